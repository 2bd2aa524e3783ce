"""The bounds accuse nobody falsely and are tight where tightness is possible; what is measured."""

import itertools

import numpy as np
import pytest
from scipy import special, stats

from jaxdp import accounting as acc
from jaxdp import auditing
from jaxdp.accounting.gaussian import gaussian_epsilon
from jaxdp.auditing import bounds, measures, ranks
from jaxdp.auditing.bounds import Counts
from jaxdp.auditing.guessed import audit_one_run
from jaxdp.auditing.scores import audit_all_thresholds, audit_scores

AUDITS, LEVEL = 100, 0.05
MOST = stats.binom.ppf(0.999, AUDITS, LEVEL)  # one false alarm of the tests themselves in 1,000


def violations(audit, truth):
    rngs = (np.random.default_rng([13, seed]) for seed in range(AUDITS))
    return sum(audit(rng) > truth + 1e-9 for rng in rngs)


def pair(seed, mu, runs=300):
    rng = np.random.default_rng(seed)
    return rng.normal(mu, 1, runs), rng.normal(size=runs)


def by_the_gaussian_profile(inside, outside, delta, **options):
    return audit_scores(inside, outside, delta, kind="gaussian", **options)


def test_the_level_is_kept_exactly_at_the_very_truth():
    """The tightest nulls there are, at a fixed event: over all counts, not over drawn ones."""
    nulls = [(24, bounds.gaussian_dp(mu), special.ndtr(-mu / 2)) for mu in (0.3, 1.5)]
    for runs, epsilon in ((24, 0.0), (24, 1.0), (300, 4.0)):
        nulls.append((runs, bounds.approximate_dp(epsilon, 0.0), special.expit(-epsilon)))
    for (runs, tradeoff, chance), rule in itertools.product(nulls, bounds.RULES):
        law = stats.binom.pmf(np.arange(runs + 1), runs, chance)
        accused = sum(
            law[alarms] * law[misses]
            for alarms, misses in itertools.product(np.flatnonzero(law > 1e-7), repeat=2)
            if bounds.p_value(Counts(alarms, runs, misses, runs), tradeoff, rule) <= LEVEL
        )
        assert 0 < accused <= LEVEL, (rule, chance)


def test_a_bound_is_the_last_that_is_refuted():
    counts = Counts(3, 100, 20, 100), Counts(20, 100, 3, 100), Counts(50, 1_000, 50, 1_000)
    for each, rule in itertools.product(counts, bounds.RULES):
        for tradeoff, found in (
            (bounds.gaussian_dp, bounds.mu_bound(each, rule=rule)),
            (lambda e: bounds.approximate_dp(e, 1e-5), bounds.epsilon_bound(each, 1e-5, rule=rule)),
        ):
            assert found > 1.5
            assert bounds.p_value(each, tradeoff(found), rule) <= LEVEL + 1e-12
            assert bounds.p_value(each, tradeoff(1.001 * found), rule) > LEVEL
    assert bounds.largest_refuted(lambda e: 1.0, 0.05) == 0.0


@pytest.mark.parametrize("audit", [audit_scores, auditing.audit_ranks, by_the_gaussian_profile])
def test_audits_with_a_chosen_threshold_stay_below_the_truth(audit):
    for mu, audits, runs in ((0.0, 200, 300), (1.0, AUDITS, 1000)):
        truth = gaussian_epsilon(mu, 1e-5)[0] if mu else 0.0
        scores = (pair([9, seed], mu, runs) for seed in range(audits))
        wrong = sum(audit(*each, 1e-5).epsilon > truth for each in scores)
        assert wrong <= stats.binom.ppf(0.999, audits, 0.05), mu


