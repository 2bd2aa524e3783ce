"""Checks of hyper-parameters, which let injected ones (jax arrays) through."""

from typing import Any

import jax

from jaxdp import _validate


def decay(name: str, value: Any) -> Any:
    """The value, if it is at least 0 and below 1."""
    if isinstance(value, jax.Array):
        return value
    if not 0 <= _validate.non_negative(name, value) < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")
    return float(value)


def positive(name: str, value: Any) -> Any:
    """The value, if it is finite and above 0."""
    return value if isinstance(value, jax.Array) else _validate.positive(name, value)


def non_negative(name: str, value: Any) -> Any:
    """The value, if it is finite and at least 0."""
    return value if isinstance(value, jax.Array) else _validate.non_negative(name, value)


def at_least_one(name: str, value: Any) -> Any:
    """The value, if it is whole and at least 1."""
    return value if isinstance(value, jax.Array) else _validate.integer(name, value, least=1)


def learning_rate(value: Any) -> Any:
    """The value, if it is a number above 0 or a schedule."""
    return value if callable(value) else positive("learning_rate", value)
