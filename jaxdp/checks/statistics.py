"""Tells whether an array is made of private records: some of them, or a statistic of them."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxdp.checks import directions

_PREFIXES, _CLASSES = 1_024, 1_000
_SMALL = 2**22  # numbers up to which costly statistics are computed
_QUANTILES = (0.01, 0.02, 0.05, 0.1, 0.25, 0.75, 0.9, 0.95, 0.98, 0.99)
_FEW = 20  # classes of which every pair is compared


def equal_to(value: np.ndarray, columns: Sequence[np.ndarray]) -> tuple[str, bool]:
    """(what of the records the array is, True if that can be no chance), or ("", False).

    Args:
        value: any array.
        columns: the records, one array [n, ...] for every leaf.
    """
    if value.size == 0 or value.dtype.kind not in "fiu":
        return "", False
    for column in columns:
        if column.dtype.kind not in "fiu" or not len(column):
            continue
        if value.size == 1:
            words = _scalar(float(value.ravel()[0]), column)
            if words:
                return words, False
            continue
        if words := _rows(value, column) or _moments(value, column):
            return words, is_telling(value)
        small = column.size <= _SMALL and is_telling(value)
        if small and (words := directions.of_records(value, column)):
            return words, True
    words = _by_class(value, columns) if value.ndim else ""
    return words, bool(words) and is_telling(value)


def _by_class(value: np.ndarray, columns: Sequence[np.ndarray]) -> str:
    """Words for frequencies of labels, weights that balance them, and means of each class."""
    for labels in (c for c in columns if c.ndim == 1 and c.dtype.kind in "iu"):
        if value.shape[0] > _CLASSES or int(labels.min()) < 0 or labels.max() >= value.shape[0]:
            continue
        counts = np.bincount(labels, minlength=value.shape[0])
        share = counts / len(labels)
        weights = 1 / np.maximum(share, 1e-12)
        for found in (share, np.log(np.maximum(share, 1e-12)), weights, weights / len(counts)):
            if value.shape == found.shape and np.ptp(found) > 0 and _close(value, found):
                return "the frequencies of the records' labels, or weights made of them"
        for column in columns:
            if value.shape[1:] == column.shape[1:] and column.ndim > 1 and column.size <= _SMALL:
                sums = np.zeros(value.shape)
                np.add.at(sums, labels, column)
                if _close(value, sums / np.maximum(counts, 1).reshape(-1, *[1] * (value.ndim - 1))):
                    return "the records' means by class"
    return ""


def _close(value: np.ndarray, found: np.ndarray) -> bool:
    size = float(np.max(np.abs(found), initial=0.0))
    return bool(np.allclose(value, found, rtol=1e-4, atol=1e-5 * size))


def is_telling(value: np.ndarray) -> bool:
    """True for numbers that nobody writes down by chance: no grids, no zeros, no small integers."""
    flat = value.ravel().astype(np.float64)
    distinct = np.unique(flat)
    if value.dtype.kind != "f" or np.all(flat == np.round(flat)):
        steps = np.unique(np.diff(flat))
        return value.size >= 16 and len(distinct) >= 5 and len(steps) > 1
    grid = np.diff(flat)
    uneven = len(distinct) >= 3 and not np.allclose(grid, grid[0], rtol=1e-3)
    scaled = flat * 1_000
    return bool(uneven and np.any(np.abs(scaled - np.round(scaled)) > 1e-2))


def _rows(value: np.ndarray, column: np.ndarray) -> str:
    """Words for an array that is one record, or several."""
    one = value.shape == column.shape[1:]
    if not one and (value.shape[1:] != column.shape[1:] or column.ndim < 2):
        return ""
    wanted = (value[None] if one else value).astype(column.dtype)
    # The first alone: where it is no record, the array is none.
    flat = column.reshape(len(column), -1)
    if not np.any(np.all(flat == wanted[0].ravel(), axis=1)):
        return ""
    known = {row.tobytes() for row in flat}
    if not all(row.ravel().tobytes() in known for row in wanted):
        return ""
    return "one of the records" if one else f"{len(wanted)} of the records"


def _moments(value: np.ndarray, column: np.ndarray) -> str:
    if column.dtype.kind != "f" and value.dtype.kind != "f":
        return ""
    if not np.any(value != value.ravel()[0]):
        return ""
    if column.size > _SMALL and not _may_be(value, column):
        return ""
    for words, found in _statistics(column, value.shape):
        if found.shape == value.shape and _close(value, found):
            return words
    return ""


def _may_be(value: np.ndarray, column: np.ndarray) -> bool:
    """False for an array far from all statistics of a sample: no pass over large data then."""
    x = column[:: max(1, len(column) // _PREFIXES)].astype(np.float64)
    by_channel = x.ndim > 2 and value.shape == x.shape[-1:]
    if not by_channel and value.shape != x.shape[1:]:
        return False
    axes = tuple(range(x.ndim - 1)) if by_channel else 0
    mean, std = x.mean(axes), x.std(axes)
    near = [
        np.abs(value - mean) <= std,
        np.abs(value - std) <= std,
        np.abs(value - std**2) <= std**2,
    ]
    return any(np.all(each) for each in [*near, value <= x.min(axes), value >= x.max(axes)])


def _statistics(x: np.ndarray, shape: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """Statistics of the records that have this shape, in float64; no copies of large data."""
    if shape == x.shape[1:]:
        yield "the records' mean", x.mean(0, dtype=np.float64)
        std = x.std(0, dtype=np.float64)
        yield "the records' standard deviation", std
        yield "the records' variance", std**2
        yield "the records' standard deviation", std * np.sqrt(len(x) / max(1, len(x) - 1))
        yield "the records' minimum", x.min(0)
        yield "the records' maximum", x.max(0)
    if x.ndim > 2 and shape == x.shape[-1:]:
        rest = tuple(range(x.ndim - 1))
        yield "the records' mean by channel", x.mean(rest, dtype=np.float64)
        yield "the records' standard deviation by channel", x.std(rest, dtype=np.float64)
    if x.size > _SMALL:
        return
    if shape == x.shape[1:]:
        yield "the records' median", np.median(x, axis=0)
        for level, found in zip(_QUANTILES, np.quantile(x, _QUANTILES, axis=0), strict=True):
            yield f"the records' quantile of {level:g}", found
        counts = np.arange(1, len(x) + 1).reshape(-1, *[1] * (x.ndim - 1))
        means = np.cumsum(x, axis=0, dtype=np.float64) / counts
        yield from (("the mean of the first records", row) for row in means[1:_PREFIXES])
    if x.ndim == 2 and shape == (x.shape[1],) * 2 and len(x) > 1:
        yield "the records' covariance", np.cov(x.astype(np.float64), rowvar=False)
        yield "the records' second moments", x.T.astype(np.float64) @ x / len(x)


def _scalar(value: float, column: np.ndarray) -> str:
    """Words for a number that agrees to six digits with a statistic of all numbers."""
    scaled = value * 10_000
    if column.size > _SMALL or not np.isfinite(value):
        return ""
    if abs(scaled - round(scaled)) < 1e-2:
        return ""
    known = _of_numbers(column) if column.ndim > 1 else _of_labels(column)
    for words, found in known:
        if abs(value - found) <= 2e-6 * abs(found):
            return f"{words}, {value:.7g}"
    return ""


def _of_numbers(column: np.ndarray) -> Iterator[tuple[str, float]]:
    flat = column.reshape(len(column), -1)
    squares = np.einsum("ij,ij->i", flat, flat, dtype=np.float64)
    yield "the records' mean", float(column.mean(dtype=np.float64))
    yield "the records' standard deviation", float(column.std(dtype=np.float64))
    yield "the records' largest number", float(column.max())
    yield "the records' smallest number", float(column.min())
    yield "the largest norm of a record", float(np.sqrt(squares.max()))
    yield "the records' median norm", float(np.median(np.sqrt(squares)))
    for level, found in zip(_QUANTILES, np.quantile(flat, _QUANTILES), strict=True):
        yield f"the records' quantile of {level:g}", float(found)


def _of_labels(column: np.ndarray) -> Iterator[tuple[str, float]]:
    """Shares of classes, weights that balance them, and ratios of two classes."""
    counts = np.unique(column, return_counts=True)[1]
    if not 2 <= len(counts) <= _FEW:
        return
    share = counts / len(column)
    for found in (*share, *(1 / share), *(1 / share / len(counts))):
        yield "a share of a class among the records, or a weight made of it", float(found)
    for found in np.divide.outer(counts, counts).ravel():
        yield "the ratio of two classes among the records", float(found)
