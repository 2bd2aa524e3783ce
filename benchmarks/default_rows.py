"""Time of a step with the physical batch that ``Trainer`` chooses, beside an optax loop.

``python -m benchmarks.default_rows [--rounds 7] [--networks cnn gpt] [--batches 16 32 64 256]``
alternates three loops on one network and one expected batch: optax without privacy (mean gradient
of exactly so many rows), the trainer with one pass that holds nearly every draw (B + 6√B + 6 rows,
the default before), and the trainer as it chooses. It prints medians over the rounds of each loop's
mean step, and medians of the ratios within a round. Under eight minutes on two idle cores. With
``--processor`` it counts processor time, which other work on the machine changes less.
"""

import argparse
import math
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks import networks

RECORDS = 4_096
NETWORKS = {"cnn": networks.cnn, "gpt": networks.language_model}
# Steps of one round: enough for draws of several passes to take their share, at most seconds.
STEPS = {
    "cnn": {16: 100, 32: 80, 64: 50, 256: 15},
    "gpt": {16: 12, 32: 8, 64: 4, 256: 2},
}


class Ordinary:
    """A hand-written optax loop: the mean gradient of ``batch`` rows, gathered on the device."""

    rows = "–"

    def __init__(self, params, loss_fn, data, batch):
        tx, rng = optax.sgd(0.01), np.random.default_rng(0)
        self._draws = [rng.integers(0, RECORDS, batch).astype(np.int32) for _ in range(100)]
        self._taken = 0

        def mean(params, rows):
            return jnp.mean(jax.vmap(loss_fn, (None, 0))(params, rows))

        @jax.jit
        def step(params, opt_state, data, indices):
            rows = jax.tree.map(lambda leaf: leaf[indices], data)
            updates, opt_state = tx.update(jax.grad(mean)(params, rows), opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        self._step, self._data = step, data
        self._state = params, tx.init(params)

    def take(self, steps):
        for _ in range(steps):
            self._state = self._step(*self._state, self._data, self._draws[self._taken % 100])
            self._taken += 1
        jax.block_until_ready(self._state)


class Private:
    """The trainer, with so many rows of a physical batch; None leaves them to it."""

    def __init__(self, params, loss_fn, data, batch, rows=None):
        mechanism = jaxdp.dp_sgd(
            noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=batch, dataset_size=RECORDS
        )
        self._trainer = jaxdp.Trainer(
            loss_fn, mechanism, optax.sgd(0.01), data, physical_batch_size=rows
        )
        self._state = self._trainer.init(params)
        self.rows = self._trainer.physical_batch_size

    def take(self, steps):
        for batch in self._trainer.batches(steps):
            self._state, _ = self._trainer.step(self._state, batch)
        jax.block_until_ready(self._state.params)


def whole_draw(batch):
    return -(-(batch + 6 * math.isqrt(batch) + 6) // 8) * 8


def compared(network, batch, rounds, clock):
    params, loss_fn, data = NETWORKS[network](RECORDS)
    loops = {
        "optax": Ordinary(params, loss_fn, data, batch),
        "one pass": Private(params, loss_fn, data, batch, whole_draw(batch)),
        "chosen": Private(params, loss_fn, data, batch),
    }
    steps = STEPS[network][batch]
    for loop in loops.values():
        loop.take(2)  # compiles
    taken = {name: [] for name in loops}
    for turn in range(rounds):
        names = list(loops) if turn % 2 else list(reversed(loops))
        for name in names:
            began = clock()
            loops[name].take(steps)
            taken[name].append((clock() - began) / steps)
    return loops, taken


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", type=int, choices=[16, 32, 64, 256])
    parser.add_argument("--processor", action="store_true")
    given = parser.parse_args()
    clock = time.process_time if given.processor else time.perf_counter
    print("| network | batch | optax | one pass: rows | | | chosen: rows | | |")
    print("|---|---|---|---|---|---|---|---|---|")
    for network in given.networks:
        for batch in given.batches or [16, 32, 64, 256]:
            loops, taken = compared(network, batch, given.rounds, clock)
            cells = [network, str(batch), f"{1e3 * statistics.median(taken['optax']):.1f} ms"]
            for name in ("one pass", "chosen"):
                pairs = zip(taken[name], taken["optax"], strict=True)
                ratio = statistics.median(ours / theirs for ours, theirs in pairs)
                step = 1e3 * statistics.median(taken[name])
                cells += [str(loops[name].rows), f"{step:.1f} ms", f"{ratio:.2f} ×"]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
