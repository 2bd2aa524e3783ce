"""Test accuracy at one proven epsilon: `python -m benchmarks.correlated_accuracy --data-dir DIR`.

Independent noise (Poisson sampling, random allocation) beside correlated noise (banded, amplified;
and buffered, records in a public order, under another relation), by momentum SGD. Every method
chooses its learning rate from one grid on one seed, and is then run on five others. Every run is
written down as it ends; what is there is not run again.

--seeds, --epochs, --datasets and --methods take a part of it; --steps cuts runs short, to try it
out, and writes nothing.
"""

import argparse
import functools
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxdp
from jaxdp import accounting as acc
from jaxdp import data, models
from jaxdp.ledger.seeds import Secret
from jaxdp.noise import Workload

RESULTS = Path(__file__).parent / "results" / "correlated_accuracy.json"
EPSILON, DELTA = 2.0, 1e-5
BATCH, CLIP, MOMENTUM, HIDDEN = 600, 1.0, 0.9, (64,)
RATES = (0.2, 0.4, 0.8, 1.6, 3.2)
TUNING, SEEDS = 0, (1, 2, 3, 4, 5)
DATASETS, EPOCHS = ("mnist", "fashion_mnist"), (1, 4)
# Of the method's epsilon; it says less under replace_special, where a record is set to zero.
RELATIONS = {
    "independent, poisson": "add_or_remove_one",
    "independent, allocation": "add_or_remove_one",
    "banded, cyclic poisson": "add_or_remove_one",
    "buffered, fixed order": "replace_special",
}


def mechanism(method: str, size: int, epochs: int) -> jaxdp.Mechanism:
    """The mechanism of a method with the budget of all epochs."""
    noise, sampling = method.split(", ")
    steps = epochs * -(-size // BATCH)
    numbers: dict[str, Any] = {
        "l2_clip_norm": CLIP,
        "batch_size": BATCH,
        "dataset_size": size,
        "epsilon": EPSILON,
        "delta": DELTA,
        "steps": steps,
        "relation": RELATIONS[method],
    }
    if noise == "independent":
        return jaxdp.dp_sgd(sampling=sampling, **numbers)
    named = sampling.replace(" ", "_")
    workload = Workload(momentum=MOMENTUM)
    return jaxdp.dp_mf(sampling=named, strategy=noise, workload=workload, **numbers)


def accuracy(apply: Any, params: Any, dataset: data.Dataset) -> float:
    """The share of test records that are classified right."""
    found = np.argmax(apply(params, dataset.test_x), axis=1)
    return float(np.mean(found == dataset.test_y))


def trained(
    made: jaxdp.Mechanism, dataset: data.Dataset, train: Any, rate: float, seed: int, steps: int
) -> dict[str, Any]:
    """One run on ``train``, the records on the device: its accuracy and its seconds."""
    shape = dataset.spec.example_shape
    model = models.build("mlp", num_classes=10, example_shape=shape, hidden=HIDDEN)
    trainer = jaxdp.Trainer(
        models.cross_entropy(model),
        made,
        optax.sgd(rate, momentum=MOMENTUM),
        train,
        secret=Secret.from_seed(seed),
    )
    state = trainer.init(models.init(model, jax.random.key(seed), shape))
    began = time.perf_counter()
    for batch in trainer.batches(steps):
        state, _ = trainer.step(state, batch)
    found = accuracy(jax.jit(model.apply), jax.block_until_ready(state.params), dataset)
    return {"accuracy": round(found, 4), "seconds": round(time.perf_counter() - began, 1)}


def _one(made: Any, dataset: Any, train: Any, steps: int, rate: float, seed: int) -> Any:
    found = trained(made, dataset, train, rate, seed, steps)
    jax.clear_caches()
    gc.collect()
    return found


def described(made: jaxdp.Mechanism, method: str) -> dict[str, Any]:
    """The public numbers of a method, with the epsilon that is proven."""
    steps = made.steps or 0
    return {
        "relation": RELATIONS[method],
        "epsilon": round(made.epsilon(steps, DELTA, acc.Relation(RELATIONS[method])).upper, 4),
        "noise_multiplier": float(made.noise_multiplier),  # type: ignore[arg-type]
        "steps": steps,
        "strategy": repr(made.strategy),
        "bands": made.strategy.bands if made.strategy else 1,
    }


def summary(row: dict[str, Any]) -> dict[str, Any]:
    """Mean and standard deviation over the seeds that did not choose the rate."""
    found = [run["accuracy"] for run in row["runs"].values()]
    spread = statistics.stdev(found) if len(found) > 1 else 0.0
    return {"mean": round(statistics.mean(found), 4), "deviation": round(spread, 4)}


def filled(row: dict[str, Any], run: Any, seeds: Any, save: Any) -> None:
    """Runs what is missing of a row: every rate on one seed, then the best on the others."""
    for rate in RATES:
        if str(rate) not in row["tuning"]:
            row["tuning"][str(rate)] = run(rate, TUNING)
            save()
    best = max(RATES, key=lambda rate: row["tuning"][str(rate)]["accuracy"])
    row["rate"] = best
    for seed in seeds:
        if str(seed) not in row["runs"]:
            row["runs"][str(seed)] = run(best, seed)
            row |= summary(row)
            save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    parser.add_argument("--datasets", nargs="*", default=DATASETS)
    parser.add_argument("--epochs", nargs="*", type=int, default=EPOCHS)
    parser.add_argument("--methods", nargs="*", default=tuple(RELATIONS))
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, help="of every run; nothing is written")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() and not args.steps else {}

    def save() -> None:
        if not args.steps:
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")

    for name in args.datasets:
        dataset = data.load(name, args.data_dir)
        # Once: compiled steps keep what they were made for, and 144 copies do not fit.
        train = jax.device_put((dataset.train_x, dataset.train_y))
        for epochs in args.epochs:
            for method in args.methods:
                label = f"{name}, {epochs} epochs, {method}"
                made = mechanism(method, len(dataset.train_y), epochs)
                row = results.setdefault(label, {"tuning": {}, "runs": {}})
                row |= described(made, method)
                steps = args.steps or made.steps
                run = functools.partial(_one, made, dataset, train, steps)
                filled(row, run, args.seeds, save)
                print(label, {k: v for k, v in row.items() if k != "strategy"}, flush=True)


if __name__ == "__main__":
    main()
