"""Time and memory of draws beside NumPy's own: `python -m benchmarks.draws`.

Poisson draws of n records at rate q, from one generator each; epochs of random allocation and of
shuffling; and how long a draw in a thread holds up others. NumPy's column is what jaxdp did before:
a binomial count and `Generator.choice` without replacement, `Generator.permutation`, a stable sort
of 64-bit integers.
"""

import argparse
import json
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.sampling import Poisson, RandomAllocation, Shuffled, pad

RESULTS = Path(__file__).parent / "results" / "draws.json"
MOST = 6_000_000  # records of a draw
SIZES = (10**5, 10**6, 10**7, 10**8, 10**9, 10**10)
RATES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.25, 0.5)


def generator(key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[1, key]))


def numpys(rng: np.random.Generator, n: int, q: float) -> np.ndarray:
    return rng.choice(n, size=rng.binomial(n, q), replace=False)


def numpys_epoch(rng: np.random.Generator, n: int, steps: int) -> list[np.ndarray]:
    slots = rng.bit_generator.random_raw(n) % np.uint64(steps)
    order = rng.permutation(n)
    order = order[np.argsort(slots[order], kind="stable")]
    ends = np.cumsum(np.bincount(slots.astype(np.int64), minlength=steps))
    return np.split(order, ends[:-1])


def times(draw: Callable[[np.random.Generator], Any], rounds: int) -> float:
    """The median processor time of a draw, ms, after one that is not counted.

    Draws run on one core: this is the time that they take where nothing else runs.
    """
    took = []
    for key in range(rounds + 1):
        rng, start = generator(key), time.thread_time()
        draw(rng)
        took.append(1e3 * (time.thread_time() - start))
    return statistics.median(took[1:])


def memory(draw: Callable[[np.random.Generator], Any]) -> float:
    """MB that a draw holds at most, its result included."""
    tracemalloc.start()
    draw(generator(0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def poisson(n: int, q: float, rounds: int) -> dict[str, float]:
    rule, expected = Poisson(q), n * q
    start = time.thread_time()
    rule.choose(generator(0), n)
    first = 1e3 * (time.thread_time() - start)
    rounds = max(rounds, min(200, int(rounds * 1e5 / expected)))
    row = {
        "records": n,
        "rate": q,
        "expected": expected,
        "ms": times(lambda rng: rule.choose(rng, n), rounds),
        "first_ms": first,
        "numpy_ms": times(lambda rng: numpys(rng, n, q), rounds),
        "mb": memory(lambda rng: rule.choose(rng, n)),
        "numpy_mb": memory(lambda rng: numpys(rng, n, q)),
    }
    cells = (f"{n:.0e}", f"{q:g}", f"{expected:,.0f}", f"{row['ms']:.3g}", f"{row['numpy_ms']:.3g}")
    print(
        "| " + " | ".join((*cells, f"{row['mb']:.3g}", f"{row['numpy_mb']:.3g}")) + " |", flush=True
    )
    return row


def epochs(n: int, rounds: int) -> dict[str, float]:
    allocation, shuffled = RandomAllocation(40), Shuffled(n // 40)
    found = {
        "allocation_ms": times(lambda rng: allocation.epoch(rng, n), rounds),
        "allocation_numpy_ms": times(lambda rng: numpys_epoch(rng, n, 40), rounds),
        "shuffled_ms": times(lambda rng: shuffled.epoch(rng, n), rounds),
        "shuffled_numpy_ms": times(lambda rng: rng.permutation(n), rounds),
        "pad_ms": times(lambda rng: pad(np.arange(n // 4), 4096, 0, n), rounds),
    }
    print(f"epochs of {n:,} records: {found}")
    return found


def pauses(n: int, q: float) -> dict[str, float]:
    """The longest pause, ms, of Python in the main thread beside draws in another thread."""
    rule, found = Poisson(q), {}
    works = {
        "draw": lambda key: rule.choose(generator(key), n),
        "sleep": lambda key: time.sleep(0.1),
    }
    for name, work in works.items():
        thread = threading.Thread(target=lambda work=work: [work(key) for key in range(20)])
        start = last = time.perf_counter()
        longest, count = [], 0
        thread.start()
        while thread.is_alive():
            count, now = count + 1, time.perf_counter()
            longest.append(now - last)
            longest, last = sorted(longest)[-200:] if len(longest) > 10_000 else longest, now
        found[f"{name}_longest_ms"] = 1e3 * max(longest)
        found[f"{name}_loops_a_ms"] = count / (1e3 * (last - start))
        thread.join()
    print(f"Python beside draws of {n * q:,.0f} of {n:,} in a thread: {found}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=float, default=MOST, help="records of a draw")
    options = parser.parse_args()
    print("| records | rate | drawn | ms | NumPy, ms | MB | NumPy, MB |")
    print("|---|---|---|---|---|---|---|")
    cases = [(n, q) for n in SIZES for q in RATES if 1 <= n * q <= options.most]
    found = {
        "numpy": np.__version__,
        "draws": [poisson(n, q, options.rounds) for n, q in cases],
        "epochs": epochs(10**7, options.rounds),
        "pauses": pauses(10**7, 0.25),
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
