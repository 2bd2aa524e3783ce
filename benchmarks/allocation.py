"""Epsilon of random allocation beside Poisson sampling: `python -m benchmarks.allocation`.

Epochs are composed by plain convolutions of losses rounded outwards onto a grid of a hundred
thousandth of the widest loss: what epochs cost is for comparison, not certified.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from scipy import signal

from jaxdp import accounting as acc
from jaxdp.accounting.gaussian import solve_epsilon
from jaxdp.accounting.pairs import Discrete

RESULTS = Path(__file__).parent / "results" / "allocation.json"
ROWS = (  # noise multiplier, steps, participations, epochs, delta
    (1.0, 1, 1, 1, 1e-8),
    (1.0, 8, 1, 1, 1e-8),
    (1.0, 64, 1, 1, 1e-8),
    (1.0, 117, 1, 1, 1e-5),
    (1.0, 117, 1, 10, 1e-5),
    (1.0, 1_000, 1, 1, 1e-8),
    (1.0, 1_000, 1, 100, 1e-6),
    (1.0, 999_999, 1, 1, 1e-8),
    (0.5, 117, 1, 1, 1e-5),
    (0.3, 1_000, 1, 1, 1e-5),
    (3.0, 100, 1, 10, 1e-6),
    (20.0, 1_000, 1, 1, 1e-8),
    (1.0, 1_000, 10, 1, 1e-6),
    (1.0, 117, 7, 1, 1e-5),
)


def composed(pair: Discrete, epochs: int, upper: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """Losses, masses and the infinite mass of ``epochs`` pairs."""
    if epochs == 1:
        return pair.loss, pair.p, pair.infinite
    width = 1e-5 * float(pair.loss[-1] - pair.loss[0])
    index = (np.ceil if upper else np.floor)(pair.loss / width).astype(int)
    one = np.bincount(index - index[0], pair.p)
    total, low = one, int(index[0])
    for _ in range(epochs - 1):
        total, low = signal.fftconvolve(total, one), low + int(index[0])
        used = np.flatnonzero(total > 1e-16)
        total, low = total[used[0] : used[-1] + 1], low + int(used[0])
    return width * (np.arange(total.size) + low), total, epochs * pair.infinite


def epsilon(pairs: tuple[Discrete, ...], epochs: int, delta: float, upper: bool) -> float:
    """The larger of the directions."""
    found = 0.0
    for pair in pairs:
        loss, mass, infinite = composed(pair, epochs, upper)

        def delta_at(at: float, loss=loss, mass=mass, infinite=infinite) -> float:
            over = loss > at
            return infinite + float(mass[over] @ -np.expm1(at - loss[over]))

        found = max(found, solve_epsilon(delta_at, delta, 1e-6, 1e-9)[int(upper)])
    return found


def row(z: float, steps: int, k: int, epochs: int, delta: float) -> dict[str, float | None]:
    relation = acc.Relation.ADD_OR_REMOVE_ONE
    ends, seconds = {}, {}
    for upper in (False, True):
        start = time.process_time()
        pairs = acc.RandomlyAllocated(acc.Gaussian(z), steps, k).pairs(relation, upper)
        seconds[upper] = time.process_time() - start
        ends[upper] = epsilon(pairs, epochs, delta, upper) if pairs else None
    step = acc.PoissonSampled(acc.Gaussian(z), k / steps)
    return {
        "noise_multiplier": z,
        "steps": steps,
        "participations": k,
        "epochs": epochs,
        "delta": delta,
        "lower": ends[False],
        "upper": ends[True],
        "poisson": acc.epsilon(acc.Repeated(step, steps * epochs), delta).upper,
        "processor_seconds": round(seconds[False] + seconds[True], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    for query in ROWS:
        rows.append(row(*query))
        print(rows[-1], flush=True)
    args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
