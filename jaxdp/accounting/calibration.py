"""Calibration: the noise, the number of steps or whatever else fits a privacy budget.

Every answer was checked: its proven (upper) epsilon never exceeds the target.
"""

import math
from collections.abc import Callable
from typing import Any

from jaxdp import arguments as check
from jaxdp.accounting import queries
from jaxdp.accounting.base import ADD, Event, Relation
from jaxdp.accounting.events import Gaussian, PoissonSampled, Repeated

_JUMP = 100.0  # of a cost in the log of the value: so steep is no accountant's curve
_FINE = 1e-6  # relative, of what is found where a step is a sampled Gaussian
_NEAR_ESTIMATE = ("auto", "exact", "gdp")  # accountants whose upper end is hardly above it


def calibrate(
    make_event: Callable[[Any], Event],
    epsilon: float,
    delta: float,
    relation: Relation = ADD,
    accountant: str = "auto",
    *,
    between: tuple[float, float] = (1e-9, 1e9),
    most: bool = False,
    whole: bool = False,
    tolerance: float = 1e-4,
    otherwise: float | None = None,
) -> float:
    """The smallest (or largest) value whose event is proven to be within (epsilon, delta).

    The value is whatever makes an event more private as it grows (a noise multiplier, the factor of
    a schedule) or, with ``most``, less private (steps, epochs, a sampling probability).

    Formal guarantee: ``acc.epsilon(make_event(value), delta, relation, accountant).upper <=
    epsilon`` was evaluated for the value returned, whatever ``make_event`` does elsewhere. Quick
    estimates lead the search, or the accountant's own answers where they are no tighter than it, 60
    at most; as many proofs at most, mostly one.

    Args:
        make_event: from a value to everything that would be released.
        epsilon: target > 0.
        delta: in (0, 1).
        relation: which data sets are neighbours.
        accountant: as for ``epsilon``.
        between: the least and the greatest value that are tried, both > 0.
        most: find the largest value instead of the smallest.
        whole: try whole numbers only, as int. The answer is then the last that is within, or
            within a relative 1e-7 of it.
        tolerance: how close, relative, the answer is to the best one, or its epsilon to the target.
        otherwise: is returned when no value is within; None raises.

    Returns:
        The value: a float, or an int. An end of ``between`` when all values are within.

    Raises:
        ValueError: for an argument out of its range, or a target that no value meets.
        UnsupportedEventError: the accountant refuses an event.

    Example:
        >>> from jaxdp import accounting as acc
        >>> def training(epochs):
        ...     return acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.0), 0.01), 100 * epochs)
        >>> acc.calibrate(training, 3.0, 1e-5, between=(1, 10**6), most=True, whole=True)
        26
    """
    epsilon = check.positive("epsilon", epsilon)
    delta = check.error_probability("delta", delta)
    tolerance = check.positive("tolerance", tolerance)
    low, high = _ends(between, whole)
    wide, safe = (high, low) if most else (low, high)

    def quick(value: float) -> float:
        event = make_event(value)
        if accountant not in _NEAR_ESTIMATE:
            return _log_ratio(queries.epsilon(event, delta, relation, accountant).upper, epsilon)
        found = queries.epsilon(event, delta, relation, tolerance=math.inf)
        about = found.upper if found.estimate is None else found.estimate
        # A little inside, so that the first proof succeeds.
        return _log_ratio(about, epsilon * (1 - tolerance / 2))

    # One step more or less is less than the usual width.
    finer = 1e-5 if whole else None

    def proven(value: float) -> float:
        found = queries.epsilon(make_event(value), delta, relation, accountant, tolerance=finer)
        return _log_ratio(found.upper, epsilon)

    start, slope = least(quick, min(max(1, low), high), -1.5, (wide, safe), tolerance / 4, whole)
    start = safe if start is None else start
    # Where epsilon jumps, the next value tried is the neighbour that shows it.
    value, _ = least(proven, start, slope, (wide, safe), tolerance, whole, tolerance / 5)
    if value is None and otherwise is None:
        reached = epsilon * math.exp(proven(safe))
        raise ValueError(
            f"epsilon={epsilon!r}: expected a target that can be met; at {safe:g}, the most "
            f"private value tried, {reached:.6g} is proven"
        )
    return otherwise if value is None else value  # type: ignore[return-value]


