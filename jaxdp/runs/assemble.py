"""The parts of a configured run: data, loss, model, energy, evaluation."""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import data
from jaxdp.data import models
from jaxdp.ledger.seeds import Secret
from jaxdp.optimizers import registry
from jaxdp.optimizers.energy import PrivateEnergy, PublicEnergy
from jaxdp.recipes import features
from jaxdp.recipes.preprocess import Whitening, dp_pca, dp_whitening, project, whitened
from jaxdp.runs import canary_inputs
from jaxdp.runs.config import RunConfig, rows_of_pass
from jaxdp.sampling import Sampler
from jaxdp.types import LossFn, PyTree


def loss_of(config: RunConfig) -> Callable[..., jax.Array]:
    """The loss of one example."""
    return models.cross_entropy(model_of(config))


def featured(config: RunConfig, dataset: data.Dataset) -> data.Dataset:
    """The data with each example's fixed features in its place: nothing is released or charged.

    Args:
        config: resolved.
        dataset: as loaded.
    """
    if config.features is None:
        return dataset
    train_x, test_x = (
        features.by_name(config.features, x) for x in (dataset.train_x, dataset.test_x)
    )
    return dataclasses.replace(dataset, train_x=train_x, test_x=test_x)


def stand_in(config: RunConfig, dataset: data.Dataset) -> np.ndarray:
    """The training examples; where others will be made of them, zeros of those' shape, unread."""
    shape = config.example_shape()
    if shape == dataset.train_x.shape[1:]:
        return dataset.train_x
    return np.broadcast_to(np.float32(0), (len(dataset.train_x), *shape))


def projected(
    config: RunConfig, dataset: data.Dataset, secret: Secret, components: np.ndarray | None
) -> tuple[data.Dataset, np.ndarray | None]:
    """The data projected by DP-PCA or whitened, and what was released for it.

    Args:
        config: resolved.
        dataset: as loaded.
        secret: of the run, where the components are still to be released: charge them first.
        components: released before, to be used again.
    """
    if config.whiten_noise_multiplier is not None:
        return _whitened(config, config.whiten_noise_multiplier, dataset, secret, components)
    if config.pca_dimensions is None:
        return dataset, None
    assert config.pca_noise_multiplier is not None
    if components is None:
        components = dp_pca(
            dataset.train_x, config.pca_dimensions, config.pca_noise_multiplier, secret
        )
    train_x, test_x = (project(x, components) for x in (dataset.train_x, dataset.test_x))
    return dataclasses.replace(dataset, train_x=train_x, test_x=test_x), components


def _whitened(
    config: RunConfig,
    noise_multiplier: float,
    dataset: data.Dataset,
    secret: Secret,
    released: np.ndarray | None,
) -> tuple[data.Dataset, np.ndarray]:
    """The whitened data, and what was released: the mean's rows, then the matrix's."""
    if released is None:
        made = dp_whitening(dataset.train_x, noise_multiplier, secret, size=config.dataset_size)
        released = np.concatenate(made)
    train_x, test_x = (whitened_by(released, x) for x in (dataset.train_x, dataset.test_x))
    return dataclasses.replace(dataset, train_x=train_x, test_x=test_x), released


def whitened_by(released: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Examples whitened by what a run released for it: the mean's rows, then the matrix's."""
    channels = released.shape[1]
    return whitened(x, Whitening(released[:-channels], released[-channels:]))


def energy_of(
    config: RunConfig,
    public: tuple[LossFn, PyTree],
    trained: tuple[LossFn, PyTree],
    sampler: Callable[..., Sampler],
) -> PublicEnergy | PrivateEnergy | None:
    """The energy that judges the candidates of an annealed algorithm; None for another.

    Args:
        config: resolved.
        public: loss and test examples that may judge.
        trained: loss and training records, on the device.
        sampler: (mechanism, number of records, physical batch size) -> sampler on the run's ledger.
    """
    kind = registry.ALGORITHMS[config.algorithm].energy
    if not kind:
        return None
    if kind in ("public", "test"):
        return PublicEnergy(public[0], jax.device_put(public[1]))
    loss_fn, records = trained
    if kind == "train":
        return PublicEnergy(loss_fn, records)
    mechanism = config.private_algorithm().energy
    assert mechanism is not None
    count = len(jax.tree.leaves(records)[0])
    rows = config.physical_batch_size
    # Of "auto", what an update's memory leaves says nothing about an energy's.
    drawn = sampler(mechanism, count, rows if isinstance(rows, int) else rows_of_pass(config))
    return PrivateEnergy(loss_fn, records, mechanism, drawn)


def test_split(
    config: RunConfig, dataset: data.Dataset
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """(x, y) of the test examples that judge candidates, and of those that accuracy is measured on.

    A public energy takes the first half of the test set, at most 5,000, and accuracy the rest. As
    published all examples do both, so that the accuracy is not held out. Those that are candidates
    of an audit are in neither.
    """
    kind = registry.ALGORITHMS[config.algorithm].energy
    left = canary_inputs.tests_left(config, len(dataset.test_y))
    whole = (dataset.test_x[:left], dataset.test_y[:left])
    if kind != "public":
        return whole, whole
    cut = min(5_000, left // 2)
    return tuple(a[:cut] for a in whole), tuple(a[cut:] for a in whole)


def fresh_params(config: RunConfig, secret: Secret) -> PyTree:
    """The parameters before the first step, a function of the secret alone."""
    return models.init(model_of(config), secret.jax_key("init"), config.example_shape())


def model_of(config: RunConfig) -> nn.Module:
    """The model of a configuration."""
    return models.build(
        config.model,
        num_classes=config.spec.num_classes,
        example_shape=config.example_shape(),
        activation=config.activation,
        hidden=(config.hidden,),
    )


def evaluator(
    model: nn.Module, x: np.ndarray, y: np.ndarray
) -> Callable[[PyTree], dict[str, float]]:
    """A function from parameters to ``test_accuracy`` and ``test_loss``, the mean cross-entropy.

    Args:
        model: the network.
        x: public test examples, which go to the device once.
        y: their labels.
    """
    size = 1_000
    x, y = jax.device_put((x, y))

    @jax.jit
    def sums(params: PyTree, xs: jax.Array, ys: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = jnp.asarray(model.apply(params, xs))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ys)
        return jnp.sum(jnp.argmax(logits, axis=-1) == ys), jnp.sum(losses)

    def numbers(params: PyTree) -> dict[str, float]:
        parts = [sums(params, x[i : i + size], y[i : i + size]) for i in range(0, len(y), size)]
        correct, loss = (sum(float(part) for part in of) for of in zip(*parts, strict=True))
        return {"test_accuracy": correct / len(y), "test_loss": loss / len(y)}

    return numbers
