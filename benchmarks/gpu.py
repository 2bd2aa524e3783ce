"""Correctness, speed and memory on whatever device JAX finds: `python -m benchmarks.gpu`.

Written for the first hour on an accelerator: pieces in the order of what they tell, each in a
process of its own, each recorded when it ends. The command ends within ``--minutes`` (8); run
again, it does what is left. A piece that runs out of memory, or of time though it had half of the
minutes, says so in its place; ``--again`` tries those once more. Sizes are smaller on a CPU, where
this checks the program.

    bound        can one record add more than it may? Each record's clipped gradient, float64 norm
    noise        is the noise for a key the same as on the CPU, and of deviation 1?
    exact X      clipped sum and norms of network X against the vmap engine on the CPU
    gradient X   time of the clipped gradient of network X beside the ordinary one
    step X       time of a whole step by `jaxdp.Trainer` beside an optax loop, and memory
    memory X     temporary memory that XLA plans for, beside the ordinary gradient's
"""

import argparse
import functools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
NETWORKS = ("cnn", "gpt2", "mlp", "wrn", "transformer")
PIECES = (
    "bound",
    "noise",
    *(f"{kind} {name}" for name in NETWORKS for kind in ("exact", "gradient", "step", "memory")),
)
CLIP = 0.1


def made(name: str, records: int | None = None) -> Any:
    """(params, loss of one example, batch or ``records`` records) at the device's size."""
    import jax

    from benchmarks import networks, networks_large

    small = jax.default_backend() == "cpu"
    short = {"length": 32, "vocabulary": 1_000, "width": 64, "layers": 2, "heads": 4}
    make, batch = {
        "cnn": (networks.cnn, 64 if small else 2_048),
        "mlp": (networks.mlp, 64 if small else 4_096),
        "transformer": (networks.language_model, 8 if small else 256),
        "wrn": (networks.wide_resnet, 2 if small else 256),
        "gpt2": (
            functools.partial(networks_large.gpt, **(short if small else {})),
            4 if small else 32,
        ),
    }[name]
    return batch, make(batch if records is None else records)


def bound() -> dict[str, Any]:
    """The largest float64 norm of one record's clipped gradient, over what one record may add."""
    import jax
    import numpy as np

    import jaxdp

    found = {}
    for name in ("cnn", "mlp", "transformer"):
        _, (params, loss_fn, batch) = made(name, 16)
        for engine in ("ghost", "vmap"):
            grad_fn = jaxdp.clipped_grad(
                lambda p, b, f=loss_fn: 1e3 * f(p, b), jaxdp.clip(CLIP), engine
            )
            one = jax.jit(lambda p, b, m, g=grad_fn: _value(g(p, b, m)))
            worst = 0.0
            for record in range(16):
                value, l2 = one(params, batch, np.arange(16) == record)
                worst = max(worst, _norm(jax.tree.leaves(value)) / float(l2))
            found[f"{name}, {engine}"] = worst
    return {"norm over l2": found, "held": max(found.values()) <= 1.0}


