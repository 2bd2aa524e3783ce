"""The share of the ceiling that ordinary records leave to an audit, by simulation.

python -m benchmarks.auditing_injected runs/y [--canaries 1000] [--draws 24]

The run has many canaries. Those that stayed out saw ordinary records and noise alone, so simulated
coins and draws are put on top of them, and audited: ``draws`` times, which says what one run can
not. Beside it the same number of ideal audits, with the same coins and draws and noise alone. Adds
to benchmarks/results/auditing_runs.json.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import jaxdp
from benchmarks.auditing_runs import RESULT
from jaxdp.audit import audit_one_run, canaries

DELTA, RECORDS = 1e-5, 60_000


def bounds(others, algorithm, count, draws):
    """[draws, 2], the bounds among ordinary records, and without them."""
    rate, found = canaries.sampling_rate(algorithm), []
    noise = canaries.noise_multipliers(algorithm, len(others))
    for seed in range(draws):
        rng = np.random.default_rng([35, seed])
        columns = rng.choice(others.shape[1], count, replace=False)
        coins = rng.random(count) < 0.5
        drawn = (rng.random((len(others), count)) < rate) & coins
        alone = noise * rng.standard_normal(drawn.shape)
        found.append(
            [
                audit_one_run(
                    canaries.log_odds(drawn + part, algorithm), coins, DELTA, log_odds=True
                ).epsilon
                for part in (others[:, columns], alone)
            ]
        )
    return np.array(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--canaries", type=int, default=1_000)
    parser.add_argument("--draws", type=int, default=24)
    given = parser.parse_args()
    guarantee = json.loads((given.folder / "report.json").read_text())["guarantee"]
    mechanism = jaxdp.dp_sgd(
        noise_multiplier=guarantee["noise_multiplier"],
        l2_clip_norm=1.0,
        batch_size=round(RECORDS * guarantee["sampling_prob"]),
        dataset_size=RECORDS,
    )
    coins = json.loads((given.folder / "secret" / "canaries.json").read_text())["included"]
    others = np.load(given.folder / "canary_gradients.npy")[:, ~np.array(coins, bool)]
    found = bounds(others, jaxdp.optimizers.sgd(mechanism, 0.1), given.canaries, given.draws)
    among, ideal = found.mean(axis=0)
    errors = found.std(axis=0, ddof=1) / np.sqrt(len(found))
    row = {"canaries": given.canaries, "draws": len(found), "bound": among, "ideal": ideal}
    row |= {"standard_errors": errors.tolist(), "share": among / ideal}
    print(row)
    result = json.loads(RESULT.read_text())
    kept = [r for r in result.get("injected", []) if r["canaries"] != given.canaries]
    RESULT.write_text(json.dumps({**result, "injected": [*kept, row]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
