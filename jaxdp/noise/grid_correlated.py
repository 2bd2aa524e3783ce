"""Correlated noise on an integer grid: banded strategies whose coefficients are binary fractions.

The noise of a step takes back that of the steps before in integers, N_i = round(Z_i - sum_j c_j
N_(i-j)), and the sum rounded to integers S_i is released as S_i + N_i. That is a function of the
integers C S + Z released so far, because rounding after S_i is added is adding S_i after rounding:
docs/grid_noise.md, Theorem 5.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import arguments
from jaxdp.noise.correlated import (
    CorrelatedState,
    Ring,
    check_next,
    check_stable,
    continues,
    first_state,
    row_norm,
)
from jaxdp.noise.gaussian import Axes, Paid
from jaxdp.noise.grid import IntegerNoise, Past, grid_scale, law_for, noised, over_devices
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
class IntegerMatrixNoise(IntegerNoise):
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
        super().__post_init__()
        arguments.positive("noise_multiplier", self.noise_multiplier)  # one for all steps
        check_dyadic(self.strategy)

    @property
    def part(self) -> str:  # type: ignore[override]
        """Names the strategy: another one's noise is another part."""
        return f"{ON_GRID}, correlated by {self.strategy!r}"

    def init(self, params: PyTree) -> CorrelatedState:
        """A state without past: buffers of zeros, int32, sharded as the parameters are."""
        super().init(params)  # refuses too many coordinates
        return first_state(params, self._rows.size, jnp.int32)

    def check(self, summed: Summed, state: CorrelatedState, axes: Axes) -> None:
        """Raises ValueError for a sum of another step, of another precision, or too large."""
        check_next(summed, state)
        super().check(summed, state, axes)

    def add(self, state: CorrelatedState, paid: Paid) -> tuple[PyTree, CorrelatedState]:
        """Returns (the noisy sum, the next state); NaN where the state is not the key's."""
        cuts, count = over_devices(paid.summed.value, paid.axes)
        law, goes_on = self.law(count), continues(state, paid.key, self.strategy.steps)
        one, rows = jnp.where(goes_on, 1.0, jnp.nan), self._rows
        scale = grid_scale(law, paid.multiplier, count, paid.summed.l2) * one

        # The sum of c_j N_(i-j) in cells of 2^-8, in two parts; none for one band.
        past = None
        if rows.size:
            whole = jnp.asarray(_whole(self.strategy).astype(np.int32))
            weights = jnp.take(whole, rows.lags(state.step))

            def weighed(kept: jax.Array) -> jax.Array:
                each = weights.reshape(-1, *(1,) * (kept.ndim - 1)) * kept
                return jnp.sum(each, axis=0, dtype=jnp.int32)

            high = jax.tree.map(lambda kept: weighed(kept >> np.int32(16)), state.buffers)
            low = jax.tree.map(lambda kept: weighed(kept & np.int32(0xFFFF)), state.buffers)
            past = Past(DIGITS, high, low)

        noisy, noise = noised(paid.summed.value, scale, jnp.asarray(paid.key.long), law, cuts, past)
        buffers = state.buffers
        if noise is not None:
            buffers = jax.tree.map(lambda b, row: rows.kept(b, row, state.step), buffers, noise)
        step = jnp.where(goes_on, state.step + 1, _NEVER)
        return noisy, CorrelatedState(jnp.asarray(paid.key.tag), state.leaves, step, buffers)

    def std(self, params: PyTree, l2: float, step: int | jax.Array) -> jax.Array:
        """That of a row of C⁻¹Z, in integers over the scale."""
        return super().std(params, l2, step) * row_norm(self.strategy, step)

    def in_words(self, parameters: int) -> str:
        """A sentence on the grid for so many parameters: cell and inequality."""
        found = super().in_words(parameters)
        return f"{found}; what a step takes back of earlier noise is an integer too"

    @functools.cached_property
    def carried(self) -> float:
        """The most by which an integer grows over the steps; see ``law_for``."""
        return carried(self.strategy)

    @property
    def _rows(self) -> Ring:
        """The integers by which the last steps were noised."""
        return Ring(self.strategy.bands - 1)


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
