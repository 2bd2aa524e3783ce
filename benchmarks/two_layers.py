"""Makes the weights of ``jaxdp.features.two_layers`` from images of a random process, without data.

python -m benchmarks.two_layers [--seed 0] [--images 1600] [--whitened 5000] [--folder F] CHANNELS

A filter of either layer is the product with a whitened patch (Coates and Ng 2011): of such an
image, then of what the first layer gives of it. Other images of the process give the numbers that
centre and whiten each part's channels.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks import scenes
from benchmarks.pretrain import FOLDER, write
from jaxdp.recipes import two_layers
from jaxdp.recipes.features import CONTRAST
from jaxdp.recipes.two_layers import FILTERS, NEXT_SIDE, SIDE, Layer, TwoLayers, Whitened

PATCHES, RIDGE, NEXT_CONTRAST, DIRECTIONS = 30_000, 0.1, 0.3, 256
_AT_ONCE = 100


def drawn(seed: int, numbers: np.ndarray, channels: int) -> np.ndarray:
    """float32 [n, channels, 32, 32] in [0, 1]: images of the process, at half their side."""
    found = scenes.images(seed, numbers).astype(np.float32) / 255
    side = found.shape[1] // 2
    found = found.reshape(-1, side, 2, side, 2, 3).mean((2, 4)).transpose(0, 3, 1, 2)
    return found if channels == 3 else found.mean(1, keepdims=True)


def layer(x: np.ndarray, side: int, count: int, contrast: float, rng: np.random.Generator) -> Layer:
    """Filters from patches of x [n, channels, h, w]: whitened, those of more contrast, of norm 1.

    The bias takes the patches' mean away, but for a first layer, whose patches have none.
    """
    n, channels, height, width = x.shape
    limits = (n, height - side + 1, width - side + 1)
    places = zip(*(rng.integers(0, most, PATCHES) for most in limits), strict=True)
    rows = np.stack([x[i, :, a : a + side, b : b + side] for i, a, b in places])
    rows = rows.reshape(PATCHES, -1)
    rows -= rows.mean(1, keepdims=True)
    rows /= np.sqrt(np.mean(rows**2, 1, keepdims=True) + contrast**2)
    values, vectors = np.linalg.eigh(np.cov(rows.T))
    whitening = np.float32(vectors / np.sqrt(np.maximum(values, 0) + RIDGE) @ vectors.T)
    white = rows[: 4 * count] @ whitening
    norms = np.linalg.norm(white, axis=1, keepdims=True)
    chosen = np.flatnonzero(norms[:, 0] > np.median(norms))[:count]
    filters = white[chosen] / norms[chosen] @ whitening
    filters -= filters.mean(1, keepdims=True)
    bias = -filters @ rows.mean(0) if channels > 3 else np.zeros(count, np.float32)
    return Layer(filters.reshape(count, channels, side, side), bias, np.float32(contrast))


def layers(x: np.ndarray, counts: tuple[int, int], rng: np.random.Generator) -> tuple[Layer, Layer]:
    """Both layers, of images x [n, channels, h, w]."""
    first = layer(x, SIDE, counts[0], CONTRAST, rng)
    run = jax.jit(lambda x: jax.lax.map(lambda one: two_layers.pooled(first, one), x))
    between = np.concatenate([run(x[i : i + _AT_ONCE]) for i in range(0, len(x), _AT_ONCE)])
    deviation = float(between.std())
    second = layer(between / deviation, NEXT_SIDE, counts[1], NEXT_CONTRAST, rng)
    # (x / d - m) / √(v / d² + c²) = (x - d m) / √(v + (d c)²): the same with a larger contrast.
    return first, second._replace(contrast=np.float32(NEXT_CONTRAST * deviation))


def whitening(x: np.ndarray) -> Whitened:
    """Mean by place, and (Σ + τ I)^-1/4 of channels, of normalised cells x [n, channels, places].

    τ is the mean variance; the scale leaves channels a mean square of 1, as of ``dp_whitening``.
    Only ``DIRECTIONS`` have a factor of their own.
    """
    mean = x.mean(0, dtype=np.float64)
    rows = (x - mean).transpose(0, 2, 1).reshape(-1, x.shape[1])
    values, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    values, vectors = np.maximum(values[::-1], 0), vectors[:, ::-1]
    scales = (values + values.mean()) ** -0.25
    scales /= np.sqrt(np.mean(values * scales**2))
    k = min(DIRECTIONS, len(values) - 1)
    rest = np.sqrt(np.sum((values * scales**2)[k:]) / np.sum(values[k:]))
    return Whitened(mean, vectors[:, :k], np.append(scales[:k], rest))


def made(channels: int, seed: int, images: int, others: int, counts: tuple[int, int]) -> TwoLayers:
    """The weights: filters of so many images, whitening by so many others."""
    found = layers(drawn(seed, np.arange(images), channels), counts, np.random.default_rng(seed))
    # As they will be used: of 8 bits, and in colour with the mirrored image.
    blank = [Whitened(np.zeros((1, 1)), np.zeros((1, 1)), np.zeros(2))] * 2
    kept = two_layers.stored(TwoLayers(found, (blank[0], blank[1])))
    used = two_layers.ready(two_layers.of_stored(kept).layers)

    @jax.jit
    def cells(x: jax.Array) -> Sequence[jax.Array]:
        def one(x: jax.Array) -> list[jax.Array]:
            parts = two_layers.cells(used, x.transpose(1, 2, 0), channels == 3)
            return [two_layers.normalised(part) for part in parts]

        return jax.lax.map(one, x)

    starts = range(images, images + others, _AT_ONCE)
    every = [cells(drawn(seed, start + np.arange(_AT_ONCE), channels)) for start in starts]
    parts = [whitening(np.concatenate(part)) for part in zip(*every, strict=True)]
    return TwoLayers(found, (parts[0], parts[1]))


def main() -> None:
    """Writes the weights and their recipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("channels", type=int, choices=tuple(FILTERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=1_600)
    parser.add_argument("--whitened", type=int, default=5_000)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args()
    began = time.process_time()
    channels = given.channels
    found = made(channels, given.seed, given.images, given.whitened, FILTERS[channels])
    arrays = two_layers.stored(found) | {"image": scenes.images(given.seed, np.arange(1))[0]}
    command = f"{channels} --seed {given.seed} --images {given.images} --whitened {given.whitened}"
    write(
        given.folder / f"scenes_{channels}",
        arrays,
        command=f"python -m benchmarks.two_layers {command}",
        images="a random process (benchmarks/scenes.py), of no data of anybody's",
        processor_seconds=round(time.process_time() - began),
    )


if __name__ == "__main__":
    main()
