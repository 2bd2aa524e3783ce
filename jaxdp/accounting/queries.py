"""Privacy queries and the accountants that answer them: epsilon at a delta, delta at an epsilon.

A query flattens its event to releases with counts, and asks an accountant for a ``Bound``. Noise
that is a Gaussian's but for a total-variation distance (``GridNoise``) is charged to delta here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import special

from jaxdp import arguments as check
from jaxdp.accounting import certificate, contour, gaussian, last_iterate
from jaxdp.accounting.base import (
    ADD,
    Array,
    Bound,
    Event,
    Relation,
    Unresolved,
    UnsupportedEventError,
)
from jaxdp.accounting.events import Repeated
from jaxdp.accounting.flat import FlatRun, directions, flatten
from jaxdp.accounting.rdp import convert, rdp_to_delta

NOTHING_LEFT = "nothing of delta is left beside the distance of the noise from a Gaussian's"
_ZERO = "delta(0) is already below the target"
_BETWEEN = "no tight value is known: the truth lies between the ends"
_LIMIT = "a limit for many small steps; it may be below the truth, so there is no upper end"
_UPPER_ONLY = "upper bound only: no lower end is proven"
_UNPROVEN = "an estimate alone was asked for: no end is proven"
_ROUGH = 1e-2  # tolerance from which on an upper end is enough
_MARGIN = 1 + 1e-9  # of the rounding of what a distance costs


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
    run = flatten(event, relation)
    question = Question("epsilon", run, relation, at, _aim(tolerance))
    _check(run, relation, accountant)
    if at == 1:
        found = Bound(0, 0, 0, "none", "any release has it")
    elif at == 0 and run.distance:
        found = Bound(0.0, None, math.inf, "none", NOTHING_LEFT)
    elif at == 0:
        found = _pure(run, relation)
    else:
        found = (_near_epsilon if run.distance else _ask)(question, accountant)
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
    run = flatten(event, relation)
    question = Question("delta", run, relation, at, _aim(tolerance))
    _check(run, relation, accountant)
    if run.distance:
        found = _near_delta(question, accountant)
    elif at == math.inf and run.parts:
        found = _impossible(run, relation)
    else:
        found = _ask(question, accountant)
    return replace(found, relation=relation)


def supports(event: Event, relation: Relation = ADD, accountant: str = "auto") -> bool:
    """True if ``epsilon(event, ..., relation, accountant)`` would answer rather than refuse.

    Raises:
        ValueError: for something that is not an event, a relation or an accountant.
    """
    try:
        _check(flatten(event, relation), relation, accountant)
    except UnsupportedEventError:
        return False
    return True


def epsilons_over_steps(
    event: Event,
    steps: Sequence[int],
    delta: float,
    relation: Relation = ADD,
    accountant: str = "auto",
) -> Array:
    """The upper epsilon after each of the given numbers of repetitions of ``event``.

    Arguments and errors as for ``epsilon`` of one step; ``steps``, [k] counts >= 0, in any order.

    Returns:
        [k] upper epsilons (infinite where nothing is guaranteed).
    """
    counts = check.each("steps", steps, check.count)
    uppers = [epsilon(Repeated(event, n), delta, relation, accountant).upper for n in counts]
    return np.asarray(uppers, dtype=np.float64)


def _aim(tolerance: float | None) -> float | None:
    if tolerance is None or tolerance == math.inf:
        return tolerance
    return check.positive("tolerance", tolerance)


def trivial(run: FlatRun) -> Bound | None:
    """The answer to runs that need no accountant: nothing released, or nothing guaranteed."""
    if run.infinite:
        return Bound(0.0, None, math.inf, "none", f"no guarantee: {run.infinite}")
    if run.empty:
        return Bound(0.0, 0.0, 0.0, "none", "nothing that depends on the data was released")
    return None


def _pure(run: FlatRun, relation: Relation) -> Bound:
    """Epsilon at delta 0: the sum of the largest losses."""
    if known := trivial(run):
        return known
    if run.steps:
        lower, estimate = (0.0, None) if run.hidden else (math.inf, math.inf)
        return Bound(lower, estimate, math.inf, "none", "Gaussian noise: no loss is the largest")
    value = math.fsum(n * part.pure(relation) for part, n in run.parts)
    tight = value < math.inf and all(part.pairs(relation, False) for part, _ in run.parts)
    lower, estimate = (value * (1 - 1e-12), value) if tight else (0.0, None)
    return Bound(lower, estimate, value * (1 + 1e-12), "none")


def _impossible(run: FlatRun, relation: Relation) -> Bound:
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


def _near_epsilon(question: "Question", accountant: str) -> Bound:
    """Bounds on epsilon of a release within its run's distance of the run."""
    run, relation, target = question.run, question.relation, question.at
    none = Bound(0.0, None, math.inf, "none", NOTHING_LEFT)
    if known := trivial(run):
        # Without a run that depends on data only the distance is charged.
        return known if run.infinite or _delta_cost(0.0, run.distance) <= target else none
    # An epsilon that is proven at half of delta says what the distance costs at most.
    start = math.inf
    if not run.hidden:
        start = convert("epsilon", run.renyi(relation), 0.5 * target)
    if not math.isfinite(start):
        start = _ask(replace(question, at=0.5 * target, tolerance=None), accountant).upper
    share = _delta_cost(start, run.distance)
    if not share <= 0.5 * target:
        return none
    bound = _ask(replace(question, at=(target - share) * (1 - 1e-15)), accountant)
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


