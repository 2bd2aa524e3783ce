"""The three-splitting's closed forms, for ONE example, so that no example can touch another.

L(W, U, V) = 1/2 |V_L - y|^2 + gamma/2 sum_i |V_i - relu_i(U_i)|^2 + gamma/2 sum_i |U_i - W_i V_{i-1}|^2
(Zeng, Lau, Lin and Yao 2019, arXiv:1803.00225, "three-splitting"; DP-SBCD, equation (4); relu_L is
the identity). Each form minimises it in one variable with the others fixed.
"""  # noqa: E501

import functools

import jax
import jax.numpy as jnp

from jaxdp.clipping.rounding import MARGIN, exact_einsum

# Of the last block's U under cross-entropy: at gamma = 1 an error of 3^-12.
_STEPS = 12


def scaled_norm(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The norm of v times a power of two, and that power.

    Squares of entries below 1e-19 or above 1e19 leave float32: a record of tiny inputs and huge
    targets would have a gradient of norm 0 to clip, one far from the others none at all.
    """
    largest = jnp.max(jnp.abs(v))
    small, large = largest < 2.0**-40, largest > 2.0**40
    scale = jnp.where(small, 2.0**86, jnp.where(large, 2.0**-86, 1.0)).astype(v.dtype)
    return jnp.linalg.norm(v * scale), scale


def length(v: jax.Array) -> jax.Array:
    """A bound on the spectral norm of a block's input: |v| of v [d], |V'V|_F^(1/2) of V [t, d].

    The fourth root of the sum of the singular values' fourth powers: at least the largest of them,
    at most the Frobenius norm. float32 errs by t sqrt(d) roundings at most, within the margin.
    """
    norm, scale = scaled_norm(v)
    whole = norm / scale
    if v.ndim == 1:
        return whole
    # Divided first: fourth powers would under- and overflow where squares do not.
    unit = v * scale / jnp.maximum(norm, 1e-30)
    return whole * jnp.sqrt(jnp.linalg.norm(exact_einsum("td,te->de", unit, unit)))


def clip_to_ball(v: jax.Array, bound: float) -> jax.Array:
    """The input, shortened to ``length`` at most ``bound``; non-finite ones become zero.

    It enforces DP-SBCD's Assumption 3.1, which the smoothness of a block's loss rests on.
    """
    norm = length(v)
    bound = bound * (1.0 - MARGIN)
    factor = jnp.where(norm > bound, bound / jnp.maximum(norm, bound), 1.0)
    return jnp.where(jnp.isfinite(norm), v * factor, 0.0)


def last_v(y: jax.Array, u: jax.Array, gamma: float) -> jax.Array:
    """V_L [d_L] for the squared loss: (y + gamma U_L)/(1 + gamma) (DP-SBCD, equation (5))."""
    return (y + gamma * u) / (1.0 + gamma)


def last_u(v: jax.Array, product: jax.Array) -> jax.Array:
    """U_L [d_L] of the linear last layer: half-way between V_L and W_L V_{L-1}."""
    return 0.5 * (v + product)


def one_hot(y: jax.Array) -> jax.Array:
    """1 at the largest entry of y [..., k], 0 elsewhere: within sqrt(2) of any softmax."""
    return jax.nn.one_hot(jnp.argmax(y, axis=-1), y.shape[-1], dtype=y.dtype)


def softmax_u(y: jax.Array, product: jax.Array, gamma: float) -> jax.Array:
    """U_L [d_L] for cross-entropy: argmin_u -log softmax(u)_y + gamma/2 |u - product|^2, nearly.

    A fixed number of gradient steps of 1/(gamma + 1/2), each of which divides the error by
    1 + 2 gamma at least. It has no closed form, and needs none: any function of one record and of
    released weights will do.

    Args:
        y: one-hot [d_L].
        product: W_L V_{L-1} [d_L].
        gamma: the splitting's weight.
    """

    def step(u: jax.Array, _: None) -> tuple[jax.Array, None]:
        slope = jax.nn.softmax(u) - y + gamma * (u - product)
        return u - slope / (gamma + 0.5), None

    return jax.lax.scan(step, product, length=_STEPS)[0]


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
    convex and gamma |v|^2-smooth still: docs/proofs/hidden_state.md. A non-finite example gives 0.

    Of a convolution the residual is [t, channels], the input [t, d], and the gradient the product
    of two matrices, of norm at most |residual|_F times the ``length`` of the input. The residuals
    of all positions are shortened together, which again gives a Huber loss, of their norm.
    """
    norm, scale = scaled_norm(residual)
    norm = norm * length(v)
    bound = l2_clip_norm * scale * (1.0 - MARGIN)
    factor = jnp.where(norm > bound, bound / jnp.maximum(norm, bound), 1.0)
    return jnp.where(jnp.isfinite(norm), residual * factor, 0.0)
