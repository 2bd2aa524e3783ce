"""Dominating pairs: of finitely many losses, Laplace noise, and Gaussian noise on sampled batches.

Gaussian pairs are in units of one record's largest contribution: the noise has standard deviation
z = noise multiplier. The worst pair of output laws of a Poisson-sampled step on the real line is

  add/remove, replace-special:  P = (1-q) N(0, z^2) + q N(1, z^2),  Q = N(0, z^2), and the reverse
  replace-one:                  the same P,  Q = (1-q) N(0, z^2) + q N(-1, z^2)

(Zhu, Dong and Wang 2022, "Optimal accounting of differential privacy via characteristic function",
arXiv:2106.08567v2, Theorem 11, for add/remove; Schuchardt et al. 2024, "Unified mechanism-specific
amplification by subsampling", arXiv:2403.04867, for the replace-one pair of a Poisson sample, which
Koskela, Jalko and Honkela 2020, arXiv:1906.03049, use for the substitution relation. It is stated
for one Gaussian query on a draw; for several on one draw it assumes that they were fixed together.)
docs/proofs/sampling_bounds.md derives those of other batches (Theorem 1).
"""

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from scipy import special

from jaxdp.accounting.events import Array, Event, Relation

_U = 2.0**-53
_SQRT2, _SQRT_2PI = math.sqrt(2), math.sqrt(2 * math.pi)
_NO_LAW = 1e-6  # by so much do the masses of a law not miss 1
_BINS = 20_000  # of outputs, at most
_UNDERFLOW = 600.0  # losses whose Q mass is a number for sure


class Masses(NamedTuple):
    """Masses of cells of losses."""

    p: Array  # [m] under P
    q: Array  # [m] under Q, times e^base
    gain: Array  # [m] p - q, with the digits that both have in common left out
    error: Array  # [m] bound on the error of ``gain``
    base: Array | float = 0.0  # [m] a loss near the cell's, or 0 for all


class Pair(abc.ABC):
    """A dominating pair (P, Q) of one release in one direction, by its loss L = log dP/dQ under P.

    A record's presence can be told from the release no better than P from Q: delta(epsilon) of the
    release is at most P(L > epsilon) - e^epsilon Q(L > epsilon) (Zhu, Dong and Wang 2022,
    arXiv:2106.08567v2, Definition 7), for a tight pair the same. A composition is dominated by the
    products of its pairs (Theorem 10 there).

    Attributes:
        center: a loss near which most of the probability lies; grids are aligned with it.
        infinite: P(L = infinity).
        rounding: bound on the relative error of every mass that ``masses`` and ``tails`` return.
    """

    center: float
    infinite: float = 0.0
    rounding: float

    @abc.abstractmethod
    def masses(self, edges: Array) -> Masses:
        """Masses of edges[i] < L <= edges[i + 1], [m] each; edges increase, +-inf allowed.

        An infinite loss is in no cell.
        """

    @abc.abstractmethod
    def tails(self, losses: Array) -> tuple[Array, Array]:
        """P(L > loss) with the infinite losses, and Q(L > loss), [m] each; any order of losses."""

    @abc.abstractmethod
    def span(self, tail: float) -> tuple[float, float]:
        """(low, high) finite losses: P(L < low) and P(high < L < infinity) are about ``tail``.

        Only a hint where to put a grid; nothing proven rests on it.
        """

    def slack(self, edges: Array) -> float:
        """The largest distance, in loss, of cells and tails as computed from finite ``edges``."""
        return 0.0


class PairedEvent(Event):
    """An event that accountants read as it is: neither a composition nor a Gaussian step.

    Subclasses are frozen dataclasses. An accountant asks ``refuses`` first.
    """

    apart: ClassVar[bool] = False  # True where the pairs for the lower end are far from the upper's

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """Pairs for an upper (or a lower) bound on delta: one for each direction, or one for both.

        Forward is the record's presence (P with the record), reverse its absence. An empty tuple
        where no pair is known: then ``renyi`` bounds the event, or for a lower end nothing does.
        For a lower bound the pair must be dominated by one that the release attains.
        """
        return ()

    def contained(self) -> Event | None:
        """An event that this one may be no more than, and whose lower end is its own; or None."""
        return None

    def renyi(self, relation: Relation, orders: Array) -> Array:
        """Renyi divergence of each order > 1, [k], in the larger direction; never below the truth.

        Infinite where none is known.
        """
        return np.full(orders.shape, np.inf)

    def pure(self, relation: Relation) -> float:
        """The largest loss, that is epsilon at delta 0; infinite unless a finite one is known."""
        return math.inf

    def infinite(self) -> str:
        """The reason why nothing at all can be guaranteed (no noise), or ""."""
        return ""

    def of_group(self, records: int) -> Event | None:
        """The event for one record that costs what this one does for so many; None if unknown."""
        return None


