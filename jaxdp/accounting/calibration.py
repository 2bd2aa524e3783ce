"""Calibration: the noise, the number of steps or the sampling probability that fits a budget.

Every answer was checked: its proven (upper) epsilon never exceeds the target.
"""

import math
from collections.abc import Callable

from jaxdp.accounting import _validate as check
from jaxdp.accounting.base import Event
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.events import Gaussian, PoissonSampled, Repeated
from jaxdp.accounting.proving import Prover
from jaxdp.accounting.search import largest, least

_RANGE = math.log(1e9)
_FINE = 1e-6  # relative, of what is found where a step is a sampled Gaussian
_COARSE = 1e-4  # relative, of the value that makes any other event
_MAX_STEPS = 10**12

MakeEvent = Callable[[float], Event]
MakeRun = Callable[[int], Event]


def calibrate(
    make_event: MakeEvent,
    epsilon: float,
    delta: float,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    accountant: str = "auto",
) -> float:
    r"""The smallest value whose event is proven to be within (epsilon, delta).

    The value is a noise multiplier, or whatever else makes an event more private as it grows: one
    multiplier of several releases, the factor of a noise schedule. Smallest means to a relative
    1e-4, between 1e-9 and 1e9.

    Formal guarantee: ``acc.epsilon(make_event(value), delta, relation, accountant).upper <=
    epsilon`` was proven for the value returned, whatever ``make_event`` does elsewhere.

    | case | answer |
    |---|---|
    | 1e-9 is within the target already | 1e-9 |
    | 1e9 is not | ValueError |
    | the event is refused by the accountant | UnsupportedEventError, with its name |
    | delta below 1e-15 or above 0.1, or losses that take the accountant seconds a value | \
      proven all the same, but by Rényi bounds where the exact integral fails: not always least |

    Args:
        make_event: from a value > 0 to everything that would be released.
        epsilon: target > 0.
        delta: in (0, 1).
        relation: which data sets are neighbours.
        accountant: as for ``jaxdp.accounting.epsilon``.

    Returns:
        The value.

    Raises:
        ValueError: for an argument out of its range, or a target that no value up to 1e9 meets.
    """
    return _least_value(make_event, epsilon, delta, relation, accountant, _COARSE)


def calibrate_count(
    make_event: MakeRun,
    epsilon: float,
    delta: float,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    accountant: str = "auto",
) -> int:
    """The largest number whose event is proven to be within (epsilon, delta); 0 if not even 1 is.

    It is a number of steps, or of anything else of which more is less private. Otherwise as
    ``calibrate``.

    Args:
        make_event: from a count >= 1 to everything that would be released.
        epsilon: target >= 0.
        delta: in (0, 1).
        relation: which data sets are neighbours.
        accountant: as for ``jaxdp.accounting.epsilon``.

    Raises:
        ValueError: for an argument out of its range, or when more than 1e12 would fit.
    """
    epsilon = check.non_negative("epsilon", epsilon)
    delta = check.open_probability("delta", delta)

    def most(by: str, guess: int = 1) -> int:
        prover = Prover(epsilon, delta, relation, by)
        return largest(lambda n: prover.bound(make_event(n)).upper <= epsilon, _MAX_STEPS, guess)

    # RDP is quick and its answer is near: the search with a slower accountant starts there.
    return most(accountant, max(1, most("rdp")) if accountant == "auto" else 1)


