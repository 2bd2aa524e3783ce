"""Sensitivities: how far one record can move C G, all steps together.

One record's rows of G have l2 norm at most 1 in the steps where it takes part and are zero
elsewhere. The sensitivity is the largest Frobenius norm of C (G - G') between data sets with the
record and without it (added, removed, or its gradients set to zero).

No value is below the truth, rounding included. All of them are square roots of sums of at most
n k^2 products of numbers that are not negative. A sum or product of such numbers is off by a
relative 2^-53 for each operation that a term passes through: less than 4 (n + k) of them here, and
k <= n. Every value is therefore multiplied by 1 + (n + 16) 2^-49. Where numbers of either sign are
summed, in C^T C, the absolute error has its own term (``_square_of_matrix``).
"""

import dataclasses
import math

import numpy as np

from jaxdp import arguments
from jaxdp.noise.strategies import BandedInverse, Buffered, Strategy, ToeplitzStrategy


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
        arguments.fields(self, participations=arguments.size, separation=arguments.size)


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
        arguments.fields(self, bands=arguments.size)


Participation = Single | FixedEpochOrder | Cyclic
SINGLE = Single()


def step_pattern(participation: Participation, steps: int) -> tuple[int, int]:
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


def sensitivity(strategy: Strategy, participation: Participation) -> float:
    """The sensitivity of a strategy to one record in clip norms, or a bound above it; never below.

    Exact but for rounding (less than 1e-6 of it) are, for any C: one participation, where it is the
    largest column norm; cyclic participation, likewise; and at most b bands, where the columns of
    one record have no row in common and the squares of their norms add up. Exact for a Toeplitz C:
    a fixed order with coefficients that are non-negative, where steps 0, b, 2 b, ... are the worst.
    Exact for other C: a fixed order where C^T C is non-negative on the worst steps, or these are at
    most two, for opposite gradients absorb their sign.

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
    # One record takes part in at most ``count`` steps, ``separation`` apart. Gradients of norm 1 in
    # them move C G by a sum of as many columns of C, each times a unit vector.
    count, separation = step_pattern(participation, strategy.steps)
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
        # Buffers and inverses know their columns only to within a bound.
        known = not isinstance(strategy, BandedInverse | Buffered)
        signed = known and not disjoint and not strategy.non_negative
        if signed and strategy.steps <= _LARGEST_GRAM:
            square = min(square, _square_of_matrix(strategy, count, separation))
    else:
        square = _square_of_matrix(strategy, count, separation)
    if not math.isfinite(square):
        raise ValueError(f"strategy must have a sensitivity within float64, got {strategy!r}")
    return math.sqrt(square) * (1 + (strategy.steps + 16) * 2.0**-49)


def _square_of_matrix(strategy: Strategy, count: int, separation: int) -> float:
    """The square of the sensitivity of any C, or of a bound above it."""
    matrix = strategy.matrix()
    squares = np.square(matrix).sum(axis=0)
    if count == 1:
        return float(squares.max())
    if strategy.bands <= separation:
        return max(float(squares[j::separation][:count].sum()) for j in range(len(matrix)))

    # At least |C^T C|. In any order of summation each entry is off by at most n units of rounding
    # times the sum of the absolute products, at most the product of the norms of the two columns.
    gram = matrix.T @ matrix
    norms = np.sqrt(gram.diagonal())
    bound = np.abs(gram) + (len(matrix) + 8) * 2.0**-52 * np.outer(norms, norms)
    each = (np.arange(start, len(matrix), separation)[:count] for start in range(len(matrix)))
    return float(np.max([bound[np.ix_(steps, steps)].sum(axis=0).sum() for steps in each]))
