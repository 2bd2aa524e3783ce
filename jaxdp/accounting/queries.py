"""Privacy queries: epsilon at a delta, delta at an epsilon, epsilon over the steps of a run."""

import math
from collections.abc import Sequence

import numpy as np

from jaxdp.accounting import _validate as check
from jaxdp.accounting import accountants
from jaxdp.accounting.base import Event
from jaxdp.accounting.bounds import Bound, Relation, UnsupportedEventError
from jaxdp.accounting.canonical import flatten
from jaxdp.accounting.events import Repeated
from jaxdp.accounting.loss import Array
from jaxdp.accounting.saddle import Unresolved


def epsilon(
    event: Event,
    delta: float,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    accountant: str = "auto",
) -> Bound:
    """Bounds on the epsilon of ``event`` at ``delta``; report ``.upper``.

    Args:
        event: what was released, see ``jaxdp.accounting.events``.
        delta: in (0, 1).
        relation: which data sets are neighbours.
        accountant: "auto" (the tightest that covers the event) or the name of an accountant.

    Returns:
        A ``Bound``. Infinite where nothing is guaranteed; exactly 0 where delta(0) is at most
            ``delta``;
        its note says so.

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
    delta = check.open_probability("delta", delta)
    return accountants.ask("epsilon", flatten(event, relation), relation, accountant, delta)


def delta(
    event: Event,
    epsilon: float,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    accountant: str = "auto",
) -> Bound:
    """Bounds on the delta of ``event`` at ``epsilon`` >= 0, infinity included.

    Arguments and errors as for ``epsilon``.

    At infinity delta is the probability of an infinite loss: 0 for noise on everything, and
    unknown, hence 1 at most, where nothing is guaranteed.
    """
    if check.real("epsilon", epsilon) != math.inf:
        # delta falls with epsilon, so that the answer at 1e100 holds for every larger one.
        epsilon = min(check.non_negative("epsilon", epsilon), 1e100)
    return accountants.ask("delta", flatten(event, relation), relation, accountant, epsilon)


def quick_epsilon(
    event: Event, delta: float, relation: Relation = Relation.ADD_OR_REMOVE_ONE
) -> float:
    """The best value of epsilon to be had in milliseconds: an estimate, no guarantee.

    Arguments and errors as for ``epsilon``.
    """
    run = flatten(event, relation)
    kinds = {step.sampling for step, _ in run.steps}
    if run.hidden or run.infinite or run.parts or kinds != {"poisson"}:
        return accountants.ask("epsilon", run, relation, "rdp", delta).estimate
    closed = len(run.steps) == 1 == run.steps[0][1]
    quickest = accountants.ACCOUNTANTS["exact"] if closed else accountants.ONE_LINE
    try:
        return quickest.epsilon(run, relation, delta).estimate
    except Unresolved:
        return accountants.ask("epsilon", run, relation, "rdp", delta).estimate


def supports(
    event: Event, relation: Relation = Relation.ADD_OR_REMOVE_ONE, accountant: str = "auto"
) -> bool:
    """True if ``epsilon(event, ..., relation, accountant)`` would answer rather than refuse.

    Raises:
        ValueError: for something that is not an event, a relation or an accountant.
    """
    try:
        return not accountants.refuses(flatten(event, relation), relation, accountant)
    except UnsupportedEventError:
        return False


def epsilons_over_steps(
    event: Event,
    steps: Sequence[int],
    delta: float,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    accountant: str = "auto",
) -> Array:
    """The upper epsilon after each of the given numbers of repetitions of ``event``.

    Args:
        event: one step.
        steps: [k] counts >= 0, in any order.
        delta: in (0, 1).
        relation: which data sets are neighbours.
        accountant: as for ``epsilon``.

    Returns:
        [k] upper epsilons (infinite where nothing is guaranteed).
    """
    counts = [check.count(f"steps[{i}]", n) for i, n in enumerate(steps)]
    uppers = [epsilon(Repeated(event, n), delta, relation, accountant).upper for n in counts]
    return np.asarray(uppers if uppers else [math.inf][:0], dtype=np.float64)
