"""Errors of a strategy: how far the noise moves the parameters, for a noise of 1 and no more.

The error of step i is the l2 norm of row i of B = A C^-1, the standard deviation of the noise in
each coordinate of the parameters after that step, per unit of Z. Times the sensitivity it compares
strategies of equal privacy; here it is not multiplied.
"""

import dataclasses
import math

import numpy as np

from jaxdp import arguments
from jaxdp.noise.strategies import Buffered, Strategy, ToeplitzStrategy, impulse, times_series


@dataclasses.dataclass(frozen=True)
class Workload:
    """The matrix A [n, n] whose row i says how the parameters after step i depend on the gradients.

    m_i = momentum m_(i-1) + g_i, and the parameters move by the sum over t <= i of m_t: heavy-ball
    momentum at a learning rate of 1, for a common factor changes nothing when strategies are
    compared. As it is, A is the matrix of prefix sums: plain SGD.

    Attributes:
        momentum: beta in [0, 1).
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        arguments.fields(self, momentum=arguments.decay)

    def apply(self, series: np.ndarray) -> np.ndarray:
        """float64 [n, ...]: A times ``series`` [n, ...], along the first axis."""
        if self.momentum:
            series = times_series([1.0], [1.0, -self.momentum], series)
        return np.asarray(np.cumsum(series, axis=0))

    def toeplitz(self, steps: int) -> np.ndarray:
        """float64 [n]: the coefficients of A, which is Toeplitz."""
        return self.apply(impulse(arguments.integer("steps", steps, least=1)))

    def matrix(self, steps: int) -> np.ndarray:
        """float64 [n, n]: A."""
        return self.apply(np.eye(arguments.integer("steps", steps, least=1)))


PREFIX_SUMS = Workload()


def step_errors(strategy: Strategy, workload: Workload = PREFIX_SUMS) -> np.ndarray:
    """float64 [n]: the l2 norm of every row of A C^-1.

    Of the cost of one recurrence where C is Toeplitz, otherwise of n^2 numbers or more.

    Raises:
        ValueError: when the strategy is unstable.
    """
    if isinstance(strategy, ToeplitzStrategy):
        response = workload.apply(strategy.first_inverse_column())
        return np.asarray(np.sqrt(np.cumsum(np.square(response))))
    return np.asarray(np.sqrt(np.square(workload.apply(strategy.inverse())).sum(axis=1)))


def rms_error(strategy: Strategy, workload: Workload = PREFIX_SUMS) -> float:
    """The root mean square of ``step_errors``; of a buffered strategy in O(log n)."""
    if isinstance(strategy, Buffered):
        return math.sqrt(_buffered_squares(strategy, workload)[1] / strategy.steps)
    return float(np.sqrt(np.mean(np.square(step_errors(strategy, workload)))))


def max_error(strategy: Strategy, workload: Workload = PREFIX_SUMS) -> float:
    """The largest of ``step_errors``; of a buffered strategy in O(log n)."""
    if isinstance(strategy, Buffered):
        return math.sqrt(_buffered_squares(strategy, workload)[0])
    return float(step_errors(strategy, workload).max())


ERRORS = {"rms": rms_error, "max": max_error}


def _buffered_squares(strategy: Buffered, workload: Workload) -> tuple[float, float]:
    """The squares of the last step's error, which is the largest, and of all steps' together."""
    scales, decays = np.asarray(strategy.scales), np.asarray(strategy.decays)
    last, total = square_sums(scales, decays, workload.momentum, strategy.steps)
    if not (np.isfinite(last) and np.isfinite(total)):
        raise ValueError(f"{strategy!r} is unstable: its noise exceeds float64 within its steps")
    return float(last), float(total)


def square_sums(
    scales: np.ndarray, decays: np.ndarray, momentum: float, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """The sums of b_t^2 and of (n - t) b_t^2 over t < n, for the response b of a buffered strategy.

    b is the first column of A C^-1, A of learning rate 1. The state after an impulse of noise is
    the buffers, the momentum and the parameter; all are 1 at t = 0, and F moves them one step on.
    P_n is the sum over t < n of the outer squares of the states and H_n that of P_1, ..., P_n:

        P_(r+m) = P_r + F^r P_m (F^r)^T,    H_(r+m) = H_r + m P_r + F^r H_m (F^r)^T.

    Transposed, never conjugated: it is analytic, and complex parameters give derivatives.

    Args:
        scales: [..., m], real or complex.
        decays: [..., m].
        momentum: beta.
        steps: n.

    Returns:
        two arrays [...].
    """

    def conjugated(moved: np.ndarray, square: np.ndarray) -> np.ndarray:
        """F^r P (F^r)^T."""
        return moved @ square @ np.swapaxes(moved, -1, -2)

    # F: the noise of a step is y = -sum_k scales_k s_k; every state but the parameter decays, and
    # all of them take up y, the parameter by way of the momentum.
    buffers = scales.shape[-1]
    once = np.zeros((*scales.shape[:-1], buffers + 2, buffers + 2), scales.dtype)
    once[..., :, :buffers] = -scales[..., None, :]
    index = np.arange(buffers)
    once[..., index, index] += decays
    once[..., buffers:, buffers] = momentum
    once[..., -1, -1] = 1

    # Doubling, and one more step where a binary digit of n is 1; it starts at n = 1, where the
    # states are all 1.
    one = np.ones((1, 1), scales.dtype)
    moved, square = once, np.broadcast_to(one, once.shape)
    total, length = square, 1
    with np.errstate(over="ignore", invalid="ignore"):
        for bit in bin(steps)[3:]:
            total = total + length * square + conjugated(moved, total)
            square = square + conjugated(moved, square)
            moved, length = moved @ moved, 2 * length
            if bit == "1":
                total = (1 + length) * one + conjugated(once, total)
                square = one + conjugated(once, square)
                moved, length = moved @ once, length + 1
    return square[..., -1, -1], total[..., -1, -1]
