"""From per-example gradients to their clipped sum: the arithmetic that every engine shares."""

import jax
import jax.numpy as jnp

from jaxdp.clipping.rules import Rule
from jaxdp.types import PyTree


def square_norms(grads: PyTree) -> PyTree:
    """Per-leaf squared norms, float32 [m], of per-example gradients with leaves [m, ...]."""
    return jax.tree.map(
        lambda leaf: jnp.sum(jnp.square(_float32(leaf)), axis=tuple(range(1, leaf.ndim))), grads
    )


def clipped_sum(rule: Rule, grads: PyTree, mask: jax.Array) -> tuple[PyTree, jax.Array, jax.Array]:
    """Sums the rule's clipped gradients over the examples that the mask [m] lets through.

    An example whose gradient has a non-finite entry, or a norm beyond float32, contributes zero:
    a decision about that record alone, so the sensitivity is untouched.

    Returns:
        The sum, float32 and shaped like the parameters; norms [m]; clipped [m] (bool).
    """
    squares = square_norms(grads)
    norms = jnp.sqrt(sum(jax.tree.leaves(squares)))
    keep = mask & jnp.isfinite(norms)
    factors = rule.factors(jax.tree.map(lambda s: jnp.where(keep, s, 0.0), squares))
    total = jax.tree.map(lambda leaf, factor: _weighted_sum(leaf, factor, keep), grads, factors)
    shortened = jnp.stack([factor < 1.0 for factor in jax.tree.leaves(factors)]).any(axis=0)
    return total, norms, shortened & keep


def _weighted_sum(leaf: jax.Array, factor: jax.Array, keep: jax.Array) -> jax.Array:
    # `where` and not a zero weight: 0 * nan is nan. A dot, not multiply-and-add: on a CPU it took
    # 54 ms against 101 ms for 512 examples of the MNIST CNN.
    column = keep.reshape(keep.shape + (1,) * (leaf.ndim - 1))
    rows = jnp.where(column, _float32(leaf), 0.0)
    return jnp.tensordot(factor, rows, axes=1, precision=jax.lax.Precision.HIGHEST)


def _float32(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.float32)
