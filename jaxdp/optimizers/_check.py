"""Checks of hyper-parameters, which let injected ones (jax arrays) through."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxdp import arguments


def _injectable(check: Callable[[str, float], float], name: str, value: float | jax.Array) -> Any:
    """Returns what the check returns; a jax array as it is."""
    return value if isinstance(value, jax.Array) else check(name, value)


decay = functools.partial(_injectable, arguments.decay)
positive = functools.partial(_injectable, arguments.positive)
non_negative = functools.partial(_injectable, arguments.non_negative)
at_least_one = functools.partial(_injectable, arguments.size)


def learning_rate(value: optax.ScalarOrSchedule) -> Any:
    """Returns the value, if it is a number above 0 or a schedule."""
    return value if callable(value) else positive("learning_rate", value)
