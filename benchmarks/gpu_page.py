"""docs/gpu.md, from what `python -m benchmarks.gpu` stored: `python -m benchmarks.gpu --page`."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu import NETWORKS, PIECES, RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
TITLES = {
    "cnn": "MNIST CNN, 1,024 rows",
    "gpt2": "GPT-2 small, 32 texts of 128",
    "wrn": "WRN-16-4, 64 rows in 16 views",
    "vit": "ViT-B/16, 64 images of 224 × 224",
    "gpt2-lora": "GPT-2 small by LoRA, 32 texts of 128",
    "smollm2-lora": "SmolLM2-135M by LoRA on bfloat16, 32 texts of 128",
}
INTRODUCTION = """# On an accelerator

What private training costs on one accelerator, beside ordinary training and other libraries,
and whether it is right there. `python -m benchmarks.gpu` measures it, on whatever device JAX
finds, and `--page` writes this page. Networks have random weights. Times are medians of rounds
in which all take turns, in milliseconds; "ordinary" is the mean gradient of the same batch,
without privacy, and a step's is that with Adam. "–": not measured."""
STEP = """### A step

`jaxdp.Trainer` as it comes (Poisson draws of that many records in the mean, noise, Adam, a
ledger in memory) beside a loop of optax over as many rows. "Next batch" and "call" are what the
host is busy for in a step; they overlap with the device. The first step includes all
compilation."""
GRADIENT = """### A clipped gradient

Of the whole batch at once, products as the device likes them (TF32 on an NVIDIA GPU; torch is
told so too). In parentheses the time over the ordinary gradient of the same framework. Opacus:
per-example gradients by hooks, and ghost clipping."""
MEMORY = """### Memory and compilation

Of one gradient: megabytes of temporary memory as XLA plans it; the most that was in use in a
process of its own, parameters, batch and result included (where the clipped gradient needs
less, the ordinary one's); seconds to trace and to compile."""
LARGEST = """### The largest batch

Of one gradient in one pass, by doubling until the memory ends (JAX may take 92 % of it), and
records a second at that size."""
PRECISION = """### Precision

Gradients in full float32 (`jax.default_matmul_precision("highest")`), as the device likes them,
and by a loss that casts parameters and examples to bfloat16: ordinary → clipped, and how many
times as long."""
EXACT = """### Correct

Relative errors of four records' clipped sum and of their norms, against the `vmap` engine in
float32. The `vmap` engine at the device's own precision shows what that precision alone does:
it moves gradients, never a record's bound."""


def page(stored: dict[str, dict[str, Any]]) -> str:
    """The page, from what each file of results holds."""
    return "\n\n".join([INTRODUCTION, *map(section, stored.values())]) + "\n"


def section(rows: dict[str, Any]) -> str:
    """What was measured on one device."""
    machine = rows["machine"]
    versions = [
        f"{name} {machine[name]}"
        for name in ("jax", "jax_privacy", "torch", "opacus")
        if name in machine
    ]
    parts = [
        f"## {machine['device']}\n\n{machine['count']} device, {', '.join(versions)}.",
        part(STEP, ("", "optax", "jaxdp", "times", "next batch", "call", "rows of a pass",
                    "first step, s: optax", "jaxdp"), rows, step),
        part(GRADIENT, ("", "ordinary", "jaxdp", "vmap engine", "jax_privacy", "torch, ordinary",
                        "Opacus, hooks", "Opacus, ghost"), rows, gradient),
        part(MEMORY, ("", "planned: ordinary", "jaxdp", "vmap engine", "jax_privacy",
                      "in use: ordinary", "jaxdp", "compiled in s: ordinary", "jaxdp"),
             rows, memory),
        part(LARGEST, ("", "rows: ordinary", "jaxdp", "a second: ordinary", "jaxdp"),
             rows, largest),
        part(PRECISION, ("", "float32", "default", "bfloat16"), rows, precision),
        part(EXACT, ("", "reference", "float32: sum", "norms", "default: sum", "norms",
                     "vmap engine, default: sum", "norms"), rows, exact),
        laws(rows),
        unfinished(rows),
    ]  # fmt: skip
    return "\n\n".join(found for found in parts if found)


def part(
    text: str,
    columns: Iterable[str],
    rows: dict[str, Any],
    cells: Callable[[dict[str, Any], str], list[str]],
) -> str:
    """A text with its table; nothing where no cell has a figure."""
    lines = [[TITLES[name], *cells(rows, name)] for name in NETWORKS]
    lines = [line for line in lines if set(line[1:]) != {"–"}]
    if not lines:
        return ""
    table = [list(columns), ["---", *["--:"] * (len(lines[0]) - 1)], *lines]
    return text + "\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in table)


def at(rows: dict[str, Any], *keys: str) -> Any:
    """What is there under these keys, or None."""
    found: Any = rows
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def shown(value: Any, form: str = "{:.3g}") -> str:
    """A number with three digits, or a dash."""
    if not isinstance(value, (int, float)):
        return "–"
    return f"{value:,.0f}" if form == "{:.3g}" and abs(value) >= 100 else form.format(value)


