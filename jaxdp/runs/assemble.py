"""From a configuration to the parts of a run: trainer, state, model, optimizer, evaluation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import data, models, train
from jaxdp.noise import PrivatizeState
from jaxdp.optimizers import registry
from jaxdp.optimizers.annealing import AnnealingState
from jaxdp.optimizers.energy import PrivateEnergy, PublicEnergy
from jaxdp.optimizers.method import Method
from jaxdp.preprocess import dp_pca, project
from jaxdp.runs.config import RunConfig
from jaxdp.seeds import Secret
from jaxdp.train import Trainer, TrainState
from jaxdp.types import PyTree


def trainer_of(
    config: RunConfig, dataset: data.Dataset | None, secret: Secret, device_data: PyTree = None
) -> Trainer:
    """The trainer of a resolved configuration, all of its randomness from ``secret``.

    Args:
        config: resolved.
        dataset: the data; None for a trainer that only makes states.
        secret: of the run.
        device_data: the training records, already on the device.
    """
    method, loss_fn = method_of(config, secret), models.cross_entropy(model_of(config))
    if (candidates := config.candidates()) is not None:
        loss_fn = candidates.loss(loss_fn)
    if dataset is None:
        rows, energy = config.dataset_size, None
        method = dataclasses.replace(method, energy=None)
    else:
        rows = len(dataset.train_y)
        energy = _energy(config, dataset, loss_fn, secret, device_data)
    return train.trainer_of(
        method, loss_fn, rows, secret=secret, energy=energy,
        physical_batch_size=config.physical_batch_size,
    )


def method_of(config: RunConfig, secret: Secret) -> Method:
    """The run's method; with audit canaries, one that keeps what is seen of them."""
    method, candidates = config.private_method(secret), config.candidates()
    return method if candidates is None else candidates.watched(method)


def projected(
    config: RunConfig, dataset: data.Dataset, secret: Secret, components: np.ndarray | None
) -> tuple[data.Dataset, np.ndarray | None]:
    """The data as the model sees them, and the released components that project them.

    Args:
        config: resolved.
        dataset: as loaded.
        secret: of the run, where the components are still to be released: charge them first.
        components: released before, to be used again.
    """
    if config.pca_dimensions is None:
        return dataset, None
    assert config.pca_noise_multiplier is not None
    if components is None:
        components = dp_pca(
            dataset.train_x, config.pca_dimensions, config.pca_noise_multiplier, secret
        )
    train_x, test_x = (project(x, components) for x in (dataset.train_x, dataset.test_x))
    return dataclasses.replace(dataset, train_x=train_x, test_x=test_x), components


def _energy(
    config: RunConfig, dataset: data.Dataset, loss_fn: Callable[..., jax.Array], secret: Secret,
    device_data: PyTree,
) -> PublicEnergy | PrivateEnergy | None:
    kind = registry.METHODS[config.method].energy
    if not kind:
        return None
    if kind in ("public", "test"):
        seen, _ = test_split(config, dataset)
        return PublicEnergy(loss_fn, jax.device_put(seen))
    if kind == "train":
        return PublicEnergy(loss_fn, device_data)
    mechanism = config.private_method(secret).energy
    assert mechanism is not None
    sampler = mechanism.sampler(
        len(dataset.train_y), secret=secret.child("energy"),
        physical_batch_size=config.physical_batch_size,
    )
    return PrivateEnergy(loss_fn, device_data, mechanism, sampler)


def test_split(config: RunConfig, dataset: data.Dataset) -> tuple[Any, Any]:
    """(x, y) of the test examples that judge candidates, and of those that accuracy is told of.

    A public energy takes the first half of the test set, at most 5,000, and accuracy the rest. As
    published all examples do both, so that the accuracy is not held out.
    """
    kind = registry.METHODS[config.method].energy
    whole = (dataset.test_x, dataset.test_y)
    if kind != "public":
        return whole, whole
    cut = min(5_000, len(dataset.test_y) // 2)
    return tuple(a[:cut] for a in whole), tuple(a[cut:] for a in whole)


def fresh_state(trainer: Trainer, config: RunConfig, secret: Secret) -> TrainState:
    """The state before the first step; its parameters are a function of the secret alone."""
    return trainer.init(
        models.init(model_of(config), secret.jax_key("init"), config.example_shape())
    )


def model_of(config: RunConfig) -> nn.Module:
    """The model of a configuration."""
    return models.build(
        config.model, num_classes=data.spec(config.dataset).num_classes,
        example_shape=config.example_shape(), activation=config.activation,
        hidden=(config.hidden,),
    )


def with_keys(opt_state: PyTree, secret: Secret) -> PyTree:
    """The same optimizer state with the keys of ``secret``, for the noise and for judging."""
    names = {PrivatizeState: "noise", AnnealingState: "judge"}

    def replace(node: Any) -> Any:
        if type(node) not in names:
            return node
        return node._replace(key=jax.random.key_data(secret.jax_key(names[type(node)])))

    return jax.tree.map(replace, opt_state, is_leaf=lambda n: type(n) in names)


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
