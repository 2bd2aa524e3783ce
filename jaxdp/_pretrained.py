"""The small convolutional network of ``features.pretrained``, its weights, and their recipe.

``benchmarks/pretrain.py`` makes the weights from images of a random process; nobody's data enters.
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

FILTERS, SIDE, STRIDE, CELLS = 128, 6, 2, 4
# Images of this many channels have a network each.
CHANNELS = (1, 3)
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
    """The recipe of the weights: command, seed, steps, and the digest of the arrays."""
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


def responses(kept: Weights, images: jax.Array) -> jax.Array:
    """Rectified responses of every second place, [n, h, w, 2 · count]: above, then below.

    A patch is brought to mean 0 and divided by √(variance + ``CONTRAST``²) before its product with
    a filter (Coates, Lee and Ng 2011, Section 3.2.1); the image goes on as its edges are.

    Args:
        kept: the weights.
        images: [n, height, width, channels] in [0, 1].
    """
    side, _, channels, _ = kept.filters.shape
    before = (side - 1) // 2
    around = ((0, 0), *((before, side - 1 - before),) * 2, (0, 0))
    padded = jnp.pad(images, around, mode="edge")

    def over(x: jax.Array, filters: Any) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x,
            filters,
            (STRIDE, STRIDE),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            precision=jax.lax.Precision.HIGHEST,
        )

    mean = jnp.full((side, side, channels, 1), 1 / (side * side * channels), jnp.float32)
    # About 1/2, so that squares of pixels lose fewer digits; the filters do not see it.
    padded = padded - 0.5
    variance = over(jnp.square(padded), mean) - jnp.square(over(padded, mean))
    found = over(padded, kept.filters) * jax.lax.rsqrt(jnp.maximum(variance, 0) + CONTRAST**2)
    least = kept.thresholds.reshape(1, 1, 1, -1)
    both = jnp.concatenate([found - least, -found - least], axis=-1)
    return jax.nn.relu(both)


def _folder() -> Any:
    return importlib.resources.files("jaxdp").joinpath("weights")
