"""The measures of an attack by its scores: bounds on epsilon, and what attacks are compared by."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from jaxdp import arguments
from jaxdp.auditing import bounds, ranks
from jaxdp.auditing.bounds import Counts
from jaxdp.auditing.scores import Audited, Rule, audit_scores, checked

_RATIO = 3.0  # between neighbouring ranks
AT = (1e-3, 1e-2)  # false-positive rates told in numbers
PLOTTED = (1e-3, 1e-2, 1e-1)
Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A number with its interval.

    Attributes:
        value: of these scores.
        interval: (low, high).
        kind: of the interval, in words.
    """

    value: float
    interval: Interval
    kind: str

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.interval[0]:.4g}, {self.interval[1]:.4g}]"


class Point(NamedTuple):
    """A point of a ROC curve at a fixed rank, with exact intervals of both rates.

    Attributes:
        alarms: the false-positive rate.
        alarms_interval: (low, high).
        hits: the true-positive rate.
        hits_interval: (low, high).
    """

    alarms: float
    alarms_interval: Interval
    hits: float
    hits_interval: Interval

    def to_list(self) -> list[float]:
        """[alarms, low, high, hits, low, high]."""
        return [self.alarms, *self.alarms_interval, self.hits, *self.hits_interval]


@dataclasses.dataclass(frozen=True)
class AttackMeasures:
    """The measures of one column of scores.

    Attributes:
        epsilon: the lower bound over the whole ROC curve, see ``audit_ranks``.
        epsilon_splits: the lower bound of many random halves, see ``audit_splits``.
        epsilon_gaussian: the lower bound **if the mechanism's own trade-off is Gaussian**; None at
            delta 0.
        auroc: area under the ROC curve, ties counted half.
        tpr: by false-positive rate, the hit rate of the best threshold with at most that rate.
        accuracy: the largest share of right answers of any threshold, worlds equally likely.
        confidence: of each bound and interval by itself.
    """

    epsilon: Audited
    epsilon_splits: Audited
    epsilon_gaussian: Audited | None
    auroc: Measured
    tpr: dict[float, Measured]
    accuracy: Measured
    confidence: float

    def __str__(self) -> str:
        lines = [
            f"{self.epsilon} (any mechanism, whole ROC curve)",
            f"{self.epsilon_splits} (any mechanism, many splits)",
        ]
        if self.epsilon_gaussian is not None:
            lines.append(f"{self.epsilon_gaussian} (only if {self.epsilon_gaussian.assumes})")
        lines.append(f"area under the ROC curve {self.auroc}")
        lines += [f"true-positive rate at {rate:g} {found}" for rate, found in self.tpr.items()]
        return "\n".join([*lines, f"largest accuracy {self.accuracy}"])


def attack_measures(
    with_record: Any,
    without: Any,
    delta: float,
    *,
    confidence: float = 0.95,
    false_positive_rates: tuple[float, ...] = AT,
    resamples: int = 1_000,
    seed: int = 0,
) -> AttackMeasures:
    """Lower bounds on epsilon and the attack's measures, from scores of any kind.

    Formal guarantee: where the scores are of independent runs, the two bounds on epsilon hold for
    any mechanism, each with ``confidence`` by itself; the larger of the two does not. Canaries of
    one run may depend on one another: ``audit_one_run`` holds for them, these bounds need not. The
    intervals of the other measures describe this attack: another attack may do better. Those of
    the area and the accuracy are bootstrap intervals, approximate; those of the true-positive
    rates are exact (Clopper-Pearson with a threshold at a fixed rank).

    Args:
        with_record: scores [n], higher with the record, of independent runs. Not-a-number counts
            as a score above all others: a run may show that. Make sure that yours does.
        without: scores [n'].
        delta: of the bounds, in [0, 1).
        confidence: in (0, 1).
        false_positive_rates: each in (0, 1).
        resamples: of the bootstrap.
        seed: of the bootstrap and the splits.

    Raises:
        ValueError: scores of several columns, or a number out of its range.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> found = jaxdp.auditing.attack_measures(
        ...     rng.normal(1.0, 1.0, 1_000), rng.normal(0.0, 1.0, 1_000), delta=1e-5
        ... )
        >>> 0.5 < found.epsilon.epsilon < 4.38 and 0.7 < found.auroc.value < 0.82
        True
    """
    arguments.fraction("confidence", confidence)
    bounds.check_delta(delta)
    arguments.integer("resamples", resamples, least=10)
    arguments.integer("seed", seed, least=0)
    if not isinstance(false_positive_rates, tuple | list):
        raise ValueError(
            f"false_positive_rates must be a tuple of rates, got {false_positive_rates!r}"
        )
    for rate in false_positive_rates:
        arguments.fraction("false_positive_rates", rate)
    inside, outside = one_column(with_record, without)
    gaussian = None
    if delta > 0:
        gaussian = audit_scores(inside, outside, delta, confidence=confidence, kind="gaussian")
    return AttackMeasures(
        audit_ranks(inside, outside, delta, confidence=confidence),
        audit_splits(inside, outside, delta, confidence=confidence, seed=seed),
        gaussian,
        _bootstrapped(inside, outside, auroc, resamples, confidence, seed),
        {
            rate: true_positive_rate(inside, outside, rate, confidence)
            for rate in false_positive_rates
        },
        _bootstrapped(inside, outside, accuracy, resamples, confidence, seed),
        confidence,
    )


