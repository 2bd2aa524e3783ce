"""The bounds accuse nobody falsely and are tight where tightness is possible; what is measured."""

import itertools

import numpy as np
import pytest
from scipy import special, stats

from jaxdp import accounting as acc
from jaxdp import audit
from jaxdp.accounting.gaussian import gaussian_epsilon
from jaxdp.audit import audit_scores, bounds, scores
from jaxdp.audit.bounds import ErrorCounts

AUDITS, LEVEL = 100, 0.05
MOST = stats.binom.ppf(0.999, AUDITS, LEVEL)  # one false alarm of the tests themselves in 1,000


def violations(audit, truth):
    rngs = (np.random.default_rng([13, seed]) for seed in range(AUDITS))
    return sum(audit(rng) > truth + 1e-9 for rng in rngs)


def pair(seed, mu, runs=300):
    rng = np.random.default_rng(seed)
    return rng.normal(mu, 1, runs), rng.normal(size=runs)


def of_two_columns(inside, outside, delta, **options):
    """The event is chosen on a part of the runs."""
    return audit_scores(np.c_[inside, -inside], np.c_[outside, -outside], delta, **options)


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
            if bounds.p_value(ErrorCounts(alarms, runs, misses, runs), tradeoff, rule) <= LEVEL
        )
        assert 0 < accused <= LEVEL, (rule, chance)


def largest_mu(counts, rule="sum"):
    refuted = lambda mu: bounds.p_value(counts, bounds.gaussian_dp(mu), rule)  # noqa: E731
    return bounds.largest_refuted(refuted, LEVEL)


def test_a_bound_is_the_last_that_is_refuted():
    counts = (
        ErrorCounts(3, 100, 20, 100),
        ErrorCounts(20, 100, 3, 100),
        ErrorCounts(50, 1_000, 50, 1_000),
    )
    for each, rule in itertools.product(counts, bounds.RULES):
        for tradeoff, found in (
            (bounds.gaussian_dp, largest_mu(each, rule)),
            (lambda e: bounds.approximate_dp(e, 1e-5), bounds.epsilon_bound(each, 1e-5, rule=rule)),
        ):
            assert found > 1.5
            assert bounds.p_value(each, tradeoff(found), rule) <= LEVEL + 1e-12
            assert bounds.p_value(each, tradeoff(1.001 * found), rule) > LEVEL
    assert bounds.largest_refuted(lambda e: 1.0, 0.05) == 0.0


@pytest.mark.parametrize("audit", [audit_scores, of_two_columns, by_the_gaussian_profile])
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
    for kind, value in itertools.product(TWO_WORLDS, (0.0, np.nan, np.inf, -np.inf, 7)):
        found = TWO_WORLDS[kind](np.full(500, value), np.full(400, value), 1e-5)
        assert found.epsilon == 0.0, (kind, value)


def test_every_threshold_looked_at_is_paid_for():
    """Nine fixed ones at the whole error each exceed 0 too often; all the ranks together do not."""
    cuts = np.linspace(-2, 2, 9)

    def best_without_correction(rng):
        pair = rng.normal(size=(2, 300))
        return max(audit_scores(*pair, 1e-5, threshold=cut).epsilon for cut in cuts)

    assert violations(best_without_correction, 0.0) > MOST
    ranked = lambda rng: audit_scores(*rng.normal(size=(2, 300)), 1e-5).epsilon  # noqa: E731
    assert violations(ranked, 0.0) <= MOST


TWO_WORLDS = {"fixed ranks": audit_scores, "a chosen event": of_two_columns}


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


@pytest.mark.parametrize("audit", [audit_scores, by_the_gaussian_profile])
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
        assert min(audit(*each, 1e-5).epsilon for audit in TWO_WORLDS.values()) > 3.5
    broken = np.full(300, np.nan)  # not a number is a score
    assert audit_scores(broken, np.zeros(300), 1e-5).epsilon > 3


