"""Learning-rate schedules by name, as ``jaxdp train`` takes them."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxdp import _validate

KINDS = ("constant", "cosine", "linear")


def schedule(text: str, learning_rate: float, steps: int) -> Callable[[Any], Any]:
    """The optax schedule that a text such as "cosine" or "linear:50" describes.

    Formal guarantee: the rates are public constants of the run, applied after the noise: they cost
    nothing.

    Args:
        text: ``KIND`` or ``KIND:WARMUP``. The rate rises evenly from 0 for WARMUP steps, then it
            stays (constant), or falls to 0 at the last step along a cosine or evenly (linear).
        learning_rate: the greatest rate.
        steps: of the run.

    Raises:
        ValueError: a text of another form, or a warm-up that is as long as the run.
    """
    kind, sign, number = text.partition(":")
    if kind not in KINDS or (sign and not number.isdecimal()):
        raise ValueError(
            f"learning_rate_schedule must be KIND or KIND:WARMUP with a kind among "
            f"{', '.join(KINDS)}, such as cosine:50; got {text!r}"
        )
    warmup = int(number or 0)
    if warmup >= _validate.integer("steps", steps, least=1) and warmup:
        raise ValueError(
            f"learning_rate_schedule must warm up for less than the {steps} steps, got {text!r}"
        )
    left = steps - warmup
    after = {
        "constant": lambda: optax.constant_schedule(learning_rate),
        "cosine": lambda: optax.cosine_decay_schedule(learning_rate, left),
        "linear": lambda: optax.linear_schedule(learning_rate, 0.0, left),
    }[kind]()
    if warmup:
        # The first step moves too: (i + 1) / warmup of the rate.
        rising = optax.linear_schedule(learning_rate / warmup, learning_rate, max(1, warmup - 1))
        after = optax.join_schedules([rising, after], [warmup])

    def rate(step: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes the step with floats
            return after(step)

    return rate
