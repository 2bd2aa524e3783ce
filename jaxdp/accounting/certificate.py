"""Certified bounds on epsilon and delta of a composition: every error is bounded by argument.

docs/certificate.md holds the argument. Each step's pair is replaced by finitely many losses on a
grid that dominate it, or are dominated by it; their sum is found by one tilted FFT. Where a single
step may lose far more than the others together, its losses are cut at a cap: no step above the cap
is the FFT's part, one step above it enters by its own profile, several by their probability.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special

from jaxdp.accounting.base import Array, Pair, Unresolved
from jaxdp.accounting.convolve import Law, log_moments, tilt
from jaxdp.accounting.discretise import Atoms, above, below
from jaxdp.accounting.roots import bracket_decreasing

Kinds = tuple[tuple[Pair, int], ...]

_SIZES = (1 << 13, 1 << 22)
_CAPS = (math.inf, 24.0, 12.0, 6.0, 3.0, 1.6)  # of epsilon
_OUTSIDE = 14.0  # nats: tilted probability that a window leaves outside
_COARSE = 0.05
_ORDERS = np.geomspace(1e-9, 1e9, 91)


class _Unreached(Unresolved):
    """Raised where delta is 0: no loss is as large as epsilon."""


@dataclass(frozen=True)
class _Plan:
    """Where the losses are cut, and the window and tilt of their sum."""

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
        size = _SIZES[0]
        while size < _SIZES[1]:
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


class Direction:
    """One direction of a composition, for deltas about exp(log_delta)."""

    def __init__(
        self, upper: Kinds, lower: Kinds | None, log_delta: float, tolerance: float
    ) -> None:
        self._kinds = {True: upper, False: lower}
        self.log_delta, self.tolerance = log_delta, tolerance
        self._count = sum(n for _, n in upper)

    @property
    def two_sided(self) -> bool:
        """True if pairs for a lower end are known."""
        return self._kinds[False] is not None

    def size(self, epsilon: float) -> int:
        """Points of a grid that suits the tolerance."""
        return self._best_plan(epsilon).size(self.tolerance)

    def delta_end(self, high: bool, epsilon: float, size: int) -> float:
        """A certified end of delta at epsilon, over exp(log_delta)."""
        return self._terms(high, epsilon, size)(epsilon)

    def epsilon_end(self, high: bool, near: float, size: int) -> float:
        """A certified end of epsilon; ``near`` is where it is looked for.

        Raises:
            Unresolved: there is none about here.
        """
        for _ in range(12):
            step = min(0.02 * near, 1 / self._best_plan(near).c)
            low, high_, seen = _root(
                self._terms(high, near, size), near, step, 0.02 * self.tolerance
            )
            at = high_ if high else low
            if near < 1e-12 or (seen and 0.7 * near <= at <= 1.3 * near):
                return at
            near = at if at > near else (0.25 if seen else 0.85) * near
        if not high:
            return 0.0
        raise Unresolved("the window did not settle")

    def negligible(self, epsilon: float) -> bool:
        """True if Chernoff's bound puts delta at epsilon below exp(log_delta)."""
        plan = self._plan(max(epsilon, 1e-9), math.inf)
        return plan is None or plan.chernoff < self.log_delta - 1e-6

    def rough(self) -> float:
        """An epsilon that is not far above the true one, by Chernoff's bound or single steps."""

        def excess(log_epsilon: float) -> float:
            plan = self._plan(math.exp(log_epsilon), math.inf)
            return -1.0 if plan is None else plan.chernoff - self.log_delta

        if excess(-23.0) <= 0:
            return math.exp(-23.0)
        if excess(25.0) > 0:
            raise Unresolved("no finite epsilon")
        return math.exp(bracket_decreasing(excess, -23.0, 25.0, rtol=1e-3, max_iter=30)[1])

    def _plan(self, epsilon: float, factor: float) -> _Plan | None:
        """The plan for a cap of ``factor`` epsilon; None if no loss reaches epsilon."""
        kinds = self._kinds[True] or ()
        tail = math.exp(max(self.log_delta, -640.0) - 23) / self._count
        spans = [pair.span(tail) for pair, _ in kinds]
        if not all(high - low < 1e9 for low, high in spans):
            raise Unresolved("losses beyond 1e9")
        caps = tuple(
            min(high, max(factor * epsilon, p.center + 1e-9))
            for (p, _), (_, high) in zip(kinds, spans, strict=True)
        )
        if sum(n * max(high, 0.0) for (_, n), (_, high) in zip(kinds, spans, strict=True)) <= 0:
            return None
        lows = tuple(low for low, _ in spans)
        width = _coarse(epsilon, spans)
        atoms = [
            (above(p, width, low, cap, _COARSE), n)
            for (p, n), low, cap in zip(kinds, lows, caps, strict=True)
        ]
        moments = functools.partial(log_moments, atoms, width)
        split = any(cap < high for cap, (_, high) in zip(caps, spans, strict=True))
        c, bound = _tilt(moments, epsilon)
        spread = *_spread(atoms, width, c), (c + 1) / max(epsilon, 1e-2 / c)
        c, reach = self._line(moments, c, epsilon)
        if split:
            bulk = _window(moments, 0.0, _OUTSIDE)
            reach = min(reach[0], bulk[0]), max(reach[1], bulk[1])
        first, last = min(reach[0], epsilon), max(reach[1], epsilon)
        margin = 0.02 * (last - first)
        over = math.log(sum(n * a.over[0] for a, n in atoms) + 1e-320)
        chernoff = float(np.logaddexp(bound, over))
        return _Plan(
            caps,
            lows,
            c,
            first - margin,
            last + margin,
            split,
            chernoff,
            spread,
            _lattice(kinds, spans),
        )

    def _line(
        self, moments: Callable[[Array], Array], c: float, epsilon: float
    ) -> tuple[float, tuple[float, float]]:
        """(tilt, window): the shortest window of tilts below the saddle.

        A lower tilt leaves losses behind that are too rare to matter. It costs digits: what is
        outside and what is rounded weighs more against delta.
        """
        best = c, (-math.inf, math.inf)
        for factor in (1.0, 0.7, 0.5, 0.35):
            lower = factor * c
            weight = float(moments(np.asarray([lower]))[0]) - lower * epsilon - self.log_delta
            reach = _window(moments, lower, _OUTSIDE + max(weight, 0.0))
            # Rounding is about this many nats below the tilted law.
            if factor < 1 and weight > 21 - math.log(self._count):
                break
            if reach[1] - reach[0] < 0.9 * (best[1][1] - best[1][0]):
                best = lower, reach
        return best

    @functools.lru_cache(maxsize=16)  # noqa: B019 - an object lives as long as a query
    def _best_plan(self, epsilon: float) -> _Plan:
        """The plan with the shortest window; one with a cap must halve it."""
        best = self._plan(epsilon, math.inf)
        if best is None:
            raise _Unreached("no loss reaches epsilon")
        if epsilon < 1e-9 or best.last - best.first < 30 * epsilon:
            return best
        for factor in _CAPS[1:]:
            plan = self._plan(epsilon, factor)
            if plan is None or not plan.split or self._several(plan, epsilon) > -12:
                continue
            if plan.last - plan.first < 0.5 * (best.last - best.first):
                best = plan
        return best

    def _several(self, plan: _Plan, epsilon: float) -> float:
        """log of what two steps above the cap may add beyond their P - e^epsilon Q, over delta."""
        width = _coarse(epsilon, list(zip(plan.lows, plan.caps, strict=True)))
        atoms = [
            (above(p, width, low, cap, _COARSE), n)
            for (p, n), low, cap in zip(self._kinds[True] or (), plan.lows, plan.caps, strict=True)
        ]
        both, _ = _two_or_more([(n, a.over[0]) for a, n in atoms])
        cap = min((a.top for a, _ in atoms if a.over[0] > 0), default=math.inf)
        shortfall = _shortfall(atoms, width, 2 * cap - epsilon)
        return math.log(both + 1e-320) + shortfall - self.log_delta

    def _terms(self, high: bool, epsilon: float, size: int) -> Callable[[float], float]:
        """Delta's certified end as a function of epsilon, over exp(log_delta)."""
        kinds = self._kinds[high]
        assert kinds is not None
        plan = self._best_plan(epsilon)
        width = plan.width(size)
        make, fine = (above if high else below), plan.fine(self.tolerance)
        atoms = [
            (make(p, width, low, cap, fine), n)
            for (p, n), low, cap in zip(kinds, plan.lows, plan.caps, strict=True)
        ]
        moments = functools.partial(log_moments, atoms, width)
        law = _law(atoms, moments, width, plan, size, plan.c)
        base = law.profile(epsilon)
        sign = 1 if high else -1
        unit = self.log_delta
        if not plan.split:
            infinite = [
                (n, a.over[0] if high else p.infinite)
                for (p, n), (a, _) in zip(kinds, atoms, strict=True)
            ]
            beyond = _one_or_more(infinite) * math.exp(-unit)

            def whole(at: float) -> float:
                value, error = base(at, unit)
                return max(value + sign * error, 0.0) + beyond

            return whole
        singles = [
            _Single(pair, n, atoms, i, width, plan, size, sign)
            for i, (pair, n) in enumerate(kinds)
            if atoms[i][0].over[0] > 0
        ]
        both, error_p = _two_or_more([(n, a.over[0]) for a, n in atoms])
        second, error_q = _two_or_more([(n, a.over[1]) for a, n in atoms])
        lowest = min((a.top for a, _ in atoms if a.over[0] > 0), default=math.inf)

        def parts(at: float) -> float:
            value, error = base(at, unit)
            value = max(value + sign * error, 0.0)
            one = sum(single(at) for single in singles)
            grown = math.exp(min(at, 700.0))
            several = both - grown * second + sign * (error_p + grown * error_q)
            if high:
                short = _shortfall(atoms, width, 2 * lowest - at)
                several = min(max(several, 0.0) + both * math.exp(min(short, 0.0)), both + error_p)
            return value + (one + max(several, 0.0)) * math.exp(-unit)

        return parts


