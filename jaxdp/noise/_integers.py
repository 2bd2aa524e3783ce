"""Discrete Gaussian integers from a key: sums of multiples of draws from one alias table.

docs/grid_noise.md proves how far their law is from the discrete Gaussian. Integer i of n is a
function of (key, n, i), on any device and under any flags.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import _placement
from jaxdp.noise import _chacha
from jaxdp.noise._table import Table, table

# Blocks of the generator made together, for each draw: so many that starting a loop costs little,
# and few enough to stay in a cache.
_BLOCKS = 2048
_WORDS = 16
# Ratio of what is added to a draw and the draw that it is added to: at least 2 standard
# deviations of the law that joins them.
_LEAST = 2.0


@dataclasses.dataclass(frozen=True)
class Sum:
    """x0 + f0 (x1 + f1 (x2 + ...)), each x a draw from one table.

    Attributes:
        factors: (f0, f1, ...); one more draw than factors.
        sigma: of the table.
        slot_bits: of the table.

    Raises:
        ValueError: a factor so large that gaps would show.
    """

    factors: tuple[int, ...]
    sigma: int = 2560
    slot_bits: int = 16

    def __post_init__(self) -> None:
        if not self.joints or min(self.joints) < _LEAST:
            raise ValueError(
                f"factors must be below {self.sigma / _LEAST:g}, got {self.factors} for sigma "
                f"{self.sigma}"
            )

    @property
    def draws(self) -> int:
        """The number of draws from the table."""
        return len(self.factors) + 1

    @property
    def std(self) -> float:
        """The parameter s of the discrete Gaussian that it stands for."""
        return math.sqrt(self._variances()[0])

    @property
    def joints(self) -> tuple[float, ...]:
        """r' of every addition x + f y: s0 s_y / sqrt(s0^2 + f^2 s_y^2)."""
        rest = self._variances()[1:]
        return tuple(
            self.sigma * math.sqrt(y / (self.sigma**2 + f * f * y))
            for f, y in zip(self.factors, rest, strict=True)
        )

    @property
    def distance(self) -> float:
        """A proven bound on the total-variation distance of one integer from D(s)."""
        joined = sum(2 * gap(r) for r in self.joints)
        return (self.draws * self.table.distance + joined) * (1 + 1e-9)

    @property
    def most(self) -> int:
        """The largest magnitude of an integer: every draw is of the table."""
        factors = [math.prod(self.factors[:n]) for n in range(self.draws)]
        return sum(factors) * self.table.half

    @property
    def table(self) -> Table:
        """The alias table, made on the host."""
        return table(self.sigma, self.slot_bits)

    def _variances(self) -> list[int]:
        """The variance of the sum from each draw on, the innermost last."""
        found = [self.sigma**2]
        for factor in self.factors[::-1]:
            found.insert(0, self.sigma**2 + factor**2 * found[0])
        return found


def gap(r: float) -> float:
    """e: sum_z exp(-(z - y)^2 / (2 r^2)) is r sqrt(2 pi) up to a factor 1 +- e, for every real y.

    Poisson summation: e = 2 sum_{j >= 1} exp(-2 pi^2 r^2 j^2), less than 2.1 times its first term
    where r >= 1; a factor for the rounding of this function.
    """
    return 2.1 * math.exp(-2 * math.pi**2 * r * r) * (1 + 1e-9)


def integers(key: jax.Array, size: int, law: Sum) -> jax.Array:
    """Independent integers int32 [size] of the law.

    Args:
        key: uint32 [8].
        size: at most 2**32.
        law: the sum of draws.

    Raises:
        ValueError: too many of them for the generator's counter.
    """
    return made(key, size, law)[0]


