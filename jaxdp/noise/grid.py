"""Noise on an integer grid from a cryptographic generator, as the first link of an optax chain.

The sum is rounded to integers, a discrete Gaussian integer is added to each, and all that follows
is computed from the noisy integers: no bit of the result knows the magnitude of the sum.
docs/grid_noise.md has the theorem and its proof.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_batching import custom_vmap

from jaxdp import _links, _placement, _processes, _validate
from jaxdp.clipping import rounding
from jaxdp.noise import _chacha
from jaxdp.noise._integers import Sum, gap, integers
from jaxdp.noise.gaussian import (
    PrivatizeState,
    check_floating,
    check_made_for,
    check_update,
    mean_of,
    multipliers,
    numbers,
    refuse_injected,
    spent,
)
from jaxdp.normals import cut_over
from jaxdp.schedules import NoiseSchedule
from jaxdp.tickets import ON_GRID, NoiseKey
from jaxdp.types import PyTree, Summed

# Noisy sums of more coordinates are refused: those that every step is charged for.
COORDINATES = 2**32
# What a step is charged for all of them: at least ``COORDINATES`` times ``distance()``.
DISTANCE = 2.0**-78
# Integers before the noise end here: a clip of every coordinate, far from wrapping around.
_LARGEST = 2**30
# A discrete Gaussian is post-processing of a continuous one whose variance is less by r^2.
_JOINT = 2.0
# Rounding may cost the noise this share, or in the end the other, before it is refused.
_SHARE, _MOST = 2.0**-8, 2.0**-2
_FACTOR = 511
_LAWS = (Sum((_FACTOR,)), *(Sum((_FACTOR, 2**n)) for n in range(1, 8)))
# Keeps 12 digits of a float32: products of two such are exact.
_UPPER = np.uint32(0xFFFFF000)
# Every value of these is a float32.
_EXACT = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))
# The scale's own rounding: a few operations in float32, and the multiplier's.
_SLACK = 1 - 2.0**-18


def privatize_on_grid(
    noise_multiplier: float | NoiseSchedule,
    expected_batch_size: float,
    *,
    sharded_over: tuple[str, ...] = (),
    replicated_over: tuple[str, ...] = (),
) -> optax.GradientTransformationExtraArgs:
    """Adds discrete Gaussian noise to a ``Summed``, on an integer grid; divides as ``privatize``.

    Formal guarantee: one update is, but for a total-variation distance below 2^-78,
    post-processing of a Gaussian mechanism with multiplier ``noise_multiplier`` relative to the
    largest contribution ``l2`` of one record, in the arithmetic that the device really has
    (docs/grid_noise.md). ``jaxdp.accounting.GridNoise`` charges both. Integers come from ChaCha20
    with a key of 256 bits, derived from the ticket.

    Coordinates of the sum beyond ``grid_range`` are clipped. The noise is larger by what rounding
    may move the sum, at most 0.4 % for up to 6 10^10 coordinates times squared multiplier.

    Args:
        noise_multiplier: as for ``privatize``, above 0.
        expected_batch_size: as for ``privatize``.
        sharded_over: as for ``privatize``.
        replicated_over: as for ``privatize``.

    Returns:
        A transformation like ``privatize``'s, with its state.

    Raises:
        ValueError: as ``privatize``; no noise; too many coordinates for it; several processes; a
            sum that float32 would round once more, such as one of float64.
        TypeError: as ``privatize``.
    """
    _processes.check_alone("noise on a grid")
    refuse_injected(noise_multiplier=noise_multiplier, expected_batch_size=expected_batch_size)
    largest, least = _extremes(noise_multiplier)
    if not 1e-6 <= least <= largest <= 1e6:
        raise ValueError(
            f"noise_multiplier must be in [1e-6, 1e6] for noise on a grid, got {noise_multiplier}"
        )
    multiplier_at, on_host = multipliers(noise_multiplier), numbers(noise_multiplier)
    divisor = _validate.positive("expected_batch_size", expected_batch_size)

    def init(params: PyTree) -> PrivatizeState:
        check_floating(params)
        leaves = jax.tree.leaves(params)
        law_for(largest, sum(leaf.size for leaf in leaves))
        return PrivatizeState(jnp.zeros(2, jnp.uint32), jnp.asarray(len(leaves), jnp.int32))

    def update(
        updates: Summed,
        state: PrivatizeState,
        params: PyTree | None = None,
        *,
        key: NoiseKey | None = None,
        **extra: Any,
    ) -> tuple[PyTree, PrivatizeState]:
        check_update(updates, params, extra)
        check_made_for(updates, state.leaves)
        _check_exact(updates.value)
        cuts = [
            cut_over(leaf, sharded_over, replicated_over) for leaf in jax.tree.leaves(updates.value)
        ]
        count = _coordinates(updates.value, cuts)
        law = law_for(largest, count)
        key, _, multiplier = spent(ON_GRID, multiplier_at, on_host, updates, key, (state, params))
        tag = jnp.asarray(key.tag)
        fresh = jnp.where(jnp.all(tag == state.last), jnp.nan, 1.0)
        scale = grid_scale(law, multiplier, count, updates.l2) * fresh
        noisy = _noised(updates.value, scale, jnp.asarray(key.long), law, cuts)
        return mean_of(noisy, updates, params, divisor), PrivatizeState(tag, state.leaves)

    return optax.GradientTransformationExtraArgs(init, _links.own(update))


def law_for(multiplier: float, coordinates: int) -> Sum:
    """The law of the integers: the least noise, in grid cells, beside which rounding is small.

    Args:
        multiplier: the largest noise multiplier.
        coordinates: of the whole sum.

    Raises:
        ValueError: there are too many of them.
    """
    moved = math.sqrt(coordinates) * multiplier
    if moved > _MOST * _LAWS[-1].std or coordinates > COORDINATES:
        raise ValueError(
            f"params must have at most {COORDINATES} coordinates for noise on a grid, and their "
            f"root times noise_multiplier at most {_MOST * _LAWS[-1].std:.3g}, got {coordinates} "
            f"and {moved:.3g}: take noise='gaussian'"
        )
    return next((law for law in _LAWS if moved <= _SHARE * law.std), _LAWS[-1])


def distance() -> float:
    """A proven bound on the total variation between one coordinate's integer and the theorem's.

    That of the sums of draws from the discrete Gaussian, and of that from post-processing of a
    continuous one.
    """
    return max(law.distance for law in _LAWS) + 2 * gap(_JOINT)


def grid_scale(law: Sum, multiplier: Any, coordinates: int, l2: Any) -> jax.Array:
    """c, grid cells for one unit of the sum: float32 with 12 digits, never above the theorem's.

    multiplier · (c · l2 + sqrt(coordinates) (1 + 2^-22)) <= sqrt(s^2 - r^2). NaN outside of
    [2^-100, 2^100].
    """
    std = np.float32(math.sqrt(law.std**2 - _JOINT**2) * (1 - 2.0**-22))
    rounding = np.float32(math.sqrt(coordinates) * (1 + 2.0**-21))
    moved = std / jnp.asarray(multiplier, jnp.float32) - rounding
    exact = moved / jnp.asarray(l2, jnp.float32) * np.float32(_SLACK)
    scale = _shortened(exact)
    return jnp.where((scale >= 2.0**-100) & (scale <= 2.0**100), scale, jnp.nan)


def grid_std(law: Sum, multiplier: Any, coordinates: int, l2: Any) -> jax.Array:
    """Standard deviation of the noise on the sum; public, and at least ``multiplier`` times l2."""
    return np.float32(law.std) / grid_scale(law, multiplier, coordinates, l2)


def grid_range(noise_multiplier: float | NoiseSchedule, coordinates: int) -> float:
    """The number of clip norms that a coordinate of the sum may have; beyond, it is clipped.

    Args:
        noise_multiplier: as for ``privatize_on_grid``.
        coordinates: of the whole sum.
    """
    largest, least = _extremes(noise_multiplier)
    return _LARGEST * least / law_for(largest, coordinates).std


def on_grid(value: jax.Array, scale: jax.Array) -> jax.Array:
    """``value`` · ``scale``, rounded to int32; off by at most 1/2 + 2^-23, whatever the value.

    Coordinates beyond 2^30 / scale are clipped to it first. Both factors of every product have 12
    digits, so that float32 rounds none of them; see docs/grid_noise.md. NaN is 0.
    """
    limit = jnp.minimum(np.float32(_LARGEST) / scale, np.finfo(np.float32).max)
    value = jnp.clip(jnp.where(jnp.isnan(value), 0.0, value), -limit, limit)
    upper = _shortened(value)
    parts = upper * scale, (value - upper) * scale
    whole = [jnp.round(part) for part in parts]
    rest = (parts[0] - whole[0]) + (parts[1] - whole[1])
    first, second, third = (each.astype(jnp.int32) for each in (*whole, jnp.round(rest)))
    return first + second + third


def _shortened(value: jax.Array) -> jax.Array:
    """``value`` towards zero with 12 digits in place of 24."""
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32) & _UPPER
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _extremes(given: float | NoiseSchedule) -> tuple[float, float]:
    """The largest and the least noise multiplier."""
    if not isinstance(given, NoiseSchedule):
        number = _validate.positive("noise_multiplier", given)
        return number, number
    levels = [float(level) for level, _ in given.levels]
    return max(levels), min(levels)


def _check_exact(tree: PyTree) -> None:
    """Raises ValueError for a sum that float32 does not hold: rounding it is in no sensitivity."""
    for leaf in jax.tree.leaves(tree):
        if (found := np.dtype(leaf.dtype)) not in _EXACT:
            raise ValueError(
                f"the sum must be of {', '.join(map(str, _EXACT))} for noise on a grid, got "
                f"{found}: rounding it to float32 would move it farther than l2 says"
            )


def _coordinates(tree: PyTree, cuts: list[list[str]]) -> int:
    """The number of coordinates of the sum, on all devices together."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return sum(
        leaf.size * math.prod(sizes[axis] for axis in cut)
        for leaf, cut in zip(jax.tree.leaves(tree), cuts, strict=True)
    )


