"""One run: exact payment for several looks, weights, and bounds that assume a family."""

import functools
import itertools

import numpy as np
import pytest
from scipy import special, stats

from jaxdp import accounting as acc
from jaxdp import audit
from jaxdp.accounting.gaussian import gaussian_epsilon
from jaxdp.audit import assumed, audit_one_run, guesses
from tests.refusing import all_refused

AUDITS = 60
MOST = stats.binom.ppf(0.999, AUDITS, 0.05)
EIGHT = 1.666030597852292  # mu of a Gaussian of epsilon 8 at delta 1e-5


def gaussian_run(seed, mu, m):
    rng = np.random.default_rng(seed)
    coins = rng.random(m) < 0.5
    return mu * (rng.normal(size=m) + mu * coins - mu / 2), coins


def of_log_odds(scores, coins, delta, **options):
    return audit_one_run(scores, coins, delta, log_odds=True, **options)


def weighted(odds, coins, delta):
    return guesses.weighted_guesses_bound(odds, coins, delta, 0.05)


def of_a_gaussian(scores, coins, delta, **options):
    return audit.audit_one_run_family(scores, coins, acc.Gaussian, 1.0, delta, **options)


def test_the_joint_and_the_weighted_p_value_by_enumeration():
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
    # By weights.
    weights, right = np.array([3, 1, 0, 2, 2]), np.array([True, False, True, True, False])
    q = special.expit(1.1)
    wanted = sum(
        q ** sum(outcome) * (1 - q) ** (5 - sum(outcome))
        for outcome in itertools.product((0, 1), repeat=5)
        if weights @ np.array(outcome) >= 5
    )
    assert guesses.weighted_tail(weights, right, 1.1) == pytest.approx(wanted, rel=1e-9)


def test_ideal_scores_reach_the_ceiling_and_a_fixed_example_what_its_peer_does():
    """A Gaussian of epsilon 8: 3.0 by the best number of guesses, chosen with the coins in hand."""
    runs = [gaussian_run(seed, EIGHT, 1_000) for seed in range(10)]
    assert np.mean([audit_one_run(*run, 1e-5).epsilon for run in runs]) > 0.9 * 3.0
    assert np.mean([weighted(*run, 1e-5) for run in runs]) > 0.95 * 3.0
    assert np.mean([of_log_odds(*run, 1e-5).epsilon for run in runs]) > 0.95 * 3.0
    # Of a Gaussian's quantiles jax_privacy prints ``peer``, and ``plain`` with nothing assumed.
    base = special.ndtri((np.arange(10_000) + 0.5) / 10_000)
    coins = np.arange(20_000) < 10_000
    for shift, peer, plain in ((1, 2.1647, 1.1335), (2, 4.7218, 2.3119)):
        scores, truth = np.r_[base + shift, base], gaussian_epsilon(shift, 1e-6)[0]
        assert peer < of_a_gaussian(scores, coins, 1e-6).epsilon < truth
        assert plain < audit_one_run(scores, coins, 1e-6).epsilon < truth


def test_one_run_of_a_gaussian_at_the_very_truth_and_the_family_bound_below_it():
    truth, runs = gaussian_epsilon(1.0, 1e-5)[0], (gaussian_run(i, 1.0, 400) for i in range(200))
    found = [of_a_gaussian(*run, 1e-5) for run in runs]
    assert sum(each.epsilon > truth for each in found) <= stats.binom.ppf(0.999, 200, 0.05)
    # The family bound stays below it, and says what it assumes.
    rate, steps, z, m = 0.02, 60, 0.6, 2_000

    def family(noise):
        return acc.Repeated(acc.PoissonSampled(acc.Gaussian(noise), rate), steps)

    truth, found = acc.epsilon(family(z), 1e-5).upper, []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        coins = rng.random(m) < 0.5
        seen = z * rng.normal(size=(steps, m)) + ((rng.random((steps, m)) < rate) & coins)
        odds = np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * seen - 1) / (2 * z * z)).sum(0)
        found.append(audit.audit_one_run_family(odds, coins, family, z, 1e-5))
    values = np.array([each.epsilon for each in found])
    assert np.sum(values > truth) <= 1
    assert np.median(values) > 0.25 * truth
    assert "size of the noise" in found[0].assumes


@pytest.mark.parametrize("one_sided", [True, False])
def test_guesses_of_independent_coins_are_never_refuted_by_their_own_law(one_sided):
    """Randomised response's right guesses are binomial: at its own epsilon, so many are likely."""
    epsilon, r = 1.5, 60
    q = special.expit(epsilon)
    inverse = assumed.profile_inverse(((epsilon, 0.0),))
    for level in (0.3, 0.05, 1e-3):
        likely = int(stats.binom.isf(level, r, q))  # P(at least so many) >= level
        assert stats.binom.sf(likely - 1, r, q) >= level
        assert not assumed.is_refuted(likely, r, 120, inverse, level, one_sided=one_sided)
    strict = assumed.profile_inverse(((0.2, 0.0),))
    assert assumed.is_refuted(r, r, 120, strict, 0.05, one_sided=one_sided)


