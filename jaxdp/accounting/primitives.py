"""Additive noise that is no Gaussian: Laplace, discrete Laplace and discrete Gaussian.

All three have a log-concave law, so that thresholds are the best tests between two of its shifts
and the trade-off function of a shift by a + b is that of a after that of b. A vector with
independent noise in every coordinate is a chain of shifts of one coordinate each, which group
privacy bounds by the same expression (Dong, Roth and Su 2019, arXiv:1905.02383v3, Theorem 2.14): so
the shift of one coordinate by the l1 distance dominates every shift of the vector, and is one.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from jaxdp import arguments as check
from jaxdp.accounting.base import Array, Discrete, Pair, Part
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.loss import separation

_U = 2.0**-53
_UNDERFLOW = 600.0  # losses whose Q mass is a number for sure
_LARGEST = 1e6  # above it no loss is worth the name of a guarantee


class Exponential:
    """A pair with P density ~ e^(loss/2) of the loss between -+largest, and atoms at the ends.

    Laplace noise is such a pair, and so is the worst of bounded range.

    Args:
        largest: a > 0; the losses lie in [-a, a].
        weight: w, the P density is w e^(-(a - loss)/2)/2, the Q density w e^(-(a + loss)/2)/2.
        atom: P mass at a and Q mass at -a; P has e^-a times it at -a.
    """

    infinite = 0.0

    def __init__(self, largest: float, weight: float, atom: float) -> None:
        self.center, self.weight, self.atom = largest, weight, atom
        # The exponents are at most ``largest``, each rounded a few times.
        self.rounding = 4 * _U * (8 + largest)

    def cells(self, edges: Array) -> tuple[Array, Array]:
        """As ``Pair.cells``."""
        return self._between(edges[:-1], edges[1:])

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """As ``Pair.tails``."""
        return self._between(losses, np.asarray(np.inf))

    def _between(self, low: Array, high: Array) -> tuple[Array, Array]:
        a = self.center
        left, right = np.clip(low, -a, a), np.clip(high, -a, a)
        part = -self.weight * np.expm1(-0.5 * (right - left))
        top, bottom = (low < a) & (a <= high), (low < -a) & (-a <= high)
        rare = self.atom * math.exp(-a)
        p = part * np.exp(-0.5 * (a - right)) + self.atom * top + rare * bottom
        q = part * np.exp(-0.5 * (a + left)) + rare * top + self.atom * bottom
        return p, q

    def span(self, tail: float) -> tuple[float, float]:
        """As ``Pair.span``."""
        return -self.center, self.center

    def slack(self, edges: Array) -> float:
        """The largest distance of the losses from the true ones: ``largest`` is rounded."""
        return 4 * _U * self.center


def vanishing(epsilon: float) -> str:
    """The reason why a release with such a loss is charged as one without noise, or ""."""
    return "" if epsilon <= _LARGEST else f"a release's loss of {epsilon:g} guarantees nothing"


def discrete(
    loss: Array, p: Array, upper: bool, infinite: float = 0.0, rounding: float = 16 * _U
) -> Discrete:
    """The pair of these increasing losses and P masses; a rounded loss moves its Q mass.

    For a lower bound the losses whose Q mass may underflow are left out.
    """
    if not upper:
        keep = loss < _UNDERFLOW
        loss, p, infinite = loss[keep], p[keep], 0.0
    return Discrete(loss, p, infinite, rounding + 8 * _U * float(np.max(np.abs(loss), initial=0.0)))


def finite_renyi(loss: Array, p: Array, orders: Array) -> Array:
    """Renyi divergences of a pair of finitely many losses, [k], raised by what rounding may do."""
    inside = p > 0
    loss, log_p = loss[inside], np.log(p[inside])
    out = np.empty(orders.size)
    for i, order in enumerate(orders.tolist()):
        terms = log_p + (order - 1) * loss
        scale = loss.size + 8 + float(np.max(np.abs(terms) + np.abs(log_p)))
        out[i] = (float(special.logsumexp(terms)) + 8 * _U * scale) / (order - 1)
    return np.maximum(out, 0.0)


@dataclass(frozen=True)
class Laplace(Part):
    """A sum of contributions plus independent Laplace noise in every coordinate.

    The scale is noise_multiplier times c, the largest l1 norm that ONE record can contribute,
    whatever the relation: under REPLACE_ONE the accountant itself doubles the distance. The pair is
    tight under every relation.

    Attributes:
        noise_multiplier: b >= 0, Laplace scale divided by c; 0 means no noise (infinite loss).
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        check.fields(self, noise_multiplier=check.non_negative)

    def infinite(self) -> str:
        """As ``Part.infinite``."""
        return vanishing(1 / self.noise_multiplier if self.noise_multiplier > 0 else math.inf)

    def pure(self, relation: Relation) -> float:
        """As ``Part.pure``."""
        return separation(relation) / self.noise_multiplier

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """As ``Part.pairs``."""
        a = self.pure(relation)
        return (Exponential(a, 0.5, 0.5),) if upper or a < _UNDERFLOW else ()

    def renyi(self, relation: Relation, orders: Array) -> Array:
        # Mironov 2017, arXiv:1702.07476v3, Proposition 6.
        """As ``Part.renyi``."""
        a = self.pure(relation)
        up = np.log(orders / (2 * orders - 1)) + (orders - 1) * a
        down = np.log((orders - 1) / (2 * orders - 1)) - orders * a
        slack = 16 * _U * (4 + orders * a + np.abs(np.log(orders - 1)))
        return np.minimum((np.logaddexp(up, down) + slack) / (orders - 1), a * (1 + 4 * _U))


