"""Privacy loss distributions on a grid: certified bounds on both sides, by one tilted FFT.

Pessimistic: the mass between two grid points goes to both of them so that the probability under
both laws is kept, which only makes the pair easier to tell apart (Doroshenko et al. 2022, "Connect
the dots", arXiv:2207.04380v2, Section 4). Optimistic: each cell is merged into one outcome, a
post-processing, whose loss is then rounded down. The composition is computed under the law tilted
by exp(c loss), so that the rounding of the FFT is relative to delta, however small it is.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from jaxdp.accounting.bounds import Bound, Relation
from jaxdp.accounting.canonical import Run, Step
from jaxdp.accounting.exact import cheapest, compositions, negligible
from jaxdp.accounting.loss import Array, Pair, log_ratio
from jaxdp.accounting.saddle import Composition, Moments, Unresolved, choose_order


@dataclass(frozen=True)
class Atoms:
    """A discrete approximation of one step's loss, on the grid ``offset + index * width``.

    Attributes:
        index: [m] integers.
        mass: [m] probabilities under the first law (their sum may fall short of 1).
        offset: loss of index 0.
        infinite: probability that is put at infinite loss.
        top: the step's losses above this are in no atom.
    """

    index: np.ndarray
    mass: Array
    offset: float
    infinite: float
    top: float = math.inf


@dataclass(frozen=True)
class Composed:
    """Delta as a function of epsilon for a composition of ``Atoms``.

    Attributes:
        loss: [m] increasing grid of losses.
        weight: [m] exp(c (loss - loss[0])) times the probability of each loss, over exp(log_scale).
        c: the tilt.
        log_scale: common factor, in logs.
        infinite: probability of infinite loss.
        wrapped: bound on the probability that wrapped around from the left.
        log_error: log of the error of delta at loss[0] from the right and from rounding; it falls
            as exp(-c epsilon).
    """

    loss: Array
    weight: Array
    c: float
    log_scale: float
    infinite: float
    wrapped: float
    log_error: float

    def delta(self, epsilon: float) -> float:
        """sum over loss > epsilon of probability * (1 - e^(epsilon - loss)), plus the infinite."""
        first = int(np.searchsorted(self.loss, epsilon, side="right"))
        excess = self.loss[first:] - epsilon
        value = float(self.weight[first:] @ (-np.expm1(-excess) * np.exp(-self.c * excess)))
        return value * self._scale(self.log_scale, epsilon) + self.infinite

    def error(self, epsilon: float) -> float:
        """Bound on the error of ``delta`` from wrapping and rounding."""
        return self.wrapped + self._scale(self.log_error, epsilon)

    def _scale(self, log_factor: float, epsilon: float) -> float:
        return math.exp(min(log_factor - self.c * (epsilon - float(self.loss[0])), 700.0))

    def epsilon(self, delta: float, sign: int) -> float:
        """The least epsilon at which delta + sign * error is at most ``delta``; inf if none is.

        Bisection ends with two sides: the far one for an upper end (sign 1), the near one for a
        lower end (sign -1).
        """

        def fits(epsilon: float) -> bool:
            return self.delta(epsilon) + sign * self.error(epsilon) <= delta

        low, high = max(0.0, float(self.loss[0])), float(self.loss[-1])
        if fits(low):
            return low
        if not fits(high):
            return math.inf
        while high - low > 1e-9 * high:
            middle = 0.5 * (low + high)
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high if sign > 0 else low


def inverse_loss(pair: Pair, loss: Array) -> Array:
    """Output x at which the forward loss of the pair is ``loss``; -inf below its infimum.

    Args:
        pair: a sampled step; its direction is ignored.
        loss: [m] values of log P/Q.
    """
    z, q = pair.step.noise_multiplier, pair.step.sampling_prob
    if pair.relation is Relation.REPLACE_ONE:
        # u = e^(x/z^2) solves B u^2 - (1-q)(e^loss - 1) u - e^loss B = 0, B = q e^(-1/(2 z^2)).
        half = np.abs(loss) / 2
        log_sinh = half + np.log(np.maximum(-np.expm1(-2 * half), 1e-300)) - math.log(2)
        log_y = math.log1p(-q) - math.log(q) + 0.5 / (z * z) + log_sinh
        asinh = np.where(
            log_y > 300, log_y + math.log(2), np.arcsinh(np.exp(np.minimum(log_y, 300)))
        )
        return z * z * np.sign(loss) * (half + asinh)
    small = np.minimum(loss, 30.0)
    inside = 1 + np.expm1(small) / q
    with np.errstate(divide="ignore"):
        g = np.log(np.maximum(inside, 0.0))
    return z * z * np.where(loss < 30, g, loss - math.log(q)) + 0.5


def _masses(pair: Pair, edges: Array) -> tuple[Array, Array]:
    """Probabilities of the intervals between increasing outputs ``edges``, under P and under Q."""
    z, q = pair.step.noise_multiplier, pair.step.sampling_prob

    def normal(mean: float) -> Array:
        t = (edges - mean) / z
        # Differences of whichever tail is small, so that far intervals keep their digits.
        return np.where(
            t[:-1] > 0,
            special.ndtr(-t[:-1]) - special.ndtr(-t[1:]),
            special.ndtr(t[1:]) - special.ndtr(t[:-1]),
        )

    base = normal(0.0)
    p = (1 - q) * base + q * normal(1.0)
    if pair.relation is Relation.REPLACE_ONE:
        return p, (1 - q) * base + q * normal(-1.0)
    return p, base


def cells(pair: Pair, edges_of_loss: Array) -> tuple[Array, Array]:
    """First- and second-law masses of intervals of the pair's own loss, in increasing order."""
    if not pair.reverse:
        return _masses(pair, inverse_loss(pair, edges_of_loss))
    p, other = _masses(pair, inverse_loss(pair, -edges_of_loss[::-1]))
    return other[::-1], p[::-1]


