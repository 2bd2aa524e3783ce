"""Exact tests of two worlds by thresholds at fixed ranks, for which no run is set aside.

A threshold that was picked because these scores looked good there must be paid for. One at a fixed
rank need not be: of n continuous scores without the record, the share of the mechanism's scores
above the (k + 1)-th highest is Beta(k + 1, n - k) whatever the mechanism, and the scores with the
record are independent of it.
"""

import functools

import numpy as np
from scipy import special

from jaxdp import arguments
from jaxdp.auditing import bounds
from jaxdp.auditing.bounds import Tradeoff

_NORMAL = np.r_[-np.inf, np.linspace(-6, 6, 600)]  # cells of the integral, as normal scores


def p_value(rank: int, runs: int, missed: int, others: int, tradeoff: Tradeoff) -> float:
    """A valid p-value of "the trade-off function of the two worlds is at least ``tradeoff``".

    E P(Bin(others, f(a)) <= missed) over a ~ Beta(rank + 1, runs - rank): the probability that so
    few scores of one world lie beyond the (rank + 1)-th highest of the other, where the two are as
    far apart as f allows. Exact for scores that are a mechanism's own likelihood ratio. The
    integral is taken over cells, at the larger end of each.

    Formal guarantee: for every rank that was fixed beforehand; ties only make it larger.

    Args:
        rank: scores without the record above the threshold, in [0, runs).
        runs: without the record.
        missed: scores with the record that are not above it.
        others: runs with the record.
        tradeoff: see ``jaxdp.auditing.bounds.Tradeoff``.

    Raises:
        ValueError: a count is out of its range.
    """
    runs = arguments.integer("runs", runs, least=1)
    others = arguments.integer("others", others, least=1)
    for name, value, most in (("rank", rank, runs - 1), ("missed", missed, others)):
        if arguments.integer(name, value, least=0) > most:
            raise ValueError(f"{name} must be at most {most}, got {value}")
    if missed == others:
        return 1.0
    least = np.clip(
        np.r_[tradeoff(_ends(rank, runs)), 0.0], 0.0, 1.0
    )  # the last cell reaches a = 1
    few = special.betainc(others - missed, missed + 1.0, 1.0 - least)
    return float(min(1.0, np.diff(np.r_[special.ndtr(_NORMAL), 1.0]) @ few))


@functools.lru_cache(maxsize=256)
def _ends(rank: int, runs: int) -> np.ndarray:
    """The larger ends of the cells of a ~ Beta(rank + 1, runs - rank), but for the last."""
    return np.asarray(special.betaincinv(rank + 1.0, runs - rank, special.ndtr(_NORMAL[1:])))


def balanced_p_value(crossing: int, runs: int, others: int, tradeoff: Tradeoff) -> float:
    """A valid p-value from the least number of which false alarms and misses both stay below.

    Some threshold has at most ``crossing`` of both if and only if the (crossing + 1)-th lowest
    score with the record lies above the (crossing + 1)-th highest without it: ``p_value`` at that
    rank. The threshold itself is found on all the scores, and nothing is paid for it.

    Args:
        crossing: the least c such that some threshold has at most c false alarms and c misses.
        runs: without the record.
        others: with the record.
        tradeoff: symmetric.
    """
    if crossing >= min(runs, others):
        return 1.0
    return p_value(crossing, runs, crossing, others, tradeoff)


def crossing(inside: np.ndarray, outside: np.ndarray) -> tuple[int, float]:
    """(the least c with a threshold of at most c false alarms and c misses, that threshold)."""
    size = min(len(inside), len(outside))
    low, high = np.sort(inside)[:size], np.sort(outside)[::-1][:size]
    above = low > high  # from the first true on, all are
    c = int(np.argmax(above)) if above.any() else size
    return c, float(low[min(c, size - 1)])


def balanced_mu(inside: np.ndarray, outside: np.ndarray, level: float) -> tuple[float, int, float]:
    """(a lower bound on the mu of Gaussian DP, the count at the balanced threshold, the threshold).

    Formal guarantee: that of ``p_value``, of a mechanism that is mu-GDP, at 1 - ``level``.

    Args:
        inside: float [n], higher with the record.
        outside: float [n'].
        level: the error.
    """
    c, cut = crossing(inside, outside)
    sizes = len(outside), len(inside)
    mu = bounds.largest_refuted(
        lambda mu: balanced_p_value(c, *sizes, bounds.gaussian_dp(mu)), level
    )
    return mu, c, cut