class Discrete(Pair):
    """A pair of finitely many losses.

    Args:
        loss: [m] increasing finite losses.
        p: [m] masses under P (their sum with ``infinite`` may fall short of 1 in a lower bound).
        infinite: P mass of an infinite loss.
        rounding: bound on the relative error of ``p``.
        q: [m] masses under Q; p e^-loss when None.
    """

    def __init__(
        self,
        loss: Array,
        p: Array,
        infinite: float = 0,
        rounding: float = 0,
        q: Array | None = None,
    ) -> None:
        self.loss, self.p, self.infinite = loss, p, infinite
        self.q = p * np.exp(-loss) if q is None else q
        # Sums of m non-negative terms: Higham 2002, Section 4.2.
        self.rounding = rounding + 2.3e-16 * (loss.size + 4)
        self.center = float(loss[int(np.argmax(p))]) if loss.size else 0.0

    def masses(self, edges: Array) -> Masses:
        index, count = np.searchsorted(edges, self.loss, side="left") - 1, edges.size - 1
        inside = (index >= 0) & (index < count)
        masses = (np.bincount(index[inside], v[inside], count) for v in (self.p, self.q))
        p, q = (np.asarray(mass, np.float64) for mass in masses)
        return Masses(p, q, p - q, (self.rounding + 2 * _U) * (p + q))

    def tails(self, losses: Array) -> tuple[Array, Array]:
        first = np.searchsorted(self.loss, losses, side="right")
        beyond_p = np.append(np.cumsum(self.p[::-1])[::-1], 0.0)
        beyond_q = np.append(np.cumsum(self.q[::-1])[::-1], 0.0)
        return beyond_p[first] + self.infinite, beyond_q[first]

    def span(self, tail: float) -> tuple[float, float]:
        top = self.loss.size - 1
        below = int(np.searchsorted(np.cumsum(self.p), tail))
        above = top - int(np.searchsorted(np.cumsum(self.p[::-1]), tail))
        return float(self.loss[min(below, top)]), float(self.loss[max(above, 0)])


def discrete_pair(
    loss: Array, p: Array, upper: bool, infinite: float = 0.0, rounding: float = 16 * _U
) -> Discrete:
    """The pair of these increasing losses and P masses; a rounded loss moves its Q mass.

    For a lower bound the losses whose Q mass may underflow are left out.

    Raises:
        ValueError: losses that do not increase, masses that are no law: those of P do not sum to 1,
            or those of Q (p e^-loss) to more than 1.
    """
    with np.errstate(all="ignore"):
        law, other = float(np.sum(p)) + infinite, float(np.sum(p * np.exp(-loss)))
    if not (np.all(np.diff(loss) > 0) and np.all(np.isfinite(loss)) and np.all(p >= 0)):
        raise ValueError(f"loss={loss!r}, p={p!r}: expected increasing losses and masses >= 0")
    # Q masses of losses that are far below 0 may overflow.
    if not abs(law - 1) <= _NO_LAW or 1 + _NO_LAW < other < math.inf:
        raise ValueError(
            f"p={p!r}: expected masses of two laws, got {law:g} in all of P and {other:g} of Q"
        )
    if not upper:
        keep = loss < _UNDERFLOW
        loss, p, infinite = loss[keep], p[keep], 0.0
    return Discrete(loss, p, infinite, rounding + 8 * _U * float(np.max(np.abs(loss), initial=0.0)))


def symmetric_pair(epsilons: Array, deltas: Array) -> Discrete:
    """The pair, dominating in both directions, of profiles that are known at some epsilons only.

    A profile is convex in a = e^epsilon, and the larger one of both directions is its own mirror:
    d(1/a) = 1 - (1 - d(a)) / a. So it lies below the convex hull of the points and their mirrors,
    and the hull is the profile of finitely many losses.

    Args:
        epsilons: [k] >= 0, increasing, below 700.
        deltas: [k] in [0, 1], upper bounds.
    """
    # Convex in alpha = e^epsilon: the lower hull of all points, from left to right, as in Andrew's
    # monotone chain.
    alpha = np.exp(epsilons)
    # The hull at epsilon 0: the lowest chord between a point and its mirror.
    at_0 = min(1.0, float(np.min((alpha - 1 + 2 * deltas) / (alpha + 1))) * (1 + 1e-12))
    later = alpha > 1
    x, y = np.append(1.0, alpha[later]), np.append(at_0, deltas[later])
    knots: list[int] = []
    for i in range(x.size):
        while len(knots) > 1:
            a, b = knots[-2:]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            knots.pop()
        knots.append(i)
    # A profile that is linear between knots: its slope rises at a knot by the Q mass of the loss
    # log(knot), and that times the knot is its P mass.
    x, y = x[knots], y[knots]
    slopes = np.append(np.diff(y) / np.diff(x), 0.0)
    loss, infinite = np.log(x[1:]), float(y[-1])
    p = np.maximum(x[1:] * np.diff(slopes), 0.0)
    # Rounding: scaled until the profile at every knot is what it should be.
    reached = np.maximum(-np.expm1(np.log(x)[:, None] - loss), 0.0) @ p
    short = np.divide(y - infinite, reached, out=np.ones_like(y), where=reached > 0)
    p = p * max(1.0, float(short.max())) * (1 + 1e-12)
    mirrored = p * np.exp(-loss)
    rest = max(1 - infinite - float(np.sum(p + mirrored)), 0.0)
    losses = np.concatenate([-loss[::-1], [0.0], loss])
    return Discrete(losses, np.concatenate([mirrored[::-1], [rest], p]), infinite, 1e-12)


