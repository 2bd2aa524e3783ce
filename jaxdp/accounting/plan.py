"""Cuts of a composition's losses, and the window, tilt and grids that its certificate needs.

Nothing proven rests on a choice made here, but for the bounds that say so: ``chernoff``,
``shortfall``, ``most``, ``one_or_more`` and ``two_or_more``.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from jaxdp.accounting.base import Array, Pair, Unresolved
from jaxdp.accounting.grid import Atoms, above
from jaxdp.accounting.sums import (
    OUTSIDE,
    Counted,
    Layout,
    TiltedMoments,
    log_moments,
    tilt,
)

Kinds = tuple[tuple[Pair, int], ...]
Ends = tuple[tuple[float, float], ...]
_CAPS = (24.0, 12.0, 6.0, 3.0, 1.6, 0.9, 0.5, 0.3)  # of epsilon
_ORDERS = np.geomspace(1e-9, 1e9, 46)
SIZES = (1 << 12, 1 << 21)
LOST = 1e-3  # of the tolerance, in delta: what a lower end may give up
_LONG = 1 << 18  # points beyond which small losses are tried apart


@dataclass(frozen=True, eq=False)
class SumPlan:
    """Cuts of the losses, and the window and tilt of their sum.

    Attributes:
        caps: the largest small loss of each kind of step.
        lows: the least loss of interest of each.
        c: the tilt.
        first: the least loss of the window.
        last: the largest.
        split: True if losses above the caps are counted by themselves.
        chernoff: log of an upper bound on delta.
        spread: distances of the losses from each step's point mass, their tilted weights, and what
            a unit of variance adds to epsilon, relative.
        lattice: a distance that the grid should divide; 0 if there is none.
        atoms: coarse atoms above the steps, from which grids are chosen.
        grid: the width of their grid.
        log_delta: about where.
        outside: nats of probability that a window leaves outside, of the tilted and the plain law.
    """

    caps: tuple[float, ...]
    lows: tuple[float, ...]
    c: float
    first: float
    last: float
    split: bool
    chernoff: float
    spread: tuple[Array, Array, float]
    lattice: float
    atoms: Counted
    grid: float
    log_delta: float
    outside: tuple[float, float]


@functools.lru_cache(maxsize=8)
def moments(plan: SumPlan, c: float, small: Ends = ()) -> TiltedMoments:
    """Chernoff's bounds on sums of the coarse atoms, or the small of them, tilted by ``c``."""
    atoms, width = list(plan.atoms), plan.grid
    for i, (low, high) in enumerate(small):
        # The atoms of this kind's small losses, given that the loss is one of them.
        atom, n = atoms[i]
        loss = atom.offset + atom.index * width
        kept = (loss >= low - width) & (loss <= high + width)
        mass = atom.mass[kept] / atom.mass[kept].sum()
        atoms[i] = replace(atom, index=atom.index[kept], mass=mass), n
    return TiltedMoments(atoms, width, c)


def best(kinds: Kinds, epsilon: float, log_delta: float) -> SumPlan:
    """The plan with the shortest window; one with a cap must halve it, or save digits."""
    found = plan(kinds, epsilon, log_delta, math.inf)
    # Where delta is large no loss is rare.
    short = found.last - found.first < 30 * epsilon and found.chernoff - log_delta < 8
    if epsilon < 1e-9 or log_delta > -3 or short:
        return found
    for factor in _CAPS:
        other = plan(kinds, epsilon, log_delta, factor)
        shorter = other.last - other.first <= 0.5 * (found.last - found.first)
        clearer = other.chernoff < found.chernoff - 2
        if not other.split or not (clearer or (shorter and other.chernoff < found.chernoff + 2)):
            continue
        # What two steps above the cap may add beyond their P - e^epsilon Q must be little.
        spans = list(zip(other.lows, other.caps, strict=True))
        atoms, width = _coarse(kinds, epsilon, spans, other.caps)
        both, _ = two_or_more([(n, a.over[0]) for a, n in atoms])
        several = math.log(both + 1e-320) + shortfall([(atoms, width)], epsilon)
        if several - log_delta < -12:
            found = other
    return found


def chernoff(kinds: Kinds, epsilon: float, log_delta: float) -> float:
    """log of an upper bound on delta at epsilon."""
    return _saddle(kinds, epsilon, log_delta, math.inf)[-1]


def _coarse(
    kinds: Kinds, epsilon: float, spans: Sequence[tuple[float, float]], caps: Sequence[float]
) -> tuple[list[tuple[Atoms, int]], float]:
    """(coarse atoms above each kind of step, the width of their grid)."""
    reach = min((high - low for low, high in spans if high > low), default=1.0)
    # The widest kind's grid must be numbered, too.
    most = max(high - low for low, high in spans)
    width = max(1e-5 * min(max(epsilon, 1e-4 * reach), reach), 1e-14 * most)
    # The more steps, the less may each add.
    atoms = [
        (above(p, width, low, cap, min(max(3 / math.sqrt(n), 3e-3), 0.05)), n)
        for (p, n), (low, _), cap in zip(kinds, spans, caps, strict=True)
    ]
    return atoms, width


