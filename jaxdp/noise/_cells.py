"""Sums on an integer grid and the noise of integers that is added there, leaf by leaf."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from jaxdp import _placement
from jaxdp.clipping import rounding
from jaxdp.noise import _chacha
from jaxdp.noise._integers import Sum, made
from jaxdp.types import PyTree

# Integers before the noise end here: a clip of every coordinate, far from wrapping around.
LARGEST = 2**30
# Keeps 12 digits of a float32: products of two such are exact.
_UPPER = np.uint32(0xFFFFF000)


@dataclasses.dataclass(frozen=True)
class Past:
    """The noise of earlier steps, weighed: 2^16 high + low, in cells of 2^-digits.

    Attributes:
        digits: binary digits of the weights.
        high: pytree like the sum, int32.
        low: likewise; less than 2^31 - 2^15 in magnitude.
    """

    digits: int
    high: PyTree
    low: PyTree


def on_grid(value: jax.Array, scale: jax.Array) -> jax.Array:
    """``value`` · ``scale``, rounded to int32; off by at most 1/2 + 2^-23, whatever the value.

    Coordinates beyond 2^30 / scale are clipped to it first. Both factors of every product have 12
    digits, so that float32 rounds none of them; see docs/grid_noise.md. NaN is 0.
    """
    limit = jnp.minimum(np.float32(LARGEST) / scale, np.finfo(np.float32).max)
    value = jnp.clip(jnp.where(jnp.isnan(value), 0.0, value), -limit, limit)
    upper = shortened(value)
    parts = upper * scale, (value - upper) * scale
    whole = [jnp.round(part) for part in parts]
    rest = (parts[0] - whole[0]) + (parts[1] - whole[1])
    first, second, third = (each.astype(jnp.int32) for each in (*whole, jnp.round(rest)))
    return first + second + third


def shortened(value: jax.Array) -> jax.Array:
    """``value`` towards zero with 12 digits in place of 24."""
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32) & _UPPER
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def coordinates(tree: PyTree, cuts: list[list[str]]) -> int:
    """The number of coordinates of the sum, on all devices together."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return sum(
        leaf.size * math.prod(sizes[axis] for axis in cut)
        for leaf, cut in zip(jax.tree.leaves(tree), cuts, strict=True)
    )


def noised(
    tree: PyTree,
    scale: jax.Array,
    key: jax.Array,
    law: Sum,
    cuts: list[list[str]],
    past: Past | None = None,
) -> tuple[PyTree, PyTree]:
    """(the sum with its noise, float32: integers over the scale; the noise, int32, with a past).

    Args:
        tree: the sum.
        scale: cells for one unit of it; NaN makes all NaN.
        key: uint32 [8].
        law: of the integers; with a past, of those before one more draw refines them.
        cuts: for each leaf the axes of a ``shard_map`` over which devices hold other parts.
        past: what the noise of a step takes back; None for none.

    Raises:
        ValueError: members of a ``vmap`` share the key (two equal keys give NaN).
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree, None if past is None else tree
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
    digits = None if past is None else past.digits
    back = [] if past is None else [*jax.tree.leaves(past.high), *jax.tree.leaves(past.low)]
    with _placement.on(mesh):
        found = _add(0, law, digits, groups, mesh)(keys, scale, *values, *back)
    noisy, noise = (
        jax.tree.unflatten(structure, part) if part else None
        for part in (found[: len(leaves)], found[len(leaves) :])
    )
    return noisy, noise


@functools.lru_cache(maxsize=64)
def _add(
    lanes: int, law: Sum, digits: int | None, groups: tuple[tuple[str, ...], ...], mesh: Any
) -> Any:
    """The addition under ``lanes`` vmaps, as that of ``jaxdp.normals``, traced for one ``mesh``.

    It is compiled as a whole, also where nothing is compiled around it: once for every shape.
    """

    @custom_vmap
    def add(keys: list[jax.Array], scale: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        mapped: Any = functools.partial(_added, law, digits, groups)
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
        found = _add(lanes + 1, law, digits, groups, mesh)(keys, *full)
        return found, [True] * len(found)

    return jax.jit(add)


def _added(
    law: Sum,
    digits: int | None,
    groups: tuple[tuple[str, ...], ...],
    keys: list[jax.Array],
    scale: jax.Array,
    *leaves: jax.Array,
) -> list[jax.Array]:
    """Each leaf with its noise. Leaves that are cut alike have one key, and one stream of it."""
    count = len(groups)
    # Both halves of a number are taken of one and the same (docs/clip_bound.md, assumption 3).
    values = tuple(rounding.written(leaves[:count]))
    found: dict[int, jax.Array] = {}
    for group in dict.fromkeys(groups):
        members = [n for n, own in enumerate(groups) if own == group]
        ends = np.cumsum([values[n].size for n in members])
        drawn = made(keys[members[0]], int(ends[-1]), law, digits is not None)
        parts = [jnp.split(part, ends[:-1]) for part in drawn]
        for place, n in enumerate(members):
            own = [part[place].reshape(values[n].shape) for part in parts]
            found[n] = own[0] if digits is None else _row(own, leaves[n + count :: count], digits)
    noisy = [on_grid(values[n], scale) + found[n] for n in range(count)]
    floats = [cells.astype(jnp.float32) * (1 / scale) for cells in noisy]
    return floats if digits is None else floats + [found[n] for n in range(count)]


def _row(own: list[jax.Array], past: tuple[jax.Array, ...], digits: int) -> jax.Array:
    """The noise of a step, int32: (its own - the past) / 2^digits, rounded to the nearest cell.

    Exact modulo 2^32: of the past only the low part is divided, and what is divided fits in int32.
    """
    (coarse, fine), (high, low) = own, past
    half = np.int32(2**digits // 2)
    rest = jnp.right_shift(fine - low + half, np.int32(digits))
    return coarse - jnp.left_shift(high, np.int32(16 - digits)) + rest


def _repeated(keys: jax.Array) -> jax.Array:
    """bool scalar: True if two of the keys [n, 8] are equal."""
    ordered = jax.lax.sort([keys[:, n] for n in range(8)], num_keys=8)
    same = [word[1:] == word[:-1] for word in ordered]
    return jnp.any(functools.reduce(jnp.logical_and, same))
