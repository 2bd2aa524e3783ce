"""Privacy queries: epsilon at a delta, delta at an epsilon, and what fits a budget.

A query flattens its event to releases with counts, and asks an accountant for a ``Bound``. Noise
that is a Gaussian's but for a total-variation distance (``GridNoise``) is charged to delta here.
Calibration searches over events; its answer was checked by a query of the proven epsilon.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import special

from jaxdp import arguments as check
from jaxdp.accounting import certificate, contour, gaussian
from jaxdp.accounting.events import (
    ADD,
    Bound,
    Event,
    Gaussian,
    PoissonSampled,
    Relation,
    Repeated,
    Unresolved,
    UnsupportedEventError,
)
from jaxdp.accounting.flat import FlatRun, alternatives, directions, flatten, least
from jaxdp.accounting.rdp import best_conversion, rdp_to_delta

NOTHING_LEFT = "nothing of delta is left beside the distance of the noise from a Gaussian's"
_ZERO = "delta(0) is already below the target"
_BETWEEN = "no tight value is known: the truth lies between the ends"
_LIMIT = "a limit for many small steps; it may be below the truth, so there is no upper end"
_UPPER_ONLY = "upper bound only: no lower end is proven"
_UNPROVEN = "an estimate alone was asked for: no end is proven"
_ROUGH_TOLERANCE = 1e-2  # tolerance from which on an upper end is enough
_MARGIN = 1 + 1e-9  # of the rounding of what a distance costs
_JUMP_SLOPE = 100.0  # of a cost in the log of the value: so steep is no accountant's curve
_CLOSE = 1e-6  # relative, of what is found where a step is a sampled Gaussian
_NEAR_ESTIMATE = ("auto", "exact", "gdp")  # accountants whose upper end is hardly above it


def epsilon(
    event: Event,
    delta: float,
    relation: Relation = ADD,
    accountant: str = "auto",
    tolerance: float | None = None,
) -> Bound:
    """Bounds on the epsilon of ``event`` at ``delta``; report ``.upper``.

    Args:
        event: what was released, see ``jaxdp.accounting.events``.
        delta: in [1e-300, 1), or 0 or 1.
        relation: which data sets are neighbours.
        accountant: "auto" (the tightest that covers the event) or the name of an accountant.
        tolerance: relative width of the interval that is aimed at; by default 1e-4 where the record
            is expected in one step or more, else 5e-4. A tenth takes about three times as long.
            From 1e-2 on only ``upper`` is looked for, and similar steps count as the least private
            of them. Infinity asks for ``estimate`` alone, in milliseconds: ``upper`` is then proven
            only where there is no estimate.

    Returns:
        A ``Bound``, whose note says why where it is infinite or exactly 0.

    Raises:
        ValueError: for an argument out of its range.
        UnsupportedEventError: when the event has no bound under this relation and accountant.

    Example:
        >>> from jaxdp import accounting as acc
        >>> step = acc.PoissonSampled(acc.Gaussian(noise_multiplier=1.0), sampling_prob=0.01)
        >>> bound = acc.epsilon(acc.Repeated(step, 1_000), delta=1e-5)
        >>> bound.lower <= bound.estimate <= bound.upper
        True
        >>> print(f"{bound.upper:.2f}")
        1.83
    """
    at = check.target("delta", delta)
    if tolerance is not None and tolerance != math.inf:
        tolerance = check.positive("tolerance", tolerance)
    if len(seen := alternatives(event, relation)) > 1:
        return largest(epsilon(each, delta, relation, accountant, tolerance) for each in seen)
    run = flatten(seen[0], relation)
    question = Question("epsilon", run, relation, at, tolerance)
    _require_supported(run, relation, accountant)
    if at == 1:
        found = Bound(0, 0, 0, "none", "any release has it")
    elif at == 0 and run.distance:
        found = Bound(0.0, None, math.inf, "none", NOTHING_LEFT)
    elif at == 0:
        found = _epsilon_at_delta_zero(run, relation)
    else:
        found = (_epsilon_with_distance if run.distance else _compute_bound)(question, accountant)
    if accountant == "auto" and (inside := least(seen[0])) != seen[0]:
        found = _above(found, epsilon(inside, delta, relation, tolerance=tolerance).lower)
    return replace(found, relation=relation)


def delta(
    event: Event,
    epsilon: float,
    relation: Relation = ADD,
    accountant: str = "auto",
    tolerance: float | None = None,
) -> Bound:
    """Bounds on the delta of ``event`` at ``epsilon`` >= 0, infinity included.

    At infinity delta is the probability of an infinite loss.

    Arguments and errors as for ``epsilon``; the usual tolerance is 1e-3.
    """
    at = check.real("epsilon", epsilon)
    if at != math.inf:
        # delta falls with epsilon, so that the answer at 1e100 holds for every larger one.
        at = min(check.non_negative("epsilon", epsilon), 1e100)
    if tolerance is not None and tolerance != math.inf:
        tolerance = check.positive("tolerance", tolerance)
    if len(seen := alternatives(event, relation)) > 1:
        return largest(delta(each, epsilon, relation, accountant, tolerance) for each in seen)
    run = flatten(seen[0], relation)
    question = Question("delta", run, relation, at, tolerance)
    _require_supported(run, relation, accountant)
    if run.distance:
        found = _delta_with_distance(question, accountant)
    elif at == math.inf and run.parts:
        found = _delta_at_infinity(run, relation)
    else:
        found = _compute_bound(question, accountant)
    if accountant == "auto" and (inside := least(seen[0])) != seen[0]:
        found = _above(found, delta(inside, at, relation, tolerance=tolerance).lower)
    return replace(found, relation=relation)


def largest(bounds: Iterable[Bound]) -> Bound:
    """The bound of the largest of several values, each the truth of some pair of neighbours."""
    found = tuple(bounds)
    known = [bound.estimate for bound in found if bound.estimate is not None]
    estimate = max(known) if len(known) == len(found) else None
    worst = max(found, key=lambda bound: bound.upper)
    return replace(worst, lower=max(bound.lower for bound in found), estimate=estimate)


def _above(bound: Bound, lower: float) -> Bound:
    """The bound with the lower end of what the event contains, where that is larger."""
    note = _BETWEEN if lower > 0 and bound.note == _UPPER_ONLY else bound.note
    return replace(bound, lower=max(bound.lower, min(lower, bound.upper)), note=note)


def supports(event: Event, relation: Relation = ADD, accountant: str = "auto") -> bool:
    """True if ``epsilon(event, ..., relation, accountant)`` would answer rather than refuse.

    Raises:
        ValueError: for something that is not an event, a relation or an accountant.
    """
    try:
        for seen in alternatives(event, relation):
            _require_supported(flatten(seen, relation), relation, accountant)
    except UnsupportedEventError:
        return False
    return True


def trivial_bound(run: FlatRun) -> Bound | None:
    """The answer to runs that need no accountant: nothing released, or nothing guaranteed."""
    if run.infinite:
        return Bound(0.0, None, math.inf, "none", f"no guarantee: {run.infinite}")
    if not (run.steps or run.parts):
        return Bound(0.0, 0.0, 0.0, "none", "nothing that depends on the data was released")
    return None


def _epsilon_at_delta_zero(run: FlatRun, relation: Relation) -> Bound:
    """Epsilon at delta 0: the sum of the largest losses."""
    if known := trivial_bound(run):
        return known
    if run.steps:
        lower, estimate = (0.0, None) if run.dominated else (math.inf, math.inf)
        return Bound(lower, estimate, math.inf, "none", "Gaussian noise: no loss is the largest")
    value = math.fsum(n * part.pure(relation) for part, n in run.parts)
    tight = value < math.inf and all(part.pairs(relation, False) for part, _ in run.parts)
    lower, estimate = (value * (1 - 1e-12), value) if tight else (0.0, None)
    return Bound(lower, estimate, value * (1 + 1e-12), "none")


def _delta_at_infinity(run: FlatRun, relation: Relation) -> Bound:
    """Delta at an infinite epsilon: the probability that some loss is infinite."""
    log_none = 0.0
    for part, n in run.parts:
        pairs = part.pairs(relation, True)
        some = max((pair.infinite for pair in pairs), default=0.0)
        if not pairs and not np.isfinite(part.renyi(relation, np.asarray([2.0]))).any():
            some = 1.0
        log_none += n * (math.log1p(-some) if some < 1 else -math.inf)
    upper = 1.0 if run.infinite else min(1.0, -math.expm1(log_none) * (1 + 1e-12))
    estimate = None if upper else 0.0
    return Bound(0.0, estimate, upper, "none", "the probability of an infinite loss")


# A release whose law is near that of the run: a total-variation distance is charged to delta.
#
# If M is (epsilon, delta)-private and every output law of M' is within t of M's in total variation,
# then M' is (epsilon, delta + (1 + e^epsilon) t)-private: P'(S) <= P(S) + t <= e^epsilon Q(S) +
# delta + t <= e^epsilon (Q'(S) + t) + delta + t. Over the steps of a run, each adaptive, distances
# add up.


def _delta_cost(epsilon: float, distance: float) -> float:
    """The delta that a total-variation distance costs at epsilon; infinite beyond float64."""
    return (1 + math.exp(epsilon)) * distance * _MARGIN if epsilon < 700 else math.inf


def _epsilon_with_distance(question: "Question", accountant: str) -> Bound:
    """Bounds on epsilon where the run's total-variation distance is charged to delta."""
    run, relation, target = question.run, question.relation, question.at
    none = Bound(0.0, None, math.inf, "none", NOTHING_LEFT)
    if known := trivial_bound(run):
        # Without a run that depends on data only the distance is charged.
        return known if run.infinite or _delta_cost(0.0, run.distance) <= target else none
    # An epsilon that is proven at half of delta says what the distance costs at most.
    start = math.inf
    if not run.dominated:
        start = best_conversion("epsilon", run.renyi(relation), 0.5 * target)
    if not math.isfinite(start):
        start = _compute_bound(replace(question, at=0.5 * target, tolerance=None), accountant).upper
    share = _delta_cost(start, run.distance)
    if not share <= 0.5 * target:
        return none
    bound = _compute_bound(replace(question, at=(target - share) * (1 - 1e-15)), accountant)
    upper = min(bound.upper, start)
    lower, share = min(bound.lower, upper), share / target
    # The lower end is of delta (1 - share) and must be of delta (1 + share). delta falls with x =
    # e^epsilon as a convex function, so x is convex in delta: at 1 - share it is at most (1 - w)
    # times that at 1 + share and w times that at 1/2, w = 2 share / (1/2 + share).
    weight = 2 * share / (0.5 + share) * _MARGIN
    lost = weight * math.exp(min(start - lower, 700.0))
    lower = max(0.0, (lower + math.log1p(-lost)) * (1 - 1e-12)) if lost < 1 else 0.0
    estimate = None if bound.estimate is None else min(max(bound.estimate, lower), upper)
    return Bound(lower, estimate, upper, bound.accountant, bound.note)


