"""Correlated noise on an integer grid: banded strategies whose coefficients are binary fractions.

The noise of a step takes back that of the steps before in integers, N_i = round(Z_i - sum_j c_j
N_(i-j)), and the sum rounded to integers S_i is released as S_i + N_i. That is a function of the
integers C S + Z released so far, because rounding after S_i is added is adding S_i after rounding:
docs/grid_noise.md, Theorem 5.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import arguments
from jaxdp.noise._integers import Sum
from jaxdp.noise.correlated import (
    CorrelatedState,
    Ring,
    check_next,
    check_stable,
    continues,
    part_of,
    row_norm,
)
from jaxdp.noise.gaussian import Axes, Noise, Paid, refuse_injected
from jaxdp.noise.grid import (
    IntegerNoise,
    Past,
    check_exact,
    coordinates,
    cuts_of,
    grid_in_words,
    grid_scale,
    grid_std,
    law_for,
    noised,
    require_range,
)
from jaxdp.noise.strategies import Strategy, Toeplitz
from jaxdp.tickets import ON_GRID
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


@dataclasses.dataclass(frozen=True)
class IntegerMatrixNoise(Noise):
    """Noise that is correlated over the steps, in integers of a grid.

    ``MatrixNoise`` with the integers of ``IntegerNoise``; one band is that.

    Formal guarantee: but for a total-variation distance below 2^-78 a step, the updates of all
    steps are post-processing of one Gaussian mechanism with multiplier noise_multiplier / s, where
    s is the strategy's sensitivity under the participation of a record, in the arithmetic that the
    device really has (docs/grid_noise.md, Theorem 5). Take ``mechanism.privatize()`` of
    ``jaxdp.dp_mf(..., noise="grid")``, which sets the one by the other and charges both.

    Attributes:
        strategy: ``Toeplitz`` with coefficients of 8 binary digits, such as ``dyadic`` makes.

    Raises:
        ValueError: as ``IntegerNoise``; another strategy.
    """

    strategy: Strategy

    def __post_init__(self) -> None:
        refuse_injected(noise_multiplier=self.noise_multiplier)
        arguments.fields(self, noise_multiplier=arguments.positive)
        require_range(self.noise_multiplier)
        check_dyadic(self.strategy)

    @property
    def part(self) -> str:
        """Names the strategy: another one's noise is another part."""
        return part_on_grid(self.strategy)

    def init(self, params: PyTree) -> CorrelatedState:
        """A state without past: buffers of zeros, int32, sharded as the parameters are."""
        leaves = jax.tree.leaves(params)
        self._law(sum(leaf.size for leaf in leaves))
        buffers = jax.tree.map(self._rows.none, params)
        number = jnp.asarray(len(leaves), jnp.int32)
        return CorrelatedState(jnp.zeros(2, jnp.uint32), number, jnp.zeros((), jnp.int32), buffers)

    def check(self, summed: Summed, state: CorrelatedState, axes: Axes) -> None:
        """Raises ValueError for a sum of another step, of another precision, or too large."""
        check_next(summed, state)
        check_exact(summed.value)
        self._law(coordinates(summed.value, cuts_of(summed.value, axes)))

    def add(self, state: CorrelatedState, paid: Paid) -> tuple[PyTree, CorrelatedState]:
        """Returns (the noisy sum, the next state); NaN where the state is not the key's."""
        value, cuts = paid.summed.value, cuts_of(paid.summed.value, paid.axes)
        count, rows = coordinates(value, cuts), self._rows
        law, goes_on = self._law(count), continues(state, paid.key, self.strategy.steps)
        one = jnp.where(goes_on, 1.0, jnp.nan)
        scale = grid_scale(law, paid.multiplier, count, paid.summed.l2) * one
        past = rows.past(state)
        noisy, noise = noised(value, scale, jnp.asarray(paid.key.long), law, cuts, past)
        buffers = state.buffers if noise is None else rows.kept_after(state, noise)
        step = jnp.where(goes_on, state.step + 1, _NEVER)
        return noisy, CorrelatedState(jnp.asarray(paid.key.tag), state.leaves, step, buffers)

    def std(self, params: PyTree, l2: float, step: int | jax.Array) -> jax.Array:
        """That of a row of C⁻¹Z, in integers over the scale."""
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        return grid_std(self._law(count), self.multiplier(0), count, l2) * row_norm(
            self.strategy, step
        )

    event = IntegerNoise.event

    def in_words(self, parameters: int) -> str:
        """A sentence on the grid for so many parameters: cell and inequality."""
        found = grid_in_words(self.noise_multiplier, parameters, self._carried)
        return f"{found}; what a step takes back of earlier noise is an integer too"

    @functools.cached_property
    def _carried(self) -> float:
        return carried(self.strategy)

    @functools.cached_property
    def _rows(self) -> "_IntegerRows":
        return _IntegerRows(self.strategy)

    def _law(self, count: int) -> Sum:
        return law_for(self.multiplier(0), count, self._carried)


class _IntegerRows(Ring):
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
