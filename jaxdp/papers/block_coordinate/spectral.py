"""Keeping a layer Lipschitz: the published rescaling, and the projection that is sound inside a chain."""  # noqa: E501

import dataclasses

import jax
import jax.numpy as jnp

from jaxdp import arguments
from jaxdp.clipping.rounding import exact_einsum


def power_iteration(w: jax.Array, key: jax.Array, iterations: int) -> jax.Array:
    """An estimate of the largest singular value of w [d_out, d_in], never above it.

    x <- W^T W x from a fresh random x, then |W x|/|x| (Gouk et al. 2021, arXiv:1804.04368, Section
    4). It UNDER-estimates: no guarantee may rest on it.
    """
    x = jax.random.normal(key, (w.shape[1],), w.dtype)
    for _ in range(iterations):
        x = w.T @ (w @ x)
        x = x / jnp.maximum(jnp.linalg.norm(x), 1e-30)
    return jnp.linalg.norm(w @ x) / jnp.maximum(jnp.linalg.norm(x), 1e-30)


def clip_singular_values(w: jax.Array, radius: float) -> jax.Array:
    """The nearest matrix with all singular values at most ``radius``: the Euclidean projection.

    1-Lipschitz in the Frobenius norm, as every projection on a convex set. Costs an SVD.
    """
    left, values, right = jnp.linalg.svd(w, full_matrices=False)
    # Exact: units of fewer digits would round away the noise that a hidden chain counts on.
    return exact_einsum("ij,jk->ik", left * jnp.minimum(values, radius)[None, :], right)


@dataclasses.dataclass(frozen=True)
class Rescale:
    """W <- W min(1, radius/|W|_2), |W|_2 by power iteration (DP-SBCD, equation (2)).

    Free as post-processing of a released W. NOT 1-Lipschitz in the Frobenius norm (up to
    sqrt(d - 1)), so it has no place inside a hidden chain.

    Attributes:
        radius: the Lipschitz constant wanted of a layer.
        iterations: of the power algorithm.
    """

    radius: float
    iterations: int = 2

    def __post_init__(self) -> None:
        arguments.positive("radius", self.radius)
        arguments.integer("iterations", self.iterations, least=1)

    def __call__(self, w: jax.Array, key: jax.Array) -> jax.Array:
        """The rescaled weights, shaped like w [d_out, d_in]."""
        norm = power_iteration(w, key, self.iterations)
        return w * jnp.minimum(1.0, self.radius / jnp.maximum(norm, 1e-30))
