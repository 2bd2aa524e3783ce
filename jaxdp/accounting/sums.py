"""Sums of small losses on a grid: their distribution with its error, and atoms from below."""

import math
from dataclasses import dataclass

import numpy as np

from jaxdp.accounting.loss import Array, Pair
from jaxdp.accounting.pld import Atoms, cells, loss_range, point_mass
from jaxdp.accounting.saddle import Composition, Unresolved


class Law:
    """The tilted distribution of a sum of small losses on a grid, kept as its transform."""

    def __init__(
        self, atoms: list[tuple[Atoms, int]], grid: "Grid", moments: Array, tilt: int
    ) -> None:
        """Convolves the losses.

        Args:
            atoms: (losses, count) of every kind of step.
            grid: the window and the orders.
            moments: [k] log moments of the sum at the grid's orders.
            tilt: index of the order of the tilt.
        """
        self.c, self.grid = float(grid.orders[tilt]), grid
        self.count = sum(n for _, n in atoms)
        offset = sum(n * a.offset for a, n in atoms)
        self.start = math.floor((grid.first - offset) / grid.width)
        self.losses: Array = offset + grid.width * (self.start + np.arange(grid.size, dtype=float))
        logs: Array = np.zeros(grid.size // 2 + 1)
        log_scale = self.c * offset
        for atom, n in atoms:
            exponent = np.log(np.maximum(atom.mass, 1e-320)) + self.c * grid.width * atom.index
            peak = float(exponent.max())
            weight = np.where(atom.mass > 0, np.exp(exponent - peak), 0.0)
            total = float(weight.sum())
            one = np.bincount(atom.index % grid.size, weight / total, minlength=grid.size)
            logs = logs + n * np.log(np.fft.rfft(one) + 1e-300)
            log_scale += n * (peak + math.log(total))
        self.spectrum = np.where(logs.real > -80, np.exp(logs), 0.0)  # no slow denormals
        self.weight: Array = np.full(self.spectrum.size, 2.0 / grid.size)
        self.weight[[0, -1]] = 1.0 / grid.size
        size = np.abs(self.spectrum)
        self.loss_of_digits = 3e-16 * self.weight * (2 * (20 + self.count) * size + 20)
        self.norm = math.sqrt(float((self.weight * size**2).sum()))
        # Relative to epsilon; a gain so far below it that this would overflow is not asked for.
        damp = self.c * (self.losses - grid.epsilon)
        self.damp = np.where(np.abs(damp) < 80, np.exp(-np.clip(damp, -80, 80)), 0.0)
        self.first_damped = int(np.searchsorted(damp, -80.0))
        self.log_scale = log_scale - self.c * grid.epsilon
        self.above, self.below = grid.outside(moments, tilt)

    def mean(self, gain: Array, most: float) -> tuple[float, float]:
        """(sum of probability * gain, its error).

        Args:
            gain: [size] non-negative, increasing, at the losses; 0 at the first unless untilted.
            most: the largest gain anywhere.
        """
        grid, scale = self.grid, math.exp(min(self.log_scale, 700.0))
        if self.first_damped and gain[self.first_damped - 1] > 0:
            return 0.0, math.inf
        damped = gain * self.damp
        shape = np.fft.rfft(np.roll(damped, self.start % grid.size))
        real = self.spectrum.real * shape.real + self.spectrum.imag * shape.imag
        # Sums rather than dot products: those wake up threads, which cost more than they save.
        value = float((self.weight * real).sum())
        # Rounding: of the powers and the transform of the law, then of the gain's transform.
        error = float((self.loss_of_digits * np.abs(shape)).sum())
        error += 5e-15 * self.norm * math.sqrt(float((damped * damped).sum()))
        # What is outside wraps into the window, and is missing where it was.
        error += (self.above + self.below) * float(damped.max()) + self.below * float(damped[0])
        late = self.c * (float(self.losses[-1]) - grid.epsilon)
        error += self.above * most * math.exp(-late) + 1e-34 * grid.size * most
        return value * scale, error * scale


@dataclass(frozen=True)
class Grid:
    """A window of losses, and orders at which moments are known.

    Attributes:
        first: smallest loss.
        width: distance.
        size: number, a power of two.
        orders: [k] increasing, both signs.
        epsilon: about where delta will be asked for.
    """

    first: float
    width: float
    size: int
    orders: Array
    epsilon: float

    def outside(self, moments: Array, tilt: int) -> tuple[float, float]:
        """Chernoff bounds on the tilted law's probability above and below the window."""
        c, last = self.orders[tilt], self.first + self.width * (self.size - 1)
        raised, lowered = self.orders > c, self.orders < c
        gain = moments - moments[tilt]
        above = (gain - (self.orders - c) * last)[raised].min(initial=0.0)
        below = (gain + (c - self.orders) * self.first)[lowered].min(initial=0.0)
        return math.exp(above), math.exp(below)


def contracted(composition: Composition, pair: Pair, width: float, lowest: float) -> Atoms:
    """Atoms on the grid that the step's loss dominates, without a drift to pay for.

    Cells of four grid widths are merged, and each merged loss is split between its two neighbours
    on the grid at unchanged probabilities under both laws. Merging loses more of the loss's spread
    than the split gives back: that the cell's own profile lies above that of the two points is
    checked for every cell, by a tangent of the convex profile, and a cell that fails is rounded
    down whole. The cell of the steps that were not sampled is merged onto a grid point.

    Raises:
        Unresolved: the grid is too fine or too coarse for the step.
    """
    middle = point_mass(pair)
    for _ in range(3):
        first, second = cells(pair, middle + 2 * width * np.asarray([-1.0, 1.0]))
        if not (first[0] > 0 and second[0] > 0):
            raise Unresolved("the grid is too fine for a step")
        previous, middle = middle, float(np.log(first[0] / second[0]))
    low, high = loss_range(composition, pair)
    ends = max(low, middle - lowest), min(high, middle + lowest)
    if not (math.isfinite(middle) and ends[0] <= ends[1]):
        raise Unresolved("the grid is too coarse for a step")
    # Whole cells, the last one too: all of a step may be in the one in the middle.
    count = [math.floor((end - previous) / (4 * width) + 0.5) for end in ends]
    cell = np.arange(count[0], count[1] + 2, dtype=np.float64)
    edges = np.asarray(previous + 4 * width * (cell - 0.5))
    p, other = cells(pair, edges)
    offset = middle - 5e-16
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = np.log(p) - np.log(other)
        index = np.floor((loss - offset) / width)
    keep = np.isfinite(index) & (p > 1e-290)
    index = np.where(keep, index, 0.0)
    left = offset + width * index
    up = np.clip((p - other * np.exp(left)) / -math.expm1(-width) - 2e-15 * p / width, 0.0, p)
    half: Array = np.clip(left + width / 2, edges[:-1], edges[1:])
    beyond = [
        a[1::2] for a in cells(pair, np.append(np.column_stack([edges[:-1], half]), edges[-1]))
    ]
    profile, slope = beyond[0] - np.exp(half) * beyond[1], beyond[1] * np.exp(half)
    holds = profile + slope * -np.expm1(left - half) >= up * -math.expm1(-width)
    holds &= profile - slope * np.expm1(left + width - half) >= 0
    up = np.where(holds, up, 0.0)
    both = np.concatenate([index[keep], index[keep] + 1]).astype(np.int64)
    mass = np.concatenate([(p - up)[keep], up[keep]])
    return Atoms(both, mass, offset, 0.0, float(edges[-1]))


def log_moments(atom: Atoms, width: float, orders: Array) -> Array:
    """[k] log of sum mass exp(order loss)."""
    keep = atom.mass > 0
    loss, log_mass = (atom.offset + width * atom.index)[keep], np.log(atom.mass[keep])
    out = []
    for order in orders:
        exponent = log_mass + order * loss
        top = float(exponent.max())
        out.append(top + math.log(float(np.exp(exponent - top).sum())))
    return np.asarray(out)
