"""Flattens nested events to distinct steps with counts, which accountants read."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxdp.accounting import fixed_size, hidden_state
from jaxdp.accounting.base import Event, Part
from jaxdp.accounting.bounds import Relation, UnsupportedEventError
from jaxdp.accounting.chains import Array, NoisyChain
from jaxdp.accounting.correlated import CorrelatedNoise, CyclicPoisson
from jaxdp.accounting.events import (
    Composed,
    FixedSizeSampled,
    Gaussian,
    GridNoise,
    HiddenState,
    NonPrivate,
    PoissonSampled,
    Repeated,
)
from jaxdp.accounting.sampled import PerUser

_PARTITION = (
    "records are put into batches of public sizes, so that neighbours have equal size; ask with "
    "relation replace_one"
)
Bounding = Callable[[NoisyChain], Array]


@dataclass(frozen=True, order=True)
class Step:
    """One release: a Gaussian mechanism on a sampled batch.

    Attributes:
        noise_multiplier: z > 0, relative to one record's largest contribution.
        sampling_prob: q in (0, 1]; 1 is the full batch.
        sampling: "poisson" (also the full batch) or "fixed_size" (without replacement, q = b/n).
    """

    noise_multiplier: float
    sampling_prob: float = 1.0
    sampling: str = "poisson"


@dataclass(frozen=True)
class Run:
    """A composition in flat form.

    Attributes:
        steps: (step, count) pairs, distinct and sorted; full-batch Gaussians are merged into one.
            Hidden-state events are among them as Gaussians that are no better.
        infinite: why nothing can be guaranteed, or "" when something can.
        hidden: (event, count) of the hidden-state events.
        others: the steps without the hidden-state events; None when there are none of these.
        parts: (part, count) of the events that are no Gaussian steps, distinct.
    """

    steps: tuple[tuple[Step, int], ...]
    infinite: str = ""
    hidden: tuple[tuple[HiddenState, int], ...] = ()
    others: tuple[tuple[Step, int], ...] | None = None
    parts: tuple[tuple[Part, int], ...] = ()

    @property
    def empty(self) -> bool:
        """True if nothing that depends on the data was released."""
        return not (self.steps or self.parts or self.infinite)


def flatten(event: Event, relation: Relation) -> Run:
    """The flat run of ``event``, equal steps merged: the cost does not depend on their order.

    Full-batch Gaussians compose exactly to one with z = (sum n_i z_i^-2)^-1/2 (Dong, Roth and Su
    2022, "Gaussian differential privacy", Corollary 3.3), and so do Gaussians inside one sampled
    event, which saw one draw of records.

    Raises:
        ValueError: when ``relation`` is not a ``Relation``.
        UnsupportedEventError: when the event, or the event under this relation, has no bound here.
    """
    run, distance = apart(event, relation)
    if distance:
        raise UnsupportedEventError(
            "GridNoise: its noise is a Gaussian's but for a total-variation distance, which has an "
            "epsilon at a delta and no other bound here"
        )
    return run


def apart(event: Event, relation: Relation) -> tuple[Run, float]:
    """As ``flatten``, and how far in total variation the release is from that run's.

    Whoever takes the run must charge the distance; see ``jaxdp.accounting.near``.

    Raises:
        ValueError: when ``relation`` is not a ``Relation``.
    """
    if not isinstance(relation, Relation):
        raise ValueError(f"relation={relation!r}: expected one of {[str(r) for r in Relation]}")
    found = _Found(relation)
    found.collect(event, 1)
    return found.run(), found.distance * (1 + 1e-9)


def _merged(counts: dict[Step, int]) -> tuple[tuple[Step, int], ...]:
    """The steps sorted, with all full-batch Gaussians merged into one."""
    full = [(s, n) for s, n in counts.items() if s.sampling_prob == 1]
    sampled = {s: n for s, n in counts.items() if s.sampling_prob < 1}
    if full:
        precision = 0.0
        for step, n in full:
            precision += n * step.noise_multiplier**-2
        alone = sum(n for _, n in full) == 1
        z = full[0][0].noise_multiplier if alone else precision**-0.5
        sampled[Step(z)] = 1
    return tuple(sorted(sampled.items()))


def _add_hidden(event: HiddenState, times: int, found: "_Found") -> None:
    """Adds the event as a Gaussian that is no better than its worst batch."""
    mu = math.sqrt(2 * float(batch_values(event).max()))
    if not math.isfinite(mu):
        found.reasons.append(
            "inner iterates left a loop whose start is not the same for all records"
        )
    elif mu > 0:
        # Under replace-one a Gaussian of multiplier z is 2/z-GDP.
        found.add(Step(min(2 / mu, 1e30)), times)


def batch_values(event: HiddenState, bound: Bounding = hidden_state.shifted) -> Array:
    """S of each batch that may hold the record, [batches], summed over the blocks."""
    bound = hidden_state.composed if event.exposed else bound
    values = np.zeros(event.blocks[0].batches)
    for chain, n in Counter(event.blocks).items():
        values = values + n * bound(chain)
    return values


class _Found:
    """The parts that an event is made of, under one relation.

    Args:
        relation: which data sets are neighbours.
        sampled: name of the sampled event that the event is within, or "".
    """

    def __init__(self, relation: Relation, sampled: str = "") -> None:
        self.relation, self.sampled = relation, sampled
        self.counts: dict[Step, int] = {}
        self.reasons: list[str] = []
        self.hidden: dict[HiddenState, int] = {}
        self.parts: dict[Part, int] = {}
        self.distance = 0.0

    def run(self) -> Run:
        """The flat form of everything collected."""
        others = _merged(self.counts)
        for chains, n in self.hidden.items():
            _add_hidden(chains, n, self)
        infinite = "; ".join(dict.fromkeys(self.reasons))
        parts = tuple(self.parts.items())
        if not self.hidden:
            return Run(others, infinite, parts=parts)
        return Run(_merged(self.counts), infinite, tuple(self.hidden.items()), others, parts)

    def collect(self, event: Event, times: int) -> None:
        """Adds ``times`` occurrences of ``event``."""
        if times == 0:
            return
        match event:
            case Repeated(inner, n):
                self.collect(inner, times * n)
            case Composed(events):
                for inner in events:
                    self.collect(inner, times)
            case NonPrivate(reason):
                self.reasons.append(reason)
            case Gaussian(z):
                self.add(Step(z) if z > 0 else None, times)
            case PoissonSampled(inner, q):
                self._sampled(event, inner, q, "poisson", times)
            case FixedSizeSampled(inner, n, b):
                if 0 < b < n:
                    self._unless(event, fixed_size.refuses(self.relation))
                self._sampled(event, inner, b / n, "fixed_size", times)
            case HiddenState():
                if self.relation is not Relation.REPLACE_ONE:
                    self._unless(event, _PARTITION)
                self.hidden[event] = self.hidden.get(event, 0) + times
            case PerUser(inner, _):
                self.collect(inner, times)
            case GridNoise(inner, distance):
                self._near(inner, distance, times)
            case CorrelatedNoise() | CyclicPoisson():
                self._correlated(event, times)
            case Part():
                self._part(event, times)
            case _:
                raise ValueError(f"event={event!r}: expected an event of jaxdp.accounting")

    def _unless(self, event: Event, refusal: str) -> None:
        if refusal:
            name = type(event).__name__
            raise UnsupportedEventError(f"{name} under {self.relation.value}: {refusal}")

    def _part(self, event: Part, times: int) -> None:
        self._unless(event, event.refuses(self.relation))
        if event.infinite():
            self.reasons.append(event.infinite())
        else:
            self.parts[event] = self.parts.get(event, 0) + times

    def _near(self, inner: Event, distance: float, times: int) -> None:
        if self.sampled:
            raise UnsupportedEventError(
                f"{self.sampled} of a GridNoise event: put it around the sampled event"
            )
        self.distance += times * distance
        self.collect(inner, times)

    def _correlated(self, event: CorrelatedNoise | CyclicPoisson, times: int) -> None:
        if self.sampled:
            raise UnsupportedEventError(
                f"{self.sampled} of a {type(event).__name__} event: it is a whole run with draws "
                "of its own, and its amplification by sampling has no bound here"
            )
        self._unless(event, event.refuses(self.relation))
        self.collect(event.independent, times)

    def _sampled(self, event: Event, inner: Event, q: float, sampling: str, times: int) -> None:
        """Adds a sampled event: everything inside saw one draw, so it is one joint Gaussian."""
        if q == 0 and not isinstance(inner, NonPrivate):
            return
        found = _Found(self.relation, type(event).__name__)
        found.collect(inner, 1)
        run = found.run()
        if run.hidden:
            raise UnsupportedEventError(
                f"{type(event).__name__} of a HiddenState event: its partition is of all records, "
                "not of a draw, and no bound is known"
            )
        for part, _ in run.parts:
            raise UnsupportedEventError(
                f"{type(event).__name__} of a {type(part).__name__} event: its amplification by "
                "sampling has no bound here; put it beside the sampled event"
            )
        if run.infinite:
            self.reasons.append(run.infinite)
        for step, _ in run.steps:
            if step.sampling_prob < 1:
                raise UnsupportedEventError(
                    f"{type(event).__name__} of a sampled event: nested sampling has no bound here"
                )
            sampled = Step(step.noise_multiplier, q, sampling if q < 1 else "poisson")
            self.add(sampled, times)

    def add(self, step: Step | None, times: int) -> None:
        """Adds a Gaussian step; None is one without noise."""
        if step is None:
            self.reasons.append("a release has no noise (noise multiplier 0)")
        elif step.noise_multiplier < 1e-30:
            z = step.noise_multiplier
            self.reasons.append(f"noise multiplier {z:g} is too small to be any noise")
        else:
            self.counts[step] = self.counts.get(step, 0) + times
