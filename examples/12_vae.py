"""A variational autoencoder: a bound on the log-likelihood of images that nobody trained on."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp

rng = np.random.default_rng()
grid, centres = np.mgrid[:8, :8].reshape(2, 64).T, rng.uniform(1, 6, (22_000, 1, 2))
bright = 0.02 + 0.96 * np.exp(-((grid - centres) ** 2).sum(-1) / 3)  # a spot somewhere
images = (rng.random(bright.shape) < bright).astype("float32")  # black and white, 8 by 8
train, public = images[:20_000], images[20_000:]
encoder, decoder = (nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(n)]) for n in (4, 64))
params = {
    "encoder": encoder.init(jax.random.key(0), train[0]),
    "decoder": decoder.init(jax.random.key(1), jnp.zeros(2)),
}


def loss_fn(params, x, rng):  # of one image: minus its evidence lower bound
    mean, log_std = jnp.split(encoder.apply(params["encoder"], x), 2)
    code = mean + jnp.exp(log_std) * jax.random.normal(rng, (2,))
    reconstruction = optax.sigmoid_binary_cross_entropy(decoder.apply(params["decoder"], code), x)
    return reconstruction.sum() + 0.5 * (mean**2 + jnp.exp(2 * log_std) - 1 - 2 * log_std).sum()


# Noise counts less the larger the batch: 1,024 of 20,000 records, and few steps at a high rate.
budget = {"epsilon": 3, "delta": 1e-5, "steps": 200, "l2_clip_norm": 1.0}
for privacy in ({"noise_multiplier": 0, "l2_clip_norm": 1e6}, budget):
    mechanism = jaxdp.dp_sgd(batch_size=1024, dataset_size=20_000, **privacy)
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.adam(0.03), train)
    state = trainer.init(params)
    for batch in trainer.batches(200):
        state, _ = trainer.step(state, batch)
    keys = jax.random.split(jax.random.key(2), len(public))
    bound = -jax.vmap(loss_fn, (None, 0, 0))(state.params, public, keys).mean()
    print(f"{bound:.2f} nats an image at epsilon {trainer.epsilon(1e-5).upper:.2f}")
