import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import models
from jaxdp.papers import networks

SHAPES = {
    "mnist-cnn": (28, 28, 1),
    "cifar-cnn": (32, 32, 3),
    "dense-top": (5,),
    "mlp": (5,),
    "logistic": (5,),
}
SIZES = {
    "mnist-cnn": 26_010,
    "cifar-cnn": 550_570,
    "dense-top": 5 * 64 + 64 + 64 * 64 + 64 + 650,
    "mlp": 5 * 64 + 64 + 650,
    "logistic": 60,
}


@pytest.mark.parametrize("name", models.MODELS)
def test_sizes_are_the_papers(name):
    model = models.build(name, num_classes=10, example_shape=SHAPES[name])
    params = jax.eval_shape(lambda key: models.init(model, key, SHAPES[name]), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == SIZES[name]


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("activation", list(models.ACTIVATIONS))
def test_no_layer_couples_the_batch(name, activation):
    shape = SHAPES[name]
    model = models.build(name, num_classes=10, example_shape=shape, activation=activation)
    # Random numbers of the right shapes: an initialisation is a compilation, and not the point.
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: models.init(model, key, shape), jax.random.key(0))
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) / 8, leaf.dtype), shapes
    )
    x = jax.random.uniform(jax.random.key(1), (3, *shape))
    other = x.at[1:].set(7.0)
    np.testing.assert_allclose(model.apply(params, x)[0], model.apply(params, other)[0], atol=1e-6)


@pytest.mark.parametrize(("size", "stride"), [(13, 1), (5, 1), (32, 2), (8, 2)])
def test_pooling_equals_flax(size, stride):
    x = jax.random.normal(jax.random.key(0), (2, size, size, 3))
    ours = networks.max_pool_2x2(x, stride)
    np.testing.assert_array_equal(ours, nn.max_pool(x, (2, 2), (stride, stride)))


def test_tempered_sigmoid_is_tanh_at_2_2_1():
    x = jnp.linspace(-3.0, 3.0, 11)
    np.testing.assert_allclose(networks.tempered_sigmoid(2.0, 2.0, 1.0)(x), nn.tanh(x), atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet"}, "model must be one of mlp"),
        ({"activation": "gelu"}, "activation must be one of tanh"),
        (
            {"name": "mnist-cnn"},
            r"model mnist-cnn must be given examples \(28, 28, 1\), got \(5,\)",
        ),
    ],
)
def test_bad_input(arguments, message):
    good = {"name": "mlp", "num_classes": 2, "example_shape": (5,)}
    with pytest.raises(ValueError, match=message):
        models.build(**{**good, **arguments})
