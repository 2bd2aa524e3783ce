"""Renyi (RDP) accounting: fast and general, but never tight.

The Renyi divergence of order alpha of one step is computed by the trapezoid rule from the
definition, for integer and fractional orders alike, so there is no series to truncate. An order
that cannot be tabulated is charged without the benefit of sampling (a valid, larger value); it is
never set to zero.
"""

import functools
import math

import numpy as np
from scipy import special

from jaxdp.accounting.bounds import Relation, UnsupportedEventError
from jaxdp.accounting.canonical import Run, Step
from jaxdp.accounting.loss import Array, separation
from jaxdp.accounting.moments import renyi

DEFAULT_ORDERS: tuple[float, ...] = tuple(
    float(a)
    for a in np.unique(
        np.concatenate(
            [
                1 + np.geomspace(0.01, 1, 24),
                np.arange(2, 12, 0.25),
                np.arange(12, 65),
                np.round(np.geomspace(66, 1e6, 70)),
            ]
        )
    )
)


def step_rdp(step: Step, relation: Relation, orders: tuple[float, ...] = DEFAULT_ORDERS) -> Array:
    """Renyi divergence of one step at each order, [len(orders)], never below the true value.

    Full batch: alpha s^2/(2 z^2), s the separation (Mironov 2017, arXiv:1702.07476v3, Corollary 3).
    Poisson: log E_Q[(P/Q)^alpha]/(alpha-1) with the pairs of ``loss``; for add/remove this
    direction is the larger one (Mironov, Talwar and Zhang 2019, arXiv:1908.10530v1, Theorem 5).
    Fixed size without replacement (replace-one only): ``wbk_rdp`` at half the noise multiplier.

    Raises:
        UnsupportedEventError: fixed-size sampling under another relation than replace-one.
    """
    if step.sampling == "fixed_size":
        if relation is not Relation.REPLACE_ONE:
            raise UnsupportedEventError(f"fixed-size sampling under {relation.value}: no bound")
        full = 0.5 * np.asarray(orders) * (2 / step.noise_multiplier) ** 2
        # Replacing a record moves the sum by two contributions: half the noise multiplier.
        return np.minimum(wbk_rdp(step.sampling_prob, step.noise_multiplier / 2, orders), full)
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


def wbk_rdp(sampling_prob: float, noise_multiplier: float, orders: tuple[float, ...]) -> Array:
    """Renyi bound for sampling without replacement, of a Gaussian whose sensitivity is 1.

    log(1 + q^2 C(a,2) min(4(e^(1/z^2) - 1), 2 e^(1/z^2)) + 4 sum_{j=3..a} q^j C(a,j)
    sqrt(B(2 ceil(j/2)) B(2 floor(j/2)))) / (a - 1), with B(l) = E[(dP/dQ - 1)^l] (Wang, Balle and
    Kasiviswanathan 2019, arXiv:1808.00087v2, Theorem 9 with the bounds of its Section 3.3; the form
    that AdaDp's Theorem 1 prints).

    Args:
        sampling_prob: q = batch size / data set size.
        noise_multiplier: noise divided by how far replacing one record moves the sum.
        orders: [k]; those that are not integers in 2..256 are dropped (infinite).

    Returns:
        [k] bounds for one step.
    """
    q, z = sampling_prob, noise_multiplier
    out = np.full(len(orders), np.inf)
    wanted = [int(a) for a in orders if a == int(a) and 2 <= a <= 256]
    if not wanted:
        return out
    log_b = {k: _log_b(k, z) for k in range(2, max(wanted) + 2, 2)}
    for i, order in enumerate(orders):
        if order not in wanted:
            continue
        j = np.arange(2, int(order) + 1)
        log_binomial = (
            special.gammaln(order + 1) - special.gammaln(j + 1) - special.gammaln(order - j + 1)
        )
        pair = [0.5 * (log_b[2 * ((k + 1) // 2)] + log_b[2 * (k // 2)]) for k in j.tolist()]
        terms = math.log(4) + np.asarray(pair)
        # B(2) = e^(1/z^2) - 1; the other form of the second term wins when noise is small.
        terms[0] = min(terms[0], math.log(2) + 1 / z**2)
        total = float(special.logsumexp(np.append(terms + j * math.log(q) + log_binomial, 0.0)))
        out[i] = total / (order - 1) * (1 + 1e-12)
    return out


@functools.lru_cache(maxsize=4096)
def _log_b(power: int, z: float) -> float:
    """log E_{N(0, z^2)}[(exp((x - 1/2)/z^2) - 1)^power], power even, by the trapezoid rule.

    The alternating binomial sum of the paper cancels; the integrand here is non-negative.
    """
    width = min(z / 6, 0.2 * z * z) / math.sqrt(1 + power / 50)
    x = np.arange(-(14 + math.sqrt(power)) * z, power + 14 * z, width)
    if x.size > 400_000:
        return math.inf
    g = (x - 0.5) / z**2
    size = np.where(g > 1, g + np.log1p(-np.exp(-np.maximum(g, 1.0))), 0.0)
    with np.errstate(divide="ignore"):
        size = np.where(g > 1, size, np.log(np.abs(np.expm1(np.minimum(g, 1.0)))))
    log_terms = power * size - 0.5 * (x / z) ** 2
    return float(special.logsumexp(log_terms)) + math.log(width / (z * math.sqrt(2 * math.pi)))


def run_rdp(run: Run, relation: Relation, orders: tuple[float, ...] = DEFAULT_ORDERS) -> Array:
    """Renyi divergence of the whole composition at each order: the sum over its steps."""
    total = np.zeros(len(orders))
    poisson = [(step, n) for step, n in run.steps if step.sampling == "poisson"]
    curves = _poisson_rdp([step for step, _ in poisson], relation, orders)
    for (_, n), curve in zip(poisson, curves, strict=True):
        total += n * curve
    for step, n in run.steps:
        if step.sampling != "poisson":
            total += n * step_rdp(step, relation, orders)
    for part, n in run.parts:
        total += n * part.renyi(relation, np.asarray(orders))
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
    if conversion == "improved":
        eps = eps + np.log1p(-1 / a) - np.log(a) / (a - 1)
    elif conversion != "mironov":
        raise ValueError(f"conversion={conversion!r}: expected 'improved' or 'mironov'")
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
    if conversion == "improved":
        log_delta = log_delta + (a - 1) * np.log1p(-1 / a) - np.log(a)
    elif conversion != "mironov":
        raise ValueError(f"conversion={conversion!r}: expected 'improved' or 'mironov'")
    log_delta = log_delta[np.isfinite(log_delta)]
    if log_delta.size == 0:
        return 1.0
    return min(1.0, max(math.exp(min(0.0, float(log_delta.min()))), 1e-300))