@dataclass(frozen=True)
class _Lattice(Part):
    """Noise on the integers: the sums are integers, and so is the distance."""

    scale: float
    sensitivity: int = 1

    def __post_init__(self) -> None:
        check.fields(self, scale=check.positive, sensitivity=check.size)
        if not 1e-30 <= self.scale <= 1e30:
            raise ValueError(f"scale={self.scale!r}: expected a number in [1e-30, 1e30]")
        if self.sensitivity > 100_000:
            raise ValueError(f"sensitivity={self.sensitivity}: expected at most 100000")

    def infinite(self) -> str:
        """As ``Part.infinite``."""
        return vanishing(self.sensitivity / self.scale)

    def _shift(self, relation: Relation) -> int:
        return int(separation(relation)) * self.sensitivity


@dataclass(frozen=True)
class DiscreteLaplace(_Lattice):
    """A sum of integer contributions plus independent noise k with mass ~ e^(-|k|/scale).

    Also known as the geometric mechanism. Under REPLACE_ONE the accountant itself doubles the
    distance. The pair is tight under every relation.

    Attributes:
        scale: in [1e-30, 1e30]; epsilon is sensitivity/scale where one record is added or removed.
        sensitivity: the largest l1 norm of ONE record's integer contribution, in 1..1e5.
    """

    def pure(self, relation: Relation) -> float:
        """As ``Part.pure``."""
        return self._shift(relation) / self.scale

    def _law(self, relation: Relation) -> tuple[Array, Array]:
        """(losses, P masses) of the outputs shift, shift - 1, ..., 0; the rest joins the ends."""
        shift, t = self._shift(relation), self.scale
        k = np.arange(shift, -1, -1.0)
        p = np.exp(-k / t) / (1 + math.exp(-1 / t))
        p[1:-1] *= -math.expm1(-1 / t)
        return (shift - 2 * k) / t, p

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """As ``Part.pairs``."""
        loss, p = self._law(relation)
        return (discrete(loss, p, upper, rounding=8 * _U * (4 + self.pure(relation))),)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        """As ``Part.renyi``."""
        return finite_renyi(*self._law(relation), orders)


@dataclass(frozen=True)
class DiscreteGaussian(_Lattice):
    """A sum of integer contributions plus independent noise k with mass ~ e^(-k^2/(2 scale^2)).

    The pair is tight for contributions of this l1 norm. Where a vector's l2 norm is bounded
    instead, use ``ZCDP(l2^2/(2 scale^2))`` (Canonne, Kamath and Steinke 2020, arXiv:2004.00010v5,
    Theorem 14). Under REPLACE_ONE the accountant itself doubles the distance.

    Attributes:
        scale: sigma, about the noise's standard deviation; above 1e4 only Renyi bounds.
        sensitivity: as of ``DiscreteLaplace``, and the range of ``scale`` too.
    """

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """As ``Part.pairs``."""
        shift, sigma = self._shift(relation), self.scale
        if sigma > 1e4:
            return ()
        # Outputs beyond 38 scales weigh less than 1e-300 together: an infinite loss above, nothing
        # below.
        reach = math.ceil(38 * sigma) + 1
        k = np.arange(reach, -reach - 1, -1.0)
        mass = np.exp(-0.5 * (k / sigma) ** 2)
        loss = shift * (shift - 2 * k) / (2 * sigma * sigma)
        keep = mass > 0
        p = mass[keep] / mass.sum()
        # exp(-t^2/2) with t^2/2 <= 730 rounded thrice.
        return (discrete(loss[keep], p, upper, 1e-300, 4096 * _U),)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        # Canonne, Kamath and Steinke 2020, Proposition 5.
        """As ``Part.renyi``."""
        return orders * (0.5 * (self._shift(relation) / self.scale) ** 2 * (1 + 8 * _U))
