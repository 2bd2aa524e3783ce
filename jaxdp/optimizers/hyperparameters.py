"""Hyper-parameters of optimizers: checks, and learning-rate schedules by name.

All are public constants of a run. ``optax.inject_hyperparams`` makes jax arrays of them, which may
be traced, so that the checks let an array through.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxdp import arguments


def _injectable(check: Callable[[str, float], float], name: str, value: float | jax.Array) -> Any:
    """Returns the checked value; a jax array, as it is."""
    return value if isinstance(value, jax.Array) else check(name, value)


decay = functools.partial(_injectable, arguments.decay)
positive = functools.partial(_injectable, arguments.positive)
non_negative = functools.partial(_injectable, arguments.non_negative)
at_least_one = functools.partial(_injectable, arguments.size)


def learning_rate(value: optax.ScalarOrSchedule) -> Any:
    """Returns the value, if it is a number above 0 or a schedule."""
    return value if callable(value) else positive("learning_rate", value)


KINDS = ("constant", "cosine", "linear")


def schedule(text: str, learning_rate: float, steps: int) -> optax.Schedule:
    """The optax schedule that a text such as "cosine" or "linear:50" describes.

    Formal guarantee: the rates are public constants of the run, applied after the noise: they cost
    nothing.

    Args:
        text: ``KIND`` or ``KIND:WARMUP``. The rate rises evenly from 0 for WARMUP steps, then it
            stays (constant), or falls to 0 at the last step along a cosine or evenly (linear).
            Or ``to:SHARE:STEPS``: it falls evenly to this share of itself, then stays.
        learning_rate: the greatest rate.
        steps: of the run.

    Raises:
        ValueError: a text of another form, or a warm-up that is as long as the run.
    """
    if text.startswith("to:"):
        found = re.fullmatch(r"to:(0\.\d*[1-9]\d*):([1-9]\d{0,8})", text)
        if found is None:
            raise ValueError(
                "learning_rate_schedule must be to:SHARE:STEPS with a share between 0 and 1 and "
                f"whole steps, such as to:0.5:1000; got {text!r}"
            )
        share, falling = float(found[1]), int(found[2])
        after = optax.linear_schedule(learning_rate, share * learning_rate, falling)
    else:
        kind, sign, number = text.partition(":")
        if kind not in KINDS or (sign and not number.isdecimal()):
            raise ValueError(
                f"learning_rate_schedule must be KIND or KIND:WARMUP with a kind among "
                f"{', '.join(KINDS)}, such as cosine:50, or to:SHARE:STEPS; got {text!r}"
            )
        # The warm-up is part of the run: what falls, falls over the steps that are left.
        warmup = int(number or 0)
        if warmup >= arguments.integer("steps", steps, least=1) and warmup:
            raise ValueError(
                f"learning_rate_schedule must warm up for less than the {steps} steps, got {text!r}"
            )
        left = steps - warmup
        if kind == "constant":
            after = optax.constant_schedule(learning_rate)
        elif kind == "cosine":
            after = optax.cosine_decay_schedule(learning_rate, left)
        else:
            after = optax.linear_schedule(learning_rate, 0.0, left)
        if warmup:
            # The first step moves too: (i + 1) / warmup of the rate.
            first = learning_rate / warmup
            rising = optax.linear_schedule(first, learning_rate, max(1, warmup - 1))
            after = optax.join_schedules([rising, after], [warmup])

    def rate(step: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        """The learning rate of a step."""
        with jax.numpy_dtype_promotion("standard"):  # optax mixes the step with floats
            return after(step)

    return rate
