"""Releases of which a guarantee is all that is known: (epsilon, delta), zCDP, bounded range.

And randomised response, whose own pair is that of pure differential privacy.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from jaxdp import arguments as check
from jaxdp.accounting.base import Array, Pair, Part
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.primitives import Exponential, discrete, finite_renyi, vanishing

_U = 2.0**-53


@dataclass(frozen=True, kw_only=True)
class _Stated(Part):
    """An event that was proven under one relation, and has an upper end only."""

    relation: Relation = Relation.ADD_OR_REMOVE_ONE

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "relation", Relation(self.relation))
        except ValueError:
            expected = [r.value for r in Relation]
            raise ValueError(f"relation={self.relation!r}: expected one of {expected}") from None

    def refuses(self, relation: Relation) -> str:
        # A null record is a record, so REPLACE_ONE covers REPLACE_SPECIAL.
        """As ``Part.refuses``."""
        covered = (relation, self.relation) == (Relation.REPLACE_SPECIAL, Relation.REPLACE_ONE)
        if covered or relation is self.relation:
            return ""
        return f"it was proven under {self.relation.value}; state it under {relation.value}"


@dataclass(frozen=True)
class EpsilonDelta(_Stated):
    """Any release that is (epsilon, delta)-differentially private, and nothing else is known of it.

    Charged as the worst such release: the loss is +-epsilon, or infinite with probability delta
    (Kairouz, Oh and Viswanath 2015, arXiv:1311.0776v4, Theorem 3.3 and its proof). An upper end
    only, since the release may leak less.

    Attributes:
        epsilon: >= 0, finite.
        delta: in [0, 1]; 0 is pure differential privacy.
        relation: under which it was proven; others are refused, but for REPLACE_SPECIAL where
            REPLACE_ONE was proven (the null record being among the records).
    """

    epsilon: float
    delta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fields(self, epsilon=check.non_negative, delta=check.share)

    def infinite(self) -> str:
        """As ``Part.infinite``."""
        return "a release's delta is 1" if self.delta == 1 else vanishing(self.epsilon)

    def pure(self, relation: Relation) -> float:
        """As ``Part.pure``."""
        return self.epsilon if self.delta == 0 else math.inf

    def _law(self) -> tuple[Array, Array]:
        """(losses, P masses) of the finite losses."""
        if self.epsilon == 0:
            return np.zeros(1), np.asarray([1 - self.delta])
        loss = np.asarray([-self.epsilon, self.epsilon])
        return loss, (1 - self.delta) * special.expit(loss)

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """As ``Part.pairs``."""
        return (discrete(*self._law(), upper, self.delta),) if upper else ()

    def renyi(self, relation: Relation, orders: Array) -> Array:
        """As ``Part.renyi``."""
        if self.delta > 0:
            return super().renyi(relation, orders)
        return finite_renyi(*self._law(), orders)


@dataclass(frozen=True)
class ExponentialMechanism(_Stated):
    """A choice with probability ~ e^(epsilon u/(2 D)), D the most that u changes.

    Charged for what such a choice is: epsilon-bounded range, all of its losses lie in an interval
    of length epsilon (Durfee and Rogers 2019, arXiv:1905.04273v3; Dong, Durfee and Rogers 2020,
    arXiv:1909.13830v2). That is about half of epsilon-differential privacy. Report-noisy-max with
    Gumbel noise is such a choice. docs/accounting.md derives the pair. An upper end only.

    Attributes:
        epsilon: > 0.
        relation: under which u changes by at most D; others are refused as in ``EpsilonDelta``.
    """

    epsilon: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fields(self, epsilon=check.positive)

    def infinite(self) -> str:
        """As ``Part.infinite``."""
        return vanishing(self.epsilon)

    def pure(self, relation: Relation) -> float:
        """As ``Part.pure``."""
        return self.epsilon

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """As ``Part.pairs``."""
        weight = -1 / math.expm1(-self.epsilon)
        return (Exponential(self.epsilon, weight, 0.0),) if upper else ()

    def renyi(self, relation: Relation, orders: Array) -> Array:
        # log E_Q[e^(alpha L)] is 0 at 0 and 1, and its second derivative is the variance of a
        # variable of range epsilon, at most epsilon^2/4 (Cesar and Rogers 2020, arXiv:2004.07223).
        """As ``Part.renyi``."""
        return np.minimum(orders * (self.epsilon**2 / 8), self.epsilon) * (1 + 8 * _U)


@dataclass(frozen=True)
class ZCDP(_Stated):
    """Any release that is (xi, rho)-zero-concentrated differentially private.

    Its Renyi divergence of every order alpha > 1 is at most xi + rho alpha (Bun and Steinke 2016,
    arXiv:1605.02065v1, Definition 8.1). Accounted by Renyi divergences alone, with all that it is
    composed with. An upper end only.

    Attributes:
        rho: >= 0.
        xi: >= 0.
        relation: under which it was proven; others are refused as in ``EpsilonDelta``.
    """

    rho: float
    xi: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fields(self, rho=check.non_negative, xi=check.non_negative)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        """As ``Part.renyi``."""
        return (self.xi + self.rho * orders) * (1 + 4 * _U)


@dataclass(frozen=True)
class RandomizedResponse(Part):
    """Every record's own answer, replaced by a uniformly random one with ``noise_prob``.

    Stated for equally many records: REPLACE_ONE, and REPLACE_SPECIAL where the null record has one
    of the answers. The pair is tight under both. An added answer would be seen at once, so
    ADD_OR_REMOVE_ONE is refused.

    Attributes:
        noise_prob: p in [0, 1], with which the answer is drawn from all buckets (its own too).
        buckets: k >= 2, possible answers.
    """

    noise_prob: float
    buckets: int = 2

    def __post_init__(self) -> None:
        check.fields(self, noise_prob=check.share)
        object.__setattr__(self, "buckets", check.count("buckets", self.buckets, 2))

    def refuses(self, relation: Relation) -> str:
        """As ``Part.refuses``."""
        if relation is not Relation.ADD_OR_REMOVE_ONE:
            return ""
        return "the number of answers is seen; ask with relation replace_one"

    def infinite(self) -> str:
        """As ``Part.infinite``."""
        return "" if self.noise_prob >= 1e-15 else "answers are released without noise"

    def pure(self, relation: Relation) -> float:
        """As ``Part.pure``."""
        return math.log1p(self.buckets * (1 - self.noise_prob) / self.noise_prob)

    def _law(self) -> tuple[Array, Array]:
        """(losses, P masses): the other answer, a third one, one's own."""
        p, k, top = self.noise_prob, self.buckets, self.pure(Relation.REPLACE_ONE)
        if top == 0:
            return np.zeros(1), np.ones(1)
        return np.asarray([-top, 0.0, top]), np.asarray([p / k, (k - 2) * (p / k), 1 - p + p / k])

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """As ``Part.pairs``."""
        return (discrete(*self._law(), upper),)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        """As ``Part.renyi``."""
        return finite_renyi(*self._law(), orders)
