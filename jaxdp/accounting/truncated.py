"""Gaussian releases on a Poisson sample of which at most ``cap`` records are kept.

docs/sampling_bounds.md proves the pairs (Theorem 3).
"""

from dataclasses import dataclass

import numpy as np
from scipy import special

from jaxdp import arguments as check
from jaxdp.accounting import mixture
from jaxdp.accounting.base import Array, Discrete, Pair
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.mixture import Branches, Mixture
from jaxdp.accounting.sampled import _Batched

# Relative error allowed to binomial tails (against 40 digits, up to 1e12 records: 2e-13).
_TAIL_ERROR = 1e-10
# Less than this is charged as this, and a record as if it were dropped as rarely as can be.
_LEAST = 1e-280

# Of the batch without the record, with it and with the null record: where fewer than cap others
# are drawn, and where a kept record takes the place of another. Forward, reverse.
_DISTANCES = (((1, 0, 1), (2, 1, 1)), ((0, 1, 1), (1, 2, 1)))


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
    """

    sampling_prob: float
    cap: int
    dataset_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fields(self, sampling_prob=check.share, cap=check.size, dataset_size=check.size)

    def refuses(self, relation: Relation) -> str:
        """As ``Part.refuses``."""
        if relation is Relation.REPLACE_SPECIAL:
            return ""
        return (
            "the number of records is public and a record is zeroed out; ask with replace_special"
        )

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """As ``Part.pairs``."""
        z, q = self.event.noise_multiplier, self.sampling_prob
        if q == 0:
            return (Discrete(np.zeros(1), np.ones(1)),)
        free, full, kept = branches(q, self.cap, self.dataset_size)
        if not upper:
            # All others are 0. Rounded down; a full batch that is hardly ever drawn counts as one
            # without the record.
            taken = (free * q + full * kept * (full > _LEAST)) * (1 - 1e-9)
            return tuple(Mixture(taken, z, d) for d in ((1, 0, 1), (0, 1, 1)))
        return tuple(
            Branches(((free, Mixture(q, z, d)), (full, Mixture(kept, z, e))), 2 * _TAIL_ERROR)
            for d, e in _DISTANCES
        )

    def renyi(self, relation: Relation, orders: Array) -> Array:
        """As ``Part.renyi``."""
        z, q = self.event.noise_multiplier, self.sampling_prob
        if q == 0:
            return np.zeros(orders.shape)
        free, full, kept = branches(q, self.cap, self.dataset_size)
        # A record that is never dropped bounds either branch, by convexity.
        whole = 0.5 * orders / z**2
        shares, largest = np.asarray([[free], [full]]), np.zeros(orders.shape)
        for distances in _DISTANCES:
            both = [Mixture(k, z, d) for k, d in zip((q, kept), distances, strict=True)]
            logs = np.asarray([np.minimum(mixture.renyi(pair, orders), whole) for pair in both])
            logs *= orders - 1
            small = np.log1p((shares * np.expm1(np.minimum(logs, 600.0))).sum(axis=0))
            with np.errstate(divide="ignore"):
                large = np.logaddexp.reduce(np.log(shares) + logs)
            largest = np.maximum(largest, np.where(logs.max(axis=0) < 600, small, large))
        return np.asarray(np.minimum(largest * (1 + 4 * _TAIL_ERROR) / (orders - 1), whole))


def branches(q: float, cap: int, n: int) -> tuple[float, float, float]:
    """(probability of fewer than ``cap`` others, of more, that the record is kept with more).

    The last is q E[cap/(M + 1) | M >= cap] = cap/n P(Binomial(n, q) > cap) over the second, at
    most q cap/(cap + 1); it is rounded up.
    """
    if cap >= n:
        return 1.0, 0.0, q
    # P(Binomial(n, q) >= k) as an incomplete beta integral: bdtrc loses digits with n.
    full = float(special.betainc(cap, n - cap, q))
    kept = q * cap / (cap + 1)
    if full < _LEAST:
        return 1.0, _LEAST, kept
    both = cap / n * float(special.betainc(cap + 1, n - cap, q))
    free = float(special.betaincc(cap, n - cap, q))
    return free, full, min(kept, both / full * (1 + 3 * _TAIL_ERROR))
