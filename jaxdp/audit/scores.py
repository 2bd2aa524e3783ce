"""Lower bounds on epsilon from scores of two worlds: runs with a record, and runs without it.

Also the test of the event that was charged, and the measures by which attacks are compared.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.accounting.curves import false_negative_rates
from jaxdp.accounting.gaussian import gaussian_epsilon
from jaxdp.audit import bounds
from jaxdp.audit.bounds import ErrorCounts, Tradeoff

KINDS = ("clopper_pearson", "gaussian")
_BACK = 0.1  # of the error, spent on scores that are lower with the record
_RATIO = 3.0  # between neighbouring ranks
_QUANTILES = np.r_[0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, np.linspace(0.04, 0.96, 24)]
_QUANTILES = np.unique(np.r_[_QUANTILES, 1 - _QUANTILES, 0.0, 1.0])
GAUSSIAN_ONLY = "the mechanism's own trade-off function is Gaussian (full batch, nothing hidden)"
_EPSILONS = (0.0, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # of a privacy profile
_TRIED = 6  # events whose test is computed before one of them is chosen
_HELD_OUT = 0.3  # of the runs, on which a test of an event is chosen
_FAR = 6.0  # how many times the claimed noise a family is searched: beyond, epsilon is nearly 0
AT = (1e-3, 1e-2)  # false-positive rates of a report
PLOTTED = (1e-3, 1e-2, 1e-1)
Pair = tuple[np.ndarray, np.ndarray]


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
        assumes: what must be true of the mechanism for it to hold; "" for nothing.
        counts: of the test, in the runs kept for it; None of one run.
        rule: the test; None of one run.
    """

    epsilon: float
    delta: float
    confidence: float
    assumes: str
    counts: ErrorCounts | None = None
    rule: ThresholdTest | None = None

    def __str__(self) -> str:
        return (
            f"epsilon >= {np.floor(1000 * self.epsilon) / 1000:.3f} at delta {self.delta:g} with "
            f"{self.confidence:.0%} confidence"
        )


class _PlannedTest(NamedTuple):
    """A test whose threshold was fixed before these runs were looked at.

    Attributes:
        test: the event.
        counts: of its errors.
        p_value: of a trade-off function.
        level: its share of the error.
    """

    test: ThresholdTest
    counts: ErrorCounts
    p_value: Callable[[Tradeoff], float]
    level: float


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
    gaussian = arguments.one_of("kind", kind, KINDS) == "gaussian"
    (arguments.fraction if gaussian else arguments.decay)("delta", delta)
    level = 1 - arguments.fraction("confidence", confidence)
    arguments.fraction("held_out", held_out)
    arguments.integer("seed", seed, least=0)

    # The tests, each with a share of the error, fixed before the scores that they are made on are
    # looked at: an event by its counts, thresholds at fixed ranks, or one chosen on other runs.
    inside, outside = as_scores(with_record, without)
    columns = inside.shape[1]

    def fixed_test(test: ThresholdTest) -> list[_PlannedTest]:
        """The one planned test of an event, with the whole error."""
        counts = test.counts(inside, outside)
        return [
            _PlannedTest(test, counts, partial(bounds.p_value, counts, rule=test.combine), level)
        ]

    if threshold is not None:
        if columns > 1:
            raise ValueError(f"threshold must be None for {columns} columns, got {threshold}")
        if np.ndim(threshold) or np.isnan(threshold):
            raise ValueError(f"threshold must be a single number, got {threshold!r}")
        looks = fixed_test(ThresholdTest(0, 1, float(threshold)))
    elif columns == 1:
        looks = [
            look
            for sign, share in ((1, 1 - _BACK), (-1, _BACK))
            for look in _rank_tests(inside, outside, 0, sign, share * level, gaussian)
        ]
    else:
        chosen, (inside, outside) = split_runs(inside, outside, held_out, seed)
        if gaussian:
            # The column and sign whose balanced threshold has the fewest errors.
            _, column, sign = min(
                (
                    _rank_tests(*chosen, column, sign, 1.0, balanced=True)[0].counts.alarms,
                    column,
                    sign,
                )
                for column in range(columns)
                for sign in (1, -1)
            )
            looks = _rank_tests(inside, outside, column, sign, level, gaussian)
        else:
            looks = fixed_test(
                _choose_for_epsilon(chosen, (len(inside), len(outside)), delta, confidence)
            )

    # The largest epsilon, or mu, that a look refutes.
    guarantee = bounds.gaussian_dp if gaussian else partial(bounds.approximate_dp, delta=delta)
    best, best_look = 0.0, looks[0]
    for look in looks:

        def p_of(parameter: float, p_value: Callable[[Tradeoff], float] = look.p_value) -> float:
            """The p-value of the guarantee with this epsilon, or mu."""
            return p_value(guarantee(parameter))

        if p_of(best) > look.level:
            continue  # it refutes no more than was refuted before
        found = bounds.largest_refuted(p_of, look.level)
        if found > best:
            best, best_look = found, look
    epsilon = gaussian_epsilon(best, delta)[0] if gaussian else best
    assumes = GAUSSIAN_ONLY if gaussian else ""
    return Audited(epsilon, delta, confidence, assumes, best_look.counts, best_look.test)


