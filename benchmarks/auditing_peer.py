"""jax_privacy's bounds on the scores of a file; run by an interpreter that has jax_privacy.

python -m benchmarks.auditing_peer scores.npz   prints one JSON object.
"""

import json
import sys

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


if __name__ == "__main__":
    main(sys.argv[1])
