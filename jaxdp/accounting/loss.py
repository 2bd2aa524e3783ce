"""The privacy loss of one step, tabulated on a grid where the trapezoid rule is exact to rounding.

Everything is in units of one record's largest contribution: the noise has standard deviation
z = noise multiplier, and the worst pair of output laws on the real line is

  add/remove, replace-special:  P = (1-q) N(0, z^2) + q N(1, z^2),  Q = N(0, z^2), and the reverse
  replace-one:                  the same P,  Q = (1-q) N(0, z^2) + q N(-1, z^2)

(Zhu, Dong and Wang 2022, "Optimal accounting of differential privacy via characteristic function",
arXiv:2106.08567v2, Theorem 11, for add/remove; Schuchardt et al. 2024, "Unified mechanism-specific
amplification by subsampling", arXiv:2403.04867, for the replace-one pair of a Poisson sample.)
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.canonical import Step

Array = NDArray[np.float64]

MAX_NODES = 40_000
_TAIL = 12.0  # window beyond the last mode, in noise standard deviations: the rest weighs e^-72


@dataclass(frozen=True)
class LossTable:
    """Nodes of a quadrature over the output x of one step, for the pair (P, Q).

    Attributes:
      log_q: [m] log of Q's density times the grid width.
      loss: [m] log P/Q at the node, increasing.
    """

    log_q: Array
    loss: Array


def separation(relation: Relation) -> float:
    """How far one record moves the sum, in contributions: 2 under replace-one, else 1."""
    return 2.0 if relation is Relation.REPLACE_ONE else 1.0


def grid_width(noise_multiplier: float) -> float:
    """Width at which the trapezoid rule's error is below rounding for real, moderate orders.

    The integrand is a Gaussian (relative error exp(-2 pi^2 z^2/h^2)) times a function that is
    analytic for |Im x| < pi z^2, where the likelihood ratio of the mixture first vanishes (error
    exp(-2 pi d/h) with d half of that).
    """
    z = noise_multiplier
    return min(z / 4, 0.27 * z * z)


def tabulate(step: Step, relation: Relation, max_order: float, width: float) -> LossTable | None:
    """Table of the loss that covers every moment up to `max_order`, or None if that is too long.

    Args:
      step: Poisson-sampled (or full-batch) step.
      relation: the neighbouring relation; decides the pair.
      max_order: largest alpha of E_Q[(P/Q)^alpha] the table must serve, and 1 - alpha likewise.
      width: distance of the nodes in x.
    """
    z, q = step.noise_multiplier, step.sampling_prob
    two_sided = relation is Relation.REPLACE_ONE
    reach = max(max_order, 1.0)
    right = float((2 * reach if two_sided else reach) + _TAIL * z)
    left = -right if two_sided else -(_TAIL * z)
    if not (right - left) / width < MAX_NODES:
        return None
    x: Array = (
        np.arange(math.floor(left / width), math.ceil(right / width) + 1).astype(np.float64) * width
    )
    log_base: Array = -0.5 * (x / z) ** 2 + math.log(width / (z * math.sqrt(2 * math.pi)))
    log_p = log_ratio(x, z, q)
    if not two_sided:
        return LossTable(log_base, log_p)
    log_q = log_ratio(-x, z, q)
    return LossTable(log_base + log_q, log_p - log_q)


def log_ratio(x: Array, z: float, q: float) -> Array:
    """log of ((1-q) N(0) + q N(1)) / N(0) at x, to relative precision also where it is tiny.

    Args:
      x: [...] outputs.
      z: noise multiplier > 0.
      q: sampling probability in (0, 1].

    Returns:
      [...] log likelihood ratio, increasing in x.
    """
    g = (x - 0.5) / (z * z)
    if q == 1:
        return g
    small = np.minimum(g, 30.0)
    t = q * np.expm1(small)
    stable = (g < 30.0) & (t > -0.5)
    return np.where(
        stable, np.log1p(np.maximum(t, -0.5)), np.logaddexp(math.log1p(-q), math.log(q) + g)
    )
