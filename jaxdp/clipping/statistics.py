"""Tells whether an array was computed from private records: rows of them, or a statistic.

One function, ``made_of``, is asked of every array that enters a loss: what the loss captured, and
the first values of its parameters, frozen or trained. It compares values, so that a coincidence of
lengths says nothing. What is the same for all records (zeros, a position encoding), what anybody
writes down (ones, grids, a few digits) and rows that many records share are nobody's.

A leaf of more than 2^22 numbers is compared at some of its columns, a public choice, in all of its
rows; statistics of channels and of all numbers are computed where the array is like those of a
sample of its rows.

**Not seen**: what was fitted to records in another way than by these statistics (the weights of a
network), statistics of some of the records or of some of their columns, by position of a sequence,
or of more than one leaf, but for leaves that are single numbers; a statistic that is one of more
than 8 rows of an array; sums of fewer than 8 columns; one number of each record (labels), and
products of records; sums of several arrays, and whatever was rounded to five digits. Of a leaf of
more than 2^22 numbers: quantiles, norms, covariances and principal directions. Of one of more than
2^23 rows: rows outside a sample of them, and statistics. Of one of more than 2^28 numbers:
statistics of channels and of all numbers.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.clipping import directions

_SMALL = 2**22  # numbers of a leaf, or of a sample, that are looked at in every way
_LARGE = 2**26  # numbers of the columns that are kept of a larger one
_WHOLE = 2**28  # numbers that are passed over where an array is like the statistic of a sample
_CHUNK = 2**17  # numbers that are converted at a time
_PREFIXES, _CLASSES, _FEW = 1_024, 1_000, 20
_WIDE = 8  # numbers from which on arrays are compared up to a scale and a shift
_CLOSE = 3e-4  # relative
_EXACT = 3e-6
_QUANTILES = (0.01, 0.02, 0.05, 0.1, 0.25, 0.75, 0.9, 0.95, 0.98, 0.99)
_Scalings = tuple[tuple[float, float], ...]  # (scale, shift) of each
_PLAIN = ((1.0, 0.0), (-1.0, 0.0))
_TABLE = (
    "an array with an entry for each of the records, which hold its number (where it was made of "
    "them, make the entry a leaf of its record)"
)
_SHARES = "the frequencies of the records' labels, or weights made of them"


class Made(NamedTuple):
    """An answer: the rows or the statistic of the records that an array is.

    Attributes:
        words: it, without a private value.
        certain: True if it can be no chance.
    """

    words: str
    certain: bool


def made_of(value: Any, records: "KnownRecords") -> Made | None:
    """Returns the rows or the statistic of the records that an array is; None for any other.

    Looked for are records among its rows or columns (three are enough), statistics of columns, of
    channels and of all numbers, means of classes and of the first records, frequencies of classes
    and weights made of them, covariances, principal directions, projections and whitening.

    Args:
        value: any array.
        records: the records.
    """
    if not _fits(np.shape(value), records):
        return None
    value, digits = _numbers(np.asarray(jax.device_get(value)))
    if value is None or not np.isfinite(value).any():
        return None
    with np.errstate(all="ignore"):
        if value.size == 1:
            return _likeliest(_of_number(float(value.ravel()[0]), records))
        if np.all(value == value.ravel()[0]):
            return None
        return _likeliest(_of_array(value, digits, records))


def _fits(shape: tuple[int, ...], records: "KnownRecords") -> bool:
    """False for a large array of a shape that nothing of the records has: it is not read."""
    size = math.prod(shape)
    if size <= _CHUNK or size == max(shape) or shape[0] == records.count:
        return True
    return any(
        leaf.width in (size, shape[0], shape[-1])
        or leaf.shape in (shape[: len(leaf.shape)], shape[-len(leaf.shape) :])
        for leaf in records.leaves
    )


def _likeliest(found: Iterable[Made]) -> Made | None:
    """The first that is certain, else the first."""
    kept = None
    for made in found:
        if made.certain:
            return made
        kept = kept or made
    return kept


def _plain(rows: np.ndarray) -> np.ndarray:
    """Rows in numbers that NumPy computes with."""
    plain: np.ndarray = rows.astype(np.float32) if rows.dtype.kind not in "fiu" else rows
    return plain


def _numbers(value: np.ndarray) -> tuple[np.ndarray | None, np.dtype | None]:
    """The array in numbers that NumPy computes with, and its dtype where that has few digits."""
    kind, name = value.dtype.kind, value.dtype.name
    if value.size == 0:
        return None, None
    if name in ("float16", "bfloat16"):
        return value.astype(np.float32), value.dtype
    if kind == "b":
        return value.astype(np.uint8), None
    return (value, None) if kind in "fiu" else (None, None)


def _of_array(
    value: np.ndarray, digits: np.dtype | None, records: "KnownRecords"
) -> Iterator[Made]:
    for leaf in records.leaves:
        yield from _rows(value, digits, leaf, records.labels)
        yield from _channels(value, digits, leaf)
        if leaf.is_small:
            yield from _second_moments(value, leaf)
    for labels in records.labels:
        yield from _frequencies(value, labels)
    if records.number(value.shape[0]):
        yield Made(_TABLE, False)


def _second_moments(value: np.ndarray, leaf: "_Leaf") -> Iterator[Made]:
    """Covariances, and matrices that were fitted to them."""
    if leaf.width not in value.shape or value.ndim != 2 or not np.isfinite(value).all():
        return
    found = []
    if value.shape == (leaf.width, leaf.width):
        flat, words = value.ravel().astype(np.float64), ("covariance", "second moments")
        named = zip(words, leaf.scatter, strict=False)
        found = [f"the records' {words}" for words, each in named if _agree(flat, each.ravel())]
    found.append(directions.of_records(value, leaf.width, leaf.scatter))
    if any(found) and is_telling(value):
        yield from (Made(words, True) for words in found if words)


# Statistics of columns ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Moments:
    """Moments of every number of a record over all records, or a sample of them.

    Attributes:
        count: int [d], the number of records of which it is finite; gaps count in nothing.
        mean: float64 [d].
        variance: float64 [d], divided by ``count``.
        low: float64 [d], the least.
        high: float64 [d], the largest.
    """

    count: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def over(self, groups: np.ndarray) -> "Moments":
        """Moments over groups of these numbers.

        Args:
            groups: int [groups, k], the places of each.
        """
        count, each = self.count[groups], self.mean[groups]
        share = count / count.sum(1, keepdims=True)
        mean = np.sum(share * each, axis=1, where=count > 0)
        apart = self.variance[groups] + np.square(each - mean[:, None])
        return Moments(
            count.sum(1),
            mean,
            np.sum(share * apart, axis=1, where=count > 0),
            np.fmin.reduce(self.low[groups], axis=1),
            np.fmax.reduce(self.high[groups], axis=1),
        )


def _moments(x: np.ndarray) -> Moments:
    """The moments of the finite numbers of rows [n, d], in float64, converted a part at a time."""
    size = max(1, _CHUNK // x.shape[1])
    count, about, total, squares = np.zeros((4, x.shape[1]))
    low, high = np.full((2, x.shape[1]), np.nan)
    for at in range(0, len(x), size):
        part = x[at : at + size].astype(np.float64)
        known = np.isfinite(part)
        if not known.all():
            part[~known] = np.nan
        low, high = np.fmin(low, np.fmin.reduce(part)), np.fmax(high, np.fmax.reduce(part))
        if at == 0:
            about = np.nan_to_num(low / 2 + high / 2)
        part -= about  # so that squares of numbers far from zero lose no digits
        count += known.sum(0)
        total += part.sum(0, where=known)
        squares += np.square(part, out=part).sum(0, where=known)
    mean = total / count
    return Moments(count, about + mean, np.maximum(squares / count - mean**2, 0), low, high)


_EXTREMES = tuple(f"the records' {w}" for w in ("minimum", "maximum", "range", "inverse range"))


def _table(m: Moments) -> Iterator[tuple[str, np.ndarray]]:
    """**The** statistics of columns; nan for a column that is the same for all records."""
    varies = np.where(m.high > m.low, 1.0, np.nan)
    std, more = np.sqrt(m.variance), m.count / np.maximum(1, m.count - 1)
    yield "the records' mean", m.mean * varies
    for words, found in (
        ("standard deviation", std),
        ("standard deviation", std * np.sqrt(more)),
        ("variance", m.variance),
        ("variance", m.variance * more),
        ("range", m.high - m.low),
        ("root mean square", np.sqrt(m.variance + m.mean**2)),
        ("mean square", m.variance + m.mean**2),
    ):
        yield f"the records' {words}", found * varies
        yield f"the records' inverse {words}", varies / found
    yield "the records' mean in standard deviations", m.mean / std * varies
    yield "the records' minimum", m.low * varies
    yield "the records' maximum", m.high * varies
    if len(m.mean) > 1 and m.low.min() >= 0 and m.high.max() <= 1:
        for words, _, found in _of_shares(m.mean):
            yield words, found * varies


def _of_shares(share: np.ndarray) -> Iterator[tuple[str, bool, np.ndarray]]:
    """(words, True if it is a logarithm, what is made of shares such as those of classes)."""
    odds = share / (1 - share)
    for found in (share, 1 / share, odds, 1 / odds, np.sqrt(share), 1 / np.sqrt(share)):
        yield _SHARES, False, found
    for found in (np.log(share), np.log(odds)):
        yield f"the logarithm of {_SHARES}", True, found


def _columns(
    rows: np.ndarray, single: bool, digits: np.dtype | None, leaf: "_Leaf"
) -> Iterator[Made]:
    """Statistics of the columns of a leaf among rows [m, kept]."""
    m, groups = leaf.moments, np.arange(len(leaf.places))[:, None]
    for flat in rows.astype(np.float64):
        for moments in filter(None, (m, leaf.rounded)):
            yield from _statistics(flat, digits, leaf, leaf.x, moments, groups, "")
        if single and leaf.is_small and np.mean((flat >= m.low) & (flat <= m.high)) > 0.9:
            for words, found in leaf.quantiles:
                if (certain := _agree(flat, found, leaf.scalings, digits)) is not None:
                    times = np.sum(np.abs(leaf.x - found) <= 1e-6 * np.abs(found), axis=0)
                    yield Made(words, certain and bool(np.median(times) <= 3))


def _channels(value: np.ndarray, digits: np.dtype | None, leaf: "_Leaf") -> Iterator[Made]:
    """Statistics of the channels of a leaf."""
    if len(leaf.shape) < 2:
        return
    plain = tuple(size for size in value.shape if size != 1)
    for axis in (-1, 0) if len(leaf.shape) == 3 else (-1,):
        if plain != (leaf.shape[axis],):
            continue
        flat, groups = value.ravel().astype(np.float64), leaf.along(axis)
        over = leaf.sample.over(groups)
        like = any(_like(flat, found, over.variance, leaf.scalings) for _, found in _table(over))
        if like and leaf.whole is not None:
            records = leaf.whole
            yield from _statistics(flat, digits, leaf, leaf.full, records, groups, " by channel")


def _statistics(
    flat: np.ndarray,
    digits: np.dtype | None,
    leaf: "_Leaf",
    x: np.ndarray,
    moments: Moments,
    groups: np.ndarray,
    by: str,
) -> Iterator[Made]:
    """The statistics that an array is, of groups of the numbers of records ``x``."""
    for words, found in _table(moments.over(groups)):
        if (certain := _agree(flat, found, leaf.scalings, digits)) is None:
            continue
        if words in _EXTREMES:  # bounds that many records reach were chosen before them
            certain = certain and is_telling(flat) and not _reached(x, moments, groups, words)
        yield Made(words + by, certain)


def _reached(x: np.ndarray, m: Moments, groups: np.ndarray, words: str) -> bool:
    """True if many records reach this extreme of most columns, or channels."""
    over, low, high = m.over(groups), m.low.copy(), m.high.copy()
    low[groups], high[groups] = over.low[:, None], over.high[:, None]
    times = np.array([(x == low).sum(0), (x == high).sum(0)])
    one = {"the records' minimum": times[0], "the records' maximum": times[1]}
    return bool(np.median(one.get(words, times.min(0))[groups].sum(1)) > 3)


def _like(flat: np.ndarray, found: np.ndarray, variance: np.ndarray, scalings: _Scalings) -> bool:
    """True for an array that may be a statistic of which a sample's is ``found``."""
    known = np.isfinite(found) & np.isfinite(flat)
    flat, found, room = flat[known], found[known], np.sqrt(variance[known])
    if len(found) < 2:
        return False
    if len(found) >= _WIDE and abs(np.corrcoef(flat, found)[0, 1]) > 0.7:
        return True
    room = room + 0.3 * np.abs(found)
    near = [np.abs(flat - a * found - b) <= abs(a) * room for a, b in scalings]
    return any(np.mean(each) > 0.9 for each in near)


