"""Features beside sums in float64, pre-trained weights and the images that they came from.

No image has a part in another's features, to the last bit.
"""

import itertools

import numpy as np
import pytest

import jaxdp
from benchmarks import dead_leaves, pretrain
from jaxdp.recipes import features
from jaxdp.recipes.preprocess import Whitening, whitened
from tests.refusing import refused

WEIGHTS = {channels: features.weights(channels) for channels in features.FILTERS}


def gaussian(sides, deviation, slant=1.0, angle=0.0, frequency=0.0):
    """A Gaussian on the torus, times a wave; the quadratic form by a rotation matrix."""
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    form = turn @ np.diag([1, slant**2]) @ turn.T / (2 * deviation**2)
    found = np.zeros(sides, complex)
    for wraps in itertools.product(range(-4, 5), repeat=2):
        at = np.stack(np.indices(sides), -1) + np.array(wraps) * sides
        phase = frequency * at @ turn[:, 0]
        found += np.exp(-np.einsum("...a,ab,...b", at, form, at) + 1j * phase)
    return found


def wavelet(sides, scale, orientations, index):
    numbers = (0.8 * 2**scale, 4 / orientations)
    angle = (int(orientations - orientations / 2 - 1) - index) * np.pi / orientations
    wave = gaussian(sides, *numbers, angle, 0.75 * np.pi / 2**scale)
    bell = gaussian(sides, *numbers, angle)
    norm = 2 * np.pi * numbers[0] ** 2 / numbers[1]
    return (wave - bell * wave.sum() / bell.sum()) / norm


def convolved(image, kernel, step):
    """A sum over all pixels for every output pixel: no Fourier transform."""
    (height, width), rows = image.shape, np.indices(image.shape).reshape(2, -1)
    down = (rows[0][:, None] - rows[0][None]) % height
    across = (rows[1][:, None] - rows[1][None]) % width
    full = kernel[down, across] @ image.reshape(-1)
    return full.reshape(image.shape)[::step, ::step]


def reference(image, scales, orientations):
    """[h, w, paths] of one plane, path after path."""
    cell = 2**scales
    padded = np.pad(image, [(cell, cell + -side % cell) for side in image.shape], mode="reflect")

    def averaged(plane, scale):
        low = gaussian(plane.shape, 0.8 * 2.0 ** (scales - 1 - scale)).real
        return convolved(plane, low / low.sum(), 2 ** (scales - scale))[1:-1, 1:-1]

    def modulus(plane, scale, index):
        return np.abs(convolved(plane, wavelet(plane.shape, scale, orientations, index), 2**scale))

    first = {(j, a): modulus(padded, j, a) for j in range(scales) for a in range(orientations)}
    paths = [averaged(padded, 0)] + [averaged(plane, j) for (j, _), plane in first.items()]
    for j, k in itertools.combinations(range(scales), 2):
        for a, b in itertools.product(range(orientations), repeat=2):
            paths.append(averaged(modulus(first[j, a], k - j, b), k))
    return np.stack(paths, -1)