def _delta_with_distance(question: "Question", accountant: str) -> Bound:
    """Bounds on delta, to which the run's total-variation distance is charged."""
    share = _delta_cost(question.at, question.run.distance)
    if not share < 1:
        return Bound(0.0, None, 1.0, "none", NOTHING_LEFT)
    bound = _compute_bound(question, accountant)
    lower, upper = max(0.0, bound.lower - share), (bound.upper + share) * (1 + 1e-15)
    return replace(bound, lower=lower, upper=min(1.0, upper))


# The accountants.


@dataclass(frozen=True)
class Question:
    """One query of a flat run: epsilon at a delta, or delta at an epsilon."""

    of: Literal["epsilon", "delta"]
    run: FlatRun  # its distance is charged elsewhere
    relation: Relation  # which data sets are neighbours
    at: float  # the other of the two; an epsilon may be infinite
    tolerance: float | None = None  # as of ``epsilon``


def _require_supported(run: FlatRun, relation: Relation, accountant: str) -> None:
    """Refuses a run for which the accountant has no bound.

    Raises:
        UnsupportedEventError: with the reason.
        ValueError: for an unknown accountant.
    """
    if accountant not in ACCOUNTANTS:
        expected = sorted(name for name in ACCOUNTANTS if name != "auto")
        raise ValueError(f"accountant={accountant!r}: expected 'auto' or one of {expected}")
    if trivial_bound(run):
        return
    if run.parts and accountant not in ("auto", "rdp"):
        name = run.parts[0][0].type_name
        raise UnsupportedEventError(f"{name} by accountant {accountant}: not covered")
    if reason := ACCOUNTANTS[accountant][1](run, relation):
        raise UnsupportedEventError(f"{reason} by accountant {accountant} under {relation.value}")


