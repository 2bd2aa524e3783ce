"""Certified bounds for rarely sampled steps: large losses are counted, the rest convolved.

Where q is tiny and noise small, one step can lose far more than all others together, and a grid
that holds its tail is too coarse for the rest. So the outputs of every step are cut at a loss
``cap`` near epsilon, and delta is the sum over the number of steps with a larger loss of what that
adds:

* none: the grid of ``pld``, which now ends at the cap;
* one: the law of the others on that grid, against the large loss's privacy profile in closed form;
* more: at most (P - e^epsilon Q) of that event where the loss exceeds epsilon for certain; where it
  may not, the rest by Chernoff's bound.

Which steps had a large loss is part of the output, so the parts add up, and replacing the small
losses by dominating (or merged) ones bounds each.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from jaxdp.accounting.bounds import Bound, Relation
from jaxdp.accounting.canonical import Run
from jaxdp.accounting.exact import compositions
from jaxdp.accounting.rare_tables import large, tables
from jaxdp.accounting.roots import bracket_decreasing
from jaxdp.accounting.saddle import Composition, Unresolved

_SIZES = (1 << 14, 1 << 17, 1 << 18, 1 << 19)
# Of epsilon. Two losses above the cap exceed it nearly for certain, the surer the higher the cap;
# the grid is the coarser for it.
_CAPS = (1.5, 3.0, 6.0, 12.0, 24.0)


def rare_delta(run: Run, relation: Relation, epsilon: float, tolerance: float = 2e-3) -> Bound:
    """Certified (lower, upper) delta at epsilon; otherwise as ``rare_epsilon``."""
    known = {c: _Ends(0.0, math.inf) for c in compositions(run, relation, 1e-12)}
    for size in _SIZES:
        for composition, ends in known.items():
            known[composition] = _narrower(
                ends, functools.partial(_delta_end, composition, epsilon, size), tolerance
            )
        lower = max(e.lower for e in known.values())
        upper = min(1.0, max(e.upper for e in known.values()))
        if upper - lower <= tolerance * upper:
            break
    lower = min(lower, upper)
    return Bound(lower, 0.5 * (lower + upper), upper, "rare")


def _delta_end(
    composition: Composition, epsilon: float, size: int, high: bool, factor: float, _: float
) -> float:
    return tables(composition, epsilon, size, factor, high).bound(epsilon)


class _Ends(NamedTuple):
    """Certified ends of one direction so far, and the caps that may narrow them on a finer grid."""

    lower: float
    upper: float
    low_caps: tuple[float, ...] = _CAPS
    high_caps: tuple[float, ...] = _CAPS


def _narrower(ends: _Ends, ask: Callable[[bool, float, float], float], tolerance: float) -> _Ends:
    """The best of either end, all being certified, over the caps that may help.

    What more than one large loss adds shrinks with the cap and what the grid adds grows with it, so
    the two ends may want different caps.

    Args:
        ends: what is known.
        ask: (whether the upper end, cap, upper end so far) -> a certified end.
        tolerance: relative width that is enough.

    Raises:
        Unresolved: where no cap has an answer, or two contradict each other.
    """
    lower, upper, low_caps, high_caps = ends
    try:
        found, high_caps = _best(high_caps, lambda cap, best: ask(True, cap, min(upper, best)), -1)
    except Unresolved:
        if upper == math.inf:
            raise
        found = upper
    upper = min(upper, found)
    if upper - lower > tolerance * upper:
        found, low_caps = _best(low_caps, lambda cap, _: ask(False, cap, upper), 1)
        lower = max(lower, found)
    if lower > upper:
        raise Unresolved("bounds contradict each other")
    return _Ends(lower, upper, low_caps, high_caps)


def _best(
    caps: tuple[float, ...], ask: Callable[[float, float], float], sign: int
) -> tuple[float, tuple[float, ...]]:
    """(the smallest answer, or with sign 1 the largest; its cap and the next).

    Raises:
        Unresolved: where no cap has a smallest answer; the largest is 0 then.
    """
    best, chosen, refusal = -sign * math.inf, caps[0], Unresolved("no cap")
    for cap in caps:
        try:
            found = ask(cap, best)
        except Unresolved as error:
            refusal = error
            continue
        if found > 0 and sign * (found - best) <= 0:
            break
        if found > 0:
            best, chosen = found, cap
    if not math.isinf(best):
        return best, _CAPS[_CAPS.index(chosen) :][:2]
    if sign < 0:
        raise refusal
    return 0.0, caps


def _guess(composition: Composition, delta: float) -> float:
    """The epsilon at which the deltas of the single steps sum to delta: near the truth if rare."""

    def excess(log_epsilon: float) -> float:
        epsilon = math.exp(log_epsilon)
        profile = [n * float(large(p, epsilon, epsilon)[2]) for p, n in composition.pairs]
        return sum(profile) - delta

    if not excess(-40.0) > 0 >= excess(4.0):
        raise Unresolved("no single step loses that much")
    return math.exp(bracket_decreasing(excess, -40.0, 4.0, rtol=1e-4)[1])


def rare_epsilon(run: Run, relation: Relation, delta: float, tolerance: float = 9e-4) -> Bound:
    """Certified (lower, upper) epsilon at delta; the grid is refined to a relative ``tolerance``.

    Raises:
        Unresolved: where it does not apply, or gives no finite answer.
    """
    forward, *backward = compositions(run, relation, delta)
    guess, ends = _guess(forward, delta), _Ends(0.0, math.inf)
    for size in _SIZES:
        ask = functools.partial(_epsilon_end, forward, delta, guess, size)
        ends = _narrower(ends, ask, tolerance)
        if ends.upper - ends.lower <= tolerance * ends.upper:
            break
    if not all(_smaller(c, ends.upper, delta) for c in backward):
        raise Unresolved("the direction without large losses matters")
    return Bound(ends.lower, 0.5 * (ends.lower + ends.upper), ends.upper, "rare")


def _smaller(composition: Composition, epsilon: float, delta: float) -> bool:
    """True if the direction without large losses is certainly below delta at epsilon."""
    if composition.ceiling() <= epsilon:
        return True
    for size, factor in itertools.product(_SIZES, _CAPS):
        try:
            if tables(composition, epsilon, size, factor, True).bound(epsilon) <= delta:
                return True
        except Unresolved:
            continue
    return False


def _epsilon_end(
    composition: Composition,
    delta: float,
    guess: float,
    size: int,
    high: bool,
    factor: float,
    upper: float,
) -> float:
    """One end of epsilon; the tables of the upper one are moved until they are about it."""
    near = upper if upper < math.inf else guess
    for _ in range(14):
        bound = tables(composition, near, size, factor, high).bound
        if not high:
            return _root(bound, delta, near, inside=True)
        try:
            found = _root(bound, delta, near)
        except Unresolved:
            near *= 3
            continue
        if abs(found - near) <= 0.2 * near:
            return found
        near = found
    raise Unresolved("the cap did not settle")


def _root(
    bound: Callable[[float], float], delta: float, near: float, inside: bool = False
) -> float:
    """The point where a decreasing ``bound`` meets delta, from above, or if ``inside`` below."""

    @functools.cache
    def excess(log_epsilon: float) -> float:
        value = bound(math.exp(log_epsilon))
        if math.isnan(value):
            raise Unresolved("not a number")
        return math.log(value / delta) if value > 0 else -math.inf

    low = high = math.log(near)
    step = min(max(2 * abs(excess(low)), 1e-4), 0.5)
    while excess(low) <= 0:
        if step > 20:
            return 0.0 if inside else math.exp(low)
        low, step = low - step, 2 * step
    while excess(high) > 0:
        high, step = high + step, 2 * step
        if high > math.log(near) + 2:
            raise Unresolved("no upper end")
    ends = bracket_decreasing(excess, low, high, rtol=1e-5 / max(abs(low), 1.0))
    return math.exp(ends[0] if inside else ends[1])
