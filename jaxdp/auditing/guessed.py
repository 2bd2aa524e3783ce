"""Lower bounds on epsilon from the scores of one run's canaries.

Steinke, Nasr and Jagielski 2023, arXiv:2305.08846v1; see ``jaxdp.auditing.guesses`` for the bounds
that assume nothing, ``jaxdp.auditing.assumed`` for those that assume a family.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.accounting.gaussian import gaussian_epsilon
from jaxdp.auditing import assumed, bounds, guesses
from jaxdp.auditing.scores import Audited, check, checked

SIDES = ("both", "top")
COINS = "every canary was included by its own fair coin"
GAUSSIAN = f"{COINS}, and the mechanism is a Gaussian"
# Shares of m, each look's guesses among the next one's.
_LOOKS = (
    (0.01, "top"), (0.02, "top"), (0.04, "top"),
    (0.08, "both"), (0.15, "both"), (0.25, "both"), (0.4, "both"),
)  # fmt: skip
_ASSUMED = ((0.01, "top"), (0.03, "top"), (0.04, "both"), (0.1, "both"))
_TIES = 20_261_123  # of the order among equal scores
_UNFAIR = 1e-9  # fair coins are refused with this probability: nothing beside any error
_ROOT = 1.5  # guesses over the root of m: as many as a family's bound likes best, by simulation


class _Look(NamedTuple):
    """A number of guesses "in" and "out", and how many of them are right."""

    ins: int
    outs: int
    correct: int

    @property
    def total(self) -> int:
        return self.ins + self.outs


def audit_one_run(
    scores: Any,
    included: Any,
    delta: float,
    *,
    confidence: float = 0.95,
    looks: Sequence[tuple[int, str]] | None = None,
) -> Audited:
    """A lower bound on epsilon from one training run with many canaries.

    A look makes r guesses: "top": the r canaries with the highest scores are in; "both": half of r
    are in and as many with the lowest scores are out. Looks of which each holds the one before are
    paid for by the exact probability that any of them looks so good; others by Bonferroni.
    Equal scores are put in a random order, always the same: a place tells nothing of a coin.

    Formal guarantee: that of ``jaxdp.auditing.guesses.nested_p_value``: every canary was
    included by its own fair coin, secret to whoever computed the scores, and the scores are a
    function of what the run released and of the canaries.

    Args:
        scores: [m], higher for canaries that seem to be in.
        included: bool [m], the coins.
        delta: of the bound.
        confidence: in (0, 1).
        looks: pairs (r, side), fixed beforehand; None takes the best of seven: 1, 2 and 4 %
            of m on top, 8, 15, 25 and 40 % on both sides.

    Raises:
        ValueError: shapes that do not fit, coins that cannot be fair (all alike, say), or a look of
            another kind.
    """
    check(delta, confidence)
    order = _order(scores, included)
    found = _looks(order, _LOOKS if looks is None else looks, looks is not None)
    m, level = len(order), 1 - confidence
    if all(one.ins <= two.ins and one.outs <= two.outs for one, two in _pairs(found)):
        correct, made = (
            np.array([getattr(look, k) for look in found]) for k in ("correct", "total")
        )
        value = guesses.nested_bound(correct, made, m, delta, level)
    else:
        value = max(
            bounds.one_run_bound(look.correct, look.total, m, delta, 1 - level / len(found))
            for look in found
        )
    return Audited(value, delta, confidence, "one run", COINS, None, None)


def audit_guesses(
    log_odds: Any, included: Any, delta: float, *, confidence: float = 0.95
) -> Audited:
    """A lower bound on epsilon from one run whose scores are log odds of "in" against "out".

    Every canary is guessed by the sign of its log odds, with a weight that grows with their size
    and is 0 below a level. Weights and level are computed without the coins, so there is one
    statistic, and nothing to pay. Log odds that are wrong cost power, never validity.

    Formal guarantee: that of ``jaxdp.auditing.guesses.weighted_p_value``; coins and scores as for
    ``audit_one_run``.

    Args:
        log_odds: [m], such as a log-likelihood ratio with and without the canary.
        included: bool [m], the coins.
        delta: of the bound.
        confidence: in (0, 1).

    Raises:
        ValueError: shapes that do not fit, or coins that cannot be fair.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> coins, mu = rng.random(1_000) < 0.5, 1.666
        >>> seen = rng.normal(size=1_000) + mu * coins
        >>> audited = jaxdp.auditing.audit_guesses(mu * (seen - mu / 2), coins, delta=1e-5)
        >>> 2.0 < audited.epsilon < 8.0
        True
    """
    check(delta, confidence)
    odds = guesses.checked_odds(log_odds)
    coins = _coins(included, odds.shape)
    weights = guesses.weights_of(odds, len(odds), delta, 1 - confidence)
    value = guesses.weighted_bound(weights, (odds > 0) == coins, len(odds), delta, 1 - confidence)
    return Audited(value, delta, confidence, "one run, weighted", COINS, None, None)


def audit_one_run_gaussian(
    scores: Any,
    included: Any,
    delta: float,
    *,
    confidence: float = 0.95,
    looks: Sequence[tuple[int, str]] | None = None,
) -> Audited:
    """A lower bound on epsilon from one run, **if the mechanism is a Gaussian**.

    Formal guarantee: that of ``jaxdp.auditing.assumed.refuted``, of a mechanism whose trade-off
    function for each canary is at least that of a Gaussian: mu, and from it epsilon. Of another
    mechanism it says nothing, so it finds no bugs. Each look is paid for (Bonferroni).

    Args:
        scores: as for ``audit_one_run``.
        included: bool [m], the coins.
        delta: of the bound, above 0.
        confidence: in (0, 1).
        looks: as for ``audit_one_run``; None takes four: 1 and 3 % of m on top, 4 and 10 % on both
            sides.
    """
    check(delta, confidence, "gaussian")
    order = _order(scores, included)
    found = _looks(order, _ASSUMED if looks is None else looks, looks is not None)
    level = (1 - confidence) / len(found)
    mu = max(
        assumed.largest_mu(look.correct, look.total, len(order), level, one_sided=not look.outs)
        for look in found
    )
    value = gaussian_epsilon(mu, delta)[0]
    return Audited(value, delta, confidence, "one run, Gaussian", GAUSSIAN, None, None)


def audit_one_run_family(
    scores: Any,
    included: Any,
    family: Callable[[float], acc.Event],
    noise: float,
    delta: float,
    *,
    confidence: float = 0.95,
    guesses: int | None = None,
) -> Audited:
    """A lower bound on epsilon from one run, **if the mechanism is in a family of events**.

    Formal guarantee: that of ``jaxdp.auditing.assumed.refuted``, of a mechanism that is
    ``family(z)`` for some z: same sampling and steps, noise unknown. The canaries need not be
    independent of each other. It finds no bugs: a mechanism outside the family may have a smaller
    epsilon.

    Args:
        scores: [m], higher for canaries that seem to be in.
        included: bool [m], the coins.
        family: from a noise multiplier to the event, less private the smaller it is.
        noise: where the search begins.
        delta: of the bound, above 0.
        confidence: in (0, 1).
        guesses: how many of the highest scores are guessed to be in, fixed beforehand; None takes
            1.5 times the root of m.
    """
    check(delta, confidence, "gaussian")
    arguments.positive("noise", noise)
    order = _order(scores, included)
    r = min(len(order), round(_ROOT * len(order) ** 0.5)) if guesses is None else guesses
    (look,) = _looks(order, [(r, "top")], True)
    least = assumed.least_noise(look.correct, r, len(order), family, noise, 1 - confidence)
    value = 0.0 if least is None else acc.epsilon(family(least), delta).lower
    words = f"{COINS}, and the mechanism is what its event says, but for the size of the noise"
    return Audited(value, delta, confidence, "one run, family", words, None, None)


def _order(scores: Any, included: Any) -> np.ndarray:
    """bool [m], the coins from the highest score to the lowest, ties in a random order."""
    values, _ = checked(scores, scores)
    if np.ndim(scores) != 1:
        raise ValueError(f"scores must be [m], one a canary, got shape {np.shape(scores)}")
    coins = _coins(included, np.shape(scores))
    # Ties must not be broken by place: canaries that are listed by their coins would be told apart.
    anywhere = np.random.default_rng(_TIES).permutation(len(coins))
    return coins[np.lexsort((anywhere, -values[:, 0]))]


def _coins(included: Any, shape: tuple[int, ...]) -> np.ndarray:
    coins = np.asarray(included)
    if coins.shape != shape or coins.dtype != bool:
        raise ValueError(
            f"included must be bool {shape} like scores, got {coins.dtype} {coins.shape}"
        )
    ins = int(coins.sum())
    if 2 * special.bdtr(min(ins, len(coins) - ins), len(coins), 0.5) < _UNFAIR:
        raise ValueError(
            "included must be one fair coin for each canary, tossed by itself, got "
            f"{ins} of {len(coins)} that are True"
        )
    return coins


def _looks(order: np.ndarray, given: Sequence[tuple[Any, str]], fixed: bool) -> list[_Look]:
    """The looks, as given or as shares of m."""
    m, found = len(order), []
    if not given:
        raise ValueError(f"looks must be at least one pair (r, side), got {given!r}")
    for size, side in given:
        r = _look(size, side, m) if fixed else min(m, max(2, round(size * m)))
        outs = r // 2 if side == "both" else 0
        correct = int(order[: r - outs].sum() + (~order[m - outs :]).sum())
        found.append(_Look(r - outs, outs, correct))
    return found


def _pairs(looks: list[_Look]) -> list[tuple[_Look, _Look]]:
    looks.sort(key=lambda look: look.total)
    return list(itertools.pairwise(looks))


def _look(r: int, side: str, m: int) -> int:
    arguments.one_of("looks", side, SIDES)
    if arguments.integer("looks", r, least=1) > m:
        raise ValueError(f"looks must make at most {m} guesses, got {r}")
    return int(r)
