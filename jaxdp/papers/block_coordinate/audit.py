"""Whole runs of hidden-state block coordinate descent, whose last iterates alone are seen."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxdp.auditing.worlds import Run
from jaxdp.papers.block_coordinate.hidden import HiddenBlocks, train_block
from jaxdp.types import PyTree


def hidden_run(
    algorithm: HiddenBlocks,
    data: tuple[jax.Array, jax.Array],
    other: tuple[jax.Array, jax.Array],
    *,
    partition: bool = True,
    score: Callable[[list[jax.Array]], jax.Array] | None = None,
) -> Run:
    """One whole run through the compiled loop of training, for ``jaxdp.auditing.two_worlds``.

    The worlds are neighbours under replace-one: the last record, or ``other`` in its place. What is
    handed on is what such a run releases, the last iterate of every block in every sweep.

    Args:
        algorithm: R2 or R3.
        data: (x [N, d_0], y [N, d_L]), N the declared size.
        other: (x [d_0], y [d_L]), what replaces the last record where ``member`` is False.
        partition: draw a secret partition anew for each run; False keeps the records' order, for
            an algorithm that is charged for the worst batch whatever the partition.
        score: from the released blocks, one [d_i, d_{i-1}] each, to features [k]; None hands on
            every number.

    Raises:
        ValueError: the records are not as many as declared or do not fill their batches; a fixed
            order for an algorithm that is charged for the average over the partition.
    """
    x, y = (jnp.asarray(part, jnp.float32) for part in data)
    records, size = algorithm.dataset_size, algorithm.batch_size
    if x.shape[0] != records or y.shape[0] != records or records % size:
        raise ValueError(
            f"data must hold the declared {records} records in whole batches of {size}, got "
            f"{x.shape[0]} and {y.shape[0]}"
        )
    if algorithm.average and not partition:
        raise ValueError(
            "partition must be True for an algorithm charged for its average, got False"
        )
    handed_on = score or (lambda blocks: jnp.concatenate([jnp.ravel(w) for w in blocks]))
    start = algorithm.network.init(jax.random.key(0))
    if algorithm.direct:
        start = (jnp.zeros_like(start[0]),)

    def run(words: jax.Array, member: jax.Array) -> jax.Array:
        noise, draw = jax.random.split(jax.random.wrap_key_data(words))
        order = jax.random.permutation(draw, records) if partition else jnp.arange(records)

        def batches(part: jax.Array, replaced: jax.Array) -> PyTree:
            rows = part.at[-1].set(jnp.where(member, part[-1], jnp.asarray(replaced, part.dtype)))
            return rows[order].reshape(-1, size, part.shape[1])

        full = jnp.ones((records // size, size), bool)
        cut = batches(x, other[0]), batches(y, other[1]), full
        weights, released = start, []
        for sweep in range(algorithm.sweeps):
            for block in reversed(range(algorithm.network.blocks)):
                key = jax.random.fold_in(jax.random.fold_in(noise, sweep), block)
                weights = train_block(algorithm, block, weights, cut, key, sweep, None)
                released.append(weights[block])
        return handed_on(released)

    return run
