"""Cuts of a composition's losses, and the window and tilt that its certificate needs.

Nothing proven rests on a choice made here, but for the bounds that say so: ``Plan.chernoff`` and
``shortfall``.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from jaxdp.accounting.base import Array, Pair, Unresolved
from jaxdp.accounting.convolve import log_moments, tilt
from jaxdp.accounting.discretise import Atoms, above

Kinds = tuple[tuple[Pair, int], ...]
Counted = Sequence[tuple[Atoms, int]]
Moments = Callable[[Array], Array]

SIZES = (1 << 13, 1 << 22)
_CAPS = (24.0, 12.0, 6.0, 3.0, 1.6)  # of epsilon
_OUTSIDE = 14.0  # nats: tilted probability that a window leaves outside
_ORDERS = np.geomspace(1e-9, 1e9, 46)


@dataclass(frozen=True)
class Plan:
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

    def width(self, size: int) -> float:
        """The grid width of a window of ``size`` points; point masses lie on the grid."""
        width = (self.last - self.first) / size
        count = math.floor(self.lattice / width)
        # Point masses between the two lie at fractions of their distance.
        count -= count % 120 if count >= 120 else 0
        if count:
            width = self.lattice / count
        return width

    def size(self, tolerance: float) -> int:
        """Points of a grid on which both ends are about ``tolerance`` (of epsilon) apart."""
        distance, weight, factor = self.spread
        size = SIZES[0]
        while size < SIZES[1]:
            width = (self.last - self.first) / size
            added = float(weight @ np.minimum(width * width / 6, width * distance / 2))
            if 1.2 * factor * added <= tolerance:
                break
            size *= 2
        return size

    def fine(self, tolerance: float) -> float:
        """Width of far cells, over their distance, that adds a tenth of the tolerance."""
        distance, weight, factor = self.spread
        added = factor * float(weight @ distance**2) / 6
        return min(0.02, math.sqrt(0.1 * tolerance / max(added, 1e-300)))


def best(kinds: Kinds, epsilon: float, log_delta: float) -> Plan:
    """The plan with the shortest window; one with a cap must halve it."""
    found = plan(kinds, epsilon, log_delta, math.inf)
    # Where delta is large no loss is rare.
    if epsilon < 1e-9 or log_delta > -3 or found.last - found.first < 30 * epsilon:
        return found
    for factor in _CAPS:
        other = plan(kinds, epsilon, log_delta, factor)
        if not other.split or other.last - other.first > 0.5 * (found.last - found.first):
            continue
        if _several(kinds, other, epsilon) - log_delta < -12:
            found = other
    return found


def chernoff(kinds: Kinds, epsilon: float, log_delta: float) -> float:
    """log of an upper bound on delta at epsilon."""
    return _tilted(kinds, epsilon, log_delta, math.inf)[-1]


def _tilted(
    kinds: Kinds, epsilon: float, log_delta: float, factor: float
) -> tuple[list[tuple[float, float]], tuple[float, ...], Counted, float, float, float]:
    """(spans, caps, coarse atoms, their grid width, saddle, log of a bound on delta).

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
    width = _coarse(epsilon, spans)
    atoms = _atoms(kinds, [low for low, _ in spans], caps, width)
    c, bound = _tilt(functools.partial(log_moments, atoms, width), epsilon)
    over = math.log(sum(n * a.over[0] for a, n in atoms) + 1e-320)
    return spans, caps, atoms, width, c, float(np.logaddexp(bound, over))


