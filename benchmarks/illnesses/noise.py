"""Accuracy on digits against the noise of a run, for a narrow and a wide network, best of 8 rates.

python -m benchmarks.illnesses.noise

Where ``jaxdp.audit.advice`` begins to speak of noise was set by it: the noise beside the longest
signal possible, and the signal of records that play public ones (the 597 held out). Writes
``benchmarks/results/illnesses_noise.json`` (about six minutes on a core), and prints its table,
which docs/howto/does_not_learn.md shows.
"""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxdp
from benchmarks.illnesses.known_healthy import (
    accuracy,
    applied,
    cross_entropy,
    dense,
    digits,
    parted,
)
from jaxdp.audit.advice import outlook
from jaxdp.audit.examined import Examined
from jaxdp.audit.gradient_numbers import measure

RESULTS = Path(__file__).parents[1] / "results" / "illnesses_noise.json"
SETTINGS = (  # batch, steps, epsilon
    (240, 200, 3.0), (64, 200, 3.0), (16, 200, 3.0), (16, 200, 0.5), (240, 30, 0.3),
    (4, 200, 3.0), (4, 200, 0.5), (240, 200, 0.1), (2, 200, 0.3),
)  # fmt: skip


def logits(params: Any, x: jax.Array) -> jax.Array:
    return applied(params["out"], jnp.tanh(applied(params["in"], x.reshape(-1))))


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return cross_entropy(logits(params, x), y)


def measured(batch: int, steps: int, epsilon: float, width: int) -> dict[str, Any]:
    """The program, as "parts", with the noise of these settings and the signal at their start."""
    train, test = parted(digits(), 1_200)
    params = {"in": dense(0, 64, width), "out": dense(1, width, 10)}
    mechanism = jaxdp.dp_sgd(
        epsilon=epsilon, delta=1e-4, steps=steps,
        l2_clip_norm=1.0, batch_size=batch, dataset_size=1_200,
    )  # fmt: skip
    noise, size = outlook(mechanism).noise, sum(leaf.size for leaf in jax.tree.leaves(params))
    numbers = measure(Examined(mechanism.clipped_grad(loss), params, mechanism, None, test))
    return {
        "parts": (train, test, params, mechanism), "batch": batch, "steps": steps,
        "epsilon": epsilon, "parameters": size, "of_the_run": math.sqrt(size) * noise,
        "in_a_direction": noise, "signal": numbers.mean.signal(numbers.noise),
    }  # fmt: skip


def row(*setting: Any) -> dict[str, Any]:
    """The noise and signal of these settings, and the best accuracy of eight optimizers."""
    found, scores = measured(*setting), []
    train, test, params, mechanism = found.pop("parts")
    score = accuracy(logits, *test)
    for rate in (0.003, 0.03, 0.3, 1.0):
        for optimizer in (optax.sgd(rate, momentum=0.9), optax.adam(rate / 10)):
            trainer = jaxdp.Trainer(loss, mechanism, optimizer, train)
            state = trainer.init(params)
            for each in trainer.batches(found["steps"]):
                state, _ = trainer.step(state, each)
            scores.append(round(score(state.params), 3))
    return found | {"accuracy": max(scores)}


def table(rows: list[dict[str, Any]]) -> str:
    """Lines of Markdown, the least noise first; the two networks side by side."""
    small, large = sorted({line["parameters"] for line in rows})
    lines = [
        "| batch, steps, epsilon | in one direction "
        + "".join(f"| length, {size:,} parameters | signal | accuracy " for size in (small, large))
        + "|",
        "|---|---|---|---|---|---|---|---|",
    ]
    found = {(x["batch"], x["steps"], x["epsilon"], x["parameters"]): x for x in rows}
    for line in sorted(rows, key=lambda x: x["in_a_direction"]):
        if line["parameters"] == small:
            key = line["batch"], line["steps"], line["epsilon"]
            cells = [f"{key[0]}, {key[1]}, {key[2]:g}", f"{line['in_a_direction']:.4f}"]
            for each in (line, found[*key, large]):
                cells += [f"{each['of_the_run']:.2f}", f"{each['signal']:.2g}"]
                cells.append(f"{each['accuracy']:.2f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Trains everything, writes the rows and prints their table."""
    rows = [row(*setting, width) for width in (16, 512) for setting in SETTINGS]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