def loss_range(composition: Composition, pair: Pair) -> tuple[float, float]:
    """Smallest and largest loss of the outputs that are kept."""
    window = np.asarray(composition.window(pair))
    z, q = pair.step.noise_multiplier, pair.step.sampling_prob
    loss = log_ratio(window, z, q)
    if pair.relation is Relation.REPLACE_ONE:
        loss = loss - log_ratio(-window, z, q)
    low, high = (-loss[1], -loss[0]) if pair.reverse else (loss[0], loss[1])
    return float(low), float(high)


def point_mass(pair: Pair) -> float:
    """The loss of a step whose record was not sampled, or typical of a full batch.

    Grids are aligned with it, since most of the probability is there. The losses of a full batch
    lie around 1/(2 z^2), far from 0 where noise is small.
    """
    z, q = pair.step.noise_multiplier, pair.step.sampling_prob
    if q == 1:
        return 0.5 / (z * z)
    if pair.relation is Relation.REPLACE_ONE:
        return 0.0
    mid = float(log_ratio(np.asarray([0.0]), z, q)[0])
    return -mid if pair.reverse else mid


def _grid(composition: Composition, pair: Pair, offset: float, width: float, span: float) -> Array:
    """The indices of the grid points that carry atoms, increasing floats.

    Dense within two spans of the point mass. Losses further down cannot matter and are cut there;
    losses further up are rare and placed 64 times coarser, still on the grid.

    Raises:
        Unresolved: the grid would need too many points.
    """
    low, high = loss_range(composition, pair)
    first = math.floor((max(low, offset - 2 * span) - offset) / width)
    last = math.ceil((high - offset) / width)
    dense = min(last, math.ceil(2 * span / width))
    index: Array = np.arange(first, dense + 1, dtype=np.float64)
    if last > dense:
        if (last - dense) / 64 > 6e6:
            raise Unresolved("the loss of one step spans too many grid points")
        index = np.append(index, dense + 64.0 * np.arange(1, (last - dense) // 64 + 2))
    return index


def pessimistic(composition: Composition, pair: Pair, width: float, span: float) -> Atoms:
    """Atoms that dominate the step's loss: connect the dots, tails rounded up."""
    offset = point_mass(pair)
    index = _grid(composition, pair, offset, width, span)
    loss = offset + index * width
    gap = np.diff(loss)
    p, other = cells(pair, loss)
    with np.errstate(over="ignore", invalid="ignore"):
        up = (p - other * np.exp(np.minimum(loss[:-1], 700.0))) / -np.expm1(-gap)
    # The slack covers the rounding of the difference; rounding up is always allowed.
    up = np.clip(np.nan_to_num(up, nan=np.inf) + 1e-13 * p / np.minimum(gap, 1.0), 0.0, p)
    mass = np.zeros(index.size)
    mass[1:] += up
    mass[:-1] += p - up
    below, _ = cells(pair, np.asarray([-np.inf, loss[0]]))
    mass[0] += below[0]
    above, _ = cells(pair, np.asarray([loss[-1], np.inf]))
    return Atoms(index.astype(np.int64), mass, offset, float(above[0]), float(loss[-1]))


def optimistic(
    composition: Composition, pair: Pair, width: float, span: float, tilt: float
) -> Atoms:
    """Atoms that the step's loss dominates: merged cells, rounded down to a shifted grid."""
    offset = point_mass(pair)
    for _ in range(3):
        p, other = cells(pair, offset + np.asarray([-0.5, 0.5]) * width)
        if p[0] > 0 and other[0] > 0:
            offset = float(np.log(p[0] / other[0]))
    index = _grid(composition, pair, offset, width, span)
    middle = 0.5 * (index[1:] + index[:-1])
    edges = offset + width * np.concatenate([[index[0] - 0.5], middle, [index[-1] + 0.5]])
    p, other = cells(pair, edges)
    top = float(edges[-1])
    loss = _merged_loss(p, other, edges[:-1])
    keep = (p > 1e-290) & (loss > -math.inf)
    if not keep.any():
        raise Unresolved("every cell of the grid has too little probability")
    index, p, loss = index[keep], p[keep], loss[keep]
    deficit = index * width + offset - loss + 1e-15
    # Shift the grid down by s: atoms that lack more than s fall by whole widths instead.
    order = np.argsort(deficit)
    weight = (p * np.exp(np.clip(tilt * index * width, -600, 600)))[order]
    remaining = weight.sum() - np.cumsum(weight)
    sorted_deficit = np.maximum(deficit[order], 0.0)
    best = int(np.argmin(sorted_deficit * weight.sum() + width * remaining))
    shift = float(sorted_deficit[best])
    down = np.ceil(np.maximum(deficit - shift, 0.0) / width - 1e-12)
    return Atoms((index - down).astype(np.int64), p, offset - shift, 0.0, top)


def _merged_loss(p: Array, other: Array, least: Array) -> Array:
    """A lower bound on the loss of each merged cell, [m]; -inf where nothing is known.

    Args:
        p: [m] masses under the first law.
        other: [m] masses under the second law.
        least: [m] smallest loss in each cell.
    """
    # Beyond a loss of about 660 the second law underflows. The loss of a merged cell is at least
    # the smallest loss in it; there the edges are exact to rounding, which the slack covers.
    edge = np.where(least > 300, least * (1 - 1e-14), -np.inf)
    known = (p > 1e-290) & (other > 1e-290)
    ratio = np.divide(p, other, out=np.ones_like(p), where=known)
    return np.where(known, np.log(ratio), edge)


def compose(
    atoms: list[tuple[Atoms, int]], width: float, size: int, start: float, c: float
) -> Composed:
    """Composes atoms under the law tilted by exp(c loss), on ``size`` losses from ``start``.

    What lies outside wraps into the window: from the left with weight at most e^(-c period), from
    the right at most exp(K(c') - (c'-c)(start + period) - c epsilon); both are added to the error.
    """
    spectrum = np.ones(size // 2 + 1, dtype=complex)
    log_total, offset, infinite, count = 0.0, 0.0, 0.0, 0
    others = c * np.asarray([1.05, 1.15, 1.3, 1.6, 2.0, 3.0, 8.0])
    beyond = np.zeros(others.size)
    for atom, n in atoms:
        exponent = np.log(np.maximum(atom.mass, 1e-320)) + c * width * atom.index
        peak = float(exponent.max())
        tilted = np.where(atom.mass > 0, np.exp(exponent - peak), 0.0)
        total = float(tilted.sum())
        wrapped = np.bincount(atom.index % size, weights=tilted / total, minlength=size)
        spectrum *= np.exp(n * np.log(np.fft.rfft(wrapped) + 1e-300))
        log_total += n * (peak + math.log(total))
        for i, other in enumerate(others):
            e = np.log(np.maximum(atom.mass, 1e-320)) + other * width * atom.index
            top = float(e.max())
            beyond[i] += n * (top + math.log(float(np.exp(e - top).sum())))
        offset += n * atom.offset
        infinite += n * atom.infinite
        count += n
    first = math.floor((start - offset) / width)
    law = np.maximum(np.roll(np.fft.irfft(spectrum, size), -(first % size)), 0.0)
    span = size * width
    # Both relative to the first grid loss, with index * width in the place of the loss.
    right = float(np.min(beyond - (others - c) * (first * width + span))) - c * first * width
    scale = log_total - c * width * first
    noise = scale + math.log(3e-16 * (20 + count) / -math.expm1(-c * width))
    loss: Array = offset + width * (first + np.arange(size, dtype=np.float64))
    return Composed(
        loss, law, c, scale, infinite, math.exp(-c * span), float(np.logaddexp(right, noise))
    )


def pld_epsilon(run: Run, relation: Relation, delta: float, tolerance: float = 5e-4) -> Bound:
    """Certified (lower, upper) epsilon at delta; the grid is refined to a relative ``tolerance``.

    Raises:
        Unresolved: when the grid would be too long.
    """
    found = (0.0, 0.0)
    for size in (1 << 15, 1 << 18, 1 << 20):
        found = (0.0, 0.0)
        for i, composition in enumerate(compositions(run, relation, delta)):
            if i > 0 and found[0] > 0 and negligible(composition, found[0], delta):
                continue
            lower, upper = _epsilon_one_way(_with_full_batch(composition), delta, size)
            found = max(found[0], lower), max(found[1], upper)
        if found[1] - found[0] <= tolerance * found[1]:
            break
    note = "delta(0) is already below the target" if found[1] == 0 else ""
    return Bound(found[0], 0.5 * (found[0] + found[1]), found[1], "pld", note)


def pld_delta(run: Run, relation: Relation, epsilon: float, tolerance: float = 2e-3) -> Bound:
    """Certified (lower, upper) delta at epsilon; otherwise as ``pld_epsilon``."""
    lower = upper = 0.0
    for size in (1 << 15, 1 << 18, 1 << 20):
        lower = upper = 0.0
        for reverse in range(len(compositions(run, relation, 1e-9))):
            target = 1e-9
            for _ in range(40):
                composition = _with_full_batch(compositions(run, relation, target)[reverse])
                c, moments = choose_order(composition, None, epsilon)
                log_delta = moments.saddle(c)[1]
                if log_delta >= math.log(target) - 3:
                    break
                target = math.exp(max(log_delta, 1.5 * math.log(target), -690))
            low, high = _tables(composition, moments, c, epsilon, log_delta, size)
            lower = max(lower, low.delta(epsilon) - low.error(epsilon))
            upper = max(upper, high.delta(epsilon) + high.error(epsilon))
        if upper - lower <= tolerance * upper:
            break
    upper = min(upper, 1.0)
    return Bound(lower, 0.5 * (lower + upper), upper, "pld")


def _with_full_batch(composition: Composition) -> Composition:
    """The merged full-batch Gaussian as one more pair (mu^2 is all that matters about it)."""
    if composition.mu2 == 0:
        return composition
    z = composition.mu2**-0.5
    if z < 1e-6:
        # Its outputs lie so near 1 that the quadrature's nodes would fall together.
        raise Unresolved(f"the full batches together have noise multiplier {z:g}, below 1e-6")
    full = Pair(Step(z), Relation.ADD_OR_REMOVE_ONE)
    return Composition((*composition.pairs, (full, 1)), 0.0, composition.log_tail)


def _epsilon_one_way(composition: Composition, delta: float, size: int) -> tuple[float, float]:
    log_delta = math.log(delta)
    c, moments = choose_order(composition, log_delta, None)
    epsilon = max(moments.saddle(c)[0], 0.0)
    if epsilon == 0:
        c, moments = choose_order(composition, None, 0.0)
    upper = epsilon
    for _ in range(6):
        low, high = _tables(composition, moments, c, epsilon, log_delta, size)
        upper = high.epsilon(delta, 1)
        if not math.isfinite(upper):
            raise Unresolved("the pessimistic grid has no finite answer")
        better, better_moments = choose_order(composition, None, upper)
        at_the_edge = 0 < upper <= high.loss[0] * (1 + 1e-9)
        near = abs(upper - epsilon) < 0.1 * (high.loss[-1] - high.loss[0])
        if (abs(math.log(better / c)) < 0.3 or near) and not at_the_edge:
            break
        c, moments, epsilon = better, better_moments, upper
    else:
        raise Unresolved("the grid did not settle")
    lower = low.epsilon(delta, -1)
    return (0.0 if lower <= low.loss[0] else lower), upper


def _tables(
    composition: Composition,
    moments: Moments,
    c: float,
    epsilon: float,
    log_delta: float,
    size: int,
) -> tuple[Composed, Composed]:
    """(optimistic, pessimistic) compositions on a window around epsilon, as long as delta needs."""
    c, length = cheapest(moments, c, epsilon, log_delta)
    span = 1.3 * length
    start, width = epsilon - 0.15 * span, span / size
    down = [(optimistic(composition, p, width, span, c), n) for p, n in composition.pairs]
    up = [(pessimistic(composition, p, width, span), n) for p, n in composition.pairs]
    return compose(down, width, size, start, c), compose(up, width, size, start, c)
