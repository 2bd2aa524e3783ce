"""Averages of the iterates: post-processing of what every step released, at no cost."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp import arguments
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.types import PyTree


class AveragedState(NamedTuple):
    """State of ``averaged``.

    Attributes:
        inner: state of the algorithm's own ``after_noise``.
        ema: ``optax.EmaState`` of the parameters after each update.
        average_of_params: the debiased average, shaped like the parameters; before the first update
            the parameters themselves.
    """

    inner: PyTree
    ema: Any
    average_of_params: PyTree


def averaged(algorithm: Algorithm, decay: float) -> Algorithm:
    """The same algorithm, which also keeps an exponential moving average of its parameters.

    Noise moves the last iterate about; an average over the last 1/(1 - decay) steps or so moves
    less. The average is ``optax.ema`` (debiased) of the parameters after each update.

    Formal guarantee: the average is computed from the parameters after each step, all of which the
    events charge. So it is post-processing: the events are those of ``algorithm``. A rejected
    candidate counts as one more step at the parameters that stay.

    Args:
        algorithm: any; steps, noise and parameters are unchanged.
        decay: weight of the past, above 0 and below 1, such as 0.99.

    Returns:
        The algorithm, whose ``average`` reads the average.

    Raises:
        ValueError: a decay that is out of its range, or an algorithm that is averaged already.
    """
    if not 0 < arguments.fraction("decay", decay) < 1:
        raise ValueError(f"decay must be above 0 and below 1, got {decay!r}")
    if algorithm.average is not None:
        raise ValueError("algorithm must not be averaged twice, got one with an average")
    inner = optax.with_extra_args_support(algorithm.after_noise)
    mean = optax.ema(decay, debias=True)

    def init(params: PyTree) -> AveragedState:
        return AveragedState(inner.init(params), mean.init(params), jax.tree.map(jnp.array, params))

    def update(
        updates: PyTree, state: AveragedState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, AveragedState]:
        if params is None:
            raise ValueError("params must be given to average them, got None")
        moved, after = inner.update(updates, state.inner, params, **extra)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its counter with the decay
            average, ema = mean.update(optax.apply_updates(params, moved), state.ema)
        return moved, AveragedState(after, ema, average)

    return dataclasses.replace(
        algorithm,
        after_noise=optax.GradientTransformationExtraArgs(init, update),
        scale=_through(algorithm.scale),
        raw=_through(algorithm.raw),
        counts=_through(algorithm.counts),
        average=lambda state: state.average_of_params,
    )


def _through(read: Callable[[PyTree], PyTree] | None) -> Callable[[PyTree], Any] | None:
    if read is None:
        return None
    # Wrapped, to be told as whose function it is.
    return functools.wraps(read)(lambda state: read(state.inner))
