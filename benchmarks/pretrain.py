"""Makes the filters of ``jaxdp.features.pretrained`` from images of dead leaves, without data.

python -m benchmarks.pretrain [--seed 0] [--images 2000] [--folder FOLDER] CHANNELS

A filter is the product with a whitened patch of such an image (Coates and Ng 2011, "The importance
of encoding versus training with sparse coding and vector quantization", whose patches are those of
the data).
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import dead_leaves
from jaxdp.recipes.features import CONTRAST, FILTERS, SIDE, Weights, digest

FOLDER = Path(__file__).parents[1] / "jaxdp" / "recipes" / "weights"
CANVAS, PATCHES, RIDGE, THRESHOLD = 40, 100_000, 0.1, 0.5


def made(channels: int, seed: int, images: int) -> Weights:
    """The filters, of patches from random places of so many images."""
    leaves = dead_leaves.images(seed, images, CANVAS, channels)
    rows = drawn(leaves, np.random.default_rng(seed))
    deviation = rows.std(1, keepdims=True)
    rows = (rows - rows.mean(1, keepdims=True)) / np.sqrt(deviation**2 + CONTRAST**2)
    whitening = whitened(rows, channels)
    # Plain patches are no filters: half of all, those of more contrast, are.
    chosen = np.flatnonzero(deviation[:, 0] >= np.median(deviation))[: FILTERS[channels]]
    kept = rows[chosen] @ whitening
    kept = kept / np.linalg.norm(kept, axis=1, keepdims=True) @ whitening
    filters = kept.T.reshape(SIDE, SIDE, channels, -1)
    filters = filters - filters.mean((0, 1, 2), keepdims=True)
    count = filters.shape[-1]
    return Weights(filters.astype(np.float32), np.full(count, THRESHOLD, np.float32))


def drawn(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """float64 [PATCHES, side · side · channels] from random places."""
    last = images.shape[1] - SIDE
    which, down, across = (rng.integers(0, most, PATCHES) for most in (len(images), last, last))
    places = zip(which, down, across, strict=True)
    rows = np.stack([images[i, a : a + SIDE, b : b + SIDE] for i, a, b in places])
    return rows.reshape(PATCHES, -1).astype(np.float64)


def whitened(rows: np.ndarray, channels: int) -> np.ndarray:
    """The matrix (Σ + ridge)^-1/2 of patches and their mirror images."""
    mirrored = rows.reshape(-1, SIDE, SIDE, channels)[:, :, ::-1].reshape(rows.shape)
    values, vectors = np.linalg.eigh(np.cov(np.concatenate([rows, mirrored]).T))
    found: np.ndarray = vectors / np.sqrt(np.maximum(values, 0) + RIDGE) @ vectors.T
    return found


def main() -> None:
    """Writes the weights (float16) and their recipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("channels", type=int, choices=tuple(FILTERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=2_000)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args()
    began = time.process_time()
    found = made(given.channels, given.seed, given.images)
    arrays = {name: np.asarray(array, np.float16) for name, array in found._asdict().items()}
    command = f"{given.channels} --seed {given.seed} --images {given.images}"
    write(
        given.folder / f"dead_leaves_{given.channels}",
        arrays,
        command=f"python -m benchmarks.pretrain {command}",
        images="dead leaves (benchmarks/dead_leaves.py), of no data of anybody's",
        processor_seconds=round(time.process_time() - began),
    )


def write(path: Path, arrays: dict[str, np.ndarray], **recipe: Any) -> None:
    """Writes arrays to path.npz, and their recipe with versions and digest to path.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path.with_suffix(".npz"), **arrays)
    made_by = {"jax": jax.__version__, "numpy": np.__version__, "sha256": digest(arrays)}
    text = json.dumps(recipe | made_by, indent=1) + "\n"
    path.with_suffix(".json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
