"""Images in, features out: batches of one shape, and means over the cells of a grid."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

# Of a batch, as if the second order of all its images were held at once.
_NUMBERS_AT_ONCE = 1 << 23


def checked(images: np.ndarray) -> np.ndarray:
    if getattr(images, "ndim", 0) != 4 or not all(images.shape[1:]):
        raise ValueError(
            f"images must be an array [n, height, width, channels], got shape {np.shape(images)}"
        )
    return images


def rows_at_once(shape: tuple[int, ...], paths: int, margin: int) -> int:
    """Images of a batch, a function of public shapes alone."""
    sides = [side + margin for side in shape[:-1]]
    return max(1, min(1024, _NUMBERS_AT_ONCE // (math.prod(sides) * shape[-1] * paths)))


def mapped(function: Callable[[jax.Array], jax.Array], x: np.ndarray, rows: int) -> np.ndarray:
    """The function of all images, computed ``rows`` at a time."""
    shape = jax.eval_shape(function, jax.ShapeDtypeStruct((rows, *x.shape[1:]), jnp.float32)).shape
    found = np.empty((len(x), *shape[1:]), np.float32)
    for start in range(0, len(x), rows):
        part = np.asarray(x[start : start + rows], np.float32)
        missing = [(0, rows - len(part))] + [(0, 0)] * (x.ndim - 1)
        found[start : start + rows] = np.asarray(function(jnp.pad(part, missing)))[: len(part)]
    return found


def in_cells(x: jax.Array, down: int, across: int) -> jax.Array:
    """Means [down, across, k] of [h, w, k] over the cells of a grid."""
    rows, columns = (
        jnp.asarray(_cells(side, n)) for side, n in zip(x.shape, (down, across), strict=False)
    )
    exact = jax.lax.Precision.HIGHEST
    by_rows = jnp.einsum("ai,ijc->ajc", rows, x, precision=exact)
    return jnp.einsum("bj,ajc->abc", columns, by_rows, precision=exact)


@functools.lru_cache(maxsize=64)
def _cells(side: int, cells: int) -> np.ndarray:
    """float32 [cells, side]: weights of the mean over each cell; sizes differ by 1 at most."""
    edges = np.arange(cells + 1) * side // cells
    place = np.arange(side)
    inside = (place >= edges[:-1, None]) & (place < edges[1:, None])
    return (inside / inside.sum(1, keepdims=True)).astype(np.float32)
