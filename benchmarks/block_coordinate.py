"""DP-SBCD: accuracy, claimed and proven epsilon side by side, and what a sweep costs.

python -m benchmarks.block_coordinate generated|softmax|hidden|madelon|mnist|speed [--data-dir DIR]
python -m benchmarks.block_coordinate plot      # docs/images/block_coordinate_stand_in.png

Each part replaces its own section of benchmarks/results/block_coordinate.json. Set
OPENBLAS_NUM_THREADS=1 on a busy machine: LAPACK's threads otherwise wait for one another.
"""

import argparse
import dataclasses
import functools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks.block_figure import save_figure
from benchmarks.block_problems import Problem, generated, madelon, mnist, with_constant
from jaxdp import accounting as acc
from jaxdp import models
from jaxdp.ledger.seeds import Secret
from jaxdp.mechanism import default_physical_batch_size
from jaxdp.papers import block_coordinate as bc
from jaxdp.papers.block_coordinate.released import compiled_sweep

FIGURE = Path("docs/images/block_coordinate_stand_in.png")
RESULTS = Path(__file__).parent / "results" / "block_coordinate.json"
DELTA = 1e-5
ADD, REPLACE = acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE


def accuracy(problem: Problem, network: bc.Network, weights: Any) -> float:
    outputs = jax.jit(network.apply)(weights, with_constant(problem.test[0]))
    return float(np.mean(np.argmax(outputs, axis=1) == problem.test[1]))


def calibrated(events: Any, epsilon: float, relation: acc.Relation) -> float:
    """The smallest scale of the noise (to 1e-4) whose proven epsilon is within the target."""

    def smallest(low: float, high: float, algorithm: str) -> float:
        while high / low > 1 + 1e-4:
            middle = math.sqrt(low * high)
            fits = acc.epsilon(events(middle), DELTA, relation, algorithm).upper <= epsilon
            low, high = (low, middle) if fits else (middle, high)
        return high

    # Renyi bounds are quick and never below the others: they bracket the answer.
    enough = smallest(1e-2, 1e3, "rdp")
    return smallest(0.4 * enough, enough, "auto")


def schedules(problem: Problem, epochs: int) -> dict[str, bc.SweepSchedule]:
    """Constant noise, and noise that falls linearly to a third over the epochs."""
    each = round(problem.size / problem.batch_size)
    return {"constant": bc.constant(), "decreasing": bc.linear(1.5, 0.5, epochs, each)}


def released(problem: Problem, epochs: int, schedule: bc.SweepSchedule) -> bc.ReleasedBlocks:
    """R1 at the problem's proven epsilon after so many epochs."""

    def algorithm(z: float) -> bc.ReleasedBlocks:
        return bc.ReleasedBlocks(
            problem.network, z, problem.clip, problem.step_size, problem.batch_size,
            problem.size, bc.Proximal(spectral_radius=problem.projection), schedule=schedule,
        )  # fmt: skip

    steps = problem.steps(epochs)
    return algorithm(calibrated(lambda z: algorithm(z).events(steps), problem.epsilon, ADD))


def along(problem: Problem, network: bc.Network, at: dict[int, int]) -> tuple[dict, Any]:
    """A table that a callback fills with the accuracy after certain steps."""
    table: dict[int, float] = {}

    def look(step: int, weights: Any) -> None:
        if step in at:
            table[at[step]] = accuracy(problem, network, weights)

    return table, look


def run_released(
    problem: Problem, algorithm: bc.ReleasedBlocks, epochs: list[int], seed: int
) -> dict:
    table, look = along(problem, algorithm.network, {problem.steps(e): e for e in epochs})
    bc.train(
        algorithm, problem.lifted, problem.steps(epochs[-1]), secret=Secret.from_seed(seed),
        on_step=look, ledger=jaxdp.Ledger(),
    )  # fmt: skip
    return table


def dp_sgd(problem: Problem, epochs: int) -> jaxdp.Mechanism:
    """DP-SGD at the problem's proven epsilon."""
    z = acc.calibrate_noise_multiplier(
        problem.epsilon, DELTA, problem.batch_size / problem.size, problem.steps(epochs)
    )
    return jaxdp.dp_sgd(
        noise_multiplier=z,
        l2_clip_norm=problem.sgd_clip,
        batch_size=problem.batch_size,
        dataset_size=problem.size,
    )