def _agree(
    flat: np.ndarray,
    found: np.ndarray,
    scalings: _Scalings = _PLAIN,
    digits: np.dtype | None = None,
) -> bool | None:
    """None where an array is not the statistic; else True if that can be no chance.

    Many numbers are compared up to any scale and shift, few up to the usual ones.

    Args:
        flat: the array [d].
        found: the statistic [d]; what is not finite in either is not compared.
        scalings: the usual scales and shifts of these records.
        digits: a dtype of few digits that the array had.
    """
    known = np.isfinite(found) & np.isfinite(flat)
    flat, found = flat[known], found[known]
    if len(found) < 2 or np.ptp(found) <= 1e-6 * np.max(np.abs(found)):
        return None
    if digits is not None:  # every such number is a rounded one: only many say something
        same = np.mean(found.astype(digits).astype(np.float64) == flat)
        return True if same > 0.9 and len(np.unique(flat)) >= 16 else None
    size = np.max(np.abs(flat))
    errors = [np.abs(flat - scale * found - shift) for scale, shift in scalings]
    fits = [e for e in errors if np.all(e <= _CLOSE * np.abs(flat) + 1e-5 * size)]
    if not fits and len(found) >= _WIDE and (error := _beside(flat, found)) is not None:
        fits = [error]
    if not fits:
        return None
    exact = any(np.all(e <= _EXACT * size) for e in fits)
    return is_telling(flat) or (exact and len(np.unique(flat)) >= 16 and not _is_even(flat))


