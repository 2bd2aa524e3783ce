"""Tells whether a matrix was fitted to records: principal directions, projections, whitening."""

import functools
from collections.abc import Iterator, Sequence

import numpy as np

WIDEST = 1_024  # numbers of a record up to which moments are computed
_CLOSE = 1e-3  # of the norm; float32 leaves about 1e-5
_APART = 1e-6  # of the largest eigenvalue: the distance of one that stands alone


def of_records(value: np.ndarray, width: int, moments: Sequence[np.ndarray]) -> str:
    """Words for a matrix that the records' covariance or second moments explain; "" for others.

    A matrix that was chosen without the records has none of these relations to their moments,
    unless these are alike in all directions: balanced one-hot records have any orthogonal matrix
    for principal directions. Of such records nothing is said.

    Args:
        value: [a, b].
        width: numbers of a record, d.
        moments: the records' covariance and second moments, float64 [d, d].
    """
    if width < 3 or width not in value.shape or value.dtype.kind != "f":
        return ""
    for each in moments:
        for rows in _as_rows(value.astype(np.float64), width):
            if _may_be(rows, each) and (words := _words(rows, each)) and _of_their_own(each):
                return words
    return ""


def _as_rows(value: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """The matrix as directions [k, width], k at most width: both ways where it is square."""
    if value.shape[1] == width and value.shape[0] <= width:
        yield value
    if value.shape[0] == width and value.shape[1] <= width:
        yield value.T


def _may_be(rows: np.ndarray, moments: np.ndarray) -> bool:
    """False for most matrices of which nothing is said: two directions are tried, which is cheap.

    Where two matrices are near, so are their products with a random direction.
    """
    count, width = rows.shape
    one, two = np.random.default_rng(0).normal(size=(2, count))
    near = functools.partial(_near, close=10 * _CLOSE)
    if near(rows @ (moments @ (rows.T @ one)), one):
        return True
    if count == width and near(rows @ (rows @ one), rows @ one):
        return True
    if not near(rows @ (rows.T @ one), one):
        return False
    if count < width:
        seen = moments @ (rows.T @ one)
        return near(rows.T @ (rows @ seen), seen)
    # Of eigenvectors each is stretched alike in every direction.
    one, two = (rows.T @ each for each in (one, two))
    return near(rows @ (moments @ one) * (rows @ two), rows @ (moments @ two) * (rows @ one))


def _words(rows: np.ndarray, moments: np.ndarray) -> str:
    count, width = rows.shape
    seen = rows @ moments
    if np.linalg.norm(seen) <= 1e-9 * np.linalg.norm(moments) * np.linalg.norm(rows):
        return ""
    alike = np.trace(moments) / width * np.eye(width)
    squares = rows @ rows.T
    if count >= 3 and _near(seen @ rows.T, np.eye(count)):
        # Of records alike in all directions any rotation is one.
        rotated = _near(squares, np.trace(squares) / count * np.eye(count))
        return "" if rotated else "a whitening of the records"
    # What lies in all directions alike fixes none.
    moments = moments - alike
    seen = rows @ moments
    if _near(squares, np.eye(count)):
        small = seen @ rows.T
        if count == width:
            return "the records' principal directions" if _near(small, _diagonal(small)) else ""
        return "principal directions of the records" if _near(seen, small @ rows) else ""
    if count == width and _near(rows, rows.T) and _near(rows @ rows, rows):
        fitted = _near(seen, moments @ rows)
        return "a projection on principal directions of the records" if fitted else ""
    return ""


def _of_their_own(moments: np.ndarray) -> bool:
    """True if a direction is fixed by the moments: its eigenvalue is not 0, and of no other."""
    values = np.linalg.eigvalsh(moments)
    least = _APART * values[-1]
    gaps = np.diff(values, prepend=-np.inf, append=np.inf)
    return bool(((values > least) & (gaps[1:] > least) & (gaps[:-1] > least)).any())


def _diagonal(matrix: np.ndarray) -> np.ndarray:
    return np.diag(np.diag(matrix))


def _near(one: np.ndarray, two: np.ndarray, close: float = _CLOSE) -> bool:
    return bool(np.linalg.norm(one - two) <= close * np.linalg.norm(two))
