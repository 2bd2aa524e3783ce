"""Renyi (RDP) accounting, fast and general but never tight, and moments of a step's loss.

The Renyi divergence of order alpha of one step is computed by the trapezoid rule from the
definition, for integer and fractional orders alike, so there is no series to truncate. The grids
are such that the rule is exact to rounding. An order that cannot be tabulated is charged without
the benefit of sampling (a valid, larger value); it is never set to zero.
"""

import functools
import math

import numpy as np
from scipy import special

from jaxdp.accounting.base import Array, Relation, Unresolved
from jaxdp.accounting.pairs import log_ratio, posterior

_TAIL = 12.0  # window beyond the last mode, in noise standard deviations: the rest weighs e^-72
_MOST_NODES, _MOST_OF_AN_ORDER = 60_000, 8_002  # an order that needs more is not tabulated


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
    width = _trapezoid_width(z, spread)
    first = np.floor(left / width)
    count = np.ceil(right / width) + 1 - first
    # Orders within a factor of four share the nodes of the largest.
    level = np.floor(np.log2(alphas) / 2)
    for wanted in np.unique(level):
        fits = np.flatnonzero((level == wanted) & (count < _MOST_OF_AN_ORDER))
        if fits.size:
            i = fits[np.argmax(alphas[fits])]
            x = width[i] * (first[i] + np.arange(count[i]))
            value, rounding = log_moments(*_table(x, float(width[i]), z, q, relation), order[fits])
            found[fits] = np.minimum(found[fits], (value + rounding) / order[fits])
    return found


def tabulate(
    z: float, q: float, relation: Relation, log_tail: float, order: float, frequency: float
) -> tuple[Array, Array]:
    """(log weights, losses) of a quadrature for E[exp(z loss)], |Re z| and |Im z| up to these.

    Outside the nodes each law has probability at most exp(log_tail): both laws, because the moments
    are taken relative to the second law's total of 1. The loss turns by at most s p/z^2 per unit of
    x: s the separation, p the largest posterior probability of having been sampled.

    Raises:
        Unresolved: that needs too many nodes.
    """
    # Beyond these a component keeps a quarter of the tail.
    log_shares = log_tail - math.log(4) - np.asarray([0.0, math.log(q)])
    base, sampled = -z * special.ndtri_exp(np.minimum(log_shares, -0.7))
    right = max(float(base), 1 + float(sampled))
    two_sided = relation is Relation.REPLACE_ONE
    p = float(posterior(np.asarray(right), z, q))
    steep = p if p < 0.5 else 1.0
    spread = (p * (1 - p) if p < 0.5 else 0.25) * order if two_sided else 0.0
    turning = relation.separation * steep * frequency / (z * z)
    width = float(_trapezoid_width(z, spread, turning))
    left = -right if two_sided else -float(base)
    if not (right - left) / width < _MOST_NODES:
        raise Unresolved("a step needs too many nodes")
    index: Array = np.arange(math.floor(left / width), math.ceil(right / width) + 1, dtype=float)
    return _table(width * index, width, z, q, relation)


def _trapezoid_width(z: float, spread: float | Array, turning: float = 0.0) -> Array:
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


def _table(x: Array, width: float, z: float, q: float, relation: Relation) -> tuple[Array, Array]:
    """(log of the first law's density times the width, loss) at the outputs x."""
    loss = log_ratio(x, z, q)
    log_weight = loss - 0.5 * (x / z) ** 2 + np.log(width / (z * np.sqrt(2 * np.pi)))
    if relation is Relation.REPLACE_ONE:
        loss = loss - log_ratio(-x, z, q)
    return log_weight, loss


