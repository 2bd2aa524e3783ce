"""Sums of scores without thresholds, beside the guesses of the package: one run, many canaries.

python -m benchmarks.auditing_sums valid            1,000 audits of each kind; 5 minutes
python -m benchmarks.auditing_sums larger           simulated scores, 1,000 canaries; 2 minutes
python -m benchmarks.auditing_sums runs FOLDER/*    runs that `auditing_inputs --keep` left; 1

All write into benchmarks/results/auditing_sums.json. What is bounded, with its proof, is in
docs/proofs/auditing.md, "Sums of scores". The statistic is S = sum s_i g_i / |g| with coins s = +-1
and guess weights g = tanh(log odds / 2), the mean of a coin given its score.

The pair of normal laws is rebuilt from the abstract of arXiv:2606.12733 and from summaries (scores
of either half are normal, hockey-stick divergence, intervals by Bonferroni), not from the paper.
"""

import json
import sys
from pathlib import Path

import numpy as np
from scipy import optimize, special, stats

from jaxdp import accounting as acc
from jaxdp import audit
from jaxdp.accounting.gaussian import gaussian_epsilon
from jaxdp.audit import bounds, canaries, guesses
from jaxdp.audit.algorithms import noise_family
from jaxdp.audit.assumed import _EPSILONS
from jaxdp.audit.scores import family_bound, privacy_profile, smallest_refuted_noise
from jaxdp.runs.audit import config_of
from jaxdp.runs.directory import RunDirectory

RESULT = Path(__file__).parent / "results" / "auditing_sums.json"
DELTA, LEVEL, AUDITS = 1e-5, 0.05, 1_000
MLP = 100, 512 / 60_000  # steps and rate of the network of `auditing_inputs`
V = np.r_[np.linspace(0, 0.99, 991), 1 - np.geomspace(0.01, 1e-9, 400)[1:], 1.0]  # posterior means
EPSILON_OF_V = np.r_[2 * np.arctanh(V[:-1]), 745.0]


# What a trade-off function allows of a sum ------------------------------------------------------


def gaussian_deltas(mu):
    """delta(epsilon) at V's epsilons, of mu-GDP."""
    e = EPSILON_OF_V[:-1]
    return special.ndtr(mu / 2 - e / mu) - np.exp(e + special.log_ndtr(-mu / 2 - e / mu))


def event_deltas(event):
    """At least delta(epsilon) there: convex in e^epsilon, so chords of upper ends lie above."""
    known = privacy_profile(event, acc.Relation.ADD_OR_REMOVE_ONE, _EPSILONS)
    x, d = np.exp([e for e, _ in known]), [d for _, d in known]
    return np.interp(np.exp(EPSILON_OF_V[:-1]), x, d)


def log_chance_independent(total, m, deltas):
    """log of a bound on P(S >= total), canaries independent: Chernoff's, see the lemma."""

    def exponent(logs):
        rate, root = np.exp(np.clip(logs, -6, 9))
        c = min(rate / (2 * root), 300.0)
        root = rate / (2 * c)  # every pair is allowed, and this one does not overflow
        psi = np.exp(c * V**2)
        inner = 2 * c * V * psi * (1 - V) + psi  # its differences are psi''(v) (1 - v), integrated
        moment = 1 + np.diff(inner) @ deltas
        return -rate * total + rate**2 / 2 + rate * root / 2 + m * np.log(moment)

    start = np.log([2.5, max(1.0, np.sqrt(m * 2 * np.diff(V) @ ((1 - V[:-1]) * deltas)))])
    found = optimize.minimize(exponent, start, method="Nelder-Mead", options={"xatol": 1e-3})
    return min(0.0, float(found.fun))


def log_chance_joined(total, m, deltas):
    """log of a bound on P(S >= total), whatever joins the canaries: Hoeffding and Markov."""
    after = np.cumsum((2 * np.diff(V) * (1 - V[:-1]) * deltas)[::-1])[::-1]
    squares = V[:-1] ** 2
    excess = 2 * V[:-1] * (1 - V[:-1]) * deltas + after  # E(M^2 - c)+ at c = squares
    best = 1.0
    for d in np.linspace(0.002, 1.0, 250):
        slack, below = total - np.sqrt(m * d), squares < d - 1e-6
        if slack > 0:
            best = min(best, np.exp(-(slack**2) / 2) + np.min(excess[below] / (d - squares[below])))
    return float(np.log(best))


