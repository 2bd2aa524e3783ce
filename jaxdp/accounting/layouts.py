"""Grids for a sum of losses: of one width, of bunches, or with the large losses apart."""

import functools
import itertools
import math
from dataclasses import replace

import numpy as np

from jaxdp.accounting.apart import Inner, Outer, most
from jaxdp.accounting.base import Array
from jaxdp.accounting.bunches import OUTSIDE, Layout, Sums
from jaxdp.accounting.convolve import Counted, Law
from jaxdp.accounting.discretise import Atoms, above, below
from jaxdp.accounting.plan import Ends, Kinds, Plan

SIZES = (1 << 12, 1 << 21)
LOST = 1e-3  # of the tolerance, in delta: what a lower end may give up
_LONG = 1 << 18  # points beyond which small losses are tried apart


class Laid:
    """A composition's steps on the grids that suit a plan.

    Attributes:
        layout: the grids.
        kinds: the pairs that may have losses above the caps, with their numbers.
        lost: probability that a lower end has to give up.
    """

    def __init__(self, kinds: Kinds, plan: Plan, high: bool, tolerance: float) -> None:
        """Chooses grids on which an end is within about ``tolerance`` of epsilon."""
        self.layout, self.kinds, self.lost = layout(plan, tolerance), kinds, 0.0
        self._plan, self._put = plan, above if high else below
        self._fine = plan.fine(tolerance)
        self._inner: list[tuple[Inner, int]] = []
        if self.layout.small:
            self._inner = [
                (Inner(pair, *ends), n)
                for (pair, n), ends in zip(kinds, self.layout.small, strict=True)
            ]
            self.kinds = tuple((Outer(inner), n) for inner, n in self._inner)
            if not high:
                self._give_up(plan.log_delta + math.log(LOST * tolerance / len(kinds)))
        self._outer = functools.cache(self._on_grid)

    def _give_up(self, log_lost: float) -> None:
        """Leaves out as many small losses as there may be large ones."""
        for i, (inner, n) in enumerate(self._inner):
            count = most(n, Outer(inner).chance(), log_lost)
            self._inner[i] = inner, n - count
            self.lost += math.exp(log_lost) if count < n else 0.0

    def atoms(self) -> list[tuple[Atoms, int]]:
        """The atoms of ``kinds`` on the grid on which they are put."""
        return self._outer(self.layout.widths[-1 if self._inner else 0])

    def groups(self) -> list[tuple[Counted, float]]:
        """All atoms below the caps, with the widths of their grids."""
        widths = self.layout.widths
        if not self._inner:
            return [(self.atoms(), widths[0])]
        return [(self.atoms(), widths[-1]), (self._small(widths[0]), widths[0])]

    def law(self, c: float, without: int | None = None) -> Law:
        """The law of the sum of all losses below the caps, tilted by c, less one of a kind."""

        def outer(width: float) -> Counted:
            return [(a, n - (i == without)) for i, (a, n) in enumerate(self._outer(width))]

        plan, ends = self._plan, self.layout.small
        layout = replace(self.layout, outside=plan.outside[c == 0])
        if not self._inner:
            return Sums(outer, self._put, layout, plan.moments(c)).whole(plan.first)
        apart = outer, plan.moments(c, ends)
        return Sums(self._small, self._put, layout, plan.moments(c), apart).whole(plan.first)

    def _on_grid(self, width: float) -> list[tuple[Atoms, int]]:
        plan = self._plan
        return [
            (self._put(p, width, low, cap, self._fine), n)
            for (p, n), low, cap in zip(self.kinds, plan.lows, plan.caps, strict=True)
        ]

    def _small(self, width: float) -> list[tuple[Atoms, int]]:
        return [(self._put(p, width, *p.span(0.0), self._fine), n) for p, n in self._inner]


@functools.lru_cache(maxsize=8)
def layout(plan: Plan, tolerance: float) -> Layout:
    """Grids on which both ends are about ``tolerance`` (of epsilon) apart, if any are."""
    reach = plan.last - plan.first
    needed = reach / _width(plan, tolerance)
    size = _points(needed)
    width = _aligned(plan.lattice, reach / size)
    best = Layout((width,), 1, size, size if needed <= SIZES[1] else math.inf)
    if plan.lattice > width or size < 1 << 14:
        return best
    for levels in (1, 2, 3, 4):
        best = _better(best, _bunched(plan, levels, 0.5 * tolerance / (levels + 1)))
    if best.points > _LONG:
        for power in range(2, 22, 2):
            small = _small(plan, reach * 2.0**-power, tolerance)
            for levels in (0, 1, 2, 3) if small else ():
                best = _better(best, _bunched(plan, levels, 0.5 * tolerance / (levels + 2), small))
    return best


def _better(best: Layout, other: Layout | None) -> Layout:
    return other if other and other.points < 0.6 * best.points else best


