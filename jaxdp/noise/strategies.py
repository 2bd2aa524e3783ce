"""Strategies: lower-triangular matrices C, with whose inverse the noise of the steps is correlated.

A run of n steps with the strategy C releases C G + Z, row by row, where row i of G is the sum of
the clipped gradients of step i and Z is independent Gaussian noise; after C^-1, which is
post-processing, that is G plus the noise Y = C^-1 Z, whose rows are correlated (the matrix
mechanism; Denisov, McMahan, Rush, Smith and Thakurta 2022, arXiv:2202.08312). The loop computes Y
from float32 numbers, so a strategy is, by definition, the matrix of exactly these float32 numbers.

Strategies are immutable, and equal where their numbers are. Matrices are float64, on the host.
"""

import base64
import dataclasses
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from jaxdp import arguments


class Strategy(ABC):
    """A lower-triangular matrix C [n, n] with a positive diagonal.

    Attributes:
        steps: n >= 1.
    """

    types: ClassVar[dict[str, type["Strategy"]]] = {}
    steps: int

    def __init_subclass__(cls) -> None:
        # A class name stands for a strategy in JSON, see ``from_dict``.
        Strategy.types[cls.__name__] = cls

    @property
    @abstractmethod
    def bands(self) -> int:
        """The number of bands: the smallest with C[i, j] = 0 for i - j >= bands."""

    @abstractmethod
    def matrix(self) -> np.ndarray:
        """float64 [n, n]: C."""

    @abstractmethod
    def inverse(self) -> np.ndarray:
        """float64 [n, n]: C^-1."""

    def inverse_row_norms(self) -> np.ndarray:
        """float64 [n]: the standard deviation of the correlated noise of each step, for unit Z."""
        return np.asarray(np.sqrt(np.square(self.inverse()).sum(axis=1)))

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The strategy in plain JSON types; ``from_dict`` gives an equal strategy back."""

    def cancelled(self) -> float:
        """max_i sum_j |C_ij| s_j, where s_j is the standard deviation of the noise of step j.

        The size of what has to cancel for a step's own normals to be left; infinite where the noise
        exceeds float64.
        """
        try:
            deviations = self.inverse_row_norms()
        except ValueError:
            return math.inf
        return float(np.max(self.times_magnitudes(deviations)))

    def times_magnitudes(self, values: np.ndarray) -> np.ndarray:
        """float64 [n]: |C| times the values [n]."""
        return np.asarray(np.abs(self.matrix()) @ values)


class ToeplitzStrategy(Strategy):
    """A strategy whose C is Toeplitz: C[i, j] = c_(i-j)."""

    @abstractmethod
    def first_column(self) -> np.ndarray:
        """float64 [n]: c, the first column of C; ValueError where it exceeds float64."""

    @abstractmethod
    def first_inverse_column(self) -> np.ndarray:
        """float64 [n]: that of C^-1, which is Toeplitz too; ValueError where it exceeds float64."""

    @abstractmethod
    def column_bound(self) -> np.ndarray:
        """float64 [n]: at least the absolute value of the first column, rounding included."""

    @property
    @abstractmethod
    def non_negative(self) -> bool:
        """True where all of C is proven to be at least 0."""

    def matrix(self) -> np.ndarray:
        return _lower_toeplitz(self.first_column())

    def inverse(self) -> np.ndarray:
        return _lower_toeplitz(self.first_inverse_column())

    def times_magnitudes(self, values: np.ndarray) -> np.ndarray:
        from scipy import signal

        column = np.abs(self.first_column())[: self.bands]
        return np.asarray(signal.oaconvolve(column, values)[: self.steps])

    def inverse_row_norms(self) -> np.ndarray:
        return np.asarray(np.sqrt(np.cumsum(np.square(self.first_inverse_column()))))

    def to_dict(self) -> dict[str, Any]:
        fields = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        return {"type": type(self).__name__, **fields}


def _lower_toeplitz(first: np.ndarray) -> np.ndarray:
    """float64 [n, n]: the lower-triangular Toeplitz matrix of this first column."""
    from scipy import linalg  # slow to import

    return np.asarray(linalg.toeplitz(first, np.zeros(len(first))))


_UNIT = 2.0**-53  # the largest relative error of one rounding


@dataclasses.dataclass(frozen=True, repr=False)
class _Series(ToeplitzStrategy):
    """A strategy of finitely many coefficients: those of C, or of its inverse."""

    coefficients: tuple[float, ...]
    steps: int

    def __post_init__(self) -> None:
        arguments.fields(self, steps=arguments.size)
        coefficients = to_float32("coefficients", self.coefficients)
        if coefficients[0] != 1:
            raise ValueError(f"coefficients[0] must be 1, got {coefficients[0]!r}")
        if len(coefficients) > self.steps:
            raise ValueError(
                f"coefficients must be at most steps ({self.steps}), got {len(coefficients)}"
            )
        object.__setattr__(self, "coefficients", coefficients)

    def __repr__(self) -> str:
        given = self.coefficients
        shown = repr(given)
        if len(given) > _SHOWN:
            text = digest(np.asarray(given, "<f4").tobytes())
            shown = f"<{len(given)} float32, blake2b {text}>"
        return f"{type(self).__name__}(coefficients={shown}, steps={self.steps})"

    def _padded(self) -> np.ndarray:
        """float64 [n]: the coefficients, and zeros."""
        return np.pad(self.coefficients, (0, self.steps - len(self.coefficients)))

    def _inverse_series(self) -> np.ndarray:
        """float64 [n]: the coefficients of the inverse series; ValueError beyond float64."""
        return _require_finite(self, times_series([1.0], self.coefficients, impulse(self.steps)))


class Toeplitz(_Series):
    """C is Toeplitz with these coefficients, and zero beyond them: C[i, j] = coefficients[i - j].

    The noise is y_i = z_i - sum_(j>=1) coefficients[j] y_(i-j).

    Attributes:
        coefficients: 1 to n numbers, rounded to float32; the first is 1. Their number is ``bands``.
        steps: n.
    """

    @property
    def bands(self) -> int:
        """The number of bands: C[i, j] = 0 for i - j >= bands."""
        return len(self.coefficients)

    @property
    def non_negative(self) -> bool:
        """True where all of C is at least 0."""
        return min(self.coefficients) >= 0

    def first_column(self) -> np.ndarray:
        """float64 [n]: c, exactly."""
        return self._padded()

    def column_bound(self) -> np.ndarray:
        """float64 [n]: |c|, exactly."""
        return np.abs(self.first_column())

    def first_inverse_column(self) -> np.ndarray:
        return self._inverse_series()


class BandedInverse(_Series):
    """C^-1 is Toeplitz with these coefficients, and zero beyond them (C itself is full).

    The noise is y_i = sum_j coefficients[j] z_(i-j).

    Attributes:
        coefficients: 1 to n numbers, rounded to float32; the first is 1.
        steps: n.
    """

    @property
    def bands(self) -> int:
        """The number of bands of C: n, but for the identity."""
        return self.steps if any(self.coefficients[1:]) else 1

    @property
    def non_negative(self) -> bool:
        """True where no coefficient but the first is above 0: c is then a sum of products >= 0."""
        return all(d <= 0 for d in self.coefficients[1:])

    def first_column(self) -> np.ndarray:
        return self._inverse_series()

    def column_bound(self) -> np.ndarray:
        """float64 [n]: at least |c|.

        The computed column f satisfies d * f = (1, 0, ...) - e, where each |e_i| is at most (w + 2)
        units of rounding times (|d| * |f|)_i, for w coefficients d. So f - c = -c * e, nowhere
        above D = |c|_1 E for the largest |e_i| = E; and |c|_1 <= |f|_1 + n D. Together
        D <= |f|_1 E / (1 - n E).

        Raises:
            ValueError: when n E is above 1e-7, or the column exceeds float64.
        """
        found = np.abs(self.first_column())
        width = len(self.coefficients)
        moved = times_series(np.abs(self.coefficients), [1.0], found).max()
        most = 2 * (width + 4) * _UNIT * moved  # twice, for the rounding of this very line
        if self.steps * most > 1e-7:
            raise ValueError(f"{self!r} has a column that rounding leaves unknown: use fewer steps")
        return np.asarray(found + 4 * found.sum() * most)

    def first_inverse_column(self) -> np.ndarray:
        """float64 [n]: the coefficients, exactly."""
        return self._padded()


class MadeAgain(BandedInverse):
    """A banded inverse of the coefficients 1 and -λ, with no buffer: y_i = z_i - λ z_(i-1).

    The normals of the step before are made again from their key. DP-λCGD: Kalinin, McKenna, Pagh
    and Lampert 2026, arXiv:2601.22334.

    Attributes:
        coefficients: 1, and -λ for a λ from 0 to below 1, rounded to float32.
        steps: n.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.coefficients) != 2 or not -1 < self.coefficients[1] <= 0:
            raise ValueError(
                "coefficients must be 1 and a number from 0 down to above -1, got "
                f"{self.coefficients!r}"
            )


