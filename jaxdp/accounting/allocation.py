"""Random allocation: laws of its likelihood ratio, above and below in convex order.

Of a record that is in one of t Gaussian steps the likelihood ratio is S/t, S = sum of t independent
e^X with X ~ N(-1/2z^2, 1/z^2) in the record's absence. In both directions delta is the mean of
a convex function of it: a law above it in convex order bounds delta from above, one below from
below. For k > 1 the lower end is that of a sum over the steps, whose two laws are convolutions.
docs/proofs/allocation.md proves this, the step to k > 1, and every line of the arithmetic.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

from jaxdp.accounting.events import Array
from jaxdp.accounting.pairs import Discrete, bracket_decreasing, normal_cells

COARSE = 1 / 16  # the largest spacing of atoms at which the quadrature is exact to rounding
REACH = 9.6  # standard deviations: beyond lies less than TAIL
TAIL = 1e-21
LEAST_NOISE = 0.15  # of the k steps together: below it no sampling is credited
MOST_NOISE = 1e6  # above it losses are lost in rounding
MOST_STEPS = 1 << 24
MOST_SCORES = 100_000  # steps beyond which the convolutions of a lower end take long
LINEAR = 1 / 200  # the widest relative step of a grid that is even around the mean
EPS = 2.0**-52
CHUNK = 1 << 13
FAR = 13.5  # standard deviations beyond which a score is counted as its last value
RARE = 1e-40  # what is left out at either end of a law of scores
_LONGEST = 2**14  # scores of a law
CELLS = 1 << 12  # values of a step's score, or 16 deviations of the sum where that is more
_ROOTS, _WEIGHTS = special.roots_legendre(8)


@dataclass(frozen=True)
class _Resolution:
    """The side on which laws are approximated in convex order, and how close their atoms are."""

    upper: bool
    fine: float  # spacing near the mean, in standard deviations
    bits: int  # far from the mean 2^bits in an octave


@dataclass(frozen=True)
class _RatioLaw:
    """A discrete law of a likelihood ratio, or of a sum of some, in the record's absence."""

    at: Array  # [m] places, increasing, > 0
    mass: Array  # [m]
    zero: float = 0.0  # mass at 0
    escaped: float = 0.0  # mean at infinity, where there is no mass
    error: float = 0.0  # bound on the relative error of a mass
    shift: float = 0.0  # bound on the relative error of a place


@lru_cache(maxsize=64)
def epoch_pairs(
    z: float, steps: int, participations: int, upper: bool
) -> tuple[Discrete, Discrete]:
    """The pairs (forward, reverse) of an epoch; arguments as of ``RandomlyAllocated``."""
    # The steps in k groups, ``more`` of them larger by one: docs/proofs/allocation.md.
    size, more = divmod(steps, participations)
    # Every combination adds about fine^2 to the relative width of epsilon. Laws of much noise have
    # light tails: they take less time.
    fine, bits = (1 / 16, 7) if z < 2 else (1 / 20, 8)
    combined = sum(n.bit_length() + n.bit_count() - 2 for n in (size, participations))
    rule = _Resolution(upper, fine / math.sqrt(max(combined, 6)), bits)
    parts = [(size, participations - more), (size + 1, more)]
    used = [part for part in parts if part[1]]
    laws = [(_product_of_means(z, *part, rule), _spread(z, *part)) for part in used]
    law, spread = laws[0]
    if more:
        law = _combine(law, laws[1][0], np.multiply, 1.0, math.hypot(spread, laws[1][1]), rule)
    shift = (law.shift + 1e-14) * (1 if upper else -1)
    loss, error = np.log(law.at), law.error + law.shift
    forward = Discrete(loss + shift, law.at * law.mass, law.escaped, error)
    reverse = Discrete((shift - loss)[::-1], law.mass[::-1], law.zero, error)
    return forward, reverse


def _spread(z: float, steps: int, groups: int) -> float:
    """The standard deviation, roughly, of the log of the product of ``groups`` means S/t."""
    return math.sqrt(groups * math.log1p(math.expm1(1 / (z * z)) / steps))


def _product_of_means(z: float, steps: int, groups: int, rule: _Resolution) -> _RatioLaw:
    """The law of the product of ``groups`` independent copies of S/t, t = ``steps``."""
    # One factor among n: a place of n standard deviations is sqrt(n) times further off.
    law = _combine_copies(
        lambda n: _single_step_law(z, min(rule.fine * math.sqrt(n) / 2, COARSE), rule),
        lambda a, b, n: _combine(a, b, np.add, n, _spread(z, n, 1), rule),
        steps,
    )
    shift, escaped = law.shift + EPS, law.escaped / steps
    mean = replace(law, at=law.at / steps, shift=shift, escaped=escaped)
    return _combine_copies(
        lambda n: mean,
        lambda a, b, n: _combine(a, b, np.multiply, 1.0, _spread(z, steps, n), rule),
        groups,
    )


