"""Certified bounds for rarely sampled steps: the few large losses are counted, the rest convolved.

Where q is tiny and noise small, one step can lose far more than all others together, and a grid
that holds its tail is too coarse for the rest. So the outputs of every step are cut at a loss `cap`
near epsilon, and delta is the sum over the number of steps with a larger loss of what that adds:

* none: the grid of `pld`, which now ends at the cap;
* one: the law of the others on that grid, against the large loss's privacy profile in closed form;
* more: at most (P - e^epsilon Q) of that event where the loss exceeds epsilon for certain; where it
  may not, the rest by Chernoff's bound.

Which steps had a large loss is part of the output, so the parts add up, and replacing the small
losses by dominating (or merged) ones bounds each.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special

from jaxdp.accounting.bounds import Bound, Relation
from jaxdp.accounting.canonical import Run
from jaxdp.accounting.exact import compositions
from jaxdp.accounting.loss import Array, Pair
from jaxdp.accounting.pld import Atoms, cells, inverse_loss, pessimistic
from jaxdp.accounting.roots import bracket_decreasing
from jaxdp.accounting.saddle import Composition, Unresolved
from jaxdp.accounting.sums import Grid, Law, contracted, log_moments

_SIZES = (1 << 14, 1 << 17, 1 << 18, 1 << 19)
_CAPS = (1.5, 3.0, 6.0)  # of epsilon; two losses above the cap exceed it nearly for certain
_SPAN = 16.0  # window of the grid, in caps
_BELOW = 11.0  # of them below epsilon
_LOWEST = 8.0  # losses below minus as many caps are rounded
_MOST = 0.15  # expected number of large losses beyond which the cap is raised


@dataclass(frozen=True)
class _Capped(Composition):
    """A composition whose outputs end where one loss reaches `cap`."""

    cap: float = 0.0

    def window(self, pair: Pair) -> tuple[float, float]:
        left, right = super().window(pair)
        if pair.reverse:
            return left, right
        return left, min(right, float(inverse_loss(pair, np.asarray([self.cap]))[0]))


def large(pair: Pair, at: float | Array, epsilon: float | Array) -> tuple[Array, Array, Array]:
    """First and second law's probability beyond the output where the loss is `at`, and P - e^eps Q.

    The last is accurate also where the two nearly cancel.
    """
    if pair.reverse:
        zero = np.zeros(np.broadcast_shapes(np.shape(at), np.shape(epsilon)))
        return zero, zero, zero
    z, q = pair.step.noise_multiplier, pair.step.sampling_prob
    x = inverse_loss(pair, np.asarray(at))
    none, sampled = special.ndtr(-x / z), special.ndtr((1 - x) / z)
    first = (1 - q) * none + q * sampled
    if pair.relation is Relation.REPLACE_ONE:
        apart = special.ndtr((-1 - x) / z)
        second = (1 - q) * none + q * apart
        return first, second, q * (sampled - apart) - np.expm1(epsilon) * second
    return first, none, q * (sampled - none) - np.expm1(epsilon) * none


@dataclass(frozen=True)
class _Side:
    """Everything needed for one end of delta.

    Attributes:
      atoms: (pair, its small losses, count).
      alone: law of all small losses.
      others: for each pair the law of all other steps' small losses, untilted.
      high: whether this is the upper end.
    """

    atoms: list[tuple[Pair, Atoms, int]]
    alone: Law
    others: list[Law]
    high: bool

    def none(self, epsilon: float) -> tuple[float, float]:
        """(what the event without large losses adds to delta, its error)."""
        excess = np.maximum(self.alone.losses - epsilon, 0.0)
        return self.alone.mean(-np.expm1(-excess), 1.0)

    def one(self, epsilon: float) -> tuple[float, float]:
        """(what the events with one large loss add to delta, its error)."""
        value = error = 0.0
        for (pair, atom, n), law in zip(self.atoms, self.others, strict=True):
            if pair.reverse:
                continue
            gain = self._profile(pair, atom.top, epsilon - law.losses)
            found = law.mean(gain, float(large(pair, atom.top, 0.0)[0]))
            value += n * found[0]
            error += n * (found[1] + 1e-14 * float(large(pair, atom.top, 0.0)[0]))
        return value, error

    def _profile(self, pair: Pair, top: float, missing: Array) -> Array:
        """What one large loss adds where the others leave `missing` (decreasing) to epsilon.

        A convex function of e^missing, asked at every 32nd point: between them its chord for an
        upper end, the tangents (the slope is the second law's probability) for a lower one.
        """
        nodes = np.append(missing[::32], missing[-1])
        _, slope, value = large(pair, np.maximum(nodes, top), nodes)
        at, x = np.expm1(nodes), np.expm1(missing)
        if self.high:
            return np.maximum(np.interp(x, at[::-1], value[::-1]), 0.0)
        i = np.arange(missing.size) // 32
        above = value[i] + slope[i] * (at[i] - x)
        below = value[i + 1] - slope[i + 1] * (x - at[i + 1])
        return np.maximum(np.maximum(above, below), 0.0)


def _small(
    composition: Composition, cap: float, width: float, pess: bool
) -> list[tuple[Pair, Atoms, int]]:
    capped = _Capped(composition.pairs, composition.mu2, composition.log_tail, cap)
    out = []
    for pair, n in composition.pairs:
        if pess:
            atom = pessimistic(capped, pair, width, _LOWEST / 2 * cap)
        else:
            atom = contracted(capped, pair, width, _LOWEST * cap)
        out.append((pair, atom, n))
    return out


def _side(composition: Composition, cap: float, epsilon: float, size: int, pess: bool) -> _Side:
    """Tables for one end of delta near `epsilon`."""
    width = _SPAN * cap / size
    atoms = _small(composition, cap, width, pess)
    positive = np.geomspace(0.25, 64, 17) / cap
    orders = np.concatenate([-positive[::-1], [0.0], positive])
    grid = Grid(epsilon - _BELOW * cap, width, size, orders, epsilon)
    each = [log_moments(a, width, orders) for _, a, _ in atoms]
    total: Array = sum((n * k for (_, _, n), k in zip(atoms, each, strict=True)), 0.0 * orders)

    def harm(tilt: int) -> float:
        """Log of about the error that this tilt leaves in the event without large losses."""
        c = float(orders[tilt])
        wrapped = sum(grid.outside(total, tilt)) + 1e-12
        return float(total[tilt]) - c * epsilon - math.log(c) + math.log(wrapped)

    best = min(range(positive.size + 1, orders.size), key=harm)
    alone = Law([(a, n) for _, a, n in atoms], grid, total, best)
    others = []
    for i in range(len(atoms)):
        rest = [(a, n - (i == j)) for j, (_, a, n) in enumerate(atoms)]
        others.append(Law(rest, grid, total - each[i], positive.size))
    return _Side(atoms, alone, others, pess)


def _several(atoms: list[tuple[Pair, Atoms, int]], epsilon: float) -> tuple[float, float, float]:
    """(P - e^epsilon Q of the event of two or more large losses, its rounding, bound on P)."""
    counts = []
    for which in (0, 1):
        law: Array = np.asarray([1.0])
        for pair, atom, n in atoms:
            p = float(large(pair, atom.top, 0.0)[which])
            pmf = [math.exp(n * math.log1p(-p))]
            for k in range(1, min(n, 30) + 1):
                pmf.append(pmf[-1] * (n - k + 1) / k * p / (1 - p))
            law = np.convolve(law, pmf)[:31]
        counts.append(law[2:])
    first, second = counts
    value = float((first - math.exp(epsilon) * second).sum())
    size = float(first.sum() + math.exp(min(epsilon, 700.0)) * second.sum())
    expected = sum(n * float(large(pair, atom.top, 0.0)[0]) for pair, atom, n in atoms)
    return value, 1e-11 * size + 1e-30, 0.5 * expected**2


@dataclass(frozen=True)
class Rare:
    """delta of one direction near one epsilon, from below and from above.

    Attributes:
      low: tables of what the losses dominate.
      high: tables of what dominates them.
      width: of the grid.
      cap: the loss at which outputs were cut.
    """

    low: _Side
    high: _Side
    width: float
    cap: float

    def lower(self, epsilon: float) -> float:
        """At most delta(epsilon)."""
        none, one = self.low.none(epsilon), self.low.one(epsilon)
        several, rounding, _ = _several(self.low.atoms, epsilon)
        return none[0] - none[1] + one[0] - one[1] + several - rounding

    def upper(self, epsilon: float) -> float:
        """At least delta(epsilon)."""
        none, one = self.high.none(epsilon), self.high.one(epsilon)
        several, rounding, probability = _several(self.high.atoms, epsilon)
        # Forward, what is above the grid is a large loss; backward it was cut off.
        cut = sum(n * atom.infinite for pair, atom, n in self.high.atoms if pair.reverse)
        return (
            cut
            + sum(none)
            + sum(one)
            + several
            + rounding
            + probability * self._shortfall(epsilon)
            + self._fallen(epsilon, probability)
        )

    def _shortfall(self, epsilon: float) -> float:
        """Bound on E[(e^(epsilon - loss) - 1)+] given two large losses, by Chernoff.

        (e^y - 1)+ <= e^((1+c) y) c^c/(1+c)^(1+c); connecting the dots spreads e^-loss at an
        unchanged mean, so its moments of order 1+c >= 1 are not below the true ones.
        """
        orders = np.geomspace(0.05, 256, 40) / self.cap
        total: Array = (1 + orders) * (epsilon - 2 * min(a.top for _, a, _ in self.high.atoms))
        for pair, atom, n in self.high.atoms:
            # The other steps' losses, those that are large too included.
            log_large = math.log(float(large(pair, atom.top, 0.0)[0]) + 1e-300)
            moment = log_moments(atom, self.width, -(1 + orders))
            moment = np.logaddexp(moment, log_large - (1 + orders) * atom.top)
            # What was rounded up on purpose: at most one grid width of 2e-13 of the mass.
            total += n * np.maximum(moment + 2e-13 * (1 + orders), 0.0)
        total += orders * np.log(orders) - (1 + orders) * np.log1p(orders)
        return math.exp(min(float(total.min()), 700.0))

    def _fallen(self, epsilon: float, probability: float) -> float:
        """The same where a loss fell below the grid, and was rounded up to it."""
        out = 0.0
        for pair, atom, n in self.high.atoms:
            lowest = atom.offset + self.width * float(atom.index[0])
            out += n * float(cells(pair, np.asarray([-np.inf, lowest]))[1][0])
        return math.exp(epsilon) * out * probability


def rare_delta(run: Run, relation: Relation, epsilon: float, tolerance: float = 2e-3) -> Bound:
    """Certified (lower, upper) delta at epsilon; otherwise as `rare_epsilon`."""
    for size in _SIZES:
        lower = upper = 0.0
        for composition in compositions(run, relation, 1e-12):
            found = tables(composition, epsilon, size)
            lower, upper = max(lower, found.lower(epsilon)), max(upper, found.upper(epsilon))
        if upper - lower <= tolerance * upper:
            break
    upper = min(upper, 1.0)
    return Bound(min(lower, upper), 0.5 * (lower + upper), upper, "rare")


def tables(composition: Composition, epsilon: float, size: int) -> Rare:
    """Tables of one direction for epsilons near `epsilon`.

    Raises:
      Unresolved: where large losses are too frequent to be counted.
    """
    for factor in _CAPS:
        cap = factor * epsilon
        expected = sum(n * float(large(pair, cap, 0.0)[0]) for pair, n in composition.pairs)
        if expected <= _MOST:
            break
    else:
        raise Unresolved("large losses are not rare")
    if not 1e-9 < cap < 20 or composition.mu2 > 0:
        raise Unresolved("not a run of rarely sampled steps")
    low, high = (_side(composition, cap, epsilon, size, pess) for pess in (False, True))
    return Rare(low, high, _SPAN * cap / size, cap)


def _guess(composition: Composition, delta: float) -> float:
    """Epsilon as if only one step were taken at a time: near the truth where that is rare."""

    def excess(log_epsilon: float) -> float:
        epsilon = math.exp(log_epsilon)
        profile = [n * float(large(p, epsilon, epsilon)[2]) for p, n in composition.pairs]
        return sum(profile) - delta

    if not excess(-40.0) > 0 >= excess(4.0):
        raise Unresolved("no single step loses that much")
    return math.exp(bracket_decreasing(excess, -40.0, 4.0, rtol=1e-4)[1])


def rare_epsilon(run: Run, relation: Relation, delta: float, tolerance: float = 9e-4) -> Bound:
    """Certified (lower, upper) epsilon at delta; the grid is refined to a relative `tolerance`.

    Raises:
      Unresolved: where it does not apply, or gives no finite answer.
    """
    near: dict[Composition, float] = {}
    for size in _SIZES:
        ends = [0.0, 0.0]
        for composition in compositions(run, relation, delta):
            if composition.ceiling() == math.inf:
                start = near.get(composition) or _guess(composition, delta)
                lower, upper = _one_way(composition, delta, size, start)
                near[composition] = upper
                ends = [max(ends[0], lower), max(ends[1], upper)]
                continue
            # No large losses this way: it only has to be seen to be smaller.
            known = composition.ceiling() <= ends[1]
            if not known and tables(composition, ends[1], size).upper(ends[1]) > delta:
                raise Unresolved("the direction without large losses matters")
        if ends[1] - ends[0] <= tolerance * ends[1]:
            break
    return Bound(ends[0], 0.5 * sum(ends), ends[1], "rare")


def _one_way(
    composition: Composition, delta: float, size: int, epsilon: float
) -> tuple[float, float]:
    for _ in range(6):
        found = tables(composition, epsilon, size)
        upper = _root(found.upper, delta, epsilon)
        if abs(upper - epsilon) <= 0.2 * epsilon:
            break
        epsilon = upper
    else:
        raise Unresolved("the cap did not settle")
    return _root(found.lower, delta, upper, inside=True), upper


def _root(
    bound: Callable[[float], float], delta: float, near: float, inside: bool = False
) -> float:
    """Where the decreasing `bound` meets delta: the end above, or with `inside` the end below."""

    def excess(log_epsilon: float) -> float:
        return bound(math.exp(log_epsilon)) - delta

    low = high = math.log(near)
    step = 1e-3
    while excess(low) <= 0:
        low -= step
        step *= 4
        if step > 20:
            return 0.0 if inside else math.exp(low)
    step = 1e-3
    while excess(high) > 0:
        high += step
        step *= 4
        if step > 2:
            raise Unresolved("no upper end")
    ends = bracket_decreasing(excess, low, high, rtol=1e-5 / max(abs(low), 1.0))
    return math.exp(ends[0] if inside else ends[1])
