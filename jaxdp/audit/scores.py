"""Lower bounds on epsilon from scores of two worlds: runs with a record, and runs without it."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from jaxdp import arguments
from jaxdp.accounting.gaussian import gaussian_epsilon
from jaxdp.audit import bounds
from jaxdp.audit.bounds import ErrorCounts, Tradeoff

KINDS = ("clopper_pearson", "gaussian")
_BACK = 0.1  # of the error, spent on scores that are lower with the record
_RATIO = 3.0  # between neighbouring ranks
_QUANTILES = np.r_[0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, np.linspace(0.04, 0.96, 24)]
_QUANTILES = np.unique(np.r_[_QUANTILES, 1 - _QUANTILES, 0.0, 1.0])
GAUSSIAN_ONLY = "the mechanism's own trade-off function is Gaussian (full batch, nothing hidden)"


@dataclasses.dataclass(frozen=True)
class ThresholdTest:
    """A test: column ``column`` times ``sign`` is at least ``threshold``."""

    column: int
    sign: int
    threshold: float
    combine: str = "sum"

    def counts(self, with_record: np.ndarray, without: np.ndarray) -> ErrorCounts:
        """The counts of the test on scores [n, k] and [n', k]."""
        inside = self.sign * with_record[:, self.column] >= self.threshold
        outside = self.sign * without[:, self.column] >= self.threshold
        return ErrorCounts(int(outside.sum()), len(outside), int((~inside).sum()), len(inside))


@dataclasses.dataclass(frozen=True)
class Audited:
    """A lower bound on epsilon, with its confidence and assumptions.

    Attributes:
        epsilon: lower bound at ``delta``; 0 where nothing is proven.
        delta: of the bound.
        confidence: with which the bound holds.
        kind: how it was made.
        assumes: what must be true of the mechanism for it to hold; "" for nothing.
        counts: of the test, in the runs kept for it; None of one run.
        rule: the test; None of one run.
    """

    epsilon: float
    delta: float
    confidence: float
    kind: str
    assumes: str
    counts: ErrorCounts | None = None
    rule: ThresholdTest | None = None

    def __str__(self) -> str:
        return (
            f"epsilon >= {np.floor(1000 * self.epsilon) / 1000:.3f} at delta {self.delta:g} with "
            f"{self.confidence:.0%} confidence"
        )


def audit_scores(
    with_record: ArrayLike,
    without: ArrayLike,
    delta: float,
    *,
    confidence: float = 0.95,
    kind: str = "clopper_pearson",
    held_out: float = 0.2,
    threshold: float | None = None,
    seed: int = 0,
) -> Audited:
    """A lower bound on epsilon from scores of runs with and without a record.

    Formal guarantee: of any mechanism that is (epsilon, delta)-DP for the two worlds the answer
    exceeds epsilon with probability at most 1 - ``confidence``, for independent runs. The kind
    "gaussian" is tighter, but holds **only for mechanisms whose own trade-off function is
    Gaussian**: full-batch Gaussian noise, any number of steps, all released. Of any other, such as
    one that samples, one point says nothing about the profile elsewhere (Nasr et al. 2023,
    arXiv:2302.07956v1, section 5: mu from one point, epsilon from mu).

    What is tested was fixed beforehand or is paid for:

    * a ``threshold``: the event "the score is at least that", by its counts;
    * of one column, thresholds at fixed ranks (``jaxdp.audit.bounds.rank_p_value``), 0, 3, 9,
      27, ... up to half of the runs from either end of the ROC curve, each with its share of the
      error; of the kind "gaussian" the balanced threshold alone, where false alarms and misses are
      equally many. A tenth of the error is for scores that are lower with the record. A score of
      few values does better with a threshold of your own;
    * of several columns the event (of the kind "gaussian" the column) is chosen on a random part of
      the runs, and tested on the others.

    Args:
        with_record: scores [n] or [n, k] of the runs with the record, k of them a run; not-a-number
            is a score of its own.
        without: scores [n'] or [n', k] of the runs without it.
        delta: of the bound.
        confidence: in (0, 1).
        kind: "clopper_pearson" for any mechanism, or "gaussian".
        held_out: of several columns, the fraction of the runs on which the event is chosen.
        threshold: of a single column, fixed beforehand.
        seed: of the random part.

    Returns:
        The bound, with its assumptions; ``counts`` and ``rule`` are of the best test.

    Raises:
        ValueError: a threshold with several columns or not a number; too few runs.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> without = rng.normal(0.0, 1.0, 10_000)
        >>> with_record = rng.normal(2.0, 1.0, 10_000)
        >>> audited = jaxdp.audit.audit_scores(with_record, without, delta=1e-5)
        >>> proven = jaxdp.accounting.epsilon(jaxdp.accounting.Gaussian(0.5), delta=1e-5).upper
        >>> 1.0 < audited.epsilon < proven
        True
    """
    check(delta, confidence, kind)
    arguments.fraction("held_out", held_out)
    arguments.integer("seed", seed, least=0)
    inside, outside = checked(with_record, without)
    level, columns, gaussian = 1 - confidence, inside.shape[1], kind == "gaussian"
    if threshold is not None:
        if columns > 1:
            raise ValueError(f"threshold must be None for {columns} columns, got {threshold}")
        if np.ndim(threshold) or np.isnan(threshold):
            raise ValueError(f"threshold must be a single number, got {threshold!r}")
        looks = [_event(ThresholdTest(0, 1, float(threshold)), inside, outside, level)]
    elif columns == 1:
        looks = [
            look
            for sign, share in ((1, 1 - _BACK), (-1, _BACK))
            for look in _ranks(inside, outside, 0, sign, share * level, gaussian)
        ]
    else:
        chosen, (inside, outside) = split(inside, outside, held_out, seed)
        if gaussian:
            column, sign = _farthest(*chosen)
            looks = _ranks(inside, outside, column, sign, level, gaussian)
        else:
            test = _best_event(chosen, (len(inside), len(outside)), delta, confidence)
            looks = [_event(test, inside, outside, level)]

    # The largest epsilon, or mu, that a look refutes.
    guarantee = bounds.gaussian_dp if gaussian else partial(bounds.approximate_dp, delta=delta)
    best, best_look = 0.0, looks[0]
    for look in looks:

        def p_of(parameter: float, p_value: Callable[[Tradeoff], float] = look.p_value) -> float:
            return p_value(guarantee(parameter))

        if p_of(best) > look.level:
            continue  # it refutes no more than was refuted before
        found = bounds.largest_refuted(p_of, look.level)
        if found > best:
            best, best_look = found, look
    epsilon = gaussian_epsilon(best, delta)[0] if gaussian else best
    assumes = GAUSSIAN_ONLY if gaussian else ""
    return Audited(epsilon, delta, confidence, kind, assumes, best_look.counts, best_look.test)


class _Look(NamedTuple):
    """A test whose threshold was fixed before these runs were looked at.

    Attributes:
        p_value: of a trade-off function.
        level: its share of the error.
        counts: of its errors.
        test: the event.
    """

    p_value: Callable[[Tradeoff], float]
    level: float
    counts: ErrorCounts
    test: ThresholdTest


def _event(test: ThresholdTest, inside: np.ndarray, outside: np.ndarray, level: float) -> _Look:
    counts = test.counts(inside, outside)
    return _Look(partial(bounds.p_value, counts, rule=test.combine), level, counts, test)


def _ranks(
    inside: np.ndarray, outside: np.ndarray, column: int, sign: int, level: float, balanced: bool
) -> list[_Look]:
    """The looks at one column, higher with the record: several ranks, or the ``balanced`` one.

    Some threshold has at most c false alarms and c misses if and only if the (c + 1)-th lowest
    score with the record lies above the (c + 1)-th highest without it. So the balanced threshold is
    one of fixed rank: c is found on all the scores, and nothing is paid for it.
    """
    low, high = np.sort(sign * inside[:, column]), np.sort(sign * outside[:, column])
    n, m, looks = len(low), len(high), []
    size = min(n, m)
    if balanced:
        above = low[:size] > high[::-1][:size]  # from the first true on, all are
        c = int(np.argmax(above)) if above.any() else size
        test = ThresholdTest(column, sign, float(low[min(c, size - 1)]))
        p_value = partial(bounds.rank_p_value, c, m, c, n) if c < size else lambda tradeoff: 1.0
        return [_Look(p_value, level, ErrorCounts(c, m, c, n), test)]
    most = int(np.log(max(size / 2, 1)) / np.log(_RATIO))
    for rank in sorted({0, *(round(_RATIO**i) for i in range(1, most + 1))}):
        # From above, by the rank of a false alarm, and from below, by that of a miss.
        cut = high[-1 - rank]
        missed, alarms = int(np.sum(low <= cut)), int(np.sum(high >= low[rank]))
        test = ThresholdTest(column, sign, float(np.nextafter(cut, np.inf)))
        p_value = partial(bounds.rank_p_value, rank, m, missed, n)
        looks.append(_Look(p_value, level, ErrorCounts(rank, m, missed, n), test))
        test = ThresholdTest(column, sign, float(low[rank]))
        p_value = partial(bounds.rank_p_value, rank, n, alarms, m)
        looks.append(_Look(p_value, level, ErrorCounts(alarms, m, rank, n), test))
    return [look._replace(level=level / len(looks)) for look in looks]


def _farthest(inside: np.ndarray, outside: np.ndarray) -> tuple[int, int]:
    """(column, sign) whose balanced threshold has the fewest false alarms and misses."""
    tried = [
        (_ranks(inside, outside, column, sign, 1.0, balanced=True)[0].counts.alarms, column, sign)
        for column in range(inside.shape[1])
        for sign in (1, -1)
    ]
    return min(tried)[1:]


Pair = tuple[np.ndarray, np.ndarray]


def split(inside: np.ndarray, outside: np.ndarray, held_out: float, seed: int) -> tuple[Pair, Pair]:
    """(the part to choose on, the part to test on), each of both worlds."""
    arguments.fraction("held_out", held_out)
    rng = np.random.default_rng(arguments.integer("seed", seed, least=0))
    parts = []
    for name, scores in (("with_record", inside), ("without", outside)):
        first = round(held_out * len(scores))
        if not 0 < first < len(scores):
            raise ValueError(
                f"{name} must be enough runs to set {held_out} aside, got {len(scores)}"
            )
        order = rng.permutation(len(scores))
        parts.append((scores[order[:first]], scores[order[first:]]))
    return (parts[0][0], parts[1][0]), (parts[0][1], parts[1][1])


def candidates(chosen: Pair) -> tuple[list[ThresholdTest], np.ndarray, np.ndarray]:
    """The tests worth trying, with their rates of false alarms [r] and misses [r]."""
    rules, alarms, misses = [], [], []
    for column in range(chosen[0].shape[1]):
        inside, outside = (np.sort(scores[:, column]) for scores in chosen)
        cuts = np.unique(np.quantile(np.r_[inside, outside], _QUANTILES, method="nearest"))
        for sign in (1, -1):
            below_in, below_out = (
                np.searchsorted(s, cuts, "left" if sign > 0 else "right") for s in (inside, outside)
            )
            hit_in, hit_out = below_in / len(inside), below_out / len(outside)
            if sign > 0:
                hit_in, hit_out = 1 - hit_in, 1 - hit_out
            rules += [ThresholdTest(column, sign, sign * float(cut)) for cut in cuts]
            alarms.append(hit_out)
            misses.append(1 - hit_in)
    return rules, np.concatenate(alarms), np.concatenate(misses)


def _best_event(
    chosen: Pair, sizes: tuple[int, int], delta: float, confidence: float
) -> ThresholdTest:
    """The test with the largest bound to be expected of ``sizes`` further runs (with, without)."""
    tests, alarms, misses = candidates(chosen)

    def pessimistic(rate: np.ndarray, runs: int) -> np.ndarray:
        # The upper end at 95 % (Clopper and Pearson), so that 0 in few runs is not taken for 0.
        hits = np.rint(rate * runs)
        inside = np.minimum(hits, runs - 1)
        return np.where(hits < runs, special.betaincinv(inside + 1, runs - inside, 0.95), 1.0)

    a, b = pessimistic(alarms, len(chosen[1])), pessimistic(misses, len(chosen[0]))
    gain = np.log(np.maximum(np.maximum((1 - b - delta) / a, (1 - a - delta) / b), 1e-9))
    best = int(np.argmax(gain))
    # Half a hit more, for a rate of 0 in few runs is hardly 0.
    likely = [
        round((rate[best] * len(part) + 0.5) / (len(part) + 1) * size)
        for rate, part, size in zip((alarms, misses), chosen[::-1], sizes[::-1], strict=True)
    ]
    expected = ErrorCounts(likely[0], sizes[1], likely[1], sizes[0])
    combine = max(
        bounds.RULES, key=lambda rule: bounds.epsilon_bound(expected, delta, confidence, rule)
    )
    return dataclasses.replace(tests[best], combine=combine)


def check(delta: float, confidence: float, kind: str = KINDS[0]) -> None:
    """Raises ValueError unless all three are in their range."""
    arguments.one_of("kind", kind, KINDS)
    bounds.check_delta(delta, kind)
    arguments.fraction("confidence", confidence)


def checked(with_record: ArrayLike, without: ArrayLike) -> Pair:
    """Both as float64 [n, k], with not-a-number as a score above all others.

    Raises:
        ValueError: strings, complex numbers, rows of unlike lengths, or shapes that do not fit.
    """
    both = []
    for name, given in (("with_record", with_record), ("without", without)):
        scores = numbers(name, given)
        scores = scores[:, None] if scores.ndim == 1 else scores
        if scores.ndim != 2 or not scores.size:
            raise ValueError(f"{name} must be scores [n] or [n, k], got shape {scores.shape}")
        both.append(scores)
    if both[0].shape[1] != both[1].shape[1]:
        raise ValueError(
            f"without must have {both[0].shape[1]} columns like with_record, got {both[1].shape[1]}"
        )
    return both[0], both[1]


def numbers(name: str, given: ArrayLike) -> np.ndarray:
    """The scores as float64, not-a-number as one above all others; ValueError for no numbers."""
    try:
        found = np.asarray(given)
    except ValueError:  # rows of unlike lengths
        found = np.empty(0, object)
    if found.dtype.kind not in "biuf":
        shown = found.dtype if found.size else type(given).__name__
        raise ValueError(f"{name} must be scores [n] or [n, k], real numbers, got {shown}")
    return np.nan_to_num(found.astype(np.float64), nan=1e30, posinf=1e29, neginf=-1e29)