def test_scattering_is_the_direct_sums():
    for shape, *numbers in (((9, 6, 2), 1, 4), ((7, 10, 1), 2, 3), ((8, 8, 1), 3, 1)):
        images = np.random.default_rng(1).normal(size=(2, *shape)).astype(np.float32)
        found = features.scattering(images, *numbers)
        for image, row in zip(images, found, strict=True):
            planes = [reference(plane, *numbers) for plane in np.moveaxis(image, -1, 0)]
            want = np.concatenate(planes, -1)
            np.testing.assert_allclose(row, want, atol=2e-6, err_msg=str(shape))
        assert found.dtype == np.float32
        assert found.shape[-1] == shape[-1] * features.number_of_paths(*numbers)
    # Constants have their mean and no more.
    found = features.scattering(np.full((1, 16, 12, 1), 7.0), 2, 8)
    np.testing.assert_allclose(found[..., 0], 7, rtol=1e-6)
    assert np.abs(found[..., 1:]).max() < 1e-5
    dark, light = (np.full((1, 12, 12, 3), level, np.float32) for level in (0.0, 0.75))
    np.testing.assert_allclose(*map(features.pretrained, (dark, light)), atol=1e-2)
    # Groups have mean 0 and variance 1.
    x = np.random.default_rng(5).normal(3, 2, size=(5, 4, 3, 6)).astype(np.float32)
    x[0, ..., :2] = 4.0
    found = features.group_normalised(x, 3).reshape(5, 12, 3, 2)
    np.testing.assert_allclose(found.mean((1, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(found.std((1, 3))[1:], 1, atol=1e-4)
    assert (found[0, :, 0] == 0).all()


def test_wrong_arguments_are_told_in_words():
    images, names = np.zeros((1, 8, 8, 1), np.float32), ", ".join(features.NAMES)
    assert names.startswith(
        "scattering, random_convolutions, pretrained, pretrained_mirrored, two_"
    )
    for words, call, *args in (
        (r"images must be .*got shape \(8, 8, 1\)", features.scattering, images[0]),
        ("scales must be at most log2 .* 8 by 8; got 4", features.scattering, images, 4),
        ("scales must be a whole number", features.scattering, images, 0),
        ("orientations must be a whole number", features.scattering, images, 1, 0),
        ("groups must divide the 10", features.group_normalised, np.zeros((2, 10)), 3),
        (r"x must be .*got shape \(3,\)", features.group_normalised, np.zeros(3), 3),
        (f"features must be one of {names}; got", features.by_name, "wavelets", images),
        (r"must be given images .*got examples \(9,", features.shape_of, "scattering", (9,)),
        ("1 or 3 channels for pre-made.*, got 2", features.pretrained, images[..., [0, 0]]),
        ("1 or 3 channels .*got 2", features.shape_of, "two_layers", (28, 28, 2)),
        (r"at least 16 by 16.*\(8, 8, 1\)", features.two_layers, images),
        ("at least 4 by 4.*3 by 8", features.pretrained, images[:, :3]),
        (r"images must be an array .*got shape \(8, 8, 1\)", features.pretrained, images[0]),
        ("for pre-made filters, got 4", features.shape_of, "pretrained_mirrored", (32, 32, 4)),
        ("at least 4 by 4, got examples", features.shape_of, "pretrained", (32, 3, 3)),
    ):
        refused(words, call, *args)
    for name, wrong in (("side", 9), ("side", 0), ("cells", 9), ("filters", 0), ("seed", -1)):
        refused(name, features.random_convolutions, images, **{name: wrong})
    assert jaxdp.features is features


def pooled(responses, threshold, down, across):
    """Means over cells of what is above a threshold, and of what is below its negative."""
    found = np.concatenate([responses - threshold, -responses - threshold], -1).clip(0)
    edges = (np.arange(n + 1) * found.shape[i] // n for i, n in ((1, down), (2, across)))
    rows, columns = map(list, map(itertools.pairwise, edges))
    cells = [[found[:, a:b, c:d].mean((1, 2)) for c, d in columns] for a, b in rows]
    return np.moveaxis(np.array(cells), 2, 0)


def test_random_convolutions_are_sums_over_pixels_by_filters_that_are_public_constants():
    images = np.random.default_rng(0).random((3, 9, 8, 2)).astype(np.float32)
    found = features.random_convolutions(images, filters=4, side=3, cells=2, seed=5)
    filters = features.random_filters(4, 3, 2, 5).astype(np.float64)
    padded = np.pad(images.astype(np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    responses = np.zeros((3, 9, 8, 4))
    for i, j in itertools.product(range(9), range(8)):
        responses[:, i, j] = np.einsum("nabc,abcf->nf", padded[:, i : i + 3, j : j + 3], filters)
    np.testing.assert_allclose(found, pooled(responses, 0.0, 2, 2), atol=1e-5)
    # Filters are public constants.
    filters = features.random_filters(6, 5, 1, 0)
    np.testing.assert_array_equal(filters, features.random_filters(6, 5, 1, 0))
    assert np.abs(filters - features.random_filters(6, 5, 1, 1)).max() > 0.1
    flat = filters.reshape(-1, 6).astype(np.float64)
    np.testing.assert_allclose(flat.mean(0), 0, atol=1e-7)
    np.testing.assert_allclose(np.linalg.norm(flat, axis=0), 1, rtol=1e-6)
    # The one kind that is not computed image by image: every place of three batches.
    image = np.random.default_rng(1).random((12, 12, 1)).astype(np.float32)
    rows = features._rows_at_once((12, 12, 40), 2, 0)
    x, places = among(image, 2 * rows + 9)
    found = bits(features.random_convolutions(x)[places])
    assert (found == bits(features.random_convolutions(image[None]))).all()


# Sizes at which images computed together, in place of one by one, had other last bits.
SHAPES = {"scattering": (13, 11, 1), "random_convolutions": (28, 28, 1)}
SHAPES |= {"two_layers": (28, 28, 1), "two_layers_mirrored": (17, 16, 3)}


def bits(x):
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def among(image, count):
    """(records with the image at every second place, beside others of any size; these places)."""
    rng = np.random.default_rng(0)
    x = rng.random((count, *image.shape)).astype(np.float32)
    x *= 10.0 ** rng.uniform(-30, 30, size=(count, *[1] * image.ndim)).astype(np.float32)
    x[1::8], x[3::8], x[5::16] = np.nan, np.inf, -np.inf
    x[::2] = image
    return x, np.arange(0, count, 2)


@pytest.mark.parametrize("name", features.NAMES)
def test_an_image_has_its_features_at_every_place_of_every_batch(name, monkeypatch):
    """In full batches, in the padded last one, and alone; neighbours may be infinite."""
    numbers = 1 << (12 if name.startswith("pretrained") else 20)  # for a few dozen images a batch
    monkeypatch.setattr(features, "_NUMBERS_AT_ONCE", numbers)
    image = np.random.default_rng(1).random(SHAPES.get(name, (8, 9, 3))).astype(np.float32)
    alone = features.by_name(name, image[None])
    assert alone.shape[1:] == features.shape_of(name, image.shape)
    assert np.isfinite(alone).all()
    for count in (2, 75, 200):
        x, places = among(image, count)
        found = features.by_name(name, x)
        assert (bits(found[places]) == bits(alone)).all()
        assert np.isnan(found[1]).any()


@pytest.mark.parametrize(("places", "channels"), [(12, 7), (16, 32)])
def test_whitened_and_normalised_records_do_not_know_each_other(places, channels):
    rng = np.random.default_rng(2)
    drawn = lambda rows: rng.normal(size=(rows, channels)).astype(np.float32)  # noqa: E731
    record, fitted = drawn(places), Whitening(drawn(places), drawn(channels))
    x, at = among(record, 300)
    for made in (lambda x: whitened(x, fitted), lambda x: features.group_normalised(x, channels)):
        assert (bits(made(x)[at]) == bits(made(record[None]))).all()


def test_weights_are_those_of_their_recipe_and_others_are_refused(monkeypatch):
    for channels, found in WEIGHTS.items():
        recipe, filters = features.recipe(f"dead_leaves_{channels}"), features.FILTERS[channels]
        half = {name: array.astype(np.float16) for name, array in found._asdict().items()}
        assert features.digest(half) == recipe["sha256"]
        assert recipe["command"].startswith(f"python -m benchmarks.pretrain {channels} --seed ")
        assert found.filters.shape == (6, 6, channels, filters)
        assert found.thresholds.shape == (filters,)
        assert all(np.isfinite(array).all() for array in found)
        assert np.abs(found.filters.mean((0, 1, 2))).max() < 1e-4  # of float16
        assert (found.filters.std((0, 1, 2)) > 1e-3).all()
    monkeypatch.setattr(features, "recipe", lambda name: recipe | {"sha256": "0" * 64})
    words = "weights must be those of their recipe, digest 000"
    refused(words, features.weights.__wrapped__, channels)
    # A digest sees names, shapes, types and numbers.
    arrays, six = {"a": np.arange(6.0), "b": np.ones(2, np.float16)}, np.arange(6.0)
    changes = ({"a": six.reshape(2, 3)}, {"b": np.ones(2, np.float32)}, {"a": six + 1e-9})
    others = [{"a": six, "c": arrays["b"]}, *({**arrays, **each} for each in changes)]
    digests = [features.digest(each) for each in (arrays, *others)]
    assert len({*digests}) == 5
    assert features.digest(dict(reversed(arrays.items()))) == digests[0]


def summed(images, kept):
    """The features of the pre-trained network, place by place in float64."""
    filters, thresholds = (np.asarray(a, np.float64) for a in kept)
    count, height, width, _ = images.shape
    padded = np.pad(images.astype(np.float64), ((0, 0), (2, 3), (2, 3), (0, 0)), mode="edge")
    found = np.zeros((count, height, width, len(thresholds)))
    for i, j in itertools.product(range(height), range(width)):
        patch = padded[:, i : i + 6, j : j + 6]
        patch = patch - patch.mean((1, 2, 3), keepdims=True)
        spread = np.sqrt(patch.var((1, 2, 3)) + (10 / 255) ** 2)[:, None]
        found[:, i, j] = np.einsum("nabc,abcf->nf", patch, filters) / spread
    return pooled(found, thresholds, height // 4, width // 4)


def test_pretrained_features_are_the_sums_over_pixels():
    for height, width, channels in ((8, 8, 1), (9, 13, 3)):
        images = np.random.default_rng(0).random((2, height, width, channels)).astype(np.float32)
        want, mirror = (summed(x, WEIGHTS[channels]) for x in (images, images[:, :, ::-1]))
        np.testing.assert_allclose(features.pretrained(images), want, atol=1e-4)
        found = features.pretrained(images, mirrored=True)
        np.testing.assert_allclose(found, (want + mirror) / 2, atol=1e-4)
        np.testing.assert_allclose(features.pretrained(images[:, :, ::-1], True), found, atol=1e-6)


def test_leaves_are_a_function_of_the_seed_and_filters_those_of_whitened_patches(monkeypatch):
    monkeypatch.setattr(dead_leaves, "_AT_ONCE", 3)
    found = dead_leaves.images(0, 4, 20, 3)
    assert found.shape == (4, 20, 20, 3)
    assert found.min() >= 0
    assert found.max() <= 1
    assert (found.std((1, 2, 3)) > 0.01).all()
    np.testing.assert_array_equal(dead_leaves.images(0, 4, 20, 3), found)
    assert np.abs(dead_leaves.images(1, 4, 20, 3) - found).max() > 0.1
    assert dead_leaves.images(0, 3, 20, 1).shape == (3, 20, 20, 1)
    # Filters are those of whitened patches.
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
