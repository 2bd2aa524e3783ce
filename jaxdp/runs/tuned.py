"""Tuning of a configuration: built-in data and models, scored on a part of the test records."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments, data
from jaxdp.accounting.tuned import Tries
from jaxdp.ledger.seeds import Secret
from jaxdp.optimizers import registry
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.runs import assemble
from jaxdp.runs import space as spaces
from jaxdp.runs.config import RunConfig, check_values, resolve
from jaxdp.runs.recipes import recipe
from jaxdp.runs.tries import Chosen
from jaxdp.runs.tuning import tune

# What a candidate may be made of: none of them moves the event.
NAMES = ("learning_rate", "l2_clip_norm", "momentum", "optimizer")
_MOST_TO_CHOOSE = 5_000


class TunedConfig(NamedTuple):
    """The result of ``tuned``.

    Attributes:
        chosen: the best try, or none.
        config: its configuration, or that of the tuning.
        accuracy: on the test records that chose nothing; None where no try gave a score.
    """

    chosen: Chosen
    config: RunConfig
    accuracy: float | None


def configured(
    dataset: str | data.specs.DatasetSpec,
    tries: Tries,
    *,
    epsilon: float | None,
    noise_multiplier: float | None,
    **given: Any,
) -> RunConfig:
    """The resolved configuration of every try; noise for ``epsilon`` of the **whole** tuning.

    Args:
        dataset: as for ``recipe``.
        tries: law of the number of tries.
        epsilon: of everything; None with a ``noise_multiplier``.
        noise_multiplier: of every try; None takes the least that ``epsilon`` allows.
        given: other fields, as for ``recipe``.

    Raises:
        ValueError: both or neither were given, or a value that cannot be tuned.
    """
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError(
            "epsilon or noise_multiplier must be given, and not both, got "
            f"{epsilon} and {noise_multiplier}"
        )
    config = resolve(recipe(dataset, noise_multiplier=noise_multiplier or 1.0, **given))
    _check_once(config)
    if registry.ALGORITHMS[config.algorithm].energy:
        raise ValueError(
            f"algorithm must judge no candidates of its own to be tuned, got {config.algorithm}"
        )
    if epsilon is None:
        return config
    relation, steps = acc.Relation(config.relation), config.steps
    assert steps is not None

    def everything(noise: float) -> acc.Event:
        return acc.Tuned(dataclasses.replace(config, noise_multiplier=noise).total(steps), tries)

    noise = acc.calibrate(
        everything, arguments.positive("epsilon", epsilon), config.delta, relation
    )
    return resolve(recipe(dataset, noise_multiplier=noise, **given))


def _check_once(config: RunConfig) -> None:
    """Raises ValueError for a projection: tries train on the records as they are."""
    for name in ("pca_dimensions", "whiten_noise_multiplier"):
        if (found := getattr(config, name)) is not None:
            raise ValueError(
                f"{name} must be None to be tuned, got {found}: tries train on the records as they "
                "are, without a release before the first step"
            )


def tuned(
    folder: str | os.PathLike[str],
    config: RunConfig,
    dataset: data.Dataset,
    space: Mapping[str, spaces.Law],
    tries: Tries,
) -> TunedConfig:
    """Tunes a configuration, or goes on where it was interrupted; see ``jaxdp.tune``.

    The first half of the test records, 5,000 at most, chooses; accuracy is measured on the others.

    Args:
        folder: of the tuning.
        config: from ``configured``.
        dataset: its data; the test records are public.
        space: laws of ``NAMES``.
        tries: law of the number of tries.

    Raises:
        ValueError: a name that cannot be tuned, data without test records, or a configuration that
            releases something before the first step.
    """
    _check_once(config)
    for name in spaces.checked(space):
        arguments.one_of("search", name, NAMES, ": others would change the noise or the model")
    if config.spec.test_size < 2:
        raise ValueError(
            "data must have public test records (x_test, y_test), of which one half chooses; got "
            f"{config.spec.test_size}"
        )
    dataset = assemble.featured(config, dataset)
    cut = min(_MOST_TO_CHOOSE, len(dataset.test_y) // 2)
    model = assemble.model_of(config)
    choosing = assemble.evaluator(model, dataset.test_x[:cut], dataset.test_y[:cut])

    def make(candidate: spaces.Candidate) -> Algorithm:
        changed = dataclasses.replace(config, **candidate)  # type: ignore[arg-type]
        check_values(dataclasses.replace(changed, epsilon=None))
        return changed.private_algorithm()

    # Public: the same ones for all tries, also of a tuning that goes on.
    params = assemble.fresh_params(config, Secret(0, reproducible=True))
    rows = config.physical_batch_size
    chosen = tune(
        folder,
        assemble.loss_of(config),
        make,
        (np.asarray(dataset.train_x), np.asarray(dataset.train_y)),
        params=params,
        space=space,
        score=lambda trained: choosing(trained)["test_accuracy"],
        tries=tries,
        delta=config.delta,
        steps=config.steps,
        relation=acc.Relation(config.relation),
        physical_batch_size=rows if isinstance(rows, int) else None,
        about={"dataset": config.dataset, "model": config.model, "chosen_on": cut},
        features=None if config.encoder is None else config.encoder["words"],
    )
    if chosen.candidate is None:
        return TunedConfig(chosen, config, None)
    rest = assemble.evaluator(model, dataset.test_x[cut:], dataset.test_y[cut:])
    accuracy = rest(jax.device_put(chosen.params))["test_accuracy"]
    config = dataclasses.replace(config, **chosen.candidate)  # type: ignore[arg-type]
    return TunedConfig(chosen, config, accuracy)
