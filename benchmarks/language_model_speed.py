"""A private step of a language model beside an ordinary one: seconds, memory, compilation.

python -m benchmarks.language_model_speed [lora] [full] [--layers 30] [--rounds 7] [--rows 16]

The network is SmolLM2-135M's (examples/language_model/llama.py) with random weights; texts have 64
tokens. Of each kind two pairs run in turn, round by round: a whole step (``Trainer.step`` beside a
loop over the same physical batches and one optax update), and the gradient of one physical batch.
The ordinary loop is on the host, like jaxdp's: a ``scan`` over the batches was a third slower, for
XLA's CPU backend then makes float32 copies of what is in bfloat16. Figures are medians; memory is
XLA's own account of the compiled programs: of a gradient what is temporary, of a step all, with
parameters, optimizer state and sums.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks.gradients import medians
from jaxdp.training import physical_batch

sys.path.append(f"{Path(__file__).parents[1] / 'examples' / 'language_model'}")

import llama

RESULTS = Path(__file__).parent / "results" / "language_model_speed.json"
LENGTH, RECORDS, RANK, ADAPTED = 64, 256, 8, ("q_proj", "v_proj")
ROWS = {"lora": 16, "full": "auto"}


def smollm2(layers: int = 30, vocabulary: int = 49_152) -> llama.Config:
    """The configuration of SmolLM2-135M, with fewer layers for a quick look."""
    return llama.Config(vocabulary, 576, 1_536, layers, 9, 3, 64, rope_theta=100_000.0)


def weights(config: llama.Config, dtype: Any) -> dict[str, Any]:
    """Random parameters: matrices in ``dtype``, norms in float32."""
    params = llama.init(jax.random.key(0), config)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if "norm" in jax.tree_util.keystr(path) else leaf.astype(dtype),
        params,
    )


class Ordinary:
    """The step of somebody who needs no privacy: gradients added up, then optax."""

    def __init__(self, loss, optimizer, params, trainable, batch_size):
        flags = jax.tree_util.tree_map_with_path(
            lambda path, _: trainable(jax.tree_util.keystr(path)), params
        )
        self.trained = jax.tree.map(lambda p, flag: jnp.array(p) if flag else None, params, flags)
        self.frozen = jax.tree.map(lambda p, flag: None if flag else p, params, flags)
        self.state = optimizer.init(self.trained)

        def gradient(trained, frozen, rows, mask):
            def total(trained):
                whole = jax.tree.map(
                    lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None
                )
                return jnp.sum(jax.vmap(loss, (None, 0))(whole, rows), where=mask) / batch_size

            return jax.grad(total)(trained)

        def add(total, trained, frozen, data, at, mask):
            rows = jax.tree.map(lambda x: x[at], data)
            return jax.tree.map(jnp.add, total, gradient(trained, frozen, rows, mask))

        def update(trained, state, grads):
            updates, state = optimizer.update(grads, state, trained)
            return optax.apply_updates(trained, updates), state

        self.gradient, self.add = jax.jit(gradient), jax.jit(add, donate_argnums=0)
        self.update = jax.jit(update, donate_argnums=(0, 1))
        self.zeros = jax.jit(lambda trained: jax.tree.map(jnp.zeros_like, trained))

    def __call__(self, data, draw):
        total = self.zeros(self.trained)
        for at, mask in zip(draw.indices, draw.mask, strict=True):
            total = self.add(total, self.trained, self.frozen, data, at, mask)
        self.trained, self.state = self.update(self.trained, self.state, total)
        return self.trained


def memory_of(compiled: Any) -> int:
    """The bytes that a compiled program needs, without its arguments and results."""
    return int(compiled.memory_analysis().temp_size_in_bytes)


def whole_memory_of(compiled: Any) -> int:
    """The bytes that a compiled program needs, arguments and results included."""
    found = compiled.memory_analysis()
    size = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    return int(size - found.alias_size_in_bytes)


def compiled(jitted: Any, *args: Any, **options: Any) -> tuple[Any, float]:
    """The compiled program, and the seconds that it took to trace and compile."""
    began = time.perf_counter()
    program = jitted.lower(*args, **options).compile()
    return program, time.perf_counter() - began


def measured(kind: str, layers: int, rounds: int, rows: Any, batch_size: int) -> dict[str, Any]:
    """The figures of "lora" or "full".

    Args:
        kind: what is trained.
        layers: of the network.
        rounds: of timing.
        rows: of a physical batch, or "auto".
        batch_size: records of a step, the same number in every one.
    """
    config = smollm2(layers)
    params = weights(config, jnp.bfloat16 if kind == "lora" else jnp.float32)
    if kind == "lora":
        params = llama.with_lora(jax.random.key(1), params, RANK, ADAPTED)
    trainable = (lambda path: "lora" in path) if kind == "lora" else (lambda path: True)
    tokens = jax.random.randint(jax.random.key(2), (RECORDS, LENGTH), 0, config.vocab_size)

    def loss(params, tokens):
        return llama.losses(params, tokens, config).mean()

    mechanism = jaxdp.dp_sgd(
        noise_multiplier=1.0,
        l2_clip_norm=1.0,
        batch_size=batch_size,
        dataset_size=RECORDS,
        sampling="fixed_size",
    )
    optimizer = optax.adam(1e-4)
    trainer = jaxdp.Trainer(
        loss, mechanism, optimizer, tokens, trainable=trainable, physical_batch_size=rows
    )
    state = trainer.init(params)
    rows = trainer.physical_batch_size
    ordinary = Ordinary(loss, optimizer, params, trainable, batch_size)
    grad_fn, frozen, one = trainer.clipped_grad, ordinary.frozen, tokens[:rows]
    everyone = np.ones(rows, bool)

    # Compiled first, each program by itself.
    def clip(params, rows):
        return grad_fn(params, rows, "all").value

    own, seconds = compiled(ordinary.gradient, ordinary.trained, frozen, one, everyone)
    clipped, private_seconds = compiled(jax.jit(clip), params, one)
    found: dict[str, Any] = {
        "layers": layers,
        "physical_batch_size": rows,
        "batch_size": batch_size,
        "gradient": {
            "temporary_megabytes": _pair(memory_of(own) / 1e6, memory_of(clipped) / 1e6),
            "compilation_seconds": _pair(seconds, private_seconds),
        },
    }
    print(json.dumps(found), flush=True)
    gradients = {
        "ordinary": lambda: own(ordinary.trained, frozen, one, everyone),
        "private": lambda: clipped(params, one),
    }
    found["gradient"]["milliseconds"] = _pair(*medians(gradients, rounds).values())
    print(json.dumps(found["gradient"]), flush=True)

    # The step whole.
    batches = trainer.batches(rounds + 1)
    batch = next(batches)
    began = time.perf_counter()
    jax.block_until_ready(ordinary(tokens, batch.draw))
    own_first = time.perf_counter() - began
    began = time.perf_counter()
    state, _ = trainer.step(state, batch)
    jax.block_until_ready(state)
    first = time.perf_counter() - began
    times: dict[str, list[float]] = {"ordinary": [], "private": []}
    for batch in batches:
        began = time.perf_counter()
        jax.block_until_ready(ordinary(tokens, batch.draw))
        then = time.perf_counter()
        state, _ = trainer.step(state, batch)
        jax.block_until_ready(state)
        times["ordinary"].append(then - began)
        times["private"].append(time.perf_counter() - then)
    given = ordinary.trained, ordinary.trained, frozen, tokens, *batch.draw.indices[:1]
    own, _ = compiled(ordinary.add, *given, batch.draw.mask[0])
    own_held, held = map(physical_batch.bytes_of, (ordinary.state, state.opt_state))
    own_median, median = (statistics.median(each) for each in times.values())
    example = (grad_fn, params, trainer.source.example, rows, RECORDS, {})
    found["step"] = {
        "megabytes": _pair(
            (whole_memory_of(own) + own_held) / 1e6,
            (physical_batch.bytes_of_physical_batch(*example) + held) / 1e6,
        ),
        "milliseconds": _pair(1e3 * own_median, 1e3 * median),
        "compilation_seconds": _pair(own_first - own_median, first - median),
    }
    return found


def _pair(ordinary: float, private: float) -> dict[str, float]:
    return {
        "ordinary": round(ordinary, 2),
        "private": round(private, 2),
        "ratio": round(private / ordinary, 3),
    }


def main() -> None:
    """Prints the figures of what is asked for; writes those of all 30 layers, others stay."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", help="lora, full; both if left out")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", help="of a physical batch, or auto [default: 16, full auto]")
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args()
    kept = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    for kind in given.kinds or ROWS:
        rows = given.rows or ROWS[kind]
        rows = rows if rows == "auto" else int(rows)
        found = measured(kind, given.layers, given.rounds, rows, given.batch)
        print(json.dumps(found, indent=1), flush=True)
        if given.layers == 30:
            kept[kind] = found | {"machine": platform.processor() or platform.machine()}
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
