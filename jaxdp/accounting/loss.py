"""The privacy loss of one step, tabulated on a grid where the trapezoid rule is exact to rounding.

Everything is in units of one record's largest contribution: the noise has standard deviation
z = noise multiplier, and the worst pair of output laws on the real line is

  add/remove, replace-special:  P = (1-q) N(0, z^2) + q N(1, z^2),  Q = N(0, z^2), and the reverse
  replace-one:                  the same P,  Q = (1-q) N(0, z^2) + q N(-1, z^2)

(Zhu, Dong and Wang 2022, "Optimal accounting of differential privacy via characteristic function",
arXiv:2106.08567v2, Theorem 11, for add/remove; Schuchardt et al. 2024, "Unified mechanism-specific
amplification by subsampling", arXiv:2403.04867, for the replace-one pair of a Poisson sample, which
Koskela, Jalko and Honkela 2020, arXiv:1906.03049, use for the substitution relation. It is stated
for one Gaussian query on a draw; for several on one draw it assumes that they were fixed together.)
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.canonical import Step

Array = NDArray[np.float64]

MAX_NODES = 400_000
TAIL = 12.0  # window beyond the last mode, in noise standard deviations: the rest weighs e^-72


@dataclass(frozen=True)
class Pair:
    """One step under one relation, in one direction: the loss is log(first law / second law).

    Attributes:
        step: a Poisson-sampled (or full-batch) step.
        relation: the neighbouring relation.
        reverse: swap the two laws. Replace-one is symmetric and needs only one direction.
    """

    step: Step
    relation: Relation
    reverse: bool = False

    @property
    def mu(self) -> float:
        """Separation of the two laws of a full batch in noise standard deviations."""
        return separation(self.relation) / self.step.noise_multiplier


@dataclass(frozen=True)
class LossTable:
    """Nodes of a quadrature over the output of one step.

    Attributes:
        log_weight: [m] log of the first law's density times the grid width.
        loss: [m] log(first/second) at the node.
    """

    log_weight: Array
    loss: Array


def separation(relation: Relation) -> float:
    """The distance that one record moves the sum by: 2 contributions for replace-one, else 1."""
    return 2.0 if relation is Relation.REPLACE_ONE else 1.0


def directions(relation: Relation) -> tuple[bool, ...]:
    """The values of ``Pair.reverse`` that must be bounded."""
    return (False,) if relation is Relation.REPLACE_ONE else (False, True)


def mass_window(pair: Pair, log_tail: float) -> tuple[float, float]:
    """(lowest, highest) output: outside, each law has probability at most exp(log_tail).

    Both laws, because the moments are taken relative to the second law's total of 1.
    """
    z, q = pair.step.noise_multiplier, pair.step.sampling_prob

    def quantile(log_weight: float) -> float:
        """Distance beyond which a component of this weight keeps a quarter of the tail."""
        return -z * float(special.ndtri_exp(min(log_tail - math.log(4) - log_weight, -0.7)))

    if q == 1:
        reach = quantile(0.0)
        return 1 - reach, 1 + reach
    sampled = max(quantile(math.log(q)), 0.0)
    if pair.relation is Relation.REPLACE_ONE:
        right = max(quantile(math.log1p(-q)), 1 + sampled)
        return -right, right
    reach = quantile(0.0)
    return -max(reach, sampled - 1), max(reach, 1 + sampled)


def grid_width(
    pair: Pair, window: tuple[float, float], order: float, frequency: float = 0.0
) -> float:
    """Width of the x-grid at which E[exp((order + i frequency) loss)] is exact to rounding.

    The loss turns by at most s p/z^2 per unit of x: s the separation, p the largest posterior
    probability of having been sampled. See ``trapezoid_width``.
    """
    z, q = pair.step.noise_multiplier, pair.step.sampling_prob
    p = float(posterior(np.asarray([max(abs(window[0]), abs(window[1]))]), z, q)[0])
    if pair.relation is not Relation.REPLACE_ONE:
        p = float(posterior(np.asarray([window[1]]), z, q)[0])
    divides = pair.reverse or pair.relation is Relation.REPLACE_ONE
    spread = (p * (1 - p) if p < 0.5 else 0.25) * order if divides else 0.0
    turning = separation(pair.relation) * (p if p < 0.5 else 1.0) * frequency / (z * z)
    return float(trapezoid_width(z, spread, turning))


def trapezoid_width(z: float | Array, spread: float | Array, turning: float = 0.0) -> Array:
    """Width at which the trapezoid rule of the tilted density is exact to rounding.

    Shifting the line of integration to x + id multiplies the integrand by at most
    exp(d^2/2z^2) for the Gaussian, exp(turning d) for the oscillation, and exp(spread d^2/z^4),
    spread = order p(1-p), where a likelihood ratio is divided by; this holds for d <= pi z^2/2, as
    the mixture first vanishes at pi z^2. The trapezoid rule's error is that times
    exp(-2 pi d/width), made e^-37.
    """
    curvature = 1 / z**2 + 2 * spread / z**4
    d = np.minimum(np.sqrt(74 / curvature), np.pi * z * z / 2)
    return np.asarray(2 * np.pi / (37 / d + curvature * d / 2 + turning))


def tabulate(
    pair: Pair, window: tuple[float, float], width: float, max_nodes: int = MAX_NODES
) -> LossTable | None:
    """Table of the loss on nodes ``width`` apart inside ``window``; None if these are too many."""
    z, q = pair.step.noise_multiplier, pair.step.sampling_prob
    left, right = window
    if not (right - left) / width < max_nodes:
        return None
    x: Array = np.arange(math.floor(left / width), math.ceil(right / width) + 1).astype(float)
    x *= width
    log_base: Array = -0.5 * (x / z) ** 2 + math.log(width / (z * math.sqrt(2 * math.pi)))
    log_p = log_ratio(x, z, q)
    if pair.reverse:
        return LossTable(log_base, -log_p)
    if pair.relation is not Relation.REPLACE_ONE:
        return LossTable(log_base + log_p, log_p)
    return LossTable(log_base + log_p, log_p - log_ratio(-x, z, q))


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
    return np.where(
        stable, np.log1p(np.maximum(t, -0.5)), np.logaddexp(np.log1p(-q), np.log(q) + g)
    )


def weighted_expm1(log_weight: Array, exponent: Array) -> Array:
    """exp(log_weight) * expm1(exponent), without overflow where the weight makes up for it."""
    small = np.exp(log_weight) * np.expm1(np.minimum(exponent, 1.0))
    return np.where(exponent < 1.0, small, np.exp(log_weight + exponent) - np.exp(log_weight))


def log_moment(table: LossTable, order: float) -> tuple[float, float]:
    """log E[exp(order loss)] under the first law, and a bound on its rounding error.

    E[e^(c loss)] - 1 is summed with E_second[e^loss - 1] = 0 taken out term by term, so that it is
    exact to rounding also when it is 1e-15 or the order is 1e-12. What the nodes miss of that zero
    is charged as error: a window that leaves out one law's mass shows.
    """
    peak = float((table.log_weight + order * table.loss).max())
    if peak > 10:
        total = float(np.exp(table.log_weight + order * table.loss - peak).sum())
        value = peak + math.log(total)
        return value, 4e-16 * (1 + abs(value))
    gain = weighted_expm1(table.log_weight, order * table.loss)
    drift = order * weighted_expm1(table.log_weight - table.loss, table.loss)
    excess = float((gain - drift).sum())
    rounding = 4e-15 * float(np.abs(gain).sum() + np.abs(drift).sum())
    return math.log1p(max(excess, 0.0)), rounding + abs(float(drift.sum()))