def _rank_tests(
    inside: np.ndarray, outside: np.ndarray, column: int, sign: int, level: float, balanced: bool
) -> list[_PlannedTest]:
    """Returns tests of one column, higher with the record: several ranks or the ``balanced`` one.

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
        return [_PlannedTest(test, ErrorCounts(c, m, c, n), p_value, level)]
    most = int(np.log(max(size / 2, 1)) / np.log(_RATIO))
    for rank in sorted({0, *(round(_RATIO**i) for i in range(1, most + 1))}):
        # From above, by the rank of a false alarm, and from below, by that of a miss.
        cut = high[-1 - rank]
        missed, alarms = int(np.sum(low <= cut)), int(np.sum(high >= low[rank]))
        test = ThresholdTest(column, sign, float(np.nextafter(cut, np.inf)))
        p_value = partial(bounds.rank_p_value, rank, m, missed, n)
        looks.append(_PlannedTest(test, ErrorCounts(rank, m, missed, n), p_value, level))
        test = ThresholdTest(column, sign, float(low[rank]))
        p_value = partial(bounds.rank_p_value, rank, n, alarms, m)
        looks.append(_PlannedTest(test, ErrorCounts(alarms, m, rank, n), p_value, level))
    return [look._replace(level=level / len(looks)) for look in looks]


def split_runs(
    inside: np.ndarray, outside: np.ndarray, held_out: float, seed: int
) -> tuple[Pair, Pair]:
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


def candidate_tests(chosen: Pair) -> tuple[list[ThresholdTest], np.ndarray, np.ndarray]:
    """The tests worth trying, with their rates of false alarms [r] and misses [r]."""
    rules, alarms, missed = [], [], []
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
            missed.append(1 - hit_in)
    return rules, np.concatenate(alarms), np.concatenate(missed)


def _choose_for_epsilon(
    chosen: Pair, sizes: tuple[int, int], delta: float, confidence: float
) -> ThresholdTest:
    """The test with the largest bound to be expected of ``sizes`` further runs (with, without)."""
    tests, alarms, misses = candidate_tests(chosen)

    def pessimistic(rate: np.ndarray, runs: int) -> np.ndarray:
        """The upper end at 95 % (Clopper and Pearson): 0 in few runs is not taken for 0."""
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


def as_scores(with_record: ArrayLike, without: ArrayLike) -> Pair:
    """Both as float64 [n, k], with not-a-number as a score above all others.

    Raises:
        ValueError: strings, complex numbers, rows of unlike lengths, or shapes that do not fit.
    """
    inside, outside = (
        scores[:, None] if scores.ndim == 1 else scores
        for scores in (as_numbers("with_record", with_record), as_numbers("without", without))
    )
    for name, scores in (("with_record", inside), ("without", outside)):
        if scores.ndim != 2 or not scores.size:
            raise ValueError(f"{name} must be scores [n] or [n, k], got shape {scores.shape}")
    if inside.shape[1] != outside.shape[1]:
        raise ValueError(
            f"without must have {inside.shape[1]} columns like with_record, got {outside.shape[1]}"
        )
    return inside, outside


def as_numbers(name: str, given: ArrayLike) -> np.ndarray:
    """The scores as float64, not-a-number as one above all others; ValueError for no numbers."""
    try:
        found = np.asarray(given)
    except ValueError:  # rows of unlike lengths
        found = np.empty(0, object)
    if found.dtype.kind not in "biuf":
        shown = found.dtype if found.size else type(given).__name__
        raise ValueError(f"{name} must be scores [n] or [n, k], real numbers, got {shown}")
    return np.nan_to_num(found.astype(np.float64), nan=1e30, posinf=1e29, neginf=-1e29)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of testing the charged event against the runs.

    Attributes:
        p_value: valid, of "the two worlds are as close as the event says".
        refuted: True if the p-value is at most 1 - ``confidence``.
    """

    p_value: float
    refuted: bool


