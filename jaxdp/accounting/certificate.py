"""Certified bounds on epsilon and delta of a composition: every error is bounded by argument.

docs/certificate.md holds the argument. Each step's pair is replaced by finitely many losses on a
grid that dominate it, or are dominated by it; their sum is found by one tilted FFT. Where a single
step may lose far more than the others together, its losses are cut at a cap: no step above the cap
is the FFT's part, one step above it enters by its own profile, several by their probability.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from jaxdp.accounting import plan as plans
from jaxdp.accounting import tails
from jaxdp.accounting.base import Pair, Unresolved
from jaxdp.accounting.grid import Atoms, Inner, Outer, above, below
from jaxdp.accounting.plan import (
    LOST,
    Kinds,
    SumPlan,
    layout,
    most,
    one_or_more,
    shortfall,
    two_or_more,
)
from jaxdp.accounting.roots import bracket_decreasing
from jaxdp.accounting.sums import Counted, Law, LawProfile, law_of_sum

_COARSE = 0.02  # of epsilon: the tolerance of what is only compared
_WIDE = 3e-2  # relative: the width from which on moments alone may do better


class PartsOnGrids:
    """A composition's steps on the grids that suit a plan.

    Attributes:
        layout: the grids.
        kinds: the pairs that may have losses above the caps, with their numbers.
        lost: probability that a lower end has to give up.
    """

    def __init__(self, kinds: Kinds, plan: SumPlan, high: bool, tolerance: float) -> None:
        """Chooses grids on which an end is within about ``tolerance`` of epsilon."""
        self.layout, self.kinds, self.lost = layout(plan, tolerance), kinds, 0.0
        self._plan, self._put = plan, above if high else below
        # Width of far cells, over their distance, that adds a tenth of the tolerance.
        distance, weight, factor = plan.spread
        added = factor * float(weight @ distance**2) / 6
        self._fine = min(0.02, max(math.sqrt(0.1 * tolerance / max(added, 1e-300)), 1e-4))
        self._inner: list[tuple[Inner, int]] = []
        if self.layout.small:
            self._inner = [
                (Inner(pair, *ends), n)
                for (pair, n), ends in zip(kinds, self.layout.small, strict=True)
            ]
            self.kinds = tuple((Outer(inner), n) for inner, n in self._inner)
            if not high:
                # As many small losses are left out as there may be large ones.
                log_lost = plan.log_delta + math.log(LOST * tolerance / len(kinds))
                for i, (inner, n) in enumerate(self._inner):
                    count = most(n, Outer(inner).chance(), log_lost)
                    self._inner[i] = inner, n - count
                    self.lost += math.exp(log_lost) if count < n else 0.0
        self._outer = functools.cache(self._on_grid)

    def atoms(self) -> list[tuple[Atoms, int]]:
        """The atoms of ``kinds`` on the grid on which they are put."""
        return self._outer(self.layout.widths[-1 if self._inner else 0])

    def groups(self) -> list[tuple[Counted, float]]:
        """All atoms below the caps, with the widths of their grids."""
        widths = self.layout.widths
        if not self._inner:
            return [(self.atoms(), widths[0])]
        return [(self.atoms(), widths[-1]), (self._small(widths[0]), widths[0])]

    def law(self, c: float, without: int | None = None) -> Law:
        """The law of the sum of all losses below the caps, tilted by c, less one of a kind."""

        def outer(width: float) -> Counted:
            return [(a, n - (i == without)) for i, (a, n) in enumerate(self._outer(width))]

        plan, ends = self._plan, self.layout.small
        layout = replace(self.layout, outside=plan.outside[c == 0])
        moments = plans.moments(plan, c)
        if not self._inner:
            return law_of_sum(outer, self._put, layout, moments, plan.first)
        apart = outer, plans.moments(plan, c, ends)
        return law_of_sum(self._small, self._put, layout, moments, plan.first, apart)

    def _on_grid(self, width: float) -> list[tuple[Atoms, int]]:
        plan = self._plan
        return [
            (self._put(p, width, low, cap, self._fine), n)
            for (p, n), low, cap in zip(self.kinds, plan.lows, plan.caps, strict=True)
        ]

    def _small(self, width: float) -> list[tuple[Atoms, int]]:
        return [(self._put(p, width, *p.span(0.0), self._fine), n) for p, n in self._inner]


class Direction:
    """One direction of a composition, for deltas about exp(log_delta)."""

    def __init__(
        self, upper: Kinds, lower: Kinds | None, log_delta: float, tolerance: float
    ) -> None:
        self._upper, self._lower = upper, lower
        self.log_delta, self.tolerance = log_delta, tolerance
        self.exhausted = False  # True once no finer grid is left
        self.by_moments = False  # True once ends were asked of moments alone
        self._plans: dict[float, SumPlan] = {}

    @property
    def two_sided(self) -> bool:
        """True if pairs for a lower end are known."""
        return self._lower is not None

    def total(self, high: bool) -> tails.SumMoments:
        """The moments of the sum of all losses, above or below."""
        kinds = self._upper if high else self._lower
        assert kinds is not None
        return tails.SumMoments(kinds, high, self.log_delta)

    def delta_end(self, high: bool, epsilon: float, tolerance: float) -> float:
        """A certified end of delta at epsilon, over exp(log_delta).

        Args:
            high: the upper end.
            epsilon: where.
            tolerance: relative, of delta, that the grid may add.
        """
        # The epsilon of which tolerances are fractions; c times it, of delta's logarithm.
        scale = max(epsilon, 1e-2 / self._plan(epsilon).c)
        return self._terms(high, epsilon, tolerance / scale)(epsilon)

    def epsilon_end(self, high: bool, near: float, tolerance: float) -> float:
        """A certified end of epsilon; ``near`` is where it is looked for.

        Raises:
            Unresolved: no upper end was found.
        """
        start, best = near, math.inf
        for attempt in range(40):
            step = min(0.02 * near, 1 / self._plan(near).c)
            try:
                terms = self._terms(high, near, tolerance)
                low, high_, seen = _root(terms, near, step, 0.02 * self.tolerance)
            except Unresolved:
                if high and best == math.inf:
                    raise
                break
            if high and high_ > best:
                break  # this plan is no better than an earlier one
            at, best = (high_, high_) if high else (low, best)
            settled = 0.7 * near <= at <= 1.3 * near or (high and at == 0)
            if near < 1e-12 or (seen and settled):
                return best if high else at
            if not (at > near or (high and not seen and at < 0.85 * near)):
                at = (0.25 if seen else 0.85) * near
            near = at
            # A lower end so far down, or so hard to find, is of no use.
            if not high and (near < 0.1 * start or attempt > 3):
                return 0.0
        return best if high else 0.0

    def within(self, epsilon: float) -> bool:
        """True if delta at epsilon is proven to be at most exp(log_delta)."""
        if epsilon >= 1e-9 and self._excess(epsilon) < -1e-3:
            return True
        if epsilon == 0 and self._one_step() > 1.01 * math.exp(self.log_delta):
            return False
        return any(self._terms(True, epsilon, t)(epsilon) <= 1 for t in (_COARSE, self.tolerance))

    def _one_step(self) -> float:
        """The largest delta at epsilon 0 of one step alone: that of all is no smaller."""
        zero = np.zeros(1)
        return max(float(p[0] - q[0]) for p, q in (pair.tails(zero) for pair, _ in self._upper))

    def _excess(self, epsilon: float) -> float:
        """log of Chernoff's bound on delta at epsilon, over exp(log_delta)."""
        return plans.chernoff(self._upper, epsilon, self.log_delta) - self.log_delta

    def _plan(self, epsilon: float) -> SumPlan:
        if epsilon not in self._plans:
            self._plans[epsilon] = plans.best(self._upper, epsilon, self.log_delta)
        return self._plans[epsilon]

    def rough(self) -> float:
        """An upper end of epsilon that is not far above the true one, on a coarse grid."""

        def excess(log_epsilon: float) -> float:
            return self._excess(math.exp(log_epsilon))

        if excess(-23.0) <= 0:
            return math.exp(-23.0)
        if excess(25.0) > 0:
            raise Unresolved("no finite epsilon")
        least = math.exp(bracket_decreasing(excess, -23.0, 25.0, rtol=1e-3, max_iter=30)[1])
        # Chernoff's bound is poor where a few rare losses decide.
        while least > 1e-9 and self._terms(True, 0.6 * least, _COARSE)(0.6 * least) <= 1:
            least *= 0.6
        return least

    def _terms(self, high: bool, epsilon: float, tolerance: float) -> Callable[[float], float]:
        """Delta's certified end as a function of epsilon, over exp(log_delta)."""
        plan = self._plan(epsilon)
        if plan.chernoff < self.log_delta - 15 or not math.isfinite(plan.last - plan.first):
            # So far out that nothing else is of use, or has digits; below it nothing is known.
            least = 1.01 * math.exp(plan.chernoff - self.log_delta) if high else 0.0
            return lambda at: least if at >= epsilon or not high else math.inf
        kinds = self._upper if high else self._lower
        assert kinds is not None
        parts = PartsOnGrids(kinds, plan, high, tolerance)
        self.exhausted = parts.layout.points > 1 << 24  # or more than float64 can tell
        kinds, atoms = parts.kinds, parts.atoms()
        base = LawProfile(parts.law(plan.c), epsilon)
        sign = 1 if high else -1
        unit = self.log_delta
        lost = parts.lost * math.exp(-unit)
        if not plan.split:
            infinite = [
                (n, a.over[0] if high else p.infinite * (1 - 2 * p.rounding))
                for (p, n), (a, _) in zip(kinds, atoms, strict=True)
            ]
            beyond = one_or_more(infinite) * math.exp(-unit)
            beyond *= 1.0 if high else _kept(kinds, [0.0] * len(kinds))

            def whole(at: float) -> float:
                value, error = base(at, unit)
                return max(max(value + sign * error, 0.0) + beyond - lost, 0.0)

            return whole
        singles = [
            _OneLarge(pair, n, atom, parts.law(0.0, i), sign)
            for i, ((pair, n), (atom, _)) in enumerate(zip(kinds, atoms, strict=True))
            if atom.over[0] > 0
        ]
        both, error_p = two_or_more([(n, a.over[0]) for a, n in atoms])
        second, error_q = two_or_more([(n, a.over[1]) for a, n in atoms])
        if high:
            # Q of what lies below the windows, or at minus infinity, is in no atom.
            lows = (np.asarray([low]) for low in plan.lows)
            missing = sum(
                n * (1 - float(p.tails(low)[1][0])) for (p, n), low in zip(kinds, lows, strict=True)
            )
            second *= max(1 - missing, 0.0)
            groups = parts.groups()
        else:
            both *= _kept(kinds, [a.over[0] for a, _ in atoms])

        def split(at: float) -> float:
            value, error = base(at, unit)
            value = max(value + sign * error, 0.0)
            one = sum(single(at) for single in singles)
            grown = math.exp(min(at, 700.0))
            several = both - grown * second + sign * (error_p + grown * error_q)
            if high:
                short = math.exp(shortfall(groups, at))
                several = min(max(several, 0.0) + both * short, both + error_p)
            elif at > 700:
                several = 0.0
            return max(value + (one + max(several, 0.0)) * math.exp(-unit) - lost, 0.0)

        return split


