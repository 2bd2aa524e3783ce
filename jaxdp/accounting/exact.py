"""The exact accountant: the contour integral in both directions, widened by its error."""

import math
from dataclasses import dataclass

from jaxdp.accounting.base import Unresolved
from jaxdp.accounting.bounds import Bound, Relation
from jaxdp.accounting.canonical import Run
from jaxdp.accounting.contour import Contour, build, period
from jaxdp.accounting.loss import Pair, directions, separation
from jaxdp.accounting.saddle import Composition, Moments, chernoff, choose_order

_GOOD = 1e-9  # relative error of delta at which refinement stops
_CUT = 1e-11  # probability of the outputs cut off, relative to delta


@dataclass(frozen=True)
class _Evaluated:
    """A contour and a second, independent discretisation of the same integral."""

    contour: Contour
    check: Contour
    lost: float

    def delta(self, epsilon: float) -> tuple[float, float]:
        """(delta, error): the error is the disagreement of the two, plus aliasing and rounding."""
        value = self.contour.delta(epsilon)
        error = 10 * abs(value - self.check.delta(epsilon)) + 1e-10 * abs(value)
        return value, error + self.lost + self.contour.rounding_error(epsilon)


def compositions(run: Run, relation: Relation, delta: float) -> list[Composition]:
    """The run in each direction that must be bounded, forward first, for deltas near ``delta``."""
    sampled = [(s, n) for s, n in run.steps if s.sampling_prob < 1]
    mu2 = math.fsum(
        n * (separation(relation) / s.noise_multiplier) ** 2
        for s, n in run.steps
        if s.sampling_prob == 1
    )
    log_tail = math.log(_CUT) + math.log(delta)
    return [
        Composition(tuple((Pair(s, relation, reverse), n) for s, n in sampled), mu2, log_tail)
        for reverse in (directions(relation) if sampled else (False,))
    ]


def exact_epsilon(run: Run, relation: Relation, delta: float) -> Bound:
    """Epsilon at delta, as a bound.

    Raises:
        Unresolved: the integral cannot be evaluated well.
    """
    best = (0.0, 0.0, 0.0)
    for i, composition in enumerate(compositions(run, relation, delta)):
        if i > 0 and best[0] > 0 and negligible(composition, best[0], delta):
            continue
        found = _epsilon_one_way(composition, delta)
        best = (max(best[0], found[0]), max(best[1], found[1]), max(best[2], found[2]))
    note = "delta(0) is already below the target" if best[2] == 0 else ""
    return Bound(*best, "exact", note)


def exact_delta(run: Run, relation: Relation, epsilon: float) -> Bound:
    """Delta at epsilon, as a bound; otherwise as ``exact_epsilon``."""
    best = (0.0, 0.0, 0.0)
    for reverse in range(len(compositions(run, relation, 1e-9))):
        if reverse and best[0] > 0:
            composition = compositions(run, relation, best[0])[reverse]
            if negligible(composition, epsilon, best[0]):
                continue
        value, error = _delta_one_way(run, relation, reverse, epsilon)
        found = (max(value - error, 0.0), min(max(value, 0.0), 1.0), min(value + error, 1.0))
        best = (max(best[0], found[0]), max(best[1], found[1]), max(best[2], found[2]))
    return Bound(*best, "exact")


def negligible(composition: Composition, epsilon: float, delta: float) -> bool:
    """True if this direction's delta at epsilon is provably below ``delta``."""
    if composition.ceiling() <= epsilon:
        return True
    try:
        _, moments = choose_order(composition, math.log(delta), None)
        return chernoff(moments, epsilon) < math.log(delta) - 1e-6
    except Unresolved:
        pass
    # Orders that suit delta cannot be tabulated; lower ones are looser and may do.
    order = 8.0
    while order < 1e12:
        try:
            if chernoff(Moments(composition, order), epsilon) < math.log(delta) - 1e-6:
                return True
        except Unresolved:
            return False
        order *= 8
    return False


def _epsilon_one_way(composition: Composition, delta: float) -> tuple[float, float, float]:
    """(lower, estimate, upper) in one direction."""
    evaluated, epsilon = _evaluate(composition, delta)
    return _widen(evaluated, _solve(evaluated.contour, epsilon, delta), delta)


def _evaluate(composition: Composition, delta: float) -> tuple[_Evaluated, float]:
    """The integral on a line that suits the epsilon of ``delta``, and roughly that epsilon."""
    log_delta = math.log(delta)
    c, moments = choose_order(composition, log_delta, None)
    epsilon = max(moments.saddle(c)[0], 0.0)
    if epsilon == 0:
        c, moments = choose_order(composition, None, 0.0)
    for _ in range(15):
        c, length = cheapest(moments, c, epsilon, log_delta)
        contour = _extend(composition, moments, c, epsilon, length)
        previous, epsilon = epsilon, _solve(contour, epsilon, delta)
        # The contour's length and its aliasing were bounded for the previous epsilon.
        distance = epsilon - composition.floor()
        resolved = contour.decayed or distance > 0.8 * (previous - composition.floor())
        better, better_moments = choose_order(composition, None, epsilon)
        near = abs(math.log(better / c)) < 0.2 or abs(epsilon - previous) < 0.1 * distance
        if resolved and near and period(moments, c, epsilon, log_delta) <= contour.length:
            break
        c, moments = better, better_moments
    else:
        raise Unresolved("the contour did not settle")
    return _confirm(composition, contour, epsilon), epsilon