class _Single:
    """One step of a kind above its cap, beside the sum of all others below theirs."""

    def __init__(
        self,
        pair: Pair,
        count: int,
        atoms: list[tuple[Atoms, int]],
        which: int,
        width: float,
        plan: _Plan,
        size: int,
        sign: int,
    ) -> None:
        others = [(a, n - (i == which)) for i, (a, n) in enumerate(atoms)]
        moments = functools.partial(log_moments, others, width)
        self._law = _law(others, moments, width, plan, size, 0.0)
        self._pair, self._count, self._sign = pair, count, sign
        self._atom = atoms[which][0]
        # Sums that hardly ever occur enter with the largest payoff, or not at all.
        live = self._law.weight > 1e-25
        self._rare = float(self._law.weight[~live].sum())
        self._loss, self._weight = self._law.loss[live], self._law.weight[live]

    def __call__(self, epsilon: float) -> float:
        """Certified count * E[D(epsilon - sum of the others)], D the large losses' profile."""
        p, q = self._atom.over
        at = epsilon - self._loss
        payoff = np.maximum(p - np.exp(np.minimum(at, 700.0)) * q, 0.0)
        beyond = np.flatnonzero(at > self._atom.top)
        if beyond.size:
            first, second = self._pair.tails(at[beyond])
            r = 2 * self._pair.rounding * self._sign
            grown = np.exp(np.minimum(at[beyond], 700.0))
            with np.errstate(over="ignore", invalid="ignore"):
                far = first * (1 + r) - np.where(second > 0, grown * second, 0.0) * (1 - r)
            payoff[beyond] = np.clip(np.nan_to_num(far), 0.0, p)
        payoff = payoff * (1 + self._sign * 1e-14)
        value, error = self._law.mean(self._weight, payoff)
        error += (self._law.alias + self._rare) * p * math.exp(self._law.log_scale)
        return self._count * max(value + self._sign * error, 0.0)


