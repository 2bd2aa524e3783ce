"""The papers' networks: their sizes, and that no layer couples the records of a batch."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import models
from jaxdp.papers import networks
from tests.refusing import refused

# Shape of an example, and the number of parameters for 10 classes.
PAPERS = {
    "mnist-cnn": ((28, 28, 1), 26_010),
    "cifar-cnn": ((32, 32, 3), 550_570),
    "dense-top": ((5,), 5 * 64 + 64 + 64 * 64 + 64 + 650),
    "mlp": ((5,), 5 * 64 + 64 + 650),
    "logistic": ((5,), 60),
}
ACTIVATED = [(name, "tanh") for name in PAPERS] + [("mlp", name) for name in models.ACTIVATIONS]


def shapes_of(model, shape):
    return jax.eval_shape(lambda key: models.init(model, key, shape), jax.random.key(0))


def test_sizes_are_the_papers_and_no_layer_couples_the_batch():
    assert set(models.MODELS) == set(PAPERS)
    for name, (shape, size) in PAPERS.items():
        model = models.build(name, num_classes=10, example_shape=shape)
        leaves = jax.tree.leaves(shapes_of(model, shape))
        assert sum(leaf.size for leaf in leaves) == size, name
    # No layer couples the batch.
    for name, activation in ACTIVATED:
        shape, _ = PAPERS[name]
        model = models.build(name, num_classes=10, example_shape=shape, activation=activation)
        # Random numbers of the right shapes: an initialisation is a compilation, and not the point.
        rng = np.random.default_rng(0)
        leaves, layout = jax.tree.flatten(shapes_of(model, shape))
        drawn = [jnp.asarray(rng.normal(size=leaf.shape) / 8, leaf.dtype) for leaf in leaves]
        params = jax.tree.unflatten(layout, drawn)
        x = rng.random((3, *shape), np.float32)
        other = np.concatenate([x[:1], np.full_like(x[1:], 7.0)])
        one, two = (model.apply(params, rows)[0] for rows in (x, other))
        np.testing.assert_allclose(one, two, atol=1e-6, err_msg=f"{name} {activation}")


def test_pooling_equals_flax_and_a_tempered_sigmoid_tanh():
    for size, stride in ((13, 1), (5, 1), (32, 2), (8, 2)):
        x = jnp.asarray(np.random.default_rng(0).random((2, size, size, 3), np.float32))
        theirs = nn.max_pool(x, (2, 2), (stride, stride))
        np.testing.assert_array_equal(networks.max_pool_2x2(x, stride), theirs)
    x = jnp.linspace(-3.0, 3.0, 11)
    np.testing.assert_allclose(networks.tempered_sigmoid(2.0, 2.0, 1.0)(x), nn.tanh(x), atol=1e-6)
    # Others are refused.
    given = {"num_classes": 2, "example_shape": (5,)}
    words = "mnist-cnn must be given examples (28, 28, 1), got (5,)"
    refused("model must be one of mlp", models.build, "resnet", **given)
    refused("activation must be one of tanh", models.build, "mlp", activation="gelu", **given)
    refused(words, models.build, "mnist-cnn", **given)
