"""Compares arrays with private records: are they rows of them, or a statistic?

One function, ``match_statistic``, is asked of every array that enters a loss: what the loss
captured, and the first values of its parameters, frozen or trained. It compares values, so that a
coincidence of lengths says nothing. What is the same for all records (zeros, a position encoding),
what anybody writes down (ones, grids, a few digits) and rows that many records share are nobody's.

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
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

_SMALL = 2**22  # numbers of a leaf, or of a sample, that are looked at in every way
_LARGE = 2**26  # numbers of the columns that are kept of a larger one
_WHOLE = 2**28  # numbers that are passed over where an array is like the statistic of a sample
_CHUNK = 2**17  # numbers that are converted at a time
_SOME, _CLASSES, _FEW = 1_024, 1_000, 20
_WIDE = 8  # numbers from which on arrays are compared up to a scale and a shift
_WIDEST = 1_024  # numbers of a record up to which covariances are computed
_CLOSE, _EXACT = 3e-4, 3e-6  # relative
_SHORT = ("float16", "bfloat16")
_FIT = 1e-3  # of the norm of a matrix; float32 leaves about 1e-5
_QUANTILES = (0.01, 0.02, 0.05, 0.1, 0.25, 0.75, 0.9, 0.95, 0.98, 0.99)
_LEVELS = ("the records' median", *(f"the records' quantile of {q:g}" for q in _QUANTILES))
_Scalings = tuple[tuple[float, float], ...]  # (scale, shift) of each
_PLAIN = ((1.0, 0.0), (-1.0, 0.0))
_EXTREMES = tuple(f"the records' {w}" for w in ("minimum", "maximum", "range", "inverse range"))
_FIRST = "the mean of the first records"
_SHARES = "the frequencies of the records' labels, or weights made of them"


class Match(NamedTuple):
    """An answer: the rows or the statistic of the records that an array is."""

    words: str  # it, without a private value
    certain: bool  # True if it can be no chance
    whole: bool = False  # True if most records are among its rows


def match_statistic(value: ArrayLike, records: "KnownRecords") -> Match | None:
    """Returns the rows or the statistic of the records that an array is; None for any other.

    Looked for are records among its rows or columns (three are enough), statistics of columns, of
    channels and of all numbers, means of classes and of the first records, frequencies of classes
    and weights made of them, covariances, principal directions, projections and whitening.
    """
    # A large array of a shape that nothing of the records has is not read.
    shape = np.shape(value)
    size = math.prod(shape)
    fits = size <= _CHUNK or size == max(shape) or shape[0] == records.count
    if not fits and not any(
        leaf.width in (size, shape[0], shape[-1])
        or leaf.shape in (shape[: len(leaf.shape)], shape[-len(leaf.shape) :])
        for leaf in records.leaves
    ):
        return None
    array = np.asarray(jax.device_get(value))
    if not size or not _is_numeric(array):
        return None
    if not np.isfinite(array).any():
        return None
    kept = None
    with np.errstate(all="ignore"):
        found = _match_number(array, records) if size == 1 else _match_array(array, records)
        for made in found:
            if made.certain:
                return made
            kept = kept or made
    return kept


def _is_numeric(array: np.ndarray) -> bool:
    return array.dtype.kind in "fiub" or array.dtype.name in _SHORT


def _as_numpy(rows: np.ndarray) -> np.ndarray:
    """Rows in numbers that NumPy computes with."""
    narrow = rows.dtype.kind not in "fiu" or rows.dtype.name in _SHORT
    plain: np.ndarray = rows.astype(np.float32) if narrow else rows
    return plain


def _match_array(value: np.ndarray, records: "KnownRecords") -> Iterator[Match]:
    if np.all(value == value.ravel()[0]):
        return
    for leaf in records.leaves:
        yield from _match_rows(value, leaf, records.labels)
        yield from _match_channels(value, leaf)
        if leaf.is_small:
            yield from _match_second_moments(value, leaf)
    for labels in records.labels:
        yield from _match_frequencies(value, labels)


# Statistics of columns ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Moments:
    """Moments of every number of a record over all records, or a sample of them."""

    count: np.ndarray  # int [d], the number of records of which it is finite; gaps count in nothing
    mean: np.ndarray  # float64 [d]
    variance: np.ndarray  # float64 [d], divided by ``count``
    low: np.ndarray  # float64 [d], the least
    high: np.ndarray  # float64 [d], the largest

    @property
    def varies(self) -> np.ndarray:
        """[d], 1; nan for a number that is the same for all records."""
        return np.where(self.high > self.low, 1.0, np.nan)

    def over(self, groups: np.ndarray) -> "Moments":
        """Moments over groups of these numbers.

        Args:
            groups: int [groups, k], the places of each.
        """
        count, each = self.count[groups], self.mean[groups]
        share = count / count.sum(1, keepdims=True)
        mean = np.sum(share * each, axis=1, where=count > 0)
        squares = self.variance[groups] + np.square(each - mean[:, None])
        variance = np.sum(share * squares, axis=1, where=count > 0)
        low = np.fmin.reduce(self.low[groups], axis=1)
        high = np.fmax.reduce(self.high[groups], axis=1)
        return Moments(count.sum(1), mean, variance, low, high)


def _moments(x: np.ndarray) -> Moments:
    """The moments of the finite numbers of rows [n, d], in float64, converted a part at a time."""
    count, about, total, squares = np.zeros((4, x.shape[1]))
    low, high = np.full((2, x.shape[1]), np.nan)
    for cut in _row_slices(*x.shape):
        part = x[cut].astype(np.float64)
        known = np.isfinite(part)
        if not known.all():
            part[~known] = np.nan
        low, high = np.fmin(low, np.fmin.reduce(part)), np.fmax(high, np.fmax.reduce(part))
        if cut.start == 0:
            about = np.nan_to_num(low / 2 + high / 2)
        part -= about  # so that squares of numbers far from zero lose no digits
        count += known.sum(0)
        total += part.sum(0, where=known)
        squares += np.square(part, out=part).sum(0, where=known)
    mean = total / count
    return Moments(count, about + mean, np.maximum(squares / count - mean**2, 0), low, high)


def _row_slices(count: int, width: int) -> list[slice]:
    """Slices of rows [count, width] that are converted at a time."""
    size = max(1, _CHUNK // width)
    return [slice(at, at + size) for at in range(0, count, size)]


def _column_statistics(m: Moments) -> Iterator[tuple[str, np.ndarray]]:
    """**The** statistics of columns; nan for a column that is the same for all records."""
    varies, std, more = m.varies, np.sqrt(m.variance), m.count / np.maximum(1, m.count - 1)
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
        for words, _, found in _functions_of_shares(m.mean):
            yield words, found * varies


def _functions_of_shares(share: np.ndarray) -> Iterator[tuple[str, bool, np.ndarray]]:
    """(words, True if it is a logarithm, what is made of shares such as those of classes)."""
    odds = share / (1 - share)
    for found in (share, 1 / share, odds, 1 / odds, np.sqrt(share), 1 / np.sqrt(share)):
        yield _SHARES, False, found
    for found in (np.log(share), np.log(odds)):
        yield f"the logarithm of {_SHARES}", True, found


def _match_columns(row: np.ndarray, leaf: "_Leaf", single: bool) -> Iterator[Match]:
    """Statistics of the columns of a leaf, of which ``row`` [kept] may be one."""
    flat, low, high = row.astype(np.float64), leaf.moments.low, leaf.moments.high
    candidates = [each for m in (leaf.moments, leaf.rounded) if m for each in _column_statistics(m)]
    if single:  # not beside others
        between = (flat >= low) & (flat <= high)
        if leaf.is_small and np.mean(between) > 0.9:
            candidates += zip(_LEVELS, leaf.quantiles, strict=True)
        near = np.all(np.abs(leaf.prefixes - flat) <= 1e-3 * np.max(np.abs(flat)), axis=1)
        if len(flat) >= _WIDE:  # up to a scale and a shift
            means = leaf.prefixes - leaf.prefixes.mean(1, keepdims=True)
            centred = flat - flat.mean()
            lengths = np.linalg.norm(means, axis=1) * np.linalg.norm(centred)
            near = np.abs(means @ centred) > 0.999 * lengths
        means = leaf.prefixes[near] * leaf.moments.varies
        candidates += [(_FIRST, mean) for mean in means]
    for words, found in candidates:
        certain = _agrees(flat if words == _FIRST else row, found, leaf.scalings)
        if certain and words in _EXTREMES + _LEVELS:
            ends = (low, high) if "range" in words else (found,)
            certain = (words in _LEVELS or is_specific(flat)) and not _are_bounds(leaf.x.T, *ends)
        if certain is not None:
            yield Match(words, certain)


def _are_bounds(columns: Iterable[np.ndarray], *ends: np.ndarray) -> bool:
    """True for bounds that many records reach in most columns: they were chosen before them."""
    each = zip(columns, *ends, strict=True)
    times = [min(np.sum(np.abs(x - e) <= 1e-6 * np.abs(e)) for e in those) for x, *those in each]
    return bool(np.median(times) > 3)


def _match_channels(value: np.ndarray, leaf: "_Leaf") -> Iterator[Match]:
    """Statistics of the channels of a leaf, of all records where a sample's are like them."""
    if len(leaf.shape) < 2:
        return
    plain = tuple(size for size in value.shape if size != 1)
    for axis in (-1, 0) if len(leaf.shape) == 3 else (-1,):
        if plain != (leaf.shape[axis],):
            continue
        by = np.moveaxis(np.arange(leaf.width).reshape(leaf.shape), axis, 0)
        flat, groups = value.ravel().astype(np.float64), by.reshape(len(by), -1)
        over = leaf.sample.over(groups)
        usual = (found for _, found in _column_statistics(over))
        like = any(_resembles(flat, found, over.variance, leaf.scalings) for found in usual)
        if like and leaf.whole is not None:
            over = leaf.whole.over(groups)
            for words, found in _column_statistics(over):
                certain = _agrees(value.ravel(), found, leaf.scalings)
                if certain and words in _EXTREMES:
                    ends = (over.low, over.high) if "range" in words else (found,)
                    columns = (leaf.full[:, group] for group in groups)
                    certain = is_specific(flat) and not _are_bounds(columns, *ends)
                if certain is not None:
                    yield Match(f"{words} by channel", certain)