def _combine_copies(
    copy: Callable[[int], _RatioLaw],
    combine: Callable[[_RatioLaw, _RatioLaw, int], _RatioLaw],
    count: int,
) -> _RatioLaw:
    """The law of ``count`` copies combined by doubling; calls get how many are in the result."""
    law, n = copy(1), 1
    for digit in bin(count)[3:]:
        n *= 2
        law = combine(law, law, n)
        if digit == "1":
            n += 1
            law = combine(copy(n), law, n)
    return law


def _single_step_law(z: float, width: float, rule: _Resolution) -> _RatioLaw:
    """The law of e^X, X ~ N(-1/2z^2, 1/z^2), on cells of at most ``width`` deviations of X.

    A cell has its mass at its ends (above), or at its mean (below).
    """
    top = REACH + 1 / z  # the last place above the mean of X; the first is -REACH
    count = math.ceil((REACH + top) / width)
    width = (REACH + top) / count
    edges = width * np.arange(count + 1) - REACH
    inside, weight = (_ROOTS + 1) / 2, _WEIGHTS * (width / 2 / math.sqrt(2 * math.pi))
    weight = weight * np.exp(-0.5 * (edges[:-1, None] + width * inside) ** 2)
    log, h = edges / z - 0.5 / z**2, width / z
    shift = 2 * (float(np.abs(log).max()) + (REACH + top) / z + 8) * EPS
    error = (4 * top**2 + 64) * EPS
    if not rule.upper:
        mass = weight.sum(axis=1)
        log = log[1:] + np.log(weight @ np.exp((inside - 1) * h) / mass)
        return _RatioLaw(np.exp(log), mass, error=error, shift=shift + error)
    mass = np.zeros(count + 1)
    mass[:-1] = weight @ (np.expm1((inside - 1) * h) / math.expm1(-h))
    mass[1:] += weight @ (np.exp((inside - 1) * h) * np.expm1(-inside * h) / math.expm1(-h))
    # More than lies beyond: under Q the near end is REACH away, under P the far one.
    mass[0] += TAIL
    mass[-1] += 1.01 * float(special.ndtr(-top))
    return _RatioLaw(np.exp(log), mass, TAIL, TAIL, error, shift)


class _Grid:
    """Places center +- (f - 2^bits) / scale, f the floats with ``bits`` digits after the point.

    They are evenly spaced near the center, ``step`` times the mean apart, then in proportion to the
    distance; the cell of a place is read off its digits. ``operation`` on ``a`` and ``b``, which
    will be put on the grid, fixes its ends.
    """

    def __init__(
        self, a: _RatioLaw, b: _RatioLaw, operation: np.ufunc, mean: float, step: float, bits: int
    ) -> None:
        low = float(operation(a.at[0], b.at[0]))
        high = float(operation(a.at[-1], b.at[-1]))
        self.bits, self.center, self.scale = bits, mean, 1 / (step * mean)
        if step > LINEAR or low < mean / 32:
            self.bits = max(3, round(-math.log2(step)))
            self.center, self.scale = 0.0, 2**self.bits / low
        first, last = (self.locate(np.asarray([x])) for x in (low, high))
        self.left = -int(first[0][0]) if self.center else 0
        self.size = int(last[0][0]) + self.left + 2
        raw = (np.arange(self.size) - self.left).astype(np.int64)
        f = ((np.abs(raw) + self._base()) << (52 - self.bits)).view(np.float64) - 2.0**self.bits
        self.at = self.center + np.copysign(f, raw) / self.scale

    def _base(self) -> int:
        return (1023 + self.bits) << self.bits

    def step(self, x: Array) -> Array:
        """At least the length of the cell of a place."""
        return 2 * (np.abs(x - self.center) * 2.0**-self.bits + 1 / self.scale)

    def locate(self, x: Array) -> tuple[NDArray[np.int64], Array]:
        """(index of the last place <= x, how far x is from it to the next as a fraction)."""
        y = (x - self.center) * self.scale
        f = np.abs(y) + 2.0**self.bits
        raw = f.view(np.int64)
        index = (raw >> (52 - self.bits)) - self._base()
        fraction = (raw & ((1 << (52 - self.bits)) - 1)) * 2.0 ** (self.bits - 52)
        if self.center:
            below = y < 0
            index = np.where(below, -1 - index, index)
            fraction = np.where(below, 1 - fraction, fraction)
        return np.asarray(index, np.int64), np.asarray(fraction, np.float64)


