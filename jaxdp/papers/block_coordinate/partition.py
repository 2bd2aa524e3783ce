"""A secret, fixed partition of the records into batches of one size."""

import jax
import jax.numpy as jnp
import numpy as np

Batches = tuple[jax.Array, jax.Array, jax.Array]


def secret_partition(
    data: tuple[jax.Array, jax.Array], batch_size: int, rng: np.random.Generator
) -> Batches:
    """Puts every record into one batch, uniformly at random and without looking at it.

    Args:
        data: (x [N, d_0], y [N, d_L]).
        batch_size: b.
        rng: where the permutation comes from; secret.

    Returns:
        x [l, b, d_0], y [l, b, d_L], mask [l, b]; the last batch is padded with rows of zeros.
    """
    records = data[0].shape[0]
    order = rng.permutation(records)
    batches = -(-records // batch_size)
    padding = batches * batch_size - records
    order = np.concatenate([order, np.zeros(padding, order.dtype)]).reshape(batches, batch_size)
    mask = (np.arange(batches * batch_size) < records).reshape(batches, batch_size)
    x, y = (jnp.where(mask[:, :, None], part[order], 0.0) for part in data)
    return x, y, jnp.asarray(mask)
