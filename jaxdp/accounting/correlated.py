"""Runs whose noise is correlated over the steps (matrix mechanisms), each as one event.

All sums of a run are released as G + C^-1 Z: row i of G is the sum of step i, [n, d], C is lower
triangular, [n, n], without a zero on its diagonal, and Z is independent Gaussian noise, [n, d].
docs/correlated_noise.md proves what they cost.
"""

from dataclasses import dataclass

from jaxdp import arguments as check
from jaxdp.accounting.base import Event
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.events import Gaussian, PoissonSampled, Repeated


@dataclass(frozen=True)
class _Correlated(Event):
    """The base of the events here: all ``steps`` noisy sums of a run."""

    event: Gaussian

    def __post_init__(self) -> None:
        if not isinstance(self.event, Gaussian):
            raise ValueError(f"event={self.event!r}: expected a Gaussian (see joint_gaussian)")


@dataclass(frozen=True)
class CorrelatedNoise(_Correlated):
    """``steps`` sums with correlated noise; every record is in the steps of a public order.

    The noise multiplier of ``event`` is the standard deviation of Z over the largest norm by which
    one record moves C G over the whole run: over the sensitivity of C under the order, times the
    clip norm. Then the run is exactly one Gaussian release, even though every sum may depend on
    those released before it (Denisov, McMahan, Rush, Smith and Thakurta 2022, arXiv:2202.08312,
    Theorem 2.1). Where the sums from one step on are made again, with fresh rows of Z and the old
    ones before, that is one more such event (docs/correlated_noise.md, Theorem 2).

    Refused under ADD_OR_REMOVE_ONE: one record less shifts the places of all after it.

    Attributes:
        event: the one release that they are together.
        steps: n >= 1, of the whole run.
    """

    steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fields(self, steps=check.size)

    @property
    def block(self) -> int:
        """As ``Event.block``."""
        return self.steps

    @property
    def independent(self) -> Event:
        """The releases with independent noise at whose cost it is charged."""
        return self.event

    def refuses(self, relation: Relation) -> str:
        """As ``Part.refuses``."""
        if relation is not Relation.ADD_OR_REMOVE_ONE:
            return ""
        return (
            "records are taken by their position, and one removed record shifts every position "
            "after it; ask with relation replace_special, or with replace_one, under which a "
            "record moves the sums twice as far"
        )


@dataclass(frozen=True)
class CyclicPoisson(_Correlated):
    """``steps`` sums with noise correlated over ``bands`` steps, on batches drawn group by group.

    Every record is in one of the groups 0, ..., bands - 1, by a function of the record alone; step
    i draws each record of group i mod bands independently with ``sampling_prob``. C has at most
    ``bands`` bands: C[i, j] is 0 unless j <= i < j + bands. The noise multiplier of ``event`` is
    the standard deviation of Z over the largest column norm of C times the clip norm.

    It costs what ceil(steps/bands) Poisson-sampled Gaussian steps cost (Choquette-Choo, Ganesh,
    McKenna, McMahan, Rush, Thakurta and Xu 2023, arXiv:2306.08153v2, Theorem 4): a record that is
    drawn in step i moves rows i, ..., i + bands - 1 of C G + Z alone, and its next draw is bands
    steps later. docs/correlated_noise.md, Theorem 3, has the whole argument, for sums that depend
    on those before. One band is DP-SGD with Poisson samples.

    Refused under REPLACE_ONE: the two records may be in different groups.

    Attributes:
        event: one column of C times one record's contribution, with noise.
        sampling_prob: q in [0, 1], of the records of a step's group; the expected batch is q/bands
            of all records.
        bands: b >= 1, of C; as many groups.
        steps: n >= 1, of the whole run.
    """

    sampling_prob: float
    bands: int
    steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fields(self, sampling_prob=check.share, bands=check.size, steps=check.size)

    @property
    def block(self) -> int:
        """As ``Event.block``."""
        return self.steps

    @property
    def independent(self) -> Event:
        """The releases with independent noise at whose cost it is charged."""
        rounds = -(-self.steps // self.bands)
        return Repeated(PoissonSampled(self.event, self.sampling_prob), rounds)

    def refuses(self, relation: Relation) -> str:
        """As ``Part.refuses``."""
        if relation is not Relation.REPLACE_ONE:
            return ""
        return (
            "the two records may be in different groups, whose steps are correlated; ask with "
            "relation add_or_remove_one or replace_special"
        )
