"""The bounds accuse nobody falsely and are tight where tightness is possible."""

import itertools

import numpy as np
import pytest
from scipy import special, stats

from jaxdp import accounting as acc
from jaxdp import auditing
from jaxdp.auditing import bounds
from jaxdp.auditing.bounds import Counts
from jaxdp.auditing.guessed import audit_one_run
from jaxdp.auditing.scores import audit_all_thresholds, audit_scores

AUDITS, LEVEL = 100, 0.05
MOST = stats.binom.ppf(0.999, AUDITS, LEVEL)  # one false alarm of the tests themselves in 1,000


def violations(audit, truth):
    rngs = (np.random.default_rng([13, seed]) for seed in range(AUDITS))
    return sum(audit(rng) > truth + 1e-9 for rng in rngs)


def gaussian_pair(rng, mu, count):
    return rng.normal(mu, 1, count), rng.normal(0, 1, count)


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


@pytest.mark.parametrize("kind", ["clopper_pearson", "gaussian"])
def test_audits_with_a_chosen_threshold_stay_below_the_truth(kind):
    truth = acc.epsilon(acc.Gaussian(1.0), 1e-5).upper

    def audit(rng):
        return audit_scores(*gaussian_pair(rng, 1.0, 1000), 1e-5, kind=kind).epsilon

    assert violations(audit, truth) <= MOST


def test_null_scores_give_zero():
    """Many columns of noise: whatever was looked at, 95 % of audits say 0."""
    audit = lambda rng: audit_scores(*rng.normal(size=(2, 300, 3)), 1e-5).epsilon  # noqa: E731
    assert violations(audit, 0.0) <= MOST
    same = np.random.default_rng(1).normal(size=500)
    assert audit_scores(same, same, 1e-5, kind="gaussian").epsilon == 0.0
    assert audit_all_thresholds(same, same, 1e-5, [-1.0, 0.0, 1.0]).epsilon == 0.0


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
    for epsilon, delta in ((0.5, 0.05), (1.0, 0.2), (0.0, 0.5), (2.0, 0.9), (1.0, 1e-5)):

        def audit(rng, epsilon=epsilon, delta=delta):
            worlds = (told(rng, 40, there, epsilon, delta) for there in (True, False))
            return TWO_WORLDS[kind](*worlds, delta).epsilon

        assert violations(audit, epsilon) <= MOST, (epsilon, delta)


def test_few_runs_of_one_world():
    gaussian = lambda *given: audit_scores(*given, kind="gaussian")  # noqa: E731
    for n, m in ((5, 300), (300, 5), (3, 3)):
        for audit in (auditing.audit_ranks, gaussian):
            made = lambda rng, n=n, m=m: (rng.normal(size=n), rng.normal(size=m), 1e-5)  # noqa: E731
            found = violations(lambda rng, a=audit, made=made: a(*made(rng)).epsilon, 0.0)
            assert found <= MOST, (n, m, audit)


def test_scores_that_are_all_equal_tell_nothing():
    for kind, value in itertools.product(TWO_WORLDS, (0.0, np.nan, np.inf, -np.inf, 7)):
        found = TWO_WORLDS[kind](np.full(500, value), np.full(400, value), 1e-5)
        assert found.epsilon == 0.0, (kind, value)


def test_the_gaussian_profile_is_tight_and_says_what_it_assumes():
    for epsilon in (1.0, 2.0, 4.0, 8.0):
        sigma = acc.calibrate_noise_multiplier(
            epsilon=epsilon, delta=1e-5, steps=1, sampling_prob=1
        )
        scores = gaussian_pair(np.random.default_rng(3), 1 / sigma, 10_000)
        found = audit_scores(*scores, 1e-5, kind="gaussian", held_out=0.1)
        assert 0.75 * epsilon < found.epsilon <= epsilon
        assert "Gaussian" in found.assumes


