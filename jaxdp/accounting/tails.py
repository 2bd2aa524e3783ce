"""Ends of epsilon and delta from moments alone, for sums that no grid resolves.

Where the losses of very many steps add up to millions, rounding drowns the law of their sum. Its
moments (``SumMoments``) are known to all digits still. ``upper_end`` is Chernoff's bound, by the
best order; ``lower_end`` the probability of the best window about a tilted law (``_windows``;
docs/proofs/certificate.md, Theorem 11). The ends differ by a few standard deviations of the sum.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from jaxdp.accounting.events import Array
from jaxdp.accounting.grid import dominating_atoms, merge_cells
from jaxdp.accounting.pairs import Pair

Kinds = tuple[tuple[Pair, int], ...]

_U = 2.0**-53
_NATS = (0.02, 0.1, 0.3, 0.7, 1.2, 2.0, 3.5, 6.0, 10.0)  # left out on one side of a window
_NO_DIGITS = 1e-305  # a mass below has not its relative error: it may be this much more
_MAX_EXPONENTS = 4_000_000  # at once


class SumMoments:
    """Log moments of the sum of all steps' losses, from above or from below.

    Attributes:
        over: probability of losses that are left out of the moments; of use above only.
        spread: standard deviation of the sum, roughly.
    """

    def __init__(self, kinds: Kinds, high: bool, log_delta: float) -> None:
        """Puts every kind of step on a fine grid of its own."""
        tail = math.exp(max(log_delta, -640.0) - 23) / sum(n for _, n in kinds)
        self._steps: list[tuple[Array, Array, int]] = []
        self.over, variance = 0.0, 0.0
        for pair, n in kinds:
            # A cell is at most a share of its distance from where most losses are, or a tenth of
            # that at the far end; it is a small part of what its losses differ by anyhow. The tail
            # of least floats is too large for many steps: so far out it is less.
            low, end = pair.span(tail)
            reach = max(end - low, 1e-12 * max(abs(low), abs(end), 1e-9))
            fine = min(max(0.01 / math.sqrt(reach), 1e-5), 3e-4)
            grid = 0.1 * fine * reach, low, end + 0.1 * reach, fine
            if high:
                atoms = dominating_atoms(pair, *grid)
                loss, mass = atoms.offset + atoms.index * grid[0], atoms.mass + _NO_DIGITS
                self.over += n * (atoms.over[0] + 1e-320) * (1 + 1e-12)
            else:
                loss, mass = merge_cells(pair, *grid)
            if loss.size:
                self._steps.append((loss, np.log(mass), n))
                variance += n * float(mass @ (loss - mass @ loss / mass.sum()) ** 2)
        # Without losses nothing is known.
        whole = len(self._steps) == len(kinds)
        self.spread = math.sqrt(variance) if whole else 0.0

    def moments(self, orders: Array) -> tuple[Array, Array]:
        """log of the integral of exp(order * sum), and a bound on its rounding error, [k] each."""
        value, error = np.zeros(orders.size), np.zeros(orders.size)
        for loss, log_mass, n in self._steps:
            part = max(_MAX_EXPONENTS // loss.size, 1)
            parts = [orders[i : i + part, None] for i in range(0, orders.size, part)]
            one = np.empty(0)
            for order in parts:
                exponent = order * loss + log_mass
                peak = exponent.max(axis=1)
                # Subnormal numbers are slow: no term is less than e^-700 of the largest.
                terms = np.exp(np.maximum(exponent - peak[:, None], -700.0))
                one = np.append(one, peak + np.log(terms.sum(axis=1)))
            # Exponents, their logs and exponentials, and a sum of non-negative terms.
            reach = np.abs(orders) * float(np.abs(loss).max()) + np.abs(one)
            size = loss.size + 16 + 8 * float(np.abs(log_mass).max())
            value += n * one
            error += n * _U * (8 * reach + size)
        return value, error + 4 * _U * len(self._steps) * np.abs(value)


def upper_end(kinds: Kinds, log_delta: float, epsilon: float | None = None) -> float:
    """An epsilon that is proven at exp(log_delta), infinite if none is; or a delta at ``epsilon``.

    Arguments as of ``SumMoments``.
    """
    total = SumMoments(kinds, True, log_delta)
    # What is over is taken off delta; log(1 - share) is rounded down.
    share = total.over * math.exp(-log_delta)
    rest = math.log1p(-share) * (1 + 1e-12) - 1e-14 if share < 0.5 else -math.inf
    left = log_delta + rest

    def at(orders: Array) -> Array:
        """The end by each order: Chernoff's bound on epsilon, or on the log of delta."""
        log_moment, error = total.moments(orders)
        # The largest e^(-cx) (1 - e^-x), and what rounding may do to its log.
        first, second = orders * np.log(orders), (1 + orders) * np.log1p(orders)
        off = 4 * _U * (np.abs(first) + second)
        if epsilon is None:
            found = log_moment + error + (first - second) + off - left
            return np.asarray((found + 4 * _U * np.abs(found)) / orders)
        away = orders * epsilon
        return np.asarray(log_moment + error - away + 4 * _U * away + (first - second) + off)

    found = _minimize_over_orders(at, total.spread)
    # What is over the grid is charged to delta whole.
    if epsilon is None:
        return max(found * (1 + 4 * _U), 0.0) if math.isfinite(left) else math.inf
    return min((math.exp(min(found, 0.0)) + total.over) * (1 + 1e-12), 1.0)


