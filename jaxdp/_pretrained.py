"""The filters of ``features.pretrained``, their recipe, and an image's responses to them.

``benchmarks/pretrain.py`` makes them from images of a random process; nobody's data enters.
"""

import functools
import hashlib
import importlib.resources
import io
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import _images

# Filters by the number of an image's channels; side of a filter, and of a cell of the grid.
FILTERS = {1: 64, 3: 128}
SIDE, CELL = 6, 4
# Added to a patch's deviation, of pixels in [0, 1]: smaller ones count as noise (Coates and Ng).
CONTRAST = 10 / 255


class Weights(NamedTuple):
    """A convolution after contrast normalisation.

    Attributes:
        filters: [side, side, channels, count]; the sum of each is 0.
        thresholds: [count], what a response must exceed, on either side.
    """

    filters: np.ndarray | jax.Array
    thresholds: np.ndarray | jax.Array


def recipe(channels: int) -> dict[str, Any]:
    """The recipe of the weights: command, seed, and the digest of the arrays."""
    text = _folder().joinpath(f"dead_leaves_{channels}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@functools.lru_cache(maxsize=2)
def weights(channels: int) -> Weights:
    """float32 weights of the network for images of ``channels`` channels.

    Raises:
        ValueError: the arrays are not those of the recipe.
    """
    content = _folder().joinpath(f"dead_leaves_{channels}.npz").read_bytes()
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    wanted = recipe(channels)["sha256"]
    if (found := digest(arrays)) != wanted:
        raise ValueError(
            f"weights must be those of their recipe, digest {wanted}, got {found}: install jaxdp "
            "again"
        )
    return Weights(**{name: array.astype(np.float32) for name, array in arrays.items()})


def digest(arrays: dict[str, np.ndarray]) -> str:
    """SHA-256 of arrays with their names, shapes and types, in the order of the names."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name]).astype(arrays[name].dtype.newbyteorder("<"))
        found.update(repr((name, array.shape, array.dtype.str)).encode())
        found.update(array.tobytes())
    return found.hexdigest()


@functools.partial(jax.jit, static_argnames="mirrored")
def features(kept: Weights, images: jax.Array, mirrored: bool) -> jax.Array:
    """Rectified responses in cells, [n, h, w, 2 · count], one image after the other.

    Args:
        kept: the weights.
        images: [n, height, width, channels] in [0, 1].
        mirrored: whether those of the mirrored image are added and halved.
    """

    def one(image: jax.Array) -> jax.Array:
        found = _in_cells(kept, image)
        return (found + _in_cells(kept, image[:, ::-1])) / 2 if mirrored else found

    return jax.lax.map(one, images)


def _in_cells(kept: Weights, image: jax.Array) -> jax.Array:
    """Means [h, w, 2 · count] over cells: responses above the thresholds, then below.

    A patch is brought to mean 0 and divided by √(variance + ``CONTRAST``²) before its product with
    a filter (Coates, Lee and Ng 2011, Section 3.2.1); the image goes on as its edges are.
    """
    patches = _patches(image)
    patches = patches - jnp.mean(patches, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(patches), axis=-1, keepdims=True)
    patches = patches * jax.lax.rsqrt(variance + CONTRAST**2)
    filters = kept.filters.reshape(patches.shape[-1], -1)
    found = jnp.matmul(patches, filters, precision=jax.lax.Precision.HIGHEST)
    least = kept.thresholds.reshape(1, 1, -1)
    both = [jax.nn.relu(x - least) for x in (found, -found)]
    cells = (side // CELL for side in image.shape[:2])
    return _images.in_cells(jnp.concatenate(both, axis=-1), *cells)


def _patches(image: jax.Array) -> jax.Array:
    """[height, width, side · side · channels]: what lies under a filter at each place."""
    before, (height, width, _) = (SIDE - 1) // 2, image.shape
    around = ((before, SIDE - 1 - before),) * 2
    padded = jnp.pad(image, (*around, (0, 0)), mode="edge")
    places = [(i, j) for i in range(SIDE) for j in range(SIDE)]
    return jnp.concatenate([padded[i : i + height, j : j + width] for i, j in places], axis=-1)


def _folder() -> Any:
    return importlib.resources.files("jaxdp").joinpath("weights")
