"""The Gaussian mechanism without sampling, whose privacy profile is known in closed form."""

import math
from collections.abc import Callable

from scipy import special

from jaxdp.accounting.roots import bracket_decreasing, expand_right

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
    return bracket_epsilon(lambda epsilon: gaussian_delta(mu, epsilon), delta, scale, margin)


def bracket_epsilon(
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
        def excess(epsilon: float) -> float:
            value = delta_at(epsilon)
            return math.log(value / target) if value > 0 else -math.inf

        if excess(0.0) <= 0:
            return 0.0, 0.0
        hi = expand_right(excess, scale)
        return bracket_decreasing(excess, 0.0 if hi == scale else hi / 2, hi)

    return end(delta * (1 + margin))[0], end(delta * (1 - margin))[1]
