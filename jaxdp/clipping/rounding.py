"""Sums with bounded rounding errors; docs/proofs/clip_bound.md has the proofs.

float32 rounds a sum by an amount that grows with the number of its terms and with what they would
add up to if nothing cancelled. So rows are added in blocks of fixed size, blocks by halves or with
compensation, and a norm is never taken to be shorter than the terms of its gradient allow.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.types import PyTree

# Half the distance from 1 to the next float32: the largest relative error of one operation.
UNIT = 2.0**-24
# What rules aim below their bound. One half covers TOLERATED, the other the norm's own arithmetic.
MARGIN = 2.0**-9
# Rounding of a squared norm, relative to it, that the margin covers.
TOLERATED = 2.0**-9
# Rows of one block of a sum, where each row's gradient cancels nowhere.
ROWS = 160
# Terms of one block of a sum over positions.
TERMS = 128
# Terms of a gradient may cancel up to this ratio; beyond, its norm counts as longer than it is.
CANCELLED = 32.0
# The largest share of the bound by which one record moves the rounding of blocks.
SHARE = 0.0132
# What ``halves`` loses of an entry, in units: 2^-16.
HALVED = 256
# Roundings of one product, with room for units that split float32 into parts (bfloat16 on a TPU).
_PRODUCT = 8
# A sum of up to so many squares is in error by less than TOLERATED.
_SQUARES = 2**14
# Entries of an inner product that are added without blocks.
_INNER = 1024
# Terms of a group in a sum over positions.
_GROUP = 32


def gamma(operations: int) -> float:
    """n·u / (1 - n·u): the relative error of n roundings (Higham 2002, Lemma 3.1)."""
    if operations * UNIT > 0.5:
        raise ValueError(f"operations must be at most {int(0.5 / UNIT)}, got {operations}")
    return operations * UNIT / (1.0 - operations * UNIT)


def error_of_sum(records: int, devices: int = 1, drawn: bool = True) -> float:
    """E / C: the share of the bound by which one record moves the rounding of a sum.

    The sum is over ``records``: a share of its blocks, and 24 roundings of all that blocks,
    microbatches and physical batches add. What eight devices add of a draw is within these.

    Args:
        records: the largest number of records of a draw.
        devices: that add their sums.
        drawn: True where the rows are those of a draw, which fills the devices one after another;
            False where any device may hold any number of them.
    """
    if devices > 1 and (devices > 8 or not drawn):
        return SHARE + (2 * devices + (8 if drawn else 22)) * UNIT * records
    return SHARE + 24.0 * UNIT * records


def most_records(batch_size: int) -> int:
    """A public number that no Poisson draw of this expected size exceeds, but for 1 in e^1100.

    (Chernoff: exp(-t²/(2(B + t/3))) at t = B + 1024, which is largest near B = 500.)
    """
    return 2 * batch_size + 1024


def check_records(count: int, most: int) -> None:
    """Raises ValueError, without the number, for more records than their public bound."""
    if count > most:
        raise ValueError(
            "most_records must be at least the records of a draw and the rows of a batch, got "
            f"{most}: declare the batch_size and dataset_size that they really have, or "
            "most_records itself in jaxdp.clipped_grad"
        )


def rows_of_block(positions: int) -> int:
    """The number of rows of one block, a power of two; fewer where more terms may cancel."""
    return 1 << int(math.log2(max(1.0, math.sqrt(TERMS / positions))))


def pairwise_sum(parts: jax.Array) -> jax.Array:
    """The sum over the first axis by halves: log2(n) roundings each."""
    while parts.shape[0] > 1:
        half = parts.shape[0] // 2
        added = parts[:half] + parts[half : 2 * half]
        odd = parts.shape[0] % 2
        parts = jnp.concatenate([added, parts[-1:]]) if odd else added
    return parts[0]


def sum_arrays(parts: list[jax.Array]) -> jax.Array:
    """The sum of arrays of one shape, by halves."""
    while len(parts) > 1:
        halves = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = halves + (parts[-1:] if len(parts) % 2 else [])
    return parts[0]


def add_compensated(total: PyTree, lost: PyTree, more: PyTree) -> tuple[PyTree, PyTree]:
    """Compensated addition (Kahan 1965): the new total, and what it lost by rounding.

    What is added is written first: the loss is that of the number which the total got.
    """
    more = materialized(more)
    wanted = jax.tree.map(jnp.subtract, more, lost)
    larger = jax.tree.map(jnp.add, total, wanted)
    lost = jax.tree.map(lambda new, old, add: (new - old) - add, larger, total, wanted)
    return larger, lost


def compensated(total: PyTree, lost: PyTree) -> PyTree:
    """The total with its compensation applied."""
    return jax.tree.map(jnp.subtract, total, lost)


def into_blocks(rows: PyTree, size: int) -> PyTree:
    """Arrays [m, ...] as [ceil(m / size), size, ...], padded with zeros."""

    def one(array: jax.Array) -> jax.Array:
        count = max(1, -(-array.shape[0] // size))
        missing = count * size - array.shape[0]
        filled = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) if missing else array
        return filled.reshape(count, size, *array.shape[1:])

    return jax.tree.map(one, rows)


def even_size(rows: int, most: int) -> int:
    """The size of equal blocks of at most ``most`` rows each.

    As many blocks as the rows need, or up to twice as many where that divides the rows: padding
    would copy them.
    """
    least = max(1, -(-rows // most))
    dividing = (count for count in range(least, 2 * least + 1) if rows % count == 0)
    return max(1, -(-rows // next(dividing, least)))


def sum_over_blocks(fn: Callable[[Any], jax.Array], rows: PyTree, size: int) -> jax.Array:
    """The sum of ``fn`` over blocks of ``size`` rows, compensated; padding rows are zero."""
    blocks = into_blocks(rows, size)
    count = jax.tree.leaves(blocks)[0].shape[0]
    if count == 1:
        return fn(jax.tree.map(lambda array: array[0], blocks))
    one = jax.eval_shape(lambda: jax.tree.map(lambda array: array[0], blocks))
    shape = jax.eval_shape(fn, one)
    zeros = jnp.zeros(shape.shape, shape.dtype)

    def add(carry: tuple[jax.Array, jax.Array], block: PyTree) -> tuple[PyTree, None]:
        block = jax.tree.map(lambda array, like: array.reshape(like.shape), block, one)
        return add_compensated(*carry, fn(block)), None

    (total, lost), _ = jax.lax.scan(add, (zeros, zeros), jax.tree.map(without_ones, blocks))
    return compensated(total, lost)


def without_ones(blocks: jax.Array) -> jax.Array:
    """Blocks without axes of one entry, which XLA lays out anew, by a copy, where a loop begins."""
    return blocks.reshape(blocks.shape[0], *(size for size in blocks.shape[1:] if size != 1))


def square_norms(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums of squares [m] of rows [m, ...]: as computed, and not below the true ones."""
    found, roundings = sums_of_squares(rows)
    return found, rounded_up(found, gamma(roundings) * found)


