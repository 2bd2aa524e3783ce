"""delta(epsilon) as an integral over a vertical line of complex moments: an estimate, no bound.

With K(z) = sum_t log E[exp(z loss_t)], for any c > 0

    delta(epsilon) = 1/(2 pi i) * integral over Re z = c of exp(K(z) - z epsilon) / (z (z+1)) dz,

the Laplace inversion of E[(1 - e^(epsilon - loss))+] (Zhu, Dong and Wang 2022, arXiv:2106.08567v2,
Section 4, evaluate privacy profiles from characteristic functions; the line through the saddle
point is what makes it exact for tiny delta). The trapezoid rule with spacing h adds to delta
exactly the aliased copies delta(epsilon + 2 pi k/h) e^(2 pi k c/h), k != 0; ``choose_line``
bounds them.
Only the forward direction is composed: for sampled Gaussians no run is known whose reverse has the
larger delta (Lebeda, Regehr, Kamath and Steinke 2024, arXiv:2405.20769, conjecture it).
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy import special

from jaxdp.accounting.events import Array, Relation, Unresolved
from jaxdp.accounting.pairs import bracket_decreasing, log_ratio, posterior

if TYPE_CHECKING:
    from jaxdp.accounting.flat import FlatRun, GaussianStep

Complex = NDArray[np.complex128]
Tables = list[tuple[Array, Array, int]]  # log weights, losses and number of each kind of step

EPSILON_ERROR, DELTA_ERROR = 1e-6, 1e-4  # relative; a worse estimate is none
_ALIAS = 26.0  # aliased copies are kept below e^-26 of delta
_LOG_CUT = -25.0  # log probability of the outputs cut off, relative to delta
_MAX_FREQUENCIES = 30_000
_MAX_PRODUCTS = 4e8  # frequencies times nodes
_MOST_NODES = 60_000
_DECAYED = 1e-14
_TAPERED = 0.625  # of the last frequency: beyond it the taper is 0, or nearly
_NEGLIGIBLE = 1e-8  # of the integrand at 0: what may come back beyond the last frequency


@dataclass(frozen=True)
class Composition:
    """A run of Gaussians on Poisson samples and full batches."""

    steps: "tuple[tuple[GaussianStep, int], ...]"  # (step, count) of the sampled steps
    relation: Relation
    mu2: float  # sum of squared separations of all full-batch steps, in noise variances
    # Outputs are cut off so far out that all of them together have this (log) probability: the
    # moments are then those of the loss that matters.
    log_tail: float

    def tables(self, order: float, frequency: float = 0.0) -> Tables:
        """A quadrature for E[exp(z loss)] of each kind of step, |Re z| and |Im z| up to these.

        Outside the nodes each law has its share of the tail at most: both laws, because the moments
        are taken relative to the second law's total of 1. The loss turns by at most s p/z^2 per
        unit of x: s the separation, p the largest posterior probability of having been sampled.

        Raises:
            Unresolved: that needs too many nodes.
        """
        log_tail = self.log_tail - math.log(max(sum(n for _, n in self.steps), 1))
        two_sided, found = self.relation is Relation.REPLACE_ONE, []
        for step, n in self.steps:
            z, q = step.noise_multiplier, step.sampling_prob
            # Beyond these a component keeps a quarter of the tail.
            log_shares = log_tail - math.log(4) - np.asarray([0.0, math.log(q)])
            base, sampled = -z * special.ndtri_exp(np.minimum(log_shares, -0.7))
            right = max(float(base), 1 + float(sampled))
            p = float(posterior(np.asarray(right), z, q))
            steep = p if p < 0.5 else 1.0
            spread = (p * (1 - p) if p < 0.5 else 0.25) * order if two_sided else 0.0
            turning = self.relation.separation * steep * frequency / (z * z)
            width = float(trapezoid_width(z, spread, turning))
            left = -right if two_sided else -float(base)
            if not (right - left) / width < _MOST_NODES:
                raise Unresolved("a step needs too many nodes")
            index = np.arange(math.floor(left / width), math.ceil(right / width) + 1, dtype=float)
            found.append((*tabulate_step(width * index, width, z, q, self.relation), n))
        return found

    def saddle(self, tables: Tables, c: float) -> tuple[float, float, float]:
        """(epsilon whose contour has its saddle at c, log of delta there roughly, L''(c)).

        The exponent L(z) - z epsilon - log z - log(1+z), L = sum n_i log E[exp(z loss_i)], is
        stationary at z = c; the log of delta is its saddle-point approximation (Daniels
        1954, "Saddlepoint approximations in statistics", to first order).
        """
        l0, l1, l2 = 0.5 * c * (c + 1) * self.mu2, (c + 0.5) * self.mu2, self.mu2
        for log_weight, loss, n in tables:
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


@dataclass(frozen=True)
class Line:
    """Values of the integrand on a line, from which delta follows at any epsilon."""

    c: float  # real part of the line
    y: Array  # [n] imaginary parts, equally spaced from 0
    # [n] complex; trapezoid weight * exp(K(z) - K(c)) / (pi z (z+1)), tapered smoothly unless
    # ``decayed``, which smooths delta on the scale of 1/y[-1].
    values: Complex
    shorter: Complex  # the same with a taper that ends earlier
    log_scale: float  # K(c)
    rounding: float  # of the values, relative, roughly
    decayed: bool  # the integrand fell below rounding before the last frequency
    level: float = 0.0  # the largest exp(K(z) - K(c)) where the taper falls

    def delta_and_slope(self, epsilon: float) -> tuple[float, float]:
        """(delta, -d delta/d epsilon); the slope is e^epsilon times the second law's tail."""
        wave = self.values * np.exp(-1j * epsilon * self.y)
        # Re sum (c + iy) wave, without forming the complex product.
        total = float(wave.real.sum())
        turned = self.c * total - float((self.y * wave.imag).sum())
        scale = math.exp(min(self.log_scale - self.c * epsilon, 700.0))
        return scale * total, scale * turned

    def relative_error(self, epsilon: float) -> float:
        """The relative error of delta, roughly."""
        value = self.delta_and_slope(epsilon)[0]
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
            value, slope = self.delta_and_slope(x)
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


