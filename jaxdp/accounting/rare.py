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

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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
# Of epsilon. Two losses above the cap exceed it nearly for certain, the surer the higher the cap;
# the grid is the coarser for it.
_CAPS = (1.5, 3.0, 6.0, 12.0, 24.0)
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
    """One end of delta in one direction, near one epsilon.

    Attributes:
      side: tables of what dominates the losses (`side.high`), or of what they dominate.
      width: of the grid.
      cap: the loss at which outputs were cut.
    """

    side: _Side
    width: float
    cap: float

    def bound(self, epsilon: float) -> float:
        """At least delta(epsilon), or with tables of what is dominated at most that."""
        return self._upper(epsilon) if self.side.high else self._lower(epsilon)

    def _lower(self, epsilon: float) -> float:
        none, one = self.side.none(epsilon), self.side.one(epsilon)
        several, rounding, _ = _several(self.side.atoms, epsilon)
        return none[0] - none[1] + one[0] - one[1] + several - rounding

    def _upper(self, epsilon: float) -> float:
        none, one = self.side.none(epsilon), self.side.one(epsilon)
        several, rounding, probability = _several(self.side.atoms, epsilon)
        # Forward, what is above the grid is a large loss; backward it was cut off.
        cut = sum(n * atom.infinite for pair, atom, n in self.side.atoms if pair.reverse)
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
        orders = self._orders
        total = self._moments + (1 + orders) * (
            epsilon - 2 * min(a.top for _, a, _ in self.side.atoms)
        )
        total = total + orders * np.log(orders) - (1 + orders) * np.log1p(orders)
        return math.exp(min(float(total.min()), 700.0))

    @property
    def _orders(self) -> Array:
        return np.geomspace(0.05, 256, 40) / self.cap

    @functools.cached_property
    def _moments(self) -> Array:
        """Log moments of orders -(1 + c) of all steps' losses, those that are large included."""
        orders = self._orders
        total: Array = np.zeros(orders.size)
        for pair, atom, n in self.side.atoms:
            log_large = math.log(float(large(pair, atom.top, 0.0)[0]) + 1e-300)
            moment = log_moments(atom, self.width, -(1 + orders))
            moment = np.logaddexp(moment, log_large - (1 + orders) * atom.top)
            # What was rounded up on purpose: at most one grid width of 2e-13 of the mass.
            total += n * np.maximum(moment + 2e-13 * (1 + orders), 0.0)
        return total

    def _fallen(self, epsilon: float, probability: float) -> float:
        """The same where a loss fell below the grid, and was rounded up to it."""
        out = 0.0
        for pair, atom, n in self.side.atoms:
            lowest = atom.offset + self.width * float(atom.index[0])
            out += n * float(cells(pair, np.asarray([-np.inf, lowest]))[1][0])
        return math.exp(epsilon) * out * probability


def rare_delta(run: Run, relation: Relation, epsilon: float, tolerance: float = 2e-3) -> Bound:
    """Certified (lower, upper) delta at epsilon; otherwise as `rare_epsilon`."""
    known = {c: _Ends(0.0, math.inf) for c in compositions(run, relation, 1e-12)}
    for size in _SIZES:
        for composition, ends in known.items():
            known[composition] = _narrower(
                ends, functools.partial(_delta_end, composition, epsilon, size), tolerance
            )
        lower = max(e.lower for e in known.values())
        upper = min(1.0, max(e.upper for e in known.values()))
        if upper - lower <= tolerance * upper:
            break
    lower = min(lower, upper)
    return Bound(lower, 0.5 * (lower + upper), upper, "rare")


def _delta_end(
    composition: Composition, epsilon: float, size: int, high: bool, factor: float, _: float
) -> float:
    return tables(composition, epsilon, size, factor, high).bound(epsilon)


class _Ends(NamedTuple):
    """Certified ends of one direction so far, and the caps that may narrow them on a finer grid."""

    lower: float
    upper: float
    low_caps: tuple[float, ...] = _CAPS
    high_caps: tuple[float, ...] = _CAPS


def _narrower(ends: _Ends, ask: Callable[[bool, float, float], float], tolerance: float) -> _Ends:
    """The best of either end, all being certified, over the caps that may help.

    What more than one large loss adds shrinks with the cap and what the grid adds grows with it, so
    the two ends may want different caps.

    Args:
      ends: what is known.
      ask: (whether the upper end, cap, upper end so far) -> a certified end.
      tolerance: relative width that is enough.

    Raises:
      Unresolved: where no cap has an answer, or two contradict each other.
    """
    lower, upper, low_caps, high_caps = ends
    try:
        found, high_caps = _best(high_caps, lambda cap, best: ask(True, cap, min(upper, best)), -1)
    except Unresolved:
        if upper == math.inf:
            raise
        found = upper
    upper = min(upper, found)
    if upper - lower > tolerance * upper:
        found, low_caps = _best(low_caps, lambda cap, _: ask(False, cap, upper), 1)
        lower = max(lower, found)
    if lower > upper:
        raise Unresolved("bounds contradict each other")
    return _Ends(lower, upper, low_caps, high_caps)


