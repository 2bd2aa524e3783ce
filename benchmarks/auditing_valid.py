"""A thousand null audits of every kind of bound, and bounds at the very truth; seeds fixed before.

python -m benchmarks.auditing_valid two_worlds     20 minutes
python -m benchmarks.auditing_valid one_run         5 minutes
python -m benchmarks.auditing_valid payments        2 minutes
python -m benchmarks.auditing_valid ideal           1 minute

All write into benchmarks/results/auditing_valid.json.

A null audit has scores that tell nothing: a bound above 0 is wrong. At the truth: randomised
response of a known epsilon by canary, for which the guessing bounds are tight, and a Gaussian. Of
1,000 audits at 95 % at most 66 may be wrong: the Clopper-Pearson lower limit of the share is then
below 5 %.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
from scipy import special

import jaxdp
from jaxdp import accounting as acc
from jaxdp import audit
from jaxdp.accounting.gaussian import gaussian_epsilon
from jaxdp.audit import guesses

RESULT = Path(__file__).parent / "results" / "auditing_valid.json"
AUDITS, RUNS, CANARIES, DELTA = 1_000, 300, 400, 1e-5
MU = 1.0


def member(z):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), 0.1), 10)


TWO_WORLDS = {
    "fixed ranks": lambda i, o: audit.audit_scores(i, o, DELTA),
    "an event chosen of two columns": lambda i, o: audit.audit_scores(
        np.c_[i, -i], np.c_[o, -o], DELTA
    ),
    "fixed threshold": lambda i, o: audit.audit_scores(i, o, DELTA, threshold=0.0),
    "Gaussian": lambda i, o: audit.audit_scores(i, o, DELTA, kind="gaussian"),
    "family": lambda i, o: audit.scores.family_bound(i, o, member, 1.0, DELTA),
}
ONE_RUN = {
    "looks": lambda s, c: audit.audit_one_run(s, c, DELTA),
    "log odds": lambda s, c: audit.audit_one_run(s, c, DELTA, log_odds=True),
    "if Gaussian": lambda s, c: audit.audit_one_run_family(s, c, acc.Gaussian, 1.0, DELTA),
    "if in the family": lambda s, c: audit.audit_one_run_family(s, c, member, 1.0, DELTA),
}


def row(kind, null, found, truth, since):
    wrong = int(np.sum(np.array(found) > truth + 1e-9))
    low = float(special.betaincinv(wrong, len(found) - wrong + 1.0, 0.025)) if wrong else 0.0
    told = {"kind": kind, "null": null, "truth": truth, "audits": len(found), "wrong": wrong}
    told |= {"lower_limit_of_share": low, "median": float(np.median(found))}
    told |= {"seconds": round(time.time() - since, 1)}
    print(told, flush=True)
    return told


def two_worlds(audits):
    rows, truth = [], gaussian_epsilon(MU, DELTA)[0]
    for kind, bound in TWO_WORLDS.items():
        for null, mu, limit in (("no leak", 0.0, 0.0), ("Gaussian of mu 1", MU, truth)):
            if mu and kind not in ("fixed ranks", "Gaussian"):
                continue
            since, found = time.time(), []
            for seed in range(audits):
                rng = np.random.default_rng([1, seed])
                found.append(bound(rng.normal(mu, 1, RUNS), rng.normal(size=RUNS)).epsilon)
            rows.append(row(kind, null, found, limit, since))
    return rows


def answers(rng, coins, epsilon, delta):
    """Scores of randomised response that tells the coin outright with probability delta."""
    lie = (rng.random(len(coins)) < special.expit(-epsilon)) & (rng.random(len(coins)) >= delta)
    return epsilon * np.where(coins ^ lie, 1.0, -1.0) * (1 + 0.1 * rng.random(len(coins)))


def one_run(audits):
    rows, truth = [], gaussian_epsilon(MU, DELTA)[0]
    for kind, bound in ONE_RUN.items():
        nulls = [("no leak", 0.0)]
        answered = [("randomised response", 1.0), ("two scores, canaries listed by coin", 1.0)]
        nulls += answered if "if" not in kind else []
        nulls += [("Gaussian of mu 1", truth)] if kind == "if Gaussian" else []
        for null, limit in nulls:
            since, found = time.time(), []
            for seed in range(audits):
                rng = np.random.default_rng([2, seed])
                coins = rng.random(CANARIES) < 0.5
                if null.startswith("two scores"):
                    coins = np.sort(coins)
                    scores = np.sign(answers(rng, coins, limit, DELTA))
                elif null == "randomised response":
                    scores = answers(rng, coins, limit, DELTA)
                else:
                    scores = MU * (rng.normal(size=CANARIES) + bool(limit) * MU * coins - MU / 2)
                found.append(bound(scores, coins).epsilon)
            rows.append(row(kind, null, found, limit, since))
    return rows


def payments(seeds):
    """Means of six runs of 1,000 canaries: one statistic alone, and both, by the share of looks."""
    algorithm = jaxdp.optimizers.sgd(
        jaxdp.dp_sgd(noise_multiplier=0.532, l2_clip_norm=1.0, batch_size=512, dataset_size=60_000),
        0.1,
    )
    charged, rows = 512 / 60_000, []
    leaks = {
        "as charged": (0.532, charged), "half the noise": (0.266, charged),
        "a tenth of the noise": (0.0532, charged), "rate 0.2": (0.532, 0.2),
    }  # fmt: skip
    for leak, (noise, rate) in leaks.items():
        found = []
        for seed in range(min(seeds, 6)):
            rng = np.random.default_rng([7, seed])
            coins = rng.random(1_000) < 0.5
            drawn = (rng.random((600, 1_000)) < rate) & coins
            scores = audit.canaries.log_odds(
                drawn + noise * rng.standard_normal(drawn.shape), algorithm
            )
            found.append([_paid(scores, coins, share) for share in (0.0, 0.1, 0.5, 1.0)])
        means = dict(zip(("0", "0.1", "0.5", "1"), np.mean(found, axis=0).tolist(), strict=True))
        rows.append({"leak": leak, "runs": len(found), "mean_bound_by_share_of_looks": means})
        print(rows[-1], flush=True)
    return rows


def ideal(seeds):
    """Mean bounds from ideal scores of a Gaussian of epsilon 8, seen by 1,000 canaries."""
    found, mu = [], 1.666030597852292
    for seed in range(min(seeds, 100)):
        rng = np.random.default_rng([8, seed])
        coins = rng.random(1_000) < 0.5
        scores = mu * (rng.normal(size=1_000) + mu * coins - mu / 2)
        found.append([_paid(scores, coins, share) for share in (0.0, 0.1, 1.0)])
    means = dict(zip(("0", "0.1", "1"), np.mean(found, axis=0).tolist(), strict=True))
    print(means, flush=True)
    return {"runs": len(found), "mean_bound_by_share_of_looks": means}


def _paid(scores, coins, share):
    """The better bound, where looks have ``share`` of the error of 5 %."""
    weights = (
        guesses.weighted_guesses_bound(scores, coins, DELTA, 0.05 * (1 - share))
        if share < 1
        else 0.0
    )
    if not share:
        return weights
    looks = audit.audit_one_run(scores, coins, DELTA, confidence=1 - 0.05 * share).epsilon
    return max(weights, looks)


def main(part, audits=AUDITS):
    rows = {"two_worlds": two_worlds, "one_run": one_run, "payments": payments, "ideal": ideal}[
        part
    ](int(audits))
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps({**result, part: rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
