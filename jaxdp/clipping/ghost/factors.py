"""Per-example gradients as factors: their norms, products and weighted sums."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.clipping.ghost.sites import Convolution, Lookup

EXACT = lax.Precision.HIGHEST

# The rounding of a ghost norm is relative to what the norm would be if nothing cancelled. The part
# of it below _TOLERATED is covered by the margin that every rule keeps.
_ROUNDING = 8 * 2.0**-24
_TOLERATED = 1e-4
# The squares of entries below 1e-19 underflow to zero. Lengths are enlarged by what that may hide,
# so that a tiny factor times a huge one is still seen, also by _ROUNDING's share of it.
_HIDDEN_SQUARE = 1e-31
# The smallest normal float32, below which numbers may be flushed to zero.
_TINY = 2.0**-126


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """A site, what entered it [m, *operand], and the loss's cotangent there [m, *result]."""

    site: Any
    data: jax.Array
    cotangent: jax.Array

    def ab(self, key: Any) -> tuple[jax.Array, jax.Array]:
        """The factors [m, g, t, p] and [m, g, t, q], arranged as ``key`` says."""
        a, b = self.site.inputs(self.data), self.site.cotangent(self.cotangent)
        return (a, b) if self.site.key == key else (b, a)

    def gradients(self) -> jax.Array:
        """Per-example gradients, float32 [m, g, p, q]."""
        b = self.site.cotangent(self.cotangent)
        if not isinstance(self.site, Lookup):
            return dot("mgtp,mgtq->mgpq", self.site.inputs(self.data), b)
        zeros = jnp.zeros(self.site.sizes[2:], jnp.float32)
        scatter = jax.vmap(lambda rows, b: zeros.at[rows].add(b, mode="drop"))
        return scatter(self.site.rows(self.data), b[:, 0])[:, None]

    def weighted_sum(self, weights: jax.Array, keep: jax.Array | None) -> jax.Array:
        """sum_i weights_i g_i over the rows to keep [m], arranged like the parameter."""
        clean = self
        if keep is not None:
            clean = Use(self.site, kept(self.data, keep), kept(self.cotangent, keep))
        if isinstance(self.site, Convolution):
            return self.site.view.to_leaf(clean._convolution_sum(weights))
        total = clean._lookup_sum if isinstance(self.site, Lookup) else clean._dense_sum
        return self.site.view.to_leaf(self.site.to_view(total(weights)))

    def _dense_sum(self, weights: jax.Array) -> jax.Array:
        a, b = self.ab(self.site.key)
        # The weights go to the smaller factor.
        a, b = (_weighted(a, weights), b) if a.size <= b.size else (a, _weighted(b, weights))
        return dot("mgtp,mgtq->gpq", a, b)

    def _lookup_sum(self, weights: jax.Array) -> jax.Array:
        b = _weighted(self.site.cotangent(self.cotangent), weights)
        rows = self.site.rows(self.data).reshape(-1)
        zeros = jnp.zeros(self.site.sizes[2:], jnp.float32)
        return zeros.at[rows].add(b.reshape(-1, b.shape[-1]), mode="drop")[None]

    def _convolution_sum(self, weights: jax.Array) -> jax.Array:
        """As the ordinary gradient of a kernel, so that no patches wait for the weights."""
        cotangent = _weighted(self.cotangent.astype(jnp.float32), weights)
        data = self.data.astype(jnp.float32)
        kernel = jax.ShapeDtypeStruct(self.site.view.shape, jnp.float32)
        convolve = lambda k: jax.vmap(lambda x: self.site.convolve(x, k))(data)  # noqa: E731
        return jax.linear_transpose(convolve, kernel)(cotangent)[0]


def reference(uses: Sequence[Use]) -> Any:
    """The site whose arrangement the others follow: a lookup, if there is one."""
    lookups = [use.site for use in uses if isinstance(use.site, Lookup)]
    return (lookups or [use.site for use in uses])[0]


def multiplied(uses: Sequence[Use]) -> jax.Array:
    """Per-example gradients [m, g, p, q], summed over the uses, as the reference arranges them."""
    key = reference(uses).key
    grads = [u.gradients() for u in uses]
    turned = [
        g if u.site.key == key else g.swapaxes(2, 3) for u, g in zip(uses, grads, strict=True)
    ]
    return sum(turned[1:], start=turned[0])


