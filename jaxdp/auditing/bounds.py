"""Lower bounds on epsilon from counts of right and wrong guesses, in NumPy and SciPy alone.

An audit runs a mechanism many times without a record and many times with it, and guesses from what
was released which world it was in. Its false alarms and misses are binomial; a guarantee says which
pairs of probabilities (false alarm, miss) are possible, its trade-off function. A guarantee is
refuted when no possible pair explains the counts.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from scipy import special

from jaxdp import arguments
from jaxdp.accounting.gaussian import gaussian_epsilon

# From false-alarm probabilities [k] to the least probability of a miss [k]; non-increasing.
Tradeoff = Callable[[np.ndarray], np.ndarray]
RULES = ("sum", "box", "alarms", "misses")
_SHARES = {"box": 0.5, "alarms": 0.9, "misses": 0.1}  # of the error, spent on the false alarms
# Normal scores of the grid, dense where the maximum lies.
_LEVELS = np.r_[np.linspace(6, 3, 20), np.linspace(2.9, -3.6, 200), np.linspace(-3.8, -9, 40)]


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of right and wrong answers of one fixed test S ("the record was there").

    Attributes:
        alarms: runs without the record in which S happened.
        without: runs without the record.
        misses: runs with the record in which S did not happen.
        with_record: runs with the record.

    Raises:
        ValueError: a count below 0, no runs, or more alarms or misses than runs.
    """

    alarms: int
    without: int
    misses: int
    with_record: int

    def __post_init__(self) -> None:
        for hits, runs in (("alarms", "without"), ("misses", "with_record")):
            most = arguments.integer(runs, getattr(self, runs), least=1)
            if arguments.integer(hits, getattr(self, hits), least=0) > most:
                raise ValueError(
                    f"{hits} must be at most {runs} ({most}), got {getattr(self, hits)}"
                )


def p_value(counts: Counts, tradeoff: Tradeoff, rule: str = "sum") -> float:
    """A valid p-value of "the trade-off function of the two worlds is at least ``tradeoff``".

    For every possible (a, b), b >= tradeoff(a), the two one-sided Clopper-Pearson p-values of the
    counts are independent and super-uniform; ``rule`` combines them, and the largest combination
    over all possible pairs is the answer. Between the points of the grid both p-values are taken at
    their larger end, so the maximum is bounded from above.

    Args:
        counts: of an event that was fixed before these runs were looked at.
        tradeoff: see ``Tradeoff``.
        rule: "sum": P(min(Z1, 0) + min(Z2, 0) <= the sum of the two normal scores, capped at 0),
            which is Stouffer's rule without credit for a count that looks too good; "box":
            Bonferroni, twice the smaller p-value, as two Clopper-Pearson intervals at half the
            level: better where an event nearly never happens; "alarms" and "misses": the same with
            nine tenths of the error spent on the false alarms or on the misses.

    Raises:
        ValueError: ``counts`` are no ``Counts``, or the rule is unknown.
    """
    arguments.one_of("rule", rule, RULES)
    if not isinstance(counts, Counts):
        raise ValueError(f"counts must be Counts of one event, got {counts!r}")
    if counts.alarms == counts.without or counts.misses == counts.with_record:
        return 1.0
    # The first of the two p-values falls from 1 to 0 along the grid of a.
    first, grid = _grid(counts.alarms, counts.without)
    least = np.r_[tradeoff(grid), 0.0]  # the cell to the right of the last point reaches a = 1
    second = special.betainc(
        counts.with_record - counts.misses, counts.misses + 1.0, 1.0 - np.clip(least, 0.0, 1.0)
    )
    combine = _capped_sum if rule == "sum" else functools.partial(_box, share=_SHARES[rule])
    return float(np.max(combine(np.r_[1.0, first], second)))


@functools.lru_cache(maxsize=64)
def _grid(hits: int, runs: int) -> tuple[np.ndarray, np.ndarray]:
    """P(Bin(runs, a) <= hits) and the a at which it has that value, from 1 to 0."""
    values = special.betaincinv(hits + 1.0, runs - hits, special.ndtr(-_LEVELS))
    return special.betainc(runs - hits, hits + 1.0, 1.0 - values), values


def _box(first: np.ndarray, second: np.ndarray, share: float) -> np.ndarray:
    return np.minimum(1.0, np.minimum(first / share, second / (1 - share)))


