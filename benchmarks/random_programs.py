"""Random programs, clipped as by float64: `python -m benchmarks.random_programs --programs 2000`.

What is judged, and how much rounding is allowed, is told in tests/clipping/judged.py. A program
that fails is printed with its seed: `--seed SEED --programs 1` tries it again.
"""

import argparse
import collections
import json
import time
import traceback
from pathlib import Path

import jax

from tests.clipping import programs
from tests.clipping.judged import judged

RESULTS = Path(__file__).parent / "results" / "random_programs.json"
# Compiled programs are forgotten after so many: they fill the memory.
_KEPT = 50


def tried(seed: int) -> tuple[list[str], dict[str, int]]:
    """What is wrong with one program, and what was counted."""
    try:
        text, wrong, counts = judged(seed)
    except Exception:
        text, wrong, counts = programs.program(seed).text, [traceback.format_exc(limit=-6)], {}
    if wrong:
        print(f"seed {seed}: {text}", *wrong, sep="\n  ", flush=True)
    features = (name for name in programs.FEATURES if name in text)
    return wrong, {**counts, **{f"with {name}": 1 for name in features}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    total: collections.Counter[str] = collections.Counter()
    failed: dict[int, list[str]] = {}
    start = time.process_time()
    for done, seed in enumerate(range(args.seed, args.seed + args.programs), start=1):
        wrong, counts = tried(seed)
        total.update(counts)
        if wrong:
            failed[seed] = wrong
        if done % _KEPT == 0 or done == args.programs:
            jax.clear_caches()
            found = {"first seed": args.seed, "programs": done, "failed": failed, **total}
            args.out.write_text(json.dumps(found, indent=1) + "\n")
            seconds = time.process_time() - start
            print(f"{done} programs, {seconds:.0f} s of a core, {len(failed)} failed", flush=True)


if __name__ == "__main__":
    main()
