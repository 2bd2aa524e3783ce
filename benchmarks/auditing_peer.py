"""jax_privacy's bounds on the scores of a file; run by an interpreter that has jax_privacy.

python -m benchmarks.auditing_peer scores.npz   prints one JSON object.
python -m benchmarks.auditing_peer coverage     how often its bound over all thresholds is too high.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np


def main(path):
    from jax_privacy import auditing

    found = {}
    with np.load(path) as scores:
        names = sorted({name.rsplit("/", 1)[0] for name in scores})
        for name in names:
            inside, outside = scores[f"{name}/in"], scores[f"{name}/out"]
            auditor = auditing.CanaryScoreAuditor(inside, outside)
            row = {"gdp": auditor.epsilon_from_gdp(0.05, 1e-5)}
            strategies = {
                "all": auditing.Bonferroni(),
                "split": auditing.Split(0.2, seed=0),
            }
            for kind, strategy in strategies.items():
                row[f"clopper_pearson_{kind}"] = auditor.epsilon_clopper_pearson(
                    0.05, 1e-5, one_sided=False, threshold_strategy=strategy
                )
            small = auditing.CanaryScoreAuditor(inside[:1000], outside[:1000])
            row["one_run"] = small.epsilon_one_run(0.05, 1e-5)
            found[name] = {k: float(v) for k, v in row.items()}
    print(json.dumps(found))


def measure(draws=4_000, runs=1_000):
    """Share of draws whose bound exceeds the truth, where many thresholds are equally good.

    Laplace noise of scale 1/epsilon on a count of 1 or 0: beyond either end every threshold has the
    ratio e^epsilon. Epsilon 0: the two worlds are one.
    """
    from jax_privacy import auditing

    rng, rows = np.random.default_rng(1), []
    for epsilon in (0.0, 0.25, 1.0, 3.0):
        scale = 1 / epsilon if epsilon else 1.0
        high = {0.05: 0, 0.2: 0}
        for _ in range(draws):
            inside = rng.laplace(size=runs) * scale + (epsilon > 0)
            auditor = auditing.CanaryScoreAuditor(inside, rng.laplace(size=runs) * scale)
            for level in high:
                bound = auditor.epsilon_clopper_pearson(
                    level, 0.0, one_sided=False, threshold_strategy=auditing.Bonferroni()
                )
                high[level] += bound > epsilon
        shares = {str(level): count / draws for level, count in high.items()}
        rows.append({"truth": epsilon, "draws": draws, "runs": 2 * runs, "too_high_at": shares})
    print(json.dumps(rows))


def coverage(python):
    """``measure`` by the interpreter ``python``."""
    command = [python, str(Path(__file__).absolute()), "coverage"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    rows = json.loads(done.stdout.splitlines()[-1])
    for row in rows:
        print(row, flush=True)
    return rows


if __name__ == "__main__":
    measure() if sys.argv[1] == "coverage" else main(sys.argv[1])
