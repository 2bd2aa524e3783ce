"""Sources: records that can be read by index, from arrays, files, readers and lists.

No message here holds a value, an index or a count of records: under add-or-remove-one all of them
are private.
"""

import dataclasses
import math
import mmap
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set, ValuesView
from types import ModuleType
from typing import Literal, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike, DTypeLike

from jaxdp.sampling.rules import Identities
from jaxdp.types import MOST_RECORDS, PyTree, require_gatherable

Key = TypeVar("Key")
# To a leaf, as ``jax.tree_util.tree_flatten_with_path`` has it.
LeafPath = tuple[Hashable, ...]
# Libraries' streams, which may have a length.
_STREAMS = {"IterableDataset", "IterDataset", "IterDataPipe", "DataLoader"}
TOGETHER = 2**20  # numbers that are tested at a time on the host, where they fit into its cache
_SMALL = 2**18  # numbers for which no program is compiled for a device


class RandomAccess(Protocol):
    """Records with ``len`` and ``[index]``: lists, and sources of grain, tfds, torch and others."""

    def __len__(self) -> int:
        """The number of records."""

    def __getitem__(self, index: int, /) -> PyTree:
        """One record."""


@runtime_checkable
class Source(Protocol):
    """The protocol of a source: records that can be read by index, in any order.

    Attributes:
        example: pytree of ``jax.ShapeDtypeStruct``: shape and dtype of one record, without a
            leading axis. Taken as public.
        on_device: True where the records lie on the device, so that a compiled step can gather
            them there.
    """

    @property
    def example(self) -> PyTree:
        """Shape and dtype of one record."""

    @property
    def on_device(self) -> bool:
        """True if the records lie on the device."""

    def __len__(self) -> int:
        """The number of records. Sensitive under add-or-remove-one."""

    def gather(self, indices: np.ndarray, mask: np.ndarray) -> PyTree:
        """The records at ``indices``: a pytree of fresh NumPy arrays [m, ...] like ``example``.

        Args:
            indices: integer [m].
            mask: bool [m]; where False the row is zeros, and nothing is read for it.

        Raises:
            ValueError: indices or mask are none of the above, an index lies outside, or a record
                is unlike the example. No message tells which, or how many records there are; that
                a run stopped here may still depend on a record.
        """


