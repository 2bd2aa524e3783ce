"""One sweep over the blocks on one batch, last block first: the step of R1 and of Algorithm 2."""

import jax
import jax.numpy as jnp

from jaxdp.clipping import rounding
from jaxdp.clipping.ghost.leaves import outer_sum
from jaxdp.noise.normals import add_normals
from jaxdp.papers.block_coordinate import forms
from jaxdp.papers.block_coordinate.network import Network, Weights
from jaxdp.papers.block_coordinate.proximal import Proximal, Rescale


def sweep(
    network: Network,
    proximal: Proximal,
    rescale: Rescale | None,
    step_size: float,
    divisor: float,
    weights: Weights,
    x: jax.Array,
    y: jax.Array,
    mask: jax.Array,
    l2_clip_norms: jax.Array,
    noise_stds: jax.Array,
    key: jax.Array,
) -> Weights:
    """Updates every block once (DP-SBCD, Algorithm 2, with clipping and noise on the sum).

    The splitting variables of a record come from a forward pass of the weights before the sweep,
    and from blocks updated earlier in it; every one of those is a noisy release.

    Args:
        network: the network.
        proximal: P.
        rescale: the published normalisation after each update; None for none.
        step_size: eta.
        divisor: the public expected batch size.
        weights: W_1 ... W_L.
        x: float32 [m, d_0], rows of the batch.
        y: float32 [m, d_L], wanted outputs.
        mask: bool [m]; False rows are padding and contribute zero.
        l2_clip_norms: float32 [L], bound on one record's gradient of each block; may be infinite.
        noise_stds: float32 [L], noise on each block's SUM of gradients.
        key: secret, used once.

    Returns:
        The new weights, each of them a release.
    """
    new = list(weights)
    inputs, products = jax.vmap(lambda row: network.forward(weights, row))(x)
    noise_key, power_key = jax.random.split(key)
    factor, u = None, None
    for i in reversed(range(network.blocks)):
        u = _targets(network, i, tuple(new), factor, products[i], y, u)
        residuals = network.residual(i, products[i], u, y)
        total = clipped_sum(residuals, inputs[i], mask, l2_clip_norms[i])
        words = jax.random.key_data(jax.random.fold_in(noise_key, i))
        noisy = add_normals(total, noise_stds[i], words)
        new[i] = proximal(new[i] - step_size / divisor * noisy, step_size)
        if rescale is not None:
            new[i] = rescale(new[i], jax.random.fold_in(power_key, i))
        factor = forms.ridge_factor(new[i]) if i > 0 else None
    return tuple(new)


def sums_given(
    network: Network, old: Weights, new: Weights, x: jax.Array, y: jax.Array, mask: jax.Array,
    l2_clip_norms: jax.Array,
) -> list[jax.Array]:  # fmt: skip
    """The clipped sum of every block in the sweep that went from ``old`` to ``new``, for an audit.

    Args:
        network: the network.
        old: the weights before the sweep, released.
        new: the weights after it, released; the blocks above one are read for its sum.
        x: float32 [m, d_0].
        y: float32 [m, d_L].
        mask: bool [m].
        l2_clip_norms: float32 [L].
    """
    inputs, products = jax.vmap(lambda row: network.forward(old, row))(x)
    factor, u, found = None, None, []
    for i in reversed(range(network.blocks)):
        mixed = (*old[: i + 1], *new[i + 1 :])
        u = _targets(network, i, mixed, factor, products[i], y, u)
        residuals = network.residual(i, products[i], u, y)
        found.append(clipped_sum(residuals, inputs[i], mask, l2_clip_norms[i]))
        factor = forms.ridge_factor(new[i]) if i > 0 else None
    return found[::-1]


def _targets(
    network: Network, block: int, weights: Weights, factor: jax.Array | None,
    products: jax.Array, y: jax.Array, u_next: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """U_i [m, d_i], record by record."""
    if u_next is None:
        last = jax.vmap(lambda p, y: network.target(block, weights, None, p, y, None))
        return last(products, y)
    hidden = jax.vmap(lambda p, y, u: network.target(block, weights, factor, p, y, u))
    return hidden(products, y, u_next)


def clipped_sum(
    residuals: jax.Array, v: jax.Array, mask: jax.Array, l2_clip_norm: jax.Array,
    convex: bool = False,
) -> jax.Array:  # fmt: skip
    """The sum [d_i, d_{i-1}] of clipped gradients r v^T over the rows that the mask lets through.

    Formal guarantee: one row more or less changes it by at most ``l2_clip_norm`` in the Frobenius
    norm, and by ``rounding.error_of_sum`` of it through the rounding of the others
    (docs/proofs/clip_bound.md, Theorem 1). A non-finite row contributes zero.

    Args:
        residuals: of the block's loss with respect to its products, [m, d_i].
        v: [m, d_{i-1}]; of a convolution [m, t, d_{i-1}], and d_i is t times channels.
        mask: bool [m].
        l2_clip_norm: C.
        convex: clip so that the clipped loss stays convex, as a hidden chain needs. Without
            positions there is no other way of clipping.
    """
    # Norm and sum must see the same numbers.
    residuals, v = rounding.materialized((residuals, v))
    if v.ndim == 3:
        return _over_positions(residuals, v, mask, l2_clip_norm, convex)
    clip = jax.vmap(forms.clipped_residual, (0, 0, None))
    short = jnp.where(mask[:, None], clip(residuals, v, l2_clip_norm), 0.0)
    size = rounding.even_size(v.shape[0], rounding.ROWS)
    return outer_sum((short[:, None], v[:, None], None), size)[0]


def _over_positions(
    residuals: jax.Array, v: jax.Array, mask: jax.Array, l2_clip_norm: jax.Array, convex: bool
) -> jax.Array:
    """The clipped sum of a convolution: every row's gradient is formed, and then added once."""
    residuals = residuals.reshape(*v.shape[:2], -1)
    if convex:
        residuals = jax.vmap(forms.clipped_residual, (0, 0, None))(residuals, v, l2_clip_norm)
    # Written: what follows reads the very numbers that are added.
    grads = rounding.materialized(rounding.exact_einsum("mtp,mtq->mpq", residuals, v))
    norms = jnp.sqrt(rounding.square_norms(grads.reshape(grads.shape[0], -1))[1])
    if not convex:
        bound = l2_clip_norm * (1.0 - rounding.MARGIN)
        factors = jnp.where(norms > bound, bound / jnp.maximum(norms, bound), 1.0)
        grads = grads * factors[:, None, None]
    kept = mask & jnp.isfinite(norms)
    grads = jnp.where(kept[:, None, None], grads, 0.0)
    blocks = rounding.into_blocks(grads, rounding.even_size(grads.shape[0], rounding.ROWS))
    return rounding.pairwise_sum(jnp.sum(blocks, axis=1))