def plan(kinds: Kinds, epsilon: float, log_delta: float, factor: float) -> Plan:
    """The plan for a cap of ``factor`` epsilon."""
    spans, caps, atoms, width, c, bound = _tilted(kinds, epsilon, log_delta, factor)
    moments = functools.partial(log_moments, atoms, width)
    split = any(cap < high for cap, (_, high) in zip(caps, spans, strict=True))
    spread = *_spread(atoms, width, c), (c + 1) / max(epsilon, 1e-2 / c)
    # Where delta is near 1 the saddle is at 0; a window needs a tilt of about the spread.
    c = max(c, 2 / math.sqrt(max(float(spread[1] @ spread[0] ** 2), 1e-300)))
    c, reach = _line(moments, c, epsilon, log_delta, sum(n for _, n in kinds))
    if split:
        bulk = _window(moments, 0.0, _OUTSIDE)
        reach = min(reach[0], bulk[0]), max(reach[1], bulk[1])
    first, last = min(reach[0], epsilon), max(reach[1], epsilon)
    margin = 0.02 * (last - first)
    lows, lattice = tuple(low for low, _ in spans), _lattice(kinds, spans)
    return Plan(caps, lows, c, first - margin, last + margin, split, bound, spread, lattice)


def _atoms(
    kinds: Kinds, lows: Sequence[float], caps: Sequence[float], width: float
) -> list[tuple[Atoms, int]]:
    """Coarse atoms above each kind of step; the more steps, the less may each add."""
    return [
        (above(p, width, low, cap, min(max(3 / math.sqrt(n), 1e-3), 0.05)), n)
        for (p, n), low, cap in zip(kinds, lows, caps, strict=True)
    ]


def _line(
    moments: Moments, c: float, epsilon: float, log_delta: float, count: int
) -> tuple[float, tuple[float, float]]:
    """(tilt, window): the shortest window of tilts below the saddle.

    A lower tilt leaves losses behind that are too rare to matter. It costs digits: what is outside
    and what is rounded weighs more against delta.
    """
    best = c, (-math.inf, math.inf)
    for factor in (1.0, 0.7, 0.5, 0.35):
        lower = factor * c
        weight = float(moments(np.asarray([lower]))[0]) - lower * epsilon - log_delta
        reach = _window(moments, lower, _OUTSIDE + max(weight, 0.0))
        # Rounding is about this many nats below the tilted law.
        if factor < 1 and weight > 21 - math.log(count):
            break
        if reach[1] - reach[0] < 0.9 * (best[1][1] - best[1][0]):
            best = lower, reach
    return best


def _several(kinds: Kinds, plan: Plan, epsilon: float) -> float:
    """log of what two steps above the cap may add beyond their P - e^epsilon Q."""
    width = _coarse(epsilon, list(zip(plan.lows, plan.caps, strict=True)))
    atoms = _atoms(kinds, plan.lows, plan.caps, width)
    both, _ = two_or_more([(n, a.over[0]) for a, n in atoms])
    return math.log(both + 1e-320) + shortfall(atoms, width, epsilon)


def around(c: float) -> Array:
    """The orders on both sides of c at which Chernoff's bounds are tried."""
    if c == 0:
        far = np.geomspace(1e-3, 1e9, 37)
        return np.concatenate([-far[::-1], far])
    ratio = np.geomspace(0.02, 30, 22)
    return np.concatenate([c - ratio[::-1] * c, c + ratio * c])


def _lattice(kinds: Kinds, spans: list[tuple[float, float]]) -> float:
    """The distance of the largest loss from the point mass, where it is a point mass too; or 0."""
    for (pair, _), (_, high) in zip(kinds, spans, strict=True):
        near = np.asarray([high - 1e-9 * abs(high) - 1e-300])
        if float(pair.tails(near)[0][0]) - pair.infinite > 1e-6:
            return max(high - pair.center, high)
    return 0.0


def _coarse(epsilon: float, spans: list[tuple[float, float]]) -> float:
    """The grid width on which windows and tilts are chosen."""
    reach = min((high - low for low, high in spans if high > low), default=1.0)
    return 1e-5 * min(max(epsilon, 1e-4 * reach), reach)