def statistic(odds, coins):
    """S of log odds."""
    g = np.tanh(odds / 2)
    return float(np.where(coins, 1, -1) @ g / max(np.linalg.norm(g), 1e-300))


def sum_bound(odds, coins, chance, family=None, noise=1.0):
    """The bound on epsilon by S: of mu-GDP, or of a family of events."""
    total, m, least = statistic(odds, coins), len(coins), np.log(LEVEL)
    if family is None:
        of_mu = lambda mu: chance(total, m, gaussian_deltas(max(mu, 1e-3)))  # noqa: E731
        return gaussian_epsilon(bounds.largest_refuted(of_mu, least), DELTA)[0]
    z = smallest_refuted_noise(lambda z: chance(total, m, event_deltas(family(z))) <= least, noise)
    return 0.0 if z is None else acc.epsilon(family(z), DELTA).lower


# What is known already, and what assumes a normal law -------------------------------------------


def plain_sum(odds, coins):
    """Nothing assumed: the sum of all guesses by |log odds|, none below a threshold, exactly."""
    weights = np.rint(np.abs(odds) * (10 / np.abs(odds).max())).astype(int)
    return guesses.weighted_bound(weights, (odds > 0) == coins, len(coins), DELTA, LEVEL)


def student(odds, coins):
    """Normal scores of one variance, independent: the noncentral t of the normalised sum."""
    a, b = odds[coins], odds[~coins]
    root, free = np.sqrt(len(a) * len(b) / len(odds)), len(odds) - 2
    t = (a.mean() - b.mean()) * root / np.sqrt((a.var() * len(a) + b.var() * len(b)) / free)
    of_mu = lambda mu: stats.nct.sf(t, free, mu * root)  # noqa: E731
    return gaussian_epsilon(bounds.largest_refuted(of_mu, LEVEL), DELTA)[0]


def pair_epsilon(shift, inside, outside):
    """Epsilons at DELTA [k] of N(shift, inside^2) against N(0, outside^2), the larger direction."""
    worst = np.zeros(np.broadcast(shift, inside, outside).shape)
    for d, s, t in ((shift, inside, outside), (-shift, outside, inside)):
        d, s, t = np.broadcast_arrays(*np.atleast_1d(d / t, s / t, 1.0 * t))[:3]
        s = np.where(np.abs(s - 1) < 1e-6, 1 + 1e-6, s)
        low, high = np.zeros(d.shape), np.full(d.shape, 60.0)
        for _ in range(30):
            e = (low + high) / 2
            # log p / q = x^2 / 2 - (x - d)^2 / (2 s^2) - log s >= e, between or beyond two roots.
            a, b, c = 0.5 - 0.5 / s**2, d / s**2, -(d**2) / (2 * s**2) - np.log(s) - e
            root = np.sqrt(np.maximum(b**2 - 4 * a * c, 0))
            x, y = (-b - root) / (2 * a), (-b + root) / (2 * a)
            x, y = np.minimum(x, y), np.maximum(x, y)
            p = special.ndtr((y - d) / s) - special.ndtr((x - d) / s)
            q = special.ndtr(y) - special.ndtr(x)
            beyond = s > 1
            p_out = special.ndtr((x - d) / s) + special.ndtr((d - y) / s)
            q_out = special.ndtr(x) + special.ndtr(-y)
            real = b**2 > 4 * a * c
            p, q = np.where(beyond, p_out, p * real), np.where(beyond, q_out, q * real)
            p, q = np.where(beyond & ~real, 1.0, p), np.where(beyond & ~real, 1.0, q)
            above = p - np.exp(e) * q > DELTA
            low, high = np.where(above, e, low), np.where(above, high, e)
        worst = np.maximum(worst, low)
    return worst


def pair_of_normals(odds, coins):
    """Two normal laws: the least epsilon over a box of intervals, an eighth of the error a side."""
    ends = []
    for part in (odds[coins], odds[~coins]):
        n, size = len(part), part.std(ddof=1)
        half = size / np.sqrt(n) * stats.t.isf(LEVEL / 8, n - 1)
        cuts = stats.chi2.ppf([1 - LEVEL / 8, LEVEL / 8], n - 1)
        ends.append((part.mean(), half, size * np.sqrt((n - 1) / cuts)))
    (mean, half, s), (other, half_other, t) = ends
    shift = max(0.0, abs(mean - other) - half - half_other)
    s, t = (each.ravel() for each in np.meshgrid(np.linspace(*s, 9), np.linspace(*t, 9)))
    low, high = max(s.min(), t.min()), min(s.max(), t.max())
    if low <= high:  # equal variances are possible; the largest hides most
        s, t = np.r_[s, high], np.r_[t, high]
    return float(pair_epsilon(np.full(s.shape, shift), s, t).min())


