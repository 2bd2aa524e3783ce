"""Two layers beside sums over every patch in float64, and their weights made again from a seed."""

import jax
import numpy as np
import pytest

from benchmarks import scenes
from benchmarks import two_layers as making
from jaxdp.recipes import features, two_layers
from jaxdp.recipes.two_layers import CELLS, Layer, TwoLayers, Whitened


def drawn(channels, counts=(16, 24)):
    """Random weights with few filters."""
    rng = np.random.default_rng(channels)

    def layer(count, channels, side):
        kernel = rng.normal(size=(count, channels, side, side)) / side
        kernel -= kernel.mean((1, 2, 3), keepdims=True)
        return Layer(np.float32(kernel), np.float32(rng.normal(size=count) / 9), np.float32(0.1))

    def whitened(count, cells):
        directions = np.linalg.qr(rng.normal(size=(2 * count, 5)))[0]
        mean, factors = rng.normal(size=(2 * count, cells**2)), rng.random(6) + 0.5
        return Whitened(*map(np.float32, (mean, directions, factors)))

    layers = layer(counts[0], channels, 6), layer(counts[1], 2 * counts[0], 3)
    parts = map(whitened, counts[::-1], CELLS[channels])
    return TwoLayers(layers, tuple(parts))


def responses(layer, x):
    """[2 count, h, w] of x [channels, h, w], patch by patch."""
    side, (_, height, width) = layer.kernel.shape[-1], x.shape
    before = (side - 1) // 2, side // 2
    padded, found = np.pad(x, [(0, 0), before, before], mode="edge"), []
    for i, j in np.ndindex(height, width):
        patch = padded[:, i : i + side, j : j + side].astype(float)
        patch = (patch - patch.mean()) / np.sqrt(patch.var() + float(layer.contrast) ** 2)
        found.append(np.einsum("fcab,cab->f", layer.kernel, patch) + layer.bias)
    y = np.stack(found, 1).reshape(-1, height, width)
    return np.concatenate([y - 0.5, -y - 0.5]).clip(0)


def in_cells(x, cells):
    edges = [np.arange(cells + 1) * side // cells for side in x.shape[1:]]
    rows = [x[:, a:b] for a, b in zip(edges[0], edges[0][1:], strict=False)]
    pairs = list(zip(edges[1], edges[1][1:], strict=False))
    return np.stack([row[:, :, a:b].mean((1, 2)) for row in rows for a, b in pairs], 1)


def summed(weights, image, mirrored):
    x = image.transpose(2, 0, 1)
    sides = [-side % 4 for side in x.shape[1:]]
    widths = [(0, 0), *((side // 2, side - side // 2) for side in sides)]
    x, (coarse, fine) = np.pad(x, widths, mode="edge"), CELLS[len(x)]
    parts = []
    for view in [x, x[:, :, ::-1]] if mirrored else [x]:
        low = responses(weights.layers[0], view)
        low = low.reshape(len(low), low.shape[1] // 2, 2, -1, 2).mean((2, 4))
        parts.append((in_cells(responses(weights.layers[1], low), coarse), in_cells(low, fine)))
    found = []
    for part, numbers in zip(zip(*parts, strict=True), weights.parts, strict=True):
        grouped = np.mean(part, 0).reshape(16, -1)
        grouped = grouped - grouped.mean(1, keepdims=True)
        grouped /= np.sqrt(grouped.var(1, keepdims=True) + 1e-5)
        along, last = numbers.directions.astype(float), numbers.factors[-1]
        matrix = last * np.eye(len(along))
        matrix += along @ np.diag(numbers.factors[:-1] - last) @ along.T
        found.append((matrix @ (grouped.reshape(len(along), -1) - numbers.mean)).reshape(-1))
    return np.concatenate(found)


def ready(weights):
    return weights._replace(layers=two_layers.ready(weights.layers))


@pytest.mark.parametrize("mirrored", [False, True])
def test_features_are_the_sums_over_patches(mirrored):
    for height, width, channels in ((16, 24, 3), (15, 21, 1), (28, 28, 1)):
        weights = drawn(channels)
        image = np.random.default_rng(height).random((height, width, channels)).astype(np.float32)
        found = np.asarray(two_layers.encoded(ready(weights), image[None], mirrored))[0]
        np.testing.assert_allclose(found, summed(weights, image, mirrored), atol=2e-5)


def test_what_is_stored_is_read_back_but_for_eight_bits_of_the_second_kernel():
    weights = drawn(3)
    arrays = two_layers.stored(weights)
    found = two_layers.of_stored(arrays)
    assert arrays["second.kernel"].dtype == np.int8
    for one, other in zip(found.parts, weights.parts, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), one, other)
    # The image of every filter among the products: 1 where all sums of it are.
    image = np.random.default_rng(0).random((1, 16, 16, 3)).astype(np.float32)
    want, given = (two_layers.encoded(ready(w), image, True) for w in (weights, found))
    np.testing.assert_allclose(given, want, atol=0.1)


def test_shipped_weights_are_those_of_their_recipe_and_whiten():
    images = making.drawn(5, np.arange(60), 3).transpose(0, 2, 3, 1)
    for channels, shape in ((1, (10_368,)), (3, (12_288,))):
        name = f"scenes_{channels}"
        arrays, recipe = features.arrays_of(name), features.recipe(name)
        assert features.digest(arrays) == recipe["sha256"]
        assert recipe["command"].startswith(f"python -m benchmarks.two_layers {channels} --seed 0")
        x = images if channels == 3 else images[:, 2:-2, 2:-2].mean(-1, keepdims=True)
        found = features.two_layers(x, mirrored=channels == 3)
        assert found.shape[1:] == shape == features.shape_of("two_layers", x.shape[1:])
        # Other images of the process come out centred, of mean square 1.
        assert 0.8 < np.mean(found**2) < 1.25
        assert np.abs(found.mean(0)).mean() < 0.2
        # What the weights saw is a function of the seed: its first image, made again. Elsewhere a
        # last digit may turn a level.
        again = scenes.images(0, np.arange(1))[0].astype(int)
        assert np.abs(again - arrays["image"]).max() <= 1
        assert np.mean(again != arrays["image"]) < 1e-3


def test_weights_are_made_again_from_the_seed_bit_by_bit(monkeypatch):
    monkeypatch.setattr(making, "PATCHES", 2_000)
    monkeypatch.setattr(making, "DIRECTIONS", 10)
    monkeypatch.setattr(making, "_AT_ONCE", 16)
    first, again, other = (
        two_layers.stored(making.made(1, seed, 32, 32, (8, 16))) for seed in (0, 0, 1)
    )
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["first.kernel"], other["first.kernel"])
    # An image is itself whoever is beside it.
    many = scenes.images(3, np.arange(5))
    np.testing.assert_array_equal(scenes.images(3, np.array([4]))[0], many[4])
    assert many.std((1, 2, 3)).min() > 2
    # Filters have sum 0, and directions are orthonormal, of falling variance.
    weights = making.made(1, 0, 32, 32, (8, 16))
    for layer in weights.layers:
        assert np.abs(layer.kernel.sum((1, 2, 3))).max() < 1e-4
    for part in weights.parts:
        np.testing.assert_allclose(part.directions.T @ part.directions, np.eye(10), atol=1e-6)
        assert (np.diff(part.factors[:-1]) >= 0).all()
