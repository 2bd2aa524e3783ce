"""Discrete Laplace noise on one number: privacy at delta 0, exactly.

The number is rounded to an integer grid, and an integer is added whose law is exp(-|k| / t), drawn
without any rounding from the words of a cryptographic generator (Canonne, Kamath and Steinke 2020,
arXiv:2004.00010v5). Laplace noise in floating point shows by its gaps what it was added to (Mironov
2012, "On significance of the least significant bits for differential privacy"); here no float is
drawn. docs/proofs/grid_noise.md, Theorem 6.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.clipping import rounding
from jaxdp.ledger.tickets import ON_GRID
from jaxdp.noise._integers import chacha20_block
from jaxdp.noise.gaussian import Axes, Noise, NoiseRequest, PrivatizeState
from jaxdp.noise.grid import sharding_and_size, to_grid, with_12_digits
from jaxdp.noise.normals import over_vmap
from jaxdp.schedules import NoiseSchedule
from jaxdp.types import PyTree, Summed

# The most grid cells by which one record moves the number, both roundings included.
CELLS = 1024
# Two numbers that are less than that apart are at most CELLS apart as integers, for each is rounded
# by at most 1/2 + 2^-23; a share for float32.
_CELLS_OF_L2 = np.float32((CELLS - 2.0**-10) * (1 - 2.0**-18))
# Integers end here before the noise and after it: a clip, far from overflow.
_MOST = 2**29
# What was drawn, and the number of the next word.
_Pair = tuple[jax.Array, jax.Array]
_State = tuple[jax.Array, jax.Array, jax.Array]


def scale_of(noise_multiplier: float) -> int:
    """t: the scale of the noise in grid cells, never less than the multiplier says."""
    return math.ceil(noise_multiplier * CELLS)


def laplace_event(noise_multiplier: float) -> acc.Event:
    """The event of one release, its rounding included."""
    return acc.DiscreteLaplace(scale_of(noise_multiplier), CELLS)


class LaplaceNoise(Noise):
    """Discrete Laplace noise on a sum of one number, independent in every step.

    Formal guarantee: one update is the discrete Laplace mechanism of ``laplace_event``, without any
    delta: of 1 / ``noise_multiplier`` where a record is added or removed, in the arithmetic that
    the device really has (docs/proofs/grid_noise.md, Theorem 6). Words come from ChaCha20 with a
    key of 256 bits, derived from the ticket. The number of words that are taken, and so the time,
    depends on the noise.

    ``noise_multiplier`` is here the scale of the noise over ``l2``, which for one number is the
    norm l1 too; the standard deviation is √2 times that. Sums beyond 2^29 cells, 524,288
    times ``l2``, are clipped.

    Raises:
        ValueError: a noise multiplier outside [1/64, 1024], or one that changes; a sum of several
            numbers.
    """

    part = f"{ON_GRID}, Laplace"

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.noise_multiplier
        if isinstance(given, NoiseSchedule) or not 1 / 64 <= given <= 1024:
            raise ValueError(
                "noise_multiplier must be one number in [1/64, 1024] for Laplace noise, got "
                f"{arguments.described(given)}"
            )

    def init(self, params: PyTree) -> PrivatizeState:
        """A state that no update has used; ValueError for more than one number."""
        _require_one_number(sum(leaf.size for leaf in jax.tree.leaves(params)))
        return PrivatizeState(jnp.zeros(2, jnp.uint32), jnp.asarray(1, jnp.int32))

    def check(self, summed: Summed, state: PrivatizeState, axes: Axes) -> None:
        """Raises ValueError for a sum of more than one float32 number."""
        _require_one_number(sharding_and_size(summed.value, axes)[1])
        (leaf,) = jax.tree.leaves(summed.value)
        if leaf.dtype != jnp.float32:
            raise ValueError(f"the sum must be of float32 for Laplace noise, got {leaf.dtype}")

    def add(self, state: PrivatizeState, request: NoiseRequest) -> tuple[PyTree, PrivatizeState]:
        """Returns (the noisy sum, the next state); NaN for the key of the step before."""
        tag, summed = jnp.asarray(request.key.tag), request.summed
        fresh = jnp.where(jnp.all(tag == state.last), jnp.nan, 1.0)
        usable = jnp.isfinite(request.multiplier) & (request.multiplier > 0)
        scale = with_12_digits(_CELLS_OF_L2 / jnp.asarray(summed.l2, jnp.float32)) * fresh
        scale = jnp.where(usable & (scale >= 2.0**-100) & (scale <= 2.0**100), scale, jnp.nan)
        (value,), structure = jax.tree.flatten(summed.value)
        key = jnp.asarray(request.key.long)
        noisy = _compiled_add(self._scale)([key], scale, value)
        return jax.tree.unflatten(structure, noisy), PrivatizeState(tag, state.leaves)

    def std(self, params: PyTree, l2: float, step: int | jax.Array) -> float:
        """√2 times the scale of the noise, which is about ``noise_multiplier`` times ``l2``."""
        return math.sqrt(2) * self._scale / float(_CELLS_OF_L2) * l2

    def description(self, parameters: int) -> str:
        """A sentence on the integers."""
        return (
            f"discrete Laplace integers of scale {self._scale:,} from ChaCha20, added to the sum "
            f"rounded to cells of which a record moves it by at most {CELLS:,}"
        )

    @property
    def _scale(self) -> int:
        return scale_of(float(self.noise_multiplier))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=64)
def _compiled_add(t: int) -> Callable[..., list[jax.Array]]:
    """The addition, compiled as a whole, as that of ``grid``."""

    def add(keys: list[jax.Array], scale: jax.Array, value: jax.Array) -> list[jax.Array]:
        """The number with its noise: an integer over the scale, and NaN where that is NaN."""
        (value,) = rounding.materialized([value])
        cells = jnp.clip(to_grid(value, scale), -_MOST, _MOST) + discrete_laplace(keys[0], t)
        return [jnp.clip(cells, -_MOST, _MOST).astype(jnp.float32) * (1 / scale)]

    return jax.jit(over_vmap(add))


def _require_one_number(count: int) -> None:
    """Raises ValueError for a sum of several numbers, whose norms l1 and l2 differ."""
    if count != 1:
        raise ValueError(
            f"params must be one number for Laplace noise, of a sensitivity in the norm l1, got "
            f"{count}: take jaxdp.optimizers.dp_zo, or noise='gaussian'"
        )


def discrete_laplace(key: jax.Array, scale: int) -> jax.Array:
    """An integer k, int32, whose probability is exp(-|k| / t) over its sum, t the ``scale``.

    Exactly, of words that are uniform and independent. A magnitude beyond 2^30 is 2^30.

    Args:
        key: uint32 [8], a ChaCha20 key that is used for nothing else.
        scale: in 1, ..., 2^20.
    """
    t, loop = jnp.uint32(scale), jax.lax.while_loop
    start, yes, no = jnp.uint32(0), jnp.bool_(True), jnp.bool_(False)

    # What follows returns a value, and at which word the next one begins.
    def below(n: jax.Array, at: jax.Array) -> _Pair:
        """Uniform in 0, ..., n - 1: as few bits as hold n - 1, until they are below n."""
        bits = np.uint32(32) - jax.lax.clz(n - 1)
        mask = jnp.where(bits == 0, start, ~start >> (np.uint32(32) - bits))

        def word(state: _Pair) -> _Pair:
            return chacha20_block(key, state[1], (0, 0, 0))[0] & mask, state[1] + 1

        return loop(lambda state: state[0] >= n, word, (n, at))

    def coin(numerator: jax.Array, at: jax.Array) -> _Pair:
        """True with probability exp(-numerator / t), at most 1: their Bernoulli(exp(-gamma))."""

        def toss(state: _State) -> _State:
            """The k-th toss, of probability numerator / (t k)."""
            k, _, at = state
            small, at = below(t, at)
            first, at = below(k, at)
            return k + 1, (small < numerator) & (first == 0), at

        k, _, at = loop(lambda state: state[1], toss, (jnp.uint32(1), yes, at))
        return k % 2 == 0, at  # the toss before this k was the first to fail

    def low(state: _State) -> _State:
        """A number below t, which is kept with probability exp(-number / t)."""
        number, at = below(t, state[2])
        return number, *coin(number, at)

    def high(state: _State) -> _State:
        """One more with probability 1 / e, and whether it goes on."""
        more, at = coin(t, state[2])
        return state[0] + more.astype(jnp.uint32), more, at

    def attempt(state: _State) -> _State:
        """A magnitude and a sign; -0 is tried again, for 0 has no sign."""
        small, _, at = loop(lambda state: ~state[1], low, (start, no, state[2]))
        times, _, at = loop(lambda state: state[1], high, (start, yes, at))
        sign, at = below(jnp.uint32(2), at)
        most = jnp.uint32(2**30 // scale + 1)
        return jnp.minimum(small + t * jnp.minimum(times, most), 2**30), sign, at

    size, sign, _ = loop(
        lambda state: (state[0] == 0) & (state[1] == 1), attempt, (start, jnp.uint32(1), start)
    )
    size = size.astype(jnp.int32)
    return jnp.where(sign == 1, -size, size)
