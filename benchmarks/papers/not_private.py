"""SA-DPSGD's column "nonDP": its networks trained without privacy, which guarantees nothing.

Ordinary training: mean gradients of shuffled batches, no clipping, no noise. The papers state no
optimizer for it; ours is SGD with momentum, for PIGDO's network Adam.
"""

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.papers import queue
from jaxdp import __version__, data
from jaxdp._extras import needed
from jaxdp.data import models
from jaxdp.papers import networks  # noqa: F401  (registers the networks)
from jaxdp.runs import assemble
from jaxdp.types import PyTree

with needed("benchmarks.papers.not_private", "papers", "flax"):
    import flax.linen as nn

FILE = "not_private.json"
BATCH, RATE, MOMENTUM = 256, 0.05, 0.9
ADAM_BATCH, ADAM_RATE = 600, 0.001
# In percent: SA-DPSGD, Table 1, the last column; PIGDO, Section 5.1.
PAPER = {"mnist": 99.09, "fashion_mnist": 89.01, "cifar10": 79.02}
PIGDO = {"mnist": 98.57, "fashion_mnist": 88.85}
_MODELS = {"mnist": "mnist-cnn", "fashion_mnist": "mnist-cnn", "cifar10": "cifar-cnn"}
# CIFAR-10's networks took half an hour of a shared core for 10 epochs.
MINUTES = {"cifar10": 30}
_EPOCHS = {"mnist": 20, "fashion_mnist": 20, "cifar10": 10}
# Section 5.1's.
_PIGDO_EPOCHS = {"mnist": 100, "fashion_mnist": 300}


@dataclasses.dataclass(frozen=True)
class FreeRow:
    """One training without privacy.

    Attributes:
        dataset: of the run.
        activation: "relu" or "tanh".
        epochs: of the run.
        pigdo: whether it is PIGDO's 784-1000-10, by Adam, and not Table 1's network, by SGD.
    """

    dataset: str
    activation: str
    epochs: int
    pigdo: bool = False

    @property
    def name(self) -> str:
        """As in the file of results."""
        network = "mlp-1000-" if self.pigdo else ""
        return f"{self.dataset}-{network}{self.activation}-not-private"

    @property
    def paper(self) -> float:
        """The paper's accuracy in percent."""
        return (PIGDO if self.pigdo else PAPER)[self.dataset]

    @property
    def batch(self) -> int:
        """Records of a step."""
        return ADAM_BATCH if self.pigdo else BATCH

    def optimizer(self) -> optax.GradientTransformation:
        """A fresh one."""
        return optax.adam(ADAM_RATE) if self.pigdo else optax.sgd(RATE, MOMENTUM)

    def network(self, constants: data.specs.DatasetSpec) -> nn.Module:
        """The network for a data set."""
        return models.build(
            "mlp" if self.pigdo else _MODELS[self.dataset],
            num_classes=constants.num_classes,
            example_shape=constants.example_shape,
            activation=self.activation,
            hidden=(1_000,),
        )


# CIFAR-10, which takes longest, last.
ROWS = {
    row.name: row
    for row in (
        *(FreeRow(d, a, _EPOCHS[d]) for d in ("mnist", "fashion_mnist") for a in ("relu", "tanh")),
        *(FreeRow(d, "relu", epochs, True) for d, epochs in _PIGDO_EPOCHS.items()),
        *(FreeRow("cifar10", a, _EPOCHS["cifar10"]) for a in ("relu", "tanh")),
    )
}


def work(
    results: Path, folder: Path, data_dir: Path | None, runs: int, shown: Callable[[int], None]
) -> None:
    """Runs every row ``runs`` times, but those that ``results`` has; shows how many are done."""
    queue.work_through(
        ROWS,
        folder,
        results,
        lambda row, _: run(row, data.load(row.dataset, data_dir)),
        runs,
        shown=shown,
    )


def run(row: FreeRow, dataset: data.Dataset) -> dict[str, Any]:
    """Trains once, without any guarantee, and measures after every epoch; a line of the results."""
    model = row.network(dataset.spec)
    rng, tx = np.random.default_rng(), row.optimizer()
    params = models.init(
        model, jax.random.key(int(rng.integers(2**31))), dataset.spec.example_shape
    )
    evaluate = assemble.evaluator(model, dataset.test_x, dataset.test_y)
    step, state = _step(model, tx), tx.init(params)
    curve, seconds = [], 0.0
    for epoch in range(1, row.epochs + 1):
        began = time.perf_counter()
        order = rng.permutation(len(dataset.train_x))
        for i in range(0, len(order) - row.batch + 1, row.batch):
            chosen = order[i : i + row.batch]
            batch = dataset.train_x[chosen], dataset.train_y[chosen]
            params, state = step(params, state, batch)
        jax.block_until_ready(params)
        seconds += time.perf_counter() - began
        found = evaluate(params)
        curve.append([epoch, found["test_accuracy"], found["test_loss"]])
    return {
        "name": row.name,
        "dataset": row.dataset,
        "activation": row.activation,
        "test_accuracy": curve[-1][1],
        "proven_epsilon": "inf",
        "private": False,
        "curve": curve,
        "epochs": row.epochs,
        "seconds": round(seconds, 1),
        "machine": f"{os.cpu_count()} cores, {jax.devices()[0].device_kind}",
        "jaxdp": __version__,
    }


def _step(
    model: nn.Module, tx: optax.GradientTransformation
) -> Callable[..., tuple[PyTree, PyTree]]:
    """A compiled step on the mean loss of a batch."""

    def loss(params: PyTree, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

    @jax.jit
    def step(
        params: PyTree, state: PyTree, batch: tuple[jax.Array, jax.Array]
    ) -> tuple[PyTree, PyTree]:
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    return step