def calibrate_noise_multiplier(
    epsilon: float,
    delta: float,
    sampling_prob: float,
    steps: int,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    accountant: str = "auto",
) -> float:
    """The smallest noise multiplier (to a relative 1e-6) whose upper epsilon is within the target.

    Args:
        epsilon: target > 0.
        delta: in (0, 1).
        sampling_prob: Poisson sampling probability q in [0, 1]; 1 is the full batch.
        steps: number of steps >= 0.
        relation: which data sets are neighbours.
        accountant: as for ``jaxdp.accounting.epsilon``.

    Returns:
        The noise multiplier; 0 when nothing is released (q or steps is 0).

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> from jaxdp import accounting as acc
        >>> noise = acc.calibrate_noise_multiplier(3.0, 1e-5, sampling_prob=0.01, steps=1_000)
        >>> step = acc.PoissonSampled(acc.Gaussian(noise), sampling_prob=0.01)
        >>> acc.epsilon(acc.Repeated(step, 1_000), delta=1e-5).upper <= 3.0
        True
    """
    check.positive("epsilon", epsilon)
    check.open_probability("delta", delta)
    q = check.probability("sampling_prob", sampling_prob)
    steps = check.count("steps", steps)
    if q == 0 or steps == 0:
        return 0.0

    def run(noise_multiplier: float) -> Event:
        return _dp_sgd(noise_multiplier, q, steps)

    return _least_value(run, epsilon, delta, relation, accountant, _FINE)


def calibrate_steps(
    epsilon: float,
    delta: float,
    sampling_prob: float,
    noise_multiplier: float,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    accountant: str = "auto",
) -> int:
    """The largest number of steps whose upper epsilon is within the target; 0 if not even one is.

    Arguments as for ``calibrate_noise_multiplier``.

    Raises:
        ValueError: for an argument out of its range, or when more than 1e12 steps would fit.
    """
    q = check.probability("sampling_prob", sampling_prob)
    z = check.positive("noise_multiplier", noise_multiplier)
    if q == 0:
        raise ValueError(f"sampling_prob={sampling_prob!r}: expected above 0, or any steps fit")
    return calibrate_count(lambda n: _dp_sgd(z, q, n), epsilon, delta, relation, accountant)


def calibrate_sampling_prob(
    epsilon: float,
    delta: float,
    steps: int,
    noise_multiplier: float,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    accountant: str = "auto",
) -> float:
    """The largest Poisson sampling probability (to a relative 1e-6) within the target, at most 1.

    Arguments as for ``calibrate_noise_multiplier``.

    Raises:
        ValueError: for an argument out of its range.
    """
    epsilon = check.non_negative("epsilon", epsilon)
    delta = check.open_probability("delta", delta)
    steps = check.count("steps", steps)
    z = check.positive("noise_multiplier", noise_multiplier)

    prover = Prover(epsilon, delta, relation, accountant)

    def excess(minus_log_q: float) -> float:
        event = _dp_sgd(z, math.exp(-minus_log_q), steps)
        return _log_ratio(prover.bound(event).upper, epsilon)

    if excess(0.0) <= 0:
        return 1.0
    try:
        return math.exp(-least(excess, 3.0, -1.0, (0.0, 60.0), _tolerance(prover, _FINE)))
    except OverflowError:
        return 0.0


def _least_value(
    make_event: MakeEvent,
    epsilon: float,
    delta: float,
    relation: Relation,
    accountant: str,
    fine: float,
) -> float:
    epsilon = check.positive("epsilon", epsilon)
    delta = check.open_probability("delta", delta)

    prover = Prover(epsilon, delta, relation, accountant)

    def excess(log_value: float) -> float:
        return _log_ratio(prover.bound(make_event(math.exp(log_value))).upper, epsilon)

    try:
        log_value = least(excess, 0.0, -1.5, (-_RANGE, _RANGE), _tolerance(prover, fine))
    except OverflowError:
        raise ValueError(
            f"epsilon={epsilon!r}: expected a target that noise up to 1e9 can meet"
        ) from None
    return math.exp(log_value)


def _tolerance(prover: Prover, fine: float) -> Callable[[], float]:
    return lambda: fine if prover.patient else max(fine, _COARSE)


def _dp_sgd(noise_multiplier: float, sampling_prob: float, steps: int) -> Event:
    return Repeated(PoissonSampled(Gaussian(noise_multiplier), sampling_prob), steps)


def _log_ratio(value: float, target: float) -> float:
    """log(value/target), <= 0 exactly when value <= target; defined for 0 and infinity."""
    if value <= target:
        return -math.inf if value == 0 else min(0.0, math.log(value / target))
    return math.inf if target == 0 else max(5e-324, math.log(value / target))