def as_source(data: PyTree, *, example: PyTree | None = None) -> Source:
    """Returns ``data`` as a source of records, without copying it.

    ==========================================================  ================================
    data                                                        becomes
    ==========================================================  ================================
    a source                                                    itself
    pytree of JAX arrays [N, ...]                               ``ArraySource``, as they are
    pytree of NumPy arrays, ``np.memmap``, or anything with     ``ArraySource`` on the host, never
    ``shape``, ``dtype`` and ``[indices]`` (h5py, zarr)         copied whole
    anything with ``len`` and ``[index]`` that gives a pytree:  ``Records``, read one by one, or
    grain, ``tfds.data_source``, Hugging Face, torch, a list    by ``__getitems__`` where it is
    ==========================================================  ================================

    A **list is a list of records**; a tuple or dict of arrays holds columns. float64 and int64
    become what JAX makes of them when the source is made: float32 and int32, unless
    ``jax_enable_x64`` is set. Integers that do not fit are refused when they are drawn.

    Args:
        data: the records.
        example: for records read one by one: a pytree of what has ``shape`` and ``dtype``, one
            record's. Without it record 0 is read for them, so an empty source needs it.

    Returns:
        A source with ``len(data)`` records.

    Raises:
        ValueError: the data cannot be sampled from; the message names the remedy. It never holds a
            record or their number, which are private.
    """
    if data is None:
        raise ValueError(
            "data must be given: a tuple of arrays [N, ...], or anything with len and [index]; "
            "got None"
        )
    listed = isinstance(data, list)
    if not isinstance(data, Source):
        # What looks like arrays or records and is neither. An object that JAX warns of is a leaf.
        parts = [] if listed else jax.tree.leaves(data, is_leaf=_is_no_array)
        for part in parts:
            if hasattr(part, "todense"):
                raise ValueError(
                    f"data must hold dense arrays, got a sparse {_kind(part)}: densify it, or give "
                    "a source whose [index] densifies one record"
                )
            if _is_no_array(part):
                raise ValueError(_no_random_access(part))
            # Frames and series of pandas and polars and tables of pyarrow: [i] is a column.
            converts = hasattr(part, "to_numpy") or hasattr(part, "to_pandas")
            if hasattr(part, "iloc") or (hasattr(part, "columns") and converts):
                raise ValueError(
                    f"data must hold arrays or records, got {_kind(part)}: give frame.to_numpy(), "
                    "or a dict of columns, {name: frame[name].to_numpy() for name in names}, those "
                    "of text as integers, by a public list of categories"
                )
        if isinstance(data, (str, bytes, bytearray)):
            raise ValueError(
                f"data must hold arrays or records, got {_kind(data)}; jaxdp.sampling.load reads a "
                "file"
            )
        whole = len(parts) == 1 and parts[0] is data
        if isinstance(data, Mapping) and whole:
            raise ValueError(
                f"data must be one set of records, got the mapping {_kind(data)}: choose a split, "
                "such as data['train'], or make columns with dict(data)"
            )
        if listed and data and all(_is_array(value) and value.shape for value in data[:2]):
            raise ValueError(
                "data must not be a list of arrays, which can be read in two ways: give "
                "np.stack(data) where each array is a record, and a tuple where each array is a "
                "column [N, ...]"
            )
        if listed or (whole and not _is_array(data)):
            stream = any(base.__name__ in _STREAMS for base in type(data).__mro__)
            try:
                len(data)
            except TypeError:  # no __len__, or a cardinality that is not known
                stream = True
            if stream or not hasattr(type(data), "__getitem__"):
                raise ValueError(_no_random_access(data))
            return Records.of(data, example)
    if example is not None:
        raise ValueError("example must be None where data are arrays: they have shapes and dtypes")
    return data if isinstance(data, Source) else ArraySource.of(data)


def _is_no_array(part: PyTree) -> bool:
    """True for sparse data, and what can only be iterated over: generators, sets, dict values."""
    iterated = hasattr(part, "__next__") or isinstance(part, (Set, ValuesView))
    return iterated or hasattr(part, "todense")


def _is_array(data: PyTree) -> bool:
    return hasattr(data, "shape") and hasattr(data, "dtype")


def _kind(data: PyTree) -> str:
    return f"{type(data).__module__}.{type(data).__qualname__}".removeprefix("builtins.")


