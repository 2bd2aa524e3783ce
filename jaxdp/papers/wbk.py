"""The Renyi bound for batches without replacement as papers print it.

Guarantees use ``FixedSizeSampled`` of ``jaxdp.accounting``, whose divergences are smaller.
"""

import functools
import math

import numpy as np
from scipy import special

from jaxdp.accounting.events import Array


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
