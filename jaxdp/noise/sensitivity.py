"""Sensitivities: how far one record can move C G, all steps together.

One record's rows of G have l2 norm at most 1 in the steps where it takes part and are zero
elsewhere. The sensitivity is the largest Frobenius norm of C (G - G') between data sets with the
record and without it (added, removed, or its gradients set to zero).

No value is below the truth, rounding included. All of them are square roots of sums of at most
n k^2 products of numbers that are not negative. A sum or product of such numbers is off by a
relative 2^-53 for each operation that a term passes through: less than 4 (n + k) of them here, and
k <= n. Every value is therefore multiplied by 1 + (n + 16) 2^-49. Where numbers of either sign are
summed, in C^T C, the absolute error has its own term (``_any_matrix``).
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
        for name in ("participations", "separation"):
            value = arguments.integer(name, getattr(self, name), least=1)
            object.__setattr__(self, name, value)


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


Participation = Single | FixedEpochOrder | Cyclic
SINGLE = Single()


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


def repeats(participation: Participation, steps: int) -> tuple[int, int]:
    """The most steps that one release counts a record in, at least 1, and their distance.

    Raises:
        ValueError: when it is no participation.
    """
    if not isinstance(participation, Participation):
        raise ValueError(f"participation must be one of {Participation}, got {participation!r}")
    if not isinstance(participation, FixedEpochOrder):
        return 1, steps
    separation = participation.separation
    return min(participation.participations, -(-steps // separation)), separation


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
    common and the squares of their norms add up. Exact for a Toeplitz C: a fixed order with
    coefficients that are non-negative, where steps 0, b, 2 b, ... are the worst. Exact for other C:
    a fixed order where C^T C is non-negative on the worst steps, or these are at most two.

    Elsewhere it is a bound: the sum of |C^T C| over a record's steps (arXiv:2211.06530), or of a
    Toeplitz C the norm that the magnitudes of its coefficients have, whichever is lower. The first
    takes n^2 k operations and is left out for a Toeplitz C of more than 2,048 steps.

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
        # Columns 0, b, 2 b, ... are the worst, for later ones are shorter. Where they have no row
        # in common their squares add up, whatever the signs. For c >= 0, C^T C >= 0, so that equal
        # gradients are the worst, and columns s < t have the product
        # sum_(m < n - t) c_m c_(m + t - s), which falls as both move on together.
        column = strategy.column_bound()
        if disjoint := count == 1 or strategy.bands <= separation:
            square = float(np.cumsum(np.square(column))[::-1][::separation][:count].sum())
        else:
            total = column.copy()
            for shift in range(separation, separation * count, separation):
                total[shift:] += column[:-shift]
            square = float(np.square(total).sum())
        exact = disjoint or strategy.non_negative
        # Buffers and inverses know their columns only to within a bound.
        known = not isinstance(strategy, BandedInverse | Buffered)
        if not exact and known and strategy.steps <= _LARGEST_GRAM:
            other, exact = _any_matrix(strategy.matrix(), strategy.bands, count, separation)
            square = other if exact else min(square, other)
    else:
        square, exact = _any_matrix(strategy.matrix(), strategy.bands, count, separation)
    if not math.isfinite(square):
        raise ValueError(f"strategy must have a sensitivity within float64, got {strategy!r}")
    return Sensitivity(math.sqrt(square) * (1 + (strategy.steps + 16) * 2.0**-49), exact)


def _any_matrix(matrix: np.ndarray, bands: int, count: int, separation: int) -> tuple[float, bool]:
    """The square of the sensitivity of any C or of a bound above it; True where it is exact."""
    squares = np.square(matrix).sum(axis=0)
    if count == 1:
        return float(squares.max()), True
    if bands <= separation:
        return max(squares[j::separation][:count].sum() for j in range(len(matrix))), True

    # At least |C^T C|. In any order of summation each entry is off by at most n units of rounding
    # times the sum of the absolute products, at most the product of the norms of the two columns.
    gram = matrix.T @ matrix
    norms = np.sqrt(gram.diagonal())
    error = (len(matrix) + 8) * 2.0**-52 * np.outer(norms, norms)
    bound, non_negative = np.abs(gram) + error, gram >= -error

    best, exact = -math.inf, False
    for start in range(len(matrix)):
        steps = np.arange(start, len(matrix), separation)[:count]
        pairs = np.ix_(steps, steps)
        square = float(bound[pairs].sum(axis=0).sum())
        if square > best:
            # Opposite gradients absorb the sign of two steps.
            best, exact = square, len(steps) <= 2 or bool(non_negative[pairs].all())
    return best, exact