def _beside(flat: np.ndarray, found: np.ndarray) -> np.ndarray | None:
    """The rest of an array beside its best fit by ``scale * found + shift``, where it is small."""
    apart, around = found - found.mean(), flat - flat.mean()
    error: np.ndarray = np.abs(around - apart * (apart @ around) / (apart @ apart))
    # Of the typical distance between its numbers, not of one that stands far out.
    typical = np.median(np.abs(flat - np.median(flat)))
    close = np.all(error <= _CLOSE * (typical + np.abs(around)))
    return error if close and typical > 0 and len(np.unique(flat)) >= 6 else None


def is_telling(value: np.ndarray) -> bool:
    """True for numbers that nobody writes down by chance: no grids, no zeros, no few digits."""
    flat = value.ravel().astype(np.float64)
    distinct = np.unique(flat[:_SMALL])
    if len(distinct) < 3 or _is_even(flat):
        return False
    if np.all(distinct == np.round(distinct)):
        return flat.size >= 16 and len(distinct) >= 5
    return bool(np.mean(~_rounded(distinct)) >= 0.5)


def _is_even(flat: np.ndarray) -> bool:
    steps = np.diff(flat)
    return bool(np.allclose(steps, steps[0], rtol=1e-3)) if len(steps) else True


def _rounded(numbers: np.ndarray) -> np.ndarray:
    """True for numbers of at most five digits, or three behind the point."""
    size = np.maximum(np.abs(numbers), 1e-30)
    error = np.full(numbers.shape, np.inf)
    for scaled in (numbers * 10 ** (4 - np.floor(np.log10(size))), numbers * 1_000):
        error = np.minimum(error, np.abs(scaled - np.round(scaled)) / np.abs(scaled))
    return (error <= 1e-7) | (numbers == 0)


