"""Time series: a person's windows together are one record (docs/howto/persons.md)."""

import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import clipping, sampling

PERSONS, LENGTH, WINDOW, rng = 2_000, 60, 8, np.random.default_rng(0)
PER_PERSON = LENGTH - WINDOW  # windows of the longest series: public, as the bounds are


def series(persons):
    period, noise = rng.uniform(5, 9, (persons, 1)), rng.normal(size=(persons, LENGTH))
    wave = np.sin(2 * np.pi * np.arange(LENGTH) / period + rng.uniform(0, 6, (persons, 1)))
    return np.clip(wave + 0.2 * noise, -2, 2).astype(np.float32)


def windows(series):
    return np.lib.stride_tricks.sliding_window_view(series, WINDOW + 1, axis=1)


def loss_fn(params, window):  # of one window; a person's loss is the mean over hers
    return jnp.square(window[:WINDOW] @ params - window[WINDOW])


train, valid = (windows(series(n)).reshape(-1, WINDOW + 1) for n in (PERSONS, 200))
owners = np.repeat(np.arange(PERSONS), PER_PERSON)
persons = sampling.users(train, owners, records_per_user=PER_PERSON)
budget = {"epsilon": 3, "delta": 1e-5, "steps": 60, "l2_clip_norm": 0.3}  # of a person's gradient
for noise in ({"noise_multiplier": 0, "l2_clip_norm": 1e6}, budget):  # without and with privacy
    unit = {"dataset_size": PERSONS, "records_per_user": PER_PERSON}
    mechanism = jaxdp.dp_sgd(**noise, **unit, batch_size=200)
    trainer = jaxdp.Trainer(clipping.user_loss(loss_fn), mechanism, optax.adam(0.03), persons)
    state = trainer.init(jnp.zeros(WINDOW))
    for batch in trainer.batches(60):
        state, _ = trainer.step(state, batch)
    error = jnp.square(valid[:, :WINDOW] @ state.params - valid[:, WINDOW]).mean()
    print(f"mean square error {error:.4f} at epsilon {trainer.epsilon(1e-5).upper:.2f}")
