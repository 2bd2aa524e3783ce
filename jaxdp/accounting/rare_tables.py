"""Tables that bound delta where single large losses are rare; ``rare`` uses them."""

import functools
import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.loss import Array, Pair
from jaxdp.accounting.pld import Atoms, cells, inverse_loss, pessimistic
from jaxdp.accounting.saddle import Composition, Unresolved
from jaxdp.accounting.sums import Grid, Law, contracted, log_moments

_SPAN = 16.0  # window of the grid, in caps
_BELOW = 11.0  # of them below epsilon
_LOWEST = 8.0  # losses below minus as many caps are rounded
_MOST = 0.15  # expected number of large losses beyond which the cap is refused


@dataclass(frozen=True)
class _Capped(Composition):
    """A composition whose outputs end where one loss reaches ``cap``."""

    cap: float = 0.0

    def window(self, pair: Pair) -> tuple[float, float]:
        left, right = super().window(pair)
        if pair.reverse:
            return left, right
        return left, min(right, float(inverse_loss(pair, np.asarray([self.cap]))[0]))


def large(pair: Pair, at: float | Array, epsilon: float | Array) -> tuple[Array, Array, Array]:
    """(P, Q, P - e^epsilon Q) of the outputs beyond the one where the loss is ``at``.

    P and Q are the first and second law's probability. The difference is accurate also where the
    two nearly cancel.
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
    """The tables for one end (lower or upper) of delta.

    Attributes:
        atoms: (pair, its small losses, count).
        alone: law of all small losses.
        others: for each pair the law of all other steps' small losses, untilted.
        high: True for the upper end.
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
        """The delta that one large loss adds where others leave ``missing`` (decreasing).

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
    """Tables for one end of delta near ``epsilon``."""
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
    """One end (lower or upper) of delta in one direction, near one epsilon.

    Attributes:
        side: tables of what dominates the losses (``side.high``), or of what they dominate.
        width: of the grid.
        cap: the loss at which outputs were cut.
    """

    side: _Side
    width: float
    cap: float

    def bound(self, epsilon: float) -> float:
        """An upper bound on delta(epsilon), or a lower one if not ``side.high``."""
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


def tables(composition: Composition, epsilon: float, size: int, factor: float, high: bool) -> Rare:
    """Tables of one end and direction for epsilons near ``epsilon``, cut at ``factor`` times it.

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
