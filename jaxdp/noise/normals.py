"""Standard normals from a key: the same whatever JAX's flags say, never shared in a ``vmap``.

Element i of leaf n is a function of (key, n, i): threefry2x32 (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3") on the counter (n, i), one word of its two for each half of a leaf.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike

from jaxdp.devices import placement
from jaxdp.types import PyTree

# Leaves up to this size share one computation.
_SMALL = 2**16
# Bits by which threefry2x32 rotates: four rounds of the one, four of the other, and so on.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_LOWEST = np.nextafter(np.float32(-1), np.float32(0))


def add_normals(
    tree: PyTree,
    std: ArrayLike,
    words: jax.Array,
    sharded_over: tuple[str, ...] = (),
    replicated_over: tuple[str, ...] = (),
    before: tuple[ArrayLike, jax.Array] | None = None,
) -> PyTree:
    """Adds independent float32 normals of standard deviation ``std`` to every coordinate.

    Args:
        tree: pytree of arrays.
        std: scalar.
        words: uint32 [2], a threefry key.
        sharded_over: see ``jaxdp.privatize``.
        replicated_over: see ``jaxdp.privatize``.
        before: (scalar, uint32 [2]): to each normal so many times that of another key is added,
            before ``std`` multiplies both. No array holds it.

    Raises:
        ValueError: members of a ``vmap`` share the key (two equal keys give NaN); a mesh axis of a
            ``shard_map`` or ``pmap`` around it that is neither sharded nor replicated.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree

    def of_parts(own: jax.Array) -> list[jax.Array]:
        """The key of each leaf: another one for each part of it that devices hold."""
        keys = []
        for leaf in leaves:
            key = own
            for axis in sharded_axes(leaf, sharded_over, replicated_over):
                index = jax.lax.axis_index(axis).astype(jnp.uint32)
                key = jnp.stack(_threefry(key[0], key[1], jnp.uint32(0xFFFFFFFF), index))
            keys.append(key)
        return keys

    values = [jnp.asarray(leaf, jnp.float32) for leaf in leaves]
    given, std = values, jnp.asarray(std, jnp.float32)
    if before is not None:
        given = [jnp.asarray(before[0], jnp.float32), *of_parts(before[1]), *values]
    with placement.using_mesh(placement.current_mesh(values), override=False):
        return jax.tree.unflatten(structure, over_vmap(_add_normals)(of_parts(words), std, *given))


def _small_leaves(
    words: Sequence[jax.Array], shapes: Sequence[tuple[int, ...]]
) -> dict[int, jax.Array]:
    """The normals of the small leaves, by the leaf's number; none where a leaf would be alone.

    They are generated in one array, with the same values: XLA takes a second to compile each.
    """
    found: dict[int, jax.Array] = {}
    groups: dict[frozenset[str], list[int]] = {}
    for n, shape in enumerate(shapes[: len(words)]):
        if math.prod(shape) <= _SMALL:
            groups.setdefault(frozenset(placement.varying(words[n])), []).append(n)
    for small in groups.values():
        if len(small) == 1:
            continue
        parts = []  # key, counter, and which word of it, for every element of a leaf
        for n in small:
            counters, second = _counters(shapes[n])
            each = (words[n][0], words[n][1], jnp.uint32(n))
            parts.append((*(jnp.broadcast_to(x, counters.shape) for x in each), counters, second))
        flat = [jnp.concatenate([jnp.ravel(part[i]) for part in parts]) for i in range(5)]
        *counted, second = placement.replicated(flat)
        first, last = _threefry(*counted)
        made = _from_bits(jnp.where(second, last, first))
        ends = np.cumsum([part[0].size for part in parts])[:-1]
        for n, values in zip(small, jnp.split(placement.replicated(made), ends), strict=True):
            found[n] = placement.replicated(values.reshape(shapes[n]))
    return found