def _compute_bound(question: Question, accountant: str) -> Bound:
    """The bound of the accountant named, or for "auto" of the tightest that covers the run.

    Raises:
        UnsupportedEventError: when the accountant cannot resolve the run.
    """
    run = question.run
    if known := trivial_bound(run):
        upper = known.upper if question.of == "epsilon" else min(known.upper, 1.0)
        return replace(known, upper=upper)
    if question.of == "delta" and question.at == math.inf and not run.parts:
        # Gaussian noise on everything: no output is possible under one law alone.
        return Bound(0.0, 0.0, 0.0, "none", "no output of the run has an infinite loss")
    try:
        bound = ACCOUNTANTS[accountant][0](question)
        for kind in dict.fromkeys(type(event) for event, _ in run.dominated):
            of, relation, at = question.of, question.relation, question.at
            bound = kind.refine(bound, of, run, relation, at, accountant)
    except Unresolved as error:
        raise UnsupportedEventError(
            f"{run}: {accountant} under {question.relation.value} cannot resolve the composition "
            f"({error}); use accountant 'auto'"
        ) from None
    # The Gaussian in the place of such an event is above it, so that the lower end is lost.
    return replace(bound, lower=0.0, estimate=None) if run.dominated else bound


def _certified(question: Question, renyi: bool = False) -> Bound:
    """The certificate's bound; with ``renyi`` Renyi's where there are no pairs, or it is less.

    Raises:
        Unresolved: no upper end was found.
    """
    run, relation, at = question.run, question.relation, question.at
    aim, of_epsilon = question.tolerance, question.of == "epsilon"
    poisson = all(step.sampling == "poisson" for step, _ in run.steps) and not run.parts
    full = poisson and all(step.sampling_prob == 1 for step, _ in run.steps)
    if renyi and full:
        return _gdp(question)
    if renyi and not all(part.pairs(relation, True) for part, _ in run.parts):
        return _rdp(question)
    # One Gaussian step on a Poisson sample has a closed form.
    if poisson and len(run.steps) == 1 and run.steps[0][1] == 1:
        return _single_step(question)
    if of_epsilon and poisson:
        # The total variations of steps add up to more than delta(0) of all: below it every delta
        # has epsilon exactly 0.
        total = 0.0
        for step, n in run.steps:
            mu = relation.separation / step.noise_multiplier
            total += n * step.sampling_prob * float(special.erf(mu / (2 * math.sqrt(2))))
        if total * (1 + 1e-12) <= at:
            return Bound(0.0, 0.0, 0.0, "exact", _ZERO)

    # The contour integral's value, which is no bound, says where to look.
    estimate, rough = None, aim is not None and aim >= _ROUGH_TOLERANCE
    if poisson and not run.dominated and (not rough or aim == math.inf):
        try:
            if not of_epsilon:
                estimate = contour.delta(run, relation, at)
            elif full:
                estimate = _gdp(question).estimate
            else:
                estimate = contour.epsilon(run, relation, at)
        except Unresolved:
            pass
    if aim == math.inf and estimate is not None:
        return Bound(0.0, estimate, math.inf if of_epsilon else 1.0, "exact", _UNPROVEN)
    # The width that is aimed at. Where an upper end is enough, similar steps count as the least
    # private of them. Where a record is rarely drawn at all, delta is decided by few steps and a
    # width costs more.
    if rough:
        run, estimate = run.merge_similar(), None
        goal = aim or _ROUGH_TOLERANCE
        if aim == math.inf:
            goal = 2e-4 if of_epsilon else _ROUGH_TOLERANCE
    else:
        sampled = sum(n * s.sampling_prob for s, n in run.steps) + sum(n for _, n in run.parts)
        goal = aim or ((9.8e-5 if sampled >= 1 else 5e-4) if of_epsilon else 1e-3)

    # The certificate, on the pairs of the run. Delta's tails are cut for an expected delta, so that
    # a better guess is a new certificate.
    try:
        if of_epsilon:
            found = directions(run, relation, math.log(at), goal, not rough)
            lower, upper = certificate.bounds(found, near=estimate or None)
        else:
            guess = estimate or rdp_to_delta(run.renyi(relation), at)
            for _ in range(8):
                found = directions(run, relation, math.log(max(guess, 1e-300)), goal, not rough)
                lower, upper = certificate.bounds(found, at)
                # Tails were cut for the delta that was expected.
                if upper >= 1e-3 * guess or guess < 1e-290:
                    break
                guess = max(upper, 1e-300)
    except Unresolved:
        if not renyi:
            raise
        return _rdp(question)
    # Two ways to one number: the estimate must lie within the ends, and where these are wide the
    # Renyi bound may be the smaller upper end.
    bound = _with_estimate(lower, upper, estimate, found[0].lower is not None, question.of)
    wide = not rough and bound.upper - bound.lower > 3e-2 * bound.upper
    if renyi and (wide or any(direction.by_moments for direction in found)):
        return _tighten(bound, _rdp(question))
    return bound


