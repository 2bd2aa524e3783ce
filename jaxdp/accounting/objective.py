"""Objective perturbation: the exact minimum of a logistic loss plus a random linear term.

docs/tabular.md holds the proof.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from jaxdp import arguments as check
from jaxdp.accounting.base import Array, Pair, Part
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.gaussian import PROFILE_ERROR, gaussian_delta, gaussian_epsilon
from jaxdp.accounting.tuned import symmetric

_POINTS = 385
_MARGIN = 1 + 2 * PROFILE_ERROR


@dataclass(frozen=True)
class ObjectivePerturbation(Part):
    """The minimum of sum log(1 + e^(-y x.w)) + |w|^2 lambda/2 + b.w, with b ~ N(0, (z R)^2 I).

    |x| <= R, y in {-1, 1}, and the minimum is exact. Kifer, Smith and Thakurta 2012; Redberg,
    Koskela and Wang 2023 (arXiv:2401.00583v1, Theorem 3.1) have 2 H(epsilon - c, 1/z) with H the
    profile of a Gaussian mechanism and c = log(1 + curvature). Here it is H(epsilon - c, 1/z): the
    derivative of the logistic loss keeps its sign. An upper end only.

    Adding or removing one record, or replacing it by the record x = 0; replacing it by another is
    refused.

    Attributes:
        noise_multiplier: z > 0.
        curvature: R^2 / (4 lambda) > 0, a record's largest second derivative over the ridge's.
    """

    noise_multiplier: float
    curvature: float

    def __post_init__(self) -> None:
        check.fields(self, noise_multiplier=check.positive, curvature=check.positive)

    def refuses(self, relation: Relation) -> str:
        """As ``Part.refuses``."""
        if relation is Relation.REPLACE_ONE:
            return "it is proven for adding, removing and zeroing out a record"
        if not self.pairs(relation, True):
            return f"its noise_multiplier={self.noise_multiplier!r} is too small"
        return ""

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """As ``Part.pairs``."""
        found = _profile(self.noise_multiplier, self.curvature) if upper else None
        return () if found is None else (symmetric(*found),)


@functools.lru_cache(maxsize=64)
def _profile(noise_multiplier: float, curvature: float) -> tuple[Array, Array] | None:
    """Epsilons [k] from 0 to where delta is about 1e-25, and upper ends of delta [k]."""
    mu, shift = (1 / noise_multiplier) * (1 + 1e-15), math.log1p(curvature) * (1 + 1e-15)
    if not mu < 30 or not shift < 100:
        return None
    last = shift + max(gaussian_epsilon(mu, 1e-25)[1], mu)
    epsilons = np.unique(np.append(np.linspace(0, last, _POINTS - 1), shift))
    at_0 = min(gaussian_delta(mu, 0.0) * _MARGIN, 1.0)
    deltas = [
        gaussian_delta(mu, (e - shift) * (1 - 4e-16)) * _MARGIN
        if e >= shift
        else at_0 + (1 - at_0) * -math.expm1(e - shift) * (1 + 1e-14)
        for e in epsilons.tolist()
    ]
    return epsilons, np.minimum(np.minimum.accumulate(np.asarray(deltas)), 1.0)
