"""Errors of a strategy: how far the noise moves the parameters, for a noise of 1 and no more.

The error of step i is the l2 norm of row i of B = A C^-1, the standard deviation of the noise in
each coordinate of the parameters after that step, per unit of Z. Times the sensitivity it compares
strategies of equal privacy; here it is not multiplied.
"""

import math

import numpy as np

from jaxdp.noise import _gramian
from jaxdp.noise.strategies import Buffered
from jaxdp.noise.strategy import Strategy, ToeplitzStrategy
from jaxdp.noise.workloads import PREFIX_SUMS, Workload

_BLOCK = 256


def step_errors(strategy: Strategy, workload: Workload = PREFIX_SUMS) -> np.ndarray:
    """float64 [n]: the l2 norm of every row of A C^-1.

    Of the cost of one recurrence where both are Toeplitz, otherwise of n^2 numbers or more.

    Args:
        strategy: C.
        workload: A.

    Raises:
        ValueError: when the workload has another number of steps, or the strategy is unstable.
    """
    if isinstance(strategy, ToeplitzStrategy) and workload.constant:
        response = workload.applied(strategy.first_inverse_column())
        return np.asarray(np.sqrt(np.cumsum(np.square(response))))
    total = np.zeros(strategy.steps)
    for start in range(0, strategy.steps, _BLOCK):
        stop = min(start + _BLOCK, strategy.steps)
        rows = workload.applied(strategy.inverse_columns(start, stop))
        total += np.square(rows).sum(axis=1)
    return np.asarray(np.sqrt(total))


def rms_error(strategy: Strategy, workload: Workload = PREFIX_SUMS) -> float:
    """The root mean square of the errors of all steps, not multiplied by the sensitivity.

    Args:
        strategy: C.
        workload: A.

    Raises:
        ValueError: when the workload has another number of steps, or the strategy is unstable.
    """
    if isinstance(strategy, Buffered) and workload.constant:
        return _buffered(strategy, workload)[1]
    return float(np.sqrt(np.mean(np.square(step_errors(strategy, workload)))))


def max_error(strategy: Strategy, workload: Workload = PREFIX_SUMS) -> float:
    """The largest of the errors of all steps, not multiplied by the sensitivity.

    Args:
        strategy: C.
        workload: A.

    Raises:
        ValueError: when the workload has another number of steps, or the strategy is unstable.
    """
    if isinstance(strategy, Buffered) and workload.constant:
        return _buffered(strategy, workload)[0]
    return float(step_errors(strategy, workload).max())


def _buffered(strategy: Buffered, workload: Workload) -> tuple[float, float]:
    """The max and the RMS error, in O(log n)."""
    workload.check(strategy.steps)
    scales, decays = np.asarray(strategy.scales), np.asarray(strategy.decays)
    last, total = _gramian.square_sums(scales, decays, workload.momentum, strategy.steps)
    if not (np.isfinite(last) and np.isfinite(total)):
        raise ValueError(f"{strategy!r} is unstable: its noise exceeds float64 within its steps")
    rate = workload.learning_rate
    return rate * math.sqrt(last), rate * math.sqrt(total / strategy.steps)