@dataclasses.dataclass(frozen=True)
class Buffered(ToeplitzStrategy):
    """BLT, a buffered linear Toeplitz matrix: c_0 = 1, c_j = sum_k scales[k] decays[k]^(j-1).

    Dvijotham, McMahan, Pillutla, Steinke and Thakurta 2024, arXiv:2404.16706; McMahan, Xu and Zhang
    2024, arXiv:2408.08868. The noise needs one buffer s_k, at first 0, per scale:
    y_i = z_i - sum_k scales[k] s_k, and then s_k becomes decays[k] s_k + y_i.

    Attributes:
        scales: m numbers above 0, rounded to float32.
        decays: m numbers from 0 to below 1, rounded to float32.
        steps: n.
    """

    scales: tuple[float, ...]
    decays: tuple[float, ...]
    steps: int

    def __post_init__(self) -> None:
        arguments.fields(self, steps=arguments.size)
        for name in ("scales", "decays"):
            object.__setattr__(self, name, to_float32(name, getattr(self, name)))
        if len(self.scales) != len(self.decays):
            raise ValueError(
                f"decays must have one number per scale ({len(self.scales)}), got {self.decays!r}"
            )
        if min(self.scales) <= 0:
            raise ValueError(f"scales must be above 0 in float32, got {self.scales!r}")
        if min(self.decays) < 0 or max(self.decays) >= 1:
            raise ValueError(f"decays must be in [0, 1) in float32, got {self.decays!r}")

    @property
    def bands(self) -> int:
        """The number of bands of C: 2 where all decays are 0, otherwise n."""
        return self.steps if any(self.decays) else min(2, self.steps)

    @property
    def non_negative(self) -> bool:
        """True: c is a sum of products of numbers that are at least 0."""
        return True

    def first_column(self) -> np.ndarray:
        """float64 [n]: c; c_j is off by a factor of at most 1 + (n + m) 2^-52, but for underflow.

        Each power is a product of j factors, in some order, and nothing is subtracted.
        """
        column = impulse(self.steps)
        for scale, decay in zip(self.scales, self.decays, strict=True):
            powers = np.full(self.steps, decay)
            powers[:2] = 1.0  # c_0 is written below
            column += scale * np.cumprod(powers)
        column[0] = 1.0
        return column

    def column_bound(self) -> np.ndarray:
        """float64 [n]: at least c; 1e-290 is more than n underflows lose."""
        widened = self.first_column() * (1 + (self.steps + len(self.scales) + 2) * 2.0**-51)
        widened[1:] += 1e-290
        widened[0] = 1.0
        return np.asarray(widened)

    def first_inverse_column(self) -> np.ndarray:
        """float64 [n]: the first column of C^-1; ValueError where it exceeds float64.

        d_j = -v (L - v v^T)^(j-1) v, where v has the square roots of the scales and the diagonal
        matrix L the decays: a sum of powers of the eigenvalues of that symmetric matrix.
        """
        v = np.sqrt(self.scales)
        values, vectors = np.linalg.eigh(np.diag(self.decays) - np.outer(v, v))
        column = impulse(self.steps)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for value, weight in zip(values, np.square(v @ vectors), strict=True):
                powers = value ** np.arange(self.steps - 1, dtype=np.float64)
                column[1:] -= weight * powers
        return _require_finite(self, column)


