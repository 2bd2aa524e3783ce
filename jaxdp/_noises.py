"""The noise of a mechanism: its parts, the link that adds it, its standard deviation, its event."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp import _links
from jaxdp import accounting as acc
from jaxdp.clipping import rounding
from jaxdp.noise import (
    grid,
    grid_correlated,
    privatize,
    privatize_correlated,
    privatize_correlated_on_grid,
    privatize_on_grid,
)
from jaxdp.noise.correlated import part_of
from jaxdp.schedules import NoiseSchedule, split_noise
from jaxdp.tickets import ON_GRID
from jaxdp.types import PyTree, Summed

# ``Mechanism.noise``: float32 Gaussians, or integers from a cryptographic generator.
NOISES = ("gaussian", "grid")


def check_noise(mechanism: Any) -> None:
    """Raises ValueError where noise on a grid is asked for, and parts of the release cannot be."""
    if mechanism.noise not in NOISES:
        raise ValueError(f"noise must be one of {NOISES}, got {mechanism.noise!r}")
    if mechanism.noise != "grid":
        return
    if mechanism.count_noise_multiplier is not None:
        raise ValueError(
            "noise must be 'gaussian' with count_noise_multiplier: the count that quantile "
            "clipping releases is not on the integer grid yet, and part of the release would have "
            "ordinary noise; got 'grid'"
        )
    if mechanism.strategy is not None:
        grid_correlated.check_dyadic(mechanism.strategy)
    levels = mechanism.noise_multiplier
    if not isinstance(levels, NoiseSchedule) and levels <= 0:
        raise ValueError(f"noise_multiplier must be above 0 for noise on a grid, got {levels}")


def gradient_part(mechanism: Any) -> str:
    """The name of the gradient among the parts of a step's event."""
    if mechanism.strategy is not None:
        named = grid_correlated.part_on_grid if mechanism.noise == "grid" else part_of
        return named(mechanism.strategy)
    return ON_GRID if mechanism.noise == "grid" else "gradient"


def multipliers(mechanism: Any, step: int) -> dict[str, float]:
    """The noise multiplier of each part of step ``step``."""
    part = gradient_part(mechanism)
    if mechanism.strategy is not None:
        return {part: mechanism.fresh}
    whole = mechanism.noise_multiplier
    whole = whole(step) if isinstance(whole, NoiseSchedule) else whole
    if mechanism.count_noise_multiplier is None:
        return {part: whole}
    rest = split_noise(whole, mechanism.count_noise_multiplier)
    return {part: rest, "votes": mechanism.count_noise_multiplier}


def link(mechanism: Any, options: dict[str, Any]) -> optax.GradientTransformationExtraArgs:
    """The link of an optax chain that adds the mechanism's noise."""
    inner = _adding(mechanism, options)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return inner.update(_declared(mechanism, updates), state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, _links.own(update))


def _declared(mechanism: Any, summed: Any) -> Any:
    """The sum, with the mechanism's largest number of records where nobody declared one.

    ``noise_std``, which optimizers subtract, is then the noise that is added.
    """
    found = summed.undeclared if isinstance(summed, Summed) else None
    if found is None or found[1] > mechanism.most_records:
        return summed
    l2 = found[0] * (1.0 + rounding.of_sum(mechanism.most_records))
    return dataclasses.replace(summed, l2=l2)


def _adding(mechanism: Any, options: dict[str, Any]) -> optax.GradientTransformationExtraArgs:
    size = mechanism.batch_size
    if mechanism.strategy is not None:
        adds = privatize_correlated_on_grid if mechanism.noise == "grid" else privatize_correlated
        return adds(mechanism.strategy, mechanism.fresh, size, **options)
    if mechanism.noise == "grid":
        return privatize_on_grid(mechanism.noise_multiplier, size, **options)
    if mechanism.count_noise_multiplier is None:
        return privatize(mechanism.noise_multiplier, size, **options)
    return privatize(multipliers(mechanism, 0)["gradient"], size, **options)


def std(mechanism: Any, params: PyTree, step: int | jax.Array) -> float | jax.Array:
    """As ``Mechanism.noise_std``."""
    l2 = mechanism.l2(params)
    each = l2 / mechanism.batch_size
    if mechanism.strategy is not None:
        rows = jnp.asarray(mechanism.strategy.inverse_row_norms(), jnp.float32)
        row = jnp.take(rows, jnp.asarray(step), mode="fill", fill_value=jnp.nan)
        return _fresh_std(mechanism, params, l2) / mechanism.batch_size * row
    noise = mechanism.noise_multiplier
    scheduled = isinstance(noise, NoiseSchedule)
    at: Any = noise
    if scheduled:
        at = jnp.take(noise.table(), jnp.asarray(step), mode="fill", fill_value=jnp.nan)
    if mechanism.noise != "grid":
        return each * at
    largest = max(level for level, _ in noise.levels) if scheduled else noise
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    law = grid.law_for(float(largest), count)
    return grid.grid_std(law, at, count, l2) / mechanism.batch_size


def _fresh_std(mechanism: Any, params: PyTree, l2: float) -> float | jax.Array:
    """Standard deviation, on the sum, of the noise that correlated noise is made of."""
    if mechanism.noise != "grid":
        exact: float = mechanism.fresh * l2
        return exact
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    law = grid.law_for(mechanism.fresh, count, grid_correlated.carried(mechanism.strategy))
    return grid.grid_std(law, mechanism.fresh, count, l2)


def grid_in_words(mechanism: Any, parameters: int) -> str:
    """A sentence on the integer grid of a mechanism for so many parameters: cell and inequality."""
    if mechanism.strategy is None:
        return grid.grid_in_words(mechanism.noise_multiplier, parameters)
    carried = grid_correlated.carried(mechanism.strategy)
    found = grid.grid_in_words(mechanism.fresh, parameters, carried)
    return f"{found}; what a step takes back of earlier noise is an integer too"


def event(mechanism: Any, noise_multiplier: float) -> acc.Event:
    """The accounting event of a step, or of an epoch that is one event, with this noise."""
    if mechanism.leak:
        return acc.NonPrivate(mechanism.leak)
    found = mechanism.sampling.event(acc.Gaussian(noise_multiplier), mechanism.dataset_size)
    if mechanism.records_per_user is not None:
        found = acc.PerUser(found, mechanism.records_per_user)
    if mechanism.noise == "grid":
        found = acc.GridNoise(found, found.block * grid.DISTANCE)
    return found
