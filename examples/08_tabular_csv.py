"""Regression on a CSV file, scaled by public bounds: the table's own mean would be a release."""

import tempfile

import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_diabetes

import jaxdp

path = f"{tempfile.mkdtemp()}/patients.csv"
patients = load_diabetes(scaled=False)
np.savetxt(path, np.c_[patients.data, patients.target], delimiter=",", header="age,sex,bmi,...")

table = np.loadtxt(path, delimiter=",")
low = np.array([18, 1, 15, 60, 90, 40, 20, 2, 3, 50, 0])  # known without looking at the table
high = np.array([80, 2, 45, 140, 310, 250, 100, 10, 7, 130, 350])
table = 2 * (np.clip(table, low, high) - low) / (high - low) - 1
x, y = table[:, :-1], table[:, -1]
params = {"w": jnp.zeros(10), "b": jnp.zeros(())}


def predict(params, x):
    return x @ params["w"] + params["b"]


def loss_fn(params, x, y):
    return (predict(params, x) - y) ** 2


mechanism = jaxdp.dp_sgd(
    epsilon=3, delta=1e-4, steps=60, batch_size=64, dataset_size=442, l2_clip_norm=1.0
)
trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.2), (x, y))
state = trainer.init(params)
for batch in trainer.batches():
    state, _ = trainer.step(state, batch)
print(f"epsilon {trainer.epsilon().upper:.2f}, weight of bmi {state.params['w'][2]:.2f}")
