"""Privacy queries: epsilon at a delta, delta at an epsilon, epsilon over the steps of a run."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxdp import arguments as check
from jaxdp.accounting import accountants, near
from jaxdp.accounting.base import Array, Event, Unresolved
from jaxdp.accounting.bounds import ADD, Bound, Relation, UnsupportedEventError
from jaxdp.accounting.canonical import Run, apart
from jaxdp.accounting.events import Repeated


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
    found = _epsilon(event, delta, relation, accountant, tolerance)
    return replace(found, relation=relation)


def _epsilon(
    event: Event, delta: float, relation: Relation, accountant: str, tolerance: float | None
) -> Bound:
    delta = check.target("delta", delta)
    run, distance = apart(event, relation)
    goal = None if tolerance is None else check.positive("tolerance", tolerance)
    if distance and 0 < delta < 1:
        accountants.check(run, relation, accountant)
        return near.epsilon_near(run, relation, accountant, delta, goal, distance)
    if delta in (0, 1) and not accountants.refuses(run, relation, accountant):
        if delta == 0 and distance:
            return Bound(0.0, None, math.inf, "none", near.NOTHING_LEFT)
        return _pure(run, relation) if delta == 0 else Bound(0, 0, 0, "none", "any release has it")
    return accountants.ask("epsilon", run, relation, accountant, delta, goal)


def _pure(run: Run, relation: Relation) -> Bound:
    """Epsilon at delta 0: the sum of the largest losses."""
    if known := accountants.trivial(run):
        return known
    if run.steps:
        lower, estimate = (0.0, None) if run.hidden else (math.inf, math.inf)
        return Bound(lower, estimate, math.inf, "none", "Gaussian noise: no loss is the largest")
    value = math.fsum(n * part.pure(relation) for part, n in run.parts)
    tight = value < math.inf and all(part.pairs(relation, False) for part, _ in run.parts)
    lower, estimate = (value * (1 - 1e-12), value) if tight else (0.0, None)
    return Bound(lower, estimate, value * (1 + 1e-12), "none")


def delta(
    event: Event, epsilon: float, relation: Relation = ADD, accountant: str = "auto"
) -> Bound:
    """Bounds on the delta of ``event`` at ``epsilon`` >= 0, infinity included.

    Arguments and errors as for ``epsilon``.

    At infinity delta is the probability of an infinite loss.
    """
    return replace(_delta(event, epsilon, relation, accountant), relation=relation)


def _delta(event: Event, epsilon: float, relation: Relation, accountant: str) -> Bound:
    if check.real("epsilon", epsilon) != math.inf:
        # delta falls with epsilon, so that the answer at 1e100 holds for every larger one.
        epsilon = min(check.non_negative("epsilon", epsilon), 1e100)
    run, distance = apart(event, relation)
    if distance:
        accountants.check(run, relation, accountant)
        return near.delta_near(run, relation, accountant, epsilon, distance)
    if epsilon == math.inf and run.parts and not accountants.refuses(run, relation, accountant):
        return _impossible(run, relation)
    return accountants.ask("delta", run, relation, accountant, epsilon)


def _impossible(run: Run, relation: Relation) -> Bound:
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


def quick_epsilon(event: Event, delta: float, relation: Relation = ADD) -> float:
    """The best value of epsilon to be had in milliseconds: an estimate, no guarantee.

    Arguments and errors as for ``epsilon``.
    """
    run, distance = apart(event, relation)
    quick = accountants.quick_epsilon(run, relation, delta)
    if quick is not None:
        share = near.taken(quick, distance)
        if share >= delta:
            return math.inf
        again = accountants.quick_epsilon(run, relation, delta - share) if share else quick
        return quick if again is None else again
    if distance:
        return near.epsilon_near(run, relation, "auto", delta, None, distance).upper
    try:
        return accountants.rough_epsilon(run, relation, delta)
    except Unresolved:
        return accountants.ask("epsilon", run, relation, "auto", delta).upper


def rough_delta(event: Event, epsilon: float, relation: Relation = ADD) -> float:
    """An upper end of delta, mostly good to 1 %, in a fraction of the time of ``delta``.

    Arguments and errors as for ``delta``.
    """
    run, distance = apart(event, relation)
    found = accountants.rough_delta(run, relation, check.non_negative("epsilon", epsilon))
    return min(1.0, (found + near.taken(epsilon, distance)) * (1 + 1e-15)) if distance else found


def supports(event: Event, relation: Relation = ADD, accountant: str = "auto") -> bool:
    """True if ``epsilon(event, ..., relation, accountant)`` would answer rather than refuse.

    Raises:
        ValueError: for something that is not an event, a relation or an accountant.
    """
    try:
        return not accountants.refuses(apart(event, relation)[0], relation, accountant)
    except UnsupportedEventError:
        return False


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