def _small(plan: Plan, reach: float, tolerance: float) -> Ends:
    """Ends of the small losses, all but those ``reach`` from a step's point mass; () if of no use.

    A lower end gives up as many small losses as there may be large ones.
    """
    ends, lost = [], 0.0
    for (atom, n), low, cap in zip(plan.atoms, plan.lows, plan.caps, strict=True):
        # A point mass at the least loss is small, too: the interval is open there.
        first, last = max(atom.offset - reach, low) - plan.grid, min(atom.offset + reach, cap)
        loss = atom.offset + atom.index * plan.grid
        small = (loss >= first - plan.grid) & (loss <= last + plan.grid)
        chance = float(atom.mass[~small].sum()) + atom.over[0]
        if not small.any() or not chance < 0.01:
            return ()
        given_up = most(n, chance, plan.log_delta + math.log(LOST * tolerance))
        # A small loss counts for as much as it exceeds the least that it may be on average.
        mass = atom.mass[small]
        gain = np.exp(plan.c * (loss[small] - loss[small].max()))
        with np.errstate(divide="ignore"):
            second = np.log(mass) - loss[small]
        peak = float(second.max())
        least = math.log(float(mass.sum())) - peak - math.log(float(np.exp(second - peak).sum()))
        lost += given_up * abs(float(mass * gain @ loss[small]) / float(mass @ gain) - least)
        ends.append((first, last))
    return tuple(ends) if lost < 0.1 * tolerance * (plan.c + 1) / plan.spread[2] else ()


def _bunched(plan: Plan, levels: int, tolerance: float, small: Ends = ()) -> Layout | None:
    """Grids for bunches of bunches, of which each level adds ``tolerance``.

    With ``small`` losses apart there is one level more: their whole sum, or r bunches of it, goes
    to a grid that is fine enough for the large ones.
    """
    distance, weight, factor = plan.spread
    counts, bunches = plan.counts(), 1
    if levels:
        bunches = round(float(plan.counts().max()) ** (1 / (levels + 1)))
    fine = _width(plan, tolerance)
    if small:
        apart = distance > max(high - low for low, high in small) / 2
        fine = _width(plan, tolerance, (distance[~apart], weight[~apart]))
    above = max(levels, 1)
    widths = [
        fine,
        *(
            math.sqrt(5 * tolerance / (factor * float(bunches) ** (above - i)))
            for i in range(above)
        ),
    ]
    if small:
        widths[-1] = min(widths[-1], _width(plan, tolerance, (distance[apart], weight[apart])))
    if (levels and bunches < 16) or any(b < 4 * a for a, b in itertools.pairwise(widths)):
        return None
    counted = [(plan.last - plan.first) / widths[-1]]
    size = _points(counted[0])
    widths[-1] = (plan.last - plan.first) / size
    tilts = (plan.c, 0.0) if plan.split else (plan.c,)
    for level in range(above):
        nats = 2 + (above - level) * math.log(bunches)
        part = counts // bunches ** (above - level)
        for c, outside in zip(tilts, plan.outside, strict=False):
            first, last = plan.moments(c, small).window(part, outside + nats)
            counted.append((last - first) / widths[level])
    points = sum(_points(n) if n <= SIZES[1] else math.inf for n in counted)
    # Every bunch brings the rounding of its transform.
    noise = 3e-13 * math.sqrt(_points(counted[1])) * float(bunches) ** above
    noise *= math.exp(min(max(plan.outside) - OUTSIDE, 700.0)) * factor / (plan.c * (plan.c + 1))
    points *= max(1.0, noise / tolerance)
    return Layout(tuple(widths), bunches, size, points, small)


def _aligned(lattice: float, width: float) -> float:
    """A width that is hardly larger, on whose grid point masses lie."""
    count = math.floor(lattice / width)
    # Point masses between the two lie at fractions of their distance.
    count -= count % 120 if count >= 120 else 0
    return lattice / count if count else width


def _width(plan: Plan, tolerance: float, spread: tuple[Array, Array] | None = None) -> float:
    """The widest grid of single steps that adds at most ``tolerance`` of epsilon."""
    distance, weight, factor = plan.spread
    distance, weight = spread or (distance, weight)

    def added(width: float) -> float:
        return float(weight @ np.minimum(width * width / 6, width * distance / 2))

    reach = plan.last - plan.first
    low, high = math.log(reach / 2**40), math.log(reach / SIZES[0])
    for _ in range(12):
        middle = 0.5 * (low + high)
        enough = 1.2 * factor * added(math.exp(middle)) <= tolerance
        low, high = (middle, high) if enough else (low, middle)
    return math.exp(low)


def _points(count: float) -> int:
    """The power of two that is not below ``count``, within the sizes that are used."""
    return 1 << math.ceil(math.log2(min(max(count, SIZES[0]), SIZES[1])))
