"""Flax networks by name, none with a layer that couples the examples of a batch."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import optax

from jaxdp import arguments
from jaxdp._extras import needed
from jaxdp.ledger.seeds import AT_ONCE
from jaxdp.types import PyTree

with needed("jaxdp.models", "train", "flax"):
    import flax.linen as nn

# U(±1/√fan_in), as the papers' PyTorch networks start.
kernel_init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": nn.tanh,
    "relu": nn.relu,
}


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
            x = ACTIVATIONS[self.activation](nn.Dense(width, kernel_init=kernel_init)(x))
        return nn.Dense(self.num_classes, kernel_init=kernel_init)(x)


@dataclasses.dataclass(frozen=True)
class ModelEntry:
    """A registry entry: how to build a network, and the examples that it takes.

    Attributes:
        build: from (activation, num_classes, hidden widths) to the module.
        example_shape: of the examples that it takes; None takes any.
    """

    build: Callable[[str, int, tuple[int, ...]], nn.Module]
    example_shape: tuple[int, ...] | None = None


MODELS: dict[str, ModelEntry] = {
    "mlp": ModelEntry(lambda activation, classes, hidden: MLP(hidden, activation, classes)),
    "logistic": ModelEntry(lambda activation, classes, hidden: MLP((), activation, classes)),
}


def register(name: str, entry: ModelEntry) -> None:
    """Adds a network to the registry, for runs and the command line.

    Raises:
        ValueError: the name is taken by another.
    """
    if MODELS.setdefault(name, entry) is not entry:
        raise ValueError(f"name must be new, got {name!r}, which is registered")


def build(
    name: str,
    *,
    num_classes: int,
    example_shape: tuple[int, ...],
    activation: str = "tanh",
    hidden: tuple[int, ...] = (64,),
) -> nn.Module:
    """The network ``name`` for examples of ``example_shape``.

    Raises:
        ValueError: an unknown name or activation, or examples of a shape that it does not take.
    """
    hint = "; `import jaxdp.papers.networks` adds those of the papers"
    entry = MODELS[arguments.one_of("model", name, tuple(MODELS), hint)]
    arguments.one_of("activation", activation, tuple(ACTIVATIONS))
    if entry.example_shape not in (None, tuple(example_shape)):
        raise ValueError(
            f"model {name} must be given examples {entry.example_shape}, got {example_shape}"
        )
    return entry.build(activation, num_classes, hidden)


def init(model: nn.Module, key: jax.Array, example_shape: tuple[int, ...]) -> PyTree:
    """Initial float32 parameters, a function of the key alone."""
    example = np.zeros((1, *example_shape), np.float32)
    inside = isinstance(key, jax.core.Tracer)  # of another jit, whose options count
    return jax.jit(model.init, compiler_options=None if inside else AT_ONCE)(key, example)


def cross_entropy(model: nn.Module) -> Callable[[PyTree, tuple[jax.Array, jax.Array]], jax.Array]:
    """The cross-entropy loss ``(params, (x, label)) -> scalar`` of one example."""

    def loss_fn(params: PyTree, example: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, label = example
        logits = model.apply(params, x[None])[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    return loss_fn
