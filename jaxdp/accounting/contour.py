"""delta(epsilon) as an integral over a vertical line of complex moments: an estimate, no bound.

With K(z) = sum_t log E[exp(z loss_t)], for any c > 0

    delta(epsilon) = 1/(2 pi i) * integral over Re z = c of exp(K(z) - z epsilon) / (z (z+1)) dz,

the Laplace inversion of E[(1 - e^(epsilon - loss))+] (Zhu, Dong and Wang 2022, arXiv:2106.08567v2,
Section 4, evaluate privacy profiles from characteristic functions; the line through the saddle
point is what makes it exact for tiny delta). The trapezoid rule with spacing h adds to delta
exactly the aliased copies delta(epsilon + 2 pi k/h) e^(2 pi k c/h), k != 0, which ``cheapest``
bounds. Only the forward direction is composed: for sampled Gaussians no run is known whose reverse
has the larger delta (Lebeda, Regehr, Kamath and Steinke 2024, arXiv:2405.20769, conjecture it).
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import special

from jaxdp.accounting.base import Array, Relation, Unresolved
from jaxdp.accounting.flat import FlatRun, GaussianStep
from jaxdp.accounting.rdp import log_moments, tabulate
from jaxdp.accounting.roots import bracket_decreasing

Complex = NDArray[np.complex128]

EPSILON_ERROR, DELTA_ERROR = 1e-6, 1e-4  # relative; a worse estimate is none
_ALIAS = 26.0  # aliased copies are kept below e^-26 of delta
_LOG_CUT = -25.0  # log probability of the outputs cut off, relative to delta
_MAX_FREQUENCIES = 30_000
_MAX_PRODUCTS = 4e8  # frequencies times nodes
_DECAYED = 1e-14
_GONE = 0.625  # of the last frequency: beyond it the taper is 0, or nearly
_MISSED = 1e-8  # of the integrand at 0: what may come back beyond the last frequency


@dataclass(frozen=True)
class Composition:
    """A run of Gaussians on Poisson samples and full batches.

    Attributes:
        steps: (step, count) of the sampled steps.
        relation: the neighbouring relation.
        mu2: sum of squared separations of all full-batch steps, in noise variances.
        log_tail: outputs are cut off so far out that all of them together have this (log)
            probability: the moments are then those of the loss that matters.
    """

    steps: tuple[tuple[GaussianStep, int], ...]
    relation: Relation
    mu2: float
    log_tail: float

    def tables(self, order: float, frequency: float = 0.0) -> list[tuple[Array, Array, int]]:
        """(log weights, losses, count) of each kind of step, for moments up to a complex order.

        Raises:
            Unresolved: that needs too many nodes.
        """
        log_tail = self.log_tail - math.log(max(sum(n for _, n in self.steps), 1))
        return [
            (
                *tabulate(
                    step.noise_multiplier,
                    step.sampling_prob,
                    self.relation,
                    log_tail,
                    order,
                    frequency,
                ),
                n,
            )
            for step, n in self.steps
        ]


@dataclass(frozen=True)
class Line:
    """Values of the integrand on a line, from which delta follows at any epsilon.

    Attributes:
        c: real part of the line.
        y: [n] imaginary parts, equally spaced from 0.
        values: [n] complex; trapezoid weight * exp(K(z) - K(c)) / (pi z (z+1)), tapered smoothly
            unless ``decayed``, which smooths delta on the scale of 1/y[-1].
        shorter: the same with a taper that ends earlier.
        log_scale: K(c).
        rounding: of the values, relative, roughly.
        decayed: the integrand fell below rounding before the last frequency.
        level: the largest exp(K(z) - K(c)) where the taper falls.
    """

    c: float
    y: Array
    values: Complex
    shorter: Complex
    log_scale: float
    rounding: float
    decayed: bool
    level: float = 0.0

    def at(self, epsilon: float) -> tuple[float, float]:
        """(delta, -d delta/d epsilon); the slope is e^epsilon times the second law's tail."""
        wave = self.values * np.exp(-1j * epsilon * self.y)
        # Re sum (c + iy) wave, without forming the complex product.
        total = float(wave.real.sum())
        turned = self.c * total - float((self.y * wave.imag).sum())
        scale = math.exp(min(self.log_scale - self.c * epsilon, 700.0))
        return scale * total, scale * turned

    def doubt(self, epsilon: float) -> float:
        """The relative error of delta, roughly."""
        value = self.at(epsilon)[0]
        scale = math.exp(min(self.log_scale - self.c * epsilon, 700.0))
        wave = np.exp(-1j * epsilon * self.y)
        moved = abs(float(((self.values - self.shorter) * wave).real.sum()))
        error = scale * (moved + self.rounding * float(np.abs(self.values).sum()))
        return 1e-11 + error / value if value > 0 else math.inf

    def solve(self, start: float, delta: float) -> float:
        """Epsilon >= 0 where delta is ``delta`` (0 when it is already below there).

        Raises:
            Unresolved: Newton's method in the log of delta, within a bracket, does not converge.
        """
        low, high, x = 0.0, math.inf, start
        for _ in range(100):
            value, slope = self.at(x)
            low, high = (x, high) if value > delta else (low, x)
            if high == 0:
                return 0.0
            step = value / slope * math.log(value / delta) if min(value, slope) > 0 else math.inf
            new = x + step
            if abs(step) < 1e-7 * min(x, 1 / self.c):
                return new  # within about the square of that
            if not low < new < high or abs(step) > 8 / self.c:
                new = 0.5 * (low + high) if high < math.inf else x + 1 / self.c
            if low == 0 and new < 0.05 * start:
                # Zero itself may do: halving would take a thousand steps to find out.
                new, start = 0.0, 0.0
            x = new
        raise Unresolved("no root on this line")


