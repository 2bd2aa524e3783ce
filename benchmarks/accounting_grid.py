"""Is any upper epsilon too low, or any lower one too high? A grid against other accountants.

    python -m benchmarks.accounting_grid [--quick] [--out benchmarks/results/accounting_grid.json]

Where dp_accounting is usable (delta >= 1e-12, steps <= 1e5, an epsilon below 300, and an answer
within 12 s and 7 GB: beyond, its grid is too large or too coarse) its optimistic PLD must not
exceed our upper end, nor its pessimistic PLD lie below our lower end. Everywhere the answer must be
finite, free of NaN, and not silently zero, and along every axis of the grid the upper ends must be
monotone: a bound that should be the smaller of two may exceed the other by its own width at most.

With --reuse no peer is loaded, and the peak memory that is noted is the accountants' own.
"""

import argparse
import itertools
import json
import logging
import math
import resource
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp import accounting as acc

SAMPLING = (1e-7, 1e-5, 1e-3, 0.0085333, 0.03, 0.1, 0.5, 0.95, 1.0)
NOISE = (0.3, 0.45, 0.8, 1.23, 4.0, 1000.0)
STEPS = (1, 10, 300, 5_000, 100_000, 10_000_000)
DELTAS = (1e-2, 1e-5, 1e-9, 1e-12, 1e-18)
KEY = ("q", "z", "steps", "delta", "relation")
PEER_SECONDS, PEER_BYTES = 12, 7 << 30
RELATIONS = (acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE)


def peer(
    q: float, z: float, steps: int, relation: acc.Relation, pessimistic: bool, scale: float
) -> Any:
    """dp_accounting's composed privacy loss distribution, or None where it fails."""
    from dp_accounting.pld import common, privacy_loss_distribution

    # Fine enough to say something, coarse enough to end: `scale` is the epsilon to expect.
    interval = max(5e-4 if steps <= 300 else 1e-4, scale / 20_000)
    try:
        one = privacy_loss_distribution.from_gaussian_mechanism(
            z,
            pessimistic_estimate=pessimistic,
            value_discretization_interval=interval,
            sampling_prob=q,
            neighboring_relation=getattr(privacy_loss_distribution.NeighborRel, relation.name, None)
            or common.NeighborRel[relation.name],
        )
        return one.self_compose(steps) if steps > 1 else one
    except (TimeoutError, MemoryError):
        raise
    except Exception as error:  # a peer's failure is a result, not ours to hide
        return error


def in_time(
    q: float, z: float, steps: int, relation: acc.Relation, scale: float
) -> tuple[Any, Any]:
    """The peer's optimistic and pessimistic distributions, or None where it takes too long."""

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(PEER_SECONDS)
    try:
        low = peer(q, z, steps, relation, False, scale)
        return low, peer(q, z, steps, relation, True, scale)
    except (TimeoutError, MemoryError):
        return None, None
    finally:
        signal.alarm(0)


def check(q: float, z: float, steps: int, delta: float, relation: acc.Relation) -> dict[str, Any]:
    """One row: our bound and what it cost."""
    event = acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)
    row: dict[str, Any] = dict(zip(KEY, (q, z, steps, delta, relation.value), strict=True))
    start = time.perf_counter()
    try:
        bound = acc.epsilon(event, delta, relation)
    except Exception as error:
        return row | {"failed": repr(error), "seconds": time.perf_counter() - start}
    return row | {
        "lower": bound.lower,
        "upper": bound.upper,
        "accountant": bound.accountant,
        "note": bound.note,
        "seconds": round(time.perf_counter() - start, 4),
        "width": (bound.upper - bound.lower) / bound.upper if bound.upper > 0 else 0.0,
    }


def renewed(row: dict[str, Any]) -> dict[str, Any]:
    """The row, asked again if its bounds are wider than the bar."""
    if row["width"] <= (1e-3 if row["steps"] * row["q"] < 1 else 1e-4):
        return row
    found = check(*(row[k] for k in KEY[:4]), acc.Relation(row["relation"]))
    found |= {k: row[k] for k in ("optimistic", "pessimistic") if k in row}
    print(found, flush=True)
    return found | verdict(found)


def answers(low: Any, high: Any, delta: float) -> dict[str, float]:
    """The peer's optimistic and pessimistic epsilon, where it has them."""
    plds = (("optimistic", low), ("pessimistic", high))
    return {
        name: float(pld.get_epsilon_for_delta(delta))
        for name, pld in plds
        if hasattr(pld, "get_epsilon_for_delta")
    }


def verdict(row: dict[str, Any]) -> dict[str, bool]:
    """Whether our ends contradict the peer's."""
    if "upper" not in row:
        return {}
    slack = 1e-9 * row["upper"] + 1e-12
    low, high = row.get("optimistic", 0.0), row.get("pessimistic", math.inf)
    return {
        "too_low": bool(low > row["upper"] + slack and math.isfinite(low)),
        "too_high": bool(row["lower"] > high + slack),
    }


