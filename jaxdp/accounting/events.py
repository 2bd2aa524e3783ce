"""Events and their bounds: descriptions of releases that hold all that an accountant needs.

Events are frozen, comparable and round-trip through JSON (``to_dict``, ``from_dict``). They hold no
neighbouring relation: that is an argument of the query. Here is what all accountants share, and the
events that are Gaussian releases, that contain other events, or whose noise is correlated over the
steps.
"""

import enum
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from jaxdp import arguments as check

Array = NDArray[np.float64]


class Relation(enum.Enum):
    """The neighbouring relation: how two neighbouring data sets differ.

    The noise multiplier of an event is always relative to the largest contribution of ONE record;
    the relation alone decides what a change of one record does to the sum.

    Attributes:
        ADD_OR_REMOVE_ONE: one record more or less. The sum moves by one contribution.
        REPLACE_ONE: one record becomes another. The sum moves from +1 to -1 contribution, that is
            by twice as much: for a full batch it is the same as half the noise multiplier.
        REPLACE_SPECIAL: one record becomes a null record that contributes zero ("zero-out"). The
            sum moves by one contribution and the number of records stays public.
    """

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    REPLACE_ONE = "replace_one"
    REPLACE_SPECIAL = "replace_special"

    @property
    def separation(self) -> float:
        """Distance that one record moves a sum by: 2 contributions for replace-one, else 1."""
        return 2.0 if self is Relation.REPLACE_ONE else 1.0


ADD = Relation.ADD_OR_REMOVE_ONE


class UnsupportedEventError(ValueError):
    """Raised for an event that an accountant cannot bound, with its name and the reason."""


@dataclass(frozen=True)
class Bound:
    """An interval that holds the true value, and the accountant that found it.

    Attributes:
        lower: not above the true value (0 where the accountant gives no lower bound).
        estimate: the exact value to rounding, never a guarantee; None where only an upper bound is
            proven.
        upper: not below the true value. This is the number to report.
        accountant: name of the accountant, e.g. "rdp".
        note: a sentence when the value needs one (why it is 0, or infinite), else "".
        relation: which data sets are neighbours; None where nobody said.
    """

    lower: float
    estimate: float | None
    upper: float
    accountant: str = ""
    note: str = ""
    relation: Relation | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if any(math.isnan(v) for v in (self.lower, self.estimate or 0.0, self.upper)):
            raise ArithmeticError(f"{self.accountant}: a bound came out as not-a-number")
        if self.lower > self.upper:
            raise ArithmeticError(f"{self.accountant}: lower {self.lower} above upper {self.upper}")


@dataclass(frozen=True)
class Claim:
    """An epsilon that a paper states: to be printed and plotted, never to guarantee.

    It is not a number, and no function that takes a guarantee takes it.

    Attributes:
        name: short, for a table.
        value: the claimed epsilon.
        assumptions: the assumptions of the formula, one sentence each.
        holds: for each assumption, True if it held.
        source: paper and number of the formula.
        order: the Renyi or moment order that gave the value (nan when there is none).
    """

    name: str
    value: float
    assumptions: tuple[str, ...]
    holds: tuple[bool, ...]
    source: str
    order: float = math.nan

    def verdict(self, proven: Bound) -> str:
        """One sentence that sets the claim against a proven bound for the same run."""
        broken = [a for a, ok in zip(self.assumptions, self.holds, strict=True) if not ok]
        why = f" (does not hold: {'; '.join(broken)})" if broken else ""
        if self.value < proven.lower:
            return f"below the truth, which is at least {proven.lower:.4g}{why}"
        if self.value < proven.upper:
            return f"within the bounds of the truth{why}"
        return f"above the proven {proven.upper:.4g}{why}"


class Unresolved(ArithmeticError):
    """Raised where a computation has no answer of use; another accountant must answer."""