class Exponential(Pair):
    """A pair with P density ~ e^(loss/2) of the loss between -+largest, and atoms at the ends.

    Laplace noise is such a pair, and so is the worst of bounded range.

    Args:
        largest: a > 0; the losses lie in [-a, a].
        weight: w, the P density is w e^(-(a - loss)/2)/2, the Q density w e^(-(a + loss)/2)/2.
        atom: P mass at a and Q mass at -a; P has e^-a times it at -a.
    """

    def __init__(self, largest: float, weight: float, atom: float) -> None:
        self.center, self.weight, self.atom = largest, weight, atom
        # The exponents are at most ``largest``, each rounded a few times.
        self.rounding = 4 * _U * (8 + largest)

    def masses(self, edges: Array) -> Masses:
        p, q = self._between(edges[:-1], edges[1:])
        return Masses(p, q, p - q, (self.rounding + 2 * _U) * (p + q))

    def tails(self, losses: Array) -> tuple[Array, Array]:
        return self._between(losses, np.asarray(np.inf))

    def _between(self, low: Array, high: Array) -> tuple[Array, Array]:
        """P and Q masses of low < L <= high, [m] each."""
        a = self.center
        left, right = np.clip(low, -a, a), np.clip(high, -a, a)
        part = -self.weight * np.expm1(-0.5 * (right - left))
        top, bottom = (low < a) & (a <= high), (low < -a) & (-a <= high)
        rare = self.atom * math.exp(-a)
        p = part * np.exp(-0.5 * (a - right)) + self.atom * top + rare * bottom
        q = part * np.exp(-0.5 * (a + left)) + rare * top + self.atom * bottom
        return p, q

    def span(self, tail: float) -> tuple[float, float]:
        return -self.center, self.center

    def slack(self, edges: Array) -> float:
        # The largest loss is rounded.
        return 4 * _U * self.center


def normal_cells(x: Array, mean: float, z: float) -> Array:
    """N(mean, z^2) masses of the intervals between increasing ``x``, [m - 1].

    Narrow intervals by Taylor's series about their middle, whose width is exact; wide ones in a
    tail by Mills' ratio. Relative error below 4e-13 within 40 z of the mean.
    """
    t = (x - mean) / z
    with np.errstate(invalid="ignore", over="ignore"):
        width = (x[1:] - x[:-1]) / z
        middle = 0.5 * (t[1:] + t[:-1])
        narrow = width * (1 + np.abs(middle)) < 0.05
    # The series of the density about the middle of a narrow interval: its odd terms vanish.
    m, w = np.where(narrow, middle, 0.0), np.where(narrow, width, 0.0)
    # Integrals of the Hermite polynomials of orders 2, 4 and 6.
    m2, w2 = m * m, w * w
    he2, he4, he6 = m2 - 1, (m2 - 6) * m2 + 3, ((m2 - 15) * m2 + 45) * m2 - 15
    series = 1 + w2 * (he2 / 24 + w2 * (he4 / 1920 + w2 * he6 / 322_560))
    out: Array = np.exp(-0.5 * m2) / _SQRT_2PI * w * series
    # Wide ones, whose width is known better than their ends.
    wide = np.flatnonzero(~narrow)
    left, right, width = t[wide], t[wide + 1], width[wide]
    with np.errstate(over="ignore", invalid="ignore"):
        mass = special.ndtr(right) - special.ndtr(left)
        tail = np.flatnonzero((np.sign(left) == np.sign(right)) & np.isfinite(left + right))
        near = np.minimum(np.abs(left[tail]), np.abs(right[tail]))
        far = np.maximum(np.abs(left[tail]), np.abs(right[tail]))
        fall = np.exp(-0.5 * width[tail] * (far + near))
        rest = special.erfcx(near / _SQRT2) - fall * special.erfcx(far / _SQRT2)
        mass[tail] = 0.5 * np.exp(-0.5 * near * near) * rest
        beyond = np.flatnonzero((left > 0) & (right == np.inf))
        mass[beyond] = special.ndtr(-left[beyond])
    out[wide] = mass
    return out


def posterior(x: Array, z: float | Array, q: float | Array) -> Array:
    """Probability of having been sampled, given the output x."""
    return np.exp(np.minimum(0.0, np.log(q) + (x - 0.5) / (z * z) - log_ratio(x, z, q)))


def log_ratio(x: Array, z: float | Array, q: float | Array) -> Array:
    """log of ((1-q) N(0) + q N(1)) / N(0) at x, to relative precision also where it is tiny.

    Args:
        x: [...] outputs.
        z: noise multiplier > 0.
        q: sampling probability in (0, 1], or an array of them below 1.

    Returns:
        [...] log likelihood ratio, increasing in x.
    """
    g = (x - 0.5) / (z * z)
    if isinstance(q, float) and q == 1:
        return g
    t = q * np.expm1(np.minimum(g, 30.0))
    stable = (g < 30.0) & (t > -0.5)
    far = np.logaddexp(np.log1p(-q), np.log(q) + g)
    return np.where(stable, np.log1p(np.maximum(t, -0.5)), far)


