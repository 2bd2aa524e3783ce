"""AdaDp's local phase, in which sides differ by coordinate: of a run, and of gradients of zero.

Both follow noisy gradients and public constants: nothing else is released by telling them.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.runs.config import RunConfig
from jaxdp.runs.report.schema import Report
from jaxdp.types import PyTree

# Of the repaired algorithm; as published the phase follows un-noised gradients.
ALGORITHMS = ("adadp", "adadp-noise-only")


def columns(report: Report) -> dict[str, Any]:
    """The columns of a result row about the local phase; empty for an algorithm without one.

    ``local_began`` is the first step, counted from 1, whose sides differ by coordinate, 0 if none;
    ``local_share`` the share of such steps. The same of ``noise_``, where every gradient is zero.
    """
    size = report.parameters
    if report.algorithm not in ALGORITHMS or report.config is None or size is None:
        return {}
    last = report.history[-1]
    began, local = noise_alone(RunConfig.from_dict(report.config), size, last.step)
    return {
        "local_began": int(last.numbers["local_began"]),
        "local_share": last.numbers["local_steps"] / last.step,
        "noise_began": began,
        "noise_share": local / last.step,
    }


def noise_alone(config: RunConfig, size: int, steps: int, seed: int = 0) -> tuple[int, int]:
    """(first local step or 0, local steps) of so many steps on gradients that are zero.

    Args:
        config: resolved, of an algorithm of ``ALGORITHMS``.
        size: number of parameters.
        steps: their number.
        seed: of the noise.
    """
    state, algorithm = zero_gradients(config, size, steps, seed)
    found = algorithm.counts_of((None, state))
    return found["local_began"], found["local_steps"]


def stds_of_noise_alone(config: RunConfig, size: int, steps: int, seed: int = 0) -> np.ndarray:
    """σ_i of the sum, float [size], after such steps; arguments as for ``noise_alone``."""
    state, algorithm = zero_gradients(config, size, steps, seed)
    assert isinstance(config.noise_multiplier, float)
    return config.noise_multiplier * math.sqrt(size) * np.asarray(algorithm.scale(state))


def zero_gradients(config: RunConfig, size: int, steps: int, seed: int) -> tuple[Any, Any]:
    """The state after the noise, and the algorithm; arguments as for ``noise_alone``."""
    algorithm = config.private_algorithm()
    scale, zeros = algorithm.scale, jnp.zeros(size)
    assert scale is not None

    @jax.jit
    def run(state: PyTree, keys: jax.Array) -> Any:
        def step(state: PyTree, key: jax.Array) -> tuple[Any, None]:
            std = algorithm.mechanism.noise_std(zeros, 0) * scale(state)
            noise = std * jax.random.normal(key, (size,))
            return algorithm.after_noise.update(noise, state, zeros)[1], None

        return jax.lax.scan(step, state, keys)[0]

    keys = jax.random.split(jax.random.key(seed), steps)
    return run(algorithm.after_noise.init(zeros), keys), algorithm