def _no_random_access(data: PyTree) -> str:
    return (
        f"data must have len(data) and data[index], got {_kind(data)}. A stream cannot be sampled "
        "from, and epsilon is proven for sampled records only: give a random-access source instead "
        "(arrays, a memory map, tfds.data_source, grain's sources, a map-style dataset, or "
        "list(stream) where it fits into memory)"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySource:
    """A source whose records are rows of arrays, on the device or on the host."""

    # Pytree of arrays [N, ...], as they were given: JAX's, or NumPy's, memory maps and array-likes,
    # which are read on access. Sensitive.
    arrays: PyTree = dataclasses.field(repr=False)
    example: PyTree  # pytree of ``jax.ShapeDtypeStruct``: one record, in JAX's dtypes
    # N when the source was made. Sensitive under add-or-remove-one.
    size: int = dataclasses.field(repr=False)
    on_device: bool  # True where all are JAX's
    # [N], of the records that they were made of; None where each is its own, see
    # ``jaxdp.sampling.hashes.identities``. Sensitive.
    identities: Identities | None = dataclasses.field(default=None, repr=False)
    part: Hashable = dataclasses.field(default=None, repr=False)  # of ``jaxdp.sampling.parts``

    @classmethod
    def of(cls, arrays: PyTree) -> "ArraySource":
        """Makes the source from shapes and dtypes alone, without reading the arrays."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(arrays)
        if not leaves:
            raise ValueError("data must hold at least one array [N, ...], got none")
        on_device = all(isinstance(leaf, jax.Array) for _, leaf in leaves)
        held: list[np.ndarray | jax.Array] = []
        rows = []
        for path, given in leaves:
            name = named(path)
            leaf = given if on_device else _on_host(given, name)
            if len(leaf.shape) == 0:
                raise ValueError(
                    f"data must hold arrays [N, ...], got an array without axes in {name}: "
                    "constants belong into the loss function; a list that is a column becomes an "
                    "array by np.asarray"
                )
            if held and leaf.shape[0] != held[0].shape[0]:
                raise ValueError(
                    "data must hold arrays [N, ...] with one and the same N, got another number "
                    f"of rows in {name} than in {named(leaves[0][0])}"
                )
            if on_device and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                raise ValueError(
                    f"data must hold numbers or bools, got {leaf.dtype} in {name}: keys do not "
                    "belong to records"
                )
            # On the device nothing is converted: what was made under jax_enable_x64 stays wide.
            dtype = leaf.dtype if on_device else kept_dtype(leaf.dtype, name)
            rows.append(jax.ShapeDtypeStruct(tuple(leaf.shape[1:]), dtype))
            held.append(leaf)
        size = _countable(int(held[0].shape[0]))
        if on_device:
            require_gatherable(size)
        unflatten = jax.tree_util.tree_unflatten
        return cls(unflatten(structure, held), unflatten(structure, rows), size, on_device)

    def __len__(self) -> int:
        return self.size

    def gather(self, indices: np.ndarray, mask: np.ndarray) -> PyTree:
        """The records at ``indices``, copied to the host; see ``Source.gather``.

        Each array is asked once, for ascending indices without repetition: a file is read from its
        beginning to its end, and h5py allows nothing else.
        """
        places, kept = chosen(indices, mask, self.size)
        ascending, back = np.unique(kept, return_inverse=True)
        # JAX wants indices of 32 bits, which reach every record on a device.
        asked = ascending.astype(np.int32) if self.on_device else ascending

        def rows(
            path: LeafPath, like: jax.ShapeDtypeStruct, leaf: np.ndarray | jax.Array
        ) -> np.ndarray:
            _require_unchanged(int(leaf.shape[0]), self.size)
            # Always a new array: what a caller put on the device may still share its memory.
            out = np.zeros((len(mask), *like.shape), like.dtype)
            if not len(kept):
                return out
            read = np.asarray(leaf[asked])
            if isinstance(leaf, np.memmap):
                _unmap(leaf)
            if read.shape != (len(ascending), *like.shape):
                raise ValueError(
                    f"{named(path)} must give rows of shape {list(like.shape)} for an array of "
                    "indices, got something else: array-likes need [indices] as NumPy's arrays "
                    "have it"
                )
            out[places] = converted(read, np.dtype(like.dtype), named(path))[back]
            return out

        return jax.tree_util.tree_map_with_path(rows, self.example, self.arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class Records:
    """A source of records from anything with ``len`` and ``[index]``.

    Within a record, dicts and tuples are structure and a list of numbers is one array. Where the
    data have ``__getitems__`` (torch's protocol: a list of indices gives a list of records), a
    whole physical batch is read at once. Hugging Face data sets are fastest
    ``.with_format("numpy")``.

    What the data do per record (a decoder, a random crop) must depend on that record alone: what
    is computed from several records, such as a mean of the data set, is a release of its own.
    """

    data: RandomAccess = dataclasses.field(repr=False)  # the data that are read. Sensitive
    example: PyTree  # pytree of ``jax.ShapeDtypeStruct``: one record
    # The number of records when the source was made. Sensitive under add-or-remove-one.
    size: int = dataclasses.field(repr=False)
    on_device: bool = dataclasses.field(default=False, init=False, repr=False)

    @classmethod
    def of(cls, data: RandomAccess, example: PyTree | None = None) -> "Records":
        """Makes the source; reads record 0 unless ``example`` is given."""
        size = _countable(len(data))
        if example is not None:
            leaves, structure = jax.tree_util.tree_flatten_with_path(example)
            if not leaves or not all(_is_array(leaf) for _, leaf in leaves):
                raise ValueError(
                    "example must be a pytree of what has shape and dtype, such as "
                    f"jax.ShapeDtypeStruct or NumPy arrays, got {type(example).__name__}"
                )
        elif size == 0:
            raise ValueError(
                "data must hold a record to take shapes from, or example must be given, got an "
                "empty source without one"
            )
        else:
            leaves, structure = _flat(_read(data.__getitem__, 0))
            if not leaves:
                raise ValueError(
                    "data must hold records with at least one number, got None or an empty "
                    "structure. Filter before the records are counted, so that no index stands for "
                    "nothing"
                )
            leaves = [(path, as_numbers(leaf, named(path))) for path, leaf in leaves]
        dtypes = [kept_dtype(leaf.dtype, named(path)) for path, leaf in leaves]
        shapes = [tuple(leaf.shape) for _, leaf in leaves]
        structs = list(map(jax.ShapeDtypeStruct, shapes, dtypes))
        return cls(data, jax.tree_util.tree_unflatten(structure, structs), size)

    def __len__(self) -> int:
        return self.size

    def gather(self, indices: np.ndarray, mask: np.ndarray) -> PyTree:
        """The records at ``indices``, each read once; see ``Source.gather``."""
        _require_unchanged(len(self.data), self.size)
        places, kept = chosen(indices, mask, self.size)
        likes, structure = jax.tree_util.tree_flatten_with_path(self.example)
        out = [np.zeros((len(mask), *like.shape), like.dtype) for _, like in likes]
        ascending, back = np.unique(kept, return_inverse=True)

        for which, record in enumerate(self._records(ascending.tolist())):
            leaves, found = _flat(record)
            if found != structure:
                raise ValueError(
                    "data must hold records that all have the structure of the example, got one "
                    "with another: a missing value, a missing key, or None"
                )
            # Copied at once: a reader may hand out the same buffer for every record.
            rows = places[back == which]
            for array, (path, value), (_, like) in zip(out, leaves, likes, strict=True):
                name = named(path)
                number = as_numbers(value, name)
                if number.shape != like.shape:
                    # Without the shape that was found, which belongs to the record.
                    raise ValueError(
                        "data must hold records that all have the shape of the example, "
                        f"{list(like.shape)} in {name}, got one of another: records of unlike "
                        "shapes cannot be stacked. Bring them to one shape in the source; "
                        "jaxdp.sampling.padded_text does it for token ids"
                    )
                array[rows] = converted(number, np.dtype(like.dtype), name)
        return jax.tree_util.tree_unflatten(structure, out)

    def _records(self, indices: list[int]) -> Iterator[PyTree]:
        """The records at ``indices``, in that order; Python integers, as readers expect them."""
        together = getattr(self.data, "__getitems__", None)
        if not indices or not callable(together):
            for index in indices:
                yield _read(self.data.__getitem__, index)
            return
        records = _read(together, indices)
        if not isinstance(records, Iterable) or len(list_of := list(records)) != len(indices):
            raise ValueError(
                "data.__getitems__ must give one record for each index, got another number of them"
            )
        yield from list_of


def _read(read: Callable[[Key], PyTree], key: Key) -> PyTree:
    try:
        return read(key)
    except StopIteration as error:
        # It would look like the end of the training to whoever iterates over batches.
        raise RuntimeError("the source raised StopIteration instead of giving records") from error


def _flat(record: PyTree) -> tuple[list[tuple[LeafPath, PyTree]], PyTreeDef]:
    """The leaves of a record with their paths, and its structure; lists of numbers are leaves."""

    def is_leaf(part: PyTree) -> bool:
        # JAX warns of iterators, which it may some day read out; here they are refused as leaves.
        if isinstance(part, (Iterator, Set)):
            return True
        # A list, nested or not, that begins with a number, or is empty, is one array. JAX would
        # take every number for a leaf.
        if not isinstance(part, list):
            return False
        while isinstance(part, list):
            if not part:
                return True
            part = part[0]
        return isinstance(part, (bool, int, float, complex, np.generic))

    return jax.tree_util.tree_flatten_with_path(record, is_leaf=is_leaf)


def _on_host(leaf: np.ndarray | jax.Array, name: str) -> np.ndarray:
    """The leaf as a NumPy array; one with a NumPy dtype is returned as it is, unread."""
    if isinstance(leaf, (np.ma.MaskedArray, jax.Array)):
        return as_numbers(leaf, name)
    if not _is_array(leaf):
        raise ValueError(
            f"data must hold arrays [N, ...], got {type(leaf).__name__} in {name}: make it an "
            "array, np.asarray; records that are read one by one must be one object with len and "
            "[index]"
        )
    try:
        np.dtype(leaf.dtype)
    except TypeError:  # a tensor of another library
        return as_numbers(leaf, name)
    return leaf


def _unmap(leaf: np.memmap) -> None:
    """Unmaps what was read of a memory map, which stays cached.

    The system maps whole stretches of a file around each row, so that a few thousand random rows
    would bring all of it into the process's memory and, in a container, to its limit. Only where
    nothing can be lost: a copy-on-write map would forget what was written to it. Windows cannot.
    """
    if leaf.mode == "r" and sys.platform != "win32":
        pages = getattr(leaf, "_mmap", None)
        if isinstance(pages, mmap.mmap):
            pages.madvise(mmap.MADV_DONTNEED)


Wrong = Literal["NaN", "infinity", "NaN or infinity"]
_TESTS: dict[Wrong, Callable[[ModuleType, np.ndarray | jax.Array], bool]] = {
    "NaN": lambda module, x: module.isnan(x).any(),
    "infinity": lambda module, x: module.isinf(x).any(),
    "NaN or infinity": lambda module, x: ~module.isfinite(x).all(),
}
_on_device = jax.jit(lambda x, wrong: _TESTS[wrong](jnp, x), static_argnames="wrong")


def holds(
    array: np.ndarray | jax.Array, wrong: Wrong, dtype: np.dtype | None = None, name: str = ""
) -> bool:
    """True if an array has what is wrong, in what this process holds of it; read in pieces.

    Args:
        array: in memory, in a memory map or on devices.
        wrong: what must not be among its numbers.
        dtype: to which what lies on the host is converted first; None for its own.
        name: of the array, for the error message of ``converted``.
    """
    # Whole numbers that stay what they are cannot be wrong.
    dtype = array.dtype if dtype is None else dtype
    if array.dtype == dtype and not jnp.issubdtype(dtype, np.inexact):
        return False
    if isinstance(array, jax.core.Tracer):  # `jax.jit(trainer.init)`: no numbers to look at yet
        return False
    shards = [array]
    if isinstance(array, jax.Array):  # replicas of a shard are one
        shards = list({str(each.index): each.data for each in array.addressable_shards}.values())
    for shard in shards:
        far = isinstance(shard, jax.Array) and any(on.platform != "cpu" for on in shard.devices())
        if far and shard.size > _SMALL:
            if _on_device(shard, wrong):
                return True
            continue
        whole = np.atleast_1d(shard)
        rows = max(1, TOGETHER // max(1, math.prod(whole.shape[1:])))
        for start in range(0, len(whole), rows):
            if _TESTS[wrong](np, converted(whole[start : start + rows], dtype, name)):
                return True
            if isinstance(whole, np.memmap):
                _unmap(whole)
    return False


def named(path: LeafPath) -> str:
    """``leaf ['x']`` for a path into a pytree; ``the array`` for a pytree that is one."""
    return f"leaf {jax.tree_util.keystr(path)}" if path else "the array"


def kept_dtype(dtype: DTypeLike, name: str) -> np.dtype:
    """The native dtype in which records of ``dtype`` reach JAX: float32 for float64, and so on.

    Raises:
        ValueError: ``dtype`` is not a number or a bool that JAX knows.
    """
    found = np.dtype(dtype)
    number = jnp.issubdtype(found, np.number) or jnp.issubdtype(found, np.bool_)
    # To NumPy a time difference is a signed integer; JAX has no extended precision.
    wide = found.kind in "fc" and found.itemsize > (8 if found.kind == "f" else 16)
    if number and found.kind != "m" and not wide:
        return np.dtype(jax.dtypes.canonicalize_dtype(found.newbyteorder("=")))
    text = (
        "give categories as integers, by a public list of them (one read off the records would be "
        "a release of its own), np.array([codes.get(word, len(codes)) for word in column]) with "
        "codes = {word: code for code, word in enumerate(CATEGORIES)}; free text as token ids; "
        "numbers by column.astype(np.float32); bytes by decoding them"
    )
    # NumPy's name of a dtype of text holds the length of the longest text.
    word, remedy = {
        "S": ("bytes", text),
        "T": ("text", text),
        "U": ("text", text),
        "V": (
            "a structured dtype",
            "give the fields of a structured array as a dict, {name: array[name]}",
        ),
        "O": (
            "object",
            "records of unlike length (pad them: jaxdp.sampling.padded_text), missing values, or "
            f"Python objects cannot be stacked. If it is text, {text}",
        ),
    }.get(found.kind, (str(found), "convert it to float32 or int32"))
    raise ValueError(f"data must hold numbers or bools, got {word} in {name}: {remedy}")


def converted(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """``values`` as ``dtype``; the array itself where it has that dtype already.

    Raises:
        ValueError: an integer does not fit, or the conversion would drop a fraction or a sign.
    """
    if values.dtype == dtype:
        return values
    kept_dtype(values.dtype, name)
    if not np.can_cast(values.dtype, dtype, "same_kind"):
        raise ValueError(
            f"{name} must hold {dtype} as the first record does, got {values.dtype}: let the "
            "source convert every record, or declare the dtype with as_source(data, example=...)"
        )
    # Integers are checked by their values: the cast would wrap them.
    integers = values.dtype.kind in "iu" and dtype.kind in "iu"
    if integers and values.size and not np.can_cast(values.dtype, dtype, "safe"):
        limits = np.iinfo(dtype)
        if values.min() < limits.min or values.max() > limits.max:
            raise ValueError(
                f"{name} must hold integers that fit {dtype}, got some that do not: renumber them, "
                "split them into two columns, or enable jax_enable_x64 before the source is made"
            )
    # A float64 beyond float32's range becomes infinite: a gradient that is not finite counts as 0.
    # A warning would say that such a record was drawn.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(dtype)


def as_numbers(value: ArrayLike, name: str) -> np.ndarray:
    """A leaf of a record as an array, without a copy if it is one, or a tensor on the host."""
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            f"data must hold plain arrays, got a masked array in {name}: its mask would be lost. "
            "Fill it, and give the mask as a leaf of its own"
        )
    if hasattr(value, "numpy") and not isinstance(value, (np.ndarray, jax.Array)):
        value = value.numpy()
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):
        # Not chained: NumPy's message may hold the record.
        raise ValueError(
            f"data must hold numbers, got in {name} what NumPy makes no array of: nested lists of "
            "unlike lengths, or numbers and arrays in one list"
        ) from None
    kept_dtype(array.dtype, name)
    return array


def _countable(size: int) -> int:
    """``size``, if records can be drawn from so many; otherwise ValueError."""
    if size > MOST_RECORDS:
        raise ValueError(
            "data must hold at most 2**53 records, got more. A source that repeats itself "
            "(such as grain's MapDataset.repeat()) must be given without the repetition: every "
            "record must be in it once"
        )
    return size


def _require_unchanged(now: int, then: int) -> None:
    """Raises ValueError if a source has changed its length since it was made."""
    if now != then:
        raise ValueError(
            "data must keep its number of records, got another number than when the source was "
            "made: draws are made from the first one. Make a new source, and a new run"
        )


def chosen(indices: np.ndarray, mask: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [k] twice: the rows whose mask is True, and the indices there.

    Args:
        indices: integer [m]; ignored where the mask is False.
        mask: bool [m].
        size: the number of records.

    Raises:
        ValueError: another shape or dtype, or an index outside the source.
    """
    indices, mask = np.asarray(indices), np.asarray(mask)
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise ValueError(f"indices must be integers [m], got {indices.dtype} {list(indices.shape)}")
    if mask.shape != indices.shape or mask.dtype != bool:
        expected = f"bool {list(indices.shape)}"
        raise ValueError(f"mask must be {expected}, got {mask.dtype} {list(mask.shape)}")
    kept = indices[mask]
    # Before the cast: a uint64 beyond int64 would come out negative, or as another record.
    if kept.size and not (kept.min() >= 0 and kept.max() < size):
        raise ValueError("indices must lie within the source, got one that does not")
    return np.flatnonzero(mask), kept.astype(np.int64)
