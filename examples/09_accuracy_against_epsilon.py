"""Accuracy against epsilon, plotted; and what showing all the points costs together."""

import tempfile

import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from sklearn.datasets import load_digits

import jaxdp

digits = load_digits()
x, y = digits.data / 16, digits.target
train, (valid_x, valid_y) = (x[:1437], y[:1437]), (x[1437:], y[1437:])
params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
ledger = jaxdp.Ledger()  # one for all: the points are shown together


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"] + params["b"], y)


def accuracy(epsilon):
    mechanism = jaxdp.dp_sgd(
        epsilon=epsilon, delta=1e-4, steps=30, batch_size=256, dataset_size=1437, l2_clip_norm=1.0
    )
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(1.0), train, ledger=ledger)
    state = trainer.init(params)
    for batch in trainer.batches():
        state, _ = trainer.step(state, batch)
    return ((valid_x @ state.params["w"] + state.params["b"]).argmax(-1) == valid_y).mean()


budgets = [0.1, 0.3, 1, 3]
plt.semilogx(budgets, [accuracy(budget) for budget in budgets], marker="o")
plt.xlabel("epsilon")
plt.ylabel("accuracy")
plt.savefig(f"{tempfile.gettempdir()}/accuracy_against_epsilon.png")
print(f"all {len(budgets)} points together: epsilon {ledger.epsilon(1e-4).upper:.2f}")
