"""LoRA of nnx and of Tunix's Gemma 3, with the real packages: `python -m benchmarks.peers_of_nnx`.

The second example needs `pip install google-tunix==0.1.7 qwix==0.1.8` (74 packages more, and 1.6 GB
with JAX); where it is missing, the row says so. Of each example: what it printed, the leaves by
engine, and the clipped gradient beside the ordinary one, at its own size and at Gemma 3 270M's
widths: memory as XLA plans it, time of both in turn, seconds to trace and to compile.
"""

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import runpy
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import jaxdp
from benchmarks.gradients import RULE, medians

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "language_model"
RESULTS = ROOT / "benchmarks" / "results" / "peers_of_nnx.json"
PACKAGES = ("jax", "flax", "optax", "google-tunix", "qwix", "einops", "jaxtyping")
TRAINABLE = {"lora": True, "base": False}


def main() -> list[dict[str, Any]]:
    """Returns a row of each example, run, and one of Gemma at its own widths."""
    rows = []
    for name in ("nnx_lora", "tunix_gemma"):
        if name == "tunix_gemma" and importlib.util.find_spec("tunix") is None:
            rows.append({"example": name, "missing": "pip install google-tunix==0.1.7 qwix==0.1.8"})
            continue
        with contextlib.redirect_stdout(io.StringIO()) as said:
            ran = runpy.run_path(str(EXAMPLES / f"{name}.py"))
        params = {"lora": ran["lora"], "base": ran["base"]}
        row = {"example": name, "printed": said.getvalue().splitlines()}
        rows.append(row | measured(ran["loss_fn"], params, ran["texts"][:64]))
        if name == "tunix_gemma":
            rows.append({"example": "Gemma 3 270M's widths, 4 layers"} | measured(*wide(ran)))
    there = {name: _version(name) for name in PACKAGES}
    RESULTS.write_text(json.dumps({"versions": there, "rows": rows}, indent=1) + "\n", "utf-8")
    for row in rows:
        print(json.dumps(row, indent=1))
    return rows


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def wide(ran: dict[str, Any]) -> tuple[Any, Any, jax.Array]:
    """A loss, parameters and 8 texts of 64 tokens of Gemma 3 270M with 4 of its 18 layers."""
    gemma, qwix = ran["gemma"], ran["qwix"]
    config = gemma.ModelConfig.gemma3_270m()
    config.num_layers, config.num_embed = 4, 4096
    model = gemma.Gemma3(config, rngs=nnx.Rngs(0))
    model = qwix.apply_lora_to_model(
        model, ran["provider"], rngs=nnx.Rngs(1), **model.get_model_input()
    )
    graph, lora, base = nnx.split(model, nnx.LoRAParam, ...)
    lora = jax.tree.map(lambda x: x.astype("float32"), lora)
    # The example's own loss, of another graph.
    loss_fn = ran["loss_fn"]
    of_graph = type(loss_fn)(loss_fn.__code__, loss_fn.__globals__ | {"graph": graph})
    texts = jax.random.randint(jax.random.key(0), (8, 65), 0, 4096)
    return of_graph, {"lora": lora, "base": base}, texts


def measured(loss_fn: Any, params: Any, texts: jax.Array, rounds: int = 7) -> dict[str, Any]:
    """Leaves by engine, and memory, time, trace and compilation of both gradients of ``texts``."""
    grad_fn = jaxdp.clipped_grad(loss_fn, RULE, trainable=TRAINABLE)
    engines = [line.engine for line in grad_fn.plan(params, texts)]

    def mean(lora: Any, base: Any, texts: jax.Array) -> jax.Array:
        return jax.vmap(loss_fn, (None, 0))({"lora": lora, "base": base}, texts).mean()

    functions = {
        "clipped": lambda p, texts: grad_fn(p, texts, "all").value,
        "ordinary": lambda p, texts: jax.grad(mean)(p["lora"], p["base"], texts),
    }
    row: dict[str, Any] = {
        "texts": list(texts.shape),
        "trained numbers": sum(np.size(x) for x in jax.tree.leaves(params["lora"])),
        "frozen numbers": sum(np.size(x) for x in jax.tree.leaves(params["base"])),
        "leaves by engine": {name: engines.count(name) for name in sorted(set(engines))},
    }
    compiled = {}
    for name, function in functions.items():
        began = time.perf_counter()
        lowered = jax.jit(function).lower(params, texts)
        traced = time.perf_counter()
        compiled[name] = lowered.compile()
        row[name] = {
            "trace s": round(traced - began, 2),
            "compile s": round(time.perf_counter() - traced, 2),
            "temporary MB": round(compiled[name].memory_analysis().temp_size_in_bytes / 2**20, 2),
        }
    found = medians({n: lambda f=f: f(params, texts) for n, f in compiled.items()}, rounds)
    for name, milliseconds in found.items():
        row[name]["ms"] = milliseconds
    row["clipped / ordinary"] = {
        what: round(row["clipped"][what] / max(row["ordinary"][what], 1e-9), 2)
        for what in row["clipped"]
    }
    return row


if __name__ == "__main__":
    main()