def run_dp_sgd(problem: Problem, mechanism: jaxdp.Mechanism, epochs: list[int], seed: int) -> dict:
    secret = Secret.from_seed(seed)
    model = models.MLP(problem.hidden, "relu", problem.classes)
    # A small batch in one pass; a large one in passes of the default size, which is faster.
    rows = problem.batch_size + 6 * math.isqrt(problem.batch_size)
    default = default_physical_batch_size(problem.batch_size)
    trainer = jaxdp.Trainer(
        models.cross_entropy(model), mechanism, optax.sgd(problem.sgd_rate), problem.train[:2],
        secret=secret, physical_batch_size=rows if rows <= 256 else default,
    )  # fmt: skip
    state = trainer.init(models.init(model, secret.jax_key("init"), problem.train[0].shape[1:]))
    apply = jax.jit(model.apply)
    table, at = {}, {problem.steps(e): e for e in epochs}
    for batch in trainer.batches(problem.steps(epochs[-1])):
        state, _ = trainer.step(state, batch)
        if state.step in at:
            outputs = apply(state.params, jnp.asarray(problem.test[0]))
            table[at[state.step]] = float(np.mean(np.argmax(outputs, 1) == problem.test[1]))
    return table


def run_published(
    problem: Problem, algorithm: bc.AsPublished, epochs: list[int], seed: int
) -> dict:
    table, look = along(problem, algorithm.network, {e: e for e in epochs})
    bc.train_as_published(algorithm, problem.lifted, secret=Secret.from_seed(seed), on_epoch=look)
    return table


def summary(tables: list[dict]) -> dict[str, list[float]]:
    """Mean and standard deviation over the seeds, by epoch."""
    out = {}
    for epoch in tables[0]:
        values = [table[epoch] for table in tables]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        out[str(epoch)] = [round(statistics.mean(values), 4), round(spread, 4)]
    return out


def row(name: str, tables: list[dict], started: float, **figures: Any) -> dict:
    seconds = round((time.perf_counter() - started) / len(tables), 1)
    made = {"algorithm": name, "accuracy": summary(tables), "seconds_a_run": seconds, **figures}
    print(json.dumps(made), flush=True)
    return made


def as_published(problem: Problem, algorithm: bc.ReleasedBlocks, epochs: int) -> bc.AsPublished:
    """The paper's algorithm with the noise that R1 adds to W."""
    std = algorithm.noise_multipliers[0] * problem.clip * problem.step_size / problem.batch_size
    return bc.AsPublished(
        problem.network, std, problem.step_size, problem.batch_size, problem.size, epochs,
        rescale=bc.Rescale(2.0),
        schedule=bc.SweepSchedule(algorithm.schedule.factors),
    )  # fmt: skip


def compare(problem: Problem, epochs: list[int], seeds: int) -> list[dict]:
    """Every algorithm at one proven epsilon, accuracy against epochs."""
    rows, last = [], epochs[-1]
    for kind, schedule in schedules(problem, last).items():
        algorithm = released(problem, last, schedule)
        spent = {
            str(e): round(acc.epsilon(algorithm.events(problem.steps(e)), DELTA).upper, 4)
            for e in epochs
        }
        started = time.perf_counter()
        tables = [run_released(problem, algorithm, epochs, seed) for seed in range(seeds)]
        published = as_published(problem, algorithm, last)
        claim = published.claim(2 * problem.clip, DELTA)
        proven = acc.epsilon(algorithm.events(problem.steps(last)), DELTA, REPLACE).upper
        rows.append(
            row(
                f"R1, {kind} noise",
                tables,
                started,
                proven_add_or_remove=spent,
                proven_replace_one=proven,
                claimed_replace_one=claim.value,
                noise_multiplier=algorithm.noise_multipliers[0],
            )
        )
        started = time.perf_counter()
        tables = [run_published(problem, published, epochs, seed) for seed in range(seeds)]
        loss = published.claim(2 * problem.clip, DELTA, order=2.0).value
        rows.append(
            row(
                f"as published, {kind} noise",
                tables,
                started,
                claimed_replace_one=claim.value,
                claimed_renyi_2=loss,
                proven_add_or_remove="inf",
                noise_std=published.noise_std,
            )
        )
    mechanism, started = dp_sgd(noise_multiplier=problem, l2_clip_norm=last), time.perf_counter()
    tables = [run_dp_sgd(problem, mechanism, epochs, seed) for seed in range(seeds)]
    spent = {str(e): round(mechanism.epsilon(problem.steps(e), DELTA).upper, 4) for e in epochs}
    z = mechanism.noise_multiplier
    rows.append(row("DP-SGD", tables, started, proven_add_or_remove=spent, noise_multiplier=z))
    return rows


