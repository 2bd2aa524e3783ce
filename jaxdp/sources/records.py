"""Sources that are read one record at a time: grain, tfds, Hugging Face, torch, lists."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike

from jaxdp.sources import _leaves
from jaxdp.sources._leaves import LeafPath, RandomAccess
from jaxdp.types import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Records:
    """A source of records from anything with ``len`` and ``[index]``.

    Within a record, dicts and tuples are structure and a list of numbers is one array. Where the
    data have ``__getitems__`` (torch's protocol: a list of indices gives a list of records), a
    whole physical batch is read at once. Hugging Face data sets are fastest
    ``.with_format("numpy")``.

    What the data do per record (a decoder, a random crop) must depend on that record alone: what
    is computed from several records, such as a mean of the data set, is a release of its own.

    Attributes:
        data: the data that are read. Sensitive.
        example: pytree of ``jax.ShapeDtypeStruct``: one record.
        size: the number of records when the source was made. Sensitive under
            add-or-remove-one.
        on_device: False.
    """

    data: RandomAccess = dataclasses.field(repr=False)
    example: PyTree
    size: int = dataclasses.field(repr=False)
    on_device: bool = dataclasses.field(default=False, init=False, repr=False)

    @classmethod
    def of(cls, data: RandomAccess, example: PyTree | None = None) -> "Records":
        """Makes the source; reads record 0 unless ``example`` is given."""
        size = _leaves.require_count(len(data))
        if example is not None:
            return cls(data, _declared(example), size)
        if size == 0:
            raise ValueError(
                "data must hold a record to take shapes from, or example must be given, got an "
                "empty source without one"
            )
        return cls(data, _like(_read_one(data, 0)), size)

    def __len__(self) -> int:
        return self.size

    def gather(self, indices: np.ndarray, mask: np.ndarray) -> PyTree:
        """The records at ``indices``, each read once; see ``Source.gather``."""
        _leaves.require_unchanged(len(self.data), self.size)
        kept = _leaves.chosen(indices, mask, self.size)
        likes, structure = jax.tree_util.tree_flatten_with_path(self.example)
        out = [np.zeros((len(mask), *like.shape), like.dtype) for _, like in likes]
        ascending, back = np.unique(kept, return_inverse=True)
        places = np.flatnonzero(np.asarray(mask))
        order = [places[back == which] for which in range(len(ascending))]
        # Copied row by row at once: a reader may hand out the same buffer for every record.
        for rows, record in zip(order, _read(self.data, ascending.tolist()), strict=True):
            for array, value in zip(out, _checked(record, likes, structure), strict=True):
                array[rows] = value
        return jax.tree_util.tree_unflatten(structure, out)


def _declared(example: PyTree) -> PyTree:
    leaves = jax.tree_util.tree_leaves_with_path(example)
    shaped = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for _, leaf in leaves]
    if not shaped or not all(shaped):
        raise ValueError(
            "example must be a pytree of what has shape and dtype, such as jax.ShapeDtypeStruct or "
            f"NumPy arrays, got {type(example).__name__}"
        )
    return jax.tree_util.tree_map_with_path(_struct, example)


def _like(record: PyTree) -> PyTree:
    leaves, structure = _leaves.flat(record)
    if not leaves:
        raise ValueError(
            "data must hold records with at least one number, got None or an empty structure. "
            "Filter before the records are counted, so that no index stands for nothing"
        )
    structs = [_struct(p, _leaves.as_numbers(v, _leaves.named(p))) for p, v in leaves]
    return jax.tree_util.tree_unflatten(structure, structs)


def _struct(path: LeafPath, leaf: np.ndarray) -> jax.ShapeDtypeStruct:
    dtype = _leaves.kept_dtype(leaf.dtype, _leaves.named(path))
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype)


def _read(data: RandomAccess, indices: list[int]) -> Iterable[PyTree]:
    """The records at ``indices``, in that order; Python integers, as readers expect them."""
    together = getattr(data, "__getitems__", None)
    if not indices or not callable(together):
        return (_read_one(data, index) for index in indices)
    records = _guarded(together, indices)
    if not isinstance(records, Iterable) or len(list_of := list(records)) != len(indices):
        raise ValueError(
            "data.__getitems__ must give one record for each index, got another number of them"
        )
    return list_of


def _read_one(data: RandomAccess, index: int) -> PyTree:
    return _guarded(data.__getitem__, index)


def _guarded(read: Callable[..., PyTree], key: int | list[int]) -> Any:
    try:
        return read(key)
    except StopIteration as error:
        # It would look like the end of the training to whoever iterates over batches.
        raise RuntimeError("the source raised StopIteration instead of giving records") from error


def _checked(
    record: PyTree, likes: list[tuple[LeafPath, jax.ShapeDtypeStruct]], structure: PyTreeDef
) -> list[np.ndarray]:
    """The leaves of ``record`` in the example's dtypes; ValueError if they differ in form."""
    leaves, found = _leaves.flat(record)
    if found != structure:
        raise ValueError(
            "data must hold records that all have the structure of the example, got one with "
            "another: a missing value, a missing key, or None"
        )
    pairs = zip(leaves, likes, strict=True)
    return [_fitting(value, like, _leaves.named(path)) for (path, value), (_, like) in pairs]


def _fitting(value: ArrayLike, like: jax.ShapeDtypeStruct, name: str) -> np.ndarray:
    array = _leaves.as_numbers(value, name)
    if array.shape != like.shape:
        # Without the shape that was found, which belongs to the record.
        raise ValueError(
            f"data must hold records that all have the shape of the example, {list(like.shape)} in "
            f"{name}, got one of another: records of unlike shapes cannot be stacked. Bring them "
            "to one shape in the source; jaxdp.sources.padded_text does it for token ids"
        )
    return _leaves.converted(array, np.dtype(like.dtype), name)
