"""Lower bounds on epsilon from scores of two worlds; the test is chosen on runs set aside."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

from jaxdp import arguments
from jaxdp.accounting.gaussian import gaussian_epsilon
from jaxdp.auditing import bounds, ranks
from jaxdp.auditing.bounds import Counts

_BACK = 0.1  # of the error, spent on scores that are lower with the record
KINDS = ("clopper_pearson", "gaussian")
_QUANTILES = np.r_[0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, np.linspace(0.04, 0.96, 24)]
_QUANTILES = np.unique(np.r_[_QUANTILES, 1 - _QUANTILES, 0.0, 1.0])


@dataclasses.dataclass(frozen=True)
class Rule:
    """A test: column ``column`` times ``sign`` is at least ``threshold``."""

    column: int
    sign: int
    threshold: float
    combine: str = "sum"

    def counts(self, with_record: np.ndarray, without: np.ndarray) -> Counts:
        """The counts of the test on scores [n, k] and [n', k]."""
        inside = self.sign * with_record[:, self.column] >= self.threshold
        outside = self.sign * without[:, self.column] >= self.threshold
        return Counts(int(outside.sum()), len(outside), int((~inside).sum()), len(inside))


@dataclasses.dataclass(frozen=True)
class Audited:
    """A lower bound on epsilon, with its confidence and assumptions.

    Attributes:
        epsilon: lower bound at ``delta``; 0 where nothing is proven.
        delta: of the bound.
        confidence: with which the bound holds.
        kind: how it was made.
        assumes: what must be true of the mechanism for it to hold; "" for nothing.
        counts: of the chosen event, in the runs kept for the test.
        rule: the event; None where several were looked at.
    """

    epsilon: float
    delta: float
    confidence: float
    kind: str
    assumes: str
    counts: Counts | None
    rule: Rule | None

    def __str__(self) -> str:
        return (
            f"epsilon >= {np.floor(1000 * self.epsilon) / 1000:.3f} at delta {self.delta:g} with "
            f"{self.confidence:.0%} confidence"
        )


GAUSSIAN_ONLY = "the mechanism's own trade-off function is Gaussian (full batch, nothing hidden)"


def audit_scores(
    with_record: Any,
    without: Any,
    delta: float,
    *,
    confidence: float = 0.95,
    kind: str = "clopper_pearson",
    held_out: float = 0.2,
    threshold: float | None = None,
    seed: int = 0,
) -> Audited:
    """A lower bound on epsilon from scores of runs with and without a record.

    Formal guarantee: that of ``jaxdp.auditing.epsilon_bound`` (or ``gaussian_bound``), for
    independent runs: the column, its direction, the threshold and the combining rule are chosen on
    a random part of the runs, the bound is computed on the others. The kind "gaussian" takes the
    balanced threshold, where false alarms and misses are equally many, by its exact distribution
    (``jaxdp.auditing.ranks``): of a single column no run is set aside and no seed is drawn.

    Args:
        with_record: scores [n] or [n, k] of the runs with the record, k of them a run; not-a-number
            is a score of its own.
        without: scores [n'] or [n', k] of the runs without it.
        delta: of the bound.
        confidence: in (0, 1).
        kind: "clopper_pearson" for any mechanism, or "gaussian".
        held_out: fraction of the runs on which the event (of the kind "gaussian", the column) is
            chosen.
        threshold: of a single column, fixed beforehand; then no run is set aside.
        seed: of the random part.

    Returns:
        The bound, with its assumptions.

    Raises:
        ValueError: a threshold with several columns or not a number; too few runs.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> without = rng.normal(0.0, 1.0, 10_000)
        >>> with_record = rng.normal(2.0, 1.0, 10_000)
        >>> audited = jaxdp.auditing.audit_scores(with_record, without, delta=1e-5)
        >>> proven = jaxdp.accounting.epsilon(jaxdp.accounting.Gaussian(0.5), delta=1e-5).upper
        >>> 1.0 < audited.epsilon < proven
        True
    """
    check(delta, confidence, kind)
    inside, outside = checked(with_record, without)
    bound = bounds.epsilon_bound if kind == "clopper_pearson" else bounds.gaussian_bound
    if threshold is None and kind == "gaussian":
        return _balanced(inside, outside, delta, confidence, held_out, seed)
    if threshold is None:
        chosen, kept = split(inside, outside, held_out, seed)
        rule = _chosen(chosen, kept, delta, confidence, bound)
    elif inside.shape[1] > 1:
        raise ValueError(f"threshold must be None for {inside.shape[1]} columns, got {threshold}")
    elif np.ndim(threshold) or np.isnan(threshold):
        raise ValueError(f"threshold must be a single number, got {threshold!r}")
    else:
        rule, kept = Rule(0, 1, float(threshold)), (inside, outside)
    counts = rule.counts(*kept)
    value = bound(counts, delta, confidence, rule.combine)
    assumes = GAUSSIAN_ONLY if kind == "gaussian" else ""
    return Audited(value, delta, confidence, kind, assumes, counts, rule)


def _balanced(
    inside: np.ndarray,
    outside: np.ndarray,
    delta: float,
    confidence: float,
    held_out: float,
    seed: int,
) -> Audited:
    """The bound by the Gaussian profile at the balanced threshold."""
    column = 0
    signs: tuple[tuple[int, float], ...] = ((1, 1 - _BACK), (-1, _BACK))
    if inside.shape[1] > 1:
        chosen, (inside, outside) = split(inside, outside, held_out, seed)
        column, sign = _farthest(*chosen)
        signs = ((sign, 1.0),)
    one, other = inside[:, column], outside[:, column]
    tried = [
        (*ranks.balanced_mu(sign * one, sign * other, share * (1 - confidence)), sign)
        for sign, share in signs
    ]
    mu, c, cut, sign = max(tried)
    counts, rule = Counts(c, len(other), c, len(one)), Rule(column, sign, cut)
    value = gaussian_epsilon(mu, delta)[0]
    return Audited(value, delta, confidence, "gaussian", GAUSSIAN_ONLY, counts, rule)


def _farthest(inside: np.ndarray, outside: np.ndarray) -> tuple[int, int]:
    """(column, sign) whose balanced threshold has the fewest false alarms and misses."""
    tried = [
        (ranks.crossing(sign * inside[:, k], sign * outside[:, k])[0], k, sign)
        for k in range(inside.shape[1])
        for sign in (1, -1)
    ]
    return min(tried)[1:]


def audit_all_thresholds(
    with_record: Any,
    without: Any,
    delta: float,
    thresholds: Any,
    *,
    confidence: float = 0.95,
    kind: str = "clopper_pearson",
) -> Audited:
    """The best bound over given thresholds, in both directions, corrected for all of them.

    Formal guarantee: as ``audit_scores``; each of the 2 k looks gets 1/(2 k) of the error
    (Bonferroni). The thresholds must not depend on these scores.

    Args:
        with_record: as for ``audit_scores``.
        without: as for ``audit_scores``.
        delta: of the bound.
        thresholds: [t], at least one; every column is tried with each of them.
        confidence: in (0, 1), of the bound, over all looks together.
        kind: as for ``audit_scores``.

    Raises:
        ValueError: there is no threshold.
    """
    # Before the error is shared out: a share of a wrong confidence can look like a right one.
    check(delta, confidence, kind)
    inside, outside = checked(with_record, without)
    cuts = np.atleast_1d(np.asarray(thresholds, float))
    if cuts.ndim != 1 or not cuts.size or np.isnan(cuts).any():
        raise ValueError(f"thresholds must be numbers [t], at least one, got {thresholds!r}")
    looks = 2 * inside.shape[1] * len(cuts)
    bound = bounds.epsilon_bound if kind == "clopper_pearson" else bounds.gaussian_bound
    level = 1 - (1 - confidence) / looks
    rules = [
        Rule(column, sign, sign * float(cut))
        for column in range(inside.shape[1])
        for sign in (1, -1)
        for cut in cuts
    ]
    found = [(bound(rule.counts(inside, outside), delta, level), i) for i, rule in enumerate(rules)]
    value, i = max(found)
    assumes = GAUSSIAN_ONLY if kind == "gaussian" else ""
    counts = rules[i].counts(inside, outside)
    return Audited(value, delta, confidence, f"{kind}, {looks} looks", assumes, counts, rules[i])


def check(delta: float, confidence: float, kind: str = KINDS[0]) -> None:
    """Raises ValueError unless all three are in their range."""
    arguments.one_of("kind", kind, KINDS)
    bounds.check_delta(delta, kind)
    arguments.fraction("confidence", confidence)


def checked(with_record: Any, without: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64 [n, k], with not-a-number as a score above all others."""
    both = []
    for name, given in (("with_record", with_record), ("without", without)):
        scores = _numbers(name, given)
        scores = scores[:, None] if scores.ndim == 1 else scores
        if scores.ndim != 2 or not scores.size:
            raise ValueError(f"{name} must be scores [n] or [n, k], got shape {scores.shape}")
        both.append(np.nan_to_num(scores, nan=1e30, posinf=1e29, neginf=-1e29))
    if both[0].shape[1] != both[1].shape[1]:
        raise ValueError(
            f"without must have {both[0].shape[1]} columns like with_record, got {both[1].shape[1]}"
        )
    return both[0], both[1]


def _numbers(name: str, given: Any) -> np.ndarray:
    """The scores as float64; ValueError for strings, complex numbers and rows of unlike lengths."""
    try:
        found = np.asarray(given)
    except ValueError:  # rows of unlike lengths
        found = np.empty(0, object)
    if found.dtype.kind not in "biuf":
        shown = found.dtype if found.size else type(given).__name__
        raise ValueError(f"{name} must be scores [n] or [n, k], real numbers, got {shown}")
    return found.astype(np.float64)


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


def candidates(chosen: Pair) -> tuple[list[Rule], np.ndarray, np.ndarray]:
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
            rules += [Rule(column, sign, sign * float(cut)) for cut in cuts]
            alarms.append(hit_out)
            misses.append(1 - hit_in)
    return rules, np.concatenate(alarms), np.concatenate(misses)


def _chosen(
    chosen: Pair,
    kept: Pair,
    delta: float,
    confidence: float,
    bound: Callable[..., float],
) -> Rule:
    rules, alarms, misses = candidates(chosen)
    # Pessimistic about the choosing part, so that a rate of 0 in few runs is not taken for 0.
    a, b = (
        upper(rate, len(part), 0.05)
        for rate, part in zip((alarms, misses), chosen[::-1], strict=True)
    )
    gain = np.log(np.maximum(np.maximum((1 - b - delta) / a, (1 - a - delta) / b), 1e-9))
    best = int(np.argmax(gain))
    sizes = len(kept[1]), len(kept[0])
    # Half a hit more, for a rate of 0 in few runs is hardly 0.
    likely = [
        round((rate[best] * len(part) + 0.5) / (len(part) + 1) * size)
        for rate, part, size in zip((alarms, misses), chosen[::-1], sizes, strict=True)
    ]
    expected = Counts(likely[0], sizes[0], likely[1], sizes[1])
    combine = max(bounds.RULES, key=lambda r: bound(expected, delta, confidence, r))
    return dataclasses.replace(rules[best], combine=combine)


def upper(rate: np.ndarray, runs: int, level: float) -> np.ndarray:
    """Clopper-Pearson upper ends of rates that were measured in ``runs`` runs."""
    hits = np.rint(rate * runs)
    inside = np.minimum(hits, runs - 1)
    return np.where(hits < runs, special.betaincinv(inside + 1, runs - inside, 1 - level), 1.0)
