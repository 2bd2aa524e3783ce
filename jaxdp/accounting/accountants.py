"""The accountants: each takes a flat ``Run`` and a relation, and returns a ``Bound``."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxdp.accounting import certificate, estimate, gaussian, last_iterate, rdp, single
from jaxdp.accounting.base import Unresolved
from jaxdp.accounting.bounds import Bound, Relation, UnsupportedEventError
from jaxdp.accounting.canonical import Run, Step
from jaxdp.accounting.kinds import directions, fewer
from jaxdp.accounting.loss import separation

_ZERO = "delta(0) is already below the target"
_BETWEEN = "no tight value is known: the truth lies between the ends"
_LIMIT = "a limit for many small steps; it may be below the truth, so there is no upper end"
_UPPER_ONLY = "upper bound only: no lower end is proven"


@dataclass(frozen=True)
class Accountant:
    """An accountant and the runs that it refuses.

    Attributes:
        answer: ("epsilon" or "delta", run, relation, the other of the two) -> Bound.
        refuses: (run, relation) -> reason, or "" when it can answer.
    """

    answer: Callable[..., Bound]
    refuses: Callable[[Run, Relation], str]


def _only_pairs(run: Run, relation: Relation) -> str:
    bad = [type(part).__name__ for part, _ in run.parts if not part.pairs(relation, True)]
    return f"{', '.join(bad)}: no privacy loss distribution is known" if bad else ""


def _no_replace_one(run: Run, relation: Relation) -> str:
    bad = [s for s, _ in run.steps if s.sampling != "poisson"]
    if bad or run.parts or relation is Relation.REPLACE_ONE:
        only = "the central limit is stated for adding or removing a record from Poisson samples"
        return f"{_names(run)}: {only}"
    return ""


def _only_full_batch(run: Run, relation: Relation) -> str:
    plain = all(s.sampling_prob == 1 and s.sampling == "poisson" for s, _ in run.steps)
    return "" if plain and not run.parts else f"{_names(run)}: there is no exact GDP curve"


def _names(run: Run) -> str:
    """The events that a message is about; a long list is counted."""
    names = [*(str(s) for s, _ in run.steps), *(str(p) for p, _ in run.parts)]
    more = [f"and {len(names) - 8} more"] if len(names) > 8 else []
    return ", ".join(names[:8] + more)


def _gdp(query: str, run: Run, relation: Relation, value: float) -> Bound:
    mu = separation(relation) / run.steps[0][0].noise_multiplier
    if query == "epsilon":
        lower, upper = gaussian.gaussian_epsilon(mu, value)
        return Bound(lower, 0.5 * (lower + upper), upper, "gdp", _ZERO if upper == 0 else "")
    return _around(
        lambda by: gaussian.gaussian_delta(mu * (1 - by), value * (1 + by)), 1e-10, "gdp"
    )


def _around(delta: Callable[[float], float], margin: float, name: str) -> Bound:
    """A closed form with its margin, at arguments moved by more than their rounding.

    That moves delta by more than the margin where mu is huge.
    """
    value, low, high = delta(0.0), delta(2e-15) * (1 - margin), delta(-2e-15) * (1 + margin)
    return Bound(min(low, value), value, min(max(high + 1e-300, value), 1.0), name)


def _clt(query: str, run: Run, relation: Relation, value: float) -> Bound:
    """Gaussian differential privacy by the central limit theorem: an approximation, not a bound.

    mu is sqrt(sum n q^2 (e^(1/z^2) - 1)), where a full-batch step adds 1/z^2: Bu, Dong, Long and Su
    2020, "Deep learning with Gaussian differential privacy" (arXiv:1911.11607), the central limit
    for Poisson sampling under add/remove.
    """
    square = 0.0
    for step, n in run.steps:
        inverse = step.noise_multiplier**-2
        gained = inverse if step.sampling_prob == 1 else math.expm1(min(inverse, 700.0))
        square += n * step.sampling_prob**2 * gained
    if query == "epsilon":
        estimate, upper = gaussian.gaussian_epsilon(math.sqrt(square), value)[1], math.inf
    else:
        estimate, upper = gaussian.gaussian_delta(math.sqrt(square), value), 1.0
    return Bound(0.0, estimate, upper, "clt", _LIMIT)


def _rdp(query: str, run: Run, relation: Relation, value: float) -> Bound:
    upper = rdp.convert(query, rdp.run_rdp(run, relation), value)
    return Bound(0.0, None, upper, "rdp", _UPPER_ONLY)


def poisson(run: Run) -> bool:
    """True if the run is of Gaussians on Poisson samples or full batches alone."""
    return not run.parts and all(s.sampling == "poisson" for s, _ in run.steps)


def quick_epsilon(run: Run, relation: Relation, delta: float) -> float | None:
    """An estimate of epsilon, or None where there is none: it is no bound."""
    if not poisson(run) or not run.steps or run.infinite or run.hidden:
        return None
    if not _only_full_batch(run, relation):
        return _gdp("epsilon", run, relation, delta).estimate
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


def _exact_epsilon(
    run: Run,
    relation: Relation,
    delta: float,
    goal: float | None = None,
    other: Callable[[], Bound] | None = None,
) -> Bound:
    """The certificate's bounds; ``other`` is asked too where they rest on moments alone."""
    if _is_single(run):
        lower, upper = single.single_epsilon(run.steps[0][0], relation, delta)
        lower, upper = lower * (1 - 1e-14), upper * (1 + 1e-14)  # as in _around
        return Bound(lower, 0.5 * (lower + upper), upper, "exact", _ZERO if upper == 0 else "")
    if not run.parts and single.total_variation(run, relation) <= delta:
        return Bound(0.0, 0.0, 0.0, "exact", _ZERO)
    quick = quick_epsilon(run, relation, delta)
    sampled = sum(n * s.sampling_prob for s, n in run.steps) + sum(n for _, n in run.parts)
    goal = goal or (9.8e-5 if sampled >= 1 else 5e-4)
    found = directions(run, relation, math.log(delta), goal)
    lower, upper = certificate.epsilon_bounds(found, quick or None)
    bound = _joined(lower, upper, quick, found[0].two_sided, "epsilon")
    return _tighter(bound, other) if other and any(d.by_moments for d in found) else bound


