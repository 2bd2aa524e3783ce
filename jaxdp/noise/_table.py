"""Alias tables of the discrete Gaussian, made of Python integers, with a proven error.

Walker's alias method (1977; Vose 1991, "A linear algorithm for generating random numbers with a
given distribution"): a uniform slot, and one comparison that keeps the slot or takes its alias. In
integers the law that it draws is exactly that of the weights.
"""

import dataclasses
import decimal
import functools

import numpy as np

# Bits of a threshold: the first are in the word that has the slot, the others in three more words.
DEEPER = 96
WORD = 32
# Weights are whole parts of this.
TOTAL = 1 << (DEEPER + WORD)
# Digits of the weights before they are rounded; the thresholds have at most 39.
_DIGITS = 80


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """An alias table of integers -half, ..., half - 1, half = 2**(slot_bits - 1).

    Attributes:
        slot_bits: the table has 2**slot_bits slots.
        sigma: of the discrete Gaussian that it draws.
        first: uint32 [slots]; the leading bits of a slot's threshold above its alias.
        deeper: uint32 [3, slots]; the other bits of the threshold, most significant word first.
        distance: a proven bound on the total-variation distance of a draw from that Gaussian.
    """

    slot_bits: int
    sigma: int
    first: np.ndarray
    deeper: np.ndarray
    distance: float

    @property
    def half(self) -> int:
        """The value of slot 0 is -half."""
        return 1 << (self.slot_bits - 1)


@functools.lru_cache(maxsize=8)
def table(sigma: int = 2560, slot_bits: int = 16) -> Table:
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
    exact = _masses(sigma, slot_bits)
    given = _rounded(exact)
    thresholds, aliases = _aliased(given, slot_bits)
    lead = [t >> DEEPER for t in thresholds]
    first = np.asarray([(t << slot_bits) | a for t, a in zip(lead, aliases, strict=True)])
    parts = [[(t >> (64 - WORD * n)) % 2**WORD for t in thresholds] for n in range(3)]
    return Table(
        slot_bits,
        sigma,
        first.astype(np.uint32),
        np.asarray(parts, np.uint64).astype(np.uint32),
        _distance(sigma, given[half], exact[0], half),
    )


def weights(sigma: int, slot_bits: int) -> list[int]:
    """Integer weights of the slots, [2**slot_bits], that add up to 2**(128) exactly.

    That of value z != 0 is exp(-z^2 / (2 sigma^2)) over the sum of all, rounded down; 0 has what
    is left. The lowest slot has no mirror and none.
    """
    return _rounded(_masses(sigma, slot_bits))


def _masses(sigma: int, slot_bits: int) -> list[decimal.Decimal]:
    """2**128 P(z) of z = 0, ..., half - 1, to 70 digits; P adds up to 1 on -half < z < half."""
    with decimal.localcontext(prec=_DIGITS, Emin=-999999, Emax=999999):
        step = (-1 / (2 * decimal.Decimal(sigma) ** 2)).exp()
        # rho(z + 1) = rho(z) step^(2z + 1): z^2 roundings in all, a relative 10^-70.
        rho, ratio, square = [decimal.Decimal(1)], step, step * step
        for _ in range(1, 1 << (slot_bits - 1)):
            rho.append(rho[-1] * ratio)
            ratio *= square
        norm = 2 * sum(rho) - 1
        return [value * TOTAL / norm for value in rho]


def _rounded(masses: list[decimal.Decimal]) -> list[int]:
    """The weights of all slots: those of z != 0 rounded down, and the rest to 0."""
    one_side = [int(mass) for mass in masses[1:]]
    return [0, *one_side[::-1], TOTAL - 2 * sum(one_side), *one_side]


def _distance(sigma: int, centre: int, exact: decimal.Decimal, half: int) -> float:
    """Total variation: what rounding down moved to 0, whose weight is ``centre``, and the tail.

    The tail: sum_{z >= h} rho(z) <= rho(h) (1 + sigma^2 / h) (the integral, by Mills' ratio), over
    a sum of at least sigma; twice, with h the half, <= 2 (1 + 1) exp(-h^2 / (2 sigma^2)).
    """
    with decimal.localcontext(prec=_DIGITS, Emin=-999999, Emax=999999):
        tail = 4 * (-(decimal.Decimal(half) ** 2) / (2 * decimal.Decimal(sigma) ** 2)).exp()
        moved = (centre - exact) / TOTAL
        # Digits that were dropped: 10^-60 of everything; and to float64, upwards.
        return float((tail + moved + decimal.Decimal(10) ** -60) * decimal.Decimal("1.000001"))


def _aliased(given: list[int], slot_bits: int) -> tuple[list[int], list[int]]:
    """(threshold of each slot below 2**(128 - slot_bits), alias of each), exactly for the weights.

    A slot that keeps all of its share has itself for an alias, and threshold 0.
    """
    share = 1 << (DEEPER + WORD - slot_bits)
    left = list(given)
    thresholds, aliases = [0] * len(given), list(range(len(given)))
    small = [n for n, weight in enumerate(left) if weight < share]
    large = [n for n, weight in enumerate(left) if weight >= share]
    while small:
        low, high = small.pop(), large[-1]
        thresholds[low], aliases[low] = left[low], high
        left[high] -= share - left[low]
        if left[high] < share:
            small.append(large.pop())
    return thresholds, aliases
