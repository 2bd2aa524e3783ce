"""Accuracy of the best recipes at proven budgets: last iterates, several runs each.

python -m benchmarks.accuracy mnist fashion_mnist --data-dir PREPARED --out FOLDER [--runs 5]
    [--epsilon 3 ...]

Each run is `jaxdp train --recipe best` in a process of its own; one whose report is there is not
run again. The recipe was committed before its first test run, and is the same at every epsilon.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "accuracy.json"
DELTA = "1e-5"


def report_of(dataset: str, epsilon: float, number: int, given: argparse.Namespace) -> dict:
    """The report of one run, which is made if it is not there; an interrupted one goes on."""
    folder = given.out / f"{dataset}-{epsilon:g}-{number}"
    if not (folder / "report.json").exists():
        command = [sys.executable, "-m", "jaxdp", "train", "--out", str(folder)]
        if (folder / "ledger.jsonl").exists():
            command += ["--resume"]
        else:
            command += ["--dataset", dataset, "--recipe", "best", "--epsilon", f"{epsilon:g}"]
            command += ["--delta", DELTA]
        command += ["--data-dir", str(given.data_dir)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def row(dataset: str, epsilon: float, given: argparse.Namespace) -> dict:
    """The accuracies of all runs at one epsilon, in percent."""
    reports = [report_of(dataset, epsilon, n, given) for n in range(1, given.runs + 1)]
    found = [round(100 * report["history"][-1]["test_accuracy"], 2) for report in reports]
    return {
        "dataset": dataset,
        "epsilon": epsilon,
        "delta": float(DELTA),
        "proven_epsilon": max(report["guarantee"]["epsilon"] for report in reports),
        "accuracy": found,
        "command": reports[0]["command"],
    }


def main() -> None:
    """Writes one row for each data set and epsilon; others stay."""
    parser = argparse.ArgumentParser()
    parser.add_argument("datasets", nargs="+", choices=["mnist", "fashion_mnist", "cifar10"])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; secret")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[3.0])
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    for dataset in given.datasets:
        for epsilon in given.epsilon:
            made = row(dataset, epsilon, given)
            kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
            kept = [r for r in kept if (r["dataset"], r["epsilon"]) != (dataset, epsilon)]
            text = json.dumps([*kept, made], indent=1) + "\n"
            RESULTS.write_text(text, encoding="utf-8")
            spread = statistics.stdev(made["accuracy"]) if given.runs > 1 else 0.0
            mean = statistics.mean(made["accuracy"])
            print(f"{dataset} epsilon {epsilon:g}: {mean:.2f} +- {spread:.2f}", flush=True)


if __name__ == "__main__":
    main()
