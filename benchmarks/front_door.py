"""Host time of a step by the front door, beside a hand-written jitted loop; ledger on disk.

``python -m benchmarks.front_door [--steps 10000] [--folder DIR]`` prints main-thread processor time
a step of both, the time of charging at the beginning and at the end, and the cost of one fsync.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import accounting as acc

BATCH, RECORDS, WIDTH = 64, 10_000, 32


def loss_fn(params, example):
    x, y = example
    return jnp.square(jnp.tanh(x @ params["w"]) @ params["v"] - y)


def problem():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(RECORDS, WIDTH)), jnp.float32)
    y = jnp.asarray(rng.normal(size=RECORDS), jnp.float32)
    params = {"w": jnp.zeros((WIDTH, 16)), "v": jnp.zeros(16)}
    return (x, y), params


def front_door(steps, folder):
    data, params = problem()
    mechanism = jaxdp.dp_sgd(
        noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=BATCH, dataset_size=RECORDS
    )
    trainer = jaxdp.Trainer(
        loss_fn, mechanism, optax.sgd(0.1), data, ledger=folder / "ledger.jsonl"
    )
    state = trainer.init(params)
    for batch in trainer.batches(20):  # compiles
        state, _ = trainer.step(state, batch)
    jax.block_until_ready(state.params)
    main, wall = time.thread_time(), time.perf_counter()
    for batch in trainer.batches(steps):
        state, _ = trainer.step(state, batch)
    jax.block_until_ready(state.params)
    took = time.thread_time() - main, time.perf_counter() - wall
    trainer.close()
    return took


def by_hand(steps, rows):
    """The same clipped gradients on draws made beforehand, one jitted function, a host loop."""
    (x, y), params = problem()
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))
    tx = optax.chain(jaxdp.privatize(1.0, BATCH), optax.sgd(0.1))
    mechanism = jaxdp.dp_sgd(
        noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=BATCH, dataset_size=RECORDS
    )
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, RECORDS, rows).astype(np.int32) for _ in range(100)]
    mask = np.arange(rows) < BATCH

    @jax.jit
    def step(params, opt_state, indices, mask, key):
        summed = grad_fn(params, (x[indices], y[indices]), mask)
        noise = mechanism.simulated_key(key)
        updates, opt_state = tx.update(summed, opt_state, params, key=noise)
        return optax.apply_updates(params, updates), opt_state

    opt_state, keys = tx.init(params), list(jax.random.split(jax.random.key(0), 1_000))
    for i in range(20):
        params, opt_state = step(params, opt_state, draws[i], mask, keys[i])
    jax.block_until_ready(params)
    main, wall = time.thread_time(), time.perf_counter()
    for i in range(steps):
        params, opt_state = step(params, opt_state, draws[i % 100], mask, keys[i % 1_000])
    jax.block_until_ready(params)
    return time.thread_time() - main, time.perf_counter() - wall


def charging(count, folder):
    """Seconds a charge among the first and the last thousand of ``count`` on disk."""
    ledger = jaxdp.Ledger(folder / "charges.jsonl")
    event = acc.PoissonSampled(acc.Gaussian(1.0), 0.01)
    stream, _ = ledger.new_stream()
    seconds = []
    for step in range(count):
        began = time.perf_counter()
        ledger.charge(event, stream=stream, first_step=step)
        seconds.append(time.perf_counter() - began)
    ledger.close()
    return statistics.median(seconds[:1_000]), statistics.median(seconds[-1_000:])


def one_fsync(folder):
    seconds = []
    with (folder / "fsync").open("ab") as file:
        for _ in range(200):
            file.write(b"x" * 300)
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--charges", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path.home())
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        print(f"one fsync: {1e3 * one_fsync(folder):.3f} ms")
        first, last = charging(given.charges, folder)
        print(f"a charge: {1e3 * first:.3f} ms at first, {1e3 * last:.3f} at {given.charges:,}")
        rows, pairs = 120, []
        for turn in range(given.rounds):
            (folder / str(turn)).mkdir()
            pairs.append((front_door(given.steps, folder / str(turn)), by_hand(given.steps, rows)))
        for name, i in (("main thread", 0), ("wall", 1)):
            ours = statistics.median(1e3 * a[i] / given.steps for a, _ in pairs)
            hand = statistics.median(1e3 * b[i] / given.steps for _, b in pairs)
            more = ours - hand
            print(f"{name}: front door {ours:.3f} ms a step, by hand {hand:.3f}: {more:+.3f}")


if __name__ == "__main__":
    main()