def _law(
    atoms: list[tuple[Atoms, int]],
    moments: Callable[[Array], Array],
    width: float,
    plan: _Plan,
    size: int,
    c: float,
) -> Law:
    """The tilted law on the plan's window, with Chernoff's bounds on what is outside."""
    orders = _around(c)
    gain = moments(orders) - float(moments(np.asarray([c]))[0])
    up, down = orders > c, orders < c
    last = plan.first + (size - 2) * width
    above_ = (gain - (orders - c) * last)[up].min()
    below_ = (gain + (c - orders) * plan.first)[down].min()
    outside = tuple(math.exp(min(float(v), 0.0)) * (1 + 1e-9) for v in (below_, above_))
    return Law(atoms, width, plan.first, size, c, (outside[0], outside[1]))


def _around(c: float) -> Array:
    """Orders on both sides of c at which Chernoff's bounds are tried."""
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
    reach = min(max(high - low, 1e-300) for low, high in spans)
    return 1e-5 * min(max(epsilon, 1e-4 * reach), reach)


def _tilt(moments: Callable[[Array], Array], epsilon: float) -> tuple[float, float]:
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


def _window(moments: Callable[[Array], Array], c: float, nats: float) -> tuple[float, float]:
    """(first, last) loss of a window that leaves e^-nats of the tilted law on either side."""
    orders = _around(c)
    gain = moments(orders) - moments(np.asarray([c]))[0] + nats
    up, down = orders > c, orders < c
    last = (gain / np.where(up, orders - c, 1.0))[up].min()
    first = -(gain / np.where(down, c - orders, 1.0))[down].min()
    return float(first), float(last)


