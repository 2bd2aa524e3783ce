"""Runs that were trained with canaries, as ``jaxdp audit`` found them, for the record.

jaxdp train --dataset mnist --epsilon 8 --steps 600 --canaries 1000 --out runs/a
jaxdp audit runs/a
python -m benchmarks.auditing_real runs/a ...

Adds them to benchmarks/results/auditing.json, and copies the last one's ROC plot to docs/images.
"""

import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULT = HERE / "results" / "auditing.json"
FIGURE = HERE.parent / "docs" / "images" / "one_run_audit.png"


def row_of(folder):
    """What a reader needs of one run."""
    report = json.loads((folder / "report.json").read_text())
    audited = report["audited"]
    kept = (
        "canaries", "steps", "delta", "confidence", "proven", "audited", "audited_profile",
        "profile_assumes", "audited_family", "family_assumes", "audited_last", "reachable",
        "all_right", "points", "verdict", "what",
    )  # fmt: skip
    return {
        "dataset": report["dataset"], "model": report["model"], "algorithm": report["algorithm"],
        "noise_multiplier": report["guarantee"]["noise_multiplier"],
        "sampling_prob": report["guarantee"]["sampling_prob"],
        "test_accuracy": report["test_accuracy"],
        **{name: audited[name] for name in kept},
    }  # fmt: skip


def main(folders):
    rows = [row_of(Path(folder)) for folder in folders]
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps({**result, "real_runs": rows}, indent=1) + "\n")
    shutil.copyfile(Path(folders[-1]) / "roc.png", FIGURE)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main(sys.argv[1:])
