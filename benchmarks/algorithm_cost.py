"""Seconds per step of each algorithm over DP-SGD's: `python -m benchmarks.algorithm_cost`.

All algorithms take turns in one process on arrays of MNIST's shape (the CNN, batch 512): in each
round every algorithm takes some steps on draws of the same law, and its time is divided by DP-SGD's
of that round.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import jax

import jaxdp
from benchmarks.overhead import mnist_shaped
from jaxdp import runs
from jaxdp.ledger.seeds import Secret
from jaxdp.optimizers import registry
from jaxdp.papers import algorithms, networks  # noqa: F401  (registers them)
from jaxdp.runs import assemble
from jaxdp.training.trainer import Batches, Trainer, TrainState

RESULTS = Path(__file__).parent / "results" / "algorithm_cost.json"


def of_name(name: str) -> runs.RunConfig:
    """The configuration by which an algorithm is measured."""
    settings = {"energy_noise": 50.0} if name == "sa-dpsgd-private" else None
    return runs.resolve(
        runs.recipe("mnist", algorithm=name, noise_multiplier=1.2, steps=10_000, settings=settings)
    )


def prepared(
    config: runs.RunConfig, dataset: Any, train: Any, steps: int
) -> tuple[Trainer, Batches, TrainState]:
    """The run's trainer, batches and state after its first steps: everything is compiled."""
    secret, ledger, loss_fn = Secret.from_seed(1), jaxdp.Ledger(), assemble.loss_of(config)

    def sampler(mechanism: jaxdp.Mechanism, count: int, rows: int) -> Any:
        return mechanism.sampler(count, ledger=ledger, secret=secret, physical_batch_size=rows)

    trainer = Trainer(
        loss_fn,
        config.private_algorithm(secret),
        source=train,
        ledger=ledger,
        secret=secret,
        energy=assemble.energy_of(
            config, (loss_fn, assemble.test_split(config, dataset)[0]), (loss_fn, train), sampler
        ),
        physical_batch_size=config.physical_batch_size,
    )
    state = trainer.init(assemble.fresh_params(config, secret))
    batches = trainer.batches(steps + 2)
    for _ in range(2):
        state, _ = trainer.step(state, next(batches))
    return trainer, batches, state


def device() -> dict[str, Any]:
    """What the figures were taken on."""
    first = jax.devices()[0]
    return {"platform": first.platform, "kind": first.device_kind, "cores": os.cpu_count()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    dataset = mnist_shaped()
    train = jax.device_put((dataset.train_x, dataset.train_y))
    # An energy over all 60,000 training records would take longer than all others together.
    names = [name for name, entry in registry.ALGORITHMS.items() if entry.energy != "train"]
    steps = options.rounds * options.steps
    made = {name: prepared(of_name(name), dataset, train, steps) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.rounds):
        for name, (trainer, batches, state) in made.items():
            began = time.perf_counter()
            for _ in range(options.steps):
                state, _ = trainer.step(state, next(batches))
            jax.block_until_ready(state.params)
            seconds[name].append((time.perf_counter() - began) / options.steps)
            made[name] = trainer, batches, state
    rows = []
    for name, times in seconds.items():
        ratios = [t / base for t, base in zip(times, seconds["dp-sgd"], strict=True)]
        rows.append(
            {
                "algorithm": name,
                "ratio_to_dp_sgd": round(statistics.median(ratios), 2),
                "ratios": [round(r, 2) for r in ratios],
                "milliseconds": round(1e3 * statistics.median(times), 1),
            }
        )
        print(f"{name:30} {rows[-1]['ratio_to_dp_sgd']:6.2f}  {rows[-1]['milliseconds']} ms")
    RESULTS.write_text(json.dumps({"device": device(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