@functools.lru_cache(maxsize=4)
def _saddle(
    kinds: Kinds, epsilon: float, log_delta: float, factor: float
) -> tuple[list[tuple[float, float]], tuple[float, ...], Counted, float, float, float]:
    """(spans, caps, coarse atoms, their grid width, the best order c, log of its bound on delta).

    delta <= E[exp(c (sum - epsilon))] max_x e^(-cx) (1 - e^-x) (Canonne, Kamath and Steinke 2020,
    arXiv:2004.00010v5, proof of Proposition 12), and the probability of what is above the caps.

    Raises:
        Unresolved: losses are too large to be put on a grid.
    """
    tail = math.exp(max(log_delta, -640.0) - 23) / sum(n for _, n in kinds)
    spans = [pair.span(tail) for pair, _ in kinds]
    if not all(high - low < 1e9 for low, high in spans):
        raise Unresolved("losses beyond 1e9")
    caps = tuple(
        min(high, max(factor * epsilon, p.center + 1e-9))
        for (p, _), (_, high) in zip(kinds, spans, strict=True)
    )
    atoms, width = _coarse(kinds, epsilon, spans, caps)
    # Where c times the largest sum is huge, the bound is a difference of numbers that have no
    # digits left for it.
    reach = sum(n * (abs(a.offset) + width * float(np.abs(a.index).max())) for a, n in atoms)
    orders = _ORDERS
    for _ in range(3):
        c = orders
        with np.errstate(over="ignore", invalid="ignore"):
            bound = log_moments(atoms, width, c) - c * epsilon + c * np.log(c)
            bound = bound - (1 + c) * np.log1p(c)
            lost = 1e-15 * c * (reach + epsilon)
        bound = np.where(np.isnan(bound), np.inf, bound + np.where(lost > 1e-6, lost, 0.0))
        k = int(np.argmin(bound))
        orders = np.geomspace(orders[max(k - 1, 0)], orders[min(k + 1, orders.size - 1)], 9)
    over = math.log(sum(n * a.over[0] for a, n in atoms) + 1e-320)
    least = float(np.logaddexp(min(float(bound[k]), 0.0), over))
    return spans, caps, atoms, width, float(c[k]), least


def plan(kinds: Kinds, epsilon: float, log_delta: float, factor: float) -> SumPlan:
    """The plan for a cap of ``factor`` epsilon."""
    spans, caps, atoms, width, c, bound = _saddle(kinds, epsilon, log_delta, factor)
    split = any(cap < high for cap, (_, high) in zip(caps, spans, strict=True))
    counts = np.asarray([n for _, n in atoms])
    # Distances of the losses from each step's point mass, with their tilted weights.
    distance = np.concatenate([np.abs(atom.index) * width for atom, _ in atoms])
    weight = np.concatenate([n * tilt(atom, c * width)[0] for atom, n in atoms])
    spread = distance, weight, (c + 1) / max(epsilon, 1e-2 / c)

    # Where delta is near 1 the saddle is at 0; a window needs a tilt of about the spread, whose law
    # outweighs what lies about epsilon by e^20 at most.
    variance = float(weight @ distance**2)
    most = 2 / math.sqrt(variance) if variance > 1e-290 else 0.0
    while most > c and log_moments(atoms, width, np.asarray([most]))[0] > most * epsilon + 20:
        most /= 2
    c = max(c, most)

    # The shortest window of tilts below. A lower tilt leaves losses behind that are too rare to
    # matter. It costs digits: what is outside and what is rounded weighs more against delta.
    chosen, window, nats = c, (-math.inf, math.inf), OUTSIDE
    for share in (1.0, 0.7, 0.5, 0.35):
        lower = share * c
        total = float(log_moments(atoms, width, np.asarray([lower]))[0])
        excess = total - lower * epsilon - log_delta
        # Rounding is about this many nats below the tilted law.
        if share < 1 and excess > 21 - math.log(counts.sum()):
            break
        # In delta no sum weighs more than max_x e^(-cx) (1 - e^-x).
        excess += lower * math.log(lower) - (1 + lower) * math.log1p(lower)
        outside = OUTSIDE + max(excess, 0.0)
        reach = TiltedMoments(atoms, width, lower).window(counts, outside)
        if reach[1] - reach[0] < 0.9 * (window[1] - window[0]):
            chosen, window, nats = lower, reach, outside

    # Beside one loss above a cap the plain law of the others counts.
    over = math.log(sum(n * a.over[0] for a, n in atoms) + 1e-320)
    single = max(over - log_delta, 0.0) + OUTSIDE
    if split:
        bulk = TiltedMoments(atoms, width, 0.0).window(counts, single)
        window = min(window[0], bulk[0]), max(window[1], bulk[1])
    first, last = min(window[0], epsilon), max(window[1], epsilon)
    margin = 0.02 * (last - first)

    # The distance of the largest loss from the point mass, where it is a point mass too.
    lattice = 0.0
    for (pair, _), (_, high) in zip(kinds, spans, strict=True):
        near = np.asarray([high - 1e-9 * abs(high) - 1e-300])
        if not lattice and float(pair.tails(near)[0][0]) - pair.infinite > 1e-6:
            lattice = max(high - pair.center, high)
    return SumPlan(
        caps=caps,
        lows=tuple(low for low, _ in spans),
        c=chosen,
        first=first - margin,
        last=last + margin,
        split=split,
        chernoff=bound,
        spread=spread,
        lattice=lattice,
        atoms=atoms,
        grid=width,
        log_delta=log_delta,
        outside=(nats, single),
    )


