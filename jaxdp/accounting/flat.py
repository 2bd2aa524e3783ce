"""Flattens events to distinct releases with counts, and pairs these for a certificate."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from jaxdp.accounting.batches import RandomlyAllocated, _CutShort
from jaxdp.accounting.certificate import Direction
from jaxdp.accounting.events import (
    ADD,
    Array,
    Bound,
    Composed,
    CorrelatedNoise,
    CyclicallyAllocated,
    CyclicPoissonSampled,
    Event,
    FixedSizeSampled,
    Gaussian,
    GridNoise,
    NonPrivate,
    Parallel,
    PerUser,
    PoissonSampled,
    Relation,
    Repeated,
    UnsupportedEventError,
    counts_of,
)
from jaxdp.accounting.pairs import (
    BatchGaussian,
    Discrete,
    Pair,
    PairedEvent,
    SampledGaussian,
    zeroed_pair,
)
from jaxdp.accounting.primitives import poisson_sampled
from jaxdp.accounting.rdp import DEFAULT_ORDERS, poisson_renyi

_MOST_ALTERNATIVES = 1_000  # unlike things that units in unlike parts saw: each is a query
# Kinds of steps that are kept distinct: each costs the time of a transform and more.
_MAX_KINDS, _MAX_KINDS_ROUGH = 100, 24
_NOTHING = Discrete(np.zeros(1), np.ones(1))  # the pair of a release that tells nothing
# Distances between the batch of fixed size without the record, with it, and with its replacement.
_DISTANCES = {Relation.REPLACE_ONE: ((2, 2, 2),), Relation.REPLACE_SPECIAL: ((2, 1, 1), (1, 2, 1))}


@dataclass(frozen=True, order=True)
class GaussianStep:
    """One release: a Gaussian mechanism on a sampled batch."""

    noise_multiplier: float  # z > 0, relative to one record's largest contribution
    sampling_prob: float = 1.0  # q in (0, 1]; 1 is the full batch
    # "poisson" (also the full batch) or "fixed_size" (without replacement, q = b/n).
    sampling: str = "poisson"

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """As ``PairedEvent.pairs``.

        Those of a fixed size are tight for one step (docs/proofs/sampling_bounds.md, Theorem 2);
        for a lower bound they are those of two data sets.
        """
        z, q = self.noise_multiplier, self.sampling_prob
        if self.sampling == "poisson":
            forward = SampledGaussian(z, q, relation)
            if relation is Relation.REPLACE_ONE:
                return (forward,)
            return forward, SampledGaussian(z, q, relation, reverse=True)
        if upper:
            return tuple(BatchGaussian(q, z, d) for d in _DISTANCES[relation])
        # All other records contribute -1, the record 1 and its replacement -1 or its null 0. Absent
        # against present: that, or for a null all others 1.
        far = int(relation.separation)
        present = BatchGaussian(q, z, (2, 0, 2)) if far == 2 else zeroed_pair(q, z)
        return present, BatchGaussian(q, z, (0, far, far))

    def renyi(self, relation: Relation, orders: Array) -> Array:
        """As ``PairedEvent.renyi``."""
        z, q = self.noise_multiplier, self.sampling_prob
        if self.sampling == "poisson":
            return poisson_renyi(z, q, relation, tuple(orders.tolist()))
        full = 0.5 * orders * (relation.separation / z) ** 2
        curves = [BatchGaussian(q, z, d).renyi(orders) for d in _DISTANCES[relation]]
        return np.asarray(np.minimum(np.max(curves, axis=0), full))


class DominatedEvent(Event):
    """Base class of events that a Gaussian mechanism dominates, and for which no pair is known.

    A run that holds one has upper bounds alone; its class may know a smaller one for the whole run.
    """

    def mu(self) -> float:
        """The mu for which the event is mu-GDP under the relations not refused; may be infinite."""
        return math.inf

    @classmethod
    def refine(
        cls,
        bound: Bound,
        of: str,
        run: "FlatRun",
        relation: Relation,
        value: float,
        accountant: str,
    ) -> Bound:
        """Returns the bound of a run that holds such events, or a smaller one that they prove.

        Args:
            bound: by the accountant, where a Gaussian stands for each of them.
            of: "epsilon" at a delta, or "delta" at an epsilon.
            run: the flat run.
            relation: which data sets are neighbours.
            value: the delta, or the epsilon.
            accountant: the one that was asked for.
        """
        return bound


@dataclass(frozen=True)
class FlatRun:
    """The releases of a composition with their numbers."""

    # (step, count) pairs, distinct and sorted; full-batch Gaussians are merged into one. Dominated
    # events are among them as the Gaussians that dominate them.
    steps: tuple[tuple[GaussianStep, int], ...]
    infinite: str = ""  # why nothing can be guaranteed, or "" when something can
    # (event, count) of the events that a Gaussian dominates, distinct.
    dominated: tuple[tuple[DominatedEvent, int], ...] = ()
    # The steps without the dominated events; None when there are none of these.
    others: tuple[tuple[GaussianStep, int], ...] | None = None
    # (part, count) of the events that are no Gaussian steps, distinct.
    parts: tuple[tuple[PairedEvent, int], ...] = ()
    distance: float = 0.0  # of the release in total variation from this run; charged by ``queries``

    def renyi(self, relation: Relation, orders: tuple[float, ...] = DEFAULT_ORDERS) -> Array:
        """Renyi divergence of the whole at each order, [k]: the sum over its steps and parts."""
        alphas, total = np.asarray(orders, dtype=np.float64), np.zeros(len(orders))
        releases: list[tuple[GaussianStep | PairedEvent, int]] = [*self.steps, *self.parts]
        for release, n in releases:
            total += n * release.renyi(relation, alphas)
        return total

    def steps_beside(
        self, kind: type[DominatedEvent], relation: Relation
    ) -> tuple[tuple[GaussianStep, int], ...]:
        """The steps without the dominated events of a class; those of others are Gaussians still.

        What a class proves in ``DominatedEvent.refine`` it proves of its own events alone.
        """
        found = [*(self.steps if self.others is None else self.others)]
        for event, n in self.dominated:
            if not isinstance(event, kind) and (mu := event.mu()) > 0:
                found.append((GaussianStep(min(relation.separation / mu, 1e30)), n))
        return tuple(found)

    def merge_similar(self) -> "FlatRun":
        """A run of fewer kinds of steps, no more private: similar ones have the least noise."""
        groups, _ = _group_similar_steps(self.steps, _MAX_KINDS_ROUGH)
        return replace(self, steps=tuple((least, n) for (least, _), n in groups))

    def __str__(self) -> str:
        """The kinds of releases, for a message; a long list is counted."""
        names = [str(release) for release, _ in (*self.steps, *self.parts)]
        more = [f"and {len(names) - 8} more"] if len(names) > 8 else []
        return ", ".join(names[:8] + more)


def alternatives(event: Event, relation: Relation) -> tuple[Event, ...]:
    """An event for each part, of all that units there saw; the event itself where none has parts.

    The bound of a run with ``Parallel`` events is the largest of theirs. A unit is in one part of
    every rule, so that there is an event for each choice of parts; those that saw no more than
    another are left out.

    Args:
        event: what was released.
        relation: which data sets are neighbours.

    Raises:
        UnsupportedEventError: the relation lets a unit change its part; a release on a part takes
            the number of its units as public; too many choices.
    """
    rules: dict[str, set[str]] = {}
    for parallel in _parallels(event):
        if reason := parallel.refuses(relation):
            raise UnsupportedEventError(f"Parallel under {relation.value}: {reason}")
        for name, on_part in dict(parallel.parts).items():
            rules.setdefault(parallel.rule, set()).add(name)
            try:
                require_bound(on_part, ADD)
            except UnsupportedEventError as error:
                raise UnsupportedEventError(
                    f"Parallel, part {name!r}: {error}. How many units are in a part follows from "
                    "what they hold, and nothing on a part may take it as public"
                ) from None
    found = [event]
    for rule, names in rules.items():
        chosen = [_seen_in(each, rule, name) for each in found for name in sorted(names)]
        most: list[dict[Event, int]] = []
        for held in sorted(map(counts_of, chosen), key=lambda held: -sum(held.values())):
            if not any(all(other.get(e, 0) >= n for e, n in held.items()) for other in most):
                most.append(held)
            if len(most) > _MOST_ALTERNATIVES:
                raise UnsupportedEventError(
                    f"Parallel: parts with more than {_MOST_ALTERNATIVES:,} unlike releases, each "
                    "of which is a query of its own"
                )
        found = [Composed(tuple(Repeated(e, n) for e, n in held.items())) for held in most]
    return tuple(found)


def least(event: Event) -> Event:
    """The event with each part replaced by what it contains: what holds below that, holds of it."""
    match event:
        case Repeated(inner, n):
            return Repeated(least(inner), n)
        case Composed(events):
            return Composed(tuple(map(least, events)))
        case PerUser(inner) | GridNoise(inner):
            return replace(event, event=least(inner))
        case PairedEvent():
            inside = event.contained()
            return event if inside is None else least(inside)
    return event


def require_bound(event: Event, relation: Relation) -> None:
    """Raises UnsupportedEventError for an event that has no bound under a relation."""
    for seen in alternatives(event, relation):
        flatten(seen, relation)


def _parallels(event: Event) -> Iterator[Parallel]:
    """The ``Parallel`` events of a composition, those within others' parts too."""
    inner: tuple[Event, ...] = ()
    match event:
        case Repeated(each, n):
            inner = (each,) if n else ()
        case Composed(events):
            inner = events
        case Parallel(common, parts):
            yield event
            inner = (common, *dict(parts).values())
    for each in inner:
        yield from _parallels(each)


