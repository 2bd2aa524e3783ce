"""Two layers of whitened patches: the cheap forward is the convolutions', record by record."""

import jax
import numpy as np

from benchmarks.encoder import cheap, patches


def drawn(side, channels, count, seed):
    kernel = np.random.default_rng(seed).normal(size=(side, side, channels, count)) / side
    kernel = (kernel - kernel.mean((0, 1, 2))).astype(np.float32)
    return patches.Layer(kernel, kernel[0, 0, 0] / 4, 0.1)


LAYERS = drawn(6, 3, 5, 0), drawn(3, 10, 7, 1)
IMAGES = np.random.default_rng(2).random((3, 32, 32, 3)).astype(np.float32)


def test_products_of_unfolded_patches_are_the_convolutions():
    first, second = LAYERS
    low, high = 0.0, 0.0
    for x in (IMAGES, IMAGES[:, :, ::-1]):
        y = patches.cells(patches.responses(first, x), 2)
        low, high = low + patches.cells(y, 4) / 2, high + patches.responses(second, y) / 2
    for step in (1, 2):
        cells = [patches.cells(high[:, ::step, ::step], 8 // step), low]
        wanted = np.concatenate([c.transpose(0, 3, 1, 2).reshape(3, -1) for c in cells], 1)
        found = cheap.encoded(first, second, IMAGES, step)
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_an_image_has_its_features_beside_any_others():
    run = jax.jit(lambda x: cheap.encoded(*LAYERS, x))
    bits = lambda x: np.asarray(run(x)).view(np.uint32)  # noqa: E731
    alone = bits(IMAGES[:1])
    for count in (2, 9, 32):
        scale = 10.0 ** np.random.default_rng(count).uniform(-30, 30, (count, 1, 1, 1))
        x = np.float32(scale) * IMAGES[1]
        x[1::4], x[::2] = np.nan, IMAGES[0]
        assert (bits(x)[::2] == alone).all()
