"""Calibrates the noise or the steps of a whole run to a privacy budget."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxdp import accounting as acc
from jaxdp import arguments

if TYPE_CHECKING:
    from jaxdp.runs.config import RunConfig


def calibrated_noise(config: "RunConfig", relation: acc.Relation) -> float:
    """The least noise (within 1e-4) whose proven epsilon is at most the one asked for."""
    assert config.steps is not None
    assert config.epsilon is not None
    if _plain(config):
        return float(
            acc.calibrate_noise_multiplier(
                epsilon=config.epsilon,
                delta=config.delta,
                steps=config.steps,
                relation=relation,
                sampling_prob=config.batch_size / config.dataset_size,
            )
        )
    if (
        acc.epsilon(_total(config, noise_multiplier=1e9), config.delta, relation).upper
        > config.epsilon
    ):
        raise ValueError(
            f"epsilon must be within reach of {config.algorithm} at any noise_multiplier, got "
            f"{config.epsilon}"
        )
    return acc.calibrate(
        lambda noise: _total(config, noise_multiplier=noise), config.epsilon, config.delta, relation
    )


def calibrated_steps(config: "RunConfig", relation: acc.Relation) -> int:
    """The greatest number of steps whose proven epsilon is at most the one asked for; 0 if none."""
    assert config.noise_multiplier is not None
    assert config.epsilon is not None
    if _plain(config):
        return int(
            acc.calibrate_steps(
                epsilon=config.epsilon,
                delta=config.delta,
                relation=relation,
                sampling_prob=config.batch_size / config.dataset_size,
                noise_multiplier=config.noise_multiplier,
            )
        )
    return acc.queries.calibrate_count(
        lambda steps: _total(config, steps=steps), config.epsilon, config.delta, relation
    )


def steps_within(planned: int | None, steps: int | None) -> int:
    """The steps to train: those asked for, or else those that the noise was calibrated for.

    Raises:
        ValueError: there are neither, or more were asked for than calibrated.
    """
    steps = planned if steps is None else arguments.integer("steps", steps, least=1)
    if steps is None:
        raise ValueError("steps must be given: the noise was not calibrated for any; got None")
    if planned is not None and steps > planned:
        raise ValueError(
            f"steps must be at most {planned}, which the noise was calibrated for, got {steps}"
        )
    return steps


def _plain(config: "RunConfig") -> bool:
    """True if a run is one event repeated, which the accountant calibrates by itself."""
    if config.strategy or config.noise_schedule is not None or config.once():
        return False
    tried = {"noise_multiplier": 1.0, "steps": 1, "learning_rate_schedule": None}
    made = dataclasses.replace(config, **tried).private_algorithm()  # type: ignore[arg-type]
    rate, released = config.batch_size / config.dataset_size, acc.Gaussian(1.0)
    # A registered algorithm may release something else than the noise it is given.
    plain = released if rate == 1 else acc.PoissonSampled(released, rate)
    return made.energy is None and made.mechanism.with_leak("").event == plain


def _total(config: "RunConfig", **tried: Any) -> acc.Event:
    """The event of everything released; of an algorithm as published, without its leak."""
    config = dataclasses.replace(config, **tried)
    algorithm = config.private_algorithm()
    sound = algorithm.mechanism.with_leak("")
    algorithm = dataclasses.replace(algorithm, mechanism=sound, raw=None)
    assert config.steps is not None
    return acc.Composed((*config.once(), algorithm.total(config.steps)))
