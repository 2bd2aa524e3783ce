"""Canaries that are records beside those that are gradients: MNIST, one run each.

python -m benchmarks.auditing_inputs --data-dir DIR [--only "full batch"] [--keep FOLDER]

DP-SGD without momentum, 1,000 candidates, delta 1e-5. Two regimes: a network of 64 hidden units in
100 steps of 512 of the 60,000 records, in which a record is hardly drawn, and logistic regression
in 100 steps of all of the first 6,000 records, in which the last iterate holds every step. Every
run has a secret of the operating system. The scores were fixed on other runs before. Writes
benchmarks/results/auditing_inputs.json.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path

from jaxdp import data, runs
from jaxdp.ledger.seeds import Secret
from jaxdp.runs.audit import audit_rows_of
from jaxdp.runs.config import CANARY_KINDS as KINDS
from jaxdp.runs.described import report as described

RESULT = Path(__file__).parent / "results" / "auditing_inputs.json"
REGIMES = {
    "mlp, 100 steps of 512": {
        "model": "mlp", "hidden": 64, "batch_size": 512, "dataset_size": 60_000,
        "learning_rate": 0.5,
    },
    "logistic, 100 steps of the full batch": {
        "model": "logistic", "batch_size": 6_000, "dataset_size": 6_000, "sampling": "full_batch",
        "learning_rate": 20.0,
    },
}  # fmt: skip
EPSILONS = 8.0, 4.0, 3.0
CANARIES, STEPS = 1_000, 100


def one(regime, epsilon, kind, dataset, folder):
    """A run, and what its audit finds."""
    config = runs.resolve(
        runs.recipe(
            "mnist", epsilon=epsilon, momentum=0.0, canaries=CANARIES,
            canary_kind=kind, steps=STEPS, eval_every=STEPS, **REGIMES[regime],
        )
    )  # fmt: skip
    directory, size = runs.RunDirectory(folder), config.dataset_size
    part = dataclasses.replace(
        dataset, train_x=dataset.train_x[:size], train_y=dataset.train_y[:size]
    )
    since = time.perf_counter()
    result = runs.start(config, directory, part, Secret.new(), lambda step, row: None)
    seconds = time.perf_counter() - since
    (folder / "report.json").write_text(json.dumps(described(result).to_dict()))
    found = audit_rows_of(directory, config.private_algorithm(), CANARIES, config.delta, 0.95)
    row = found.to_dict()
    kept = ("proven", "audited", "audited_family", "audited_last", "last_of", "reachable", "broken")
    return {
        "regime": regime, "epsilon": epsilon, "canaries": CANARIES, "kind": kind,
        "noise_multiplier": config.noise_multiplier, **{name: row[name] for name in kept},
        "test_accuracy": result.history[-1]["test_accuracy"], "seconds": round(seconds, 1),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="of `jaxdp data prepare mnist`")
    parser.add_argument("--only", default="", help="runs whose name holds this text")
    parser.add_argument("--keep", help="folder for the runs; nothing is written to the results")
    given = parser.parse_args()
    dataset = data.load("mnist", Path(given.data_dir))
    for regime in REGIMES:
        for epsilon in EPSILONS:
            for kind in KINDS:
                name = f"{regime}, epsilon {epsilon:g}, {kind}"
                if given.only not in name:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    place = Path(given.keep or folder) / name.replace(" ", "-")
                    row = one(regime, epsilon, kind, dataset, place)
                print(row, flush=True)
                if given.keep is None:
                    _record(name, row)


def _record(name, row):
    rows = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps({**rows, name: row}, indent=1) + "\n")


if __name__ == "__main__":
    main()
