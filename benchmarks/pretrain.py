"""Pre-trains the network of ``jaxdp.features.pretrained`` on images of dead leaves, without data.

python -m benchmarks.pretrain [--seed 0] [--images 1000] [--steps 60] [--folder FOLDER] CHANNELS

First filters are whitened patches of the images (Coates and Ng 2011, "The importance of encoding
versus training with sparse coding and vector quantization"). Then two views of each image are
brought together on the sphere, and images apart (Wang and Isola 2020, arXiv:2005.10242, alignment
and uniformity, as Baradad et al. 2021, arXiv:2106.05963, and DP-RandP, arXiv:2306.06076).
"""

import argparse
import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import dead_leaves
from jaxdp import _pretrained
from jaxdp._pretrained import CHANNELS, CONTRAST, FILTERS, SIDE, Weights

FOLDER = Path(__file__).parents[1] / "jaxdp" / "weights"
CANVAS, VIEW = 40, 32
PATCHES, RIDGE, THRESHOLD = 40_000, 0.1, 0.5
BATCH, RATE, WIDTH = 96, 1e-3, 128


def whitened_patches(images: np.ndarray, rng: np.random.Generator) -> Weights:
    """Filters: products with ``FILTERS`` whitened patches, from random places of the images."""
    channels, last = images.shape[-1], images.shape[1] - SIDE
    which, down, across = (rng.integers(0, most, PATCHES) for most in (len(images), last, last))
    rows = np.stack(
        [images[i, a : a + SIDE, b : b + SIDE] for i, a, b in zip(which, down, across, strict=True)]
    )
    rows = rows.reshape(PATCHES, -1).astype(np.float64)
    deviation = rows.std(1, keepdims=True)
    rows = (rows - rows.mean(1, keepdims=True)) / np.sqrt(deviation**2 + CONTRAST**2)
    values, vectors = np.linalg.eigh(np.cov(rows.T))
    whitening = vectors / np.sqrt(np.maximum(values, 0) + RIDGE) @ vectors.T
    # Plain patches are no filters: half of all, those of more contrast, are.
    chosen = np.flatnonzero(deviation[:, 0] >= np.median(deviation))[:FILTERS]
    kept = rows[chosen] @ whitening
    kept = kept / np.linalg.norm(kept, axis=1, keepdims=True) @ whitening
    filters = kept.T.reshape(SIDE, SIDE, channels, FILTERS).astype(np.float32)
    return centred(Weights(filters, np.full(FILTERS, THRESHOLD, np.float32)))


def centred(weights: Weights) -> Weights:
    mean = weights.filters.mean((0, 1, 2), keepdims=True)
    return weights._replace(filters=weights.filters - mean)


def view(key: jax.Array, image: jax.Array) -> jax.Array:
    """A random window of the image, mirrored or not, in other light and colour."""
    keys = jax.random.split(key, 5)
    corner = jax.random.randint(keys[0], (2,), 0, CANVAS - VIEW + 1)
    found = jax.lax.dynamic_slice(image, (*corner, 0), (VIEW, VIEW, image.shape[-1]))
    found = jnp.where(jax.random.bernoulli(keys[1]), found[:, ::-1], found)
    contrast = jnp.exp(0.3 * jax.random.normal(keys[2]))
    light = 0.1 * jax.random.normal(keys[3]) + 0.1 * jax.random.normal(keys[4], found.shape[-1:])
    return jnp.clip((found - 0.5) * contrast + 0.5 + light.reshape(1, 1, -1), 0, 1)


def projected(params: tuple[Weights, jax.Array], images: jax.Array) -> jax.Array:
    """Points [n, WIDTH] on the sphere: responses in 4 × 4 cells, and a linear map."""
    weights, head = params
    found = _pretrained.responses(centred(weights), images)
    count, height, width, channels = found.shape
    cells = found.reshape(count, 4, height // 4, 4, width // 4, channels).mean((2, 4))
    cells = cells - cells.mean((1, 2, 3), keepdims=True)
    cells = cells.reshape(count, -1)
    out = cells / jnp.linalg.norm(cells + 1e-9, axis=1, keepdims=True) @ head
    return out / jnp.linalg.norm(out + 1e-9, axis=1, keepdims=True)


def loss_fn(params: tuple[Weights, jax.Array], one: jax.Array, other: jax.Array) -> jax.Array:
    """Mean squared distance of two views, and log of the mean Gaussian kernel between images."""
    a, b = projected(params, one), projected(params, other)
    alignment = jnp.mean(jnp.sum(jnp.square(a - b), axis=1))
    apart = [_uniformity(x) for x in (a, b)]
    return alignment + sum(apart) / 2


def _uniformity(x: jax.Array) -> jax.Array:
    squares = 2 - 2 * x @ x.T
    others = ~jnp.eye(len(x), dtype=bool)
    return jnp.log(jnp.mean(jnp.exp(-2 * squares), where=others))


def trained(images: np.ndarray, start: Weights, steps: int, seed: int) -> tuple[Weights, list]:
    """The weights after ``steps`` of Adam, and the losses."""
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, max(1, steps)))
    keys = jax.random.split(jax.random.key(seed), 3)
    head = jax.random.normal(keys[0], (4 * 4 * 2 * FILTERS, WIDTH)) / np.sqrt(WIDTH)
    params = (jax.tree.map(jnp.asarray, start), head)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch, key):
        views = [
            jax.vmap(view)(jax.random.split(k, len(batch)), batch) for k in jax.random.split(key)
        ]
        loss, gradient = jax.value_and_grad(loss_fn)(params, *views)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    rng = np.random.default_rng(seed)
    for i in range(steps):
        batch = images[rng.integers(0, len(images), BATCH)]
        params, state, loss = step(params, state, batch, jax.random.fold_in(keys[1], i))
        losses.append(float(loss))
        if i % 10 == 0 or i + 1 == steps:
            print(f"step {i}: loss {np.mean(losses[-10:]):.4f}", flush=True)
    return centred(jax.tree.map(np.asarray, params[0])), losses


def made(channels: int, seed: int, count: int, steps: int) -> tuple[Weights, list]:
    images = dead_leaves.images(seed, count, CANVAS, channels)
    start = whitened_patches(images, np.random.default_rng(seed))
    return trained(images, start, steps, seed) if steps else (start, [])


def main() -> None:
    """Writes the weights (float16) and their recipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("channels", type=int, choices=CHANNELS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=1_000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args()
    began = time.process_time()
    found, losses = made(given.channels, given.seed, given.images, given.steps)
    arrays = {name: np.asarray(array, np.float16) for name, array in found._asdict().items()}
    given.folder.mkdir(parents=True, exist_ok=True)
    np.savez(given.folder / f"dead_leaves_{given.channels}.npz", **arrays)
    ends = (losses[:20], losses[-20:]) if losses else ()
    recipe = {
        "command": f"python -m benchmarks.pretrain {given.channels} --seed {given.seed} "
        f"--images {given.images} --steps {given.steps}",
        "images": "dead leaves (benchmarks/dead_leaves.py), of no data of anybody's",
        "loss, first and last 20 steps": [round(float(np.mean(end)), 4) for end in ends],
        "processor_seconds": round(time.process_time() - began),
        "jax": jax.__version__,
        "numpy": np.__version__,
        "sha256": _pretrained.digest(arrays),
    }
    path = given.folder / f"dead_leaves_{given.channels}.json"
    path.write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
