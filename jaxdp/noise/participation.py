"""Participations: in which steps one record may take part, as the sensitivity has to know.

A strategy's sensitivity depends on it; whoever draws the batches has to see to it that no record
takes part otherwise.
"""

import dataclasses

from jaxdp import arguments
from jaxdp import sampling as rules
from jaxdp.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Single:
    """Every record takes part in at most one step: one pass over the data."""


@dataclasses.dataclass(frozen=True)
class MinSeparation:
    """Every record takes part in at most k steps, any two of them at least b apart.

    Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta and Xu 2023, arXiv:2306.08153,
    "b-min-sep participation".

    Attributes:
        participations: k >= 1; more than fit into n steps, ceil(n / b), count as these.
        separation: b >= 1.
    """

    participations: int
    separation: int

    def __post_init__(self) -> None:
        _check(self)


@dataclasses.dataclass(frozen=True)
class FixedOrder:
    """Every record takes part in steps j, j + b, j + 2 b, ...: epochs of b steps in one order.

    j is any step, and at most k consecutive ones of these steps count. Choquette-Choo, McMahan,
    Rush and Thakurta 2022, arXiv:2211.06530, "(k, b)-participation".

    Attributes:
        separation: b >= 1, the steps of an epoch.
        participations: k >= 1, the epochs; more than fit into n steps count as these.
    """

    separation: int
    participations: int

    def __post_init__(self) -> None:
        _check(self)


@dataclasses.dataclass(frozen=True)
class Cyclic:
    """Every record is in one of b groups, and only steps congruent to the group mod b see it.

    The amplified BandMF (Choquette-Choo et al. 2023, arXiv:2306.08153v2): b consecutive steps have
    one group each, each step sampling from its own. A strategy of at most b bands then moves
    disjoint rows in each of a record's steps, so the sensitivity is that of ONE step, one column;
    the accountant composes them as releases of their own.

    Attributes:
        bands: b >= 1.
    """

    bands: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", arguments.integer("bands", self.bands, least=1))


Participation = Single | MinSeparation | FixedOrder | Cyclic
SINGLE = Single()


def repeats(participation: Participation, steps: int) -> tuple[int, int]:
    """The most steps that one release counts a record in, at least 1, and their distance.

    Raises:
        ValueError: when it is no participation.
    """
    if not isinstance(participation, Participation):
        raise ValueError(f"participation must be one of {Participation}, got {participation!r}")
    if isinstance(participation, Single | Cyclic):
        return 1, steps
    separation = participation.separation
    return min(participation.participations, -(-steps // separation)), separation


def _check(participation: MinSeparation | FixedOrder) -> None:
    for name in ("participations", "separation"):
        value = arguments.integer(name, getattr(participation, name), least=1)
        object.__setattr__(participation, name, value)


def participation(sampling: Sampling, dataset_size: int) -> Participation:
    """The participation that a sampling rule of a whole run keeps to.

    Args:
        sampling: cyclic Poisson, or a fixed order.
        dataset_size: the number of records.

    Raises:
        ValueError: another rule.
    """
    if isinstance(sampling, rules.CyclicPoisson):
        return Cyclic(sampling.bands)
    if isinstance(sampling, rules.FixedOrder):
        passes = sampling.separation(dataset_size)
        times = -(-sampling.steps // passes)
        return Single() if times == 1 else FixedOrder(passes, times)
    raise ValueError(
        f"sampling must be CyclicPoisson or FixedOrder for correlated noise, got {sampling}"
    )