def identity(steps: int) -> Toeplitz:
    """The identity: independent noise, that of DP-SGD."""
    return Toeplitz((1.0,), steps)


def square_root(steps: int, bands: int | None = None) -> Toeplitz:
    """The square root of the matrix of prefix sums: the coefficients of (1 - x)^(-1/2).

    Fichtenberger, Henzinger and Upadhyay 2022, arXiv:2202.11205; cut after ``bands`` of them:
    Kalinin and Lampert 2024, arXiv:2405.13763.

    Args:
        steps: n.
        bands: how many coefficients are kept, 1..n; None for all.
    """
    return Toeplitz(_power_series(-1.0, steps, bands), steps)


def banded_inverse_square_root(steps: int, bands: int) -> BandedInverse:
    """BISR: the inverse has the first ``bands`` coefficients of (1 - x)^(1/2).

    Kalinin, McKenna, Upadhyay and Lampert 2025, arXiv:2505.12128.

    Args:
        steps: n.
        bands: how many coefficients the inverse has, 1..n.
    """
    return BandedInverse(_power_series(-3.0, steps, bands), steps)


def from_dict(description: dict[str, object]) -> Strategy:
    """The strategy that a description by ``to_dict`` stands for.

    Raises:
        ValueError: when the type is unknown, or a field is missing, unknown or wrong.
    """
    kind = description.get("type") if isinstance(description, dict) else None
    if not isinstance(kind, str) or kind not in Strategy.types:
        raise ValueError(f"description must have a 'type', got {str(description)[:80]!r}")
    fields = {k: v for k, v in description.items() if k != "type"}
    try:
        return Strategy.types[kind](**fields)
    except TypeError as error:
        raise ValueError(f"description of a {kind}: {error}") from None


