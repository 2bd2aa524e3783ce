"""Valid p-values of a trade-off function from two worlds, in NumPy and SciPy alone.

An audit runs a mechanism many times without a record and many times with it, and guesses from what
was released which world it was in. A guarantee says which pairs of probabilities (false alarm,
miss) are possible, its trade-off function. It is refuted when no possible pair explains what was
seen: either the counts of a test that was fixed beforehand, or the misses at a threshold of fixed
rank.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from scipy import special

from jaxdp import arguments
from jaxdp.accounting.curves import false_negative_rates

# From false-alarm probabilities [k] to the least probability of a miss [k]; non-increasing.
Tradeoff = Callable[[np.ndarray], np.ndarray]
RULES = ("sum", "box", "alarms", "misses")
_SHARES = {"box": 0.5, "alarms": 0.9, "misses": 0.1}  # of the error, spent on the false alarms
# Normal scores of the grid, dense where the maximum lies.
_LEVELS = np.r_[np.linspace(6, 3, 20), np.linspace(2.9, -3.6, 200), np.linspace(-3.8, -9, 40)]
_CELLS = np.r_[-np.inf, np.linspace(-6, 6, 600)]  # of an integral over a rank, as normal scores


@dataclasses.dataclass(frozen=True)
class ErrorCounts:
    """Counts of the errors of one fixed test S ("the record was there").

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
            arguments.integer(hits, getattr(self, hits), least=0, most=most)


def p_value(counts: ErrorCounts, tradeoff: Tradeoff, rule: str = "sum") -> float:
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
        ValueError: ``counts`` are no ``ErrorCounts``, or the rule is unknown.
    """
    arguments.one_of("rule", rule, RULES)
    if not isinstance(counts, ErrorCounts):
        raise ValueError(f"counts must be ErrorCounts of one event, got {counts!r}")
    if counts.alarms == counts.without or counts.misses == counts.with_record:
        return 1.0
    # The first of the two p-values falls from 1 to 0 along the grid of a.
    first, grid = _grid(counts.alarms, counts.without)
    least = np.r_[tradeoff(grid), 0.0]  # the cell to the right of the last point reaches a = 1
    second = special.betainc(
        counts.with_record - counts.misses, counts.misses + 1.0, 1.0 - np.clip(least, 0.0, 1.0)
    )
    first = np.r_[1.0, first]
    if rule == "sum":
        return float(np.max(_capped_sum(first, second)))
    share = _SHARES[rule]
    return float(min(1.0, np.max(np.minimum(first / share, second / (1 - share)))))


@functools.lru_cache(maxsize=64)
def _grid(hits: int, runs: int) -> tuple[np.ndarray, np.ndarray]:
    """P(Bin(runs, a) <= hits) and the a at which it has that value, from 1 to 0."""
    values = special.betaincinv(hits + 1.0, runs - hits, special.ndtr(-_LEVELS))
    return special.betainc(runs - hits, hits + 1.0, 1.0 - values), values


def _capped_sum(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """P(min(Z1, 0) + min(Z2, 0) <= t) = Phi(t) + Phi(c) Phi(-c), c = -t / sqrt(2), for t < 0."""
    total = sum(np.minimum(special.ndtri(p), 0.0) for p in (first, second))
    c = -total / np.sqrt(2.0)
    value = special.ndtr(total) + special.ndtr(c) * special.ndtr(-c)
    return np.where(total < 0, value, 1.0)


def rank_p_value(rank: int, runs: int, missed: int, others: int, tradeoff: Tradeoff) -> float:
    """A valid p-value of the same, by the threshold at a fixed rank: no run is set aside for it.

    A threshold that was picked because these scores looked good there must be paid for. One at a
    fixed rank need not be: of n continuous scores without the record, the share of the mechanism's
    scores above the (k + 1)-th highest is a ~ Beta(k + 1, n - k) whatever the mechanism, and the
    scores with the record are independent of it. The answer is E P(Bin(others, f(a)) <= missed):
    the probability that so few scores of one world lie beyond that score of the other, where the
    two are as far apart as f allows. Exact for scores that are a mechanism's own likelihood ratio.
    The integral is taken over cells, at the larger end of each.

    Formal guarantee: for every rank that was fixed beforehand; ties only make it larger.

    Args:
        rank: scores without the record above the threshold, in [0, runs).
        runs: without the record.
        missed: scores with the record that are not above it.
        others: runs with the record.
        tradeoff: see ``Tradeoff``.

    Raises:
        ValueError: a count is out of its range.
    """
    runs = arguments.integer("runs", runs, least=1)
    others = arguments.integer("others", others, least=1)
    arguments.integer("rank", rank, least=0, most=runs - 1)
    arguments.integer("missed", missed, least=0, most=others)
    if missed == others:
        return 1.0
    least = np.r_[tradeoff(_cell_ends(rank, runs)), 0.0]  # the last cell reaches a = 1
    few = special.betainc(others - missed, missed + 1.0, 1.0 - np.clip(least, 0.0, 1.0))
    return float(min(1.0, np.diff(np.r_[special.ndtr(_CELLS), 1.0]) @ few))


@functools.lru_cache(maxsize=256)
def _cell_ends(rank: int, runs: int) -> np.ndarray:
    """The larger ends of the cells of a ~ Beta(rank + 1, runs - rank), but for the last."""
    return np.asarray(special.betaincinv(rank + 1.0, runs - rank, special.ndtr(_CELLS[1:])))


def binomial_pmf(count: int, rate: float) -> np.ndarray:
    """The probabilities [count + 1] of 0, 1, ..., ``count`` hits in as many draws."""
    hits = np.arange(count + 1)
    left, log = count - hits, special.gammaln
    choose = log(count + 1) - log(hits + 1) - log(left + 1)
    return np.exp(choose + special.xlogy(hits, rate) + special.xlog1py(left, -rate))


def approximate_dp(epsilon: float, delta: float) -> Tradeoff:
    """The trade-off function of (epsilon, delta)-DP in both directions.

    See ``jaxdp.accounting.curves.misses`` (Dong, Roth and Su 2019, arXiv:1905.02383v3, equation 2,
    after Wasserman and Zhou 2010 and Kairouz, Oh and Viswanath 2015).
    """
    return lambda a: false_negative_rates([(epsilon, delta)], a)


def gaussian_dp(mu: float) -> Tradeoff:
    """The trade-off function of mu-GDP, G_mu(a) = Phi(Phi^-1(1 - a) - mu).

    Dong, Roth and Su 2019, arXiv:1905.02383v3, equation 6.
    """
    return lambda a: special.ndtr(-special.ndtri(a) - mu)


def epsilon_bound(
    counts: ErrorCounts, delta: float, confidence: float = 0.95, rule: str = "sum"
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
    arguments.decay("delta", delta)
    level = 1 - arguments.fraction("confidence", confidence)
    return largest_refuted(lambda e: p_value(counts, approximate_dp(e, delta), rule), level)


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
