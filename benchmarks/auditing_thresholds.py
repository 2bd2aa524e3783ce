"""Bounds over all thresholds, of a Gaussian and of one run, beside jax_privacy's.

python -m benchmarks.auditing_thresholds [--peer PYTHON] [--draws 12]

PYTHON is an interpreter that has jax_privacy; it is then asked about the same scores. Without one
our side is computed alone, and the peer's figures are those of ``RECORDED``: of jax_privacy as of
20 August 2026, on other draws of the same laws. Also its fixed example, and one data set of each
size for the Gaussian kind, which once depended on a seed. Writes
benchmarks/results/auditing_thresholds.json.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from scipy import special

from benchmarks import auditing_peer
from jaxdp import accounting as acc
from jaxdp import auditing

RESULT = Path(__file__).parent / "results" / "auditing_thresholds.json"
DELTA, RUNS = 1e-5, 2_000
# Of jax_privacy: over all thresholds, by many splits, Gaussian, one run.
RECORDED = {
    "null": (0.0, 0.0, 0.0, 0.0),
    "Gaussian, mu 0.25": (0.156, 0.040, 0.439, 0.142),
    "Gaussian, mu 1": (1.554, 1.229, 3.680, 1.285),
    "Gaussian, mu 2.5": (4.134, 3.693, 12.020, 3.134),
    "sampled": (1.665, 1.352, None, 1.318),
}
# At a shift of the fixed example: if Gaussian, with nothing assumed.
RECORDED_FIXED = {1.0: (2.165, 1.133), 2.0: (4.722, 2.312)}
OURS = {
    "fixed ranks": lambda i, o: auditing.audit_ranks(i, o, DELTA),
    "one split": lambda i, o: auditing.audit_scores(i, o, DELTA, held_out=0.2),
    "Gaussian": lambda i, o: auditing.audit_scores(i, o, DELTA, kind="gaussian"),
    "one run": lambda i, o: _one_run(i[:1_000], o[:1_000]),
}


def drawn(name, draws):
    """Scores [draws, n] with and without the record."""
    rng = np.random.default_rng([11, list(RECORDED).index(name)])
    shape = (draws, RUNS)
    if name == "sampled":  # the likelihood ratio of ten steps at rate 0.1 and noise 0.6
        rate, noise = 0.1, 0.6
        pair = []
        for there in (True, False):
            x = noise * rng.normal(size=(*shape, 10)) + (rng.random((*shape, 10)) < rate) * there
            ratio = np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * x - 1) / (2 * noise**2))
            pair.append(ratio.sum(axis=-1))
        return tuple(pair)
    mu = 0.0 if name == "null" else float(name.split()[-1])
    return rng.normal(mu, 1, shape), rng.normal(0, 1, shape)


def _one_run(inside, outside):
    both = np.r_[inside, outside]
    return auditing.audit_one_run(both, np.arange(len(both)) < len(inside), DELTA)


def truth(name):
    if name == "sampled":
        event = acc.Repeated(acc.PoissonSampled(acc.Gaussian(0.6), 0.1), 10)
        return acc.epsilon(event, DELTA).upper
    mu = 0.0 if name == "null" else float(name.split()[-1])
    return acc.epsilon(acc.Gaussian(1 / mu), DELTA).upper if mu else 0.0


def table(draws, python):
    """Means over the draws; bounds above the truth are counted."""
    scores = {name: drawn(name, draws) for name in RECORDED}
    theirs = peers(scores, python) if python else None
    rows = {}
    for name, (inside, outside) in scores.items():
        kinds = {k: v for k, v in OURS.items() if not (name == "sampled" and k == "Gaussian")}
        found = {
            kind: [audit(i, o).epsilon for i, o in zip(inside, outside, strict=True)]
            for kind, audit in kinds.items()
        }
        limit = truth(name)
        rows[name] = {
            "draws": draws, "runs": 2 * RUNS, "truth": limit,
            "ours": {kind: float(np.mean(each)) for kind, each in found.items()},
            "ours_above_truth": {
                kind: int(np.sum(np.array(each) > limit)) for kind, each in found.items()
            },
            "jax_privacy_recorded": RECORDED[name],
            "jax_privacy": None if theirs is None else theirs[name],
        }  # fmt: skip
        print(name, rows[name], flush=True)
    return rows


def peers(scores, python):
    """Means of jax_privacy's bounds on the very same scores, by another interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scores.npz"
        np.savez(
            path,
            **{
                f"{name}:{i}/{world}": each[i]
                for name, pair in scores.items()
                for world, each in zip(("in", "out"), pair, strict=True)
                for i in range(len(each))
            },
        )
        command = [python, auditing_peer.__file__, str(path)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=environment, cwd=folder
        )
    told = json.loads(done.stdout.splitlines()[-1])
    found = {}
    for name in scores:
        rows = [row for key, row in told.items() if key.rsplit(":", 1)[0] == name]
        found[name] = {kind: float(np.mean([row[kind] for row in rows])) for kind in rows[0]}
    return found


def fixed():
    """The fixed example of jax_privacy: quantiles of a Gaussian, 20,000 canaries, delta 1e-6."""
    rows = []
    for shift, (family, plain) in RECORDED_FIXED.items():
        level = special.ndtri((np.arange(10_000) + 0.5) / 10_000)
        scores, coins = np.r_[level + shift, level], np.arange(20_000) < 10_000
        rows.append(
            {
                "shift": shift,
                "truth": acc.epsilon(acc.Gaussian(1 / shift), 1e-6).upper,
                "if Gaussian": auditing.audit_one_run_gaussian(scores, coins, 1e-6).epsilon,
                "nothing assumed": auditing.audit_one_run(scores, coins, 1e-6).epsilon,
                "jax_privacy_recorded": {"if Gaussian": family, "nothing assumed": plain},
            }
        )
        print(rows[-1], flush=True)
    return rows


def one_data_set():
    """The Gaussian kind on one data set of each size: the same, whatever the seed."""
    rows = []
    for mu, runs in ((0.06, 100_000), (0.5, 10_000), (1.0, 2_000)):
        rng = np.random.default_rng([12, runs])
        pair = rng.normal(mu, 1, runs), rng.normal(0, 1, runs)
        found = {
            auditing.audit_scores(*pair, DELTA, kind="gaussian", seed=seed).epsilon
            for seed in range(5)
        }
        limit = acc.epsilon(acc.Gaussian(1 / mu), DELTA).upper
        rows.append({"mu": mu, "runs": 2 * runs, "truth": limit, "found": sorted(found)})
        print(rows[-1], flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="an interpreter that has jax_privacy")
    parser.add_argument("--draws", type=int, default=12)
    given = parser.parse_args()
    since = time.perf_counter()
    rows = {
        "table": table(given.draws, given.peer),
        "fixed_example": fixed(),
        "one_data_set": one_data_set(),
    }
    rows["seconds"] = round(time.perf_counter() - since, 1)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