def _power_series(first: float, steps: int, bands: int | None) -> tuple[float, ...]:
    """Coefficients of a power of 1 - x: each is (first + 2 j) / (2 j) of the one before."""
    steps = arguments.integer("steps", steps, least=1)
    width = steps if bands is None else arguments.integer("bands", bands, least=1)
    if width > steps:
        raise ValueError(f"bands must be at most steps ({steps}), got {bands!r}")
    j = np.arange(1.0, width)
    return tuple(np.concatenate([[1.0], np.cumprod((first + 2 * j) / (2 * j))]).tolist())


def _require_finite(strategy: ToeplitzStrategy, column: np.ndarray) -> np.ndarray:
    """Returns the column; ValueError where a number of it is beyond float64."""
    if not np.isfinite(column).all():
        raise ValueError(f"{strategy!r} is unstable: its noise exceeds float64 within its steps")
    return column


@dataclasses.dataclass(frozen=True, repr=False)
class Dense(Strategy):
    """C is any lower-triangular matrix of float32 numbers with a positive diagonal.

    ``Dense.of`` makes one from a matrix. The noise is y_i = (z_i - sum_(j<i) C_ij y_j) / C_ii.

    Attributes:
        entries: the rows of the lower triangle, one after the other (row i has i + 1 numbers), as
            little-endian float32: 2 n (n + 1) bytes. Also accepted in base64, as in JSON.
        steps: n.
    """

    entries: bytes
    steps: int

    def __post_init__(self) -> None:
        arguments.fields(self, steps=arguments.size)
        if isinstance(self.entries, str):
            object.__setattr__(self, "entries", base64.b64decode(self.entries, validate=True))
        if not isinstance(self.entries, bytes):
            raise ValueError(f"entries must be bytes, got a {type(self.entries).__name__}")
        if len(self.entries) != 2 * self.steps * (self.steps + 1):
            raise ValueError(
                f"entries must be {2 * self.steps * (self.steps + 1)} bytes for steps="
                f"{self.steps}, got {len(self.entries)}"
            )
        numbers = nearest_float32("entries", np.frombuffer(self.entries, "<f4"))
        diagonal = numbers[np.cumsum(np.arange(1, self.steps + 1)) - 1]
        if not (diagonal > 0).all():
            raise ValueError(f"the diagonal must be above 0 in float32, got {diagonal.min()!r}")
        # Without -0.0 and subnormal numbers, equal matrices have equal bytes.
        object.__setattr__(self, "entries", (numbers + 0).astype("<f4").tobytes())

    @classmethod
    def of(cls, matrix: np.ndarray) -> "Dense":
        """The strategy of a lower-triangular matrix, its entries rounded to float32.

        Args:
            matrix: float [n, n].

        Raises:
            ValueError: when it is not square and lower-triangular, with a positive diagonal.
        """
        matrix = np.asarray(matrix)
        square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] >= 1
        if not square or matrix.dtype.kind not in "fiu" or np.triu(matrix, 1).any():
            raise ValueError(
                f"matrix must be lower-triangular [n, n], got {matrix.dtype} {matrix.shape}, or "
                "entries above the diagonal"
            )
        lower = nearest_float32("matrix", matrix[np.tril_indices(len(matrix))])
        return cls(lower.astype("<f4").tobytes(), len(matrix))

    def __repr__(self) -> str:
        found = digest(self.entries)
        return f"Dense(steps={self.steps}, bands={self.bands}, entries=<blake2b {found}>)"

    @cached_property
    def bands(self) -> int:
        rows, columns = np.nonzero(self.matrix())
        return int((rows - columns).max()) + 1

    def matrix(self) -> np.ndarray:
        """float64 [n, n]: C, exactly."""
        matrix = np.zeros((self.steps, self.steps))
        matrix[np.tril_indices(self.steps)] = np.frombuffer(self.entries, "<f4")
        return matrix

    def inverse(self) -> np.ndarray:
        from scipy import linalg

        return np.asarray(linalg.solve_triangular(self.matrix(), np.eye(self.steps), lower=True))

    def to_dict(self) -> dict[str, Any]:
        """The strategy in plain JSON types, its entries in base64; ``from_dict`` undoes it."""
        entries = base64.b64encode(self.entries).decode("ascii")
        return {"type": "Dense", "entries": entries, "steps": self.steps}