ESTIMATES = {
    "normal scores of one variance": student,
    "pair of normal laws": pair_of_normals,
}


def guessing(odds, coins):
    """The package's bound that assumes fair coins alone."""
    return audit.audit_one_run(odds, coins, DELTA, log_odds=True).epsilon


# 1,000 audits -------------------------------------------------------------------------------------


def member(z, steps=10, rate=0.1):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), rate), steps)


def sampled(rng, coins, z=0.7, steps=10, rate=0.1):
    """(log odds, plain sums) of a sampled Gaussian."""
    seen = (rng.random((steps, len(coins))) < rate) & coins
    seen = seen + z * rng.standard_normal(seen.shape)
    ratios = np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * seen - 1) / (2 * z * z))
    return ratios.sum(0), seen.sum(0)


def scores_of(kind, rng, coins):
    """Log odds, or what an auditor takes for them."""
    m = len(coins)
    gaussian = lambda mu: mu * (rng.normal(size=m) + mu * coins - mu / 2)  # noqa: E731
    if kind == "no leak":
        return rng.normal(size=m)
    if kind == "Gaussian of mu 1":
        return gaussian(1.0)
    if kind == "Gaussian of mu 2.5, scores tanh":
        return np.tanh(gaussian(2.5) / 2)
    if kind == "Gaussian of mu 1, canaries joined":
        # |x| has one law whatever the coin, and given |x| the sign is randomised response: one
        # |x| for all canaries leaves each canary's law as it was.
        x = abs(rng.normal(0.5))
        right = rng.random(m) < special.expit(x)
        return np.where(coins == right, x, -x) + 1e-3 * rng.random(m)
    if kind == "randomised response of epsilon 1":
        right = rng.random(m) < special.expit(1.0)
        return np.where(coins == right, 1.0, -1.0) + 1e-3 * rng.random(m)
    return sampled(rng, coins)[kind.endswith("sums alone")]


KINDS = {  # the true epsilon, and which sums claim something
    "no leak": (0.0, gaussian_deltas(1e-3), True),
    "Gaussian of mu 1": (gaussian_epsilon(1.0, DELTA)[0], gaussian_deltas(1.0), True),
    "Gaussian of mu 2.5, scores tanh": (
        gaussian_epsilon(2.5, DELTA)[0], gaussian_deltas(2.5), True,
    ),
    "Gaussian of mu 1, canaries joined": (
        gaussian_epsilon(1.0, DELTA)[0], gaussian_deltas(1.0), False,
    ),
    "randomised response of epsilon 1": (1.0, None, True),
    "sampled Gaussian": (None, None, True),
    "sampled Gaussian, sums alone": (None, None, True),
}  # fmt: skip


