"""Tests of an assumed trade-off function by the guesses about one run.

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

from jaxdp import accounting as acc
from jaxdp.auditing import bounds
from jaxdp.auditing.events import least_refuted, profile

# From a probability x to the least a with 1 - f(a) >= x.
Inverse = Callable[[float], float]
_NORMAL = NormalDist()
# Of the profile: close together where few wrong guesses among many right ones lie.
_EPSILONS = (
    0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.25, 3.5, 3.75, 4.0, 4.25, 4.5, 4.75, 5.0, 5.5, 6.0,
    7.0, 8.0,
)  # fmt: skip


def refuted(
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


def largest_mu(
    correct: int, guesses: int, canaries: int, level: float, *, one_sided: bool
) -> float:
    """The largest refuted mu of Gaussian DP; 0 where none is."""

    def p(mu: float) -> float:
        found = refuted(
            correct, guesses, canaries, gaussian_inverse(mu), level, one_sided=one_sided
        )
        return 0.0 if found else 1.0

    return bounds.largest_refuted(p, level)


def least_noise(
    correct: int,
    guesses: int,
    canaries: int,
    family: Callable[[float], acc.Event],
    noise: float,
    level: float,
) -> float | None:
    """Nearly the least refuted noise of a family, itself refuted; None where none is.

    All guesses say "in". The relation is adding or removing a record.

    Args:
        correct: right guesses.
        guesses: r.
        canaries: m.
        family: from a noise multiplier to the event.
        noise: where the search begins.
        level: in (0, 1).
    """

    def of(z: float) -> bool:
        inverse = event_inverse(family(z))
        return refuted(correct, guesses, canaries, inverse, level, one_sided=True)

    return least_refuted(of, noise)


def gaussian_inverse(mu: float) -> Inverse:
    """The ``Inverse`` of a Gaussian's trade-off function: Phi(Phi^-1(x) - mu)."""

    def inverse(x: float) -> float:
        return _NORMAL.cdf(_NORMAL.inv_cdf(x) - mu) if 0 < x < 1 else float(x >= 1)

    return inverse


def event_inverse(event: acc.Event) -> Inverse:
    """The ``Inverse`` of a trade-off function not above the event's own."""
    return _of_pieces(profile(event, acc.Relation.ADD_OR_REMOVE_ONE, _EPSILONS))


@functools.lru_cache(maxsize=64)
def _of_pieces(pieces: tuple[tuple[float, float], ...]) -> Inverse:
    known = [(math.exp(epsilon), delta) for epsilon, delta in pieces]

    def inverse(x: float) -> float:
        both = (max((x - d) / e, 1 - d - (1 - x) * e) for e, d in known)
        return min(1.0, max(0.0, *both))

    return inverse