def cheapest(moments: Moments, c: float, epsilon: float, log_delta: float) -> tuple[float, float]:
    """(order, period): the saddle, or a lower order where rare huge losses stretch the period.

    Where a step's loss has a heavy tail the law tilted at the saddle has a second mode far out. The
    answer is the same on any line, so a line that leaves that mode behind is as good and shorter.
    """
    best = c, period(moments, c, epsilon, log_delta)
    for factor in (0.7, 0.5, 0.35, 0.25, 0.15):
        length = period(moments, factor * c, epsilon, log_delta)
        if length < (0.5 if best[0] == c else 0.95) * best[1]:
            best = factor * c, length
    return best[0], 1.1 * best[1]


def _solve(contour: Contour, start: float, delta: float) -> float:
    """Epsilon >= 0 where the contour's delta is ``delta`` (0 when it is already below there)."""
    low, high, x = 0.0, math.inf, max(start, 0.0)
    for _ in range(100):
        value, slope = contour.delta_and_slope(x)
        if value > delta:
            low = x
        else:
            high = x
            if x == 0:
                return 0.0
        step = math.inf
        if value > 0 and slope > 0:
            step = value / slope * math.log(value / delta)
        new = x + step
        if not low <= new < high or abs(step) > 8 / contour.c:
            new = 0.5 * (low + high) if high < math.inf else x + 1 / contour.c
        if low == 0 and new < 0.05 * start:
            # Zero itself may do: halving would take a thousand steps to find out.
            new, start = 0.0, 0.0
        if abs(new - x) <= 2e-15 * new or high * (1 - 1e-15) <= low:
            return x
        x = new
    return x


def _widen(evaluated: _Evaluated, epsilon: float, delta: float) -> tuple[float, float, float]:
    """Move away from the estimate until delta, with its error, is on the right side again."""
    value, error = evaluated.delta(epsilon)
    if epsilon == 0 and value + error <= delta:
        return 0.0, 0.0, 0.0
    slope = max(evaluated.contour.delta_and_slope(epsilon)[1], 1e-300)
    step = 2 * error / slope + 1e-13 * epsilon
    lower, upper = epsilon, epsilon
    for _ in range(60):
        upper = epsilon + step
        value, error = evaluated.delta(upper)
        if value + error <= delta:
            break
        step *= 2
    else:
        raise Unresolved("no verified upper end")
    step = 2 * error / slope + 1e-13 * epsilon
    for _ in range(60):
        lower = max(epsilon - step, 0.0)
        value, error = evaluated.delta(lower)
        if lower == 0 or value - error >= delta:
            break
        step *= 2
    return lower, epsilon, upper


def _delta_one_way(
    run: Run, relation: Relation, reverse: int, epsilon: float
) -> tuple[float, float]:
    """(delta, error); the cut-off follows delta down until it is small enough for it."""
    target = 1e-9
    for _ in range(40):
        composition = compositions(run, relation, target)[reverse]
        c, moments = choose_order(composition, None, epsilon)
        log_delta = moments.saddle(c)[1]
        if log_delta >= math.log(target) - 3:
            break
        target = math.exp(max(log_delta, 1.5 * math.log(target), -690))
        if target < 1e-295:
            raise Unresolved("delta underflows")
    c, length = cheapest(moments, c, epsilon, log_delta)
    contour = _extend(composition, moments, c, epsilon, length)
    return _confirm(composition, contour, epsilon).delta(epsilon)


def _extend(
    composition: Composition, moments: Moments, c: float, epsilon: float, length: float
) -> Contour:
    """A contour that is long enough.

    Where the integrand decays that is soon. Where steps that were never sampled leave a point mass
    in the distribution of the loss it does not decay, but oscillates with the distance of epsilon
    from the point mass, so that a smooth taper beyond about 200/distance changes nothing.
    """
    last = 8.6 / math.sqrt(moments.derivatives(c)[2])
    contour = build(composition, c, last, length)
    for doublings in range(18):
        if contour.decayed:
            break
        if doublings >= 3 and last * (epsilon - composition.floor()) > 200:
            break
        last *= 2
        try:
            contour = build(composition, c, last, length)
        except Unresolved:
            break
    return contour


def _confirm(composition: Composition, contour: Contour, epsilon: float) -> _Evaluated:
    """Add an independent discretisation, and lengthen both while they disagree at epsilon."""
    lost = 8 * math.exp(composition.log_tail)
    best: _Evaluated | None = None
    best_error = math.inf
    for _ in range(6):
        last, length = float(contour.frequencies[-1]), contour.length
        try:
            check = build(composition, contour.c, last * 1.37, length * 1.21)
        except Unresolved:
            break
        evaluated = _Evaluated(contour, check, lost)
        value, error = evaluated.delta(epsilon)
        if error < best_error:
            best, best_error = evaluated, error
        if error <= _GOOD * value:
            break
        try:
            contour = build(composition, contour.c, last * 2, length * 1.1)
        except Unresolved:
            break
    if best is None:
        raise Unresolved("the integrand does not decay")
    return best