def test_guesses_on_both_sides_of_all_canaries_are_not_halved():
    """Where every coin is guessed, what holds if all guesses say "in" would refute the truth."""
    for epsilon, r in ((1.0, 400), (0.5, 400), (2.0, 100)):
        inverse = assumed.profile_inverse(((epsilon, 0.0),))
        likely = int(stats.binom.isf(0.05, r, special.expit(epsilon)))
        assert not assumed.is_refuted(likely, r, r, inverse, 0.05, one_sided=False), epsilon
        assert assumed.is_refuted(likely, r, r, inverse, 0.05, one_sided=True), epsilon


# Constructed mechanisms at the very truth: no bound of one run may exceed it too often.
BOUNDS = {
    "looks": lambda *run, seed: audit_one_run(*run, seed=seed).epsilon,
    "weights": lambda *run, seed: weighted(*run),
    "both": lambda *run, seed: of_log_odds(*run, seed=seed).epsilon,
}
ONE_RUN = audit_one_run, of_log_odds, of_a_gaussian


def answers(rng, coins, epsilon):
    """Randomised response: two different scores, all others ties."""
    lie = rng.random(len(coins)) < special.expit(-epsilon)
    return epsilon * np.where(coins ^ lie, 1.0, -1.0)


def told(rng, coins, epsilon, which):
    """Answers, but of the coins at ``which`` the truth, surest of all."""
    return np.where(which, np.where(coins, 50.0, -50.0), answers(rng, coins, epsilon))


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


def alone(rng, coins, epsilon, delta):
    """The tightest null: each coin by itself, told with probability delta; sizes tell nothing."""
    lie = (rng.random(len(coins)) < special.expit(-epsilon)) & (rng.random(len(coins)) >= delta)
    return np.where(coins ^ lie, 1.0, -1.0) * (1.5 + 0.1 * rng.random(len(coins)))


def one_told(rng, coins, epsilon, delta):
    """One at most, which makes the most of delta: with probability m delta."""
    found = answers(rng, coins, epsilon)
    if rng.random() < len(coins) * delta:
        i = rng.integers(len(coins))
        found[i] = 50.0 if coins[i] else -50.0
    return found