def audit_splits(
    with_record: Any,
    without: Any,
    delta: float,
    *,
    confidence: float = 0.95,
    splits: int = 21,
    held_out: float = 0.2,
    seed: int = 0,
) -> Audited:
    """The median of the bounds of many random splits, each at half the error.

    Twice the median of valid p-values is one (Meinshausen, Meier and Buehlmann 2009,
    arXiv:0811.2177, Theorem 3.1). It hardly depends on the seed, and costs a factor 2 of the error.

    Formal guarantee: as ``jaxdp.auditing.audit_scores``.

    Args:
        with_record: as for ``audit_scores``.
        without: as for ``audit_scores``.
        delta: of the bound.
        confidence: in (0, 1).
        splits: an odd number.
        held_out: of each split.
        seed: of the splits.

    Raises:
        ValueError: an even number of splits, or as ``audit_scores``.
    """
    level = 1 - arguments.fraction("confidence", confidence)
    if arguments.integer("splits", splits, least=1) % 2 == 0:
        raise ValueError(f"splits must be odd, got {splits}")
    seeds = np.random.SeedSequence(arguments.integer("seed", seed, least=0)).generate_state(splits)
    found = [
        audit_scores(
            with_record, without, delta, confidence=1 - level / 2, held_out=held_out, seed=int(s)
        ).epsilon
        for s in seeds
    ]
    value = float(np.median(found))
    return Audited(value, delta, confidence, f"median of {splits} splits", "", None, None)


def audit_ranks(
    with_record: Any,
    without: Any,
    delta: float,
    *,
    confidence: float = 0.95,
    ranks: Any = None,
) -> Audited:
    """The best lower bound on epsilon over thresholds at fixed ranks, along the whole ROC curve.

    Formal guarantee: of any mechanism that is (epsilon, delta)-DP for the two worlds, the answer
    exceeds epsilon with probability at most 1 - ``confidence``. Each rank is looked at from both
    ends, and each of the 2 k looks gets 1/(2 k) of the error (Bonferroni).

    Args:
        with_record: scores [n], higher with the record.
        without: scores [n'].
        delta: of the bound, in [0, 1).
        confidence: in (0, 1).
        ranks: [k] of different whole numbers, fixed beforehand; None takes 0, 3, 10, 30, ... up to
            half of the runs.

    Returns:
        The bound; ``counts`` and ``rule`` are of the best look.

    Raises:
        ValueError: scores of several columns, or a rank that is not below the number of runs.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> audited = jaxdp.auditing.audit_ranks(
        ...     rng.normal(2.0, 1.0, 2_000), rng.normal(0.0, 1.0, 2_000), delta=1e-5
        ... )
        >>> 2.5 < audited.epsilon < 9.9
        True
    """
    level = 1 - arguments.fraction("confidence", confidence)
    bounds.check_delta(delta)
    inside, outside = one_column(with_record, without)
    looks = _ranks(ranks, min(len(inside), len(outside)))
    share = level / (2 * len(looks))
    best, counts, rule = 0.0, None, None
    for rank in looks:
        for found, cut, missed in _both_ends(inside, outside, rank):
            sizes = len(outside), len(inside)
            sizes = sizes if found == "alarms" else sizes[::-1]
            p = functools.partial(_p_value, rank, missed, sizes, delta)
            if best and p(best) > share:
                continue
            value = bounds.largest_refuted(p, share)
            if value > best:
                best, rule = value, Rule(0, 1, cut)
                pair = (rank, missed) if found == "alarms" else (missed, rank)
                counts = Counts(pair[0], len(outside), pair[1], len(inside))
    kind = f"fixed ranks, {2 * len(looks)} looks"
    return Audited(best, delta, confidence, kind, "", counts, rule)


def _both_ends(inside: np.ndarray, outside: np.ndarray, rank: int) -> list[tuple[str, float, int]]:
    """(the count that is fixed, threshold, the other count), from above and from below."""
    high, low = np.sort(outside)[-1 - rank], np.sort(inside)[rank]
    return [
        ("alarms", float(np.nextafter(high, np.inf)), int(np.sum(inside <= high))),
        ("misses", float(low), int(np.sum(outside >= low))),
    ]