def valid(audits=AUDITS, m=400):
    """How many of the bounds exceed the truth; a sum does where it refutes the truth."""
    rows = []
    for kind, (truth, deltas, independent) in KINDS.items():
        if truth is None:
            truth, deltas = acc.epsilon(member(0.7), DELTA).upper, event_deltas(member(0.7))
        if kind.startswith("randomised"):  # any (1, 0)-DP mechanism
            deltas = np.maximum(0.0, 1 - (1 + np.exp(EPSILON_OF_V[:-1])) * special.expit(-1.0))
        wrong = dict.fromkeys(
            ("guesses, nothing assumed", "plain sum, nothing assumed", "sum, its kind",
             "sum, its kind and independent", *ESTIMATES), 0,
        )  # fmt: skip
        for seed in range(audits):
            rng = np.random.default_rng([11, seed])
            coins = rng.random(m) < 0.5
            odds = scores_of(kind, rng, coins)
            total = statistic(odds, coins)
            found = {
                "guesses, nothing assumed": guessing(odds, coins) > truth,
                "plain sum, nothing assumed": plain_sum(odds, coins) > truth,
                "sum, its kind": log_chance_joined(total, m, deltas) <= np.log(LEVEL),
                "sum, its kind and independent": log_chance_independent(total, m, deltas)
                <= np.log(LEVEL),
                **{name: of(odds, coins) > truth + 1e-4 for name, of in ESTIMATES.items()},
            }
            for name, is_wrong in found.items():
                wrong[name] += bool(is_wrong)
        for name, count in wrong.items():
            low, high = audit.scores.clopper_pearson(count, audits, 0.95)[1:]
            claimed = name not in ESTIMATES and (independent or "independent" not in name)
            rows.append(
                {"kind": kind, "truth": truth, "bound": name, "claimed": claimed, "audits": audits,
                 "above": count, "clopper_pearson": [low, high]}
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


# Which is larger ----------------------------------------------------------------------------------


def all_bounds(odds, coins, family=acc.Gaussian, noise=1.0, events=None, sums=None):
    """Every bound on the same scores; where sampled, the normal pair of ``sums`` as well."""
    pair = odds[coins], odds[~coins]
    alone = {} if sums is None else {"estimate: pair, sums alone": pair_of_normals(sums, coins)}
    return alone | {
        "nothing assumed: guesses": guessing(odds, coins),
        "nothing assumed: plain sum": plain_sum(odds, coins),
        "its kind: guesses": audit.audit_one_run_family(odds, coins, family, noise, DELTA).epsilon,
        "its kind: sum": sum_bound(odds, coins, log_chance_joined, events, noise),
        "its kind and independent: threshold": (
            audit.audit_scores(*pair, DELTA, kind="gaussian")
            if events is None
            else family_bound(*pair, events, noise, DELTA)
        ).epsilon,
        "its kind and independent: sum": sum_bound(
            odds, coins, log_chance_independent, events, noise
        ),
        **{f"estimate: {name}": of(odds, coins) for name, of in ESTIMATES.items()},
    }


def larger(seeds=12, m=1_000):
    """Means over simulated audits."""
    rows = []
    plain = [(f"Gaussian of mu {mu:g}", mu, None) for mu in (0.25, 0.5, 1.0, 1.666, 2.5)]
    drawn = [
        ("sampled, 10 steps at 0.1", 0.7, (10, 0.1)),
        ("sampled, 100 steps of 512", 0.4515, MLP),
    ]
    for kind, size, sampling in plain + drawn:
        found, event = [], acc.Gaussian(1 / size)
        for seed in range(seeds):
            rng = np.random.default_rng([12, seed])
            coins = rng.random(m) < 0.5
            if sampling is None:
                odds = size * (rng.normal(size=m) + size * coins - size / 2)
                found.append(all_bounds(odds, coins, acc.Gaussian, 1 / size))
            else:
                family = lambda z: member(z, *sampling)  # noqa: E731, B023
                odds, sums = sampled(rng, coins, size, *sampling)
                found.append(all_bounds(odds, coins, family, size, family, sums))
                event = family(size)
        means = {name: float(np.mean([each[name] for each in found])) for name in found[0]}
        truth = acc.epsilon(event, DELTA).upper
        rows.append({"kind": kind, "truth": truth, "audits": seeds, "means": means})
        print(rows[-1], flush=True)
    return rows


def runs(*folders):
    """The same on finished runs; `auditing_inputs` says what they are."""
    rows = []
    for folder in map(Path, folders):
        directory, report = RunDirectory(folder), json.loads((folder / "report.json").read_text())
        config = config_of(directory)
        coins = json.loads((folder / "secret" / "canaries.json").read_text())["included"]
        coins = np.array(coins, bool)
        seen, algorithm = np.load(folder / "canary_gradients.npy"), config.private_algorithm()
        records = seen.shape[1] > len(coins)
        odds = canaries.log_odds(seen, algorithm, records=records)
        family, noise = noise_family(algorithm, len(seen))
        whole = config.sampling == "full_batch"
        sums = None if whole else seen.sum(0)
        found = all_bounds(odds, coins, family, noise, None if whole else family, sums)
        proven = report["guarantee"]["epsilon"]
        rows.append({"run": folder.name, "proven": proven, "records": records, "bounds": found})
        print(rows[-1], flush=True)
    return rows


def main(part, *rest):
    rest = rest if part == "runs" else map(int, rest)
    rows = {"valid": valid, "larger": larger, "runs": runs}[part](*rest)
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps({**result, part: rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
