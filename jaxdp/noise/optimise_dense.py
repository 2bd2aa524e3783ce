"""The strategy of the least error times sensitivity among all matrices, or all of some bands."""

import numpy as np

from jaxdp import arguments
from jaxdp.noise._minimise import INFEASIBLE, Loss, lowest, warn
from jaxdp.noise.dense import Dense
from jaxdp.noise.participation import SINGLE, Cyclic, FixedOrder, Participation, repeats
from jaxdp.noise.strategies import Toeplitz, square_root
from jaxdp.noise.workloads import PREFIX_SUMS, Workload

_LARGEST_GAP = 1e-4


def optimal_dense(
    steps: int,
    participation: Participation = SINGLE,
    workload: Workload = PREFIX_SUMS,
    bands: int | None = None,
) -> Dense:
    """The strategy with the least RMS error times sensitivity.

    X = C^T C minimises trace(A^T A X^-1), a convex function, subject to columns of norm 1 and to
    products of 0 of any two columns that one record could move (Choquette-Choo et al. 2022,
    arXiv:2211.06530): those of a fixed order's epochs; under a minimum separation b, and for cyclic
    participation, those b or more apart, which leaves b bands (arXiv:2306.08153). The optimum
    among such X; without repeated participation, among all. An iteration takes n^3 operations:
    seconds for 512 steps. A RuntimeWarning says when, by duality, the square of the error
    is not proven to be within 1e-4 of the least.

    Args:
        steps: n.
        participation: in which steps one record may take part.
        workload: A.
        bands: the largest number of bands, 1..n; None for no limit but the participation's.

    Raises:
        ValueError: when an argument is out of its range.
    """
    steps = arguments.integer("steps", steps, least=1)
    workload.check(steps)
    width = steps if bands is None else arguments.integer("bands", bands, least=1)
    if width > steps:
        raise ValueError(f"bands must be at most steps ({steps}), got {bands!r}")
    free, width = _free(steps, participation, width)
    found = _start(steps, workload.momentum, width)[free]
    if len(found):
        loss, name = _loss(workload, free, steps), f"dense, {steps} steps"
        # The gap is what tells that it is the optimum.
        found = lowest(loss, [found], name, steepest=np.inf, ftol=1e-10, maxcor=10)
        gap = _gap(workload.matrix(steps), _square(found, free, steps), free)
        if gap > _LARGEST_GAP:
            warn(f"{name}: the squared error is up to a factor of {1 + gap:.6g} above the least", 2)
    return Dense.of(_factor(_square(found, free, steps)))


def _start(steps: int, momentum: float, width: int) -> np.ndarray:
    """X of the banded square root of the workload without its schedule, with columns of norm 1."""
    root, decay = square_root(steps).first_column(), momentum ** np.arange(float(steps))
    series = np.convolve(root, root * decay)[:width]
    columns = Toeplitz(tuple((series / series[0]).tolist()), steps).matrix()
    columns /= np.sqrt(np.square(columns).sum(axis=0))
    return np.asarray(columns.T @ columns)


def _gap(matrix: np.ndarray, square: np.ndarray, free: tuple[np.ndarray, np.ndarray]) -> float:
    """A bound on the relative distance from the least trace(A X^-1 A^T), by duality.

    For any positive semi-definite Y that is 0 where X is free, the least trace is at least
    2 |A Y^(1/2)|_* - trace(Y), with the sum of the singular values. At the optimum that is an
    equality with Y = X^-1 A^T A X^-1; here the free entries of that are set to 0.
    """
    moved = np.linalg.solve(square, matrix.T)
    total = float(np.vdot(matrix.T, moved))
    dual = moved @ moved.T
    dual[free] = dual[free[::-1]] = 0
    values, vectors = np.linalg.eigh(dual)
    root = vectors * np.sqrt(np.maximum(values - min(values[0], 0), 0))
    nuclear = np.linalg.svd(matrix @ root, compute_uv=False).sum()
    return total / float(2 * nuclear - np.square(root).sum()) - 1


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