def _best(
    caps: tuple[float, ...], ask: Callable[[float, float], float], sign: int
) -> tuple[float, tuple[float, ...]]:
    """(the smallest answer, or with sign 1 the largest; its cap and the next).

    Raises:
      Unresolved: where no cap has a smallest answer; the largest is 0 then.
    """
    best, chosen, refusal = -sign * math.inf, caps[0], Unresolved("no cap")
    for cap in caps:
        try:
            found = ask(cap, best)
        except Unresolved as error:
            refusal = error
            continue
        if found > 0 and sign * (found - best) <= 0:
            break
        if found > 0:
            best, chosen = found, cap
    if not math.isinf(best):
        return best, _CAPS[_CAPS.index(chosen) :][:2]
    if sign < 0:
        raise refusal
    return 0.0, caps


def tables(composition: Composition, epsilon: float, size: int, factor: float, high: bool) -> Rare:
    """Tables of one end and direction for epsilons near `epsilon`, cut at `factor` times it.

    Raises:
      Unresolved: where large losses are too frequent to be counted.
    """
    cap = factor * epsilon
    expected = sum(n * float(large(pair, cap, 0.0)[0]) for pair, n in composition.pairs)
    if expected > _MOST:
        raise Unresolved("large losses are not rare")
    if not 1e-9 < cap < 20 or composition.mu2 > 0:
        raise Unresolved("not a run of rarely sampled steps")
    return Rare(_side(composition, cap, epsilon, size, high), _SPAN * cap / size, cap)


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
    forward, *backward = compositions(run, relation, delta)
    guess, ends = _guess(forward, delta), _Ends(0.0, math.inf)
    for size in _SIZES:
        ask = functools.partial(_epsilon_end, forward, delta, guess, size)
        ends = _narrower(ends, ask, tolerance)
        if ends.upper - ends.lower <= tolerance * ends.upper:
            break
    if not all(_smaller(c, ends.upper, delta) for c in backward):
        raise Unresolved("the direction without large losses matters")
    return Bound(ends.lower, 0.5 * (ends.lower + ends.upper), ends.upper, "rare")


def _smaller(composition: Composition, epsilon: float, delta: float) -> bool:
    """Whether the direction without large losses is certainly below delta at epsilon."""
    if composition.ceiling() <= epsilon:
        return True
    for size, factor in itertools.product(_SIZES, _CAPS):
        try:
            if tables(composition, epsilon, size, factor, True).bound(epsilon) <= delta:
                return True
        except Unresolved:
            continue
    return False


def _epsilon_end(
    composition: Composition,
    delta: float,
    guess: float,
    size: int,
    high: bool,
    factor: float,
    upper: float,
) -> float:
    """One end of epsilon; the tables of the upper one are moved until they are about it."""
    near = upper if upper < math.inf else guess
    for _ in range(14):
        bound = tables(composition, near, size, factor, high).bound
        if not high:
            return _root(bound, delta, near, inside=True)
        try:
            found = _root(bound, delta, near)
        except Unresolved:
            near *= 3
            continue
        if abs(found - near) <= 0.2 * near:
            return found
        near = found
    raise Unresolved("the cap did not settle")


def _root(
    bound: Callable[[float], float], delta: float, near: float, inside: bool = False
) -> float:
    """Where the decreasing `bound` meets delta: the end above, or with `inside` the end below."""

    @functools.cache
    def excess(log_epsilon: float) -> float:
        value = bound(math.exp(log_epsilon))
        if math.isnan(value):
            raise Unresolved("not a number")
        return math.log(value / delta) if value > 0 else -math.inf

    low = high = math.log(near)
    step = min(max(2 * abs(excess(low)), 1e-4), 0.5)
    while excess(low) <= 0:
        if step > 20:
            return 0.0 if inside else math.exp(low)
        low, step = low - step, 2 * step
    while excess(high) > 0:
        high, step = high + step, 2 * step
        if high > math.log(near) + 2:
            raise Unresolved("no upper end")
    ends = bracket_decreasing(excess, low, high, rtol=1e-5 / max(abs(low), 1.0))
    return math.exp(ends[0] if inside else ends[1])