class _OneLarge:
    """One step of a kind above its cap, beside the sum of all others below theirs."""

    def __init__(self, pair: Pair, count: int, atom: Atoms, others: Law, sign: int) -> None:
        self._law = others
        self._pair, self._count, self._sign, self._atom = pair, count, sign, atom
        # Sums that hardly ever occur enter with the largest payoff, or not at all: all of them
        # together weigh no more than rounding may.
        live = self._law.weight > max(self._law.error / math.sqrt(others.loss.size), 1e-25)
        rare = float(self._law.weight[~live].sum()) + self._law.error * math.sqrt(others.loss.size)
        ends = np.asarray([self._atom.top, max(float(self._law.loss[-1]), self._atom.top)])
        self._inexact = 1e-15 * self._law.reach + pair.slack(ends)
        self._missed = (self._law.alias + rare) * math.exp(self._law.log_scale)
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
            if self._sign > 0:
                # A cut that rounding moved is not the best one.
                far = np.nan_to_num(far, nan=p) + p * self._inexact
            payoff[beyond] = np.clip(np.nan_to_num(far), 0.0, p)
        # Rounding of the difference, with the exponent's.
        slack = 4e-16 * (2 + np.abs(at)) * (p + np.exp(np.minimum(at, 700.0)) * q)
        payoff = np.clip(payoff + self._sign * np.minimum(slack, p), 0.0, p)
        if self._sign < 0:
            payoff[at > 700] = 0.0
        value, error = self._law.mean(self._weight, payoff)
        error += self._missed * p
        end = value + self._sign * error
        # The largest losses weigh p and no less than nothing, whatever is not a number.
        if self._sign > 0:
            return self._count * (end if end < p else p)
        return self._count * (end if end > 0 else 0.0)


