"""What a private step costs beyond its clipped gradients: `python -m benchmarks.overhead`.

Seconds per step of a training run (sampling, noise, optimizer, ledger, evaluation, checkpoints)
over the seconds of passes of clipped gradient of such draws called alone, on arrays of MNIST's
shape.
"""

import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from jaxdp import data, runs
from jaxdp.ledger.seeds import Secret
from jaxdp.papers import networks  # noqa: F401  (registers them)
from jaxdp.runs import assemble

EVAL_EVERY = 235  # 4,700 steps in 20 blocks, as `jaxdp train --dataset mnist` cuts them
ROUNDS = 5
STEPS = 235


def mnist_shaped() -> data.Dataset:
    rng = np.random.default_rng(0)
    x = rng.random((70_000, 28, 28, 1), np.float32)
    y = rng.integers(0, 10, 70_000).astype(np.int32)
    return data.Dataset(data.specs.spec("mnist"), x[:60_000], y[:60_000], x[60_000:], y[60_000:])


def train_block(dataset: data.Dataset, secret: Secret) -> float:
    """Seconds per step of a run's second block: everything is compiled by then."""
    config = runs.resolve(
        runs.recipe("mnist", noise_multiplier=1.2, steps=2 * EVAL_EVERY, eval_every=EVAL_EVERY)
    )
    ends = []

    def progress(step: int, row: dict | None) -> None:
        if row is not None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        runs.start(config, runs.RunDirectory(Path(folder) / "run"), dataset, secret, progress)
    return (ends[-1] - ends[-2]) / EVAL_EVERY


def gradients_alone(dataset: data.Dataset, secret: Secret) -> float:
    """Seconds per step of the clipped gradients of draws of the same law, called alone."""
    config = runs.resolve(runs.recipe("mnist", noise_multiplier=1.2, steps=2 * EVAL_EVERY))
    mechanism = config.mechanism()
    grad_fn = mechanism.clipped_grad(assemble.loss_of(config))
    sampler = mechanism.sampler(
        len(dataset.train_y), secret=secret, physical_batch_size=config.physical_batch_size
    )
    params = assemble.fresh_params(config, secret)
    train = jax.device_put((dataset.train_x, dataset.train_y))
    jax.block_until_ready(grad_fn(params, train, sampler.draw()).value)
    began = time.perf_counter()
    for _ in range(STEPS):
        summed = grad_fn(params, train, sampler.draw())
    jax.block_until_ready(summed.value)
    return (time.perf_counter() - began) / STEPS


def main() -> None:
    dataset, ratios = mnist_shaped(), []
    for i in range(ROUNDS):
        secret = Secret.from_seed(i)
        alone, train = gradients_alone(dataset, secret), train_block(dataset, secret)
        ratios.append(train / alone)
        print(f"alone {1e3 * alone:.1f} ms, train {1e3 * train:.1f} ms, ratio {ratios[-1]:.3f}")
    print(f"median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
