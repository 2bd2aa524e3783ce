"""Moments of many steps' losses at many orders at once, for Renyi accounting.

Orders within a factor of four share the nodes of the largest, and steps are stacked: an order costs
a row of a table, not a quadrature of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.canonical import Step
from jaxdp.accounting.loss import (
    TAIL,
    Array,
    log_ratio,
    posterior,
    separation,
    trapezoid_width,
    weighted_expm1,
)

_MAX_NODES = 8_002  # an order that needs more is not tabulated
_ELEMENTS = 100_000  # of one array at a time: what fits in a core's cache


def renyi(steps: Sequence[Step], relation: Relation, orders: Array) -> Array:
    """log E_Q[(P/Q)^alpha] / (alpha - 1), never below the true value; inf where there is no table.

    Args:
        steps: n Poisson-sampled steps, q < 1.
        relation: the neighbouring relation; the pairs are those of ``loss``, forward direction.
        orders: [k] > 1.

    Returns:
        [n, k].
    """
    grids = _grids(steps, relation, orders)
    out: Array = np.full((len(steps), orders.size), np.inf)
    level = np.floor(np.log2(orders) / 2)
    for wanted in np.unique(level):
        columns = np.flatnonzero(level == wanted)
        for start in range(0, columns.size, 64):
            _fill(out, grids, columns[start : start + 64], relation, orders)
    return out


@dataclass(frozen=True)
class _Grids:
    """Trapezoid rules that are exact to rounding, for every step and order.

    Attributes:
        z: [n] noise multipliers.
        q: [n] sampling probabilities.
        width: [n, k] distance of the nodes.
        first: [n, k] index of the leftmost node; node i lies at i * width.
        count: [n, k] number of nodes; floats, because it may be huge.
    """

    z: Array
    q: Array
    width: Array
    first: Array
    count: Array


def _grids(steps: Sequence[Step], relation: Relation, orders: Array) -> _Grids:
    """Outputs outside the window weigh less than e^-72 of E[exp(t loss)] - 1, 0 <= t <= order - 1.

    Every mode of P^(1+t) Q^-t lies between those of its Gaussian factors. It may not be left out
    because it is small beside 1: where q is tiny, E - 1 is all there is.
    """
    z = np.asarray([step.noise_multiplier for step in steps], dtype=np.float64)
    q = np.asarray([step.sampling_prob for step in steps], dtype=np.float64)
    order = orders - 1
    right = 1 + separation(relation) * order + TAIL * z[:, None]
    left, spread = -TAIL * z[:, None] + 0 * order, 0 * right
    if relation is Relation.REPLACE_ONE:
        p = posterior(right, z[:, None], q[:, None])
        left, spread = -right, np.where(p < 0.5, p * (1 - p), 0.25) * order
    width = trapezoid_width(z[:, None], spread)
    first = np.floor(left / width)
    return _Grids(z, q, width, first, np.ceil(right / width) + 1 - first)


def _fill(
    out: Array, grids: _Grids, columns: NDArray[np.int64], relation: Relation, orders: Array
) -> None:
    """Compute ``out`` at ``columns``, each step with the nodes of the largest order that fits."""
    columns = columns[np.argsort(orders[columns])]
    fits = grids.count[:, columns] < _MAX_NODES
    reach = np.where(fits.any(axis=1), columns.size - fits[:, ::-1].argmax(axis=1), 0)
    rows = np.flatnonzero(reach)
    # Steps of like size together, so that little is padded.
    count = grids.count[rows, columns[reach[rows] - 1]]
    rows = rows[np.argsort(count)]
    group = max(1, int(_ELEMENTS / (columns.size * count.max(initial=1.0))))
    for start in range(0, rows.size, group):
        part = rows[start : start + group]
        largest = columns[reach[part] - 1]
        log_weight, loss = _tables(grids, part, largest, relation)
        used = columns[: reach[part].max()]
        value, rounding = log_moments(log_weight, loss, orders[used] - 1)
        within = orders[used] <= orders[largest][:, None]
        bound = np.where(within, (value + rounding) / (orders[used] - 1), np.inf)
        out[part[:, None], used] = bound


def _tables(
    grids: _Grids, rows: NDArray[np.int64], columns: NDArray[np.int64], relation: Relation
) -> tuple[Array, Array]:
    """(log weights, losses), [rows, nodes], on each row's own grid; padded with weight 0."""
    z, q = grids.z[rows, None], grids.q[rows, None]
    width, count = grids.width[rows, columns, None], grids.count[rows, columns, None]
    index: Array = np.arange(count.max(initial=0.0))
    x = width * (grids.first[rows, columns, None] + index)
    loss = log_ratio(x, z, q)
    log_weight = loss - 0.5 * (x / z) ** 2 + np.log(width / (z * np.sqrt(2 * np.pi)))
    if relation is Relation.REPLACE_ONE:
        loss = loss - log_ratio(-x, z, q)
    inside = index < count
    return np.where(inside, log_weight, -np.inf), np.where(inside, loss, 0.0)


def log_moments(log_weight: Array, loss: Array, orders: Array) -> tuple[Array, Array]:
    """``loss.log_moment`` of several tables at several orders.

    Args:
        log_weight: [n, m] log of the first law's density times the grid width; -inf is padding.
        loss: [n, m] loss at the node; 0 in the padding.
        orders: [k] >= 0.

    Returns:
        (log E[exp(order loss)], bound on its rounding error), [n, k] each.
    """
    exponent = orders[:, None] * loss[:, None, :] + log_weight[:, None, :]
    peak = exponent.max(axis=-1)
    exponent -= peak[:, :, None]
    value = peak + np.log(np.exp(exponent, out=exponent).sum(axis=-1))
    rounding = 4e-16 * (1 + np.abs(value))
    row, column = np.nonzero(peak <= 10)
    # E - 1 with a zero taken out term by term: exact also where it is 1e-15.
    zero = weighted_expm1(log_weight - loss, loss)
    order = orders[column, None]
    drift = order * zero[row]
    gain = weighted_expm1(log_weight[row], order * loss[row])
    value[row, column] = np.log1p(np.maximum((gain - drift).sum(axis=-1), 0.0))
    size = np.abs(gain).sum(axis=-1) + np.abs(drift).sum(axis=-1)
    rounding[row, column] = 4e-15 * size + np.abs(drift.sum(axis=-1))
    return value, rounding