def softmax_rows(problem: Problem, epochs: list[int], seeds: int) -> list[dict]:
    """R1 with a softmax block, and what of the difference is the loss, the noise, the settings."""
    # Chosen among 30 settings by the accuracy of two seeds.
    tuned = dataclasses.replace(problem, clip=0.01, step_size=10.0, projection=1.5)
    rows, last = [], epochs[-1]

    def add(name: str, algorithm: bc.ReleasedBlocks, private: bool = True) -> None:
        started = time.perf_counter()
        tables = [run_released(problem, algorithm, epochs, seed) for seed in range(seeds)]
        spent = {
            str(e): round(acc.epsilon(algorithm.events(problem.steps(e)), DELTA).upper, 4)
            for e in epochs
        } if private else "inf"  # fmt: skip
        z = algorithm.noise_multipliers[0]
        rows.append(row(name, tables, started, proven_add_or_remove=spent, noise_multiplier=z))

    for kind, schedule in schedules(problem, last).items():
        squared = released(tuned, last, schedule)
        network = dataclasses.replace(squared.network, loss="softmax")
        add(f"R1, softmax block, {kind} noise", dataclasses.replace(squared, network=network))
        if kind == "constant":
            add("R1, squared loss at the softmax block's settings", squared)
            quiet = dataclasses.replace(squared, network=network, noise_multipliers=0.0)
            add("R1, softmax block, no noise: not private", quiet, private=False)
    return rows


def hidden_rows(problem: Problem, seeds: int, target: float) -> list[dict]:
    """R2 and R3 at a proven replace-one epsilon, beside DP-SGD at the same."""
    rows = []
    batch = next(b for b in range(problem.batch_size, 0, -1) if problem.size % b == 0)
    linear = dataclasses.replace(problem, hidden=()).network
    step = 1.9 / problem.bound**2
    settings = {
        "R3, one layer, 50 epochs": (linear, 50, 1, 0.0),
        "R3, one layer, 200 epochs": (linear, 200, 1, 0.0),
        "R3, one layer, weight decay, 50 epochs": (linear, 50, 1, 0.02),
        "R3, one layer, weight decay, 200 epochs": (linear, 200, 1, 0.02),
        "R2, 2 sweeps of 10 epochs": (problem.network, 10, 2, 0.0),
        "R2, 5 sweeps of 10 epochs": (problem.network, 10, 5, 0.0),
    }
    for name, (network, inner, sweeps, decay) in settings.items():

        def algorithm(z: float, network=network, inner=inner, sweeps=sweeps, decay=decay):
            return bc.HiddenBlocks(
                network, z, 4 * problem.clip, step, batch, problem.size, inner, sweeps,
                bc.Proximal(weight_decay=decay), average=True, direct=network.blocks == 1,
            )  # fmt: skip

        chosen = algorithm(calibrated(lambda z: algorithm(z).event(), target, REPLACE))
        started, tables = time.perf_counter(), []
        for seed in range(seeds):
            weights = bc.train_hidden(chosen, problem.lifted, secret=Secret.from_seed(seed))
            tables.append({inner * sweeps: accuracy(problem, network, weights)})
        exposed = acc.epsilon(chosen.event("compared"), DELTA, REPLACE).upper
        proven = acc.epsilon(chosen.event(), DELTA, REPLACE).upper
        rows.append(
            row(
                name,
                tables,
                started,
                proven_replace_one=proven,
                if_exposed_replace_one=exposed,
                noise_multiplier=chosen.noise_multiplier,
                batch_size=batch,
            )
        )
    for epochs in (50, 200):
        steps, q = problem.steps(epochs), problem.batch_size / problem.size
        z = acc.calibrate_noise_multiplier(target, DELTA, q, steps, REPLACE)
        mechanism = jaxdp.dp_sgd(
            noise_multiplier=z,
            l2_clip_norm=problem.sgd_clip,
            batch_size=problem.batch_size,
            dataset_size=problem.size,
        )
        started, which = time.perf_counter(), dataclasses.replace(problem, hidden=())
        tables = [run_dp_sgd(which, mechanism, [epochs], seed) for seed in range(seeds)]
        name = f"DP-SGD, one layer, {epochs} epochs"
        rows.append(row(name, tables, started, proven_replace_one=target, noise_multiplier=z))
    return rows


