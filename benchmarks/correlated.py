"""Correlated noise beside jax_privacy: `python -m benchmarks.correlated [--part optimise|noise]`.

optimise: the errors of the strategies that both find, and the time it takes. noise: what a step's
noise costs beside the step's clipped gradient, in time and memory. With --peer jax_privacy takes
part; the interpreter must have it. --networks names those of the part noise. The contenders of a
row run in turn; figures are medians.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

RESULTS = Path(__file__).parent / "results" / "correlated.json"
STEPS = (64, 1_000, 10_000, 100_000)
STRATEGIES = (("banded", 8), ("banded", 32), ("buffered", 2), ("buffered", 4))
DENSE = (64, 256, 512)
# On a busy machine LAPACK's threads otherwise wait for one another.
ALONE = os.environ | {"OPENBLAS_NUM_THREADS": "1"}


def cases() -> list[tuple[str, int, int, str]]:
    """(kind, steps, size, error) of every strategy; the errors apart, for both are optimised."""
    every = itertools.product(STEPS, ("rms", "max"), STRATEGIES)
    found = [(kind, steps, size, error) for steps, error, (kind, size) in every]
    return [("dense", steps, 0, "rms") for steps in DENSE] + found


def found_by(who: str, case: tuple[str, int, int, str], limit: float) -> dict[str, Any]:
    """What one library finds, in a process of its own; an error in words where it fails."""
    command = [sys.executable, "-m", "benchmarks.correlated_strategies", who, *map(str, case)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=ALONE)
        text = done.stdout
    except subprocess.TimeoutExpired as late:
        text, done = (late.stdout or b"").decode(), None
    rows = [line for line in text.splitlines() if line.startswith("{")]
    if rows:
        return json.loads(rows[-1])
    if done is None:
        return {"failed": f"more than {limit:g} s"}
    return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:120]}


def optimise(results: dict[str, Any], who: list[str], limit: float) -> None:
    """Fills in the rows that are missing."""
    rows = results.setdefault("optimise", {})
    for case in cases():
        kind, steps, size, error = case
        row = rows.setdefault(f"{kind} {size or ''} n={steps} {error}".replace("  ", " "), {})
        for name in who:
            if name not in row:
                row[name] = found_by(name, case, limit) | {"load": load()}
                print(case, name, row[name], flush=True)
                write(results)


def load() -> float:
    """How many processes wanted the cores in the last minute."""
    return round(os.getloadavg()[0], 1)


def write(results: dict[str, Any]) -> None:
    """Writes the results of all parts."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("optimise", "noise"))
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one strategy")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--networks", nargs="*", default=["mlp", "transformer", "gpt2"])
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    who = ["jaxdp", *["jax_privacy"] * args.peer]
    results["machine"] = {"device": str(jax.devices()[0]), "jax": jax.__version__}
    if args.part in (None, "optimise"):
        optimise(results, who, args.limit)
    if args.part in (None, "noise"):
        from benchmarks import correlated_steps

        for name in args.networks:
            found = correlated_steps.measured(name, args.peer, args.rounds)
            results.setdefault("noise", {})[name] = found | {"load": load()}
            write(results)
    write(results)


if __name__ == "__main__":
    main()
