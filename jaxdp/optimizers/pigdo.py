"""PIGDO: gradients preconditioned before they are clipped: PIAdam, PIRMSprop, PIAdagrad.

"Differentially Private Deep Learning with Iterative Gradient Descent Optimization" (PIGDO), Table 1
and Algorithm 2. Its released code privatises first and then runs Adam: ``dp_adam``.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from jaxdp import arguments
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers.adaptive import AdaptiveMoments, AdaptiveState, adaptive_algorithm
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.types import PyTree


@dataclasses.dataclass(frozen=True)
class Preconditioner:
    """The public diagonal by which the next per-example gradients are divided.

    D_i = √s_i + a over its root mean square, held within [1/spread, spread]: a function of the
    moments of **earlier noisy** gradients. Only the shape counts, for were D left to shrink with
    the moments, clipping would bind ever harder and shrink them further.

    Attributes:
        moments: the moments, which give √s_i + a.
        spread: the largest factor by which a coordinate differs from the root mean square.
    """

    moments: AdaptiveMoments
    spread: float = 10.0

    def __post_init__(self) -> None:
        if arguments.positive("spread", self.spread) < 1:
            raise ValueError(f"spread must be at least 1, got {self.spread!r}")

    def __call__(self, state: AdaptiveState) -> PyTree:
        """The diagonal, shaped like the parameters; all ones before the first update."""
        # Shape alone: over the root mean square, and within the spread, which bounds how unevenly
        # a gradient's coordinates are clipped.
        roots = self.moments.denominator(state)
        leaves = jax.tree.leaves(roots)
        size = sum(leaf.size for leaf in leaves)
        mean = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in leaves) / size)
        shape = jax.tree.map(
            lambda r: jnp.clip(r / jnp.maximum(mean, 1e-30), 1 / self.spread, self.spread), roots
        )
        # Before the first noisy gradient nothing is known of the shape.
        return jax.tree.map(lambda s: jnp.where(state.step > 0, s, jnp.ones_like(s)), shape)


def piadam(
    mechanism: Mechanism,
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    noise_floor: float = 0.1,
    spread: float = 10.0,
) -> Algorithm:
    """PIAdam, repaired: gradients are divided by D, a function of noisy outputs, then clipped.

    Formal guarantee: D is post-processing, so each step is the mechanism's event. (The paper's
    moments are un-noised and shared, so that one record moves every example's contribution.)

    Args:
        mechanism: with flat clipping, whose norm is that of the preconditioned gradient.
        learning_rate: a number or an optax schedule.
        b1: decay of the first moment, of noisy gradients.
        b2: decay of the second.
        eps: a.
        noise_floor: see ``jaxdp.optimizers.scale_by_dp_adam_bc``.
        spread: see ``Preconditioner``.
    """
    moments = AdaptiveMoments(b2, eps, noise_floor, b1)
    return adaptive_algorithm(mechanism, learning_rate, moments, Preconditioner(moments, spread))


def pirmsprop(
    mechanism: Mechanism,
    learning_rate: optax.ScalarOrSchedule,
    decay: float = 0.9,
    eps: float = 1e-8,
    noise_floor: float = 0.1,
    spread: float = 10.0,
) -> Algorithm:
    """PIRMSprop, repaired; arguments as ``piadam`` and ``decay`` of RMSprop.

    The paper does not state the decay: 0.9 is RMSprop's usual one. As published it is Adam's b2.
    """
    moments = AdaptiveMoments(decay, eps, noise_floor)
    return adaptive_algorithm(mechanism, learning_rate, moments, Preconditioner(moments, spread))


def piadagrad(
    mechanism: Mechanism,
    learning_rate: optax.ScalarOrSchedule,
    eps: float = 1e-8,
    noise_floor: float = 0.1,
    spread: float = 10.0,
) -> Algorithm:
    """PIAdagrad, repaired; arguments as ``piadam``."""
    moments = AdaptiveMoments(None, eps, noise_floor)
    return adaptive_algorithm(mechanism, learning_rate, moments, Preconditioner(moments, spread))