def _with_estimate(
    lower: float, upper: float, estimate: float | None, both: bool, of: str
) -> Bound:
    """The certificate with the integral's estimate, which must not contradict it.

    Raises:
        ArithmeticError: they contradict each other: one of the two is wrong.
    """
    error = contour.EPSILON_ERROR if of == "epsilon" else contour.DELTA_ERROR
    if estimate is not None and not lower * (1 - error) <= estimate <= upper * (1 + error):
        raise ArithmeticError(
            f"{of}: the certificate [{lower!r}, {upper!r}] and the contour integral's {estimate!r} "
            "contradict each other; please report this run"
        )
    note = _ZERO if upper == 0 and of == "epsilon" else ""
    if not both:
        return Bound(0.0, None, upper, "exact", note or _UPPER_ONLY)
    if estimate is not None:
        return Bound(lower, min(max(estimate, lower), upper), upper, "exact", note)
    if upper - lower > 2e-3 * upper:
        return Bound(lower, None, upper, "exact", note or _BETWEEN)
    return Bound(lower, 0.5 * (lower + upper), upper, "exact", note)


def _tighten(bound: Bound, other: Bound) -> Bound:
    """The bound, or its lower end with the other's upper end if that is the smaller.

    Raises:
        ArithmeticError: the other's upper end is below the bound's lower end.
    """
    if other.upper >= bound.upper:
        return bound
    if other.upper < bound.lower:
        raise ArithmeticError(
            f"{bound.accountant}'s lower end {bound.lower!r} and {other.accountant}'s upper end "
            f"{other.upper!r} contradict each other; please report this run"
        )
    estimate = None if bound.estimate is None else min(bound.estimate, other.upper)
    return Bound(bound.lower, estimate, other.upper, other.accountant, bound.note)


