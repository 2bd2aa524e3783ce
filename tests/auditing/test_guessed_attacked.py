"""Constructed mechanisms at the very truth: no bound of one run may exceed it too often."""

import numpy as np
import pytest
from scipy import special, stats

from jaxdp import accounting as acc
from jaxdp import auditing
from jaxdp.auditing import assumed, bounds, guesses, one_run

AUDITS = 60
MOST = stats.binom.ppf(0.999, AUDITS, 0.05)
BOUNDS = {
    "looks": auditing.audit_one_run,
    "weights": auditing.audit_guesses,
    "both": lambda s, c, d: one_run._audited(s, c, d, 0.95),
}


def answers(rng, coins, epsilon):
    """Randomised response: two different scores, all others ties."""
    lie = rng.random(len(coins)) < special.expit(-epsilon)
    return epsilon * np.where(coins ^ lie, 1.0, -1.0)


def named(rng, coins, epsilon, delta):
    """Each coin is told with probability delta, and then is surest of all."""
    told = rng.random(len(coins)) < delta
    return np.where(told, np.where(coins, 50.0, -50.0), answers(rng, coins, epsilon))


def shamed(rng, coins, epsilon, delta):
    """All coins are told at once with probability delta."""
    told = rng.random() < delta
    return np.where(coins, 50.0, -50.0) if told else answers(rng, coins, epsilon)


def one_named(rng, coins, epsilon, delta):
    """One coin at most is told, which makes the most of delta: with probability m delta."""
    found = answers(rng, coins, epsilon)
    if rng.random() < len(coins) * delta:
        i = rng.integers(len(coins))
        found[i] = 50.0 if coins[i] else -50.0
    return found


def together(rng, coins, epsilon, delta):
    """Two canaries share one answer, about the parity of their coins: one guess of two is right."""
    pairs = len(coins) // 2 * 2
    found = answers(rng, coins, epsilon)
    found[:pairs] = np.repeat(answers(rng, coins[:pairs:2] ^ coins[1:pairs:2], epsilon), 2)
    return found


def chosen(rng, coins, epsilon, delta):
    """Sizes that depend on the answers before: where they agree, the next ones weigh more."""
    found = answers(rng, coins, epsilon)
    return found * (1 + (np.cumsum(found) > 0) * rng.random(len(coins)))


def broken(rng, coins, epsilon, delta):
    """Scores that are no numbers."""
    found = answers(rng, coins, epsilon)
    return np.where(found > 0, np.inf, np.where(rng.random(len(coins)) < 0.5, np.nan, -np.inf))


MECHANISMS = {each.__name__: each for each in (named, shamed, one_named, together, chosen, broken)}


@pytest.mark.parametrize("m", [2, 200])
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("kind", BOUNDS)
def test_a_bound_of_one_run_stays_below_the_truth(kind, name, m):
    """Canaries are listed by their coins, so that ties broken by place would tell."""
    epsilon, delta, wrong = 0.5, 1e-4, 0
    for seed in range(AUDITS):
        rng = np.random.default_rng([9, seed])
        coins = rng.random(m) < 0.5
        scores = MECHANISMS[name](rng, coins, epsilon, delta)
        order = np.argsort(~coins, kind="stable")
        wrong += BOUNDS[kind](scores[order], coins[order], delta).epsilon > epsilon + 1e-9
    assert wrong <= MOST


@pytest.mark.parametrize(
    "audit",
    [auditing.audit_one_run, auditing.audit_guesses, auditing.audit_one_run_gaussian],
)
@pytest.mark.parametrize("score", [0.0, 1.0, np.nan, np.inf, -np.inf])
def test_equal_scores_tell_nothing_however_canaries_are_listed(audit, score):
    coins = np.arange(1_000) < 500
    assert audit(np.full(1_000, score), coins, 1e-5).epsilon == 0.0
    assert audit(np.full(1_000, score), ~coins, 1e-5).epsilon == 0.0


def test_every_epsilon_up_to_a_weighted_bound_is_refuted():
    """Few guesses and a large m delta: there the p-value is not monotone."""
    for weights, m, delta in (
        (np.ones(12, int), 100_000, 1e-3),
        (np.arange(1, 11), 30_000, 1e-4),
        (np.full(200, 3), 2_000, 1e-4),
    ):
        right = np.ones(len(weights), bool)
        found = guesses.weighted_bound(weights, right, m, delta, 0.05)
        first = guesses._first(m, delta, 0.05) * guesses._STEP
        for epsilon in np.linspace(first, found, 50) if found else ():
            assert guesses.weighted_p_value(weights, right, m, epsilon, delta) <= 0.05 + 1e-9
        beyond = max(found, first) + 0.02
        assert guesses.weighted_p_value(weights, right, m, beyond, delta) > 0.05


def test_families_hold_for_dependent_canaries():
    """Everything is told at once with probability delta: an (epsilon, delta) trade-off function."""
    epsilon, delta, m, wrong = 0.5, 0.03, 100, 0
    inverse = assumed._of_pieces(((epsilon, delta),))
    for seed in range(AUDITS):
        rng = np.random.default_rng([10, seed])
        coins = rng.random(m) < 0.5
        top = np.argsort(-shamed(rng, coins, epsilon, delta) - rng.random(m), kind="stable")[:10]
        right = int(coins[top].sum())
        wrong += assumed.refuted(right, 10, m, inverse, 0.05, one_sided=True)
    assert wrong <= MOST


def test_thresholds_at_ranks_of_discrete_scores_stay_below_the_truth():
    epsilon, wrong = 1.0, 0
    for seed in range(AUDITS):
        rng = np.random.default_rng([11, seed])
        inside, outside = (answers(rng, np.full(200, there), epsilon) for there in (True, False))
        wrong += auditing.audit_ranks(inside, outside, 0.0).epsilon > epsilon
    assert wrong <= MOST
    assert bounds.largest_refuted(lambda e: 1.0, 0.05) == 0.0


@pytest.mark.parametrize(
    "audit",
    [
        auditing.audit_one_run,
        auditing.audit_guesses,
        auditing.audit_one_run_gaussian,
        lambda s, c, d: auditing.audit_one_run_family(s, c, acc.Gaussian, 1.0, d),
    ],
    ids=["looks", "weights", "gaussian", "family"],
)
@pytest.mark.parametrize("ins", [0, 1, 380, 620, 1_000])
def test_coins_that_cannot_be_fair_are_refused(audit, ins):
    """All in: every guess "in" is right, and tells nothing. Such an answer was 5.8 once."""
    coins = np.arange(1_000) < ins
    with pytest.raises(ValueError, match=rf"^included must be one fair coin .* got {ins} of 1000"):
        audit(np.random.default_rng(0).normal(size=1_000) + 9, coins, 1e-5)


def test_fair_coins_are_never_refused():
    for seed in range(2_000):
        coins = np.random.default_rng([12, seed]).random(1 + seed % 200) < 0.5
        auditing.audit_one_run(np.zeros(len(coins)), coins, 1e-5, looks=[(1, "top")])