@dataclass(frozen=True)
class SampledGaussian(Pair):
    """The worst pair of a Poisson-sampled (or full-batch) Gaussian step in one direction.

    The pairs, and who proved them, stand at the head of this module. Both ends of a guarantee may
    rest on them: a record that always contributes the same unit vector attains them.
    """

    z: float  # noise multiplier > 0
    q: float  # sampling probability in (0, 1]
    relation: Relation
    reverse: bool = False  # the absent record's direction. Replace-one is symmetric

    rounding = 8e-13  # of 40 deviations: exp(-t^2/2) with t rounded, docs/proofs/certificate.md

    @property
    def center(self) -> float:  # type: ignore[override]
        """The loss of a step whose record was not sampled, or typical of a full batch."""
        x = np.asarray([1.0 if self.q == 1 and not self.reverse else 0.0])
        loss = log_ratio(x, self.z, self.q)
        if self.relation is Relation.REPLACE_ONE:
            loss = loss - log_ratio(-x, self.z, self.q)
        return -float(loss[0]) if self.reverse else float(loss[0])

    def span(self, tail: float) -> tuple[float, float]:
        z, q = self.z, self.q
        reach = -z * float(special.ndtri(max(tail, 1e-310) / 2))
        sampled = -z * float(special.ndtri(min(max(tail, 1e-310) / (2 * q), 0.5)))
        least = -max(reach, sampled) - (self.relation is Relation.REPLACE_ONE)
        ends = np.asarray([least, max(reach, 1 + sampled)])
        loss = log_ratio(ends, z, q)
        if self.relation is Relation.REPLACE_ONE:
            loss = loss - log_ratio(-ends, z, q)
        low, high = loss.tolist()
        if q < 1 and self.relation is not Relation.REPLACE_ONE:
            # What rounding cannot tell from the least loss is not left beyond it.
            floor = math.log1p(-q)
            low = floor * (1 + 1e-15) if low < floor * (1 - 1e-10) else low
        return (-high, -low) if self.reverse else (low, high)

    def masses(self, edges: Array) -> Masses:
        # The part that both laws share is left out of the difference, which so keeps its digits
        # where hardly any record is sampled.
        z, q = self.z, self.q
        x = self.output(-edges[::-1] if self.reverse else edges)
        base, present = normal_cells(x, 0.0, z), normal_cells(x, 1.0, z)
        absent = normal_cells(x, -1.0, z) if self.relation is Relation.REPLACE_ONE else base
        p, other = (1 - q) * base + q * present, (1 - q) * base + q * absent
        gain, error = q * (present - absent), self.rounding * q * (present + absent)
        if self.reverse:
            return Masses(other[::-1], p[::-1], -gain[::-1], error[::-1])
        return Masses(p, other, gain, error)

    def tails(self, losses: Array) -> tuple[Array, Array]:
        z, q = self.z, self.q
        sign = 1.0 if self.reverse else -1.0
        x = self.output(-losses if self.reverse else losses)
        base, present = special.ndtr(sign * x / z), special.ndtr(sign * (x - 1) / z)
        absent = base
        if self.relation is Relation.REPLACE_ONE:
            absent = special.ndtr(sign * (x + 1) / z)
        p, other = (1 - q) * base + q * present, (1 - q) * base + q * absent
        return (other, p) if self.reverse else (p, other)

    def slack(self, edges: Array) -> float:
        z, q = self.z, self.q
        x = self.output(-edges if self.reverse else edges)
        x = x[np.isfinite(x)]
        wide = np.abs(x) if self.relation is Relation.REPLACE_ONE else x
        steep = posterior(wide, z, q) * self.relation.separation
        turns = 3 + (2 * np.abs(x) + 1) / z**2
        largest = float(np.max(steep * turns, initial=0.0))
        return 8 * _U * (largest + 2 * float(np.max(np.abs(edges), initial=0.0)))

    def output(self, loss: Array) -> Array:
        """The output x at which the forward loss is ``loss``; -inf below its infimum."""
        z, q = self.z, self.q
        if self.relation is Relation.REPLACE_ONE:
            if q == 1:
                return np.asarray(loss * (z * z / 2))
            # u = e^(x/z^2) solves B u^2 - (1-q)(e^loss - 1) u - e^loss B = 0,
            # B = q e^(-1/(2 z^2)).
            half = np.abs(loss) / 2
            with np.errstate(divide="ignore"):
                log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
            log_y = math.log1p(-q) - math.log(q) + 0.5 / (z * z) + log_sinh
            small = np.arcsinh(np.exp(np.minimum(log_y, 300)))
            asinh = np.where(log_y > 300, log_y + math.log(2), small)
            return np.asarray(z * z * np.sign(loss) * (half + asinh))
        if q == 1:
            return np.asarray(z * z * loss + 0.5)
        # log(1 + (e^loss - 1)/q) = loss - log q + log(1 - (1 - q) e^-loss).
        # Also below, where q is near 1 and the other form would cancel.
        direct = (loss > 30) | (loss < -0.5)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            near = np.log1p(np.maximum(np.expm1(np.minimum(loss, 30.0)) / q, -1.0))
            inside = np.maximum(-(1 - q) * np.exp(-np.where(direct, loss, 30.0)), -1.0)
            far = loss - math.log(q) + np.log1p(inside)
        return np.asarray(z * z * np.where(direct, far, near) + 0.5)


