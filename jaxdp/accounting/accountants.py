"""The accountants: each takes a flat ``Run`` and a relation, and returns a ``Bound``."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxdp.accounting import (
    certificate,
    clt,
    estimate,
    fixed_size,
    gaussian,
    last_iterate,
    rdp,
    single,
)
from jaxdp.accounting.base import Pair, Unresolved
from jaxdp.accounting.bounds import Bound, Relation, UnsupportedEventError
from jaxdp.accounting.canonical import Run, Step
from jaxdp.accounting.certificate import Direction
from jaxdp.accounting.loss import separation
from jaxdp.accounting.pairs import gaussian_pairs
from jaxdp.accounting.plan import Kinds

_ZERO = "delta(0) is already below the target"
_BETWEEN = "no tight value is known: the truth lies between the ends"
_UPPER_ONLY = "upper bound only: no lower end is proven"


@dataclass(frozen=True)
class Accountant:
    """An accountant: its two queries, and the runs that it refuses.

    Attributes:
        epsilon: (run, relation, delta) -> Bound.
        delta: (run, relation, epsilon) -> Bound.
        refuses: (run, relation) -> reason, or "" when it can answer.
    """

    epsilon: Callable[[Run, Relation, float], Bound]
    delta: Callable[[Run, Relation, float], Bound]
    refuses: Callable[[Run, Relation], str]


def _only_pairs(run: Run, relation: Relation) -> str:
    bad = [type(part).__name__ for part, _ in run.parts if not part.pairs(relation, True)]
    return f"{', '.join(bad)}: no privacy loss distribution is known" if bad else ""


def _only_renyi(run: Run, relation: Relation) -> str:
    del run, relation
    return ""


def _only_log_sobolev(run: Run, relation: Relation) -> str:
    del relation
    return last_iterate.refuses_log_sobolev(run)


def _no_replace_one(run: Run, relation: Relation) -> str:
    bad = [s for s, _ in run.steps if s.sampling != "poisson"]
    if bad or run.parts or relation is Relation.REPLACE_ONE:
        return f"{_names(run)}: the central limit is stated for adding or removing a record from "
        "Poisson samples"
    return ""


def _only_full_batch(run: Run, relation: Relation) -> str:
    del relation
    plain = all(s.sampling_prob == 1 and s.sampling == "poisson" for s, _ in run.steps)
    return "" if plain and not run.parts else f"{_names(run)}: there is no exact GDP curve"


def _names(run: Run) -> str:
    """The events that a message is about; a long list is counted."""
    names = [*(str(s) for s, _ in run.steps), *(str(p) for p, _ in run.parts)]
    more = [f"and {len(names) - 8} more"] if len(names) > 8 else []
    return ", ".join(names[:8] + more)


def _gdp_epsilon(run: Run, relation: Relation, delta: float) -> Bound:
    mu = separation(relation) / run.steps[0][0].noise_multiplier
    lower, upper = gaussian.gaussian_epsilon(mu, delta)
    return Bound(lower, 0.5 * (lower + upper), upper, "gdp", _ZERO if upper == 0 else "")


def _gdp_delta(run: Run, relation: Relation, epsilon: float) -> Bound:
    mu = separation(relation) / run.steps[0][0].noise_multiplier

    def at(by: float) -> float:
        return gaussian.gaussian_delta(mu * (1 - by), epsilon * (1 + by))

    # The rounding of mu and of epsilon/mu moves delta by more than its own margin where mu is huge.
    value, low, high = at(0.0), at(2e-15) * (1 - 1e-10), at(-2e-15) * (1 + 1e-10) + 1e-300
    return Bound(min(low, value), value, min(max(high, value), 1.0), "gdp")


def _rdp_epsilon(run: Run, relation: Relation, delta: float) -> Bound:
    upper, _ = rdp.rdp_to_epsilon(rdp.run_rdp(run, relation), delta)
    return Bound(0.0, None, upper, "rdp", _UPPER_ONLY)


def _rdp_delta(run: Run, relation: Relation, epsilon: float) -> Bound:
    upper = rdp.rdp_to_delta(rdp.run_rdp(run, relation), epsilon)
    return Bound(0.0, None, upper, "rdp", _UPPER_ONLY)


def poisson(run: Run) -> bool:
    """True if the run is of Gaussians on Poisson samples or full batches alone."""
    return not run.parts and all(s.sampling == "poisson" for s, _ in run.steps)


def directions(run: Run, relation: Relation, log_delta: float) -> list[Direction]:
    """The run's dominating pairs, direction by direction, for a certificate at about a delta."""
    ends: list[list[tuple[tuple[Pair, ...], int]] | None] = []
    for upper in (True, False):
        found = [(_step_pairs(step, relation, upper), n) for step, n in run.steps]
        found += [(part.pairs(relation, upper), n) for part, n in run.parts]
        ends.append(found if all(pairs for pairs, _ in found) else None)
    high, low = ends
    assert high is not None
    sampled = sum(n * s.sampling_prob for s, n in run.steps) + sum(n for _, n in run.parts)
    tolerance = 9e-5 if sampled >= 1 else 5e-4
    count = max(len(pairs) for found in ends if found for pairs, _ in found)

    def kinds(found: list[tuple[tuple[Pair, ...], int]], i: int) -> Kinds:
        return tuple((pairs[min(i, len(pairs) - 1)], n) for pairs, n in found)

    return [
        Direction(kinds(high, i), None if low is None else kinds(low, i), log_delta, tolerance)
        for i in range(count)
    ]


