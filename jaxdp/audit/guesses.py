"""The lower bound on epsilon from one run with many canaries that assumes fair coins alone.

Steinke, Nasr and Jagielski (2023, arXiv:2305.08846v1, Theorem 5.2) bound the number of right
guesses by a binomial one. What is here rests on the same comparison, guess by guess. Every canary
i has its fair coin S_i; Y is what was released; the guesses, their order and their weights are
functions of Y.

    Given Y and the coins before it, guess i is right with probability at most q + F_i, where
    q = e^epsilon / (1 + e^epsilon) and E F_i <= delta / (1 + e^epsilon).

Proof: let P and P' be the laws of Y given the coins before i, and S_i = 1 or 0. They are mixtures
over the later coins, hence (epsilon, delta)-close. A guess "in" is right with probability
p / (p + p'), and the expected excess over q of both guesses is at most
(1 - q) / 2 (int (p - e^epsilon p')_+ + int (p' - e^epsilon p)_+) <= (1 - q) delta. So there are
independent coins X_i that come up with probability q, independent of Y, and "guess i is right"
implies X_i = 1 except in an event of probability E F_i. But for an event of probability at most
m delta / (1 + e^epsilon), **all** the right guesses are among the X_i at once, whatever the order:
any increasing statistic of the guesses is bounded by that of independent coins.

Y may hold randomness that is independent of the coins: (Y, U) is as private as Y. So equal scores
may be put in a random order, if it is drawn anew for every audit. One order for all audits will not
do: where canaries are listed by their coins, its places tell of the coins, and always the same.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from jaxdp import arguments
from jaxdp.audit import bounds
from jaxdp.audit.scores import Audited, as_numbers

SIDES = ("both", "top")
COINS = "every canary was included by its own fair coin"
# Shares of m, each look's guesses among the next one's.
_SHARES = (
    (0.01, "top"), (0.02, "top"), (0.04, "top"),
    (0.08, "both"), (0.15, "both"), (0.25, "both"), (0.4, "both"),
)  # fmt: skip
_LOOKS = 0.1  # of the error. By simulation: a leak as charged loses 1 %, and faults are still found
_UNFAIR = 1e-9  # fair coins are refused with this probability: nothing beside any error
_TIES = 0x71E5  # beside a seed
_STEP = 0.01  # of the grid of epsilons; a bound is one of them
_MOST = 40.0
_WEIGHTS = 10  # the largest weight
_TRIED = np.linspace(0.0, 0.98, 25)  # of the largest log odds


def audit_one_run(
    scores: ArrayLike,
    included: ArrayLike,
    delta: float,
    *,
    confidence: float = 0.95,
    log_odds: bool = False,
    seed: int | None = None,
) -> Audited:
    """A lower bound on epsilon from one training run with many canaries.

    A look makes r guesses: "top": the r canaries with the highest scores are in; "both": half of r
    are in and as many with the lowest scores are out. There are seven: 1, 2 and 4 % of m on top, 8,
    15, 25 and 40 % on both sides. Each look holds the one before, and they are paid for by the
    exact probability that any of them looks so good.

    Scores that are log odds of "in" against "out" tell more: every canary is guessed by their sign,
    with a weight that grows with their size and is 0 below a level. Weights and level are computed
    without the coins, so there is one statistic, and nothing to pay. Log odds that are wrong cost
    power, never validity; as those of a faulty run are, a tenth of the error is left for the looks.

    Formal guarantee: that of ``nested_p_value`` and ``weighted_tail``: every canary was included
    by its own fair coin, secret to whoever computed the scores, and the scores are a function of
    what the run released and of the canaries. Equal scores are put in an order that is independent
    of the coins, see the module.

    Args:
        scores: [m], higher for canaries that seem to be in.
        included: bool [m], the coins.
        delta: of the bound.
        confidence: in (0, 1).
        log_odds: the scores are log odds, such as a log-likelihood ratio with and without the
            canary.
        seed: of the order among equal scores, chosen without a look at the coins; None takes one
            from the operating system.

    Raises:
        ValueError: shapes that do not fit, or coins that cannot be fair (all alike, say).

    Example:
        >>> rng = np.random.default_rng(0)
        >>> coins, mu = rng.random(1_000) < 0.5, 1.666
        >>> seen = rng.normal(size=1_000) + mu * coins
        >>> odds = mu * (seen - mu / 2)
        >>> audited = jaxdp.audit.audit_one_run(odds, coins, delta=1e-5, log_odds=True)
        >>> 2.0 < audited.epsilon < 8.0
        True
    """
    arguments.decay("delta", delta)
    level = 1 - arguments.fraction("confidence", confidence)
    coins, order = order_by_score(scores, included, seed)
    m, share = len(order), _LOOKS if log_odds else 1.0
    looks = [(min(m, max(2, round(part * m))), side) for part, side in _SHARES]
    value = nested_bound(*count_right(coins[order], looks), m, delta, share * level)
    if log_odds:
        value = max(value, weighted_guesses_bound(scores, coins, delta, (1 - share) * level))
    return Audited(value, delta, confidence, COINS)


def order_by_score(
    scores: ArrayLike, included: ArrayLike, seed: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The coins [m], and the canaries from the highest score to the lowest, int [m].

    Raises:
        ValueError: shapes that do not fit, or coins that cannot be fair.
    """
    values, coins = as_numbers("scores", scores), np.asarray(included)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"scores must be [m], one a canary, got shape {values.shape}")
    if coins.shape != values.shape or coins.dtype != bool:
        raise ValueError(
            f"included must be bool {values.shape} like scores, got {coins.dtype} {coins.shape}"
        )
    ins, m = int(coins.sum()), len(coins)
    if 2 * special.bdtr(min(ins, m - ins), m, 0.5) < _UNFAIR:
        raise ValueError(
            "included must be one fair coin for each canary, tossed by itself, got "
            f"{ins} of {m} that are True"
        )
    # A stream of its own, for the coins may come of the same seed.
    own = None if seed is None else (arguments.integer("seed", seed, least=0), _TIES)
    # Ties are broken anew for every audit: neither by place nor by one order for all.
    ties = np.random.default_rng(own).permutation(m)
    return coins, np.lexsort((ties, -values))