def main() -> None:
    """Run the grid and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every 16th run, no peer")
    parser.add_argument("--out", default="benchmarks/results/accounting_grid.json")
    parser.add_argument("--reuse", help="take the peer's answers from this earlier result")
    parser.add_argument("--renew", help="ask again only the wide rows of this earlier result")
    parser.add_argument("--merge", nargs="*", help="only merge these results into --out")
    parser.add_argument("--part", default="0/1", help="k/n: the k-th of n interleaved parts")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (PEER_BYTES, PEER_BYTES))
    if args.merge:
        parts = [json.loads(Path(name).read_text()) for name in args.merge]
        rows = [r for part in parts for r in part["rows"]]
        summary = summarise(rows)
        summary |= {"peak_mb": max(part["summary"].get("peak_mb", 0.0) for part in parts)}
        print(json.dumps(summary, indent=1))
        Path(args.out).write_text(json.dumps({"summary": summary, "rows": rows}, indent=0))
        return
    if args.renew:
        rows = [renewed(r) for r in json.loads(Path(args.renew).read_text())["rows"]]
        summary = summarise(rows)
        summary["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(summary, indent=1))
        Path(args.out).write_text(json.dumps({"summary": summary, "rows": rows}, indent=0))
        return
    k, n = (int(v) for v in args.part.split("/"))
    known = {}
    if args.reuse:
        for row in json.loads(Path(args.reuse).read_text())["rows"]:
            known[tuple(row[k] for k in KEY)] = row
    rows = []
    runs = list(itertools.product(RELATIONS, SAMPLING, NOISE, STEPS))
    for i, (relation, q, z, steps) in enumerate(runs):
        if i % n != k or (args.quick and i % 16):
            continue
        step = acc.PoissonSampled(acc.Gaussian(z), q)
        scale = acc.epsilon(acc.Repeated(step, steps), 1e-5, relation).upper
        moderate = scale < 300
        usable = steps <= 100_000 and moderate and not args.quick and not args.reuse
        low, high = in_time(q, z, steps, relation, scale) if usable else (None, None)
        for delta in DELTAS:
            compare = delta >= 1e-12
            row = check(q, z, steps, delta, relation)
            row |= answers(low if compare else None, high if compare else None, delta)
            earlier = known.get(tuple(row[k] for k in KEY), {})
            if moderate:
                row |= {k: earlier[k] for k in ("optimistic", "pessimistic") if k in earlier}
            rows.append(row | verdict(row))
            row = rows[-1]
            if row.get("failed") or row.get("too_low") or row.get("too_high"):
                print(row, flush=True)
    summary = summarise(rows)
    if args.reuse or args.quick:
        summary["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(summary, indent=1))
    Path(args.out).write_text(json.dumps({"summary": summary, "rows": rows}, indent=0))


def breaks(rows: list[dict[str, Any]]) -> tuple[int, int, list[dict[str, Any]]]:
    """Monotonicity along the axes: (pairs of neighbours, breaks, breaks beyond the width)."""
    known = {tuple(r[k] for k in KEY): r for r in rows}
    pairs, broken, bad = 0, 0, []
    # The value of an axis grows to the right; epsilon grows with q and steps, falls with z, delta.
    axes = ((0, SAMPLING, 1), (1, NOISE, -1), (2, STEPS, 1), (3, sorted(DELTAS), -1))
    for key, row in known.items():
        for position, values, sign in axes:
            place = values.index(key[position])
            if place + 1 == len(values):
                continue
            other = known.get((*key[:position], values[place + 1], *key[position + 1 :]))
            if other is None:
                continue
            small, large = (row, other) if sign > 0 else (other, row)
            pairs += 1
            broken += small["upper"] > large["upper"]
            if small["lower"] > large["upper"] * (1 + 1e-12):
                bad.append({"smaller": small, "larger": large})
    return pairs, broken, bad


def refuted(row: dict[str, Any]) -> bool:
    """Whether the peer's optimistic answer exceeds even the Renyi bound, so is certainly wrong."""
    event = acc.Repeated(acc.PoissonSampled(acc.Gaussian(row["z"]), row["q"]), row["steps"])
    relation = acc.Relation(row["relation"])
    return row["optimistic"] > acc.epsilon(event, row["delta"], relation, "rdp").upper


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts that the docs quote."""
    good = [r for r in rows if "upper" in r]
    pairs, broken, bad = breaks(good)
    for pair in bad:
        print(pair, flush=True)
    dense = [r for r in good if r["steps"] * r["q"] >= 1]
    sparse = [r for r in good if r["steps"] * r["q"] < 1]
    return {
        "points": len(rows),
        "compared": sum("optimistic" in r for r in good),
        "above_our_upper": sum(r["too_low"] for r in good),
        "of_these_refuted_by_rdp": sum(refuted(r) for r in good if r["too_low"]),
        "below_our_lower": sum(r["too_high"] for r in good),
        "failed": len(rows) - len(good),
        "silent_zero_or_infinite": sum(
            not math.isfinite(r["upper"]) or (r["upper"] == 0 and not r["note"]) for r in good
        ),
        "dense_points": len(dense),
        "dense_wider_than_1e-4": sum(r["width"] > 1e-4 for r in dense),
        "sparse_points": len(sparse),
        "sparse_wider_than_1e-3": sum(r["width"] > 1e-3 for r in sparse),
        "widest": max(r["width"] for r in good),
        "neighbours": pairs,
        "not_monotone": broken,
        "not_monotone_beyond_width": len(bad),
        "median_seconds": float(np.median([r["seconds"] for r in good])),
        "slowest_seconds": max(r["seconds"] for r in good),
    }


if __name__ == "__main__":
    main()
