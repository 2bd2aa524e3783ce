"""The law of a composition's sum, of many steps by way of bunches of steps.

A sum of n losses on one grid needs a grid as fine as sqrt(n) roundings ask for. So a run of many
steps is first summed in bunches of n/r steps, in a window and on a grid of their own; the law of a
bunch is put on a coarser grid, above or below; and r bunches are summed (docs/certificate.md,
Theorem 8).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxdp.accounting.base import Array
from jaxdp.accounting.convolve import Counted, Law, grown, log_moments
from jaxdp.accounting.discretise import Atoms, Masses

_U = 2.0**-53
OUTSIDE = 14.0  # nats: tilted probability that a window leaves outside
_LARGEST = 21  # log2 of the points of a bunch
_NEARER = (0, 2, 4, 6, 9, 13, 18, 24, 30, 36)  # orders between the best of coarse losses and c

Put = Callable[[Any, float, float, float, float], Atoms]


@dataclass(frozen=True)
class Layout:
    """Grids on which a sum is found.

    Attributes:
        widths: of the grids: of a step's losses, of the bunches of the first level, and so on.
        bunches: how many bunches of one level make one of the next.
        size: points of the window of the whole sum, a power of two.
        points: points of all windows together.
        small: (least, largest) small loss of each kind of steps; then the large ones are put on the
            last grid at once, beside the sum of the small ones. Empty if all are on the first.
        outside: nats of tilted probability that all windows of one level leave outside.
    """

    widths: tuple[float, ...]
    bunches: int
    size: int
    points: float
    small: tuple[tuple[float, float], ...] = ()
    outside: float = OUTSIDE


class Moments:
    """Chernoff's bounds on sums of atoms, tilted by ``c``.

    Attributes:
        c: the tilt.
        orders: the orders on both sides of c at which they are tried, [k].
        gain: log E[exp((order - c) loss)] of the tilted losses of each kind, [kinds, k].
    """

    def __init__(self, atoms: Counted, width: float, c: float) -> None:
        self.c, self.orders = c, around(c)
        orders = np.append(self.orders, c)
        rows = [log_moments([(atom, 1)], width, orders) for atom, _ in atoms]
        self.gain = np.asarray([row[:-1] - row[-1] for row in rows])
        # Without digits: a difference of numbers that are too large.
        offsets = np.asarray([abs(atom.offset) for atom, _ in atoms])
        self._size = np.abs(self.orders) * offsets[:, None] + np.abs(self.gain)

    def of(self, counts: Array) -> Array:
        """log E[exp((order - c) sum)] of the tilted sum, [k]; infinite where it has no digits."""
        used = counts > 0
        with np.errstate(over="ignore", invalid="ignore"):
            gain = counts[used] @ self.gain[used]
            size = counts[used] @ self._size[used]
        return np.where(size < 1e12, gain, np.inf)

    def window(self, counts: Array, nats: float) -> tuple[float, float]:
        """(first, last) loss of a window that leaves e^-nats of the tilted law on either side."""
        gain, c = self.of(counts) + nats, self.c
        up, down = self.orders > c, self.orders < c
        last = (gain[up] / (self.orders[up] - c)).min()
        return float(-(gain[down] / (c - self.orders[down])).min()), float(last)

    def near(self, counts: Array, first: float, last: float) -> Array:
        """The orders that may well give the best bounds below ``first`` and above ``last``."""
        gain, c = self.of(counts), self.c
        above = np.where(self.orders > c, gain - (self.orders - c) * last, np.inf)
        below = np.where(self.orders < c, gain + (c - self.orders) * first, np.inf)
        up, down = int(np.argmin(above)), int(np.argmin(below))
        half = self.orders.size // 2
        # Sums of coarser losses have larger moments at far orders.
        used = {max(up - i, half) for i in _NEARER} | {min(down + i, half - 1) for i in _NEARER}
        return np.asarray(self.orders[sorted(used)])


def around(c: float) -> Array:
    """The orders on both sides of c at which Chernoff's bounds are tried."""
    if c == 0:
        far = np.geomspace(1e-3, 1e9, 37)
        return np.concatenate([-far[::-1], far])
    ratio = np.geomspace(0.02, 30, 15)
    return np.concatenate([c - ratio[::-1] * c, c + ratio * c])


class Summed:
    """The computed law of a bunch's sum, as a pair.

    Args:
        loss: [m] increasing losses.
        p: [m] masses under P; those under Q are p e^-loss.
    """

    center = infinite = 0.0

    def __init__(self, loss: Array, p: Array) -> None:
        self.loss, self.p = loss, p
        # Sums of m non-negative terms: Higham 2002, Section 4.2.
        self.rounding = 2.3e-16 * (loss.size + 4)

    def cells(self, edges: Array) -> tuple[Array, Array]:
        """As ``Pair.cells``."""
        return self.masses(edges)[:2]

    def masses(self, edges: Array) -> Masses:
        """As ``discretise.Masses``, each cell beside its lower edge."""
        ends = np.searchsorted(self.loss, edges, side="right")
        inside = slice(ends[0], ends[-1])
        base = np.where(np.isfinite(edges[:-1]), edges[:-1], edges[1:])
        index = np.repeat(np.arange(base.size), np.diff(ends))
        p, lower = self.p[inside], base[index] - self.loss[inside]
        # Not p - gain, which has no digits where the cell is many nats wide.
        terms = p, p * np.exp(lower), -p * np.expm1(lower)
        first, second, gain = (
            np.asarray(np.bincount(index, v, base.size), np.float64) for v in terms
        )
        # The terms of one cell's gain have the same sign.
        return Masses(first, second, gain, 2 * self.rounding * np.abs(gain), base)

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """As ``Pair.tails``; none is asked for but that of the largest loss."""
        return (losses < self.loss[-1]) * self.p.sum(), np.zeros(losses.shape)