def test_null_scores_give_zero():
    """Many columns of noise: whatever was looked at, 95 % of audits say 0; and equal scores."""
    audit = lambda rng: audit_scores(*rng.normal(size=(2, 300, 3)), 1e-5).epsilon  # noqa: E731
    assert violations(audit, 0.0) <= MOST
    same = np.random.default_rng(1).normal(size=500)
    assert by_the_gaussian_profile(same, same, 1e-5).epsilon == 0.0
    assert audit_all_thresholds(same, same, 1e-5, [-1.0, 0.0, 1.0]).epsilon == 0.0
    for kind, value in itertools.product(TWO_WORLDS, (0.0, np.nan, np.inf, -np.inf, 7)):
        found = TWO_WORLDS[kind](np.full(500, value), np.full(400, value), 1e-5)
        assert found.epsilon == 0.0, (kind, value)


def test_every_threshold_looked_at_is_paid_for():
    cuts = np.linspace(-2, 2, 9)

    def best_without_correction(rng):
        pair = rng.normal(size=(2, 300))
        return max(audit_scores(*pair, 1e-5, threshold=cut).epsilon for cut in cuts)

    def corrected(rng):
        return audit_all_thresholds(*rng.normal(size=(2, 300)), 1e-5, cuts).epsilon

    assert violations(best_without_correction, 0.0) > MOST
    assert violations(corrected, 0.0) <= MOST


TWO_WORLDS = {
    "ranks": auditing.audit_ranks,
    "one split": auditing.audit_scores,
    "splits": lambda *given: auditing.audit_splits(*given, splits=3),
}


def told(rng, runs, there, epsilon, delta):
    """Randomised response that shows the truth outright, as an infinity, with probability delta."""
    right = special.expit(epsilon)
    answers = np.where(rng.random(runs) < (right if there else 1 - right), 1.0, 0.0)
    return np.where(rng.random(runs) < delta, np.inf if there else -np.inf, answers)


@pytest.mark.parametrize("kind", TWO_WORLDS)
def test_atoms_and_infinities_stay_below_the_truth(kind):
    """Also at ranks in the middle of a tie: scores of two values, with no delta to hide it."""
    few = ((0.5, 0.05, 40), (1.0, 0.2, 40), (0.0, 0.5, 40), (2.0, 0.9, 40), (1.0, 1e-5, 40))
    for epsilon, delta, runs in (*few, (1.0, 0.0, 200), (0.0, 0.0, 300)):

        def audit(rng, epsilon=epsilon, delta=delta, runs=runs):
            worlds = (told(rng, runs, there, epsilon, delta) for there in (True, False))
            return TWO_WORLDS[kind](*worlds, delta).epsilon

        assert violations(audit, epsilon) <= MOST, (epsilon, delta)


@pytest.mark.parametrize("audit", [auditing.audit_ranks, by_the_gaussian_profile])
def test_few_runs_of_one_world(audit):
    for n, m in ((5, 300), (300, 5), (3, 3)):
        one = lambda rng, n=n, m=m: audit(rng.normal(size=n), rng.normal(size=m), 1e-5)  # noqa: E731
        assert violations(lambda rng, one=one: one(rng).epsilon, 0.0) <= MOST, (n, m)


def test_the_gaussian_profile_is_tight_has_no_seed_and_takes_the_right_column():
    for epsilon in (1.0, 2.0, 4.0, 8.0):
        sigma = acc.calibrate_noise_multiplier(
            epsilon=epsilon, delta=1e-5, steps=1, sampling_prob=1
        )
        found = by_the_gaussian_profile(*pair(3, 1 / sigma, 10_000), 1e-5, held_out=0.1)
        assert 0.75 * epsilon < found.epsilon <= epsilon
        assert "Gaussian" in found.assumes
    scores = pair([9, 0], 1.0, 2_000)
    found = {by_the_gaussian_profile(*scores, 1e-5, seed=s).epsilon for s in (0, 7)}
    assert len(found) == 1
    back = by_the_gaussian_profile(*(-s for s in scores), 1e-5)
    assert 0.9 * found.pop() < back.epsilon
    assert back.rule.sign == -1
    inside, outside = np.random.default_rng(1).normal(size=(2, 3_000, 3))
    inside[:, 1] -= 1.0
    found = by_the_gaussian_profile(inside, outside, 1e-5)
    assert (found.rule.column, found.rule.sign) == (1, -1)
    assert 3.0 < found.epsilon < 4.38