def _tilt(moments: Moments, epsilon: float) -> tuple[float, float]:
    """(the order that makes Chernoff's bound on delta(epsilon) least, log of the bound).

    delta <= E[exp(c (sum - epsilon))] max_x e^(-cx) (1 - e^-x) (Canonne, Kamath and Steinke 2020,
    arXiv:2004.00010v5, proof of Proposition 12).
    """
    orders = _ORDERS
    for _ in range(3):
        c = orders
        with np.errstate(over="ignore", invalid="ignore"):
            bound = moments(c) - c * epsilon + c * np.log(c) - (1 + c) * np.log1p(c)
        bound = np.where(np.isnan(bound), np.inf, bound)
        best = int(np.argmin(bound))
        near = orders[max(best - 1, 0)], orders[min(best + 1, orders.size - 1)]
        c_best, least = float(orders[best]), float(bound[best])
        orders = np.geomspace(*near, 9)
    return c_best, min(least, 0.0)


def _window(moments: Moments, c: float, nats: float) -> tuple[float, float]:
    """(first, last) loss of a window that leaves e^-nats of the tilted law on either side."""
    orders = around(c)
    gain = moments(orders) - moments(np.asarray([c]))[0] + nats
    up, down = orders > c, orders < c
    last = (gain / np.where(up, orders - c, 1.0))[up].min()
    first = -(gain / np.where(down, c - orders, 1.0))[down].min()
    return float(first), float(last)


def shortfall(atoms: Counted, width: float, epsilon: float) -> float:
    """log of a bound on E[(e^(epsilon - sum) - 1)+], given two steps or more above the cap.

    Chernoff's, as in ``_tilt``, of the steps below it. How many these are is not known, so that
    only what raises a moment is counted. At most 0 is of use: then the event's probability bounds
    what it adds.
    """
    tops = [a.top for a, _ in atoms if a.over[0] > 0]
    if not tops or min(tops) < 0:
        return -math.inf if not tops else 0.0
    b = np.geomspace(1e-3, 1e9, 49)
    bound = b * np.log(b) - (1 + b) * np.log1p(b) - (1 + b) * (2 * min(tops) - epsilon)
    for atom, n in atoms:
        one = log_moments([(atom, 1)], width, -(1 + b)) - math.log1p(-min(atom.over[0], 1 - 1e-16))
        bound = bound + n * np.maximum(one, 0.0) * (1 + 1e-9)
    return min(float(np.nanmin(bound)) + 1e-3, 0.0)


def _spread(atoms: Counted, width: float, c: float) -> tuple[Array, Array]:
    """(distances of the losses from each step's point mass, their tilted weights times counts)."""
    distances, weights = [], []
    for atom, n in atoms:
        tilted, _, _ = tilt(atom, c * width)
        distances.append(np.abs(atom.index) * width)
        weights.append(n * tilted)
    return np.concatenate(distances), np.concatenate(weights)


def one_or_more(chances: list[tuple[int, float]]) -> float:
    """Probability of at least one of independent events, (number, probability) each."""
    return -math.expm1(sum(n * math.log1p(-min(p, 1 - 1e-16)) for n, p in chances))


def two_or_more(chances: list[tuple[int, float]]) -> tuple[float, float]:
    """(probability of at least two of independent events, bound on its rounding error).

    With l = -sum n log(1 - p) and s = sum n p/(1 - p) it is 1 - e^-l (1 + s).
    """
    rate = -sum(n * math.log1p(-min(p, 1 - 1e-16)) for n, p in chances)
    rest = sum(n * _odds_beyond(p) for n, p in chances)
    value = float(special.gammainc(2, rate)) - math.exp(-rate) * rest
    return max(value, 0.0), 1e-12 * (float(special.gammainc(2, rate)) + rest)


def _odds_beyond(p: float) -> float:
    """p/(1 - p) + log(1 - p), >= 0."""
    if p < 1e-3:
        return sum((1 - 1 / k) * p**k for k in range(2, 9))
    return p / (1 - p) + math.log1p(-p)