def _noised(
    tree: PyTree, scale: jax.Array, key: jax.Array, law: Sum, cuts: list[list[str]]
) -> PyTree:
    """The sum with its noise, float32: integers over the scale.

    Raises:
        ValueError: members of a ``vmap`` share the key (two equal keys give NaN).
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    axes = sorted(jax.sharding.get_abstract_mesh().manual_axes)
    keys = []
    for cut in cuts:
        own = key
        for axis in cut:
            own = _chacha.subkey(own, jax.lax.axis_index(axis), axes.index(axis))
        keys.append(own)
    values = [jnp.asarray(leaf, jnp.float32) for leaf in leaves]
    groups = tuple(map(tuple, cuts))
    mesh = _placement.mesh_around(values)
    with _placement.on(mesh):
        return jax.tree.unflatten(structure, _add(0, law, groups, mesh)(keys, scale, *values))


@functools.lru_cache(maxsize=64)
def _add(lanes: int, law: Sum, groups: tuple[tuple[str, ...], ...], mesh: Any) -> Any:
    """The addition under ``lanes`` vmaps, as that of ``jaxdp.normals``, traced for one ``mesh``.

    It is compiled as a whole, also where nothing is compiled around it: once for every shape.
    """

    @custom_vmap
    def add(keys: list[jax.Array], scale: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        mapped: Any = functools.partial(_added, law, groups)
        for _ in range(lanes):
            mapped = jax.vmap(mapped)
        if lanes:
            scale = jnp.where(_repeated(keys[0].reshape(-1, 8)), jnp.nan, scale)
        return mapped(keys, scale, *leaves)

    @add.def_vmap
    def rule(size: int, mapped: Any, keys: Any, scale: Any, *leaves: Any) -> Any:
        if not all(mapped[0]):
            raise ValueError(
                "key must be another one for every member of a vmap, got one for all: they would "
                "share their noise, which subtracts away"
            )
        full = [
            x if m else jnp.broadcast_to(x[None], (size, *x.shape))
            for x, m in zip((scale, *leaves), mapped[1:], strict=True)
        ]
        found = _add(lanes + 1, law, groups, mesh)(keys, *full)
        return found, [True] * len(found)

    return jax.jit(add)


def _added(
    law: Sum,
    groups: tuple[tuple[str, ...], ...],
    keys: list[jax.Array],
    scale: jax.Array,
    *leaves: jax.Array,
) -> list[jax.Array]:
    """Each leaf with its noise. Leaves that are cut alike have one key, and one stream of it."""
    # Both halves of a number are taken of one and the same (docs/clip_bound.md, assumption 3).
    leaves = tuple(rounding.written(leaves))
    found: dict[int, jax.Array] = {}
    for group in dict.fromkeys(groups):
        members = [n for n, own in enumerate(groups) if own == group]
        ends = np.cumsum([leaves[n].size for n in members])
        made = _placement.alike(integers(keys[members[0]], int(ends[-1]), law))
        for n, noise in zip(members, jnp.split(made, ends[:-1]), strict=True):
            noisy = on_grid(leaves[n], scale) + noise.reshape(leaves[n].shape)
            found[n] = noisy.astype(jnp.float32) * (1 / scale)
    return [found[n] for n in range(len(leaves))]


def _repeated(keys: jax.Array) -> jax.Array:
    """bool scalar: True if two of the keys [n, 8] are equal."""
    ordered = jax.lax.sort([keys[:, n] for n in range(8)], num_keys=8)
    same = [word[1:] == word[:-1] for word in ordered]
    return jnp.any(functools.reduce(jnp.logical_and, same))
