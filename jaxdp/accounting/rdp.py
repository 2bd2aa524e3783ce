"""Renyi (RDP) accounting, fast and general but never tight.

The Renyi divergence of order alpha of one step is computed by the trapezoid rule from the
definition, for integer and fractional orders alike, so there is no series to truncate. The grids
are such that the rule is exact to rounding. An order that cannot be tabulated is charged without
the benefit of sampling (a valid, larger value); it is never set to zero.
"""

import functools
import math

import numpy as np

from jaxdp.accounting.contour import log_moments, tabulate_step, trapezoid_width
from jaxdp.accounting.events import Array, Relation
from jaxdp.accounting.pairs import posterior

_TAIL = 12.0  # window beyond the last mode, in noise standard deviations: the rest weighs e^-72
_MAX_NODES = 8_002  # nodes; an order that needs more is not tabulated
_GRIDS = (
    1 + np.geomspace(0.01, 1, 24),
    np.arange(2, 12, 0.25),
    np.arange(12, 65),
    np.round(np.geomspace(66, 1e6, 70)),
)
DEFAULT_ORDERS: tuple[float, ...] = tuple(np.unique(np.concatenate(_GRIDS)).tolist())


@functools.lru_cache(maxsize=512)
def poisson_renyi(z: float, q: float, relation: Relation, orders: tuple[float, ...]) -> Array:
    """Renyi divergence of a Poisson-sampled Gaussian step at each order, [k]; never too small.

    Full batch: alpha s^2/(2 z^2), s the separation (Mironov 2017, arXiv:1702.07476v3, Corollary 3).
    Poisson: log E_Q[(P/Q)^alpha]/(alpha-1) with the forward pair of ``pairs``; for add/remove this
    direction is the larger one (Mironov, Talwar and Zhang 2019, arXiv:1908.10530v1, Theorem 5).

    Args:
        z: noise multiplier > 0.
        q: sampling probability in (0, 1].
        relation: the neighbouring relation.
        orders: [k] > 1.
    """
    alphas = np.asarray(orders, dtype=np.float64)
    # Sampling never hurts: the divergence is convex, so the full batch bounds every order.
    found: Array = 0.5 * alphas * (relation.separation / z) ** 2
    if q == 1:
        return found
    # Outputs outside the window weigh less than e^-72 of E[exp(t loss)] - 1, 0 <= t <= order. Every
    # mode of P^(1+t) Q^-t lies between those of its Gaussian factors. It may not be left out
    # because it is small beside 1: where q is tiny, E - 1 is all there is. Numbers may be huge.
    order = alphas - 1
    right = 1 + relation.separation * order + _TAIL * z
    left, spread = -_TAIL * z + 0 * order, 0 * order
    if relation is Relation.REPLACE_ONE:
        p = posterior(right, z, q)
        left, spread = -right, np.where(p < 0.5, p * (1 - p), 0.25) * order
    width = trapezoid_width(z, spread)
    first = np.floor(left / width)
    count = np.ceil(right / width) + 1 - first
    # Orders within a factor of four share the nodes of the largest.
    level = np.floor(np.log2(alphas) / 2)
    for wanted in np.unique(level):
        fits = np.flatnonzero((level == wanted) & (count < _MAX_NODES))
        if fits.size:
            i = fits[np.argmax(alphas[fits])]
            x = width[i] * (first[i] + np.arange(count[i]))
            nodes = tabulate_step(x, float(width[i]), z, q, relation)
            value, rounding = log_moments(*nodes, order[fits])
            found[fits] = np.minimum(found[fits], (value + rounding) / order[fits])
    return found


def rdp_to_epsilon(
    rdp: Array, delta: float, orders: tuple[float, ...] = DEFAULT_ORDERS
) -> tuple[float, float]:
    """The smallest epsilon that the curve guarantees at ``delta``, and the order that gives it.

    It is rdp + log(1-1/alpha) - log(delta alpha)/(alpha-1) (Canonne, Kamath and Steinke 2020,
    arXiv:2004.00010v5, Proposition 12).

    Args:
        rdp: [k] divergences; infinite ones are dropped.
        delta: in (0, 1).
        orders: [k] orders > 1.

    Returns:
        (epsilon, order); (inf, nan) when every order was dropped.
    """
    a = np.asarray(orders)
    eps = rdp - math.log(delta) / (a - 1)
    eps = eps + np.log1p(-1 / a) - np.log(a) / (a - 1)
    eps = np.where(np.isfinite(eps), eps, np.inf)
    best = int(np.argmin(eps))
    if not math.isfinite(eps[best]):
        return math.inf, math.nan
    return max(float(eps[best]), 0.0), float(a[best])


def rdp_to_delta(rdp: Array, epsilon: float, orders: tuple[float, ...] = DEFAULT_ORDERS) -> float:
    """The smallest delta that the curve guarantees at ``epsilon``; inverts ``rdp_to_epsilon``."""
    a = np.asarray(orders)
    log_delta = (a - 1) * (rdp - epsilon)
    log_delta = log_delta + (a - 1) * np.log1p(-1 / a) - np.log(a)
    log_delta = log_delta[np.isfinite(log_delta)]
    if log_delta.size == 0:
        return 1.0
    return min(1.0, max(math.exp(min(0.0, float(log_delta.min()))), 1e-300))


def best_conversion(query: str, rdp: Array, value: float) -> float:
    """The smallest "epsilon" at a delta, or "delta" at an epsilon, that the curve guarantees."""
    return rdp_to_epsilon(rdp, value)[0] if query == "epsilon" else rdp_to_delta(rdp, value)
