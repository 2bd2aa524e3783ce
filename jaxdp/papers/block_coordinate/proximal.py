"""Steps that follow a block's gradient: a proximal operator, or the published rescaling."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxdp import arguments
from jaxdp.clipping.rounding import exact_einsum


def clip_singular_values(w: jax.Array, radius: float) -> jax.Array:
    """The nearest matrix with all singular values at most ``radius``: the Euclidean projection.

    1-Lipschitz in the Frobenius norm, as every projection on a convex set. Costs an SVD.
    """
    left, values, right = jnp.linalg.svd(w, full_matrices=False)
    # Exact: units of fewer digits would round away the noise that a hidden chain counts on.
    return exact_einsum("ij,jk->ik", left * jnp.minimum(values, radius)[None, :], right)


@dataclasses.dataclass(frozen=True)
class Proximal:
    """P(W) = project(soft(W) / (1 + eta weight_decay)), each part where it is asked for.

    Every part is 1-Lipschitz in the Frobenius norm, and so is the whole; with weight decay it is a
    contraction (DP-SBCD, Lemma 4.2).

    Attributes:
        weight_decay: lambda of r(W) = lambda/2 |W|_F^2.
        sparsity: lambda of r(W) = lambda |W|_1: soft thresholding at eta lambda.
        spectral_radius: rho of the ball of matrices with |W|_2 <= rho; None for no projection.
    """

    weight_decay: float = 0.0
    sparsity: float = 0.0
    spectral_radius: float | None = None

    def __post_init__(self) -> None:
        arguments.non_negative("weight_decay", self.weight_decay)
        arguments.non_negative("sparsity", self.sparsity)
        if self.spectral_radius is not None:
            arguments.positive("spectral_radius", self.spectral_radius)

    def __call__(self, w: jax.Array, step_size: float) -> jax.Array:
        """The proximal step of w [d_out, d_in]."""
        if self.sparsity:
            threshold = step_size * self.sparsity
            w = jnp.sign(w) * jax.nn.relu(jnp.abs(w) - threshold)
        if self.weight_decay:
            w = w / (1.0 + step_size * self.weight_decay)
        if self.spectral_radius is not None:
            w = clip_singular_values(w, self.spectral_radius)
        return w

    def certain_decay(self, step_size: float) -> float:
        """The weight decay that an accountant may count on, at most ``weight_decay``.

        1/(1 + eta lambda) is a float32 number in the program: its rounding may contract by less,
        and not at all where eta lambda is below 6e-8.
        """
        wanted = step_size * self.weight_decay
        return min(self.weight_decay, max(0.0, wanted - 2.0**-22 * (1 + wanted)) / step_size)

    def diameter(self, shape: tuple[int, int]) -> float | None:
        """Largest Frobenius distance of two results of that shape; None when unbounded."""
        if self.spectral_radius is None:
            return None
        # A float32 projection may land a little outside the ball.
        return 2 * self.spectral_radius * math.sqrt(min(shape)) * (1 + 1e-4)


NO_PROXIMAL = Proximal()


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