# Rows -----------------------------------------------------------------------------------------


def _rows(
    value: np.ndarray, digits: np.dtype | None, leaf: "_Leaf", labels: Sequence["_Labels"]
) -> Iterator[Made]:
    """Records and their statistics among the rows or columns of an array."""
    for rows in _as_rows(value, leaf):
        if leaf.width == 1:
            yield from _numbers_of(rows[:, 0], leaf)
            continue
        rows, single = rows[:, leaf.places], len(rows) == 1
        if not (single and leaf.width < 4):
            found = leaf.marks.found(rows)
            least = min(3, len(rows))
            if found.any() and (single or found.sum() >= least):
                words = f"{'one' if single else 'several'} of the records"
                told = sum(_is_telling_row(row) for row in rows[found][:_PREFIXES])
                yield Made(words, told >= least)
        if single:
            flat = rows[0].astype(np.float64)
            for mean in leaf.prefixes[_near(flat, leaf.prefixes)]:
                if (certain := _agree(flat, mean * leaf.varies, leaf.scalings)) is not None:
                    yield Made("the mean of the first records", certain)
        if len(rows) <= _WIDE:  # such as a mean beside a deviation
            yield from _columns(rows, single, digits, leaf)
        for each in labels:
            yield from _class_means(rows, leaf, each)


def _near(flat: np.ndarray, means: np.ndarray) -> np.ndarray:
    """bool [k]: means [k, d] that an array may be, up to a scale and a shift."""
    if len(flat) < _WIDE:
        size = np.max(np.abs(means), axis=1)
        near: np.ndarray = np.max(np.abs(means - flat), axis=1) <= 1e-3 * size
        return near
    cosines = _normalised(means) @ _normalised(flat[None])[0] / len(flat)
    near = np.abs(cosines) > 0.999
    return near