def test_the_gaussian_profile_is_wrong_for_other_mechanisms():
    """Why it is stated: the truth is exceeded, sampled at a threshold, or as an answer at random."""
    rng, count = np.random.default_rng(0), 4000
    rate, sigma = 0.5, 0.5
    inside = rng.binomial(1, rate, count) + sigma * rng.normal(size=count)
    sampled = inside, sigma * rng.normal(size=count)
    truth = acc.epsilon(acc.PoissonSampled(acc.Gaussian(sigma), rate), 0.3).upper
    assert audit_scores(*sampled, 0.3, threshold=1.0).epsilon <= truth
    assert audit_scores(*sampled, 0.3, kind="gaussian", threshold=1.0).epsilon > truth
    answers = [rng.uniform(size=count) < special.expit(side) for side in (1.0, -1.0)]
    noisy = [each + 0.1 * rng.uniform(size=count) for each in answers]
    assert audit_scores(*noisy, 1e-5).epsilon <= 1.0
    assert audit_scores(*noisy, 1e-5, kind="gaussian").epsilon > 3.0


def test_both_directions_are_seen():
    """An event that happens without the record alone, and one that happens with it alone."""
    rng = np.random.default_rng(0)
    often, rarely = rng.uniform(size=4000) < 0.1, np.zeros(4000)
    for pair in ((often, rarely), (rarely, often), (~often, 1 - rarely)):
        assert audit_scores(*pair, 1e-5).epsilon > 3.5
    broken = np.full(300, np.nan)  # not a number is a score
    assert audit_scores(broken, np.zeros(300), 1e-5).epsilon > 3


def test_one_run_bound_is_sound_and_tight_for_randomised_response():
    truth = 2.0
    found = [
        bounds.one_run_bound(rng.binomial(500, special.expit(truth)), 500, 1000, 0.0)
        for rng in map(np.random.default_rng, range(AUDITS))
    ]
    assert sum(value > truth for value in found) <= MOST
    assert np.median(found) > 0.8 * truth
    assert bounds.one_run_bound(250, 500, 1000, 1e-5) == 0.0


def test_one_run_audits_of_a_gaussian_with_many_canaries():
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


def test_looks_are_fixed_beforehand_and_paid_for():
    coins = np.arange(100) % 2 == 0

    def seen(*looks):
        return audit_one_run(coins.astype(float), coins, 0.0, looks=looks).epsilon

    one = seen((50, "top"))
    assert 0 <= bounds.one_run_bound(50, 50, 100, 0.0) - one < 0.01  # down to a grid
    assert seen((50, "top"), (2, "both")) < one
    assert 0 <= bounds.one_run_bound(100, 100, 100, 0.0) - seen((100, "both")) < 0.01


def test_one_run_p_value_by_direct_sums():
    correct, guesses, canaries, epsilon, delta = 60, 80, 100, 0.5, 1e-3
    q = special.expit(epsilon)
    beta = stats.binom.sf(correct - 1, guesses, q)
    alpha = max(
        (stats.binom.sf(correct - i - 1, guesses, q) - beta) / i for i in range(1, canaries + 1)
    )
    found = bounds.one_run_p_value(correct, guesses, canaries, epsilon, delta)
    assert found == pytest.approx(beta + 2 * canaries * delta * alpha, rel=1e-9)


def test_the_box_is_clopper_and_pearsons():
    """In both directions: the other one exchanges alarms and misses."""
    level = 0.025
    alarms, misses = (stats.beta.ppf(1 - level, k + 1, 1000 - k) for k in (3, 400))
    wanted = np.log((1 - misses) / alarms)
    for counts in (Counts(3, 1000, 400, 1000), Counts(400, 1000, 3, 1000)):
        found = bounds.epsilon_bound(counts, 0.0, rule="box")
        assert found == pytest.approx(wanted, abs=0.02)
        assert found <= wanted + 1e-9


def test_the_combined_p_value_has_its_level():
    rng = np.random.default_rng(0)
    values = bounds._capped_sum(*rng.uniform(size=(2, 200_000)))
    for level in (0.001, 0.05, 0.3):
        assert np.mean(values <= level) == pytest.approx(level, rel=0.15)
