"""Standard normals from a key: the same whatever JAX's flags say, never shared in a ``vmap``.

Element i of leaf n is a function of (key, n, i): threefry2x32 (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3") on the counter (n, i), one word of its two for each half of a leaf.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend.random import threefry2x32_p

from jaxdp.types import PyTree

# Leaves up to this size share one computation.
_SMALL = 2**16
_LOWEST = np.nextafter(np.float32(-1), np.float32(0))


def noised(
    tree: PyTree,
    std: Any,
    words: jax.Array,
    sharded_over: tuple[str, ...] = (),
    replicated_over: tuple[str, ...] = (),
) -> PyTree:
    """Adds independent float32 normals of standard deviation ``std`` to every coordinate.

    Args:
        tree: pytree of arrays.
        std: scalar.
        words: uint32 [2], a threefry key.
        sharded_over: see ``jaxdp.privatize``.
        replicated_over: likewise.

    Raises:
        ValueError: members of a ``vmap`` share the key (two equal keys give NaN); a mesh axis of a
            ``shard_map`` or ``pmap`` around it that is neither sharded nor replicated.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    keys = [_of_shard(words, leaf, sharded_over, replicated_over) for leaf in leaves]
    std = jnp.asarray(std, jnp.float32)
    values = [jnp.asarray(leaf, jnp.float32) for leaf in leaves]
    return jax.tree.unflatten(structure, _add(0)(keys, std, *values))


