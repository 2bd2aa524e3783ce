"""Host-side argument checks: every message names the argument, its value and what was expected."""

import math
import numbers


def real(name: str, value: object) -> float:
    """The value as a float; ValueError if it is not a real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={value!r}: expected a real number")
    return float(value)


def non_negative(name: str, value: object) -> float:
    """The value as a float, if it is finite and >= 0."""
    number = real(name, value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name}={value!r}: expected a finite number >= 0")
    return number


def positive(name: str, value: object) -> float:
    """The value as a float, if it is finite and > 0."""
    number = real(name, value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name}={value!r}: expected a finite number > 0")
    return number


def probability(name: str, value: object) -> float:
    """The value as a float, if it is in [0, 1]."""
    number = real(name, value)
    if not 0 <= number <= 1:
        raise ValueError(f"{name}={value!r}: expected a probability in [0, 1]")
    return number


def open_probability(name: str, value: object) -> float:
    """The value as a float, if it is strictly between 0 and 1."""
    number = real(name, value)
    if not 1e-300 <= number < 1:
        raise ValueError(f"{name}={value!r}: expected a number in [1e-300, 1)")
    return number


def target(name: str, value: object) -> float:
    """The value as a float, if it is 0, 1, or between them and no less than 1e-300."""
    number = real(name, value)
    if number not in (0.0, 1.0) and not 1e-300 <= number < 1:
        raise ValueError(f"{name}={value!r}: expected 0, 1 or a number in [1e-300, 1)")
    return number


def count(name: str, value: object, minimum: int = 0) -> int:
    """The value as an int, if it is whole and >= ``minimum``; floats are refused, 1e4 too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}={value!r}: expected an integer >= {minimum}")
    if not minimum <= int(value) <= 10**18:
        raise ValueError(f"{name}={value!r}: expected an integer >= {minimum} and at most 1e18")
    return int(value)