def _resembles(
    flat: np.ndarray, found: np.ndarray, variance: np.ndarray, scalings: _Scalings
) -> bool:
    """True for an array that may be a statistic of which a sample's is ``found``."""
    known = np.isfinite(found) & np.isfinite(flat)
    flat, found, room = flat[known], found[known], np.sqrt(variance[known])
    if len(found) < 2:
        return False
    if len(found) >= _WIDE and abs(np.corrcoef(flat, found)[0, 1]) > 0.7:
        return True
    room = room + 0.3 * np.abs(found)
    return any(np.mean(np.abs(flat - a * found - b) <= abs(a) * room) > 0.9 for a, b in scalings)


def _agrees(flat: np.ndarray, found: np.ndarray, scalings: _Scalings = _PLAIN) -> bool | None:
    """None where an array is not the statistic; else True if that can be no chance.

    Many numbers are compared up to any scale and shift, few up to the usual ones.

    Args:
        flat: the array [d], in its own dtype.
        found: the statistic [d]; what is not finite in either is not compared.
        scalings: the usual scales and shifts of these records.
    """
    known = np.isfinite(found) & np.isfinite(flat)
    digits, flat, found = flat.dtype, flat[known].astype(np.float64), found[known]
    if len(found) < 2 or np.ptp(found) <= 1e-6 * np.max(np.abs(found)):
        return None
    if digits.name in _SHORT:  # every such number is a rounded one: only many say something
        same = np.mean(found.astype(digits).astype(np.float64) == flat)
        return True if same > 0.9 and len(np.unique(flat)) >= 16 else None
    size, levels = np.max(np.abs(flat)), len(np.unique(flat))
    errors = [np.abs(flat - scale * found - shift) for scale, shift in scalings]
    fits = [e for e in errors if np.all(e <= _CLOSE * np.abs(flat) + 1e-5 * size)]
    if not fits and len(found) >= _WIDE and levels >= 6:
        # The rest beside the best fit by any scale and shift, of the typical distance between the
        # numbers, not of one that stands far out.
        wanted, centred = found - found.mean(), flat - flat.mean()
        error = np.abs(centred - wanted * (wanted @ centred) / (wanted @ wanted))
        typical = np.median(np.abs(flat - np.median(flat)))
        if typical > 0 and np.all(error <= _CLOSE * (typical + np.abs(centred))):
            fits = [error]
    if not fits:
        return None
    exact = any(np.all(e <= _EXACT * size) for e in fits)
    return is_specific(flat) or (exact and levels >= 16 and not _is_evenly_spaced(flat))


