"""Bounds over all thresholds, of a Gaussian and of one run, beside jax_privacy's.

python -m benchmarks.auditing_thresholds [--peer PYTHON --told WORDS] [--draws 12]

PYTHON is an interpreter that has jax_privacy; it is then asked about the very same scores. Without
one our side is computed alone, and the peer's figures of the last time are kept: the scores are
drawn from fixed seeds. Also its fixed example, and one data set of each size for the Gaussian kind,
which once depended on a seed. Writes benchmarks/results/auditing_thresholds.json.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from scipy import special

from benchmarks import auditing_peer
from jaxdp import accounting as acc
from jaxdp import audit

RESULT = Path(__file__).parent / "results" / "auditing_thresholds.json"
DELTA, RUNS = 1e-5, 2_000
LAWS = ("null", "Gaussian, mu 0.25", "Gaussian, mu 1", "Gaussian, mu 2.5", "sampled")
CANARIES = 1_000  # of either world, for the bounds of one run
OURS = {
    "fixed ranks": lambda i, o: audit.audit_scores(i, o, DELTA),
    "Gaussian": lambda i, o: audit.audit_scores(i, o, DELTA, kind="gaussian"),
    "one run": lambda i, o: _one_run(audit.audit_one_run, i, o),
    "one run, if Gaussian": lambda i, o: _one_run(if_gaussian, i, o),
}


def drawn(name, draws):
    """Scores [draws, n] with and without the record."""
    rng = np.random.default_rng([11, LAWS.index(name)])
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


def if_gaussian(scores, coins, delta):
    """The noise is searched from multiplier 4 on, whatever the truth."""
    return audit.audit_one_run_family(scores, coins, acc.Gaussian, 4.0, delta)


def _one_run(audit, inside, outside):
    both = np.r_[inside[:CANARIES], outside[:CANARIES]]
    return audit(both, np.arange(2 * CANARIES) < CANARIES, DELTA)


def truth(name):
    if name == "sampled":
        event = acc.Repeated(acc.PoissonSampled(acc.Gaussian(0.6), 0.1), 10)
        return acc.epsilon(event, DELTA).upper
    mu = 0.0 if name == "null" else float(name.split()[-1])
    return acc.epsilon(acc.Gaussian(1 / mu), DELTA).upper if mu else 0.0


def table(draws, python, before):
    """Means over the draws; bounds above the truth are counted."""
    rows = {}
    for name in LAWS:
        pairs = {str(i): pair for i, pair in enumerate(zip(*drawn(name, draws), strict=True))}
        kinds = {k: v for k, v in OURS.items() if not (name == "sampled" and "Gaussian" in k)}
        found = {
            i: {k: audit(*pair).epsilon for k, audit in kinds.items()} for i, pair in pairs.items()
        }
        limit, theirs = truth(name), before.get(name, {}).get("jax_privacy")
        if python:
            asked = auditing_peer.ask(python, pairs, DELTA, CANARIES)
            theirs = summary(asked, limit)
        rows[name] = {
            "draws": draws, "runs": 2 * RUNS, "truth": limit, "ours": summary(found, limit),
            "jax_privacy": theirs,
        }  # fmt: skip
        print(name, rows[name], flush=True)
    return rows


def summary(found, limit):
    """{kind: [mean, how many are above the truth]} of {draw: {kind: bound}}."""
    kinds = next(iter(found.values()))
    each = {kind: np.array([row[kind] for row in found.values()]) for kind in kinds}
    return {kind: [float(np.mean(b)), int(np.sum(b > limit + 1e-9))] for kind, b in each.items()}


def fixed(python, before):
    """The fixed example of jax_privacy: quantiles of a Gaussian, 20,000 canaries, delta 1e-6."""
    rows = []
    for at, shift in enumerate((1.0, 2.0)):
        level = special.ndtri((np.arange(10_000) + 0.5) / 10_000)
        scores, coins = np.r_[level + shift, level], np.arange(20_000) < 10_000
        theirs = before[at].get("jax_privacy") if at < len(before) else None
        if python:
            pair = {"fixed": (scores[coins], scores[~coins])}
            theirs = auditing_peer.ask(python, pair, 1e-6, 10_000)["fixed"]
        rows.append(
            {
                "shift": shift,
                "truth": acc.epsilon(acc.Gaussian(1 / shift), 1e-6).upper,
                "if Gaussian": if_gaussian(scores, coins, 1e-6).epsilon,
                "nothing assumed": audit.audit_one_run(scores, coins, 1e-6).epsilon,
                "jax_privacy": theirs,
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
            audit.audit_scores(*pair, DELTA, kind="gaussian", seed=seed).epsilon
            for seed in range(5)
        }
        limit = acc.epsilon(acc.Gaussian(1 / mu), DELTA).upper
        rows.append({"mu": mu, "runs": 2 * runs, "truth": limit, "found": sorted(found)})
        print(rows[-1], flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="an interpreter that has jax_privacy")
    parser.add_argument("--told", help="the peer's version and the date, for the record")
    parser.add_argument("--draws", type=int, default=12)
    given = parser.parse_args()
    since, before = time.perf_counter(), json.loads(RESULT.read_text())
    rows = {
        "peer": given.told or before.get("peer"),
        "table": table(given.draws, given.peer, before["table"]),
        "fixed_example": fixed(given.peer, before["fixed_example"]),
        "one_data_set": one_data_set(),
    }
    rows["seconds"] = round(time.perf_counter() - since, 1)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
