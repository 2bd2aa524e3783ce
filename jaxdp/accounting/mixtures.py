"""Gaussian noise on a sum that a record moves by a random amount of a public law."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special

from jaxdp import arguments as check
from jaxdp.accounting.base import Array, Pair, Part
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.cells import normal_cells
from jaxdp.accounting.primitives import discrete

_U = 2.0**-53
_NODES = 20_000  # of a quadrature


@dataclass(frozen=True)
class MixtureOfGaussians(Part):
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
        """As ``Part.refuses``."""
        if relation is Relation.REPLACE_ONE:
            return "no worst pair is proven where the amounts of two records may point apart"
        return ""

    def infinite(self) -> str:
        """As ``Part.infinite``."""
        z = self.noise_multiplier
        return "" if z >= 1e-30 or not any(self.sensitivities) else "a release has no noise"

    def components(self) -> tuple[Array, Array]:
        """(shifts in noise standard deviations, probabilities > 0), by shift."""
        s, p = np.asarray(self.sensitivities), np.asarray(self.probabilities)
        p = p / math.fsum(self.probabilities)
        keep = p > 0
        return s[keep] / self.noise_multiplier if s.any() else s[keep], p[keep]

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """As ``Part.pairs``."""
        c, p = self.components()
        if c[-1] == 0:
            return (discrete(np.zeros(1), np.ones(1), upper),)
        return Mixture(c, p), Mixture(c, p, reverse=True)

    def renyi(self, relation: Relation, orders: Array) -> Array:
        # By the trapezoid rule in both directions, its error added.
        """As ``Part.renyi``."""
        c, p = self.components()
        out = np.empty(orders.size)
        for i, order in enumerate(orders.tolist()):
            # x^a and x^(1-a) are convex, so the mixture of the moments bounds the moment.
            plain = float(special.logsumexp(0.5 * order * (order - 1) * c * c, b=p))
            both = max(_log_moment(c, p, power) for power in (order, 1 - order))
            out[i] = (min(plain, both) + 1e-13 * (1 + abs(plain))) / (order - 1)
        return np.maximum(np.minimum(out, orders * (0.5 * float(c[-1]) ** 2 * (1 + 8 * _U))), 0.0)


def _log_moment(c: Array, p: Array, power: float) -> float:
    """log E[R(y)^power], y standard normal, R = sum p_i e^(c_i y - c_i^2/2); never too low.

    On the line Im y = d with c_i d < pi/2 no term leaves the right half-plane, so |R| is at most
    its value at Re y and at least cos(c d) times that, and the Gaussian grows by e^(d^2/2). The
    trapezoid rule of width h is then wrong by a relative e^(d^2/2 - 2 pi d/h) cos(c d)^power for
    powers below 0, made e^-37. Outside [-reach, reach] the moments of the components bound it.
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
    terms = power * log_ratio(y, c, p)[0] - 0.5 * y * y
    inside = float(special.logsumexp(terms)) + math.log(width / math.sqrt(2 * math.pi))
    beyond = special.logsumexp(plain + special.log_ndtr(order * c - reach) + math.log(2), b=p)
    return float(np.logaddexp(inside + 4e-16 * (y.size + order * top * reach), beyond)) + 1e-15


def log_ratio(y: Array, c: Array, p: Array) -> tuple[Array, Array]:
    """(log sum p_i e^(c_i y - c_i^2/2), its derivative in y), [m] each."""
    peak = np.full(y.shape, -np.inf)
    exponents = list(zip(c.tolist(), (np.log(p) - 0.5 * c * c).tolist(), strict=True))
    for slope, start in exponents:
        peak = np.maximum(peak, slope * y + start)
    total, slopes = np.zeros(y.shape), np.zeros(y.shape)
    for slope, start in exponents:
        weight = np.exp(slope * y + start - peak)
        total += weight
        slopes += slope * weight
    return peak + np.log(total), slopes / total