def is_specific(value: np.ndarray) -> bool:
    """True for numbers that nobody writes down by chance: no grids, no zeros, no few digits."""
    flat = value.ravel().astype(np.float64)
    distinct = np.unique(flat[:_SMALL])
    if len(distinct) < 3 or _is_evenly_spaced(flat):
        return False
    if np.all(distinct == np.round(distinct)):
        return flat.size >= 16 and len(distinct) >= 5
    return bool(np.mean(~_has_few_digits(distinct)) >= 0.5)


def _is_evenly_spaced(flat: np.ndarray) -> bool:
    steps = np.diff(flat)
    return bool(np.allclose(steps, steps[0], rtol=1e-3)) if len(steps) else True


def _has_few_digits(numbers: np.ndarray) -> np.ndarray:
    """True for numbers of at most five digits, or three behind the point."""
    size = np.maximum(np.abs(numbers), 1e-30)
    error = np.full(numbers.shape, np.inf)
    for scaled in (numbers * 10 ** (4 - np.floor(np.log10(size))), numbers * 1_000):
        error = np.minimum(error, np.abs(scaled - np.round(scaled)) / np.abs(scaled))
    return (error <= 1e-7) | (numbers == 0)


# Second moments -------------------------------------------------------------------------------


def _match_second_moments(value: np.ndarray, leaf: "_Leaf") -> Iterator[Match]:
    """Covariances, and matrices that were fitted to them: directions, projections, whitening."""
    # A matrix that was chosen without the records has none of these relations to their moments,
    # unless these are alike in all directions: balanced one-hot records have any orthogonal matrix
    # for principal directions. Of such records nothing is said.
    width = leaf.width
    if width not in value.shape or value.ndim != 2 or not np.isfinite(value).all():
        return
    value = value.astype(np.float64)
    ways = [rows for rows in (value, value.T) if rows.shape[1] == width and len(rows) <= width]
    for words, moments in zip(("covariance", "second moments"), leaf.scatter, strict=False):
        same = value.shape == moments.shape and _agrees(value.ravel(), moments.ravel())
        if same and is_specific(value):
            yield Match(f"the records' {words}", True)
        for rows in ways if width >= 3 else ():
            if (fitted := _name_fit(rows, moments)) and is_specific(value):
                # A direction is fixed where its eigenvalue is not 0, and of no other.
                values = np.linalg.eigvalsh(moments)
                least = 1e-6 * values[-1]
                gaps = np.diff(values, prepend=-np.inf, append=np.inf)
                if ((values > least) & (gaps[1:] > least) & (gaps[:-1] > least)).any():
                    yield Match(fitted, True)


