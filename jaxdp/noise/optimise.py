"""Strategies of the least error times sensitivity, found on the host in float64.

Deterministic: fixed starts and no random numbers. The sensitivity is that of the participation
with the clip norm 1; the strategies are rounded to float32 at the end, and only then is their
sensitivity taken (``jaxdp.noise.sensitivity``).
"""

import numpy as np

from jaxdp import arguments
from jaxdp.noise import _gramian, _series
from jaxdp.noise._minimise import INFEASIBLE, Loss, lowest
from jaxdp.noise.participation import SINGLE, Cyclic, MinSeparation, Participation, repeats
from jaxdp.noise.strategies import Buffered, Toeplitz, square_root
from jaxdp.noise.workloads import PREFIX_SUMS, Workload

ERRORS = ("rms", "max")
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
        workload: A, of a constant learning rate.
        error: "rms" or "max".

    Raises:
        ValueError: when an argument is out of its range.
    """
    arguments.one_of("error", error, ERRORS)
    start = square_root(steps, bands)
    target = workload.toeplitz(start.steps)
    found = np.asarray(start.coefficients[1:])
    # Long runs make all but a narrow valley unstable: shorter ones lead into it.
    for length in _lengths(start.steps, start.bands) if len(found) else ():
        found = lowest(_banded(target[:length], error), [found], f"{bands} bands, {length} steps")
    return Toeplitz((1.0, *found.tolist()), start.steps)


def _lengths(steps: int, bands: int) -> list[int]:
    lengths = [steps]
    while lengths[-1] > 64 * bands:
        lengths.append(lengths[-1] // 8)
    return lengths[::-1]


def _banded(target: np.ndarray, error: str) -> Loss:
    steps = len(target)
    weights = np.arange(steps, 0, -1) / steps if error == "rms" else np.ones(steps)
    return lambda free: _banded_loss(np.concatenate([[1.0], free]), target, weights)


def _banded_loss(
    coefficients: np.ndarray, target: np.ndarray, weights: np.ndarray
) -> tuple[float, np.ndarray]:
    """log(sum_t w_t b_t^2) + log |c|^2 for b = a / c, and its gradient but for c_0.

    The derivative of b_t in c_j is -(b / c)_(t-j), so that of the sum is -2 sum_t w_t b_t
    (b / c)_(t-j): one more recurrence, and a correlation.
    """
    response = _series.filtered([1.0], coefficients, target)
    again = _series.filtered([1.0], coefficients, response)
    if not np.abs(again).max() < 1e100:
        return INFEASIBLE, np.zeros(len(coefficients) - 1)
    weighted = weights * response
    # Unlike products of matrices, these start no threads, which take longer than the work.
    total, square = (weighted * response).sum(), np.square(coefficients).sum()
    padded = np.concatenate([np.zeros(len(coefficients) - 1), again])
    delayed = np.lib.stride_tricks.sliding_window_view(padded, len(again))[-2::-1]
    slopes = np.einsum("jt,t->j", delayed, weighted)
    gradient = -2 * slopes / total + 2 * coefficients[1:] / square
    return float(np.log(total) + np.log(square)), gradient


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
        participation: any but ``Cyclic``.
        workload: A, of a constant learning rate.
        error: "rms" or "max".

    Raises:
        ValueError: when an argument is out of its range, or the participation is cyclic (a buffered
            strategy has no bands).
    """
    steps = arguments.integer("steps", steps, least=1)
    buffers = arguments.integer("buffers", buffers, least=1)
    arguments.one_of("error", error, ERRORS)
    workload.check(steps)
    workload.learning_rate  # noqa: B018  (refuses a schedule)
    if isinstance(participation, Cyclic):
        raise ValueError(f"participation must not be cyclic, got {participation!r}")
    often = repeats(participation, steps)

    # The pattern 0, b, 2 b, ... is the worst under a minimum separation where c does not increase.
    falling = isinstance(participation, MinSeparation) and often[0] > 1

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        return _buffered_loss(free, steps, often, workload.momentum, error, falling)

    found = lowest(loss, _starts(steps, buffers, falling), f"{buffers} buffers, {steps} steps")
    scales, decays = _parameters(found, falling)
    order = np.argsort(-decays)
    # Rounded to float32, a sum of 1 may come out above it.
    scales = np.maximum(scales[order] * (1 - falling * 2.0**-20), _LEAST_SCALE)
    decays = np.minimum(decays[order], _LONGEST_MEMORY)
    return Buffered(tuple(scales.tolist()), tuple(decays.tolist()), steps)


def _parameters(free: np.ndarray, falling: bool) -> tuple[np.ndarray, np.ndarray]:
    """The scales and decays of unconstrained numbers [..., 2 m]: their logarithm and log-odds.

    If c is to be ``falling``, the logarithms are of shares beside a share of 1, so that the scales
    sum to less than 1.
    """
    half = free.shape[-1] // 2
    scales = np.exp(free[..., :half])
    if falling:
        scales = scales / (1 + scales.sum(axis=-1, keepdims=True))
    return scales, 1 / (1 + np.exp(-free[..., half:]))


def _starts(steps: int, buffers: int, falling: bool) -> list[np.ndarray]:
    """Free numbers of sums near the square root's coefficients, over several ranges of decays.

    j^(-1/2) is the integral of s^(-1/2) exp(-s j) over s, divided by the square root of pi: its sum
    over a geometric grid of s = 1 - decay is such a strategy.
    """
    starts = []
    for longest in (0.3, 1.0, 4.0, 12.0):
        edges = np.geomspace(min(longest / steps, 0.05), 0.6, buffers + 1)
        rates = np.sqrt(edges[1:] * edges[:-1])
        scales = np.sqrt(rates) * np.log(edges[1] / edges[0]) / np.pi
        scales *= min(1.0, 0.5 / scales.sum())
        scales /= 1 - scales.sum() if falling else 1
        starts.append(np.concatenate([np.log(scales), np.log((1 - rates) / rates)]))
    return starts


def _buffered_loss(
    free: np.ndarray,
    steps: int,
    often: tuple[int, int],
    momentum: float,
    error: str,
    falling: bool,
) -> tuple[float, np.ndarray]:
    """log error^2 + log sensitivity^2 and its gradient, by a complex step in every direction.

    The loss is analytic and real on real numbers, so its imaginary part at a step of 1e-30 i is
    the derivative times 1e-30, to full precision.
    """
    moved = free + 1e-30j * np.eye(len(free))
    with np.errstate(all="ignore"):
        scales, decays = _parameters(moved, falling)
        last, total = _gramian.square_sums(scales, decays, momentum, steps)
        square = _pattern_square(scales, decays, steps, often)
        values = np.log(total if error == "rms" else last) + np.log(square)
    if not np.isfinite(values).all():
        return INFEASIBLE, np.zeros(len(free))
    return float(values[0].real), values.imag / 1e-30


def _pattern_square(
    scales: np.ndarray, decays: np.ndarray, steps: int, often: tuple[int, int]
) -> np.ndarray:
    """The square of the norm of the sum of columns 0, b, 2 b, ..., [...], in closed form.

    At the p-th of these steps the buffers hold s, geometric sums over the earlier ones; the sum of
    columns is 1 + scales . s there, and scales . (decays^(j-1) t) a further j steps on, where t
    is decays s + 1, until the next.
    """
    count, separation = often
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
