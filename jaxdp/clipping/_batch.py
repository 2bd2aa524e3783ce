"""What a physical batch must look like, checked from shapes alone (so also inside ``jit``)."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.types import PyTree


def rows(name: str, tree: PyTree) -> int:
    """The common first axis m of all leaves."""
    shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(tree)]
    sizes = {shape[0] if shape else -1 for shape in shapes}
    if len(sizes) != 1 or -1 in sizes:
        raise ValueError(
            f"{name} must hold arrays [m, ...] with one and the same m, got shapes {shapes}"
        )
    return int(sizes.pop())


def checked_mask(mask: Any, size: int) -> jax.Array:
    """The mask as bool [size]; None lets every row through."""
    if mask is None:
        return jnp.ones(size, dtype=bool)
    mask = jnp.asarray(mask)
    if mask.shape != (size,) or mask.dtype != jnp.bool_:
        raise ValueError(f"mask must be bool [{size}], got {mask.dtype} {list(mask.shape)}")
    return mask


def cut(rows: jax.Array, size: int) -> jax.Array:
    """Rows [m, ...] as [ceil(m / size), size, ...], filled up (a mask: with False)."""
    missing = -rows.shape[0] % size
    filler = jnp.zeros_like(rows[:1]) if rows.dtype == jnp.bool_ else rows[:1]
    filled = rows if missing == 0 else jnp.concatenate([rows, *[filler] * missing])
    return filled.reshape(-1, size, *rows.shape[1:])