Steps = Callable[[float], Counted]  # from the width of a grid to the atoms on it, with numbers


class Sums:
    """Laws of sums of steps' losses, by way of bunches."""

    def __init__(
        self,
        steps: Steps,
        put: Put,
        layout: Layout,
        moments: Moments,
        apart: tuple[Steps, Moments] | None = None,
    ) -> None:
        """Puts the steps on the finest grid.

        Args:
            steps: those that are summed in bunches.
            put: puts a bunch on a grid, above or below.
            layout: the grids.
            moments: of coarse atoms, from which windows and orders are chosen; with the tilt.
            apart: what is put on the last grid at once, and the moments without it.
        """
        self._steps, self._put, self._layout = steps, put, layout
        self._beside, bunched = apart or ((lambda _: ()), moments)
        self._moments, self._c = (moments, bunched), moments.c
        self._atoms = steps(layout.widths[0])

    def whole(self, first: float) -> Law:
        """The law of the sum of all, on a window that begins at ``first``."""
        counts = np.asarray([n for _, n in self._atoms])
        return self._of(counts, len(self._layout.widths) - 1, first, self._layout.size)

    def _of(self, counts: Array, level: int, first: float, size: int) -> Law:
        """The law of the sum of ``counts`` steps of each kind."""
        width, r = self._layout.widths[level], self._layout.bunches
        top = level == len(self._layout.widths) - 1
        moments = self._moments[not top]
        if level == 0:
            return self._law(_counted(self._atoms, counts), moments, counts, width, first, size)
        part, rest = counts // r, list(self._beside(width)) if top else []
        if (counts % r).any():
            rest += _counted(self._steps(width), counts % r)
        bunch = self._of(part, level - 1, *self._window(part, level))
        atom, log_scale, inexact, cut = _coarser(bunch, width, self._put)
        found = self._law([(atom, r), *rest], moments, counts, width, first, size)
        found.log_scale += r * log_scale
        found.relative += grown(r * (bunch.relative + inexact))
        # What was wrapped is missing in one place and too much in another. It is relative to a
        # total that the coarse atoms have but for their width.
        lost = r * (2 * bunch.alias + math.sqrt(bunch.loss.size) * bunch.error + cut)
        total = r * bunch.log_scale + float(log_moments(rest, width, np.asarray([self._c]))[0])
        ratio = 1 + grown(max(total - found.log_scale, 0.0))
        found.alias += grown(lost) * ratio
        return found

    def _law(
        self, kinds: Counted, hint: Moments, counts: Array, width: float, first: float, size: int
    ) -> Law:
        """The law of the kinds' sum, on one grid; ``hint`` and ``counts`` choose orders."""
        c, last = self._c, first + (size - 2) * width
        orders = hint.near(counts, first, last)
        moments = log_moments(kinds, width, np.append(orders, c))
        gain = moments[:-1] - moments[-1]
        total = np.abs(orders) * sum(n * abs(a.offset) for a, n in kinds) + np.abs(gain)
        gain = np.where(total < 1e12, gain, np.inf)
        up = orders > c
        above = (gain - (orders - c) * last)[up].min(initial=0.0)
        below = (gain + (c - orders) * first)[~up].min(initial=0.0)
        outside = tuple(1.01 * math.exp(min(float(v), 0.0)) for v in (below, above))
        return Law(kinds, width, first, size, c, (outside[0], outside[1]))

    def _window(self, counts: Array, level: int) -> tuple[float, int]:
        """(first loss, points) of the window of a bunch of which ``level`` is summed."""
        times = (len(self._layout.widths) - level) * math.log(self._layout.bunches)
        first, last = self._moments[1].window(counts, self._layout.outside + 2 + times)
        points = (last - first) / self._layout.widths[level - 1] + 2
        return first, 1 << min(max(math.ceil(math.log2(points)), 6), _LARGEST)


def _counted(atoms: Counted, counts: Array) -> list[tuple[Atoms, int]]:
    return [(atom, int(n)) for (atom, _), n in zip(atoms, counts, strict=True) if n]


def _coarser(bunch: Law, width: float, put: Put) -> tuple[Atoms, float, float, float]:
    """(a bunch's atoms on a coarse grid, log of what their masses are over, errors).

    The errors are a relative one, and the tilted probability of sums that rounding or wrapping
    drowns: those are left out, for the moments' sake.
    """
    k = int(np.argmax(bunch.weight))
    middle = float(bunch.loss[k])
    loss = bunch.width * (np.arange(bunch.loss.size, dtype=np.float64) - k)
    kept = bunch.weight > bunch.error / math.sqrt(loss.size)
    # What was wrapped lies at the window's ends.
    kept &= np.minimum(np.cumsum(bunch.weight), np.cumsum(bunch.weight[::-1])[::-1]) > bunch.alias
    # Nor is what has no float without the tilt.
    kept &= np.abs(bunch.c * loss) < 600
    kept[k] = True
    pair = Summed(loss[kept], bunch.weight[kept] * np.exp(-bunch.c * loss[kept]))
    atom = put(pair, width, float(pair.loss[0]), float(pair.loss[-1]), 1e-9)
    inexact = 8 * _U * (1 + abs(bunch.log_scale) + (1 + bunch.c) * 2 * bunch.reach)
    moved = replace(atom, offset=atom.offset + middle)
    return moved, bunch.log_scale - bunch.c * middle, inexact, float(bunch.weight[~kept].sum())
