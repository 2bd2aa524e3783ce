"""Checks of a physical batch, from shapes alone (so also inside ``jit``)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp._rows import check_mask, check_records, rows
from jaxdp.types import Batch, PyTree

__all__ = ["check_records", "checked_mask", "opened", "rows"]


def opened(batch: Any, mask: Any) -> tuple[PyTree, jax.Array]:
    """The rows of a physical batch [m, ...] and its mask, bool [m].

    Args:
        batch: a ``Batch``, or a pytree of arrays [m, ...].
        mask: of a pytree: bool [m] or "all"; None for a ``Batch``, which holds its own.

    Raises:
        ValueError: the mask is missing, given with a ``Batch``, or of another shape or dtype; the
            batch is not arrays [m, ...], or a pytree that holds a ``Batch``.
    """
    if not isinstance(batch, Batch):
        leaves = jax.tree.leaves(batch, is_leaf=lambda leaf: isinstance(leaf, Batch))
        if any(isinstance(leaf, Batch) for leaf in leaves):
            raise ValueError(
                "batch must be one Batch with all data in it, got a pytree that holds a Batch: its "
                "mask would be ignored"
            )
        return batch, checked_mask(mask, rows("batch", batch))
    if mask is not None:
        raise ValueError("mask must not be given with a Batch, which holds its own; got both")
    check_mask(batch.mask, rows("batch", batch.data))
    return batch.data, jnp.asarray(batch.mask)


def checked_mask(mask: Any, size: int) -> jax.Array:
    """The mask as bool [size]; "all" is a mask of True."""
    if mask is None:
        raise ValueError(
            "mask must say which rows are records, got None: padding would count as records. Hand "
            "over a jaxdp.Batch (draw.batches(data) makes them), or give mask=: bool "
            f'[{size}], or "all" where no row is padding'
        )
    if isinstance(mask, str):
        if mask != "all":
            raise ValueError(f'mask must be bool [{size}] or "all", got {mask!r}')
        return jnp.ones(size, dtype=bool)
    mask = jnp.asarray(mask)
    check_mask(mask, size)
    return mask


def example(rows: PyTree) -> PyTree:
    """The shapes of one row of a batch of leaves [m, ...], also where m is 0."""
    shapes = jax.eval_shape(lambda tree: tree, rows)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), shapes)


def of_none(one: Callable[[PyTree, jax.Array], Any], rows: PyTree) -> Any:
    """The (sum, ClipInfo) of a batch without rows: zeros, and leaves [0, ...].

    ``one`` is only traced, for the shapes of a single row: much of JAX refuses empty arrays.
    """
    single = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), example(rows)
    )
    clipped, info = jax.eval_shape(one, single, jax.ShapeDtypeStruct((1,), jnp.bool_))
    none = jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape[1:]), leaf.dtype), info)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), clipped)
    return zeros._replace(norms=none.norms, clipped=none.clipped), none