def calibrate_count(
    make_event: Callable[[int], Event],
    epsilon: float,
    delta: float,
    relation: Relation = ADD,
    accountant: str = "auto",
) -> int:
    """The largest number whose event is proven to be within (epsilon, delta); 0 if not even 1 is.

    It is a number of steps, or of anything else of which more is less private; 1e12 at most.
    Arguments and errors as for ``calibrate``.
    """
    found = calibrate(
        make_event, epsilon, delta, relation, accountant,
        between=(1, 10**12), most=True, whole=True, otherwise=0,
    )  # fmt: skip
    return int(found)


def calibrate_noise_multiplier(
    epsilon: float,
    delta: float,
    sampling_prob: float,
    steps: int,
    relation: Relation = ADD,
    accountant: str = "auto",
) -> float:
    """The smallest noise multiplier (to a relative 1e-6) whose upper epsilon is within the target.

    0 when nothing is released. ``sampling_prob`` in [0, 1] is that of Poisson samples (1 is the
    full batch), ``steps`` >= 0. Other arguments and errors as for ``calibrate``.

    Example:
        >>> from jaxdp import accounting as acc
        >>> noise = acc.calibrate_noise_multiplier(3.0, 1e-5, sampling_prob=0.01, steps=1_000)
        >>> step = acc.PoissonSampled(acc.Gaussian(noise), sampling_prob=0.01)
        >>> acc.epsilon(acc.Repeated(step, 1_000), delta=1e-5).upper <= 3.0
        True
    """
    check.positive("epsilon", epsilon)
    check.error_probability("delta", delta)
    q = check.share("sampling_prob", sampling_prob)
    if q == 0 or check.count("steps", steps) == 0:
        return 0.0
    return calibrate(
        lambda z: _dp_sgd(z, q, steps), epsilon, delta, relation, accountant, tolerance=_FINE
    )


def calibrate_steps(
    epsilon: float,
    delta: float,
    sampling_prob: float,
    noise_multiplier: float,
    relation: Relation = ADD,
    accountant: str = "auto",
) -> int:
    """The largest number of steps whose upper epsilon is within the target; 0 if not even one is.

    Arguments and errors as for ``calibrate_noise_multiplier``; 1e12 at most.

    Raises:
        ValueError: also for a ``sampling_prob`` of 0, with which any number fits.
    """
    q = check.share("sampling_prob", sampling_prob)
    z = check.positive("noise_multiplier", noise_multiplier)
    if q == 0:
        raise ValueError(f"sampling_prob={sampling_prob!r}: expected above 0, or any steps fit")
    return calibrate_count(lambda n: _dp_sgd(z, q, n), epsilon, delta, relation, accountant)


def calibrate_sampling_prob(
    epsilon: float,
    delta: float,
    steps: int,
    noise_multiplier: float,
    relation: Relation = ADD,
    accountant: str = "auto",
) -> float:
    """The largest Poisson sampling probability (to a relative 1e-6) within the target, at most 1.

    Arguments and errors as for ``calibrate_noise_multiplier``; 0 if not even 1e-26 is within.
    """
    steps = check.count("steps", steps)
    z = check.positive("noise_multiplier", noise_multiplier)
    return calibrate(
        lambda q: _dp_sgd(z, q, steps), epsilon, delta, relation, accountant,
        between=(1e-26, 1.0), most=True, tolerance=_FINE, otherwise=0.0,
    )  # fmt: skip


def _dp_sgd(noise_multiplier: float, sampling_prob: float, steps: int) -> Event:
    return Repeated(PoissonSampled(Gaussian(noise_multiplier), sampling_prob), steps)


def _ends(between: tuple[float, float], whole: bool) -> tuple[float, float]:
    try:
        low, high = between
    except (TypeError, ValueError):
        raise ValueError(f"between={between!r}: expected two numbers") from None
    for end in (low, high):
        check.count("between", end, 1) if whole else check.positive("between", end)
    if not low < high:
        raise ValueError(f"between={between!r}: expected the smaller number first")
    return low, high


def _log_ratio(value: float, target: float) -> float:
    """log(value/target), <= 0 exactly when value <= target; defined for 0 and infinity."""
    if value <= target:
        return -math.inf if value == 0 else min(0.0, math.log(value / target))
    return max(5e-324, math.log(value / target))


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
