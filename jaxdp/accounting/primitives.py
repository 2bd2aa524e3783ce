"""Releases beside Gaussians on batches: other noise, answers, and guarantees that are given.

Laplace, discrete Laplace and discrete Gaussian noise have a log-concave law, so that thresholds are
the best tests between two of its shifts and the trade-off function of a shift by a + b is that of a
after that of b. A vector with independent noise in every coordinate is a chain of shifts of one
coordinate each, which group privacy bounds by the same expression (Dong, Roth and Su 2019,
arXiv:1905.02383v3, Theorem 2.14): so the shift of one coordinate by the l1 distance dominates every
shift of the vector, and is one.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from scipy import special

from jaxdp import arguments as check
from jaxdp.accounting.events import (
    ADD,
    Array,
    Event,
    Gaussian,
    Relation,
    Repeated,
    require_gaussian,
)
from jaxdp.accounting.gaussian import PROFILE_ERROR, gaussian_delta, gaussian_epsilon
from jaxdp.accounting.pairs import (
    Exponential,
    MixedGaussian,
    Pair,
    PairedEvent,
    SampledGaussian,
    discrete_pair,
    mixture_log_ratio,
    symmetric_pair,
)

_U = 2.0**-53
_UNDERFLOW = 600.0  # losses whose Q mass is a number for sure
_LARGEST_EPSILON = 1e6  # above it no loss is worth the name of a guarantee
_NODES = 20_000  # of a quadrature
MOST_OF_ONE = 1000  # records of a group, or a user, that a mixture is made of


def vacuous_reason(epsilon: float) -> str:
    """The reason why a release with such a loss is charged as one without noise, or ""."""
    enough = epsilon <= _LARGEST_EPSILON
    return "" if enough else f"a release's loss of {epsilon:g} guarantees nothing"


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


def log_geometric_sum(epsilon: float, k: int) -> float:
    """log of 1 + e^epsilon + ... + e^((k - 1) epsilon), raised by its rounding."""
    if epsilon == 0:
        return math.log(k)
    ratio = np.log(-np.expm1(-k * epsilon)) - np.log(-np.expm1(-epsilon))
    return float((k - 1) * epsilon + ratio) + 1e-14 * (1 + k * epsilon)


@dataclass(frozen=True)
class Laplace(PairedEvent):
    """A sum of contributions plus independent Laplace noise in every coordinate.

    The scale is noise_multiplier times c, the largest l1 norm that ONE record can contribute,
    whatever the relation: under REPLACE_ONE the accountant itself doubles the distance. The pair is
    tight under every relation.

    Attributes:
        noise_multiplier: b >= 0, Laplace scale divided by c; 0 means no noise (infinite loss).
    """

    words = (
        "a sum of clipped contributions with Laplace noise of {noise_multiplier:.4g} times the "
        "largest one"
    )

    noise_multiplier: float

    def __post_init__(self) -> None:
        check.fields(self, noise_multiplier=check.non_negative)

    def infinite(self) -> str:
        return vacuous_reason(1 / self.noise_multiplier if self.noise_multiplier > 0 else math.inf)

    def pure(self, relation: Relation) -> float:
        return relation.separation / self.noise_multiplier

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        a = self.pure(relation)
        return (Exponential(a, 0.5, 0.5),) if upper or a < _UNDERFLOW else ()

    def renyi(self, relation: Relation, orders: Array) -> Array:
        # Mironov 2017, arXiv:1702.07476v3, Proposition 6.
        a = self.pure(relation)
        up = np.log(orders / (2 * orders - 1)) + (orders - 1) * a
        down = np.log((orders - 1) / (2 * orders - 1)) - orders * a
        slack = 16 * _U * (4 + orders * a + np.abs(np.log(orders - 1)))
        return np.minimum((np.logaddexp(up, down) + slack) / (orders - 1), a * (1 + 4 * _U))

    def of_group(self, records: int) -> Event | None:
        return Laplace(self.noise_multiplier / records)


@dataclass(frozen=True)
class _IntegerNoise(PairedEvent):
    """Base of noise on the integers: the sums are integers, and so is the distance."""

    scale: float
    sensitivity: int = 1

    def __post_init__(self) -> None:
        check.fields(self, scale=check.positive, sensitivity=check.size)
        if not 1e-30 <= self.scale <= 1e30:
            raise ValueError(f"scale={self.scale!r}: expected a number in [1e-30, 1e30]")
        if self.sensitivity > 100_000:
            raise ValueError(f"sensitivity={self.sensitivity}: expected at most 100000")

    def infinite(self) -> str:
        return vacuous_reason(self.sensitivity / self.scale)

    def _shift(self, relation: Relation) -> int:
        return int(relation.separation) * self.sensitivity

    def of_group(self, records: int) -> Event | None:
        return replace(self, sensitivity=self.sensitivity * records)


@dataclass(frozen=True)
class DiscreteLaplace(_IntegerNoise):
    """A sum of integer contributions plus independent noise k with mass ~ e^(-|k|/scale).

    Also known as the geometric mechanism. Under REPLACE_ONE the accountant itself doubles the
    distance. The pair is tight under every relation.

    Attributes:
        scale: in [1e-30, 1e30]; epsilon is sensitivity/scale where one record is added or removed.
        sensitivity: the largest l1 norm of ONE record's integer contribution, in 1..1e5.
    """

    words = (
        "a sum of integers, up to {sensitivity} of a record, with discrete Laplace noise of scale "
        "{scale:.4g}"
    )

    def pure(self, relation: Relation) -> float:
        return self._shift(relation) / self.scale

    def _losses(self, relation: Relation) -> tuple[Array, Array]:
        """(losses, P masses) of the outputs shift, shift - 1, ..., 0; the rest joins the ends."""
        shift, t = self._shift(relation), self.scale
        k = np.arange(shift, -1, -1.0)
        p = np.exp(-k / t) / (1 + math.exp(-1 / t))
        p[1:-1] *= -math.expm1(-1 / t)
        return (shift - 2 * k) / t, p

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        loss, p = self._losses(relation)
        return (discrete_pair(loss, p, upper, rounding=8 * _U * (4 + self.pure(relation))),)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        return finite_renyi(*self._losses(relation), orders)


@dataclass(frozen=True)
class _SampledLaplace(PairedEvent, type_name="PoissonSampled of a DiscreteLaplace"):
    """A ``DiscreteLaplace`` on a Poisson sample, where a record is added, removed or zeroed out.

    With (P, Q) the unsampled pair, the pairs are ((1 - q) Q + q P, Q) and its reverse (Zhu, Dong
    and Wang 2022, arXiv:2106.08567v2, Theorem 11; docs/proofs/accounting.md).
    """

    event: DiscreteLaplace
    sampling_prob: float

    def refuses(self, relation: Relation) -> str:
        return "no bound is proven" if relation is Relation.REPLACE_ONE else ""

    def infinite(self) -> str:
        return self.event.infinite()

    def pure(self, relation: Relation) -> float:
        # Of log(1 + x), x = q (e^a - 1), where x is off by a few roundings of a and of log q.
        (loss, _), _ = self._losses(relation)
        few = 64 + 8 * (self.event.pure(relation) - math.log(self.sampling_prob))
        return float(loss[-1]) * (1 + few * _U)

    def _losses(self, relation: Relation) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """(losses, P masses) of the sample with the record against that without, and reversed."""
        q, (loss, p) = self.sampling_prob, self.event._losses(relation)
        least = p * np.exp(-loss)
        # log((1 - q) + q e^loss), without cancellation on either side.
        small = np.log1p(q * np.expm1(np.minimum(loss, 30.0)))
        mixed = np.where(loss < 30.0, small, np.logaddexp(math.log1p(-q), math.log(q) + loss))
        # Losses that float64 cannot tell apart are one.
        mixed, first = np.unique(mixed, return_index=True)
        least = np.add.reduceat(least, first)
        return (mixed, least * np.exp(mixed)), (-mixed[::-1], least[::-1])

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        # Each loss and mass is rounded a few times, and masses of one loss are added up.
        rounding = _U * (256 + 32 * self.event.pure(relation) + self.event.sensitivity)
        found = self._losses(relation)
        return tuple(discrete_pair(loss, p, upper, rounding=rounding) for loss, p in found)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        both = [finite_renyi(loss, p, orders) for loss, p in self._losses(relation)]
        return np.asarray(np.maximum(*both))


def poisson_sampled(event: PairedEvent, sampling_prob: float) -> PairedEvent | None:
    """The event on a Poisson sample, with the probability in (0, 1]; None where none is known."""
    if sampling_prob == 1:
        return event
    if isinstance(event, DiscreteLaplace) and event.sensitivity / event.scale < _UNDERFLOW:
        return _SampledLaplace(event, sampling_prob)
    return None


@dataclass(frozen=True)
class DiscreteGaussian(_IntegerNoise):
    """A sum of integer contributions plus independent noise k with mass ~ e^(-k^2/(2 scale^2)).

    The pair is tight for contributions of this l1 norm. Where a vector's l2 norm is bounded
    instead, use ``ZCDP(l2^2/(2 scale^2))`` (Canonne, Kamath and Steinke 2020, arXiv:2004.00010v5,
    Theorem 14). Under REPLACE_ONE the accountant itself doubles the distance.

    Attributes:
        scale: sigma, about the noise's standard deviation; above 1e4 only Renyi bounds.
        sensitivity: as of ``DiscreteLaplace``, and the range of ``scale`` too.
    """

    words = (
        "a sum of integers, up to {sensitivity} of a record, with discrete Gaussian noise of scale "
        "{scale:.4g}"
    )

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
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
        return (discrete_pair(loss[keep], p, upper, 1e-300, 4096 * _U),)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        # Canonne, Kamath and Steinke 2020, Proposition 5.
        return orders * (0.5 * (self._shift(relation) / self.scale) ** 2 * (1 + 8 * _U))


@dataclass(frozen=True)
class MixtureOfGaussians(PairedEvent):
    """Gaussian noise on a vector that a record, or group, moves by a random, secret amount.

    With probability p_i, independent of the data, the vector moves by an l2 norm of at most s_i
    times the unit of the noise. ``PoissonSampled(Gaussian(z), q)`` is the mixture of 0 and 1 with
    probabilities 1 - q and q. The worst pair is N(0, z^2) against the mixture of N(s_i, z^2) on the
    line, in both directions: among events of one probability under N(0) a half-space is the most
    likely under every single N(c_i), and on the line one half-space is that for all i at once
    (Choquette-Choo et al. 2024, arXiv:2310.15526v2; Ganesh 2024, arXiv:2401.10294v2). It is tight.

    Attributes:
        noise_multiplier: z >= 0, noise standard deviation in the unit of the sensitivities.
        sensitivities: s_i >= 0, public; equal ones are merged.
        probabilities: p_i >= 0, public; as many. They sum to 1 within 1e-12.
    """

    noise_multiplier: float
    sensitivities: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        check.fields(self, noise_multiplier=check.non_negative)
        values = check.each("sensitivities", self.sensitivities, check.non_negative)
        chances = check.each("probabilities", self.probabilities, check.share)
        if len(values) != len(chances):
            raise ValueError(f"probabilities has length {len(chances)}: expected {len(values)}")
        total = math.fsum(chances)
        if not abs(total - 1) <= 1e-12:
            raise ValueError(f"probabilities sum to {total!r}: expected 1")
        merged: dict[float, float] = {}
        for s, p in sorted(zip(values, chances, strict=True)):
            merged[s] = merged.get(s, 0.0) + p
        object.__setattr__(self, "sensitivities", tuple(merged))
        object.__setattr__(self, "probabilities", tuple(merged.values()))

    def refuses(self, relation: Relation) -> str:
        if relation is Relation.REPLACE_ONE:
            return "no worst pair is proven where the amounts of two records may point apart"
        return ""

    def infinite(self) -> str:
        z = self.noise_multiplier
        return "" if z >= 1e-30 or not any(self.sensitivities) else "a release has no noise"

    def components(self) -> tuple[Array, Array]:
        """(shifts in noise standard deviations, probabilities > 0), by shift."""
        s, p = np.asarray(self.sensitivities), np.asarray(self.probabilities)
        p = p / math.fsum(self.probabilities)
        keep = p > 0
        return s[keep] / self.noise_multiplier if s.any() else s[keep], p[keep]

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        c, p = self.components()
        if c[-1] == 0:
            return (discrete_pair(np.zeros(1), np.ones(1), upper),)
        return MixedGaussian(c, p), MixedGaussian(c, p, reverse=True)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        # By the trapezoid rule in both directions, its error added.
        c, p = self.components()
        out = np.empty(orders.size)
        for i, order in enumerate(orders.tolist()):
            # x^a and x^(1-a) are convex, so the mixture of the moments bounds the moment.
            plain = float(special.logsumexp(0.5 * order * (order - 1) * c * c, b=p))
            both = max(_log_moment(c, p, power) for power in (order, 1 - order))
            out[i] = (min(plain, both) + 1e-13 * (1 + abs(plain))) / (order - 1)
        return np.maximum(np.minimum(out, orders * (0.5 * float(c[-1]) ** 2 * (1 + 8 * _U))), 0.0)

    def describe(self) -> str:
        noise, most = f"{self.noise_multiplier:.4g}", f"{max(self.sensitivities):.4g}"
        many = f"{len(self.sensitivities)} amounts at random, up to {most}"
        return f"a sum with Gaussian noise of {noise}, which a record moves by one of {many}"


def binomial_mixture(noise_multiplier: float, sampling_prob: float, k: int) -> MixtureOfGaussians:
    """The mixture of k records of which each takes part with probability ``sampling_prob`` > 0."""
    q = sampling_prob
    if q == 1:
        return MixtureOfGaussians(noise_multiplier, (k,), (1.0,))
    # P(0), ..., P(k) of a binomial law, to a relative 1e-13. The last is more than all those
    # together that underflow, so that the law is no smaller.
    yes, no = math.log(q), math.log1p(-q)
    logs = [math.log(math.comb(k, j)) + j * yes + (k - j) * no for j in range(k + 1)]
    chances = [math.exp(v) if v > -697 else 0.0 for v in logs]
    chances[-1] = max(chances[-1], 1e-300)
    return MixtureOfGaussians(noise_multiplier, tuple(range(k + 1)), tuple(chances))


@dataclass(frozen=True)
class ExamplesPerUser(PairedEvent):
    """A Gaussian on Poisson-sampled records, where the privacy unit is a user with several of them.

    Example-level sampling (Charles et al. 2024, arXiv:2407.07737): every record takes part and is
    clipped by itself. Of a user's records a binomial number takes part, which in the worst case
    point one way: the ``MixtureOfGaussians`` of 0, ..., k, which is tight. What a user with fewer
    records adds, or with records that point apart, is dominated
    (docs/proofs/accounting.md#users-whose-records-are-drawn-one-by-one).

    Attributes:
        event: what is released from the batch, in units of the largest contribution of a record.
        sampling_prob: q in (0, 1], of each record.
        records: k in 1..1,000, the most records of one user in the whole data set; public.
    """

    unit_is_user = True
    words = (
        "{event}, each record drawn with probability {sampling_prob:.4g}; the unit is a user with "
        "at most {records:,} of the records"
    )
    refused: ClassVar = {
        Relation.REPLACE_ONE: "no worst pair is proven where the records of two users point apart"
    }

    event: Gaussian
    sampling_prob: float
    records: int

    def __post_init__(self) -> None:
        check.fields(
            self, event=require_gaussian, sampling_prob=check.probability, records=check.size
        )
        if self.records > MOST_OF_ONE:
            raise ValueError(f"records={self.records}: expected at most {MOST_OF_ONE}")

    @property
    def _mixture(self) -> MixtureOfGaussians:
        return binomial_mixture(self.event.noise_multiplier, self.sampling_prob, self.records)

    def infinite(self) -> str:
        return self._mixture.infinite()

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        return self._mixture.pairs(relation, upper)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        return self._mixture.renyi(relation, orders)

    def of_group(self, records: int) -> Event | None:
        users = records * self.records
        return replace(self, records=users) if users <= MOST_OF_ONE else None


def _log_moment(c: Array, p: Array, power: float) -> float:
    """log E[R(y)^power], y standard normal, R = sum p_i e^(c_i y - c_i^2/2); never too low.

    On the line Im y = d with c_i d < pi/2 no term leaves the right half-plane, so |R| is at most
    its value at Re y and at least cos(c d) times that, and the Gaussian grows by e^(d^2/2). The
    trapezoid rule of width h is then wrong by a relative e^(d^2/2 - 2 pi d/h) cos(c d)^power for
    powers below 0, made e^-37 (as in ``contour.trapezoid_width``). Outside [-reach, reach] the
    moments of the components bound it.
    """
    top, order = float(c[-1]), max(power, 1 - power)
    if top == 0:
        return 0.0
    d = min(6.0, 1 / (top * math.sqrt(order)))
    penalty = 0.5 * d * d + (-(order - 1) * math.log(math.cos(top * d)) if power < 0 else 0.0)
    width = 2 * math.pi * d / (37 + penalty)
    plain = 0.5 * order * (order - 1) * c * c
    reach = order * top + 9 + math.sqrt(2 * float(plain[-1]))
    if not reach / width < _NODES:
        return math.inf
    y: Array = width * np.arange(-math.ceil(reach / width), math.ceil(reach / width) + 1.0)
    terms = power * mixture_log_ratio(y, c, p)[0] - 0.5 * y * y
    inside = float(special.logsumexp(terms)) + math.log(width / math.sqrt(2 * math.pi))
    beyond = special.logsumexp(plain + special.log_ndtr(order * c - reach) + math.log(2), b=p)
    return float(np.logaddexp(inside + 4e-16 * (y.size + order * top * reach), beyond)) + 1e-15


@dataclass(frozen=True, kw_only=True)
class _StatedEvent(PairedEvent):
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
        covered = (relation, self.relation) == (Relation.REPLACE_SPECIAL, Relation.REPLACE_ONE)
        if covered or relation is self.relation:
            return ""
        return f"it was proven under {self.relation.value}; state it under {relation.value}"


@dataclass(frozen=True)
class EpsilonDelta(_StatedEvent):
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

    words = "a release that is stated to be ({epsilon:.4g}, {delta:.4g})-private"

    epsilon: float
    delta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fields(self, epsilon=check.non_negative, delta=check.share)

    def infinite(self) -> str:
        return "a release's delta is 1" if self.delta == 1 else vacuous_reason(self.epsilon)

    def pure(self, relation: Relation) -> float:
        return self.epsilon if self.delta == 0 else math.inf

    def _losses(self) -> tuple[Array, Array]:
        """(losses, P masses) of the finite losses."""
        if self.epsilon == 0:
            return np.zeros(1), np.asarray([1 - self.delta])
        loss = np.asarray([-self.epsilon, self.epsilon])
        return loss, (1 - self.delta) * special.expit(loss)

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        return (discrete_pair(*self._losses(), upper, self.delta),) if upper else ()

    def renyi(self, relation: Relation, orders: Array) -> Array:
        if self.delta > 0:
            return super().renyi(relation, orders)
        return finite_renyi(*self._losses(), orders)

    def of_group(self, records: int) -> Event | None:
        # Vadhan 2017, "The complexity of differential privacy", Lemma 2.2, its sum not yet bounded.
        delta = 0.0
        if self.delta:
            log_delta = math.log(self.delta) + log_geometric_sum(self.epsilon, records)
            delta = math.exp(min(0.0, log_delta + 1e-12))
        return replace(self, epsilon=records * self.epsilon, delta=delta)


@dataclass(frozen=True)
class ExponentialMechanism(_StatedEvent):
    """A choice with probability ~ e^(epsilon u/(2 D)), D the most that u changes.

    Charged for what such a choice is: epsilon-bounded range, all of its losses lie in an interval
    of length epsilon (Durfee and Rogers 2019, arXiv:1905.04273v3; Dong, Durfee and Rogers 2020,
    arXiv:1909.13830v2). That is about half of epsilon-differential privacy. Report-noisy-max with
    Gumbel noise is such a choice. docs/proofs/accounting.md derives the pair. The lower end is the
    choice between two candidates of which one rises by D where the other falls by it.

    Attributes:
        epsilon: > 0.
        relation: under which u changes by at most D; others are refused as in ``EpsilonDelta``.
    """

    words = "a choice by an exponential mechanism of epsilon {epsilon:.4g}"
    apart: ClassVar[bool] = True

    epsilon: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fields(self, epsilon=check.positive)

    def infinite(self) -> str:
        return vacuous_reason(self.epsilon)

    def pure(self, relation: Relation) -> float:
        return self.epsilon

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        if not upper:
            if self.epsilon / 2 >= _UNDERFLOW:
                return ()
            loss = np.asarray([-self.epsilon / 2, self.epsilon / 2])
            return (discrete_pair(loss, special.expit(loss), upper),)
        weight = -1 / math.expm1(-self.epsilon)
        return (Exponential(self.epsilon, weight, 0.0),)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        # log E_Q[e^(alpha L)] is 0 at 0 and 1, and its second derivative is the variance of a
        # variable of range epsilon, at most epsilon^2/4 (Cesar and Rogers 2020, arXiv:2004.07223).
        return np.minimum(orders * (self.epsilon**2 / 8), self.epsilon) * (1 + 8 * _U)

    def of_group(self, records: int) -> Event | None:
        return replace(self, epsilon=records * self.epsilon)


@dataclass(frozen=True)
class ZCDP(_StatedEvent):
    """Any release that is (xi, rho)-zero-concentrated differentially private.

    Its Renyi divergence of every order alpha > 1 is at most xi + rho alpha (Bun and Steinke 2016,
    arXiv:1605.02065v1, Definition 8.1). Accounted by Renyi divergences alone, with all that it is
    composed with. An upper end only.

    Attributes:
        rho: >= 0.
        xi: >= 0.
        relation: under which it was proven; others are refused as in ``EpsilonDelta``.
    """

    words = "a release that is stated to be ({xi:.4g}, {rho:.4g})-zero-concentrated private"

    rho: float
    xi: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fields(self, rho=check.non_negative, xi=check.non_negative)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        return (self.xi + self.rho * orders) * (1 + 4 * _U)

    def of_group(self, records: int) -> Event | None:
        # Bun and Steinke 2016, arXiv:1605.02065v1, Proposition 1.9.
        return None if self.xi else replace(self, rho=records * records * self.rho)


@dataclass(frozen=True)
class RandomizedResponse(PairedEvent):
    """Every record's own answer, replaced by a uniformly random one with ``noise_prob``.

    Stated for equally many records: REPLACE_ONE, and REPLACE_SPECIAL where the null record has one
    of the answers. The pair is tight under both. An added answer would be seen at once, so
    ADD_OR_REMOVE_ONE is refused.

    Attributes:
        noise_prob: p in [0, 1], with which the answer is drawn from all buckets (its own too).
        buckets: k >= 2, possible answers.
    """

    words = (
        "each record's own answer, replaced with probability {noise_prob:.4g} by a random one of "
        "{buckets}"
    )
    refused: ClassVar = {ADD: "the number of answers is seen; ask with relation replace_one"}

    noise_prob: float
    buckets: int = 2

    def __post_init__(self) -> None:
        check.fields(self, noise_prob=check.share)
        object.__setattr__(self, "buckets", check.count("buckets", self.buckets, 2))

    def infinite(self) -> str:
        return "" if self.noise_prob >= 1e-15 else "answers are released without noise"

    def pure(self, relation: Relation) -> float:
        return math.log1p(self.buckets * (1 - self.noise_prob) / self.noise_prob)

    def _losses(self) -> tuple[Array, Array]:
        """(losses, P masses): the other answer, a third one, one's own."""
        p, k, top = self.noise_prob, self.buckets, self.pure(Relation.REPLACE_ONE)
        if top == 0:
            return np.zeros(1), np.ones(1)
        return np.asarray([-top, 0.0, top]), np.asarray([p / k, (k - 2) * (p / k), 1 - p + p / k])

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        return (discrete_pair(*self._losses(), upper),)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        return finite_renyi(*self._losses(), orders)

    def of_group(self, records: int) -> Event | None:
        return Repeated(self, records)


@dataclass(frozen=True)
class ObjectivePerturbation(PairedEvent):
    """The minimum of sum log(1 + e^(-y x.w)) + |w|^2 lambda/2 + b.w, with b ~ N(0, (z R)^2 I).

    |x| <= R, y in {-1, 1}, and the minimum is exact. Kifer, Smith and Thakurta 2012; Redberg,
    Koskela and Wang 2023 (arXiv:2401.00583v1, Theorem 3.1) have 2 H(epsilon - c, 1/z) with H the
    profile of a Gaussian mechanism and c = log(1 + curvature). Here it is H(epsilon - c, 1/z): the
    derivative of the logistic loss keeps its sign. The lower end is H(epsilon, 1/z), which data
    sets come as near to as one likes (docs/proofs/tabular.md).

    Adding or removing one record, or replacing it by the record x = 0; replacing it by another is
    refused.

    Attributes:
        noise_multiplier: z > 0.
        curvature: R^2 / (4 lambda) > 0, a record's largest second derivative over the ridge's.
    """

    words = (
        "the minimum of a logistic loss with a random linear term (noise multiplier "
        "{noise_multiplier:.4g}, curvature {curvature:.4g})"
    )
    apart: ClassVar[bool] = True

    noise_multiplier: float
    curvature: float

    def __post_init__(self) -> None:
        check.fields(self, noise_multiplier=check.positive, curvature=check.positive)

    def refuses(self, relation: Relation) -> str:
        if relation is Relation.REPLACE_ONE:
            return "it is proven for adding, removing and zeroing out a record"
        if not self.pairs(relation, True):
            return f"its noise_multiplier={self.noise_multiplier!r} is too small"
        return ""

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        if not upper:
            return (SampledGaussian(self.noise_multiplier, 1.0, relation),)
        found = _profile(self.noise_multiplier, self.curvature)
        return () if found is None else (symmetric_pair(*found),)


@functools.lru_cache(maxsize=64)
def _profile(noise_multiplier: float, curvature: float) -> tuple[Array, Array] | None:
    """Epsilons [k] from 0 to where delta is about 1e-25, and upper ends of delta [k]."""
    mu, shift = (1 / noise_multiplier) * (1 + 1e-15), math.log1p(curvature) * (1 + 1e-15)
    if not mu < 30 or not shift < 100:
        return None
    last = shift + max(gaussian_epsilon(mu, 1e-25)[1], mu)
    epsilons = np.unique(np.append(np.linspace(0, last, 385 - 1), shift))
    at_0 = min(gaussian_delta(mu, 0.0) * (1 + 2 * PROFILE_ERROR), 1.0)
    deltas = [
        gaussian_delta(mu, (e - shift) * (1 - 4e-16)) * (1 + 2 * PROFILE_ERROR)
        if e >= shift
        else at_0 + (1 - at_0) * -math.expm1(e - shift) * (1 + 1e-14)
        for e in epsilons.tolist()
    ]
    return epsilons, np.minimum(np.minimum.accumulate(np.asarray(deltas)), 1.0)