def _single_step(question: Question) -> Bound:
    """The bound of one sampled Gaussian step, by its closed form."""
    (step, _), relation, at = question.run.steps[0], question.relation, question.at
    z, q = step.noise_multiplier, step.sampling_prob
    if question.of == "epsilon":
        at_epsilon = functools.partial(gaussian.sampled_delta, z, q, relation)
        lower, upper = gaussian.solve_epsilon(at_epsilon, at, 1e-12, gaussian.PROFILE_ERROR)
        lower, upper = lower * (1 - 1e-14), upper * (1 + 1e-14)  # as in _around
        return Bound(lower, 0.5 * (lower + upper), upper, "exact", _ZERO if upper == 0 else "")
    return _closed_form_delta(
        lambda by: gaussian.sampled_delta(z * (1 + by), q, relation, at * (1 + by)), 1e-9, "exact"
    )


def _closed_form_delta(delta: Callable[[float], float], margin: float, name: str) -> Bound:
    """The bound on delta by a closed form, with its margin.

    Its arguments are moved by more than their rounding, which moves delta by more than the margin
    where mu is huge.
    """
    value, low, high = delta(0.0), delta(2e-15) * (1 - margin), delta(-2e-15) * (1 + margin)
    return Bound(min(low, value), value, min(max(high + 1e-300, value), 1.0), name)


def _gdp(question: Question) -> Bound:
    """The exact bound of full batches, which are one Gaussian (Balle and Wang 2018, Theorem 8)."""
    mu, at = question.relation.separation / question.run.steps[0][0].noise_multiplier, question.at
    if question.of == "epsilon":
        lower, upper = gaussian.gaussian_epsilon(mu, at)
        return Bound(lower, 0.5 * (lower + upper), upper, "gdp", _ZERO if upper == 0 else "")
    delta_of = gaussian.gaussian_delta
    return _closed_form_delta(lambda by: delta_of(mu * (1 - by), at * (1 + by)), 1e-10, "gdp")


def _clt(question: Question) -> Bound:
    """Gaussian differential privacy by the central limit theorem: an approximation, not a bound.

    mu is sqrt(sum n q^2 (e^(1/z^2) - 1)), where a full-batch step adds 1/z^2: Bu, Dong, Long and Su
    2020, "Deep learning with Gaussian differential privacy" (arXiv:1911.11607), the central limit
    for Poisson sampling under add/remove.
    """
    square = 0.0
    for step, n in question.run.steps:
        inverse = step.noise_multiplier**-2
        gained = inverse if step.sampling_prob == 1 else math.expm1(min(inverse, 700.0))
        square += n * step.sampling_prob**2 * gained
    if question.of == "epsilon":
        estimate, upper = gaussian.gaussian_epsilon(math.sqrt(square), question.at)[1], math.inf
    else:
        estimate, upper = gaussian.gaussian_delta(math.sqrt(square), question.at), 1.0
    return Bound(0.0, estimate, upper, "clt", _LIMIT)


