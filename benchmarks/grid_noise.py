"""Cost of noise on an integer grid beside ordinary noise: alone, and as a share of a step.

    python -m benchmarks.grid_noise [--rounds 5] [--parameters 1000000 10000000]
    python -m benchmarks.grid_noise --rounds 2 --parameters --networks gpt2-small:16
    python -m benchmarks.grid_noise --parameters --networks --accuracy 60
    python -m benchmarks.grid_noise --parameters --networks --bits 40000

Both kinds are timed in turn, so that what else the machine does falls on both.
Accuracy is that of so many runs of each kind in turn, each with a fresh secret: mean and standard
error. What is not measured again is kept in the stored results.
"""

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxdp
from benchmarks import grid_bits, networks_large
from jaxdp import models
from jaxdp.ledger.tickets import simulated_key
from jaxdp.noise import IndependentNoise, IntegerNoise, privatize
from jaxdp.types import Summed

RESULTS = Path(__file__).parent / "results" / "grid_noise.json"
KINDS = {"gaussian": IndependentNoise(1.0), "grid": IntegerNoise(1.0)}


def in_turn(runs: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of each, one after the other in every round; the first warms up.

    Median and least of the wall clock, and the median of the processor's time, of all threads,
    which other programs on the machine change less.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter(), time.process_time()
            jax.block_until_ready(run(number))
            taken = time.perf_counter() - start[0], time.process_time() - start[1]
            if number:
                found[name].append(taken)
    told = {}
    for name, times in found.items():
        wall, processor = zip(*times, strict=True)
        told[name] = {
            "median": statistics.median(wall),
            "least": min(wall),
            "processor": statistics.median(processor),
        }
    return told


def update_of(kind: str, size: int) -> Callable[[int], Any]:
    """An update of one parameter of ``size`` coordinates, compiled."""
    noise, params = KINDS[kind], jnp.zeros(size)
    tx = privatize(noise, 1.0)
    state = tx.init(params)

    @jax.jit
    def noisy(key: Any, value: jax.Array) -> jax.Array:
        return tx.update(Summed(value, jnp.float32(1.0)), state, params, key=key)[0]

    return lambda n: noisy(simulated_key(jax.random.key(n), {noise.part: 1.0}), params)


def problem_of(network: str, rows: int) -> tuple[Any, Callable[[Any, Any], jax.Array], Any]:
    """Parameters, loss of one example and 4 · ``rows`` records."""
    rng, size = np.random.default_rng(0), 4 * rows
    if network == "gpt2-small":
        params, of_tokens, tokens = networks_large.gpt(size, 128)
        return params, lambda params, example: of_tokens(params, example["x"]), {"x": tokens}
    data = {
        "x": rng.standard_normal((size, 28, 28, 1), np.float32),
        "y": rng.integers(0, 10, size).astype(np.int32),
    }
    hidden = {"hidden": (2_900, 2_600)} if network == "mlp" else {}
    model = models.build(network, num_classes=10, example_shape=(28, 28, 1), **hidden)
    params = model.init(jax.random.key(0), jnp.zeros((1, 28, 28, 1)))

    def loss_fn(params: Any, example: Any) -> jax.Array:
        logits = model.apply(params, example["x"][None])[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])

    return params, loss_fn, data


def step_of(kind: str, problem: Any, rows: int) -> Callable[[int], Any]:
    """Whole steps of a trainer: draw, gather, clip, noise, SGD."""
    params, loss_fn, data = problem
    mechanism = jaxdp.dp_sgd(
        noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=rows, dataset_size=4 * rows, noise=kind
    )
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), data, reserve=1)
    kept = {"state": trainer.init(params), "batches": iter(trainer.batches(1_000))}

    def once(_number: int) -> Any:
        kept["state"], info = trainer.step(kept["state"], next(kept["batches"]))
        return info.update_norm

    return once