class BatchGaussian(Pair):
    """The pair of (1-k) A + k B against (1-k) A + k C, for the worst unit Gaussians at distances.

    With the record the release is B, without it C, and A where neither is drawn. The profile for
    epsilon >= 0 is attained with A and C on the same side of B, for epsilon < 0 with A and B on the
    same side of C; both losses are monotone, and what is left of the probability has loss 0.
    Distances (AB, AC, BC) in contributions: Poisson (1, 0, 1), its reverse (0, 1, 1), Poisson under
    replace-one (1, 1, 2), a batch of fixed size under replace-one (2, 2, 2).

    A may be a mixture, a share ``near`` of which is nearer to both B and C by one contribution.

    Masses are those of edges moved by at most ``slack``, up to ``rounding``.

    Args:
        probability: k in (0, 1].
        noise_multiplier: z > 0.
        distances: those of the means of A and B, A and C, B and C, each 0, 1 or 2 contributions.
        near: in [0, 1); above 0 only where AB and AC are at least 1.
    """

    rounding = 1e-12

    def __init__(
        self,
        probability: float,
        noise_multiplier: float,
        distances: tuple[int, int, int],
        near: float = 0.0,
    ) -> None:
        self.k, self.distances = probability, distances
        # Of A: (share, how many contributions nearer).
        self.shares = ((1 - near, 0), (near, 1)) if near else ((1.0, 0),)
        self.unit = 1 / noise_multiplier
        self.ab, self.ac, self.bc = (self.unit * d for d in distances)
        if self.k == 1:
            self.center = 0.5 * self.bc**2
        else:
            middle = float(np.log1p(self.k * np.expm1(-0.5 * self.bc**2)))
            self.center = 0.0 if self.ab and self.ac else (middle if self.ab else -middle)

    def masses(self, edges: Array) -> Masses:
        # A has no part in the difference, which so keeps its digits where k is small.
        x = self._outputs(np.maximum(edges, 0.0), self.distances[0])[::-1]
        up = [normal_cells(x, mean, 1.0)[::-1] for mean in (0.0, self.bc)]
        y = self._outputs(np.maximum(-edges, 0.0), self.distances[1])
        down = [normal_cells(y, mean, 1.0) for mean in (0.0, self.bc)]
        at_zero = (edges[:-1] < 0) & (edges[1:] >= 0)
        x0, y0 = (float(self._outputs(np.zeros(1), d)[0]) for d in self.distances[:2])
        base = np.zeros(edges.size - 1)
        for share, nearer in self.shares:
            ab, ac = self.ab - nearer * self.unit, self.ac - nearer * self.unit
            middle = max(special.ndtr(ab - x0) - special.ndtr(y0 - ac), 0.0)
            cells = normal_cells(x, ab, 1.0)[::-1] + normal_cells(y, ac, 1.0) + middle * at_zero
            base += (1 - self.k) * share * cells
        p, q = self.k * (up[0] + down[1]), self.k * (up[1] + down[0])
        return Masses(base + p, base + q, p - q, self.rounding * (p + q))

    def slack(self, edges: Array) -> float:
        # The logs that make up an output are each known to a few units of rounding, and by one unit
        # of the output the loss changes by at most the larger distance times the posterior weights
        # of B under P and of C under Q. Near the largest loss, which A = B has, the loss itself
        # moves by that rounding.
        logit = np.log(self.k) - (np.log1p(-self.k) if self.k < 1 else -np.inf)
        size = abs(np.log(self.k)) + (abs(np.log1p(-self.k)) if self.k < 1 else 0.0)
        size -= sum(math.log(share) for share, _ in self.shares)
        largest = 0.0
        for sign, d, base in ((1, self.distances[0], self.ab), (-1, self.distances[1], self.ac)):
            losses = np.maximum(sign * edges, 0.0)
            x = self._outputs(losses, d)
            losses, x = losses[np.isfinite(x)], x[np.isfinite(x)]
            turns = 4 + size + 2 * losses + (base + self.bc) * np.abs(x) + base**2 + self.bc**2
            odds = logit - self._log_base(x, d)
            without = self.bc * x - 0.5 * self.bc**2
            weight = special.expit(odds) + special.expit(odds + without)
            steep = max(d, self.distances[2]) * weight + np.minimum(losses, 1.0)
            largest = max(largest, float(np.max(steep * turns, initial=0.0)))
        return 16 * _U * largest

    def tails(self, losses: Array) -> tuple[Array, Array]:
        x = self._outputs(np.maximum(losses, 0.0), self.distances[0])
        y = self._outputs(np.maximum(-losses, 0.0), self.distances[1])
        p, q = (
            special.ndtr(np.where(losses < 0, below - y, x - above))
            for below, above in ((self.bc, 0.0), (0.0, self.bc))
        )
        base = np.zeros(losses.shape)
        for share, nearer in self.shares:
            ab, ac = self.ab - nearer * self.unit, self.ac - nearer * self.unit
            base += share * special.ndtr(np.where(losses < 0, ac - y, x - ab))
        return (1 - self.k) * base + self.k * p, (1 - self.k) * base + self.k * q

    def span(self, tail: float) -> tuple[float, float]:
        far, rare = special.ndtri(tail / 2), special.ndtri(min(tail / (2 * self.k), 0.5))
        low = self._loss(min(self.ac + far, self.bc + rare), self.distances[1])
        return -low, self._loss(min(self.ab + far, rare), self.distances[0])

    def renyi(self, orders: Array) -> Array:
        """Renyi divergence of P from Q at orders > 1, [k], never too small; inf where unknown.

        With t the likelihood ratio, E_Q[t^a] - 1 is the mean of t^a - 1 - a(t - 1), convex in t: on
        a cell of losses it is below its chord, whose mean follows from the cell's two masses.
        """
        reach = max(1e-200, *(abs(end) for end in self.span(1e-290)))
        grid = [np.linspace(0.0, reach, 1500), np.geomspace(min(1e-9, 1e-3 * reach), reach, 1500)]
        up = np.unique(np.concatenate(grid))
        down = np.concatenate([[-np.inf], -up[::-1]])
        # Above 0 by masses under P: the likelihood ratio may be large where those of Q underflow.
        p, share = self._shares(up, above=True)
        q, other = self._shares(down, above=False)
        first = float(self._outputs(np.asarray([reach]), self.distances[0])[0])
        far = max(self.ab, self.bc)
        means = np.asarray([*(self.ab - nearer * self.unit for _, nearer in self.shares), 0.0])
        weights = [*((1 - self.k) * share for share, _ in self.shares), self.k]
        out = np.full(orders.shape, np.inf)
        with np.errstate(all="ignore"):
            log_p, log_weights = np.log(p), np.log(weights)
            for i, a in enumerate(orders.tolist()):
                log_high = np.where(a * up < 600, np.log(_convex_excess(up, a)) - up, (a - 1) * up)
                log_rest = -np.inf
                if first > -np.inf:
                    # E_Q[(P/Q)^a; L > reach]: from there the loss grows at most as fast as the
                    # output times the larger distance.
                    s = (a - 1) * far
                    logs = (a - 1) * (reach + far * first) - s * means + 0.5 * s * s
                    logs = logs + special.log_ndtr(first - means + s) + log_weights
                    log_rest = float(np.logaddexp.reduce(logs))
                # Chords of the convex function over every cell, summed relative to the largest.
                scale = max(0.0, log_rest, float(np.max(log_p + log_high[1:])))
                left, right = (np.exp(log_p + log - scale) for log in (log_high[:-1], log_high[1:]))
                low = _convex_excess(down, a)
                below = float(q @ (other * low[1:] + (1 - other) * low[:-1])) * np.exp(-scale)
                total = float(np.sum(share * right + (1 - share) * left)) + below
                total = (total + np.exp(log_rest - scale)) * (1 + 1e-9)
                log_moment = scale + np.log(total + np.exp(-scale)) if scale else np.log1p(total)
                out[i] = log_moment / (a - 1) * (1 + 1e-12)
        return np.where(np.isnan(out), np.inf, out)

    def _shares(self, loss: Array, above: bool) -> tuple[Array, Array]:
        """(mass, its part at the upper end) of each cell: the two masses of the cell are kept.

        Under P if ``above``, else under Q. More at the upper end is safe: all doubt goes there.
        """
        p, q, *_ = self.masses(loss)
        gap = np.diff(loss)
        # A mass is a difference of tails, which are known to 1e-13 of themselves.
        step = -1 if above else 1
        with np.errstate(all="ignore"):
            doubt = sum(np.cumsum(m[::step])[::step] / m for m in (p, q)) * 2e-13
            rise = np.log(p) - np.log(q) - loss[:-1]
            share = np.expm1(-rise) / np.expm1(-gap) if above else np.expm1(rise) / np.expm1(gap)
            share = share + 1e-6 + doubt / gap
        # The lowest cell has no lower end: there the convex function is at most its value at t = 0.
        share = np.where(np.isinf(gap), 0.0, np.nan_to_num(share, nan=1.0))
        return (p if above else q), np.clip(share, 0.0, 1.0)

    def _log_base(self, x: Array, base: int) -> Array:
        """log A/B at outputs x, [m], with B at 0 and A's mean at ``base`` contributions."""
        logs = [
            math.log(share) + d * x - 0.5 * d * d
            for share, d in ((share, self.unit * (base - nearer)) for share, nearer in self.shares)
        ]
        return np.asarray(np.logaddexp.reduce(logs))

    def _loss(self, x: float, base: int) -> float:
        """Loss at output x, at least 0: B at 0, A at ``base``, C at the distance BC."""
        with np.errstate(divide="ignore"):
            rest = np.log1p(-self.k) + self._log_base(np.asarray(x), base)
        log_k = np.log(self.k)
        without = log_k + self.bc * x - 0.5 * self.bc**2
        return max(0.0, float(np.logaddexp(rest, log_k) - np.logaddexp(rest, without)))

    def _outputs(self, losses: Array, base: int) -> Array:
        """Outputs below which the loss is above ``losses`` >= 0, [m]; -inf where it never is.

        (e^loss - 1) (1-k)/k A/B + e^loss C/B = 1 is quadratic in exp(unit x).
        """
        # Losses beyond 1e300 stand for an empty event; infinities would not subtract.
        losses = np.minimum(losses, 1e300)
        with np.errstate(all="ignore"):
            rest = losses + np.log(-np.expm1(-losses)) + np.log1p(-self.k) - np.log(self.k)
            # log of the coefficients of exp(unit x) to the powers 0, 1 and 2.
            power = [np.full(losses.shape, -np.inf) for _ in range(3)]
            terms = [(rest + math.log(share), base - nearer) for share, nearer in self.shares]
            for log_weight, d in (*terms, (losses, self.distances[2])):
                power[d] = np.logaddexp(power[d], log_weight - 0.5 * (d * self.unit) ** 2)
            left = np.log(np.maximum(-np.expm1(np.minimum(power[0], 1.0)), 0.0))
            root = np.logaddexp(2 * power[1], np.log(4) + power[2] + left)
            x = (np.log(2) + left - np.logaddexp(power[1], 0.5 * root)) / self.unit
            x = np.where(np.isnan(x), -np.inf, x)
            # One Newton step where a small unit has cost digits: there the exponents are near 0.
            exponent = losses + self.bc * x - 0.5 * self.bc**2
            parts = [(log + self.unit * d * (x - 0.5 * self.unit * d), d) for log, d in terms]
            others = [(np.exp(log), d) for log, d in parts]
            slope = sum(self.unit * d * other for other, d in others) + self.bc * np.exp(exponent)
            step = (sum(other for other, _ in others) + np.expm1(exponent)) / slope
            return np.where(np.abs(exponent) < 0.5, x - step, x)