def _rdp(question: Question) -> Bound:
    """The bound by Renyi divergences, the best over their orders."""
    upper = best_conversion(question.of, question.run.renyi(question.relation), question.at)
    return Bound(0.0, None, upper, "rdp", _UPPER_ONLY)


def _no_replace_one(run: FlatRun, relation: Relation) -> str:
    """The reason why the central limit does not cover the run, or ""."""
    bad = any(step.sampling != "poisson" for step, _ in run.steps)
    if bad or relation is Relation.REPLACE_ONE:
        only = "the central limit is stated for adding or removing a record from Poisson samples"
        return f"{run}: {only}"
    return ""


def _only_full_batch(run: FlatRun, relation: Relation) -> str:
    """The reason why the run is no Gaussian mechanism, or ""."""
    full = all(step.sampling_prob == 1 for step, _ in run.steps)
    return "" if full else f"{run}: there is no exact GDP curve"


# Name: (the accountant, the reason why it refuses a run under a relation, or "").
ACCOUNTANTS: dict[str, tuple[Callable[[Question], Bound], Callable[[FlatRun, Relation], str]]] = {
    "auto": (functools.partial(_certified, renyi=True), lambda run, relation: ""),
    "exact": (_certified, lambda run, relation: ""),
    "gdp": (_gdp, _only_full_batch),
    "clt": (_clt, _no_replace_one),
    "rdp": (_rdp, lambda run, relation: ""),
}


# Calibration.

_epsilon_of = epsilon  # where the name is that of a number


def calibrate(
    make_event: Callable[[float], Event],
    epsilon: float,
    delta: float,
    relation: Relation = ADD,
    accountant: str = "auto",
    *,
    between: tuple[float, float] = (1e-9, 1e9),
    most: bool = False,
    whole: bool = False,
    tolerance: float = 1e-4,
    otherwise: float | None = None,
) -> float:
    """The smallest (or largest) value whose event is proven to be within (epsilon, delta).

    The value is whatever makes an event more private as it grows (a noise multiplier, the factor of
    a schedule) or, with ``most``, less private (steps, epochs, a sampling probability).

    Formal guarantee: ``acc.epsilon(make_event(value), delta, relation, accountant).upper <=
    epsilon`` was evaluated for the value returned, whatever ``make_event`` does elsewhere. Quick
    estimates lead the search, or the accountant's own answers where they are no tighter than it, 60
    at most; as many proofs at most, mostly one.

    Args:
        make_event: from a value to everything that would be released.
        epsilon: target > 0.
        delta: in (0, 1).
        relation: which data sets are neighbours.
        accountant: as for ``epsilon``.
        between: the least and the greatest value that are tried, both > 0.
        most: find the largest value instead of the smallest.
        whole: try whole numbers only, as int. The answer is then the last that is within, or
            within a relative 1e-7 of it.
        tolerance: how close, relative, the answer is to the best one, or its epsilon to the target.
        otherwise: is returned when no value is within; None raises.

    Returns:
        The value: a float, or an int. An end of ``between`` when all values are within.

    Raises:
        ValueError: for an argument out of its range, or a target that no value meets.
        UnsupportedEventError: the accountant refuses an event.

    Example:
        >>> from jaxdp import accounting as acc
        >>> def training(epochs):
        ...     return acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.0), 0.01), 100 * epochs)
        >>> acc.calibrate(training, 3.0, 1e-5, between=(1, 10**6), most=True, whole=True)
        26
    """
    epsilon = check.positive("epsilon", epsilon)
    delta = check.error_probability("delta", delta)
    tolerance = check.positive("tolerance", tolerance)
    try:
        low, high = between
    except (TypeError, ValueError):
        raise ValueError(f"between={between!r}: expected two numbers") from None
    for end in (low, high):
        check.count("between", end, 1) if whole else check.positive("between", end)
    if not low < high:
        raise ValueError(f"between={between!r}: expected the smaller number first")
    wide, safe = (high, low) if most else (low, high)

    def estimated_excess(value: float) -> float:
        """log of the estimated epsilon over the target: it leads the search, cheaply."""
        event = make_event(value)
        if accountant not in _NEAR_ESTIMATE:
            return _log_excess(_epsilon_of(event, delta, relation, accountant).upper, epsilon)
        found = _epsilon_of(event, delta, relation, tolerance=math.inf)
        about = found.upper if found.estimate is None else found.estimate
        # A little inside, so that the first proof succeeds.
        return _log_excess(about, epsilon * (1 - tolerance / 2))

    # One step more or less is less than the usual width.
    finer = 1e-5 if whole else None

    def proven_excess(value: float) -> float:
        """log of the proven epsilon over the target: it alone decides what is returned."""
        found = _epsilon_of(make_event(value), delta, relation, accountant, tolerance=finer)
        return _log_excess(found.upper, epsilon)

    # The proofs begin at the estimate's answer, with its slope; mostly the first one succeeds.
    one = min(max(1, low), high)
    start, slope = search(estimated_excess, one, -1.5, (wide, safe), tolerance / 4, whole)
    start = safe if start is None else start
    # Where epsilon jumps, the next value tried is the neighbour that shows it.
    value, _ = search(proven_excess, start, slope, (wide, safe), tolerance, whole, tolerance / 5)
    if value is None and otherwise is None:
        reached = epsilon * math.exp(proven_excess(safe))
        raise ValueError(
            f"epsilon={epsilon!r}: expected a target that can be met; at {safe:g}, the most "
            f"private value tried, {reached:.6g} is proven"
        )
    return otherwise if value is None else value  # type: ignore[return-value]


