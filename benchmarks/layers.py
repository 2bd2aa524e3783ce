"""Every layer type that people use, one by one: `python -m benchmarks.layers [name ...]`.

Of each: parameters by engine, errors against float64 (of 4 examples), time and temporary memory
of the ordinary gradient, of ours and of per-example gradients. The contenders of a row run in turn,
round by round. jax_privacy takes part where it is installed. `--table` only writes the table anew.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import time
from pathlib import Path

import jax

import jaxdp
from benchmarks.gradients import CLIP, RULE, clipped, mean_gradient, medians, temporary
from tests.clipping import layers

RESULTS = Path(__file__).parent / "results" / "layers.json"
README = Path(__file__).parent / "README.md"
# Seconds from which a contender runs once.
SLOW = 3.0
MARKS = ("<!-- layers -->", "<!-- end of layers -->")
SIZES = layers.Sizes(rows=32, width=64, length=64, side=16, depth=8, words=10_000)
WIDER = {
    "linear": dataclasses.replace(SIZES, rows=256, width=512),
    **{
        name: dataclasses.replace(SIZES, width=128)
        for name in layers.NAMES["linen"]
        if name.startswith(("rnn", "gru", "lstm", "linear, positions", "attention"))
    },
}


def contenders(loss_fn, framework):
    """Functions of parameters and batch, by name; of nnx only what differs from linen."""
    found = {"ordinary": mean_gradient(loss_fn), "jaxdp": clipped(loss_fn)}
    if framework == "linen":
        found["vmap"] = clipped(loss_fn, "vmap")
        if importlib.util.find_spec("jax_privacy"):
            import jax_privacy

            found["jax_privacy"] = jax.jit(
                jax_privacy.clipped_grad(loss_fn, l2_clip_norm=CLIP, keep_batch_dim=False)
            )
    return found


def measured(framework, name, rounds):
    """One row."""
    sizes = WIDER.get(name, SIZES)
    params, loss_fn, batch = layers.make(framework, name, sizes)
    engines = {}
    rows = jaxdp.clipped_grad(loss_fn, RULE).plan(params, batch)
    for row, leaf in zip(rows, jax.tree.leaves(params), strict=False):
        engines[row.engine] = engines.get(row.engine, 0) + leaf.size
    runs = contenders(loss_fn, framework)
    bound = {name: lambda run=run: run(params, batch) for name, run in runs.items()}
    return {
        "engines": engines,
        "reasons": {row.path: f"{row.engine}: {row.reason}" for row in rows},
        "errors": errors(framework, name, dataclasses.replace(sizes, rows=4)),
        "milliseconds": timed(bound, rounds),
        "megabytes": {n: round(temporary(run, params, batch), 2) for n, run in runs.items()},
    }


def timed(runs, rounds):
    """Milliseconds; of what takes seconds, those of one run."""
    slow = {}
    for name, run in runs.items():
        jax.block_until_ready(run())
        began = time.perf_counter()
        jax.block_until_ready(run())
        if (seconds := time.perf_counter() - began) > SLOW:
            slow[name] = round(1e3 * seconds, 2)
    return medians({n: run for n, run in runs.items() if n not in slow}, rounds) | slow


def errors(framework, name, sizes):
    """Relative errors of norms and of the clipped sum, by engine."""
    params, loss_fn, batch = layers.make(framework, name, sizes)
    reference = layers.exact(framework, name, sizes, params)
    grads = {e: jaxdp.clipped_grad(loss_fn, RULE, e) for e in ("auto", "ghost")}
    return {e: layers.errors(g, params, batch, *reference) for e, g in grads.items()}


def table(results):
    """The rows in Markdown."""
    lines = [
        "| layer | parameters by engine | error of norms, sum | ordinary, ms | jaxdp | `vmap` | "
        "jax_privacy | ordinary, MB | jaxdp | `vmap` |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results["rows"].items():
        ms, mb = row["milliseconds"], row["megabytes"]
        used = ", ".join(f"{engine} {count:,}" for engine, count in row["engines"].items())
        off = ", ".join(f"{error:.0e}" for error in row["errors"]["auto"])
        times = [_over(ms, each, "ordinary") for each in ("jaxdp", "vmap", "jax_privacy")]
        memory = [_over(mb, each, "ordinary") for each in ("jaxdp", "vmap")]
        cells = [name, used, off, f"{ms['ordinary']:.3g}", *times, f"{mb['ordinary']:.3g}", *memory]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _over(found, name, base):
    return f"{found[name] / found[base]:.2f} ×" if name in found and found[base] else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="such as 'linen gru'; all unless given")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    every = [
        f"{framework} {name}" for framework in layers.NAMES for name in layers.NAMES[framework]
    ]
    for label in [] if args.table else args.names or every:
        framework, name = label.split(" ", 1)
        row = measured(framework, name, args.rounds)
        row["load"] = round(os.getloadavg()[0], 1)
        results["rows"][label] = row
        print(label, {k: v for k, v in row.items() if k != "reasons"}, flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    results["rows"] = {label: results["rows"][label] for label in every if label in results["rows"]}
    results["machine"] = {"device": str(jax.devices()[0]), "jax": jax.__version__}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    text = README.read_text()
    if all(mark in text for mark in MARKS):
        before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
        README.write_text(f"{before}{MARKS[0]}\n\n{table(results)}\n\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
