"""A strategy of n (n + 1) / 2 numbers of its own."""

import base64
import dataclasses
from functools import cached_property
from typing import Any

import numpy as np

from jaxdp.noise import _series
from jaxdp.noise.strategy import Strategy, check_steps


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
        check_steps(self)
        if isinstance(self.entries, str):
            object.__setattr__(self, "entries", base64.b64decode(self.entries, validate=True))
        if not isinstance(self.entries, bytes):
            raise ValueError(f"entries must be bytes, got a {type(self.entries).__name__}")
        if len(self.entries) != 2 * self.steps * (self.steps + 1):
            raise ValueError(
                f"entries must be {2 * self.steps * (self.steps + 1)} bytes for steps="
                f"{self.steps}, got {len(self.entries)}"
            )
        numbers = _series.rounded("entries", np.frombuffer(self.entries, "<f4"))
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
        lower = _series.rounded("matrix", matrix[np.tril_indices(len(matrix))])
        return cls(lower.astype("<f4").tobytes(), len(matrix))

    def __repr__(self) -> str:
        found = _series.digest(self.entries)
        return f"Dense(steps={self.steps}, bands={self.bands}, entries=<blake2b {found}>)"

    @cached_property
    def bands(self) -> int:
        """The number of bands: the smallest with C[i, j] = 0 for i - j >= bands."""
        rows, columns = np.nonzero(self.matrix())
        return int((rows - columns).max()) + 1

    def matrix(self) -> np.ndarray:
        """float64 [n, n]: C, exactly."""
        matrix = np.zeros((self.steps, self.steps))
        matrix[np.tril_indices(self.steps)] = np.frombuffer(self.entries, "<f4")
        return matrix

    def column_norms(self) -> np.ndarray:
        """float64 [n]: the l2 norm of every column of C."""
        return np.asarray(np.sqrt(np.square(self.matrix()).sum(axis=0)))

    def inverse_columns(self, start: int, stop: int) -> np.ndarray:
        """float64 [n, stop - start]: these columns of C^-1."""
        from scipy import linalg

        unit = np.eye(self.steps)[:, start:stop]
        return np.asarray(linalg.solve_triangular(self.matrix(), unit, lower=True))

    def to_dict(self) -> dict[str, Any]:
        """The strategy in plain JSON types, its entries in base64; ``from_dict`` undoes it."""
        entries = base64.b64encode(self.entries).decode("ascii")
        return {"type": "Dense", "entries": entries, "steps": self.steps}