def _near_delta(question: "Question", accountant: str) -> Bound:
    """Bounds on delta of a release within its run's distance of the run."""
    share = _delta_cost(question.at, question.run.distance)
    if not share < 1:
        return Bound(0.0, None, 1.0, "none", NOTHING_LEFT)
    bound = _ask(question, accountant)
    return Bound(
        max(0.0, bound.lower - share),
        bound.estimate,
        min(1.0, (bound.upper + share) * (1 + 1e-15)),
        bound.accountant,
        bound.note,
    )


# The accountants.


@dataclass(frozen=True)
class Question:
    """Of a flat run: epsilon at a delta, or delta at an epsilon.

    Attributes:
        of: "epsilon" or "delta".
        run: the flat run; its distance is charged elsewhere.
        relation: which data sets are neighbours.
        at: the other of the two; an epsilon may be infinite.
        tolerance: as of ``epsilon``.
    """

    of: Literal["epsilon", "delta"]
    run: FlatRun
    relation: Relation
    at: float
    tolerance: float | None = None


def _check(run: FlatRun, relation: Relation, accountant: str) -> None:
    """Refuses a run for which the accountant has no bound.

    Raises:
        UnsupportedEventError: with the reason.
        ValueError: for an unknown accountant.
    """
    if accountant not in ACCOUNTANTS:
        expected = sorted(name for name in ACCOUNTANTS if name != "auto")
        raise ValueError(f"accountant={accountant!r}: expected 'auto' or one of {expected}")
    if run.empty or run.infinite:
        return
    if run.parts and accountant not in ("auto", "rdp"):
        name = type(run.parts[0][0]).__name__
        raise UnsupportedEventError(f"{name} by accountant {accountant}: not covered")
    if reason := ACCOUNTANTS[accountant][1](run, relation):
        raise UnsupportedEventError(f"{reason} by accountant {accountant} under {relation.value}")


