"""Correlated noise on an integer grid: banded strategies whose coefficients are binary fractions.

The noise of a step takes back that of the steps before in integers, N_i = round(Z_i - sum_j c_j
N_(i-j)), and the sum rounded to integers S_i is released as S_i + N_i. That is a function of the
integers C S + Z released so far, because rounding after S_i is added is adding S_i after rounding:
docs/grid_noise.md, Theorem 5.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import _links, _validate
from jaxdp._arithmetic import check_arithmetic
from jaxdp.noise._cells import Past, coordinates, noised
from jaxdp.noise.correlated import CorrelatedState, check_next, continues, part_of
from jaxdp.noise.gaussian import (
    check_floating,
    check_made_for,
    check_update,
    mean_of,
    refuse_injected,
    spent,
)
from jaxdp.noise.grid import check_exact, grid_scale, law_for
from jaxdp.noise.recurrences import Ring, check_stable
from jaxdp.noise.strategies import Toeplitz
from jaxdp.noise.strategy import Strategy
from jaxdp.normals import cut_over
from jaxdp.tickets import ON_GRID, NoiseKey
from jaxdp.types import PyTree, Summed

# Binary digits of a coefficient behind the point: rounded to as many, optimal strategies of 2 to 64
# bands have errors that differ by a few 1e-4 of themselves at most.
DIGITS = 8
# The magnitudes of all coefficients but the first together, so that the past stays within 32 bits.
_MOST = 2**14
# Of no step: what goes on from a wrong state is refused for good.
_NEVER = -1


def part_on_grid(strategy: Strategy) -> str:
    """The name of the part of a step's event whose noise on a grid this strategy correlates."""
    return f"{ON_GRID}, {part_of(strategy)}"


def dyadic(strategy: Strategy) -> Toeplitz:
    """A banded Toeplitz strategy with its coefficients rounded to 8 binary digits.

    Those are what noise on an integer grid takes. It is another strategy, with a sensitivity and
    errors of its own; those of an optimal one of up to 64 bands are within 4e-4 of what they were.
    A coefficient below 1 stays below it, so that the inverse decays.

    Args:
        strategy: a ``Toeplitz``, such as ``optimal_banded`` makes.

    Raises:
        ValueError: another kind, or coefficients that are too large.

    Example:
        >>> from jaxdp.noise import dyadic
        >>> from jaxdp.noise.strategies import Toeplitz
        >>> dyadic(Toeplitz((1.0, 0.41, 0.2), steps=10)).coefficients
        (1.0, 0.41015625, 0.19921875)
    """
    _check_kind(strategy)
    assert isinstance(strategy, Toeplitz)
    whole = np.round(np.asarray(strategy.coefficients) * 2**DIGITS)
    below = np.abs(strategy.coefficients) < 1
    whole = np.where(below, np.clip(whole, 1 - 2**DIGITS, 2**DIGITS - 1), whole)
    made = Toeplitz(tuple((whole / 2**DIGITS).tolist()), strategy.steps)
    check_dyadic(made)
    return made


def check_dyadic(strategy: Strategy) -> None:
    """Raises ValueError for a strategy that noise on an integer grid does not take."""
    _check_kind(strategy)
    whole = _whole(strategy)
    if (whole != np.round(whole)).any():
        raise ValueError(
            f"strategy must have coefficients of {DIGITS} binary digits for noise on a grid, got "
            f"{strategy!r}: take jaxdp.noise.dyadic(strategy), which rounds them"
        )
    if np.abs(whole[1:]).sum() > _MOST:
        raise ValueError(
            f"strategy must have coefficients that add up to at most {_MOST / 2**DIGITS:g} in "
            f"magnitude beside the first for noise on a grid, got {strategy!r}: take fewer bands"
        )
    law_for(1e-6, 1, carried(strategy))


def carried(strategy: Strategy) -> float:
    """At least sum_i |(C^-1)_i0|: the most by which the largest integer grows over the steps.

    The computed column d has C d = (1, 0, ...) + e with every |e_i| at most (b + 3) roundings of
    sum_j |c_j d_(i-j)|, which ``check_stable`` keeps below 2^12; so the true sum is at most that of
    d over 1 - n max |e_i|.

    Args:
        strategy: a ``Toeplitz``.

    Raises:
        ValueError: its inverse grows too far, or over too many steps to be known.
    """
    assert isinstance(strategy, Toeplitz)
    check_stable(strategy)
    off = strategy.steps * (strategy.bands + 4) * 2.0**-41
    if off > 0.5:
        raise ValueError(f"strategy must have fewer steps for noise on a grid, got {strategy!r}")
    return float(np.abs(strategy.first_inverse_column()).sum()) / (1 - off) * (1 + 2.0**-30)


def _checked_multiplier(noise_multiplier: float) -> float:
    multiplier = _validate.positive("noise_multiplier", noise_multiplier)
    if not 1e-6 <= multiplier <= 1e6:
        raise ValueError(
            f"noise_multiplier must be in [1e-6, 1e6] for noise on a grid, got {noise_multiplier}"
        )
    return multiplier