def _ranks(ranks: Any, runs: int) -> list[int]:
    if ranks is None:
        most = int(np.log(max(runs / 2, 1)) / np.log(_RATIO))
        return sorted({0, *(round(_RATIO**i) for i in range(1, most + 1))})
    found = [arguments.integer("ranks", rank, least=0) for rank in np.atleast_1d(ranks).tolist()]
    if not found or len(set(found)) < len(found) or max(found) >= runs:
        raise ValueError(f"ranks must be different numbers below {runs}, got {ranks!r}")
    return found


def _p_value(rank: int, missed: int, sizes: tuple[int, int], delta: float, epsilon: float) -> float:
    tradeoff = bounds.approximate_dp(epsilon, delta)
    return ranks.p_value(rank, sizes[0], missed, sizes[1], tradeoff)


def auroc(inside: np.ndarray, outside: np.ndarray) -> float:
    """The area under the ROC curve: P(inside > outside) + P(equal) / 2 over all pairs."""
    low = np.sort(outside)
    below = np.searchsorted(low, inside, "left") + np.searchsorted(low, inside, "right")
    return float(below.mean() / (2 * len(low)))


def accuracy(inside: np.ndarray, outside: np.ndarray) -> float:
    """The largest mean of true-positive and true-negative rate over all thresholds."""
    cuts = np.unique(np.r_[inside, outside])
    below_in, below_out = (
        np.searchsorted(np.sort(s), cuts, "left") / len(s) for s in (inside, outside)
    )
    return float(0.5 + 0.5 * max(0.0, np.max(below_out - below_in)))


def true_positive_rate(
    inside: np.ndarray, outside: np.ndarray, rate: float, confidence: float
) -> Measured:
    """The hit rate of the lowest threshold with at most the given rate of false positives.

    Its interval is Clopper-Pearson's, of this threshold, whose own false-positive rate is near the
    given one (``points`` has an interval of that as well): the threshold is an order statistic of
    the scores without the record, of which those with it are independent. With fewer than 1 / rate
    scores without the record the threshold is their largest, and the rate coarser than asked for.
    """
    rank = min(math.floor(rate * len(outside)), len(outside) - 1)
    hits = int(np.sum(inside > np.sort(outside)[-1 - rank]))
    found = clopper_pearson(hits, len(inside), confidence)
    return Measured(hits / len(inside), found, "exact")


def points(
    inside: np.ndarray, outside: np.ndarray, confidence: float, rates: tuple[float, ...] = PLOTTED
) -> tuple[Point, ...]:
    """Points of the ROC curve at fixed false-positive rates, each interval at ``confidence``.

    Args:
        inside: float [n], higher with the record.
        outside: float [n'].
        confidence: in (0, 1).
        rates: those that fewer than one of the n' scores would pass are left out.
    """
    found = []
    for rate in rates:
        rank = math.floor(rate * len(outside))
        if 0 < rank < len(outside):
            hit = true_positive_rate(inside, outside, rate, confidence)
            spread = clopper_pearson(rank, len(outside), confidence)
            found.append(Point(rank / len(outside), spread, hit.value, hit.interval))
    return tuple(found)


def clopper_pearson(hits: int, runs: int, confidence: float) -> Interval:
    """The exact interval of a probability (Clopper and Pearson 1934)."""
    tail = (1 - confidence) / 2
    low = special.betaincinv(hits, runs - hits + 1.0, tail) if hits else 0.0
    high = special.betaincinv(hits + 1.0, runs - hits, 1 - tail) if hits < runs else 1.0
    return float(low), float(high)


def _bootstrapped(
    inside: np.ndarray,
    outside: np.ndarray,
    measure: Callable[[np.ndarray, np.ndarray], float],
    resamples: int,
    confidence: float,
    seed: int,
) -> Measured:
    """A measure with its bias-corrected bootstrap interval (Efron 1987)."""
    rng = np.random.default_rng(arguments.integer("seed", seed, least=0))
    drawn = [
        measure(rng.choice(inside, len(inside)), rng.choice(outside, len(outside)))
        for _ in range(resamples)
    ]
    values, value = np.array(drawn), measure(inside, outside)
    below = (np.sum(values < value) + 0.5 * np.sum(values == value) + 0.5) / (resamples + 1)
    ends = special.ndtri(np.array([1 - confidence, 1 + confidence]) / 2)
    low, high = np.quantile(values, special.ndtr(2 * special.ndtri(below) + ends))
    return Measured(value, (float(low), float(high)), "bootstrap")


def one_column(with_record: Any, without: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64 [n], with not-a-number as a score above all others; ValueError for more."""
    inside, outside = checked(with_record, without)
    if inside.shape[1] > 1:
        raise ValueError(
            f"with_record must be scores [n], one a run, got {inside.shape[1]} columns"
        )
    return inside[:, 0], outside[:, 0]
