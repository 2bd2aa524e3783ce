"""Two layers of filters that are whitened patches of the process's images; nothing is trained.

python -m benchmarks.encoder.patches --out WEIGHTS.npz [--seed 0] [--images 1600]

The first layer is that of ``benchmarks.pretrain``; the second does the same with patches of what
the first gives, on every second pixel (Coates and Ng 2011; Mairal 2016, "End-to-end kernel learning
with supervised convolutional kernel networks", stacks such layers).
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.encoder import scenes

PATCHES, RIDGE, THRESHOLD, CELLS = 30_000, 0.1, 0.5, 4


class Layer(NamedTuple):
    """Responses to filters of contrast-normalised patches, above a threshold and below.

    Attributes:
        kernel: [side, side, channels, count]; the sum of each filter is 0.
        bias: [count], added to a response.
        contrast: added to a patch's deviation.
    """

    kernel: np.ndarray
    bias: np.ndarray
    contrast: float


def layer(
    images: np.ndarray,
    side: int,
    count: int,
    contrast: float,
    rng: np.random.Generator,
    centred: bool,
) -> Layer:
    """Filters from patches at random places: whitened, those of more contrast, of norm 1."""
    n, height, width, channels = images.shape
    limits = (n, height - side + 1, width - side + 1)
    places = zip(*(rng.integers(0, most, PATCHES) for most in limits), strict=True)
    rows = np.stack([images[i, a : a + side, b : b + side] for i, a, b in places])
    rows = rows.reshape(PATCHES, -1).astype(np.float32)
    rows -= rows.mean(1, keepdims=True)
    rows /= np.sqrt(np.mean(rows**2, 1, keepdims=True) + contrast**2)
    values, vectors = np.linalg.eigh(np.cov(rows.T))
    whitening = vectors / np.sqrt(np.maximum(values, 0) + RIDGE) @ vectors.T
    white = rows[: 4 * count] @ whitening
    norms = np.linalg.norm(white, axis=1, keepdims=True)
    chosen = np.flatnonzero(norms[:, 0] > np.median(norms))[:count]
    filters = white[chosen] / norms[chosen] @ whitening
    filters -= filters.mean(1, keepdims=True)
    bias = -filters @ rows.mean(0) if centred else np.zeros(count)
    kernel = filters.T.reshape(side, side, channels, count).astype(np.float32)
    return Layer(kernel, bias.astype(np.float32), contrast)


def responses(found: Layer, x: jax.Array) -> jax.Array:
    """[n, h, w, 2 count] of [n, h, w, channels]: above the threshold, then below minus it."""
    side = found.kernel.shape[0]
    before, after = (side - 1) // 2, side // 2
    x = jnp.pad(x, [(0, 0), (before, after), (before, after), (0, 0)], mode="edge")
    layout = ("NHWC", "HWIO", "NHWC")
    kernel = jnp.asarray(found.kernel, jnp.float32)
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=layout)
    window = (1, side, side, 1)
    moments = jnp.stack([x.mean(-1), jnp.square(x).mean(-1)], -1)
    moments = jax.lax.reduce_window(moments, 0.0, jax.lax.add, window, (1, 1, 1, 1), "VALID")
    mean, square = jnp.split(moments / side**2, 2, -1)
    variance = jnp.maximum(square - mean**2, 0)
    y = y * jax.lax.rsqrt(variance + found.contrast**2)
    y = y + jnp.asarray(found.bias, jnp.float32).reshape(1, 1, 1, -1)
    return jnp.concatenate([jax.nn.relu(y - THRESHOLD), jax.nn.relu(-y - THRESHOLD)], -1)


def cells(x: jax.Array, side: int) -> jax.Array:
    """Means of squares of side × side places."""
    n, height, width, channels = x.shape
    return x.reshape(n, height // side, side, width // side, side, channels).mean((2, 4))


def encoded(first: Layer, second: Layer, images: jax.Array) -> jax.Array:
    """[n, CELLS, CELLS, 2 count] of images in [0, 1]: the mean with the mirrored image's."""

    def once(x: jax.Array) -> jax.Array:
        y = responses(second, cells(responses(first, x), 2))
        return cells(y, y.shape[1] // CELLS)

    return (once(images) + once(images[:, :, ::-1])) / 2


def made(seed: int, images: int, counts: tuple[int, int] = (128, 512)) -> tuple[Layer, Layer]:
    """Both layers; the scale between them is in the second's filters."""
    rng = np.random.default_rng(seed)
    drawn = scenes.images(seed, np.arange(images)).astype(np.float32) / 255
    halves = np.asarray(cells(jnp.asarray(drawn), 2))
    first = layer(halves, 6, counts[0], 10 / 255, rng, centred=False)
    run = jax.jit(lambda x: cells(responses(first, x), 2))
    between = np.concatenate([np.asarray(run(halves[i : i + 100])) for i in range(0, images, 100)])
    deviation = float(between.std())
    second = layer(between / deviation, 3, counts[1], 0.3, rng, centred=True)
    # (x / d - m) / √(v / d² + c²) = (x - d m) / √(v + (d c)²): the same with a larger contrast.
    return first, second._replace(contrast=0.3 * deviation)


def main() -> None:
    """Writes the weights in float16."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=1_600)
    given = parser.parse_args()
    both = made(given.seed, given.images)
    arrays: dict[str, np.ndarray] = {}
    for name, one in zip(("first", "second"), both, strict=True):
        arrays |= {f"{name}.{part}": np.float16(value) for part, value in one._asdict().items()}
    np.savez(given.out, **arrays)


if __name__ == "__main__":
    main()