def normals(words: Any, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Standard normals float32 for several leaves, all independent.

    Small leaves are made in one piece, with the same values: XLA takes a second to compile each.

    Args:
        words: uint32 [leaves, 2], or a list of uint32 [2]; the key of each leaf.
        shapes: the shape of each leaf.

    Raises:
        ValueError: a leaf of 2**33 elements or more.
    """
    found: dict[int, jax.Array] = {}
    groups: dict[frozenset[str], list[int]] = {}
    for n, shape in enumerate(shapes):
        if math.prod(shape) <= _SMALL:
            groups.setdefault(frozenset(varying(words[n])), []).append(n)
    for small in groups.values():
        if len(small) == 1:
            continue
        parts = [_counters(words[n], n, shapes[n]) for n in small]
        flat = [jnp.concatenate([jnp.ravel(part[i]) for part in parts]) for i in range(4)]
        halves = _threefry(*flat)
        values = _from_bits(jnp.stack(halves))
        ends = np.cumsum([part[0].size for part in parts])[:-1]
        for n, both in zip(small, jnp.split(values, ends, axis=1), strict=True):
            found[n] = both.reshape(-1)[: math.prod(shapes[n])].reshape(shapes[n])
    for n, shape in enumerate(shapes):
        if n not in found:
            # Scalar keys: XLA would write broadcast ones to memory.
            pair = _threefry(*words[n], *_counters(words[n], n, shape)[2:])
            rows = shape[0] if shape else 1
            found[n] = _from_bits(jnp.concatenate(pair)[:rows]).reshape(shape)
    return [found[n] for n in range(len(shapes))]


def _counters(
    words: jax.Array, leaf: int, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The key and the counter of every pair of elements, uint32 [ceil(rows / 2), ...]."""
    rows, *rest = shape or (1,)
    half = (-(-rows // 2), *rest)
    if math.prod(half) >= 2**32:
        raise ValueError(f"a parameter must have fewer than 2**33 elements, got shape {shape}")
    counters = jnp.zeros(half, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(half))):
        counters += jax.lax.broadcasted_iota(jnp.uint32, half, axis) * np.uint32(stride)
        stride *= half[axis]
    first, second = (jnp.broadcast_to(word, half) for word in words)
    return first, second, jnp.full(half, leaf, jnp.uint32), counters


def _from_bits(bits: jax.Array) -> jax.Array:
    """Normals by the inverse of their distribution function, from 23 bits each."""
    mantissa = (bits >> np.uint32(9)) | np.uint32(0x3F800000)
    uniform = jax.lax.bitcast_convert_type(mantissa, jnp.float32) - np.float32(1)
    centred = jnp.maximum(_LOWEST, uniform * (1 - _LOWEST) + _LOWEST)
    return np.float32(math.sqrt(2)) * jax.lax.erf_inv(centred)


@functools.cache
def _add(lanes: int) -> Any:
    """The addition under ``lanes`` vmaps: keys [*lanes, 2], std [*lanes], leaves likewise.

    A vmap asks the rule below, also through ``jit`` and ``scan``: it takes the member's axis to the
    front, and knows whether the members' keys differ.
    """

    @custom_vmap
    def add(words: list[jax.Array], std: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        def one(words: list[jax.Array], std: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
            drawn = normals(words, [leaf.shape for leaf in leaves])
            return [leaf + std * noise for leaf, noise in zip(leaves, drawn, strict=True)]

        mapped = one
        for _ in range(lanes):
            mapped = jax.vmap(mapped)
        if lanes:
            repeated = _repeated(words[0].reshape(-1, 2))
            std = jnp.where(repeated, jnp.nan, std)
        return mapped(words, std, *leaves)

    @add.def_vmap
    def rule(size: int, mapped: Any, words: Any, std: Any, *leaves: Any) -> Any:
        if not all(mapped[0]):
            raise ValueError(
                "key must be another one for every member of a vmap, got one for all: they would "
                "share their noise, which subtracts away"
            )
        full = [
            x if m else jnp.broadcast_to(x[None], (size, *x.shape))
            for x, m in zip((std, *leaves), mapped[1:], strict=True)
        ]
        found = _add(lanes + 1)(words, *full)
        return found, [True] * len(found)

    return add


def _repeated(words: jax.Array) -> jax.Array:
    """bool scalar: True if two of the keys [n, 2] are equal."""
    first, second = jax.lax.sort((words[:, 0], words[:, 1]), num_keys=2)
    return jnp.any((first[1:] == first[:-1]) & (second[1:] == second[:-1]))


def _of_shard(
    words: jax.Array,
    leaf: jax.Array,
    sharded_over: tuple[str, ...],
    replicated_over: tuple[str, ...],
) -> jax.Array:
    """The key for this device's part of a leaf: another one where the value is another part."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return words
    typed = bool(varying(jax.lax.axis_index(axes[0])))  # JAX tracks who varies over what
    cut = varying(leaf) if typed else set(sharded_over)
    if unknown := set(axes) - cut - set(replicated_over) if not typed else set():
        raise ValueError(
            f"sharded_over or replicated_over must name every mesh axis around privatize, got none "
            f"for {sorted(unknown)}: whether devices hold one sum (and need one noise) or parts of "
            "it (and need noise each) cannot be seen inside shard_map or pmap"
        )
    for axis in sorted(cut & set(axes)):
        index = jax.lax.axis_index(axis).astype(jnp.uint32)
        words = jnp.stack(_threefry(words[0], words[1], jnp.uint32(0xFFFFFFFF), index))
    return words


def _threefry(*arguments: jax.Array) -> list[jax.Array]:
    """threefry2x32 of (key, key, counter, counter), all made to vary over the same mesh axes."""
    axes: set[str] = set().union(*map(varying, arguments))
    alike = [
        jax.lax.pcast(a, tuple(sorted(axes - varying(a))), to="varying") if axes - varying(a) else a
        for a in arguments
    ]
    found: list[jax.Array] = threefry2x32_p.bind(*alike)
    return found


def varying(value: Any) -> set[str]:
    """The mesh axes over which ``shard_map`` knows the value to differ; none where it does not."""
    kind: Any = jax.typeof(value)
    if hasattr(kind, "vma"):  # its name before jax 0.10.2
        return set(kind.vma)
    return set(kind.manual_axis_type.varying | kind.manual_axis_type.unreduced)