def calibrate_count(
    make_event: Callable[[int], Event],
    epsilon: float,
    delta: float,
    relation: Relation = ADD,
    accountant: str = "auto",
) -> int:
    """The largest number whose event is proven to be within (epsilon, delta); 0 if not even 1 is.

    It is a number of steps, or of anything else of which more is less private; 1e12 at most.
    Arguments and errors as for ``calibrate``.
    """
    found = calibrate(
        lambda count: make_event(int(count)), epsilon, delta, relation, accountant,
        between=(1, 10**12), most=True, whole=True, otherwise=0,
    )  # fmt: skip
    return int(found)


def calibrate_noise_multiplier(
    epsilon: float,
    delta: float,
    sampling_prob: float,
    steps: int,
    relation: Relation = ADD,
    accountant: str = "auto",
) -> float:
    """The smallest noise multiplier (to a relative 1e-6) whose upper epsilon is within the target.

    0 when nothing is released. ``sampling_prob`` in [0, 1] is that of Poisson samples (1 is the
    full batch), ``steps`` >= 0. Other arguments and errors as for ``calibrate``.

    Example:
        >>> from jaxdp import accounting as acc
        >>> noise = acc.calibrate_noise_multiplier(3.0, 1e-5, sampling_prob=0.01, steps=1_000)
        >>> step = acc.PoissonSampled(acc.Gaussian(noise), sampling_prob=0.01)
        >>> acc.epsilon(acc.Repeated(step, 1_000), delta=1e-5).upper <= 3.0
        True
    """
    check.positive("epsilon", epsilon)
    check.error_probability("delta", delta)
    q = check.share("sampling_prob", sampling_prob)
    if q == 0 or check.count("steps", steps) == 0:
        return 0.0
    event = functools.partial(_dp_sgd, sampling_prob=q, steps=steps)
    return calibrate(event, epsilon, delta, relation, accountant, tolerance=_CLOSE)


def calibrate_steps(
    epsilon: float,
    delta: float,
    sampling_prob: float,
    noise_multiplier: float,
    relation: Relation = ADD,
    accountant: str = "auto",
) -> int:
    """The largest number of steps whose upper epsilon is within the target; 0 if not even one is.

    Arguments and errors as for ``calibrate_noise_multiplier``; 1e12 at most.

    Raises:
        ValueError: also for a ``sampling_prob`` of 0, with which any number fits.
    """
    q = check.share("sampling_prob", sampling_prob)
    z = check.positive("noise_multiplier", noise_multiplier)
    if q == 0:
        raise ValueError(f"sampling_prob={sampling_prob!r}: expected above 0, or any steps fit")
    return calibrate_count(lambda n: _dp_sgd(z, q, n), epsilon, delta, relation, accountant)