def made(key: jax.Array, size: int, law: Sum, fine: bool = False) -> tuple[jax.Array, ...]:
    """As ``integers``, in a tuple; with ``fine`` another draw for each, independent of them.

    Args:
        key: as for ``integers``.
        size: likewise.
        law: likewise.
        fine: True adds int32 [size], of the table alone; the integers stay the same.

    Raises:
        ValueError: as ``integers``.
    """
    if size > 2**32:
        raise ValueError(f"size must be at most 2**32, got {size}")
    blocks = max(1, min(_BLOCKS, -(-size // _WORDS)))
    count = max(1, -(-size // (blocks * _WORDS)))
    numbers = jnp.arange(count, dtype=jnp.uint32)

    def chunks(numbers: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        draws = law.draws + fine
        one = lambda n: _chunk(key, n * np.uint32(blocks), blocks, law, draws)  # noqa: E731
        found: tuple[jax.Array, ...] = jax.lax.map(one, numbers)
        return found

    found = _placement.between(chunks, numbers, key)
    return tuple(part.reshape(-1)[:size] for part in found)


def _chunk(
    key: jax.Array, start: jax.Array, blocks: int, law: Sum, draws: int
) -> tuple[jax.Array, ...]:
    """The integers [16 · blocks] of ``blocks`` counters from ``start``: word by word."""
    lanes = np.arange(draws * blocks, dtype=np.uint32)

    def words(lane: jax.Array, level: jax.Array) -> jax.Array:
        """Words uint32 [16, ...] of the lanes: a draw and a counter each."""
        draw, counter = lane // np.uint32(blocks), start + lane % np.uint32(blocks)
        return jnp.stack(_chacha.block(key, counter, (draw, level, 0)))

    levels = jnp.arange(1, 4, dtype=jnp.uint32)
    first = words(jnp.asarray(lanes), jnp.zeros_like(lanes))
    found = drawn(law.table, first, lambda lane: words(jnp.broadcast_to(lane, 3), levels))
    found = found.reshape(_WORDS, draws, blocks)
    whole = summed(law, [found[:, draw] for draw in range(law.draws)])
    return whole.reshape(-1), *(found[:, draw].reshape(-1) for draw in range(law.draws, draws))


def drawn(tabled: Table, first: jax.Array, deeper: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Draws from the table, int32 [words, lanes] like ``first``.

    The first word has the slot and the leading bits of the comparison. Only in a lane where some
    of these are equal, three more words of every draw decide: that depends on nothing but words.

    Args:
        tabled: the table.
        first: uint32 [words, lanes], uniform and independent.
        deeper: lane -> uint32 [words, 3], the words after the first, most significant first.
    """
    slot, alias, lead, wanted = _looked_up(tabled, first)
    chosen = jnp.where(lead < wanted, slot, alias)
    # Row by row: one pass, where a reduction over the rows is slower than the look-ups.
    same = [a == b for a, b in zip(lead, wanted, strict=True)]
    tied = functools.reduce(jnp.logical_or, same)

    def settle(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Draws one lane again, with all of its bits."""
        tied, chosen = state
        lane = jnp.argmax(tied).astype(jnp.uint32)
        full = _drawn_deep(tabled, first[:, lane], deeper(lane))
        return tied.at[lane].set(False), chosen.at[:, lane].set(full)

    _, chosen = jax.lax.while_loop(lambda state: jnp.any(state[0]), settle, (tied, chosen))
    return chosen.astype(jnp.int32) - np.int32(tabled.half)


def _drawn_deep(tabled: Table, first: jax.Array, deeper: jax.Array) -> jax.Array:
    """Slots uint32 [words] of draws whose comparison has all of its bits."""
    slot, alias, lead, wanted = _looked_up(tabled, first)
    below = slot < np.uint32(0)  # False; in a shard_map it varies as they do
    for level in (2, 1, 0):
        found, threshold = deeper[:, level], _taken(jnp.asarray(tabled.deeper[level]), slot)
        below = (found < threshold) | ((found == threshold) & below)
    return jnp.where((lead < wanted) | ((lead == wanted) & below), slot, alias)


def _looked_up(tabled: Table, first: jax.Array) -> tuple[jax.Array, ...]:
    """Slot, alias, leading bits of the comparison, and what these must be below."""
    bits = np.uint32(tabled.slot_bits)
    low = np.uint32((1 << tabled.slot_bits) - 1)
    slot = first & low
    entry = _taken(jnp.asarray(tabled.first), slot)
    return slot, entry & low, first >> bits, entry >> bits


def summed(law: Sum, draws: Sequence[jax.Array]) -> jax.Array:
    """x0 + f0 (x1 + f1 (x2 + ...)) of draws, each an int32 array."""
    found = draws[-1]
    for n, factor in reversed(list(enumerate(law.factors))):
        found = draws[n] + np.int32(factor) * found
    return found


def _taken(values: jax.Array, slot: jax.Array) -> jax.Array:
    return values.at[slot].get(mode="promise_in_bounds")
