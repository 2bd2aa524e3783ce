"""Bounds at fixed ranks, and the measures of an attack's scores."""

import numpy as np
import pytest
from scipy import special, stats

from jaxdp import auditing
from jaxdp.accounting.gaussian import gaussian_epsilon
from jaxdp.auditing import bounds, measures, ranks

AUDITS = 200
MOST = stats.binom.ppf(0.999, AUDITS, 0.05)


def pair(seed, mu, runs=300):
    rng = np.random.default_rng([9, seed])
    return rng.normal(mu, 1, runs), rng.normal(size=runs)


def test_every_split_has_half_of_the_error():
    """Twice the median of p-values is one, so a single split is one at 97.5 %."""
    scores = pair(0, 1.5)
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


def by_the_gaussian_profile(inside, outside, delta, **options):
    return auditing.audit_scores(inside, outside, delta, kind="gaussian", **options)


@pytest.mark.parametrize("audit", [auditing.audit_ranks, by_the_gaussian_profile])
def test_audits_at_the_very_truth_stay_below_it(audit):
    for mu, audits in ((0.0, AUDITS), (1.0, 50)):
        truth = gaussian_epsilon(mu, 1e-5)[0] if mu else 0.0
        wrong = sum(audit(*pair(seed, mu), 1e-5).epsilon > truth for seed in range(audits))
        assert wrong <= stats.binom.ppf(0.999, audits, 0.05)


def test_ties_give_no_advantage():
    """Scores of two values: the threshold lies in the middle of a tie."""
    rng = np.random.default_rng(3)
    found = [
        auditing.audit_ranks(*(rng.random((2, 300)) < 0.5).astype(float), 1e-5).epsilon
        for _ in range(AUDITS)
    ]
    assert np.sum(np.array(found) > 0) <= MOST


def test_both_ends_of_the_curve_are_seen():
    """One event that happens with the record alone, and one that happens without it alone."""
    with_record, without = np.zeros(2_000), np.zeros(2_000)
    with_record[:200] = 1
    assert auditing.audit_ranks(with_record, without, 1e-5).epsilon > 3
    assert auditing.audit_ranks(-without, -with_record, 1e-5).epsilon > 3
    assert auditing.audit_ranks(-with_record, -without, 1e-5).epsilon == 0.0


def test_the_gaussian_profile_has_no_seed():
    scores = pair(0, 1.0, 2_000)
    found = {by_the_gaussian_profile(*scores, 1e-5, seed=s).epsilon for s in (0, 7)}
    assert len(found) == 1
    back = by_the_gaussian_profile(*(-s for s in scores), 1e-5)
    assert 0.9 * found.pop() < back.epsilon
    assert back.rule.sign == -1


def test_of_several_columns_the_right_one_is_taken():
    rng = np.random.default_rng(1)
    inside, outside = rng.normal(size=(2, 3_000, 3))
    inside[:, 1] -= 1.0
    found = by_the_gaussian_profile(inside, outside, 1e-5)
    assert (found.rule.column, found.rule.sign) == (1, -1)
    assert 3.0 < found.epsilon < 4.38


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


def test_the_measures_of_a_gaussian():
    found = auditing.attack_measures(
        *pair(0, 1.0, 1_000), 1e-5, resamples=200, false_positive_rates=(0.1,)
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
    points = measures.points(*pair(0, 1.0, 1_000), 0.95)
    assert [point.alarms for point in points] == [0.001, 0.01, 0.1]
    assert all(low <= hits <= high for _, _, hits, (low, high) in points)