def test_the_gaussian_profile_is_wrong_for_other_mechanisms():
    """Why it is stated: the truth is exceeded, sampled at a threshold, or as an answer at random."""
    rng, count, rate, sigma = np.random.default_rng(0), 4000, 0.5, 0.5
    inside = rng.binomial(1, rate, count) + sigma * rng.normal(size=count)
    sampled = inside, sigma * rng.normal(size=count)
    truth = acc.epsilon(acc.PoissonSampled(acc.Gaussian(sigma), rate), 0.3).upper
    assert audit_scores(*sampled, 0.3, threshold=1.0).epsilon <= truth
    assert by_the_gaussian_profile(*sampled, 0.3, threshold=1.0).epsilon > truth
    answers = [rng.uniform(size=count) < special.expit(side) for side in (1.0, -1.0)]
    noisy = [each + 0.1 * rng.uniform(size=count) for each in answers]
    assert audit_scores(*noisy, 1e-5).epsilon <= 1.0
    assert by_the_gaussian_profile(*noisy, 1e-5).epsilon > 3.0


def test_both_directions_are_seen():
    """An event that happens without the record alone, and one that happens with it alone."""
    rng = np.random.default_rng(0)
    often, rarely = 1.0 * (rng.uniform(size=4000) < 0.1), np.zeros(4000)
    for each in ((often, rarely), (rarely, often), (1 - often, 1 - rarely)):
        assert audit_scores(*each, 1e-5).epsilon > 3.5
    ranked = lambda *each: auditing.audit_ranks(*each, 1e-5).epsilon  # noqa: E731
    assert min(ranked(often, rarely), ranked(-rarely, -often)) > 3
    assert ranked(-often, -rarely) == 0.0
    broken = np.full(300, np.nan)  # not a number is a score
    assert audit_scores(broken, np.zeros(300), 1e-5).epsilon > 3


def test_one_run_audits_of_many_canaries_with_looks_fixed_beforehand_and_paid_for():
    """One vector sum of many Dirac canaries with noise; the truth is that of one of them."""
    sigma, canaries, delta = 0.7, 600, 1e-5
    truth = acc.epsilon(acc.Gaussian(sigma), delta).upper

    def audit(rng, size=1.0):
        included = rng.uniform(size=canaries) < 0.5
        scores = size * included + sigma * rng.normal(size=canaries)
        return audit_one_run(scores, included, delta).epsilon

    values = [audit(np.random.default_rng(seed)) for seed in range(40)]
    assert sum(v > truth for v in values) <= stats.binom.ppf(0.999, 40, LEVEL)
    assert np.median(values) > 1.0
    assert violations(lambda rng: audit(rng, size=0.0), 0.0) <= MOST
    # Looks.
    coins = np.arange(100) % 2 == 0

    def seen(*looks):
        return audit_one_run(coins.astype(float), coins, 0.0, looks=looks).epsilon

    one = seen((50, "top"))
    assert 0 <= bounds.one_run_bound(50, 50, 100, 0.0) - one < 0.01  # down to a grid
    assert seen((50, "top"), (2, "both")) < one
    assert 0 <= bounds.one_run_bound(100, 100, 100, 0.0) - seen((100, "both")) < 0.01


def test_one_run_p_value_by_direct_sums_and_its_bound_for_randomised_response():
    correct, guesses, canaries, epsilon, delta = 60, 80, 100, 0.5, 1e-3
    q = special.expit(epsilon)
    beta = stats.binom.sf(correct - 1, guesses, q)
    alpha = max(
        (stats.binom.sf(correct - i - 1, guesses, q) - beta) / i for i in range(1, canaries + 1)
    )
    found = bounds.one_run_p_value(correct, guesses, canaries, epsilon, delta)
    assert found == pytest.approx(beta + 2 * canaries * delta * alpha, rel=1e-9)
    truth = 2.0
    found = [
        bounds.one_run_bound(rng.binomial(500, special.expit(truth)), 500, 1000, 0.0)
        for rng in map(np.random.default_rng, range(AUDITS))
    ]
    assert sum(value > truth for value in found) <= MOST
    assert np.median(found) > 0.8 * truth
    assert bounds.one_run_bound(250, 500, 1000, 1e-5) == 0.0


