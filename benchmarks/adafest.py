"""Noise in chosen rows of a table beside noise in all: `python -m benchmarks.adafest`.

Processor time and XLA's temporary memory of one step on a table of 300,000 rows of 16, for 512
records of four items each: clipped sum, noise and update of SGD in one program. Programs take
turns; medians, into benchmarks/results/adafest.json. Where the machine is shared, set
XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1".
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import optimizers
from jaxdp.optimizers.algorithm import as_algorithm

RESULTS = Path(__file__).parent / "results" / "adafest.json"
ROWS, WIDTH, RECORDS, ITEMS = 300_000, 16, 512, 4


def loss_fn(params: Any, items: jax.Array, liked: jax.Array) -> jax.Array:
    """Of one record: a score that is linear in the sum of its items' rows."""
    score = params["items"][items].sum(0) @ params["weights"]
    return optax.sigmoid_binary_cross_entropy(score, liked)


def ordinary(params: Any, data: Any) -> Any:
    """A step of SGD without privacy."""
    grads = jax.grad(lambda p: jax.vmap(loss_fn, (None, 0, 0))(p, *data).sum())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    rng = np.random.default_rng(0)
    items = np.minimum(rng.zipf(1.3, (RECORDS, ITEMS)), ROWS).astype(np.int32) - 1
    data = jnp.asarray(items), jnp.asarray(rng.integers(0, 2, RECORDS), jnp.float32)
    params = {"items": jnp.zeros((ROWS, WIDTH)), "weights": jnp.ones(WIDTH)}
    mechanism = jaxdp.dp_sgd(
        noise_multiplier=1.0, l2_clip_norm=0.5, batch_size=RECORDS, dataset_size=100 * RECORDS
    )
    sparse = optimizers.dp_adafest(
        mechanism,
        optax.sgd(0.1),
        table="items",
        rows=lambda items, liked: items,
        threshold=10.0,
        cap=1_024,
        count_noise_multiplier=2.0,
    )
    programs = {"ordinary": jax.jit(ordinary).lower(params, data).compile()}
    for name, algorithm in (("dense", as_algorithm(mechanism, optax.sgd(0.1))), ("sparse", sparse)):
        grad_fn, link = algorithm.clipped_grad(loss_fn), algorithm.noise_link()
        key, state = algorithm.mechanism.simulated_key(jax.random.key(0)), link.init(params)

        def step(
            params: Any,
            data: Any,
            grad_fn: Any = grad_fn,
            link: Any = link,
            given: Any = (key, state),
        ) -> Any:
            summed = grad_fn.with_info(params, data, "all")[0]
            mean = link.update(summed, given[1], params, key=given[0])[0]
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, mean)

        programs[name] = jax.jit(step).lower(params, data).compile()
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            begun = time.process_time()
            jax.block_until_ready(program(params, data))
            seconds[name].append(time.process_time() - begun)
    rows = {}
    for name, program in programs.items():
        memory = program.memory_analysis().temp_size_in_bytes / 1e6
        each = sorted(round(1e3 * one, 1) for one in seconds[name])
        rows[name] = {"milliseconds": statistics.median(each), "all": each, "MB": round(memory, 1)}
        print(f"{name}: {rows[name]['milliseconds']} ms, {memory:.1f} MB")
    RESULTS.write_text(json.dumps({"jax": jax.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