def zeroed_pair(k: float, z: float) -> Pair:
    """The pair of (1-k) N(0) + k N(2) against (1-k) N(0) + k N(1), deviation z, for a lower end.

    A batch of fixed size whose other records all contribute -1, and the record 1 or, zeroed out,
    0. The loss falls before it rises; so it is told of small bins, a post-processing.
    """
    if z < 0.03:  # no bin holds mass of both laws; here all others contribute zero
        return BatchGaussian(k, z, (1, 0, 1))
    width = max(0.01 * min(z, z * z), (45 * z + 2) / _BINS)
    x = np.concatenate([[-np.inf], np.arange(-10 * z, 2 + 35 * z, width), [np.inf]])
    none, null, present = (normal_cells(x, mean, z) for mean in (0.0, 1.0, 2.0))
    p, q = (1 - k) * none + k * present, (1 - k) * none + k * null
    keep = np.minimum(p, q) > 1e-280
    loss, p, q = np.log(p[keep] / q[keep]), p[keep], q[keep]
    order = np.argsort(loss)
    return Discrete(loss[order], p[order], 0.0, 1e-12, q[order])


def _convex_excess(loss: Array, order: float) -> Array:
    """t^a - 1 - a (t - 1) at t = e^loss, to 1e-10 of itself."""
    a = order
    series = (a - 1) * a / 2 * loss**2 * (1 + loss * ((a + 1) / 3 + (a * a + a + 1) / 12 * loss))
    return np.where(np.abs(a * loss) < 1e-3, series, np.expm1(a * loss) - a * np.expm1(loss))


