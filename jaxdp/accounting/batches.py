"""Gaussian releases on batches drawn in other ways: truncated, shuffled, randomly allocated.

docs/proofs/sampling_bounds.md proves the pairs of the first two (Theorems 3 and 4),
docs/proofs/allocation.md those of the third.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from scipy import special

from jaxdp import arguments as check
from jaxdp.accounting.allocation import (
    LEAST_NOISE,
    MOST_NOISE,
    MOST_SCORES,
    MOST_STEPS,
    epoch_pairs,
    score_pairs,
)
from jaxdp.accounting.events import ADD, Array, Gaussian, Relation, require_gaussian
from jaxdp.accounting.pairs import BatchGaussian, Branches, Discrete, Pair, PairedEvent

_THRESHOLDS = 20_000
# Relative error allowed to binomial tails (against 40 digits, up to 1e12 records: 2e-13).
_TAIL_ERROR = 1e-10
# Less than this is charged as this, and a record as if it were dropped as rarely as can be.
_LEAST = 1e-280

# Of the batch without the record, with it and with the null record: where fewer than cap - 1 others
# are drawn, and where a kept record may take the place of another. Forward, reverse.
_DISTANCES = (((1, 0, 1), (2, 1, 1)), ((0, 1, 1), (1, 2, 1)))


@dataclass(frozen=True)
class _GaussianOnBatches(PairedEvent):
    """One Gaussian release on every batch: the base of the events here."""

    event: Gaussian

    def __post_init__(self) -> None:
        check.fields(self, event=require_gaussian)

    def infinite(self) -> str:
        return "" if self.event.noise_multiplier > 0 else "a release has no noise"


@dataclass(frozen=True)
class TruncatedPoissonSampled(_GaussianOnBatches, type_name="TruncatedPoisson"):
    """``event`` on a Poisson sample of which at most ``cap`` records are kept.

    Each of the ``dataset_size`` records takes part independently with ``sampling_prob``; of more
    than ``cap`` a uniformly random subset of ``cap`` is kept, without looking at the data. One
    compiled batch of a fixed shape then serves every step.

    Attributes:
        event: what is released from the batch.
        sampling_prob: q in [0, 1].
        cap: the largest batch, >= 1.
        dataset_size: n >= 1, public and exact.
    """

    words = (
        "{event}, each of {dataset_size:,} records drawn with probability {sampling_prob:.4g} and "
        "at most {cap:,} of them kept"
    )
    refused: ClassVar = dict.fromkeys(
        (ADD, Relation.REPLACE_ONE),
        "the number of records is public and a record is zeroed out; ask with replace_special",
    )

    sampling_prob: float
    cap: int
    dataset_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fields(self, sampling_prob=check.share, cap=check.size, dataset_size=check.size)

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        z, q = self.event.noise_multiplier, self.sampling_prob
        if q == 0:
            return (Discrete(np.zeros(1), np.ones(1)),)
        law = batch_branches(q, self.cap, self.dataset_size)
        if not upper:
            # All others are 0. Rounded down; a full batch that is hardly ever drawn counts as one
            # without the record.
            full = law.full * (law.kept - 1e-9 * q) * (law.full > _LEAST)
            sampled = max(law.free * q + full, 0.0) * (1 - 1e-9)
            return tuple(BatchGaussian(sampled, z, d) for d in ((1, 0, 1), (0, 1, 1)))
        return tuple(
            Branches(((law.free, free), (law.full, full)), 2 * _TAIL_ERROR)
            for free, full in self._branches(law)
        )

    def _branches(self, law: "BatchLaw") -> list[tuple[BatchGaussian, BatchGaussian]]:
        """Forward and reverse: the pairs of a batch that is not full, and of one that may be."""
        z, q = self.event.noise_multiplier, self.sampling_prob
        return [
            (BatchGaussian(q, z, free), BatchGaussian(law.kept, z, full, law.near))
            for free, full in _DISTANCES
        ]

    def renyi(self, relation: Relation, orders: Array) -> Array:
        z, q = self.event.noise_multiplier, self.sampling_prob
        if q == 0:
            return np.zeros(orders.shape)
        law = batch_branches(q, self.cap, self.dataset_size)
        # A record that is never dropped bounds either branch, by convexity.
        whole = 0.5 * orders / z**2
        shares, largest = np.asarray([[law.free], [law.full]]), np.zeros(orders.shape)
        for both in self._branches(law):
            logs = np.asarray([np.minimum(pair.renyi(orders), whole) for pair in both])
            logs *= orders - 1
            small = np.log1p((shares * np.expm1(np.minimum(logs, 600.0))).sum(axis=0))
            with np.errstate(divide="ignore"):
                large = np.logaddexp.reduce(np.log(shares) + logs)
            largest = np.maximum(largest, np.where(logs.max(axis=0) < 600, small, large))
        return np.asarray(np.minimum(largest * (1 + 4 * _TAIL_ERROR) / (orders - 1), whole))


class BatchLaw(NamedTuple):
    """A record in a truncated Poisson batch, by how many others are drawn."""

    free: float  # P(fewer than cap - 1 others)
    full: float  # P(cap - 1 or more)
    kept: float  # P(the record is kept, given these), at most q; rounded up
    near: float  # given that it is not, P(cap - 1 others: no place of theirs is taken); down


def batch_branches(q: float, cap: int, n: int) -> BatchLaw:
    """The law for ``cap`` of ``n`` records, each drawn with probability ``q``.

    Of M >= cap others the record is kept with probability q E[cap/(M + 1) | M >= cap], which is
    cap/n P(Binomial(n, q) > cap) / P(M >= cap) and at most q cap/(cap + 1).
    """
    if cap >= n:
        return BatchLaw(1.0, 0.0, q, 0.0)
    # P(Binomial(n, q) >= k) as an incomplete beta integral: bdtrc loses digits with n.
    over = max(float(special.betainc(cap, n - cap, q)), _LEAST)
    both = cap / n * float(special.betainc(cap + 1, n - cap, q))
    least = both / over * (1 - 3 * _TAIL_ERROR) if over > _LEAST else 0.0
    given = min(q * cap / (cap + 1), both / over * (1 + 3 * _TAIL_ERROR) if least else q)
    free, full = 0.0, 1.0  # of no others or more
    if cap > 1:
        free = float(special.betaincc(cap - 1, n - cap + 1, q))
        full = max(float(special.betainc(cap - 1, n - cap + 1, q)), over)
    # P(M = cap - 1), within the error of both tails.
    slack = _TAIL_ERROR * (full + over)
    fewer, most = max(full - over - slack, 0.0), full - over + slack
    kept = min((most * q + over * given) / full * (1 + 3 * _TAIL_ERROR), q)
    near, far = fewer * (1 - q), over * (1 + _TAIL_ERROR) * (1 - least)
    return BatchLaw(free, full, kept, near / (near + far) * (1 - 1e-12))


@dataclass(frozen=True)
class ShuffledEpoch(_GaussianOnBatches):
    """``event`` on each of the ``steps`` batches of one pass over shuffled records.

    Every record is in exactly one batch of a public size. No amplification is proven: a pass is
    charged as one release that shows the record's batch without sampling. Treating it as Poisson
    is too low (Chua et al. 2024, arXiv:2403.17673). ``Repeated`` counts epochs.

    Attributes:
        event: what is released from each batch.
        steps: T >= 1, batches of the epoch.
    """

    whole_block = True
    words = "an epoch of {steps:,} steps over shuffled records: {event}"
    refused: ClassVar = {
        ADD: "the batches of a pass have public sizes, so that neighbours have equal size; ask "
        "with relation replace_special or replace_one"
    }

    steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fields(self, steps=check.size)

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        # That of the one batch with the record; below, of the largest output.
        z, far = self.event.noise_multiplier, int(relation.separation)
        one = (BatchGaussian(1.0, z, (0, far, far)),)
        return one if upper else _largest_output_pairs(z, self.steps, far)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        # Those of the one batch with the record.
        return np.asarray(0.5 * orders * (relation.separation / self.event.noise_multiplier) ** 2)


def _largest_output_pairs(z: float, steps: int, far: int) -> tuple[Discrete, ...]:
    """The largest of ``steps`` outputs, where all other records contribute -1, in small bins.

    From every batch's sum its public least value is taken. Then the outputs are noise but one,
    whose mean is 2 with the record and 2 - ``far`` with what stands for it. A bin of the largest is
    a post-processing, so the release is no better than this pair (Chua et al. 2024,
    arXiv:2403.17673, has one threshold).
    """
    if z < 0.01:
        return ()  # the two laws lie 100 standard deviations apart: no bin holds mass of both
    # Bins change the loss by 0.01 where the number allows; the outermost are open.
    width = max(0.01 * min(z, z * z), 50 * z / _THRESHOLDS)
    edges = np.arange(-12 * z, 2 + 38 * z, width)
    rest = (steps - 1) * special.log_ndtr(edges / z)
    logs = np.asarray([special.log_ndtr((edges - m) / z) + rest for m in (2.0, 2.0 - far)])
    # P and Q of a largest output below and above each edge.
    below, above = np.exp(logs), -np.expm1(logs)
    keep = (below.min(axis=0) > 1e-280) & (above.min(axis=0) > 1e-280)
    if not keep.any():
        return ()
    below, above = below[:, keep], above[:, keep]
    # Differences of whichever end is small, after and before the outermost bins.
    small = above[:, :-1] < 0.5
    ends = np.where(small, above[:, :-1], below[:, 1:])
    inner = ends - np.where(small, above[:, 1:], below[:, :-1])
    mass = np.concatenate([below[:, :1], inner, above[:, -1:]], axis=1)
    # The ends are known to a relative 4e-12, their difference to that over its share of them.
    rounding = 4e-12 * max(1.0, float(np.max(ends / inner, initial=0.0)))
    loss = np.log(mass[0] / mass[1])
    order = np.argsort(loss)
    loss, (p, q) = loss[order], mass[:, order]
    reverse = Discrete(-loss[::-1], q[::-1], 0.0, rounding, p[::-1])
    return Discrete(loss, p, 0.0, rounding, q), reverse


@dataclass(frozen=True)
class RandomlyAllocated(_GaussianOnBatches, type_name="RandomAllocation"):
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

    whole_block = True
    words = (
        "an epoch of {steps:,} steps, each record in {participations:,} of them at random: {event}"
    )

    steps: int
    participations: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fields(self, steps=check.size, participations=check.size)
        k = self.participations
        if k > self.steps:
            raise ValueError(f"participations={k}: expected at most steps={self.steps}")

    def refuses(self, relation: Relation) -> str:
        if relation is Relation.REPLACE_ONE:
            return (
                "no dominating pair is known where a record becomes another in the same steps; ask "
                "with relation add_or_remove_one or replace_special"
            )
        if self.steps > MOST_STEPS:
            return f"an epoch of {self.steps} steps has too many for its sum, at most {MOST_STEPS}"
        return ""

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        # The same under both relations. One participation has both ends, which meet as atoms get
        # finer; between 1 and t the lower end is that of a score: docs/proofs/allocation.md.
        z, k = self.event.noise_multiplier, self.participations
        joint = z / math.sqrt(k)
        if self.refuses(relation):
            return ()
        if k == self.steps or (upper and joint < LEAST_NOISE):
            return (BatchGaussian(1.0, joint, (0, 1, 1)),)  # one Gaussian is its own reverse
        if not upper and (z < LEAST_NOISE or z > MOST_NOISE):
            return ()
        if not upper and k > 1:
            return score_pairs(z, self.steps, k) if self.steps <= MOST_SCORES else ()
        return epoch_pairs(min(z, MOST_NOISE), self.steps, k, upper)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        # That of k steps without sampling, order k / 2z^2. An epoch is a mixture over the record's
        # steps, and the divergence is quasi-convex (van Erven and Harremoes 2014,
        # arXiv:1206.2459v2, Theorem 13).
        z = self.event.noise_multiplier
        return np.asarray(orders * self.participations / (2 * z * z))


class _CutShort(RandomlyAllocated, type_name="RandomAllocation"):
    """An epoch of which only the first steps were released: at most a whole one, maybe nothing."""

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        return super().pairs(relation, True) if upper else ()
