"""Gradients at the size people fine-tune: `python -m benchmarks.large [part ...]`.

Parts: memory (XLA's account of the temporary memory, compiled and not run), speed (contenders in
turn, medians), compile (seconds), precision (operations by type and precision), tpu (the same
networks compiled ahead of time for a TPU, where libtpu is installed: TPU_LIBRARY_PATH).
"""

import argparse
import collections
import importlib.util
import json
import math
import os
import statistics
import time
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks import networks, networks_large
from benchmarks.gradients import CLIP, clipped, mean_gradient, opacus, temporary

RESULTS = Path(__file__).parent / "results" / "large.json"
HALF = jnp.bfloat16

# What is compiled and not run: name -> (maker, microbatch that is asked for; all rows of those
# that take microbatches by themselves).
MEMORY = {
    "GPT-2 small, scan and remat, 64 rows of 128": (
        lambda: networks_large.gpt(64, 128, shapes=True), 64),
    "GPT-2 small, scan and remat, 16 rows of 1,024": (
        lambda: networks_large.gpt(16, 1024, shapes=True), 16),
    "GPT 3.4 M, scan and remat, 8 rows of 128": (
        lambda: networks_large.gpt(8, 128, 1000, 256, 4, 4, shapes=True), 8),
    "6 blocks, scan and remat, 48 rows of 96": (
        lambda: networks_large.gpt(48, 96, 1000, 128, 6, 4, shapes=True), 48),
    "WRN-16-4, 64 rows": (lambda: networks.wide_resnet(64), 16),
    "WRN-16-4, 64 rows, 16 augmentations": (
        lambda: networks_large.with_views(networks.wide_resnet(64)), 8),
    "ViT-B/16, 64 rows": (lambda: networks_large.vision_transformer(64), 16),
    "ResNet-18, 32 rows": (lambda: networks_large.resnet18(32), 8),
    "small CNN, 32 rows": (lambda: networks_large.small_cnn(32), 16),
    "LSTM text, 32 rows of 64": (lambda: networks_large.recurrent(), 16),
    "GRU text, 32 rows of 64": (lambda: networks_large.recurrent(nn.GRUCell), 16),
}  # fmt: skip
SPEED = {
    "small CNN, 32 rows": lambda: networks_large.small_cnn(32),
    "ResNet-18, 8 rows": lambda: networks_large.resnet18(8),
    "WRN-16-4, 16 rows": lambda: networks.wide_resnet(16),
    "LSTM text, 32 rows of 64": lambda: networks_large.recurrent(),
    "GRU text, 32 rows of 64": lambda: networks_large.recurrent(nn.GRUCell),
    "RNN text, 32 rows of 64": lambda: networks_large.recurrent(nn.SimpleCell),
    "GPT 3.4 M, scan and remat, 8 rows of 128": lambda: networks_large.gpt(
        8, 128, 1000, 256, 4, 4),
    "6 blocks, scan and remat, 48 rows of 96": lambda: networks_large.gpt(
        48, 96, 1000, 128, 6, 4),
    "GPT 3.4 M, written out, 8 rows of 128": lambda: networks_large.gpt(
        8, 128, 1000, 256, 4, 4, scanned=False, remat=False),
}  # fmt: skip
# Those that networks_torch has.
IN_TORCH = {name for name in SPEED if "scan" not in name and "WRN" not in name}


def memory(only: str = "", known: dict | None = None) -> dict:
    """Mebibytes of temporary memory, ordinary and ours; of those networks that are named so."""
    rows = dict(known or {})
    for name, (make, microbatch) in MEMORY.items():
        if only not in name:
            continue
        params, loss_fn, batch = make()
        found = {
            "ordinary": temporary(mean_gradient(loss_fn), params, batch),
            "auto": temporary(clipped(loss_fn), params, batch),
            f"auto, microbatch {microbatch}": temporary(
                clipped(loss_fn, "auto", microbatch), params, batch
            ),
        }
        rows[name] = {label: round(mb, 1) for label, mb in found.items()}
        for label in list(found)[1:]:
            rows[name][f"{label}, over ordinary"] = round(found[label] / found["ordinary"], 2)
        print(name, rows[name], flush=True)
    return rows


