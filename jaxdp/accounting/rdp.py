"""Renyi accounting: fast, works for anything, and never tight.

The Renyi divergence of order alpha of one step is computed by the trapezoid rule from the
definition, for integer and fractional orders alike, so there is no series to truncate. An order
that cannot be tabulated is charged without the benefit of sampling (a valid, larger value); it is
never set to zero.
"""

import functools
import math

import numpy as np

from jaxdp.accounting.bounds import Relation, UnsupportedEventError
from jaxdp.accounting.canonical import Run, Step
from jaxdp.accounting.loss import (
    Array,
    Pair,
    grid_width,
    log_moment,
    moment_window,
    separation,
    tabulate,
)

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
    Poisson: log E_Q[(P/Q)^alpha]/(alpha-1) with the pairs of `loss`; for add/remove this direction
    is the larger one (Mironov, Talwar and Zhang 2019, arXiv:1908.10530v1, Theorem 5).
    """
    if step.sampling != "poisson":
        raise UnsupportedEventError(f"{step.sampling} sampling: no Renyi bound implemented")
    return _step_rdp(step, relation, orders).copy()


@functools.lru_cache(maxsize=512)
def _step_rdp(step: Step, relation: Relation, orders: tuple[float, ...]) -> Array:
    alphas = np.asarray(orders)
    full = 0.5 * alphas * (separation(relation) / step.noise_multiplier) ** 2
    if step.sampling_prob == 1:
        return full
    # Sampling never hurts: the divergence is convex, so the full batch bounds every order.
    return np.array(
        [min(f, _moment(step, relation, float(a))) for a, f in zip(alphas, full, strict=True)]
    )


def _moment(step: Step, relation: Relation, alpha: float) -> float:
    """log E_Q[(P/Q)^alpha] / (alpha - 1) for one order, or infinity where there is no table."""
    pair = Pair(step, relation)
    window = moment_window(pair, alpha - 1)
    table = tabulate(pair, window, grid_width(pair, window, alpha - 1), max_nodes=8_000)
    if table is None:
        return math.inf
    value, rounding = log_moment(table, alpha - 1)
    return (value + rounding) / (alpha - 1)


def run_rdp(run: Run, relation: Relation, orders: tuple[float, ...] = DEFAULT_ORDERS) -> Array:
    """Renyi divergence of the whole composition at each order: the sum over its steps."""
    total = np.zeros(len(orders))
    for step, n in run.steps:
        total += n * step_rdp(step, relation, orders)
    return total


def rdp_to_epsilon(
    rdp: Array,
    delta: float,
    orders: tuple[float, ...] = DEFAULT_ORDERS,
    conversion: str = "improved",
) -> tuple[float, float]:
    """Smallest epsilon that the curve guarantees at `delta`, and the order that gives it.

    Args:
      rdp: [k] divergences; infinite ones are dropped.
      delta: in (0, 1).
      orders: [k] orders > 1.
      conversion: "improved": epsilon = rdp + log(1-1/alpha) - log(delta alpha)/(alpha-1)
        (Canonne, Kamath and Steinke 2020, arXiv:2004.00010v5, Proposition 12), or "mironov":
        epsilon = rdp + log(1/delta)/(alpha-1) (Mironov 2017, Proposition 3).

    Returns:
      (epsilon, order); (inf, nan) when every order was dropped.
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
    """Smallest delta that the curve guarantees at `epsilon`: the inverse of `rdp_to_epsilon`."""
    a = np.asarray(orders)
    log_delta = (a - 1) * (rdp - epsilon)
    if conversion == "improved":
        log_delta = log_delta + (a - 1) * np.log1p(-1 / a) - np.log(a)
    elif conversion != "mironov":
        raise ValueError(f"conversion={conversion!r}: expected 'improved' or 'mironov'")
    log_delta = log_delta[np.isfinite(log_delta)]
    return 1.0 if log_delta.size == 0 else min(1.0, math.exp(min(0.0, float(log_delta.min()))))
