"""A lower bound on epsilon from one run that assumes a family of trade-off functions (f-DP).

Mahloujifar, Melis and Chaudhuri (2024, arXiv:2410.22235) bound the number of right guesses of a
mechanism that keeps a trade-off function f for each canary, whatever joins the canaries.

    Let r of m canaries be guessed, p_i = P(i guesses are right), and for some k let
    R = sum_{i >= k} (i / m) p_i and W = sum_{i >= k - 1} ((r - i) / m) p_i. Then R <= 1 - f(W).
    If all guesses say "in": R <= (1 - f(2 W)) / 2.

Proof: fix the other coins. "Canary j is guessed to be v, and with it, were that right, at least k
guesses are" is one event of the release. Its probabilities with S_j = v and S_j = 1 - v are a
guarantee's pair: one is at most 1 - f(the other). 1 - f is concave, so this holds of the mean over
the coins and over j; the means are R and W. If all say "in", only v = 1 occurs, whose joint
probability with the coin is half of that given the coin.

Feasible numbers p stay feasible when mass moves to fewer right guesses. So the largest
P(at least c are right) is found by putting that mass at c, then, going down, the least mass that
each k allows; it is possible if and only if the whole mass is at most 1. (The paper's Algorithm 3;
the halved form for one-sided guesses and this proof are ours.)
"""

import functools
import math
from collections.abc import Callable
from statistics import NormalDist

from numpy.typing import ArrayLike

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.audit.guesses import COINS, count_right, order_by_score
from jaxdp.audit.scores import Audited, privacy_profile, smallest_refuted_noise

# From a probability x to the least a with 1 - f(a) >= x.
Inverse = Callable[[float], float]
_NORMAL = NormalDist()
# Guesses over the root of m: as many as a bound likes best, by simulation.
_SAMPLED, _GAUSSIAN = (1.5, "top"), (6.0, "both")
# Of the profile: close together where few wrong guesses among many right ones lie.
_EPSILONS = (
    0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.25, 3.5, 3.75, 4.0, 4.25, 4.5, 4.75, 5.0, 5.5, 6.0,
    7.0, 8.0,
)  # fmt: skip


def audit_one_run_family(
    scores: ArrayLike,
    included: ArrayLike,
    family: Callable[[float], acc.Event],
    noise: float,
    delta: float,
    *,
    confidence: float = 0.95,
    seed: int | None = None,
) -> Audited:
    """A lower bound on epsilon from one run, **if the mechanism is in a family of events**.

    Formal guarantee: that of ``refuted``, of a mechanism whose trade-off function for each canary
    is at least that of ``family(z)`` for some z: same sampling and steps, noise unknown. The
    canaries need not be independent of each other. It finds no bugs: a mechanism outside the family
    may have a smaller epsilon.

    One look is made, fixed beforehand (see ``jaxdp.audit.audit_one_run``): the highest scores, 1.5
    times the root of m, or of Gaussian events 6 times the root of m on both sides.

    Args:
        scores: [m], higher for canaries that seem to be in.
        included: bool [m], the coins.
        family: from a noise multiplier to the event, less private the smaller it is:
            ``accounting.Gaussian``, or sampling and steps with that noise.
        noise: where the search begins.
        delta: of the bound, above 0.
        confidence: in (0, 1).
        seed: of the order among equal scores, as there.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> coins = rng.random(1_000) < 0.5
        >>> seen = rng.normal(size=1_000) + coins
        >>> gaussian = jaxdp.accounting.Gaussian
        >>> found = jaxdp.audit.audit_one_run_family(seen, coins, gaussian, 1.0, delta=1e-5)
        >>> 1.0 < found.epsilon < 4.38
        True
    """
    for name, value in (("delta", delta), ("confidence", confidence)):
        arguments.fraction(name, value)
    arguments.positive("noise", noise)
    coins, order = order_by_score(scores, included, seed)
    m, level = len(order), 1 - confidence
    times, side = _GAUSSIAN if isinstance(family(noise), acc.Gaussian) else _SAMPLED
    look = min(m, round(times * m**0.5)), side
    (correct,), (made,) = (each.tolist() for each in count_right(coins[order], [look]))

    def impossible(z: float) -> bool:
        """True if noise multiplier z is refuted."""
        one_sided = look[1] == "top"
        return is_refuted(correct, made, m, event_inverse(family(z)), level, one_sided=one_sided)

    least = smallest_refuted_noise(impossible, noise)
    value = 0.0 if least is None else acc.epsilon(family(least), delta).lower
    words = f"{COINS}, and the mechanism is what its event says, but for the size of the noise"
    return Audited(value, delta, confidence, words)


def is_refuted(
    correct: int, guesses: int, canaries: int, inverse: Inverse, level: float, *, one_sided: bool
) -> bool:
    """True if so many right guesses have at most probability ``level`` under a trade-off function.

    Formal guarantee: of any mechanism whose trade-off function for each canary, all other coins
    fixed, is at least f in both directions, the answer is True with probability at most ``level``:
    the module's inequality. Every canary was put in by its own fair coin, and the number of guesses
    was fixed beforehand.

    Args:
        correct: right guesses c.
        guesses: r <= m.
        canaries: m.
        inverse: see ``Inverse``.
        level: in (0, 1).
        one_sided: all guesses say "in".
    """
    scale = 2.0 if one_sided else 1.0
    right, wrong = level * correct / canaries, level * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        least = inverse(min(1.0, scale * right)) / scale
        if least <= wrong:
            break  # neither changes any more
        right, wrong = right + i / (guesses - i) * (least - wrong), least
        if right + wrong > guesses / canaries:
            return True
    return right + wrong > guesses / canaries


def event_inverse(event: acc.Event) -> Inverse:
    """The ``Inverse`` of an event's trade-off function, or of one below it.

    That of a Gaussian is Phi(Phi^-1(x) - mu), mu = 1 / noise multiplier; of others it is read from
    the profile at a few epsilons.
    """
    if isinstance(event, acc.Gaussian):
        mu = 1 / event.noise_multiplier

        def inverse(x: float) -> float:
            """Phi(Phi^-1(x) - mu)."""
            return _NORMAL.cdf(_NORMAL.inv_cdf(x) - mu) if 0 < x < 1 else float(x >= 1)

        return inverse
    return profile_inverse(privacy_profile(event, acc.Relation.ADD_OR_REMOVE_ONE, _EPSILONS))


@functools.lru_cache(maxsize=64)
def profile_inverse(pieces: tuple[tuple[float, float], ...]) -> Inverse:
    """The ``Inverse`` where pairs (epsilon, delta) are known to hold."""
    known = [(math.exp(epsilon), delta) for epsilon, delta in pieces]

    def inverse(x: float) -> float:
        """The least a that all pairs allow: 1 - f is the least of their lines."""
        both = (max((x - d) / e, 1 - d - (1 - x) * e) for e, d in known)
        return min(1.0, max(0.0, *both))

    return inverse