class Event:
    """Base class of all events: frozen dataclasses that describe a release.

    Every event raises ValueError for a field that is not what its ``Attributes`` say.

    Attributes:
        types: every event class by its ``type_name``, of which no two have the same: a ledger's
            line would be read as the other event.
        type_name: as ``to_dict`` writes it; that of the class unless it says another.
        words: for reports, with {fields}; an event without any is shown by its ``repr``.
        refused: by relation, the reason why no such event has a bound under it.
        whole_block: True if one such event is ``steps`` consecutive steps of a loop, charged whole.
        unit_is_user: True if the privacy unit of such an event is a user, else a record.
    """

    types: ClassVar[dict[str, Callable[..., "Event"]]] = {}
    type_name: ClassVar[str] = "Event"
    words: ClassVar[str] = ""
    refused: ClassVar[Mapping[Relation, str]] = {}
    whole_block: ClassVar[bool] = False  # said by the class: a field may be called steps by chance
    unit_is_user: ClassVar[bool] = False

    @property
    def block(self) -> int:
        """The consecutive steps of a loop that are one such event: its ``steps``, or 1."""
        return int(getattr(self, "steps")) if self.whole_block else 1  # noqa: B009

    def refuses(self, relation: Relation) -> str:
        """The reason why there is no bound under this relation, or ""."""
        return self.refused.get(relation, "")

    def describe(self) -> str:
        """One such release in words, for a report: ``words`` with the values of the fields."""
        values = vars(self).items()
        fields = {k: v.describe() if isinstance(v, Event) else v for k, v in values}
        return self.words.format(**fields) if self.words else repr(self)

    def __init_subclass__(cls, type_name: str = "") -> None:
        super().__init_subclass__()
        cls.type_name = type_name or cls.__name__
        if cls.__name__.startswith("_"):
            return
        known, own = Event.types.get(cls.type_name), f"{cls.__module__}.{cls.__qualname__}"
        # A class that is defined again, as by a notebook's cell, replaces itself.
        if known is not None and own != (named := f"{known.__module__}.{known.__qualname__}"):
            raise ValueError(
                f"type_name must be a name that no other event has, got {cls.type_name!r} of {own}:"
                f" ledgers hold {named} by it, and would be read as another event"
            )
        Event.types[cls.type_name] = cls


def require_event(name: str, value: object) -> Event:
    """Returns the value, if it is an event."""
    if not isinstance(value, Event):
        raise ValueError(f"{name}={value!r}: expected an event of jaxdp.accounting")
    return value


def require_gaussian(name: str, value: object) -> "Gaussian":
    """Returns the value, if it is a Gaussian event."""
    if not isinstance(value, Gaussian):
        raise ValueError(f"{name}={value!r}: expected a Gaussian (see joint_gaussian)")
    return value


@dataclass(frozen=True)
class Gaussian(Event):
    """A sum of contributions plus spherical Gaussian noise, N(sum, (z c)^2 I), released once.

    c is the largest l2 norm that ONE record can contribute to the sum (the clip norm), whatever the
    relation: under REPLACE_ONE the accountant itself doubles the distance.

    Attributes:
        noise_multiplier: z in [0, 1e30], noise standard deviation divided by c; 0 means no noise
            (infinite loss).
    """

    words = (
        "a sum of clipped contributions with Gaussian noise of {noise_multiplier:.4g} times the "
        "largest one"
    )

    noise_multiplier: float

    def __post_init__(self) -> None:
        check.fields(self, noise_multiplier=check.non_negative)
        if self.noise_multiplier > 1e30:
            raise ValueError(f"noise_multiplier={self.noise_multiplier!r}: expected at most 1e30")


@dataclass(frozen=True)
class PoissonSampled(Event):
    """``event`` on a batch in which every record takes part independently with ``sampling_prob``.

    The batch size is random and neither truncated nor padded with other records. If ``event``
    is itself a composition, all its parts saw the SAME draw of records.

    Attributes:
        event: what is released from the batch.
        sampling_prob: q in [0, 1].
    """

    words = "{event}, each record drawn with probability {sampling_prob:.4g}"

    event: Event
    sampling_prob: float

    def __post_init__(self) -> None:
        check.fields(self, event=require_event, sampling_prob=check.share)


@dataclass(frozen=True)
class WeightedPoissonSampled(PoissonSampled):
    """``event`` on a batch in which every record takes part with a probability of its own.

    It is a public function of the record alone, at most ``sampling_prob``; records take part
    independently. It costs what Poisson sampling with ``sampling_prob`` does, under every relation
    (docs/proofs/sampling_bounds.md, Theorem 5); ``lower`` is of a record with the largest.

    Attributes:
        event: as for ``PoissonSampled``.
        sampling_prob: the largest probability of any record that there may be, in [0, 1].
    """

    words = "{event}, each record drawn with a probability of its own, at most {sampling_prob:.4g}"


