"""The three-splitting's closed forms, for ONE example, so that no example can touch another.

L(W, U, V) = 1/2 |V_L - y|^2 + gamma/2 sum_i |V_i - relu_i(U_i)|^2 + gamma/2 sum_i |U_i - W_i V_{i-1}|^2
(Zeng, Lau, Lin and Yao 2019, arXiv:1803.00225, "three-splitting"; DP-SBCD, equation (4); relu_L is
the identity). Each form minimises it in one variable with the others held.
"""  # noqa: E501

import functools

import jax
import jax.numpy as jnp

from jaxdp.clipping.rounding import MARGIN


def clip_to_ball(v: jax.Array, bound: float) -> jax.Array:
    """The nearest point of norm at most ``bound``; v is [d]. Non-finite vectors become zero.

    It enforces DP-SBCD's Assumption 3.1, which the smoothness of a block's loss rests on.
    """
    norm = jnp.linalg.norm(v)
    bound = bound * (1.0 - MARGIN)
    factor = jnp.where(norm > bound, bound / jnp.maximum(norm, bound), 1.0)
    return jnp.where(jnp.isfinite(norm), v * factor, 0.0)


def last_v(y: jax.Array, u: jax.Array, gamma: float) -> jax.Array:
    """V_L [d_L] for the squared loss: (y + gamma U_L)/(1 + gamma) (DP-SBCD, equation (5))."""
    return (y + gamma * u) / (1.0 + gamma)


def last_u(v: jax.Array, product: jax.Array) -> jax.Array:
    """U_L [d_L] of the linear last layer: half-way between V_L and W_L V_{L-1}."""
    return 0.5 * (v + product)


def ridge_factor(w: jax.Array) -> jax.Array:
    """Cholesky factor of I + W^T W or, where it is smaller, of I + W W^T; for ``hidden_v``."""
    gram = w @ w.T if w.shape[0] < w.shape[1] else w.T @ w
    return jnp.linalg.cholesky(gram + jnp.eye(gram.shape[0], dtype=w.dtype))


def hidden_v(w_next: jax.Array, factor: jax.Array, u: jax.Array, u_next: jax.Array) -> jax.Array:
    """V_i [d_i]: (I + W^T W)^-1 (relu(U_i) + W^T U_{i+1}), W = W_{i+1} (DP-SBCD, equation (5)).

    Args:
        w_next: W_{i+1} [d_{i+1}, d_i].
        factor: its ``ridge_factor``.
        u: U_i [d_i].
        u_next: U_{i+1} [d_{i+1}].
    """
    right = jax.nn.relu(u) + u_next @ w_next
    if w_next.shape[0] >= w_next.shape[1]:
        return _ridge_solve(factor, right)
    # Woodbury: a system of d_{i+1} unknowns instead of d_i.
    return right - _ridge_solve(factor, right @ w_next.T) @ w_next


def _ridge_solve(factor: jax.Array, right: jax.Array) -> jax.Array:
    """x with x (F F^T) = right. Rows, not columns: under ``vmap`` nothing is then transposed."""
    solve = functools.partial(jax.lax.linalg.triangular_solve, factor, lower=True)
    return solve(solve(right[None], transpose_a=True))[0]


def hidden_u(v: jax.Array, product: jax.Array, ratio: float = 1.0) -> jax.Array:
    """U_i [d_i]: argmin_u 1/2 (relu(u) - v)^2 + ratio/2 (u - product)^2 in every coordinate.

    The better of the minimisers of the two branches (Zeng et al. 2019, Lemma 13).

    Args:
        v: V_i [d_i].
        product: W_i V_{i-1} [d_i].
        ratio: weight of the second term over that of the first; 1 in DP-SBCD.
    """
    positive = jax.nn.relu((v + ratio * product) / (1.0 + ratio))
    negative = jnp.minimum(product, 0.0)
    return jnp.where(
        _cost(positive, v, product, ratio) <= _cost(negative, v, product, ratio),
        positive,
        negative,
    )


def _cost(u: jax.Array, v: jax.Array, product: jax.Array, ratio: float) -> jax.Array:
    return 0.5 * (jax.nn.relu(u) - v) ** 2 + 0.5 * ratio * (u - product) ** 2


def clipped_residual(
    residual: jax.Array, v: jax.Array, l2_clip_norm: jax.Array | float
) -> jax.Array:
    """The residual [d_i], shortened so that the gradient ``outer(residual, v)`` has norm <= C.

    The gradient of a block's loss for one example is an outer product, whose norm is the product of
    the norms: no per-example gradient is ever formed. Clipping makes the block's loss a Huber loss:
    convex and gamma |v|^2-smooth still (docs/hidden_state.md). A non-finite example gives zero.
    """
    norm = jnp.linalg.norm(residual) * jnp.linalg.norm(v)
    bound = l2_clip_norm * (1.0 - MARGIN)
    factor = jnp.where(norm > bound, bound / jnp.maximum(norm, bound), 1.0)
    return jnp.where(jnp.isfinite(norm), residual * factor, 0.0)