def rough_epsilon(run: Run, relation: Relation, delta: float) -> float:
    """An upper end of epsilon at delta, good to about 0.02 %.

    Raises:
        Unresolved: ``ask`` knows a better way, or the only one.
    """
    _need_certificate(run, relation)
    found = directions(fewer(run), relation, math.log(delta), 2e-4, both=False)
    return certificate.epsilon_bounds(found, None)[1]


def rough_delta(run: Run, relation: Relation, epsilon: float) -> float:
    """An upper end of delta at epsilon, good to about 1 % where there is a certificate."""
    try:
        _need_certificate(run, relation)
        return min(1.0, _certified_delta(fewer(run), relation, epsilon, None, 1e-2, False)[1])
    except Unresolved:
        return ask("delta", run, relation, "auto", epsilon).upper


def _need_certificate(run: Run, relation: Relation) -> None:
    known = run.empty or run.infinite or not _only_full_batch(run, relation) or _is_single(run)
    if known or run.hidden or _only_pairs(run, relation):
        raise Unresolved("no privacy loss distribution")


def _exact_delta(
    run: Run, relation: Relation, epsilon: float, other: Callable[[], Bound] | None = None
) -> Bound:
    if _is_single(run):
        return _single_delta(run.steps[0][0], relation, epsilon)
    quick = quick_delta(run, relation, epsilon)
    lower, upper, found = _certified_delta(run, relation, epsilon, quick, 1e-3, True)
    bound = _joined(lower, upper, quick, found[0].two_sided, "delta")
    return _tighter(bound, other) if other and any(d.by_moments for d in found) else bound


def _certified_delta(
    run: Run, relation: Relation, epsilon: float, near: float | None, goal: float, both: bool
) -> tuple[float, float, list[certificate.Direction]]:
    """(lower, upper) delta, and the directions that they were found in."""
    guess = near or rdp.rdp_to_delta(rdp.run_rdp(run, relation), epsilon)
    for _ in range(8):
        found = directions(run, relation, math.log(max(guess, 1e-300)), goal, both)
        lower, upper = certificate.delta_bounds(found, epsilon)
        # Tails were cut for the delta that was expected.
        if upper >= 1e-3 * guess or guess < 1e-290:
            break
        guess = max(upper, 1e-300)
    return lower, upper, found