def _add_separately(
    words: jax.Array, std: jax.Array, number: int, leaf: jax.Array, *before: jax.Array
) -> jax.Array:
    """``leaf`` and its noise, in a computation of its own; ``before`` as in ``_add_normals``.

    XLA would otherwise run the generator again in everything that takes the result, and make the
    noise of all leaves before it needs the first: on a CPU, which ignores barriers there, a branch
    keeps it from that. The branch not taken is one of NaN.
    """

    def added(words: jax.Array, std: jax.Array, leaf: jax.Array, *before: jax.Array) -> jax.Array:
        """The leaf and its noise."""
        counters, second = _counters(leaf.shape)

        def normals(key: jax.Array) -> jax.Array:
            # Scalar keys: XLA would write broadcast ones to memory.
            first, last = _threefry(key[0], key[1], jnp.uint32(number), counters)
            return _from_bits(jnp.where(second, last, first)).reshape(leaf.shape)

        noise = normals(words)
        if before:
            noise = _sum_of(noise, std, before[0], normals(before[1]))
        return leaf + std * noise

    def all_nan(words: jax.Array, std: jax.Array, leaf: jax.Array, *before: jax.Array) -> jax.Array:
        """NaN, as what a deviation of NaN would make."""
        return leaf * jnp.nan + std

    return jax.lax.platform_dependent(
        words,
        std,
        leaf,
        *before,
        cpu=lambda *each: jax.lax.cond(jnp.isnan(std), all_nan, added, *each),
        default=lambda *each: jax.lax.optimization_barrier(added(*each)),
    )


