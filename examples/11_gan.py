"""A GAN with two optimizers: the discriminator is private, the generator learns from it alone."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import make_moons

import jaxdp

train, public = jnp.split(make_moons(22_000, noise=0.05)[0] - jnp.array([0.5, 0.25]), [20_000])
D, G = (nn.Sequential([nn.Dense(64), nn.gelu, nn.Dense(64), nn.gelu, nn.Dense(n)]) for n in (1, 2))
params = {"D": D.init(jax.random.key(0), public), "G": G.init(jax.random.key(1), public)}
tx = {"D": optax.adam(4e-3, b1=0.5), "G": optax.adam(1e-3, b1=0.5)}


def loss_fn(params, x, rng):  # of one record, and a fake beside it
    both = jnp.stack([x, G.apply(params["G"], jax.random.normal(rng, (2,)))])
    return jnp.sum(jax.nn.softplus(D.apply(params["D"], both)[:, 0] * jnp.arange(-1, 2, 2)))


@jax.jit
def improved(params, opt_state, noise):  # sees the discriminator that was released, and no record
    grads = jax.grad(lambda made: -D.apply(params["D"], G.apply(made, noise)).mean())(params["G"])
    updates, opt_state = tx["G"].update(grads, opt_state)
    return optax.apply_updates(params["G"], updates), opt_state


budget = {"epsilon": 3, "delta": 1e-5, "steps": 300, "l2_clip_norm": 1.0}  # few steps, a high rate
for privacy in ({"noise_multiplier": 0, "l2_clip_norm": 1e6}, budget):  # without privacy, and with
    mechanism = jaxdp.dp_sgd(batch_size=1024, dataset_size=20_000, **privacy)
    trainer = jaxdp.Trainer(loss_fn, mechanism, tx["D"], train, trainable={"D": True, "G": False})
    state, opt_state = trainer.init(params), tx["G"].init(params["G"])
    for batch in trainer.batches(300):
        state, _ = trainer.step(state, batch)
        noise = jax.random.normal(jax.random.key(state.step), (1024, 2))
        made, opt_state = improved(state.params, opt_state, noise)
        state = state._replace(params=state.params | {"G": made})
    near = jnp.linalg.norm(G.apply(made, noise)[:, None] - public, axis=-1).min(0) < 0.1
    print(f"{near.mean():.3f} have a fake near, at epsilon {trainer.epsilon(1e-5).upper:.2f}")