def log_moments(log_weight: Array, loss: Array, orders: Array) -> tuple[Array, Array]:
    """log E[exp(order loss)] at several orders, with a bound on its rounding error.

    E[e^(c loss)] - 1 is summed with E_second[e^loss - 1] = 0 taken out term by term, so that it is
    exact to rounding also when it is 1e-15 or the order is 1e-12. What the nodes miss of that zero
    is charged as error: a window that leaves out one law's mass shows.

    Args:
        log_weight: [m] log of the first law's density times the grid width.
        loss: [m] loss at the node.
        orders: [k] >= 0.

    Returns:
        (log moment, bound), [k] each.
    """
    exponent = orders[:, None] * loss + log_weight
    peak = exponent.max(axis=-1)
    value = peak + np.log(np.exp(exponent - peak[:, None]).sum(axis=-1))
    rounding = 4e-16 * (1 + np.abs(value))
    near = np.flatnonzero(peak <= 10)
    drift = orders[near, None] * _weighted_expm1(log_weight - loss, loss)
    gain = _weighted_expm1(log_weight, orders[near, None] * loss)
    value[near] = np.log1p(np.maximum((gain - drift).sum(axis=-1), 0.0))
    size = np.abs(gain).sum(axis=-1) + np.abs(drift).sum(axis=-1)
    rounding[near] = 4e-15 * size + np.abs(drift.sum(axis=-1))
    return value, rounding


def _weighted_expm1(log_weight: Array, exponent: Array) -> Array:
    """exp(log_weight) * expm1(exponent), without overflow where the weight makes up for it."""
    small = np.exp(log_weight) * np.expm1(np.minimum(exponent, 1.0))
    return np.where(exponent < 1.0, small, np.exp(log_weight + exponent) - np.exp(log_weight))


def rdp_to_epsilon(
    rdp: Array,
    delta: float,
    orders: tuple[float, ...] = DEFAULT_ORDERS,
    conversion: str = "improved",
) -> tuple[float, float]:
    """The smallest epsilon that the curve guarantees at ``delta``, and the order that gives it.

    Args:
        rdp: [k] divergences; infinite ones are dropped.
        delta: in (0, 1).
        orders: [k] orders > 1.
        conversion: "improved": epsilon = rdp + log(1-1/alpha) - log(delta alpha)/(alpha-1)
            (Canonne, Kamath and Steinke 2020, arXiv:2004.00010v5, Proposition 12), or "mironov":
            epsilon = rdp + log(1/delta)/(alpha-1) (Mironov 2017, Proposition 3).

    Returns:
        (epsilon, order); (inf, nan) when every order was dropped.

    Raises:
        ValueError: an unknown conversion.
    """
    a = np.asarray(orders)
    eps = rdp - math.log(delta) / (a - 1)
    if _improved(conversion):
        eps = eps + np.log1p(-1 / a) - np.log(a) / (a - 1)
    eps = np.where(np.isfinite(eps), eps, np.inf)
    best = int(np.argmin(eps))
    if not math.isfinite(eps[best]):
        return math.inf, math.nan
    return max(float(eps[best]), 0.0), float(a[best])


def rdp_to_delta(
    rdp: Array,
    epsilon: float,
    orders: tuple[float, ...] = DEFAULT_ORDERS,
    conversion: str = "improved",
) -> float:
    """The smallest delta that the curve guarantees at ``epsilon``; inverts ``rdp_to_epsilon``."""
    a = np.asarray(orders)
    log_delta = (a - 1) * (rdp - epsilon)
    if _improved(conversion):
        log_delta = log_delta + (a - 1) * np.log1p(-1 / a) - np.log(a)
    log_delta = log_delta[np.isfinite(log_delta)]
    if log_delta.size == 0:
        return 1.0
    return min(1.0, max(math.exp(min(0.0, float(log_delta.min()))), 1e-300))


def _improved(conversion: str) -> bool:
    if conversion not in ("improved", "mironov"):
        raise ValueError(f"conversion={conversion!r}: expected 'improved' or 'mironov'")
    return conversion == "improved"


def convert(query: str, rdp: Array, value: float) -> float:
    """The smallest "epsilon" at a delta, or "delta" at an epsilon, that the curve guarantees."""
    return rdp_to_epsilon(rdp, value)[0] if query == "epsilon" else rdp_to_delta(rdp, value)
