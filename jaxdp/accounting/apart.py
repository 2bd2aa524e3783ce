"""A step's small losses apart from its large ones, each on a grid that suits it.

Where a record is rarely drawn nearly every loss is tiny and a few are large: one grid for both is
long. A step is dominated by two released together: which of the two it is, with a large loss if it
is one, and always a small loss (docs/certificate.md, Theorem 9).
"""

import math
from typing import Any

import numpy as np

from jaxdp.accounting.base import Array, Pair, Unresolved
from jaxdp.accounting.discretise import cell_masses

_U = 2.0**-53


class Inner:
    """The pair of a step's losses in (low, high], given that they are there, less ``shift``.

    Args:
        pair: one step.
        low: of the small losses.
        high: of the small losses; with the pair's center in between.

    Attributes:
        shift: log of the ratio of the probabilities of a small loss.

    Raises:
        Unresolved: hardly any loss is small.
    """

    infinite = 0.0

    def __init__(self, pair: Pair, low: float, high: float) -> None:
        self.pair, self.low, self.high = pair, low, high
        self.small = [float(v[0]) for v in cell_masses(pair, np.asarray([low, high]))[:4]]
        p, q, gain, error = self.small
        if not min(p, q) > 1e-290:
            raise Unresolved("no small losses")
        self.ratio = gain / q
        self.shift = math.log1p(self.ratio)
        # Of a logarithm: the error over its argument, which is p/q.
        size = max(abs(self.shift), abs(math.expm1(-self.shift)))
        self.doubt = error / min(p, q) + (2 * pair.rounding + 8 * _U) * size
        self.rounding = 2 * pair.rounding + 8 * _U
        self.center = pair.center - self.shift

    def cells(self, edges: Array) -> tuple[Array, Array]:
        """As ``Pair.cells``."""
        return self.masses(edges)[:2]

    def masses(self, edges: Array) -> tuple[Array, Array, Array, Array]:
        """(P masses, Q masses, P - Q, bound on the error of the difference) of the cells, [m]."""
        p, q, gain, error = cell_masses(self.pair, self._inside(edges))[:4]
        total, other = self.small[:2]
        moved = q * self.ratio
        size = np.abs(gain) + np.abs(moved) + q * self.doubt
        return p / total, q / other, (gain - moved) / total, (error + self.rounding * size) / total

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """As ``Pair.tails``."""
        first, last = self.pair.tails(self._inside(losses)), self.pair.tails(self._inside(np.inf))
        return (first[0] - last[0]) / self.small[0], (first[1] - last[1]) / self.small[1]

    def span(self, tail: float) -> tuple[float, float]:
        """As ``Pair.span``."""
        return self.low - self.shift, self.high - self.shift

    def slack(self, edges: Array) -> float:
        """The largest distance of the cells' edges, in loss, from ``edges``."""
        return self.doubt + _own_slack(self.pair, self._inside(edges))

    def _inside(self, losses: Any) -> Array:
        losses = np.atleast_1d(losses)
        # Rounding must not leave the largest small loss out.
        last = losses >= self.high - self.shift
        return np.clip(np.where(last, self.high, losses + self.shift), self.low, self.high)


class Outer:
    """The pair of a step's other losses, and of the event that the loss is small.

    Args:
        inner: the small losses of the same step.
    """

    infinite = 0.0

    def __init__(self, inner: Inner) -> None:
        self.inner, self.center = inner, inner.shift
        self.rounding = inner.pair.rounding

    def cells(self, edges: Array) -> tuple[Array, Array]:
        """As ``Pair.cells``."""
        return self.masses(edges)[:2]

    def masses(self, edges: Array) -> tuple[Array, Array, Array, Array]:
        """As ``Inner.masses``."""
        least = cell_masses(self.inner.pair, np.minimum(edges, self.inner.low))
        largest = cell_masses(self.inner.pair, np.maximum(edges, self.inner.high))
        here = (edges[:-1] < self.center) & (edges[1:] >= self.center)
        p, q, gain, error = (
            a + b + here * small
            for a, b, small in zip(least[:4], largest[:4], self.inner.small, strict=True)
        )
        return p, q, gain, error + 4 * _U * np.abs(gain)

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """As ``Pair.tails``."""
        high = np.where(losses < self.center, self.inner.low, np.maximum(losses, self.inner.high))
        return self.inner.pair.tails(np.where(losses < self.inner.low, losses, high))

    def span(self, tail: float) -> tuple[float, float]:
        """As ``Pair.span``."""
        return self.inner.pair.span(tail)

    def slack(self, edges: Array) -> float:
        """As ``Inner.slack``."""
        return self.inner.doubt + _own_slack(self.inner.pair, edges)

    def chance(self) -> float:
        """Upper bound on the probability of a large loss."""
        pair, ends = self.inner.pair, np.asarray([-np.inf, self.inner.low])
        above = float(pair.tails(np.asarray([self.inner.high]))[0][0])
        return (float(pair.cells(ends)[0][0]) + above) * (1 + 2 * pair.rounding)


def most(n: int, chance: float, log_target: float) -> int:
    """A number that a binomial variable exceeds with a probability of e^log_target at most.

    Chernoff's bound: P(K >= k) <= e^(-n p) (e n p/k)^k for k > n p (Hoeffding 1963, Theorem 1,
    with 1 - p <= e^-p).
    """
    mean, k = n * chance, math.ceil(n * chance) + 1
    while mean > 0 and k <= n and k * (1 + math.log(mean / k)) - mean > log_target - 1e-6:
        k += max(k // 100, 1)
    return min(k - 1, n)


def _own_slack(pair: Pair, edges: Array) -> float:
    own: Any = getattr(pair, "slack", None)
    return 0.0 if own is None else float(own(edges))