def privatize_correlated_on_grid(
    strategy: Strategy,
    noise_multiplier: float,
    expected_batch_size: float,
    *,
    sharded_over: tuple[str, ...] = (),
    replicated_over: tuple[str, ...] = (),
) -> optax.GradientTransformationExtraArgs:
    """Adds noise correlated over the steps to a ``Summed``, on an integer grid.

    As ``privatize_correlated`` with the integers of ``privatize_on_grid``; one band is that.

    Formal guarantee: but for a total-variation distance below 2^-78 a step, the updates of all
    steps are post-processing of one Gaussian mechanism with multiplier noise_multiplier / s, where
    s is the strategy's sensitivity under the participation of a record, in the arithmetic that the
    device really has (docs/grid_noise.md, Theorem 5). Take ``mechanism.privatize()`` of
    ``jaxdp.dp_mf(..., noise="grid")``, which sets the one by the other and charges both.

    Args:
        strategy: ``Toeplitz`` with coefficients of 8 binary digits, such as ``dyadic`` makes.
        noise_multiplier: standard deviation of the fresh noise over ``l2``, in [1e-6, 1e6].
        expected_batch_size: as for ``privatize``.
        sharded_over: as for ``privatize``.
        replicated_over: as for ``privatize``.

    Returns:
        A transformation like ``privatize_correlated``'s. The ``buffers`` of its state are the
        integers, int32, by which the steps before were noised: **secret**.

    Raises:
        ValueError: as ``privatize_correlated`` and ``privatize_on_grid``; another strategy.
        TypeError: as ``privatize``.
    """
    refuse_injected(noise_multiplier=noise_multiplier, expected_batch_size=expected_batch_size)
    check_arithmetic()
    multiplier = _checked_multiplier(noise_multiplier)
    divisor = _validate.positive("expected_batch_size", expected_batch_size)
    check_dyadic(strategy)
    part, rows, most = part_on_grid(strategy), _Rows(strategy), carried(strategy)

    def init(params: PyTree) -> CorrelatedState:
        check_floating(params)
        leaves = jax.tree.leaves(params)
        law_for(multiplier, sum(leaf.size for leaf in leaves), most)
        buffers = jax.tree.map(rows.none, params)
        number = jnp.asarray(len(leaves), jnp.int32)
        return CorrelatedState(jnp.zeros(2, jnp.uint32), number, jnp.zeros((), jnp.int32), buffers)

    def update(
        updates: Summed,
        state: CorrelatedState,
        params: PyTree | None = None,
        *,
        key: NoiseKey | None = None,
        **extra: Any,
    ) -> tuple[PyTree, CorrelatedState]:
        check_update(updates, params, extra)
        check_made_for(updates, state.leaves)
        check_next(updates, state)
        check_exact(updates.value)
        cuts = [
            cut_over(leaf, sharded_over, replicated_over) for leaf in jax.tree.leaves(updates.value)
        ]
        count = coordinates(updates.value, cuts)
        law = law_for(multiplier, count, most)
        single = np.float32(multiplier)
        key, _, charged = spent(
            part, lambda _: single, lambda _: multiplier, updates, key, (state, params)
        )
        goes_on = continues(state, key, strategy.steps)
        scale = grid_scale(law, charged, count, updates.l2) * jnp.where(goes_on, 1.0, jnp.nan)
        past = rows.past(state)
        noisy, noise = noised(updates.value, scale, jnp.asarray(key.long), law, cuts, past)
        mean = mean_of(noisy, updates, params, divisor)
        buffers = state.buffers if noise is None else rows.kept_after(state, noise)
        step = jnp.where(goes_on, state.step + 1, _NEVER)
        return mean, CorrelatedState(jnp.asarray(key.tag), state.leaves, step, buffers)

    return optax.GradientTransformationExtraArgs(init, _links.own(update))


class _Rows(Ring):
    """The integers by which the last m steps were noised, and what is taken back of them."""

    def __init__(self, strategy: Strategy):
        super().__init__(strategy.bands - 1)
        self._weights = _whole(strategy).astype(np.int32)

    def none(self, param: Any) -> jax.Array:
        """Zeros int32 [m, ...], cut over devices as the parameter is."""
        like = jnp.zeros_like(param, dtype=jnp.int32)
        return jnp.broadcast_to(like[None], (self.size, *like.shape))

    def past(self, state: CorrelatedState) -> Past | None:
        """The sum of c_j N_(i-j) in cells of 2^-8, in two parts; None for one band."""
        if not self.size:
            return None
        weights = jnp.take(jnp.asarray(self._weights), self.lags(state.step))

        def weighed(kept: jax.Array) -> jax.Array:
            each = weights.reshape(-1, *(1,) * (kept.ndim - 1)) * kept
            return jnp.sum(each, axis=0, dtype=jnp.int32)

        high = jax.tree.map(lambda kept: weighed(kept >> np.int32(16)), state.buffers)
        low = jax.tree.map(lambda kept: weighed(kept & np.int32(0xFFFF)), state.buffers)
        return Past(DIGITS, high, low)

    def kept_after(self, state: CorrelatedState, noise: PyTree) -> PyTree:
        """The buffers after the step whose integers are ``noise``."""
        return jax.tree.map(
            lambda kept, row: self.kept(kept, row, state.step), state.buffers, noise
        )


def _whole(strategy: Strategy) -> np.ndarray:
    """float64 [b]: the coefficients in units of the last digit, exactly."""
    assert isinstance(strategy, Toeplitz)
    return np.asarray(strategy.coefficients) * 2**DIGITS


def _check_kind(strategy: Strategy) -> None:
    if not isinstance(strategy, Toeplitz):
        raise ValueError(
            "strategy must be a banded Toeplitz one for noise on a grid, 'banded', 'square_root', "
            f"'identity' or jaxdp.noise.Toeplitz, got {strategy!r}: the rows of others are no "
            "integers of 32 bits. Take strategy='banded', or noise='gaussian'"
        )