def _kept(kinds: Kinds, large: list[float]) -> float:
    """The factor by which small losses of lower pairs weigh less than those of laws of total 1."""
    everything = np.asarray([-np.inf])
    totals = [min(float(p.tails(everything)[0][0]) * (1 - 2 * p.rounding), 1.0) for p, _ in kinds]
    return math.prod(
        max((total - over) / (1 - over), 0.0) ** n if over < 1 else 0.0
        for total, over, (_, n) in zip(totals, large, kinds, strict=True)
    )


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

    Raises:
        Unresolved: no upper end was found.
    """
    lower = upper = 0.0
    for direction in directions:
        try:
            if (upper > 0 or not near) and direction.within(upper):
                continue
            hint, known = upper or near, math.inf
            if not hint:
                hint = known = direction.epsilon_end(True, direction.rough(), _COARSE)
            ends = _refine(direction, direction.epsilon_end, max(hint, 1e-9), known)
        except Unresolved:
            ends = 0.0, math.inf
        ends = _tighter(ends, direction, tails.lower_epsilon, tails.upper_epsilon, None)
        lower, upper = max(lower, ends[0]), max(upper, ends[1])
    return lower, upper


def delta_bounds(directions: list[Direction], epsilon: float) -> tuple[float, float]:
    """Certified (lower, upper) delta at epsilon over the directions of one composition.

    Raises:
        Unresolved: no upper end was found.
    """
    lower = upper = 0.0
    for direction in directions:
        unit = math.exp(direction.log_delta)
        try:
            if upper > 0 and direction.delta_end(True, epsilon, _COARSE) * unit <= upper:
                continue
            ends = _refine(direction, direction.delta_end, epsilon)
        except Unresolved:
            ends = 0.0, math.inf
        ends = ends[0] * unit, ends[1] * unit
        ends = _tighter(ends, direction, tails.lower_delta, tails.upper_delta, epsilon)
        lower, upper = max(lower, ends[0]), max(upper, ends[1])
    return min(lower, 1.0), min(upper, 1.0)


def _tighter(
    ends: tuple[float, float],
    direction: Direction,
    lower: Callable[[tails.SumMoments, float], float],
    upper: Callable[[tails.SumMoments, float], float],
    epsilon: float | None,
) -> tuple[float, float]:
    """The ends, or those from moments alone where these are wide and those are better.

    Args:
        ends: (lower, upper).
        direction: whose they are.
        lower: an end of the sum of losses, at epsilon or at the direction's delta.
        upper: likewise.
        epsilon: where delta is asked; None where epsilon is.

    Raises:
        Unresolved: there is no upper end.
        ArithmeticError: the ends contradict each other.
    """
    low, high = ends
    if high < math.inf and (high - low <= _WIDE * high or not direction.two_sided):
        return ends
    direction.by_moments = True
    at = direction.log_delta if epsilon is None else epsilon
    high = min(high, upper(direction.total(True), at))
    if direction.two_sided:
        low = max(low, lower(direction.total(False), at))
    if high == math.inf:
        raise Unresolved("no finite epsilon")
    if low > high:
        raise ArithmeticError(f"moments: lower end {low!r} above upper end {high!r}")
    return low, high


def _refine(
    direction: Direction,
    end: Callable[[bool, float, float], float],
    near: float,
    upper: float = math.inf,
) -> tuple[float, float]:
    """Both ends, on finer and finer grids; each end is the best so far, beginning with ``upper``.

    Raises:
        Unresolved: no upper end was found.
        ArithmeticError: the ends contradict each other.
    """
    lower, before = 0.0, math.inf
    hint = near if end == direction.epsilon_end else 1.0
    goal, enough = direction.tolerance, 0.55 * direction.tolerance
    tolerance, stalled = 0.7 * goal, 0
    while True:
        # An end that is close to a good guess is not asked again; a poor guess is close to none.
        if not 0 <= upper - hint <= enough * hint or before == math.inf:
            try:
                upper = min(upper, end(True, near, tolerance))
            except Unresolved:
                if upper == math.inf:
                    raise
        # A plan serves all that is about it.
        if end == direction.epsilon_end and not abs(upper - near) < 1e-3 * near:
            near = max(upper, 1e-12)
        if not direction.two_sided:
            return 0.0, upper
        if not 0 <= hint - lower <= enough * hint:
            lower = max(lower, end(False, near, tolerance))
        if lower > upper:
            raise ArithmeticError(f"certificate: lower end {lower!r} above upper end {upper!r}")
        width = (upper - lower) / max(upper, 1e-300) if upper < math.inf else math.inf
        # Ends that do not approach are those of different pairs, or rounding's.
        stalled += width > 0.9 * before
        if width <= goal or upper <= 1e-9 or stalled > 1 or direction.exhausted:
            return lower, upper
        before = width
        tolerance *= min(max(0.6 * goal / width, 1 / 256), 0.2)