def _name_fit(rows: np.ndarray, moments: np.ndarray) -> str:
    """Words for directions [k, d] that moments [d, d] explain; "" for others.

    Matrices are compared by their products with a few random directions, which is cheap: those of
    unlike matrices are unlike.
    """
    count, width = rows.shape
    one, two = np.random.default_rng(0).normal(size=(2, count, 4))
    mean = np.trace(moments) / width

    def near(left: np.ndarray, right: np.ndarray) -> bool:
        return bool(np.linalg.norm(left - right) <= _FIT * np.linalg.norm(right))

    def excess(directions: np.ndarray) -> np.ndarray:
        """The moments of these directions, without what is alike in all, which fixes none."""
        return moments @ directions - mean * directions

    squares, spread = rows @ (rows.T @ one), rows @ (moments @ (rows.T @ one))
    if np.linalg.norm(spread) <= 1e-9 * np.linalg.norm(moments) * np.linalg.norm(squares):
        return ""
    if count >= 3 and near(spread, one):
        # Of records alike in all directions any rotation is one.
        rotated = near(squares, np.sum(rows**2) / count * one)
        return "" if rotated else "a whitening of the records"
    if near(squares, one) and count == width:  # each is stretched alike in every direction
        left, right = rows @ excess(rows.T @ one) * two, rows @ excess(rows.T @ two) * one
        return "the records' principal directions" if near(left, right) else ""
    if near(squares, one):
        lead = excess(rows.T @ one)
        found = near(rows.T @ (rows @ lead), lead)
        return "principal directions of the records" if found else ""
    if count == width and near(rows @ one, rows.T @ one) and near(rows @ (rows @ one), rows @ one):
        found = near(rows @ excess(one), excess(rows @ one))
        return "a projection on principal directions of the records" if found else ""
    return ""


