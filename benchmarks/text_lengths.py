"""Time of a step on texts of unlike lengths: buckets against one length.

python -m benchmarks.text_lengths [--rows 32] [--steps 20]
"""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp.sampling import bucketed_text, padded_text

WORDS, WIDTH, RECORDS, BATCH = 1_000, 64, 4_000, 256
BUCKETS = {64: 192, 128: 96, 256: 32}


def texts() -> list[dict[str, Any]]:
    """Random tokens; log-normal lengths: two thirds up to 64, a tenth above 128."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.9, 0.7, RECORDS), 1, 400).astype(int)
    return [{"ids": rng.integers(0, WORDS, n), "label": int(n % 2)} for n in lengths]


def parameters() -> dict[str, jax.Array]:
    """Embedding, one head of attention, one layer, output: 81,000 numbers."""
    shapes = dict.fromkeys(("query", "key", "value", "layer"), (WIDTH, WIDTH))
    shapes |= {"table": (WORDS, WIDTH), "out": (WIDTH, 1)}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
    return {name: 0.1 * jax.random.normal(keys[name], shape) for name, shape in shapes.items()}


def loss_fn(params: dict[str, jax.Array], record: dict[str, jax.Array]) -> jax.Array:
    """Cross entropy of one text; padding is seen by nothing."""
    mask = record["ids_mask"]
    x = params["table"][record["ids"]]
    scores = (x @ params["query"]) @ (x @ params["key"]).T / WIDTH**0.5
    x = x + jax.nn.softmax(jnp.where(mask[None, :], scores, -1e9)) @ (x @ params["value"])
    x = x + jnp.tanh(x @ params["layer"])
    logit = jnp.sum(x, axis=0, where=mask[:, None]) / jnp.maximum(mask.sum(), 1) @ params["out"]
    return optax.sigmoid_binary_cross_entropy(logit[0], record["label"])


class Timed:
    """A trainer whose steps are timed.

    Args:
        source: of the texts.
        rows: of a pass; None leaves it to jaxdp.
        steps: how many.
    """

    def __init__(self, source: Any, rows: int | None, steps: int):
        mechanism = jaxdp.dp_sgd(
            noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=BATCH, dataset_size=RECORDS
        )
        self.trainer = jaxdp.Trainer(
            loss_fn, mechanism, optax.sgd(0.1), source, physical_batch_size=rows
        )
        self.state = self.trainer.init(parameters())
        self.batches = self.trainer.batches(steps)

    def step(self) -> float:
        """Seconds of one step, its batch drawn before."""
        batch = next(self.batches)
        begin = time.perf_counter()
        self.state, _ = self.trainer.step(self.state, batch)
        jax.block_until_ready(self.state.params)
        return time.perf_counter() - begin


def main() -> None:
    """Steps of both by turns, so that other work on the machine meets both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=None, help="of a pass; by default jaxdp's own")
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    data = texts()
    sources = {
        "one length": padded_text(data, max(BUCKETS), field="ids"),
        "buckets": bucketed_text(data, BUCKETS, field="ids"),
    }
    timed = {name: Timed(source, asked.rows, asked.steps + 2) for name, source in sources.items()}
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(asked.steps + 2):
        for name, one in timed.items():
            seconds[name].append(one.step())
    seconds = {name: found[2:] for name, found in seconds.items()}  # without compilation
    for name, found in seconds.items():
        print(f"{name}: median {statistics.median(found):.3f} s a step")
    ratios = [a / b for a, b in zip(seconds["one length"], seconds["buckets"], strict=True)]
    print(
        f"one length over buckets: median {statistics.median(ratios):.2f}, "
        f"from {min(ratios):.2f} to {max(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
