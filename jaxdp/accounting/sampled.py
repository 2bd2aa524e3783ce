"""Events of Gaussian releases under other sampling: random allocation and users."""

from dataclasses import dataclass

from jaxdp import arguments as check
from jaxdp.accounting import allocation
from jaxdp.accounting.base import Array, Event, Pair, Part, an_event
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
    """

    steps: int
    participations: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fields(self, steps=check.size, participations=check.size)
        k = self.participations
        if k > self.steps:
            raise ValueError(f"participations={k}: expected at most steps={self.steps}")

    @property
    def block(self) -> int:
        """As ``Event.block``."""
        return self.steps

    def refuses(self, relation: Relation) -> str:
        """As ``Part.refuses``."""
        return allocation.refuses(self.steps, relation)

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """As ``Part.pairs``."""
        z = self.event.noise_multiplier
        return allocation.pairs(z, self.steps, self.participations, relation, upper)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        """As ``Part.renyi``."""
        z = self.event.noise_multiplier
        return allocation.renyi(z, self.participations, orders)


@dataclass(frozen=True)
class PerUser(Event):
    """``event`` where the privacy unit is a user: what it says of a record holds for a whole user.

    The samplers draw users; the at most ``records`` records of a user are aggregated into one
    gradient, which is clipped once. No record belongs to two users.

    Attributes:
        event: the release, its records read as users.
        records: k >= 1, the most records of one user that enter a step; public.
    """

    event: Event
    records: int

    def __post_init__(self) -> None:
        check.fields(self, event=an_event, records=check.size)

    @property
    def block(self) -> int:
        """As ``Event.block``."""
        return self.event.block
