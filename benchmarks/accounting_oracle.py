"""An independent judge: delta(epsilon) by brute force in extended precision (or mpmath).

    python -m benchmarks.accounting_oracle [--out benchmarks/results/accounting_oracle.json]

The same inversion identity as the exact accountant, with nothing else in common: 64-bit mantissas,
no cut-off of the outputs, no transform, no taper, a line that is not the saddle, and plain sums.
It checks delta(lower) >= delta >= delta(upper) on a list of difficult runs, and settles the rows
of the grid on which dp_accounting and we disagree.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp import accounting as acc
from jaxdp.accounting.canonical import flatten
from jaxdp.accounting.contour import period
from jaxdp.accounting.exact import compositions
from jaxdp.accounting.saddle import choose_order

LONG = np.longdouble
RELATIONS = (acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE)


def delta(
    q: float, z: float, steps: int, epsilon: float, replace: bool, reverse: bool, plan: tuple
) -> tuple[float, float]:
    """(delta, size of the last term) by trapezoid sums over the output and over the line.

    Args:
      q: sampling probability < 1.
      z: noise multiplier.
      steps: number of steps.
      epsilon: where.
      replace: replace-one pair instead of add/remove.
      reverse: the other direction of add/remove.
      plan: (real part of the line, last frequency, period in epsilon, largest output).
    """
    c, last, length, right = plan
    c_, z_, q_, eps = LONG(c), LONG(z), LONG(q), LONG(epsilon)
    width = LONG(2 * math.pi) / (
        LONG(2 if replace else 1) * LONG(last) / z_**2
        + max(LONG(11) / z_ * LONG(1 + c) ** LONG(0.25), LONG(40) / z_**2)
    )
    x = np.arange(math.floor(-12 * z / width), math.ceil(right / width) + 1).astype(LONG) * width

    def ratio(at: np.ndarray) -> np.ndarray:
        return np.log1p(q_ * np.expm1((at - LONG(0.5)) / z_**2))

    weight = -x * x / (2 * z_**2)
    weight -= np.log(np.exp(weight).sum())
    loss = ratio(x)
    if reverse:
        loss = -loss
    else:
        weight = weight + loss
        if replace:
            loss = loss - ratio(-x)
    tilted = weight + c_ * loss
    keep = tilted > tilted.max() - 90
    loss, tilted = loss[keep], tilted[keep]
    peak = tilted.max()
    mass = np.exp(tilted - peak)
    log_moment = np.log(mass.sum()) + peak
    step = LONG(2 * math.pi) / LONG(length)
    count, total, term = int(last / float(step)) + 1, LONG(0), LONG(0)
    for start in range(0, count, 128):
        y = step * np.arange(start, min(count, start + 128)).astype(LONG)
        moment = (np.exp(1j * y[:, None] * loss[None, :]) * mass[None, :]).sum(axis=1) / mass.sum()
        terms = np.exp(steps * np.log(moment) + (steps * log_moment - c_ * eps) - 1j * y * eps) / (
            (c_ + 1j * y) * (1 + c_ + 1j * y)
        )
        if start == 0:
            terms[0] *= LONG(0.5)
        total += terms.real.sum()
        term = np.abs(terms[-1])
    scale = step / LONG(math.pi)
    return float(total * scale), float(term * scale)


def judge(
    q: float, z: float, steps: int, target: float, relation: acc.Relation, epsilon: float
) -> tuple[float, float]:
    """(delta at epsilon over both directions, relative size of what was left out)."""
    event = acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)
    found, left = 0.0, 0.0
    replace = relation is acc.Relation.REPLACE_ONE
    for composition in compositions(flatten(event, relation), relation, target):
        reverse = composition.pairs[0][0].reverse
        saddle, moments = choose_order(composition, None, epsilon)
        options = [(0.6 * saddle * k, 0.0) for k in (1.0, 0.5, 0.25, 0.12)]
        options = [(c, period(moments, c, epsilon, math.log(target))) for c, _ in options]
        c, length = min(options, key=lambda o: o[1])
        right = composition.window(composition.pairs[0][0])[1] + 0.4 * z
        last = 12 / math.sqrt(moments.derivatives(c)[2])
        value, term = 0.0, math.inf
        for _ in range(14):
            if last * length / 6.3 > 60_000:
                break
            value, term = delta(
                q, z, steps, epsilon, replace, reverse, (c, last, 1.6 * length, right)
            )
            if term * last * length < 1e-9 * target:
                break
            last *= 2
        found, left = max(found, value), max(left, term / target)
    return found, left


POINTS = [
    (q, z, steps, target, relation)
    for relation in RELATIONS
    for q, z, steps, target in (
        (512 / 60_000, 1.23, 5_000, 1e-5),
        (0.01, 2.0, 40_000, 1e-5),
        (0.01, 0.9, 1_800, 1e-5),
        (0.001, 0.7, 10_000, 1e-5),
        (0.000256, 0.6, 100_000, 1e-5),
        (0.5, 1.0, 3, 1e-18),
        (0.1, 0.3, 10, 1e-5),
        (0.1, 0.3, 10, 1e-14),
        (0.03, 0.4, 300, 1e-12),
        (0.01, 100.0, 10**7, 1e-15),
        (0.001, 30.0, 10**6, 1e-18),
        (0.3, 0.45, 100, 1e-9),
        (0.001, 1.0, 1_000, 1e-5),
        (0.2, 5.0, 10**6, 1e-3),
        (1e-4, 2.0, 10**6, 1e-6),
        (0.9, 0.35, 20, 1e-18),
        (1e-3, 3.0, 100, 1e-9),
        (1e-5, 3.0, 1_000, 1e-9),
        (0.05, 0.8, 100, 1e-16),
        (1e-5, 0.45, 100_000, 1e-9),
        (1e-7, 0.3, 10**7, 1e-5),
        (0.02, 1.0, 10, 1e-13),
    )
]


def check(q: float, z: float, steps: int, target: float, relation: acc.Relation) -> dict[str, Any]:
    """One row: whether the oracle's delta falls where the bound says."""
    event = acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)
    bound = acc.epsilon(event, target, relation)
    start = time.perf_counter()
    at_upper, left = judge(q, z, steps, target, relation, bound.upper)
    at_lower, _ = judge(q, z, steps, target, relation, bound.lower)
    slack = 1e-9 + left
    return {
        "q": q,
        "z": z,
        "steps": steps,
        "delta": target,
        "relation": relation.value,
        "lower": bound.lower,
        "upper": bound.upper,
        "method": bound.method,
        "delta_at_upper": at_upper,
        "delta_at_lower": at_lower,
        "left_out": left,
        "holds": bool(at_upper <= target * (1 + slack) and at_lower >= target * (1 - slack)),
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Judge the points, and the disputed rows of the grid's result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", default="benchmarks/results/accounting_grid.json")
    parser.add_argument("--out", default="benchmarks/results/accounting_oracle.json")
    parser.add_argument("--disputes", type=int, default=60, help="how many disputed rows at most")
    args = parser.parse_args()
    rows = []
    for point in POINTS:
        rows.append(check(*point))
        if not rows[-1]["holds"]:
            print(rows[-1], flush=True)
    disputes = []
    if Path(args.grid).exists():
        for row in json.loads(Path(args.grid).read_text())["rows"]:
            if (row.get("too_low") or row.get("too_high")) and row["q"] < 1:
                disputes.append(row)
    disputes = disputes[:: max(1, len(disputes) // args.disputes)]
    for row in disputes:
        relation = acc.Relation(row["relation"])
        rows.append(check(row["q"], row["z"], row["steps"], row["delta"], relation))
        rows[-1]["disputed"] = True
        if not rows[-1]["holds"]:
            print(rows[-1], flush=True)
    summary = {
        "points": len(rows),
        "disputed": sum("disputed" in r for r in rows),
        "hold": sum(r["holds"] for r in rows),
    }
    print(json.dumps(summary))
    Path(args.out).write_text(json.dumps({"summary": summary, "rows": rows}, indent=0))


if __name__ == "__main__":
    main()
