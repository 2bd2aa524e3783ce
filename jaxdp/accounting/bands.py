"""Exact accounting where a single step can lose far more than all others: a contour per band.

A step whose loss has a heavy tail leaves no good line for the contour integral: any tilt that
reaches epsilon is dominated by jumps so rare that they do not matter. So the outputs are cut,
smoothly, at x_0 < x_1 < ... < x_m, and delta is a telescoping sum over k of

    delta(largest jump below x_k) - delta(largest jump below x_(k-1)),

each an integral of exp(K_k(z)) - exp(K_(k-1)(z)) on a line of its own, on which that term is about
as small as its value.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from jaxdp.accounting.contour import DECAYED, Contour, taper
from jaxdp.accounting.cuts import Band, log_total
from jaxdp.accounting.fourier import Complex, fourier_excess
from jaxdp.accounting.loss import Array
from jaxdp.accounting.roots import bracket_decreasing, expand_right
from jaxdp.accounting.saddle import Composition, Unresolved
from jaxdp.accounting.single import single_delta

_MAX_FREQUENCIES = 500_000
_STEP = 2.5  # nats of tail probability from one cut to the next
_HOPELESS = 0.02  # relative error of delta at which bands are given up
_ZERO = 1e-150  # what has decayed to 0 is taken to be
_NEGLIGIBLE = -32.0  # terms are dropped, and added to the error, below e^this times delta


@dataclass(frozen=True)
class Term:
    """A band with its log moments on a grid of orders, from which lines are chosen.

    Attributes:
        band: the band.
        orders: [k] increasing real parts.
        moments: [k] log E[exp(c loss)] of the band's term.
    """

    band: Band
    orders: Array
    moments: Array

    def exponents(self, epsilon: float) -> Array:
        """[k] log of a bound on the term's delta at epsilon from each order.

        delta <= E[exp(c (loss - epsilon))] max_u e^(-cu) (1 - e^(-u)), as in ``saddle.chernoff``.
        """
        c = self.orders
        return self.moments - c * epsilon + c * np.log(c) - (1 + c) * np.log1p(c)


def split(composition: Composition) -> list[Term]:
    """The terms of the telescoping sum, lowest first."""
    levels: list[float | None] = list(np.arange(-2.0, composition.log_tail + 2.0, -_STEP))
    levels.append(None)
    lower = [None, *levels[:-1]]
    bands = [Band(composition, u, v) for u, v in zip(levels, lower, strict=True)]
    return [_term(band) for band in bands]


def _term(band: Band) -> Term:
    orders, moments = [], []
    for log_c in np.arange(-3.0, 24.0, 0.5):
        try:
            value = band.log_moment(math.exp(log_c))
        except Unresolved:
            break
        if math.isfinite(value):
            orders.append(math.exp(log_c))
            moments.append(value)
        if value > 2_000:
            break
    if len(orders) < 3:
        raise Unresolved("a band has no moments")
    return Term(band, np.asarray(orders), np.asarray(moments))


def rough_epsilon(terms: list[Term], log_delta: float) -> float:
    """The epsilon at which the sum of the terms' bounds is delta: just above the true one."""

    def excess(epsilon: float) -> float:
        return float(special.logsumexp([t.exponents(epsilon).min() for t in terms])) - log_delta

    if excess(0.0) <= 0:
        return 0.0
    return bracket_decreasing(excess, 0.0, expand_right(excess, 1e-9, 4.0), rtol=1e-3)[1]


def lone_epsilon(composition: Composition, delta: float) -> float:
    """The epsilon at which the deltas of the single steps sum to delta."""

    def excess(epsilon: float) -> float:
        alone = [n * single_delta(p.step, p.relation, epsilon) for p, n in composition.pairs]
        return sum(alone) - delta

    if excess(0.0) <= 0:
        return 0.0
    return bracket_decreasing(excess, 0.0, expand_right(excess, 1e-9, 4.0), rtol=1e-3)[1]