def _step_pairs(step: Step, relation: Relation, upper: bool) -> tuple[Pair, ...]:
    if step.sampling == "poisson":
        return gaussian_pairs(step, relation)
    return fixed_size.pairs(step.noise_multiplier, step.sampling_prob, relation, upper)


def quick_epsilon(run: Run, relation: Relation, delta: float) -> float | None:
    """An estimate of epsilon, or None where there is none: it is no bound."""
    if not poisson(run) or not run.steps or run.infinite or run.hidden:
        return None
    if not _only_full_batch(run, relation):
        return _gdp_epsilon(run, relation, delta).estimate
    if _is_single(run):
        return _exact_epsilon(run, relation, delta).estimate
    try:
        return estimate.epsilon(run, relation, delta)
    except Unresolved:
        return None


def quick_delta(run: Run, relation: Relation, epsilon: float) -> float | None:
    """An estimate of delta, or None where there is none: it is no bound."""
    if not poisson(run) or not run.steps or run.infinite or run.hidden:
        return None
    try:
        return estimate.delta(run, relation, epsilon)
    except Unresolved:
        return None


def _exact_epsilon(run: Run, relation: Relation, delta: float) -> Bound:
    if _is_single(run):
        lower, upper = single.single_epsilon(run.steps[0][0], relation, delta)
        lower, upper = lower * (1 - 1e-14), upper * (1 + 1e-14)  # as in _single_delta
        return Bound(lower, 0.5 * (lower + upper), upper, "exact", _ZERO if upper == 0 else "")
    if not run.parts and single.total_variation(run, relation) <= delta:
        return Bound(0.0, 0.0, 0.0, "exact", _ZERO)
    quick = quick_epsilon(run, relation, delta)
    found = directions(run, relation, math.log(delta))
    lower, upper = certificate.epsilon_bounds(found, quick or None)
    return _joined(lower, upper, quick, found[0].two_sided, "epsilon")


