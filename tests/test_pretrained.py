"""The pre-trained network beside sums over pixels, its weights, and the images they came from."""

import itertools

import numpy as np
import pytest

from benchmarks import dead_leaves, pretrain
from jaxdp import _pretrained, features

WEIGHTS = {channels: _pretrained.weights(channels) for channels in _pretrained.FILTERS}


@pytest.mark.parametrize("channels", _pretrained.FILTERS)
def test_weights_are_those_of_their_recipe(channels):
    found, recipe = WEIGHTS[channels], _pretrained.recipe(channels)
    half = {name: array.astype(np.float16) for name, array in found._asdict().items()}
    assert _pretrained.digest(half) == recipe["sha256"]
    assert recipe["command"].startswith(f"python -m benchmarks.pretrain {channels} --seed ")
    assert found.filters.shape == (6, 6, channels, _pretrained.FILTERS[channels])
    assert found.thresholds.shape == (_pretrained.FILTERS[channels],)
    assert all(np.isfinite(array).all() for array in found)
    assert np.abs(found.filters.mean((0, 1, 2))).max() < 1e-4  # of float16
    assert (found.filters.std((0, 1, 2)) > 1e-3).all()


def test_other_weights_are_refused(monkeypatch):
    recipe = _pretrained.recipe(1)
    monkeypatch.setattr(_pretrained, "recipe", lambda channels: recipe | {"sha256": "0" * 64})
    with pytest.raises(ValueError, match=r"weights must be those of their recipe, digest 000"):
        _pretrained.weights.__wrapped__(1)


def test_a_digest_sees_names_shapes_types_and_numbers():
    arrays = {"a": np.arange(6.0), "b": np.ones(2, np.float16)}
    others = [
        {"a": np.arange(6.0), "c": np.ones(2, np.float16)},
        {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(2, np.float16)},
        {"a": np.arange(6.0), "b": np.ones(2, np.float32)},
        {"a": np.arange(6.0) + 1e-9, "b": np.ones(2, np.float16)},
    ]
    digests = [_pretrained.digest(each) for each in (arrays, *others)]
    assert len({*digests}) == 5
    assert _pretrained.digest(dict(reversed(arrays.items()))) == digests[0]


def summed(images, kept):
    """The features of the pre-trained network, place by place in float64."""
    filters, thresholds = (np.asarray(a, np.float64) for a in kept)
    count, height, width, _ = images.shape
    padded = np.pad(images.astype(np.float64), ((0, 0), (2, 3), (2, 3), (0, 0)), mode="edge")
    found = np.zeros((count, height, width, 2 * len(thresholds)))
    for i in range(height):
        for j in range(width):
            patch = padded[:, i : i + 6, j : j + 6]
            patch = patch - patch.mean((1, 2, 3), keepdims=True)
            spread = np.sqrt(patch.var((1, 2, 3)) + (10 / 255) ** 2)[:, None]
            r = np.einsum("nabc,abcf->nf", patch, filters) / spread
            both = np.concatenate([r - thresholds, -r - thresholds], -1)
            found[:, i, j] = np.maximum(both, 0)
    rows, columns = (
        np.arange(n + 1) * m // n for m, n in ((height, height // 4), (width, width // 4))
    )
    cells = [
        [found[:, a:b, c:d].mean((1, 2)) for c, d in itertools.pairwise(columns)]
        for a, b in itertools.pairwise(rows)
    ]
    return np.moveaxis(np.array(cells), 2, 0)


@pytest.mark.parametrize(("height", "width", "channels"), [(8, 8, 1), (9, 13, 3)])
def test_features_are_the_sums_over_pixels(height, width, channels):
    images = np.random.default_rng(0).random((2, height, width, channels)).astype(np.float32)
    want = summed(images, WEIGHTS[channels])
    np.testing.assert_allclose(features.pretrained(images), want, atol=1e-4)
    mirror = summed(images[:, :, ::-1], WEIGHTS[channels])
    found = features.pretrained(images, mirrored=True)
    np.testing.assert_allclose(found, (want + mirror) / 2, atol=1e-4)
    np.testing.assert_allclose(features.pretrained(images[:, :, ::-1], True), found, atol=1e-6)


def test_constants_have_few_features_however_bright():
    dark = features.pretrained(np.zeros((1, 12, 12, 3), np.float32))
    light = features.pretrained(np.full((1, 12, 12, 3), 0.75, np.float32))
    np.testing.assert_allclose(dark, light, atol=1e-2)


def test_other_images_are_refused():
    blank = lambda *shape: features.pretrained(np.zeros(shape, np.float32))  # noqa: E731
    for call, words in (
        (lambda: blank(2, 8, 8, 2), "images must have 1 or 3 channels for pretrained, got 2"),
        (lambda: blank(2, 3, 8, 1), "at least 4 by 4.*3 by 8"),
        (lambda: blank(8, 8, 1), r"images must be an array .*got shape \(8, 8, 1\)"),
        (lambda: features.shape_of("pretrained_mirrored", (32, 32, 4)), "for pretrained, got 4"),
        (lambda: features.shape_of("pretrained", (32, 3, 3)), "at least 4 by 4, got examples"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_leaves_are_a_function_of_the_seed(monkeypatch):
    monkeypatch.setattr(dead_leaves, "_AT_ONCE", 3)
    found = dead_leaves.images(0, 4, 20, 3)
    assert found.shape == (4, 20, 20, 3)
    assert found.min() >= 0
    assert found.max() <= 1
    assert (found.std((1, 2, 3)) > 0.01).all()
    np.testing.assert_array_equal(dead_leaves.images(0, 4, 20, 3), found)
    assert np.abs(dead_leaves.images(1, 4, 20, 3) - found).max() > 0.1
    assert dead_leaves.images(0, 3, 20, 1).shape == (3, 20, 20, 1)


def test_filters_are_those_of_whitened_patches(monkeypatch):
    monkeypatch.setattr(dead_leaves, "_AT_ONCE", 16)
    monkeypatch.setattr(pretrain, "FILTERS", {1: 8})
    monkeypatch.setattr(pretrain, "PATCHES", 2_000)
    found = pretrain.made(1, 0, 16)
    assert found.filters.shape == (6, 6, 1, 8)
    assert np.abs(found.filters.mean((0, 1, 2))).max() < 1e-6
    np.testing.assert_array_equal(pretrain.made(1, 0, 16).filters, found.filters)
    assert np.abs(pretrain.made(1, 1, 16).filters - found.filters).max() > 0.1
    rows = pretrain.drawn(dead_leaves.images(0, 16, 40, 1), np.random.default_rng(0))
    whitening = pretrain.whitened(rows, 1)
    both = np.concatenate([rows, rows.reshape(-1, 6, 6)[:, :, ::-1].reshape(rows.shape)])
    even = np.linalg.eigvalsh(np.cov((both @ whitening).T))
    raw = np.linalg.eigvalsh(np.cov(both.T))
    assert even.max() <= 1  # the ridge keeps what hardly varies small
    np.testing.assert_allclose(even, raw / (raw + pretrain.RIDGE), atol=1e-9)
