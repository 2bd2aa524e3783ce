"""Attacks on features of an image: its place, its batch, its neighbours, to the last bit."""

import numpy as np
import pytest

from jaxdp import _images, features
from jaxdp.whitening import Whitening, whitened

# Sizes at which images computed together, in place of one by one, had other last bits.
SHAPES = {"scattering": (13, 11, 1), "random_convolutions": (28, 28, 1)}


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
    monkeypatch.setattr(_images, "_NUMBERS_AT_ONCE", numbers)
    image = np.random.default_rng(1).random(SHAPES.get(name, (8, 9, 3))).astype(np.float32)
    alone = bits(features.by_name(name, image[None]))
    for count in (2, 75, 200):
        x, places = among(image, count)
        assert (bits(features.by_name(name, x)[places]) == alone).all()


def test_random_convolutions_of_a_whole_batch_as_they_are_made():
    """The one kind that is not computed image by image: every place of three batches."""
    image = np.random.default_rng(1).random((12, 12, 1)).astype(np.float32)
    rows = _images.rows_at_once((12, 12, 40), 2, 0)
    x, places = among(image, 2 * rows + 9)
    found = bits(features.random_convolutions(x)[places])
    assert (found == bits(features.random_convolutions(image[None]))).all()


@pytest.mark.parametrize(("places", "channels"), [(12, 7), (16, 32)])
def test_whitened_and_normalised_records_do_not_know_each_other(places, channels):
    rng = np.random.default_rng(2)
    record = rng.normal(size=(places, channels)).astype(np.float32)
    fitted = Whitening(
        *(rng.normal(size=(n, channels)).astype(np.float32) for n in (places, channels))
    )
    x, at = among(record, 300)
    for made in (lambda x: whitened(x, fitted), lambda x: features.group_normalised(x, channels)):
        assert (bits(made(x)[at]) == bits(made(record[None]))).all()
