"""The papers' networks in Flax, without a layer that couples the examples of a batch."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import _validate
from jaxdp.types import PyTree

# For what runs once: LLVM's best code for a random generator takes a second or two to compile.
AT_ONCE = {"xla_backend_optimization_level": 0}
# U(±1/√fan_in), as the papers' PyTorch networks start.
_kernel_init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def tempered_sigmoid(scale: float, temperature: float, offset: float) -> Callable:
    """X ↦ scale · σ(temperature · x) − offset (Papernot et al. 2020, arXiv:2007.14191v1, eq. 2)."""
    return lambda x: scale * nn.sigmoid(temperature * x) - offset


ACTIVATIONS: dict[str, Callable] = {
    "tanh": nn.tanh,
    "relu": nn.relu,
    # Papernot et al. 2020, Table 1: the values found for MNIST.
    "tempered_sigmoid": tempered_sigmoid(1.58, 3.0, 0.71),
}


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
                features, (kernel, kernel), strides=2, padding=padding, kernel_init=_kernel_init
            )
            x = max_pool_2x2(act(conv(x)), stride=1)
        x = x.reshape(x.shape[0], -1)
        x = act(nn.Dense(32, kernel_init=_kernel_init)(x))
        return nn.Dense(self.num_classes, kernel_init=_kernel_init)(x)


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
                x = act(nn.Conv(features, (3, 3), padding=1, kernel_init=_kernel_init)(x))
            x = max_pool_2x2(x, stride=2)
        x = x.reshape(x.shape[0], -1)
        x = act(nn.Dense(128, kernel_init=_kernel_init)(x))
        return nn.Dense(self.num_classes, kernel_init=_kernel_init)(x)


class MLP(nn.Module):
    """Fully connected layers; input [n, ...] is flattened, output logits [n, num_classes]."""

    hidden: tuple[int, ...] = (64,)
    activation: str = "tanh"
    num_classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [n, num_classes] of examples [n, ...]."""
        x = x.reshape(x.shape[0], -1)
        for width in self.hidden:
            x = ACTIVATIONS[self.activation](nn.Dense(width, kernel_init=_kernel_init)(x))
        return nn.Dense(self.num_classes, kernel_init=_kernel_init)(x)


MODELS = ("mnist-cnn", "cifar-cnn", "mlp", "logistic")
_INPUTS = {"mnist-cnn": (28, 28, 1), "cifar-cnn": (32, 32, 3)}


def build(
    name: str,
    *,
    num_classes: int,
    example_shape: tuple[int, ...],
    activation: str = "tanh",
    hidden: tuple[int, ...] = (64,),
) -> nn.Module:
    """The model ``name`` for examples of ``example_shape``.

    Raises:
        ValueError: an unknown name or activation, or examples of a shape that it does not take.
    """
    _validate.one_of("model", name, MODELS)
    _validate.one_of("activation", activation, tuple(ACTIVATIONS))
    expected = _INPUTS.get(name, example_shape)
    if tuple(example_shape) != expected:
        raise ValueError(f"model {name} must be given examples {expected}, got {example_shape}")
    if name == "mnist-cnn":
        return MnistCNN(activation, num_classes)
    if name == "cifar-cnn":
        return CifarCNN(activation, num_classes)
    return MLP(() if name == "logistic" else hidden, activation, num_classes)


def init(model: nn.Module, key: jax.Array, example_shape: tuple[int, ...]) -> PyTree:
    """Fresh float32 parameters, a function of the key alone."""
    example = np.zeros((1, *example_shape), np.float32)
    inside = isinstance(key, jax.core.Tracer)  # of another jit, whose options count
    return jax.jit(model.init, compiler_options=None if inside else AT_ONCE)(key, example)


def cross_entropy(model: nn.Module) -> Callable[[PyTree, tuple[jax.Array, jax.Array]], jax.Array]:
    """The loss ``(params, (x, label)) -> scalar`` of one example."""

    def loss_fn(params: PyTree, example: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, label = example
        logits = model.apply(params, x[None])[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    return loss_fn
