"""Pairs of finitely many losses on a grid, above and below a dominating pair (docs/certificate.md).

Above: the mass between two grid points goes to both of them such that its probability under both
laws is kept (Doroshenko et al. 2022, "Connect the dots", arXiv:2207.04380v2, Section 4). Below: a
cell is merged into one outcome, which is post-processing, and that outcome is split between its two
neighbours on the grid where the cell's own profile is found to lie above the split one's.

Where a record is rarely drawn nearly every loss is tiny and a few are large: one grid for both is
long. A step is dominated by two released together: which of the two it is, with a large loss if it
is one (``Outer``), and always a small loss (``Inner``; Theorem 9).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxdp.accounting.base import Array, Masses, Pair, Unresolved

Index = NDArray[np.int64]
_U = 2.0**-53
# Grid widths of a merged cell: two are the least for which the split of an evenly filled cell lies
# below its profile.
CELL = 2.4


@dataclass(frozen=True)
class Atoms:
    """Losses on the grid ``offset + index * width``, of one step.

    Attributes:
        index: [m] integers.
        mass: [m] P masses; the Q mass of each is that times e^-loss.
        offset: loss of index 0.
        top: the losses above it, and infinite ones, are in no atom.
        over: (P, Q) masses of those: rounded up and down, or below a pair down and up.
    """

    index: np.ndarray
    mass: Array
    offset: float
    top: float
    over: tuple[float, float]


def above(pair: Pair, width: float, low: float, cap: float, fine: float) -> Atoms:
    """Atoms that dominate the pair (docs/certificate.md, Theorem 2).

    Args:
        pair: one step.
        width: of the grid.
        low: the least loss of interest; smaller ones are rounded up to it.
        cap: the largest; larger ones are in ``over``.
        fine: width of a cell over its distance from the point mass, where that is far.
    """
    offset, r = pair.center, pair.rounding
    right = _spaced((cap - offset) / width, fine)
    left = _spaced((offset - low) / width, fine)
    index = np.concatenate([-left[:0:-1], right])
    loss = offset + index * width
    gap = np.diff(index) * width
    # The highest cell ends at the cap, so that ``over`` is the same on every grid.
    ends = np.append(np.minimum(loss[:-1], cap), cap)
    p, q, gain, error, base = pair.masses(ends)
    with np.errstate(over="ignore", invalid="ignore"):
        at = np.expm1(loss[:-1] - base)
        up = (gain - q * at + error + r * q * np.abs(at)) / -np.expm1(-gap)
    # A subnormal mass has no digits.
    up = np.where(q > 1e-290, np.nan_to_num(up, nan=np.inf) + 4 * _U * p, p)
    up = np.clip(up, 0.0, p)
    mass = np.zeros(index.size)
    mass[1:] += up
    mass[:-1] += p - up
    mass[0] += pair.masses(np.asarray([-np.inf, loss[0]])).p[0]
    top = np.asarray(pair.tails(ends[-1:])).ravel()
    over = float(top[0]) * (1 + 2 * r), float(top[1]) * (1 - 2 * r)
    # An edge is off by its own rounding, and by what the pair says.
    slack = 8 * _U * float(np.abs(ends).max()) + pair.slack(ends)
    return Atoms(index.astype(np.int64), mass * (1 + 2 * r), offset + slack, float(ends[-1]), over)


def below(pair: Pair, width: float, low: float, cap: float, fine: float) -> Atoms:
    """Atoms that the pair dominates (docs/certificate.md, Theorem 3); otherwise as ``above``."""
    center, r = pair.center, pair.rounding
    half = 0.5 * CELL
    right = CELL * _spaced(max((cap - center) / width - half, 1.0) / CELL, fine)
    left = CELL * _spaced(max((center - low) / width - half, 1.0) / CELL, fine)
    edges = center + width * np.concatenate([-left[::-1] - half, right + half])
    # As above, the highest cell ends at the cap.
    edges = np.append(edges[edges < cap], cap)
    cells = _Merged(pair, edges, center, width)
    if cells.lost() > 1e-5 * width and edges.size > 2:
        # Cells that are filled on one side only, such as the lowest, go with their neighbours.
        bad = np.flatnonzero(~cells.good & (cells.up > 1e-5))
        again = np.delete(edges, np.minimum(bad + (edges[bad] < center), edges.size - 2))
        cells = min(cells, _Merged(pair, again, center, width), key=_Merged.lost)
    up = np.where(cells.good, cells.up, 0.0)
    indices = np.concatenate([cells.index, cells.index + 1])
    mass = np.concatenate([cells.p - up, up]) * (1 - 3 * r - 16 * _U)
    tails = np.asarray(pair.tails(edges[-1:])).ravel()
    over = float(tails[0]) * (1 - 2 * r), float(tails[1]) * (1 + 2 * r)
    kept = mass > 0
    return Atoms(
        indices[kept].astype(np.int64),
        mass[kept],
        cells.offset - (4 * _U * float(np.abs(edges).max()) + pair.slack(edges)),
        float(edges[-1]),
        over,
    )


def merged(pair: Pair, width: float, low: float, cap: float, fine: float) -> tuple[Array, Array]:
    """(losses, their P masses), [m] each, that the pair dominates: every cell as one outcome.

    They lie on no grid; arguments as for ``above``.
    """
    center, r = pair.center, pair.rounding
    right, left = (_spaced(reach / width, fine) for reach in (cap - center, center - low))
    edges = center + width * np.concatenate([-left[:0:-1], right])
    masses = pair.masses(edges)
    loss = _merged(masses, edges[:-1], r) - (
        4 * _U * float(np.abs(edges).max()) + pair.slack(edges)
    )
    kept = np.isfinite(loss) & (masses.p > 1e-290)
    return loss[kept], masses.p[kept] * (1 - 3 * r - 16 * _U)


class _Merged:
    """Cells as one outcome each, and their splits between two points of the grid.

    Attributes:
        offset: loss of index 0: that of the merged cell in the middle.
        index: [m] index of the lower of the two points.
        p: [m] P mass.
        up: [m] what of it goes to the upper point.
        good: [m] True where the split is found to lie below the cell's own profile.
    """

    def __init__(self, pair: Pair, edges: Array, center: float, width: float) -> None:
        self._pair, self._width = pair, width
        masses = pair.masses(edges)
        p, loss = masses.p, _merged(masses, edges[:-1], pair.rounding)
        near = int(np.searchsorted(edges, center)) - 1
        middle = float(loss[min(max(near, 0), loss.size - 1)])
        self.offset = middle if np.isfinite(middle) else center
        kept = np.isfinite(loss) & (p > 1e-290)
        self.p, loss = np.where(kept, p, 0.0), np.where(kept, loss, edges[:-1])
        self.index = np.floor((loss - self.offset) / width)
        grid = self.offset + self.index * width
        self.up = np.clip(self.p * np.expm1(grid - loss) / np.expm1(-width), 0.0, self.p)
        self.good: NDArray[np.bool_] = self.up <= 4 * _U * self.p
        self.up = np.where(self.good, 0.0, self.up)
        share = np.nan_to_num(self.up / np.maximum(self.p, 1e-300) * np.exp(loss - grid - width))
        first, last = edges[:-1].copy(), edges[1:].copy()
        cut = last - (last - first) * np.clip(share, 0.0, 1.0)
        for _ in range(8):
            left = np.flatnonzero(~self.good & (self.up > 1e-6 * self.p))
            if not left.size:
                break
            low = self._try(left, edges, cut[left], grid[left])
            first[left[low]], last[left[~low]] = cut[left[low]], cut[left[~low]]
            cut[left] = 0.5 * (first[left] + last[left])

    def lost(self) -> float:
        """The mean loss given up by the cells that are rounded down whole."""
        return float(self._width * (self.up * ~self.good).sum())

    def _try(self, left: Index, edges: Array, cut: Array, grid: Array) -> NDArray[np.bool_]:
        """Marks the cells of ``left`` of whose profile a tangent lies above the split's profile.

        The part of a cell beyond a cut has P* - u Q* in u = e^epsilon, a tangent of the cell's
        profile. The split's profile is a line between its points, so that its ends decide.

        Returns:
            [k] True where a cut that is too low was the reason for the failure.
        """
        last = edges[left + 1]
        cut = np.clip(cut, edges[left], last)
        masses = self._pair.masses(np.stack([cut, last], axis=1).ravel())
        q, gain, error = (v[::2] for v in masses[1:4])
        base = np.broadcast_to(masses.base, masses.p.shape)[::2]
        up, r = self.up[left], self._pair.rounding
        with np.errstate(over="ignore", invalid="ignore"):
            near, far = np.expm1(grid - base), np.expm1(grid + self._width - base)
            slack = error + 3 * r * (q * np.abs(far) + up * self._width)
            slack += 4 * _U * self.p[left] * self._width
            at_far = gain - q * far - slack
            at_near = gain - q * near - slack + up * np.expm1(-self._width)
        self.good[left] = (at_far >= 0) & (at_near >= 0)
        return np.asarray(at_far < 0)


def _merged(masses: Masses, least: Array, r: float) -> Array:
    """A lower bound on the loss of each merged cell, [m]: log p/q, or its smallest loss."""
    p, q, gain, error, base = masses
    known = (p > 1e-290) & (q > 1e-290)
    q = np.where(known, q, 1.0)
    ratio = np.where(known, np.maximum((gain - error) / q, -1.0), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        small = np.log1p(np.maximum(ratio - r * np.abs(ratio), -1.0))
        large = np.log(np.where(known, p, 1.0) / q) - 2 * r
    value = np.where(np.abs(ratio) < 1, small, large)
    value += base - 4 * _U * (np.abs(value) + np.abs(base))
    # Beyond a loss of about 660 the second law underflows.
    return np.asarray(np.where(known, value, least))


def _spaced(last: float, fine: float) -> Array:
    """Integers from 0 to at least ``last``: by ones up to 1/fine, then geometrically.

    Raises:
        Unresolved: they are beyond int64.
    """
    last = max(float(np.ceil(last)), 1.0)
    if not last < 2.0**60:
        raise Unresolved("losses too far apart for one grid")
    dense = min(last, np.ceil(1 / fine))
    index: Array = np.arange(dense + 1)
    if last > dense:
        count = int(np.ceil(np.log(last / dense) / np.log1p(fine)))
        far = np.round(dense * (last / dense) ** (np.arange(1, count + 1) / count))
        index = np.append(index, far[np.diff(far, prepend=dense) > 0])
    return index


class Inner(Pair):
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

    def __init__(self, pair: Pair, low: float, high: float) -> None:
        self.pair, self.low, self.high = pair, low, high
        self.small = [float(v[0]) for v in pair.masses(np.asarray([low, high]))[:4]]
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

    def masses(self, edges: Array) -> Masses:
        """As ``Pair.masses``."""
        p, q, gain, error = self.pair.masses(self._inside(edges))[:4]
        total, other = self.small[:2]
        moved = q * self.ratio
        size = np.abs(gain) + np.abs(moved) + q * self.doubt
        off = (error + self.rounding * size) / total
        return Masses(p / total, q / other, (gain - moved) / total, off)

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """As ``Pair.tails``."""
        first, last = self.pair.tails(self._inside(losses)), self.pair.tails(self._inside(np.inf))
        return (first[0] - last[0]) / self.small[0], (first[1] - last[1]) / self.small[1]

    def span(self, tail: float) -> tuple[float, float]:
        """As ``Pair.span``."""
        return self.low - self.shift, self.high - self.shift

    def slack(self, edges: Array) -> float:
        """As ``Pair.slack``."""
        return self.doubt + self.pair.slack(self._inside(edges))

    def _inside(self, losses: Array | float) -> Array:
        losses = np.atleast_1d(losses)
        # Rounding must not leave the largest small loss out.
        last = losses >= self.high - self.shift
        return np.clip(np.where(last, self.high, losses + self.shift), self.low, self.high)


class Outer(Pair):
    """The pair of a step's other losses, and of the event that the loss is small.

    Args:
        inner: the small losses of the same step.
    """

    def __init__(self, inner: Inner) -> None:
        self.inner, self.center = inner, inner.shift
        self.rounding = inner.pair.rounding

    def masses(self, edges: Array) -> Masses:
        """As ``Pair.masses``."""
        least = self.inner.pair.masses(np.minimum(edges, self.inner.low))
        largest = self.inner.pair.masses(np.maximum(edges, self.inner.high))
        here = (edges[:-1] < self.center) & (edges[1:] >= self.center)
        p, q, gain, error = (
            a + b + here * small
            for a, b, small in zip(least[:4], largest[:4], self.inner.small, strict=True)
        )
        return Masses(p, q, gain, error + 4 * _U * np.abs(gain))

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """As ``Pair.tails``."""
        high = np.where(losses < self.center, self.inner.low, np.maximum(losses, self.inner.high))
        return self.inner.pair.tails(np.where(losses < self.inner.low, losses, high))

    def span(self, tail: float) -> tuple[float, float]:
        """As ``Pair.span``."""
        return self.inner.pair.span(tail)

    def slack(self, edges: Array) -> float:
        """As ``Pair.slack``."""
        return self.inner.doubt + self.inner.pair.slack(edges)

    def chance(self) -> float:
        """Upper bound on the probability of a large loss."""
        pair, ends = self.inner.pair, np.asarray([-np.inf, self.inner.low])
        above = float(pair.tails(np.asarray([self.inner.high]))[0][0])
        return (float(pair.cells(ends)[0][0]) + above) * (1 + 2 * pair.rounding)
