"""Sensitivities: how far one record can move C G, all steps together.

One record's rows of G have l2 norm at most 1 in the steps where it takes part and are zero
elsewhere. The sensitivity is the largest Frobenius norm of C (G - G') between data sets with the
record and without it (added, removed, or its gradients set to zero).

No value is below the truth, rounding included. All of them are square roots of sums of at most
n k^2 products of numbers that are not negative. A sum or product of such numbers is off by a
relative 2^-53 for each operation that a term passes through: less than 4 (n + k) of them here, and
k <= n. Every value is therefore multiplied by 1 + (n + 16) 2^-49. Where numbers of either sign are
summed, in C^T C, the absolute error has its own term (``_gram``).
"""

import dataclasses
import math

import numpy as np

from jaxdp import arguments
from jaxdp import sampling as rules
from jaxdp.noise.strategies import BandedInverse, Buffered, Strategy, ToeplitzStrategy
from jaxdp.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Single:
    """Every record takes part in at most one step: one pass over the data."""


@dataclasses.dataclass(frozen=True)
class MinSeparation:
    """Every record takes part in at most k steps, any two of them at least b apart.

    Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta and Xu 2023, arXiv:2306.08153,
    "b-min-sep participation".

    Attributes:
        participations: k >= 1; more than fit into n steps, ceil(n / b), count as these.
        separation: b >= 1.
    """

    participations: int
    separation: int

    def __post_init__(self) -> None:
        _check(self)


@dataclasses.dataclass(frozen=True)
class FixedEpochOrder:
    """Every record takes part in steps j, j + b, j + 2 b, ...: epochs of b steps in one order.

    j is any step, and at most k consecutive ones of these steps count. Choquette-Choo, McMahan,
    Rush and Thakurta 2022, arXiv:2211.06530, "(k, b)-participation".

    Attributes:
        separation: b >= 1, the steps of an epoch.
        participations: k >= 1, the epochs; more than fit into n steps count as these.
    """

    separation: int
    participations: int

    def __post_init__(self) -> None:
        _check(self)


@dataclasses.dataclass(frozen=True)
class Cyclic:
    """Every record is in one of b groups, and only steps congruent to the group mod b see it.

    The amplified BandMF (Choquette-Choo et al. 2023, arXiv:2306.08153v2): b consecutive steps have
    one group each, each step sampling from its own. A strategy of at most b bands then moves
    disjoint rows in each of a record's steps, so the sensitivity is that of ONE step, one column;
    the accountant composes them as releases of their own.

    Attributes:
        bands: b >= 1.
    """

    bands: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", arguments.integer("bands", self.bands, least=1))


Participation = Single | MinSeparation | FixedEpochOrder | Cyclic
SINGLE = Single()