def _shortfall(atoms: list[tuple[Atoms, int]], width: float, needed: float) -> float:
    """log of a bound on E[(e^(-needed - sum) - 1)+] over some of the steps, all of them small.

    Chernoff's, as in ``_tilt``. How many steps are small is not known, so that only what raises a
    moment is counted.
    """
    if needed == math.inf:
        return -math.inf
    b = np.geomspace(1e-3, 1e9, 49)
    bound = b * np.log(b) - (1 + b) * np.log1p(b) - (1 + b) * needed
    for atom, n in atoms:
        one = log_moments([(atom, 1)], width, -(1 + b)) - math.log1p(-min(atom.over[0], 1 - 1e-16))
        bound = bound + n * np.maximum(one, 0.0) * (1 + 1e-9)
    return float(np.nanmin(bound))


def _spread(atoms: list[tuple[Atoms, int]], width: float, c: float) -> tuple[Array, Array]:
    """(distances of the losses from each step's point mass, their tilted weights times counts)."""
    distances, weights = [], []
    for atom, n in atoms:
        tilted, _, _ = tilt(atom, c * width)
        distances.append(np.abs(atom.index) * width)
        weights.append(n * tilted)
    return np.concatenate(distances), np.concatenate(weights)


def _one_or_more(chances: list[tuple[int, float]]) -> float:
    """Probability of at least one of independent events, (number, probability) each."""
    return -math.expm1(sum(n * math.log1p(-min(p, 1 - 1e-16)) for n, p in chances))


def _two_or_more(chances: list[tuple[int, float]]) -> tuple[float, float]:
    """(probability of at least two of independent events, bound on its rounding error).

    With l = -sum n log(1 - p) and s = sum n p/(1 - p) it is 1 - e^-l (1 + s).
    """
    rate = -sum(n * math.log1p(-min(p, 1 - 1e-16)) for n, p in chances)
    rest = sum(n * _odds_beyond(p) for n, p in chances)
    value = float(special.gammainc(2, rate)) - math.exp(-rate) * rest
    return max(value, 0.0), 1e-13 * (float(special.gammainc(2, rate)) + rest)


