"""Moments of a composition's privacy loss on the real axis, and the saddle point of the contour."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxdp.accounting.base import Unresolved
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.loss import LossTable, Pair, grid_width, log_moment, mass_window, tabulate
from jaxdp.accounting.roots import bracket_decreasing


@dataclass(frozen=True)
class Composition:
    """A run's steps as seen from one of the two directions.

    Attributes:
        pairs: (pair, count) of the sampled steps.
        mu2: sum of squared separations of all full-batch steps, in noise variances.
        log_tail: outputs are cut off so far out that all of them together have this (log)
            probability: the moments are then those of the loss that matters, and delta is off by
            less.
    """

    pairs: tuple[tuple[Pair, int], ...]
    mu2: float = 0.0
    log_tail: float = -60.0

    def floor(self) -> float:
        """Lowest total loss (0 when unbounded below): that of steps that were never sampled."""
        if self.mu2 > 0 or any(not _has_floor(p) for p, _ in self.pairs):
            return 0.0
        return sum(n * math.log1p(-p.step.sampling_prob) for p, n in self.pairs)

    def ceiling(self) -> float:
        """Largest total loss (infinite when unbounded above)."""
        if self.mu2 > 0 or not all(p.reverse for p, _ in self.pairs):
            return math.inf
        return sum(-n * math.log1p(-p.step.sampling_prob) for p, n in self.pairs)

    def window(self, pair: Pair) -> tuple[float, float]:
        """The interval of outputs of one step that is kept."""
        return mass_window(pair, self.log_tail - math.log(sum(n for _, n in self.pairs)))


def _has_floor(pair: Pair) -> bool:
    return pair.relation is not Relation.REPLACE_ONE and not pair.reverse


class Moments:
    """Log-moment function L(c) = sum n_i log E[exp(c loss_i)] on 0 <= c <= order."""

    def __init__(self, composition: Composition, order: float) -> None:
        self.composition = composition
        self.order = order
        self._tables: list[tuple[LossTable, int]] = []
        for pair, n in composition.pairs:
            window = composition.window(pair)
            table = tabulate(pair, window, grid_width(pair, window, order), max_nodes=60_000)
            if table is None:
                raise Unresolved(f"moments of order {order:g} need too many nodes")
            self._tables.append((table, n))

    def value(self, c: float) -> tuple[float, float]:
        """(L(c), bound on its rounding error)."""
        total, rounding = 0.5 * c * (c + 1) * self.composition.mu2, 0.0
        for table, n in self._tables:
            value, error = log_moment(table, c)
            total += n * value
            rounding += n * error
        return total, rounding + 4e-16 * abs(total)

    def derivatives(self, c: float) -> tuple[float, float, float]:
        """(L, L', L'') at c, quickly: good for choosing a contour."""
        mu2 = self.composition.mu2
        l0, l1, l2 = 0.5 * c * (c + 1) * mu2, (c + 0.5) * mu2, mu2
        for table, n in self._tables:
            exponent = table.log_weight + c * table.loss
            peak = float(exponent.max())
            weight = np.exp(exponent - peak)
            total = float(weight.sum())
            mean = float(weight @ table.loss) / total
            l0 += n * (peak + math.log(total))
            l1 += n * mean
            l2 += n * float(weight @ (table.loss - mean) ** 2) / total
        return l0, l1, l2

    def saddle(self, c: float) -> tuple[float, float, float]:
        """(epsilon whose contour has its saddle at c, log of delta there roughly, L''(c)).

        The exponent L(z) - z epsilon - log z - log(1+z) is stationary at z = c; the log of delta is
        its second-order (Daniels) approximation.
        """
        l0, l1, l2 = self.derivatives(c)
        epsilon = l1 - 1 / c - 1 / (1 + c)
        curvature = l2 + 1 / c**2 + 1 / (1 + c) ** 2
        log_delta = l0 - c * epsilon - math.log(c) - math.log1p(c)
        return epsilon, log_delta - 0.5 * math.log(2 * math.pi * curvature), l2


def chernoff(moments: Moments, epsilon: float) -> float:
    """An upper bound on log delta(epsilon) that needs no integral.

    delta <= E[exp(c (loss - epsilon))] max_u e^(-cu)(1 - e^(-u)) = e^(L(c) - c epsilon)
    c^c/(1+c)^(1+c) for every c > 0 (Canonne, Kamath and Steinke 2020, arXiv:2004.00010v5, proof of
    Proposition 12); tried on a grid of c.
    """
    best = 0.0
    for c in np.geomspace(1e-2, 1, 12) * moments.order:
        value, rounding = moments.value(float(c))
        bound = value + rounding - c * epsilon + c * math.log(c) - (1 + c) * math.log1p(c)
        best = min(best, float(bound))
    return best


def choose_order(
    composition: Composition, log_delta: float | None, epsilon: float | None
) -> tuple[float, Moments]:
    """The real part of the contour for a target delta (log) or epsilon, and its moments.

    Args:
        composition: one direction of the run.
        log_delta: target, or None.
        epsilon: target, or None. Exactly one is given.

    Returns:
        (c, moments that reach 8c + 8).

    Raises:
        Unresolved: when the moments cannot be tabulated.
    """

    def excess(moments: Moments) -> Callable[[float], float]:
        def value(log_c: float) -> float:
            eps, log_d, _ = moments.saddle(math.exp(log_c))
            return log_d - log_delta if log_delta is not None else (epsilon or 0.0) - eps

        return value

    order = 8.0
    while True:
        moments = Moments(composition, order)
        f = excess(moments)
        if f(math.log(order)) <= 0:
            break
        order *= 6
        if order > 1e12:
            raise Unresolved("no saddle point below order 1e12")
    low = math.log(order) - 4
    while f(low) <= 0:
        low -= 4
        if low < -80:
            raise Unresolved("no saddle point above order e^-80")
    c = math.exp(bracket_decreasing(f, low, math.log(order), rtol=1e-2, max_iter=25)[1])
    return c, Moments(composition, 8 * c + 8)


def orders_beyond(c: float) -> Sequence[float]:
    """Orders c' > c at which the aliased copies to the right are bounded."""
    return (1.05 * c, 1.15 * c, 1.3 * c, 1.6 * c, 2 * c + 1, 3 * c + 3, 8 * c + 8)