def _seen_in(event: Event, rule: str, name: str) -> Event:
    """The composition without what other parts of one rule saw alone."""
    match event:
        case Repeated(inner, n):
            return Repeated(_seen_in(inner, rule, name), n)
        case Composed(events):
            return Composed(tuple(_seen_in(each, rule, name) for each in events))
        case Parallel(common, parts, of):
            common = _seen_in(common, rule, name)
            on = {each: _seen_in(inner, rule, name) for each, inner in dict(parts).items()}
            if of != rule:
                return Parallel(common, on, of)
            return Composed((common, on.get(name, Composed(()))))
    return event


def flatten(event: Event, relation: Relation, sampled: str = "") -> FlatRun:
    """The flat run of ``event``, equal steps merged: the cost does not depend on their order.

    Full-batch Gaussians compose exactly to one with z = (sum n_i z_i^-2)^-1/2 (Dong, Roth and Su
    2022, "Gaussian differential privacy", Corollary 3.3), and so do Gaussians inside one sampled
    event, which saw one draw of records.

    Args:
        event: what was released.
        relation: which data sets are neighbours.
        sampled: name of the sampled event that the event is within, or "".

    Raises:
        ValueError: for something that is no event, or no ``Relation``.
        UnsupportedEventError: when the event, or the event under this relation, has no bound here.
    """
    if not isinstance(event, Event):
        raise ValueError(f"event={event!r}: expected an event of jaxdp.accounting")
    if not isinstance(relation, Relation):
        values = ", ".join(f"Relation.{r.name}" for r in Relation)
        raise ValueError(f"relation={relation!r}: expected one of {values}")
    # An event that holds others puts them back on the list, with how often they occur. Three kinds
    # are left: Gaussian steps, parts that bring their own pairs, and reasons why nothing holds.
    counts: dict[GaussianStep, int] = {}
    dominating: dict[GaussianStep, int] = {}  # in the place of the dominated events
    dominated: dict[DominatedEvent, int] = {}
    parts: dict[PairedEvent, int] = {}
    reasons: list[str] = []
    distance = 0.0
    todo: list[tuple[Event, int]] = [(event, 1)]
    while todo:
        event, times = todo.pop()
        if times == 0:
            continue
        name = event.type_name
        if sampled and isinstance(
            event, CorrelatedNoise | CyclicPoissonSampled | CyclicallyAllocated
        ):
            raise UnsupportedEventError(
                f"{sampled} of a {name} event: it is a whole run with draws of its own, and its "
                "amplification by sampling has no bound here"
            )
        if reason := event.refuses(relation):
            raise UnsupportedEventError(f"{name} under {relation.value}: {reason}")
        steps: list[GaussianStep] = []
        match event:
            case Repeated(inner, n):
                todo.append((inner, times * n))
            case Composed(events):
                todo += [(inner, times) for inner in reversed(events)]
            case NonPrivate(reason):
                reasons.append(reason)
            case Gaussian(z):
                steps = [GaussianStep(z)]
            case PoissonSampled() | FixedSizeSampled():
                if isinstance(event, FixedSizeSampled):
                    q, kind = event.batch_size / event.dataset_size, "fixed_size"
                else:
                    q, kind = event.sampling_prob, "poisson"
                if q == 0 and not isinstance(event.event, NonPrivate):
                    continue
                # Everything inside saw one draw, so it is one joint Gaussian; what is no Gaussian
                # has no amplification that is proven.
                run = flatten(event.event, relation, name)
                alone = not (run.steps or run.dominated or run.infinite)
                single = alone and [n for _, n in run.parts] == [1]
                if single and kind == "poisson":  # with a draw of its own
                    on_sample = poisson_sampled(run.parts[0][0], q)
                    if on_sample is not None:
                        todo.append((on_sample, times))
                        continue
                for part, _ in (*run.dominated, *run.parts):
                    raise UnsupportedEventError(
                        f"{name} of a {part.type_name} event: its amplification by sampling "
                        "has no bound here; put it beside the sampled event"
                    )
                if any(step.sampling_prob < 1 for step, _ in run.steps):
                    raise UnsupportedEventError(
                        f"{name} of a sampled event: nested sampling has no bound here"
                    )
                if run.infinite:
                    reasons.append(run.infinite)
                kind = kind if q < 1 else "poisson"
                steps = [GaussianStep(step.noise_multiplier, q, kind) for step, _ in run.steps]
            case DominatedEvent():
                dominated[event] = dominated.get(event, 0) + times
                mu = event.mu()
                if not 0 <= mu < math.inf:
                    reasons.append(f"no Gaussian dominates {name}: {event.describe()}")
                elif mu > 0:
                    steps = [GaussianStep(min(relation.separation / mu, 1e30))]
            case Parallel():
                raise UnsupportedEventError(
                    "Parallel: it has an epsilon, a delta and a mu, each the largest over its "
                    "parts, and no other bound here; it stands beside other events, not within them"
                )
            case PerUser(inner, _):
                todo.append((inner, times))
            case GridNoise(inner, variation):
                if sampled:
                    raise UnsupportedEventError(
                        f"{sampled} of a GridNoise event: put it around the sampled event"
                    )
                distance += times * variation
                todo.append((inner, times))
            case CyclicallyAllocated(inner, slots, bands, n):
                # The first group has all its steps of an epoch before the other groups do.
                whole = (n + bands - 1) // bands // slots
                todo.append((RandomlyAllocated(inner, slots), times * whole))
                if n > whole * bands * slots:
                    todo.append((_CutShort(inner, slots), times))
            case CorrelatedNoise() | CyclicPoissonSampled():
                # At the cost of releases with independent noise: one, or a round of groups each.
                if isinstance(event, CyclicPoissonSampled):
                    inner = PoissonSampled(event.event, event.sampling_prob)
                    todo.append((inner, times * -(-event.steps // event.bands)))
                else:
                    todo.append((event.event, times))
            case PairedEvent():
                if event.infinite():
                    reasons.append(event.infinite())
                else:
                    parts[event] = parts.get(event, 0) + times
            case _:
                raise ValueError(f"event={event!r}: expected an event that jaxdp.accounting knows")
        into = dominating if isinstance(event, DominatedEvent) else counts
        for step in steps:
            z = step.noise_multiplier
            if z == 0:
                reasons.append("a release has no noise (noise multiplier 0)")
            elif z < 1e-30:
                reasons.append(f"noise multiplier {z:g} is too small to be any noise")
            else:
                into[step] = into.get(step, 0) + times
    # All full-batch Gaussians are merged into one, without the dominated events and with them.
    merged = []
    for found in ([*counts.items()], [*counts.items(), *dominating.items()]):
        full = [(s, n) for s, n in found if s.sampling_prob == 1]
        kinds = [(s, n) for s, n in found if s.sampling_prob < 1]
        if full:
            precision = 0.0
            for step, n in full:
                precision += n * step.noise_multiplier**-2
            alone = sum(n for _, n in full) == 1
            z = full[0][0].noise_multiplier if alone else precision**-0.5
            kinds.append((GaussianStep(z), 1))
        merged.append(tuple(sorted(kinds)))
    return FlatRun(
        merged[1],
        "; ".join(dict.fromkeys(reasons)),
        tuple(dominated.items()),
        merged[0] if dominated else None,
        tuple(parts.items()),
        distance * (1 + 1e-9),
    )


def flatten_exactly(event: Event, relation: Relation) -> FlatRun:
    """As ``flatten``, for those who cannot charge a distance; it is refused."""
    run = flatten(event, relation)
    if run.distance:
        raise UnsupportedEventError(
            "GridNoise: its noise is a Gaussian's but for a total-variation distance, which has an "
            "epsilon at a delta and no other bound here"
        )
    return run


def directions(
    run: FlatRun, relation: Relation, log_delta: float, tolerance: float, both: bool = True
) -> list[Direction]:
    """The run's dominating pairs, direction by direction, for a certificate at about a delta.

    Args:
        run: the flat composition.
        relation: which data sets are neighbours.
        log_delta: about where.
        tolerance: relative, of the width that is aimed at.
        both: prepare a lower end too.
    """
    groups, spread = _group_similar_steps(run.steps, _MAX_KINDS)
    above = [(least.pairs(relation, True), n) for (least, _), n in groups]
    above += [(part.pairs(relation, True), n) for part, n in run.parts]
    below = [(most.pairs(relation, False), n) for (_, most), n in groups if both]
    below += [(part.pairs(relation, False), n) for part, n in run.parts if both]
    # For a lower end what has none counts as telling nothing: to release less is post-processing.
    known = any(pairs for pairs, _ in below)
    once = not all(pairs for pairs, _ in below) or any(part.apart for part, _ in run.parts)
    below = [(pairs or (_NOTHING,), n) for pairs, n in below]
    found = []
    for i in range(max(len(pairs) for pairs, _ in above + (below if known else []))):
        # What has one pair for both directions is in each of them.
        upper, lower = (
            tuple((pairs[min(i, len(pairs) - 1)], n) for pairs, n in end if pairs)
            for end in (above, below)
        )
        goal = max(tolerance, 3 * spread)
        found.append(Direction(upper, lower if known else None, log_delta, goal, once))
    return found


def _group_similar_steps(
    steps: tuple[tuple[GaussianStep, int], ...], most: int
) -> tuple[list[tuple[tuple[GaussianStep, GaussianStep], int]], float]:
    """Groups similar steps: (those of least and most noise in a group, its number), and the spread.

    Noise is post-processing, so that less of it gives an upper end and more a lower one. Of the
    steps that differ in their noise alone about ``most`` groups are made; the spread is that of the
    noise in a group, relative.
    """
    if len(steps) <= most:
        return [((step, step), n) for step, n in steps], 0.0
    by_sampling: dict[tuple[str, float], list[tuple[GaussianStep, int]]] = {}
    for step, n in sorted(steps, key=lambda entry: entry[0].noise_multiplier):
        by_sampling.setdefault((step.sampling, step.sampling_prob), []).append((step, n))
    ends = [(s[0][0].noise_multiplier, s[-1][0].noise_multiplier) for s in by_sampling.values()]
    reach = sum(math.log(most_noise / least_noise) for least_noise, most_noise in ends)
    groups: list[tuple[tuple[GaussianStep, GaussianStep], int]] = []
    for members in by_sampling.values():
        least, last, count = members[0][0], members[0][0], 0
        for step, n in members:
            if step.noise_multiplier > least.noise_multiplier * math.exp(reach / most):
                groups.append(((least, last), count))
                least, count = step, 0
            last, count = step, count + n
        groups.append(((least, last), count))
    return groups, reach / most