# Rows -----------------------------------------------------------------------------------------


def _match_rows(value: np.ndarray, leaf: "_Leaf", labels: Sequence["_Labels"]) -> Iterator[Match]:
    """Records and their statistics among the rows or columns of an array."""
    shape, width, inner = value.shape, leaf.width, len(leaf.shape)
    if width == 1:  # most entries must be some, for one is found by chance
        flat = value.ravel()
        if max(shape) == value.size >= 8 and leaf.x.dtype.kind == "f" and is_specific(flat):
            known = np.isin(flat.astype(np.float32), leaf.x[:, 0].astype(np.float32))
            if np.mean(known) > 0.5:
                yield Match("numbers that are records", True)
        return

    # The array as rows [m, d] in each way that its shape allows.
    ways, most = [], max(1, -(-value.size // _LARGE))
    if value.size == width or shape[-1] == width or shape[-inner:] == leaf.shape:
        ways.append(value.reshape(-1, width)[::most])
    if value.size != width and (shape[0] == width or shape[:inner] == leaf.shape):
        ways.append(value.reshape(width, -1).T[::most])
    for rows in ways:
        rows, single = rows[:, leaf.places], len(rows) == 1
        if not (single and width < 4):
            found = leaf.index.find(rows)
            least = min(3, len(rows))
            if found.any() and (single or found.sum() >= least):
                words = f"{'one' if single else 'several'} of the records"
                specific = sum(_is_specific_row(row) for row in rows[found][:_SOME])
                yield Match(words, specific >= least, 2 * found.sum() > len(leaf.full))
        # A few statistics in one array, such as a mean beside a deviation.
        for row in rows[: _WIDE * (len(rows) <= _WIDE)]:
            yield from _match_columns(row, leaf, single)
        for each in labels:
            yield from _match_class_means(rows, leaf, each)


class _RowIndex:
    """Rows looked up by two numbers of each (marks), up to a scale and a shift.

    Rows of few numbers are compared as they are.
    """

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.wide = x, x.shape[1] >= _WIDE
        weights = np.random.default_rng(0).normal(size=(x.shape[1], 2))
        self.weights = weights - weights.mean(0) if self.wide else weights
        marks = self._of(x)
        self.order = np.argsort(marks[:, 0], kind="stable")
        self.marks = marks[self.order]

    def _prepared(self, rows: np.ndarray) -> np.ndarray:
        """Rows in float64; wide ones with mean 0, mean square 1 and a first mark above 0."""
        rows = rows.astype(np.float64)
        if self.wide:
            rows -= rows.mean(1, keepdims=True)
            sign = np.sign(rows @ self.weights[:, :1])
            rows *= sign / np.sqrt(np.mean(rows**2, axis=1, keepdims=True))
        return rows

    def _of(self, rows: np.ndarray) -> np.ndarray:
        parts = [self._prepared(rows[cut]) @ self.weights for cut in _row_slices(*rows.shape)]
        marks: np.ndarray = np.concatenate(parts)
        marks[~np.isfinite(marks).all(1)] = np.nan
        return marks

    def find(self, rows: np.ndarray) -> np.ndarray:
        """bool [m]: rows that are records, but for those that many records share."""
        marks, near = self._of(rows), np.full(len(rows), 1e-4 * rows.shape[1] ** 0.5)
        if not self.wide:
            near = 1e-6 * (np.abs(rows.astype(np.float64)) @ np.abs(self.weights)).sum(1)

        # Every pair of a row and a record whose first marks are near, and then whose second are.
        first = np.searchsorted(self.marks[:, 0], marks[:, 0] - near)
        last = np.searchsorted(self.marks[:, 0], marks[:, 0] + near)
        count = np.where(np.isfinite(marks[:, 0]), last - first, 0)
        whose = np.repeat(np.arange(len(rows)), count)
        places = np.repeat(first - np.cumsum(count) + count, count) + np.arange(len(whose))
        close = np.abs(self.marks[places, 1] - marks[whose, 1]) <= near[whose]
        whose, places = whose[close], self.order[places[close]]

        same = np.zeros(len(whose), bool)
        for cut in _row_slices(len(whose), rows.shape[1]):
            left, right = self._prepared(rows[whose[cut]]), self._prepared(self.x[places[cut]])
            room = (1e-5 if self.wide else 1e-6) * np.max(np.abs(right), axis=1, keepdims=True)
            same[cut] = np.all(np.abs(left - right) <= room, axis=1)
        times = np.bincount(whose[same], minlength=len(rows))
        shared = (times > max(_FEW, len(self.x) // 1_000)) | (times >= max(2, len(self.x) / 2))
        found: np.ndarray = (times > 0) & ~shared
        return found


def _is_specific_row(row: np.ndarray) -> bool:
    """True for a row that is no pattern: many digits, or a long and uneven one of few numbers."""
    row = row.astype(np.float64)
    levels, places = len(np.unique(row)), np.flatnonzero(np.diff(row))
    if levels < 2 or (len(row) > 2 and _is_evenly_spaced(row)):
        return False
    if np.mean(~_has_few_digits(np.unique(row))) >= 0.5:
        return levels >= (5 if len(row) >= _WIDE else min(3, len(row)))
    if levels < 5:  # such as black and white: neither bars, nor waves, nor single points
        return len(places) >= 12 and len(np.unique(np.diff(places))) >= 4
    return len(row) >= 16 and len(places) >= 12


def _match_class_means(rows: np.ndarray, leaf: "_Leaf", labels: "_Labels") -> Iterator[Match]:
    """Means of records by class: all of them in their order, or one."""
    there = np.flatnonzero(labels.counts)
    if len(rows) not in (1, len(there), len(labels.counts)):
        return
    means = leaf.class_means(labels)[there]
    rows = (rows[there] if len(rows) == len(labels.counts) else rows).astype(np.float64)
    pairs = zip(np.broadcast_to(rows, means.shape), means, strict=True)
    found = [c for r, m in pairs if (c := _agrees(r, m, leaf.scalings)) is not None]
    least = min(3, len(rows))
    if len(found) >= least:
        yield Match("the records' means by class", sum(found) >= least)


# Classes and single numbers -------------------------------------------------------------------


def _match_frequencies(value: np.ndarray, labels: "_Labels") -> Iterator[Match]:
    """Frequencies of classes and weights made of them, up to a factor; logarithms, up to a sum."""
    there, size = np.flatnonzero(labels.counts), value.size
    if size != max(value.shape) or len(there) < 2 or not len(labels.counts) <= size <= _CLASSES:
        return
    if size > len(labels.counts) and len(there) < 0.9 * size:
        return  # more entries than classes are classes without records, but for a few
    flat, share = value.ravel()[there].astype(np.float64), labels.share[there]
    if np.ptp(flat) == 0 or np.ptp(share) == 0:
        return
    whole = np.all(flat == np.round(flat))
    plain = np.abs(flat).max() < 100 if whole else np.all(_has_few_digits(flat))
    for words, is_log, found in _functions_of_shares(share):
        factor = flat - found if is_log else flat / found
        room = _EXACT * np.abs(factor).max()
        if is_log:
            room = max(_EXACT * np.ptp(found), 2e-7 * np.abs(flat).max())
        if np.ptp(factor) <= room:
            yield Match(words, not (labels.are_round.all() or plain))


def _match_number(array: np.ndarray, records: "KnownRecords") -> Iterator[Match]:
    """Statistics that are one number: certain if it is a class ratio, a mean or a deviation."""
    value = float(array.ravel()[0])
    if not np.isfinite(value) or _is_common(value):
        return
    for labels in records.labels:
        share, uneven = labels.share[labels.counts > 0], ~labels.are_round
        if not 2 <= len(share) <= _FEW:
            continue
        if np.any(np.abs(value - np.divide.outer(share, share)) <= 5e-7 * abs(value)):
            words = "the ratio of two classes among the records"
            yield Match(words, len(share) == 2 and bool(uneven.all()))
        made = np.array([found for *_, found in _functions_of_shares(share)])
        made = np.concatenate([made, -made, [1 / share / len(share)]])
        if (same := np.any(np.abs(value - made) <= 5e-7 * max(1.0, abs(value)), axis=0)).any():
            words = "a share of a class among the records, or a weight or a logarithm made of it"
            yield Match(words, bool(uneven[same].any()))
    for leaf in records.leaves:
        if any(labels.leaf is leaf and len(labels.share) == 2 for labels in records.labels):
            continue
        every = np.arange(leaf.width)[None]

        def near(moments: Moments, share: float, leaf: _Leaf = leaf) -> list[str]:
            return [
                words
                for words, found in _column_statistics(moments)
                for a, b in leaf.scalings
                if np.all(np.abs(value - a * found - b) <= share * abs(value))
            ]

        if leaf.width > 1 < records.count and near(leaf.each, 5e-6):
            continue  # a record alone says it, such as one of length 1
        if near(leaf.sample.over(every), 0.05) and leaf.whole is not None:
            # Numbers are clipped at pi and other public bounds.
            found = near(leaf.whole.over(every), 2e-6)
            yield from (Match(words, True) for words in found if words not in _EXTREMES)
        for words, one in leaf.single_numbers if leaf.is_small else ():
            if abs(value - one) <= 2e-6 * abs(one):
                yield Match(words, False)


def _is_common(value: float) -> bool:
    """True for numbers that any program may have: few digits, 1/k, √k, log k, and some of π, e."""
    size = np.float64(abs(value))
    if _has_few_digits(np.array(size)):
        return True
    # Functions of the number, and how much larger than the number's their relative errors are.
    plain = np.array([size, 1 / size, size**2, 1 / size**2, np.exp(size), np.exp(1 / size)])
    more = np.array([1, 1, 2, 2, size, 1 / size])
    twice, twice_more = np.append(plain, np.exp(2 * size)), np.append(more, 2 * size)  # log(2π)
    few = np.outer(1 / np.array([1, np.pi, np.e]), np.arange(1, 13)).ravel()
    for numbers, slack, most in ((plain, more, 10_000), (np.outer(few, twice), twice_more, 12)):
        nearest = np.round(numbers)
        near = np.abs(numbers - nearest) <= 1.5e-7 * slack * np.abs(numbers)
        if np.any(near & (nearest >= 1) & (numbers < most + 0.5)):
            return True
    return False


# The records ----------------------------------------------------------------------------------


class KnownRecords:
    """The records that arrays are compared with; what is computed of them is computed once.

    Args:
        columns: one array [n, ...] for every leaf of the records.

    Attributes:
        count: n.
    """

    def __init__(self, columns: Sequence[ArrayLike]) -> None:
        known = [np.asarray(jax.device_get(column)) for column in columns]
        self.count = len(known[0]) if known else 0
        known = [x for x in known if x.size and _is_numeric(x)]
        # A table whose columns are leaves: those of floats, and all.
        single = [x.reshape(-1, 1) for x in known if x.size == len(x)]
        floats = [x for x in single if _as_numpy(x[:1]).dtype.kind == "f"]
        for table in (floats, single) if len(floats) < len(single) else (floats,):
            if len(table) > 2 and self.count * len(table) <= _LARGE:
                known.append(np.concatenate([_as_numpy(x) for x in table], axis=1))
        self.leaves = [_Leaf(x) for x in known]

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
        are_round: bool, of the classes with records: shares that anybody writes down, such as 0.9
            or 1/3.
    """

    def __init__(self, leaf: "_Leaf", codes: np.ndarray) -> None:
        self.leaf, self.codes, self.counts = leaf, codes, np.bincount(codes)
        self.share = self.counts / len(codes)
        scaled = self.share[self.counts > 0, None] * np.array([100, *range(1, 13)])
        self.are_round = np.any(np.abs(scaled - np.round(scaled)) < 1e-9, axis=1)


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
        rows = self.full[:: max(1, -(-len(self.full) * len(self.places) // _LARGE))]
        whole = len(self.places) == self.width
        return _as_numpy(rows if whole else np.take(rows, self.places, axis=1))

    @functools.cached_property
    def moments(self) -> Moments:
        """Moments of the columns that are kept."""
        return _moments(self.x)

    @functools.cached_property
    def rounded(self) -> Moments | None:
        """The same as NumPy computes them in float32, whose sums of many rows are far off."""
        if self.x.dtype != np.float32 or len(self.x) < 10_000:
            return None
        return dataclasses.replace(self.moments, mean=self.x.mean(0), variance=self.x.var(0))

    @functools.cached_property
    def sample(self) -> Moments:
        """Moments of all columns over all rows, or a sample of them, evenly spaced."""
        return _moments(_as_numpy(self.full[:: max(1, -(-self.full.size // _SMALL))]))

    @functools.cached_property
    def each(self) -> Moments:
        """Moments of all numbers of single records, of a few records."""
        return _moments(_as_numpy(self.full[:: max(1, len(self.full) // _WIDE)]).T)

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
        if not 2 <= self.width <= _WIDEST or len(x := self.without_gaps) < 2:
            return []
        return [np.cov(x, rowvar=False), x.T @ x / len(x)]

    @property
    def without_gaps(self) -> np.ndarray:
        """The columns that are kept, float64, of the records that are finite in all of them."""
        x = self.x.astype(np.float64)
        whole = np.isfinite(x).all(1)
        return x if whole.all() else x[whole]

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
        means[there] = sums / of * self.moments.varies
        return means

    @functools.cached_property
    def index(self) -> _RowIndex:
        """The rows, looked up by two numbers of each."""
        return _RowIndex(self.x)

    @functools.cached_property
    def prefixes(self) -> np.ndarray:
        """The means of the first two records, of the first three, and so on, but not of all."""
        first = self.x[: min(_SOME, len(self.x) - 1)].astype(np.float64)
        means: np.ndarray = np.cumsum(first, 0) / np.arange(1, len(first) + 1)[:, None]
        return means[1:]

    @functools.cached_property
    def quantiles(self) -> np.ndarray:
        """The median and quantiles of every column; nan for one with gaps."""
        return np.quantile(self.x, (0.5, *_QUANTILES), axis=0)

    @functools.cached_property
    def single_numbers(self) -> list[tuple[str, float]]:
        """Numbers of all records that a single number is compared with."""
        x = self.without_gaps
        if not len(x):
            return []
        norms = np.sqrt(np.einsum("ij,ij->i", x, x))
        levels = zip(_LEVELS[1:], np.quantile(x, _QUANTILES).tolist(), strict=True)
        return [
            ("the records' largest number", float(x.max())),
            ("the records' smallest number", float(x.min())),
            ("the largest norm of a record", float(norms.max())),
            ("the records' median norm", float(np.median(norms))),
            *levels,
        ]

    def labels(self) -> _Labels | None:
        """The classes that this leaf names: integers of few kinds, or one-hot rows."""
        x = self.full
        if len(x) < 2 or len(self.shape) > 1 or self.width > _CLASSES:
            return None
        if self.width > 1:
            if self.sample.low.min() != 0 or self.sample.high.max() != 1:
                return None
            for rows in (x[:_SOME], x):
                if not (np.isin(rows, (0, 1)).all() and (rows.sum(1) == 1).all()):
                    return None
            return _Labels(self, np.argmax(x, axis=1))

        # Integers, or other numbers, where they are few integers.
        column = x[:, 0]
        if column.dtype.kind not in "biu":
            distinct = np.unique(column[:_SMALL].astype(np.float64))
            if len(distinct) > _FEW or not np.all(distinct == np.round(distinct)):
                return None
        low, high = int(column.min()), int(column.max())
        if low == high or high - low > _CLASSES:
            return None
        if low < 0 or high >= _CLASSES:  # such as -1 and 1
            return _Labels(self, np.unique(column, return_inverse=True)[1].ravel())
        return _Labels(self, column.astype(np.int64))
