"""One run: exact payment for several looks, weights, and bounds that assume a family."""

import itertools

import numpy as np
import pytest
from scipy import special, stats

from jaxdp import accounting as acc
from jaxdp import auditing
from jaxdp.accounting.gaussian import gaussian_epsilon
from jaxdp.auditing import assumed, guesses

AUDITS = 200
MOST = stats.binom.ppf(0.999, AUDITS, 0.05)
EIGHT = 1.666030597852292  # mu of a Gaussian of epsilon 8 at delta 1e-5


def gaussian_run(seed, mu, m):
    rng = np.random.default_rng(seed)
    coins = rng.random(m) < 0.5
    return mu * (rng.normal(size=m) + mu * coins - mu / 2), coins


def test_the_joint_p_value_by_enumeration():
    """All 2^8 outcomes of 8 guesses, seen at three numbers of them."""
    made, correct, epsilon = np.array([2, 5, 8]), np.array([2, 4, 6]), 0.7
    q = special.expit(epsilon)
    smallest = min(stats.binom.sf(c - 1, r, q) for c, r in zip(correct, made, strict=True))
    wanted = 0.0
    for outcome in itertools.product((0, 1), repeat=8):
        right = np.cumsum(outcome)[made - 1]
        seen = min(stats.binom.sf(c - 1, r, q) for c, r in zip(right, made, strict=True))
        if seen <= smallest * (1 + 1e-9):
            wanted += q ** sum(outcome) * (1 - q) ** (8 - sum(outcome))
    found = guesses.nested_p_value(correct, made, 100, epsilon, 0.0)
    assert found == pytest.approx(wanted, rel=1e-9)
    more = guesses.nested_p_value(correct, made, 100, epsilon, 1e-3)
    assert more - found == pytest.approx(0.1 / (1 + np.exp(epsilon)), rel=1e-9)


def test_the_weighted_p_value_by_enumeration():
    weights, right = np.array([3, 1, 0, 2, 2]), np.array([True, False, True, True, False])
    q = special.expit(1.1)
    wanted = sum(
        q ** sum(outcome) * (1 - q) ** (5 - sum(outcome))
        for outcome in itertools.product((0, 1), repeat=5)
        if weights @ np.array(outcome) >= 5
    )
    found = guesses.weighted_p_value(weights, right, 5, 1.1, 0.0)
    assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("delta", [0.0, 1e-4])
@pytest.mark.parametrize("audit", [auditing.audit_one_run, auditing.audit_guesses])
def test_randomised_response_by_canary_is_the_tightest_null(audit, delta):
    """It tells a coin outright with probability delta: exactly (epsilon, delta)-DP."""
    truth, m, wrong, audits = 1.0, 300, 0, 80
    for seed in range(audits):
        rng = np.random.default_rng([5, seed])
        coins = rng.random(m) < 0.5
        lie = (rng.random(m) < special.expit(-truth)) & (rng.random(m) >= delta)
        scores = np.where(coins ^ lie, 1.0, -1.0) * (1.5 + 0.1 * rng.random(m))
        wrong += audit(scores, coins, delta).epsilon > truth
    assert wrong <= stats.binom.ppf(0.999, audits, 0.05)


def test_ideal_scores_reach_the_ceiling():
    """A Gaussian of epsilon 8: 3.0 by the best number of guesses, chosen with the coins in hand."""
    runs = [gaussian_run(seed, EIGHT, 1_000) for seed in range(10)]
    looks = np.mean([auditing.audit_one_run(*run, 1e-5).epsilon for run in runs])
    weights = np.mean([auditing.audit_guesses(*run, 1e-5).epsilon for run in runs])
    assert looks > 0.9 * 3.0
    assert weights > 0.95 * 3.0


def test_weights_do_not_see_the_coins():
    odds, _ = gaussian_run(0, 1.0, 200)
    weights = guesses.weights_of(odds, 200, 1e-5, 0.05)
    assert weights.dtype.kind == "i"
    assert weights.max() == 10
    order = np.argsort(np.abs(odds))
    assert (np.diff(weights[order]) >= 0).all()
    assert not guesses.weights_of(np.zeros(5), 5, 1e-5, 0.05).any()
    assert auditing.audit_guesses(np.zeros(5), np.ones(5, bool), 1e-5).epsilon == 0.0


