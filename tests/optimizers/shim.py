"""Explicit per-example gradients, scaled, clipped and summed: the oracle of the engine's path."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxdp.types import Summed


@dataclasses.dataclass(frozen=True)
class Box:
    bound: float = 1.0

    def l2(self, params):
        return self.bound * math.sqrt(sum(leaf.size for leaf in jax.tree.leaves(params)))

    def factors(self, square_norms):
        raise NotImplementedError


def gradient(rule):
    """A stand-in for ``mechanism.clipped_grad``."""

    def clipped_grad(loss_fn):
        def over(params, batch, mask, *, scale=None):
            grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
            if scale is not None:
                grads = jax.tree.map(lambda g, s: g / s[None], grads, scale)
            if isinstance(rule, Box):
                grads = jax.tree.map(lambda g: jnp.clip(g, -rule.bound, rule.bound), grads)
                l2 = rule.l2(params)
            else:
                l2 = rule.l2(params) if callable(rule.l2) else rule.l2
                norms = jnp.sqrt(sum(jnp.sum(jnp.square(g), axis=tuple(range(1, g.ndim)))
                                     for g in jax.tree.leaves(grads)))
                factor = jnp.minimum(1.0, l2 / jnp.maximum(norms, 1e-30))
                grads = jax.tree.map(
                    lambda g: g * factor.reshape((-1,) + (1,) * (g.ndim - 1)), grads)
            keep = mask.astype(jnp.float32)
            total = jax.tree.map(lambda g: jnp.tensordot(keep, g, axes=1), grads)
            return Summed(total, l2, scale), None

        return over

    return clipped_grad