def draw(composition: Composition, c: float, length: float, last: float, epsilon: float) -> Line:
    """The line at c with this period, up to ``last`` or as far as this epsilon needs.

    Where the integrand decays that is soon. Where steps that were never sampled leave nearly a
    point mass in the distribution of the loss it does not, but oscillates with the distance of
    epsilon from there, so that a smooth taper far out changes nothing.
    """
    line = _build(composition, c, last, length)
    while not line.decayed:
        if line.doubt(epsilon) <= 1e-9:
            if not _missed(composition, line):
                break
            line = replace(line, rounding=math.inf)
        last *= 2
        try:
            line = _build(composition, c, last, length)
        except Unresolved:
            break
    return line


def _build(composition: Composition, c: float, last: float, length: float) -> Line:
    """The line tabulated for frequencies up to ``last``, with a period of ``length``."""
    spacing = 2 * math.pi / length
    count = int(last / spacing) + 2
    tables = composition.tables(c, last)
    if count > _MAX_FREQUENCIES or count * sum(loss.size for _, loss, _ in tables) > _MAX_PRODUCTS:
        raise Unresolved(f"{count} frequencies")
    y: Array = spacing * np.arange(count, dtype=np.float64)
    z = c + 1j * y
    log_scale, rounding = 0.5 * composition.mu2 * c * (c + 1), 1e-15
    exponent: Complex = np.asarray(0.5 * composition.mu2 * (z * (z + 1) - c * (c + 1)))
    for log_weight, loss, n in tables:
        moment, error = log_moments(log_weight, loss, np.asarray([c]))
        log_scale += n * float(moment[0])
        rounding += n * float(error[0]) / 16  # errors of a sum's terms average out
        exponent = exponent + n * _log_ratio(log_weight + c * loss, loss, y)
    values: Complex = (np.exp(exponent) / (z * (z + 1)) * (spacing / math.pi)).astype(complex)
    values[0] *= 0.5
    decayed = math.exp(exponent.real[-max(2, count // 16) :].max()) < _DECAYED
    decayed = decayed and _later(composition, c, last) <= _DECAYED
    ends = (math.inf, math.inf) if decayed else (last, 0.7 * last)
    # 1 at 0 and 0 from the end on to rounding, so smooth that its transform has no tail to smear.
    longer, shorter = (values * (0.5 * special.erfc((y / end - 0.48) * 11.8)) for end in ends)
    falls, gone = np.searchsorted(y, [0.3 * last, _GONE * last])
    level = math.exp(exponent.real[falls : gone + 1].max())
    rounding += 4e-16 * abs(log_scale)
    return Line(c, y, longer, shorter, log_scale, rounding, decayed, level)


def _missed(composition: Composition, line: Line) -> bool:
    """True if the taper left out what comes back, and not only what stays level."""
    c, last = line.c, float(line.y[-1])
    share = c * (c + 1) / math.hypot(c, last) / math.hypot(c + 1, last)
    try:
        later = _later(composition, c, last, _GONE)
    except Unresolved:
        return False
    return share * later > max(2 * share * line.level, _MISSED)


def _later(composition: Composition, c: float, last: float, start: float = 1.0) -> float:
    """The largest exp(K(z) - K(c)) beyond ``start`` times ``last``.

    Where the loss is nearly a multiple of what one sampled step loses it comes back, at 2 pi over
    that.
    """
    y: Array = last / 8 * np.arange(129, dtype=np.float64)
    size: Array = -0.5 * composition.mu2 * y * y
    for log_weight, loss, n in composition.tables(c, 16 * last):
        size = size + n * _log_ratio(log_weight + c * loss, loss, y).real
    return math.exp(size[y >= start * last].max())


def _log_ratio(log_weight: Array, loss: Array, y: Array) -> Complex:
    """log E[e^(iy loss)] under the law with these weights, normalised; e^-50 of it is left out."""
    keep = log_weight > log_weight.max() - 50
    weight, loss = np.exp(log_weight[keep] - log_weight.max()), loss[keep]
    weight /= weight.sum()
    mean = float(weight @ loss)
    excess = np.zeros(y.size, dtype=complex)
    for i in range(0, loss.size, 1024):
        excess += _turned(weight[i : i + 1024], loss[i : i + 1024] - mean, y)
    # log(1 + u) without losing the digits of a small u, which is multiplied by the step count.
    square = 2 * excess.real + excess.real**2 + excess.imag**2
    turn = np.arctan2(excess.imag, 1 + excess.real) + mean * y
    return np.asarray(0.5 * np.log1p(np.maximum(square, -1 + 2e-16)) + 1j * turn)


def _turned(weight: Array, points: Array, y: Array) -> Complex:
    """sum_j w_j (exp(i y_k p_j) - 1), [k], exact to rounding in relative terms; y_k = k y_1.

    A turn by k is one by a multiple of the width and one by less: ab - 1 = (a-1)(b-1) + (a-1) +
    (b-1), so that the sums are products of matrices.
    """
    width = math.isqrt(y.size) + 1
    half = (0.5 * steps[:, None] * points for steps in (y[:width], y[::width]))
    fine, coarse = (2 * sin * (1j * np.cos(h) - sin) for h in half for sin in (np.sin(h),))
    weighed = coarse * weight
    sums = weighed.sum(axis=1)[:, None] + (fine * weight).sum(axis=1)
    part = 60_000 // y.size  # products so small that no library starts threads for them
    for i in range(0, points.size, part):
        sums += weighed[:, i : i + part] @ fine[:, i : i + part].T
    return np.asarray(sums.ravel()[: y.size])


def composition(run: FlatRun, relation: Relation, log_delta: float) -> Composition:
    """The run of Gaussians on Poisson samples and full batches, for deltas near this one."""
    sampled = tuple((s, n) for s, n in run.steps if s.sampling_prob < 1)
    mu2 = math.fsum(
        n * (relation.separation / s.noise_multiplier) ** 2
        for s, n in run.steps
        if s.sampling_prob == 1
    )
    return Composition(sampled, relation, mu2, _LOG_CUT + log_delta)


def epsilon(run: FlatRun, relation: Relation, delta: float) -> float:
    """Epsilon at delta, to a relative ``EPSILON_ERROR``; 0 where delta(0) is below ``delta``.

    Raises:
        Unresolved: the integral cannot be evaluated well.
    """
    line, found = settle(composition(run, relation, math.log(delta)), delta)
    value, slope = line.at(found)
    doubt = line.doubt(found)
    error = doubt * value
    poor = error > 0.3 * EPSILON_ERROR * found * slope if found else value + error > delta
    if poor or not math.isfinite(doubt):
        raise Unresolved("the integral is not good enough")
    return found


def settle(steps: Composition, delta: float) -> tuple[Line, float]:
    """The integral on a line that suits the epsilon of ``delta``, and that epsilon."""
    log_delta = math.log(delta)
    c, moments = choose_order(steps, log_delta)
    guess = moments.saddle(c)[0]
    if guess < 0:
        guess = 0.0
        c, moments = choose_order(steps, log_delta, 0.0)
    for _ in range(15):
        line = draw(steps, *cheapest(moments, c, guess, log_delta), guess)
        previous, guess = guess, line.solve(guess, delta)
        # The line's period and its length were chosen for the previous epsilon.
        moved = line.c * abs(guess - previous)
        if moved < (1 if line.doubt(guess) < 1e-8 else 1e-3):
            return line, guess
        c, moments = choose_order(steps, log_delta, guess)
    raise Unresolved("the contour did not settle")


def delta(run: FlatRun, relation: Relation, epsilon: float) -> float:
    """Delta at epsilon, to a relative ``DELTA_ERROR``; otherwise as ``epsilon``."""
    target = -20.0
    while True:
        steps = composition(run, relation, target)
        c, moments = choose_order(steps, target, epsilon)
        log_delta = moments.saddle(c)[1]
        if log_delta >= target - 3:
            break
        # The cut-off follows delta down until it is small enough for it.
        target = max(log_delta, 1.5 * target)
        if target < -680:
            raise Unresolved("delta underflows")
    line = draw(steps, *cheapest(moments, c, epsilon, log_delta), epsilon)
    value = line.at(epsilon)[0]
    # What is cut off, and copied, was chosen for a delta that must not be far above this one.
    least = math.exp(max(log_delta, target) - 13)
    if not (value > least and line.doubt(epsilon) < 0.3 * DELTA_ERROR):
        raise Unresolved("the integral is not good enough")
    return min(value, 1.0)


class LogMoments:
    """Log-moment function L(c) = sum n_i log E[exp(c loss_i)] on 0 <= c <= order."""

    def __init__(self, composition: Composition, order: float) -> None:
        self._mu2, self._tables = composition.mu2, composition.tables(order)

    def at(self, orders: Array) -> Array:
        """L at the orders, [k]."""
        out: Array = 0.5 * self._mu2 * orders * (orders + 1)
        for log_weight, loss, n in self._tables:
            out = out + n * log_moments(log_weight, loss, orders)[0]
        return out

    def saddle(self, c: float) -> tuple[float, float, float]:
        """(epsilon whose contour has its saddle at c, log of delta there roughly, L''(c)).

        The exponent L(z) - z epsilon - log z - log(1+z) is stationary at z = c; the log of delta is
        its second-order (Daniels) approximation.
        """
        l0, l1, l2 = 0.5 * c * (c + 1) * self._mu2, (c + 0.5) * self._mu2, self._mu2
        for log_weight, loss, n in self._tables:
            exponent = log_weight + c * loss
            peak = float(exponent.max())
            weight = np.exp(exponent - peak)
            total = float(weight.sum())
            mean = float(weight @ loss) / total
            l0 += n * (peak + math.log(total))
            l1 += n * mean
            l2 += n * float(weight @ (loss - mean) ** 2) / total
        epsilon = l1 - 1 / c - 1 / (1 + c)
        curvature = l2 + 1 / c**2 + 1 / (1 + c) ** 2
        log_delta = l0 - c * epsilon - math.log(c) - math.log1p(c)
        return epsilon, log_delta - 0.5 * math.log(2 * math.pi * curvature), l2


def choose_order(
    composition: Composition, log_delta: float, epsilon: float | None = None
) -> tuple[float, LogMoments]:
    """(real part c of the line for this log of delta, or this epsilon; moments up to 8c + 8).

    Raises:
        Unresolved: the moments cannot be tabulated, or no order suits.
    """

    def at(log_c: float) -> float:
        found, log, _ = moments.saddle(math.exp(log_c))
        return log - log_delta if epsilon is None else epsilon - found

    high = 2.0
    moments = LogMoments(composition, math.exp(high))
    while at(high) > 0:
        high += 2
        if high > 28:
            raise Unresolved("no saddle point below order e^28")
        moments = LogMoments(composition, math.exp(high))
    low = high - 4
    while at(low) <= 0:
        low -= 4
        if low < -80:
            raise Unresolved("no saddle point above order e^-80")
    c = math.exp(bracket_decreasing(at, low, high, rtol=1e-2, max_iter=25)[1])
    return c, LogMoments(composition, 8 * c + 8)


def cheapest(
    moments: LogMoments, c: float, epsilon: float, log_delta: float
) -> tuple[float, float, float]:
    """(order, period, last frequency): of the saddle, or of a lower order with a shorter period.

    Where a step's loss has a heavy tail the law tilted at the saddle has a second mode far out. The
    answer is the same on any line, so a line that leaves that mode behind is as good and shorter.
    """
    orders, periods = [share * c for share in (1, 0.7, 0.5, 0.35, 0.25, 0.15)], []
    for order in orders:
        # A period 2 pi/h for which the aliased copies of delta are below e^-26 of it. To the left
        # delta <= 1, so a copy weighs at most e^(-c period). To the right delta(x) <=
        # exp(K(c') - c' x) for every c' > c.
        near = [1.05 * order, 1.15 * order, 1.3 * order, 1.6 * order]
        other = np.asarray([*near, 2 * order + 1, 3 * order + 3, 8 * order + 8])
        right = (moments.at(other) - other * epsilon - log_delta + _ALIAS) / (other - order)
        periods.append(max((_ALIAS - log_delta) / order, float(right.min())))
    best = int(np.argmin([0.5 * periods[0], *periods[1:]]))
    c, length = orders[best], periods[best]
    return c, 1.1 * length, 8 / math.sqrt(moments.saddle(c)[2])