def choose_line(
    composition: Composition, tables: Tables, c: float, epsilon: float, log_delta: float
) -> Line:
    """The line through the saddle at c, or a shorter one, as far as this epsilon needs.

    Args:
        composition: the run.
        tables: of moments up to 8c + 8, as from ``choose_order``.
        c: the order whose saddle is at about epsilon.
        epsilon: where delta is needed.
        log_delta: about the log of delta there.

    Raises:
        Unresolved: the line has too many frequencies.
    """
    # Where a step's loss has a heavy tail the law tilted at the saddle has a second mode far out.
    # The answer is the same on any line, so one of a lower order that leaves that mode behind, with
    # a shorter period, is as good.
    orders, periods = [share * c for share in (1, 0.7, 0.5, 0.35, 0.25, 0.15)], []
    for order in orders:
        # A period 2 pi/h for which the aliased copies of delta are below e^-26 of it. To the left
        # delta <= 1, so a copy weighs at most e^(-c period). To the right delta(x) <=
        # exp(K(c') - c' x) for every c' > c.
        near = [1.05 * order, 1.15 * order, 1.3 * order, 1.6 * order]
        other = np.asarray([*near, 2 * order + 1, 3 * order + 3, 8 * order + 8])
        log_moment: Array = 0.5 * composition.mu2 * other * (other + 1)
        for log_weight, loss, n in tables:
            log_moment = log_moment + n * log_moments(log_weight, loss, other)[0]
        right = (log_moment - other * epsilon - log_delta + _ALIAS) / (other - order)
        periods.append(max((_ALIAS - log_delta) / order, float(right.min())))
    best = int(np.argmin([0.5 * periods[0], *periods[1:]]))
    c, length = orders[best], 1.1 * periods[best]
    last = 8 / math.sqrt(composition.saddle(tables, c)[2])

    # Where the integrand decays that is soon far enough. Where steps that were never sampled leave
    # nearly a point mass in the distribution of the loss it does not, but oscillates with the
    # distance of epsilon from there, so that a smooth taper far out changes nothing.
    line = _tabulate_line(composition, c, last, length)
    while not line.decayed:
        if line.relative_error(epsilon) <= 1e-9:
            # The taper may have left out what comes back, and not only what stays level.
            share = c * (c + 1) / math.hypot(c, line.y[-1]) / math.hypot(c + 1, line.y[-1])
            try:
                later = _largest_beyond(composition, c, float(line.y[-1]), _TAPERED)
            except Unresolved:
                break
            if not share * later > max(2 * share * line.level, _NEGLIGIBLE):
                break
            line = replace(line, rounding=math.inf)
        last *= 2
        try:
            line = _tabulate_line(composition, c, last, length)
        except Unresolved:
            break
    return line


