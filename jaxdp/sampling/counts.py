"""Binomial counts by inversion, without rounding.

NumPy's own binomial rounds: up to a mean of 30 it subtracts floating-point probabilities from a
uniform number of 53 bits and never returns more than ten standard deviations above the mean; beyond
it compares floating-point logarithms. The errors are small, but nobody has bounded them. Here the
distribution function lies between two whole numbers that differ by a rounding or two, and where
the uniform number's bits do not say on which side of it they are, more of them are drawn.
"""

import bisect
import functools
from collections.abc import Callable

import numpy as np

_BITS = 64  # of one word
_GUARD = 64  # further bits of the weights, for what a million roundings add up to


def binomial(rng: np.random.Generator, trials: int, prob: float, bits: int = _BITS) -> int:
    """A binomial count: exactly distributed where the generator's words are uniform.

    It is the smallest k with u < F(k), for a uniform real u of which ``bits`` binary digits are
    drawn at a time, until those drawn decide (nearly always the first time).

    Args:
        rng: any of NumPy's.
        trials: n >= 0.
        prob: p in (0, 1], taken as the binary fraction that it is.
        bits: at most 64.
    """
    prob, word, known = float(prob), 0, 0
    if trials == 0 or prob == 1:
        return trials
    while True:
        drawn = int(rng.bit_generator.random_raw()) >> (_BITS - bits)
        word, known = (word << bits) | drawn, known + bits
        first, lower, upper = _bounds(trials, prob, known)
        place = bisect.bisect_right(upper, word)
        # F of the count below is at most u, and the largest u of these digits is below F.
        if 0 < place < len(lower) and word < lower[place]:
            return first + place - 1


@functools.lru_cache(maxsize=64)
def _bounds(trials: int, prob: float, bits: int) -> tuple[int, list[int], list[int]]:
    """(first, lower, upper): whole numbers with lower[i] <= 2^bits F(first - 1 + i) <= upper[i].

    F is the exact distribution function of Binomial(trials, prob). Weights follow from that of the
    mode by their ratios, which are fractions of whole numbers; each is rounded down and up. Beyond
    the last weights the ratios fall further, so that a geometric series bounds what is left out.
    """
    yes, whole = prob.as_integer_ratio()
    no = whole - yes
    mode = min(trials, (trials + 1) * yes // whole)
    one, most_left = 1 << (bits + _GUARD), 1 << (_GUARD - 2)
    up, over = _from_mode(
        one, most_left, lambda i: ((trials - mode - i) * yes, (mode + i + 1) * no)
    )
    down, under = _from_mode(
        one, most_left, lambda i: ((mode - i) * no, (trials - mode + i + 1) * yes)
    )
    weights = down[:0:-1] + up
    least, most = sum(low for low, _ in weights), sum(high for _, high in weights) + under + over
    low, high = 0, under
    lower, upper = [0], [-(-(under << bits) // least)]
    for small, large in weights:
        low, high = low + small, high + large
        lower.append((low << bits) // most)
        upper.append(-(-(high << bits) // least))
    return mode - len(down) + 1, lower, upper


def _from_mode(
    one: int, most_left: int, ratio: Callable[[int], tuple[int, int]]
) -> tuple[list[tuple[int, int]], int]:
    """Bounds (low, high) on the weights from the mode outwards, and one on all that follow.

    Args:
        one: the weight of the mode.
        most_left: what may be left out.
        ratio: of weight i + 1 to weight i, as (numerator, denominator); it falls with i.
    """
    weights = [(one, one)]
    while True:
        low, high = weights[-1]
        numerator, denominator = ratio(len(weights) - 1)
        if numerator == 0:
            return weights, 0
        if numerator < denominator:
            left = -(-high * numerator // (denominator - numerator))
            if left <= most_left:
                return weights, left
        weights.append((low * numerator // denominator, -(-high * numerator // denominator)))
