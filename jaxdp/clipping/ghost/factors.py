"""Per-example gradients as factors: what entered a use of a parameter, and the cotangent there."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxdp.clipping import rounding
from jaxdp.clipping.ghost.sites import Key, Site
from jaxdp.clipping.rounding import exact

# The squares of entries below 1e-19 underflow to zero. Lengths are enlarged by what that may hide,
# so that a tiny factor times a huge one is still seen, also by rounding's share of it.
_HIDDEN_SQUARE = 1e-31
# The smallest normal float32, below which numbers may be flushed to zero.
_TINY = 2.0**-126
# Patches of a convolution are written for so many bytes of rows at a time: on a CPU they stay in
# the cache (a third to a half of the time of all at once), elsewhere it bounds the memory.
_PATCH_BYTES, _PATCH_BYTES_ELSEWHERE = 4 * 2**20, 512 * 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """One use of a parameter: its site, the input [m, *operand], the cotangent [m, *result].

    Attributes:
        stacked: the same input and cotangent with the rows after the passes of a loop, as it stacks
            them, and the axis of the rows. To move them is to copy them, so blocks are cut there.
    """

    site: Site
    data: jax.Array
    cotangent: jax.Array
    stacked: tuple[jax.Array, jax.Array, int] | None = None

    def block(self, start: jax.Array, size: int) -> "Use":
        """The use by ``size`` rows from ``start`` on."""
        data, cotangent, axis = self.stacked or (self.data, self.cotangent, 0)

        def cut(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(jax.lax.dynamic_slice_in_dim(x, start, size, axis), axis, 0)

        return Use(self.site, cut(data), cut(cotangent))

    def kept(self, keep: jax.Array) -> "Use":
        """The use with zeros in the rows not to keep."""
        return Use(self.site, kept(self.data, keep), kept(self.cotangent, keep))

    def ab(self, key: Key) -> tuple[jax.Array, jax.Array]:
        """The factors [m, g, t, p] and [m, g, t, q], arranged as ``key`` says.

        In bfloat16 where both are, else in float32.
        """
        pair = self.site.inputs(self.data), self.site.cotangent(self.cotangent)
        a, b = rounding.alike(pair)
        return (a, b) if self.site.key == key else (b, a)

    def gradients(self) -> jax.Array:
        """Per-example gradients, float32 [m, g, p, q]."""
        if not self.site.looks_up:
            most = (_PATCH_BYTES, _PATCH_BYTES_ELSEWHERE)
            cpu, default = (functools.partial(self._products, self._at_once(n)) for n in most)
            return jax.lax.platform_dependent(cpu=cpu, default=default)
        b = self.site.cotangent(self.cotangent).astype(jnp.float32)
        zeros = jnp.zeros(self.site.sizes[2:], jnp.float32)
        scatter = jax.vmap(lambda rows, b: zeros.at[rows].add(b, mode="drop"))
        return scatter(self.site.inputs(self.data), b[:, 0])[:, None]

    def _products(self, size: int) -> jax.Array:
        """Per-example gradients, the factors of ``size`` rows at a time."""
        rows = self.data.shape[0]
        if size == rows:
            return exact("mgtp,mgtq->mgpq", *self.ab(self.site.key))
        found = jax.lax.map(
            lambda start: self.block(start, size)._products(size), jnp.arange(0, rows, size)
        )
        return found.reshape(rows, *found.shape[2:])

    def _at_once(self, most: int) -> int:
        """The number of rows whose inputs take ``most`` bytes; all, where they are the data."""
        rows = self.data.shape[0]
        row = 4 * math.prod(self.site.sizes[:3])
        if row * rows <= max(2 * most, 8 * self.data.size):
            return rows
        return next(n for n in range(max(1, most // row), 0, -1) if rows % n == 0)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rows", "grads"], meta_fields=["site"]
)
@dataclasses.dataclass(frozen=True, eq=False)
class LookedUp:
    """The gradients of all lookups of one table, with each looked-up row once.

    Attributes:
        site: one of the lookups.
        rows: int32 [m, t]; the number of rows p where there is none.
        grads: float32 [m, t, q]; zero where there is no row.
    """

    site: Site
    rows: jax.Array
    grads: jax.Array

    def squares(self, scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Squared norms [m], as computed and rounded up; the table's scale is [1, p, q]."""
        return rounding.squares(self._divided(scale))

    def kept(self, keep: jax.Array) -> "LookedUp":
        """The lookups with zeros in the rows not to keep."""
        return dataclasses.replace(self, grads=kept(self.grads, keep))

    def total(self, weights: jax.Array) -> jax.Array:
        """sum_i weights_i g_i, [1, p, q]."""
        return self._scattered(weighted(self.grads, weights))

    def boxed(self, bound: float, scale: jax.Array | None) -> jax.Array:
        """The sum [1, p, q] of gradients clipped to [-bound, bound] by coordinate."""
        return self._scattered(boxed(self._divided(scale), bound))

    def _divided(self, scale: jax.Array | None) -> jax.Array:
        if scale is None:
            return self.grads
        divisors = jnp.take(scale[0], self.rows, axis=0, mode="fill", fill_value=1.0)
        return self.grads / divisors

    def _scattered(self, grads: jax.Array) -> jax.Array:
        zeros = jnp.zeros(self.site.sizes[2:], jnp.float32)
        flat = grads.reshape(-1, grads.shape[-1])
        return zeros.at[self.rows.reshape(-1)].add(flat, mode="drop")[None]


