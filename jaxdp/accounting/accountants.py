"""The accountants: each takes a flat ``Run`` and a relation, and returns a ``Bound``."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxdp.accounting import clt, exact, gaussian, last_iterate, pld, rare, rdp, single
from jaxdp.accounting.bounds import Bound, Relation, UnsupportedEventError
from jaxdp.accounting.canonical import Run, Step
from jaxdp.accounting.loss import separation
from jaxdp.accounting.saddle import Unresolved


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


def _only_poisson(run: Run, relation: Relation) -> str:
    del relation
    bad = [s for s, _ in run.steps if s.sampling != "poisson"]
    return f"{_names(bad)}: fixed-size sampling is not covered" if bad else ""


def _anything(run: Run, relation: Relation) -> str:
    del run, relation
    return ""


def _only_log_sobolev(run: Run, relation: Relation) -> str:
    del relation
    return last_iterate.refuses_log_sobolev(run)


def _no_replace_one(run: Run, relation: Relation) -> str:
    if relation is Relation.REPLACE_ONE:
        steps = _names([s for s, _ in run.steps])
        return f"{steps}: the central limit is stated for adding or removing a record"
    return _only_poisson(run, relation)


def _only_full_batch(run: Run, relation: Relation) -> str:
    del relation
    bad = [s for s, _ in run.steps if s.sampling_prob < 1 or s.sampling != "poisson"]
    return f"{_names(bad)}: with sampling there is no exact GDP curve" if bad else ""


def _names(steps: list[Step]) -> str:
    """The steps that a message is about; a long list is counted."""
    shown = [str(s) for s in steps[:8]]
    more = [f"and {len(steps) - 8} more"] if len(steps) > 8 else []
    return ", ".join(shown + more)


def _mu(run: Run, relation: Relation) -> float:
    return separation(relation) / run.steps[0][0].noise_multiplier


def _gdp_epsilon(run: Run, relation: Relation, delta: float) -> Bound:
    lower, upper = gaussian.gaussian_epsilon(_mu(run, relation), delta)
    note = "delta(0) is already below the target" if upper == 0 else ""
    return Bound(lower, 0.5 * (lower + upper), upper, "gdp", note)


def _gdp_delta(run: Run, relation: Relation, epsilon: float) -> Bound:
    value = gaussian.gaussian_delta(_mu(run, relation), epsilon)
    return Bound(value * (1 - 1e-10), value, min(1.0, value * (1 + 1e-10) + 1e-300), "gdp")


def _rdp_epsilon(run: Run, relation: Relation, delta: float) -> Bound:
    upper, _ = rdp.rdp_to_epsilon(rdp.run_rdp(run, relation), delta)
    return Bound(0.0, upper, upper, "rdp")


def _rdp_delta(run: Run, relation: Relation, epsilon: float) -> Bound:
    upper = rdp.rdp_to_delta(rdp.run_rdp(run, relation), epsilon)
    return Bound(0.0, upper, upper, "rdp")


def _is_single(run: Run) -> bool:
    return len(run.steps) == 1 and run.steps[0][1] == 1


def _exact_epsilon(run: Run, relation: Relation, delta: float) -> Bound:
    if not _is_single(run):
        return exact.exact_epsilon(run, relation, delta)
    lower, upper = single.single_epsilon(run.steps[0][0], relation, delta)
    note = "delta(0) is already below the target" if upper == 0 else ""
    return Bound(lower, 0.5 * (lower + upper), upper, "exact", note)


def _exact_delta(run: Run, relation: Relation, epsilon: float) -> Bound:
    if not _is_single(run):
        return exact.exact_delta(run, relation, epsilon)
    value = single.single_delta(run.steps[0][0], relation, epsilon)
    margin = 1e-9
    return Bound(value * (1 - margin), value, min(1.0, value * (1 + margin) + 1e-300), "exact")


def _auto(query: str, tolerance: float) -> Callable[[Run, Relation, float], Bound]:
    """The exact answer where its own error is small; else certified bounds; else RDP.

    Args:
        query: "epsilon" or "delta".
        tolerance: relative width at which the exact answer needs no support.
    """

    def answer(run: Run, relation: Relation, value: float) -> Bound:
        if run.parts:
            return getattr(ACCOUNTANTS["rdp"], query)(run, relation, value)
        if query == "epsilon" and single.total_variation(run, relation) <= value:
            return Bound(0.0, 0.0, 0.0, "exact", "delta(0) is already below the target")
        if not _only_full_batch(run, relation):
            return getattr(ACCOUNTANTS["gdp"], query)(run, relation, value)
        if _only_poisson(run, relation):
            return getattr(ACCOUNTANTS["rdp"], query)(run, relation, value)
        found: list[Bound] = []
        for name, enough in _order(run, tolerance):
            accountant = ONE_LINE if name == "one line" else ACCOUNTANTS[name]
            try:
                bound = getattr(accountant, query)(run, relation, value)
            except Unresolved:
                continue
            if bound.upper - bound.lower <= enough * bound.upper:
                found.append(bound)
                break
            # An integral that cannot vouch for three digits of its own is not used at all.
            if bound.accountant != "exact" or bound.upper - bound.lower <= 1e-3 * bound.upper:
                found.append(bound)
        if len(found) == 1 and found[0].upper - found[0].lower <= 1e-3 * found[0].upper:
            return found[0]
        found.append(getattr(ACCOUNTANTS["rdp"], query)(run, relation, value))
        return _intersect(found)

    return answer


def _order(run: Run, tolerance: float) -> tuple[tuple[str, float], ...]:
    """(accountant, relative width that ends the search), in the order they are asked.

    Where several kinds of steps are rarely sampled the bands of the contour integral take up to a
    minute, and counting the rare losses seconds.
    """
    sampled = [n * s.sampling_prob for s, n in run.steps if s.sampling_prob < 1]
    if len(sampled) > 1 and sum(sampled) < 1:
        return (("one line", tolerance), ("rare", 1e-2), ("exact", tolerance), ("pld", 1e-3))
    return (("exact", tolerance), ("rare", 1e-3), ("pld", 1e-3))


def _intersect(bounds: list[Bound]) -> Bound:
    """The tightest lower and upper ends of several valid bounds; named after the upper one."""
    best = min(bounds, key=lambda b: b.upper)
    lower = max(b.lower for b in bounds)
    if lower > best.upper:
        # One of them is wrong: neither is believed where it is the smaller.
        worst = max(bounds, key=lambda b: b.upper)
        note = "accountants disagree; the loosest is given"
        return Bound(
            min(b.lower for b in bounds), worst.estimate, worst.upper, worst.accountant, note
        )
    estimate = min(max(bounds[0].estimate, lower), best.upper)
    return Bound(lower, estimate, best.upper, best.accountant, best.note)


ACCOUNTANTS: dict[str, Accountant] = {
    "exact": Accountant(_exact_epsilon, _exact_delta, _only_poisson),
    "pld": Accountant(pld.pld_epsilon, pld.pld_delta, _only_poisson),
    "rare": Accountant(rare.rare_epsilon, rare.rare_delta, _only_poisson),
    "gdp": Accountant(_gdp_epsilon, _gdp_delta, _only_full_batch),
    "clt": Accountant(clt.clt_epsilon, clt.clt_delta, _no_replace_one),
    "rdp": Accountant(_rdp_epsilon, _rdp_delta, _anything),
    "log_sobolev": Accountant(
        last_iterate.log_sobolev_epsilon, last_iterate.log_sobolev_delta, _only_log_sobolev
    ),
}
ONE_LINE = Accountant(
    functools.partial(exact.exact_epsilon, bands=False),
    functools.partial(exact.exact_delta, bands=False),
    _only_poisson,
)
_AUTO = Accountant(_auto("epsilon", 1e-5), _auto("delta", 1e-5), _anything)


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
        most = math.inf if query == "epsilon" else 1.0
        value = min(trivial.upper, most)
        return Bound(0.0, value, value, trivial.accountant, trivial.note)
    if query == "delta" and value == math.inf:
        # Gaussian noise on everything: no output is possible under one law alone.
        return Bound(0.0, 0.0, 0.0, "none", "no output of the run has an infinite loss")
    asked = _AUTO if accountant == "auto" else ACCOUNTANTS[accountant]
    try:
        bound = getattr(asked, query)(run, relation, value)
        return _hidden(query, run, relation, accountant, value, bound) if run.hidden else bound
    except Unresolved as error:
        raise UnsupportedEventError(
            f"{_names([s for s, _ in run.steps])}: {accountant} under {relation.value} cannot "
            f"resolve the composition ({error}); use accountant 'auto'"
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
    return Bound(0.0, bound.upper, bound.upper, name, words)


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
        names = ", ".join(type(part).__name__ for part, _ in run.parts)
        return f"{names}: not covered by accountant {accountant} under {relation.value}"
    reason = (_AUTO if accountant == "auto" else ACCOUNTANTS[accountant]).refuses(run, relation)
    return f"{reason} by accountant {accountant} under {relation.value}" if reason else ""


def _trivial(run: Run) -> Bound | None:
    """The answer to runs that need no accountant: nothing released, or nothing guaranteed."""
    if run.infinite:
        return Bound(0.0, math.inf, math.inf, "none", f"no guarantee: {run.infinite}")
    if run.empty:
        return Bound(0.0, 0.0, 0.0, "none", "nothing that depends on the data was released")
    return None
