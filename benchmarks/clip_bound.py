"""The adversarial search for a record beyond its bound: `python -m benchmarks.clip_bound`.

Norms of what records add are float64, on the factors as they enter the contraction, by
compiled programs (tests/clipping/search.py). Under a normalising rule every record is at its bound.
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np

import jaxdp
from tests.clipping import search

RESULTS = Path(__file__).parent / "results" / "clip_bound.json"
ALGORITHMS = ("auto", "ghost", "vmap")


def searched(name: str, program: tuple, seeds: int) -> dict[str, float]:
    """Records tried, and the worst contribution over the bound, for every engine."""
    loss_fn, params, make = program
    rows = 4 if name in ("long-1e6", "siamese-150528") else 24
    found = {"records": rows * seeds}
    for algorithm in ALGORITHMS:
        rule = jaxdp.normalize(1.0)
        worst = []
        for seed in range(seeds):
            batch = search.records(make, rows, seed)
            worst.append(np.max(search.contributed(loss_fn, params, batch, rule, algorithm)))
        found[algorithm] = float(max(worst))
        jax.clear_caches()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = {}
    for name, program in search.programs(long=True).items():
        rows[name] = searched(name, program, args.seeds)
        print(name, rows[name], flush=True)
    args.out.write_text(json.dumps(rows, indent=1) + "\n")
    every = [row[algorithm] for row in rows.values() for algorithm in ALGORITHMS]
    tried = sum(row["records"] for row in rows.values()) * len(ALGORITHMS)
    print(f"{len(rows)} programs, {tried} records, worst over the bound {max(every):.6f}")


if __name__ == "__main__":
    main()