def _ask(question: Question, accountant: str) -> Bound:
    """The bound of the accountant named, or for "auto" of the tightest that covers the run.

    Raises:
        UnsupportedEventError: when the accountant cannot resolve the run.
    """
    run = question.run
    if known := trivial(run):
        upper = known.upper if question.of == "epsilon" else min(known.upper, 1.0)
        return replace(known, upper=upper)
    if question.of == "delta" and question.at == math.inf and not run.parts:
        # Gaussian noise on everything: no output is possible under one law alone.
        return Bound(0.0, 0.0, 0.0, "none", "no output of the run has an infinite loss")
    try:
        bound = ACCOUNTANTS[accountant][0](question)
        if not run.hidden:
            return bound
        # Of hidden states an upper end only, averaged over their batches where that is allowed.
        if accountant == "auto" and any(event.average for event, _ in run.hidden):
            averaged = last_iterate.averaged(question.of, run, question.relation, question.at)
            bound = min(bound, averaged, key=lambda b: b.upper)
    except Unresolved as error:
        raise UnsupportedEventError(
            f"{run}: {accountant} under {question.relation.value} cannot resolve the composition "
            f"({error}); use accountant 'auto'"
        ) from None
    name = "log_sobolev" if accountant == "log_sobolev" else f"shifted, {bound.accountant}"
    words = "; ".join(part for part in (bound.note, last_iterate.note(run)) if part)
    return Bound(0.0, None, bound.upper, name, words)


def _auto(question: Question) -> Bound:
    """The certificate where there are pairs; Renyi bounds where there are none or they are less."""
    run, relation = question.run, question.relation
    if run.full_batch:
        return _gdp(question)
    if _only_pairs(run, relation):
        return _rdp(question)
    try:
        bound, by_moments = _certified(question)
    except Unresolved:
        return _rdp(question)
    both = question.tolerance is None or question.tolerance < _ROUGH
    if by_moments or (both and bound.upper - bound.lower > 3e-2 * bound.upper):
        return _tighter(bound, _rdp(question))
    return bound


def _exact(question: Question) -> Bound:
    return _certified(question)[0]


def _certified(question: Question) -> tuple[Bound, bool]:
    """The certificate's bound, and True if an end of it rests on moments alone."""
    run, relation, at = question.run, question.relation, question.at
    aim, of_epsilon = question.tolerance, question.of == "epsilon"
    # One Gaussian step on a Poisson sample has a closed form.
    single = len(run.steps) == 1 and run.steps[0][1] == 1 and not run.parts
    if single and run.steps[0][0].sampling == "poisson":
        return _single(question), False
    if of_epsilon and _total_variation(run, relation) <= at:
        return Bound(0.0, 0.0, 0.0, "exact", _ZERO), False
    if aim is not None and aim >= _ROUGH:
        estimate = _estimate(question) if aim == math.inf else None
        if estimate is not None:
            return Bound(0.0, estimate, math.inf if of_epsilon else 1.0, "exact", _UNPROVEN), False
        run, goal, both = run.fewer(), aim, False
        if aim == math.inf:
            goal = 2e-4 if of_epsilon else _ROUGH
    else:
        estimate, both = _estimate(question), True
        sampled = sum(n * s.sampling_prob for s, n in run.steps) + sum(n for _, n in run.parts)
        usual = (9.8e-5 if sampled >= 1 else 5e-4) if of_epsilon else 1e-3
        goal = aim or usual
    if of_epsilon:
        found = directions(run, relation, math.log(at), goal, both)
        lower, upper = certificate.epsilon_bounds(found, estimate or None)
    else:
        guess = estimate or rdp_to_delta(run.renyi(relation), at)
        for _ in range(8):
            found = directions(run, relation, math.log(max(guess, 1e-300)), goal, both)
            lower, upper = certificate.delta_bounds(found, at)
            # Tails were cut for the delta that was expected.
            if upper >= 1e-3 * guess or guess < 1e-290:
                break
            guess = max(upper, 1e-300)
    bound = _joined(lower, upper, estimate, found[0].two_sided, question.of)
    return bound, any(direction.by_moments for direction in found)


def _joined(lower: float, upper: float, estimate: float | None, both: bool, of: str) -> Bound:
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


def _tighter(bound: Bound, other: Bound) -> Bound:
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


def _estimate(question: Question) -> float | None:
    """The contour integral's value, which is no bound; None where there is none."""
    run = question.run
    poisson = all(step.sampling == "poisson" for step, _ in run.steps)
    if run.parts or run.hidden or not poisson:
        return None
    if question.of == "epsilon" and run.full_batch:
        return _gdp(question).estimate
    ask = contour.epsilon if question.of == "epsilon" else contour.delta
    try:
        return ask(run, question.relation, question.at)
    except Unresolved:
        return None