def audit_event(
    with_record: ArrayLike,
    without: ArrayLike,
    event: acc.Event,
    *,
    confidence: float = 0.95,
    held_out: float = _HELD_OUT,
    seed: int = 0,
    relation: acc.Relation = acc.Relation.ADD_OR_REMOVE_ONE,
) -> Verdict:
    """Tests the whole privacy profile of what was charged on scores of the two worlds.

    Formal guarantee: a mechanism that is what ``event`` says is refuted with probability at most
    1 - ``confidence``. As in ``audit_scores``, what is tested is chosen on a random part of the
    runs. Stronger than comparing epsilon at one delta, for a small delta is out of reach of few
    runs.

    Arguments as for ``audit_scores``; the worlds are neighbours under ``relation``.
    """
    level = 1 - arguments.fraction("confidence", confidence)
    chosen, kept = split_runs(*as_scores(with_record, without), held_out, seed)
    rule = _choose_against_event(event, relation, chosen, kept)
    p = bounds.p_value(rule.counts(*kept), event_tradeoff(event, relation), rule.combine)
    return Verdict(p, p <= level)


def family_bound(
    with_record: ArrayLike,
    without: ArrayLike,
    family: Callable[[float], acc.Event],
    noise: float,
    delta: float,
    *,
    confidence: float = 0.95,
) -> Audited:
    """A lower bound on epsilon at ``delta``, if the mechanism is a member of a family of events.

    The Gaussian profile of Nasr et al. (2023) with a sampled mechanism's own profile in its place:
    the least noise that the runs refute, and epsilon there.

    Formal guarantee: if the mechanism **is a member of the family** (same sampling and steps, noise
    unknown), the answer exceeds its epsilon with probability at most 1 - ``confidence``.

    Arguments as for ``audit_scores``; ``family`` goes from a noise multiplier to the event, less
    private the smaller it is, and at the multiplier ``noise`` the choice of a test and the search
    begin.
    """
    arguments.positive("noise", noise)
    arguments.fraction("delta", delta)
    level = 1 - arguments.fraction("confidence", confidence)
    chosen, kept = split_runs(*as_scores(with_record, without), _HELD_OUT, 0)
    # Where the claim is true nothing sticks out of it: the test is chosen against a weaker event.
    rule = _choose_against_event(family(1.3 * noise), acc.Relation.ADD_OR_REMOVE_ONE, chosen, kept)
    counts = rule.counts(*kept)
    least = smallest_refuted_noise(
        lambda z: bounds.p_value(counts, event_tradeoff(family(z)), rule.combine) <= level, noise
    )
    value = 0.0 if least is None else acc.epsilon(family(least), delta).lower
    assumes = "the mechanism is what its event says, but for the size of the noise"
    return Audited(value, delta, confidence, assumes, counts, rule)