@dataclass(frozen=True)
class FixedSizeSampled(Event):
    """``event`` on ``batch_size`` of ``dataset_size`` records drawn uniformly without replacement.

    A fresh, independent draw each time the event occurs (not an epoch-wise shuffle). Its neighbours
    have equal size: there is no bound under ADD_OR_REMOVE_ONE.

    Attributes:
        event: what is released from the batch.
        dataset_size: n >= 1, public.
        batch_size: b with 0 <= b <= n.
    """

    words = "{event}, over {batch_size} of {dataset_size} records drawn without replacement"

    event: Event
    dataset_size: int
    batch_size: int

    def __post_init__(self) -> None:
        check.fields(self, event=require_event, dataset_size=check.size, batch_size=check.count)
        n, b = self.dataset_size, self.batch_size
        if b > n:
            raise ValueError(f"batch_size={b}: expected at most dataset_size={n}")

    def refuses(self, relation: Relation) -> str:
        if relation is not ADD or self.batch_size in (0, self.dataset_size):
            return ""
        return (
            "batches of a fixed size only have neighbours of equal size; ask with relation "
            "replace_one or replace_special"
        )


@dataclass(frozen=True)
class Repeated(Event):
    """``event`` ``count`` times in a row, each with fresh noise and a fresh draw of records.

    Attributes:
        event: the event that is repeated (adaptively: each may depend on the earlier outputs).
        count: number of repetitions, >= 0.
    """

    event: Event
    count: int

    def __post_init__(self) -> None:
        check.fields(self, event=require_event, count=check.count)

    def describe(self) -> str:
        times = "" if self.count == 1 else f"{self.count:,} times "
        return times + self.event.describe()


@dataclass(frozen=True)
class Composed(Event):
    """Unlike events in a row, each with fresh noise and fresh draws; the order does not matter.

    Attributes:
        events: tuple of events (any iterable is accepted and made a tuple).
    """

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.events, Iterable):
            raise ValueError(f"events={self.events!r}: expected an iterable of events")
        events = tuple(self.events)
        check.each("events", events, require_event)
        object.__setattr__(self, "events", events)

    def describe(self) -> str:
        return "; ".join(part.describe() for part in self.events) or "nothing"


@dataclass(frozen=True)
class Parallel(Event):
    """Releases on disjoint parts of the data, and what was released on all of it besides.

    A public rule, a function of the privacy unit alone, says in which part a unit is; in one at
    most. delta is the largest over the parts of what the part and all saw together, for a unit
    changes no record of another part (docs/proofs/accounting.md, "Parts"). The releases may depend
    on one another's outputs, also across parts.

    A composition may hold several. Those of one ``rule`` are one partition, and are put together
    part by part; of every further rule a unit may be in any part.

    Refused under REPLACE_ONE, where a unit may change its part. What is released on a part must
    have a bound under ADD_OR_REMOVE_ONE: how many units are in it is nobody's to know.

    Attributes:
        common: what is released on all units; ``Composed(())`` for nothing.
        parts: what is released on each part besides, by its name; any mapping is accepted and made
            a tuple of (name, event). At least one; units may be in none of them.
        rule: names the partition. "" takes a random name: a partition of its own.
    """

    refused: ClassVar = {
        Relation.REPLACE_ONE: "a unit that becomes another may change its part, so that two parts "
        "differ; ask with relation add_or_remove_one or replace_special"
    }

    common: Event
    parts: Mapping[str, Event] | tuple[tuple[str, Event], ...]
    rule: str = ""

    def __post_init__(self) -> None:
        check.fields(self, common=require_event)
        parts = dict(self.parts) if isinstance(self.parts, Mapping | tuple) else {}
        if not parts or len(parts) != len(self.parts) or not all(isinstance(k, str) for k in parts):
            raise ValueError(f"parts={self.parts!r}: expected a mapping from names to events")
        check.each("parts", parts.values(), require_event)
        object.__setattr__(self, "parts", tuple(sorted(parts.items())))
        if not isinstance(self.rule, str):
            raise ValueError(f"rule={self.rule!r}: expected a string")
        object.__setattr__(self, "rule", self.rule or secrets.token_hex(8))

    @property
    def block(self) -> int:
        alone = len(self.parts) == 1 and self.common == Composed(())
        return dict(self.parts).popitem()[1].block if alone else 1

    def describe(self) -> str:
        said = [] if self.common == Composed(()) else [self.common.describe()]
        for name, event in dict(self.parts).items():
            said.append(f"on part {name!r} alone: {event.describe()}")
        return "; ".join(said)


