"""An independent judge of both ends of a bound, from the definition, with mpmath.

    python -m benchmarks.accounting_oracle [--out benchmarks/results/accounting_oracle.json]

Two ways, neither of which shares code with the accountant:

* two steps: delta as a double integral, over the first output and the closed form of the second;
* any number of steps: Fourier inversion with 40 digits on a line that is not the saddle point, with
  plain sums and no taper. Digits make up for what the choice of the line costs.

A point holds when delta(upper) <= delta <= delta(lower). The rows of the grid in which
dp_accounting's pessimistic epsilon lies below our lower end are settled in the second way: if the
true delta at its epsilon exceeds the target, its bound was too low.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import mpmath as mp

from jaxdp import accounting as acc
from jaxdp.accounting.contour import choose_order
from jaxdp.accounting.flat import flatten

ADD, REPLACE = acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE

TWO_STEPS = [
    (q, z, target)
    for q, z in (
        (1e-7, 0.3),
        (1e-7, 1.0),
        (1e-5, 0.45),
        (1e-3, 0.5),
        (1e-3, 1.0),
        (0.1, 0.35),
        (0.5, 0.3),
        (0.3, 2.0),
    )
    for target in (1e-9, 1e-13, 1e-18)
]
# q, z, steps, delta, relation, real part of the line
MANY_STEPS = [
    (512 / 60_000, 1.23, 5_000, 1e-5, ADD, 2.0),
    (0.01, 2.0, 40_000, 1e-5, ADD, 1.5),
    (0.01, 0.9, 1_800, 1e-5, ADD, 1.5),
    (0.001, 0.7, 10_000, 1e-5, ADD, 1.5),
    (0.000256, 0.6, 100_000, 1e-5, ADD, 1.5),
    (512 / 60_000, 1.23, 5_000, 1e-5, REPLACE, 1.0),
    (0.01, 2.0, 40_000, 1e-5, REPLACE, 0.7),
    (0.01, 0.9, 1_800, 1e-5, REPLACE, 1.0),
    (0.01, 100.0, 10_000_000, 1e-15, ADD, 8.0),
    (0.001, 30.0, 10_000_000, 1e-18, ADD, 30.0),
    (0.01, 100.0, 10_000_000, 1e-12, REPLACE, 5.0),
    (0.001, 10.0, 1_000_000, 1e-6, ADD, 20.0),
    (0.002, 1.5, 1_000_000, 1e-3, ADD, 1.0),
    (0.5, 1.0, 20, 1e-18, ADD, 1.0),
    (0.5, 1.0, 3, 1e-18, REPLACE, 2.0),
    (0.2, 1.0, 50, 1e-12, ADD, 1.5),
    (0.9, 0.45, 10, 1e-16, ADD, 0.5),
    (0.9, 0.45, 10, 1e-16, REPLACE, 0.4),
]


def two_steps(q: float, z: float, epsilon: float) -> float:
    """delta of two add/remove steps, first law the mixture (the larger direction here)."""
    with mp.workdps(30):
        q, z, epsilon = mp.mpf(q), mp.mpf(z), mp.mpf(epsilon)

        def tail(t: Any) -> Any:
            return mp.erfc(t / mp.sqrt(2)) / 2

        def loss(x: Any) -> Any:
            return mp.log1p(q * mp.expm1((x - mp.mpf(1) / 2) / z**2))

        def output(value: Any) -> Any:
            return z**2 * mp.log1p(mp.expm1(value) / q) + mp.mpf(1) / 2

        def one(value: Any) -> Any:
            if value <= mp.log1p(-q):
                return -mp.expm1(value)
            x = output(value)
            return q * tail((x - 1) / z) + (1 - q - mp.exp(value)) * tail(x / z)

        def integrand(x: Any) -> Any:
            first = q * mp.npdf(x, 1, z) + (1 - q) * mp.npdf(x, 0, z)
            return first * one(epsilon - loss(x))

        alone, certain = output(epsilon), output(epsilon - mp.log1p(-q))
        cuts = [-14 * z + k * (alone + 14 * z) / 30 for k in range(30)]
        cuts += [alone, certain, *(certain + k * z for k in (0.5, 1, 2, 4, 8, 16))]
        return float(mp.quad(integrand, cuts))


def many_steps(
    q: float, z: float, steps: int, epsilon: float, relation: acc.Relation, c: float, reverse: bool
) -> float:
    """delta of `steps` steps in one direction by inversion on the line with real part c."""
    with mp.workdps(40):
        q, z, epsilon, c = mp.mpf(q), mp.mpf(z), mp.mpf(epsilon), mp.mpf(c)
        width = min(z / 5, z * z / 5)
        reach = 2 if relation is REPLACE else 1
        right = 11 * z + reach * (1 + c)
        x = [width * k for k in range(int(-(11 * z + c) / width), int(right / width) + 1)]

        def ratio(at: Any) -> Any:
            return mp.log1p(q * mp.expm1((at - mp.mpf(1) / 2) / z**2))

        weights, losses = [], []
        for at in x:
            here = ratio(at)
            loss = here - (ratio(-at) if relation is REPLACE else 0)
            losses.append(-loss if reverse else loss)
            weights.append(mp.npdf(at, 0, z) * width * (1 if reverse else mp.exp(here)))
        # The aliased copies on the left weigh e^(-c period), those on the right as much again.
        step = 2 * mp.pi / (max(60 / c, mp.mpf(8) * epsilon) + 4)
        weights = [w * mp.exp(c * loss) for w, loss in zip(weights, losses, strict=True)]
        turn = [mp.expj(step * loss) for loss in losses]
        total, peak = mp.mpf(0), None
        for k in range(6_000):
            s = mp.mpc(c, k * step)
            term = mp.fsum(weights) ** steps * mp.exp(-s * epsilon) / (s * (s + 1))
            total += term.real * (mp.mpf(1) / 2 if k == 0 else 1)
            peak = peak or abs(term)
            if abs(term) < mp.mpf(10) ** -32 * peak:
                return float(total * step / mp.pi)
            weights = [w * t for w, t in zip(weights, turn, strict=True)]
        return math.nan


def judge(
    q: float, z: float, steps: int, target: float, relation: acc.Relation, c: float | None
) -> dict[str, Any]:
    """One row: delta at both ends, and whether they fall on the right sides."""
    event = acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)
    bound = acc.epsilon(event, target, relation)
    start = time.perf_counter()
    found = []
    for end in (bound.upper, bound.lower):
        if c is None:
            found.append(two_steps(q, z, end))
        else:
            ways = (False,) if relation is REPLACE else (False, True)
            found.append(max(many_steps(q, z, steps, end, relation, c, way) for way in ways))
    return {
        "q": q,
        "z": z,
        "steps": steps,
        "delta": target,
        "relation": relation.value,
        "lower": bound.lower,
        "upper": bound.upper,
        "accountant": bound.accountant,
        "width": (bound.upper - bound.lower) / bound.upper,
        "delta_at_upper": found[0],
        "delta_at_lower": found[1],
        "holds": bool(found[0] <= target <= found[1]),
        "seconds": time.perf_counter() - start,
    }


def settle(row: dict[str, Any]) -> dict[str, Any]:
    """Is delta too large at a pessimistic epsilon of dp_accounting below our lower end?"""
    relation = acc.Relation(row["relation"])
    q, z, steps, target = row["q"], row["z"], row["steps"], row["delta"]
    event = acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)
    flat, log_delta = flatten(event, relation), math.log(target)
    c = 0.7 * choose_order(flat, relation, log_delta, row["pessimistic"])[1]
    true = many_steps(q, z, steps, row["pessimistic"], relation, c, False)
    return {k: row[k] for k in ("q", "z", "steps", "delta", "relation", "pessimistic", "lower")} | {
        "delta_at_pessimistic": true,
        "peer_wrong": bool(true > target),
        "undecided": math.isnan(true),
    }


def main() -> None:
    """Judge every point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results/accounting_oracle.json")
    parser.add_argument("--grid", default="benchmarks/results/accounting_grid.json")
    args = parser.parse_args()
    rows = [judge(q, z, 2, target, ADD, None) for q, z, target in TWO_STEPS]
    print(sum(r["holds"] for r in rows), "of", len(rows), flush=True)
    for point in MANY_STEPS:
        rows.append(judge(*point))
        print(
            {k: rows[-1][k] for k in ("q", "z", "steps", "delta", "holds", "seconds")}, flush=True
        )
    for row in rows:
        if not row["holds"]:
            print(row)
    disputed = []
    if Path(args.grid).exists():
        for row in json.loads(Path(args.grid).read_text())["rows"]:
            if row.get("too_high") and row["q"] < 1 and row["q"] * row["steps"] >= 1:
                disputed.append(settle(row))
                print(disputed[-1], flush=True)
    hard = [
        r
        for r in rows
        if r["delta"] <= 1e-12 or r["steps"] * r["q"] < 1 or r["z"] < 0.5 or r["steps"] >= 10**6
    ]
    summary = {
        "points": len(rows),
        "hard": len(hard),
        "hold": sum(r["holds"] for r in rows),
        "widest": max(r["width"] for r in rows),
        "disputed": len(disputed),
        "peer_wrong": sum(r["peer_wrong"] for r in disputed),
        "undecided": sum(r["undecided"] for r in disputed),
    }
    print(json.dumps(summary))
    Path(args.out).write_text(
        json.dumps({"summary": summary, "rows": rows, "disputed": disputed}, indent=0)
    )


if __name__ == "__main__":
    main()
