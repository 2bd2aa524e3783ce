"""Losses on a grid, above and below a dominating pair, and the law of a sum of many.

docs/proofs/certificate.md holds the argument; ``certificate`` asks for what is here in this order.

1. ``dominating_atoms``: the mass between two grid points goes to both of them such that its
   probability under both laws is kept (Doroshenko et al. 2022, "Connect the dots",
   arXiv:2207.04380v2, Section 4; Theorem 2). ``dominated_atoms``: a cell is merged into one
   outcome, which is post-processing, and that outcome is split between its two neighbours on the
   grid where the cell's own profile is found to lie above the split one's (Theorem 3).
2. Where a record is rarely drawn nearly every loss is tiny and a few are large: one grid for both
   is long. A step is dominated by two released together: which of the two it is, with a large loss
   if it is one (``LargeLosses``), and always a small loss (``SmallLosses``; Theorem 9).
3. ``law_of_sum`` adds up all steps. ``Law`` is one tilted FFT whose rounding is bounded (Theorems 6
   and 7). Many steps are summed in bunches, whose law is a pair again (``BunchPair``) and is put on
   a coarser grid (Theorem 8).
4. ``profile_of`` reads delta off the law, or off its transform, with its error.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jaxdp.accounting.events import Array, Unresolved
from jaxdp.accounting.pairs import Masses, Pair

_U = 2.0**-53
OUTSIDE = 14.0  # nats: tilted probability that a window leaves outside
_LARGEST_BUNCH = 21  # log2 of the points of a bunch
_ORDER_STEPS = (0, 2, 4, 6, 9, 13, 18, 24, 30, 36)  # orders between the best of coarse losses and c
# Grid widths of a merged cell: two are the least for which the split of an evenly filled cell lies
# below its profile.
CELL = 2.4


@dataclass(frozen=True)
class Atoms:
    """Losses on the grid ``offset + index * width``, of one step."""

    index: np.ndarray  # [m] integers
    mass: Array  # [m] P masses; the Q mass of each is that times e^-loss
    offset: float  # loss of index 0
    top: float  # the losses above it, and infinite ones, are in no atom
    # (P, Q) masses of those: rounded up and down, or below a pair down and up.
    over: tuple[float, float]


def dominating_atoms(pair: Pair, width: float, low: float, cap: float, fine: float) -> Atoms:
    """Atoms that dominate the pair (docs/proofs/certificate.md, Theorem 2).

    Args:
        pair: one step.
        width: of the grid.
        low: the least loss of interest; smaller ones are rounded up to it.
        cap: the largest; larger ones are in ``over``.
        fine: width of a cell over its distance from the point mass, where that is far.
    """
    # Grid points one width apart about the point mass, and geometrically further apart where hardly
    # anything lies.
    offset, r = pair.center, pair.rounding
    right = _grid_indices((cap - offset) / width, fine)
    left = _grid_indices((offset - low) / width, fine)
    index = np.concatenate([-left[:0:-1], right])
    loss = offset + index * width
    gap = np.diff(index) * width
    # The highest cell ends at the cap, so that ``over`` is the same on every grid.
    ends = np.append(np.minimum(loss[:-1], cap), cap)
    # Mass at l in a cell [a, b] is split so that both laws keep theirs: (1 - e^(a - l)) / (1 -
    # e^(a - b)) of it goes to b. Summed over the cell that is (gain - q (e^a - 1)) / (1 - e^(a -
    # b)), and rounding up what goes to b only dominates more.
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


def dominated_atoms(pair: Pair, width: float, low: float, cap: float, fine: float) -> Atoms:
    """Atoms that the pair dominates (docs/proofs/certificate.md, Theorem 3).

    Arguments as for ``dominating_atoms``.
    """
    # Cells of ``CELL`` grid widths, one of them about the point mass, each merged into one outcome.
    center, r = pair.center, pair.rounding
    half = 0.5 * CELL
    right = CELL * _grid_indices(max((cap - center) / width - half, 1.0) / CELL, fine)
    left = CELL * _grid_indices(max((center - low) / width - half, 1.0) / CELL, fine)
    edges = center + width * np.concatenate([-left[::-1] - half, right + half])
    # As above, the highest cell ends at the cap.
    edges = np.append(edges[edges < cap], cap)
    cells = _split_cells(pair, edges, center, width)
    if cells.lost > 1e-5 * width and edges.size > 2:
        # Cells that are filled on one side only, such as the lowest, go with their neighbours.
        bad = np.flatnonzero(~cells.good & (cells.up > 1e-5))
        again = np.delete(edges, np.minimum(bad + (edges[bad] < center), edges.size - 2))
        other = _split_cells(pair, again, center, width)
        cells = other if other.lost < cells.lost else cells
    # What is not found to lie below the cell's profile is rounded down whole.
    up = np.where(cells.good, cells.up, 0.0)
    indices = np.concatenate([cells.index, cells.index + 1])
    mass = np.concatenate([cells.p - up, up]) * (1 - 3 * r - 16 * _U)
    tails = np.asarray(pair.tails(edges[-1:])).ravel()
    over = float(tails[0]) * (1 - 2 * r), float(tails[1]) * (1 + 2 * r)
    kept = mass > 0
    index, slack = indices[kept].astype(np.int64), 4 * _U * float(np.abs(edges).max())
    offset = cells.offset - (slack + pair.slack(edges))
    return Atoms(index, mass[kept], offset, float(edges[-1]), over)


def merge_cells(
    pair: Pair, width: float, low: float, cap: float, fine: float
) -> tuple[Array, Array]:
    """(losses, their P masses), [m] each, that the pair dominates: every cell as one outcome.

    They lie on no grid; arguments as for ``dominating_atoms``.
    """
    center, r = pair.center, pair.rounding
    right, left = (_grid_indices(reach / width, fine) for reach in (cap - center, center - low))
    edges = center + width * np.concatenate([-left[:0:-1], right])
    masses = pair.masses(edges)
    slack = 4 * _U * float(np.abs(edges).max()) + pair.slack(edges)
    loss = _merged_loss(masses, edges[:-1], r) - slack
    kept = np.isfinite(loss) & (masses.p > 1e-290)
    return loss[kept], masses.p[kept] * (1 - 3 * r - 16 * _U)


@dataclass(frozen=True)
class _Cells:
    """Cells as one outcome each, and their splits between two points of the grid."""

    offset: float  # loss of index 0: that of the merged cell in the middle
    index: Array  # [m] index of the lower of the two points
    p: Array  # [m] P mass
    up: Array  # [m] what of it goes to the upper point
    good: NDArray[np.bool_]  # [m] True where the split is found to lie below the cell's own profile
    lost: float  # the mean loss given up by the cells that are rounded down whole


def _split_cells(pair: Pair, edges: Array, center: float, width: float) -> _Cells:
    """Merges the cells between ``edges`` and splits each outcome as far as its profile allows."""
    # The grid's origin is the merged cell about the point mass, which then needs no split.
    masses = pair.masses(edges)
    p, loss = masses.p, _merged_loss(masses, edges[:-1], pair.rounding)
    near = int(np.searchsorted(edges, center)) - 1
    middle = float(loss[min(max(near, 0), loss.size - 1)])
    offset = middle if np.isfinite(middle) else center
    kept = np.isfinite(loss) & (p > 1e-290)
    p, loss = np.where(kept, p, 0.0), np.where(kept, loss, edges[:-1])
    index = np.floor((loss - offset) / width)
    grid = offset + index * width
    up = np.clip(p * np.expm1(grid - loss) / np.expm1(-width), 0.0, p)
    good: NDArray[np.bool_] = up <= 4 * _U * p
    up = np.where(good, 0.0, up)

    # The part of a cell beyond a cut has P* - u Q* in u = e^epsilon, a tangent of the cell's
    # profile. The split's profile is a line between its two points, so that their ends decide.
    # The cut is found by bisection, all cells at once.
    share = np.nan_to_num(up / np.maximum(p, 1e-300) * np.exp(loss - grid - width))
    first, last = edges[:-1].copy(), edges[1:].copy()
    cut = last - (last - first) * np.clip(share, 0.0, 1.0)
    r = pair.rounding
    for _ in range(8):
        left = np.flatnonzero(~good & (up > 1e-6 * p))
        if not left.size:
            break
        end = edges[left + 1]
        at = np.clip(cut[left], edges[left], end)
        masses = pair.masses(np.stack([at, end], axis=1).ravel())
        q, gain, error = (v[::2] for v in masses[1:4])
        base = np.broadcast_to(masses.base, masses.p.shape)[::2]
        with np.errstate(over="ignore", invalid="ignore"):
            lower, upper = np.expm1(grid[left] - base), np.expm1(grid[left] + width - base)
            slack = error + 3 * r * (q * np.abs(upper) + up[left] * width)
            slack += 4 * _U * p[left] * width
            at_far = gain - q * upper - slack
            at_near = gain - q * lower - slack + up[left] * np.expm1(-width)
        good[left] = (at_far >= 0) & (at_near >= 0)
        low = at_far < 0  # a cut that is too low was the reason for the failure
        first[left[low]], last[left[~low]] = cut[left[low]], cut[left[~low]]
        cut[left] = 0.5 * (first[left] + last[left])
    return _Cells(offset, index, p, up, good, float(width * (up * ~good).sum()))


def _merged_loss(masses: Masses, least: Array, r: float) -> Array:
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


def _grid_indices(last: float, fine: float) -> Array:
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


class SmallLosses(Pair):
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
        p, q, gain, error = self.pair.masses(self._inside(edges))[:4]
        total, other = self.small[:2]
        moved = q * self.ratio
        size = np.abs(gain) + np.abs(moved) + q * self.doubt
        off = (error + self.rounding * size) / total
        return Masses(p / total, q / other, (gain - moved) / total, off)

    def tails(self, losses: Array) -> tuple[Array, Array]:
        first, last = self.pair.tails(self._inside(losses)), self.pair.tails(self._inside(np.inf))
        return (first[0] - last[0]) / self.small[0], (first[1] - last[1]) / self.small[1]

    def span(self, tail: float) -> tuple[float, float]:
        return self.low - self.shift, self.high - self.shift

    def slack(self, edges: Array) -> float:
        return self.doubt + self.pair.slack(self._inside(edges))

    def _inside(self, losses: Array | float) -> Array:
        """The step's own losses at these shifted ones, clipped to (low, high]."""
        losses = np.atleast_1d(losses)
        # Rounding must not leave the largest small loss out.
        last = losses >= self.high - self.shift
        return np.clip(np.where(last, self.high, losses + self.shift), self.low, self.high)