def count_right(
    coins: np.ndarray, looks: Sequence[tuple[int, str]]
) -> tuple[np.ndarray, np.ndarray]:
    """(right guesses [k], guesses [k]) of every look, from the fewest guesses to the most.

    One that does not hold the guesses of the one before is left out, as some are of few canaries.

    Args:
        coins: bool [m], from the highest score to the lowest.
        looks: pairs (r, side), see ``audit_one_run``, fixed beforehand.

    Raises:
        ValueError: a look of another kind, or with more guesses than canaries.
    """
    m, found = len(coins), [(0, 0, 0)]
    for r, side in sorted(looks, key=lambda look: look[0]):
        arguments.integer("looks", r, least=1, most=m)
        outs = r // 2 if arguments.one_of("looks", side, SIDES) == "both" else 0
        ins = r - outs
        if ins >= found[-1][0] and outs >= found[-1][1]:
            found.append((ins, outs, int(coins[:ins].sum() + (~coins[m - outs :]).sum())))
    ins_outs_right = np.array(found[1:])
    return ins_outs_right[:, 2], ins_outs_right[:, 0] + ins_outs_right[:, 1]


def weighted_guesses_bound(
    log_odds: ArrayLike, coins: np.ndarray, delta: float, level: float
) -> float:
    """The lower bound on epsilon of the weighted guesses alone; not-a-number tells nothing."""
    odds = np.nan_to_num(np.asarray(log_odds, np.float64), nan=0.0, posinf=1e3, neginf=-1e3)
    weights = choose_weights(odds, level)
    return weighted_bound(weights, (odds > 0) == coins, len(odds), delta, level)


def delta_excess(canaries: int, epsilon: float, delta: float) -> float:
    """m delta / (1 + e^epsilon), the probability that delta makes a guess right."""
    return canaries * delta * float(special.expit(-epsilon))


def nested_p_value(
    correct: np.ndarray, guesses: np.ndarray, canaries: int, epsilon: float, delta: float
) -> float:
    """A valid p-value of (epsilon, delta)-DP from right guesses, at several numbers of guesses.

    P(some look's binomial p-value is as small as the smallest one seen) for coins that come up with
    probability e^epsilon / (1 + e^epsilon), exactly, plus ``excess``: the payment for all looks.

    Formal guarantee: every canary was put in by its own fair coin; the guesses are a function of
    what was released, their numbers were fixed beforehand, each look's are among the next one's.

    Args:
        correct: int [k], right guesses among the first ``guesses``.
        guesses: int [k], increasing.
        canaries: m.
        epsilon: >= 0.
        delta: in [0, 1).
    """
    q = float(special.expit(epsilon))
    smallest = min(_binomial_tail(r, q)[c] for r, c in zip(guesses, correct, strict=True))
    state, before, crossed = np.ones(1), 0, delta_excess(canaries, epsilon, delta)
    for r in guesses:  # the law of the right guesses where no look was as good so far
        state, before = np.convolve(state, bounds.binomial_pmf(int(r) - before, q)), int(r)
        edge = int(np.argmax(_binomial_tail(before, q) <= smallest * (1 + 1e-9)))
        crossed, state = crossed + float(state[edge:].sum()), state[:edge]
        if not state.size:
            return 1.0
    return min(1.0, crossed)