def sums_of_squares(rows: jax.Array) -> tuple[jax.Array, int]:
    """Sums of squares [m] of rows [m, ...], and how many roundings a term goes through."""
    if max(rows.shape[1:], default=0) > _SQUARES:
        rows = _split_last(rows.reshape(rows.shape[0], -1), _INNER)
    levels = _levels(rows.shape[1:])
    found = jnp.square(rows.reshape(rows.shape[0], *levels))
    for _ in levels:
        found = jax.lax.optimization_barrier(jnp.sum(found, axis=-1))
    return found, sum(levels) + 1


def sum_last_axes(terms: jax.Array, axes: int) -> jax.Array:
    """The sum over the last ``axes`` axes, one after another, long ones in groups.

    A barrier is between them: XLA would make one sum, with as many roundings as terms.
    """
    for _ in range(axes):
        if terms.shape[-1] > 2 * _GROUP:
            terms = jax.lax.optimization_barrier(jnp.sum(_split_last(terms, _GROUP), axis=-1))
        terms = jax.lax.optimization_barrier(jnp.sum(terms, axis=-1))
    return terms


def roundings(*sizes: int) -> int:
    """The number of roundings of a term in ``sums`` over axes of these sizes."""
    return sum(n if n <= 2 * _GROUP else _GROUP + -(-n // _GROUP) for n in sizes)


def rounded_up(found: jax.Array, error: jax.Array) -> jax.Array:
    """A squared norm plus its error: not below the true one, up to what the margin covers."""
    return jnp.maximum(found, (found + error) / (1.0 + TOLERATED))


def blocked_einsum(spec: str, a: jax.Array, b: jax.Array) -> tuple[jax.Array, int]:
    """``einsum`` over the last axis of both, in blocks; and how many roundings an entry has."""
    size = a.shape[-1]
    if size <= _INNER:
        return exact_einsum(spec, a, b), size + _PRODUCT
    short = [_split_last(x, _INNER) for x in (a, b)]
    left, right, out = *spec.split("->")[0].split(","), spec.split("->")[1]
    blocks = exact_einsum(f"{left[:-1]}z{left[-1]},{right[:-1]}z{right[-1]}->z{out}", *short)
    return pairwise_sum(blocks), _INNER + _PRODUCT + math.ceil(math.log2(blocks.shape[0])) + 1


def exact_einsum(
    spec: str, a: jax.Array, b: jax.Array, precision: Any = jax.lax.Precision.HIGHEST
) -> jax.Array:
    """``einsum`` in float32 or wider, without the rounding of reduced-precision units.

    Products of two bfloat16 numbers are exact in float32, so their units may take those. Another
    precision is for what norm and sum read as it comes out, never for either of them.
    """
    full = None if a.dtype == jnp.bfloat16 else precision
    kind = a.dtype if a.dtype == jnp.float64 else jnp.float32
    return jnp.einsum(spec, a, b, precision=full, preferred_element_type=kind)


def materialized(tree: PyTree) -> PyTree:
    """The arrays as they are, written to memory: all who read them read the same numbers.

    XLA may otherwise compute a value again for every reader, and round it otherwise each time. Its
    CPU backend ignores barriers where it decides that (jax 0.10), but does not look through a loop
    of unknown length. This one makes no pass, or one that changes nothing.
    """
    leaves, structure = jax.tree.flatten(tree)
    # Integers are not rounded. What stands twice in the tree is written once.
    each = {id(x): x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating) and x.size}
    if each:
        found = jax.lax.platform_dependent(*each.values(), cpu=_looped, default=_barred)
        written = dict(zip(each, found, strict=True))
        leaves = [written.get(id(x), x) for x in leaves]
    return jax.tree.unflatten(structure, leaves)


def _barred(*arrays: jax.Array) -> list[jax.Array]:
    return list(jax.lax.optimization_barrier(arrays))


def _looped(*arrays: jax.Array) -> list[jax.Array]:
    # Of all of them: where one is constant, XLA would know the length.
    first = [jnp.isnan(x[(0,) * x.ndim]) for x in arrays]
    passes = functools.reduce(jnp.logical_or, first).astype(jnp.int32)
    same = lambda _, each: [jnp.where(jnp.isnan(x), jnp.full_like(x, jnp.nan), x) for x in each]  # noqa: E731
    return list(jax.lax.fori_loop(0, passes, same, list(arrays)))


def in_one_dtype(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays as they are if all are bfloat16, else in float32."""
    own = all(array.dtype == jnp.bfloat16 for array in arrays)
    return [array if own else array.astype(jnp.float32) for array in arrays]


def split_bfloat16(x: jax.Array) -> list[jax.Array]:
    """Two bfloat16 arrays that add up to float32 ``x``, but for ``HALVED`` units of every entry.

    Entries that bfloat16 may not hold are zero. XLA may drop a cast there and back again, but never
    ``reduce_precision``.
    """
    x = jnp.where(jnp.abs(x) < 2.0**127, x, 0.0)
    high = jax.lax.reduce_precision(x, 8, 7)
    low = jax.lax.reduce_precision(x - high, 8, 7)
    return [high.astype(jnp.bfloat16), low.astype(jnp.bfloat16)]


def _split_last(x: jax.Array, size: int) -> jax.Array:
    missing = -x.shape[-1] % size
    filled = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return filled.reshape(*x.shape[:-1], filled.shape[-1] // size, size)


def _levels(shape: tuple[int, ...]) -> list[int]:
    """The axes joined from the last on, into sizes of at most _SQUARES."""
    levels: list[int] = []
    for size in shape[::-1]:
        if levels and levels[0] * size <= _SQUARES:
            levels[0] *= size
        else:
            levels.insert(0, size)
    return levels
