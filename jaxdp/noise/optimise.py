"""Strategies of the least error times sensitivity, found on the host in float64.

Deterministic: fixed starts and no random numbers. The sensitivity is that of the participation
with the clip norm 1; the strategies are rounded to float32 at the end, and only then is their
sensitivity taken (``jaxdp.noise.sensitivity``).
"""

import warnings
from collections.abc import Callable, Iterable

import numpy as np

from jaxdp import arguments
from jaxdp.noise.errors import ERRORS, PREFIX_SUMS, Workload, square_sums
from jaxdp.noise.sensitivity import SINGLE, Cyclic, Participation, sensitivity, step_pattern
from jaxdp.noise.strategies import (
    Buffered,
    Dense,
    MadeAgain,
    Strategy,
    Toeplitz,
    banded_inverse_square_root,
    identity,
    square_root,
    times_series,
)

Loss = Callable[[np.ndarray], tuple[float, np.ndarray]]

# In the units of a logarithm of a loss: far beyond any, and yet finite for the line search.
INFEASIBLE = 1e4


# Strategies by name, as ``jaxdp.dp_mf`` takes them. Cyclic Poisson sampling amplifies the banded
# ones alone; noise on an integer grid takes those whose rounded coefficients are as good.
STRATEGIES = ("banded", "buffered", "lambda", "banded_inverse", "square_root", "dense", "identity")
BANDED = ("banded", "identity")
ON_GRID = ("banded", "square_root", "identity")


def strategy_by_name(
    name: str, steps: int, bands: int, participation: Participation, workload: Workload, error: str
) -> Strategy:
    """The strategy of a name and so many bands, the best where it is optimised.

    Args:
        name: one of ``STRATEGIES``.
        steps: n.
        bands: of "banded"; of "banded_inverse" those of the inverse; of "buffered" its buffers.
        participation: the steps in which one record takes part, for "buffered", "lambda" and
            "dense".
        workload: A.
        error: "rms" or "max".

    Raises:
        ValueError: more bands than steps, or what an optimiser refuses.
    """
    if name == "buffered":
        return optimal_buffered(steps, bands, participation, workload, error)
    if name == "lambda":
        return optimal_lambda(steps, participation, workload, error)
    if name == "dense":
        return optimal_dense(steps, participation, workload)
    if bands > steps:
        raise ValueError(f"bands must be at most steps ({steps}), got {bands}")
    if name == "banded_inverse":
        return banded_inverse_square_root(steps, bands)
    if name == "banded":
        return optimal_banded(steps, bands, workload, error)
    return square_root(steps) if name == "square_root" else identity(steps)


def _refuse_cyclic(participation: Participation) -> None:
    """Raises ValueError for a cyclic participation, under which only banded strategies are used."""
    if isinstance(participation, Cyclic):
        raise ValueError(
            f"participation must not be cyclic, which takes bands, got {participation!r}"
        )


def minimize(
    loss: Loss, starts: Iterable[np.ndarray], name: str, steepest: float = 1e-4, **options: float
) -> np.ndarray:
    """The lowest of the local minima found from each start, float64 like the starts.

    A RuntimeWarning says when the best of them is no minimum, its gradient above ``steepest``.

    Args:
        loss: gives the logarithm of a loss and its gradient; ``INFEASIBLE`` and zeros where it has
            none.
        starts: float64 [p] each.
        name: of the thing optimised, for the warning.
        steepest: the largest slope that passes for none.
        **options: of L-BFGS-B in scipy.
    """
    from scipy import optimize  # slow to import

    limits = {"maxiter": 5_000, "maxfun": 20_000, "maxcor": 20, "ftol": 1e-13, "gtol": 1e-7}
    # The losses have several local minima; of equal ones the first start's is taken.
    runs = [
        optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=limits | options)
        for start in starts
    ]
    best = min(runs, key=lambda run: float(run.fun))
    slope = float(np.abs(best.jac).max())
    if not slope <= steepest:
        warnings.warn(
            f"{name}: no optimum was reached in {best.nit} iterations; the best has a gradient of "
            f"{slope:.2g} in the logarithm of its loss, {best.message}",
            RuntimeWarning,
            stacklevel=3,
        )
    return np.asarray(best.x)


_LONGEST_MEMORY = 1 - 2.0**-24  # the largest float32 below 1
_LEAST_SCALE = 1e-30