def nested_bound(
    correct: np.ndarray, guesses: np.ndarray, canaries: int, delta: float, level: float
) -> float:
    """The largest epsilon of a grid up to which all are refuted by ``nested_p_value``; or 0.

    The grid begins where ``excess`` is at most half the error, which is fixed beforehand: what is
    (epsilon, delta)-DP for an epsilon below is so there too.
    """
    looks, found = len(guesses), 0.0
    for i in range(_first_grid_place(canaries, delta, level), round(_MOST / _STEP) + 1):
        epsilon = i * _STEP
        q, more = float(special.expit(epsilon)), delta_excess(canaries, epsilon, delta)
        least = min(
            special.betainc(c, r - c + 1.0, q) if c else 1.0
            for r, c in zip(guesses, correct, strict=True)
        )
        # The sum over the looks is above the joint probability, the smallest below it.
        if least + more > level:
            break
        joint = looks * least + more > level
        if joint and nested_p_value(correct, guesses, canaries, epsilon, delta) > level:
            break
        found = epsilon
    return found


def choose_weights(log_odds: np.ndarray, level: float) -> np.ndarray:
    """int [m], weights of the guesses, 0 for those that are abstained from; without the coins.

    (|log odds| - c)_+ is the likelihood ratio's weight of a right guess against epsilon c (a coin
    with probability e^c / (1 + e^c)). c is the one with the largest bound where the log odds are
    true. Rounded to whole numbers, so that the null distribution is exact.

    Args:
        log_odds: float [m], of "in" against "out".
        level: the error.
    """
    size, z = np.abs(log_odds), -special.ndtri(level)
    chance, best = special.expit(size), (-1.0, np.zeros(len(size), int))
    for part in _TRIED:
        weights = np.maximum(size - part * size.max(), 0.0)
        if weights.max() <= 0:
            continue
        whole = np.rint(weights * (_WEIGHTS / weights.max())).astype(int)
        if not whole.any():
            continue

        # Nearly the bound that right guesses with these chances would give: where the sum to be
        # expected is z standard deviations above its mean, or where all guesses are right.
        total, squares, mean = whole.sum(), np.square(whole).sum(), whole @ chance
        epsilon = 0.0
        for step in 2.0 ** np.arange(4, -8, -1):
            q = special.expit(epsilon + step)
            low = mean - total * q >= z * math.sqrt(q * (1 - q) * squares)
            epsilon += step if low else 0.0
        all_right = special.logit(level ** (1 / np.count_nonzero(whole)))
        best = max(best, (min(epsilon, float(all_right)), whole), key=lambda pair: pair[0])
    return best[1]


def weighted_tail(weights: np.ndarray, right: np.ndarray, epsilon: float) -> float:
    """P(sum of w_i X_i >= the sum of the weights of right guesses), exactly.

    The X_i are independent coins that come up with probability e^epsilon / (1 + e^epsilon).

    Formal guarantee: with ``excess`` added it is a valid p-value of (epsilon, delta)-DP, if every
    canary was put in by its own fair coin; guesses and weights are a function of what was released.

    Args:
        weights: int [m] >= 0.
        right: bool [m].
        epsilon: >= 0.
    """
    q, law = float(special.expit(epsilon)), np.ones(1)
    for weight in range(1, int(weights.max(initial=0)) + 1):
        times = int(np.count_nonzero(weights == weight))
        if times:
            spread = np.zeros(weight * times + 1)
            spread[::weight] = bounds.binomial_pmf(times, q)
            law = np.convolve(law, spread)
    return float(law[int(weights @ right) :].sum())


def weighted_bound(
    weights: np.ndarray, right: np.ndarray, canaries: int, delta: float, level: float
) -> float:
    """A lower bound on epsilon from the sum of the weights of right guesses; 0 for none.

    Every epsilon from the grid's first one up to the bound is refuted. One alone would not do: the
    weights depend on what was released, and so might the epsilon at which ``excess``, which holds
    on average over the releases, looks smallest. The tail grows with epsilon and the excess falls.
    So an excess that was paid at the lower end of a stretch is enough for all of it.
    """
    low = _first_grid_place(canaries, delta, level) * _STEP
    if weighted_tail(weights, right, low) + delta_excess(canaries, low, delta) > level:
        return 0.0
    while True:
        start, paid = low, delta_excess(canaries, low, delta)
        found = start + bounds.largest_refuted(
            lambda more, start=start, paid=paid: (  # type: ignore[misc]
                weighted_tail(weights, right, start + more) + paid
            ),
            level,
        )
        if found - low < _STEP:
            return found
        low = found


def _first_grid_place(canaries: int, delta: float, level: float) -> int:
    """The place on the grid of the first epsilon whose ``excess`` is at most half the error."""
    places = np.arange(round(_MOST / _STEP) + 1)
    enough = canaries * delta * special.expit(-places * _STEP) <= level / 2
    return int(np.argmax(enough)) if enough.any() else len(places)


def _binomial_tail(runs: int, q: float) -> np.ndarray:
    """[runs + 2], P(Bin(runs, q) >= hits)."""
    hits = np.arange(1, runs + 1)
    return np.r_[1.0, special.betainc(hits, runs - hits + 1.0, q), 0.0]
