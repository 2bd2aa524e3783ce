"""The residual audit on trial: null audits of correct algorithms, and the bugs it must catch.

python -m benchmarks.auditing_residuals [--audits 60] [--only null,null_large,bugs]

Adds "residuals" to benchmarks/results/auditing.json. Takes about 10 minutes of one core.
"""

import argparse
import json
import time
from pathlib import Path

import jax
from scipy import stats

import jaxdp
from benchmarks import planted
from benchmarks.planted_subtle import SUBTLE
from jaxdp import optimizers as opt
from jaxdp.audit import audit_noise
from jaxdp.audit.algorithms import tiny_worlds
from jaxdp.audit.residuals import noise_verdict, trusted_steps

RESULT = Path(__file__).parent / "results" / "auditing.json"
RUNS = 3_000  # of both worlds together


def null(audits, seed=101):
    """``audits`` audits of each correct algorithm, of 3,000 runs each: how many are accused."""
    accused, least, begun = {}, [], time.perf_counter()
    for i, name in enumerate(planted.CORRECT):
        # Equal seeds would give all algorithms the same noise.
        found = null_verdicts(name, audits, RUNS, seed + 1_000 * i)
        accused[name] = sum(verdict.refuted for verdict in found)
        least += [verdict.p_value for verdict in found]
        print(name, accused[name], "of", audits, flush=True)
    total = audits * len(planted.CORRECT)
    return {
        "accused": accused, "accused_in_all": sum(accused.values()), "audits": total,
        "binomial_95": int(stats.binom.ppf(0.95, total, 0.05)), "runs": RUNS,
        "tests": len(found[0].p_values), "smallest_corrected_p": min(least),
        "seconds": time.perf_counter() - begun,
    }  # fmt: skip


def null_large(audits=40):
    """Audits of DP-SGD as `jaxdp audit` makes them, of 1.4 million numbers each."""
    algorithm = opt.sgd(
        jaxdp.dp_sgd(noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=1, dataset_size=4), 0.1
    )
    _, worlds = tiny_worlds(algorithm)
    begun = time.perf_counter()
    found = [audit_noise(algorithm, worlds, 10, seed=500 + i) for i in range(audits)]
    seconds = (time.perf_counter() - begun) / audits
    accused = sum(verdict.refuted for verdict in found)
    print(accused, "of", audits, f"{seconds:.1f} s each", flush=True)
    return {
        "accused": accused, "audits": audits, "runs": found[0].runs, "steps": found[0].steps,
        "smallest_corrected_p": min(verdict.p_value for verdict in found),
        "resolution": max(verdict.resolution for verdict in found), "seconds_each": seconds,
    }  # fmt: skip


def null_verdicts(name, audits, runs, seed):
    """Verdicts on fresh runs of a correct algorithm, many of them collected at once."""
    case, at_once, found = planted.CORRECT[name], 10, []
    algorithm = case.algorithm()
    for part in range(0, audits, at_once):
        some = min(at_once, audits - part)
        seen = trusted_steps(
            algorithm,
            case.worlds,
            case.steps,
            some * runs // 2,
            energy=case.energy,
            seed=seed + part,
        )
        # Interleaved, so that each audit has as many runs of either world.
        for i in range(some):
            rows = jax.tree.map(lambda leaf, i=i, some=some: leaf[i::some], seen)
            found.append(noise_verdict(algorithm, case.worlds, rows))
    return found


def bugs():
    """Every subtle bug by both audits, and every other one by its residuals."""
    rows = []
    for name, bug in {**SUBTLE, **planted.BUGS}.items():
        if bug.algorithm().mechanism.leak:
            continue  # refused: it is no sum plus noise
        begun = time.perf_counter()
        found = bug.noise(RUNS // 2)
        seconds = time.perf_counter() - begun
        row = {
            "bug": name, "runs": found.runs, "flagged": found.refuted,
            "p_value": found.p_value, "findings": found.findings[:3], "seconds": seconds,
        }  # fmt: skip
        if name in SUBTLE:
            row["p_value_of_two_worlds"] = bug.verdict(RUNS // 2).p_value
            row["flagged_of_20_seeds"] = sum(
                bug.noise(RUNS // 2, seed).refuted for seed in range(1, 21)
            )
        rows.append(row)
        print(row, flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--audits", type=int, default=60, help="of each of the correct algorithms")
    parser.add_argument("--only", default="null,null_large,bugs")
    given = parser.parse_args()
    parts = {"null": lambda: null(given.audits), "null_large": null_large, "bugs": bugs}
    found = {name: parts[name]() for name in given.only.split(",")}
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    kept = {**result, "residuals": {**result.get("residuals", {}), **found}}
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