def shortfall(groups: Sequence[tuple[Counted, float]], epsilon: float) -> float:
    """log of a bound on E[(e^(epsilon - sum) - 1)+], given two steps or more above the cap.

    Chernoff's, as in ``_saddle``, of the steps below it. How many these are is not known, so that
    only what raises a moment is counted. At most 0 is of use: then the event's probability bounds
    what it adds. Groups are of atoms and the widths of their grids.
    """
    tops = [a.top for atoms, _ in groups for a, _ in atoms if a.over[0] > 0]
    if not tops or min(tops) < 0:
        return -math.inf if not tops else 0.0
    b = np.geomspace(1e-3, 1e9, 49)
    bound = b * np.log(b) - (1 + b) * np.log1p(b) - (1 + b) * (2 * min(tops) - epsilon)
    for atom, n, width in ((a, n, width) for atoms, width in groups for a, n in atoms):
        one = log_moments([(atom, 1)], width, -(1 + b)) - math.log1p(-min(atom.over[0], 1 - 1e-16))
        bound = bound + n * np.maximum(one, 0.0) * (1 + 1e-9)
    return min(float(np.nanmin(bound)) + 1e-3, 0.0)


def one_or_more(chances: list[tuple[int, float]]) -> float:
    """Probability of at least one of independent events, (number, probability) each."""
    return -math.expm1(sum(n * math.log1p(-min(p, 1 - 1e-16)) for n, p in chances))


def two_or_more(chances: list[tuple[int, float]]) -> tuple[float, float]:
    """(probability of at least two of independent events, bound on its rounding error).

    With l = -sum n log(1 - p) and s = sum n p/(1 - p) it is 1 - e^-l (1 + s).
    """
    rate = -sum(n * math.log1p(-min(p, 1 - 1e-16)) for n, p in chances)
    rest = 0.0
    for n, p in chances:
        # p/(1 - p) + log(1 - p), >= 0.
        odds = sum((1 - 1 / k) * p**k for k in range(2, 9))
        rest += n * (odds if p < 1e-3 else p / (1 - p) + math.log1p(-p))
    value = float(special.gammainc(2, rate)) - math.exp(-rate) * rest
    return max(value, 0.0), 1e-12 * (float(special.gammainc(2, rate)) + rest)