def noise() -> dict[str, Any]:
    """The noise for one key on this device against the CPU's, and its deviation."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxdp.noise import normals

    words = np.asarray([7, 11], np.uint32)
    make = jax.jit(
        lambda w: normals.add_normals([jnp.zeros((1_000, 1_000)), jnp.zeros(33)], 1.0, w)
    )
    here = [np.asarray(leaf) for leaf in make(words)]
    cpu = _cpu()
    found = {"deviation": float(np.std(here[0], dtype=np.float64))}
    if cpu is None:
        return {**found, "beside the CPU": "no CPU backend in this process"}
    with jax.default_device(cpu):
        there = [np.asarray(leaf) for leaf in make(words)]
    steps = [
        np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32)).max()
        for a, b in zip(here, there, strict=True)
    ]
    same = [float(np.mean(a == b)) for a, b in zip(here, there, strict=True)]
    return {**found, "largest difference, float32 steps": int(max(steps)), "equal": min(same)}


def exact(name: str) -> dict[str, Any]:
    """Largest relative errors of norms and sum against the vmap engine on the CPU."""
    import jax
    import numpy as np

    import jaxdp

    _, (params, loss_fn, batch) = made(name, 4)
    # GPT-2's gradients of four records, on a CPU: minutes, for nothing that smaller ones hide.
    cpu = None if name == "gpt2" and jax.default_backend() != "cpu" else _cpu()
    reference = _sum_and_norms(jaxdp.clipped_grad(loss_fn, jaxdp.clip(CLIP), "vmap"))
    with jax.default_device(cpu):
        total, norms = reference(*jax.device_put((params, batch), cpu))
    found: dict[str, Any] = {"reference": f"vmap, {'same device' if cpu is None else 'CPU'}"}
    for engine in ("auto", "ghost", "vmap"):
        other, again = _sum_and_norms(jaxdp.clipped_grad(loss_fn, jaxdp.clip(CLIP), engine))(
            params, batch
        )
        leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(total)]
        gap = [a - b for a, b in zip(jax.tree.leaves(other), leaves, strict=True)]
        found[engine] = {
            "norms": float(np.max(np.abs(np.asarray(again, np.float64) / norms - 1.0))),
            "sum": _norm(gap) / _norm(leaves),
        }
    return found


def gradient(name: str) -> dict[str, Any]:
    """Milliseconds of the ordinary and the clipped gradients of a batch, run in turn."""
    import jax

    from benchmarks import gradients

    batch, (params, loss_fn, data) = made(name)
    contenders = {
        "jax, ordinary": lambda: ordinary(params, data),
        "jaxdp, auto": lambda: auto(params, data),
    }
    ordinary, auto = gradients.mean_gradient(loss_fn), gradients.clipped(loss_fn)
    contenders.update(
        {label: lambda run=run: run(params, data) for label, run in _others(name, loss_fn)}
    )
    found, failed = {}, {}
    for label, run in contenders.items():
        try:
            jax.block_until_ready(run())
        except Exception as error:  # out of memory: that is the figure
            failed[label] = str(error).splitlines()[0][:200]
    rounds = 5 if jax.default_backend() == "cpu" else 30
    fit = {label: run for label, run in contenders.items() if label not in failed}
    found = gradients.medians(fit, rounds)
    base = found["jax, ordinary"]
    return {
        "batch": batch,
        "milliseconds": found,
        "over ordinary": {label: round(ms / base, 3) for label, ms in found.items()},
        **({"failed": failed} if failed else {}),
    }


def step(name: str) -> dict[str, Any]:
    """Milliseconds of a whole private step by the front door, beside an optax loop, in turn."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxdp

    batch, (params, loss_fn, data) = made(name)
    records, steps = 8 * batch, 5 if jax.default_backend() == "cpu" else 50
    data = jax.tree.map(lambda x: jnp.tile(x, (8,) + (1,) * (x.ndim - 1)), data)
    mechanism = jaxdp.dp_sgd(
        noise_multiplier=1.0, l2_clip_norm=CLIP, batch_size=batch, dataset_size=records
    )
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.adam(1e-3), data)
    state = trainer.init(params)

    def private(state: Any, count: int) -> Any:
        for drawn in trainer.batches(count):
            state, _ = trainer.step(state, drawn)
        return jax.block_until_ready(state)

    state = private(state, 3)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    tx = optax.adam(1e-3)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def usual(params: Any, opt_state: Any, indices: Any) -> Any:
        rows = jax.tree.map(lambda x: x[indices], data)
        grad = jax.grad(lambda p: jax.vmap(loss_fn, (None, 0))(p, rows).mean())(params)
        updates, opt_state = tx.update(grad, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    rng = np.random.default_rng(0)
    pair = jax.tree.map(jnp.copy, params), tx.init(params)

    def plain(pair: Any, count: int) -> Any:
        for _ in range(count):
            pair = usual(*pair, rng.integers(0, records, batch).astype(np.int32))
        return jax.block_until_ready(pair)

    pair = plain(pair, 3)
    ours, theirs = [], []
    for _ in range(5):
        began = time.perf_counter()
        state = private(state, steps)
        middle = time.perf_counter()
        pair = plain(pair, steps)
        ours.append(middle - began)
        theirs.append(time.perf_counter() - middle)
    found = [1e3 * statistics.median(seconds) / steps for seconds in (ours, theirs)]
    return {
        "batch": batch,
        "jaxdp.Trainer, ms": round(found[0], 3),
        "optax loop, ms": round(found[1], 3),
        "ratio": round(found[0] / found[1], 3),
        "records a second": round(1e3 * batch / found[0]),
        "peak MB of the private steps": None if peak is None else round(peak / 2**20, 1),
    }


def memory(name: str) -> dict[str, Any]:
    """Megabytes of temporary memory that XLA plans for; nothing runs."""
    from benchmarks import gradients

    batch, (params, loss_fn, data) = made(name)
    found: dict[str, Any] = {"batch": batch}
    for label, fn in {
        "ordinary": gradients.mean_gradient(loss_fn),
        "auto": gradients.clipped(loss_fn),
        "vmap": gradients.clipped(loss_fn, "vmap"),
    }.items():
        try:
            found[label] = round(gradients.temporary(fn, params, data), 1)
        except Exception as error:
            found[label] = str(error).splitlines()[0][:200]
    return found


def _others(name: str, loss_fn: Callable[..., Any]) -> list[tuple[str, Any]]:
    """The vmap engine, and jax_privacy where it is installed."""
    import importlib.util

    import jax

    from benchmarks import gradients

    found = [("jaxdp, vmap", gradients.clipped(loss_fn, "vmap"))]
    if importlib.util.find_spec("jax_privacy"):
        import jax_privacy

        fn = jax_privacy.clipped_grad(loss_fn, l2_clip_norm=CLIP, keep_batch_dim=False)
        found.append(("jax_privacy", jax.jit(fn)))
    return found


def _norm(leaves: list[Any]) -> float:
    """The Euclidean norm over arrays, in float64."""
    import numpy as np

    return float(np.sqrt(sum(np.sum(np.asarray(leaf, np.float64) ** 2) for leaf in leaves)))


def _value(summed: Any) -> Any:
    return summed.value, summed.l2


def _sum_and_norms(grad_fn: Any) -> Any:
    import jax

    def of(params: Any, batch: Any) -> Any:
        summed, info = grad_fn.with_info(params, batch, "all")
        return summed.value, info.norms

    return jax.jit(of)


def _cpu() -> Any:
    import jax

    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return None


def run(piece: str) -> dict[str, Any]:
    """One piece, in this process."""
    kind, _, name = piece.partition(" ")
    if kind == "device":
        import jax

        import jaxdp

        found = {"device": jax.devices()[0].device_kind, "count": len(jax.devices())}
        return {**found, "jax": jax.__version__, "jaxdp": jaxdp.__version__}
    parts = {"bound": bound, "noise": noise}
    named = {"exact": exact, "gradient": gradient, "step": step, "memory": memory}
    return parts[kind]() if kind in parts else named[kind](name)


def _apart(piece: str, seconds: float) -> dict[str, Any]:
    """One piece in a process of its own; {"unfinished": why} where it gives no figure."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--only", piece]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"unfinished": f"not done after {seconds:.0f} s", "timed out": True}
    if done.returncode:
        return {"unfinished": (done.stderr.strip().splitlines() or ["no word"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", help="these alone, done already or not")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--again", action="store_true", help="try unfinished pieces once more")
    parser.add_argument("--out", type=Path, help="results/gpu_DEVICE.json where it is not given")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(run(given.only)))
        return
    if unknown := [piece for piece in given.pieces if piece not in PIECES]:
        parser.error(f"pieces must be among {', '.join(PIECES)}, got {unknown[0]!r}")
    began = time.monotonic()
    left = lambda: 60 * given.minutes - (time.monotonic() - began)  # noqa: E731
    machine = {**_apart("device", left()), "processor": platform.machine()}
    if "unfinished" in machine:
        parser.error(f"no device: {machine['unfinished']}")
    slug = "".join(c if c.isalnum() else "_" for c in machine["device"].lower())
    out = given.out or RESULTS / f"gpu_{slug}.json"
    rows = json.loads(out.read_text()) if out.exists() else {}
    if rows.get("machine", machine) != machine:
        parser.error(
            f"{out} holds figures of {rows['machine']}, this is {machine}: name another --out"
        )
    rows["machine"] = machine
    print(machine, flush=True)
    for piece in given.pieces or PIECES:
        known = rows.get(piece)
        if known and not given.pieces and not (given.again and "unfinished" in known):
            continue
        if left() < 20:
            print(f"{piece} and what follows are left: run it again", flush=True)
            break
        given_s = left()
        found = _apart(piece, given_s)
        if "timed out" in found and given_s < 30 * given.minutes:
            print(f"{piece} was cut off by the end: run it again", flush=True)
            break
        rows[piece] = found
        print(piece, json.dumps(rows[piece], indent=1), flush=True)
        out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
