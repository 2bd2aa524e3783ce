"""Exact accounting where single steps can lose far more than all others: one contour per band.

A step whose loss has a heavy tail leaves no good line for the contour integral: any tilt that
reaches epsilon is dominated by jumps so rare that they do not matter. So the outputs are cut,
smoothly, at x_0 < x_1 < ... < x_m, and delta is a telescoping sum over k of

    delta(largest jump below x_k) - delta(largest jump below x_(k-1)),

each an integral of exp(K_k(z)) - exp(K_(k-1)(z)) on a line of its own, on which that term is about
as small as its value.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from jaxdp.accounting.contour import _DECAYED, _MAX_FREQUENCIES, Contour, taper
from jaxdp.accounting.fourier import Complex, fourier_excess
from jaxdp.accounting.loss import Array, LossTable, Pair, grid_width, mass_window, tabulate
from jaxdp.accounting.saddle import Composition, Unresolved

_STEP = 6.0  # nats of tail probability from one cut to the next
_SOFT = 0.5  # width of a cut in noise standard deviations
_NEGLIGIBLE = -32.0  # terms are dropped, and added to the error, below e^this times delta


@dataclass(frozen=True)
class Band:
    """One term: what the cut at level `k` adds to the cut at level `k - 1`.

    Attributes:
      composition: one direction of the run.
      upper: log tail probability at the upper cut (of the whole run), or None for no cut.
      lower: the same at the lower cut; None when this is the lowest term.
    """

    composition: Composition
    upper: float | None
    lower: float | None

    def tables(self, order: float, last: float) -> list[tuple[Array, Array, LossTable, int]]:
        """(log weights of what is below the lower cut, of the band, table, count) of each step."""
        out = []
        total = math.log(sum(n for _, n in self.composition.pairs))
        for pair, n in self.composition.pairs:
            left, right = self.composition.window(pair)
            z = pair.step.noise_multiplier
            tops = [
                None if v is None else self._cut(pair, v - total) for v in (self.upper, self.lower)
            ]
            if tops[0] is not None:
                right = min(right, tops[0] + 6.5 * _SOFT * z)
            # A soft cut adds frequencies up to 12.5/width to the integrand over the output.
            width = 1 / (1 / grid_width(pair, (left, right), order, last) + 2.0 / (_SOFT * z))
            table = tabulate(pair, (left, right), width)
            if table is None:
                raise Unresolved("a step needs too many nodes")
            first = math.floor(left / width)
            x: Array = width * (first + np.arange(table.loss.size, dtype=np.float64))
            below_upper = _log_below(x, tops[0], _SOFT * z)
            if tops[1] is None:
                out.append((table.log_weight + below_upper, np.full(x.size, -np.inf), table, n))
                continue
            below_lower = _log_below(x, tops[1], _SOFT * z)
            with np.errstate(divide="ignore", invalid="ignore"):
                gap = np.exp(below_upper) - np.exp(below_lower)
                band = np.log(np.maximum(gap, 0.0))
            out.append((table.log_weight + below_lower, table.log_weight + band, table, n))
        return out

    def _cut(self, pair: Pair, log_tail: float) -> float:
        return mass_window(pair, log_tail)[1]

    def log_moment(self, c: float) -> float:
        """log of the term's E[exp(c loss)] (a difference of two), on the real axis."""
        base, ratio = 0.5 * c * (c + 1) * self.composition.mu2, 0.0
        for below, band, table, n in self.tables(c, 0.0):
            log_below = float(special.logsumexp(below + c * table.loss))
            base += n * log_below
            if self.lower is not None:
                log_band = float(special.logsumexp(band + c * table.loss))
                ratio += n * float(np.logaddexp(0.0, log_band - log_below))
        if self.lower is None:
            return base
        return base + (ratio + math.log(-math.expm1(-ratio)) if ratio > 0 else -math.inf)


def _log_below(x: Array, cut: float | None, width: float) -> Array:
    """log of the soft indicator of x < cut."""
    if cut is None:
        return np.zeros(x.size)
    return np.asarray(special.log_ndtr((cut - x) / width * math.sqrt(2)))


def split(composition: Composition) -> list[Band]:
    """The terms of the telescoping sum, lowest first."""
    levels: list[float | None] = list(np.arange(-2.0, composition.log_tail + 2.0, -_STEP))
    levels.append(None)
    lower = [None, *levels[:-1]]
    return [Band(composition, u, v) for u, v in zip(levels, lower, strict=True)]


