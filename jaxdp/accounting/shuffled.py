"""Gaussian releases on the batches of one pass over shuffled records.

docs/sampling_bounds.md proves the pairs (Theorem 4).
"""

from dataclasses import dataclass

import numpy as np
from scipy import special

from jaxdp import arguments as check
from jaxdp.accounting.base import Array, Discrete, Pair
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.mixture import Mixture
from jaxdp.accounting.sampled import _Batched

_THRESHOLDS = 20_000


@dataclass(frozen=True)
class ShuffledEpoch(_Batched):
    """``event`` on each of the ``steps`` batches of one pass over shuffled records.

    Every record is in exactly one batch of a public size. No amplification is proven: a pass is
    charged as one release that shows the record's batch without sampling. Treating it as Poisson
    is too low (Chua et al. 2024, arXiv:2403.17673). ``Repeated`` counts epochs.

    Attributes:
        event: what is released from each batch.
        steps: T >= 1, batches of the epoch.
    """

    steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fields(self, steps=check.size)

    @property
    def block(self) -> int:
        """As ``Event.block``."""
        return self.steps

    def refuses(self, relation: Relation) -> str:
        """As ``Part.refuses``."""
        if relation is not Relation.ADD_OR_REMOVE_ONE:
            return ""
        return (
            "the batches of a pass have public sizes, so that neighbours have equal size; ask with "
            "relation replace_special or replace_one"
        )

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        # That of the one batch with the record; below, of the largest output.
        """As ``Part.pairs``."""
        z, far = self.event.noise_multiplier, _far(relation)
        return (Mixture(1.0, z, (0, far, far)),) if upper else _largest(z, self.steps, far)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        # Those of the one batch with the record.
        """As ``Part.renyi``."""
        return np.asarray(0.5 * orders * (_far(relation) / self.event.noise_multiplier) ** 2)


def _far(relation: Relation) -> int:
    return 2 if relation is Relation.REPLACE_ONE else 1


def _largest(z: float, steps: int, far: int) -> tuple[Discrete, ...]:
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
    back = slice(None, None, -1)
    return Discrete(loss, p, 0.0, rounding, q), Discrete(
        -loss[back], q[back], 0.0, rounding, p[back]
    )