def mnist_rows(problem: Problem, epochs: int, seeds: int) -> list[dict]:
    """R1 against DP-SGD on MNIST: accuracy and seconds an epoch."""
    algorithm, mechanism = (
        released(problem, epochs, bc.constant()),
        dp_sgd(noise_multiplier=problem, l2_clip_norm=epochs),
    )
    runs = {
        "R1": functools.partial(run_released, problem, algorithm, [epochs]),
        "DP-SGD": functools.partial(run_dp_sgd, problem, mechanism, [epochs]),
    }
    rows = []
    for name, run in runs.items():
        started = time.perf_counter()
        tables = [run(seed) for seed in range(seeds)]
        each = (time.perf_counter() - started) / seeds / epochs
        z = algorithm.noise_multipliers[0] if name == "R1" else mechanism.noise_multiplier
        rows.append(row(name, tables, started, seconds_an_epoch=round(each, 2), noise_multiplier=z))
    return rows


def median_ms(function: Any, repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(function())
        times.append(1e3 * (time.perf_counter() - started))
    return times


def speed(repeats: int = 60) -> dict:
    """One sweep against one ordinary gradient step; 4 layers of 256, batch 256; taken in turns."""
    network = bc.Network((256,) * 5, 1.5)
    weights = network.init(jax.random.key(0))
    x, y = jax.random.normal(jax.random.key(1), (2, 256, 256)) / 16
    mask, clips = jnp.ones(256, bool), jnp.full(4, 0.05)

    def sweep(proximal: bc.Proximal) -> Any:
        return compiled_sweep(
            network, proximal, None, 0.5, 256.0, weights, x, y, mask, clips, clips,
            jax.random.key(2),
        )  # fmt: skip

    def loss(weights: Any) -> jax.Array:
        h = x.T
        for i, w in enumerate(weights):
            h = w @ (jax.nn.relu(h) if i else h)
        return 0.5 * jnp.mean(jnp.sum((h.T - y) ** 2, axis=1))

    @jax.jit
    def ordinary(weights: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.5 * g, weights, jax.grad(loss)(weights))

    runs = {
        "gradient step": lambda: ordinary(weights),
        "sweep": lambda: sweep(bc.Proximal()),
        "sweep with singular values clipped": lambda: sweep(bc.Proximal(spectral_radius=1.0)),
    }
    for run in runs.values():
        jax.block_until_ready(run())
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            found[name] += median_ms(run, 1)
    medians = {name: statistics.median(times) for name, times in found.items()}
    fastest = {name: min(times) for name, times in found.items()}
    base, swept, clipped = medians.values()
    result = {
        "median_ms": medians, "fastest_ms": fastest, "ratio": swept / base,
        "ratio_of_fastest": fastest["sweep"] / fastest["gradient step"],
        "projection_ms": clipped - swept,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    return result


def save(section: str, value: Any) -> None:
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[section] = value
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "part", choices=("generated", "softmax", "plot", "hidden", "madelon", "mnist", "speed")
    )
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=50)
    given = parser.parse_args()
    if given.part == "speed":
        save("speed", speed())
    elif given.part == "plot":
        print(save_figure(json.loads(RESULTS.read_text()), FIGURE))
    elif given.part == "softmax":
        every = list(range(10, given.epochs + 1, 10))
        save("softmax", softmax_rows(generated(), every, given.seeds))
    elif given.part == "mnist":
        save("mnist", mnist_rows(mnist(given.data_dir), given.epochs, given.seeds))
    elif given.part == "hidden":
        save("hidden", hidden_rows(generated(), given.seeds, 3.0))
    else:
        problem = generated() if given.part == "generated" else madelon(given.data_dir)
        save(given.part, compare(problem, list(range(10, given.epochs + 1, 10)), given.seeds))


if __name__ == "__main__":
    main()
