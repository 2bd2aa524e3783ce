"""Discrete Gaussian integers from a key: sums of multiples of draws from one alias table.

The words are those of ChaCha20 (RFC 8439, Section 2.3). The table is made of Python integers by
Walker's alias method (1977; Vose 1991, "A linear algorithm for generating random numbers with a
given distribution"): a uniform slot, and one comparison that keeps the slot or takes its alias. In
integers the law that it draws is exactly that of the weights.

docs/proofs/grid_noise.md proves how far their law is from the discrete Gaussian. Integer i of n is
a function of (key, n, i), on any device and under any flags.
"""

import dataclasses
import decimal
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.devices import placement

Words = tuple[jax.Array, ...]

# "expand 32-byte k", little-endian.
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_ROUNDS = 20


def chacha20_block(key: jax.Array, counter: jax.Array, nonce: Sequence[jax.Array | int]) -> Words:
    """The 16 words of every block: the key stream of RFC 8439, each word uint32 like ``counter``.

    Args:
        key: uint32 [8].
        counter: uint32, any shape: of the block.
        nonce: three words, uint32 scalars or arrays that broadcast against ``counter``.

    Raises:
        ValueError: key or counter is not uint32: the rounds would be those of no known cipher.
    """
    for name, given in (("key", key), ("counter", counter)):
        if given.dtype != jnp.uint32:
            raise ValueError(f"{name} must be uint32, got {given.dtype}")
    shape = jnp.broadcast_shapes(counter.shape, *(jnp.shape(word) for word in nonce))
    words = [*_CONSTANTS, *(key[n] for n in range(8)), counter, *nonce]
    words = [jnp.asarray(word, jnp.uint32) for word in words]
    # Added to all, so that within a shard_map all vary as the key and the counter do.
    zero = (key[0] ^ key[0]) + (counter ^ counter)
    first = tuple(jnp.broadcast_to(word + zero, shape) for word in words)

    def double_round(_: int, state: Words) -> Words:
        """Four quarter rounds on the columns, and four on the diagonals."""
        words = list(state)
        for turn, n in itertools.product((0, 1), range(4)):
            a, b, c, d = (4 * row + (n + row * turn) % 4 for row in range(4))
            for to, add, turned, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                words[to] = words[to] + words[add]
                word = words[turned] ^ words[to]
                words[turned] = (word << np.uint32(bits)) | (word >> np.uint32(32 - bits))
        return tuple(words)

    # A loop: unrolled, every reader of a word would make XLA run all rounds again for it. Never a
    # reduction of one element with the rounds as its operation: XLA leaves out the operation.
    last = jax.lax.fori_loop(0, _ROUNDS // 2, double_round, first)
    return tuple(a + b for a, b in zip(last, first, strict=True))


def derive_key(key: jax.Array, place: jax.Array | int, kind: int) -> jax.Array:
    """A key uint32 [8] of its own for each ``place``: half of a block that no stream uses.

    Args:
        key: uint32 [8].
        place: uint32 scalar.
        kind: the purpose; different kinds give unrelated keys.
    """
    made = chacha20_block(key, jnp.asarray(place, jnp.uint32), (0xFFFFFFFF, 0xFFFFFFFF, kind))
    return jnp.stack(made[:8])


# Bits of a threshold: the first are in the word that has the slot, the others in three more words.
DEEPER = 96
WORD = 32
# Weights are whole parts of this.
TOTAL = 1 << (DEEPER + WORD)
# Digits of the weights before they are rounded; the thresholds have at most 39.
_DIGITS = 80


@dataclasses.dataclass(frozen=True, eq=False)
class AliasTable:
    """An alias table of integers -half, ..., half - 1, half = 2**(slot_bits - 1)."""

    slot_bits: int  # the table has 2**slot_bits slots
    sigma: int  # of the discrete Gaussian that it draws
    first: np.ndarray  # uint32 [slots]; the leading bits of a slot's threshold above its alias
    # uint32 [3, slots]; the other bits of the threshold, most significant word first.
    deeper: np.ndarray
    distance: float  # a proven bound on the total-variation distance of a draw from that Gaussian

    @property
    def half(self) -> int:
        """The value of slot 0 is -half."""
        return 1 << (self.slot_bits - 1)


@functools.lru_cache(maxsize=8)
def alias_table(sigma: int = 2560, slot_bits: int = 16) -> AliasTable:
    """The table of the discrete Gaussian on the integers, P(z) ~ exp(-z^2 / (2 sigma^2)).

    Args:
        sigma: its parameter; half the slots must be at least 12 of it.
        slot_bits: log2 of the number of slots, at most 16.

    Raises:
        ValueError: the slots do not reach far enough.
    """
    half = 1 << (slot_bits - 1)
    if not 12 * sigma <= half or not 1 <= slot_bits <= 16:
        raise ValueError(f"sigma must be at most {half // 12} for {slot_bits} bits, got {sigma}")
    with decimal.localcontext(prec=_DIGITS, Emin=-999999, Emax=999999):
        # 2^128 P(z) of z = 0, ..., half - 1, to 70 digits; P adds up to 1 on -half < z < half.
        # rho(z + 1) = rho(z) step^(2z + 1): z^2 roundings in all, a relative 10^-70.
        step = (-1 / (2 * decimal.Decimal(sigma) ** 2)).exp()
        rho, ratio, square = [decimal.Decimal(1)], step, step * step
        for _ in range(1, half):
            rho.append(rho[-1] * ratio)
            ratio *= square
        norm = 2 * sum(rho) - 1
        exact = [value * TOTAL / norm for value in rho]

        # Weights of the slots, which add up to 2^128 exactly: those of z != 0 rounded down, and the
        # rest to 0. The lowest slot has no mirror and none.
        one_side = [int(mass) for mass in exact[1:]]
        left = [0, *one_side[::-1], TOTAL - 2 * sum(one_side), *one_side]

        # Total variation: what rounding down moved to 0, and the tail, twice
        # sum_{z >= h} rho(z) <= rho(h) (1 + sigma^2 / h) (the integral, by Mills' ratio), over a
        # sum of at least sigma; with h the half, <= 2 (1 + 1) exp(-h^2 / (2 sigma^2)).
        tail = 4 * (-(decimal.Decimal(half) ** 2) / (2 * decimal.Decimal(sigma) ** 2)).exp()
        moved = (left[half] - exact[0]) / TOTAL
        # Digits that were dropped: 10^-60 of everything; and to float64, upwards.
        rest = decimal.Decimal(10) ** -60
        distance = float((tail + moved + rest) * decimal.Decimal("1.000001"))

    # The threshold of each slot, below 2**(128 - slot_bits), and its alias, exactly for the
    # weights. A slot that keeps all of its share has itself for an alias, and threshold 0.
    share = 1 << (DEEPER + WORD - slot_bits)
    thresholds, aliases = [0] * len(left), list(range(len(left)))
    small = [n for n, weight in enumerate(left) if weight < share]
    large = [n for n, weight in enumerate(left) if weight >= share]
    while small:
        low, high = small.pop(), large[-1]
        thresholds[low], aliases[low] = left[low], high
        left[high] -= share - left[low]
        if left[high] < share:
            small.append(large.pop())
    lead = [t >> DEEPER for t in thresholds]
    first = np.asarray([(t << slot_bits) | a for t, a in zip(lead, aliases, strict=True)])
    parts = [[(t >> (64 - WORD * n)) % 2**WORD for t in thresholds] for n in range(3)]
    deeper = np.asarray(parts, np.uint64).astype(np.uint32)
    return AliasTable(slot_bits, sigma, first.astype(np.uint32), deeper, distance)


# Blocks of the generator made together, for each draw: so many that starting a loop costs little,
# and few enough to stay in a cache.
_BLOCKS = 2048
_WORDS = 16
# Ratio of what is added to a draw and the draw that it is added to: at least 2 standard
# deviations of the law that joins them.
_LEAST = 2.0


@dataclasses.dataclass(frozen=True)
class IntegerLaw:
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
        if not self.joint_widths or min(self.joint_widths) < _LEAST:
            most = f"{self.sigma / _LEAST:g} for sigma {self.sigma}"
            raise ValueError(f"factors must be below {most}, got {self.factors}")

    @property
    def draws(self) -> int:
        """The number of draws from the table."""
        return len(self.factors) + 1

    @property
    def std(self) -> float:
        """The parameter s of the discrete Gaussian that it stands for."""
        return math.sqrt(self._variances()[0])

    @property
    def joint_widths(self) -> tuple[float, ...]:
        """r' of every addition x + f y: s0 s_y / sqrt(s0^2 + f^2 s_y^2)."""
        each, s = zip(self.factors, self._variances()[1:], strict=True), self.sigma
        return tuple(s * math.sqrt(y / (s**2 + f * f * y)) for f, y in each)

    @property
    def distance(self) -> float:
        """A proven bound on the total-variation distance of one integer from D(s)."""
        joined = sum(2 * summation_error(r) for r in self.joint_widths)
        return (self.draws * self.table.distance + joined) * (1 + 1e-9)

    @property
    def largest(self) -> int:
        """The largest magnitude of an integer: every draw is of the table."""
        factors = [math.prod(self.factors[:n]) for n in range(self.draws)]
        return sum(factors) * self.table.half

    @property
    def table(self) -> AliasTable:
        """The alias table, made on the host."""
        return alias_table(self.sigma, self.slot_bits)

    def _variances(self) -> list[int]:
        """The variance of the sum from each draw on, the innermost last."""
        found = [self.sigma**2]
        for factor in self.factors[::-1]:
            found.insert(0, self.sigma**2 + factor**2 * found[0])
        return found


def summation_error(r: float) -> float:
    """e: sum_z exp(-(z - y)^2 / (2 r^2)) is r sqrt(2 pi) up to a factor 1 +- e, for every real y.

    Poisson summation: e = 2 sum_{j >= 1} exp(-2 pi^2 r^2 j^2), less than 2.1 times its first term
    where r >= 1; a factor for the rounding of this function.
    """
    return 2.1 * math.exp(-2 * math.pi**2 * r * r) * (1 + 1e-9)


def integers(
    key: jax.Array, size: int, law: IntegerLaw, fine: bool = False
) -> tuple[jax.Array, ...]:
    """(independent integers int32 [size] of the law; with ``fine`` one more draw for each).

    Args:
        key: uint32 [8].
        size: at most 2**32.
        law: the sum of draws.
        fine: True adds int32 [size], of the table alone; the integers stay the same.

    Raises:
        ValueError: too many of them for the generator's counter.
    """
    if size > 2**32:
        raise ValueError(f"size must be at most 2**32, got {size}")
    blocks = max(1, min(_BLOCKS, -(-size // _WORDS)))
    count = max(1, -(-size // (blocks * _WORDS)))
    numbers = jnp.arange(count, dtype=jnp.uint32)

    # Block after block in a loop, whose memory stays small; in parallel over CPU devices.
    def of_blocks(numbers: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        """The integers of these runs of blocks, one after the other."""
        draws = law.draws + fine
        one = lambda n: _integers_of_blocks(key, n * np.uint32(blocks), blocks, law, draws)  # noqa: E731
        found: tuple[jax.Array, ...] = jax.lax.map(one, numbers)
        return found

    found = placement.generate_sharded(of_blocks, numbers, key)
    return tuple(part.reshape(-1)[:size] for part in found)


def _integers_of_blocks(
    key: jax.Array, start: jax.Array, blocks: int, law: IntegerLaw, draws: int
) -> tuple[jax.Array, ...]:
    """The integers [16 · blocks] of ``blocks`` counters from ``start``.

    Draw d of counter c is looked up by the words of block (c, nonce d): a block has 16 words, and
    so each counter makes 16 integers.
    """
    lanes = np.arange(draws * blocks, dtype=np.uint32)

    def words(lane: jax.Array, level: jax.Array) -> jax.Array:
        """Words uint32 [16, ...] of the lanes: a draw and a counter each."""
        draw, counter = lane // np.uint32(blocks), start + lane % np.uint32(blocks)
        return jnp.stack(chacha20_block(key, counter, (draw, level, 0)))

    # The first word of every draw; three more are made only for a lane that needs them.
    levels = jnp.arange(1, 4, dtype=jnp.uint32)
    first = words(jnp.asarray(lanes), jnp.zeros_like(lanes))
    found = look_up(law.table, first, lambda lane: words(jnp.broadcast_to(lane, 3), levels))
    found = found.reshape(_WORDS, draws, blocks)
    whole = combine(law, [found[:, draw] for draw in range(law.draws)])
    return whole.reshape(-1), *(found[:, draw].reshape(-1) for draw in range(law.draws, draws))


def look_up(
    tabled: AliasTable, first: jax.Array, deeper: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Draws from the table, int32 [words, lanes] like ``first``.

    The first word has the slot and the leading bits of the comparison. Only in a lane where some
    of these are equal, three more words of every draw decide: that depends on nothing but words.

    Args:
        tabled: the table.
        first: uint32 [words, lanes], uniform and independent.
        deeper: lane -> uint32 [words, 3], the words after the first, most significant first.
    """
    bits, low = np.uint32(tabled.slot_bits), np.uint32((1 << tabled.slot_bits) - 1)

    def entries(values: np.ndarray, slot: jax.Array) -> jax.Array:
        """The table's entries at slots, which are in bounds: they have as many bits."""
        return jnp.asarray(values).at[slot].get(mode="promise_in_bounds")

    def looked_up(first: jax.Array) -> tuple[jax.Array, ...]:
        """Slot, alias, leading bits of the comparison, and what these must be below."""
        slot = first & low
        entry = entries(tabled.first, slot)
        return slot, entry & low, first >> bits, entry >> bits

    # Walker's choice: the slot where the comparison's bits are below its threshold, else the alias.
    slot, alias, lead, wanted = looked_up(first)
    chosen = jnp.where(lead < wanted, slot, alias)
    # Row by row: one pass, where a reduction over the rows is slower than the look-ups.
    same = [a == b for a, b in zip(lead, wanted, strict=True)]
    tied = functools.reduce(jnp.logical_or, same)

    def settle(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Draws one lane again, with all bits of its comparisons."""
        tied, chosen = state
        lane = jnp.argmax(tied).astype(jnp.uint32)
        slot, alias, lead, wanted = looked_up(first[:, lane])
        words = deeper(lane)
        below = slot < np.uint32(0)  # False; in a shard_map it varies as they do
        for level in (2, 1, 0):
            found, threshold = words[:, level], entries(tabled.deeper[level], slot)
            below = (found < threshold) | ((found == threshold) & below)
        full = jnp.where((lead < wanted) | ((lead == wanted) & below), slot, alias)
        return tied.at[lane].set(False), chosen.at[:, lane].set(full)

    _, chosen = jax.lax.while_loop(lambda state: jnp.any(state[0]), settle, (tied, chosen))
    return chosen.astype(jnp.int32) - np.int32(tabled.half)


def combine(law: IntegerLaw, draws: Sequence[jax.Array]) -> jax.Array:
    """x0 + f0 (x1 + f1 (x2 + ...)) of draws, each an int32 array."""
    # Horner's rule, from the innermost draw outwards.
    found = draws[-1]
    for n, factor in reversed(list(enumerate(law.factors))):
        found = draws[n] + np.int32(factor) * found
    return found
