"""The recurrences by which correlated noise is made step by step, from a few buffers.

A strategy C of b bands needs the noise y of the b - 1 steps before, a banded inverse their normals
z, a buffered one its own sums of y: no step looks back further, however many there are.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.noise.dense import Dense
from jaxdp.noise.strategies import BandedInverse, Buffered, Toeplitz
from jaxdp.noise.strategy import Strategy

_MOST_CARRIED = 2.0**12
_DIAGONAL = 2.0**30  # and its inverse: further off, float32 flushes rows of noise to none


class Recurrence(Protocol):
    """Rows of C⁻¹Z, one a step: scale · (weights · buffers + z).

    Attributes:
        size: the number m of buffers.
        keeps_inputs: True if buffers hold the normals z; else they follow the noise y.
    """

    size: int
    keeps_inputs: bool

    def weights(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(float32 [m], the weight of each buffer; scalar scale) of a step."""

    def kept(self, buffers: jax.Array, row: jax.Array, step: jax.Array) -> jax.Array:
        """The buffers [m, ...] after a step whose row (y, or z) is [...]."""


class Ring:
    """The rows of the last m steps; that of step i lies at i mod m."""

    keeps_inputs = False

    def __init__(self, size: int):
        self.size = size

    def lags(self, step: jax.Array) -> jax.Array:
        """int32 [m], in 1..m: how many steps ago the row of each buffer was made."""
        return jnp.mod(step - 1 - jnp.arange(self.size), max(self.size, 1)) + 1

    def kept(self, buffers: jax.Array, row: jax.Array, step: jax.Array) -> jax.Array:
        """The buffers [m, ...] after a step whose row is [...]."""
        if not self.size:
            return buffers
        # In place, where the memory of the state is reused.
        place = jnp.mod(step, self.size)
        return jax.lax.dynamic_update_index_in_dim(buffers, row, place, axis=0)


class _Bands(Ring):
    """y_i = z_i - Σ_j c_j y_(i-j), or with the normals before, y_i = Σ_j d_j z_(i-j)."""

    def __init__(self, coefficients: tuple[float, ...], keeps_inputs: bool):
        super().__init__(len(coefficients) - 1)
        self.keeps_inputs = keeps_inputs
        self._weights = np.asarray(coefficients, np.float32) * (1 if keeps_inputs else -1)

    def weights(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.take(jnp.asarray(self._weights), self.lags(step)), jnp.float32(1)


class _Rows(Ring):
    """y_i = (z_i - Σ_j C_(i,i-j) y_(i-j)) / C_ii, for a matrix without structure."""

    def __init__(self, strategy: Dense):
        super().__init__(strategy.bands - 1)
        matrix = strategy.matrix()
        lag = np.arange(strategy.bands)
        places = np.arange(strategy.steps)[:, None] - lag
        found = np.take_along_axis(matrix, np.maximum(places, 0), axis=1)
        self._table = np.where(places >= 0, found, 0).astype(np.float32)

    def weights(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = jnp.take(jnp.asarray(self._table), step, axis=0, mode="clip")
        return -jnp.take(row, self.lags(step)), 1 / row[0]


class _Sums:
    """y_i = z_i - Σ_k ω_k s_k, then s_k ← θ_k s_k + y_i."""

    keeps_inputs = False

    def __init__(self, strategy: Buffered):
        self.size = len(strategy.scales)
        self._scales = np.asarray(strategy.scales, np.float32)
        self._decays = np.asarray(strategy.decays, np.float32)

    def weights(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        return -jnp.asarray(self._scales), jnp.float32(1)

    def kept(self, buffers: jax.Array, row: jax.Array, step: jax.Array) -> jax.Array:
        decays = jnp.asarray(self._decays.reshape(-1, *(1,) * row.ndim))
        return decays * buffers + row[None]


def check_stable(strategy: Strategy) -> None:
    """Raises ValueError where float32 would round a step's own normals away.

    Row i of C times the noise is z_i and what is rounded: at most 2^-24 of sum_j |C_ij y_j|, where
    y_j has the standard deviation of row j of the inverse. 2^-12 of z_i is let pass; the square
    root of the prefix sums stays below that for millions of steps.

    Args:
        strategy: any.

    Raises:
        ValueError: it is refused.
    """
    if isinstance(strategy, Dense):
        diagonal = strategy.matrix().diagonal()
        if not 1 / _DIAGONAL <= diagonal.min() <= diagonal.max() <= _DIAGONAL:
            raise ValueError(
                "strategy must have a diagonal between 1e-9 and 1e9, got one from "
                f"{diagonal.min():.3g} to {diagonal.max():.3g}: a common factor changes nothing"
            )
    found = strategy.carried()
    if not found <= _MOST_CARRIED:
        raise ValueError(
            f"strategy must have an inverse that stays within float32, got {strategy!r}, whose "
            f"noise of earlier steps is {found:.3g} times that of a step and would round it away: "
            f"at most {_MOST_CARRIED:g}. Take one whose inverse decays, such as "
            "jaxdp.noise.optimal_banded makes"
        )


def recurrence(strategy: Strategy) -> Recurrence:
    """The recurrence of a strategy.

    Raises:
        ValueError: one of another kind, or whose noise float32 does not hold.
    """
    check_stable(strategy)
    match strategy:
        case Toeplitz():
            return _Bands(strategy.coefficients, keeps_inputs=False)
        case BandedInverse():
            return _Bands(strategy.coefficients, keeps_inputs=True)
        case Buffered():
            return _Sums(strategy)
        case Dense():
            return _Rows(strategy)
    raise ValueError(f"strategy must be one of jaxdp.noise, got {strategy!r}")
