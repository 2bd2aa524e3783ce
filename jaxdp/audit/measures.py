"""The measures of an attack by its scores: bounds on epsilon, and what attacks are compared by."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from jaxdp import arguments
from jaxdp.audit import bounds
from jaxdp.audit.scores import Audited, audit_scores, checked

AT = (1e-3, 1e-2)  # false-positive rates told in numbers
PLOTTED = (1e-3, 1e-2, 1e-1)
Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class WithInterval:
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


@dataclasses.dataclass(frozen=True)
class AttackMeasures:
    """The measures of one column of scores.

    Attributes:
        epsilon: the lower bound of ``audit_scores``, of any mechanism.
        epsilon_gaussian: the lower bound **if the mechanism's own trade-off is Gaussian**; None at
            delta 0.
        auroc: area under the ROC curve, ties counted half.
        tpr: by false-positive rate, the hit rate of the best threshold with at most that rate.
        accuracy: the largest share of right answers of any threshold, worlds equally likely.
        confidence: of each bound and interval by itself.
    """

    epsilon: Audited
    epsilon_gaussian: Audited | None
    auroc: WithInterval
    tpr: dict[float, WithInterval]
    accuracy: WithInterval
    confidence: float

    def __str__(self) -> str:
        lines = [f"{self.epsilon} (any mechanism)"]
        if self.epsilon_gaussian is not None:
            lines.append(f"{self.epsilon_gaussian} (only if {self.epsilon_gaussian.assumes})")
        lines.append(f"area under the ROC curve {self.auroc}")
        lines += [f"true-positive rate at {rate:g} {found}" for rate, found in self.tpr.items()]
        return "\n".join([*lines, f"largest accuracy {self.accuracy}"])


def attack_measures(
    with_record: ArrayLike,
    without: ArrayLike,
    delta: float,
    *,
    confidence: float = 0.95,
    false_positive_rates: Sequence[float] = AT,
    resamples: int = 1_000,
    seed: int = 0,
) -> AttackMeasures:
    """Lower bounds on epsilon and the attack's measures, from scores of any kind.

    Formal guarantee: where the scores are of independent runs, the bound ``epsilon`` holds for any
    mechanism with ``confidence``, the one of the Gaussian profile for such mechanisms. Canaries of
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
        seed: of the bootstrap.

    Raises:
        ValueError: scores of several columns, or a number out of its range.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> found = jaxdp.audit.attack_measures(
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
    pair = checked(with_record, without)
    if pair[0].shape[1] > 1:
        raise ValueError(
            f"with_record must be scores [n], one a run, got {pair[0].shape[1]} columns"
        )
    inside, outside = (scores[:, 0] for scores in pair)
    gaussian = None
    if delta > 0:
        gaussian = audit_scores(inside, outside, delta, confidence=confidence, kind="gaussian")
    return AttackMeasures(
        audit_scores(inside, outside, delta, confidence=confidence),
        gaussian,
        _bootstrapped(inside, outside, auroc, resamples, confidence, seed),
        {
            rate: true_positive_rate(inside, outside, rate, confidence)
            for rate in false_positive_rates
        },
        _bootstrapped(inside, outside, accuracy, resamples, confidence, seed),
        confidence,
    )


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
) -> WithInterval:
    """The hit rate of the lowest threshold with at most the given rate of false positives.

    Its interval is Clopper-Pearson's, of this threshold, whose own false-positive rate is near the
    given one (``points`` has an interval of that as well): the threshold is an order statistic of
    the scores without the record, of which those with it are independent. With fewer than 1 / rate
    scores without the record the threshold is their largest, and the rate coarser than asked for.
    """
    rank = min(math.floor(rate * len(outside)), len(outside) - 1)
    hits = int(np.sum(inside > np.sort(outside)[-1 - rank]))
    found = clopper_pearson(hits, len(inside), confidence)
    return WithInterval(hits / len(inside), found, "exact")


def points(
    inside: np.ndarray, outside: np.ndarray, confidence: float, rates: Sequence[float] = PLOTTED
) -> list[list[float]]:
    """Points of the ROC curve at fixed false-positive rates, each interval at ``confidence``.

    Args:
        inside: float [n], higher with the record.
        outside: float [n'].
        confidence: in (0, 1).
        rates: those that fewer than one of the n' scores would pass are left out.

    Returns:
        Rows [false-positive rate, low, high, hit rate, low, high].
    """
    found = []
    for rate in rates:
        rank = math.floor(rate * len(outside))
        if 0 < rank < len(outside):
            hit = true_positive_rate(inside, outside, rate, confidence)
            spread = clopper_pearson(rank, len(outside), confidence)
            found.append([rank / len(outside), *spread, hit.value, *hit.interval])
    return found


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
) -> WithInterval:
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
    return WithInterval(value, (float(low), float(high)), "bootstrap")
