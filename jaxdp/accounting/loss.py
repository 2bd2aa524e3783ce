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

import numpy as np
from scipy import special

from jaxdp.accounting.base import Array, Unresolved
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.canonical import Step

TAIL = 12.0  # window beyond the last mode, in noise standard deviations: the rest weighs e^-72
_MAX_NODES = 60_000


def separation(relation: Relation) -> float:
    """The distance that one record moves the sum by: 2 contributions for replace-one, else 1."""
    return 2.0 if relation is Relation.REPLACE_ONE else 1.0


def tabulate(
    step: Step, relation: Relation, log_tail: float, order: float, frequency: float
) -> tuple[Array, Array]:
    """(log weights, losses) of a quadrature for E[exp(z loss)], |Re z| and |Im z| up to these.

    Outside the nodes each law has probability at most exp(log_tail): both laws, because the moments
    are taken relative to the second law's total of 1. The loss turns by at most s p/z^2 per unit of
    x: s the separation, p the largest posterior probability of having been sampled.

    Raises:
        Unresolved: that needs too many nodes.
    """
    z, q = step.noise_multiplier, step.sampling_prob
    # Beyond these a component keeps a quarter of the tail.
    log_shares = log_tail - math.log(4) - np.asarray([0.0, math.log(q)])
    base, sampled = -z * special.ndtri_exp(np.minimum(log_shares, -0.7))
    right = max(float(base), 1 + float(sampled))
    two_sided = relation is Relation.REPLACE_ONE
    p = float(posterior(np.asarray(right), z, q))
    steep = p if p < 0.5 else 1.0
    spread = (p * (1 - p) if p < 0.5 else 0.25) * order if two_sided else 0.0
    turning = separation(relation) * steep * frequency / (z * z)
    width = float(trapezoid_width(z, spread, turning))
    left = -right if two_sided else -float(base)
    if not (right - left) / width < _MAX_NODES:
        raise Unresolved("a step needs too many nodes")
    index: Array = np.arange(math.floor(left / width), math.ceil(right / width) + 1, dtype=float)
    return table(width * index, width, z, q, relation)


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


def table(
    x: Array, width: float | Array, z: float | Array, q: float | Array, relation: Relation
) -> tuple[Array, Array]:
    """(log of the first law's density times the width, loss) at the outputs x."""
    loss = log_ratio(x, z, q)
    log_weight = loss - 0.5 * (x / z) ** 2 + np.log(width / (z * np.sqrt(2 * np.pi)))
    if relation is Relation.REPLACE_ONE:
        loss = loss - log_ratio(-x, z, q)
    return log_weight, loss


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