def _capped_sum(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """P(min(Z1, 0) + min(Z2, 0) <= t) = Phi(t) + Phi(c) Phi(-c), c = -t / sqrt(2), for t < 0."""
    total = sum(np.minimum(special.ndtri(p), 0.0) for p in (first, second))
    c = -total / np.sqrt(2.0)
    value = special.ndtr(total) + special.ndtr(c) * special.ndtr(-c)
    return np.where(total < 0, value, 1.0)


def approximate_dp(epsilon: float, delta: float) -> Tradeoff:
    """The trade-off function of (epsilon, delta)-DP in both directions.

    f(a) = max(0, 1 - delta - e^epsilon a, e^-epsilon (1 - delta - a)) (Dong, Roth
    and Su 2019, arXiv:1905.02383v3, equation 2, after Wasserman and Zhou 2010
    and Kairouz, Oh and Viswanath 2015).
    """

    def tradeoff(a: np.ndarray) -> np.ndarray:
        one, other = 1 - delta - np.exp(epsilon) * a, np.exp(-epsilon) * (1 - delta - a)
        return np.maximum(0.0, np.maximum(one, other))

    return tradeoff


def gaussian_dp(mu: float) -> Tradeoff:
    """The trade-off function of mu-GDP, G_mu(a) = Phi(Phi^-1(1 - a) - mu).

    Dong, Roth and Su 2019, arXiv:1905.02383v3, equation 6.
    """
    return lambda a: special.ndtr(-special.ndtri(a) - mu)


def epsilon_bound(
    counts: Counts, delta: float, confidence: float = 0.95, rule: str = "sum"
) -> float:
    """A lower bound on epsilon at ``delta``; 0 where nothing is proven.

    Formal guarantee: of any mechanism that is (epsilon, delta)-DP for the two worlds (both
    directions), the answer exceeds epsilon with probability at most 1 - ``confidence``, if the
    event was fixed before these runs were looked at. No other assumption.

    Args:
        counts: of that event.
        delta: in [0, 1).
        confidence: in (0, 1).
        rule: see ``p_value``.
    """
    check_delta(delta)
    level = _level(confidence)
    return largest_refuted(lambda e: p_value(counts, approximate_dp(e, delta), rule), level)


def mu_bound(counts: Counts, confidence: float = 0.95, rule: str = "sum") -> float:
    """A lower bound on the mu of Gaussian DP; 0 where nothing is proven.

    Formal guarantee: as ``epsilon_bound``, of a mechanism that is mu-GDP.
    """
    return largest_refuted(lambda mu: p_value(counts, gaussian_dp(mu), rule), _level(confidence))


def gaussian_bound(
    counts: Counts, delta: float, confidence: float = 0.95, rule: str = "sum"
) -> float:
    """A lower bound on epsilon through the Gaussian profile; 0 where nothing is proven.

    (Nasr et al. 2023, arXiv:2302.07956v1, section 5: mu from one point, epsilon from mu.)

    Formal guarantee: as ``epsilon_bound``, but **only for mechanisms whose own trade-off
    function is Gaussian**: full-batch Gaussian noise, any number of steps, all released. Of any
    other mechanism, such as one that samples, one point says nothing about the profile elsewhere,
    and the answer may exceed its epsilon.
    """
    check_delta(delta, "gaussian")
    mu = mu_bound(counts, confidence, rule)
    return gaussian_epsilon(mu, delta)[0]


def one_run_p_value(
    correct: int, guesses: int, canaries: int, epsilon: float, delta: float
) -> float:
    """An upper bound on the probability of so many correct guesses under (epsilon, delta)-DP.

    (Steinke, Nasr and Jagielski 2023, arXiv:2305.08846v1, Theorem 5.2: beta + 2 m delta alpha.)

    Formal guarantee: every canary was put in by its own fair coin, and the guesses are a function
    of what was released; the relation is adding or removing one canary.

    Args:
        correct: right guesses v.
        guesses: r <= canaries; the others were abstained from.
        canaries: m.
        epsilon: >= 0.
        delta: in [0, 1).

    Raises:
        ValueError: a number is out of its range.
    """
    arguments.integer("canaries", canaries, least=0)
    for name, value, most in (("guesses", guesses, canaries), ("correct", correct, guesses)):
        if arguments.integer(name, value, least=0) > most:
            raise ValueError(f"{name} must be at most {most}, got {value}")
    check_delta(delta)
    at_least = _binomial_tail(guesses, special.expit(arguments.non_negative("epsilon", epsilon)))
    beta = at_least(np.asarray(correct))
    if delta == 0 or correct == 0:
        return float(beta)
    i = np.arange(1, correct + 1)
    alpha = np.max((at_least(correct - i) - beta) / i)
    return float(min(1.0, beta + 2 * canaries * delta * alpha))


def one_run_bound(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95
) -> float:
    """A lower bound on epsilon from the guesses about one training run; 0 where none is proven.

    Formal guarantee: see ``one_run_p_value``; the number of guesses was fixed beforehand.
    """
    level = _level(confidence)
    return largest_refuted(lambda e: one_run_p_value(correct, guesses, canaries, e, delta), level)


def _binomial_tail(runs: int, chance: float) -> Callable[[np.ndarray], np.ndarray]:
    def at_least(hits: np.ndarray) -> np.ndarray:
        inside = np.clip(hits, 1, max(runs, 1))
        tail = special.betainc(inside, runs - inside + 1.0, chance)
        return np.where(hits <= 0, 1.0, tail)

    return at_least


def largest_refuted(p_of: Callable[[float], float], level: float) -> float:
    """The largest parameter refuted at ``level``: p grows with the parameter."""
    if not p_of(0.0) <= level:
        return 0.0
    low, high = 0.0, 1.0
    while p_of(high) <= level:
        low, high = high, 2 * high
        if high > 512:
            return low
    while high - low > 1e-4 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if p_of(middle) <= level else (low, middle)
    return low


def check_delta(delta: float, kind: str = "") -> None:
    """Raises ValueError unless 0 <= delta < 1 (0 < delta < 1 for the kind "gaussian")."""
    if not 0 <= arguments.non_negative("delta", delta) < 1:
        raise ValueError(f"delta must be at least 0 and below 1, got {delta!r}")
    if kind == "gaussian" and delta == 0:
        raise ValueError("delta must be above 0 for the Gaussian profile, got 0")


def _level(confidence: float) -> float:
    return 1 - arguments.fraction("confidence", confidence)