_SMALLEST = float(np.finfo(np.float32).tiny)
_SHOWN = 8


def to_float32(name: str, values: Iterable[float]) -> tuple[float, ...]:
    """The numbers as a tuple of Python floats, each rounded to float32.

    What float32 holds only as a subnormal becomes 0, for accelerators read it as 0.

    Raises:
        ValueError: when they are not finite real numbers within float32, in a sequence.
    """
    try:
        listed = isinstance(values, Iterable) and not isinstance(values, str | bytes | np.ndarray)
        given = np.asarray(tuple(values) if listed else values)
    except ValueError:  # of unlike lengths
        given = np.asarray(None)
    if given.ndim != 1 or given.dtype.kind not in "fiu" or not given.size:
        plain = isinstance(values, tuple | list)
        shown = repr(values)[:80] if plain else arguments.described(values)
        raise ValueError(f"{name} must be a sequence of numbers, got {shown}")
    return tuple(nearest_float32(name, given).astype(np.float64).tolist())


def nearest_float32(name: str, given: np.ndarray) -> np.ndarray:
    """float32: the numbers rounded, subnormal ones to 0; ValueError where one is not finite."""
    with np.errstate(over="ignore"):
        near = given.astype(np.float32)
    if not np.isfinite(near).all():
        wrong = given[~np.isfinite(near)].flat[0]
        raise ValueError(f"{name} must be finite numbers within float32, got {wrong!r} among them")
    return np.where(np.abs(near) < _SMALLEST, np.float32(0), near)


def digest(data: bytes) -> str:
    """The BLAKE2b digest of 16 bytes, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def impulse(length: int) -> np.ndarray:
    """float64 [length]: 1, 0, 0, ..."""
    return np.eye(1, length)[0]


def times_series(top: ArrayLike, bottom: ArrayLike, series: np.ndarray) -> np.ndarray:
    """``series`` times the power series top / bottom, along the first axis, to as many terms.

    Args:
        top: float [p], the coefficients of the numerator.
        bottom: float [q], those of the denominator; the first is 1.
        series: float64 [n, ...].
    """
    # scipy.signal takes longer to import than all of JAX-DP.
    from scipy import signal

    top, bottom = np.asarray(top)[: len(series)], np.asarray(bottom)[: len(series)]
    return np.asarray(signal.lfilter(top, bottom, series, axis=0))