def lower_end(kinds: Kinds, log_delta: float, epsilon: float | None = None) -> float:
    """An epsilon whose delta is proven to be above exp(log_delta), or 0; or a delta at ``epsilon``.

    Arguments as of ``SumMoments``.
    """
    total = SumMoments(kinds, False, log_delta)

    def at(window: Windows) -> Array:
        """The end by each tilt: delta(epsilon) >= weight (1 - e^(epsilon - first))."""
        with np.errstate(divide="ignore", invalid="ignore"):
            if epsilon is None:
                rounded = log_delta + 8 * _U * abs(log_delta)
                share = np.exp(np.minimum(rounded - window.log_weight, 1.0))
                return np.asarray(window.first + np.log1p(-share * (1 + 1e-9)))
            # Of losses that rounding may have moved.
            above = np.maximum(window.first * (1 - 4 * _U) - epsilon, 0.0)
            return np.asarray(window.log_weight + np.log(-np.expm1(-above)))

    found = _maximize_over_windows(total, at)
    if epsilon is None:
        return max(found * (1 - 1e-13), 0.0)
    return math.exp(min(found, 0.0)) * (1 - 1e-9)


@dataclass(frozen=True)
class Windows:
    """Intervals that hold sums of a known weight, one for each tilt."""

    first: Array  # [k] their least sum, > 0
    log_weight: Array  # [k] log of a lower bound on the untilted measure there


def _windows(orders: Array, moments: tuple[Array, Array]) -> Iterator[Windows]:
    """Yields windows that hold most of each tilted law, for each pair of shares left outside.

    Args:
        orders: [k] increasing.
        moments: of the sum, [k] each, with errors.

    Yields:
        Windows of all tilts, for one share left out below and one above.
    """
    # Differences of log moments of every two orders, with their errors.
    value, error = moments
    gap = orders[:, None] - orders
    both = value[:, None] - value, error[:, None] + error
    tilts = np.flatnonzero((orders >= 0) & (orders < orders[-1]))
    inside = np.arange(orders.size)
    with np.errstate(divide="ignore", invalid="ignore"):
        # P_c(sum < a) <= exp(K(o) - K(c) + (c - o) a) for o < c, and the same above.
        ends = [((both[0] - both[1] - g) / gap)[tilts] for g in _NATS]
    below, beyond = inside < tilts[:, None], inside > tilts[:, None]
    first = [np.nanmax(np.where(below, end, -np.inf), axis=1) for end in ends]
    last = [np.nanmin(np.where(beyond, end, np.inf), axis=1) for end in ends]
    # The best order on either side bounds what lies beyond each end; what is left lies between.
    # Untilted, a sum s there weighs e^(K(c) - c s), which is least at the window's last sum.
    c, kept, off = orders[tilts], value[tilts], error[tilts]
    for i, left in enumerate(_NATS):
        for j, right in enumerate(_NATS):
            share = -math.expm1(-left) - math.exp(-right)
            if share <= 0:
                continue
            end = last[j] * (1 + 8 * _U)
            rounded = 8 * _U * (np.abs(kept) + c * np.abs(end))
            weight = kept - off - c * end - rounded + math.log(share) - 1e-12
            start = np.where(first[i] > 0, first[i] * (1 - 8 * _U), np.nan)
            yield Windows(start, weight)


def _maximize_over_windows(total: SumMoments, at: Callable[[Windows], Array]) -> float:
    """The largest value over tilts and windows; -inf if there is none."""
    unit = 1 / total.spread if total.spread > 0 else math.inf
    if not math.isfinite(unit):
        return -math.inf
    positive = np.geomspace(1e-2, 1e5, 64)
    orders = unit * np.concatenate([-np.geomspace(1e-2, 1e3, 31)[::-1], [0.0], positive])
    # First orders over seven decades of the sum's standard deviation, then twice finer ones about
    # the best tilt: an order only chooses, every window is proven.
    best = -math.inf
    for step in (0.3, 0.15, 0.0):
        moments = total.moments(orders)
        tilts = np.flatnonzero((orders >= 0) & (orders < orders[-1]))
        found = np.full(tilts.size, -np.inf)
        for window in _windows(orders, moments):
            value = at(window)
            found = np.maximum(found, np.where(np.isnan(value), -np.inf, value))
        best = max(best, float(found.max(initial=-math.inf)))
        if not step:
            break
        # Orders about the best tilt, a share of that law's own spread apart.
        center = float(orders[tilts[int(np.argmax(found))]])
        near = unit * np.asarray([0.1, 1.0]) if center == 0 else center * np.asarray([0.9, 1.1])
        curve, _ = total.moments(np.asarray([*near, near.mean()]))
        bend = 4 * (curve[0] + curve[1] - 2 * curve[2]) / (near[1] - near[0]) ** 2
        own = 1 / math.sqrt(bend) if bend > 0 and math.isfinite(bend) else unit
        orders = np.unique(center + own * step * np.arange(-30, 31))
    return best


def _minimize_over_orders(at: Callable[[Array], Array], spread: float) -> float:
    """The least value over orders > 0; infinite if there is none."""
    unit = 1 / spread if spread > 0 else math.inf
    if not math.isfinite(unit):
        return math.inf
    orders, best = unit * np.geomspace(1e-6, 1e6, 97), math.inf
    for _ in range(4):
        value = at(orders)
        value = np.where(np.isnan(value), np.inf, value)
        k = int(np.argmin(value))
        best = min(best, float(value[k]))
        orders = np.geomspace(orders[max(k - 1, 0)], orders[min(k + 1, orders.size - 1)], 17)
    return best
