"""The inverse questions: how much noise, how many steps, or how large batches fit in a budget.

Every answer is checked by asking `epsilon` again: its upper value never exceeds the target.
"""

import math
from collections.abc import Callable

from jaxdp.accounting import _validate as check
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.events import Event, Gaussian, PoissonSampled, Repeated
from jaxdp.accounting.queries import epsilon as epsilon_of
from jaxdp.accounting.roots import bracket_decreasing

_MAX_NOISE = 1e9
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

    lo = hi = 0.0
    while excess(hi) > 0:
        lo, hi = hi, hi + 1.0
        if hi > math.log(_MAX_NOISE):
            raise ValueError(f"epsilon={epsilon!r}: expected a target noise up to 1e9 can meet")
    while lo >= hi or excess(lo) <= 0:
        hi, lo = min(hi, lo), lo - 1.0
        if lo < -math.log(_MAX_NOISE):
            return math.exp(hi)
    _, log_z = bracket_decreasing(excess, lo, hi, rtol=1e-6 / max(1.0, abs(hi)))
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

    def fits(steps: int) -> bool:
        return epsilon_of(_dp_sgd(z, q, steps), delta, relation, method).upper <= epsilon

    return _largest(fits, f"sampling_prob={sampling_prob!r}")


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
    lo = -1.0
    while excess(lo) > 0:
        lo -= 1.0
        if lo < -60:
            return 0.0
    _, minus_log_q = bracket_decreasing(lambda t: excess(-t), -lo - 1, -lo, rtol=1e-6)
    return math.exp(-minus_log_q)


def _log_ratio(value: float, target: float) -> float:
    """log(value/target), <= 0 exactly when value <= target; defined for 0 and infinity."""
    if value <= target:
        return -math.inf if value == 0 else min(0.0, math.log(value / target))
    return math.inf if target == 0 else max(5e-324, math.log(value / target))


def _largest(fits: Callable[[int], bool], what: str) -> int:
    """Largest n >= 0 with fits(n), for a predicate that turns false once."""
    if not fits(1):
        return 0
    lo, hi = 1, 2
    while fits(hi):
        lo, hi = hi, hi * 4
        if hi > _MAX_STEPS:
            raise ValueError(
                f"{what}: expected a value at which some number of steps up to 1e12 "
                "exceeds the target epsilon"
            )
    while hi - lo > 1:
        middle = (lo + hi) // 2
        lo, hi = (middle, hi) if fits(middle) else (lo, middle)
    return lo