def _exact_delta(run: Run, relation: Relation, epsilon: float) -> Bound:
    if _is_single(run):
        return _single_delta(run.steps[0][0], relation, epsilon)
    quick = quick_delta(run, relation, epsilon)
    guess = quick or rdp.rdp_to_delta(rdp.run_rdp(run, relation), epsilon)
    for _ in range(3):
        found = directions(run, relation, math.log(max(guess, 1e-300)))
        lower, upper = certificate.delta_bounds(found, epsilon)
        # Tails were cut for the delta that was expected.
        if upper >= 1e-3 * guess or guess < 1e-290:
            break
        guess = max(upper, 1e-300)
    return _joined(lower, upper, quick, found[0].two_sided, "delta")


def _single_delta(step: Step, relation: Relation, epsilon: float) -> Bound:
    """The closed form with its margin, at arguments moved by more than their rounding."""

    def at(by: float) -> float:
        moved = replace(step, noise_multiplier=step.noise_multiplier * (1 + by))
        return single.single_delta(moved, relation, epsilon * (1 + by))

    value, margin = at(0.0), 1e-9
    low, high = at(2e-15) * (1 - margin), at(-2e-15) * (1 + margin) + 1e-300
    return Bound(min(low, value), value, min(max(high, value), 1.0), "exact")


def _is_single(run: Run) -> bool:
    return poisson(run) and len(run.steps) == 1 and run.steps[0][1] == 1


def _joined(lower: float, upper: float, quick: float | None, both: bool, query: str) -> Bound:
    """The certificate with the integral's estimate, which must not contradict it.

    Raises:
        ArithmeticError: they contradict each other: one of the two is wrong.
    """
    error = estimate.EPSILON_ERROR if query == "epsilon" else estimate.DELTA_ERROR
    if quick is not None and not lower * (1 - error) <= quick <= upper * (1 + error):
        raise ArithmeticError(
            f"{query}: the certificate [{lower!r}, {upper!r}] and the contour integral's {quick!r} "
            "contradict each other; please report this run"
        )
    note = _ZERO if upper == 0 and query == "epsilon" else ""
    if not both:
        return Bound(0.0, None, upper, "exact", note or _UPPER_ONLY)
    if quick is not None:
        return Bound(lower, min(max(quick, lower), upper), upper, "exact", note)
    if upper - lower > 2e-3 * upper:
        return Bound(lower, None, upper, "exact", note or _BETWEEN)
    return Bound(lower, 0.5 * (lower + upper), upper, "exact", note)


def _auto(query: str) -> Callable[[Run, Relation, float], Bound]:
    """The certificate where there are pairs; Renyi bounds where there are none or they are less."""

    def answer(run: Run, relation: Relation, value: float) -> Bound:
        if not _only_full_batch(run, relation):
            return getattr(ACCOUNTANTS["gdp"], query)(run, relation, value)
        loose = functools.partial(getattr(ACCOUNTANTS["rdp"], query), run, relation, value)
        if _only_pairs(run, relation):
            return loose()
        try:
            bound = getattr(ACCOUNTANTS["exact"], query)(run, relation, value)
        except Unresolved:
            return loose()
        return _tighter(bound, loose) if bound.upper - bound.lower > 1e-2 * bound.upper else bound

    return answer


def _tighter(bound: Bound, other: Callable[[], Bound]) -> Bound:
    """The bound, or its lower end with the other's upper end if that is the smaller.

    Raises:
        ArithmeticError: the other's upper end is below the bound's lower end.
    """
    loose = other()
    if loose.upper >= bound.upper:
        return bound
    if loose.upper < bound.lower:
        raise ArithmeticError(
            f"{bound.accountant}'s lower end {bound.lower!r} and {loose.accountant}'s upper end "
            f"{loose.upper!r} contradict each other; please report this run"
        )
    estimate = None if bound.estimate is None else min(bound.estimate, loose.upper)
    return Bound(bound.lower, estimate, loose.upper, loose.accountant, bound.note)


