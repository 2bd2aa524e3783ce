"""The dtypes of records: those that can be trained on, and their conversion to JAX's.

No message here holds a value, an index or a count of records: under add-or-remove-one all of them
are private.
"""

from collections.abc import Hashable, Iterator, Set
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxdp import _rows
from jaxdp.types import PyTree

# To a leaf, as ``jax.tree_util.tree_flatten_with_path`` has it.
LeafPath = tuple[Hashable, ...]


class RandomAccess(Protocol):
    """Records with ``len`` and ``[index]``: lists, and sources of grain, tfds, torch and others."""

    def __len__(self) -> int:
        """The number of records."""

    def __getitem__(self, index: int, /) -> PyTree:
        """One record."""


def named(path: LeafPath) -> str:
    """``leaf ['x']`` for a path into a pytree; ``the array`` for a pytree that is one."""
    return f"leaf {jax.tree_util.keystr(path)}" if path else "the array"


def kept_dtype(dtype: DTypeLike, name: str) -> np.dtype:
    """The native dtype in which records of ``dtype`` reach JAX: float32 for float64, and so on.

    Raises:
        ValueError: ``dtype`` is not a number or a bool that JAX knows.
    """
    found = np.dtype(dtype)
    if not _is_number(found):
        raise ValueError(
            f"data must hold numbers or bools, got {_word(found)} in {name}: {_remedy(found)}"
        )
    return np.dtype(jax.dtypes.canonicalize_dtype(found.newbyteorder("=")))


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


def is_number_list(value: PyTree) -> bool:
    """True for a list, nested or not, that begins with a number, and for an empty one.

    Within a record such a list is one array. ``jax.tree`` would take every number for a leaf.
    """
    if not isinstance(value, list):
        return False
    while isinstance(value, list):
        if not value:
            return True
        value = value[0]
    return isinstance(value, (bool, int, float, complex, np.generic))


def flat(record: PyTree) -> tuple[list[tuple[Any, Any]], Any]:
    """The leaves of a record with their paths, and its structure; lists of numbers are leaves."""
    # JAX warns of iterators, which it may some day read out; here they are refused as leaves.
    return jax.tree_util.tree_flatten_with_path(
        record, is_leaf=lambda part: is_number_list(part) or isinstance(part, (Iterator, Set))
    )


def require_count(size: int) -> int:
    """``size``, if records can be drawn from so many; otherwise ValueError."""
    if size > _rows.MOST_RECORDS:
        raise ValueError(
            "data must hold at most 2**53 records, got more. A source that repeats itself "
            "(such as grain's MapDataset.repeat()) must be given without the repetition: every "
            "record must be in it once"
        )
    return size


def require_unchanged(now: int, then: int) -> None:
    """Raises ValueError if a source has changed its length since it was made."""
    if now != then:
        raise ValueError(
            "data must keep its number of records, got another number than when the source was "
            "made: draws are made from the first one. Make a new source, and a new run"
        )


def chosen(indices: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
    """int64 [k]: the indices whose mask is True.

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
    return kept.astype(np.int64)


def _is_number(dtype: np.dtype) -> bool:
    if dtype.kind == "m":
        return False  # to NumPy a time difference is a signed integer
    if dtype.kind in "fc" and dtype.itemsize > (8 if dtype.kind == "f" else 16):
        return False  # JAX has no extended precision
    return bool(jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_))


def _word(dtype: np.dtype) -> str:
    # NumPy's name of a dtype of text holds the length of the longest text.
    return {"S": "bytes", "U": "text", "V": "a structured dtype"}.get(dtype.kind, str(dtype))


def _remedy(dtype: np.dtype) -> str:
    if dtype.kind in "SU":
        return "turn text into token ids first, and bytes into arrays by decoding them"
    if dtype.kind == "O":
        return (
            "records of unlike length (pad them: jaxdp.sources.padded_text), missing values, or "
            "Python objects cannot be stacked"
        )
    if dtype.kind == "V":
        return "give the fields of a structured array as a dict, {name: array[name]}"
    return "convert it to float32 or int32"
