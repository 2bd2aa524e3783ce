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
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxdp
from benchmarks.gradients import CLIP, RULE, clipped, mean_gradient, medians, temporary
from tests.clipping import layers
from tests.clipping.architectures import opened
from tests.clipping.references import Reference, gap


class NnxBag(nnx.Module):
    """``Bag`` in nnx."""

    def __init__(self, words, width, **options):
        self.embed = nnx.Embed(words, width, **options)

    def __call__(self, ids):
        return self.embed(ids).mean(-2)


class NnxSequenceBias(nnx.Module):
    """``SequenceBias`` in nnx."""

    def __init__(self, width, param_dtype, rngs):
        self.token = nnx.Param(jax.random.normal(rngs.params(), (width,), param_dtype))

    def __call__(self, x):
        token = jnp.broadcast_to(self.token[...], (*x.shape[:-2], 1, x.shape[-1]))
        return jnp.concatenate([x, token], -2)


def _nnx(s, dtype):
    """Name -> (shape of an example, a function that makes the layer)."""
    o = {"param_dtype": dtype, "rngs": nnx.Rngs(0)}
    line, plane = (s.length, s.width), (s.side, s.side, s.width)
    w, both = s.width, (s.width, s.width)

    def recurrent(cell):
        # Some of them are of float32 unless told otherwise.
        return line, lambda: nnx.RNN(cell(*both, dtype=dtype, **o))

    def convolution(shape, options, rank):
        return shape, lambda: nnx.Conv(*both, (3,) * rank, **options, **o)

    def two_axes():
        return nnx.LinearGeneral(line, (2, w // 2), axis=(-2, -1), **o)

    return {name: convolution(*row) for name, row in layers.convolutions(s).items()} | {
        "linear": ((w,), lambda: nnx.Linear(*both, **o)),
        "linear, positions": (line, lambda: nnx.Linear(*both, **o)),
        "linear, two axes": (line, two_axes),
        "einsum": (line, lambda: nnx.Einsum("...td,hdk->...thk", (2, w, w), **o)),
        "conv transposed": (plane, lambda: nnx.ConvTranspose(*both, (3, 3), strides=(2, 2), **o)),
        "embedding": (None, lambda: nnx.Embed(s.words, w, **o)),
        "embedding bag": (None, lambda: NnxBag(s.words, w, **o)),
        "layer norm": (line, lambda: nnx.LayerNorm(w, **o)),
        "rms norm": (line, lambda: nnx.RMSNorm(w, **o)),
        "group norm": (plane, lambda: nnx.GroupNorm(w, 2, **o)),
        "instance norm": (plane, lambda: nnx.InstanceNorm(w, **o)),
        "rnn": recurrent(nnx.SimpleCell),
        "gru": recurrent(nnx.GRUCell),
        "lstm": recurrent(nnx.LSTMCell),
        "lstm, optimized": recurrent(nnx.OptimizedLSTMCell),
        "attention": (line, lambda: nnx.MultiHeadAttention(2, w, decode=False, **o)),
        "sequence bias": (line, lambda: NnxSequenceBias(w, **o)),
    }


_OF = {"linen": layers.linen, "nnx": _nnx}
NAMES = {framework: tuple(of(layers.Sizes(), jnp.float32)) for framework, of in _OF.items()}


def made(framework, name, sizes, dtype):
    """Parameters (None of linen), the loss of one example, and a batch."""
    shape, layer = _OF[framework](sizes, dtype)[name]
    if framework == "linen":
        return None, *layers.of_layer(layer.apply, shape, sizes, dtype)
    graph, params, rest = nnx.split(layer(), nnx.Param, ...)
    apply = lambda params, x: nnx.merge(graph, params, rest, copy=True)(x)  # noqa: E731
    return params, *layers.of_layer(apply, shape, sizes, dtype)


def make(framework, name, sizes):
    """Parameters, the loss of one example, and a batch."""
    params, loss_fn, batch = made(framework, name, sizes, jnp.float32)
    if framework == "linen":
        _, layer = layers.linen(sizes, jnp.float32)[name]
        params = jax.jit(layer.init)(jax.random.key(0), batch[:1])
    return params, loss_fn, batch


def exact(framework, name, sizes, params):
    """Norms [m] and the reference in float64, at the parameters that ``make`` gave."""
    # Flax asks for the common type of float64 and float32.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        _, loss_fn, batch = made(framework, name, sizes, jnp.float64)
        found = Reference(jax.tree.map(lambda x: x.astype(jnp.float64), params), loss_fn, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(found.grads)} == {np.dtype(np.float64)}
    return found.norms(), found


def errors_of(grad_fn, params, batch, norms, reference):
    """The largest relative error of norms, and that of the sum clipped to the median norm."""
    bound = np.float32(np.median(norms))
    value, info = opened(grad_fn)(params, batch, bound=bound)
    wanted = reference.clipped(jaxdp.clip(1.0), bound=float(bound))
    off = np.max(np.abs(np.asarray(info.norms, np.float64) / norms - 1.0))
    return float(off), float(gap(value, wanted))


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
        for name in NAMES["linen"]
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
    params, loss_fn, batch = make(framework, name, sizes)
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
    params, loss_fn, batch = make(framework, name, sizes)
    reference = exact(framework, name, sizes, params)
    grads = {e: jaxdp.clipped_grad(loss_fn, RULE, e) for e in ("auto", "ghost")}
    return {e: errors_of(g, params, batch, *reference) for e, g in grads.items()}


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
    every = [f"{framework} {name}" for framework in NAMES for name in NAMES[framework]]
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
