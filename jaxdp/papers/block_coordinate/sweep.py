"""One sweep over the blocks on one batch, last block first: the step of R1 and of Algorithm 2."""

import jax
import jax.numpy as jnp

from jaxdp.clipping import rounding
from jaxdp.clipping.ghost.factors import outer_sum
from jaxdp.normals import noised
from jaxdp.papers.block_coordinate import forms
from jaxdp.papers.block_coordinate.network import Network, Weights
from jaxdp.papers.block_coordinate.proximal import Proximal
from jaxdp.papers.block_coordinate.spectral import Rescale


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
        residuals = network.gamma * (products[i] - u)
        total = clipped_sum(residuals, inputs[i], mask, l2_clip_norms[i])
        words = jax.random.key_data(jax.random.fold_in(noise_key, i))
        noisy = noised(total, noise_stds[i], words)
        new[i] = proximal(new[i] - step_size / divisor * noisy, step_size)
        if rescale is not None:
            new[i] = rescale(new[i], jax.random.fold_in(power_key, i))
        factor = forms.ridge_factor(new[i]) if i > 0 else None
    return tuple(new)


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
    residuals: jax.Array, v: jax.Array, mask: jax.Array, l2_clip_norm: jax.Array
) -> jax.Array:
    """The sum [d_i, d_{i-1}] of clipped gradients r v^T over the rows that the mask lets through.

    Formal guarantee: one row more or less changes it by at most ``l2_clip_norm`` in the Frobenius
    norm, and by ``rounding.of_sum`` of it through the rounding of the others
    (docs/clip_bound.md). A non-finite row contributes zero.

    Args:
        residuals: gamma (W v - u), [m, d_i].
        v: [m, d_{i-1}].
        mask: bool [m].
        l2_clip_norm: C.
    """
    # Norm and sum must see the same numbers.
    residuals, v = rounding.written((residuals, v))
    clip = jax.vmap(forms.clipped_residual, (0, 0, None))
    short = jnp.where(mask[:, None], clip(residuals, v, l2_clip_norm), 0.0)
    size = rounding.even(v.shape[0], rounding.ROWS)
    return outer_sum([(short[:, None], v[:, None])], size)[0]
