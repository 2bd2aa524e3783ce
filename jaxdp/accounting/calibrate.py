"""The inverse questions: how much noise, how many steps, or how large batches fit in a budget.

Every answer is checked by asking `epsilon` again: its upper value never exceeds the target.
"""

import math
from collections.abc import Callable

from jaxdp.accounting import _validate as check
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.events import Event, Gaussian, PoissonSampled, Repeated
from jaxdp.accounting.queries import epsilon as epsilon_of

_RANGE = math.log(1e9)
_TOLERANCE = 1e-6  # of epsilon, relative: how much of the budget may stay unused
_MAX_STEPS = 10**12


def _dp_sgd(noise_multiplier: float, sampling_prob: float, steps: int) -> Event:
    return Repeated(PoissonSampled(Gaussian(noise_multiplier), sampling_prob), steps)


def calibrate_noise_multiplier(
    epsilon: float,
    delta: float,
    sampling_prob: float,
    steps: int,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    method: str = "auto",
) -> float:
    """Smallest noise multiplier (to a relative 1e-6) whose upper epsilon is within the target.

    Args:
      epsilon: target > 0.
      delta: in (0, 1).
      sampling_prob: Poisson sampling probability q in [0, 1]; 1 is the full batch.
      steps: number of steps >= 0.
      relation: which data sets are neighbours.
      method: accountant, as for `jaxdp.accounting.epsilon`.

    Returns:
      The noise multiplier; 0 when nothing is released (q or steps is 0).

    Raises:
      ValueError: for an argument out of its range.
    """
    epsilon = check.positive("epsilon", epsilon)
    delta = check.open_probability("delta", delta)
    q = check.probability("sampling_prob", sampling_prob)
    steps = check.count("steps", steps)
    if q == 0 or steps == 0:
        return 0.0

    def excess(log_z: float) -> float:
        event = _dp_sgd(math.exp(log_z), q, steps)
        return _log_ratio(epsilon_of(event, delta, relation, method).upper, epsilon)

    try:
        log_z = _within(excess, 0.0, -1.5, -_RANGE, _RANGE)
    except OverflowError:
        raise ValueError(
            f"epsilon={epsilon!r}: expected a target that noise up to 1e9 can meet"
        ) from None
    return math.exp(log_z)


def calibrate_steps(
    epsilon: float,
    delta: float,
    sampling_prob: float,
    noise_multiplier: float,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    method: str = "auto",
) -> int:
    """Largest number of steps whose upper epsilon is within the target; 0 if not even one is.

    Arguments as for `calibrate_noise_multiplier`.

    Raises:
      ValueError: for an argument out of its range, or when more than 1e12 steps would fit.
    """
    epsilon = check.non_negative("epsilon", epsilon)
    delta = check.open_probability("delta", delta)
    q = check.probability("sampling_prob", sampling_prob)
    z = check.positive("noise_multiplier", noise_multiplier)

    def fits(steps: int, by: str = method) -> bool:
        return epsilon_of(_dp_sgd(z, q, steps), delta, relation, by).upper <= epsilon

    # RDP is quick and its answer is near: the search with a slower method starts there.
    name = f"sampling_prob={sampling_prob!r}"
    return _largest(fits, name, max(1, _largest(lambda n: fits(n, "rdp"), name)))


def calibrate_sampling_prob(
    epsilon: float,
    delta: float,
    steps: int,
    noise_multiplier: float,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    method: str = "auto",
) -> float:
    """Largest Poisson sampling probability (to a relative 1e-6) within the target; 1 if all fit.

    Arguments as for `calibrate_noise_multiplier`.

    Raises:
      ValueError: for an argument out of its range.
    """
    epsilon = check.non_negative("epsilon", epsilon)
    delta = check.open_probability("delta", delta)
    steps = check.count("steps", steps)
    z = check.positive("noise_multiplier", noise_multiplier)

    def excess(log_q: float) -> float:
        event = _dp_sgd(z, math.exp(log_q), steps)
        return _log_ratio(epsilon_of(event, delta, relation, method).upper, epsilon)

    if excess(0.0) <= 0:
        return 1.0
    try:
        # In -log q, so that the excess decreases.
        minus_log_q = _within(lambda t: excess(-t), 3.0, -1.0, 0.0, 60.0)
    except OverflowError:
        return 0.0
    return math.exp(-minus_log_q)


def _within(
    excess: Callable[[float], float], start: float, slope: float, low: float, high: float
) -> float:
    """Nearly the smallest x in [low, high] with excess(x) <= 0, for a decreasing `excess`.

    Secant steps that aim a hair inside; a bracket of evaluated points keeps them honest, so that
    what is returned was asked and found within.

    Raises:
      OverflowError: when even excess(high) > 0.
    """
    inside = outside = None
    x, tried = start, [(start, excess(start))]
    for _ in range(80):
        value = tried[-1][1]
        if value <= 0:
            inside = x
            if value > -_TOLERANCE or x <= low:
                return x
        else:
            outside = x
            if x >= high:
                raise OverflowError("nothing within")
        if inside is not None and outside is not None and inside - outside < _TOLERANCE / 4:
            return inside
        if len(tried) > 1 and all(math.isfinite(v) for _, v in tried[-2:]):
            (x0, f0), (x1, f1) = tried[-2:]
            if x1 != x0 and (f1 - f0) / (x1 - x0) < 0:
                slope = (f1 - f0) / (x1 - x0)
        step = (
            -(value + _TOLERANCE / 3) / slope if math.isfinite(value) else math.copysign(2.0, value)
        )
        x = min(max(x + min(max(step, -2.0), 2.0), low), high)
        if inside is not None and x >= inside or outside is not None and x <= outside:
            ends = [e for e in (inside, outside) if e is not None]
            x = sum(ends) / 2 if len(ends) == 2 else (ends[0] - 1 if inside else ends[0] + 1)
            x = min(max(x, low), high)
        tried.append((x, excess(x)))
    if inside is None:
        raise OverflowError("nothing within")
    return inside


def _log_ratio(value: float, target: float) -> float:
    """log(value/target), <= 0 exactly when value <= target; defined for 0 and infinity."""
    if value <= target:
        return -math.inf if value == 0 else min(0.0, math.log(value / target))
    return math.inf if target == 0 else max(5e-324, math.log(value / target))


def _largest(fits: Callable[[int], bool], what: str, guess: int = 1) -> int:
    """Largest n >= 0 with fits(n), for a predicate that turns false once."""
    lo, hi, factor = 0, guess, 1.3 if guess > 1 else 4.0
    while fits(hi):
        lo, hi = hi, int(hi * factor) + 1
        if hi > _MAX_STEPS:
            raise ValueError(
                f"{what}: expected a value at which some number of steps up to 1e12 "
                "exceeds the target epsilon"
            )
    while hi - lo > 1:
        middle = (lo + hi) // 2
        lo, hi = (middle, hi) if fits(middle) else (lo, middle)
    return lo
