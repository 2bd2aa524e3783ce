"""Random compositions against an oracle that shares no code with the accountant.

    python -m benchmarks.accounting_random [--count 500] [--seed 0] [--seconds 1500]

The oracle cuts the output of every step into 200,000 intervals, takes their probabilities from the
normal distribution, splits each between the two nearest points of a grid of losses so that both
laws keep their mass, and convolves under a law tilted towards epsilon, on two grids of 2^18 and
2^19 points that are extrapolated. A bound fails when the delta at its upper end exceeds the
target, or at its lower end falls short of it, by more than the oracle's own error. How many upper
ends would fail if they were 0.1 % lower is counted too: a judge that never objects proves nothing.
The draw covers add/remove and replace-one, one to three kinds of steps, and little noise.
"""

import argparse
import json
import math
import random
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from jaxdp import accounting as acc

Array = NDArray[np.float64]
ADD, REPLACE = acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE

CELLS = 200_000
GRIDS = (1 << 18, 1 << 19)
REACH = 10.0  # standard deviations of output: beyond them lies 1e-23
COARSE = 1e-3  # an oracle less sure of its delta than this decides nothing
SHAVED = 0.999  # an upper end lower by this factor is tried too: would the oracle notice?
SECONDS = 120  # for one composition


@dataclass(frozen=True)
class Steps:
    """`count` Poisson-sampled Gaussian steps."""

    noise_multiplier: float
    sampling_prob: float
    count: int


def draw(rng: random.Random) -> tuple[list[Steps], float, acc.Relation]:
    """A composition, a delta and a relation."""
    steps = [
        Steps(
            10 ** rng.uniform(-0.9, 0.7),
            10 ** rng.uniform(-3.5, -0.02),
            rng.choice([2, 3, 10, 50, 300, 2000]),
        )
        for _ in range(rng.choice([1, 1, 1, 2, 3]))
    ]
    return steps, 10 ** rng.uniform(-11, -0.5), rng.choice([ADD, REPLACE])


def probabilities(edges: Array, mean: float, z: float) -> Array:
    """Normal probabilities of the intervals, from whichever tail is small."""
    t = (edges - mean) / z
    left, right = t[:-1], t[1:]
    return np.where(
        left > 0,
        special.ndtr(-left) - special.ndtr(-right),
        special.ndtr(right) - special.ndtr(left),
    )


def atoms(step: Steps, relation: acc.Relation, reverse: bool) -> tuple[Array, Array]:
    """(first-law probabilities, losses) of the intervals of one step's output."""
    z, q = step.noise_multiplier, step.sampling_prob
    left = -REACH * z - (1 if relation is REPLACE else 0)
    edges = np.linspace(left, 1 + REACH * z, CELLS + 1)
    middle = 0.5 * (edges[1:] + edges[:-1])
    none = (1 - q) * probabilities(edges, 0.0, z)
    first = none + q * probabilities(edges, 1.0, z)

    def log_ratio(x: Array) -> Array:
        g = (x - 0.5) / z**2
        small = np.log1p(q * np.expm1(np.minimum(g, 1.0)))
        return np.where(g < 0.5, small, np.logaddexp(math.log1p(-q), math.log(q) + g))

    loss, second = log_ratio(middle), none / (1 - q)
    if relation is REPLACE:
        loss = loss - log_ratio(-middle)
    elif reverse:
        first, loss = second, -loss
    keep = first > 0
    return first[keep], loss[keep]


def tilt(laws: list[tuple[Array, Array, int]], c: float) -> tuple[float, float, float]:
    """Log-moment of order c of the total loss, and mean and variance under the tilted law."""
    total = mean = variance = 0.0
    for mass, loss, count in laws:
        exponent = np.log(mass) + c * loss
        weight = np.exp(exponent - exponent.max())
        size = float(weight.sum())
        centre = float(weight @ loss) / size
        total += count * (float(exponent.max()) + math.log(size))
        mean += count * centre
        variance += count * float(weight @ (loss - centre) ** 2) / size
    return total, mean, variance


def saddle(laws: list[tuple[Array, Array, int]], epsilon: float) -> float:
    """The tilt under which what makes up delta(epsilon) is typical."""
    low, high = 1e-3, 1e5
    for _ in range(18):
        middle = math.sqrt(low * high)
        if tilt(laws, middle)[1] - 1 / middle - 1 / (1 + middle) > epsilon:
            high = middle
        else:
            low = middle
    return math.sqrt(low * high)


