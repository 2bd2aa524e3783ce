"""Diffusion: several draws of noise a record, whose gradients are averaged before it is clipped."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import make_moons

import jaxdp

moons = (make_moons(22_000, noise=0.05)[0] - [0.5, 0.25]).astype("float32")
train, public = moons[:20_000], moons[20_000:]
network = nn.Sequential([nn.Dense(64), nn.silu, nn.Dense(64), nn.silu, nn.Dense(2)])
params = network.init(jax.random.key(0), jnp.zeros(4))


def noised(x, key):  # a draw of a time and of noise
    time_key, noise_key = jax.random.split(key)
    angle, noise = jnp.pi / 2 * jax.random.uniform(time_key), jax.random.normal(noise_key, (2,))
    return jnp.cos(angle) * x + jnp.sin(angle) * noise, noise, angle


def loss_fn(params, x, noise, angle):  # of one draw for one record
    time = jnp.stack([jnp.cos(angle), jnp.sin(angle)])
    return jnp.sum((network.apply(params, jnp.concatenate([x, time])) - noise) ** 2)


budget = {"epsilon": 3, "delta": 1e-5, "steps": 200, "l2_clip_norm": 0.5}
# A draw more costs time and no privacy: less of each gradient is chance, more of it is signal.
keys = jax.random.split(jax.random.key(1), len(public))
held_out = jax.vmap(jaxdp.augmented(loss_fn, noised, 16), (None, 0, 0))
for draws, privacy in ((8, {"noise_multiplier": 0, "l2_clip_norm": 1e6}), (1, budget), (8, budget)):
    mechanism = jaxdp.dp_sgd(batch_size=1024, dataset_size=20_000, **privacy)
    several = jaxdp.augmented(loss_fn, noised, draws)
    trainer = jaxdp.Trainer(several, mechanism, optax.adam(0.02), train)
    state = trainer.init(params)
    for batch in trainer.batches(200):
        state, _ = trainer.step(state, batch)
    error, epsilon = held_out(state.params, public, keys).mean(), trainer.epsilon(1e-5).upper
    print(f"{draws} draws: error {error:.3f} (2 untrained) at epsilon {epsilon:.2f}")