def repeats(participation: Participation, steps: int) -> tuple[int, int]:
    """The most steps that one release counts a record in, at least 1, and their distance.

    Raises:
        ValueError: when it is no participation.
    """
    if not isinstance(participation, Participation):
        raise ValueError(f"participation must be one of {Participation}, got {participation!r}")
    if isinstance(participation, Single | Cyclic):
        return 1, steps
    separation = participation.separation
    return min(participation.participations, -(-steps // separation)), separation


def _check(participation: MinSeparation | FixedEpochOrder) -> None:
    for name in ("participations", "separation"):
        value = arguments.integer(name, getattr(participation, name), least=1)
        object.__setattr__(participation, name, value)


def participation(sampling: Sampling, dataset_size: int) -> Participation:
    """The participation that a sampling rule of a whole run keeps to.

    Args:
        sampling: cyclic Poisson, or a fixed order.
        dataset_size: the number of records.

    Raises:
        ValueError: another rule.
    """
    if isinstance(sampling, rules.CyclicPoisson):
        return Cyclic(sampling.bands)
    if isinstance(sampling, rules.FixedOrder):
        passes = sampling.separation(dataset_size)
        times = -(-sampling.steps // passes)
        return Single() if times == 1 else FixedEpochOrder(passes, times)
    raise ValueError(
        f"sampling must be CyclicPoisson or FixedOrder for correlated noise, got {sampling}"
    )


_LARGEST_GRAM = 2_048


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """The sensitivity of a strategy, or a bound above it.

    Attributes:
        value: never below the truth, in units of the clip norm.
        exact: True where the value is the truth, but for rounding (less than 1e-6 of it).
    """

    value: float
    exact: bool


def sensitivity(strategy: Strategy, participation: Participation) -> Sensitivity:
    """The sensitivity of a strategy to one record, or a bound above it.

    Exact are, for any C: one participation, where it is the largest column norm; cyclic
    participation, likewise; and at most b bands, where the columns of one record have no row in
    common and the squares of their norms add up (under a minimum separation, the largest such sum
    is found by dynamic programming). Exact for a Toeplitz C: a minimum separation with coefficients
    that are non-negative and non-increasing, where steps 0, b, 2 b, ... are the worst (Kalinin and
    Lampert 2024, arXiv:2405.13763, Theorem 2; the proof is in ``_worst_at_start``), and a fixed
    order with non-negative ones. Exact for other C: a fixed order where C^T C is non-negative on
    the worst steps, or these are at most two.

    Elsewhere it is a bound. Under a fixed order it sums |C^T C| over a record's steps; under a
    minimum separation each row is bounded by the worst steps for that row (arXiv:2211.06530 and
    2306.08153), or a Toeplitz C by the smallest non-increasing sequence above its coefficients,
    whichever is lower. The first takes n^2 k operations and is left out for a Toeplitz C of more
    than 2,048 steps.

    Args:
        strategy: C.
        participation: in which steps one record may take part.

    Raises:
        ValueError: when the participation is cyclic and the strategy has more bands than groups,
            or rounding leaves a column of the strategy unknown.
    """
    if isinstance(participation, Cyclic) and strategy.bands > participation.bands:
        raise ValueError(
            f"strategy must have at most bands={participation.bands} under {participation!r}, got "
            f"{strategy.bands} of {strategy!r}"
        )
    count, separation = repeats(participation, strategy.steps)
    if isinstance(strategy, ToeplitzStrategy):
        square, exact = _toeplitz(strategy, participation, count, separation)
    else:
        square, exact = _any(strategy, participation, count, separation)
    if not math.isfinite(square):
        raise ValueError(f"strategy must have a sensitivity within float64, got {strategy!r}")
    return Sensitivity(math.sqrt(square) * (1 + (strategy.steps + 16) * 2.0**-49), exact)


def _toeplitz(
    strategy: ToeplitzStrategy, participation: Participation, count: int, separation: int
) -> tuple[float, bool]:
    """The square of the sensitivity or of a bound above it, and True where it is exact."""
    column = strategy.column_bound()
    if count == 1 or strategy.bands <= separation:
        # Columns 0, b, 2 b, ... have no row in common, and later ones only shorten.
        lengths = np.cumsum(np.square(column))[::-1]
        return float(lengths[::separation][:count].sum()), True
    ordered = isinstance(participation, FixedEpochOrder)
    if strategy.non_negative if ordered else strategy.non_increasing:
        return _worst_at_start(column, count, separation), True
    if not ordered:
        column = np.maximum.accumulate(column[::-1])[::-1]
    square, exact = _worst_at_start(column, count, separation), False
    # These two know their columns only to within a bound.
    known = not isinstance(strategy, BandedInverse | Buffered)
    if known and strategy.steps <= _LARGEST_GRAM:
        other, exact = _any(strategy, participation, count, separation)
        square = other if exact else min(square, other)
    return square, exact


def _worst_at_start(column: np.ndarray, count: int, separation: int) -> float:
    """The square of the norm of the sum of columns 0, b, 2 b, ... of a Toeplitz matrix.

    For c >= 0, C^T C >= 0, and equal gradients in all steps are the worst. Columns s < t have the
    product sum_(m < n - t) c_m c_(m + t - s), which falls as both move on together; that settles a
    fixed order. If c does not increase it falls with t - s too, and the p-th and the q-th of any
    steps b apart are at least p b, and (q - p) b apart: every pair has at most the product of its
    counterpart among 0, b, 2 b, ..., and more pairs add more.
    """
    total = column.copy()
    for shift in range(separation, separation * count, separation):
        total[shift:] += column[:-shift]
    return float(np.square(total).sum())


def _any(
    strategy: Strategy, participation: Participation, count: int, separation: int
) -> tuple[float, bool]:
    """As ``_toeplitz``, for any C."""
    matrix = strategy.matrix()
    squares = np.square(matrix).sum(axis=0)
    if count == 1:
        return float(squares.max()), True
    if isinstance(participation, MinSeparation):
        if strategy.bands <= separation:
            return float(_heaviest(squares, count, separation)), True
        rows = _heaviest(_gram(matrix)[0], count, separation)
        return float(_heaviest(rows, count, separation)), False
    if strategy.bands <= separation:
        return max(squares[j::separation][:count].sum() for j in range(strategy.steps)), True

    bound, non_negative = _gram(matrix)
    best, exact = -math.inf, False
    for start in range(len(matrix)):
        steps = np.arange(start, len(matrix), separation)[:count]
        pairs = np.ix_(steps, steps)
        square = float(bound[pairs].sum(axis=0).sum())
        if square > best:
            # Opposite gradients absorb the sign of two steps.
            best, exact = square, len(steps) <= 2 or bool(non_negative[pairs].all())
    return best, exact


def _gram(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At least |C^T C|, and where C^T C is at least 0 (or too near to it to tell).

    In any order of summation each entry is off by at most n units of rounding times the sum of the
    absolute products, which is at most the product of the norms of the two columns.
    """
    gram = matrix.T @ matrix
    norms = np.sqrt(gram.diagonal())
    error = (len(matrix) + 8) * 2.0**-52 * np.outer(norms, norms)
    return np.abs(gram) + error, gram >= -error


def _heaviest(weights: np.ndarray, count: int, separation: int) -> np.ndarray:
    """[...]: the largest sum of at most k of the weights [n, ...] >= 0, any two b or more apart."""
    best = np.zeros_like(weights)
    for _ in range(count):
        taken = weights.copy()
        taken[separation:] += best[:-separation]
        best = np.maximum.accumulate(taken, axis=0)
    return np.asarray(best[-1])
