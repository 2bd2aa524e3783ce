"""Events of Gaussian releases under other sampling: allocation, shuffles, truncation, users."""

from dataclasses import dataclass

from jaxdp.accounting import _validate as check
from jaxdp.accounting import allocation, shuffled, truncated
from jaxdp.accounting.base import Array, Event, Pair, Part
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.events import Gaussian


@dataclass(frozen=True)
class _Batched(Part):
    """One Gaussian release on every batch: the base of the events here."""

    event: Gaussian

    def __post_init__(self) -> None:
        if not isinstance(self.event, Gaussian):
            raise ValueError(f"event={self.event!r}: expected a Gaussian (see joint_gaussian)")

    def infinite(self) -> str:
        """As ``Part.infinite``."""
        return "" if self.event.noise_multiplier > 0 else "a release has no noise"


@dataclass(frozen=True)
class RandomAllocation(_Batched):
    """``event`` on each of ``steps`` batches of an epoch; every record is in k of them.

    A record's k = ``participations`` steps are drawn uniformly without replacement among the
    epoch's, independently of the other records, and anew in each epoch ("balls in bins" for k = 1;
    Feldman and Shenfeld 2025, arXiv:2502.08202). Batch sizes are random. ``Repeated`` counts
    epochs; part of an epoch costs the whole.

    Attributes:
        event: what is released from each batch.
        steps: t >= 1, batches of the epoch.
        participations: k in 1..t.

    Raises:
        ValueError: ``event`` is no Gaussian, or a number is out of its range.
    """

    steps: int
    participations: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "steps", check.count("steps", self.steps, 1))
        k = check.count("participations", self.participations, 1)
        if k > self.steps:
            raise ValueError(f"participations={k}: expected at most steps={self.steps}")
        object.__setattr__(self, "participations", k)

    @property
    def block(self) -> int:
        """The steps of an epoch."""
        return self.steps

    def refuses(self, relation: Relation) -> str:
        """As ``Part.refuses``."""
        return allocation.refuses(self.steps, self.participations, relation)

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """As ``Part.pairs``."""
        z = self.event.noise_multiplier
        return allocation.pairs(z, self.steps, self.participations, relation, upper)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        """As ``Part.renyi``."""
        z = self.event.noise_multiplier
        return allocation.renyi(z, self.steps, self.participations, relation, orders)


@dataclass(frozen=True)
class ShuffledEpoch(_Batched):
    """``event`` on each of the ``steps`` batches of one pass over shuffled records.

    Every record is in exactly one batch of a public size. No amplification is proven: a pass is
    charged as one release that shows the record's batch without sampling. Treating it as Poisson
    is too low (Chua et al. 2024, arXiv:2403.17673). ``Repeated`` counts epochs.

    Attributes:
        event: what is released from each batch.
        steps: T >= 1, batches of the epoch.

    Raises:
        ValueError: ``event`` is no Gaussian, or ``steps`` is out of its range.
    """

    steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "steps", check.count("steps", self.steps, 1))

    @property
    def block(self) -> int:
        """The steps of an epoch."""
        return self.steps

    def refuses(self, relation: Relation) -> str:
        """As ``Part.refuses``."""
        return shuffled.refuses(relation)

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """As ``Part.pairs``."""
        return shuffled.pairs(self.event.noise_multiplier, self.steps, relation, upper)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        """As ``Part.renyi``."""
        return shuffled.renyi(self.event.noise_multiplier, relation, orders)


@dataclass(frozen=True)
class TruncatedPoisson(_Batched):
    """``event`` on a Poisson sample of which at most ``cap`` records are kept.

    Each of the ``dataset_size`` records takes part independently with ``sampling_prob``; of more
    than ``cap`` a uniformly random subset of ``cap`` is kept, without looking at the data. One
    compiled batch of a fixed shape then serves every step.

    Attributes:
        event: what is released from the batch.
        sampling_prob: q in [0, 1].
        cap: the largest batch, >= 1.
        dataset_size: n >= 1, public and exact.

    Raises:
        ValueError: ``event`` is no Gaussian, or a number is out of its range.
    """

    sampling_prob: float
    cap: int
    dataset_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        q = check.probability("sampling_prob", self.sampling_prob)
        object.__setattr__(self, "sampling_prob", q)
        object.__setattr__(self, "cap", check.count("cap", self.cap, 1))
        object.__setattr__(self, "dataset_size", check.count("dataset_size", self.dataset_size, 1))

    def refuses(self, relation: Relation) -> str:
        """As ``Part.refuses``."""
        return truncated.refuses(relation)

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """As ``Part.pairs``."""
        z = self.event.noise_multiplier
        return truncated.pairs(z, self.sampling_prob, self.cap, self.dataset_size, relation, upper)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        """As ``Part.renyi``."""
        z = self.event.noise_multiplier
        return truncated.renyi(z, self.sampling_prob, self.cap, self.dataset_size, relation, orders)


@dataclass(frozen=True)
class PerUser(Event):
    """``event`` where the privacy unit is a user: what it says of a record holds for a whole user.

    The samplers draw users; the at most ``records`` records of a user are aggregated into one
    gradient, which is clipped once. No record belongs to two users.

    Attributes:
        event: the release, its records read as users.
        records: k >= 1, the most records of one user that enter a step; public.

    Raises:
        ValueError: ``event`` is no event, or ``records`` is out of its range.
    """

    event: Event
    records: int

    def __post_init__(self) -> None:
        if not isinstance(self.event, Event):
            raise ValueError(f"event={self.event!r}: expected an event of jaxdp.accounting")
        object.__setattr__(self, "records", check.count("records", self.records, 1))

    @property
    def block(self) -> int:
        """That of ``event``."""
        return self.event.block
