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
