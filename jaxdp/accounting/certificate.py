"""Certified bounds on epsilon and delta of a composition: every error is bounded by argument.

docs/certificate.md holds the argument. Each step's pair is replaced by finitely many losses on a
grid that dominate it, or are dominated by it; their sum is found by one tilted FFT. Where a single
step may lose far more than the others together, its losses are cut at a cap: no step above the cap
is the FFT's part, one step above it enters by its own profile, several by their probability.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp.accounting import plan as plans
from jaxdp.accounting.base import Array, Pair, Unresolved
from jaxdp.accounting.convolve import Law, log_moments
from jaxdp.accounting.discretise import Atoms, above, below
from jaxdp.accounting.plan import SIZES, Kinds, Plan, around, one_or_more, shortfall, two_or_more
from jaxdp.accounting.roots import bracket_decreasing


class Direction:
    """One direction of a composition, for deltas about exp(log_delta)."""

    def __init__(
        self, upper: Kinds, lower: Kinds | None, log_delta: float, tolerance: float
    ) -> None:
        self._upper, self._lower = upper, lower
        self.log_delta, self.tolerance = log_delta, tolerance
        self._plans: dict[float, Plan] = {}

    @property
    def two_sided(self) -> bool:
        """True if pairs for a lower end are known."""
        return self._lower is not None

    def size(self, epsilon: float) -> int:
        """Points of a grid that suits the tolerance."""
        return self._plan(epsilon).size(self.tolerance)

    def delta_end(self, high: bool, epsilon: float, size: int) -> float:
        """A certified end of delta at epsilon, over exp(log_delta)."""
        return self._terms(high, epsilon, size)(epsilon)

    def epsilon_end(self, high: bool, near: float, size: int) -> float:
        """A certified end of epsilon; ``near`` is where it is looked for.

        Raises:
            Unresolved: there is none about here.
        """
        for _ in range(40):
            step = min(0.02 * near, 1 / self._plan(near).c)
            low, high_, seen = _root(
                self._terms(high, near, size), near, step, 0.02 * self.tolerance
            )
            at = high_ if high else low
            settled = 0.7 * near <= at <= 1.3 * near or (high and at == 0)
            if near < 1e-12 or (seen and settled):
                return at
            if not (at > near or (high and not seen and at < 0.85 * near)):
                at = (0.25 if seen else 0.85) * near
            near = at
        if not high:
            return 0.0
        raise Unresolved("the window did not settle")

    def negligible(self, epsilon: float) -> bool:
        """True if Chernoff's bound puts delta at epsilon below exp(log_delta)."""
        return epsilon >= 1e-9 and self._excess(epsilon) < -1e-3

    def _excess(self, epsilon: float) -> float:
        """log of Chernoff's bound on delta at epsilon, over exp(log_delta)."""
        return plans.chernoff(self._upper, epsilon, self.log_delta) - self.log_delta

    def _plan(self, epsilon: float) -> Plan:
        if epsilon not in self._plans:
            self._plans[epsilon] = plans.best(self._upper, epsilon, self.log_delta)
        return self._plans[epsilon]

    def rough(self) -> float:
        """An epsilon that is not far above the true one, by Chernoff's bound or single steps."""

        def excess(log_epsilon: float) -> float:
            return self._excess(math.exp(log_epsilon))

        if excess(-23.0) <= 0:
            return math.exp(-23.0)
        if excess(25.0) > 0:
            raise Unresolved("no finite epsilon")
        return math.exp(bracket_decreasing(excess, -23.0, 25.0, rtol=1e-3, max_iter=30)[1])

    def _terms(self, high: bool, epsilon: float, size: int) -> Callable[[float], float]:
        """Delta's certified end as a function of epsilon, over exp(log_delta)."""
        plan = self._plan(epsilon)
        if plan.chernoff < self.log_delta - 40:
            # So far out that nothing else is of use; below it nothing is known.
            least = 1.01 * math.exp(plan.chernoff - self.log_delta) if high else 0.0
            return lambda at: least if at >= epsilon or not high else math.inf
        kinds = self._upper if high else self._lower
        assert kinds is not None
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
                (n, a.over[0] if high else p.infinite * (1 - 2 * p.rounding))
                for (p, n), (a, _) in zip(kinds, atoms, strict=True)
            ]
            beyond = one_or_more(infinite) * math.exp(-unit)
            beyond *= 1.0 if high else _kept(kinds, [0.0] * len(kinds))

            def whole(at: float) -> float:
                value, error = base(at, unit)
                return max(value + sign * error, 0.0) + beyond

            return whole
        singles = [
            _Single(pair, n, atoms, i, width, plan, size, sign)
            for i, (pair, n) in enumerate(kinds)
            if atoms[i][0].over[0] > 0
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
        else:
            both *= _kept(kinds, [a.over[0] for a, _ in atoms])

        def parts(at: float) -> float:
            value, error = base(at, unit)
            value = max(value + sign * error, 0.0)
            one = sum(single(at) for single in singles)
            grown = math.exp(min(at, 700.0))
            several = both - grown * second + sign * (error_p + grown * error_q)
            if high:
                short = math.exp(shortfall(atoms, width, at))
                several = min(max(several, 0.0) + both * short, both + error_p)
            elif at > 700:
                several = 0.0
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
        plan: Plan,
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
        rare = float(self._law.weight[~live].sum()) + self._law.error * math.sqrt(size)
        slack: Any = getattr(pair, "slack", None)
        ends = np.asarray([self._atom.top, max(float(self._law.loss[-1]), self._atom.top)])
        self._inexact = 1e-15 * self._law.reach + (0.0 if slack is None else slack(ends))
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
        return self._count * max(value + self._sign * error, 0.0)


def _kept(kinds: Kinds, large: list[float]) -> float:
    """The factor by which small losses of lower pairs weigh less than those of laws of total 1."""
    everything = np.asarray([-np.inf])
    totals = [min(float(p.tails(everything)[0][0]) * (1 - 2 * p.rounding), 1.0) for p, _ in kinds]
    return math.prod(
        max((total - over) / (1 - over), 0.0) ** n if over < 1 else 0.0
        for total, over, (_, n) in zip(totals, large, kinds, strict=True)
    )


def _law(
    atoms: list[tuple[Atoms, int]],
    moments: Callable[[Array], Array],
    width: float,
    plan: Plan,
    size: int,
    c: float,
) -> Law:
    """The tilted law on the plan's window, with Chernoff's bounds on what is outside."""
    orders = around(c)
    gain = moments(orders) - float(moments(np.asarray([c]))[0])
    size_of = np.abs(orders) * sum(n * abs(a.offset) for a, n in atoms) + np.abs(gain)
    gain = np.where(size_of < 1e12, gain, np.inf)  # others have no digits left
    up, down = orders > c, orders < c
    last = plan.first + (size - 2) * width
    above_ = (gain - (orders - c) * last)[up].min()
    below_ = (gain + (c - orders) * plan.first)[down].min()
    outside = tuple(math.exp(min(float(v), 0.0)) * 1.01 for v in (below_, above_))
    return Law(atoms, width, plan.first, size, c, (outside[0], outside[1]))


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
        ends = _refine(direction, direction.delta_end, epsilon)
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
    hint = near if end == direction.epsilon_end else 1.0
    size, enough = direction.size(near), 0.55 * direction.tolerance
    while True:
        # An end that is close to a good guess is not asked again; a poor guess is close to none.
        if not 0 <= upper - hint <= enough * hint:
            upper = min(upper, end(True, near, size))
        if end == direction.epsilon_end:
            near = max(upper, 1e-12)
        if direction.two_sided and not 0 <= hint - lower <= enough * hint:
            lower = max(lower, end(False, near, size))
        if lower > upper:
            raise ArithmeticError(f"certificate: lower end {lower!r} above upper end {upper!r}")
        width = (upper - lower) / max(upper, 1e-300)
        tolerance = direction.tolerance
        # Ends that do not approach are those of different pairs, or rounding's.
        if width <= tolerance or width > 0.7 * before or size >= SIZES[1] or upper <= 1e-9:
            return lower, upper
        before = width
        grow = 2 ** math.ceil(0.5 * math.log2(max(width / tolerance, 2.0) * 1.2))
        size = min(size * min(grow, 16), SIZES[1])
