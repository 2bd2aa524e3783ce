"""The bounds accuse nobody falsely and are tight where tightness is possible."""

import numpy as np
import pytest
from scipy import special, stats

from jaxdp import accounting as acc
from jaxdp.auditing import bounds
from jaxdp.auditing.bounds import Counts
from jaxdp.auditing.guessed import audit_one_run
from jaxdp.auditing.scores import audit_all_thresholds, audit_scores

AUDITS, LEVEL = 200, 0.05
MOST = stats.binom.ppf(0.999, AUDITS, LEVEL)  # one false alarm of the tests themselves in 1,000


def violations(audit, truth):
    return sum(audit(np.random.default_rng(seed)) > truth for seed in range(AUDITS))


def gaussian_pair(rng, mu, count):
    return rng.normal(mu, 1, count), rng.normal(0, 1, count)


@pytest.mark.parametrize("rule", bounds.RULES)
@pytest.mark.parametrize("mu", [0.3, 1.5])
def test_two_hundred_audits_at_the_very_truth(rule, mu):
    """The tightest null there is: the event's own trade-off, at a fixed event."""
    a, b = special.ndtr(-mu / 2), special.ndtr(-mu / 2)

    def audit(rng):
        counts = Counts(rng.binomial(2000, a), 2000, rng.binomial(2000, b), 2000)
        return bounds.mu_bound(counts, rule=rule)

    assert violations(audit, mu) <= MOST


@pytest.mark.parametrize("rule", bounds.RULES)
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 4.0])
def test_two_hundred_audits_of_randomised_response(rule, epsilon):
    lie = special.expit(-epsilon)

    def audit(rng):
        counts = Counts(rng.binomial(1000, lie), 1000, rng.binomial(1000, lie), 1000)
        return bounds.epsilon_bound(counts, 0.0, rule=rule)

    assert violations(audit, epsilon) <= MOST


@pytest.mark.parametrize("kind", ["clopper_pearson", "gaussian"])
def test_two_hundred_audits_with_a_chosen_threshold(kind):
    mu, delta = 1.0, 1e-5
    truth = acc.epsilon(acc.Gaussian(1 / mu), delta).upper

    def audit(rng):
        inside, outside = gaussian_pair(rng, mu, 1000)
        return audit_scores(inside, outside, delta, kind=kind).epsilon

    assert violations(audit, truth) <= MOST


def test_null_scores_give_zero():
    """Many columns of noise: whatever was looked at, 95 % of audits say 0."""

    def audit(rng):
        return audit_scores(*rng.normal(size=(2, 300, 3)), 1e-5).epsilon

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


def test_the_gaussian_profile_is_tight_and_says_what_it_assumes():
    for epsilon in (1.0, 2.0, 4.0, 8.0):
        sigma = acc.calibrate_noise_multiplier(
            epsilon=epsilon, delta=1e-5, steps=1, sampling_prob=1
        )
        found = audit_scores(
            *gaussian_pair(np.random.default_rng(3), 1 / sigma, 10_000),
            1e-5,
            kind="gaussian",
            held_out=0.1,
        )
        assert 0.75 * epsilon < found.epsilon <= epsilon
        assert "Gaussian" in found.assumes


def test_the_gaussian_profile_is_wrong_for_a_sampled_mechanism():
    """Why the assumption is stated: a sampled step's epsilon is exceeded, at a given threshold."""
    rate, sigma, count = 0.5, 0.5, 4000
    rng = np.random.default_rng(0)
    inside = rng.binomial(1, rate, count) + sigma * rng.normal(size=count)
    outside = sigma * rng.normal(size=count)
    found = audit_scores(inside, outside, 0.3, kind="gaussian", threshold=1.0)
    truth = acc.epsilon(acc.PoissonSampled(acc.Gaussian(sigma), rate), 0.3).upper
    assert audit_scores(inside, outside, 0.3, threshold=1.0).epsilon <= truth
    assert found.epsilon > truth


def test_the_gaussian_profile_is_wrong_for_randomised_response():
    """It is no sampled Gaussian either; the threshold is the balanced one."""
    truth = 1.0
    rng = np.random.default_rng(0)
    outside = rng.uniform(size=4000) < special.expit(-truth)
    inside = rng.uniform(size=4000) < special.expit(truth)
    noisy = [answers + 0.1 * rng.uniform(size=4000) for answers in (inside, outside)]
    assert audit_scores(*noisy, 1e-5).epsilon <= truth
    assert audit_scores(*noisy, 1e-5, kind="gaussian").epsilon > 3 * truth