def most(n: int, chance: float, log_target: float) -> int:
    """A number that a binomial variable exceeds with a probability of e^log_target at most.

    Chernoff's bound: P(K >= k) <= e^(-n p) (e n p/k)^k for k > n p (Hoeffding 1963, Theorem 1,
    with 1 - p <= e^-p).
    """
    mean, k = n * chance, math.ceil(n * chance) + 1
    while mean > 0 and k <= n and k * (1 + math.log(mean / k)) - mean > log_target - 1e-6:
        k += max(k // 100, 1)
    return min(k - 1, n)


@functools.lru_cache(maxsize=8)
def layout(plan: SumPlan, tolerance: float) -> Layout:
    """Grids on which both ends are about ``tolerance`` (of epsilon) apart, if any are.

    One grid; or one for bunches of steps and a coarser one for their sum; or small losses apart
    from large ones, which go to the coarser one at once. Whichever has the fewest points.
    """
    reach = plan.last - plan.first
    needed = reach / _width(plan, tolerance)
    size = _points(needed)
    # A width that is hardly larger, on whose grid point masses lie. Those between the two lie at
    # fractions of their distance.
    width = reach / size
    count = math.floor(plan.lattice / width)
    count -= count % 120 if count >= 120 else 0
    width = plan.lattice / count if count else width
    best = Layout((width,), 1, size, size if needed <= SIZES[1] else math.inf)
    if plan.lattice > width or size < 1 << 14:
        return best
    best = _better(best, _bunched(plan, True, 0.25 * tolerance))
    if best.points > _LONG:
        for power in range(2, 22, 2):
            if small := _small(plan, reach * 2.0**-power, tolerance):
                best = _better(best, _bunched(plan, False, tolerance / 4, small))
                best = _better(best, _bunched(plan, True, tolerance / 6, small))
    return best


def _better(best: Layout, other: Layout | None) -> Layout:
    return other if other and other.points < 0.6 * best.points else best


def _small(plan: SumPlan, reach: float, tolerance: float) -> Ends:
    """Ends of the small losses, all but those ``reach`` from a step's point mass; () if of no use.

    A lower end gives up as many small losses as there may be large ones.
    """
    ends, lost = [], 0.0
    for (atom, n), low, cap in zip(plan.atoms, plan.lows, plan.caps, strict=True):
        # A point mass at the least loss is small, too: the interval is open there.
        first, last = max(atom.offset - reach, low) - plan.grid, min(atom.offset + reach, cap)
        loss = atom.offset + atom.index * plan.grid
        small = (loss >= first - plan.grid) & (loss <= last + plan.grid)
        chance = float(atom.mass[~small].sum()) + atom.over[0]
        if not small.any() or not chance < 0.01:
            return ()
        given_up = most(n, chance, plan.log_delta + math.log(LOST * tolerance))
        # A small loss counts for as much as it exceeds the least that it may be on average.
        mass = atom.mass[small]
        gain = np.exp(plan.c * (loss[small] - loss[small].max()))
        with np.errstate(divide="ignore"):
            second = np.log(mass) - loss[small]
        peak = float(second.max())
        least = math.log(float(mass.sum())) - peak - math.log(float(np.exp(second - peak).sum()))
        total = float(mass @ gain)
        if not total > 0:  # so steep a tilt leaves none of them
            return ()
        lost += given_up * abs(float(mass * gain @ loss[small]) / total - least)
        ends.append((first, last))
    return tuple(ends) if lost < 0.1 * tolerance * (plan.c + 1) / plan.spread[2] else ()


def _bunched(plan: SumPlan, several: bool, tolerance: float, small: Ends = ()) -> Layout | None:
    """A fine grid for bunches and a coarse one for their sum, each of which adds ``tolerance``.

    With ``small`` losses apart the bunches are of those, and the coarse grid is fine enough for the
    large ones. There is one bunch alone unless ``several``. None where that is of no use.
    """
    distance, weight, factor = plan.spread
    counts = np.asarray([n for _, n in plan.atoms])
    bunches = round(math.sqrt(float(counts.max()))) if several else 1
    fine, coarse = _width(plan, tolerance), math.sqrt(5 * tolerance / (factor * bunches))
    if small:
        far = distance > max(high - low for low, high in small) / 2
        fine = _width(plan, tolerance, (distance[~far], weight[~far]))
        coarse = min(coarse, _width(plan, tolerance, (distance[far], weight[far])))
    if (several and bunches < 16) or coarse < 4 * fine:
        return None
    # The points of the last window, and of a bunch's under either tilt.
    counted = [(plan.last - plan.first) / coarse]
    size = _points(counted[0])
    coarse = (plan.last - plan.first) / size
    nats, part = 2 + math.log(bunches), counts // bunches
    for c, outside in zip((plan.c, 0.0) if plan.split else (plan.c,), plan.outside, strict=False):
        first, last = moments(plan, c, small).window(part, outside + nats)
        counted.append((last - first) / fine)
    points = sum(_points(n) if n <= SIZES[1] else math.inf for n in counted)
    # Every bunch brings the rounding of its transform.
    noise = 3e-13 * math.sqrt(_points(counted[1])) * bunches
    noise *= math.exp(min(max(plan.outside) - OUTSIDE, 700.0)) * factor / (plan.c * (plan.c + 1))
    points *= max(1.0, noise / tolerance)
    return Layout((fine, coarse), bunches, size, points, small)


def _width(plan: SumPlan, tolerance: float, spread: tuple[Array, Array] | None = None) -> float:
    """The widest grid of single steps that adds at most ``tolerance`` of epsilon."""
    *whole, factor = plan.spread
    distance, weight = spread or whole
    reach = plan.last - plan.first
    low, high = math.log(reach / 2**40), math.log(reach / SIZES[0])
    for _ in range(12):
        middle = 0.5 * (low + high)
        width = math.exp(middle)
        added = float(weight @ np.minimum(width * width / 6, width * distance / 2))
        enough = 1.2 * factor * added <= tolerance
        low, high = (middle, high) if enough else (low, middle)
    return math.exp(low)


def _points(count: float) -> int:
    """The power of two that is not below ``count``, within the sizes that are used."""
    return 1 << math.ceil(math.log2(min(max(count, SIZES[0]), SIZES[1])))
