"""Moments of steps' losses at many orders at once."""

from collections.abc import Sequence

import numpy as np

from jaxdp.accounting.base import Array
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.canonical import Step
from jaxdp.accounting.loss import TAIL, posterior, separation, table, trapezoid_width

_MAX_NODES = 8_002  # an order that needs more is not tabulated


def renyi(steps: Sequence[Step], relation: Relation, orders: Array) -> Array:
    """log E_Q[(P/Q)^alpha] / (alpha - 1), never below the true value; inf where there is no table.

    Orders within a factor of four share the nodes of the largest.

    Args:
        steps: n Poisson-sampled steps, q < 1.
        relation: the neighbouring relation; the pairs are those of ``loss``, forward direction.
        orders: [k] > 1.

    Returns:
        [n, k].
    """
    out: Array = np.full((len(steps), orders.size), np.inf)
    level = np.floor(np.log2(orders) / 2)
    groups = [np.flatnonzero(level == wanted) for wanted in np.unique(level)]
    for row, step in zip(out, steps, strict=True):
        first, count, width = _grids(step, relation, orders - 1)
        for group in groups:
            fits = group[count[group] < _MAX_NODES]
            if fits.size:
                i = fits[np.argmax(orders[fits])]
                x = width[i] * (first[i] + np.arange(count[i]))
                log_weight, loss = table(
                    x, float(width[i]), step.noise_multiplier, step.sampling_prob, relation
                )
                value, rounding = log_moments(log_weight, loss, orders[fits] - 1)
                row[fits] = (value + rounding) / (orders[fits] - 1)
    return out


def _grids(step: Step, relation: Relation, order: Array) -> tuple[Array, Array, Array]:
    """(index of the leftmost node, number of nodes, their distance), [k] each, for each order.

    Outputs outside the window weigh less than e^-72 of E[exp(t loss)] - 1, 0 <= t <= order. Every
    mode of P^(1+t) Q^-t lies between those of its Gaussian factors. It may not be left out because
    it is small beside 1: where q is tiny, E - 1 is all there is. The numbers may be huge.
    """
    z, q = step.noise_multiplier, step.sampling_prob
    right = 1 + separation(relation) * order + TAIL * z
    left, spread = -TAIL * z + 0 * order, 0 * order
    if relation is Relation.REPLACE_ONE:
        p = posterior(right, z, q)
        left, spread = -right, np.where(p < 0.5, p * (1 - p), 0.25) * order
    width = trapezoid_width(z, spread)
    first = np.floor(left / width)
    return first, np.ceil(right / width) + 1 - first, width


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
