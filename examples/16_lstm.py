"""An LSTM over texts of unlike lengths, padded to one public length; padding counts for nothing."""

import flax.linen as nn
import jax
import numpy as np
import optax

import jaxdp
from jaxdp.sampling import padded_text

rng = np.random.default_rng()
texts = [rng.permutation([0, 1, *rng.integers(2, 20, n)]) for n in rng.integers(2, 15, 9_000)]
texts = [{"ids": text, "label": text[text < 2][0]} for text in texts]  # the first of 0 and 1
train = padded_text(texts[1_000:], 16, field="ids")
public = jax.tree.map(lambda *rows: np.stack(rows), *padded_text(texts[:1_000], 16, field="ids"))


class Reader(nn.Module):
    @nn.compact
    def __call__(self, ids, length):
        states = nn.RNN(nn.OptimizedLSTMCell(16))(nn.Embed(20, 16)(ids), seq_lengths=length)
        return nn.Dense(1)(states[length - 1])[0]  # the state after the last word


def loss_fn(params, record):
    logit = Reader().apply(params, record["ids"], record["ids_mask"].sum())
    return optax.sigmoid_binary_cross_entropy(logit, record["label"])


params = Reader().init(jax.random.key(0), public["ids"][0], 16)
# Few steps at a high rate: for one epsilon the noise of a step grows with the root of their number.
budget = {"epsilon": 3, "delta": 1e-5, "steps": 30, "l2_clip_norm": 1.0}
for privacy in ({"noise_multiplier": 0, "l2_clip_norm": 1e6}, budget):  # without privacy, and with
    mechanism = jaxdp.dp_sgd(batch_size=512, dataset_size=8_000, **privacy)
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.adam(0.03), train)
    state = trainer.init(params)
    for batch in trainer.batches(30):
        state, _ = trainer.step(state, batch)
    right = jax.vmap(loss_fn, (None, 0))(state.params, public) < np.log(2)
    print(f"accuracy {right.mean():.3f} at epsilon {trainer.epsilon(1e-5).upper:.2f}")
