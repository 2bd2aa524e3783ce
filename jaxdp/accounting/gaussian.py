"""The Gaussian mechanism without sampling: its privacy profile is known in closed form."""

import math
from collections.abc import Callable

from scipy import special

from jaxdp.accounting.roots import bracket_decreasing, expand_right

_SQRT_2PI = math.sqrt(2 * math.pi)


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
    if mu < 1e-5:
        # R(a) - R(a + mu) by the midpoint rule, R'(t) = t R(t) - 1: the plain difference cancels.
        difference = mu * (1 - epsilon / mu * _mills(epsilon / mu))
    else:
        difference = _mills(a) - _mills(b)
    return math.exp(-0.5 * a * a) / _SQRT_2PI * max(difference, 0.0)


def gaussian_epsilon(mu: float, delta: float) -> tuple[float, float]:
    """(lower, upper) ends of the exact epsilon; (0, 0) if delta(0) <= delta.

    The ends are roots at delta (1 +- 1e-10): delta itself is only known that well, and where it is
    close to delta(0) a relative margin on epsilon would be too thin.

    Args:
      mu: >= 0, as in `gaussian_delta`.
      delta: in (0, 1).
    """
    return bracket_epsilon(lambda epsilon: gaussian_delta(mu, epsilon), delta, max(mu, mu * mu))


def bracket_epsilon(
    delta_at: Callable[[float], float], delta: float, scale: float
) -> tuple[float, float]:
    """(lower, upper) epsilon of a decreasing profile that is known to a relative 1e-10.

    Args:
      delta_at: delta as a function of epsilon >= 0.
      delta: the target, in (0, 1).
      scale: a typical epsilon, > 0, from where the search starts.
    """

    def end(target: float) -> tuple[float, float]:
        def excess(epsilon: float) -> float:
            value = delta_at(epsilon)
            return math.log(value / target) if value > 0 else -math.inf

        if excess(0.0) <= 0:
            return 0.0, 0.0
        hi = expand_right(excess, scale)
        return bracket_decreasing(excess, 0.0 if hi == scale else hi / 2, hi)

    return end(delta * (1 + 1e-10))[0], end(delta * (1 - 1e-10))[1]
