"""Planted bugs that two worlds do not tell apart in 3,000 runs, and residuals do. Wrong on purpose.

`python -m benchmarks.auditing_residuals` and the tests ask the residual audit to flag every one.
"""

import jax
import jax.numpy as jnp

import jaxdp
from benchmarks.planted import (
    FULL,
    OPPOSED,
    STEPS,
    Bug,
    clipped_after_the_sum,
    flat,
    linked,
    masked,
    shorten,
    summed_by,
    with_gradient,
    with_noise,
)
from jaxdp.types import Summed


def bare_steps(updates, noisy, key, mechanism):
    """In 2 % of the steps nothing is added."""
    bare = jax.random.bernoulli(_other_key(key), 0.02)
    mean = jax.tree.map(lambda v: v / mechanism.batch_size, updates.value)
    return jax.tree.map(lambda v, n: jnp.where(bare, v, n), mean, noisy)


def uniform_noise(updates, noisy, key, mechanism):
    """Noise of the same variance, whose largest value is the root of three."""
    return _noised(updates, mechanism, _uniform, key)


def float16_noise(updates, noisy, key, mechanism):
    return _noised(updates, mechanism, _half, key)


def _other_key(key):
    return jax.random.fold_in(jax.random.wrap_key_data(key.words[0]), 1_000)


def _uniform(key, shape):
    return jax.random.uniform(key, shape, minval=-(3**0.5), maxval=3**0.5)


def _half(key, shape):
    return jax.random.normal(key, shape, jnp.float16).astype(jnp.float32)


def _noised(updates, mechanism, draw, key):
    leaves, structure = jax.tree.flatten(updates.value)
    keys = jax.random.split(_other_key(key), len(leaves))
    std = mechanism.noise_multiplier * updates.l2
    noisy = [v + std * draw(k, v.shape) for v, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, [v / mechanism.batch_size for v in noisy])


def weakly_decayed(loss_fn, decay=0.05):
    """A weight decay for each record drawn, by its gradient's norm, added to the sum un-noised."""
    inner = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))

    def summed(params, batch, mask):
        total, info = inner.with_info(params, batch, mask)
        size = jnp.sum(jnp.where(mask, jnp.minimum(info.norms, 10.0), 0.0))
        value = jax.tree.map(lambda v, p: v + decay * size * p, total.value, params)
        return Summed(value, total.l2)

    return linked(summed)


def clipped_late_half_the_time(grads, mask):
    """Batches of an even size are clipped after the sum, the others one by one."""
    each = jax.tree.map(lambda g: jnp.sum(g, 0), masked(shorten(grads, 1), mask))
    even = jnp.sum(mask) % 2 == 0
    return jax.tree.map(
        lambda late, right: jnp.where(even, late, right), clipped_after_the_sum(grads, mask), each
    )


SUBTLE = {
    "no noise in 2 % of the steps": Bug(lambda: with_noise(bare_steps), FULL),
    "uniform noise of the same variance": Bug(lambda: with_noise(uniform_noise), FULL),
    "weak weight decay that depends on data": Bug(lambda: with_gradient(weakly_decayed), FULL),
    "clipping after the sum in half of the batches": Bug(
        lambda: with_gradient(
            summed_by(clipped_late_half_the_time), flat(size=2, sampling="poisson")
        ),
        flat(size=2, sampling="poisson").total(STEPS),
        OPPOSED,
    ),
    "float16 noise": Bug(lambda: with_noise(float16_noise), FULL),
}