def _single_delta(step: Step, relation: Relation, epsilon: float) -> Bound:
    def delta(by: float) -> float:
        moved = replace(step, noise_multiplier=step.noise_multiplier * (1 + by))
        return single.single_delta(moved, relation, epsilon * (1 + by))

    return _around(delta, 1e-9, "exact")


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


def _exact(
    query: str,
    run: Run,
    relation: Relation,
    value: float,
    goal: float | None = None,
    other: Callable[[], Bound] | None = None,
) -> Bound:
    if query == "epsilon":
        return _exact_epsilon(run, relation, value, goal, other)
    return _exact_delta(run, relation, value, other)


def _auto(
    query: str, run: Run, relation: Relation, value: float, goal: float | None = None
) -> Bound:
    """The certificate where there are pairs; Renyi bounds where there are none or they are less."""
    if not _only_full_batch(run, relation):
        return _gdp(query, run, relation, value)
    loose = functools.partial(_rdp, query, run, relation, value)
    if _only_pairs(run, relation):
        return loose()
    try:
        bound = _exact(query, run, relation, value, goal, loose)
    except Unresolved:
        return loose()
    return _tighter(bound, loose) if bound.upper - bound.lower > 3e-2 * bound.upper else bound


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


def _never(run: Run, relation: Relation) -> str:
    return ""


ACCOUNTANTS: dict[str, Accountant] = {
    "exact": Accountant(_exact, _only_pairs),
    "gdp": Accountant(_gdp, _only_full_batch),
    "clt": Accountant(_clt, _no_replace_one),
    "rdp": Accountant(_rdp, _never),
    "log_sobolev": Accountant(last_iterate.log_sobolev, last_iterate.refuses_log_sobolev),
}
_AUTO = Accountant(_auto, _never)


def ask(
    query: str,
    run: Run,
    relation: Relation,
    accountant: str,
    value: float,
    goal: float | None = None,
) -> Bound:
    """The bound of the accountant named, or for "auto" of the tightest that covers the run.

    The query is "epsilon" at a delta, or "delta" at an epsilon, which may be infinite. ``goal`` is
    the relative width of a certified epsilon that is aimed at.

    Raises:
        UnsupportedEventError: when the accountant refuses the run or cannot resolve it.
    """
    check(run, relation, accountant)
    if known := trivial(run):
        return known if query == "epsilon" else replace(known, upper=min(known.upper, 1.0))
    if query == "delta" and value == math.inf and not run.parts:
        # Gaussian noise on everything: no output is possible under one law alone.
        return Bound(0.0, 0.0, 0.0, "none", "no output of the run has an infinite loss")
    asked = _AUTO if accountant == "auto" else ACCOUNTANTS[accountant]
    try:
        finer = (goal,) if goal and asked.answer in (_auto, _exact) else ()
        bound = asked.answer(query, run, relation, value, *finer)
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
        averaged = last_iterate.averaged(query, run, relation, value)
        bound = min(bound, averaged, key=lambda b: b.upper)
    name = "log_sobolev" if accountant == "log_sobolev" else f"shifted, {bound.accountant}"
    words = "; ".join(part for part in (bound.note, last_iterate.note(run)) if part)
    return Bound(0.0, None, bound.upper, name, words)


def check(run: Run, relation: Relation, accountant: str) -> None:
    """Raises UnsupportedEventError if the accountant has no bound for this run."""
    if refusal := refuses(run, relation, accountant):
        raise UnsupportedEventError(refusal)


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


def trivial(run: Run) -> Bound | None:
    """The answer to runs that need no accountant: nothing released, or nothing guaranteed."""
    if run.infinite:
        return Bound(0.0, None, math.inf, "none", f"no guarantee: {run.infinite}")
    if run.empty:
        return Bound(0.0, 0.0, 0.0, "none", "nothing that depends on the data was released")
    return None