def square_norms(uses: Sequence[Use]) -> tuple[jax.Array, jax.Array]:
    """Squared norms [m]: as computed, and enlarged where cancellation may hide their rounding.

    ||sum_t a_t b_t'||² = sum_ts <a_t, a_s> <b_t, b_s> over the positions of all uses; for a lookup
    a_t is one-hot.
    """
    key = reference(uses).key
    dense = [use.ab(key) for use in uses if not isinstance(use.site, Lookup)]
    looked_up = [_rows_and_b(use) for use in uses if isinstance(use.site, Lookup)]
    squares = longest = jnp.zeros(uses[0].data.shape[0], jnp.float32)
    if dense:
        a, b = _concatenated(dense, axis=2)
        squares += _dense_squares(a, b)
        longest += jnp.sum(_length(a) * _length(b), axis=(1, 2))
    if looked_up:
        rows, d = _concatenated(looked_up, axis=1)
        same = rows[:, :, None] == rows[:, None, :]
        squares += jnp.sum(jnp.where(same, dot("mtq,msq->mts", d, d), 0.0), axis=(1, 2))
        longest += jnp.sum(_length(d), axis=1)
    if dense and looked_up:
        squares += 2.0 * _cross_terms(a[:, 0], b[:, 0], rows, d)
    # Rounding may leave less than nothing of what cancels.
    squares = jnp.maximum(squares, 0.0)
    enlarged = squares * (1.0 - _TOLERATED) + _ROUNDING * jnp.square(longest)
    return squares, jnp.maximum(squares, enlarged)


def scaled_squares(use: Use, inverse: jax.Array) -> jax.Array:
    """Squared norms [m] of a gradient multiplied by ``inverse`` [g, p, q]; one position only.

    Squares of a tiny input, a huge cotangent or an inverse could underflow or overflow where their
    product does not, so each is divided by its largest entry; what may underflow still is added.
    """
    a, b = (x[:, :, 0] for x in use.ab(use.site.key))
    (a, most_a), (b, most_b), (inverse, most) = (
        _divided_by_largest(x, axes) for x, axes in ((a, (1, 2)), (b, (1, 2)), (inverse, (0, 1, 2)))
    )
    half = dot("mgp,gpq->mgq", jnp.square(a), jnp.square(inverse))
    squares = jnp.sum(half * jnp.square(b), axis=(1, 2)) + inverse.size * 4 * _TINY
    # The smallest times the largest comes first: no other order is safe from underflow.
    low, middle, high = jnp.sort(jnp.stack([most_a, most_b, jnp.full_like(most_a, most)]), axis=0)
    return jnp.square(low * high * middle * jnp.sqrt(squares))


def kept(rows: jax.Array, keep: jax.Array) -> jax.Array:
    """Zero in the rows not to keep: not by a zero weight, since 0 * nan is nan."""
    return jnp.where(_column(keep, rows.ndim), rows, jnp.zeros([], rows.dtype))


def dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """``einsum`` without the rounding of reduced-precision units."""
    return jnp.einsum(spec, a, b, precision=EXACT)


def _rows_and_b(use: Use) -> tuple[jax.Array, jax.Array]:
    rows = use.site.rows(use.data)
    b = use.site.cotangent(use.cotangent)[:, 0]
    return rows, jnp.where((rows < use.site.sizes[2])[..., None], b, 0.0)


def _dense_squares(a: jax.Array, b: jax.Array) -> jax.Array:
    if a.shape[2] == 1:
        return jnp.sum(jnp.square(_length(a) * _length(b)), axis=(1, 2))
    grams = (dot("mgtp,mgsp->mgts", x, x) for x in (a, b))
    return jnp.sum(next(grams) * next(grams), axis=(1, 2, 3))


def _cross_terms(a: jax.Array, b: jax.Array, rows: jax.Array, d: jax.Array) -> jax.Array:
    """sum_ts a_t[row_s] <b_t, d_s>."""
    at_rows = jnp.take_along_axis(a, rows[:, None, :], axis=2, mode="clip")
    return jnp.sum(at_rows * dot("mtq,msq->mts", b, d), axis=(1, 2))


def _concatenated(pairs: Sequence[tuple[jax.Array, jax.Array]], axis: int) -> list[jax.Array]:
    return [
        parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
        for parts in zip(*pairs, strict=True)
    ]


def _length(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=-1) + x.shape[-1] * _HIDDEN_SQUARE)


def _divided_by_largest(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    largest = jnp.maximum(jnp.max(jnp.abs(x), axis=axes, keepdims=True), _TINY)
    return x / largest, jnp.squeeze(largest, axes)


def _weighted(rows: jax.Array, weights: jax.Array) -> jax.Array:
    return rows * _column(weights, rows.ndim)


def _column(values: jax.Array, ndim: int) -> jax.Array:
    return values.reshape(values.shape + (1,) * (ndim - 1))
