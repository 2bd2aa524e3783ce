"""Fixed features of images, one at a time."""

import numpy as np

from jaxdp import features


def test_no_image_has_a_digit_of_its_features_from_others():
    """Before: an FFT of many images rounded each by its place, so one record moved others'."""
    images = np.random.default_rng(0).normal(size=(57, 13, 9, 3)).astype(np.float32)
    found = features.by_name("scattering", images)
    order = np.random.default_rng(1).permutation(len(images))
    np.testing.assert_array_equal(features.by_name("scattering", images[1:]), found[1:])
    np.testing.assert_array_equal(features.by_name("scattering", images[order]), found[order])
    images[0] = 1e30  # overflows
    broken = features.by_name("scattering", images)
    np.testing.assert_array_equal(broken[1:], found[1:])
