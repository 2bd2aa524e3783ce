"""Checks of configurations of runs, in words."""

import dataclasses
import math
from typing import TYPE_CHECKING

from jaxdp import accounting as acc
from jaxdp import arguments, sampling
from jaxdp.audit import canaries as audit_canaries
from jaxdp.data import models
from jaxdp.optimizers import registry
from jaxdp.recipes import features
from jaxdp.runs import canary_inputs, strategies

if TYPE_CHECKING:
    from jaxdp.runs.config import RunConfig

OPTIMIZERS = ("sgd", "adam")

_MOST_LEARNING_RATE = 1e6  # beyond, float32 overflows in a step or two
# With probability delta nothing is promised: more is no guarantee. Accountants take minutes at
# either end.
_DELTAS = (1e-30, 0.1)


def values(config: "RunConfig") -> None:
    """Raises ValueError for a value of a wrong kind or out of its range; builds nothing."""
    registry.entry_of(config.algorithm)
    arguments.one_of("optimizer", config.optimizer, OPTIMIZERS)
    arguments.one_of("relation", config.relation, tuple(r.value for r in acc.Relation))
    _check_sampling(config)
    if arguments.positive("learning_rate", config.learning_rate) > _MOST_LEARNING_RATE:
        raise ValueError(
            f"learning_rate must be at most {_MOST_LEARNING_RATE:g}, got {config.learning_rate!r}"
        )
    if not 0 <= arguments.non_negative("momentum", config.momentum) < 1:
        raise ValueError(f"momentum must be at least 0 and below 1, got {config.momentum!r}")
    if not arguments.positive("delta", config.delta) < 1:
        raise ValueError(f"delta must be above 0 and below 1, got {config.delta!r}")
    if not _DELTAS[0] <= config.delta <= _DELTAS[1]:
        raise ValueError(
            f"delta must be at least {_DELTAS[0]:g} and at most {_DELTAS[1]:g}, well below 1 over "
            f"the number of records ({config.dataset_size}), got {config.delta!r}"
        )
    if config.epsilon is not None:
        arguments.positive("epsilon", config.epsilon)
    if config.noise_multiplier is not None:
        arguments.positive("noise_multiplier", config.noise_multiplier)
    rows = None if config.physical_batch_size == "auto" else config.physical_batch_size
    for name, value in (
        ("steps", config.steps),
        ("eval_every", config.eval_every),
        ("physical_batch_size", rows),
    ):
        if value is not None:
            arguments.integer(name, value, least=1)
    for name in ("noise_schedule", "learning_rate_schedule"):
        if getattr(config, name) is not None and config.steps is None:
            raise ValueError(f"steps must be given with a {name}, got None")
    if config.average is not None:
        arguments.fraction("average", config.average)


def _check_sampling(config: "RunConfig") -> None:
    strategies.check(config)
    if config.strategy is None:
        arguments.one_of("sampling", config.sampling, sampling.NAMES)
    covered = [r.value for r in sampling.relations(config.sampling)]
    arguments.one_of("relation", config.relation, covered, f" with sampling {config.sampling}")
    arguments.integer("participations", config.participations, least=1)
    if config.cap is not None:
        arguments.integer("cap", config.cap, least=1)


def parts(config: "RunConfig") -> None:
    """Raises ValueError if mechanism and model, built once for their own checks, refuse theirs."""
    dataclasses.replace(config, noise_multiplier=config.noise_multiplier or 1.0).private_algorithm()
    if (
        registry.ALGORITHMS[config.algorithm].energy in ("public", "test")
        and not config.spec.test_size
    ):
        raise ValueError(
            f"algorithm {config.algorithm} must come with test records, which judge its "
            "candidates, got a file without"
        )
    _check_features(config)
    _check_projection(config)
    _check_noise(config)
    _check_canaries(config)
    models.build(
        config.model,
        num_classes=config.spec.num_classes,
        example_shape=config.example_shape(),
        activation=config.activation,
        hidden=(arguments.integer("hidden", config.hidden, least=1),),
    )


def _check_canaries(config: "RunConfig") -> None:
    canary_inputs.check(config)
    if not config.canaries:
        return
    if config.relation != acc.Relation.ADD_OR_REMOVE_ONE.value:
        raise ValueError(
            "canaries must be 0 but under add_or_remove_one, for each is a record more or not; got "
            f"{config.canaries} under {config.relation}"
        )
    if config.sensitive:
        raise ValueError(
            "sensitive must be False with canaries, whose losses would drown the others', "
            f"got both, {config.canaries} canaries"
        )
    noise = config.noise_multiplier or 1.0
    algorithm = dataclasses.replace(config, noise_multiplier=noise).private_algorithm()
    audit_canaries.check(algorithm, records=config.canary_kind != "gradient")
    config.candidates()


def _check_features(config: "RunConfig") -> None:
    if config.whiten_noise_multiplier is not None:
        arguments.positive("whiten_noise_multiplier", config.whiten_noise_multiplier)
    if config.features is None:
        if config.whiten_noise_multiplier is not None:
            raise ValueError(
                "whiten_noise_multiplier must be None without features, which it whitens; got "
                f"{config.whiten_noise_multiplier}"
            )
        return
    shape = features.shape_of(config.features, config.spec.example_shape)
    if config.pca_dimensions is not None:
        raise ValueError(
            f"pca_dimensions must be None with features, of which a record has {math.prod(shape)}: "
            f"the noise of so large a matrix leaves nothing; got {config.pca_dimensions} with "
            f"features {config.features}"
        )


def _check_noise(config: "RunConfig") -> None:
    if not config.secure_noise:
        return
    for name in ("pca_dimensions", "whiten_noise_multiplier"):
        if (found := getattr(config, name)) is not None:
            raise ValueError(
                f"{name} must be None with secure_noise, got {found!r}: its noise is in floating "
                "point, and the guarantee would not be that of noise on an integer grid"
            )


def _check_projection(config: "RunConfig") -> None:
    if (config.pca_dimensions is None) != (config.pca_noise_multiplier is None):
        raise ValueError(
            "pca_dimensions and pca_noise_multiplier must be given together, got "
            f"{config.pca_dimensions} and {config.pca_noise_multiplier}"
        )
    if config.pca_dimensions is None:
        return
    arguments.positive("pca_noise_multiplier", config.pca_noise_multiplier)
    most = math.prod(config.spec.example_shape)
    if arguments.integer("pca_dimensions", config.pca_dimensions, least=1) > most:
        raise ValueError(
            f"pca_dimensions must be at most the {most} of an example, got {config.pca_dimensions}"
        )
