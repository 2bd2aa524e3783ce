"""Certified bounds on epsilon and delta of a composition: every error is bounded by argument.

docs/proofs/certificate.md has the theorems. Each step's pair is replaced by finitely many losses on
a grid that dominate it (for the upper end) or are dominated by it (for the lower one); a tilted FFT
finds the distribution of their sum, and epsilon is where the delta of that meets the target.

From an event to ``Bound(lower, estimate, upper)``, in the order in which it happens:

1. ``flat.flatten`` counts the releases of the event, ``flat.directions`` pairs them, and
   ``queries`` asks ``contour`` for the estimate: it is no bound, it says where to look.
2. ``bounds`` takes the larger ends of the one or two directions; ``_refine`` computes both ends of
   one direction on finer and finer grids, until they are as close as was asked for.
3. ``Direction.epsilon_end`` looks for the epsilon at which a certified delta meets the target.
4. ``Direction._certified_delta`` is that delta, as a function of epsilon, on one grid:
   ``choose_plan`` chooses a tilt, a window for the sum and a cap on the losses, ``choose_layout``
   the widths of the grids, ``DiscretizedComposition`` puts every kind of step on them
   (``grid.dominating_atoms``, ``grid.dominated_atoms``) and sums them (``grid.law_of_sum``).
5. ``grid.profile_of`` reads delta off the sum, with a bound on all rounding. Where one step may
   lose far more than the others together, its losses end at a cap: no step above the cap is the
   FFT's part, one step above it is ``_SingleLargeLoss``, several enter by ``two_or_more``.
6. Where rounding drowns the sum, ``tails`` gives both ends from its moments alone.

Nothing proven rests on what plans and layouts choose, but for the bounds that say so:
``_saddle_point``, ``shortfall``, ``binomial_upper_bound`` and ``two_or_more``.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from jaxdp.accounting import tails
from jaxdp.accounting.events import Array, Unresolved
from jaxdp.accounting.grid import (
    OUTSIDE,
    AtomCounts,
    Atoms,
    AtomsOfWidth,
    LargeLosses,
    Law,
    Layout,
    SmallLosses,
    TiltedMoments,
    dominated_atoms,
    dominating_atoms,
    law_of_sum,
    log_moments,
    low_frequencies,
    profile_of,
    tilt,
)
from jaxdp.accounting.pairs import Pair, bracket_decreasing
from jaxdp.accounting.tails import Kinds

Intervals = tuple[tuple[float, float], ...]

SIZES = (1 << 12, 1 << 21)
_FINEST = 1 << 22  # points of a grid on which few frequencies matter
GIVEN_UP = 1e-3  # of the tolerance, in delta: what a lower end may give up
_COARSE_TOLERANCE = 0.02  # of epsilon: the tolerance of what is only compared
_WIDE_INTERVAL = 3e-2  # relative: the width from which on moments alone may do better
_CAP_FACTORS = (24.0, 12.0, 6.0, 3.0, 1.6, 0.9, 0.5, 0.3)  # of epsilon
_ORDERS = np.geomspace(1e-9, 1e9, 46)
_CELLS_OF_SUMS = 1 << 14  # in which sums beside one large loss are taken together
_MANY_POINTS = 1 << 18  # points beyond which small losses are tried on a grid of their own


def bounds(
    directions: Sequence["Direction"], epsilon: float | None = None, near: float | None = None
) -> tuple[float, float]:
    """Certified (lower, upper) epsilon at the directions' delta, or delta at ``epsilon``.

    Args:
        directions: one or two, of one composition.
        epsilon: where delta is asked; None where epsilon is.
        near: about the epsilon that is asked for, or None.

    Raises:
        Unresolved: no upper end was found.
        ArithmeticError: the ends contradict each other.
    """
    # A record's presence and its absence each have an epsilon; the guarantee is the larger.
    lower = upper = 0.0
    for direction in directions:
        log_delta = direction.log_delta
        unit = 1.0 if epsilon is None else math.exp(log_delta)
        # A direction that is proven to be no worse than the one before is left out: one evaluation
        # on a coarse grid then spares the search on fine ones.
        try:
            if epsilon is None:
                if (upper > 0 or not near) and direction.is_within(upper):
                    continue
                hint, known = upper or near, math.inf
                if not hint:
                    rough = direction.rough_epsilon()
                    hint = known = direction.epsilon_end(True, rough, _COARSE_TOLERANCE)
                low, high = _refine(direction, direction.epsilon_end, max(hint, 1e-9), known)
            else:
                if upper > 0:
                    coarse = direction.delta_end(True, epsilon, _COARSE_TOLERANCE)
                    if coarse * unit <= upper:
                        continue
                low, high = _refine(direction, direction.delta_end, epsilon)
        except Unresolved:
            low, high = 0.0, math.inf
        low, high = low * unit, high * unit
        # Where the ends are wide, because rounding drowns the sum or no grid holds it, those from
        # moments alone may be better.
        both = direction.lower is not None and not direction.once
        if high == math.inf or (both and not high - low <= _WIDE_INTERVAL * high):
            direction.by_moments = True
            high = min(high, tails.upper_end(direction.upper, log_delta, epsilon))
            if direction.lower is not None:
                low = max(low, tails.lower_end(direction.lower, log_delta, epsilon))
            if high == math.inf:
                raise Unresolved("no finite epsilon")
            if low > high:
                raise ArithmeticError(f"moments: lower end {low!r} above upper end {high!r}")
        lower, upper = max(lower, low), max(upper, high)
    return (lower, upper) if epsilon is None else (min(lower, 1.0), min(upper, 1.0))


def _refine(
    direction: "Direction",
    end: Callable[[bool, float, float], float],
    near: float,
    upper: float = math.inf,
) -> tuple[float, float]:
    """Both ends, on finer and finer grids; each end is the best so far, beginning with ``upper``.

    Raises:
        Unresolved: no upper end was found.
        ArithmeticError: the ends contradict each other.
    """
    # Each end may be half the goal away from where the contour's estimate says the truth is; the
    # first grid is chosen a little finer than the goal asks for.
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
        if direction.lower is None:
            return 0.0, upper
        if not 0 <= hint - lower <= enough * hint:
            lower = max(lower, end(False, near, tolerance))
        if lower > upper:
            raise ArithmeticError(f"certificate: lower end {lower!r} above upper end {upper!r}")
        width = (upper - lower) / max(upper, 1e-300) if upper < math.inf else math.inf
        # Ends that do not approach are those of different pairs, or rounding's.
        stalled += width > 0.9 * before
        done = width <= goal or upper <= 1e-9 or stalled > 1
        if done or direction.once or direction.exhausted:
            return lower, upper
        # The width falls about as the tolerance does: by what is missing, within [5, 256].
        before = width
        tolerance *= min(max(0.6 * goal / width, 1 / 256), 0.2)


@dataclass(eq=False)
class Direction:
    """One direction of a composition, for deltas about exp(log_delta)."""

    upper: Kinds  # pairs that dominate its steps, with their numbers
    lower: Kinds | None  # pairs for a lower end; None where none are known
    log_delta: float  # about where
    tolerance: float  # relative, of the width that is aimed at
    once: bool = False  # True where the ends are of unlike pairs: finer grids are of no use
    exhausted: bool = False  # True once no finer grid is left
    by_moments: bool = False  # True once ends were asked of moments alone

    def delta_end(self, high: bool, epsilon: float, tolerance: float) -> float:
        """A certified end of delta at epsilon, over exp(log_delta).

        Args:
            high: the upper end.
            epsilon: where.
            tolerance: relative, of delta, that the grid may add.
        """
        # The epsilon of which tolerances are fractions; c times it, of delta's logarithm.
        scale = max(epsilon, 1e-2 / choose_plan(self.upper, epsilon, self.log_delta).c)
        return self._certified_delta(high, epsilon, tolerance / scale)(epsilon)

    def epsilon_end(self, high: bool, near: float, tolerance: float) -> float:
        """A certified end of epsilon; ``near`` is where it is looked for.

        Raises:
            Unresolved: no upper end was found.
        """
        # The plan, and so the window and the tilt, depend on where epsilon is looked for. So the
        # root on one plan is where the next plan looks, until the two agree.
        start, best = near, math.inf
        for attempt in range(40):
            step = min(0.02 * near, 1 / choose_plan(self.upper, near, self.log_delta).c)
            try:
                terms = self._certified_delta(high, near, tolerance)
                low, high_, seen = _bracket_crossing(terms, near, step, 0.02 * self.tolerance)
            except Unresolved:
                if high and best == math.inf:
                    raise
                break
            if high and high_ > best:
                break  # this plan is no better than an earlier one
            # The side of the root at which the end was evaluated and found to hold.
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

    def is_within(self, epsilon: float) -> bool:
        """True if delta at epsilon is proven to be at most exp(log_delta)."""
        if epsilon >= 1e-9:
            chernoff = _saddle_point(self.upper, epsilon, self.log_delta, math.inf)[-1]
            if chernoff - self.log_delta < -1e-3:
                return True
        if epsilon == 0:
            # The largest delta of one step alone: that of all is no smaller.
            ends = [pair.tails(np.zeros(1)) for pair, _ in self.upper]
            if max(float(p[0] - q[0]) for p, q in ends) > 1.01 * math.exp(self.log_delta):
                return False
        goals = (_COARSE_TOLERANCE, self.tolerance)
        return any(self._certified_delta(True, epsilon, goal)(epsilon) <= 1 for goal in goals)

    def rough_epsilon(self) -> float:
        """An upper end of epsilon that is not far above the true one, on a coarse grid."""

        def excess(log_epsilon: float) -> float:
            """log of Chernoff's bound on delta there, over exp(log_delta)."""
            at = math.exp(log_epsilon)
            return _saddle_point(self.upper, at, self.log_delta, math.inf)[-1] - self.log_delta

        if excess(-23.0) <= 0:
            return math.exp(-23.0)
        if excess(25.0) > 0:
            raise Unresolved("no finite epsilon")
        least = math.exp(bracket_decreasing(excess, -23.0, 25.0, rtol=1e-3, max_iter=30)[1])
        # Chernoff's bound is poor where a few rare losses decide.
        while least > 1e-9:
            less = 0.6 * least
            if not self._certified_delta(True, less, _COARSE_TOLERANCE)(less) <= 1:
                break
            least = less
        return least

    def _certified_delta(
        self, high: bool, epsilon: float, tolerance: float
    ) -> Callable[[float], float]:
        """Delta's certified end as a function of epsilon, over exp(log_delta)."""
        chosen, unit = choose_plan(self.upper, epsilon, self.log_delta), self.log_delta
        if chosen.chernoff < unit - 15 or not math.isfinite(chosen.last - chosen.first):
            # So far out that nothing else is of use, or has digits; below it nothing is known.
            least = 1.01 * math.exp(chosen.chernoff - unit) if high else 0.0
            return lambda at: least if at >= epsilon or not high else math.inf
        kinds = self.upper if high else self.lower
        assert kinds is not None
        # All losses below the caps, on their grids, and the distribution of their sum. From here
        # on an upper end adds every error and a lower one subtracts it: ``sign``.
        parts = DiscretizedComposition(kinds, chosen, high, tolerance)
        self.exhausted = parts.layout.points > 1 << 24  # or more than float64 can tell
        kinds, atoms, sign = parts.kinds, parts.atoms, 1 if high else -1
        base = profile_of(parts.law(chosen.c), epsilon)
        lost = parts.lost * math.exp(-unit)

        # Small losses of lower pairs weigh less than those of laws of total 1, by this factor.
        kept = 1.0
        for (pair, n), (atom, _) in () if high else zip(kinds, atoms, strict=True):
            total = float(pair.tails(np.asarray([-np.inf]))[0][0]) * (1 - 2 * pair.rounding)
            over = atom.over[0] if chosen.split else 0.0
            kept *= max((min(total, 1.0) - over) / (1 - over), 0.0) ** n if over < 1 else 0.0

        if not chosen.split:
            # Without caps all finite losses are in the sum. Beside it some loss may be infinite,
            # which is charged whole.
            infinite = [
                (n, atom.over[0] if high else pair.infinite * (1 - 2 * pair.rounding))
                for (pair, n), (atom, _) in zip(kinds, atoms, strict=True)
            ]
            none = sum(n * math.log1p(-min(p, 1 - 1e-16)) for n, p in infinite)
            beyond = -math.expm1(none) * math.exp(-unit) * kept

            def whole(at: float) -> float:
                """Delta's end at epsilon where every finite loss is in the sum."""
                value, error = base(at, unit)
                return max(max(value + sign * error, 0.0) + beyond - lost, 0.0)

            return whole

        # With caps: no loss above its cap is the sum's part (``base``), one of each kind is
        # convolved with the sum of all others, and two or more enter by their probability.
        singles = [
            _SingleLargeLoss(pair, n, atom, parts.law(0.0, i), sign)
            for i, ((pair, n), (atom, _)) in enumerate(zip(kinds, atoms, strict=True))
            if atom.over[0] > 0
        ]
        both, error_p = two_or_more([(n, a.over[0]) for a, n in atoms])
        second, error_q = two_or_more([(n, a.over[1]) for a, n in atoms])
        both *= kept
        if high:
            # Q of what lies below the windows, or at minus infinity, is in no atom.
            ends = zip(kinds, chosen.lows, strict=True)
            q_above = [(float(p.tails(np.asarray([low]))[1][0]), n) for (p, n), low in ends]
            missing = sum(n * (1 - q) for q, n in q_above)
            second *= max(1 - missing, 0.0)
            short_of = shortfall(parts.groups())

        def split(at: float) -> float:
            """Delta's end at epsilon: no loss above a cap, one, and several, added up."""
            value, error = base(at, unit)
            value = max(value + sign * error, 0.0)
            one = sum(single(at) for single in singles)
            grown = math.exp(min(at, 700.0))
            # Several: P - e^epsilon Q of the event, plus what the sum below may fall short of
            # epsilon by; never more than the event's whole probability.
            several = both - grown * second + sign * (error_p + grown * error_q)
            if high:
                short = math.exp(short_of(at))
                several = min(max(several, 0.0) + both * short, both + error_p)
            elif at > 700:
                several = 0.0
            return max(value + (one + max(several, 0.0)) * math.exp(-unit) - lost, 0.0)

        return split


