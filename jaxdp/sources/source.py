"""Turns data of all kinds into sources of records, and refuses those without random access."""

from collections.abc import Mapping, Set, ValuesView
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxdp.sources.arrays import DeviceArrays, HostArrays
from jaxdp.sources.records import Records
from jaxdp.types import PyTree


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
    pytree of JAX arrays [N, ...]                               ``DeviceArrays``, as they are
    pytree of NumPy arrays, ``np.memmap``, or anything with     ``HostArrays``, never copied whole
    ``shape``, ``dtype`` and ``[indices]`` (h5py, zarr)
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
    if not isinstance(data, Source):
        _refuse_by_kind(data)
        if isinstance(data, list) or (_is_leaf(data) and not _is_array(data)):
            _require_random_access(data)
            return Records.of(data, example)
    if example is not None:
        raise ValueError("example must be None where data are arrays: they have shapes and dtypes")
    if isinstance(data, Source):
        return data
    leaves = jax.tree.leaves(data)
    if leaves and all(isinstance(leaf, jax.Array) for leaf in leaves):
        return DeviceArrays.of(data)
    return HostArrays.of(data)


def _parts(data: PyTree) -> list[Any]:
    """The leaves of a pytree; an object that JAX warns of is a leaf."""
    return jax.tree.leaves(
        data, is_leaf=lambda part: hasattr(part, "todense") or _is_consumed(part)
    )


def _is_leaf(data: PyTree) -> bool:
    parts = _parts(data)
    return len(parts) == 1 and parts[0] is data


def _is_consumed(part: PyTree) -> bool:
    """True for data that can only be iterated over: generators, sets, ``dict.values()``."""
    return hasattr(part, "__next__") or isinstance(part, (Set, ValuesView))


def _is_array(data: PyTree) -> bool:
    return hasattr(data, "shape") and hasattr(data, "dtype")


def _kind(data: PyTree) -> str:
    return f"{type(data).__module__}.{type(data).__qualname__}".removeprefix("builtins.")


def _refuse_by_kind(data: PyTree) -> None:
    """Raises ValueError for data that look like arrays or records and are neither."""
    for part in [] if isinstance(data, list) else _parts(data):
        if _is_consumed(part):
            raise _stream(part)
        if hasattr(part, "todense"):
            raise ValueError(
                f"data must hold dense arrays, got a sparse {_kind(part)}: densify it, or give a "
                "source whose [index] densifies one record"
            )
        # Frames and series of pandas and polars and tables of pyarrow: [i] is a column.
        converts = hasattr(part, "to_numpy") or hasattr(part, "to_pandas")
        if hasattr(part, "iloc") or (hasattr(part, "columns") and converts):
            raise ValueError(
                f"data must hold arrays or records, got {_kind(part)}: give frame.to_numpy(), or a "
                "dict of columns, {name: frame[name].to_numpy() for name in names}"
            )
    if isinstance(data, (str, bytes, bytearray)):
        raise ValueError(
            f"data must hold arrays or records, got {_kind(data)}; jaxdp.sources.load reads a file"
        )
    if isinstance(data, Mapping) and _is_leaf(data):
        raise ValueError(
            f"data must be one set of records, got the mapping {_kind(data)}: choose a split, such "
            "as data['train'], or make columns with dict(data)"
        )


_STREAMS = {"IterableDataset", "IterDataset", "IterDataPipe", "DataLoader"}


def _require_random_access(data: PyTree) -> None:
    """Raises ValueError for streams, whatever else they have, and for columns in a list."""
    if isinstance(data, list):
        if data and all(_is_array(value) and value.shape for value in data[:2]):
            raise ValueError(
                "data must not be a list of arrays, which can be read in two ways: give "
                "np.stack(data) where each array is a record, and a tuple where each array is a "
                "column [N, ...]"
            )
        return
    # torch's IterableDataset and its like may have a length.
    stream = any(base.__name__ in _STREAMS for base in type(data).__mro__)
    try:
        len(data)
    except TypeError:  # no __len__, or a cardinality that is not known
        stream = True
    if stream or not hasattr(type(data), "__getitem__"):
        raise _stream(data)


def _stream(data: PyTree) -> ValueError:
    return ValueError(
        f"data must have len(data) and data[index], got {_kind(data)}. A stream cannot be sampled "
        "from, and epsilon is proven for sampled records only: give a random-access source instead "
        "(arrays, a memory map, tfds.data_source, grain's sources, a map-style dataset, or "
        "list(stream) where it fits into memory)"
    )