def step(rows: dict[str, Any], name: str) -> list[str]:
    found = rows.get(f"step {name}", {})
    ours, theirs = (at(found, "milliseconds", who) for who in ("jaxdp.Trainer", "optax"))
    first = found.get("seconds to the first step")
    times = at(found, "ratio") if isinstance(ours, dict) else None
    return [
        shown(at(theirs or {}, "step")),
        shown(at(ours or {}, "step")),
        shown(times, "{:.2f}"),
        shown(at(ours or {}, "next batch")),
        shown(at(ours or {}, "call")),
        shown(found.get("rows of a physical batch")),
        shown(at(first or {}, "optax"), "{:.1f}"),
        shown(at(first or {}, "jaxdp.Trainer"), "{:.1f}"),
    ]


def gradient(rows: dict[str, Any], name: str) -> list[str]:
    cells = []
    for piece, labels in (
        (f"gradient {name}", ("ordinary", "jaxdp", "jaxdp, vmap", "jax_privacy")),
        (f"opacus {name}", ("ordinary", "hooks", "ghost")),
    ):
        base = at(rows, piece, "milliseconds", "ordinary")
        for label in labels:
            ms = at(rows, piece, "milliseconds", label)
            ratio = f" ({ms / base:.2f})" if ms and base and label != "ordinary" else ""
            no = "fails" if at(rows, piece, "failed", label) else "–"
            cells.append(shown(ms) + ratio if ms else no)
    return cells


def memory(rows: dict[str, Any], name: str) -> list[str]:
    programs = at(rows, f"gradient {name}", "programs") or {}
    plans = [
        shown(at(programs, label, "plan, MB"))
        for label in ("ordinary", "jaxdp", "jaxdp, vmap", "jax_privacy")
    ]
    peaks = [shown(at(rows, f"peak {name}", "peak, MB", who)) for who in ("ordinary", "jaxdp")]
    seconds = [
        sum(programs[who][kind] for kind in ("trace, s", "compile, s")) if who in programs else None
        for who in ("ordinary", "jaxdp")
    ]
    return [*plans, *peaks, *(shown(each, "{:.1f}") for each in seconds)]


def largest(rows: dict[str, Any], name: str) -> list[str]:
    return [
        shown(at(rows, f"largest {name}", who, kind))
        for kind in ("rows", "records a second")
        for who in ("ordinary", "jaxdp")
    ]


def precision(rows: dict[str, Any], name: str) -> list[str]:
    kept = rows.get(f"precision {name}", {})
    cells = []
    for found in (kept.get("float32"), rows.get(f"gradient {name}"), kept.get("bfloat16")):
        base, ours = (at(found or {}, "milliseconds", who) for who in ("ordinary", "jaxdp"))
        both = base and ours
        cells.append(f"{shown(base)} → {shown(ours)} ({ours / base:.2f})" if both else "–")
    return cells


def exact(rows: dict[str, Any], name: str) -> list[str]:
    kept = rows.get(f"exact {name}", {})
    pairs = [
        shown(at(kept, label, kind), "{:.1e}")
        for label in ("auto, float32", "auto, default", "vmap, default")
        for kind in ("sum", "norms")
    ]
    known = set(pairs) != {"–"}
    return [str(kept["reference"]).removeprefix("vmap in float32, ") if known else "–", *pairs]


def laws(rows: dict[str, Any]) -> str:
    """What one record adds, and both noises, in words."""
    lines = []
    if isinstance(norms := at(rows, "bound", "norm over l2"), dict):
        lines.append(
            "- **No record adds more than it may**: at most "
            f"{max(norms.values()):.4f} of the bound in float64, over {len(norms)} networks and "
            "engines, each record's gradient far above the bound."
        )
    for kind, words in (("normals", "Gaussian noise"), ("integers", "Noise on the integer grid")):
        found = at(rows, "noise", kind)
        if not isinstance(found, dict):
            continue
        distance = found["Kolmogorov distance, times the root of the number"]
        line = (
            f"- **{words}**, a million values: Kolmogorov distance {distance:.2f} / √n from its "
            f"law (1 % of right ones are above 1.63), deviation {found['deviation']:.4f} of its own"
        )
        if (same := found.get("equal to the CPU's")) is not None:
            share = "all" if same == 1 else f"{100 * same:.1f} % of"
            line += f"; {share} values are the CPU's bit for bit"
            if same < 1:
                line += (
                    f", the others within {found['largest difference, in the last place']} steps"
                )
        lines.append(line + ".")
    return "\n".join(lines)


def unfinished(rows: dict[str, Any]) -> str:
    """What failed, and what nobody measured yet."""
    lines = []
    for piece in PIECES:
        found = rows.get(piece, {})
        for label, why in (found.get("failed") or {}).items():
            lines.append(f"- {piece}, {label}: {why}")
        if why := found.get("unfinished"):
            lines.append(f"- {piece}: {why}")
    if missing := [piece for piece in PIECES if piece not in rows]:
        lines.append(f"- not measured: {', '.join(missing)}")
    return "\n".join(["### What is missing", "", *lines]) if lines else ""


def stored() -> dict[str, dict[str, Any]]:
    """What each file holds, by its name."""
    files = sorted(RESULTS.glob("gpu_*.json"))
    return {file.name: json.loads(file.read_text("utf-8")) for file in files}


def write() -> None:
    PAGE.write_text(page(stored()), encoding="utf-8")
