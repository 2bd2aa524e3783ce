"""Group privacy: guarantees for up to k records of one person."""

import math

from jaxdp import arguments as check
from jaxdp.accounting.events import (
    ADD,
    Bound,
    Composed,
    CorrelatedNoise,
    Event,
    Gaussian,
    GridNoise,
    NonPrivate,
    PerUser,
    PoissonSampled,
    Relation,
    Repeated,
)
from jaxdp.accounting.flat import flatten_exactly
from jaxdp.accounting.pairs import PairedEvent, bracket_decreasing
from jaxdp.accounting.primitives import MOST_OF_ONE, binomial_mixture, log_geometric_sum
from jaxdp.accounting.queries import delta as record_delta
from jaxdp.accounting.queries import epsilon as record_epsilon

_LARGEST_EPSILON = 1e6


def group_event(event: Event, records: int, relation: Relation) -> Event | None:
    """The event whose worst pairs for one record are those of ``event`` for k; None if unknown.

    Under ``relation`` up to k records are all added, all removed, all replaced, or all zeroed out.
    A sum moves k times as far. Of k Poisson-sampled records a binomial number takes part, which is
    a ``MixtureOfGaussians`` (Ganesh 2024, arXiv:2401.10294v2), but not under REPLACE_ONE.
    """
    k = records
    match event:
        case Gaussian(z):
            return Gaussian(z / k)
        case PoissonSampled():
            run = flatten_exactly(event, relation)
            if run.infinite or not (run.steps or run.parts):
                return event
            if run.parts:  # one, alone
                return run.parts[0][0].of_group(k)
            step = run.steps[0][0]
            z, q = step.noise_multiplier, step.sampling_prob
            if q == 1:
                return Gaussian(z / k)
            if relation is Relation.REPLACE_ONE or k > MOST_OF_ONE:
                return None
            return binomial_mixture(z, q, k)
        case (
            Repeated(inner, n)
            | PerUser(inner, n)
            | CorrelatedNoise(inner, n)
            | GridNoise(inner, n)  # the distance is that of each data set's own law
        ):
            one = group_event(inner, k, relation)
            return None if one is None else type(event)(one, n)  # type: ignore[arg-type]
        case Composed(events):
            each = [group_event(inner, k, relation) for inner in events]
            known = [one for one in each if one is not None]
            return Composed(tuple(known)) if len(known) == len(each) else None
        case NonPrivate():
            return event
        case PairedEvent():
            return event.of_group(k)
    return None


def group_epsilon(
    event: Event, delta: float, records: int, relation: Relation = ADD, accountant: str = "auto"
) -> Bound:
    """Bounds on epsilon where neighbours differ in up to ``records`` records; report ``.upper``.

    Of Gaussian sums, Poisson-sampled ones (not under REPLACE_ONE), Laplace and the other primitives
    and compositions of these the group's own worst pairs are known (``group_event``). Of all others
    the answer follows from the one for a record: k steps of (e, d) are (k e, d (e^(k e) - 1)/(e^e -
    1)) (Vadhan 2017, "The complexity of differential privacy", Lemma 2.2, its sum not yet bounded),
    at the best e. Then ``lower`` is that of one record.

    Arguments and errors as for ``epsilon``; each of the k = ``records`` >= 1 records of one person,
    a public number, differs as ``relation`` says.
    """
    k = check.size("records", records)
    whole = group_event(event, k, relation) if k > 1 else event
    if whole is not None:
        return record_epsilon(whole, delta, relation, accountant)
    one = record_epsilon(event, delta, relation, accountant)
    if delta in (0, 1) or not math.isfinite(one.upper):
        return _group_bound(one, one.lower, k * one.upper, one.note)

    def excess(epsilon: float) -> float:
        found = record_delta(event, epsilon, relation, accountant).upper
        return math.log(found / delta) + log_geometric_sum(epsilon, k) if found > 0 else -math.inf

    found = 0.0
    if excess(0.0) > 0:
        high = max(one.upper, 1e-6)
        while excess(high) > 0:
            high *= 2
            if high > _LARGEST_EPSILON:
                return _group_bound(one, one.lower, math.inf, "no bound found")
        found = math.nextafter(k * bracket_decreasing(excess, 0.0, high, rtol=1e-6)[1], math.inf)
    return _group_bound(one, one.lower, found, "k times that of one record")


def group_delta(
    event: Event, epsilon: float, records: int, relation: Relation = ADD, accountant: str = "auto"
) -> Bound:
    """Bounds on delta where neighbours differ in up to ``records`` records; report ``.upper``.

    Arguments, method and errors as for ``group_epsilon``.
    """
    k = check.size("records", records)
    whole = group_event(event, k, relation) if k > 1 else event
    if whole is not None:
        return record_delta(whole, epsilon, relation, accountant)
    lower = record_delta(event, epsilon, relation, accountant).lower
    each = epsilon if epsilon == math.inf else math.nextafter(epsilon / k, 0.0)
    one = record_delta(event, each, relation, accountant)
    upper = 0.0
    if one.upper > 0:
        # What P can do and Q cannot may be anything once there is a law between them.
        factor = math.inf if epsilon == math.inf else log_geometric_sum(each, k)
        upper = math.exp(min(0.0, math.log(one.upper) + factor))
    return _group_bound(one, lower, upper, "from that of one record")


def _group_bound(one: Bound, lower: float, upper: float, note: str) -> Bound:
    """The bound that follows from the one of a record, by its accountant and relation."""
    estimate = None if upper else 0.0
    return Bound(min(lower, upper), estimate, upper, one.accountant, note, relation=one.relation)
