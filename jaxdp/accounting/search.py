"""One-dimensional searches whose result was itself evaluated and found within the target."""

import math
from collections.abc import Callable


def least(
    excess: Callable[[float], float],
    start: float,
    slope: float,
    ends: tuple[float, float],
    tolerance: Callable[[], float],
) -> float:
    """Nearly the smallest x between ``ends`` with excess(x) <= 0, for a decreasing ``excess``.

    Secant steps that aim a hair inside; a bracket of evaluated points keeps them honest, so that
    what is returned was asked and found within. Every third step halves the bracket, for where
    ``excess`` jumps a secant creeps.

    Args:
        excess: log of (what x costs / target); infinities allowed.
        start: first x.
        slope: of ``excess``, roughly.
        ends: least and greatest x.
        tolerance: of x and of ``excess``, at which the search stops; asked after every ``excess``.

    Raises:
        OverflowError: when even the greatest x exceeds.
    """
    low, high = ends
    inside: float | None = None
    outside: float | None = None
    x, before = start, (math.nan, math.nan)
    for turn in range(1, 120):
        value = excess(x)
        if value <= 0:
            inside = x
            if value > -tolerance() or x <= low:
                return x
        else:
            outside = x
            if x >= high:
                raise OverflowError("nothing within")
        if inside is not None and outside is not None and inside - outside < tolerance() / 4:
            return inside
        fall = (value - before[1]) / (x - before[0]) if x != before[0] else 0.0
        slope = fall if math.isfinite(fall) and fall < 0 else slope
        before = x, value
        x = _next(x, value, slope, tolerance(), (inside, outside), turn % 3 == 0)
        x = min(max(x, low), high)
    if inside is None:
        raise OverflowError("nothing within")
    return inside


def _next(
    x: float,
    value: float,
    slope: float,
    tolerance: float,
    bracket: tuple[float | None, float | None],
    halve: bool,
) -> float:
    """A secant step from x, of at most 2; inside the bracket, or its middle."""
    inside, outside = bracket
    finite = math.isfinite(value)
    step = -(value + tolerance / 3) / slope if finite else math.copysign(2.0, value)
    new = x + min(max(step, -2.0), 2.0)
    if inside is None or outside is None:
        beyond = inside is not None and new >= inside or outside is not None and new <= outside
        return x - math.copysign(1.0, -value) if beyond else new
    return new if outside < new < inside and not halve else (inside + outside) / 2


def largest(fits: Callable[[int], bool], most: int, guess: int = 1) -> int:
    """The largest n >= 0 with fits(n), for a predicate that turns false once.

    Raises:
        ValueError: when more than ``most`` fit.
    """
    low, high, factor = 0, guess, 1.3 if guess > 1 else 4.0
    while fits(high):
        low, high = high, int(high * factor) + 1
        if high > most:
            raise ValueError(
                f"make_event: expected events of which some number up to {most:.0e} exceeds the "
                "target epsilon"
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