def smallest_refuted_noise(refuted: Callable[[float], bool], start: float) -> float | None:
    """Nearly the least refuted noise, itself refuted; None where none is."""
    high, step = start, 1.5
    while not refuted(high):
        high *= step
        if high > _FAR * start:
            return None
    low = high / step
    while refuted(low):
        high, low = low, low / step
        if low < 1e-3 * start:
            return high
    while high / low > 1.005:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return high


def event_tradeoff(
    event: acc.Event, relation: acc.Relation = acc.Relation.ADD_OR_REMOVE_ONE
) -> Tradeoff:
    """A trade-off function not above the event's own, from its profile at a few epsilons."""
    return lambda alarms: false_negative_rates(list(privacy_profile(event, relation)), alarms)


@functools.lru_cache(maxsize=4096)
def privacy_profile(
    event: acc.Event, relation: acc.Relation, epsilons: tuple[float, ...] = _EPSILONS
) -> tuple[tuple[float, float], ...]:
    """Pairs (epsilon, upper end of delta) at a few epsilons; deltas below 1e-9 end the list."""
    found = []
    for epsilon in epsilons:
        found.append((epsilon, acc.delta(event, epsilon, relation, tolerance=1e-2).upper))
        if found[-1][1] < 1e-9:
            break
    return tuple(found)


def _choose_against_event(
    event: acc.Event, relation: acc.Relation, chosen: Pair, kept: Pair
) -> ThresholdTest:
    """The test with the least p-value of the event to be expected in the runs kept."""
    rules, alarms, missed = candidate_tests(chosen)
    # Half a hit more and less, so that a rate of 0 in few runs has a spread.
    a, b = (
        (rate * len(part) + 0.5) / (len(part) + 1)
        for rate, part in zip((alarms, missed), chosen[::-1], strict=True)
    )

    # The few that exceed the profile by most standard deviations, in either direction.
    excess = np.full(len(rules), -np.inf)
    for epsilon, delta in privacy_profile(event, relation):
        for inside, outside, n_in, n_out in (
            (1 - b, a, len(chosen[0]), len(chosen[1])),
            (1 - a, b, len(chosen[1]), len(chosen[0])),
        ):
            gain = inside - math.exp(epsilon) * outside - delta
            spread = inside * (1 - inside) / n_in
            spread = spread + math.exp(2 * epsilon) * outside * (1 - outside) / n_out
            excess = np.maximum(excess, gain / np.sqrt(spread))

    # Of these the one with the least p-value, each combined by every rule.
    tradeoff, with_record, without = event_tradeoff(event, relation), len(kept[0]), len(kept[1])

    def expected(i: int, combine: str) -> float:
        """The p-value to be expected of the runs that are kept."""
        counts = ErrorCounts(round(a[i] * without), without, round(b[i] * with_record), with_record)
        return bounds.p_value(counts, tradeoff, combine)

    best = np.argsort(-excess)[:_TRIED]
    _, i, combine = min((expected(i, c), i, c) for i in best for c in bounds.RULES)
    return dataclasses.replace(rules[i], combine=combine)


