"""Roots of monotone functions of one variable, as a bracket whose two ends were evaluated."""

import math
from collections.abc import Callable


def bracket_decreasing(
    f: Callable[[float], float], lo: float, hi: float, rtol: float = 1e-13, max_iter: int = 200
) -> tuple[float, float]:
    """The narrowed bracket [lo, hi] of the sign change of a decreasing ``f``.

    A secant step that falls back to bisection whenever three steps did not halve the bracket.

    Args:
        f: decreasing; f(lo) > 0 >= f(hi). Infinite values are allowed.
        lo: left end.
        hi: right end.
        rtol: stop when the bracket is this narrow, relative to its right end.
        max_iter: evaluations at most.

    Returns:
        (lo, hi) with f(lo) > 0 >= f(hi), both evaluated.

    Raises:
        ValueError: when the ends given have no sign change between them.
    """
    f_lo, f_hi = f(lo), f(hi)
    if not (f_lo > 0 >= f_hi):
        raise ValueError(f"[{lo}, {hi}]: expected a sign change, got {f_lo} and {f_hi}")
    reference, stale = hi - lo, 0
    for _ in range(max_iter):
        if hi - lo <= rtol * abs(hi) or f_hi == 0:
            break
        x = 0.5 * (lo + hi)
        if stale < 3 and math.isfinite(f_lo) and math.isfinite(f_hi):
            # A secant point, pushed past the root by a sliver, so that the farther end moves.
            x = lo + (hi - lo) * f_lo / (f_lo - f_hi)
            sliver = max(0.25 * rtol * abs(hi), 1e-3 * min(x - lo, hi - x))
            x -= sliver if f_lo > -f_hi else -sliver
        if not lo < x < hi:
            x = 0.5 * (lo + hi)
            if not lo < x < hi:
                break
        fx = f(x)
        if fx > 0:
            lo, f_lo = x, fx
        else:
            hi, f_hi = x, fx
        stale += 1
        if hi - lo <= 0.5 * reference:
            reference, stale = hi - lo, 0
        elif stale > 3:
            stale = 3
    return lo, hi


def expand_right(f: Callable[[float], float], start: float, factor: float = 2.0) -> float:
    """The first of start, start*factor, ... where the decreasing ``f`` is <= 0.

    Raises:
        OverflowError: when none exists below 1e300.
    """
    x = start
    while not f(x) <= 0:
        x *= factor
        if x > 1e300:
            raise OverflowError(f"no sign change between {start} and 1e300")
    return x


_JUMP = 100.0  # of a cost in the log of the value: so steep is no accountant's curve


def least(
    excess: Callable[[float], float],
    start: float,
    slope: float,
    ends: tuple[float, float],
    tolerance: float,
    whole: bool = False,
    reach: float = 2.0,
) -> tuple[float | None, float]:
    """The value nearest to ends[0] at which ``excess`` was evaluated and found <= 0.

    ``excess`` falls from ends[0] to ends[1], whichever is larger. Secant steps in the logs of the
    values aim a hair inside; a bracket of evaluated values keeps them honest.

    Args:
        excess: log of (what a value costs / target); infinities allowed.
        start: first value.
        slope: of ``excess`` in the log of the value towards ends[1], roughly.
        ends: values > 0, the second the safe one.
        tolerance: relative, of the value and of the cost, at which the search stops; at least 1e-4
            after ten evaluations where the costs are seen to jump.
        whole: values are whole numbers; then the bracket is closed up to 1, or to 1e-7 of it.
        reach: first step, in the log of the value, from an infinite cost.

    Returns:
        (value, last slope); None when even the safe end exceeds, or after 60 evaluations.
    """
    sign, aim = (1 if ends[1] > ends[0] else -1), (0.0 if whole else tolerance / 3)
    low, high = min(ends), max(ends)
    inside: float | None = None
    outside: float | None = None
    value, last, before = start, 0.0, math.nan
    gain, excess_cost = -math.inf, math.inf  # the costs inside and outside
    for turn in range(1, 61):
        cost, x = excess(value), sign * math.log(value)
        if cost <= 0:
            inside, gain = value, cost
            if value == ends[0] or (cost > -tolerance and not whole):
                break
        else:
            outside, excess_cost = value, cost
            if value == ends[1]:
                break
        if turn >= 10 and inside and outside:
            steep = (excess_cost - gain) / abs(math.log(inside / outside))
            tolerance = max(tolerance, 1e-4) if steep > _JUMP else tolerance
        if inside and outside and _closed(inside, outside, tolerance, whole):
            break
        fall = (cost - before) / (x - last) if turn > 1 and x != last else math.nan
        slope = fall if math.isfinite(fall) and fall < 0 else slope
        last, before = x, cost
        if math.isfinite(cost):
            step = -(cost + aim) / slope
        else:
            step, reach = math.copysign(reach, cost), 100 * reach
        value = math.exp(sign * (x + min(max(step, -2.0 - turn), 2.0 + turn)))
        if inside and outside:
            bracket = min(inside, outside), max(inside, outside)
            if not bracket[0] < value < bracket[1] or turn > 5 and turn % 3 == 0:
                value = math.sqrt(inside) * math.sqrt(outside)
            value = min(max(round(value), bracket[0] + 1), bracket[1] - 1) if whole else value
        elif whole and round(value) == round(math.exp(sign * x)):
            value = math.exp(sign * x) + (sign if cost > 0 else -sign)
        value = min(max(round(value) if whole else value, low), high)
    return inside, slope


def _closed(inside: float, outside: float, tolerance: float, whole: bool) -> bool:
    if whole:
        return abs(inside - outside) <= max(1, 1e-7 * inside)
    return abs(math.log(inside / outside)) < tolerance / 4
