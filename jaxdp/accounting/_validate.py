"""Host-side argument checks: every message names the argument, its value and what was expected."""

import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def fields(owner: object, /, **checks: Callable[[str, Any], object]) -> None:
    """Puts what a check returns in place of each field named, in a frozen dataclass."""
    for name, check in checks.items():
        object.__setattr__(owner, name, check(name, getattr(owner, name)))


def each(name: str, values: Iterable[Any], check: Callable[[str, Any], T]) -> list[T]:
    """The values as a check returns them; it calls each name[i]."""
    return [check(f"{name}[{i}]", value) for i, value in enumerate(values)]


def _real(name: str, value: object, fits: Callable[[float], bool], expected: str) -> float:
    if not fits(real(name, value)):
        raise ValueError(f"{name}={value!r}: expected {expected}")
    return real(name, value)


def real(name: str, value: object) -> float:
    """The value as a float; ValueError if it is not a real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={value!r}: expected a real number")
    return float(value)


def non_negative(name: str, value: object) -> float:
    """The value as a float, if it is finite and >= 0."""
    return _real(name, value, lambda x: 0 <= x < math.inf, "a finite number >= 0")


def positive(name: str, value: object) -> float:
    """The value as a float, if it is finite and > 0."""
    return _real(name, value, lambda x: 0 < x < math.inf, "a finite number > 0")


def probability(name: str, value: object) -> float:
    """The value as a float, if it is in [0, 1]."""
    return _real(name, value, lambda x: 0 <= x <= 1, "a probability in [0, 1]")


def open_probability(name: str, value: object) -> float:
    """The value as a float, if it is strictly between 0 and 1."""
    return _real(name, value, lambda x: 1e-300 <= x < 1, "a number in [1e-300, 1)")


def target(name: str, value: object) -> float:
    """The value as a float, if it is 0, 1, or between them and no less than 1e-300."""
    return _real(
        name, value, lambda x: x == 0 or 1e-300 <= x <= 1, "0, 1 or a number in [1e-300, 1)"
    )


def count(name: str, value: object, minimum: int = 0) -> int:
    """The value as an int, if it is whole and >= ``minimum``; floats are refused, 1e4 too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}={value!r}: expected an integer >= {minimum}")
    if not minimum <= int(value) <= 10**18:
        raise ValueError(f"{name}={value!r}: expected an integer >= {minimum} and at most 1e18")
    return int(value)


def size(name: str, value: object) -> int:
    """As ``count``, and at least 1."""
    return count(name, value, 1)