ACCOUNTANTS: dict[str, Accountant] = {
    "exact": Accountant(_exact_epsilon, _exact_delta, _only_pairs),
    "gdp": Accountant(_gdp_epsilon, _gdp_delta, _only_full_batch),
    "clt": Accountant(clt.clt_epsilon, clt.clt_delta, _no_replace_one),
    "rdp": Accountant(_rdp_epsilon, _rdp_delta, _only_renyi),
    "log_sobolev": Accountant(
        last_iterate.log_sobolev_epsilon, last_iterate.log_sobolev_delta, _only_log_sobolev
    ),
}
_AUTO = Accountant(_auto("epsilon"), _auto("delta"), _only_renyi)


def ask(query: str, run: Run, relation: Relation, accountant: str, value: float) -> Bound:
    """Returns the bound of the accountant named, or for "auto" of the tightest that covers the run.

    Args:
        query: "epsilon" or "delta".
        run: the flat composition.
        relation: the neighbouring relation.
        accountant: "auto" or a key of ``ACCOUNTANTS``.
        value: the delta, or the epsilon (which may be infinite), at which to answer.

    Raises:
        UnsupportedEventError: when the accountant refuses the run or cannot resolve it.
    """
    refusal = refuses(run, relation, accountant)
    if refusal:
        raise UnsupportedEventError(refusal)
    trivial = _trivial(run)
    if trivial:
        value = min(trivial.upper, math.inf if query == "epsilon" else 1.0)
        return Bound(0.0, value, value, trivial.accountant, trivial.note)
    if query == "delta" and value == math.inf and not run.parts:
        # Gaussian noise on everything: no output is possible under one law alone.
        return Bound(0.0, 0.0, 0.0, "none", "no output of the run has an infinite loss")
    asked = _AUTO if accountant == "auto" else ACCOUNTANTS[accountant]
    try:
        bound: Bound = getattr(asked, query)(run, relation, value)
        return _hidden(query, run, relation, accountant, value, bound) if run.hidden else bound
    except Unresolved as error:
        raise UnsupportedEventError(
            f"{_names(run)}: {accountant} under {relation.value} cannot resolve the composition "
            f"({error}); use accountant 'auto'"
        ) from None


def _hidden(
    query: str, run: Run, relation: Relation, accountant: str, value: float, bound: Bound
) -> Bound:
    """The answer for a run with hidden-state events: an upper end only, averaged where allowed."""
    if accountant == "auto" and any(event.average for event, _ in run.hidden):
        averaged = getattr(last_iterate, f"averaged_{query}")
        bound = min(bound, averaged(run, relation, value), key=lambda b: b.upper)
    name = "log_sobolev" if accountant == "log_sobolev" else f"shifted, {bound.accountant}"
    words = "; ".join(part for part in (bound.note, last_iterate.note(run)) if part)
    return Bound(0.0, None, bound.upper, name, words)


def refuses(run: Run, relation: Relation, accountant: str) -> str:
    """The reason why the accountant has no bound for this run, or "".

    Raises:
        ValueError: for an unknown accountant.
    """
    if accountant != "auto" and accountant not in ACCOUNTANTS:
        raise ValueError(
            f"accountant={accountant!r}: expected 'auto' or one of {sorted(ACCOUNTANTS)}"
        )
    if run.empty or run.infinite:
        return ""
    if run.parts and accountant not in ("auto", "rdp"):
        return f"{type(run.parts[0][0]).__name__} by accountant {accountant}: not covered"
    reason = (_AUTO if accountant == "auto" else ACCOUNTANTS[accountant]).refuses(run, relation)
    return f"{reason} by accountant {accountant} under {relation.value}" if reason else ""


def _trivial(run: Run) -> Bound | None:
    """The answer to runs that need no accountant: nothing released, or nothing guaranteed."""
    if run.infinite:
        return Bound(0.0, math.inf, math.inf, "none", f"no guarantee: {run.infinite}")
    if run.empty:
        return Bound(0.0, 0.0, 0.0, "none", "nothing that depends on the data was released")
    return None
