"""Checks of arguments on the host: every error names the argument, its value and what was expected.

Each takes the argument's name and its value, and returns the value as the type that it stands for.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
# Of arrays that turn into numbers, and are none: truth values, complex numbers, times and texts.
_NO_KINDS = "bcmMSU"
# No count of steps or records is larger.
_MOST = 10**18


def real(name: str, value: Any) -> float:
    """Returns the value as a float; ValueError for what is no single real number."""
    numeric = hasattr(value, "__float__") or hasattr(value, "__index__")
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if isinstance(value, bool) or kind in _NO_KINDS or not numeric:
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a single number, got {value!r}") from error


def positive(name: str, value: Any) -> float:
    """Returns the value as a float, if it is a finite number above 0."""
    return _within(name, value, lambda x: 0 < x < math.inf, "a finite number above 0")


def non_negative(name: str, value: Any) -> float:
    """Returns the value as a float, if it is a finite number of at least 0."""
    return _within(name, value, lambda x: 0 <= x < math.inf, "a finite number of at least 0")


def probability(name: str, value: Any) -> float:
    """Returns the value as a float, if it is above 0 and at most 1."""
    return _within(name, value, lambda x: 0 < x <= 1, "above 0 and at most 1")


def share(name: str, value: Any) -> float:
    """Returns the value as a float, if it is in [0, 1]."""
    return _within(name, value, lambda x: 0 <= x <= 1, "a probability in [0, 1]")


def fraction(name: str, value: Any) -> float:
    """Returns the value as a float, if it is above 0 and below 1."""
    return _within(name, value, lambda x: 0 < x < 1, "above 0 and below 1")


def decay(name: str, value: Any) -> float:
    """Returns the value as a float, if it is at least 0 and below 1."""
    return _within(name, value, lambda x: 0 <= x < 1, "at least 0 and below 1")


def error_probability(name: str, value: Any) -> float:
    """Returns the value as a float, if it is in [1e-300, 1), where logarithms are finite."""
    return _within(name, value, lambda x: 1e-300 <= x < 1, "a number in [1e-300, 1)")


def target(name: str, value: Any) -> float:
    """Returns the value as a float, if it is 0, 1, or between them and no less than 1e-300."""
    expected = "0, 1 or a number in [1e-300, 1)"
    return _within(name, value, lambda x: x == 0 or 1e-300 <= x <= 1, expected)


def integer(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """Returns the value as an int, if it is whole and in range; booleans and 3.5 are refused."""
    expected = f"a whole number of at least {least}"
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    try:
        number = None if isinstance(value, bool) or kind in _NO_KINDS else int(value.__index__())
    except (AttributeError, TypeError):  # arrays have one that not all of them can answer
        number = None
    if number is None:
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be {expected} and at most {float(most):g}, got {value!r}")
    if number < least:
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return number


def count(name: str, value: Any, least: int = 0) -> int:
    """Returns the value as an int, if it is whole, at least ``least`` and at most 1e18."""
    return integer(name, value, least=least, most=_MOST)


def size(name: str, value: Any) -> int:
    """As ``count``, and at least 1."""
    return count(name, value, 1)


def boolean(name: str, value: Any) -> bool:
    """Returns the value, if it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {described(value)}")
    return value


def one_of(name: str, value: Any, allowed: Any, hint: str = "") -> Any:
    """Returns the value, if it is one of ``allowed``; ``hint`` ends the words about another."""
    if value not in allowed:
        choices = ", ".join(str(choice) for choice in allowed)
        raise ValueError(f"{name} must be one of {choices}; got {value!r}{hint}")
    return value


def each(name: str, values: Iterable[Any], check: Callable[[str, Any], T]) -> list[T]:
    """Returns the values as a check returns them; it calls each name[i]."""
    return [check(f"{name}[{i}]", value) for i, value in enumerate(values)]


def fields(owner: object, /, **checks: Callable[[str, Any], object]) -> None:
    """Puts what a check returns in place of each field named, in a frozen dataclass."""
    for name, check in checks.items():
        object.__setattr__(owner, name, check(name, getattr(owner, name)))


def described(value: Any) -> str:
    """Returns a wrong argument in words; arrays, which may be records, by type alone."""
    shown = value is None or isinstance(value, (str, bool, int, float)) or callable(value)
    return repr(value) if shown else f"a {type(value).__name__}"


def _within(name: str, value: Any, fits: Callable[[float], bool], expected: str) -> float:
    number = real(name, value)
    if not fits(number):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return number
