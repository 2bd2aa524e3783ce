"""Batches of an encoder: two views of each of some images, a function of seed and step alone."""

from collections.abc import Callable

import numpy as np

SIDE, LEAST = 32, 20
# A view's chance of losing its colours, and of being blurred.
GREY, BLUR = 0.2, 0.3


def known(step: int) -> int:
    """How many images of the process a step chooses from: more as the run goes on."""
    return 500 * ((20_000 + 2 * step) // 500)


def batch(
    canvases: Callable[[np.ndarray], np.ndarray], count: int, seed: int, step: int, size: int
) -> np.ndarray:
    """float32 [2 size, SIDE, SIDE, 3], the first views before the second.

    Args:
        canvases: the uint8 images [.., side, side, 3] of the numbers that it is given.
        count: how many there are.
        seed: of the run.
        step: of the run.
        size: images of the batch.
    """
    rng = np.random.Generator(np.random.Philox(key=[seed, step]))
    chosen = canvases(np.sort(rng.choice(count, size, replace=False)))
    return np.concatenate([_view(rng, chosen), _view(rng, chosen)])


def _view(rng: np.random.Generator, canvases: np.ndarray) -> np.ndarray:
    """A part of each image, mirrored half of the time, in other colours; about mean 0."""
    found = _cut(rng, canvases) / np.float32(255)
    count = (len(found), 1, 1, 1)

    def uniform(least: float, most: float, channels: int = 1) -> np.ndarray:
        return rng.uniform(least, most, (*count[:3], channels)).astype(np.float32)

    blurred = np.pad(found, [(0, 0), (1, 1), (1, 1), (0, 0)], mode="edge")
    blurred = (blurred[:, :-2] + 2 * blurred[:, 1:-1] + blurred[:, 2:]) / 4
    blurred = (blurred[:, :, :-2] + 2 * blurred[:, :, 1:-1] + blurred[:, :, 2:]) / 4
    found = np.where(rng.random(count) < BLUR, blurred, found)
    # Saturation, contrast, light, and the light's colour.
    grey = found.mean(-1, keepdims=True)
    saturation = np.where(rng.random(count) < GREY, np.float32(0), uniform(0.4, 1.6))
    found = grey + saturation * (found - grey)
    middle = found.mean((1, 2), keepdims=True)
    found = (middle + uniform(0.6, 1.4) * (found - middle)) * uniform(0.6, 1.4)
    found = found * uniform(0.85, 1.15, 3)
    return (np.clip(found, 0, 1) - np.float32(0.5)) * np.float32(4)


def _cut(rng: np.random.Generator, canvases: np.ndarray) -> np.ndarray:
    """float32 [n, SIDE, SIDE, 3]: a box of each, its numbers between pixels by their four."""
    n, whole = canvases.shape[:2]
    sides = rng.uniform(LEAST**2, whole**2, n) ** 0.5
    ratio = rng.uniform(0.8, 1.25, n)
    sizes = np.minimum(np.stack([sides * ratio, sides / ratio]), whole)
    firsts = rng.uniform(0, 1, (2, n)) * (whole - sizes)
    places = firsts[..., None] + sizes[..., None] * (np.arange(SIDE) + 0.5) / SIDE - 0.5
    places = np.clip(places, 0, whole - 1 - 1e-4)
    mirrored = rng.random(n) < 0.5
    places[1, mirrored] = places[1, mirrored, ::-1]
    low = places.astype(np.int64)
    part = (places - low).astype(np.float32)
    which = np.arange(n)[:, None, None]

    def at(i: int, k: int) -> np.ndarray:
        pixels = canvases[which, (low[0] + i)[:, :, None], (low[1] + k)[:, None, :]]
        across = part[1] if k else 1 - part[1]
        down = part[0] if i else 1 - part[0]
        return pixels * (down[:, :, None] * across[:, None, :])[..., None]

    found: np.ndarray = at(0, 0) + at(0, 1) + at(1, 0) + at(1, 1)
    return found
