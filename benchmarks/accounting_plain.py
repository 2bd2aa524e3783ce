"""The grid's rarely sampled points at delta 1e-5, by a convolution that shares no code with them.

    python -m benchmarks.accounting_plain [--results benchmarks/results/accounting_grid.json]

Where less than one sampling is expected the oracle of `accounting_random` is too coarse: its tilt
runs off to jumps too rare to matter. At a delta that float64 resolves no tilt is needed. One step's
losses go to a grid by linear interpolation, which only spreads them, and are convolved; losses
beyond a quarter of the grid exceed epsilon whatever the others are, so they add P - e^epsilon Q.
Prints delta at both ends over the target, minus 1, on three grids. As the grid is refined the lower
end's should stay at or above 0, and the upper end's settle at or below it.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]
CELLS = 2_000_000
GRIDS = ((4_000, 1 << 22), (16_000, 1 << 22), (32_000, 1 << 23))  # points in an epsilon, and in all


def probabilities(edges: Array, mean: float, z: float) -> Array:
    """Normal probabilities of the intervals, from whichever tail is small."""
    t = (edges - mean) / z
    left, right = t[:-1], t[1:]
    return np.where(
        left > 0,
        special.ndtr(-left) - special.ndtr(-right),
        special.ndtr(right) - special.ndtr(left),
    )


def plain_delta(
    q: float, z: float, steps: int, epsilon: float, replace: bool, fine: int, size: int
) -> float:
    """delta at epsilon from record to no record, or under replace-one."""
    width = epsilon / fine
    reach = size // 4 * width
    edges = np.linspace(-9 * z - replace, 1 + 9 * z, CELLS + 1)
    middle = 0.5 * (edges[1:] + edges[:-1])
    none = probabilities(edges, 0.0, z)
    first = (1 - q) * none + q * probabilities(edges, 1.0, z)
    second = (1 - q) * none + q * probabilities(edges, -1.0, z) if replace else none
    loss = np.log1p(q * np.expm1((middle - 0.5) / z**2))
    if replace:
        loss = loss - np.log1p(q * np.expm1((-middle - 0.5) / z**2))
    beyond = loss > reach
    p_large, q_large = float(first[beyond].sum()), float(second[beyond].sum())
    place = np.maximum(loss[~beyond], -reach) / width
    cell = np.floor(place).astype(np.int64)
    up = place - cell
    law = np.bincount(cell % size, first[~beyond] * (1 - up), minlength=size)
    law += np.bincount((cell + 1) % size, first[~beyond] * up, minlength=size)
    total = np.fft.irfft(np.fft.rfft(law) ** steps, size)[: size // 2]
    gain = -np.expm1(np.minimum(epsilon - width * np.arange(size // 2), 0.0))
    large = -math.expm1(steps * math.log1p(-p_large))
    large += math.exp(epsilon) * math.expm1(steps * math.log1p(-q_large))
    return float((total * gain).sum()) + large


def main() -> None:
    """Judge both ends of every such row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", default="benchmarks/results/accounting_grid.json")
    args = parser.parse_args()
    for row in json.loads(Path(args.results).read_text())["rows"]:
        rare = row["q"] <= 1e-7 and row["z"] < 0.5 and row["steps"] * row["q"] < 1
        if not (rare and row["delta"] == 1e-5 and row["lower"] > 0):
            continue
        for end in ("lower", "upper"):
            step = (row["q"], row["z"], row["steps"], row[end], row["relation"] == "replace_one")
            over = [plain_delta(*step, *grid) / row["delta"] - 1 for grid in GRIDS]
            print(row["relation"], *step[:3], end, *(f"{v:.2e}" for v in over), flush=True)


if __name__ == "__main__":
    main()