def looked_up(uses: Sequence[Use]) -> LookedUp | None:
    """The lookups among the uses; None where there are none.

    Positions with one row are added first, so that a record's rows are distinct: nothing cancels
    between them, and no entry of the sum has more terms than records.
    """
    found = [use for use in uses if use.site.looks_up]
    if not found:
        return None
    size = found[0].site.sizes[2]
    rows = jnp.concatenate([use.site.inputs(use.data) for use in found], axis=1)
    each = rounding.alike([use.site.cotangent(use.cotangent)[:, 0] for use in found])
    grads = jnp.concatenate(each, axis=1)
    grads = jnp.where((rows < size)[..., None], grads, jnp.zeros([], grads.dtype))
    if rows.shape[1] > 1:
        same = rows[:, :, None] == rows[:, None, :]
        first = jnp.argmax(same, axis=2) == jnp.arange(rows.shape[1])[None]
        merged = exact("mts,msq->mtq", same.astype(grads.dtype), grads)
        rows, grads = jnp.where(first, rows, size), jnp.where(first[..., None], merged, 0.0)
    # Norm and sum must see the same numbers.
    grads = grads.astype(jnp.float32)
    return LookedUp(found[0].site, rows, rounding.written(grads))


def product(a: jax.Array, b: jax.Array, weights: jax.Array) -> jax.Array:
    """sum_it weights_i a_it b_it', [g, p, q], for a few rows; many positions in blocks."""
    return rounding.total([_summed(*pair) for pair in weighted_pairs(a, b, weights)])


def weighted_pairs(
    a: jax.Array, b: jax.Array, weights: jax.Array
) -> list[tuple[jax.Array, jax.Array]]:
    """The factors with weights [m] in the smaller one; in bfloat16, two pairs that add up."""
    if a.size > b.size:
        return [(x, y) for y, x in weighted_pairs(b, a, weights)]
    heavy = weighted(a.astype(jnp.float32), weights)
    parts = rounding.halves(heavy) if a.dtype == jnp.bfloat16 else [heavy]
    return [(part, b) for part in parts]


def _summed(a: jax.Array, b: jax.Array) -> jax.Array:
    if a.shape[2] <= rounding.TERMS:
        return exact("mgtp,mgtq->gpq", a, b)
    a, b = (rounding.cut(jnp.moveaxis(x, 2, 0), rounding.TERMS) for x in (a, b))
    return rounding.pairwise(exact("ntmgp,ntmgq->ngpq", a, b))


def reference(uses: Sequence[Use]) -> Site:
    """The site whose arrangement the others follow: a lookup, if there is one."""
    lookups = [use.site for use in uses if use.site.looks_up]
    return (lookups or [use.site for use in uses])[0]


def multiplied(uses: Sequence[Use]) -> jax.Array:
    """Per-example gradients [m, g, p, q], summed over the uses, as the reference arranges them."""
    key = reference(uses).key
    grads = [u.gradients() for u in uses]
    turned = [
        g if u.site.key == key else g.swapaxes(2, 3) for u, g in zip(uses, grads, strict=True)
    ]
    return sum(turned[1:], start=turned[0])


def square_norms(
    dense: Sequence[tuple[jax.Array, jax.Array]], lookups: LookedUp | None
) -> tuple[jax.Array, jax.Array]:
    """Squared norms [m]: as computed, and large enough for the true ones where terms cancel.

    ||sum_t a_t b_t'||² = sum_ts <a_t, a_s> <b_t, b_s> over the positions of all uses; for a lookup
    a_t is one-hot. Its error is a multiple of what it would be if nothing cancelled
    (docs/clip_bound.md, Theorem 2).

    Args:
        dense: factors [m, g, t, p] and [m, g, t, q], arranged alike.
        lookups: of the same parameter.
    """
    rows = (dense[0][0] if lookups is None else lookups.grads).shape[0]
    squares = longest = jnp.zeros(rows, jnp.float32)
    roundings = 32
    if dense:
        flat = rounding.alike([*itertools.chain(*dense)])
        a, b = (jnp.concatenate(flat[at::2], axis=2) for at in (0, 1))
        roundings += 0 if a.dtype == jnp.float32 else 2 * rounding.HALVED + 3
        squares, steps = _dense_squares(a, b)
        longest = _norm(rounding.sums(_norm(a) * _norm(b), 1))
        roundings += steps
    if lookups is not None:
        own, steps = rounding.sums_of_squares(lookups.grads)
        squares, longest = squares + own, longest + _norm(lookups.grads.reshape(rows, -1))
        roundings += steps
    if dense and lookups is not None:
        squares += 2.0 * _cross_terms(a[:, 0], b[:, 0], lookups)
        roundings += rounding.roundings(a.shape[2], lookups.rows.shape[1])
    # Rounding may leave less than nothing of what cancels.
    squares = jnp.maximum(squares, 0.0)
    error = rounding.gamma(roundings) * jnp.square(longest)
    cancelled = jnp.square(longest / rounding.CANCELLED)
    return squares, jnp.maximum(rounding.enlarged(squares, error), cancelled)


