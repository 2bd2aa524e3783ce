"""Texts of unlike lengths: short ones are padded to a short public length, and so cost less."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp.sampling import bucketed_text

rng = np.random.default_rng(0)


def text(label):
    """Some of 100 words, of which those of the label's half are likelier; a few texts are long."""
    half = np.where(rng.random(int(rng.lognormal(3, 0.7)) + 1) < 0.6, label, 1 - label)
    return {"ids": rng.integers(0, 50, len(half)) + 50 * half, "label": label}


def logit(params, record):
    return jnp.mean(params[record["ids"]], where=record["ids_mask"])  # padding must not count


def loss_fn(params, record):
    return optax.sigmoid_binary_cross_entropy(logit(params, record), record["label"])


texts = [text(label) for label in [0, 1] * 2_250]
buckets = {16: 160, 48: 192, 128: 64}  # from a length to its room in a step: public constants
source = bucketed_text(texts[500:], buckets, field="ids")
valid = bucketed_text(texts[:500], buckets, field="ids").gather(np.arange(500), np.ones(500, bool))
mechanism = jaxdp.dp_sgd(
    epsilon=3, delta=1e-5, steps=60, batch_size=256, dataset_size=4_000, l2_clip_norm=0.5
)
trainer = jaxdp.Trainer(loss_fn, mechanism, optax.adam(0.1), source)
state = trainer.init(jnp.zeros(100))
for batch in trainer.batches():
    state, info = trainer.step(state, batch)
right = (jax.vmap(logit, (None, 0))(state.params, valid) > 0) == valid["label"]
print(f"accuracy {right.mean():.3f} at epsilon {trainer.epsilon().upper:.3f}")