class LargeLosses(Pair):
    """The pair of a step's other losses, and of the event that the loss is small."""

    def __init__(self, inner: SmallLosses) -> None:
        self.inner, self.center = inner, inner.shift
        self.rounding = inner.pair.rounding

    def masses(self, edges: Array) -> Masses:
        least = self.inner.pair.masses(np.minimum(edges, self.inner.low))
        largest = self.inner.pair.masses(np.maximum(edges, self.inner.high))
        here = (edges[:-1] < self.center) & (edges[1:] >= self.center)
        parts = zip(least[:4], largest[:4], self.inner.small, strict=True)
        p, q, gain, error = (a + b + here * small for a, b, small in parts)
        return Masses(p, q, gain, error + 4 * _U * np.abs(gain))

    def tails(self, losses: Array) -> tuple[Array, Array]:
        high = np.where(losses < self.center, self.inner.low, np.maximum(losses, self.inner.high))
        return self.inner.pair.tails(np.where(losses < self.inner.low, losses, high))

    def span(self, tail: float) -> tuple[float, float]:
        return self.inner.pair.span(tail)

    def slack(self, edges: Array) -> float:
        return self.inner.doubt + self.inner.pair.slack(edges)

    def chance(self) -> float:
        """Upper bound on the probability of a large loss."""
        pair, ends = self.inner.pair, np.asarray([-np.inf, self.inner.low])
        above = float(pair.tails(np.asarray([self.inner.high]))[0][0])
        return (float(pair.masses(ends).p[0]) + above) * (1 + 2 * pair.rounding)