@dataclass(frozen=True)
class Line:
    """The vertical line along which one term is integrated.

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


def choose(term: Term, epsilon: float, log_delta: float) -> Line:
    """The line of the grid on which the term is smallest, with its frequencies and period."""
    orders, moments = term.orders, term.moments
    bound = term.exponents(epsilon)
    best = min(max(int(np.argmin(bound)), 1), orders.size - 2)
    c = float(orders[best])
    (c0, c1, c2), (f0, f1, f2) = orders[best - 1 : best + 2], moments[best - 1 : best + 2]
    curve = 2 * ((f2 - f1) / (c2 - c1) - (f1 - f0) / (c1 - c0)) / (c2 - c0)
    last = 8.6 / math.sqrt(max(curve, 0.0) + 1 / c**2)
    mass = 0.0 if term.band.lower is None else min(0.0, float(moments[0]))
    left = (28 + mass - log_delta) / c
    others = list(zip(orders[best + 1 :], moments[best + 1 :], strict=True))
    for factor in (1.06, 1.2, 1.35):
        try:
            others.append((factor * c, term.band.log_moment(factor * c)))
        except Unresolved:
            break
    needed = [(f - o * epsilon - log_delta + 28) / (o - c) for o, f in others]
    length = 1.1 * max(left, min(needed), 2 / c)
    return Line(c, max(last, 60 / length), length, float(bound[best]))


def build(band: Band, line: Line) -> Contour:
    """The term tabulated on its line."""
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
    for part in band.parts(c, line.last):
        below, table, n = part.below, part.table, part.count
        exponent = below + c * table.loss
        peak = float(exponent.max())
        weight = np.exp(exponent - peak)
        total = float(weight.sum())
        moment, moment_error = log_total(part, c)
        mean = float(weight @ table.loss) / total
        moved = fourier_excess(weight / total, table.loss - mean, spacing, count)
        log_below = _log1p(moved)
        base = base + n * (log_below + 1j * mean * y)
        scale += n * moment
        rounding += n * (3e-14 * float(np.abs(moved).max()) + moment_error)
        if band.lower is not None:
            top = part.band + c * table.loss
            keep = top > top.max() - 60
            share = np.exp(top[keep] - peak) / total
            points = table.loss[keep] - mean
            jump = share.sum() + fourier_excess(share, points, spacing, count)
            ratio = ratio + n * _log_rise(moved, jump, log_below)
    if band.lower is None:
        factor = np.exp(base)
    else:
        # Relative to the term itself, e^base (e^ratio - 1), so that the scale is that of the band.
        rise = float(ratio[0].real)
        shift = rise + math.log(-math.expm1(-rise))
        small = ratio.real < 1
        rest = np.exp(np.where(small, -np.inf, base + ratio) - shift) - np.exp(base - shift)
        factor = np.where(small, np.exp(base - shift) * np.expm1(np.where(small, ratio, 0)), rest)
        scale += shift
    decayed = bool(np.abs(factor[-max(2, count // 16) :]).max() < DECAYED)
    if not decayed:
        factor = factor * taper(y)
    values = (factor / (z * (z + 1)) * (spacing / math.pi)).astype(complex)
    values[0] *= 0.5
    return Contour(c, y, values, scale, rounding + 4e-16 * abs(scale), decayed)


def _log1p(u: Complex) -> Complex:
    """log(1 + u) without losing the digits of a small u; finite where 1 + u is 0."""
    square = 2 * u.real + u.real**2 + u.imag**2
    size = np.maximum(np.hypot(1 + u.real, u.imag), _ZERO)
    real = np.where(square > -0.5, 0.5 * np.log1p(np.maximum(square, -0.5)), np.log(size))
    return np.asarray(real + 1j * np.arctan2(u.imag, 1 + u.real))


def _log_rise(moved: Complex, jump: Complex, log_kept: Complex) -> Complex:
    """log((1 + moved + jump) / (1 + moved)), also where 1 + moved has decayed to 0.

    Args:
        moved: [m].
        jump: [m].
        log_kept: [m] log(1 + moved).
    """
    kept = 1 + moved
    less = np.abs(jump) < np.abs(kept)
    return np.where(less, _log1p(jump / np.where(less, kept, 1.0)), _log1p(moved + jump) - log_kept)


@dataclass(frozen=True)
class Sum:
    """The terms of the telescoping sum, each tabulated twice.

    Attributes:
        terms: (contour, check) of every term kept.
        dropped: the terms that are too small to matter.
        lost: probability of the outputs cut off.
    """

    terms: tuple[tuple[Contour, Contour], ...]
    dropped: tuple[Term, ...]
    lost: float

    def delta_and_error(self, epsilon: float) -> tuple[float, float]:
        """delta(epsilon) and a bound on its error."""
        value, error = 0.0, self.lost
        # At this epsilon: a bound taken at a larger one would be too small here.
        error += sum(math.exp(min(float(t.exponents(epsilon).min()), 0.0)) for t in self.dropped)
        for contour, check in self.terms:
            part = contour.delta(epsilon)
            value += part
            # Ten times what the two discretisations disagree by, and never less than 2e-8.
            error += 10 * abs(part - check.delta(epsilon)) + 2e-8 * abs(part)
            error += contour.rounding_error(epsilon)
        return value, error


def tabulate_all(
    composition: Composition, terms: list[Term], epsilon: float, log_delta: float
) -> Sum:
    """Tabulates the terms that matter at epsilon, on lines long enough to resolve them there.

    Raises:
        Unresolved: as soon as the terms' errors are too large to be of use.
    """
    kept, dropped = [], []
    delta, value, error = math.exp(log_delta), 0.0, 0.0
    for term in terms:
        line = choose(term, epsilon, log_delta)
        if line.log_bound < log_delta + _NEGLIGIBLE:
            dropped.append(term)
            continue
        kept.append(_extend(term.band, line, epsilon, 3e-11 * delta))
        part, other = (contour.delta(epsilon) for contour in kept[-1])
        value, error = value + part, error + 10 * abs(part - other)
        if not error <= _HOPELESS * max(abs(value), delta):
            # Before the other terms are tabulated too: that takes seconds.
            raise Unresolved("the bands are not precise")
    return Sum(tuple(kept), tuple(dropped), 8 * math.exp(composition.log_tail))


def _extend(band: Band, line: Line, epsilon: float, enough: float) -> tuple[Contour, Contour]:
    """The term on a line that is doubled until it changes by less than ``enough``, and a check."""
    contour = build(band, line)
    for doublings in range(30):
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


def banded_epsilon(composition: Composition, delta: float) -> tuple[float, float, float]:
    """(lower, estimate, upper) epsilon in one direction.

    Raises:
        Unresolved: when the terms need too many nodes.
    """
    terms, log_delta = split(composition), math.log(delta)
    epsilon = rough_epsilon(terms, log_delta)
    if sum(n * pair.step.sampling_prob for pair, n in composition.pairs) < 1:
        # There the bounds are far above the truth, and one step at a time is close to it.
        epsilon = min(epsilon, lone_epsilon(composition, delta)) or epsilon
    for _ in range(14):
        total = tabulate_all(composition, terms, epsilon, log_delta)
        value, error = total.delta_and_error(epsilon)
        if not error <= 0.1 * max(abs(value), delta):
            raise Unresolved("the bands are not precise")
        previous, epsilon = epsilon, _root(total, delta, epsilon, 0)
        if abs(epsilon - previous) <= 0.02 * epsilon:
            break
    else:
        raise Unresolved("the bands did not settle")
    if total.delta_and_error(epsilon)[1] > _HOPELESS * delta:
        raise Unresolved("the bands are not precise")
    lower, upper = _root(total, delta, epsilon, -1), _root(total, delta, epsilon, 1)
    return min(lower, epsilon), epsilon, max(upper, epsilon)


def banded_delta(composition: Composition, epsilon: float, guess: float) -> tuple[float, float]:
    """(delta, error) at epsilon in one direction; ``guess`` is an upper bound on delta."""
    terms = split(composition)
    bound = float(special.logsumexp([t.exponents(epsilon).min() for t in terms]))
    log_delta = min(math.log(guess), bound)
    return tabulate_all(composition, terms, epsilon, log_delta).delta_and_error(epsilon)


def _root(total: Sum, delta: float, start: float, sign: int) -> float:
    """The epsilon at which delta + sign * error meets the target, near ``start``."""

    @functools.cache
    def excess(epsilon: float) -> float:
        value, error = total.delta_and_error(epsilon)
        return value + sign * error - delta

    low, high = start, start
    grow = 1e-9
    while not excess(low) > 0 and low > 0:
        low, grow = max(0.0, low * (1 - grow)), min(grow * 8, 0.5)
        if low < 1e-14:
            low = 0.0
    if low == 0 and not excess(0.0) > 0:
        return 0.0
    grow = 1e-9
    start = max(start, 1e-12)
    while excess(high) > 0:
        high, grow = max(high, 1e-14) * (1 + grow), min(grow * 8, 0.5)
        if high > 1e3 * start:
            raise Unresolved("no upper end")
    low, high = bracket_decreasing(excess, low, high, rtol=1e-13, max_iter=70)
    return low if sign < 0 else high