def on_grid(laws: list[tuple[Array, Array, int]], epsilon: float, c: float, size: int) -> float:
    """delta at epsilon by one convolution of the tilted laws on a grid of `size` losses."""
    _, mean, variance = tilt(laws, c)
    half = max(14 * math.sqrt(variance), 45 / c)
    width = 2 * half / size
    spectrum: NDArray[np.complex128] = np.ones(size // 2 + 1, dtype=complex)
    log_scale = 0.0
    for mass, loss, count in laws:
        cell = np.floor(loss / width)
        # The part that goes up, so that both sum p and sum p e^-loss are kept.
        up = np.expm1(cell * width - loss) / math.expm1(-width)
        top = float((np.log(mass) + c * loss).max())
        here = np.exp(np.log(mass) + c * cell * width - top)
        index = cell.astype(np.int64)
        law = np.bincount(index % size, here * (1 - up), minlength=size)
        law += np.bincount((index + 1) % size, here * math.exp(c * width) * up, minlength=size)
        norm = float(law.sum())
        spectrum *= np.exp(count * np.log(np.fft.rfft(law / norm) + 1e-300))
        log_scale += count * (top + math.log(norm))
    start = min(epsilon - 0.3 * half, mean - half)
    first = math.floor(start / width)
    total = np.roll(np.fft.irfft(spectrum, size), -(first % size))
    excess = (first + np.arange(size)) * width - epsilon
    beyond = excess > 0
    gain = -np.expm1(-excess[beyond]) * np.exp(-c * excess[beyond])
    return float(total[beyond] @ gain) * math.exp(log_scale - c * epsilon)


def oracle(steps: list[Steps], relation: acc.Relation, epsilon: float) -> tuple[float, float]:
    """(delta at epsilon, relative error): the larger direction, extrapolated in the grid width."""
    found = (0.0, 0.0)
    for reverse in (False,) if relation is REPLACE else (False, True):
        laws = [(*atoms(step, relation, reverse), step.count) for step in steps]
        c = saddle(laws, epsilon)
        coarse, fine = (on_grid(laws, epsilon, c, size) for size in GRIDS)
        error = abs(fine - coarse) / max(abs(fine), 1e-300)
        found = max(found, (fine + (fine - coarse) / 3, error))
    return found


def judge(steps: list[Steps], target: float, relation: acc.Relation) -> dict[str, Any]:
    """One row: our bound, the oracle's delta at its ends, and what follows."""
    row: dict[str, Any] = {
        "steps": [[s.noise_multiplier, s.sampling_prob, s.count] for s in steps],
        "delta": target,
        "relation": relation.value,
    }
    parts = [
        acc.Repeated(acc.PoissonSampled(acc.Gaussian(s.noise_multiplier), s.sampling_prob), s.count)
        for s in steps
    ]
    start = time.perf_counter()
    bound = acc.epsilon(acc.Composed(parts), target, relation)
    row |= {"lower": bound.lower, "upper": bound.upper, "accountant": bound.accountant}
    row["seconds"] = round(time.perf_counter() - start, 4)
    if not 0 < bound.upper < 2_000:
        return row | {"verdict": "zero or huge"}
    above, error = oracle(steps, relation, bound.upper)
    row |= {"delta_at_upper": above, "oracle_error": error}
    if error > COARSE:
        return row | {"verdict": "coarse"}
    slack = max(3 * error, 1e-6)
    shaved = oracle(steps, relation, SHAVED * bound.upper)[0]
    row["would_notice"] = bool(shaved > target * (1 + slack))
    if above > target * (1 + slack):
        return row | {"verdict": "low"}
    if bound.lower > 0:
        below, error = oracle(steps, relation, bound.lower)
        row["delta_at_lower"] = below
        if below < target * (1 - max(3 * error, 1e-6)):
            return row | {"verdict": "high"}
    return row | {"verdict": "holds"}


def main() -> None:
    """Draw, judge and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop drawing after as many")
    parser.add_argument("--out", default="benchmarks/results/accounting_random.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    rng, rows, end = random.Random(args.seed), [], time.monotonic() + args.seconds
    while len(rows) < args.count and time.monotonic() < end:
        steps, target, relation = draw(rng)
        signal.alarm(SECONDS)
        try:
            rows.append(judge(steps, target, relation))
        except TimeoutError:
            rows.append({"steps": str(steps), "delta": target, "verdict": "too slow"})
        finally:
            signal.alarm(0)
        if rows[-1]["verdict"] in ("low", "high", "too slow"):
            print(rows[-1], flush=True)
    verdicts = [row["verdict"] for row in rows]
    summary: dict[str, Any] = {"points": len(rows), "seed": args.seed}
    summary |= {name: verdicts.count(name) for name in sorted(set(verdicts) | {"low", "high"})}
    summary["would_notice_0.1_percent"] = sum(row.get("would_notice", False) for row in rows)
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    summary |= {"median_seconds": float(np.median(seconds)), "slowest_seconds": max(seconds)}
    print(json.dumps(summary))
    Path(args.out).write_text(json.dumps({"summary": summary, "rows": rows}, indent=0))


if __name__ == "__main__":
    main()