def _as_rows(value: np.ndarray, leaf: "_Leaf") -> Iterator[np.ndarray]:
    """The array as rows [m, d], d numbers of a record, in each way that its shape allows."""
    shape, width = value.shape, leaf.width
    if width == 1:
        if max(shape) == value.size:
            yield value.reshape(-1, 1)
        return
    inner = len(leaf.shape)
    if value.size == width:
        yield value.reshape(1, width)
        return
    most = max(1, -(-value.size // _LARGE))
    if shape[-1] == width or shape[-inner:] == leaf.shape:
        yield value.reshape(-1, width)[::most]
    if shape[0] == width or shape[:inner] == leaf.shape:
        yield value.reshape(width, -1).T[::most]


def _numbers_of(flat: np.ndarray, leaf: "_Leaf") -> Iterator[Made]:
    """Records that are single numbers: most entries must be some, for one is found by chance."""
    if len(flat) < 8 or leaf.x.dtype.kind != "f" or not is_telling(flat):
        return
    known = np.isin(flat.astype(np.float32), leaf.x[:, 0].astype(np.float32))
    if np.mean(known) > 0.5:
        yield Made("numbers that are records", True)


class _Marks:
    """Two numbers of every row, by which equal rows are found, up to a scale and a shift.

    Rows of few numbers are compared as they are.
    """

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.wide = x, x.shape[1] >= _WIDE
        rng = np.random.default_rng(0)
        weights = rng.normal(size=(x.shape[1], 2))
        self.weights = weights - weights.mean(0) if self.wide else weights
        marks = self._of(x)
        self.order = np.argsort(marks[:, 0], kind="stable")
        self.marks = marks[self.order]

    def _of(self, rows: np.ndarray) -> np.ndarray:
        size = max(1, _CHUNK // rows.shape[1])
        parts = [self._of_part(rows[at : at + size]) for at in range(0, len(rows), size)]
        return np.concatenate(parts)

    def _of_part(self, rows: np.ndarray) -> np.ndarray:
        rows = rows.astype(np.float64)
        marks: np.ndarray = rows @ self.weights
        if self.wide:
            squares = np.einsum("ij,ij->i", rows, rows) - rows.sum(1) ** 2 / rows.shape[1]
            marks *= (np.sign(marks[:, 0]) / np.sqrt(squares))[:, None]
        marks[~np.isfinite(marks).all(1)] = np.nan
        return marks

    def found(self, rows: np.ndarray) -> np.ndarray:
        """bool [m]: rows that are records, but for those that many records share."""
        marks = self._of(rows)
        near = np.full(len(rows), 1e-4)
        if not self.wide:
            near = 1e-6 * (np.abs(rows.astype(np.float64)) @ np.abs(self.weights)).sum(1)
        first = np.searchsorted(self.marks[:, 0], marks[:, 0] - near)
        last = np.searchsorted(self.marks[:, 0], marks[:, 0] + near)
        count = np.where(np.isfinite(marks[:, 0]), last - first, 0)
        whose = np.repeat(np.arange(len(rows)), count)
        start = np.repeat(first - np.cumsum(count) + count, count)
        places = start + np.arange(len(whose))
        error = np.abs(self.marks[places, 1] - marks[whose, 1])
        close = error <= near[whose]
        whose, places = whose[close], places[close]
        same = np.zeros(len(whose), bool)
        size = max(1, _CHUNK // rows.shape[1])
        for at in range(0, len(whose), size):
            cut = slice(at, at + size)
            same[cut] = self._equal(rows[whose[cut]], self.x[self.order[places[cut]]])
        times = np.bincount(whose[same], minlength=len(rows))
        shared = (times > max(_FEW, len(self.x) // 1_000)) | (times >= max(2, len(self.x) / 2))
        found: np.ndarray = (times > 0) & ~shared
        return found

    def _equal(self, rows: np.ndarray, records: np.ndarray) -> np.ndarray:
        rows, records = rows.astype(np.float64), records.astype(np.float64)
        if self.wide:
            rows, records = _normalised(rows), _normalised(records)
        size = np.max(np.abs(records), axis=1, keepdims=True)
        least = 1e-5 if self.wide else 1e-6
        equal: np.ndarray = np.all(np.abs(rows - records) <= least * size, axis=1)
        if self.wide:
            equal |= np.all(np.abs(rows + records) <= least * size, axis=1)
        return equal


def _normalised(rows: np.ndarray) -> np.ndarray:
    apart = rows - rows.mean(1, keepdims=True)
    normalised: np.ndarray = apart / np.sqrt(np.mean(apart**2, axis=1, keepdims=True))
    return normalised


def _is_telling_row(row: np.ndarray) -> bool:
    """True for a row that is no pattern: many digits, or a long and uneven one of few numbers."""
    row = row.astype(np.float64)
    levels, places = len(np.unique(row)), np.flatnonzero(np.diff(row))
    if levels < 2 or (len(row) > 2 and _is_even(row)):
        return False
    if np.mean(~_rounded(np.unique(row))) >= 0.5:
        return levels >= (5 if len(row) >= _WIDE else min(3, len(row)))
    if levels < 5:  # such as black and white: neither bars, nor waves, nor single points
        return len(places) >= 12 and len(np.unique(np.diff(places))) >= 4
    return len(row) >= 16 and len(places) >= 12


def _class_means(rows: np.ndarray, leaf: "_Leaf", labels: "_Labels") -> Iterator[Made]:
    """Means of records by class: all of them in their order, or one."""
    there = np.flatnonzero(labels.counts)
    if len(rows) not in (1, len(there), len(labels.counts)):
        return
    rows = rows.astype(np.float64)

    def pairs(means: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if len(rows) == 1:
            return ((rows[0], mean) for mean in means[there])
        places = there if len(rows) == len(means) else range(len(there))
        return zip(rows[places], means[there], strict=True)

    means = leaf.class_means(labels)
    found = [c for r, m in pairs(means) if (c := _agree(r, m, leaf.scalings)) is not None]
    least = min(3, len(rows))
    if len(found) >= least:
        yield Made("the records' means by class", sum(found) >= least)


# Classes and single numbers -------------------------------------------------------------------


def _frequencies(value: np.ndarray, labels: "_Labels") -> Iterator[Made]:
    """Frequencies of classes and weights made of them, up to a factor; logarithms, up to a sum."""
    there = np.flatnonzero(labels.counts)
    if value.size != max(value.shape) or not 2 <= len(there) <= value.size <= _CLASSES:
        return
    if value.size < len(labels.counts):
        return
    if value.size > len(labels.counts) and len(there) < 0.9 * value.size:
        return  # more entries than classes are classes without records, but for a few
    flat, share = value.ravel()[there].astype(np.float64), labels.share[there]
    if np.ptp(flat) == 0 or np.ptp(share) == 0:
        return
    whole = np.all(flat == np.round(flat))
    plain = np.abs(flat).max() < 100 if whole else np.all(_rounded(flat))
    for words, is_log, found in _of_shares(share):
        apart = flat - found if is_log else flat / found
        room = _EXACT * np.abs(apart).max()
        if is_log:
            room = max(_EXACT * np.ptp(found), 2e-7 * np.abs(flat).max())
        if np.ptp(apart) <= room:
            yield Made(words, not (labels.are_round.all() or plain))


def _of_number(value: float, records: "KnownRecords") -> Iterator[Made]:
    """Statistics that are one number: certain if it is a class ratio, a mean or a deviation."""
    if not np.isfinite(value) or _is_common(value):
        return
    for labels in records.labels:
        yield from _of_class(value, labels)
    for leaf in records.leaves:
        if any(labels.leaf is leaf and len(labels.share) == 2 for labels in records.labels):
            continue
        every = np.arange(leaf.width)[None]

        def near(moments: Moments, share: float, leaf: _Leaf = leaf) -> list[str]:
            return [
                words
                for words, found in _table(moments)
                for a, b in leaf.scalings
                if np.all(np.abs(value - a * found - b) <= share * abs(value))
            ]

        if leaf.width > 1 < records.count and near(leaf.each, 5e-6):
            continue  # a record alone says it, such as one of length 1
        if near(leaf.sample.over(every), 0.05) and leaf.whole is not None:
            for words in near(leaf.whole.over(every), 2e-6):
                if words not in _EXTREMES:  # numbers are clipped at pi and other public bounds
                    yield Made(words, True)
        for words, one in leaf.single_numbers if leaf.is_small else ():
            if abs(value - one) <= 2e-6 * abs(one):
                yield Made(words, False)


def _of_class(value: float, labels: "_Labels") -> Iterator[Made]:
    share, told = labels.share[labels.counts > 0], ~labels.are_round
    if not 2 <= len(share) <= _FEW:
        return
    made = np.array([found for *_, found in _of_shares(share)])
    made = np.concatenate([made, -made, [1 / share / len(share)]])
    ratios = np.divide.outer(share, share)
    if np.any(np.abs(value - ratios) <= 5e-7 * abs(value)):
        yield Made(
            "the ratio of two classes among the records", len(share) == 2 and bool(told.all())
        )
    if (same := np.any(np.abs(value - made) <= 5e-7 * max(1.0, abs(value)), axis=0)).any():
        words = "a share of a class among the records, or a weight or a logarithm made of it"
        yield Made(words, bool(told[same].any()))


def _is_common(value: float) -> bool:
    """True for numbers that any program may have: few digits, 1/k, √k, log k, and some of π, e."""
    size = np.float64(abs(value))
    if _rounded(np.array(size)):
        return True
    room, few = 1.5e-7, np.arange(1, 13)

    def is_whole(number: Any, room: float, most: float) -> bool:
        near = np.abs(number - np.round(number)) <= room * np.abs(number)
        return bool(np.any(near & (np.round(number) >= 1) & (number < most + 0.5)))

    # (a function of the number, how much larger than the number's its relative error is)
    logarithms = ((np.exp(size), size), (np.exp(1 / size), 1 / size))
    plain = ((size, 1), (1 / size, 1), (size**2, 2), (1 / size**2, 2), *logarithms)
    if any(is_whole(number, room * more, 10_000) for number, more in plain):
        return True
    twice = (np.exp(2 * size), 2 * size)  # log(2π)/2
    bases = (1, np.pi, np.e)
    tried = ((n / base, more) for n, more in (*plain, twice) for base in bases)
    return any(is_whole(number * few, room * more, 12) for number, more in tried)


# The records ----------------------------------------------------------------------------------


class KnownRecords:
    """The records that arrays are compared with; what is computed of them is computed once.

    Args:
        columns: one array [n, ...] for every leaf of the records.

    Attributes:
        count: n.
    """

    def __init__(self, columns: Sequence[Any]) -> None:
        known = [np.asarray(jax.device_get(column)) for column in columns]
        self.count = len(known[0]) if known else 0
        known = [x for x in known if x.size and _numbers(x[:1])[0] is not None]
        single = [x.reshape(-1, 1) for x in known if x.size == len(x)]
        floats = [x for x in single if _plain(x[:1]).dtype.kind == "f"]
        for columns in (floats, single[len(single) * (len(floats) == len(single)) :]):
            # A table whose columns are leaves.
            if len(columns) > 2 and self.count * len(columns) <= _LARGE:
                known.append(np.concatenate([_plain(x) for x in columns], axis=1))
        self.leaves = [_Leaf(x) for x in known]

    def number(self, rows: int) -> bool:
        """True if they are many and a leaf numbers them, so that each names one of ``rows``."""
        return rows == self.count >= 16 and self._are_numbered

    @functools.cached_property
    def _are_numbered(self) -> bool:
        columns = [leaf.full[:, 0] for leaf in self.leaves if leaf.width == 1]
        whole = [column for column in columns if column.dtype.kind in "iu"]
        return any(np.array_equal(np.sort(column), np.arange(self.count)) for column in whole)

    @functools.cached_property
    def labels(self) -> list["_Labels"]:
        """The leaves that name classes."""
        return [labels for leaf in self.leaves if (labels := leaf.labels()) is not None]


class _Labels:
    """Classes of the records.

    Attributes:
        leaf: the records' leaf that names them.
        codes: int [n].
        counts: how many records each class has.
        share: of the records.
    """

    def __init__(self, leaf: "_Leaf", codes: np.ndarray) -> None:
        self.leaf, self.codes, self.counts = leaf, codes, np.bincount(codes)
        self.share = self.counts / len(codes)

    @functools.cached_property
    def are_round(self) -> np.ndarray:
        """bool, of the classes with records: shares that anybody writes down, such as 0.9, 1/3."""
        scaled = self.share[self.counts > 0, None] * np.array([100, *range(1, 13)])
        round_: np.ndarray = np.any(np.abs(scaled - np.round(scaled)) < 1e-9, axis=1)
        return round_


class _Leaf:
    """One leaf of the records, and the columns of it that arrays are compared with.

    Attributes:
        shape: of one record.
        full: all of it, [n, d].
        width: d.
        is_small: True if all its columns are kept.
    """

    def __init__(self, records: np.ndarray) -> None:
        self.shape, self.full = records.shape[1:], records.reshape(len(records), -1)
        self.width, self.is_small = self.full.shape[1], self.full.size <= _SMALL

    @functools.cached_property
    def places(self) -> np.ndarray:
        """The columns that are kept: evenly spaced among those that vary in a sample."""
        count = max(_WIDE, _SMALL // len(self.full))
        if self.is_small or self.width <= count:
            return np.arange(self.width)
        varies = np.flatnonzero(self.sample.high > self.sample.low)
        if len(varies) < count:
            varies = np.arange(self.width)
        return varies[np.linspace(0, len(varies) - 1, count).astype(np.int64)]

    @functools.cached_property
    def x(self) -> np.ndarray:
        """The columns that are kept, [n, kept]; of very many rows a sample."""
        step = max(1, -(-len(self.full) * len(self.places) // _LARGE))
        rows = self.full[::step]
        whole = len(self.places) == self.width
        return _plain(rows if whole else np.take(rows, self.places, axis=1))

    @functools.cached_property
    def moments(self) -> Moments:
        """Moments of the columns that are kept."""
        return _moments(self.x)

    @property
    def varies(self) -> np.ndarray:
        """1 for a column of those that are kept; nan for one that is the same for all records."""
        return np.where(self.moments.high > self.moments.low, 1.0, np.nan)

    @functools.cached_property
    def rounded(self) -> Moments | None:
        """The same as NumPy computes them in float32, whose sums of many rows are far off."""
        if self.x.dtype != np.float32 or len(self.x) < 10_000:
            return None
        mean, variance = self.x.mean(0), self.x.var(0)
        return dataclasses.replace(self.moments, mean=mean, variance=variance)

    @functools.cached_property
    def sample(self) -> Moments:
        """Moments of all columns over all rows, or a sample of them, evenly spaced."""
        return _moments(_plain(self.full[:: max(1, -(-self.full.size // _SMALL))]))

    @functools.cached_property
    def each(self) -> Moments:
        """Moments of all numbers of single records, of a few records."""
        some = self.full[:: max(1, len(self.full) // _WIDE)]
        return _moments(_plain(some).T)

    @functools.cached_property
    def whole(self) -> Moments | None:
        """Moments of all columns over all rows; None where there are too many."""
        if self.is_small:
            return self.sample
        return None if self.full.size > _WHOLE else _moments(self.full)

    @functools.cached_property
    def scalings(self) -> _Scalings:
        """Scales and shifts that a loss may apply: to pixels, those of pixels."""
        low, high = np.fmin.reduce(self.sample.low), np.fmax.reduce(self.sample.high)
        if low < 0 or high > 255:
            return _PLAIN
        if high <= 1:
            return (*_PLAIN, (255.0, 0.0), (2.0, -1.0))
        return (*_PLAIN, (1 / 255, 0.0), (1 / 256, 0.0), (2 / 255, -1.0))

    @functools.cached_property
    def scatter(self) -> list[np.ndarray]:
        """Covariance and second moments; [] where records are too wide, or few without a gap."""
        if not 2 <= self.width <= directions.WIDEST or len(x := self.without_gaps) < 2:
            return []
        return [np.cov(x, rowvar=False), x.T @ x / len(x)]

    @property
    def without_gaps(self) -> np.ndarray:
        """The columns that are kept, float64, of the records that are finite in all of them."""
        x = self.x.astype(np.float64)
        whole = np.isfinite(x).all(1)
        return x if whole.all() else x[whole]

    def along(self, axis: int) -> np.ndarray:
        """The places of the numbers of every channel, int [channels, k]."""
        by = np.moveaxis(np.arange(self.width).reshape(self.shape), axis, 0)
        return by.reshape(len(by), -1)

    def class_means(self, labels: _Labels) -> np.ndarray:
        """The means by class of the columns that are kept, float64 [classes, kept]."""
        codes = labels.codes[:: max(1, -(-len(labels.codes) // len(self.x)))]
        counts = np.bincount(codes, minlength=len(labels.counts))
        there = np.flatnonzero(counts)
        ordered = self.x[np.argsort(codes, kind="stable")].astype(np.float64)
        means = np.full((len(counts), self.x.shape[1]), np.nan)
        begin, known = (np.cumsum(counts) - counts)[there], np.isfinite(ordered)
        ordered[~known] = 0
        sums, of = (np.add.reduceat(each, begin) for each in (ordered, known.astype(np.int32)))
        means[there] = sums / of * self.varies
        return means

    @functools.cached_property
    def marks(self) -> _Marks:
        """Marks of the rows, by which equal ones are found."""
        return _Marks(self.x)

    @functools.cached_property
    def prefixes(self) -> np.ndarray:
        """The means of the first two records, of the first three, and so on, but not of all."""
        first = self.x[: min(_PREFIXES, len(self.x) - 1)].astype(np.float64)
        means: np.ndarray = np.cumsum(first, 0) / np.arange(1, len(first) + 1)[:, None]
        return means[1:]

    @functools.cached_property
    def quantiles(self) -> list[tuple[str, np.ndarray]]:
        """The median and quantiles of every column; nan for one with gaps."""
        found = np.quantile(self.x, (0.5, *_QUANTILES), axis=0)
        words = ("median", *(f"quantile of {level:g}" for level in _QUANTILES))
        return [(f"the records' {w}", f) for w, f in zip(words, found, strict=True)]

    @functools.cached_property
    def single_numbers(self) -> list[tuple[str, float]]:
        """Numbers of all records that a single number is compared with."""
        x = self.without_gaps
        if not len(x):
            return []
        norms = np.sqrt(np.einsum("ij,ij->i", x, x))
        levels = zip(_QUANTILES, np.quantile(x, _QUANTILES), strict=True)
        return [
            ("the records' largest number", float(x.max())),
            ("the records' smallest number", float(x.min())),
            ("the largest norm of a record", float(norms.max())),
            ("the records' median norm", float(np.median(norms))),
            *((f"the records' quantile of {level:g}", float(found)) for level, found in levels),
        ]

    def labels(self) -> _Labels | None:
        """The classes that this leaf names: integers of few kinds, or one-hot rows."""
        x = self.full
        if len(x) < 2 or len(self.shape) > 1 or self.width > _CLASSES:
            return None
        if self.width == 1:
            return None if (codes := _codes(x[:, 0])) is None else _Labels(self, codes)
        if self.sample.low.min() != 0 or self.sample.high.max() != 1:
            return None
        for rows in (x[:_PREFIXES], x):
            if not (np.isin(rows, (0, 1)).all() and (rows.sum(1) == 1).all()):
                return None
        return _Labels(self, np.argmax(x, axis=1))


def _codes(column: np.ndarray) -> np.ndarray | None:
    """Classes, int [n], that integers name; or other numbers, where they are few integers."""
    if column.dtype.kind not in "biu":
        distinct = np.unique(column[:_SMALL].astype(np.float64))
        if len(distinct) > _FEW or not np.all(distinct == np.round(distinct)):
            return None
    low, high = int(column.min()), int(column.max())
    if low == high or high - low > _CLASSES:
        return None
    if low < 0 or high >= _CLASSES:  # such as -1 and 1
        return np.unique(column, return_inverse=True)[1].ravel()
    return column.astype(np.int64)