def optimal_banded(
    steps: int, bands: int, workload: Workload = PREFIX_SUMS, error: str = "rms"
) -> Toeplitz:
    """The Toeplitz strategy of so many bands with the least error times sensitivity.

    For one participation, a minimum separation or a fixed order of at least ``bands``, and cyclic
    participation: the sensitivity is then proportional to the norm of the coefficients, up to what
    the end of the run cuts off. McKenna 2024, arXiv:2405.15913, optimises likewise. A
    RuntimeWarning says when the optimum was not reached.

    Args:
        steps: n.
        bands: 1..n; more cost more memory in training.
        workload: A.
        error: "rms" or "max".

    Raises:
        ValueError: when an argument is out of its range.
    """
    arguments.one_of("error", error, tuple(ERRORS))
    start = square_root(steps, bands)
    target = workload.toeplitz(start.steps)
    found = np.asarray(start.coefficients[1:])
    # Long runs make all but a narrow valley unstable: shorter ones lead into it.
    lengths = [start.steps]
    while lengths[-1] > 64 * start.bands:
        lengths.append(lengths[-1] // 8)
    for length in lengths[::-1] if len(found) else ():
        loss, name = _banded_loss(target[:length], error), f"{bands} bands, {length} steps"
        found = minimize(loss, [found], name)
    return Toeplitz((1.0, *found.tolist()), start.steps)


def _banded_loss(target: np.ndarray, error: str) -> Loss:
    """log(sum_t w_t b_t^2) + log |c|^2 for b = a / c, and its gradient but for c_0 = 1.

    The derivative of b_t in c_j is -(b / c)_(t-j), so that of the sum is -2 sum_t w_t b_t
    (b / c)_(t-j): one more recurrence, and a correlation.
    """
    steps = len(target)
    weights = np.arange(steps, 0, -1) / steps if error == "rms" else np.ones(steps)

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        """The loss of c = (1, *free), and its gradient."""
        coefficients = np.concatenate([[1.0], free])
        response = times_series([1.0], coefficients, target)
        again = times_series([1.0], coefficients, response)
        if not np.abs(again).max() < 1e100:
            return INFEASIBLE, np.zeros(len(free))
        weighted = weights * response
        # Unlike products of matrices, these start no threads, which take longer than the work.
        total, square = (weighted * response).sum(), np.square(coefficients).sum()
        padded = np.concatenate([np.zeros(len(free)), again])
        delayed = np.lib.stride_tricks.sliding_window_view(padded, len(again))[-2::-1]
        slopes = np.einsum("jt,t->j", delayed, weighted)
        return float(np.log(total) + np.log(square)), -2 * slopes / total + 2 * free / square

    return loss


def optimal_buffered(
    steps: int,
    buffers: int,
    participation: Participation = SINGLE,
    workload: Workload = PREFIX_SUMS,
    error: str = "rms",
) -> Buffered:
    """The buffered strategy (BLT) with the least error times sensitivity.

    One evaluation takes O(log n) operations, and O(k) for k participations (arXiv:2408.08868
    optimises likewise), so n may be millions. A local optimum: the best from several starts. A
    RuntimeWarning says when none was reached.

    Args:
        steps: n.
        buffers: m >= 1; each costs the memory of one gradient in training.
        participation: once, or a fixed order.
        workload: A.
        error: "rms" or "max".

    Raises:
        ValueError: when an argument is out of its range, or the participation is cyclic (a buffered
            strategy has no bands).
    """
    steps = arguments.integer("steps", steps, least=1)
    buffers = arguments.integer("buffers", buffers, least=1)
    arguments.one_of("error", error, tuple(ERRORS))
    _refuse_cyclic(participation)
    pattern = step_pattern(participation, steps)

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        """The loss of unconstrained scales and decays, and its gradient."""
        return _buffered_loss(free, steps, pattern, workload.momentum, error)

    # From sums near the square root's coefficients, over several ranges of decays: j^(-1/2) is the
    # integral of s^(-1/2) exp(-s j) over s, divided by the square root of pi, and its sum over a
    # geometric grid of s = 1 - decay is such a strategy.
    starts = []
    for longest in (0.3, 1.0, 4.0, 12.0):
        edges = np.geomspace(min(longest / steps, 0.05), 0.6, buffers + 1)
        rates = np.sqrt(edges[1:] * edges[:-1])
        scales = np.sqrt(rates) * np.log(edges[1] / edges[0]) / np.pi
        scales *= min(1.0, 0.5 / scales.sum())
        starts.append(np.concatenate([np.log(scales), np.log((1 - rates) / rates)]))
    scales, decays = _scales_and_decays(minimize(loss, starts, f"{buffers} buffers, {steps} steps"))
    # The longest memory first, within what the strategy's float32 numbers can be.
    order = np.argsort(-decays)
    scales = np.maximum(scales[order], _LEAST_SCALE)
    decays = np.minimum(decays[order], _LONGEST_MEMORY)
    return Buffered(tuple(scales.tolist()), tuple(decays.tolist()), steps)


def _scales_and_decays(free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scales and decays of unconstrained numbers [..., 2 m]: their logarithm and log-odds."""
    half = free.shape[-1] // 2
    return np.exp(free[..., :half]), 1 / (1 + np.exp(-free[..., half:]))


def _buffered_loss(
    free: np.ndarray, steps: int, pattern: tuple[int, int], momentum: float, error: str
) -> tuple[float, np.ndarray]:
    """log error^2 + log sensitivity^2 and its gradient, by a complex step in every direction.

    The loss is analytic and real on real numbers, so its imaginary part at a step of 1e-30 i is
    the derivative times 1e-30, to full precision.
    """
    # Row k is moved in direction k; all are evaluated at once.
    moved = free + 1e-30j * np.eye(len(free))
    with np.errstate(all="ignore"):
        scales, decays = _scales_and_decays(moved)
        last, total = square_sums(scales, decays, momentum, steps)
        square = _pattern_square(scales, decays, steps, pattern)
        values = np.log(total if error == "rms" else last) + np.log(square)
    if not np.isfinite(values).all():
        return INFEASIBLE, np.zeros(len(free))
    return float(values[0].real), values.imag / 1e-30


def _pattern_square(
    scales: np.ndarray, decays: np.ndarray, steps: int, pattern: tuple[int, int]
) -> np.ndarray:
    """The square of the norm of the sum of columns 0, b, 2 b, ..., [...], in closed form.

    At the p-th of these steps the buffers hold s, geometric sums over the earlier ones; the sum of
    columns is 1 + scales . s there, and scales . (decays^(j-1) t) a further j steps on, where t
    is decays s + 1, until the next.
    """
    count, separation = pattern
    before = np.arange(count)
    lengths = np.full(count, separation)
    lengths[-1] = steps - (count - 1) * separation
    a, d = scales[..., None, :], decays[..., None, :]
    held = d ** (separation - 1) * (1 - d ** (separation * before[:, None])) / (1 - d**separation)
    first = (1 + (a * held).sum(axis=-1)) ** 2
    taken = a * (d * held + 1)
    pairs = d[..., :, None] * d[..., None, :]
    sums = (1 - pairs ** (lengths[:, None, None] - 1)) / (1 - pairs)
    rest = np.einsum("...pk,...pkl,...pl->...p", taken, sums, taken)
    return np.asarray((first + rest).sum(axis=-1))


def optimal_lambda(
    steps: int,
    participation: Participation = SINGLE,
    workload: Workload = PREFIX_SUMS,
    error: str = "rms",
) -> MadeAgain:
    """The strategy y_i = z_i - λ z_(i-1) with the least error times sensitivity.

    The best of a grid of λ that is drawn closer three times. One evaluation takes n operations for
    each time that a record takes part.

    Args:
        steps: n >= 2.
        participation: once, or a fixed order.
        workload: A.
        error: "rms" or "max".

    Raises:
        ValueError: when an argument is out of its range, or the participation is cyclic.
    """
    steps = arguments.integer("steps", steps, least=2)
    of = ERRORS[arguments.one_of("error", error, tuple(ERRORS))]
    _refuse_cyclic(participation)

    # From λ = 0 to where 1 - λ is 1 / (4 n), with which the noise takes back nearly all.
    low, high = 0.0, np.log(4.0 * steps)
    for _ in range(4):
        rates = np.linspace(low, high, 33)
        each = [MadeAgain((1.0, float(np.expm1(-rate))), steps) for rate in rates]
        losses = [of(made, workload) * sensitivity(made, participation) for made in each]
        best = int(np.argmin(losses))
        low, high = rates[max(best - 1, 0)], rates[min(best + 1, len(rates) - 1)]
    return each[best]


_LARGEST_GAP = 1e-4
Free = tuple[np.ndarray, ...]  # rows and columns of the free entries below the diagonal


def optimal_dense(
    steps: int, participation: Participation = SINGLE, workload: Workload = PREFIX_SUMS
) -> Dense:
    """The strategy with the least RMS error times sensitivity.

    X = C^T C minimises trace(A^T A X^-1), a convex function, subject to columns of norm 1 and to
    products of 0 of any two columns that one record could move, those of a fixed order's epochs
    (Choquette-Choo et al. 2022, arXiv:2211.06530). The optimum among such X; without repeated
    participation, among all. An iteration takes n^3 operations: seconds for 512 steps. A
    RuntimeWarning says when, by duality, the square of the error is not proven to be within 1e-4 of
    the least.

    Args:
        steps: n.
        participation: once, or a fixed order.
        workload: A.

    Raises:
        ValueError: when an argument is out of its range, or the participation is cyclic.
    """
    steps = arguments.integer("steps", steps, least=1)
    _refuse_cyclic(participation)
    count, separation = step_pattern(participation, steps)
    # The entries of X below the diagonal that are free, and bands that leave the others 0.
    lags = np.subtract.outer(np.arange(steps), np.arange(steps))
    fixed = (lags % separation == 0) & (lags < count * separation)
    free: Free = np.nonzero((lags > 0) & ~fixed)
    found = _dense_start(steps, workload.momentum, min(steps, separation))[free]
    if len(found):
        loss, name = _dense_loss(workload, free, steps), f"dense, {steps} steps"
        # The gap is what tells that it is the optimum.
        found = minimize(loss, [found], name, steepest=np.inf, ftol=1e-10, maxcor=10)
        gap = _duality_gap(workload.matrix(steps), _gram(found, free, steps), free)
        if gap > _LARGEST_GAP:
            warnings.warn(
                f"{name}: the squared error is up to a factor of {1 + gap:.6g} above the least",
                RuntimeWarning,
                stacklevel=2,
            )
    # The lower-triangular C with C^T C = X: a Cholesky factor from the last row backwards.
    square = _gram(found, free, steps)
    return Dense.of(np.ascontiguousarray(np.linalg.cholesky(square[::-1, ::-1])[::-1, ::-1].T))


def _dense_start(steps: int, momentum: float, width: int) -> np.ndarray:
    """X of the banded square root of the workload without its schedule, with columns of norm 1."""
    root, decay = square_root(steps).first_column(), momentum ** np.arange(float(steps))
    series = np.convolve(root, root * decay)[:width]
    columns = Toeplitz(tuple((series / series[0]).tolist()), steps).matrix()
    columns /= np.sqrt(np.square(columns).sum(axis=0))
    return np.asarray(columns.T @ columns)


def _duality_gap(matrix: np.ndarray, square: np.ndarray, free: Free) -> float:
    """A bound on the relative distance from the least trace(A X^-1 A^T), by duality.

    For any positive semi-definite Y that is 0 where X is free, the least trace is at least
    2 |A Y^(1/2)|_* - trace(Y), with the sum of the singular values. At the optimum that is an
    equality with Y = X^-1 A^T A X^-1; here the free entries of that are set to 0.
    """
    # Y = X^-1 A^T A X^-1, made feasible: zeros where X is free, no negative eigenvalues.
    moved = np.linalg.solve(square, matrix.T)
    total = float(np.vdot(matrix.T, moved))
    dual = moved @ moved.T
    dual[free] = dual[free[::-1]] = 0
    values, vectors = np.linalg.eigh(dual)
    root = vectors * np.sqrt(np.maximum(values - min(values[0], 0), 0))
    nuclear = np.linalg.svd(matrix @ root, compute_uv=False).sum()
    return total / float(2 * nuclear - np.square(root).sum()) - 1


def _gram(found: np.ndarray, free: Free, steps: int) -> np.ndarray:
    """X = C^T C float64 [n, n] with these free entries, ones on the diagonal, else zeros."""
    square = np.eye(steps)
    square[free] = found
    square[free[::-1]] = found
    return square


def _dense_loss(workload: Workload, free: Free, steps: int) -> Loss:
    """log trace(A X^-1 A^T) and its gradient -2 (A X^-1)^T (A X^-1) / trace, off the diagonal.

    The trace grows beyond all bounds where X ceases to be positive definite, so nothing else has to
    keep it so but steps that are short enough.
    """
    from scipy.linalg import lapack  # slow to import

    matrix = workload.matrix(steps)

    def loss(found: np.ndarray) -> tuple[float, np.ndarray]:
        """The loss of the free entries of X, and its gradient."""
        # By Cholesky's factor, which fails where X is not positive definite.
        factor, wrong = lapack.dpotrf(_gram(found, free, steps), lower=1)
        if wrong:
            return INFEASIBLE, np.zeros_like(found)
        inverse = np.tril(lapack.dpotri(factor, lower=1)[0])
        moved = workload.apply(inverse + np.tril(inverse, -1).T)
        total = float(np.vdot(matrix, moved))
        return float(np.log(total)), -2 * (moved.T @ moved)[free] / total

    return loss