def test_both_directions_are_seen():
    """An event that happens without the record alone, and one that happens with it alone."""
    rng = np.random.default_rng(0)
    often, rarely = rng.uniform(size=4000) < 0.1, np.zeros(4000)
    for pair in ((often, rarely), (rarely, often), (~often, 1 - rarely)):
        assert audit_scores(*pair, 1e-5).epsilon > 3.5


def test_not_a_number_is_a_score():
    broken = np.full(300, np.nan)
    assert audit_scores(broken, np.zeros(300), 1e-5).epsilon > 3


def test_one_run_bound_is_sound_and_tight_for_randomised_response():
    truth = 2.0

    def audit(rng):
        correct = rng.binomial(500, special.expit(truth))
        return bounds.one_run_bound(correct, 500, 1000, 0.0)

    values = [audit(np.random.default_rng(seed)) for seed in range(AUDITS)]
    assert sum(v > truth for v in values) <= MOST
    assert np.median(values) > 0.8 * truth
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


def test_one_run_coins_are_checked():
    with pytest.raises(ValueError, match="included must be bool"):
        audit_one_run(np.zeros(5), np.zeros(5), 1e-5)


def test_looks_are_fixed_beforehand_and_paid_for():
    coins = np.arange(100) % 2 == 0
    perfect = coins.astype(float)
    one = audit_one_run(perfect, coins, 0.0, looks=[(50, "top")]).epsilon
    assert 0 <= bounds.one_run_bound(50, 50, 100, 0.0) - one < 0.01  # down to a grid
    assert audit_one_run(perfect, coins, 0.0, looks=[(50, "top"), (2, "both")]).epsilon < one
    both = audit_one_run(perfect, coins, 0.0, looks=[(100, "both")]).epsilon
    assert 0 <= bounds.one_run_bound(100, 100, 100, 0.0) - both < 0.01
    with pytest.raises(ValueError, match="looks must be one of both, top"):
        audit_one_run(perfect, coins, 0.0, looks=[(5, "left")])
    with pytest.raises(ValueError, match="looks must make at most 100 guesses, got 101"):
        audit_one_run(perfect, coins, 0.0, looks=[(101, "top")])


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
    counts = Counts(3, 1000, 400, 1000)
    level = 0.025
    alarms, misses = (stats.beta.ppf(1 - level, k + 1, 1000 - k) for k in (3, 400))
    wanted = np.log((1 - misses) / alarms)
    assert bounds.epsilon_bound(counts, 0.0, rule="box") == pytest.approx(wanted, abs=0.02)
    assert bounds.epsilon_bound(counts, 0.0, rule="box") <= wanted + 1e-9
    # The other direction is the same with alarms and misses exchanged.
    other = Counts(400, 1000, 3, 1000)
    assert bounds.epsilon_bound(other, 0.0, rule="box") == pytest.approx(wanted, abs=0.02)
    assert bounds.epsilon_bound(other, 0.0, rule="box") <= wanted + 1e-9


def test_the_combined_p_value_has_its_level():
    rng = np.random.default_rng(0)
    values = bounds._capped_sum(*rng.uniform(size=(2, 200_000)))
    for level in (0.001, 0.05, 0.3):
        assert np.mean(values <= level) == pytest.approx(level, rel=0.15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 4, 0, 4), "alarms must be at most without"),
        ((0, 0, 0, 4), "without must be a whole number"),
        ((-1, 4, 0, 4), "alarms must be a whole number"),
    ],
)
def test_counts_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Counts(*arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"confidence": 1.0}, "confidence must be above 0 and below 1"),
        ({"held_out": 1.0}, "held_out must be above 0 and below 1"),
        ({"kind": "guess"}, "kind must be one of"),
        ({"delta": 1.0}, "delta must be at least 0 and below 1"),
        ({"without": np.zeros((9, 2))}, "without must have 1 columns"),
        ({"with_record": np.zeros(0)}, "with_record must be scores"),
    ],
)
def test_audits_are_checked(changes, message):
    arguments = {"with_record": np.zeros(9), "without": np.zeros(9), "delta": 1e-5, **changes}
    with pytest.raises(ValueError, match=message):
        audit_scores(**arguments)