MECHANISMS = {
    "each is told": lambda rng, c, e, delta: told(rng, c, e, rng.random(len(c)) < delta),
    "all are told at once": lambda rng, c, e, delta: told(rng, c, e, rng.random() < delta),
    **{"one is told": one_told, "together": together},
    **{"chosen": chosen, "broken": broken, "alone": alone},
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("kind", BOUNDS)
def test_a_bound_of_one_run_stays_below_the_truth(kind, mechanism):
    """Canaries are listed by their coins, so that ties broken by place would tell."""
    epsilon = 1.0 if mechanism == "alone" else 0.5
    for m, delta in ((2, 1e-4), (200, 1e-4), *([(300, 0.0)] if mechanism == "alone" else [])):
        wrong = 0
        for seed in range(AUDITS):
            rng = np.random.default_rng([9, seed])
            coins = rng.random(m) < 0.5
            scores = MECHANISMS[mechanism](rng, coins, epsilon, delta)
            order = np.argsort(~coins, kind="stable")
            bound = BOUNDS[kind](scores[order], coins[order], delta, seed=seed)
            wrong += bound > epsilon + 1e-9
        assert wrong <= MOST, (m, delta)


def test_equal_scores_tell_nothing_however_canaries_are_listed_and_weights_see_no_coin():
    coins = np.arange(1_000) < 500
    for bound, score in itertools.product(ONE_RUN, (0.0, 1.0, np.nan, np.inf, -np.inf)):
        for each in (coins, ~coins):
            found = bound(np.full(1_000, score), each, 1e-5, seed=0)
            assert found.epsilon == 0.0, (bound, score)
    odds, _ = gaussian_run(0, 1.0, 200)
    weights = guesses.choose_weights(odds, 0.05)
    assert weights.dtype.kind == "i"
    assert weights.max() == 10
    order = np.argsort(np.abs(odds))
    assert (np.diff(weights[order]) >= 0).all()
    assert not guesses.choose_weights(np.zeros(5), 0.05).any()
    assert weighted(np.zeros(5), np.ones(5, bool), 1e-5) == 0.0


def test_every_epsilon_up_to_a_weighted_bound_is_refuted():
    """Few guesses and a large m delta: there the p-value is not monotone."""
    for weights, m, delta in (
        (np.ones(12, int), 100_000, 1e-3),
        (np.arange(1, 11), 30_000, 1e-4),
        (np.full(200, 3), 2_000, 1e-4),
    ):
        right = np.ones(len(weights), bool)
        found = guesses.weighted_bound(weights, right, m, delta, 0.05)
        first = guesses._first_grid_place(m, delta, 0.05) * guesses._STEP

        def p_value(epsilon, weights=weights, right=right, m=m, delta=delta):
            tail = guesses.weighted_tail(weights, right, epsilon)
            return tail + guesses.delta_excess(m, epsilon, delta)

        for epsilon in np.linspace(first, found, 50) if found else ():
            assert p_value(epsilon) <= 0.05 + 1e-9
        assert p_value(max(found, first) + 0.02) > 0.05


def test_families_hold_for_dependent_canaries():
    """Everything is told at once with probability delta: an (epsilon, delta) trade-off function."""
    epsilon, delta, m, wrong = 0.5, 0.03, 100, 0
    inverse = assumed.profile_inverse(((epsilon, delta),))
    for seed in range(AUDITS):
        rng = np.random.default_rng([10, seed])
        coins = rng.random(m) < 0.5
        scores = MECHANISMS["all are told at once"](rng, coins, epsilon, delta)
        top = np.argsort(-scores - rng.random(m), kind="stable")[:10]
        right = int(coins[top].sum())
        wrong += assumed.is_refuted(right, 10, m, inverse, 0.05, one_sided=True)
    assert wrong <= MOST


def test_coins_that_cannot_be_fair_are_refused_and_fair_ones_never():
    """All in: every guess "in" is right, and tells nothing. Such an answer was 5.8 once."""
    scores = np.random.default_rng(0).normal(size=1_000) + 9
    all_refused(
        (
            rf"^included must be one fair coin .* got {ins} of 1000",
            functools.partial(bound, scores, np.arange(1_000) < ins, 1e-5),
            f"{bound.__name__} {ins}",
        )
        for bound, ins in itertools.product(ONE_RUN, (0, 1, 380, 620, 1_000))
    )
    for seed in range(600):
        coins = np.random.default_rng([12, seed]).random(1 + seed % 200) < 0.5
        guesses.order_by_score(np.zeros(len(coins)), coins)


def test_one_run_audits_of_many_canaries_with_looks_fixed_beforehand_and_paid_for():
    """One vector sum of many Dirac canaries with noise; the truth is that of one of them."""
    sigma, canaries, delta = 0.7, 600, 1e-5
    truth = acc.epsilon(acc.Gaussian(sigma), delta).upper

    def audited(rng, size=1.0):
        included = rng.uniform(size=canaries) < 0.5
        scores = size * included + sigma * rng.normal(size=canaries)
        return audit_one_run(scores, included, delta).epsilon

    values = [audited(np.random.default_rng(seed)) for seed in range(40)]
    assert sum(v > truth for v in values) <= stats.binom.ppf(0.999, 40, 0.05)
    assert np.median(values) > 1.0
    assert sum(audited(np.random.default_rng([13, i]), size=0.0) > 0 for i in range(AUDITS)) <= MOST
    # Looks, down to a grid of epsilons.
    coins = np.arange(100) % 2 == 0

    def seen(look):
        in_order = np.sort(coins)[::-1]
        return guesses.nested_bound(*guesses.count_right(in_order, [look]), 100, 0.0, 0.05)

    all_right = lambda r: special.logit(0.05 ** (1 / r))  # noqa: E731
    assert 0 <= all_right(50) - seen((50, "top")) < 0.01
    assert 0 <= all_right(100) - seen((100, "both")) < 0.01


def test_ties_are_broken_anew_for_every_audit():
    """One order for all audits makes the same error in all of them, where coins are in order.

    Then the right guesses among 400 equal scores never change; drawn anew they are hypergeometric.
    """
    coins = np.arange(400) < 200

    def right(seed=None, scores=coins * 0.0):
        order = guesses.order_by_score(scores, coins, seed)[1]
        return coins[order[:100]].sum()

    found = [right() for _ in range(400)]
    law = stats.hypergeom(400, 200, 100)
    assert abs(np.mean(found) - law.mean()) < 5 * law.std() / 20
    assert 0.6 < np.var(found) / law.var() < 1.5
    assert right(seed=3) == right(seed=3)
    assert right(scores=np.r_[np.ones(100), np.zeros(300)]) == 100
    # Nor is the order one that coins of the same seed were dealt in.
    dealt = np.random.default_rng(3).permutation(400) < 200
    assert 70 > dealt[guesses.order_by_score(np.zeros(400), dealt, 3)[1][:100]].sum() > 30
