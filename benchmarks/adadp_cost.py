"""AdaDp's Table II: `python -m benchmarks.adadp_cost --data-dir DIR`.

Seconds per iteration of AdaDp and AGD over DP-SGD's, in the table's own setting: MNIST,
DP-PCA-60-1000-10, noise 8, lots of 120. All take turns in one process. DpOpt is not defined in the
text.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks.algorithm_cost import device, prepared
from benchmarks.papers import agd, rows
from benchmarks.papers.agd_releases import Asked
from jaxdp import accounting as acc
from jaxdp import data, runs
from jaxdp.ledger.seeds import Secret
from jaxdp.runs import assemble

RESULTS = Path(__file__).parent / "results" / "adadp_cost.json"
NAMES = ("dp-sgd", "adadp", "adadp-as-published")
PAPER = {"dp-sgd": 0.3, "adadp": 0.5, "adadp-as-published": 0.5, "agd": 12.0}  # seconds
LOT = 120


def config_of(name: str) -> runs.RunConfig:
    """The row of Figure 2 at noise 8, with the table's lot and no end of steps."""
    row = rows.ROWS[f"mnist-mlp-pca-{name}-noise-8"]
    return runs.resolve(
        runs.recipe("mnist", **{**row.given, "batch_size": LOT, "epsilon": None, "steps": 10_000})
    )


def of_trainer(name: str, dataset: data.Dataset, train: Any, steps: int) -> Callable[[int], None]:
    """A function that takes so many steps."""
    trainer, batches, state = prepared(config_of(name), dataset, train, steps)

    def take(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, _ = trainer.step(state, next(batches))
            jax.block_until_ready(state.params)

    return take


def of_agd(dataset: data.Dataset) -> Callable[[int], None]:
    """A function that takes so many steps of AGD, at equal budgets that do not end."""
    config, secret = config_of("dp-sgd"), Secret.from_seed(1)
    budget = acc.RenyiFilter(1e4, config.delta, orders=(2.0, 8.0, 32.0))
    train = dataset.train_x, dataset.train_y
    asked = Asked(config, train, agd.SPLITS["equal"], secret, budget)
    steps: Iterator[Any] = agd._steps(asked, assemble.fresh_params(config, secret), 10_000)

    def take(count: int) -> None:
        for _ in range(count):
            jax.block_until_ready(next(steps))

    take(4)  # the first are the start and what compiles
    return take


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    config = config_of("dp-sgd")
    dataset, _ = assemble.projected(
        config, data.load("mnist", given.data_dir), Secret.from_seed(0), None
    )
    train = jax.device_put((dataset.train_x, dataset.train_y))
    steps = given.rounds * given.steps
    made = {name: of_trainer(name, dataset, train, steps) for name in NAMES}
    made["agd"] = of_agd(dataset)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _, name in itertools.product(range(given.rounds), made):
        began = time.perf_counter()
        made[name](given.steps)
        seconds[name].append((time.perf_counter() - began) / given.steps)
    asked = {"rounds": given.rounds, "steps": given.steps}
    found = [told(name, times, seconds["dp-sgd"]) for name, times in seconds.items()]
    RESULTS.write_text(json.dumps({"device": device(), **asked, "rows": found}, indent=1) + "\n")


def told(name: str, times: list[float], base: list[float]) -> dict[str, Any]:
    """One algorithm's line, printed."""
    ratios = [t / b for t, b in zip(times, base, strict=True)]
    line = {
        "algorithm": name,
        "ratio_to_dp_sgd": round(statistics.median(ratios), 2),
        "ratios": [round(r, 2) for r in ratios],
        "milliseconds": round(1e3 * statistics.median(times), 2),
        "ratio_printed": round(PAPER[name] / PAPER["dp-sgd"], 2),
    }
    print(f"{name:20} {line['ratio_to_dp_sgd']:6.2f}  {line['milliseconds']} ms")
    return line


if __name__ == "__main__":
    main()
