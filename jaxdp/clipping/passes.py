"""A clipped sum over several physical batches or microbatches, added with compensation."""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxdp.clipping import reduce, rounding
from jaxdp.types import ClipInfo, PyTree

if TYPE_CHECKING:
    from jaxdp.clipping.engine import ClippedGrad

# A running sum, what rounding took from it, and the votes.
Totals = tuple[PyTree, PyTree, jax.Array]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def add_pass(
    grad_fn: "ClippedGrad",
    gathered: bool,
    told: bool,
    totals: Totals,
    params: PyTree,
    data: PyTree,
    indices: jax.Array,
    mask: jax.Array,
    rng: jax.Array | None,
    scale: PyTree,
    bound: Any,
) -> tuple[Totals, ClipInfo]:
    """The totals with one physical batch of a draw added, compiled once for all.

    The ``ClipInfo`` holds its plan alone unless ``told``.
    """
    clipped, info = grad_fn.one_pass(
        params, data, indices, mask, rng, gathered=gathered, scale=scale, bound=bound
    )
    if not told:
        info = jax.tree.map(lambda leaf: None, info)
    (total, lost, votes), info = accumulated(totals, (clipped, info))
    return (_held(grad_fn, total), _held(grad_fn, lost), votes), info


def accumulated(totals: Totals, result: tuple[reduce.Clipped, ClipInfo]) -> tuple[Totals, ClipInfo]:
    """The totals and one more result; compensated, so rounding does not grow with their number."""
    (total, lost, votes), (clipped, info) = totals, result
    return (*rounding.added(total, lost, clipped.total), votes + clipped.votes), info


def by_microbatches(
    grad_fn: "ClippedGrad",
    params: PyTree,
    rows: PyTree,
    mask: jax.Array,
    scale: PyTree,
    bound: Any,
) -> tuple[reduce.Clipped, ClipInfo]:
    """The clipped sum over rows [m, ...] of one device, a microbatch at a time."""
    size, chunk = mask.shape[0], grad_fn.rows_at_once(mask.shape[0])
    one = functools.partial(grad_fn.at_once, params, scale=scale, bound=bound)
    if chunk == size:
        return one(rows, mask)
    # The last one is filled up with a record that the mask leaves out: a loss may know no zeros.
    if missing := -size % chunk:
        rows = jax.tree.map(lambda leaf: jnp.concatenate([leaf, *[leaf[:1]] * missing]), rows)
        mask = jnp.concatenate([mask, jnp.zeros(missing, bool)])
    chunks = jax.tree.map(lambda leaf: leaf.reshape(-1, chunk, *leaf.shape[1:]), (rows, mask))
    totals, infos = jax.lax.scan(
        lambda totals, piece: accumulated(totals, one(*piece)), nothing(grad_fn, params), chunks
    )
    info = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:size], infos)
    total, lost, votes = totals
    return reduce.Clipped(compensated(total, lost), info.norms, info.clipped, votes), info


@functools.partial(jax.jit, donate_argnums=0)
def compensated(total: PyTree, lost: PyTree) -> PyTree:
    """The running sum with the compensation applied, in its own memory."""
    return rounding.compensated(total, lost)


@functools.partial(jax.jit, static_argnums=0)
def nothing(grad_fn: "ClippedGrad", params: PyTree) -> Totals:
    """The totals before the first physical batch."""
    trained = grad_fn.trained(params)
    start, again = (
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained) for _ in range(2)
    )
    return _held(grad_fn, start), _held(grad_fn, again), jnp.zeros([], jnp.float32)


def _held(grad_fn: "ClippedGrad", total: PyTree) -> PyTree:
    """The sum, cut as the parameters are."""
    if grad_fn.placement is None:
        return total
    leaves, structure = jax.tree.flatten(total, is_leaf=lambda leaf: leaf is None)
    return jax.tree.unflatten(structure, grad_fn.placement.held(leaves))
