"""Gaussian releases on batches of fixed size, drawn afresh without replacement.

docs/sampling_bounds.md proves the pairs (Theorem 2).
"""

import numpy as np

from jaxdp.accounting import mixture
from jaxdp.accounting.base import Array, Pair
from jaxdp.accounting.bounds import Relation

# Distances between the batch without the record, with it, and with its replacement.
_DISTANCES = {
    Relation.REPLACE_ONE: ((2, 2, 2),),
    Relation.REPLACE_SPECIAL: ((2, 1, 1), (1, 2, 1)),
}


def refuses(relation: Relation) -> str:
    """The reason why there is no bound under this relation, or ""."""
    if relation in _DISTANCES:
        return ""
    return (
        "batches of a fixed size only have neighbours of equal size; ask with relation "
        "replace_one or replace_special"
    )


def pairs(z: float, q: float, relation: Relation, upper: bool) -> tuple[Pair, ...]:
    """Dominating pairs of one step, tight for one step; below, those of two data sets.

    z is the noise multiplier and q the batch size over that of the data set, in (0, 1].
    """
    if upper:
        return tuple(mixture.Mixture(q, z, d) for d in _DISTANCES[relation])
    # All other records contribute -1, the record 1 and its replacement -1; or all others 0.
    far = 2 if relation is Relation.REPLACE_ONE else 1
    return (mixture.Mixture(q, z, (far, 0, far)), mixture.Mixture(q, z, (0, far, far)))


def renyi(z: float, q: float, relation: Relation, orders: Array) -> Array:
    """Renyi divergences of one step at orders > 1, [k], never below the truth."""
    far = 2 if relation is Relation.REPLACE_ONE else 1
    curves = [mixture.renyi(mixture.Mixture(q, z, d), orders) for d in _DISTANCES[relation]]
    full = 0.5 * orders * (far / z) ** 2
    return np.asarray(np.minimum(np.max(curves, axis=0), full))