def quantiles(shift, count=10_000):
    """jax_privacy's fixed example: a Gaussian's quantiles, with and without a shift."""
    base = special.ndtri((np.arange(count) + 0.5) / count)
    return np.r_[base + shift, base], np.arange(2 * count) < count


@pytest.mark.parametrize(("shift", "peer", "plain"), [(1, 2.1647, 1.1335), (2, 4.7218, 2.3119)])
def test_a_fixed_example_of_a_gaussian(shift, peer, plain):
    """jax_privacy prints ``peer`` if Gaussian, and ``plain`` with nothing assumed."""
    scores, coins = quantiles(shift)
    truth = gaussian_epsilon(shift, 1e-6)[0]
    assert peer < auditing.audit_one_run_gaussian(scores, coins, 1e-6).epsilon < truth
    assert plain < auditing.audit_one_run(scores, coins, 1e-6).epsilon < truth


def test_one_run_of_a_gaussian_at_the_very_truth():
    truth = gaussian_epsilon(1.0, 1e-5)[0]
    found = [
        auditing.audit_one_run_gaussian(*gaussian_run(seed, 1.0, 400), 1e-5)
        for seed in range(AUDITS)
    ]
    assert sum(each.epsilon > truth for each in found) <= MOST
    assert "is a Gaussian" in found[0].assumes


@pytest.mark.parametrize("one_sided", [True, False])
def test_guesses_of_independent_coins_are_never_refuted_by_their_own_law(one_sided):
    """Randomised response's right guesses are binomial: at its own epsilon, so many are likely."""
    epsilon, r = 1.5, 60
    q = special.expit(epsilon)
    inverse = assumed._of_pieces(((epsilon, 0.0),))
    for level in (0.3, 0.05, 1e-3):
        likely = int(stats.binom.isf(level, r, q))  # P(at least so many) >= level
        assert stats.binom.sf(likely - 1, r, q) >= level
        assert not assumed.refuted(likely, r, 120, inverse, level, one_sided=one_sided)
        assert assumed.refuted(r, r, 120, inverse, q**r / 2, one_sided=one_sided) in (True, False)
    strict = assumed._of_pieces(((0.2, 0.0),))
    assert assumed.refuted(r, r, 120, strict, 0.05, one_sided=one_sided)


@pytest.mark.parametrize(("epsilon", "r"), [(1.0, 400), (0.5, 400), (2.0, 100)])
def test_guesses_on_both_sides_of_all_canaries_are_not_halved(epsilon, r):
    """Where every coin is guessed, what holds if all guesses say "in" would refute the truth."""
    inverse = assumed._of_pieces(((epsilon, 0.0),))
    likely = int(stats.binom.isf(0.05, r, special.expit(epsilon)))
    assert not assumed.refuted(likely, r, r, inverse, 0.05, one_sided=False)
    assert assumed.refuted(likely, r, r, inverse, 0.05, one_sided=True)


def test_the_family_bound_stays_below_the_truth_and_says_what_it_assumes():
    rate, steps, z, m = 0.02, 60, 0.6, 2_000

    def family(noise):
        return acc.Repeated(acc.PoissonSampled(acc.Gaussian(noise), rate), steps)

    truth, found = acc.epsilon(family(z), 1e-5).upper, []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        coins = rng.random(m) < 0.5
        seen = z * rng.normal(size=(steps, m)) + ((rng.random((steps, m)) < rate) & coins)
        odds = np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * seen - 1) / (2 * z * z)).sum(0)
        found.append(auditing.audit_one_run_family(odds, coins, family, z, 1e-5))
    values = np.array([each.epsilon for each in found])
    assert np.sum(values > truth) <= 2
    assert np.median(values) > 0.25 * truth
    assert "size of the noise" in found[0].assumes


def test_bad_input():
    with pytest.raises(ValueError, match=r"log_odds must be \[m\]"):
        auditing.audit_guesses(np.zeros((3, 2)), np.ones(3, bool), 1e-5)
    with pytest.raises(ValueError, match="included must be bool"):
        auditing.audit_guesses(np.zeros(3), np.ones(3), 1e-5)
    with pytest.raises(ValueError, match="delta must be above 0"):
        auditing.audit_one_run_gaussian(np.zeros(3), np.ones(3, bool), 0.0)
    with pytest.raises(ValueError, match="noise must be"):
        auditing.audit_one_run_family(np.zeros(3), np.ones(3, bool), acc.Gaussian, 0.0, 1e-5)
