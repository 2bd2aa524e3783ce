"""jax_privacy's bounds on the scores of a file; run by an interpreter that has jax_privacy.

python -m benchmarks.auditing_peer scores.npz   prints one JSON object.
python -m benchmarks.auditing_peer coverage     how often its bound over all thresholds is too high.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

LEVEL = 0.05
KINDS = ("all thresholds", "many splits", "Gaussian", "one run", "one run, if Gaussian")


def bounds(inside, outside, delta, canaries):
    """jax_privacy's bounds of ``KINDS``, those of one run from the first ``canaries`` of both."""
    from jax_privacy import auditing

    auditor = auditing.CanaryScoreAuditor(inside, outside)
    few = auditing.CanaryScoreAuditor(inside[:canaries], outside[:canaries])
    splits = auditing.MultiSplit(seed=0)
    found = (
        auditor.epsilon_clopper_pearson(LEVEL, delta, one_sided=False),
        auditor.epsilon_clopper_pearson(LEVEL, delta, one_sided=False, threshold_strategy=splits),
        auditor.epsilon_from_gdp(LEVEL, delta),
        few.epsilon_one_run(LEVEL, delta),
        few.epsilon_one_run_fdp(LEVEL, delta),
    )
    return dict(zip(KINDS, map(float, found), strict=True))


def main(path):
    with np.load(path) as scores:
        names = sorted({name.rsplit("/", 1)[0] for name in scores} - {"delta", "canaries"})
        delta, canaries = float(scores["delta"]), int(scores["canaries"])
        found = {
            name: bounds(scores[f"{name}/in"], scores[f"{name}/out"], delta, canaries)
            for name in names
        }
    print(json.dumps(found))


def ask(python, pairs, delta, canaries):
    """{name: bounds} by the interpreter ``python``, of {name: (inside, outside)}."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scores.npz"
        ends = {
            f"{name}/{world}": scores
            for name, pair in pairs.items()
            for world, scores in zip(("in", "out"), pair, strict=True)
        }
        np.savez(path, delta=delta, canaries=canaries, **ends)
        return _run(python, str(path))


def _run(python, *arguments):
    """What another interpreter prints, without this one's packages."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [python, str(Path(__file__).absolute()), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


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
    rows = _run(python, "coverage")
    for row in rows:
        print(row, flush=True)
    return rows


if __name__ == "__main__":
    measure() if sys.argv[1] == "coverage" else main(sys.argv[1])
