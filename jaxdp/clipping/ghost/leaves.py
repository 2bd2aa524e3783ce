"""One parameter's per-example gradients in three forms: as arrays, per layer, as factors only.

Each form answers the same questions: squared norms [m], the weighted sum, and the sum of gradients
clipped to a box. ``scale`` is shaped like the parameter; gradients are divided by it first.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxdp.clipping.ghost import factors
from jaxdp.clipping.ghost.factors import Use, kept
from jaxdp.clipping.ghost.sites import Lookup

# Per-example gradients of a factored parameter are multiplied out for so many bytes at a time.
_CHUNK_BYTES = 32 * 2**20
# Entries from which per-example gradients no longer fit a processor's cache.
_LARGE = 2**18


class Leaf(Protocol):
    """Per-example gradients of one parameter."""

    def squares(self, scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Squared norms float32 [m]: as computed, and with its rounding on the safe side."""

    def weighted_sum(self, weights: jax.Array, keep: jax.Array | None) -> jax.Array:
        """sum_i weights_i g_i over the rows to keep [m], arranged like the parameter; no scale.

        ``keep`` None: every row, all of them finite.
        """

    def boxed_sum(self, bound: float, keep: jax.Array, scale: jax.Array | None) -> jax.Array:
        """The sum over the rows to keep of gradients clipped to [-bound, bound] by coordinate."""


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """Per-example gradients [m, *shape]."""

    grads: jax.Array

    @property
    def large(self) -> bool:
        """Whether one more pass over the gradients is worth a branch to avoid it."""
        return self.grads.size >= _LARGE

    def squares(self, scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """See :class:`Leaf`."""
        grads = self._divided(scale)
        squares = jnp.sum(jnp.square(grads), axis=tuple(range(1, grads.ndim)))
        return squares, squares

    def weighted_sum(self, weights: jax.Array, keep: jax.Array | None) -> jax.Array:
        """See :class:`Leaf`. A dot, not multiply-and-add: 54 ms against 101 ms on a CPU.

        Large ones with rows not to keep are added row by row: slow, seldom, and without a copy.
        """
        if keep is None or not self.large:
            rows = self._divided(None) if keep is None else kept(self._divided(None), keep)
            return jnp.tensordot(weights, rows, axes=1, precision=factors.EXACT)

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            row = self.grads[i].astype(jnp.float32)
            return total + weights[i] * jnp.where(keep[i], row, 0.0)

        zeros = jnp.zeros(self.grads.shape[1:], jnp.float32)
        return jax.lax.fori_loop(0, len(self.grads), add, zeros)

    def boxed_sum(self, bound: float, keep: jax.Array, scale: jax.Array | None) -> jax.Array:
        """See :class:`Leaf`."""
        return jnp.sum(_boxed(kept(self._divided(scale), keep), bound), axis=0)

    def _divided(self, scale: jax.Array | None) -> jax.Array:
        grads = self.grads.astype(jnp.float32)
        return grads if scale is None else grads / scale[None]


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """Per-example gradients of one layer, [m, g·p·q], arranged as ``site`` has them.

    They are flat because XLA copied arrays with a group of one among their axes, to lay them out
    anew: 8 % of a transformer's step on a CPU.
    """

    site: Any
    grads: jax.Array

    @property
    def large(self) -> bool:
        """See :class:`Arrays`."""
        return Arrays(self.grads).large

    def squares(self, scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """See :class:`Leaf`."""
        return Arrays(self.grads).squares(self._arranged(scale))

    def weighted_sum(self, weights: jax.Array, keep: jax.Array | None) -> jax.Array:
        """See :class:`Leaf`."""
        return self._to_leaf(Arrays(self.grads).weighted_sum(weights, keep))

    def boxed_sum(self, bound: float, keep: jax.Array, scale: jax.Array | None) -> jax.Array:
        """See :class:`Leaf`."""
        return self._to_leaf(Arrays(self.grads).boxed_sum(bound, keep, self._arranged(scale)))

    def _arranged(self, scale: jax.Array | None) -> jax.Array | None:
        return None if scale is None else _arranged(self.site, scale).reshape(-1)

    def _to_leaf(self, gradient: jax.Array) -> jax.Array:
        groups, _, p, q = self.site.sizes
        return self.site.view.to_leaf(self.site.to_view(gradient.reshape(groups, p, q)))


@dataclasses.dataclass(frozen=True, eq=False)
class Factors:
    """Factors of per-example gradients, never multiplied out for the whole batch."""

    uses: Sequence[Use]

    def squares(self, scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """See :class:`Leaf`."""
        if scale is None:
            return factors.square_norms(self.uses)
        site = factors.reference(self.uses)
        if self._one_dense_position():
            exact = factors.scaled_squares(self.uses[0], _arranged(site, 1.0 / scale))
        else:
            exact = self._scanned(lambda layer, keep: layer.squares(scale)[0]).reshape(-1)
            exact = exact[: self.uses[0].data.shape[0]]
        return exact, exact

    def weighted_sum(self, weights: jax.Array, keep: jax.Array | None) -> jax.Array:
        """See :class:`Leaf`."""
        totals = [use.weighted_sum(weights, keep) for use in self.uses]
        return sum(totals[1:], start=totals[0])

    def boxed_sum(self, bound: float, keep: jax.Array, scale: jax.Array | None) -> jax.Array:
        """See :class:`Leaf`; the gradients of one or a few examples at a time."""

        def few_at_a_time() -> jax.Array:
            boxed = self._scanned(lambda layer, keep: layer.boxed_sum(bound, keep, scale), keep)
            return boxed[0] if boxed.shape[0] == 1 else jnp.sum(boxed, axis=0)

        large = keep.shape[0] * self._entries() >= _LARGE
        if not (large and self._one_dense_position()):
            return few_at_a_time()
        return jax.lax.platform_dependent(
            # One by one the gradients stay in the cache: 12 to 17 times faster on a CPU. An
            # accelerator would start a kernel for every example.
            cpu=lambda: self._boxed_one_by_one(bound, keep, scale), default=few_at_a_time,
        )

    def _boxed_one_by_one(
        self, bound: float, keep: jax.Array, scale: jax.Array | None
    ) -> jax.Array:
        site = self.uses[0].site
        divisor = None if scale is None else _arranged(site, scale)

        def add(total: jax.Array, row: Any) -> tuple[jax.Array, None]:
            a, b, keep = row
            grad = jnp.where(keep, a[:, :, None] * b[:, None, :], 0.0)
            return total + _boxed(grad if divisor is None else grad / divisor, bound), None

        a, b = (x[:, :, 0] for x in self.uses[0].ab(site.key))
        groups, _, p, q = site.sizes
        total = jax.lax.scan(add, jnp.zeros((groups, p, q), jnp.float32), (a, b, keep))[0]
        return site.view.to_leaf(site.to_view(total))

    def layer(self) -> Layer:
        """The gradients multiplied out."""
        grads = factors.multiplied(self.uses)
        return Layer(factors.reference(self.uses), grads.reshape(grads.shape[0], -1))

    def _one_dense_position(self) -> bool:
        site = self.uses[0].site
        return len(self.uses) == 1 and site.sizes[1] == 1 and not isinstance(site, Lookup)

    def _entries(self) -> int:
        return math.prod(factors.reference(self.uses).view.leaf_shape)

    def _scanned(
        self, fn: Callable[[Layer, jax.Array], jax.Array], keep: jax.Array | None = None
    ) -> jax.Array:
        """``fn`` of the gradients of a few examples at a time, stacked [chunks, ...]."""
        batch = self.uses[0].data.shape[0]
        keep = jnp.ones(batch, bool) if keep is None else keep
        rows = max(1, min(batch, _CHUNK_BYTES // (4 * self._entries())))
        arrays = ([(use.data, use.cotangent) for use in self.uses], keep)

        def one(chunk: Any) -> jax.Array:
            pairs, keep = chunk
            uses = [Use(use.site, *pair) for use, pair in zip(self.uses, pairs, strict=True)]
            return fn(Factors(uses).layer(), keep)

        # Padding rows are not kept.
        return jax.lax.map(one, jax.tree.map(lambda a: _cut(a, rows), arrays))


def _boxed(gradients: jax.Array, bound: float) -> jax.Array:
    clipped = jnp.clip(gradients, -bound, bound)
    # 0 / 0, where a scale underflowed: NaN would tell who has a gradient there.
    return jnp.where(jnp.isnan(clipped), 0.0, clipped)


def _cut(array: jax.Array, rows: int) -> jax.Array:
    padded = jnp.pad(array, [(0, -array.shape[0] % rows)] + [(0, 0)] * (array.ndim - 1))
    return padded.reshape(-1, rows, *array.shape[1:])


def _arranged(site: Any, leaf: jax.Array) -> jax.Array:
    return site.of_view(site.view.of_leaf(leaf))
