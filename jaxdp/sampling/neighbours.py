"""Small data sets that differ in one record, made of the user's own records, and comparing them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxdp.sampling import Source
from jaxdp.types import PyTree

_MORE = 12  # records that are left out, besides the extremes
_LOST = 64  # records without one that is equal to rounding, beyond which none is looked for


class Neighbour(NamedTuple):
    """A neighbour of a data set.

    Attributes:
        words: how it differs.
        data: the neighbour: a list of records, or a pytree of arrays [N, ...].
        changed: the most records by which anything computed record by record may differ.
    """

    words: str
    data: PyTree
    changed: int


def count(data: PyTree) -> int:
    """The number of records of a list of records, or a pytree of arrays [N, ...]."""
    return len(data) if isinstance(data, list) else len(jax.tree.leaves(data)[0])


def take(data: PyTree, indices: Sequence[int] | np.ndarray) -> PyTree:
    """The records at ``indices``, of the same kind as ``data``."""
    if isinstance(data, list):
        return [data[i] for i in indices]
    return jax.tree.map(lambda leaf: leaf[np.asarray(indices)], data)


def record(data: PyTree, at: int) -> PyTree:
    """One record of a list or of a pytree of arrays [N, ...]."""
    return data[at] if isinstance(data, list) else jax.tree.map(lambda v: np.asarray(v[at]), data)


def put(data: PyTree, at: int, other: PyTree) -> PyTree:
    """The data with another record at ``at``."""
    if isinstance(data, list):
        return [*data[:at], other, *data[at + 1 :]]

    def changed(old: PyTree, new: PyTree) -> PyTree:
        value = np.array(old)
        value[at] = new
        return value if isinstance(old, np.ndarray) else jax.numpy.asarray(value)

    return jax.tree.map(changed, data, other)


def scaled(data: PyTree, factor: float) -> PyTree:
    """The data, or a record, with all numbers that are no integers times ``factor``."""

    def one(leaf: PyTree) -> PyTree:
        value = np.asarray(leaf)
        return value * value.dtype.type(factor) if value.dtype.kind == "f" else leaf

    return jax.tree.map(one, data)


def records_of(source: Source, most: int) -> PyTree:
    """At most ``most`` records, spread over a source: pytree of NumPy arrays [m, ...]."""
    rows = np.unique(np.linspace(0, len(source) - 1, min(most, len(source))).astype(np.int64))
    return source.gather(rows, np.ones(len(rows), bool))


def neighbours(data: PyTree) -> Iterator[Neighbour]:
    """Yields informative neighbours: without the largest, smallest, longest record; with others."""
    # A statistic over the records shows best where an extreme one is left out.
    size = count(data)
    everyone = np.arange(size)
    sizes = np.array([measure(take(data, [i])) for i in range(size)])
    extremes = [sizes[:, 0].argmax(), sizes[:, 0].argmin(), sizes[:, 1].argmax(), 0, size - 1]
    for at in dict.fromkeys([*extremes, *np.linspace(0, size - 1, _MORE).astype(int)]):
        if size > 1:
            yield Neighbour(f"without record {at}", take(data, np.delete(everyone, at)), 1)
    words = "with a copy of the first record in place of the last"
    yield Neighbour(words, take(data, np.where(everyone == size - 1, 0, everyone)), 2)
    if not isinstance(data, list):
        larger = put(data, size - 1, scaled(record(data, size - 1), 8))
        yield Neighbour("with the last record made 8 times larger", larger, 2)


def measure(record: PyTree) -> tuple[float, float]:
    """(size of the numbers, length) of one record, for choosing extremes."""
    total, length = 0.0, 0.0
    for leaf in jax.tree.leaves(record):
        value = np.asarray(leaf)
        if value.dtype.kind in "biuf":
            length += np.count_nonzero(value)
            total += float(np.nansum(np.abs(value.astype(np.float64))))
        else:
            length += len(leaf) if isinstance(leaf, str | bytes) else value.size
    return total, length


def each(data: PyTree) -> list[PyTree]:
    """The records, one by one."""
    return [record(data, i) for i in range(count(data))]


def content(record: PyTree) -> tuple[bytes, ...]:
    """The bytes of a record, equal where two records are."""
    return tuple(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(record))


def differing(one: PyTree, two: PyTree) -> tuple[int, int]:
    """(records of one result that the other lacks, and the other way round), in any order."""
    # Records that are equal to the bit, then of the others those that are to rounding: it is quick
    # where they come in one order.
    left, right = each(one), each(two)
    known = {content(found): found for found in (*left, *right)}
    ours, theirs = (Counter(map(content, found)) for found in (left, right))
    left, right = ([known[k] for k in more.elements()] for more in (ours - theirs, theirs - ours))
    missing = 0
    for found in left:
        like = (i for i, other in enumerate(right) if same(found, other))
        at = next(like, None) if missing < _LOST else None
        missing += at is None
        right = right if at is None else right[:at] + right[at + 1 :]
    return missing, len(right)


def same(one: PyTree, two: PyTree) -> bool:
    """True if two pytrees hold the same numbers, to rounding; functions at a few steps."""
    a, b = jax.tree.leaves(one), jax.tree.leaves(two)
    return len(a) == len(b) and all(_same_leaf(x, y) for x, y in zip(a, b, strict=True))


def _same_leaf(x: PyTree, y: PyTree) -> bool:
    if callable(x) and callable(y):  # such as schedules
        return all(same(x(step), y(step)) for step in (0, 1, 10, 1_000))
    x, y = np.asarray(x), np.asarray(y)
    if x.shape != y.shape:
        return False
    if x.dtype.kind not in "fc" or y.dtype.kind not in "fc":
        return bool(np.all(x == y))
    size = float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)))
    return bool(np.allclose(x, y, rtol=1e-5, atol=1e-6 * size, equal_nan=True))


def shapes(data: PyTree) -> list[tuple[int, ...]]:
    """Shapes of a record, without the number of records; [] for a list of unlike records."""
    if isinstance(data, list):
        found = {tuple(np.shape(leaf) for leaf in jax.tree.leaves(each)) for each in data}
        return list(found.pop()) if len(found) == 1 else []
    return [np.shape(leaf)[1:] for leaf in jax.tree.leaves(data)]