AtomCounts = Sequence[tuple[Atoms, int]]
AtomsOfWidth = Callable[[float], AtomCounts]  # from the width of a grid to the atoms on it
Discretize = Callable[[Pair, float, float, float, float], Atoms]


def expm1_or_inf(rate: float) -> float:
    """e^rate - 1; infinite, an error that leaves nothing known, where that is beyond floats."""
    return math.expm1(rate) if rate < 700 else math.inf


def log_moments(atoms: AtomCounts, width: float, orders: Array) -> Array:
    """log E[exp(order * sum)] of the sums of atoms, [k]; -inf where there is no atom."""
    total: Array = np.zeros(orders.size)
    for atom, n in atoms:
        with np.errstate(divide="ignore"):
            log_mass = np.log(atom.mass)
        exponent = orders[:, None] * (width * atom.index) + log_mass
        peak = exponent.max(axis=1)
        total += n * (orders * atom.offset + peak)
        # Subnormal numbers are slow: no term is less than e^-700 of the largest.
        terms = np.exp(np.maximum(exponent - peak[:, None], -700.0))
        total += n * np.log(terms.sum(axis=1))
    return total


class Law:
    """The law of a sum of losses, tilted by exp(c loss), on ``size`` points of a grid.

    Attributes:
        first: the least loss.
        last: the largest.
        width: of their grid.
        size: number of its points.
        values: [k] complex; the law's transform at its lowest frequencies. It is negligible at
            the others.
        c: the tilt.
        log_scale: log E[exp(c sum)], the sum without the tilt.
        inexact: bound on the l2 norm of the error by rounding of the law with these ``values``.
        error: the same of ``weight``.
        relative: bound on a relative error of all weights together.
        alias: bound on the tilted probability outside the window, which is wrapped into it.
        above: bound on the part of that which lies above the window.
    """

    def __init__(
        self,
        atoms: AtomCounts,
        width: float,
        first: float,
        size: int,
        c: float,
        outside: tuple[float, float],
    ) -> None:
        """Convolves the atoms.

        Args:
            atoms: (losses of a step, number of such steps).
            width: of the grid.
            first: about the smallest loss of the window.
            size: number of points, a power of two.
            c: the tilt.
            outside: bounds on the tilted probability below and above the window.

        Raises:
            Unresolved: a step has no loss on so coarse a grid, or one beyond all digits.
        """
        self.c, self.alias, self.above = c, outside[0] + outside[1], outside[1]
        self.width, self.size = width, size
        self.offset = math.fsum(n * a.offset for a, n in atoms)
        self.start = math.floor((first - self.offset) / width)
        self.first = self.offset + width * self.start
        self.last = self.offset + width * (self.start + size - 1)
        self.reach = abs(self.first) + abs(self.last) + sum(n * abs(a.offset) for a, n in atoms)
        self.log_scale, self.relative = c * self.offset, 16 * _U * (1 + c * self.reach)
        # Error of an FFT of a power of two, over the input's norm: l2 of l2, or largest of l1.
        # Higham 2002, "Accuracy and Stability of Numerical Algorithms", Theorem 24.2, with twiddle
        # factors good to an ulp; each output is a sum over paths of log2(size) factors, hence also
        # by l1.
        self._transform = math.log2(size) * 8 * _U
        tilted = []
        for atom, n in atoms:
            if n == 0:
                continue
            law, log_total, largest = tilt(atom, c * width)
            self.log_scale += n * log_total
            self.relative += n * (4 * _U * (largest + abs(log_total) + 8) + 1e-30 * law.size)
            tilted.append((atom.index, law, n))
        # Only frequencies at which the product is not negligible are kept. Where a bound says that
        # those are few and the lowest, they are computed one by one.
        few = low_frequencies(tilted, size)
        live = np.arange(few or size // 2 + 1)
        logs, turned = np.zeros(live.size, dtype=complex), np.zeros(live.size)
        lines: list[tuple[int, Array, Array, float, float]] = []
        for index, law, n in tilted:
            # Without the mass at 0, whose transform is 1: what is left may be tiny.
            if few:
                moved, doubt = _transform_at(index, law, size, few)
                moved, doubt, l2, largest = moved[live], doubt[live], math.inf, float(doubt[-1])
            else:
                line = np.bincount(np.append(index % size, 0), np.append(law, -1.0), size)
                moved, l1 = np.fft.rfft(line)[live], float(np.abs(line).sum())
                l2 = self._transform * math.sqrt(float(line @ line))
                doubt = np.full(live.size, self._transform * l1)
                largest = min(self._transform * l1, l2 * math.sqrt(size))
                self.relative += n * _U * int(np.bincount(index % size).max())
            square = 2 * moved.real + moved.real**2 + moved.imag**2
            kept = n * square / 2 + logs.real > -70
            live, moved, square, doubt = live[kept], moved[kept], square[kept], doubt[kept]
            modulus = np.log(np.maximum(np.abs(1 + moved), 1e-300))
            real = np.where(square > -0.5, 0.5 * np.log1p(np.maximum(square, -0.5)), modulus)
            imag = np.arctan2(moved.imag, 1 + moved.real)
            logs = logs[kept] + n * (real + 1j * imag)
            turned = turned[kept] + n * (np.abs(real) + np.abs(imag))
            lines = [(m, r[kept], d[kept], *rest) for m, r, d, *rest in lines]
            lines.append((n, real, doubt, l2, largest))
        self.relative = expm1_or_inf(self.relative + 4 * _U * abs(self.log_scale))
        values = np.exp(logs)
        self.values = np.zeros(int(live.max(initial=0)) + 1, dtype=complex)
        self.values[live] = values
        both = np.where((live == 0) | (2 * live == size), 1.0, 2.0) / size
        # Parseval: l2 norms of the law and of how far off it may be.
        self._norm = math.sqrt(float(both @ np.abs(values) ** 2))
        off = math.sqrt(float(both @ (np.abs(values) * (16 + 16 * turned)) ** 2)) * _U
        self.inexact = off + 1e-28
        for n, real, doubt, l2, largest in lines:
            # One factor of the product less, and a modulus above 1 by rounding grows with n.
            rest = np.exp(np.minimum(logs.real - real, 0.0)) * doubt
            growth = 1 + expm1_or_inf(2 * n * largest)
            self.inexact += n * min(l2, math.sqrt(float(both @ (rest * rest)))) * growth
        self.error = self.inexact + 2 * self._transform * self._norm

    @functools.cached_property
    def loss(self) -> Array:
        """[size] increasing."""
        return self.offset + self.width * (self.start + np.arange(self.size, dtype=np.float64))

    @functools.cached_property
    def weight(self) -> Array:
        """[size] the tilted probability of each loss, over exp(log_scale - c reference)."""
        weight = np.fft.irfft(self.values, self.size)
        return np.maximum(np.roll(weight, -(self.start % self.size)), 0.0)

    def cells(self, points: int) -> tuple[Array, Array, Array, float]:
        """Sums over runs of ``points`` losses, a divisor of ``size``, without the tilt's scale.

        Returns:
            The first loss of each, [size/points]; the sums of weights; those of weights times
            1 - e^-(loss - first); a bound on the l2 error that the last two add to ``inexact``.
        """
        count, k = self.size // points, np.arange(self.values.size)
        turn = 2j * math.pi / self.size * k
        # Geometric series, in a window that begins at its first loss.
        moved = np.exp(2j * math.pi / self.size * (self.start % self.size * k % self.size))
        moved *= self.values * np.where((k == 0) | (2 * k == self.size), 1.0, 2.0) / points
        bottom = np.where(k == 0, 1.0, np.expm1(turn))
        total = np.where(k == 0, points, np.expm1(points * turn) / bottom)
        least = turn - self.width
        second = np.expm1(points * least) / np.expm1(least) if points > 1 else total
        # Frequencies that agree on the coarse points are added up.
        terms = np.pad(moved * np.asarray([total, total - second]), ((0, 0), (0, -k.size % count)))
        weight, gain = np.fft.ifft(terms.reshape(2, -1, count).sum(axis=1)).real
        first = self.offset + self.width * (
            self.start + points * np.arange(count, dtype=np.float64)
        )
        # A few roundings of every term and those of the transform, by Parseval; a fold of r
        # frequencies grows no norm by more than the root of r.
        norm = points * float(np.linalg.norm(moved)) * math.sqrt(-(-k.size // count) / count)
        doubt = (2 * self._transform + 200 * _U) * norm
        return first, weight, gain, doubt


_Tilted = Sequence[tuple[NDArray[np.int64], Array, int]]  # indices, a law on them, and how many
_FEW = 1 << 12  # frequencies that are computed one by one at most
_BLOCK = 128  # terms of a sum


def low_frequencies(kinds: _Tilted, size: int) -> int:
    """A number of lowest frequencies beyond which the product is below e^-70; 0 if not few.

    Between two frequencies of a coarse transform |E e^(i y index)| rises by no more than the
    distance times the mean of |index - center|, for any center.
    """
    spread = []
    for index, law, _ in kinds:
        center = float(law @ index)
        spread.append(float(law @ np.abs(index - center)) * (1 + 1e-9))
    # As many points as make that rise small, within what costs little.
    needed = math.pi * max(spread, default=0.0) / 0.02 + 1
    points = 1 << min(max(math.ceil(math.log2(needed)), 9), 16)
    if 8 * points > size:
        return 0
    total: Array = np.zeros(points // 2 + 1)
    for (index, law, n), distance in zip(kinds, spread, strict=True):
        size_of = np.abs(np.fft.rfft(np.bincount(index % points, law, points)))
        total += n * np.log(np.minimum(size_of + (math.pi * distance / points + 1e-11), 1.0))
    last = int(np.flatnonzero(total > -71).max(initial=0))
    count = math.ceil((last + 0.5) * (size / points)) + 1
    # Sums one by one must cost less than FFTs.
    products = count * sum(index.size for index, _, _ in kinds)
    return count if count <= min(_FEW, size // 16) and products <= 16 * size * len(kinds) else 0


def _transform_at(
    index: NDArray[np.int64], law: Array, size: int, count: int
) -> tuple[NDArray[np.complex128], Array]:
    """(sums of law (e^(-2 pi i k index / size) - 1), k < count, and bounds on their errors).

    With E_a = e^(-i a angle) - 1, E_(a + b) = E_a E_b + E_a + E_b, so that the sums for k = a + b
    are a product of two matrices; every E_a keeps its digits where the angle is tiny.
    """
    angle = index * (2 * math.pi / size)
    columns = math.isqrt(count - 1) + 1
    sums = np.zeros((-(-count // columns), columns), dtype=complex)
    for i in range(0, angle.size, 32 * _BLOCK):
        some = angle[i : i + 32 * _BLOCK]
        # Sums of blocks of terms, then of those: their rounding grows with either number.
        pad = 0, -some.size % _BLOCK
        some, mass = np.pad(some, pad), np.pad(law[i : i + some.size], pad)
        half = 0.5 * some
        fine = _powers(-2 * np.sin(half) * (np.sin(half) + 1j * np.cos(half)), columns + 1)
        coarse = mass * _powers(fine[-1], sums.shape[0])
        fine = fine[:-1]
        left, right = (v.reshape(len(v), -1, _BLOCK).swapaxes(0, 1) for v in (coarse, fine))
        sums += (left @ right.swapaxes(1, 2)).sum(axis=0)
        sums += left.sum(axis=2).sum(axis=0)[:, None]
        sums += (right @ mass.reshape(-1, _BLOCK, 1))[:, :, 0].sum(axis=0)
    terms = 8 * _BLOCK + index.size / 32 + 16 * math.log2(count + 1)
    doubt = np.arange(count, dtype=np.float64) * (_U * terms * float(law @ np.abs(angle)))
    return np.asarray(sums.ravel()[:count], complex), doubt


def _powers(one: NDArray[np.complex128], count: int) -> NDArray[np.complex128]:
    """[count, m] (1 + one)^a - 1 for a < count, in about log2(count) steps each."""
    out = np.zeros((max(count, 2), one.size), dtype=complex)
    out[1] = one
    for a in range(2, count):
        first, second = out[a // 2], out[a - a // 2]
        out[a] = first * second + second + first
    return out[:count]


class TransformProfile:
    """delta(epsilon) = E[(1 - e^(epsilon - sum))+], from the transform of a tilted law.

    The payoff on the grid is a sum of geometric series from the first loss above epsilon to the
    last of the window, so that its transform is known in closed form; the sum of products of two
    laws is that of products of their transforms. For few frequencies; ``LawProfile`` is for many.
    """

    def __init__(self, law: Law) -> None:
        # Frequencies as rows of about as many columns: k = row * columns + column.
        self._law, count = law, law.values.size
        self._columns = math.isqrt(count - 1) + 1
        k = np.arange(-(-count // self._columns) * self._columns).reshape(-1, self._columns)
        self._digits = k[:, 0], k[0]
        both = np.where((k == 0) | (2 * k == law.size), 1.0, 2.0) / law.size
        weighed = np.where(k < count, both, 0.0) * np.resize(law.values, k.shape)
        c, width, turn = law.c, law.width, 2j * math.pi / law.size * k
        series = weighed / -np.expm1(turn - c * width)
        # What 1 - e^-x grows by in a step of the grid, and the same for all later ones.
        rise = np.exp(turn - c * width) * -math.expm1(-width)
        self._terms = series, series * rise / -np.expm1(turn - (1 + c) * width)
        self._moduli = [float(np.abs(terms).sum()) for terms in self._terms]
        self._slack = 2 * _U * (sum(k.shape) + 50)

    def __call__(self, epsilon: float, log_unit: float) -> tuple[float, float]:
        """(delta, bound on its error) over exp(log_unit)."""
        law, c = self._law, self._law.c
        # Beyond that scale the weights that decide are less than the smallest numbers.
        log_scale = law.log_scale - c * epsilon - log_unit
        if log_scale > 650:
            return 0.0, math.inf
        # The first point above epsilon, and that beyond the last one.
        start = max(math.floor((epsilon - law.offset) / law.width) + 1, law.start)
        end = law.start + law.size
        value = error = 0.0
        # What the rounding of losses and epsilon may move a distance by.
        off = 8 * _U * max(law.reach, abs(epsilon))
        if start < end:
            for point, sign in ((start, 1), (end, -1)):
                x = max(law.offset + law.width * point - epsilon, 0.0)
                turned, damped = self._turned(point), math.exp(-c * x)
                late = damped * math.exp(-x)
                # Two factors that depend on the distance, and their slopes.
                parts = damped * -math.expm1(-x), late
                slopes = late + c * parts[0], (1 + c) * late
                for i, terms in enumerate(self._terms):
                    series = float((terms * turned).real.sum(axis=1).sum())
                    value += sign * parts[i] * series
                    error += self._slack * parts[i] * self._moduli[i]
                    error += off * slopes[i] * abs(series)
                # A point on the wrong side of epsilon.
                if sign > 0 and not off < x < law.width - off:
                    error += 4 * off * damped * self._moduli[0]
        value = max(value, 0.0)
        error += (4 * _U * abs(log_unit) + c * off + law.relative) * value
        # max_x e^(-cx) (1 - e^-x), and the l2 norm of e^(-cx) (1 - e^-x) over the grid's x > 0.
        peak = math.exp(c * math.log(c) - (1 + c) * math.log1p(c))
        norm = math.sqrt(1 / (2 * c * (2 * c + 1) * (c + 1) * law.width) + peak * peak)
        beyond = math.exp(-c * max(law.last - epsilon, 0.0))
        error += law.inexact * norm + law.alias * peak + law.above * beyond
        scale = math.exp(log_scale)
        return value * scale, error * scale + 1e-300

    def _turned(self, point: int) -> NDArray[np.complex128]:
        """e^(2 pi i k point / size) of all k."""
        size = self._law.size
        rows, columns = (
            np.exp(2j * math.pi / size * (point % size * digit % size)) for digit in self._digits
        )
        return np.multiply.outer(rows, columns)


class LawProfile:
    """delta(epsilon) = E[(1 - e^(epsilon - sum))+], from sums over the tail of a tilted law."""

    def __init__(self, law: Law, reference: float) -> None:
        self._law, self._reference = law, reference
        # Only about the reference, where e^(-c x) is tame.
        self._least = reference - min(max(0.4 * reference, 1e-6), 300.0 / law.c)
        self._first = int(np.searchsorted(law.loss, self._least))
        self._loss = law.loss[self._first :]
        self._damped = law.weight[self._first :] * np.exp(-law.c * (self._loss - reference))
        self._mass = np.cumsum(self._damped[::-1])[::-1]
        # Of the second law at once, where e^(reference - loss) is tame too.
        below = (1 + law.c) * (reference - self._least)
        tame = max(float(law.last) - self._least, below) < 600
        second = np.exp(reference - self._loss) * self._damped if tame else np.empty(0)
        self._second = np.cumsum(second[::-1])[::-1]
        self._log_scale = law.log_scale - law.c * reference
        self._slack = 2 * _U * (self._loss.size + 300)

    def __call__(self, epsilon: float, log_unit: float) -> tuple[float, float]:
        """(delta, bound on its error) over exp(log_unit)."""
        law, c = self._law, self._law.c
        first, far = np.searchsorted(self._loss, [epsilon, epsilon + 45.0], side="right")
        # Beyond that scale the weights that decide are less than the smallest numbers.
        if epsilon < self._least or self._log_scale - log_unit > 650:
            return 0.0, math.inf
        ratio = epsilon - self._reference
        mass = float(self._mass[first]) if first < self._mass.size else 0.0
        # Beyond 45 nats the second law has less than e^-45 of the first.
        if first < self._second.size:
            moved = math.exp(ratio) * float(self._second[first])
        else:
            moved = float(self._damped[first:far] @ np.exp(epsilon - self._loss[first:far]))
        value = max(mass - moved, 0.0)
        # The rounding of losses, epsilon and the unit, as of a relative error.
        inexact = 4 * _U * ((1 + c) * law.reach + abs(log_unit))
        error = (self._slack + inexact + 3e-20) * (mass + moved) + law.relative * value
        # max_x e^(-cx) (1 - e^-x), and the l2 norm of e^(-cx) (1 - e^-x) over the grid's x > 0.
        peak = math.exp(c * math.log(c) - (1 + c) * math.log1p(c))
        norm = math.sqrt(1 / (2 * c * (2 * c + 1) * (c + 1) * law.width) + peak * peak)
        late = math.exp(-c * max(float(law.last) - epsilon, 0.0))
        outside = law.alias * peak + law.above * late
        there = math.exp(min(-c * ratio, 700.0))
        error += (law.error * norm + outside) * there + 1e-310 * (self._loss.size + norm)
        scale = math.exp(self._log_scale - log_unit)
        return value * scale, error * scale


def profile_of(law: Law, reference: float) -> Callable[[float, float], tuple[float, float]]:
    """(delta, bound on its error) over exp(log_unit), of epsilons from about ``reference`` on."""
    return TransformProfile(law) if law.values.size <= _FEW else LawProfile(law, reference)


def tilt(atom: Atoms, rate: float) -> tuple[Array, float, float]:
    """(law tilted by exp(rate * index), log of its total before, largest number in an exponent)."""
    with np.errstate(divide="ignore"):
        log_mass = np.log(atom.mass)
    exponent = log_mass + rate * atom.index
    peak = float(exponent.max(initial=-math.inf))
    if not math.isfinite(peak):
        raise Unresolved("no loss on the grid, or one beyond all digits")
    law = np.exp(np.maximum(exponent - peak, -700.0))
    total = math.fsum(law)
    heavy = exponent >= peak - 50
    largest = float((np.abs(log_mass) + rate * np.abs(atom.index))[heavy].max())
    return law / total, peak + math.log(total), largest


@dataclass(frozen=True)
class Layout:
    """The grids on which the law of a sum is computed."""

    # Of the only grid; or of that of the steps' losses and of that of the bunches'.
    widths: tuple[float, ...]
    bunches: int  # how many bunches make the sum
    size: int  # points of the window of the whole sum, a power of two
    points: float  # points of all windows together
    # (least, largest) small loss of each kind of steps; then the large ones are put on the last
    # grid at once, beside the sum of the small ones. Empty if all are on the first.
    small: tuple[tuple[float, float], ...] = ()
    # Nats of tilted probability that all windows of one grid leave outside.
    outside: float = OUTSIDE
    few: bool = False  # True where few frequencies are thought to matter on the only grid


class TiltedMoments:
    """Chernoff's bounds on sums of atoms, tilted by ``c``.

    Attributes:
        c: the tilt.
        orders: the orders on both sides of c at which they are tried, [k].
        gain: log E[exp((order - c) loss)] of the tilted losses of each kind, [kinds, k].
    """

    def __init__(self, atoms: AtomCounts, width: float, c: float) -> None:
        self.c = c
        if c == 0:
            far = np.geomspace(1e-3, 1e9, 37)
            self.orders = np.concatenate([-far[::-1], far])
        else:
            ratio = np.geomspace(0.02, 30, 15)
            self.orders = np.concatenate([c - ratio[::-1] * c, c + ratio * c])
        orders = np.append(self.orders, c)
        rows = [log_moments([(atom, 1)], width, orders) for atom, _ in atoms]
        self.gain = np.asarray([row[:-1] - row[-1] for row in rows])
        # Without digits: a difference of numbers that are too large.
        offsets = np.asarray([abs(atom.offset) for atom, _ in atoms])
        self._size = np.abs(self.orders) * offsets[:, None] + np.abs(self.gain)

    def of_sum(self, counts: Array) -> Array:
        """log E[exp((order - c) sum)] of the tilted sum, [k]; infinite where it has no digits."""
        used = counts > 0
        with np.errstate(over="ignore", invalid="ignore"):
            gain = counts[used] @ self.gain[used]
            size = counts[used] @ self._size[used]
        return np.where(size < 1e12, gain, np.inf)

    def window(self, counts: Array, nats: float) -> tuple[float, float]:
        """(first, last) loss of a window that leaves e^-nats of the tilted law on either side."""
        gain, c = self.of_sum(counts) + nats, self.c
        up, down = self.orders > c, self.orders < c
        last = (gain[up] / (self.orders[up] - c)).min()
        return float(-(gain[down] / (c - self.orders[down])).min()), float(last)


def law_of_sum(
    steps: AtomsOfWidth,
    put: Discretize,
    layout: Layout,
    moments: TiltedMoments,
    first: float,
    large: tuple[AtomsOfWidth, TiltedMoments] | None = None,
) -> Law:
    """The law of the sum of all steps' losses, tilted, on a window that begins at ``first``.

    A sum of n losses on one grid needs a grid as fine as sqrt(n) roundings ask for. So a run of
    many steps is first summed in bunches of n/r steps, in a window and on a grid of their own; the
    law of a bunch is put on a coarser grid, above or below; and r bunches are summed
    (docs/proofs/certificate.md, Theorem 8).

    Args:
        steps: those that are summed in bunches, if there are any.
        put: puts a bunch on a grid, above or below.
        layout: the grids.
        moments: of coarse atoms, from which windows and orders are chosen; with the tilt.
        first: about the least loss of the window.
        large: what is put on the coarser grid at once, and the moments without it.
    """
    atoms = steps(layout.widths[0])
    counts = np.asarray([n for _, n in atoms])
    if len(layout.widths) == 1:
        return _law_on_one_grid(atoms, moments, counts, layout.widths[0], first, layout.size)

    def counted(kinds: AtomCounts, some: Array) -> list[tuple[Atoms, int]]:
        """The atoms with these numbers instead, those of number 0 left out."""
        return [(atom, int(n)) for (atom, _), n in zip(kinds, some, strict=True) if n]

    # What is on the coarse grid at once: large losses, and the steps that fill no bunch.
    (fine, width), r = layout.widths, layout.bunches
    bunched = large[1] if large else moments
    rest = list(large[0](width)) if large else []
    part = counts // r
    if (counts % r).any():
        rest += counted(steps(width), counts % r)
    # One bunch, in a window of which r leave no more outside than the last one does.
    low, high = bunched.window(part, layout.outside + 2 + math.log(r))
    points = math.ceil(math.log2((high - low) / fine + 2))
    size = 1 << min(max(points, 6), _LARGEST_BUNCH)
    bunch = _law_on_one_grid(counted(atoms, part), bunched, part, fine, low, size)
    atom, log_scale, inexact, cut = _bunch_on_coarse_grid(bunch, width, put)
    found = _law_on_one_grid([(atom, r), *rest], moments, counts, width, first, layout.size)
    found.log_scale += r * log_scale
    found.relative += expm1_or_inf(r * (bunch.relative + inexact))
    # What was wrapped is missing in one place and too much in another. It is relative to a
    # total that the coarse atoms have but for their width.
    lost = r * (2 * bunch.alias + math.sqrt(bunch.loss.size) * bunch.error + cut)
    total = r * bunch.log_scale + float(log_moments(rest, width, np.asarray([moments.c]))[0])
    ratio = 1 + expm1_or_inf(max(total - found.log_scale, 0.0))
    found.alias += expm1_or_inf(lost) * ratio
    return found


def _law_on_one_grid(
    kinds: AtomCounts, hint: TiltedMoments, counts: Array, width: float, first: float, size: int
) -> Law:
    """The law of the kinds' sum, on one grid; ``hint`` and ``counts`` choose orders.

    What lies outside the window is bounded by Chernoff with moments of the same atoms.
    """
    c, last = hint.c, first + (size - 2) * width
    # The orders that may well give the best bounds below ``first`` and above ``last``. Sums of
    # coarser losses have larger moments at far orders.
    coarse, half = hint.of_sum(counts), hint.orders.size // 2
    above = np.where(hint.orders > c, coarse - (hint.orders - c) * last, np.inf)
    below = np.where(hint.orders < c, coarse + (c - hint.orders) * first, np.inf)
    best = int(np.argmin(above)), int(np.argmin(below))
    used = {max(best[0] - i, half) for i in _ORDER_STEPS}
    used |= {min(best[1] + i, half - 1) for i in _ORDER_STEPS}
    orders = hint.orders[sorted(used)]
    moments = log_moments(kinds, width, np.append(orders, c))
    gain = moments[:-1] - moments[-1]
    total = np.abs(orders) * sum(n * abs(a.offset) for a, n in kinds) + np.abs(gain)
    gain = np.where(total < 1e12, gain, np.inf)
    up = orders > c
    high = float((gain - (orders - c) * last)[up].min(initial=0.0))
    low = float((gain + (c - orders) * first)[~up].min(initial=0.0))
    outside = 1.01 * math.exp(min(low, 0.0)), 1.01 * math.exp(min(high, 0.0))
    return Law(kinds, width, first, size, c, outside)


class BunchPair(Pair):
    """The computed law of a bunch's sum, as a pair.

    Args:
        loss: [m] increasing losses.
        p: [m] masses under P; those under Q are p e^-loss.
    """

    center = 0.0

    def __init__(self, loss: Array, p: Array) -> None:
        self.loss, self.p = loss, p
        # Sums of m non-negative terms: Higham 2002, Section 4.2.
        self.rounding = 2.3e-16 * (loss.size + 4)

    def masses(self, edges: Array) -> Masses:
        # Each cell beside its lower edge.
        ends = np.searchsorted(self.loss, edges, side="right")
        inside = slice(ends[0], ends[-1])
        base = np.where(np.isfinite(edges[:-1]), edges[:-1], edges[1:])
        index = np.repeat(np.arange(base.size), np.diff(ends))
        p, lower = self.p[inside], base[index] - self.loss[inside]
        # Not p - gain, which has no digits where the cell is many nats wide.
        terms = p, p * np.exp(lower), -p * np.expm1(lower)
        first, second, gain = (np.asarray(np.bincount(index, v, base.size), float) for v in terms)
        # The terms of one cell's gain have the same sign.
        return Masses(first, second, gain, 2 * self.rounding * np.abs(gain), base)

    def tails(self, losses: Array) -> tuple[Array, Array]:
        # None is asked for but that of the largest loss.
        return (losses < self.loss[-1]) * self.p.sum(), np.zeros(losses.shape)

    def span(self, tail: float) -> tuple[float, float]:
        return float(self.loss[0]), float(self.loss[-1])


def _bunch_on_coarse_grid(
    bunch: Law, width: float, put: Discretize
) -> tuple[Atoms, float, float, float]:
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
    pair = BunchPair(loss[kept], bunch.weight[kept] * np.exp(-bunch.c * loss[kept]))
    atom = put(pair, width, float(pair.loss[0]), float(pair.loss[-1]), 1e-9)
    inexact = 8 * _U * (1 + abs(bunch.log_scale) + (1 + bunch.c) * 2 * bunch.reach)
    moved = replace(atom, offset=atom.offset + middle)
    return moved, bunch.log_scale - bunch.c * middle, inexact, float(bunch.weight[~kept].sum())
