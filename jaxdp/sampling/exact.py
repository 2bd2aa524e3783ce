"""Exact binomial counts, and uniformly random subsets and permutations.

NumPy's own binomial rounds: up to a mean of 30 it subtracts floating-point probabilities from a
uniform number of 53 bits and never returns more than ten standard deviations above the mean; beyond
it compares floating-point logarithms. The errors are small, but nobody has bounded them. Here the
distribution function lies between two whole numbers that differ by a rounding or two, and where
the uniform number's bits do not say on which side of it they are, more of them are drawn.
"""

import bisect
import functools
import math

import numpy as np

_BITS = 64  # of one word
_GUARD = 64  # further bits of the weights, for what a million roundings add up to
# Fewer are left to NumPy, by Floyd's algorithm; it takes that up to a share of a fiftieth.
_FEW, _RARE = 1024, 50
# Numbers are drawn for so many standard deviations more than are needed on average.
_DEVIATIONS = 4
# Up to this share of a range numbers are drawn until enough are distinct, beyond all are permuted.
_SHARE = 0.7
# A table with a place for each position is used up to so many places, or so many for each number.
_PLACES, _EACH = 2**16, 32
# Positions that NumPy shuffles; of more, random keys are sorted, which jumps less in memory.
_SHUFFLED = 2**18
# Repeated numbers are looked for among those that share so many last bits with one.
_LAST_BITS = 20
_ALL_BITS = 2**64 - 1


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
    # Bounds (low, high) on the weights from the mode outwards, up and down, where the mode has the
    # weight ``one``, and in ``left`` one on all that follow; the ratio of weight i + 1 to weight i
    # falls with i.
    one, most_left = 1 << (bits + _GUARD), 1 << (_GUARD - 2)
    sides: list[tuple[list[tuple[int, int]], int]] = []
    for ratio in (
        lambda i: ((trials - mode - i) * yes, (mode + i + 1) * no),
        lambda i: ((mode - i) * no, (trials - mode + i + 1) * yes),
    ):
        outwards, left = [(one, one)], most_left + 1
        while left > most_left:
            low, high = outwards[-1]
            numerator, denominator = ratio(len(outwards) - 1)
            if numerator < denominator:
                left = -(-high * numerator // (denominator - numerator))
            if left > most_left:
                more = low * numerator // denominator, -(-high * numerator // denominator)
                outwards.append(more)
        sides.append((outwards, left))
    (up, over), (down, under) = sides
    weights = down[:0:-1] + up
    least, most = sum(low for low, _ in weights), sum(high for _, high in weights) + under + over
    low, high = 0, under
    lower, upper = [0], [-(-(under << bits) // least)]
    for small, large in weights:
        low, high = low + small, high + large
        lower.append((low << bits) // most)
        upper.append(-(-(high << bits) // least))
    return mode - len(down) + 1, lower, upper


def subset(rng: np.random.Generator, below: int, size: int) -> np.ndarray:
    """int64 [size]: distinct positions of ``range(below)``, every ordered tuple as likely.

    Numbers are drawn independently, each exactly uniform; of equal ones the last stays. Renaming
    positions changes neither the law of the numbers nor which places stay, and some renaming takes
    any ordered tuple of distinct positions to any other: so all of them are equally likely, and
    the order is random without a shuffle. O(size) memory, and nearly so much work. A few are drawn
    by Floyd's algorithm (Bentley and Floyd 1987, CACM 30(9)) and shuffled.

    Args:
        rng: any of NumPy's. Its integers reject what would not be uniform (Lemire 2019,
            arXiv:1805.10941), without floating-point numbers; so do ``choice`` and ``shuffle``.
        below: n >= size, less than 2^63.
        size: k >= 0.
    """
    if size < _FEW and _RARE * size <= below:
        return rng.choice(below, size, replace=False)
    if size > _SHARE * below:
        return permutation(rng, below)[:size]
    # Of so many numbers nearly always enough are distinct. A coupon collector needs
    # n log(n / (n - k)) of them on average, with a variance of at most k^2 / (n - k). With
    # x = k / (2n - k) the logarithm is 2 (x + x^3/3 + x^5/5 + ...), at most
    # 2 (x + x^3 / 3(1 - x^2)). In whole numbers: a draw is the same on every system.
    rest = 2 * below - size
    mean = 2 * below * size // rest
    mean += 2 * below * size**3 // (3 * rest * (rest * rest - size * size))
    enough = max(size, mean + _DEVIATIONS * math.isqrt(size * size // (below - size)) + 8)
    kept = np.empty(0, np.int64)
    while len(kept) < size:
        more = rng.integers(0, below, enough - len(kept))
        kept = _without_repeats(np.concatenate([kept, more]) if len(kept) else more, below)
    return kept[:size]


def permutation(rng: np.random.Generator, size: int) -> np.ndarray:
    """int64 [size]: ``range(size)``, every order as likely."""
    if size <= _SHUFFLED:
        return rng.permutation(size)
    return shuffle_within_groups(rng, np.arange(size), size)


def shuffle_within_groups(
    rng: np.random.Generator,
    values: np.ndarray,
    below: int,
    groups: np.ndarray | None = None,
    count: int = 1,
) -> np.ndarray:
    """int64 [k]: the values by ascending group, every order within each group as likely.

    A number of 64 bits is made of the group, random bits, and the value, and these are sorted.
    Values whose random bits are equal are shuffled. Renaming values changes nothing in the law.

    Args:
        rng: any of NumPy's.
        values: int64 [k] in ``range(below)``, distinct within a group.
        below: at least 1.
        groups: unsigned integers [k] in ``range(count)``; None for one group.
        count: the number of groups.

    Raises:
        ValueError: a group and a value have more than 64 bits together.
    """
    low, top = (below - 1).bit_length(), (count - 1).bit_length()
    if low + top > 64:
        raise ValueError(f"groups and values must fit in 64 bits, got {count} groups")
    keys = rng.integers(0, _ALL_BITS, len(values), np.uint64, endpoint=True)
    keys >>= np.uint64(top)
    keys &= np.uint64(_ALL_BITS - (2**low - 1))
    keys |= values.view(np.uint64)
    if groups is not None and top:
        keys |= groups.astype(np.uint64) << np.uint64(64 - top)
    keys.sort()
    # Keys that are equal but for the value: each stretch of them is shuffled.
    labels = keys >> np.uint64(low) if low < 64 else np.zeros_like(keys)
    tied = np.flatnonzero(labels[1:] == labels[:-1])
    if len(tied):
        ends = np.flatnonzero(np.diff(tied) > 1)
        first, last = np.append(0, ends + 1), np.append(ends, len(tied) - 1)
        for start, end in zip(tied[first].tolist(), tied[last].tolist(), strict=True):
            rng.shuffle(keys[start : end + 2])
    keys &= np.uint64(2**low - 1)
    return keys.view(np.int64)


def _without_repeats(numbers: np.ndarray, below: int) -> np.ndarray:
    """The numbers [k] without repetition, each where it stands last."""
    count = len(numbers)
    if below <= max(_PLACES, _EACH * count):
        places = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)
        table = np.empty(below, places.dtype)
        table[numbers] = places
        return numbers[table[numbers] == places]
    ascending = numbers.astype(np.uint32) if below <= 2**32 else numbers.copy()
    ascending.sort()
    repeated = ascending[1:][ascending[1:] == ascending[:-1]]
    if not len(repeated):
        return numbers
    bits = 2 ** min(_LAST_BITS, 4 + count.bit_length()) - 1
    marked = np.zeros(bits + 1, bool)
    marked[repeated.astype(np.int64) & bits] = True
    suspects = np.flatnonzero(marked[numbers & bits])[::-1]
    stays = np.ones(count, bool)
    stays[suspects] = False
    stays[suspects[np.unique(numbers[suspects], return_index=True)[1]]] = True
    return numbers[stays]
