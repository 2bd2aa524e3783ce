"""The papers' convolutional networks and activation; importing this module registers them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxdp._extras import needed

with needed("jaxdp.papers.networks", "papers", "flax"):
    import flax.linen as nn

    from jaxdp.data.models import ACTIVATIONS, MLP, ModelEntry, kernel_init, register


def tempered_sigmoid(
    scale: float, temperature: float, offset: float
) -> Callable[[jax.Array], jax.Array]:
    """X ↦ scale · σ(temperature · x) − offset (Papernot et al. 2020, arXiv:2007.14191v1, eq. 2)."""
    return lambda x: scale * nn.sigmoid(temperature * x) - offset


# Papernot et al. 2020, Table 1: the values found for MNIST.
ACTIVATIONS["tempered_sigmoid"] = tempered_sigmoid(1.58, 3.0, 0.71)


def max_pool_2x2(x: jax.Array, stride: int) -> jax.Array:
    """2×2 maximum over x [n, h, w, c], as the maximum of four shifted slices.

    On a CPU the gradient of a ``reduce_window`` is a scatter: with it, clipped gradients of 512
    examples of the MNIST CNN took 80–100 ms, with this 54.
    """
    height, width = x.shape[1], x.shape[2]
    corners = [
        x[:, i : height - 1 + i : stride, j : width - 1 + j : stride, :]
        for i in (0, 1)
        for j in (0, 1)
    ]
    return jnp.maximum(jnp.maximum(corners[0], corners[1]), jnp.maximum(corners[2], corners[3]))


class MnistCNN(nn.Module):
    """The 26,010-parameter network for MNIST and Fashion-MNIST (Tramèr & Boneh, arXiv:2011.11660).

    Input [n, 28, 28, 1], output logits [n, num_classes].
    """

    activation: str = "tanh"
    num_classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [n, num_classes] of images [n, 28, 28, 1]."""
        act = ACTIVATIONS[self.activation]
        for features, kernel, padding in ((16, 8, 2), (32, 4, 0)):
            conv = nn.Conv(
                features, (kernel, kernel), strides=2, padding=padding, kernel_init=kernel_init
            )
            x = max_pool_2x2(act(conv(x)), stride=1)
        x = x.reshape(x.shape[0], -1)
        x = act(nn.Dense(32, kernel_init=kernel_init)(x))
        return nn.Dense(self.num_classes, kernel_init=kernel_init)(x)


class CifarCNN(nn.Module):
    """The 550,570-parameter network for CIFAR-10 (Tramèr & Boneh 2021, arXiv:2011.11660).

    Input [n, 32, 32, 3], output logits [n, num_classes].
    """

    activation: str = "tanh"
    num_classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [n, num_classes] of images [n, 32, 32, 3]."""
        act = ACTIVATIONS[self.activation]
        for features in (32, 64, 128):
            for _ in range(2):
                x = act(nn.Conv(features, (3, 3), padding=1, kernel_init=kernel_init)(x))
            x = max_pool_2x2(x, stride=2)
        x = x.reshape(x.shape[0], -1)
        x = act(nn.Dense(128, kernel_init=kernel_init)(x))
        return nn.Dense(self.num_classes, kernel_init=kernel_init)(x)


MNIST_CNN = ModelEntry(lambda act, classes, _: MnistCNN(act, classes), (28, 28, 1))
CIFAR_CNN = ModelEntry(lambda act, classes, _: CifarCNN(act, classes), (32, 32, 3))
# The layers of AdaDp's AlexNet that it trains on CIFAR-10: two dense ones and the softmax layer.
DENSE_TOP = ModelEntry(lambda act, classes, hidden: MLP((*hidden, *hidden), act, classes))
register("mnist-cnn", MNIST_CNN)
register("cifar-cnn", CIFAR_CNN)
register("dense-top", DENSE_TOP)
