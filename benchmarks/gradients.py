"""Clipped gradients side by side with the peers: `python -m benchmarks.gradients [part ...]`.

Parts: cnn, mlp, transformer (speed), slow (processor time and memory of networks that were slow),
exact, memory, compile. The contenders of a row run in turn, round by round (Opacus after them, in a
process of its own); figures are medians over the rounds.
jax_privacy and Opacus take part where they are installed (`pip install jax_privacy==2.0.0
opacus==1.6.0`); a row says who is missing.
"""

import argparse
import functools
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from benchmarks import networks, networks_large, networks_more
from jaxdp.types import Draw

CLIP = 0.1
RULE = jaxdp.clip(CLIP)
RESULTS = Path(__file__).parent / "results" / "gradients.json"


def medians(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of every contender, run in turn."""
    for run in contenders.values():
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - began)
    return {name: round(1e3 * statistics.median(found), 2) for name, found in seconds.items()}


def mean_gradient(loss_fn):
    """The ordinary gradient of the mean loss of a batch."""
    return jax.jit(jax.grad(lambda p, b: jax.vmap(loss_fn, (None, 0))(p, b).mean()))


def clipped(loss_fn, engine="auto", microbatch_size=None):
    """The clipped sum of a batch."""
    grad_fn = jaxdp.clipped_grad(loss_fn, RULE, engine, microbatch_size)
    return jax.jit(lambda p, b: grad_fn(p, b, "all").value)


def chunked(loss_fn, params, batch, rows):
    """Ordinary and clipped gradients of one batch, both by the host loop that training uses."""
    size = jax.tree.leaves(batch)[0].shape[0]
    indices = np.arange(size, dtype=np.int32).reshape(-1, rows)
    draw = Draw(indices, np.ones(indices.shape, bool), 0, size)

    @jax.jit
    def one(total, params, at):
        rows = jax.tree.map(lambda x: x[at], batch)
        grad = jax.grad(lambda p: jax.vmap(loss_fn, (None, 0))(p, rows).sum())(params)
        return jax.tree.map(jnp.add, total, grad)

    def ordinary():
        total = jax.tree.map(jnp.zeros_like, params)
        for at in indices:
            total = one(total, params, at)
        return total

    def by(engine):
        grad_fn = jaxdp.clipped_grad(loss_fn, RULE, engine)
        return lambda: grad_fn(params, batch, draw).value

    return {
        f"jax, ordinary, passes of {rows}": ordinary,
        f"jaxdp, auto, passes of {rows}": by("auto"),
        f"jaxdp, vmap, passes of {rows}": by("vmap"),
    }


def peers(params, loss_fn, batch, microbatch):
    """jax_privacy on the same row, where it is installed."""
    found = {}
    if importlib.util.find_spec("jax_privacy"):
        import jax_privacy

        for size in (None, microbatch):
            grad = jax.jit(
                jax_privacy.clipped_grad(
                    loss_fn, l2_clip_norm=CLIP, keep_batch_dim=False, microbatch_size=size
                )
            )
            label = "jax_privacy" + (f", microbatch {size}" if size else "")
            found[label] = lambda grad=grad: grad(params, batch)
    return found


def opacus(name: str, rounds: int) -> dict[str, float]:
    """Opacus's modes, in a process of their own: two thread pools in one slow each other down."""
    if not importlib.util.find_spec("opacus"):
        return {}
    command = [sys.executable, "-m", "benchmarks.gradients_torch", name, str(rounds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


# Passes of the host loop (None: the whole batch at once), and the microbatch inside one call.
ROWS = {
    "cnn": (networks.cnn, 64, 64),
    "mlp": (networks.mlp, None, 60),
    "transformer": (networks.language_model, 8, 8),
}


def speed(name: str, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    make, passes, microbatch = ROWS[name]
    params, loss_fn, batch = make()
    contenders = {
        "jax, ordinary": lambda: mean(params, batch),
        "jaxdp, auto": lambda: auto(params, batch),
    }
    mean, auto = mean_gradient(loss_fn), clipped(loss_fn)
    micro = clipped(loss_fn, "auto", microbatch)
    contenders[f"jaxdp, auto, microbatch {microbatch}"] = lambda: micro(params, batch)
    if passes:
        contenders.update(chunked(loss_fn, params, batch, passes))
    if name != "mlp":  # seconds each; measured apart
        by_vmap = clipped(loss_fn, "vmap")
        contenders["jaxdp, vmap"] = lambda: by_vmap(params, batch)
    slow = {}
    for label, run in peers(params, loss_fn, batch, microbatch).items():
        (slow if name == "mlp" and "jax_privacy" in label else contenders)[label] = run
    if name == "mlp":
        by_vmap = clipped(loss_fn, "vmap")
        slow["jaxdp, vmap"] = lambda: by_vmap(params, batch)
    found = medians(contenders, rounds)
    found.update(medians(slow, 3) if slow else {})
    found.update(opacus(name, rounds))
    ours = found.get(f"jaxdp, auto, passes of {passes}", found["jaxdp, auto"])
    base = found.get(f"jax, ordinary, passes of {passes}", found["jax, ordinary"])
    ratios = {label: round(ours / ms, 3) for label, ms in found.items() if ms}
    return {"milliseconds": found, "ours over ordinary": round(ours / base, 3), "ours over": ratios}


def temporary(fn: Callable[..., Any], *args: Any) -> float:
    """Megabytes of temporary memory that XLA plans for."""
    return fn.lower(*args).compile().memory_analysis().temp_size_in_bytes / 2**20


def memory() -> dict[str, Any]:
    """Temporary memory: ours, vmap's, and the ordinary gradient's."""
    big = {"batch": 32, "length": 128, "vocabulary": 32_000, "width": 128}
    cases = {
        "mlp 784-1000-10, batch 600": networks.mlp(),
        "transformer, batch 32": networks.language_model(),
        "language model 32,000 words, tied": networks.language_model(**big, tied=True),
        "language model 32,000 words, untied": networks.language_model(**big),
        "mnist cnn, batch 8,192": networks.cnn(8192),
    }
    rows = {}
    for name, (params, loss_fn, batch) in cases.items():
        found = {
            "ordinary": temporary(mean_gradient(loss_fn), params, batch),
            "auto": temporary(clipped(loss_fn), params, batch),
            "auto, microbatch 8": temporary(clipped(loss_fn, "auto", 8), params, batch),
            "vmap": temporary(clipped(loss_fn, "vmap"), params, batch),
        }
        rows[name] = {label: round(mb, 1) for label, mb in found.items()}
        rows[name]["auto over ordinary"] = round(found["auto"] / found["ordinary"], 2)
        print(name, rows[name], flush=True)
    return rows


SLOW = {
    "U-Net, diffusion, 16": networks_more.unet,
    "ViT-tiny, 64 positions, 32": lambda: networks_more.of_images(networks_more.ViT()),
    "MLP 784-1000-10, 600": networks.mlp,
    "mixer, 32": lambda: networks_more.of_images(networks_more.Mixer()),
    "6 blocks, scan and remat, 48": lambda: networks_large.gpt(48, 96, 1000, 128, 6, 4),
    "GRU, 32": lambda: networks_large.recurrent(nn.GRUCell),
    "LSTM, 32": networks_large.recurrent,
    "table, 256": networks_more.tabular,
    "scanned CNN, 32": networks_more.scanned_cnn,
}


def slow(rounds: int) -> dict[str, Any]:
    """Processor time, which other programs disturb less, and temporary memory."""
    rows = {}
    for name, make in SLOW.items():
        params, loss_fn, batch = make()
        runs = {"ordinary": mean_gradient(loss_fn), "auto": clipped(loss_fn)}
        compiled = {label: run.lower(params, batch).compile() for label, run in runs.items()}
        spent: dict[str, list[float]] = {label: [] for label in runs}
        for _ in range(rounds + 1):
            for label, run in compiled.items():
                began = time.process_time()
                jax.block_until_ready(run(params, batch))
                spent[label].append(1e3 * (time.process_time() - began))
        each = zip(spent["auto"][1:], spent["ordinary"][1:], strict=True)
        held = {k: c.memory_analysis().temp_size_in_bytes / 2**20 for k, c in compiled.items()}
        rows[name] = {
            "processor, ms": {k: round(statistics.median(ms[1:]), 1) for k, ms in spent.items()},
            "temporary, MiB": {k: round(mb, 1) for k, mb in held.items()},
            "auto over ordinary": {
                "processor": round(statistics.median(a / b for a, b in each), 2),
                "temporary": round(held["auto"] / held["ordinary"], 2),
            },
        }
        print(name, rows[name], flush=True)
    return rows


def compile_times(repeats: int = 3) -> dict[str, Any]:
    """Seconds to compile, medians; the compilation cache is off."""
    rows = {}
    cases = {"mnist cnn, 64": networks.cnn(64), "WRN-16-4, 16": networks.wide_resnet(16)}
    for name, (params, loss_fn, batch) in cases.items():
        found = {}
        for label, make in {
            "ordinary": mean_gradient,
            "auto": clipped,
            "vmap": lambda f: clipped(f, "vmap"),
        }.items():
            seconds = []
            for _ in range(repeats):
                jax.clear_caches()
                began = time.perf_counter()
                make(loss_fn).lower(params, batch).compile()
                seconds.append(time.perf_counter() - began)
            found[label] = round(statistics.median(seconds), 2)
        rows[name] = {**found, "auto over ordinary": round(found["auto"] / found["ordinary"], 2)}
        print(name, rows[name], flush=True)
    return rows


def _sum_and_norms(grad_fn, params, batch):
    summed, info = grad_fn.with_info(params, batch, "all")
    return summed.value, info.norms


def exactness() -> dict[str, Any]:
    """Ghost and auto against vmap: relative errors of the norms and of the sum."""
    from tests.clipping.architectures import ARCHITECTURES

    makers = {**ARCHITECTURES, "wrn_16_4": lambda: networks.wide_resnet(3)}
    rows = {}
    for name, make in makers.items():
        params, loss_fn, batch = make()
        found = {m: jaxdp.clipped_grad(loss_fn, RULE, m) for m in ("vmap", "ghost", "auto")}
        of = {m: jax.jit(functools.partial(_sum_and_norms, g)) for m, g in found.items()}
        results = {m: run(params, batch) for m, run in of.items()}
        total, norms = results["vmap"]
        flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(total)])
        for engine in ("ghost", "auto"):
            other, again = results[engine]
            gap = np.concatenate([np.ravel(x) for x in jax.tree.leaves(other)]) - flat
            rows.setdefault(name, {})[engine] = {
                "norms": float(np.max(np.abs(again / norms - 1.0))),
                "sum": float(np.linalg.norm(gap) / np.linalg.norm(flat)),
            }
        print(name, rows[name], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=[*ROWS, "slow", "exact", "memory", "compile"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    missing = [p for p in ("jax_privacy", "opacus") if not importlib.util.find_spec(p)]
    rows = json.loads(args.out.read_text()) if args.out.exists() else {}
    rows["machine"] = {
        "device": str(jax.devices()[0]),
        "processor": platform.machine(),
        "jax": jax.__version__,
        "missing": missing,
    }
    others = {"exact": exactness, "memory": memory, "compile": compile_times}
    others["slow"] = functools.partial(slow, args.rounds)
    for part in args.parts:
        rows[part] = others[part]() if part in others else speed(part, args.rounds)
        print(part, json.dumps(rows[part], indent=1), flush=True)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