class Branches(Pair):
    """A pair whose public branch is drawn first, with the same probabilities under both laws.

    Args:
        branches: (probability, pair), the probabilities known to a relative ``rounding``.
        rounding: of the probabilities.
    """

    def __init__(self, branches: Sequence[tuple[float, BatchGaussian]], rounding: float) -> None:
        self.branches = [(weight, pair) for weight, pair in branches if weight > 0]
        self.center = max(self.branches, key=lambda branch: branch[0])[1].center
        self.rounding = rounding + 2 * BatchGaussian.rounding

    def masses(self, edges: Array) -> Masses:
        found = [[weight * v for v in pair.masses(edges)[:4]] for weight, pair in self.branches]
        p, q, gain, error = (np.sum(values, axis=0) for values in zip(*found, strict=True))
        # The branches' probabilities are off by as much under both laws.
        off = np.sum([np.abs(values[2]) for values in found], axis=0)
        return Masses(p, q, gain, error + self.rounding * off)

    def slack(self, edges: Array) -> float:
        return max(pair.slack(edges) for _, pair in self.branches)

    def tails(self, losses: Array) -> tuple[Array, Array]:
        found = [(weight, pair.tails(losses)) for weight, pair in self.branches]
        p, q = (np.sum([weight * tails[i] for weight, tails in found], axis=0) for i in (0, 1))
        return p, q

    def span(self, tail: float) -> tuple[float, float]:
        spans = [pair.span(min(tail / weight, 0.5)) for weight, pair in self.branches]
        return min(low for low, _ in spans), max(high for _, high in spans)


def mixture_log_ratio(y: Array, c: Array, p: Array) -> tuple[Array, Array]:
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