@dataclass(frozen=True)
class GridNoise(Event):
    """``event`` released on an integer grid, with discrete Gaussian noise in place of Gaussian.

    The discrete Gaussian is post-processing of the Gaussian noise that ``event`` names, but for a
    total-variation distance (docs/proofs/grid_noise.md). Every epsilon is computed for what that
    leaves of delta: (1 + e^epsilon) distance is taken off. There is no epsilon at delta 0, and no
    Renyi divergence.

    Attributes:
        event: the release, as if its noise were Gaussian.
        distance: in [0, 1), of one occurrence: all coordinates of all its steps.
    """

    words = (
        "{event}, on an integer grid: the noise is within {distance:.2g} of it in total variation, "
        "charged to delta"
    )

    event: Event
    distance: float

    def __post_init__(self) -> None:
        check.fields(self, event=require_event, distance=check.share)
        if isinstance(self.event, GridNoise):
            raise ValueError(f"event={self.event!r}: expected one that is not on a grid already")

    @property
    def block(self) -> int:
        return self.event.block


@dataclass(frozen=True)
class PerUser(Event):
    """``event`` where the privacy unit is a user: what it says of a record holds for a whole user.

    The samplers draw users; the at most ``records`` records of a user are aggregated into one
    gradient, which is clipped once. No record belongs to two users.

    Attributes:
        event: the release, its records read as users.
        records: k >= 1, the most records of one user that enter a step; public.
    """

    unit_is_user = True
    words = "{event}, where a user with at most {records:,} records is one record"

    event: Event
    records: int

    def __post_init__(self) -> None:
        check.fields(self, event=require_event, records=check.size)

    @property
    def block(self) -> int:
        return self.event.block


@dataclass(frozen=True)
class CorrelatedNoise(Event):
    """``steps`` sums with correlated noise; every record is in the steps of a public order.

    All sums are released as G + C^-1 Z: row i of G, [n, d], is the sum of step i, C is lower
    triangular, [n, n], without a zero on its diagonal, and Z is independent Gaussian noise, [n, d].
    docs/proofs/correlated_noise.md proves what they cost.

    The noise multiplier of ``event`` is the standard deviation of Z over the largest norm by which
    one record moves C G over the whole run: over the sensitivity of C under the order, times the
    clip norm. Then the run is exactly one Gaussian release, even though every sum may depend on
    those released before it (Denisov, McMahan, Rush, Smith and Thakurta 2022, arXiv:2202.08312,
    Theorem 2.1). Where the sums from one step on are made again, with fresh rows of Z and the old
    ones before, that is one more such event (docs/proofs/correlated_noise.md, Theorem 2).

    Refused under ADD_OR_REMOVE_ONE: one record less shifts the places of all after it.

    Attributes:
        event: the one release that they are together.
        steps: n >= 1, of the whole run.
    """

    whole_block = True
    words = (
        "a run of {steps:,} steps over records in a public order, with noise correlated or not, "
        "together {event}"
    )
    refused: ClassVar = {
        ADD: "records are taken by their position, and one removed record shifts every position "
        "after it; ask with relation replace_special, or with replace_one, under which a record "
        "moves the sums twice as far"
    }

    event: Gaussian
    steps: int

    def __post_init__(self) -> None:
        check.fields(self, event=require_gaussian, steps=check.size)