def _odds_beyond(p: float) -> float:
    """p/(1 - p) + log(1 - p), >= 0."""
    if p < 1e-3:
        return sum((1 - 1 / k) * p**k for k in range(2, 9))
    return p / (1 - p) + math.log1p(-p)


def _root(
    delta: Callable[[float], float], near: float, step: float, rtol: float
) -> tuple[float, float, bool]:
    """(low, high) epsilon on both sides of where a decreasing end of delta meets 1; or zeros.

    Looked for about ``near``; a search that goes far below it tries 0.

    Returns:
        The two, and False if the end could not be evaluated at the lower one.

    Raises:
        Unresolved: the end is not a number, or stays above 1.
    """

    def excess(epsilon: float) -> float:
        value = delta(epsilon)
        if math.isnan(value):
            raise Unresolved("not a number")
        return math.log(value) if value > 0 else -math.inf

    low = high = near
    if excess(near) <= 0:
        while low > 0:
            low = low - step if low - step > 0.6 * near else 0.0
            value = excess(low)
            if value == math.inf:
                return low, high, False
            if value > 0:
                break
            high, step = low, 2 * step
        else:
            return 0.0, 0.0, True
    else:
        for _ in range(40):
            high += step
            if excess(high) <= 0:
                break
            low, step = high, 2 * step
        else:
            raise Unresolved("no upper end")
    return *bracket_decreasing(excess, low, high, rtol=rtol, max_iter=60), True


def epsilon_bounds(directions: list[Direction], near: float | None) -> tuple[float, float]:
    """Certified (lower, upper) epsilon over the directions of one composition.

    Args:
        directions: one or two.
        near: about the answer, or None.
    """
    lower = upper = 0.0
    for direction in directions:
        if lower > 0 and direction.negligible(lower):
            continue
        if not near and direction.delta_end(True, 0.0, 1 << 16) <= 1:
            continue
        start = upper or near or direction.epsilon_end(True, direction.rough(), 1 << 14)
        ends = _refine(direction, direction.epsilon_end, max(start, 1e-9))
        lower, upper = max(lower, ends[0]), max(upper, ends[1])
    return lower, upper


def delta_bounds(directions: list[Direction], epsilon: float) -> tuple[float, float]:
    """Certified (lower, upper) delta at epsilon over the directions of one composition."""
    lower = upper = 0.0
    for direction in directions:
        try:
            ends = _refine(direction, direction.delta_end, epsilon)
        except _Unreached:
            continue
        unit = math.exp(direction.log_delta)
        lower, upper = max(lower, ends[0] * unit), max(upper, ends[1] * unit)
    return min(lower, 1.0), min(upper, 1.0)


def _refine(
    direction: Direction,
    end: Callable[[bool, float, int], float],
    near: float,
) -> tuple[float, float]:
    """Both ends, on finer and finer grids; each end is the best so far."""
    lower, upper, before = 0.0, math.inf, math.inf
    size = direction.size(near)
    while True:
        upper = min(upper, end(True, near, size))
        if end == direction.epsilon_end:
            near = max(upper, 1e-12)
        if direction.two_sided:
            lower = max(lower, end(False, near, size))
        if lower > upper:
            raise ArithmeticError(f"certificate: lower end {lower!r} above upper end {upper!r}")
        width = (upper - lower) / max(upper, 1e-300)
        tolerance = direction.tolerance
        # Ends that do not approach are those of different pairs, or rounding's.
        if width <= tolerance or width > 0.7 * before or size >= _SIZES[1] or upper <= 1e-9:
            return lower, upper
        before = width
        grow = 2 ** math.ceil(0.5 * math.log2(max(width / tolerance, 2.0) * 1.2))
        size = min(size * min(grow, 16), _SIZES[1])