class MixedGaussian(Pair):
    """The pair of the mixture sum p_i N(c_i, 1) (P) and N(0, 1) (Q), or its reverse.

    Args:
        c: [m] increasing shifts >= 0.
        p: [m] probabilities > 0; known to a relative 2e-12.
        reverse: the absent record's direction.
    """

    rounding = 3e-12  # of ``normal_cells`` 4e-13, of the probabilities 2e-12, of their sum

    def __init__(self, c: Array, p: Array, reverse: bool = False) -> None:
        self.c, self.p, self.reverse = c, p, reverse
        loss = mixture_log_ratio(np.asarray([float(c @ p)]), c, p)[0][0]
        self.center = -float(loss) if reverse else float(loss)

    def masses(self, edges: Array) -> Masses:
        y = self._output(-edges[::-1] if self.reverse else edges)
        mixed, base = self._mixed(lambda c: normal_cells(y, c, 1.0)), normal_cells(y, 0.0, 1.0)
        p, q = (base[::-1], mixed[::-1]) if self.reverse else (mixed, base)
        return Masses(p, q, p - q, (self.rounding + 2 * _U) * (p + q))

    def tails(self, losses: Array) -> tuple[Array, Array]:
        sign = 1.0 if self.reverse else -1.0
        y = self._output(-losses if self.reverse else losses)
        mixed, base = self._mixed(lambda c: special.ndtr(sign * (y - c))), special.ndtr(sign * y)
        return (base, mixed) if self.reverse else (mixed, base)

    def span(self, tail: float) -> tuple[float, float]:
        reach = -float(special.ndtri(max(tail, 1e-310) / 2))
        rare = special.ndtri(np.minimum(max(tail, 1e-310) / (2 * self.p), 0.5))
        ends = np.asarray([-reach, max(reach, float(np.max(self.c - rare)))])
        low, high = mixture_log_ratio(ends, self.c, self.p)[0]
        return (-float(high), -float(low)) if self.reverse else (float(low), float(high))

    def slack(self, edges: Array) -> float:
        y = self._output(-edges if self.reverse else edges)
        y = y[np.isfinite(y)]
        terms = float(self.c[-1]) * (np.max(np.abs(y), initial=0.0) + float(self.c[-1]))
        size = terms + float(np.max(-np.log(self.p))) + float(np.max(np.abs(edges), initial=0.0))
        return 2e-12 + 32 * _U * size

    def _mixed(self, law: Callable[[float], Array]) -> Array:
        """The mixture of a component's masses."""
        parts = [p * law(c) for c, p in zip(self.c.tolist(), self.p.tolist(), strict=True)]
        return np.asarray(np.sum(parts, axis=0))

    def _output(self, loss: Array) -> Array:
        """The y at which the forward loss is ``loss``; -inf below its infimum.

        Newton's method on the terms that grow, whose log is convex and at least as steep as the
        least shift: from the right, where the largest term alone is enough, it never overshoots.
        """
        # Without the constant term of the mixture, that of a shift of 0, the rest is solved for.
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
            value, slope = mixture_log_ratio(y, c, p)
            step = (value - goal) / slope
            y = y - step
            if np.max(np.abs(step) / (1 + np.abs(y)), initial=0.0) < 4e-16 * 8:
                break
        out[finite] = y
        return out


def bracket_decreasing(
    f: Callable[[float], float], lo: float, hi: float, rtol: float = 1e-13, max_iter: int = 200
) -> tuple[float, float]:
    """The narrowed bracket [lo, hi] of the sign change of a decreasing ``f``.

    A secant step that falls back to bisection whenever three steps did not halve the bracket.

    Args:
        f: decreasing; f(lo) > 0 >= f(hi). Infinite values are allowed.
        lo: left end.
        hi: right end.
        rtol: stop when the bracket is this narrow, relative to its right end.
        max_iter: evaluations at most.

    Returns:
        (lo, hi) with f(lo) > 0 >= f(hi), both evaluated.

    Raises:
        ValueError: when the ends given have no sign change between them.
    """
    f_lo, f_hi = f(lo), f(hi)
    if not (f_lo > 0 >= f_hi):
        raise ValueError(f"[{lo}, {hi}]: expected a sign change, got {f_lo} and {f_hi}")
    # Three steps that did not halve the bracket are followed by a bisection.
    reference, stale = hi - lo, 0
    for _ in range(max_iter):
        if hi - lo <= rtol * abs(hi) or f_hi == 0:
            break
        x = 0.5 * (lo + hi)
        if stale < 3 and math.isfinite(f_lo) and math.isfinite(f_hi):
            # A secant point, pushed past the root by a sliver, so that the farther end moves.
            x = lo + (hi - lo) * f_lo / (f_lo - f_hi)
            sliver = max(0.25 * rtol * abs(hi), 1e-3 * min(x - lo, hi - x))
            x -= sliver if f_lo > -f_hi else -sliver
        if not lo < x < hi:
            x = 0.5 * (lo + hi)
            if not lo < x < hi:
                break
        fx = f(x)
        if fx > 0:
            lo, f_lo = x, fx
        else:
            hi, f_hi = x, fx
        stale += 1
        if hi - lo <= 0.5 * reference:
            reference, stale = hi - lo, 0
        elif stale > 3:
            stale = 3
    return lo, hi


def expand_right(f: Callable[[float], float], start: float, factor: float = 2.0) -> float:
    """The first of start, start*factor, ... where the decreasing ``f`` is <= 0.

    Raises:
        OverflowError: when none exists below 1e300.
    """
    x = start
    while not f(x) <= 0:
        x *= factor
        if x > 1e300:
            raise OverflowError(f"no sign change between {start} and 1e300")
    return x