def calibrate_sampling_prob(
    epsilon: float,
    delta: float,
    steps: int,
    noise_multiplier: float,
    relation: Relation = ADD,
    accountant: str = "auto",
) -> float:
    """The largest Poisson sampling probability (to a relative 1e-6) within the target, at most 1.

    Arguments and errors as for ``calibrate_noise_multiplier``; 0 if not even 1e-26 is within.
    """
    steps = check.count("steps", steps)
    z = check.positive("noise_multiplier", noise_multiplier)
    return calibrate(
        lambda q: _dp_sgd(z, q, steps), epsilon, delta, relation, accountant,
        between=(1e-26, 1.0), most=True, tolerance=_CLOSE, otherwise=0.0,
    )  # fmt: skip


def _dp_sgd(noise_multiplier: float, sampling_prob: float, steps: int) -> Event:
    """The event of DP-SGD on Poisson samples."""
    return Repeated(PoissonSampled(Gaussian(noise_multiplier), sampling_prob), steps)


def _log_excess(value: float, target: float) -> float:
    """log(value/target), <= 0 exactly when value <= target; defined for 0 and infinity."""
    if value <= target:
        return -math.inf if value == 0 else min(0.0, math.log(value / target))
    return max(5e-324, math.log(value / target))


def search(
    excess: Callable[[float], float],
    start: float,
    slope: float,
    ends: tuple[float, float],
    tolerance: float,
    whole: bool = False,
    reach: float = 2.0,
) -> tuple[float | None, float]:
    """The value nearest to ends[0] at which ``excess`` was evaluated and found <= 0.

    ``excess`` falls from ends[0] to ends[1], whichever is larger. Secant steps in the logs of the
    values aim a hair inside; a bracket of evaluated values keeps them honest.

    Args:
        excess: log of (what a value costs / target); infinities allowed.
        start: first value.
        slope: of ``excess`` in the log of the value towards ends[1], roughly.
        ends: values > 0, the second the safe one.
        tolerance: relative, of the value and of the cost, at which the search stops; at least 1e-4
            after ten evaluations where the costs are seen to jump.
        whole: values are whole numbers; then the bracket is closed up to 1, or to 1e-7 of it.
        reach: first step, in the log of the value, from an infinite cost.

    Returns:
        (value, last slope); None when even the safe end exceeds, or after 60 evaluations.
    """
    sign, aim = (1 if ends[1] > ends[0] else -1), (0.0 if whole else tolerance / 3)
    low, high = min(ends), max(ends)
    inside: float | None = None
    outside: float | None = None
    value, last, before = start, 0.0, math.nan
    gain, excess_cost = -math.inf, math.inf  # the costs inside and outside
    for turn in range(1, 61):
        # The bracket: the last value found within, and the last found outside.
        cost, x = excess(value), sign * math.log(value)
        if cost <= 0:
            inside, gain = value, cost
            if value == ends[0] or (cost > -tolerance and not whole):
                break
        else:
            outside, excess_cost = value, cost
            if value == ends[1]:
                break
        # Costs that jump have no value at which they meet the target: less is asked for then.
        if turn >= 10 and inside and outside:
            steep = (excess_cost - gain) / abs(math.log(inside / outside))
            tolerance = max(tolerance, 1e-4) if steep > _JUMP_SLOPE else tolerance
        if inside and outside:
            gap = abs(inside - outside) if whole else abs(math.log(inside / outside))
            if gap <= max(1, 1e-7 * inside) if whole else gap < tolerance / 4:
                break
        # A secant step in the logs, or a longer and longer one from an infinite cost.
        fall = (cost - before) / (x - last) if turn > 1 and x != last else math.nan
        slope = fall if math.isfinite(fall) and fall < 0 else slope
        last, before = x, cost
        if math.isfinite(cost):
            step = -(cost + aim) / slope
        else:
            step, reach = math.copysign(reach, cost), 100 * reach
        value = math.exp(sign * (x + min(max(step, -2.0 - turn), 2.0 + turn)))
        if inside and outside:
            bracket = min(inside, outside), max(inside, outside)
            if not bracket[0] < value < bracket[1] or turn > 5 and turn % 3 == 0:
                value = math.sqrt(inside) * math.sqrt(outside)
            value = min(max(round(value), bracket[0] + 1), bracket[1] - 1) if whole else value
        elif whole and round(value) == round(math.exp(sign * x)):
            value = math.exp(sign * x) + (sign if cost > 0 else -sign)
        value = min(max(round(value) if whole else value, low), high)
    return inside, slope
