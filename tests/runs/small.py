"""A small run for the tests of resuming; also a program, to be killed at any moment."""

import sys

import jax
import numpy as np

from jaxdp import data, runs
from jaxdp.seeds import Secret


def dataset(seed=0):
    """Random data in the shape of the digits."""
    rng = np.random.default_rng(seed)
    x = rng.random((300, 8, 8, 1), np.float32)
    y = rng.integers(0, 10, 300).astype(np.int32)
    return data.Dataset(data.spec("digits"), x[:200], y[:200], x[200:], y[200:])


def config(**changes):
    """200 records in steps of 40."""
    given = {
        "model": "logistic", "noise_multiplier": 1.0, "steps": 12, "batch_size": 40,
        "dataset_size": 200, "eval_every": 3, "physical_batch_size": 16, **changes,
    }
    return runs.resolve(runs.recipe("digits", **given))


def ignore(step, row):
    """No progress shown."""


def go(folder, cfg, progress=ignore, seed=5, rows=None, fork=False):
    """Starts or resumes the run in ``folder``."""
    directory = runs.RunDirectory(folder)
    rows = dataset() if rows is None else rows
    if directory.exists():
        return runs.resume(cfg, directory, rows, progress, fork=fork)
    return runs.start(cfg, directory, rows, Secret.from_seed(seed), progress)


def outcome(result, folder):
    """Everything that must be bit-equal."""
    params = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result.params)]
    ledger = runs.RunDirectory(folder).ledger.read_bytes()
    return params, ledger, result.ledger.epsilon(1e-5).upper, result.history


if __name__ == "__main__":
    steps_, eval_every_ = int(sys.argv[2]), int(sys.argv[3])

    def show(step, row):
        print(step, flush=True)

    go(sys.argv[1], config(steps=steps_, eval_every=eval_every_), show)
