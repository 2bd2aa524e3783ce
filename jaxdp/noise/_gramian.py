"""Sums of squares of a linear recurrence's response, in O(log n) products of small matrices."""

import numpy as np


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
    once, one = _step(scales, decays, momentum), np.ones((1, 1), scales.dtype)
    moved, square = once, np.broadcast_to(one, once.shape)
    total, length = square, 1
    with np.errstate(over="ignore", invalid="ignore"):
        for bit in bin(steps)[3:]:
            total = total + length * square + _around(moved, total)
            square = square + _around(moved, square)
            moved, length = moved @ moved, 2 * length
            if bit == "1":
                total = (1 + length) * one + _around(once, total)
                square = one + _around(once, square)
                moved, length = moved @ once, length + 1
    return square[..., -1, -1], total[..., -1, -1]


def _around(moved: np.ndarray, square: np.ndarray) -> np.ndarray:
    return moved @ square @ np.swapaxes(moved, -1, -2)


def _step(scales: np.ndarray, decays: np.ndarray, momentum: float) -> np.ndarray:
    """[..., m + 2, m + 2]: the buffers, the momentum and the parameter one step on, without noise.

    The noise of the step is y = -sum_k scales_k s_k; every state but the parameter decays, and all
    of them take up y, the parameter by way of the momentum.
    """
    buffers = scales.shape[-1]
    matrix = np.zeros((*scales.shape[:-1], buffers + 2, buffers + 2), scales.dtype)
    matrix[..., :, :buffers] = -scales[..., None, :]
    index = np.arange(buffers)
    matrix[..., index, index] += decays
    matrix[..., buffers:, buffers] = momentum
    matrix[..., -1, -1] = 1
    return matrix
