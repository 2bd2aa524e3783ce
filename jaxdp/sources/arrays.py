"""Sources whose records are the rows of arrays on the device, in memory, or in a file."""

import dataclasses
import mmap
import sys
from typing import Any

import jax
import numpy as np

from jaxdp import _rows
from jaxdp.sampling.rules import Identities
from jaxdp.sources import _leaves
from jaxdp.sources._leaves import LeafPath
from jaxdp.types import PyTree

Array = np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceArrays:
    """A source of records that lie on the device.

    Attributes:
        arrays: pytree of JAX arrays [N, ...], as they were given. Sensitive.
        example: pytree of ``jax.ShapeDtypeStruct``: one record.
        on_device: True.
    """

    arrays: PyTree = dataclasses.field(repr=False)
    example: PyTree
    on_device: bool = dataclasses.field(default=True, init=False, repr=False)

    @classmethod
    def of(cls, arrays: PyTree) -> "DeviceArrays":
        """Makes the source from shapes and dtypes alone."""
        example = _example(arrays)
        _rows.require_gathered(int(jax.tree.leaves(arrays)[0].shape[0]))
        return cls(arrays, example)

    def __len__(self) -> int:
        return int(jax.tree.leaves(self.arrays)[0].shape[0])

    def gather(self, indices: np.ndarray, mask: np.ndarray) -> PyTree:
        """The records at ``indices``, copied to the host; see ``Source.gather``."""
        return _gathered(self, indices, mask)


@dataclasses.dataclass(frozen=True, eq=False)
class KnownArrays(DeviceArrays):
    """A source of records on the device that were made of others, whose identities they keep.

    Attributes:
        identities: [N], see ``jaxdp.sources.hashes.identities``. Sensitive.
    """

    identities: Identities = dataclasses.field(repr=False, kw_only=True)


@dataclasses.dataclass(frozen=True, eq=False)
class HostArrays:
    """A source of records in the host's memory, or in a file that is read on access.

    Attributes:
        arrays: pytree of NumPy arrays, memory maps or array-likes [N, ...]. Sensitive.
        example: pytree of ``jax.ShapeDtypeStruct``: one record, in JAX's dtypes.
        size: N when the source was made. Sensitive under add-or-remove-one.
        on_device: False.
    """

    arrays: PyTree = dataclasses.field(repr=False)
    example: PyTree
    size: int = dataclasses.field(repr=False)
    on_device: bool = dataclasses.field(default=False, init=False, repr=False)

    @classmethod
    def of(cls, arrays: PyTree) -> "HostArrays":
        """Makes the source without reading the arrays."""
        arrays = jax.tree_util.tree_map_with_path(_hosted, arrays)
        example = _example(arrays)
        return cls(arrays, example, int(jax.tree.leaves(arrays)[0].shape[0]))

    def __len__(self) -> int:
        return self.size

    def gather(self, indices: np.ndarray, mask: np.ndarray) -> PyTree:
        """The records at ``indices``; see ``Source.gather``.

        Each array is asked once, for ascending indices without repetition: a file is read from its
        beginning to its end, and h5py allows nothing else.
        """
        for leaf in jax.tree.leaves(self.arrays):
            _leaves.require_unchanged(int(leaf.shape[0]), self.size)
        return _gathered(self, indices, mask)


def _hosted(path: LeafPath, leaf: Array) -> Any:
    """The leaf as a NumPy array; one with a NumPy dtype is returned as it is, unread."""
    name = _leaves.named(path)
    if isinstance(leaf, (np.ma.MaskedArray, jax.Array)):
        return _leaves.as_numbers(leaf, name)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        kind = type(leaf).__name__
        raise ValueError(
            f"data must hold arrays [N, ...], got {kind} in {name}: make it an array, np.asarray; "
            "records that are read one by one must be one object with len and [index]"
        )
    try:
        np.dtype(leaf.dtype)
    except TypeError:  # a tensor of another library
        return _leaves.as_numbers(leaf, name)
    return leaf


def _example(arrays: PyTree) -> PyTree:
    """Shape and dtype of one record; ValueError unless the arrays have equal lengths."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    if not leaves:
        raise ValueError("data must hold at least one array [N, ...], got none")
    for path, leaf in leaves:
        if len(leaf.shape) == 0:
            raise ValueError(
                f"data must hold arrays [N, ...], got an array without axes in "
                f"{_leaves.named(path)}: constants belong into the loss function"
            )
        if leaf.shape[0] != leaves[0][1].shape[0]:
            raise ValueError(
                "data must hold arrays [N, ...] with one and the same N, got another number of "
                f"rows in {_leaves.named(path)} than in {_leaves.named(leaves[0][0])}"
            )
    _leaves.require_count(int(leaves[0][1].shape[0]))
    return jax.tree_util.tree_map_with_path(_row, arrays)


def _row(path: LeafPath, leaf: Array) -> jax.ShapeDtypeStruct:
    name = _leaves.named(path)
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise ValueError(
            f"data must hold numbers or bools, got {leaf.dtype} in {name}: keys do not belong to "
            "records"
        )
    # On the device nothing is converted, so a wide array made under jax_enable_x64 stays wide.
    on_device = isinstance(leaf, jax.Array)
    dtype = leaf.dtype if on_device else _leaves.kept_dtype(leaf.dtype, name)
    return jax.ShapeDtypeStruct(tuple(leaf.shape[1:]), dtype)


def _gathered(source: "DeviceArrays | HostArrays", indices: np.ndarray, mask: np.ndarray) -> PyTree:
    kept = _leaves.chosen(indices, mask, len(source))
    places = np.flatnonzero(np.asarray(mask))
    ascending, back = np.unique(kept, return_inverse=True)

    def rows(path: LeafPath, like: jax.ShapeDtypeStruct, leaf: Array) -> np.ndarray:
        # Always a new array: what a caller put on the device may still share its memory.
        out = np.zeros((len(mask), *like.shape), like.dtype)
        if len(kept):
            read = _read(leaf, ascending)
            if read.shape != (len(ascending), *like.shape):
                raise ValueError(
                    f"{_leaves.named(path)} must give rows of shape {list(like.shape)} for an "
                    "array of indices, got something else: array-likes need [indices] as NumPy's "
                    "arrays have it"
                )
            out[places] = _leaves.converted(read, np.dtype(like.dtype), _leaves.named(path))[back]
        return out

    return jax.tree_util.tree_map_with_path(rows, source.example, source.arrays)


def _read(leaf: Array, ascending: np.ndarray) -> np.ndarray:
    """The rows of an array; of a read-only memory map the pages read are unmapped again.

    The system maps whole stretches around each row, so that a few thousand random rows would bring
    the whole file into the process's memory and, in a container, to its limit. They stay cached.
    """
    # JAX wants indices of 32 bits, which reach every record on a device.
    indices = ascending.astype(np.int32) if isinstance(leaf, jax.Array) else ascending
    rows = np.asarray(leaf[indices])
    # Only where nothing can be lost: a copy-on-write map would forget what was written to it.
    # Windows cannot.
    pages = getattr(leaf, "_mmap", None) if getattr(leaf, "mode", None) == "r" else None
    if isinstance(leaf, np.memmap) and isinstance(pages, mmap.mmap) and sys.platform != "win32":
        pages.madvise(mmap.MADV_DONTNEED)
    return rows
