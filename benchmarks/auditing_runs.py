"""Several runs with the same number of canaries, and jax_privacy's bounds on the same scores.

jaxdp train --dataset mnist --epsilon 8 --steps 600 --canaries 1000 --out runs/a    # and so on
jaxdp audit runs/a
python -m benchmarks.auditing_runs [--peer PYTHON --told WORDS] runs/a runs/b ...

One run says little (its bound has a standard deviation of 0.4), so means over runs are told.
The peer is given the scores that our audit computes: same canaries, same model, same run. Writes
benchmarks/results/auditing_runs.json.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import jaxdp
from benchmarks import auditing_peer
from jaxdp.audit import canaries

RESULT = Path(__file__).parent / "results" / "auditing_runs.json"
KEPT = ("canaries", "proven", "audited", "reachable", "audited_family", "audited_last")


def row_of(folder, python):
    """One audited run."""
    report = json.loads((folder / "report.json").read_text())
    row = {name: report["audited"][name] for name in KEPT}
    row["test_accuracy"] = report["test_accuracy"]
    row["jax_privacy"] = of_peer(folder, report, python) if python else None
    print(folder.name, row, flush=True)
    return row


def of_peer(folder, report, python):
    """jax_privacy's bounds of one run, over all thresholds and by many splits."""
    coins = np.array(
        json.loads((folder / "secret" / "canaries.json").read_text())["included"], bool
    )
    guarantee = report["guarantee"]
    mechanism = jaxdp.dp_sgd(
        noise_multiplier=guarantee["noise_multiplier"],
        l2_clip_norm=1.0,
        batch_size=round(60_000 * guarantee["sampling_prob"]),
        dataset_size=60_000,
    )
    seen = np.load(folder / "canary_gradients.npy")
    scores = canaries.log_odds(seen, jaxdp.optimizers.sgd(mechanism, 0.1))
    pair = {"run": (scores[coins], scores[~coins])}
    delta = report["audited"]["delta"]
    found = auditing_peer.ask(python, pair, delta, len(coins))["run"]
    return {kind: value for kind, value in found.items() if kind.startswith("one run")}


def summary(rows):
    """By number of canaries: means over the runs, and the standard error of the share."""
    found = {}
    for count in sorted({row["canaries"] for row in rows}):
        some = [row for row in rows if row["canaries"] == count]
        audited, ceiling = (np.array([r[k] for r in some]) for k in ("audited", "reachable"))
        told = {"runs": len(some), "audited": float(audited.mean())}
        told |= {"ceiling": float(ceiling.mean()), "share": float(audited.mean() / ceiling.mean())}
        if len(some) > 1:
            error = audited.std(ddof=1) / np.sqrt(len(some))
            told["standard_error_of_share"] = float(error / ceiling.mean())
        told["family"] = float(np.mean([row["audited_family"] for row in some]))
        theirs = [row["jax_privacy"] for row in some if row["jax_privacy"]]
        told["jax_privacy"] = {
            kind: float(np.mean([each[kind] for each in theirs])) for kind in (theirs or [{}])[0]
        }
        found[str(count)] = told
        print(count, told, flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--peer", help="an interpreter that has jax_privacy")
    parser.add_argument("--told", help="the peer's version and the date, for the record")
    given = parser.parse_args()
    rows = [row_of(folder, given.peer) for folder in given.folders]
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    result |= {"peer": given.told, "means": summary(rows), "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