def accuracies(runs: int) -> dict[str, Any]:
    """Test accuracy in percent of a linear model of the digits, ``runs`` runs of each kind."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = np.float32(images[order] / 16), labels[order].astype(np.int32)
    data = {"x": images[:1_500], "y": labels[:1_500]}
    start = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}

    def loss_fn(params: Any, example: Any) -> jax.Array:
        logits = example["x"] @ params["w"] + params["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])

    def once(kind: str) -> float:
        mechanism = jaxdp.dp_sgd(
            epsilon=1.0,
            delta=1e-4,
            steps=60,
            l2_clip_norm=1.0,
            batch_size=256,
            dataset_size=1_500,
            noise=kind,
        )
        trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(1.0), data)
        state = trainer.init(start)
        for batch in trainer.batches(60):
            state, _ = trainer.step(state, batch)
        logits = images[1_500:] @ np.asarray(state.params["w"]) + np.asarray(state.params["b"])
        return 100 * float(np.mean(logits.argmax(axis=1) == labels[1_500:]))

    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(runs):
        for kind, reached in found.items():
            reached.append(once(kind))
    told = {
        kind: {"mean": statistics.mean(a), "error": statistics.stdev(a) / runs**0.5}
        for kind, a in found.items()
    }
    return {"accuracy_of_runs": runs, "percent": told}


def shares(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Each noise's share of its own step, and what the grid's has more, of an ordinary step."""
    told = {}
    for clock in ("median", "processor"):
        each = {name: times[clock] for name, times in found.items()}
        alone = {kind: each[f"noise alone, {kind}"] for kind in KINDS}
        more = (alone["grid"] - alone["gaussian"]) / each["gaussian"]
        told[clock] = {kind: alone[kind] / each[kind] for kind in KINDS} | {"more": more}
    return told


def name_of(row: dict[str, Any]) -> Any:
    """The part that a row of the results belongs to."""
    return row.get("network") or row.get("coordinates") or row.get("kind") or "accuracy"


def main() -> None:
    """Prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parameters", type=int, nargs="*", default=[10**6, 10**7])
    parser.add_argument("--networks", nargs="*", default=["mnist-cnn:512", "mlp:1024"])
    parser.add_argument("--accuracy", type=int, default=0, help="runs of each kind; 0 for none")
    parser.add_argument("--bits", type=int, default=0, help="runs of the audit of low-order bits")
    asked = parser.parse_args()
    importlib.import_module("jaxdp.papers.networks")  # the network of MNIST
    rows = []
    for size in asked.parameters:
        found = in_turn({kind: update_of(kind, size) for kind in KINDS}, asked.rounds)
        each = {
            kind: {name: 1e9 * value / size for name, value in seconds.items()}
            for kind, seconds in found.items()
        }
        rows.append({"coordinates": size, "ms_per_million": each})
        print(rows[-1], flush=True)
    for name in asked.networks:
        network, batch = name.split(":")
        problem = problem_of(network, int(batch))
        size = sum(leaf.size for leaf in jax.tree.leaves(problem[0]))
        steps = {k: step_of(k, problem, int(batch)) for k in KINDS}
        # The noise of as many coordinates alone, in turn with the steps that hold it.
        alone = {f"noise alone, {k}": update_of(k, size) for k in KINDS}
        found = in_turn(steps | alone, asked.rounds)
        rows.append(
            {"network": name, "coordinates": size, "seconds": found, "shares": shares(found)}
        )
        print(rows[-1], flush=True)
    if asked.accuracy:
        rows.append(accuracies(asked.accuracy))
        print(rows[-1], flush=True)
    if asked.bits:
        rows += [grid_bits.audited(kind, asked.bits) for kind in grid_bits.KINDS]
        print(*rows[-len(grid_bits.KINDS) :], sep="\n", flush=True)
    measured = [name_of(row) for row in rows]
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows += [row for row in stored if name_of(row) not in measured]
    RESULTS.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