@dataclass(frozen=True)
class Line:
    """Where one term is integrated.

    Attributes:
      c: real part.
      last: largest frequency.
      length: period in epsilon.
      log_bound: log of an upper bound on the term's share of delta.
    """

    c: float
    last: float
    length: float
    log_bound: float


def choose(band: Band, epsilon: float, log_delta: float) -> Line:
    """The line on which the term is smallest, by golden section, and how finely to sample it."""

    def exponent(log_c: float) -> float:
        c = math.exp(log_c)
        return band.log_moment(c) - c * epsilon - log_c - math.log1p(c)

    grid = np.arange(-5.0, 16.0, 1.0) - math.log(max(epsilon, 1e-12)) * 0.5
    values: list[float] = []
    for t in grid:
        try:
            values.append(exponent(float(t)))
        except Unresolved:
            break
        if len(values) > 3 and values[-1] > values[-2] + 30:
            break
    best = int(np.argmin(values))
    lo, hi = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(values) - 1)])
    for _ in range(9):
        third = (hi - lo) / 3
        if exponent(lo + third) < exponent(hi - third):
            hi -= third
        else:
            lo += third
    log_c = 0.5 * (lo + hi)
    c = math.exp(log_c)
    bound = band.log_moment(c) - c * epsilon + c * log_c - (1 + c) * math.log1p(c)
    t = 0.05
    curve = (exponent(log_c + t) - 2 * exponent(log_c) + exponent(log_c - t)) / (t * c) ** 2
    last = 8.6 / math.sqrt(max(curve, 1e-4 / c**2))
    mass = min(band.log_moment(0.0), 0.0) if band.lower is not None else 0.0
    left = (28 + mass - log_delta) / c
    right = math.inf
    for factor in (1.05, 1.15, 1.3, 1.6, 2.5, 5.0):
        try:
            value = band.log_moment(factor * c) - factor * c * epsilon - log_delta + 28
        except Unresolved:
            break
        right = min(right, value / ((factor - 1) * c))
    if not math.isfinite(right):
        raise Unresolved("no period")
    return Line(c, last, 1.1 * max(left, right, 2 / c), bound)


