"""From a budget to the noise or the steps that meet it, for everything that a run releases."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxdp import accounting as acc
from jaxdp.optimizers import registry

if TYPE_CHECKING:
    from jaxdp.runs.config import RunConfig


def calibrated_noise(config: "RunConfig", relation: acc.Relation) -> float:
    """The least noise (within 1e-4) whose proven epsilon is at most the one asked for."""
    assert config.steps is not None
    assert config.epsilon is not None
    if _plain(config):
        return float(acc.calibrate_noise_multiplier(
            epsilon=config.epsilon, delta=config.delta, steps=config.steps, relation=relation,
            sampling_prob=config.batch_size / config.dataset_size,
        ))
    high = 1.0
    while not _affords(config, relation, noise_multiplier=high):
        high *= 2
        if high > 1e6:
            raise ValueError(
                f"epsilon must be within reach of {config.method} at any noise_multiplier, got "
                f"{config.epsilon}"
            )
    low = 0.0
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        if _affords(config, relation, noise_multiplier=middle):
            high = middle
        else:
            low = middle
    return high


def calibrated_steps(config: "RunConfig", relation: acc.Relation) -> int:
    """The greatest number of steps whose proven epsilon is at most the one asked for; 0 if none."""
    assert config.noise_multiplier is not None
    assert config.epsilon is not None
    if _plain(config):
        return int(acc.calibrate_steps(
            epsilon=config.epsilon, delta=config.delta, relation=relation,
            sampling_prob=config.batch_size / config.dataset_size,
            noise_multiplier=config.noise_multiplier,
        ))
    low, high = 0, 1
    while high < 10**8 and _affords(config, relation, steps=high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _affords(config, relation, steps=middle):
            low = middle
        else:
            high = middle
    return low


def _plain(config: "RunConfig") -> bool:
    """Whether a run is one event repeated, which the accountant calibrates by itself."""
    energy = registry.METHODS[config.method].energy
    return config.noise_schedule is None and energy != "private" and not config.once()


def _affords(config: "RunConfig", relation: acc.Relation, **tried: Any) -> bool:
    config = dataclasses.replace(config, **tried)
    method = config.private_method()
    # What an algorithm as published claims to be is the mechanism without its leak.
    method = dataclasses.replace(method, mechanism=method.mechanism.leaking(""), raw=None)
    assert config.steps is not None
    assert config.epsilon is not None
    total = acc.Composed((*config.once(), method.total(config.steps)))
    return acc.epsilon(total, config.delta, relation).upper <= config.epsilon
