"""The strategy of the least error times sensitivity among all matrices, or all of some bands."""

import numpy as np

from jaxdp import _validate
from jaxdp.noise._minimise import INFEASIBLE, Loss, lowest
from jaxdp.noise.dense import Dense
from jaxdp.noise.participation import Cyclic, FixedOrder, Participation, Single, repeats
from jaxdp.noise.strategies import square_root
from jaxdp.noise.workloads import PREFIX_SUMS, Workload


def optimal_dense(
    steps: int,
    participation: Participation | None = None,
    workload: Workload = PREFIX_SUMS,
    bands: int | None = None,
) -> Dense:
    """The strategy with the least RMS error times sensitivity.

    X = C^T C minimises trace(A^T A X^-1), a convex function, subject to columns of norm 1 and to
    products of 0 of any two columns that one record could move (Choquette-Choo et al. 2022,
    arXiv:2211.06530): those of a fixed order's epochs; under a minimum separation b, and for cyclic
    participation, those b or more apart, which leaves b bands (arXiv:2306.08153). The optimum
    among such X; without repeated participation, among all. An iteration takes n^3 operations:
    seconds for 512 steps.

    Args:
        steps: n.
        participation: None or ``Single()``, or any other.
        workload: A.
        bands: the largest number of bands, 1..n; None for no limit but the participation's.

    Raises:
        ValueError: when an argument is out of its range.

    Warns:
        RuntimeWarning: when the optimum was not reached.
    """
    steps = _validate.integer("steps", steps, least=1)
    workload.check(steps)
    width = steps if bands is None else _validate.integer("bands", bands, least=1)
    if width > steps:
        raise ValueError(f"bands must be at most steps ({steps}), got {bands!r}")
    free, width = _free(steps, participation or Single(), width)
    start = square_root(steps, width).matrix()
    start /= np.sqrt(np.square(start).sum(axis=0))
    found = (start.T @ start)[free]
    if len(found):
        loss = _loss(workload, free, steps)
        found = lowest(loss, [found], f"dense, {steps} steps", ftol=1e-10, maxcor=10)
    return Dense.of(_factor(_square(found, free, steps)))


def _free(
    steps: int, participation: Participation, width: int
) -> tuple[tuple[np.ndarray, np.ndarray], int]:
    """The entries of X below the diagonal that are free, and bands that leave the others 0."""
    count, separation = repeats(participation, steps)
    apart = np.subtract.outer(np.arange(steps), np.arange(steps))
    met = np.zeros_like(apart, bool)
    if isinstance(participation, Cyclic):
        width = min(width, participation.bands)
    elif isinstance(participation, FixedOrder):
        met = (apart % separation == 0) & (apart < count * separation)
    elif count > 1:
        width = min(width, separation)
    rows, columns = np.nonzero((apart > 0) & (apart < width) & ~met)
    return (rows, columns), min(width, separation)


def _square(found: np.ndarray, free: tuple[np.ndarray, np.ndarray], steps: int) -> np.ndarray:
    square = np.eye(steps)
    square[free] = found
    square[free[::-1]] = found
    return square


def _loss(workload: Workload, free: tuple[np.ndarray, np.ndarray], steps: int) -> Loss:
    """log trace(A X^-1 A^T) and its gradient -2 (A X^-1)^T (A X^-1) / trace, off the diagonal.

    The trace grows beyond all bounds where X ceases to be positive definite, so nothing else has to
    keep it so but steps that are short enough.
    """
    from scipy.linalg import lapack  # slow to import

    matrix = workload.matrix(steps)

    def loss(found: np.ndarray) -> tuple[float, np.ndarray]:
        factor, wrong = lapack.dpotrf(_square(found, free, steps), lower=1)
        if wrong:
            return INFEASIBLE, np.zeros_like(found)
        inverse = np.tril(lapack.dpotri(factor, lower=1)[0])
        moved = workload.applied(inverse + np.tril(inverse, -1).T)
        total = float(np.vdot(matrix, moved))
        return float(np.log(total)), -2 * (moved.T @ moved)[free] / total

    return loss


def _factor(square: np.ndarray) -> np.ndarray:
    """The lower-triangular C with C^T C = X: a Cholesky factor from the last row backwards."""
    return np.ascontiguousarray(np.linalg.cholesky(square[::-1, ::-1])[::-1, ::-1].T)