class WithInterval(NamedTuple):
    """A number of these scores, and the interval of that of the attack."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


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
    """

    epsilon: Audited
    epsilon_gaussian: Audited | None
    auroc: WithInterval
    tpr: dict[float, WithInterval]
    accuracy: WithInterval

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
) -> AttackMeasures:
    """Lower bounds on epsilon and the attack's measures, from scores of any kind.

    Formal guarantee: where the scores are of independent runs, the bound ``epsilon`` holds for any
    mechanism with ``confidence``, the one of the Gaussian profile for such mechanisms, and so does
    every interval by itself: Hoeffding's of the area, of the accuracy that of Dvoretzky, Kiefer,
    Wolfowitz and Massart, Clopper and Pearson's of the true-positive rates, each of a threshold at
    a fixed rank. Canaries of one run may depend on one another: ``audit_one_run`` holds for them,
    these bounds need not. The other measures describe this attack: another may do better.

    Args:
        with_record: scores [n], higher with the record, of independent runs. Not-a-number counts
            as a score above all others: a run may show that. Make sure that yours does.
        without: scores [n'].
        delta: of the bounds, in [0, 1).
        confidence: in (0, 1).
        false_positive_rates: each in (0, 1).

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
    error = 1 - arguments.fraction("confidence", confidence)
    arguments.decay("delta", delta)
    wanted = arguments.each(
        "false_positive_rates", np.ravel(false_positive_rates).tolist(), arguments.fraction
    )
    pair = as_scores(with_record, without)
    if pair[0].shape[1] > 1:
        raise ValueError(
            f"with_record must be scores [n], one a run, got {pair[0].shape[1]} columns"
        )
    inside, outside = (np.sort(scores[:, 0]) for scores in pair)
    n, m = len(inside), len(outside)

    # The area: over all pairs the share of those with the higher score inside, ties counted half.
    ranks = np.searchsorted(outside, inside, "left") + np.searchsorted(outside, inside, "right")
    area, off = float(ranks.mean() / (2 * m)), math.sqrt(math.log(2 / error) / (2 * min(n, m)))
    auroc = WithInterval(area, max(0.0, area - off), min(1.0, area + off))

    # The accuracy: half of the largest distance of the two distributions, each within its own band.
    below_in, below_out = (
        np.searchsorted(s, np.r_[inside, outside]) / len(s) for s in (inside, outside)
    )
    best = 0.5 + 0.5 * max(0.0, float(np.max(below_out - below_in)))
    off = 0.5 * sum(math.sqrt(math.log(4 / error) / (2 * size)) for size in (n, m))
    accuracy = WithInterval(best, max(0.5, best - off), min(1.0, best + off))

    both = [
        audit_scores(inside, outside, delta, confidence=confidence, kind=kind)
        for kind in (KINDS if delta > 0 else KINDS[:1])
    ]
    rates = {rate: true_positive_rate(inside, outside, rate, confidence) for rate in wanted}
    return AttackMeasures(both[0], both[1] if delta > 0 else None, auroc, rates, accuracy)


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
    return clopper_pearson(hits, len(inside), confidence)


def roc_points(inside: np.ndarray, outside: np.ndarray, confidence: float) -> list[list[float]]:
    """Points of the ROC curve at fixed false-positive rates, each interval at ``confidence``.

    Rates that fewer than one of the scores ``outside`` [n'] would pass are left out.

    Returns:
        Rows [false-positive rate, low, high, hit rate, low, high].
    """
    found = []
    for rate in PLOTTED:
        rank = math.floor(rate * len(outside))
        if 0 < rank < len(outside):
            hits = true_positive_rate(inside, outside, rate, confidence)
            found.append([*clopper_pearson(rank, len(outside), confidence), *hits])
    return found


def clopper_pearson(hits: int, runs: int, confidence: float) -> WithInterval:
    """A share and the exact interval of its probability (Clopper and Pearson 1934)."""
    tail = (1 - confidence) / 2
    low = special.betaincinv(hits, runs - hits + 1.0, tail) if hits else 0.0
    high = special.betaincinv(hits + 1.0, runs - hits, 1 - tail) if hits < runs else 1.0
    return WithInterval(hits / runs, float(low), float(high))


def roc_curve(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """(false-alarm rate, hit rate) [k, 2] of "score >= threshold" over all thresholds."""
    both = np.sort(np.r_[inside, outside])
    cuts = both[np.unique(np.linspace(0, len(both) - 1, 400).astype(int))]
    alarms, hits = (1 - np.searchsorted(np.sort(s), cuts) / len(s) for s in (outside, inside))
    return np.c_[np.r_[alarms, 0.0], np.r_[hits, 0.0]]
