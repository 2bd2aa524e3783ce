"""Renyi (RDP) accounting: fast and general, but never tight.

The Renyi divergence of order alpha of one step is computed by the trapezoid rule from the
definition, for integer and fractional orders alike, so there is no series to truncate. An order
that cannot be tabulated is charged without the benefit of sampling (a valid, larger value); it is
never set to zero.
"""

import math

import numpy as np

from jaxdp.accounting import fixed_size
from jaxdp.accounting.base import Array
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.canonical import Run, Step
from jaxdp.accounting.loss import separation
from jaxdp.accounting.moments import renyi

_GRIDS = (
    1 + np.geomspace(0.01, 1, 24),
    np.arange(2, 12, 0.25),
    np.arange(12, 65),
    np.round(np.geomspace(66, 1e6, 70)),
)
DEFAULT_ORDERS: tuple[float, ...] = tuple(np.unique(np.concatenate(_GRIDS)).tolist())


def step_rdp(step: Step, relation: Relation, orders: tuple[float, ...] = DEFAULT_ORDERS) -> Array:
    """Renyi divergence of one step at each order, [k], never below the true value.

    Full batch: alpha s^2/(2 z^2), s the separation (Mironov 2017, arXiv:1702.07476v3, Corollary 3).
    Poisson: log E_Q[(P/Q)^alpha]/(alpha-1) with the pairs of ``loss``; for add/remove this
    direction is the larger one (Mironov, Talwar and Zhang 2019, arXiv:1908.10530v1, Theorem 5).
    Fixed size without replacement: that of the dominating pair of ``fixed_size``.
    """
    if step.sampling == "fixed_size":
        return fixed_size.renyi(
            step.noise_multiplier, step.sampling_prob, relation, np.asarray(orders)
        )
    return _poisson_rdp([step], relation, orders)[0]


_Key = tuple[Step, Relation, tuple[float, ...]]
_KEPT: dict[_Key, Array] = {}
_KEEP = 512


def _poisson_rdp(steps: list[Step], relation: Relation, orders: tuple[float, ...]) -> Array:
    """[n, k] divergences of n Poisson or full-batch steps at k orders; recent ones are kept."""
    keys = [(step, relation, orders) for step in steps]
    found = {key: _KEPT[key] for key in keys if key in _KEPT}
    new = list(dict.fromkeys(key for key in keys if key not in found))
    found.update(zip(new, _curves([step for step, _, _ in new], relation, orders), strict=True))
    for key in new:
        if len(_KEPT) >= _KEEP:
            _KEPT.pop(next(iter(_KEPT)), None)
        _KEPT[key] = found[key]
    return np.array([found[key] for key in keys]).reshape(len(keys), len(orders))


def _curves(steps: list[Step], relation: Relation, orders: tuple[float, ...]) -> Array:
    alphas = np.asarray(orders, dtype=np.float64)
    z = np.asarray([step.noise_multiplier for step in steps])[:, None]
    # Sampling never hurts: the divergence is convex, so the full batch bounds every order.
    curves: Array = 0.5 * alphas * (separation(relation) / z) ** 2
    sampled = [i for i, step in enumerate(steps) if step.sampling_prob < 1]
    moments = renyi([steps[i] for i in sampled], relation, alphas)
    curves[sampled] = np.minimum(curves[sampled], moments)
    return curves


def run_rdp(run: Run, relation: Relation, orders: tuple[float, ...] = DEFAULT_ORDERS) -> Array:
    """Renyi divergence of the whole composition at each order: the sum over its steps and parts."""
    total = np.zeros(len(orders))
    poisson = [(step, n) for step, n in run.steps if step.sampling == "poisson"]
    curves = _poisson_rdp([step for step, _ in poisson], relation, orders)
    for (_, n), curve in zip(poisson, curves, strict=True):
        total += n * curve
    for step, n in run.steps:
        if step.sampling != "poisson":
            total += n * step_rdp(step, relation, orders)
    for part, n in run.parts:
        total += n * part.renyi(relation, np.asarray(orders, dtype=np.float64))
    return total


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
