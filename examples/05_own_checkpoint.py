"""Killed and resumed: a loop of your own, with a ledger on disk and your own checkpoint."""

import pickle
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import jaxdp

digits, folder = load_digits(), tempfile.mkdtemp()
train = (digits.data / 16, digits.target)
params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"] + params["b"], y)


mechanism = jaxdp.dp_sgd(
    epsilon=3, delta=1e-4, steps=30, batch_size=256, dataset_size=1797, l2_clip_norm=1.0
)
kept = Path(folder) / "state"
for stop in (14, 30):  # two processes; the first is killed after step 14
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(1.0), train, ledger=f"{folder}/ledger")
    state = pickle.loads(kept.read_bytes()) if kept.exists() else trainer.init(params)
    for batch in trainer.batches(state=state):  # what is left: steps 11 to 14 stay charged
        state, _ = trainer.step(state, batch)
        if state.step % 10 == 0:
            kept.write_bytes(pickle.dumps(jax.device_get(state)))
        if state.step == stop:
            break
    else:  # finished
        kept.write_bytes(pickle.dumps(jax.device_get(state)))
    trainer.close()  # a process that is killed needs no close
    print(f"state of {state.step} steps, epsilon {trainer.epsilon().upper:.2f}")