def build(band: Band, line: Line) -> Contour:
    """Tabulate the term on its line."""
    spacing = 2 * math.pi / line.length
    count = int(line.last / spacing) + 2
    if not count < _MAX_FREQUENCIES:
        raise Unresolved(f"{count} frequencies")
    c = line.c
    y: Array = spacing * np.arange(count, dtype=np.float64)
    z = c + 1j * y
    base: Complex = (0.5 * band.composition.mu2 * (z * (z + 1) - c * (c + 1))).astype(complex)
    scale, rounding = 0.5 * band.composition.mu2 * c * (c + 1), 1e-13
    ratio = np.zeros(count, dtype=complex)
    for below, extra, table, n in band.tables(c, line.last):
        exponent = below + c * table.loss
        peak = float(exponent.max())
        weight = np.exp(exponent - peak)
        total = float(weight.sum())
        mean = float(weight @ table.loss) / total
        moved = fourier_excess(weight / total, table.loss - mean, spacing, count)
        log_below = _log1p(moved)
        base = base + n * (log_below + 1j * mean * y)
        scale += n * (peak + math.log(total))
        rounding += n * (3e-14 * float(np.abs(moved).max()) + 4e-16)
        if band.lower is not None:
            top = extra + c * table.loss
            keep = top > top.max() - 60
            share = np.exp(top[keep] - peak) / total
            points = table.loss[keep] - mean
            jump = share.sum() + fourier_excess(share, points, spacing, count)
            ratio = ratio + n * _log1p(jump / (1 + moved))
    if band.lower is None:
        factor = np.exp(base)
    else:
        # Relative to the term itself, e^base (e^ratio - 1), so that the scale is that of the band.
        rise = float(ratio[0].real)
        shift = rise + math.log(-math.expm1(-rise))
        if rise < 1:
            factor = np.exp(base - shift) * np.expm1(ratio)
        else:
            factor = np.exp(base + ratio - shift) - np.exp(base - shift)
        scale += shift
    decayed = bool(np.abs(factor[-max(2, count // 16) :]).max() < _DECAYED)
    if not decayed:
        factor = factor * taper(y)
    values = (factor / (z * (z + 1)) * (spacing / math.pi)).astype(complex)
    values[0] *= 0.5
    return Contour(c, y, values, scale, rounding + 4e-16 * abs(scale), decayed)


def _log1p(u: Complex) -> Complex:
    """log(1 + u) without losing the digits of a small u."""
    square = 2 * u.real + u.real**2 + u.imag**2
    real = 0.5 * np.log1p(np.maximum(square, -1 + 2e-16))
    return np.asarray(real + 1j * np.arctan2(u.imag, 1 + u.real))


@dataclass(frozen=True)
class Sum:
    """All terms, each tabulated twice.

    Attributes:
      terms: (contour, check) of every term kept.
      lost: probability that was cut off or dropped.
    """

    terms: tuple[tuple[Contour, Contour], ...]
    lost: float

    def delta_and_error(self, epsilon: float) -> tuple[float, float]:
        """delta(epsilon) and a bound on its error."""
        value, error = 0.0, self.lost
        for contour, check in self.terms:
            part = contour.delta(epsilon)
            value += part
            error += 3 * abs(part - check.delta(epsilon)) + 1e-11 * abs(part)
            error += contour.rounding_error(epsilon)
        return value, error


def tabulate_all(composition: Composition, epsilon: float, log_delta: float) -> Sum:
    """Every term that matters at epsilon, long enough to be resolved there."""
    terms = []
    lost = 8 * math.exp(composition.log_tail)
    for band in split(composition):
        line = choose(band, epsilon, log_delta)
        if line.log_bound < log_delta + _NEGLIGIBLE:
            lost += math.exp(line.log_bound)
            continue
        terms.append(_extend(band, line, epsilon, 3e-11 * math.exp(log_delta)))
    return Sum(tuple(terms), lost)


def _extend(band: Band, line: Line, epsilon: float, enough: float) -> tuple[Contour, Contour]:
    """The term on a line that is doubled until it changes by less than `enough`, and a check."""
    contour = build(band, line)
    for doublings in range(18):
        if contour.decayed:
            other = Line(line.c, 1.37 * line.last, 1.21 * line.length, line.log_bound)
            return contour, build(band, other)
        line = Line(line.c, 2 * line.last, line.length * 1.03, line.log_bound)
        previous = contour
        try:
            contour = build(band, line)
        except Unresolved:
            return contour, build(band, Line(line.c, 0.4 * line.last, line.length, 0.0))
        change = abs(contour.delta(epsilon) - previous.delta(epsilon))
        if doublings >= 3 and change < enough:
            return contour, previous
    return contour, previous


def banded_epsilon(
    composition: Composition, delta: float, start: float
) -> tuple[float, float, float]:
    """(lower, estimate, upper) epsilon in one direction, from a rough `start` > 0."""
    epsilon = start
    for _ in range(14):
        total = tabulate_all(composition, epsilon, math.log(delta))
        previous, epsilon = epsilon, _root(total, delta, epsilon, 0)
        if abs(epsilon - previous) <= 0.02 * epsilon:
            break
    else:
        raise Unresolved("the bands did not settle")
    lower, upper = _root(total, delta, epsilon, -1), _root(total, delta, epsilon, 1)
    return min(lower, epsilon), epsilon, max(upper, epsilon)


def banded_delta(composition: Composition, epsilon: float, guess: float) -> tuple[float, float]:
    """(delta, error) at epsilon in one direction; `guess` is an upper bound on delta."""
    total = tabulate_all(composition, epsilon, math.log(guess))
    return total.delta_and_error(epsilon)


def _root(total: Sum, delta: float, start: float, sign: int) -> float:
    """Where delta + sign * error meets the target, by bisection around `start`."""

    def above(epsilon: float) -> bool:
        value, error = total.delta_and_error(epsilon)
        return value + sign * error > delta

    low, high = start, start
    grow = 1e-9
    while not above(low) and low > 0:
        low, grow = max(0.0, low * (1 - grow)), min(grow * 8, 0.5)
        if low < 1e-14:
            low = 0.0
    if low == 0 and not above(0.0):
        return 0.0
    grow = 1e-9
    while above(high):
        high, grow = high * (1 + grow), min(grow * 8, 0.5)
        if high > 1e3 * start:
            raise Unresolved("no upper end")
    for _ in range(70):
        if high - low <= 1e-13 * high:
            break
        middle = 0.5 * (low + high)
        low, high = (middle, high) if above(middle) else (low, middle)
    return low if sign < 0 else high
