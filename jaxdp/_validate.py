"""Host-side checks: every message names the argument, its value and what was expected."""

import math
from typing import Any


def positive(name: str, value: Any) -> float:
    """The value as a float, if it is a finite number above 0."""
    number = _number(name, value)
    if not number > 0 or math.isinf(number):
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return number


def non_negative(name: str, value: Any) -> float:
    """The value as a float, if it is a finite number of at least 0."""
    number = _number(name, value)
    if not number >= 0 or math.isinf(number):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    return number


def probability(name: str, value: Any) -> float:
    """The value as a float, if it is above 0 and at most 1."""
    number = _number(name, value)
    if not 0 < number <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {value!r}")
    return number


def fraction(name: str, value: Any) -> float:
    """The value as a float, if it is above 0 and below 1."""
    number = positive(name, value)
    if not number < 1:
        raise ValueError(f"{name} must be above 0 and below 1, got {value!r}")
    return number


def integer(name: str, value: Any, *, least: int) -> int:
    """The value as an int, if it is whole and at least ``least``; booleans and 3.5 are refused."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    number = int(value.__index__())
    if number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number


def one_of(name: str, value: Any, allowed: Any, hint: str = "") -> Any:
    """The value, if it is one of ``allowed``; ``hint`` ends the words about another."""
    if value not in allowed:
        choices = ", ".join(str(choice) for choice in allowed)
        raise ValueError(f"{name} must be one of {choices}; got {value!r}{hint}")
    return value


def described(value: Any) -> str:
    """A wrong argument in words for an error; arrays, which may be records, by type alone."""
    shown = value is None or isinstance(value, (str, bool, int, float)) or callable(value)
    return repr(value) if shown else f"a {type(value).__name__}"


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a single number, got {value!r}") from error