class Mixture:
    """The pair of the mixture sum p_i N(c_i, 1) (P) and N(0, 1) (Q), or its reverse.

    Args:
        c: [m] increasing shifts >= 0.
        p: [m] probabilities > 0; known to a relative 2e-12.
        reverse: the absent record's direction.
    """

    infinite = 0.0
    rounding = 3e-12  # of ``normal_cells`` 4e-13, of the probabilities 2e-12, of their sum

    def __init__(self, c: Array, p: Array, reverse: bool = False) -> None:
        self.c, self.p, self.reverse = c, p, reverse
        loss = self._loss(np.asarray([float(c @ p)]))[0]
        self.center = -float(loss) if reverse else float(loss)

    def cells(self, edges: Array) -> tuple[Array, Array]:
        """As ``Pair.cells``."""
        y = self._output(-edges[::-1] if self.reverse else edges)
        mixed, base = self._mixed(lambda c: normal_cells(y, c, 1.0)), normal_cells(y, 0.0, 1.0)
        return (base[::-1], mixed[::-1]) if self.reverse else (mixed, base)

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """As ``Pair.tails``."""
        sign = 1.0 if self.reverse else -1.0
        y = self._output(-losses if self.reverse else losses)
        mixed, base = self._mixed(lambda c: special.ndtr(sign * (y - c))), special.ndtr(sign * y)
        return (base, mixed) if self.reverse else (mixed, base)

    def span(self, tail: float) -> tuple[float, float]:
        """As ``Pair.span``."""
        reach = -float(special.ndtri(max(tail, 1e-310) / 2))
        rare = special.ndtri(np.minimum(max(tail, 1e-310) / (2 * self.p), 0.5))
        low, high = self._loss(np.asarray([-reach, max(reach, float(np.max(self.c - rare)))]))
        return (-float(high), -float(low)) if self.reverse else (float(low), float(high))

    def slack(self, edges: Array) -> float:
        """The largest distance, in loss, of the rounded outputs from finite ``edges``."""
        y = self._output(-edges if self.reverse else edges)
        y = y[np.isfinite(y)]
        terms = float(self.c[-1]) * (np.max(np.abs(y), initial=0.0) + float(self.c[-1]))
        size = terms + float(np.max(-np.log(self.p))) + float(np.max(np.abs(edges), initial=0.0))
        return 2e-12 + 32 * _U * size

    def _mixed(self, law: Callable[[float], Array]) -> Array:
        """The mixture of a component's masses."""
        parts = [p * law(c) for c, p in zip(self.c.tolist(), self.p.tolist(), strict=True)]
        return np.asarray(np.sum(parts, axis=0))

    def _loss(self, y: Array) -> Array:
        return log_ratio(y, self.c, self.p)[0]

    def _output(self, loss: Array) -> Array:
        """The y at which the forward loss is ``loss``; -inf below its infimum.

        Newton's method on the terms that grow, whose log is convex and at least as steep as the
        least shift: from the right, where the largest term alone is enough, it never overshoots.
        """
        grows = self.c > 0
        c, p = self.c[grows], self.p[grows]
        target = loss
        if not grows.all():
            still = float(self.p[0])
            with np.errstate(divide="ignore"):
                near = np.log(np.maximum(np.expm1(np.minimum(loss, 30.0)) + float(p.sum()), 0.0))
            # Also below, where nearly every record is in the draw and the other form would cancel.
            with np.errstate(divide="ignore", over="ignore"):
                far = loss + np.log1p(-np.minimum(still * np.exp(-loss), 1.0))
            target = np.where(np.abs(loss - 14.75) < 15.25, near, far)
        out = np.where(target > 0, np.inf, -np.inf)
        finite = np.flatnonzero(np.isfinite(target))
        goal = target[finite]
        y = np.min([(goal - math.log(b)) / a + a / 2 for a, b in zip(c, p, strict=True)], axis=0)
        for _ in range(100):
            value, slope = log_ratio(y, c, p)
            step = (value - goal) / slope
            y = y - step
            if np.max(np.abs(step) / (1 + np.abs(y)), initial=0.0) < 4e-16 * 8:
                break
        out[finite] = y
        return out