def outer_squares(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Squared norms [m] of a b', from [m, g, p] and [m, g, q]: as computed, and on the safe side.

    The norm of an outer product is the product of the norms: nothing cancels.
    """
    (of_a, steps_a), (of_b, steps_b) = (_hidden_squares(x) for x in (a, b))
    squares = jnp.sum(of_a * of_b, axis=1)
    roundings = steps_a + steps_b + a.shape[1] + 8
    return squares, rounding.enlarged(squares, rounding.gamma(roundings) * squares)


def scaled_squares(a: jax.Array, b: jax.Array, inverse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Squared norms [m] of (a b') * ``inverse`` [g, p, q], from [m, g, p] and [m, g, q].

    Squares of a tiny input, a huge cotangent or an inverse could underflow or overflow where their
    product does not, so each is divided by its largest entry; what may underflow still is added.
    """
    (a, most_a), (b, most_b), (inverse, most) = (
        _divided_by_largest(x, axes) for x, axes in ((a, (1, 2)), (b, (1, 2)), (inverse, (0, 1, 2)))
    )
    groups, p, q = inverse.shape
    half = exact("mgp,gpq->mgq", jnp.square(a), jnp.square(inverse))
    squares = jnp.sum(half * jnp.square(b), axis=(1, 2)) + inverse.size * 4 * _TINY
    # The smallest times the largest comes first: no other order is safe from underflow.
    low, middle, high = jnp.sort(jnp.stack([most_a, most_b, jnp.full_like(most_a, most)]), axis=0)
    found = jnp.square(low * high * middle * jnp.sqrt(squares))
    return found, rounding.enlarged(found, rounding.gamma(p + groups * q + 32) * found)


def boxed(gradients: jax.Array, bound: float) -> jax.Array:
    """Gradients clipped to [-bound, bound]."""
    clipped = jnp.clip(gradients, -bound, bound)
    # 0 / 0, where a scale underflowed: NaN would tell who has a gradient there.
    return jnp.where(jnp.isnan(clipped), 0.0, clipped)


def outer_sum(pairs: Sequence[tuple[jax.Array, jax.Array]], size: int) -> jax.Array:
    """sum_i a_i b_i', [g, p, q], over all pairs [m, g, p] and [m, g, q]; weights are in them."""
    blocks = rounding.cut(pairs, size)
    found = [exact("nmgp,nmgq->ngpq", a, b) for a, b in blocks]
    return rounding.pairwise(rounding.total(found))


def kept(rows: jax.Array, keep: jax.Array) -> jax.Array:
    """The rows, with zeros in those not to keep: not by a zero weight, since 0 * nan is nan."""
    return jnp.where(_column(keep, rows.ndim), rows, jnp.zeros([], rows.dtype))


def weighted(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Rows [m, ...] times weights [m]; zero where that overflows.

    Of one position that shortens; where positions could cancel none does (docs/clip_bound.md).
    """
    found = rows * _column(weights, rows.ndim)
    return jnp.where(jnp.isfinite(found), found, 0.0)


def _dense_squares(a: jax.Array, b: jax.Array) -> tuple[jax.Array, int]:
    (grams_a, steps_a), (grams_b, steps_b) = (
        rounding.inner("mgtp,mgsp->mgts", x, x) for x in (a, b)
    )
    steps = steps_a + steps_b + rounding.roundings(*grams_a.shape[1:])
    return rounding.sums(grams_a * grams_b, 3), steps


def _cross_terms(a: jax.Array, b: jax.Array, lookups: LookedUp) -> jax.Array:
    """sum_ts a_t[row_s] <b_t, d_s>."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    at_rows = jnp.take_along_axis(a, lookups.rows[:, None, :], axis=2, mode="clip")
    return rounding.sums(at_rows * rounding.inner("mtq,msq->mts", b, lookups.grads)[0], 2)


def _hidden_squares(x: jax.Array) -> tuple[jax.Array, int]:
    """Sums of squares over the last axis, with what underflow may hide; and their roundings."""
    flat = x.astype(jnp.float32).reshape(math.prod(x.shape[:-1]), x.shape[-1])
    found, roundings = rounding.sums_of_squares(flat)
    return found.reshape(x.shape[:-1]) + x.shape[-1] * _HIDDEN_SQUARE, roundings


def _norm(x: jax.Array) -> jax.Array:
    """Norms over the last axis, not below the true ones."""
    found, roundings = _hidden_squares(x)
    return jnp.sqrt(found * (1.0 + 2.0 * rounding.gamma(roundings + 4)))


def _divided_by_largest(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    x = x.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(x), axis=axes, keepdims=True), _TINY)
    return x / largest, jnp.squeeze(largest, axes)


def _column(values: jax.Array, ndim: int) -> jax.Array:
    return values.reshape(values.shape + (1,) * (ndim - 1))