def test_the_box_is_clopper_and_pearsons_and_the_combined_p_value_has_its_level():
    """In both directions: the other one exchanges alarms and misses."""
    level = 0.025
    alarms, misses = (stats.beta.ppf(1 - level, k + 1, 1000 - k) for k in (3, 400))
    wanted = np.log((1 - misses) / alarms)
    for counts in (Counts(3, 1000, 400, 1000), Counts(400, 1000, 3, 1000)):
        found = bounds.epsilon_bound(counts, 0.0, rule="box")
        assert found == pytest.approx(wanted, abs=0.02)
        assert found <= wanted + 1e-9
    rng = np.random.default_rng(0)
    values = bounds._capped_sum(*rng.uniform(size=(2, 200_000)))
    for level in (0.001, 0.05, 0.3):
        assert np.mean(values <= level) == pytest.approx(level, rel=0.15)


def test_every_split_has_half_of_the_error():
    """Twice the median of p-values is one, so a single split is one at 97.5 %."""
    scores = pair([9, 0], 1.5)
    seed = int(np.random.SeedSequence(4).generate_state(1)[0])
    found = auditing.audit_splits(*scores, 1e-5, splits=1, seed=4).epsilon
    halved, whole = (
        auditing.audit_scores(*scores, 1e-5, confidence=level, seed=seed, held_out=0.2).epsilon
        for level in (0.975, 0.95)
    )
    assert found == pytest.approx(halved, abs=1e-9)
    assert found < whole


def test_the_p_value_at_a_rank_is_exact_for_a_gaussian():
    """At its own mu the p-value is that of the counts: uniform but for their steps."""
    mu, rank, n = 1.0, 4, 60
    rng = np.random.default_rng(0)
    outside = np.sort(rng.normal(size=(20_000, n)), axis=1)[:, -1 - rank]
    inside = rng.normal(mu, 1, size=(20_000, n))
    missed = (inside <= outside[:, None]).sum(axis=1)
    for few in (30, 36, 42):
        found = ranks.p_value(rank, n, few, n, bounds.gaussian_dp(mu))
        seen = np.mean(missed <= few)
        assert found == pytest.approx(seen, abs=4 * np.sqrt(seen / 20_000) + 0.03 * found)


def test_measures_by_hand():
    inside, outside = np.array([1.0, 2, 3, 4]), np.array([0.0, 1, 2, 2])
    wins = (inside[:, None] > outside).mean() + 0.5 * (inside[:, None] == outside).mean()
    assert measures.auroc(inside, outside) == wins
    assert measures.accuracy(inside, outside) == 0.75
    assert measures.accuracy(outside - 10, inside) == 0.5
    hits = measures.true_positive_rate(inside, outside, 0.25, 0.95)
    assert hits.value == 0.5  # above 2, the second of the others
    assert hits.interval == pytest.approx(
        (stats.beta.ppf(0.025, 2, 3), stats.beta.ppf(0.975, 3, 2))
    )
    found = auditing.attack_measures(
        *pair([9, 0], 1.0, 1_000), 1e-5, resamples=200, false_positive_rates=(0.1,)
    )
    low, high = found.auroc.interval
    assert low < special.ndtr(1 / np.sqrt(2)) < high
    low, high = found.accuracy.interval
    assert low < special.ndtr(0.5) + 0.02
    assert high > special.ndtr(0.5) - 0.02
    low, high = found.tpr[0.1].interval  # of a threshold whose own rate is near 0.1
    assert low - 0.05 < special.ndtr(1 - special.ndtri(0.9)) < high + 0.05
    assert 0.5 < found.epsilon_splits.epsilon < found.epsilon.epsilon < 4.38
    assert "only if" in str(found)
    points = measures.points(*pair([9, 0], 1.0, 1_000), 0.95)
    assert [point.alarms for point in points] == [0.001, 0.01, 0.1]
    assert all(low <= hits <= high for _, _, hits, (low, high) in points)