class _SingleLargeLoss:
    """One step of a kind above its cap, beside the sum of all others below theirs.

    D, the profile of the large loss, is convex in e^-sum. So the sums in a cell count above as two
    at its ends, with the same mean of e^-sum, and below by the tangent of D at the cell's middle
    (docs/proofs/certificate.md, Theorem 12).
    """

    def __init__(self, pair: Pair, count: int, atom: Atoms, others: Law, sign: int) -> None:
        self._law, self._pair, self._count, self._sign, self._atom = others, pair, count, sign, atom
        self._points = max(others.size // _CELLS_OF_SUMS, 1)
        first, self._total, gain, self._doubt = others.cells(self._points)
        ends = np.asarray([atom.top, max(others.last, atom.top)])
        self._inexact = 1e-15 * others.reach + pair.slack(ends)
        # e^-sum falls from 1 to ``fall`` less in a cell, relative to its first sum.
        if sign > 0:
            reach = self._points * others.width
            self._sums = np.append(first, first[-1] + reach)
            self._up = gain / -math.expm1(-reach)
        else:
            middle = -math.log1p(0.5 * math.expm1(-(self._points - 1) * others.width))
            self._sums = first + middle
            self._up = self._total * math.expm1(middle) - math.exp(middle) * gain
        self._steep = 1 / -math.expm1(-self._points * others.width) if self._points > 1 else 0.0

    def __call__(self, epsilon: float) -> float:
        """Certified count * E[D(epsilon - sum of the others)], D the large losses' profile."""
        # D at epsilon less the sum of the others: below the cap every large loss is above it.
        p, q = self._atom.over
        at = epsilon - self._sums
        grown = np.exp(np.minimum(at, 700.0))
        second = grown * q
        payoff = np.maximum(p - second, 0.0)
        beyond = np.flatnonzero(at > self._atom.top)
        if beyond.size:
            far, other = self._pair.tails(at[beyond])
            r = 2 * self._pair.rounding * self._sign
            with np.errstate(over="ignore", invalid="ignore"):
                second[beyond] = np.where(other > 0, grown[beyond] * other, 0.0)
                far = far * (1 + r) - second[beyond] * (1 - r)
            if self._sign > 0:
                # A cut that rounding moved is not the best one.
                far = np.nan_to_num(far, nan=p) + p * self._inexact
            payoff[beyond] = np.clip(np.nan_to_num(far), 0.0, p)
        # Rounding of the difference, with the exponent's.
        slack = 4e-16 * (2 + np.abs(at)) * (p + grown * q)
        payoff = np.clip(payoff + self._sign * np.minimum(slack, p), 0.0, p)
        if self._sign < 0:
            # The slope of the tangent is minus the second law's tail.
            payoff[at > 700] = 0.0
            slope = np.where(payoff > 0, np.minimum(np.nan_to_num(second), p), 0.0)
            value = float(self._total @ payoff) - float(self._up @ slope)
            turned = float(np.abs(self._up) @ slope)
            size = float(np.abs(self._total) @ payoff) + turned * (1 + 4e14 * self._pair.rounding)
            size += 0.1 * self._law.reach * float(np.abs(self._total) @ slope)
            steep = float(np.linalg.norm(slope))
        else:
            rise = np.diff(payoff)
            value = float(self._total @ payoff[:-1]) + float(self._up @ rise)
            size = float(np.abs(self._total) @ payoff[1:])
            steep = self._steep * float(np.linalg.norm(rise))
        # Of all sums, no one pays more than the first of the next cell.
        norm = math.sqrt(float(payoff @ payoff) + p * p)
        law = self._law
        error = law.inexact * math.sqrt(self._points) * norm + self._doubt * (norm + steep)
        error += (2 * law.relative + 1e-14 + 4e-16 * self._total.size) * size + law.alias * p
        end = (value + self._sign * error) * math.exp(law.log_scale)
        # The largest losses weigh p and no less than nothing, whatever is not a number.
        if self._sign > 0:
            return self._count * (end if end < p else p)
        return self._count * (end if end > 0 else 0.0)


def _bracket_crossing(
    delta: Callable[[float], float], near: float, step: float, rtol: float
) -> tuple[float, float, bool]:
    """Brackets the epsilon at which a decreasing bound on delta is 1: (low, high); or zeros.

    Looked for about ``near``; a search that goes far below it tries 0.

    Returns:
        The two, and False if the end could not be evaluated at the lower one.

    Raises:
        Unresolved: the end is not a number, or stays above 1.
    """

    @functools.cache
    def excess(epsilon: float) -> float:
        """log of the end of delta over its target; decreasing."""
        value = delta(epsilon)
        if math.isnan(value):
            raise Unresolved("not a number")
        return math.log(value) if value > 0 else -math.inf

    # The guess is above the root: go down in growing steps, and far below it to 0 at once, for
    # there a plan made for ``near`` has no digits.
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
        # The guess is below it: go up.
        for _ in range(40):
            high += step
            if excess(high) <= 0:
                break
            low, step = high, 2 * step
        else:
            raise Unresolved("no upper end")
    return *bracket_decreasing(excess, low, high, rtol=rtol, max_iter=60), True


@dataclass(frozen=True, eq=False)
class SumPlan:
    """Caps on the losses, and the window and the tilt with which their sum is computed."""

    caps: tuple[float, ...]  # the largest small loss of each kind of step
    lows: tuple[float, ...]  # the least loss of interest of each
    c: float  # the tilt
    first: float  # the least loss of the window
    last: float  # the largest
    split: bool  # True if losses above the caps are counted by themselves
    chernoff: float  # log of an upper bound on delta
    # Distances of the losses from each step's point mass, their tilted weights, and what a unit of
    # variance adds to epsilon, relative.
    spread: tuple[Array, Array, float]
    lattice: float  # a distance that the grid should divide; 0 if there is none
    atoms: AtomCounts  # coarse atoms above the steps, from which grids are chosen
    grid: float  # the width of their grid
    log_delta: float  # about where
    # Nats of probability that a window leaves outside, of the tilted and the plain law.
    outside: tuple[float, float]


@functools.lru_cache(maxsize=8)
def tilted_moments(plan: SumPlan, c: float, small: Intervals = ()) -> TiltedMoments:
    """Chernoff's bounds on sums of the coarse atoms, or of their small ones, tilted by ``c``."""
    atoms, width = list(plan.atoms), plan.grid
    for i, (low, high) in enumerate(small):
        # The atoms of this kind's small losses, given that the loss is one of them.
        atom, n = atoms[i]
        loss = atom.offset + atom.index * width
        kept = (loss >= low - width) & (loss <= high + width)
        mass = atom.mass[kept] / atom.mass[kept].sum()
        atoms[i] = replace(atom, index=atom.index[kept], mass=mass), n
    return TiltedMoments(atoms, width, c)


@functools.lru_cache(maxsize=8)
def choose_plan(kinds: Kinds, epsilon: float, log_delta: float) -> SumPlan:
    """The plan with the shortest window; one with a cap must halve it, or save digits."""
    found = plan_with_cap(kinds, epsilon, log_delta, math.inf)
    # Where delta is large no loss is rare.
    short = found.last - found.first < 30 * epsilon and found.chernoff - log_delta < 8
    if epsilon < 1e-9 or log_delta > -3 or short:
        return found
    largest = found.caps
    for factor in _CAP_FACTORS:
        if all(factor * epsilon >= high for high in largest):
            continue
        # The lower a cap, the more losses are above it: no lower one is better than too low a one.
        if not _saddle_point(kinds, epsilon, log_delta, factor)[-1] < found.chernoff + 2:
            break
        other = plan_with_cap(kinds, epsilon, log_delta, factor)
        shorter = other.last - other.first <= 0.5 * (found.last - found.first)
        if not other.split or not (shorter or other.chernoff < found.chernoff - 2):
            continue
        # What two steps above the cap may add beyond their P - e^epsilon Q must be little.
        spans = list(zip(other.lows, other.caps, strict=True))
        atoms, width = _coarse_atoms(kinds, epsilon, spans, other.caps)
        both, _ = two_or_more([(n, a.over[0]) for a, n in atoms])
        several = math.log(both + 1e-320) + shortfall([(atoms, width)])(epsilon)
        if several - log_delta < -12:
            found = other
    return found


def _coarse_atoms(
    kinds: Kinds, epsilon: float, spans: Sequence[tuple[float, float]], caps: Sequence[float]
) -> tuple[list[tuple[Atoms, int]], float]:
    """(coarse atoms above each kind of step, the width of their grid)."""
    reach = min((high - low for low, high in spans if high > low), default=1.0)
    # The widest kind's grid must be numbered, too.
    most = max(high - low for low, high in spans)
    width = max(1e-5 * min(max(epsilon, 1e-4 * reach), reach), 1e-14 * most)
    # The more steps, the less may each add.
    atoms = [
        (dominating_atoms(p, width, low, cap, min(max(3 / math.sqrt(n), 3e-3), 0.05)), n)
        for (p, n), (low, _), cap in zip(kinds, spans, caps, strict=True)
    ]
    return atoms, width


@functools.lru_cache(maxsize=4)
def _saddle_point(
    kinds: Kinds, epsilon: float, log_delta: float, factor: float
) -> tuple[list[tuple[float, float]], tuple[float, ...], AtomCounts, float, float, float]:
    """(spans, caps, coarse atoms, their grid width, the best order c, log of its bound on delta).

    delta <= E[exp(c (sum - epsilon))] max_x e^(-cx) (1 - e^-x) (Canonne, Kamath and Steinke 2020,
    arXiv:2004.00010v5, proof of Proposition 12), and the probability of what is above the caps.

    Raises:
        Unresolved: losses are too large to be put on a grid.
    """
    # What lies outside all spans together has e^-23 of delta.
    tail = math.exp(max(log_delta, -640.0) - 23) / sum(n for _, n in kinds)
    spans = [pair.span(tail) for pair, _ in kinds]
    if not all(high - low < 1e9 for low, high in spans):
        raise Unresolved("losses beyond 1e9")
    ends = [(pair.center, high) for (pair, _), (_, high) in zip(kinds, spans, strict=True)]
    caps = tuple(min(high, max(factor * epsilon, center + 1e-9)) for center, high in ends)
    atoms, width = _coarse_atoms(kinds, epsilon, spans, caps)
    # Where c times the largest sum is huge, the bound is a difference of numbers that have no
    # digits left for it.
    reach = sum(n * (abs(a.offset) + width * float(np.abs(a.index).max())) for a, n in atoms)
    # The best order on a coarse grid of orders, refined twice about it.
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


def plan_with_cap(kinds: Kinds, epsilon: float, log_delta: float, factor: float) -> SumPlan:
    """The plan for a cap of ``factor`` epsilon."""
    spans, caps, atoms, width, c, bound = _saddle_point(kinds, epsilon, log_delta, factor)
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


def shortfall(groups: Sequence[tuple[AtomCounts, float]]) -> Callable[[float], float]:
    """log of a bound on E[(e^(epsilon - sum) - 1)+], given two steps or more above the cap.

    Chernoff's, as in ``_saddle_point``, of the steps below it. How many these are is not known, so
    that only what raises a moment is counted. At most 0 is of use: then the event's probability
    bounds what it adds. Groups are of atoms and the widths of their grids; the bound is a function
    of epsilon.
    """
    tops = [a.top for atoms, _ in groups for a, _ in atoms if a.over[0] > 0]
    if not tops or min(tops) < 0:
        return lambda epsilon: 0.0 if tops else -math.inf
    b = np.geomspace(1e-3, 1e9, 49)
    bound = b * np.log(b) - (1 + b) * np.log1p(b) - (1 + b) * (2 * min(tops))
    for atom, n, width in ((a, n, width) for atoms, width in groups for a, n in atoms):
        one = log_moments([(atom, 1)], width, -(1 + b)) - math.log1p(-min(atom.over[0], 1 - 1e-16))
        bound = bound + n * np.maximum(one, 0.0) * (1 + 1e-9)
    return lambda epsilon: min(float(np.nanmin(bound + (1 + b) * epsilon)) + 1e-3, 0.0)


class DiscretizedComposition:
    """A composition's steps on the grids that suit a plan.

    Attributes:
        layout: the grids.
        kinds: the pairs that may have losses above the caps, with their numbers.
        atoms: those of ``kinds`` on the grid on which they are put.
        lost: probability that a lower end has to give up.
    """

    def __init__(self, kinds: Kinds, plan: SumPlan, high: bool, tolerance: float) -> None:
        """Chooses grids on which an end is within about ``tolerance`` of epsilon."""
        self.layout, self.kinds, self.lost = choose_layout(plan, tolerance), kinds, 0.0
        self._plan, self._put = plan, dominating_atoms if high else dominated_atoms
        # Width of far cells, over their distance, that adds a tenth of the tolerance.
        distance, weight, factor = plan.spread
        added = factor * float(weight @ distance**2) / 6
        self._fine = min(0.02, max(math.sqrt(0.1 * tolerance / max(added, 1e-300)), 1e-4))
        self._inner: list[tuple[SmallLosses, int]] = []
        self._found: dict[float, list[Atoms]] = {}  # by the width of the grid
        if self.layout.few and not self._few_matter():
            self.layout = choose_layout(plan, tolerance, few=False)
        if self.layout.small:
            each = zip(kinds, self.layout.small, strict=True)
            self._inner = [(SmallLosses(pair, *ends), n) for (pair, n), ends in each]
            self.kinds = tuple((LargeLosses(inner), n) for inner, n in self._inner)
            if not high:
                # As many small losses are left out as there may be large ones.
                log_lost = plan.log_delta + math.log(GIVEN_UP * tolerance / len(kinds))
                for i, (inner, n) in enumerate(self._inner):
                    count = binomial_upper_bound(n, LargeLosses(inner).chance(), log_lost)
                    self._inner[i] = inner, n - count
                    self.lost += math.exp(log_lost) if count < n else 0.0
        self.atoms = self._atoms_on(self.layout.widths[-1 if self._inner else 0])

    def groups(self) -> list[tuple[AtomCounts, float]]:
        """All atoms below the caps, with the widths of their grids."""
        widths = self.layout.widths
        if not self._inner:
            return [(self.atoms, widths[0])]
        return [(self.atoms, widths[-1]), (self._small_loss_atoms(widths[0]), widths[0])]

    def law(self, c: float, without: int | None = None) -> Law:
        """The law of the sum of all losses below the caps, tilted, ``without`` one of a kind."""
        plan, outer = self._plan, functools.partial(self._atoms_on, without=without)
        grids = replace(self.layout, outside=plan.outside[c == 0])
        steps: AtomsOfWidth = self._small_loss_atoms if self._inner else outer
        large = (outer, tilted_moments(plan, c, grids.small)) if self._inner else None
        return law_of_sum(steps, self._put, grids, tilted_moments(plan, c), plan.first, large)

    def _few_matter(self) -> bool:
        """True if few frequencies matter to the atoms of the only grid, as they do to coarse ones.

        Losses on a lattice of their own come back at other frequencies.
        """
        (width,), size = self.layout.widths, self.layout.size
        atoms = self._atoms_on(width)
        return all(
            low_frequencies([(a.index, tilt(a, c * width)[0], n) for a, n in atoms], size)
            for c in ((self._plan.c, 0.0) if self._plan.split else (self._plan.c,))
        )

    def _atoms_on(self, width: float, without: int | None = None) -> AtomCounts:
        """The atoms of ``kinds`` on a grid with their numbers, ``without`` one step of a kind."""
        if width not in self._found:
            ends = zip(self.kinds, self._plan.lows, self._plan.caps, strict=True)
            self._found[width] = [
                self._put(pair, width, low, cap, self._fine) for (pair, _), low, cap in ends
            ]
        found = zip(self._found[width], self.kinds, strict=True)
        return [(atom, n - (i == without)) for i, (atom, (_, n)) in enumerate(found)]

    def _small_loss_atoms(self, width: float) -> list[tuple[Atoms, int]]:
        """The atoms of the small losses on a grid, with their numbers."""
        return [(self._put(p, width, *p.span(0.0), self._fine), n) for p, n in self._inner]


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


def binomial_upper_bound(n: int, chance: float, log_target: float) -> int:
    """A number that a binomial variable exceeds with a probability of e^log_target at most.

    Chernoff's bound: P(K >= k) <= e^(-n p) (e n p/k)^k for k > n p (Hoeffding 1963, Theorem 1,
    with 1 - p <= e^-p).
    """
    mean, k = n * chance, math.ceil(n * chance) + 1
    while mean > 0 and k <= n and k * (1 + math.log(mean / k)) - mean > log_target - 1e-6:
        k += max(k // 100, 1)
    return min(k - 1, n)


@functools.lru_cache(maxsize=8)
def choose_layout(plan: SumPlan, tolerance: float, few: bool = True) -> Layout:
    """The grids with the fewest points on which both ends differ by about ``tolerance`` of epsilon.

    One grid; or one for bunches of steps and a coarser one for their sum; or one for small losses
    and a coarser one, to which large losses go at once. Where ``few`` frequencies matter to coarse
    atoms, a fine grid costs no more than its atoms: then it is one, however long.
    """
    reach = plan.last - plan.first
    needed = reach / _widest_grid(plan, tolerance)
    size = _window_size(needed)
    # A width that is hardly larger, on whose grid point masses lie. Those between the two lie at
    # fractions of their distance.
    width = reach / size
    count = math.floor(plan.lattice / width)
    count -= count % 120 if count >= 120 else 0
    width = plan.lattice / count if count else width
    best = Layout((width,), 1, size, size if needed <= SIZES[1] else math.inf)
    if plan.lattice > width or size < 1 << 14:
        return best
    if few and 2 * needed <= _FINEST:
        # One half as wide as needed spares a second, finer one for a lower end.
        finer = 2 << math.ceil(math.log2(needed))
        scale, rate = plan.grid * finer / reach, plan.c * plan.grid
        kinds = [(np.rint(a.index * scale).astype(int), tilt(a, rate)[0], n) for a, n in plan.atoms]
        if low_frequencies(kinds, finer):
            return Layout((reach / finer,), 1, finer, finer, few=True)
    other = _bunched_layout(plan, True, 0.25 * tolerance)
    best = other if other and other.points < 0.6 * best.points else best
    if best.points > _MANY_POINTS:
        for power in range(2, 22, 2):
            small = _small_loss_intervals(plan, reach * 2.0**-power, tolerance)
            for several, share in ((False, 4), (True, 6)) if small else ():
                other = _bunched_layout(plan, several, tolerance / share, small)
                best = other if other and other.points < 0.6 * best.points else best
    return best


def _small_loss_intervals(plan: SumPlan, reach: float, tolerance: float) -> Intervals:
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
        given_up = binomial_upper_bound(n, chance, plan.log_delta + math.log(GIVEN_UP * tolerance))
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


def _bunched_layout(
    plan: SumPlan, several: bool, tolerance: float, small: Intervals = ()
) -> Layout | None:
    """A fine grid for bunches and a coarse one for their sum, each of which adds ``tolerance``.

    With ``small`` losses the bunches are of those alone, and the coarse grid is fine enough for the
    large ones. There is one bunch alone unless ``several``. None where that is of no use.
    """
    # r bunches of n/r steps: putting a bunch on the coarse grid adds its rounding r times only, so
    # that the coarse width may be sqrt(n/r) times that of a grid for all n steps.
    distance, weight, factor = plan.spread
    counts = np.asarray([n for _, n in plan.atoms])
    bunches = round(math.sqrt(float(counts.max()))) if several else 1
    fine, coarse = _widest_grid(plan, tolerance), math.sqrt(5 * tolerance / (factor * bunches))
    if small:
        far = distance > max(high - low for low, high in small) / 2
        fine = _widest_grid(plan, tolerance, (distance[~far], weight[~far]))
        coarse = min(coarse, _widest_grid(plan, tolerance, (distance[far], weight[far])))
    if (several and bunches < 16) or coarse < 4 * fine:
        return None
    # The points of the last window, and of a bunch's under either tilt.
    counted = [(plan.last - plan.first) / coarse]
    size = _window_size(counted[0])
    coarse = (plan.last - plan.first) / size
    nats, part = 2 + math.log(bunches), counts // bunches
    for c, outside in zip((plan.c, 0.0) if plan.split else (plan.c,), plan.outside, strict=False):
        first, last = tilted_moments(plan, c, small).window(part, outside + nats)
        counted.append((last - first) / fine)
    points = sum(_window_size(n) if n <= SIZES[1] else math.inf for n in counted)
    # Every bunch brings the rounding of its transform.
    noise = 3e-13 * math.sqrt(_window_size(counted[1])) * bunches
    noise *= math.exp(min(max(plan.outside) - OUTSIDE, 700.0)) * factor / (plan.c * (plan.c + 1))
    points *= max(1.0, noise / tolerance)
    return Layout((fine, coarse), bunches, size, points, small)


def _widest_grid(
    plan: SumPlan, tolerance: float, spread: tuple[Array, Array] | None = None
) -> float:
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


def _window_size(count: float) -> int:
    """The power of two that is not below ``count``, within the sizes that are used."""
    return 1 << math.ceil(math.log2(min(max(count, SIZES[0]), SIZES[1])))
