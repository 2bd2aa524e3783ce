"""Calibration: the noise, the number of steps or whatever else fits a privacy budget.

Every answer was checked: its proven (upper) epsilon never exceeds the target.
"""

import math
from collections.abc import Callable
from typing import Any

from jaxdp import arguments as check
from jaxdp.accounting import queries
from jaxdp.accounting.base import Event
from jaxdp.accounting.bounds import ADD, Relation
from jaxdp.accounting.events import Gaussian, PoissonSampled, Repeated
from jaxdp.accounting.roots import least

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
        found = queries.quick_epsilon(event, delta, relation)
        # A little inside, so that the first proof succeeds.
        return _log_ratio(found, epsilon * (1 - tolerance / 2))

    # One step more or less is less than the usual width.
    finer = (1e-5,) if whole else ()

    def proven(value: float) -> float:
        found = queries.epsilon(make_event(value), delta, relation, accountant, *finer)
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
    keywords: dict[str, Any] = {"between": (1, 10**12), "whole": True, "otherwise": 0}
    return int(calibrate(make_event, epsilon, delta, relation, accountant, most=True, **keywords))


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
    make = lambda z: _dp_sgd(z, q, steps)  # noqa: E731
    return calibrate(make, epsilon, delta, relation, accountant, tolerance=_FINE)


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
    keywords: dict[str, Any] = {"between": (1e-26, 1.0), "tolerance": _FINE, "otherwise": 0.0}
    make = lambda q: _dp_sgd(z, q, steps)  # noqa: E731
    return calibrate(make, epsilon, delta, relation, accountant, most=True, **keywords)


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