def _combine(
    a: _RatioLaw, b: _RatioLaw, operation: np.ufunc, mean: float, spread: float, rule: _Resolution
) -> _RatioLaw:
    """The law of the sum or product of independent places, merged onto a grid."""
    upper = rule.upper
    grid = _Grid(a, b, operation, mean, spread * rule.fine, rule.bits)
    first, second = np.zeros((2, grid.size))

    def add(x: Array, weight: Array) -> None:
        """Adds places with their masses: split between neighbours (above), or merged (below)."""
        index, fraction = grid.locate(x)
        index = (index + grid.left).ravel()
        into = weight * (1 - fraction) if upper else weight
        first[:] += np.bincount(index, into.ravel(), grid.size)
        into = weight * (fraction if upper else x)
        second[:] += np.bincount(index, into.ravel(), grid.size)

    # Every place of a with every place of b, some rows at a time.
    rows = max(1, CHUNK // b.at.size)
    for i in range(0, a.at.size, rows):
        others = b.mass
        if a is b:  # the pair (i, j) stands for (j, i)
            others = b.mass[i:].copy()
            others[rows:] *= 2
        some, rest = slice(i, i + rows), b.at[b.at.size - others.size :]
        add(operation(a.at[some, None], rest), a.mass[some, None] * others)
    # A product is 0 where a factor is. A sum is 0 where both are; where one is, the other is a
    # place that may lie below the grid, and is split between its least place and 0.
    zero = 1.001 * (a.zero + b.zero)
    if upper and operation is np.add:
        low = a.at[0] + b.at[0]
        x = np.append(a.at, b.at)
        weight = np.append(b.zero * a.mass, a.zero * b.mass)
        zero = a.zero * b.zero + 1.001 * float(weight @ (np.maximum(1 - x / low, 0) + EPS))
        add(np.maximum(x, low), weight * np.minimum(x / low, 1))
    # The longest chain of additions: within a block of rows, over the blocks, of a tail.
    roundings = max(CHUNK, a.at.size + b.at.size) + a.at.size + grid.size + 16
    error = math.expm1(math.log1p(a.error) + math.log1p(b.error) + roundings * EPS)
    shift = max(a.shift, b.shift) if operation is np.add else 1.001 * (a.shift + b.shift)
    shift += 200 * EPS
    escaped = 1.001 * (a.escaped + b.escaped)
    # Above, the upper parts go to the next places. Below, a cell's mass is at its mean.
    if upper:
        first[1:] += second[:-1]
        return _trim_tails(_RatioLaw(grid.at, first, zero, escaped, error, shift), mean, True)
    at = second[first > 0] / first[first > 0]
    law = _trim_tails(_RatioLaw(at, first[first > 0], error=error, shift=shift), mean, False)
    width = float((grid.step(law.at) / law.at).max())
    return replace(law, shift=law.shift + 3 * (width * error + roundings * EPS))


def _trim_tails(law: _RatioLaw, mean: float, upper: bool) -> _RatioLaw:
    """The law without the empty places and without its outermost TAILs, which are charged."""
    beyond = np.cumsum((law.at * law.mass)[::-1])[::-1]
    low = int(np.searchsorted(np.cumsum(law.mass), TAIL))
    high = int(np.count_nonzero(beyond >= TAIL * mean))
    at, mass, zero, escaped = law.at[low:high], law.mass[low:high].copy(), law.zero, law.escaped
    if upper:
        # A place below at[0] is split between it and 0, one above at[-1] between it and infinity.
        mass[0] += float(law.mass[:low] @ law.at[:low]) / float(at[0])
        zero += float(law.mass[:low].sum())
        mass[-1] += float(law.mass[high:].sum())
        escaped += 1.001 * float(law.mass[high:] @ law.at[high:])
    used = mass > 0
    return _RatioLaw(at[used], mass[used], zero, escaped, law.error, law.shift)


@lru_cache(maxsize=64)
def score_pairs(z: float, steps: int, participations: int) -> tuple[Discrete, ...]:
    """The pairs (forward, reverse) of a score of an epoch, the sum of its steps': a lower end.

    None where the noise is so small that no score is likely under both laws.

    A step's score is the number of thresholds of ``_thresholds`` below its output. Proven in
    docs/proofs/allocation.md, Theorem 5; nothing there rests on where the thresholds are.
    """
    # Wider cells where laws would be too long to be convolved in a second.
    for wider in (1, 2, 4, 8, 16):
        at = _thresholds(z, steps, participations, wider)
        edges = np.concatenate([[-np.inf], at, [np.inf]])
        without, there = (_trim_scores(0, normal_cells(edges, mean, z)) for mean in (0.0, 1.0))
        own, most = _sum_of_scores(there, participations)
        rest, others = _sum_of_scores(without, steps - participations)
        absent, longest = _sum_of_scores(without, steps)
        if max(own[1].size, absent[1].size, rest[1].size) <= _LONGEST:
            break
    else:
        return ()
    first, present = _add_scores(rest, own)
    # The scores that both laws hold: the rest is left out.
    low = max(first, absent[0])
    high = min(first + present.size, absent[0] + absent[1].size)
    if low >= high:
        return ()
    p, q = present[low - first : high - first], absent[1][low - absent[0] : high - absent[0]]
    # A leaf is known to 4e-13, a convolution adds a few units for each term of its sums.
    terms = max(longest, others, most, own[1].size, 1)
    rounding = math.expm1(steps * (1e-12 + (terms + 4) * EPS))
    out = []
    for mass, other in ((p, q), (q, p)):
        above = other + 4 * steps * RARE
        loss = np.log(np.maximum(mass, 1e-300) / above)
        order = np.argsort(loss, kind="stable")
        out.append(Discrete(loss[order], mass[order], 0.0, rounding, above[order]))
    return out[0], out[1]


def _thresholds(z: float, steps: int, participations: int, wider: int) -> Array:
    """Outputs at which log(1 + x e^((y - 1/2)/z^2)) passes the multiples of a width.

    For k of t steps Poisson's own score has x = q/(1 - q), one step the limit x -> 0. Best is where
    the terms x L/(1 + x L), the steps' chances to be the record's, add up to k in the outcomes that
    decide: there the k outputs are five deviations of their mean larger.
    """
    y = np.linspace(-10 * z, 10 * z, 2001)
    mass, log = np.exp(-0.5 * (y / z) ** 2), (y - 0.5) / z**2
    mass /= mass.sum()
    far = (1 + 5 * z / math.sqrt(participations)) / z**2

    def missing(log_x: float) -> float:
        """k less the sum of the chances."""
        rest, own = special.expit(log_x + log) @ mass, special.expit(log_x + log + far) @ mass
        return float(participations * (1 - own) - (steps - participations) * rest)

    log_x = bracket_decreasing(missing, -1e4, 1e4, rtol=1e-6)[0]
    score = np.logaddexp(0.0, log_x + log)
    deviation = math.sqrt(mass @ (score - mass @ score) ** 2)
    low, high = np.logaddexp(0.0, log_x + (np.asarray([-FAR, FAR]) * z + 0.5) / z**2).tolist()
    # Of 100 steps cells have a tenth of a deviation; what they lose falls with their square.
    share = wider * min(max(0.05, math.sqrt(steps) / 100), 0.5)
    most = max(CELLS, 16 * math.sqrt(steps) / share)
    at = low + share * deviation * np.arange(1, min((high - low) / (share * deviation), most))
    # log(e^s - 1) without an overflow.
    return np.unique(z * z * (at + np.log(-np.expm1(-at)) - log_x) + 0.5)


def _sum_of_scores(law: tuple[int, Array], count: int) -> tuple[tuple[int, Array], int]:
    """(the law of ``count`` independent scores, the longest of the factors of its convolutions)."""
    total, longest = (0, np.ones(1)), 1
    for digit in bin(count)[2:]:
        longest = max(longest, total[1].size)
        if longest > _LONGEST:
            break  # given up: the caller takes wider cells
        total = _add_scores(total, total)
        if digit == "1":
            total = _add_scores(total, law)
    return total, longest


def _add_scores(a: tuple[int, Array], b: tuple[int, Array]) -> tuple[int, Array]:
    """The law of a sum: (least value, masses). No term is negative, none is computed by an FFT."""
    return _trim_scores(a[0] + b[0], np.convolve(a[1], b[1]))


def _trim_scores(least: int, mass: Array) -> tuple[int, Array]:
    """The law without the outermost scores, which weigh at most ``RARE`` on either side."""
    low = int(np.searchsorted(np.cumsum(mass), RARE))
    high = mass.size - int(np.searchsorted(np.cumsum(mass[::-1]), RARE))
    return least + low, mass[low:high]
