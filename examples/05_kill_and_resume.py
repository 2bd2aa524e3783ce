"""Killed and resumed: jaxdp.Run keeps ledger, checkpoints and curves in a folder."""

import tempfile

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
for steps in (12, 30):  # two processes: the second finds the folder and goes on, no step is lost
    run = jaxdp.Run(f"{folder}/run", loss_fn, mechanism, optax.sgd(1.0), train, params=params)
    run.fit(steps)
    print(f"{steps} steps, epsilon {run.epsilon().upper:.2f}")