@dataclass(frozen=True)
class CyclicPoissonSampled(Event, type_name="CyclicPoisson"):
    """``steps`` sums with noise correlated over ``bands`` steps, on batches drawn group by group.

    Every record is in one of the groups 0, ..., bands - 1, by a function of the record alone; step
    i draws each record of group i mod bands independently with ``sampling_prob``. C has at most
    ``bands`` bands: C[i, j] is 0 unless j <= i < j + bands. The noise multiplier of ``event`` is
    the standard deviation of Z over the largest column norm of C times the clip norm.

    It costs what ceil(steps/bands) Poisson-sampled Gaussian steps cost (Choquette-Choo, Ganesh,
    McKenna, McMahan, Rush, Thakurta and Xu 2023, arXiv:2306.08153v2, Theorem 4): a record that is
    drawn in step i moves rows i, ..., i + bands - 1 of C G + Z alone, and its next draw is bands
    steps later. docs/proofs/correlated_noise.md, Theorem 3, has the whole argument, for sums that
    depend on those before. One band is DP-SGD with Poisson samples.

    Refused under REPLACE_ONE: the two records may be in different groups.

    Attributes:
        event: one column of C times one record's contribution, with noise.
        sampling_prob: q in [0, 1], of the records of a step's group; the expected batch is q/bands
            of all records.
        bands: b >= 1, of C; as many groups.
        steps: n >= 1, of the whole run.
    """

    whole_block = True
    words = (
        "a run of {steps:,} steps with noise correlated over {bands:,} of them, in turn over "
        "{bands:,} groups of records, each record of the group drawn with probability "
        "{sampling_prob:.4g}; every draw of a record costs what it does in {event}"
    )
    refused: ClassVar = {
        Relation.REPLACE_ONE: "the two records may be in different groups, whose steps are "
        "correlated; ask with relation add_or_remove_one or replace_special"
    }

    event: Gaussian
    sampling_prob: float
    bands: int
    steps: int

    def __post_init__(self) -> None:
        check.fields(self, event=require_gaussian, sampling_prob=check.share)
        check.fields(self, bands=check.size, steps=check.size)


@dataclass(frozen=True)
class CyclicallyAllocated(Event, type_name="CyclicAllocation"):
    """As ``CyclicPoissonSampled``, but every record is in one of its group's steps of each epoch.

    An epoch is bands times ``slots`` steps. A group has every bands-th of them, and each of its
    records is in one of these, drawn uniformly for the record alone and anew in each epoch. It
    costs ceil(steps/(bands slots)) epochs of ``RandomlyAllocated(event, slots)``
    (docs/proofs/correlated_noise.md, Theorem 5). One band is random allocation.

    Attributes:
        event: one column of C times one record's contribution, with noise.
        slots: m >= 1, steps that a group has in an epoch; the expected batch is 1/(bands m) of all
            records.
        bands: b >= 1, of C; as many groups.
        steps: n >= 1, of the whole run; part of an epoch costs the whole.
    """

    whole_block = True
    words = (
        "a run of {steps:,} steps with noise correlated over {bands:,} of them, in turn over "
        "{bands:,} groups of records, each record in one of {slots:,} steps of its group, drawn at "
        "random in every epoch; a step with the record costs what it does in {event}"
    )
    refused: ClassVar = CyclicPoissonSampled.refused

    event: Gaussian
    slots: int
    bands: int
    steps: int

    def __post_init__(self) -> None:
        check.fields(self, event=require_gaussian, slots=check.size)
        check.fields(self, bands=check.size, steps=check.size)


@dataclass(frozen=True)
class NonPrivate(Event):
    """A release for which no guarantee is known; its epsilon is infinite.

    Attributes:
        reason: one sentence for the report, e.g. "a line search read the un-noised loss".
    """

    words = "something without any guarantee: {reason}"

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason:
            raise ValueError(f"reason={self.reason!r}: expected a non-empty sentence")


def counts_of(event: Event) -> dict[Event, int]:
    """The parts of an event, each with its number: they cost the same in any order."""
    if isinstance(event, Repeated):
        inner = counts_of(event.event) if event.count else {}
        return {part: n * event.count for part, n in inner.items()}
    if not isinstance(event, Composed):
        return {event: 1}
    found: dict[Event, int] = {}
    for each in event.events:
        for part, n in counts_of(each).items():
            found[part] = found.get(part, 0) + n
    return found


def of_users(event: Event) -> bool:
    """True where the privacy unit is a user: everywhere in an event, or it promises nothing."""
    match event:
        case Composed(events):
            return all(map(of_users, events))
        case Parallel(common, parts):
            return all(map(of_users, (common, *dict(parts).values())))
        case NonPrivate():
            return True
    within = getattr(event, "event", None)  # repeated, on a grid, the best of several tries
    return event.unit_is_user or (isinstance(within, Event) and of_users(within))