def _counters(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The counter of every element, uint32; and bool: the element takes the second word of it.

    Both words of a counter are used, by the same places of the upper and the lower half of the
    rows. Each element makes its own pair: nothing is joined, so that XLA does all in one loop, and
    in no more than a shard of a mesh where the leaf is sharded.

    Raises:
        ValueError: more elements or rows than counters.
    """
    rows, *rest = shape or (1,)
    half = -(-rows // 2)
    if rows >= 2**32 or half * math.prod(rest) >= 2**32:
        raise ValueError(
            "a parameter must have fewer than 2**33 elements, and fewer than 2**32 rows, got shape "
            f"{shape}"
        )
    iota = functools.partial(jax.lax.broadcasted_iota, jnp.uint32, (rows, *rest))
    row, *others = map(iota, range(1 + len(rest)))
    second = row >= np.uint32(half)
    counters = jnp.where(second, row - np.uint32(half), row)
    for size, place in zip(rest, others, strict=True):
        counters = counters * np.uint32(size) + place
    return counters, second


def _from_bits(bits: jax.Array) -> jax.Array:
    """Normals by the inverse of their distribution function, from 23 bits each."""
    mantissa = (bits >> np.uint32(9)) | np.uint32(0x3F800000)
    uniform = jax.lax.bitcast_convert_type(mantissa, jnp.float32) - np.float32(1)
    centred = jnp.maximum(_LOWEST, uniform * (1 - _LOWEST) + _LOWEST)
    return np.float32(math.sqrt(2)) * jax.lax.erf_inv(centred)


def _sum_of(normals: jax.Array, std: jax.Array, weight: jax.Array, earlier: jax.Array) -> jax.Array:
    """``normals`` + ``weight`` · ``earlier``, each of both as float32 holds it.

    A compiler would fuse the product that a normal ends with and the sum that takes it, without the
    rounding between: a normal would have other digits when it is taken back than when it was added.
    An integer operation on both, with a number that the compiler does not know, keeps it from that.
    """
    nothing = jnp.isinf(std).astype(jnp.uint32)
    bits = [jax.lax.bitcast_convert_type(each, jnp.uint32) | nothing for each in (normals, earlier)]
    own, other = (jax.lax.bitcast_convert_type(each, jnp.float32) for each in bits)
    return own + weight * other


@functools.lru_cache(maxsize=64)
def over_vmap(
    one: Callable[..., list[jax.Array]], lanes: int = 0
) -> Callable[..., list[jax.Array]]:
    """``one``, for each member of a ``vmap`` around it; the members' keys must differ.

    A vmap asks the rule below, also through ``jit`` and ``scan``: it takes the member's axis to the
    front, and knows whether the members' keys differ.

    Args:
        one: (keys, std, leaf, leaf, ...) -> the leaves with noise of their own; keys [words].
        lanes: how many vmaps are around; all that it takes has as many axes in front.
    """

    @custom_vmap
    def add(keys: list[jax.Array], std: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        """``one`` over all lanes; NaN where two of them have one key."""
        mapped = one
        for _ in range(lanes):
            mapped = jax.vmap(mapped)
        if lanes:
            # Two equal keys, in any lanes, have noise that cannot be distinguished.
            words = keys[0].reshape(-1, keys[0].shape[-1]).T
            ordered = jax.lax.sort(list(words), num_keys=len(words))
            same = [word[1:] == word[:-1] for word in ordered]
            std = jnp.where(jnp.any(functools.reduce(jnp.logical_and, same)), jnp.nan, std)
        return mapped(keys, std, *leaves)

    @add.def_vmap
    def rule(
        size: int,
        mapped: Sequence[PyTree],
        keys: list[jax.Array],
        std: jax.Array,
        *leaves: jax.Array,
    ) -> tuple[list[jax.Array], list[bool]]:
        """The same with one lane more; ValueError for one key for all of its members."""
        if not all(mapped[0]):
            raise ValueError(
                "key must be another one for every member of a vmap, got one for all: they would "
                "share their noise, which subtracts away"
            )
        given = zip((std, *leaves), mapped[1:], strict=True)
        full = [x if m else jnp.broadcast_to(x[None], (size, *x.shape)) for x, m in given]
        found = over_vmap(one, lanes + 1)(keys, *full)
        return found, [True] * len(found)

    return add


def _add_normals(words: list[jax.Array], std: jax.Array, *given: jax.Array) -> list[jax.Array]:
    """Each leaf with its noise: the last arguments; before them weight and keys of ``before``."""

    @jax.jit  # also where nothing is compiled around it: so many rounds would be a call each
    def added(words: list[jax.Array], std: jax.Array, *given: jax.Array) -> list[jax.Array]:
        """The leaves and their noise: small ones together, large ones each by itself."""
        before, leaves = given[: -len(words)], given[-len(words) :]
        shapes, found = [leaf.shape for leaf in leaves], []
        small, earlier = (_small_leaves(keys, shapes) for keys in (words, before[1:]))
        for n, leaf in enumerate(leaves):
            other = (before[0], before[1 + n]) if before else ()
            if n not in small:
                found.append(_add_separately(words[n], std, n, leaf, *other))
                continue
            noise = _sum_of(small[n], std, before[0], earlier[n]) if before else small[n]
            found.append(leaf + std * noise)
        return found

    return added(words, std, *given)


def sharded_axes(
    leaf: jax.Array, sharded_over: tuple[str, ...], replicated_over: tuple[str, ...]
) -> list[str]:
    """The axes of a ``shard_map`` or ``pmap`` around over which devices hold other parts, sorted.

    Raises:
        ValueError: an axis over which that is neither seen nor said.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return []
    typed = bool(placement.tracked_axes())
    cut = placement.varying(leaf) if typed else set(sharded_over)
    if unknown := set(axes) - cut - set(replicated_over) if not typed else set():
        raise ValueError(
            f"sharded_over or replicated_over must name every mesh axis around privatize, got none "
            f"for {sorted(unknown)}: whether devices hold one sum (and need one noise) or parts of "
            "it (and need noise each) cannot be seen inside shard_map or pmap"
        )
    return sorted(cut & set(axes))


def _threefry(
    key: jax.Array, other: jax.Array, counter: jax.Array, place: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The two words of threefry2x32 with 20 rounds, of a key and a counter of two words each.

    The values are those of JAX's own primitive, which on a CPU runs every round over the whole
    array; written element by element XLA fuses all rounds with what takes the words.
    """
    keys = (key, other, key ^ other ^ np.uint32(0x1BD11BDA))
    first, last = counter + key, place + other
    for rounds in range(5):
        for bits in _ROTATIONS[rounds % 2]:
            first = first + last
            last = ((last << np.uint32(bits)) | (last >> np.uint32(32 - bits))) ^ first
        first = first + keys[(rounds + 1) % 3]
        last = last + keys[(rounds + 2) % 3] + np.uint32(rounds + 1)
    return first, last
