"""The proximal step of a block: weight decay, soft thresholding, the spectral ball, or nothing."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxdp import arguments
from jaxdp.papers.block_coordinate.spectral import clip_singular_values


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
