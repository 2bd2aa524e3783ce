"""Tests of the event that a ledger was charged, and bounds within a family of events."""

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.audit import bounds
from jaxdp.audit.bounds import ErrorCounts, Tradeoff
from jaxdp.audit.scores import Audited, Pair, ThresholdTest, candidates, checked, split

_EPSILONS = (0.0, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_TRIED = 6
_FAR = 6.0  # how many times the claimed noise a family is searched: beyond, epsilon is nearly 0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of testing the charged event against the runs.

    Attributes:
        p_value: valid, of "the two worlds are as close as the event says".
        refuted: True if the p-value is at most 1 - ``confidence``.
        confidence: of the verdict.
        counts: of the chosen event, in the runs kept for the test.
        rule: the chosen event.
    """

    p_value: float
    refuted: bool
    confidence: float
    counts: ErrorCounts
    rule: ThresholdTest


def audit_event(
    with_record: ArrayLike,
    without: ArrayLike,
    event: acc.Event,
    *,
    confidence: float = 0.95,
    held_out: float = 0.3,
    seed: int = 0,
    relation: acc.Relation = acc.Relation.ADD_OR_REMOVE_ONE,
) -> Verdict:
    """Tests the whole privacy profile of an event on scores of the two worlds.

    Formal guarantee: a mechanism that is what ``event`` says is refuted with probability at most
    1 - ``confidence``. As in ``jaxdp.audit.audit_scores``, what is tested is chosen on a
    random part of the runs. Stronger than comparing epsilon at one delta, for a small delta is out
    of reach of few runs.

    Args:
        with_record: scores [n] or [n, k].
        without: scores [n'] or [n', k].
        event: what was charged.
        confidence: in (0, 1).
        held_out: fraction of the runs on which the test is chosen.
        seed: of that part.
        relation: under which the worlds are neighbours.
    """
    arguments.fraction("confidence", confidence)
    chosen, kept = split(*checked(with_record, without), held_out, seed)
    tradeoff = tradeoff_of(event, relation)
    rule = _chosen(chosen, kept, event, relation)
    counts = rule.counts(*kept)
    p = bounds.p_value(counts, tradeoff, rule.combine)
    return Verdict(p, p <= 1 - confidence, confidence, counts, rule)


def family_bound(
    with_record: ArrayLike,
    without: ArrayLike,
    family: Callable[[float], acc.Event],
    noise: float,
    delta: float,
    *,
    confidence: float = 0.95,
    held_out: float = 0.3,
    seed: int = 0,
) -> Audited:
    """A lower bound on epsilon at ``delta``, if the mechanism is a member of a family of events.

    The Gaussian profile of Nasr et al. (2023) with a sampled mechanism's own profile in its place:
    the least noise that the runs refute, and epsilon there.

    Formal guarantee: if the mechanism **is a member of the family** (same sampling and steps, noise
    unknown), the answer exceeds its epsilon with probability at most 1 - ``confidence``.

    Args:
        with_record: scores [n] or [n, k].
        without: scores [n'] or [n', k].
        family: from a noise multiplier to the event, less private the smaller it is.
        noise: the claimed multiplier, where the choice of a test and the search begin.
        delta: of the bound.
        confidence: in (0, 1).
        held_out: fraction of the runs on which the test is chosen.
        seed: of that part.
    """
    arguments.positive("noise", noise)
    for name, value in (("delta", delta), ("confidence", confidence)):
        arguments.fraction(name, value)
    relation = acc.Relation.ADD_OR_REMOVE_ONE
    chosen, kept = split(*checked(with_record, without), held_out, seed)
    # Where the claim is true nothing sticks out of it: the test is chosen against a weaker event.
    rule = _chosen(chosen, kept, family(1.3 * noise), relation)
    counts = rule.counts(*kept)

    def refuted(z: float) -> bool:
        tradeoff = tradeoff_of(family(z), relation)
        return bounds.p_value(counts, tradeoff, rule.combine) <= 1 - confidence

    least = least_refuted(refuted, noise)
    value = 0.0 if least is None else acc.epsilon(family(least), delta).lower
    assumes = "the mechanism is what its event says, but for the size of the noise"
    return Audited(value, delta, confidence, "family", assumes, counts, rule)


def least_refuted(refuted: Callable[[float], bool], start: float) -> float | None:
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


def tradeoff_of(
    event: acc.Event, relation: acc.Relation = acc.Relation.ADD_OR_REMOVE_ONE
) -> Tradeoff:
    """A trade-off function not above the event's own, from its profile at a few epsilons."""
    pieces = [bounds.approximate_dp(e, d) for e, d in profile(event, relation)]
    return lambda a: np.max([piece(a) for piece in pieces], axis=0)


@functools.lru_cache(maxsize=4096)
def profile(
    event: acc.Event, relation: acc.Relation, epsilons: tuple[float, ...] = _EPSILONS
) -> tuple[tuple[float, float], ...]:
    """Pairs (epsilon, upper end of delta) at a few epsilons; deltas below 1e-9 end the list."""
    found = []
    for epsilon in epsilons:
        found.append((epsilon, acc.delta(event, epsilon, relation, tolerance=1e-2).upper))
        if found[-1][1] < 1e-9:
            break
    return tuple(found)


def _chosen(chosen: Pair, kept: Pair, event: acc.Event, relation: acc.Relation) -> ThresholdTest:
    rules, alarms, misses = candidates(chosen)
    # Half a hit more and less, so that a rate of 0 in few runs has a spread.
    a, b = (
        (rate * len(part) + 0.5) / (len(part) + 1)
        for rate, part in zip((alarms, misses), chosen[::-1], strict=True)
    )
    excess = np.full(len(rules), -np.inf)
    for epsilon, delta in profile(event, relation):
        for inside, outside, n_in, n_out in (
            (1 - b, a, len(chosen[0]), len(chosen[1])),
            (1 - a, b, len(chosen[1]), len(chosen[0])),
        ):
            gain = inside - math.exp(epsilon) * outside - delta
            spread = inside * (1 - inside) / n_in
            spread = spread + math.exp(2 * epsilon) * outside * (1 - outside) / n_out
            excess = np.maximum(excess, gain / np.sqrt(spread))
    tradeoff = tradeoff_of(event, relation)
    sizes = len(kept[1]), len(kept[0])

    def expected(i: int, combine: str) -> float:
        counts = ErrorCounts(round(a[i] * sizes[0]), sizes[0], round(b[i] * sizes[1]), sizes[1])
        return bounds.p_value(counts, tradeoff, combine)

    best = np.argsort(-excess)[:_TRIED]
    _, i, combine = min((expected(i, c), i, c) for i in best for c in bounds.RULES)
    return dataclasses.replace(rules[i], combine=combine)