def _tabulate_line(composition: Composition, c: float, last: float, length: float) -> Line:
    """The line tabulated for frequencies up to ``last``, with a period of ``length``."""
    # The period sets the spacing, and with ``last`` the number of frequencies.
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
        exponent = exponent + n * _log_characteristic(log_weight + c * loss, loss, y)
    # The inversion's kernel 1/(z (z + 1)), with the trapezoid rule's half weight at 0.
    values: Complex = (np.exp(exponent) / (z * (z + 1)) * (spacing / math.pi)).astype(complex)
    values[0] *= 0.5
    decayed = math.exp(exponent.real[-max(2, count // 16) :].max()) < _DECAYED
    decayed = decayed and _largest_beyond(composition, c, last) <= _DECAYED
    ends = (math.inf, math.inf) if decayed else (last, 0.7 * last)
    # A taper is 1 at 0 and 0 from the end on to rounding, so smooth that its transform has no tail
    # to smear.
    longer, shorter = (values * (0.5 * special.erfc((y / end - 0.48) * 11.8)) for end in ends)
    falls, gone = np.searchsorted(y, [0.3 * last, _TAPERED * last])
    level = math.exp(exponent.real[falls : gone + 1].max())
    rounding += 4e-16 * abs(log_scale)
    return Line(c, y, longer, shorter, log_scale, rounding, decayed, level)


def _largest_beyond(composition: Composition, c: float, last: float, start: float = 1.0) -> float:
    """The largest exp(K(z) - K(c)) beyond ``start`` times ``last``.

    Where the loss is nearly a multiple of what one sampled step loses it comes back, at 2 pi over
    that.
    """
    y: Array = last / 8 * np.arange(129, dtype=np.float64)
    size: Array = -0.5 * composition.mu2 * y * y
    for log_weight, loss, n in composition.tables(c, 16 * last):
        size = size + n * _log_characteristic(log_weight + c * loss, loss, y).real
    return math.exp(size[y >= start * last].max())


def _log_characteristic(log_weight: Array, loss: Array, y: Array) -> Complex:
    """log E[e^(iy loss)] under the law with these weights, normalised; e^-50 of it is left out.

    E[e^(iy loss)] - 1 is summed, exact to rounding in relative terms, for y_k = k y_1. A turn by k
    is one by a multiple of the width and one by less: ab - 1 = (a-1)(b-1) + (a-1) + (b-1), so that
    the sums are products of matrices.
    """
    keep = log_weight > log_weight.max() - 50
    weight, loss = np.exp(log_weight[keep] - log_weight.max()), loss[keep]
    weight /= weight.sum()
    mean = float(weight @ loss)
    excess, width, spacing = np.zeros(y.size, dtype=complex), math.isqrt(y.size) + 1, float(y[1])
    part = 60_000 // y.size  # products so small that no library starts threads for them
    for i in range(0, loss.size, 1024):
        points, some = loss[i : i + 1024] - mean, weight[i : i + 1024]
        fine = _turns(points * spacing, width)
        coarse = _turns(points * (spacing * width), -(-y.size // width))
        weighed = coarse * some
        sums = weighed.sum(axis=1)[:, None] + (fine * some).sum(axis=1)
        for j in range(0, points.size, part):
            sums += weighed[:, j : j + part] @ fine[:, j : j + part].T
        excess += sums.ravel()[: y.size]
    # log(1 + u) without losing the digits of a small u, which is multiplied by the step count.
    square = 2 * excess.real + excess.real**2 + excess.imag**2
    turn = np.arctan2(excess.imag, 1 + excess.real) + mean * y
    return np.asarray(0.5 * np.log1p(np.maximum(square, -1 + 2e-16)) + 1j * turn)


def _turns(angle: Array, count: int) -> Complex:
    """[count, m] e^(i k angle) - 1, by doubling: (1 + a)^2 - 1 = a (a + 2)."""
    turns = np.zeros((count, angle.size), dtype=complex)
    sin, cos = np.sin(0.5 * angle), np.cos(0.5 * angle)
    turns[1:2] = 2 * sin * (1j * cos - sin)
    for k in range(2, count):
        half = turns[k // 2]
        turns[k] = half * (half + 2)
        if k % 2:
            turns[k] += turns[1] * (turns[k] + 1)
    return turns


def epsilon(run: "FlatRun", relation: Relation, delta: float) -> float:
    """Epsilon at delta, to a relative ``EPSILON_ERROR``; 0 where delta(0) is below ``delta``.

    Raises:
        Unresolved: the integral cannot be evaluated well.
    """
    # The saddle of the order at which delta is about right; where that is at a negative epsilon,
    # the one at epsilon 0.
    log_delta = math.log(delta)
    steps, c, tables = choose_order(run, relation, log_delta)
    found = steps.saddle(tables, c)[0]
    if found < 0:
        found = 0.0
        steps, c, tables = choose_order(run, relation, log_delta, 0.0)
    # A line's period and its length are chosen for the epsilon before.
    for _ in range(15):
        line = choose_line(steps, tables, c, found, log_delta)
        previous, found = found, line.solve(found, delta)
        moved, error = line.c * abs(found - previous), line.relative_error(found)
        if moved < (1 if error < 1e-8 else 1e-3):
            break
        steps, c, tables = choose_order(run, relation, log_delta, found)
    else:
        raise Unresolved("the contour did not settle")
    # An error of delta is one of epsilon by the slope; an estimate that may be off is none.
    value, slope = line.delta_and_slope(found)
    off = error * value
    poor = off > 0.3 * EPSILON_ERROR * found * slope if found else value + off > delta
    if poor or not math.isfinite(error):
        raise Unresolved("the integral is not good enough")
    return found


def delta(run: "FlatRun", relation: Relation, epsilon: float) -> float:
    """Delta at epsilon, to a relative ``DELTA_ERROR``; otherwise as ``epsilon``."""
    target = -20.0
    while True:
        steps, c, tables = choose_order(run, relation, target, epsilon)
        log_delta = steps.saddle(tables, c)[1]
        if log_delta >= target - 3:
            break
        # The cut-off follows delta down until it is small enough for it.
        target = max(log_delta, 1.5 * target)
        if target < -680:
            raise Unresolved("delta underflows")
    line = choose_line(steps, tables, c, epsilon, log_delta)
    value = line.delta_and_slope(epsilon)[0]
    # What is cut off, and copied, was chosen for a delta that must not be far above this one.
    least = math.exp(max(log_delta, target) - 13)
    if not (value > least and line.relative_error(epsilon) < 0.3 * DELTA_ERROR):
        raise Unresolved("the integral is not good enough")
    return min(value, 1.0)


def choose_order(
    run: "FlatRun", relation: Relation, log_delta: float, epsilon: float | None = None
) -> tuple[Composition, float, Tables]:
    """(the run, the order c of its line, tables of moments up to 8c + 8).

    The run is one of Gaussians on Poisson samples and full batches; the order is that whose saddle
    is at this log of delta, or at ``epsilon``.

    Raises:
        Unresolved: the moments cannot be tabulated, or no order suits.
    """
    sampled = tuple((s, n) for s, n in run.steps if s.sampling_prob < 1)
    full = [(s.noise_multiplier, n) for s, n in run.steps if s.sampling_prob == 1]
    mu2 = math.fsum(n * (relation.separation / z) ** 2 for z, n in full)
    composition = Composition(sampled, relation, mu2, _LOG_CUT + log_delta)

    def at(log_c: float) -> float:
        """log delta at this saddle less the one wanted, or epsilon less its own; decreasing."""
        found, log, _ = composition.saddle(tables, math.exp(log_c))
        return log - log_delta if epsilon is None else epsilon - found

    high = 2.0
    tables = composition.tables(math.exp(high))
    while at(high) > 0:
        high += 2
        if high > 28:
            raise Unresolved("no saddle point below order e^28")
        tables = composition.tables(math.exp(high))
    low = high - 4
    while at(low) <= 0:
        low -= 4
        if low < -80:
            raise Unresolved("no saddle point above order e^-80")
    c = math.exp(bracket_decreasing(at, low, high, rtol=1e-2, max_iter=25)[1])
    return composition, c, composition.tables(8 * c + 8)


def trapezoid_width(z: float, spread: float | Array, turning: float = 0.0) -> Array:
    """Width at which the trapezoid rule of the tilted density is exact to rounding.

    Trefethen and Weideman 2014, "The exponentially convergent trapezoidal rule", Theorem 5.1.
    Shifting the line of integration to x + id multiplies the integrand by at most
    exp(d^2/2z^2) for the Gaussian, exp(turning d) for the oscillation, and exp(spread d^2/z^4),
    spread = order p(1-p), where a likelihood ratio is divided by; this holds for d <= pi z^2/2, as
    the mixture first vanishes at pi z^2. The trapezoid rule's error is that times
    exp(-2 pi d/width), made e^-37.
    """
    curvature = 1 / z**2 + 2 * spread / z**4
    d = np.minimum(np.sqrt(74 / curvature), np.pi * z * z / 2)
    return np.asarray(2 * np.pi / (37 / d + curvature * d / 2 + turning))


def tabulate_step(
    x: Array, width: float, z: float, q: float, relation: Relation
) -> tuple[Array, Array]:
    """(log of the first law's density times the width, loss) at the outputs x."""
    loss = log_ratio(x, z, q)
    log_weight = loss - 0.5 * (x / z) ** 2 + np.log(width / (z * np.sqrt(2 * np.pi)))
    if relation is Relation.REPLACE_ONE:
        loss = loss - log_ratio(-x, z, q)
    return log_weight, loss


def log_moments(log_weight: Array, loss: Array, orders: Array) -> tuple[Array, Array]:
    """log E[exp(order loss)] at several orders, with a bound on its rounding error.

    E[e^(c loss)] - 1 is summed with E_second[e^loss - 1] = 0 taken out term by term, so that it is
    exact to rounding also when it is 1e-15 or the order is 1e-12. What the nodes miss of that zero
    is charged as error: a window that leaves out one law's mass shows.

    Args:
        log_weight: [m] log of the first law's density times the grid width.
        loss: [m] loss at the node.
        orders: [k] >= 0.

    Returns:
        (log moment, bound), [k] each.
    """
    # Plainly, by the largest term; where no moment is large, the difference from 1 instead.
    exponent = orders[:, None] * loss + log_weight
    peak = exponent.max(axis=-1)
    value = peak + np.log(np.exp(exponent - peak[:, None]).sum(axis=-1))
    rounding = 4e-16 * (1 + np.abs(value))
    near = np.flatnonzero(peak <= 10)
    terms = []
    for weight, power in ((log_weight - loss, loss), (log_weight, orders[near, None] * loss)):
        # e^weight (e^power - 1), without overflow where the weight makes up for it.
        small = np.exp(weight) * np.expm1(np.minimum(power, 1.0))
        terms.append(np.where(power < 1.0, small, np.exp(weight + power) - np.exp(weight)))
    drift, gain = orders[near, None] * terms[0], terms[1]
    value[near] = np.log1p(np.maximum((gain - drift).sum(axis=-1), 0.0))
    size = np.abs(gain).sum(axis=-1) + np.abs(drift).sum(axis=-1)
    rounding[near] = 4e-15 * size + np.abs(drift.sum(axis=-1))
    return value, rounding