def joint_gaussian(noise_multipliers: Iterable[float]) -> Gaussian:
    """Several Gaussian releases computed from ONE draw of records, as the one event they are.

    A record that is absent from the draw is absent from all of them, so they are one Gaussian
    mechanism (Dong, Roth and Su 2022, "Gaussian differential privacy", Corollary 3.3): after
    dividing each by its own noise scale the record moves the stacked vector by at most sqrt(sum
    z_i^-2). Charging them as separately sampled events would be too low: at q 0.01 and z 1, 1 over
    1,000 steps it says 2.58 where the truth is 4.48.

    Args:
        noise_multipliers: z_i >= 0 of each release, each relative to one record's largest
            contribution to that release. At least one.

    Returns:
        ``Gaussian((sum_i z_i^-2)^-1/2)``; a zero among them gives ``Gaussian(0)``.

    Raises:
        ValueError: when there is none, or one is out of its range.
    """
    zs = check.each("noise_multipliers", noise_multipliers, check.non_negative)
    if not zs:
        raise ValueError("noise_multipliers=[]: expected at least one noise multiplier")
    smallest = min(zs)
    if smallest == 0:
        return Gaussian(0.0)
    # Scaled by the smallest, so that no square under- or overflows.
    return Gaussian(smallest / math.sqrt(math.fsum((smallest / z) ** 2 for z in zs)))


def anisotropic_gaussian(bounds: Iterable[float], noise_stds: Iterable[float]) -> Gaussian:
    """Gaussian noise with its own standard deviation in every coordinate, as one event.

    Xu et al., "An adaptive and fast convergent approach to differentially private deep learning"
    (AdaDp), Lemma 1: dividing coordinate i by its noise leaves spherical noise and
    a record that moves the vector by at most sqrt(sum s_i^2/sigma_i^2), the inverse of what is
    returned.

    Args:
        bounds: s_i >= 0, largest absolute value of coordinate i of ONE record's contribution; one
            at least is above 0.
        noise_stds: sigma_i >= 0, noise added to coordinate i of the sum; as many.

    Raises:
        ValueError: when the lengths differ, or a number is out of its range.
    """
    s = check.each("bounds", bounds, check.non_negative)
    sigma = check.each("noise_stds", noise_stds, check.non_negative)
    if len(s) != len(sigma):
        raise ValueError(f"noise_stds has length {len(sigma)}: expected {len(s)}, one per bound")
    moving = [(b, n) for b, n in zip(s, sigma, strict=True) if b > 0]
    if not moving:
        raise ValueError(f"bounds={s!r}: expected at least one that is > 0")
    return joint_gaussian([n / b for b, n in moving])


def to_dict(event: Event) -> dict[str, Any]:
    """The event in plain JSON types; ``from_dict`` gives an equal event back."""
    require_event("event", event)
    out: dict[str, Any] = {"type": event.type_name}
    for key, value in vars(event).items():
        if key in ("event", "common"):
            value = to_dict(value)
        elif key == "parts" and isinstance(event, Parallel):
            value = {name: to_dict(each) for name, each in value}
        elif key == "events":
            value = [to_dict(e) for e in value]
        elif isinstance(value, tuple) and any(map(is_dataclass, value)):
            value = [asdict(part) for part in value]
        elif isinstance(value, Relation):
            value = value.value
        elif is_dataclass(value):
            value = {"type": type(value).__name__, **vars(value)}
        out[key] = value
    return out


def from_dict(description: Mapping[str, Any]) -> Event:
    """The event that a description by ``to_dict`` stands for.

    Raises:
        ValueError: when the type is unknown, or a field is missing, unknown or wrong.
    """
    if not isinstance(description, Mapping) or description.get("type") not in Event.types:
        raise ValueError(
            f"description={description!r}: expected a 'type' among {sorted(Event.types)}; "
            "`import jaxdp.papers.hidden_state` adds HiddenState"
        )
    fields = {k: v for k, v in description.items() if k != "type"}
    for key in {"event", "common"} & fields.keys():
        fields[key] = from_dict(fields[key])
    if description["type"] == Parallel.type_name and isinstance(fields.get("parts"), Mapping):
        fields["parts"] = {name: from_dict(each) for name, each in fields["parts"].items()}
    if "events" in fields:
        fields["events"] = tuple(from_dict(e) for e in fields["events"])
    try:
        return Event.types[description["type"]](**fields)
    except TypeError as error:
        raise ValueError(f"description={description!r}: {error}") from None