def speed(rounds: int) -> dict:
    """Milliseconds, medians of alternating rounds; wall clock and processor time."""
    rows = {}
    for name, make in SPEED.items():
        params, loss_fn, batch = make()
        contenders = {
            "ordinary": mean_gradient(loss_fn),
            "auto": clipped(loss_fn),
            "vmap": clipped(loss_fn, "vmap"),
        }
        if importlib.util.find_spec("jax_privacy"):
            import jax_privacy

            peer = jax_privacy.clipped_grad(loss_fn, l2_clip_norm=CLIP, keep_batch_dim=False)
            contenders["jax_privacy"] = jax.jit(peer)
        for run in contenders.values():
            jax.block_until_ready(run(params, batch))
        wall, used = (collections.defaultdict(list) for _ in range(2))
        for _ in range(rounds):
            for label, run in contenders.items():
                began, spent = time.perf_counter(), time.process_time()
                jax.block_until_ready(run(params, batch))
                wall[label].append(1e3 * (time.perf_counter() - began))
                used[label].append(1e3 * (time.process_time() - spent))
        rows[name] = {
            label: {
                "wall": round(statistics.median(wall[label]), 1),
                "processor": round(statistics.median(used[label]), 1),
            }
            for label in contenders
        }
        for kind in ("wall", "processor"):
            of = {label: rows[name][label][kind] for label in contenders}
            rows[name][f"auto over ordinary, {kind}"] = round(of["auto"] / of["ordinary"], 2)
        if name in IN_TORCH:
            rows[name]["torch and Opacus, wall"] = opacus(name, rounds)
        print(name, rows[name], flush=True)
    return rows


def compile_times() -> dict:
    """Seconds to trace and to compile GPT-2 small, written out."""
    params, loss_fn, batch = networks_large.gpt(8, 128, scanned=False, remat=False, shapes=True)
    rows = {}
    for label, run in {"ordinary": mean_gradient(loss_fn), "auto": clipped(loss_fn)}.items():
        began = time.perf_counter()
        lowered = run.lower(params, batch)
        traced = time.perf_counter()
        lowered.compile()
        done = time.perf_counter()
        rows[label] = {"trace": round(traced - began, 1), "compile": round(done - traced, 1)}
        print(label, rows[label], flush=True)
    return rows


def operations(jaxpr, times: int = 1) -> collections.Counter:
    """Floating-point operations of all products, by their type and precision."""
    found: collections.Counter = collections.Counter()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            a = eqn.invars[0].aval
            flops = 2 * math.prod(eqn.outvars[0].aval.shape)
            flops *= math.prod(a.shape[axis] for axis in contract)
            precision = str(eqn.params["precision"])
            full = " HIGHEST" if "HIGHEST" in precision else ""
            found[f"{a.dtype}{full}"] += times * flops
        length = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        inner = eqn.params.get("branches", ())[:1]  # of cond: one of them
        if not inner:
            values = jax.tree.leaves(dict(eqn.params), is_leaf=lambda v: hasattr(v, "eqns"))
            inner = [v for v in values if hasattr(v, "jaxpr") or hasattr(v, "eqns")]
        for each in inner:
            found += operations(getattr(each, "jaxpr", each), times * length)
    return found


def precision() -> dict:
    """Teraflops of GPT-2 small in bfloat16, 8 rows of 1,024, and the share in full float32."""
    params, loss_fn, batch = networks_large.gpt(8, 1024, dtype=HALF, shapes=True)
    rows = {}
    runs = {"ordinary": mean_gradient(loss_fn)}
    runs |= {engine: clipped(loss_fn, engine) for engine in ("auto", "ghost")}
    with jax.numpy_dtype_promotion("standard"):
        for label, run in runs.items():
            found = operations(jax.make_jaxpr(run)(params, batch).jaxpr)
            whole = sum(found.values())
            rows[label] = {kind: round(n / 1e12, 3) for kind, n in found.items()}
            rows[label]["share of float32 HIGHEST"] = round(found["float32 HIGHEST"] / whole, 3)
            print(label, rows[label], flush=True)
    return rows


def tpu() -> dict:
    """GPT-2 small in bfloat16 compiled for a TPU v5e: seconds, and gigabytes of memory."""
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    topology = topologies.get_topology_desc(
        "v5e:2x2", platform="tpu", chips_per_host_bounds=(2, 2, 1)
    )
    place = SingleDeviceSharding(topology.devices[0])
    params, loss_fn, batch = networks_large.gpt(8, 1024, dtype=HALF, shapes=True)
    params, batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (params, batch)
    )
    rows = {}
    runs = {"ordinary": mean_gradient(loss_fn), "auto": clipped(loss_fn)}
    runs["auto, microbatch 2"] = clipped(loss_fn, "auto", 2)
    for label, run in runs.items():
        began = time.perf_counter()
        compiled = run.lower(params, batch).compile()
        seconds = time.perf_counter() - began
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
        rows[label] = {
            "trace and compile, s": round(seconds, 1),
            "temporary, GB": round(memory.temp_size_in_bytes / 1e9, 2),
            "operations, T": round(cost["flops"] / 1e12, 2),
            "bytes accessed, GB": round(cost["bytes accessed"] / 1e9, 1),
        }
        print(label, rows[label], flush=True)
    return rows


PARTS = {"compile": compile_times, "precision": precision, "tpu": tpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["memory", "speed", "compile", "precision"])
    parser.add_argument("--only", default="", help="of memory: networks with this in their name")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else {}
    rows["machine"] = {
        "device": str(jax.devices()[0]),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
    }
    for part in args.parts:
        if part == "memory":
            rows[part] = memory(args.only, rows.get(part) if args.only else None)
        else:
            rows[part] = speed(args.rounds) if part == "speed" else PARTS[part]()
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
