"""Estimates of epsilon and delta by the contour integral, which no guarantee rests on."""

import math

import numpy as np

from jaxdp.accounting.base import Array, Unresolved
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.canonical import Run
from jaxdp.accounting.contour import Composition, Line, draw
from jaxdp.accounting.loss import separation
from jaxdp.accounting.moments import log_moments
from jaxdp.accounting.roots import bracket_decreasing

EPSILON_ERROR, DELTA_ERROR = 1e-6, 1e-4  # relative; a worse estimate is none
_ALIAS = 26.0  # aliased copies are kept below e^-26 of delta
_LOG_CUT = -25.0  # log probability of the outputs cut off, relative to delta


def composition(run: Run, relation: Relation, log_delta: float) -> Composition:
    """The run of Gaussians on Poisson samples and full batches, for deltas near this one."""
    sampled = tuple((s, n) for s, n in run.steps if s.sampling_prob < 1)
    mu2 = math.fsum(
        n * (separation(relation) / s.noise_multiplier) ** 2
        for s, n in run.steps
        if s.sampling_prob == 1
    )
    return Composition(sampled, relation, mu2, _LOG_CUT + log_delta)


def epsilon(run: Run, relation: Relation, delta: float) -> float:
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


def delta(run: Run, relation: Relation, epsilon: float) -> float:
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


class Moments:
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
) -> tuple[float, Moments]:
    """(real part c of the line for this log of delta, or this epsilon; moments up to 8c + 8).

    Raises:
        Unresolved: the moments cannot be tabulated, or no order suits.
    """

    def at(log_c: float) -> float:
        found, log, _ = moments.saddle(math.exp(log_c))
        return log - log_delta if epsilon is None else epsilon - found

    high = 2.0
    moments = Moments(composition, math.exp(high))
    while at(high) > 0:
        high += 2
        if high > 28:
            raise Unresolved("no saddle point below order e^28")
        moments = Moments(composition, math.exp(high))
    low = high - 4
    while at(low) <= 0:
        low -= 4
        if low < -80:
            raise Unresolved("no saddle point above order e^-80")
    c = math.exp(bracket_decreasing(at, low, high, rtol=1e-2, max_iter=25)[1])
    return c, Moments(composition, 8 * c + 8)


def cheapest(
    moments: Moments, c: float, epsilon: float, log_delta: float
) -> tuple[float, float, float]:
    """(order, period, last frequency): of the saddle, or of a lower order with a shorter period.

    Where a step's loss has a heavy tail the law tilted at the saddle has a second mode far out. The
    answer is the same on any line, so a line that leaves that mode behind is as good and shorter.
    """
    orders = [share * c for share in (1, 0.7, 0.5, 0.35, 0.25, 0.15)]
    periods = [_period(moments, order, epsilon, log_delta) for order in orders]
    best = int(np.argmin([0.5 * periods[0], *periods[1:]]))
    c, length = orders[best], periods[best]
    return c, 1.1 * length, 8 / math.sqrt(moments.saddle(c)[2])


def _period(moments: Moments, c: float, epsilon: float, log_delta: float) -> float:
    """A period 2 pi/h for which the aliased copies of delta are below e^-26 of it.

    To the left delta <= 1, so a copy weighs at most e^(-c period). To the right delta(x) <=
    exp(K(c') - c' x) for every c' > c.
    """
    other = np.asarray([1.05 * c, 1.15 * c, 1.3 * c, 1.6 * c, 2 * c + 1, 3 * c + 3, 8 * c + 8])
    right = (moments.at(other) - other * epsilon - log_delta + _ALIAS) / (other - c)
    return max((_ALIAS - log_delta) / c, float(right.min()))
