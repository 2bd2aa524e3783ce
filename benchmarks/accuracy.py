"""Accuracy of the best recipes at proven budgets: last iterates, several runs each.

python -m benchmarks.accuracy mnist fashion_mnist --data-dir PREPARED --out FOLDER [--runs 5]
    [--epsilon 3 ...] [--not-private]

Each run is `jaxdp train --recipe best` in a process of its own; one whose report is there is not
run again. The recipe was committed before its first test run, and is the same at every epsilon.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import data, features
from jaxdp.recipes.preprocess import dp_whitening, whitened
from jaxdp.runs.recipes import best

RESULTS = Path(__file__).parent / "results" / "accuracy.json"
DELTA = "1e-5"


def report_of(dataset: str, epsilon: float, folder: Path, given: argparse.Namespace) -> dict:
    """The report of one run, which is made if it is not there; an interrupted one goes on."""
    if not (folder / "report.json").exists():
        command = [sys.executable, "-m", "jaxdp", "train", "--out", str(folder)]
        if (folder / "ledger.jsonl").exists():
            command += ["--resume"]
        else:
            command += ["--dataset", dataset, "--recipe", "best", "--epsilon", f"{epsilon:g}"]
            command += ["--delta", DELTA]
        command += ["--data-dir", str(given.data_dir)]
        began = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        if "--resume" not in command:
            (folder / "minutes.json").write_text(f"{(time.monotonic() - began) / 60:.1f}")
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def minutes_of(folder: Path) -> float | None:
    """Minutes of a run that was not interrupted, its features included."""
    path = folder / "minutes.json"
    return json.loads(path.read_text()) if path.exists() else None


def row(dataset: str, epsilon: float, given: argparse.Namespace) -> dict:
    """The accuracies of all runs at one epsilon, in percent."""
    folders = [given.out / f"{dataset}-{epsilon:g}-{n}" for n in range(1, given.runs + 1)]
    reports = [report_of(dataset, epsilon, folder, given) for folder in folders]
    found = [round(100 * report["history"][-1]["test_accuracy"], 2) for report in reports]
    return {
        "dataset": dataset,
        "epsilon": epsilon,
        "delta": float(DELTA),
        "proven_epsilon": max(report["guarantee"]["epsilon"] for report in reports),
        "accuracy": found,
        "minutes": [minutes_of(folder) for folder in folders],
        "command": reports[0]["command"],
    }


def not_private(dataset: str, given: argparse.Namespace) -> dict:
    """The accuracy of the recipe's model without privacy: the same features, trained by Adam."""
    recipe, loaded = best(dataset)[0], data.load(dataset, str(given.data_dir))
    name = recipe["features"]
    made = [features.by_name(name, x) for x in (loaded.train_x, loaded.test_x)]
    if "whiten_noise_multiplier" in recipe:
        release = dp_whitening(made[0], 0.0, size=len(made[0]))
        made = [whitened(part, release) for part in made]
    x, test_x = (part.reshape(len(part), -1) for part in made)
    y = np.asarray(loaded.train_y, np.int32)
    right = np.argmax(test_x @ trained(x, y), axis=1) == loaded.test_y
    accuracy = [round(100 * float(np.mean(right)), 2)]
    return {"dataset": dataset, "epsilon": None, "features": name, "accuracy": accuracy}


def trained(x: np.ndarray, y: np.ndarray, epochs: int = 15, batch: int = 500) -> np.ndarray:
    """float32 [d, 10]: a softmax regression without bias, its rate falling to 0."""
    steps = epochs * (len(x) // batch)
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-3, steps))

    def loss_fn(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, y).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(w: jax.Array, state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple:
        updates, state = optimizer.update(jax.grad(loss_fn)(w, x, y), state, w)
        return optax.apply_updates(w, updates), state

    w, rng = jnp.zeros((x.shape[1], 10)), np.random.default_rng(0)
    state = optimizer.init(w)
    for _ in range(epochs):
        for part in rng.permutation(len(x))[: len(x) // batch * batch].reshape(-1, batch):
            w, state = step(w, state, x[part], y[part])
    return np.asarray(w)


def keep(made: dict) -> None:
    """Writes a row in the place of the one with the same data set and epsilon."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    kept = [r for r in kept if (r["dataset"], r["epsilon"]) != (made["dataset"], made["epsilon"])]
    RESULTS.write_text(json.dumps([*kept, made], indent=1) + "\n", encoding="utf-8")
    spread = statistics.stdev(made["accuracy"]) if len(made["accuracy"]) > 1 else 0.0
    mean = statistics.mean(made["accuracy"])
    print(f"{made['dataset']} epsilon {made['epsilon']}: {mean:.2f} +- {spread:.2f}", flush=True)


def main() -> None:
    """Writes one row for each data set and epsilon; others stay."""
    parser = argparse.ArgumentParser()
    parser.add_argument("datasets", nargs="+", choices=["mnist", "fashion_mnist", "cifar10"])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; secret")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[3.0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--not-private", action="store_true", help="the model without privacy")
    given = parser.parse_args()
    for dataset in given.datasets:
        if given.not_private:
            keep(not_private(dataset, given))
            continue
        for epsilon in given.epsilon:
            keep(row(dataset, epsilon, given))


if __name__ == "__main__":
    main()
