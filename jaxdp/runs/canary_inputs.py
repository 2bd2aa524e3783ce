"""Candidate records of an audit of a configured run: made of nothing that anybody's model saw."""

import math
from typing import TYPE_CHECKING

import numpy as np

from jaxdp import arguments, data
from jaxdp.recipes import features

if TYPE_CHECKING:
    from jaxdp.runs.config import RunConfig

KINDS = ("gradient", "noise", "pixel", "mislabelled")
_FINEST = 8  # pixels of a side, below which an image has no waves to speak of
_INPUTS = 9  # fixes the candidates, which are public


def check(config: "RunConfig") -> None:
    """Raises ValueError for a kind or a number of candidates that cannot be had."""
    arguments.one_of("canary_kind", config.canary_kind, KINDS)
    count = arguments.integer("canaries", config.canaries, least=0)
    if config.canary_kind == "gradient":
        return
    if not count:
        raise ValueError(
            f"canaries must be at least 1 with canary_kind {config.canary_kind}, got 0"
        )
    if config.pca_dimensions is not None:
        raise ValueError(
            "canary_kind must be gradient with pca_dimensions, whose projection would read them "
            f"without a charge, got {config.canary_kind}"
        )
    tests = config.spec.test_size or 0
    if config.canary_kind == "mislabelled" and not count <= tests // 2:
        raise ValueError(
            f"canaries must be at most half of the {tests} test records, which they are taken out "
            f"of, got {count} mislabelled ones"
        )


def asked_for(config: "RunConfig", dataset: data.Dataset) -> int | tuple[np.ndarray, np.ndarray]:
    """The number of candidates, or the candidates (x [m, ...], y [m]) themselves.

    Args:
        config: resolved.
        dataset: as loaded; of mislabelled candidates its last test records are taken.
    """
    if not config.canaries or config.canary_kind == "gradient":
        return config.canaries
    x, y = _made(config, dataset)
    if config.features is not None:
        x = features.by_name(config.features, x)
    return x, y.astype(dataset.train_y.dtype)


def _made(config: "RunConfig", dataset: data.Dataset) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.Philox(key=_INPUTS))
    count, classes = config.canaries, config.spec.num_classes
    labels = rng.integers(0, classes, count)
    if config.canary_kind == "mislabelled":
        other = 1 + labels % (classes - 1) if classes > 1 else labels
        return dataset.test_x[-count:], (dataset.test_y[-count:] + other) % classes
    shape = (count, *dataset.train_x.shape[1:])
    # Both are unlike any image: what ordinary records do then hardly lies along them.
    if config.canary_kind == "noise":
        return _fine(rng.standard_normal(shape, np.float32)), labels
    size = math.prod(shape[1:])
    blank = np.zeros((count, size), np.float32)
    places = np.concatenate([rng.permutation(size) for _ in range(-(-count // size))])
    blank[np.arange(count), places[:count]] = math.sqrt(size)  # as long as noise
    return blank.reshape(shape), labels


def _fine(noise: np.ndarray) -> np.ndarray:
    """Noise [m, ...]; of images [m, height, width, channels] without its coarse waves.

    Images of anything are mostly those, so that less of what other records do lies along it.
    """
    if noise.ndim != 4 or min(noise.shape[1:3]) < _FINEST:
        return noise
    waves = np.fft.fft2(noise, axes=(1, 2))
    one, two = (np.abs(np.fft.fftfreq(size)) for size in noise.shape[1:3])
    waves *= (np.maximum(one[:, None], two[None]) > 0.25)[None, :, :, None]  # cycles a pixel
    found = np.fft.ifft2(waves, axes=(1, 2)).real
    return np.asarray(found / found.std(), np.float32)


def tests_left(config: "RunConfig", count: int) -> int:
    """The number of the ``count`` test records that are no candidates: the first ones."""
    taken = config.canaries if config.canary_kind == "mislabelled" else 0
    return count - taken
