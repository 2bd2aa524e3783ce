"""Sums that are NaN where processes are at different tickets."""

import jax
import jax.numpy as jnp

from jaxdp.types import PyTree, Summed


def if_alike(summed: Summed, met: jax.Array | None) -> Summed:
    """The sum; NaN where processes are at different tickets.

    One of them may have lost a step, by an error that its own loop went on after. It would add
    other noise to one sum, or one noise to sums of other draws, which subtracts away.

    Args:
        summed: the sum.
        met: uint32 [devices, 2], see ``_shards.met``.
    """
    if met is None:
        return summed
    alike = jnp.all(jnp.max(met, axis=0) == jnp.min(met, axis=0))

    def kept(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.where(alike, x, jnp.nan), tree)

    l2 = kept(jnp.asarray(summed.l2, jnp.float32))
    votes, leaked = kept(summed.votes), kept(summed.leaked)
    return Summed(kept(summed.value), l2, summed.unscale, votes, leaked=leaked)
