"""Gaussian mechanisms whose privacy profile is known in closed form: unsampled, or sampled once."""

import math
from collections.abc import Callable

import numpy as np
from scipy import special

from jaxdp.accounting.events import Relation
from jaxdp.accounting.pairs import SampledGaussian, bracket_decreasing, expand_right, normal_cells

_SQRT_2PI = math.sqrt(2 * math.pi)

PROFILE_ERROR = 1e-10  # relative error allowed to a closed-form delta


def _mills(t: float) -> float:
    """Mills' ratio (1 - Phi(t)) / phi(t), shape (), finite for t > -37."""
    return math.sqrt(math.pi / 2) * float(special.erfcx(t / math.sqrt(2)))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Exact delta of a mu-GDP Gaussian mechanism (no sampling), mu = sensitivity / noise std.

    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu): Balle and Wang 2018,
    "Improving the Gaussian mechanism" (arXiv:1805.06530v2), Theorem 8. Written with Mills' ratio so
    that neither e^epsilon nor the difference loses digits; relative error about 1e-12.

    Args:
        mu: >= 0. Under replace-one pass twice the add/remove value.
        epsilon: >= 0.
    """
    if mu == 0:
        return 0.0
    a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    if a < -5:
        return float(special.ndtr(-a) - math.exp(-0.5 * a * a) / _SQRT_2PI * _mills(b))
    if mu < 1e-3:
        # R(a) - R(a + mu) by the midpoint rule and its correction: the plain difference cancels.
        # R' = t R - 1, and differentiating that twice more gives the third derivative.
        t = epsilon / mu
        first = t * _mills(t) - 1
        third = 2 * first + t * (_mills(t) + t * first)
        difference = -mu * (first + mu * mu / 24 * third)
    else:
        difference = _mills(a) - _mills(b)
    return math.exp(-0.5 * a * a) / _SQRT_2PI * max(difference, 0.0)


def gaussian_epsilon(mu: float, delta: float) -> tuple[float, float]:
    """(lower, upper) ends of the exact epsilon; (0, 0) if delta(0) <= delta.

    The ends are roots at delta (1 +- margin): delta itself is only known that well, and where it is
    close to delta(0) a relative margin on epsilon would be too thin.

    Args:
        mu: >= 0, as in ``gaussian_delta``.
        delta: in (0, 1).
    """
    # Where mu is huge, epsilon is about mu^2/2 and its rounding alone moves delta by 1e-16 mu.
    margin = min(PROFILE_ERROR + 4e-15 * mu, 0.5)
    scale = max(mu, mu * mu)
    return solve_epsilon(lambda epsilon: gaussian_delta(mu, epsilon), delta, scale, margin)


def solve_epsilon(
    delta_at: Callable[[float], float], delta: float, scale: float, margin: float
) -> tuple[float, float]:
    """(lower, upper) epsilon of a decreasing profile that is known to a relative ``margin``.

    Args:
        delta_at: delta as a function of epsilon >= 0.
        delta: the target, in (0, 1).
        scale: a typical epsilon, > 0, from where the search starts.
        margin: relative error of the profile, < 1.
    """

    def end(target: float) -> tuple[float, float]:
        """Two epsilons that bracket the one at this delta."""

        def excess(epsilon: float) -> float:
            """log of delta there over the target; decreasing."""
            value = delta_at(epsilon)
            return math.log(value / target) if value > 0 else -math.inf

        if excess(0.0) <= 0:
            return 0.0, 0.0
        hi = expand_right(excess, scale)
        return bracket_decreasing(excess, 0.0 if hi == scale else hi / 2, hi)

    return end(delta * (1 + margin))[0], end(delta * (1 - margin))[1]


def sampled_delta(z: float, q: float, relation: Relation, epsilon: float) -> float:
    """The delta(epsilon) of one Poisson-sampled step, the larger of both directions.

    The worst event is an output beyond a threshold, because the likelihood ratio is monotone. For
    add/remove that gives q delta_G(log(1 + (e^epsilon - 1)/q)), delta_G the unsampled profile
    (amplification by sampling: Balle, Barthe and Gaboardi 2018, arXiv:1807.01647v2, Theorem 8, with
    equality for the Gaussian); replace-one follows the same way. The reverse of add/remove has
    a H_b, H_b = sup_A N1(A) - b N0(A), where the forward direction has q H_c: with t = e^epsilon
    and r = 1 - q, a = max(1 - r t, 0) <= q and b = q t/a, and a q (b - c) = r (t - 1)^2 >= 0 with
    c = 1 + (t - 1)/q. So it is never larger. The relative error is below 1e-10.
    """
    mu = relation.separation / z
    if q == 1:
        return gaussian_delta(mu, epsilon)
    if relation is Relation.REPLACE_ONE:
        return _replace_one(z, q, epsilon)
    # epsilon' with e^epsilon' = 1 + (e^epsilon - 1)/q, without overflow.
    if epsilon > 30:
        inner = epsilon - math.log(q) + math.log1p((q - 1) * math.exp(-epsilon))
    else:
        inner = math.log1p(math.expm1(epsilon) / q)
    return q * gaussian_delta(mu, inner)


def _replace_one(z: float, q: float, epsilon: float) -> float:
    """P's mass beyond the threshold minus e^epsilon Q's, for the symmetric pair of mixtures.

    The threshold is where that is largest, so that its rounding enters squared.
    """
    x = float(SampledGaussian(z, q, Relation.REPLACE_ONE).output(np.asarray([epsilon]))[0])
    # delta = first - e^epsilon second = q (A - B) - (e^epsilon - 1) second, second = (1-q) C + q B:
    # the parts that nearly cancel are taken as one difference.
    t, h = x / z, 1 / z
    if epsilon < 500:
        # Of [t - h, t + h], whose width the difference of these two would lose.
        between = float(normal_cells(np.asarray([-h, h]), -t, 1.0)[0])
        second = (1 - q) * special.ndtr(-t) + q * special.ndtr(-t - h)
        return max(q * between - math.expm1(epsilon) * float(second), 0.0)
    # e^epsilon alone would overflow; times a tail it does not.
    base, present = special.log_ndtr(-t), special.log_ndtr(-t - h)
    log_second = np.logaddexp(math.log1p(-q) + base, math.log(q) + present)
    first = (1 - q) * special.ndtr(-t) + q * special.ndtr(h - t)
    return max(float(first) - math.exp(min(epsilon + float(log_second), 0.0)), 0.0)
