"""From a configuration to the parts of a run: trainer, state, model, optimizer, evaluation."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import data, models
from jaxdp.noise import PrivatizeState
from jaxdp.runs.config import RunConfig
from jaxdp.seeds import Secret
from jaxdp.train import Trainer, TrainState
from jaxdp.types import PyTree


def trainer_of(config: RunConfig, num_records: int, secret: Secret) -> Trainer:
    """The trainer of a resolved configuration, all of its randomness from ``secret``."""
    mechanism = config.mechanism()
    return Trainer(
        mechanism.clipped_grad(models.cross_entropy(model_of(config))),
        optax.chain(mechanism.privatize(secret.jax_key("noise")), optimizer_of(config)),
        mechanism.sampler(
            num_records, secret=secret, physical_batch_size=config.physical_batch_size
        ),
    )


def fresh_state(trainer: Trainer, config: RunConfig, secret: Secret) -> TrainState:
    """The state before the first step; its parameters are a function of the secret alone."""
    shape = data.spec(config.dataset).example_shape
    return trainer.init(models.init(model_of(config), secret.jax_key("init"), shape))


def model_of(config: RunConfig) -> nn.Module:
    """The model of a configuration."""
    chosen = data.spec(config.dataset)
    return models.build(
        config.model, num_classes=chosen.num_classes, example_shape=chosen.example_shape,
        activation=config.activation,
    )


def optimizer_of(config: RunConfig) -> optax.GradientTransformation:
    """The optax optimizer of a configuration: post-processing of the noisy gradient."""
    if config.optimizer == "adam":
        return optax.adam(config.learning_rate)
    return optax.sgd(config.learning_rate, momentum=config.momentum or None)


def with_noise_key(opt_state: PyTree, key: jax.Array) -> PyTree:
    """The same optimizer state with another noise key."""
    words = jax.random.key_data(key)

    def replace(node: Any) -> Any:
        return node._replace(key=words) if isinstance(node, PrivatizeState) else node

    return jax.tree.map(replace, opt_state, is_leaf=lambda n: isinstance(n, PrivatizeState))


def evaluator(model: nn.Module, x: np.ndarray, y: np.ndarray) -> Callable[[PyTree], float]:
    """A function from parameters to accuracy on (x, y), which go to the device once."""
    size = 1_000
    x, y = jax.device_put((x, y))

    @jax.jit
    def correct(params: PyTree, xs: jax.Array, ys: jax.Array) -> jax.Array:
        return jnp.sum(jnp.argmax(jnp.asarray(model.apply(params, xs)), axis=-1) == ys)

    def accuracy(params: PyTree) -> float:
        counts = [
            correct(params, x[i : i + size], y[i : i + size]) for i in range(0, len(y), size)
        ]
        return sum(int(count) for count in counts) / len(y)

    return accuracy
