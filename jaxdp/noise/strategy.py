"""The interface of a strategy: what the noise, its errors and its sensitivity need to know."""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from jaxdp import arguments


class Strategy(ABC):
    """A lower-triangular matrix C [n, n] with a positive diagonal.

    Attributes:
        steps: n >= 1.
    """

    types: ClassVar[dict[str, type["Strategy"]]] = {}
    steps: int

    def __init_subclass__(cls) -> None:
        Strategy.types[cls.__name__] = cls

    @property
    @abstractmethod
    def bands(self) -> int:
        """The number of bands: C[i, j] = 0 for i - j >= bands; n where C is full."""

    @abstractmethod
    def matrix(self) -> np.ndarray:
        """float64 [n, n]: C."""

    @abstractmethod
    def column_norms(self) -> np.ndarray:
        """float64 [n]: the l2 norm of every column of C."""

    @abstractmethod
    def inverse_columns(self, start: int, stop: int) -> np.ndarray:
        """float64 [n, stop - start]: these columns of C^-1."""

    def inverse_row_norms(self) -> np.ndarray:
        """float64 [n]: the standard deviation of the correlated noise of each step, for unit Z."""
        total = np.zeros(self.steps)
        for start in range(0, self.steps, 256):
            stop = min(start + 256, self.steps)
            total += np.square(self.inverse_columns(start, stop)).sum(axis=1)
        return np.asarray(np.sqrt(total))

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The strategy in plain JSON types; ``from_dict`` gives an equal strategy back."""

    def carried(self) -> float:
        """max_i sum_j |C_ij| s_j, where s_j is the standard deviation of the noise of step j.

        The size of what has to cancel for a step's own normals to be left; infinite where the noise
        exceeds float64.
        """
        try:
            deviations = self.inverse_row_norms()
        except ValueError:
            return math.inf
        return float(np.max(self.weighed(deviations)))

    def weighed(self, values: np.ndarray) -> np.ndarray:
        """float64 [n]: |C| times the values [n]."""
        return np.asarray(np.abs(self.matrix()) @ values)


class ToeplitzStrategy(Strategy):
    """A strategy whose C is Toeplitz: C[i, j] = c_(i-j)."""

    @abstractmethod
    def first_column(self) -> np.ndarray:
        """float64 [n]: c, the first column of C."""

    @abstractmethod
    def first_inverse_column(self) -> np.ndarray:
        """float64 [n]: the first column of C^-1, which is Toeplitz as well.

        Raises:
            ValueError: when it exceeds float64 within n steps.
        """

    @abstractmethod
    def column_bound(self) -> np.ndarray:
        """float64 [n]: at least the absolute value of the first column, rounding included."""

    @property
    @abstractmethod
    def non_negative(self) -> bool:
        """True where all of C is proven to be at least 0."""

    @property
    @abstractmethod
    def non_increasing(self) -> bool:
        """True where c is proven to be non-negative and nowhere to increase."""

    def matrix(self) -> np.ndarray:
        """float64 [n, n]: C."""
        return _columns(self.first_column(), 0, self.steps)

    def column_norms(self) -> np.ndarray:
        """float64 [n]: the l2 norm of every column of C; the first is the largest."""
        return np.asarray(np.sqrt(np.cumsum(np.square(self.first_column())))[::-1])

    def weighed(self, values: np.ndarray) -> np.ndarray:
        """float64 [n]: |C| times the values [n]."""
        from scipy import signal

        column = np.abs(self.first_column())[: self.bands]
        return np.asarray(signal.oaconvolve(column, values)[: self.steps])

    def inverse_columns(self, start: int, stop: int) -> np.ndarray:
        """float64 [n, stop - start]: these columns of C^-1."""
        return _columns(self.first_inverse_column(), start, stop)

    def inverse_row_norms(self) -> np.ndarray:
        """float64 [n]: the standard deviation of the correlated noise of each step, for unit Z."""
        return np.asarray(np.sqrt(np.cumsum(np.square(self.first_inverse_column()))))

    def to_dict(self) -> dict[str, Any]:
        """The strategy in plain JSON types; ``from_dict`` gives an equal strategy back."""
        fields = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        return {"type": type(self).__name__, **fields}


def check_steps(strategy: Strategy) -> None:
    """Puts the number of steps in place as an int; ValueError where it is none."""
    steps = arguments.integer("steps", strategy.steps, least=1)
    object.__setattr__(strategy, "steps", steps)


def _columns(first: np.ndarray, start: int, stop: int) -> np.ndarray:
    """float64 [n, stop - start]: columns of the lower-triangular Toeplitz matrix."""
    padded = np.concatenate([np.zeros(len(first) - 1), first])
    windows = np.lib.stride_tricks.sliding_window_view(padded, len(first))
    return np.array(windows[::-1][start:stop].T, order="C")