def _single(question: Question) -> Bound:
    """One step by its closed form."""
    (step, _), relation, at = question.run.steps[0], question.relation, question.at
    z, q = step.noise_multiplier, step.sampling_prob
    if question.of == "epsilon":
        lower, upper = gaussian.sampled_epsilon(z, q, relation, at)
        lower, upper = lower * (1 - 1e-14), upper * (1 + 1e-14)  # as in _around
        return Bound(lower, 0.5 * (lower + upper), upper, "exact", _ZERO if upper == 0 else "")
    return _around(
        lambda by: gaussian.sampled_delta(z * (1 + by), q, relation, at * (1 + by)), 1e-9, "exact"
    )


def _around(delta: Callable[[float], float], margin: float, name: str) -> Bound:
    """A closed form with its margin, at arguments moved by more than their rounding.

    That moves delta by more than the margin where mu is huge.
    """
    value, low, high = delta(0.0), delta(2e-15) * (1 - margin), delta(-2e-15) * (1 + margin)
    return Bound(min(low, value), value, min(max(high + 1e-300, value), 1.0), name)


def _total_variation(run: FlatRun, relation: Relation) -> float:
    """An upper bound on delta(0) of a composition: the sum over its steps of q TV(N(0), N(s)).

    Infinite when a release is no Poisson-sampled Gaussian. Below it every delta has epsilon
    exactly 0.
    """
    total = 0.0
    for step, n in run.steps:
        if step.sampling != "poisson":
            return math.inf
        mu = relation.separation / step.noise_multiplier
        total += n * step.sampling_prob * float(special.erf(mu / (2 * math.sqrt(2))))
    return math.inf if run.parts else total * (1 + 1e-12)


def _gdp(question: Question) -> Bound:
    mu, at = question.relation.separation / question.run.steps[0][0].noise_multiplier, question.at
    if question.of == "epsilon":
        lower, upper = gaussian.gaussian_epsilon(mu, at)
        return Bound(lower, 0.5 * (lower + upper), upper, "gdp", _ZERO if upper == 0 else "")
    return _around(lambda by: gaussian.gaussian_delta(mu * (1 - by), at * (1 + by)), 1e-10, "gdp")


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
    upper = convert(question.of, question.run.renyi(question.relation), question.at)
    return Bound(0.0, None, upper, "rdp", _UPPER_ONLY)


def _log_sobolev(question: Question) -> Bound:
    return last_iterate.log_sobolev(question.of, question.run, question.relation, question.at)


def _only_pairs(run: FlatRun, relation: Relation) -> str:
    bad = [type(part).__name__ for part, _ in run.parts if not part.pairs(relation, True)]
    return f"{', '.join(bad)}: no privacy loss distribution is known" if bad else ""


def _no_replace_one(run: FlatRun, relation: Relation) -> str:
    bad = [s for s, _ in run.steps if s.sampling != "poisson"]
    if bad or run.parts or relation is Relation.REPLACE_ONE:
        only = "the central limit is stated for adding or removing a record from Poisson samples"
        return f"{run}: {only}"
    return ""


def _only_full_batch(run: FlatRun, relation: Relation) -> str:
    return "" if run.full_batch else f"{run}: there is no exact GDP curve"


# Name: (the accountant, the reason why it refuses a run under a relation, or "").
ACCOUNTANTS: dict[str, tuple[Callable[[Question], Bound], Callable[[FlatRun, Relation], str]]] = {
    "auto": (_auto, lambda run, relation: ""),
    "exact": (_exact, _only_pairs),
    "gdp": (_gdp, _only_full_batch),
    "clt": (_clt, _no_replace_one),
    "rdp": (_rdp, lambda run, relation: ""),
    "log_sobolev": (_log_sobolev, last_iterate.refuses_log_sobolev),
}