def test_the_box_is_clopper_and_pearsons_and_the_combined_p_value_has_its_level():
    """In both directions: the other one exchanges alarms and misses."""
    level = 0.025
    alarms, misses = (stats.beta.ppf(1 - level, k + 1, 1000 - k) for k in (3, 400))
    wanted = np.log((1 - misses) / alarms)
    for counts in (ErrorCounts(3, 1000, 400, 1000), ErrorCounts(400, 1000, 3, 1000)):
        found = bounds.epsilon_bound(counts, 0.0, rule="box")
        assert found == pytest.approx(wanted, abs=0.02)
        assert found <= wanted + 1e-9
    rng = np.random.default_rng(0)
    values = bounds._capped_sum(*rng.uniform(size=(2, 200_000)))
    for level in (0.001, 0.05, 0.3):
        assert np.mean(values <= level) == pytest.approx(level, rel=0.15)


def test_the_p_value_at_a_rank_is_exact_for_a_gaussian():
    """At its own mu the p-value is that of the counts: uniform but for their steps."""
    mu, rank, n = 1.0, 4, 60
    rng = np.random.default_rng(0)
    outside = np.sort(rng.normal(size=(20_000, n)), axis=1)[:, -1 - rank]
    inside = rng.normal(mu, 1, size=(20_000, n))
    missed = (inside <= outside[:, None]).sum(axis=1)
    for few in (30, 36, 42):
        found = bounds.rank_p_value(rank, n, few, n, bounds.gaussian_dp(mu))
        seen = np.mean(missed <= few)
        assert found == pytest.approx(seen, abs=4 * np.sqrt(seen / 20_000) + 0.03 * found)


def test_measures_by_hand():
    inside, outside = np.array([1.0, 2, 3, 4]), np.array([0.0, 1, 2, 2])
    wins = (inside[:, None] > outside).mean() + 0.5 * (inside[:, None] == outside).mean()
    found = audit.attack_measures(inside, outside, 0.0, false_positive_rates=(0.25,))
    assert found.auroc.value == wins
    assert found.accuracy.value == 0.75
    assert audit.attack_measures(outside - 10, inside, 0.0).accuracy.value == 0.5
    hits = found.tpr[0.25]
    assert hits.value == 0.5  # above 2, the second of the others
    assert hits[1:] == pytest.approx((stats.beta.ppf(0.025, 2, 3), stats.beta.ppf(0.975, 3, 2)))
    found = audit.attack_measures(*pair([9, 0], 1.0, 1_000), 1e-5)
    assert 0.5 < found.epsilon.epsilon < found.epsilon_gaussian.epsilon < 4.38
    assert "only if" in str(found)
    points = scores.roc_points(*pair([9, 0], 1.0, 1_000), 0.95)
    assert [alarms for alarms, *_ in points] == [0.001, 0.01, 0.1]
    assert all(low <= hits <= high for *_, hits, low, high in points)


@pytest.mark.parametrize("shift", [0.0, 1.0, 3.0])
def test_the_intervals_of_the_measures_hold_the_truth(shift):
    """At 95 %, of few scores, of unlike numbers of them: also where nothing or all is told."""
    area, accuracy = special.ndtr(shift / np.sqrt(2)), special.ndtr(shift / 2)
    missed = 0
    for seed in range(AUDITS):
        rng = np.random.default_rng([14, seed])
        found = audit.attack_measures(rng.normal(shift, 1, 60), rng.normal(size=40), 1e-5)
        missed += not found.auroc.low <= area <= found.auroc.high
        missed += not found.accuracy.low <= accuracy <= found.accuracy.high
        assert found.auroc.low <= found.auroc.value <= found.auroc.high
        assert found.accuracy.low <= found.accuracy.value <= found.accuracy.high
    assert missed <= stats.binom.ppf(0.999, 2 * AUDITS, LEVEL)
