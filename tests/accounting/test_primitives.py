"""Other noise, stated guarantees and objective perturbation, against their definitions."""

import decimal
import functools
import itertools
import json
import math
from dataclasses import dataclass, replace

import mpmath
import numpy as np
import pytest
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting import events, rdp, tuned
from jaxdp.accounting.flat import flatten
from jaxdp.accounting.gaussian import gaussian_delta
from jaxdp.accounting.groups import group_event
from tests.accounting.judging import ADD, REPLACE, SPECIAL, cost, largest, run
from tests.accounting.judging import profile as of_pair
from tests.refusing import all_refused, refused

MIXED = acc.MixtureOfGaussians(1.3, (0.0, 1.0, 2.0), (0.8, 0.15, 0.05))
ALL = [
    (acc.Laplace(2.0), REPLACE), (acc.DiscreteLaplace(2.0, 3), ADD),
    (acc.DiscreteGaussian(1.5, 2), ADD), (acc.RandomizedResponse(0.3, 4), REPLACE),
    (acc.EpsilonDelta(1.0, 1e-3), ADD), (acc.EpsilonDelta(1.0, relation=SPECIAL), SPECIAL),
    (acc.ExponentialMechanism(1.2), ADD), (MIXED, ADD),
]  # fmt: skip


def delta(event, relation, epsilon):
    """Of the pairs, from their tails."""
    return largest(event.pairs(relation, True), epsilon)


def excess(p, q, epsilon):
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 2.0])
def test_noise_has_its_known_profile(epsilon):
    for b, relation, distance in ((1.0, ADD, 1), (0.4, REPLACE, 2), (0.7, SPECIAL, 1)):
        # Balle, Barthe and Gaboardi 2018
        true = max(0.0, 1 - math.exp((epsilon - distance / b) / 2))
        assert delta(acc.Laplace(b), relation, epsilon) == pytest.approx(true, rel=1e-12)
    # Noise on the integers, summed from its masses.
    k = np.arange(-400, 401)
    geometric, gaussian = np.exp(-np.abs(k) / 2.5), np.exp(-0.5 * (k / 3.0) ** 2)
    for relation, shift in ((ADD, 3), (REPLACE, 6)):
        for event, mass in (
            (acc.DiscreteLaplace(2.5, 3), geometric / geometric.sum()),
            (acc.DiscreteGaussian(3.0, 3), gaussian / gaussian.sum()),
        ):
            zeros = np.zeros(shift)
            true = excess(np.append(mass, zeros), np.append(zeros, mass), epsilon)
            assert delta(event, relation, epsilon) == pytest.approx(true, rel=1e-12), event
    # Randomised response, counted over its answers.
    p, buckets = 0.4, 5
    law, neighbour = (np.full(buckets, p / buckets) for _ in range(2))
    law[0] = neighbour[1] = 1 - p + p / buckets
    true = excess(law, neighbour, epsilon)
    for relation in (REPLACE, SPECIAL):
        found = delta(acc.RandomizedResponse(p, buckets), relation, epsilon)
        assert found == pytest.approx(true)


def test_a_choice_of_a_huge_epsilon_has_an_upper_end_alone():
    for eta in (1500.0, 1e5):
        found = acc.epsilon(acc.ExponentialMechanism(eta), 1e-5)
        assert found.lower == 0 < found.upper < eta + 1e-6 * eta


def test_bounded_range_is_the_worst_of_all_choices():
    """Every mechanism with two losses eta apart: the best of them attains the pair's profile."""
    for eta in (0.1, 1.2, 4.0):
        for epsilon in np.linspace(0, eta, 5)[:-1].tolist():
            t = np.linspace(max(epsilon, 1e-9), eta, 20001)
            p = np.expm1(eta - t) / (np.exp(eta - t) - np.exp(-t))
            worst = float(np.max(p * -np.expm1(epsilon - t)))
            found = delta(acc.ExponentialMechanism(eta), ADD, epsilon)
            assert worst <= found * (1 + 1e-12), eta
            assert found == pytest.approx(worst, rel=1e-5), eta
    # No exponential mechanism leaks more.
    rng, event = np.random.default_rng(0), acc.ExponentialMechanism(1.5)
    orders = np.asarray([1.5, 4.0, 30.0])
    bounds = {epsilon: delta(event, ADD, epsilon) for epsilon in (0.0, 0.4, 1.0)}
    curve = event.renyi(ADD, orders)
    for _ in range(200):
        u = rng.uniform(0, 3, 6)
        v = u + rng.choice([-1.0, 1.0], 6)
        p, q = special.softmax(1.5 * u / 2), special.softmax(1.5 * v / 2)
        assert all(excess(p, q, epsilon) <= most + 1e-15 for epsilon, most in bounds.items())
        sums = (p ** orders[:, None] * q ** (1 - orders[:, None])).sum(axis=1)
        assert (np.log(sums) / (orders - 1) <= curve * (1 + 1e-12)).all()


def test_a_mixture_has_the_profile_and_the_renyi_curve_of_its_densities():
    event = acc.MixtureOfGaussians(0.7, (0.5, 1.0, 3.0), (0.3, 0.6, 0.1))
    y = np.linspace(-9, 12, 1_000_001)
    unit = (y[1] - y[0]) / (0.7 * math.sqrt(2 * math.pi))
    none, *parts = (unit * np.exp(-0.5 * ((y - s) / 0.7) ** 2) for s in (0, *event.sensitivities))
    mixed = sum(p * part for p, part in zip(event.probabilities, parts, strict=True))
    for pair, (p, q) in zip(event.pairs(ADD, True), ((mixed, none), (none, mixed)), strict=True):
        for epsilon in (0.0, 0.1, 0.5, 3.0):
            true = pytest.approx(excess(p, q, epsilon), rel=1e-7, abs=1e-11)
            assert largest([pair], epsilon) == true, epsilon
    q, z = 0.02, 0.8
    step = acc.PoissonSampled(acc.Gaussian(z), q)
    event = acc.MixtureOfGaussians(z, (1, 0), (q, 1 - q))
    for epsilon in (0.0, 0.01, 0.5, 3.0):
        bound = acc.delta(step, epsilon)
        assert bound.lower * (1 - 1e-9) <= delta(event, ADD, epsilon) <= bound.upper * (1 + 1e-9)
    orders = np.asarray([1.01, 1.5, 2.0, 7.0, 40.0])
    assert event.renyi(ADD, orders) == pytest.approx(acc.renyi_curve(step, orders), rel=1e-5)
    # The Renyi curve of another, by the trapezoid rule: as good as exact for such densities.
    found = MIXED.renyi(ADD, np.asarray([1.5, 7.5]))
    for value, true in zip(found, (0.0454647802335754, 5.42071360462036), strict=True):
        assert true * (1 - 1e-13) <= value <= true * (1 + 1e-8)


def test_a_user_of_several_sampled_records_is_their_mixture():
    """Beside dp_accounting 0.6.0, mixture of Gaussians, upper end: (z, q, k, steps, delta)."""
    for numbers, theirs in (
        ((1.0, 0.01, 1, 1000, 1e-6), 2.124522520617938),
        ((2.0, 0.005, 4, 1000, 1e-6), 1.526758041975043),
        ((4.0, 0.005, 16, 1000, 1e-6), 3.030899909907586),
        ((3.0, 0.1, 5, 50, 1e-5), 6.0140212143970135),
    ):
        z, q, k, steps, small = numbers
        event = acc.ExamplesPerUser(acc.Gaussian(z), q, k)
        bound = acc.epsilon(acc.Repeated(event, steps), small)
        assert bound.lower <= theirs == pytest.approx(bound.upper, rel=2e-4), numbers
        if k == 1:
            record = acc.epsilon(run(q, z, steps), small)
            assert (bound.lower, bound.upper) == pytest.approx(
                (record.lower, record.upper), rel=1e-6
            )
    # Fewer records of a user, or a smaller rate, cost less; zeroing out costs the same.
    event = acc.ExamplesPerUser(acc.Gaussian(1.2), 0.3, 3)
    for less in (replace(event, records=2), replace(event, sampling_prob=0.25)):
        for epsilon in (0.0, 0.5, 2.0):
            assert acc.delta(less, epsilon).upper < acc.delta(event, epsilon).lower
    assert acc.epsilon(event, 1e-5, SPECIAL).upper == acc.epsilon(event, 1e-5).upper
    # By brute force over the 2^3 sets of records, at 20 digits.
    one = lambda x, c: mpmath.npdf(x, c, mpmath.mpf(1.2))  # noqa: E731
    chance = lambda j: math.comb(3, j) * mpmath.mpf(0.3) ** j * (1 - mpmath.mpf(0.3)) ** (3 - j)  # noqa: E731
    mixed = lambda x: mpmath.fsum(chance(j) * one(x, j) for j in range(4))  # noqa: E731
    with mpmath.workdps(20):
        for epsilon in (0.3, 1.5):
            gain = lambda x, e=epsilon: mixed(x) - mpmath.exp(e) * one(x, 0)  # noqa: E731
            cut = mpmath.findroot(gain, 1.5)
            there = mpmath.quad(gain, [cut, cut + 2, cut + 6, 25])
            gone = lambda x, e=epsilon: one(x, 0) - mpmath.exp(e) * mixed(x)  # noqa: E731
            other = 0
            if gone(-20) > 0:
                cut = mpmath.findroot(gone, (-3, 1), solver="illinois")
                other = mpmath.quad(gone, [-25, cut - 4, cut])
            bound = acc.delta(event, epsilon)
            assert bound.lower <= float(max(there, other)) * (1 + 1e-12)
            assert float(max(there, other)) * (1 - 1e-12) <= bound.upper
            assert bound.upper == pytest.approx(bound.lower, rel=1e-4)
    # Records that point apart, in the plane, never cost more.
    grid = np.linspace(-9, 13, 441)
    x, y = np.meshgrid(grid, grid)
    rng = np.random.default_rng(1)
    for _ in range(3):
        angles = rng.uniform(0, 2, 3)
        p = np.zeros_like(x)
        for taken in itertools.product((0, 1), repeat=3):
            dx, dy = np.array(taken) @ np.cos(angles), np.array(taken) @ np.sin(angles)
            share = 0.3 ** sum(taken) * 0.7 ** (3 - sum(taken))
            p += share * np.exp(-((x - dx) ** 2 + (y - dy) ** 2) / (2 * 1.44))
        q = np.exp(-(x**2 + y**2) / (2 * 1.44))
        p, q = p / q.sum(), q / q.sum()
        for epsilon in (0.1, 1.0):
            most = acc.delta(event, epsilon).upper
            assert max(excess(p, q, epsilon), excess(q, p, epsilon)) <= most * (1 + 1e-6)
    # Round trips, groups, ends and refusals.
    assert events.from_dict(json.loads(json.dumps(events.to_dict(event)))) == event
    assert group_event(event, 2, ADD) == replace(event, records=6)
    assert group_event(replace(event, records=600), 2, ADD) is None
    everyone = replace(event, sampling_prob=1.0)
    assert acc.epsilon(everyone, 1e-5).upper == pytest.approx(
        acc.epsilon(acc.Gaussian(0.4), 1e-5).upper, rel=1e-4
    )
    assert cost(acc.ExamplesPerUser(acc.Gaussian(0.0), 0.1, 2)) == math.inf
    assert "user with at most 3 of" in event.describe()
    all_refused([
        ("ExamplesPerUser under replace_one", lambda: acc.epsilon(event, 1e-5, REPLACE)),
        ("amplification by sampling", lambda: acc.epsilon(acc.PoissonSampled(event, 0.1), 1e-5)),
        ("records=1001: expected at most 1000", lambda: replace(event, records=1001)),
        ("records must be", lambda: replace(event, records=0)),
        ("sampling_prob must be", lambda: replace(event, sampling_prob=0.0)),
        ("expected a Gaussian", lambda: replace(event, event=event)),
    ])  # fmt: skip


@pytest.mark.parametrize(("event", "relation"), ALL)
def test_the_masses_of_cells_are_those_of_the_tails(event, relation):
    edges = np.concatenate([[-np.inf], np.linspace(-0.4, 0.4, 1001), [1.0, 2.0, 9.0, np.inf]])
    for pair in event.pairs(relation, True):
        beyond = pair.tails(edges)
        p, q, *_ = pair.masses(edges)
        for cell, outside in zip((p, q), beyond, strict=True):
            assert cell == pytest.approx(-np.diff(outside), abs=3e-15)
        assert beyond[0][-1] == pair.infinite
        low, high = np.exp(edges[:-1]), np.exp(edges[1:-1])
        assert (p >= q * low * (1 - 1e-9) - 1e-17).all()
        assert (p[:-1] <= q[:-1] * high * (1 + 1e-9) + 1e-17).all()


@pytest.mark.parametrize(("event", "relation"), [a for a in ALL if getattr(a[0], "delta", 0) == 0])
def test_renyi_divergences_are_no_less_than_those_of_the_pairs(event, relation):
    """log E_P[e^((order - 1) loss)]/(order - 1) of the pairs, by cells that are narrow."""
    orders, edges = np.asarray([1.01, 1.5, 2.0, 4.0]), np.linspace(-14, 14, 70_001)
    masses = [pair.masses(edges).p for pair in event.pairs(relation, True)]
    for order, value in zip(orders.tolist(), event.renyi(relation, orders), strict=True):
        weight = np.exp((order - 1) * edges[:-1])
        moment = max(math.log(float(p @ weight)) / (order - 1) for p in masses)
        if not isinstance(event, acc.ExponentialMechanism):
            assert value >= moment
        if not isinstance(event, acc.ExponentialMechanism | acc.DiscreteGaussian):
            assert value <= moment * 1.001 + 5e-4


def test_a_stated_guarantee_is_a_randomised_response_and_has_its_relation():
    """Kairouz, Oh and Viswanath 2015: they dominate, alone and composed."""
    pair = acc.EpsilonDelta(0.4).pairs(ADD, True)[0]
    np.testing.assert_allclose(pair.loss, [-0.4, 0.4])
    np.testing.assert_allclose(pair.p, special.expit([-0.4, 0.4]))
    # What holds for a replaced record holds for a null record.
    stated = acc.EpsilonDelta(1.0, 1e-6, relation="replace_one")
    assert stated.relation is REPLACE
    assert acc.supports(stated, SPECIAL)
    assert not acc.supports(stated, ADD)


def test_they_are_accounted_alone_and_beside_a_sampled_run():
    steps = run(0.02, 1.5, 20)
    without = acc.epsilon(steps, 1e-6).upper
    for event, relation in [*ALL, (acc.ZCDP(0.02), ADD)]:
        if relation is not ADD or getattr(event, "delta", 0) > 0:
            continue
        alone = acc.epsilon(event, 1e-6, relation).upper
        both = acc.epsilon(acc.Composed([steps, event]), 1e-6, relation).upper
        assert alone >= 0
        assert max(alone, without) * (1 - 1e-9) <= both < 20, event
    for event in [e for e, _ in ALL] + [acc.ZCDP(0.5, 0.1, relation=REPLACE)]:
        both = acc.Composed([acc.Gaussian(2.0), event])
        assert acc.events.from_dict(json.loads(json.dumps(acc.events.to_dict(both)))) == both
        assert repr(event) not in both.describe()


def test_lower_ends_rest_on_pairs_that_are_attained():
    known = {type(e).__name__ for e, r in ALL if e.pairs(r, False)}
    assert known == {type(e).__name__ for e, _ in ALL} - {"EpsilonDelta"}
    apart = {type(e).__name__ for e, _ in ALL if e.apart}
    assert apart == {"ExponentialMechanism"}
    assert acc.ObjectivePerturbation(2.0, 0.1).apart
    assert acc.ZCDP(1.0).pairs(ADD, True) == ()
    # Losses whose mass under Q underflows are left out of a lower end, not of an upper one.
    assert acc.Laplace(1e-3).pairs(ADD, False) == ()
    low, high = (acc.DiscreteGaussian(0.02).pairs(ADD, upper)[0] for upper in (False, True))
    assert low.tails(np.zeros(1))[0][0] == 0
    assert high.tails(np.zeros(1))[0][0] == 1


def test_what_has_no_proof_is_refused_by_name():
    objective = acc.ObjectivePerturbation(2.0, 0.05)
    rows = [
        (acc.RandomizedResponse(0.5), ADD, "replace_one"),
        (acc.EpsilonDelta(1.0), REPLACE, "proven under add_or_remove_one"),
        (acc.ZCDP(1.0, relation=SPECIAL), ADD, "proven under replace_special"),
        (acc.ExponentialMechanism(1.0), SPECIAL, "proven under add_or_remove_one"),
        (MIXED, REPLACE, "MixtureOfGaussians"),
        (objective, REPLACE, "zeroing out"),
        (acc.ObjectivePerturbation(0.01, 0.05), ADD, "too small"),
    ]
    for event, relation in ALL:  # none of them may be sampled, but one that is alone
        inside = acc.Composed([acc.Gaussian(1.0), event])
        alone = [] if isinstance(event, acc.DiscreteLaplace) else [acc.PoissonSampled(event, 0.1)]
        for sampled in (*alone, acc.PoissonSampled(inside, 0.1)):
            assert not acc.supports(sampled, relation), event
            rows.append((sampled, relation, type(event).__name__))
    all_refused(
        [(words, lambda e=e, r=r: acc.epsilon(e, 1e-5, r)) for e, r, words in rows],
        acc.UnsupportedEventError,
    )
    all_refused([
        ("noise_multiplier must be", lambda: acc.Laplace(-1.0)),
        ("scale must be", lambda: acc.DiscreteLaplace(0.0)),
        ("sensitivity must be", lambda: acc.DiscreteLaplace(1.0, 1.5)),
        ("sensitivity must be", lambda: acc.DiscreteGaussian(1.0, 0)),
        ("noise_prob must be", lambda: acc.RandomizedResponse(1.2)),
        ("buckets must be", lambda: acc.RandomizedResponse(0.5, 1)),
        ("epsilon must be", lambda: acc.EpsilonDelta(-1.0)),
        ("delta must be", lambda: acc.EpsilonDelta(1.0, 1.1)),
        ("relation='one'", lambda: acc.EpsilonDelta(1.0, relation="one")),
        ("epsilon must be", lambda: acc.ExponentialMechanism(0.0)),
        ("rho must be", lambda: acc.ZCDP(math.inf)),
        (r"sensitivities\[1\] must be", lambda: acc.MixtureOfGaussians(1.0, (1, -1), (0.5, 0.5))),
        ("probabilities has length 1", lambda: acc.MixtureOfGaussians(1.0, (1, 2), (1.0,))),
        ("sum to 0.9", lambda: acc.MixtureOfGaussians(1.0, (1, 2), (0.5, 0.4))),
        ("noise_multiplier must be", lambda: acc.ObjectivePerturbation(0.0, 1.0)),
        ("curvature must be", lambda: acc.ObjectivePerturbation(1.0, 0.0)),
        ("noise_multiplier must be", lambda: acc.ObjectivePerturbation(-1.0, 1.0)),
        ("curvature must be", lambda: acc.ObjectivePerturbation(1.0, math.inf)),
    ])  # fmt: skip


def test_without_noise_nothing_is_guaranteed_and_at_the_ends_there_are_answers():
    for event in (
        acc.Laplace(0.0), acc.Laplace(1e-9), acc.EpsilonDelta(0.0, 1.0), acc.EpsilonDelta(1e9),
        acc.MixtureOfGaussians(0.0, (0, 1), (0.5, 0.5)),
    ):  # fmt: skip
        assert cost(event) == math.inf, event
        assert acc.delta(event, 1.0).upper == 1, event
    step = acc.PoissonSampled(acc.Gaussian(1.0), 0.1)
    assert acc.epsilon(step, 0.0).lower == math.inf
    assert acc.epsilon(step, 1.0).upper == 0
    pure = acc.Composed([acc.Laplace(2.0), acc.Repeated(acc.DiscreteLaplace(4.0), 3)])
    bound = acc.epsilon(pure, 0.0)
    assert bound.lower <= 0.5 + 0.75 <= bound.upper <= 1.25 * (1 + 1e-9)
    assert acc.epsilon(acc.Composed([pure, step]), 0.0).upper == math.inf
    answers = acc.Repeated(acc.RandomizedResponse(0.5, 2), 2)
    assert acc.epsilon(answers, 0.0, REPLACE).upper == pytest.approx(2 * math.log(3))
    assert acc.epsilon(acc.EpsilonDelta(1.0, 1e-9), 0.0).upper == math.inf
    twice = acc.Repeated(acc.EpsilonDelta(1.0, 0.1), 2)
    assert acc.delta(twice, math.inf).upper == pytest.approx(0.19)
    assert acc.delta(acc.Composed([step, acc.Laplace(1.0), acc.ZCDP(1.0)]), math.inf).upper == 0
    refused(r"delta must be 0, 1 or a number .* got 1e-301", acc.epsilon, step, 1e-301)


# Objective perturbation, against the densities of its minimum in one dimension.

W = np.linspace(-60, 60, 240_001)


def density(signed, noise, ridge, against=0):
    """Of the minimum at W, by the change of variables from the random linear term."""
    gradient, curvature = ridge * W, np.full(W.shape, ridge)
    for x, n in (*((x, 1) for x in signed), (-1.0, against)):  # features times labels, how often
        wrong = special.expit(-W * x)
        gradient = gradient - n * x * wrong
        curvature = curvature + n * x * x * wrong * special.expit(W * x)
    return np.exp(-0.5 * (gradient / noise) ** 2) / (noise * math.sqrt(2 * math.pi)) * curvature


def integrated(p, q, epsilon):
    return excess(p, q, epsilon) * (W[1] - W[0])


def test_no_record_is_told_better_than_the_bound_says():
    for seed in range(12):
        rng = np.random.default_rng(seed)
        noise, ridge = rng.uniform(0.4, 3), rng.uniform(0.3, 3)
        others = rng.uniform(-1, 1, rng.integers(0, 4))
        record = rng.choice([-1, 1, rng.uniform(-1, 1)])
        without, with_it = density(others, noise, ridge), density([*others, record], noise, ridge)
        assert np.sum(without) * (W[1] - W[0]) == pytest.approx(1, abs=1e-9)
        event = acc.ObjectivePerturbation(noise, 1 / (4 * ridge))
        for epsilon in (0.0, 0.05, 0.2, 0.7, 1.5, 3.0):
            bound = acc.delta(event, epsilon).upper
            assert integrated(without, with_it, epsilon) <= bound + 1e-9, seed
            assert integrated(with_it, without, epsilon) <= bound + 1e-9, seed


def test_the_curvature_must_be_charged():
    noise, ridge = 6.0, 0.5
    exact = integrated(density([1.0], noise, ridge), density([], noise, ridge), 0.2)
    assert exact > 1.5 * gaussian_delta(1 / noise, 0.2)
    assert exact <= acc.delta(acc.ObjectivePerturbation(noise, 1 / (4 * ridge)), 0.2).upper
    # Without its factor of two the Gaussian part is reached: a ridge so small that the
    # derivative is 0 or 1 nearly everywhere.
    without, with_it = density([], 1.0, 0.05), density([1.0], 1.0, 0.05)
    for epsilon in (0.5, 1.0, 2.0):
        exact = integrated(without, with_it, epsilon)
        assert 0.9 * gaussian_delta(1.0, epsilon) < exact <= gaussian_delta(1.0, epsilon) + 1e-9
    # The lower end is come near to by a record among ever more of the other label.
    for times, short in ((2_000, 1e-2), (200_000, 1e-4)):
        without, with_it = (density(x, 1.0, 0.2, times) for x in ([], [1.0]))
        for p, q in ((without, with_it), (with_it, without)):
            assert integrated(p, q, 1.0) > gaussian_delta(1.0, 1.0) * (1 - short)
    # The bound is the shifted profile.
    event, shift = acc.ObjectivePerturbation(2.0, 0.05), math.log1p(0.05)
    for epsilon in (0.5, 1.0, 2.0, 3.0):
        exact = gaussian_delta(0.5, epsilon - shift)
        assert exact <= acc.delta(event, epsilon).upper <= exact * 1.02
    bound = acc.epsilon(event, 1e-5)
    plain = cost(acc.Gaussian(2.0))
    assert bound.upper == pytest.approx(plain + shift, rel=3e-4)
    assert plain * (1 - 1e-3) < bound.lower <= plain
    assert cost(event, SPECIAL) == bound.upper
    both = cost(acc.Composed((event, acc.Gaussian(3.0))))
    assert bound.upper < both < 2 * bound.upper


def test_a_lower_end_leaves_out_what_has_none():
    steps = acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.0), 0.1), 20)
    alone = acc.epsilon(steps, 1e-5)
    both = acc.epsilon(acc.Composed([steps, acc.EpsilonDelta(0.3)]), 1e-5)
    assert alone.lower * (1 - 1e-3) < both.lower <= alone.upper < both.upper
    assert acc.epsilon(acc.EpsilonDelta(0.3), 1e-5).lower == 0
    # The choice between two candidates is randomised response, exactly.
    choices = acc.Repeated(acc.ExponentialMechanism(1.0), 4)
    answers = acc.Repeated(acc.RandomizedResponse(2 * special.expit(-0.5), 2), 4)
    lower, exact = acc.epsilon(choices, 1e-3).lower, acc.epsilon(answers, 1e-3, REPLACE)
    assert lower == pytest.approx(exact.lower, rel=1e-3)
    assert lower <= exact.upper


# The best of a random number of runs, against its exact law ---------------------------------------

LAWS = [
    acc.Geometric(0.5), acc.Geometric(0.02), acc.Logarithmic(0.9), acc.Logarithmic(0.01),
    acc.NegativeBinomial(-0.7, 0.05), acc.NegativeBinomial(2.5, 0.3),
    acc.NegativeBinomial(1e-9, 0.2), acc.PoissonTries(0.3), acc.PoissonTries(1.0),
    acc.PoissonTries(25.0),
]  # fmt: skip
ORDERS = np.asarray([1.05, 1.5, 2.0, 3.0, 5.0, 9.0, 20.0, 60.0, 300.0])
EPSILONS = np.linspace(0.0, 12.0, 49)


@functools.cache
def masses(law):
    """P(K = k), k = 0, 1, ..., from the definitions; what is left out is below 1e-12."""
    k = np.arange(0, 3_000 if not isinstance(law, acc.PoissonTries) else 150)
    if isinstance(law, acc.PoissonTries):
        return np.exp(-law.mean + k * math.log(law.mean) - special.gammaln(k + 1))
    # Gamma(k + eta) / (Gamma(1 + eta) k!), of which the law is a multiple for k >= 1
    weight = special.gammaln(k[1:] + law.eta) - special.gammaln(k[1:] + 1)
    weight = np.exp(weight + k[1:] * math.log1p(-law.gamma))
    return np.append(0.0, weight / weight.sum())


def best(law, mass):
    """The law of the largest of K outputs; no output at all comes last."""
    below = np.append(0.0, np.cumsum(mass))
    below[-1] = 1.0
    powers = np.asarray([masses(law) @ below_ ** np.arange(masses(law).size) for below_ in below])
    return np.append(np.diff(powers), masses(law)[0])


def divergence(p, q, orders):
    """Of masses that are known to many digits; leaving out the others makes it no larger."""
    known = (p > 1e-10) & (q > 1e-10)
    p, q = np.log(p[known]), np.log(q[known])
    return np.asarray([special.logsumexp(a * p + (1 - a) * q) / (a - 1) for a in orders])


def profile(p, q, epsilons):
    return np.asarray([np.sum(np.maximum(p - math.exp(e) * q, 0)) for e in epsilons])


def _candidates():
    rng = np.random.default_rng(3)
    yield np.asarray([0.75, 0.25]), np.asarray([0.25, 0.75])  # randomised response
    yield np.asarray([0.999, 0.001]), np.asarray([0.9, 0.1])
    yield np.full(4, 0.25), np.full(4, 0.25)
    yield np.asarray([0.89, 0.1, 0.01]), np.asarray([0.3, 0.699, 0.001])
    for size in (3, 8):
        p, q = rng.dirichlet(np.ones(size)), rng.dirichlet(np.ones(size))
        yield 0.5 * p + 0.5 * q, q
    cut = np.linspace(-5, 6, 60)  # Gaussian noise, cut into cells
    for mu in (0.3, 1.0):
        p, q = (np.diff(special.ndtr(np.concatenate([[-50], cut, [50]]) - m)) for m in (mu, 0))
        yield p, q


CANDIDATES = list(_candidates())


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_never_below_the_exact_law_of_the_best(law):
    """Every order, every epsilon, both directions, and the worse of both ways of ranking."""
    k = np.arange(masses(law).size)
    for p, q in CANDIDATES:
        curve = np.maximum(divergence(p, q, ORDERS), divergence(q, p, ORDERS))
        curve = np.maximum(curve, 0) + 1e-12
        deltas = np.maximum(profile(p, q, EPSILONS), profile(q, p, EPSILONS))
        bound, shift, most = law.renyi(curve, ORDERS), law.shift(EPSILONS, deltas), 0.0
        for ranked in (slice(None), slice(None, None, -1)):
            ours, theirs = best(law, p[ranked]), best(law, q[ranked])
            for a, b in ((ours, theirs), (theirs, ours)):
                assert np.all(divergence(a, b, ORDERS) <= bound * (1 + 1e-9) + 1e-9)
                found = profile(a, b, EPSILONS + shift)
                assert np.all(found <= law.expected() * deltas + 1e-11)
            below = np.asarray([np.cumsum(p[ranked])[:-1], np.cumsum(q[ranked])[:-1]])
            growth = np.polynomial.polynomial.polyval(below, k[1:] * masses(law)[1:])
            most = max(most, float(np.max(np.abs(np.log(growth[0] / growth[1])))))
        # The shift bounds how the chance to be chosen grows.
        assert most <= shift + 1e-9
        if p.size == 2 and p[0] == 0.75 and isinstance(law, acc.Geometric):
            assert shift < 1.2 * most  # randomised response attains it, but for the grid


def test_the_renyi_bounds_and_the_laws_of_tries_are_the_printed_ones():
    orders = np.asarray([1.5, 2.0, 10.0, 80.0])
    curve = 0.01 * orders
    least = min((1 - 1 / 80) * 0.8 - math.log(0.05) / 80, 0.9 * 0.1 - math.log(0.05) / 10)
    found = acc.Geometric(0.05).renyi(curve, orders)
    np.testing.assert_allclose(found, curve + 2 * least + math.log(20) / (orders - 1))
    found = acc.PoissonTries(20.0).renyi(curve, orders)
    delta = rdp.rdp_to_delta(curve, math.log(1.5 / 0.5), tuple(orders))
    first = math.log(math.exp(-20) + 20 * math.exp(0.5 * (0.015 + 20 * delta))) / 0.5
    assert found[0] == pytest.approx(first)
    for law in LAWS:
        rng, count = np.random.default_rng(7), 20_000
        drawn = np.bincount([law.sample(rng) for _ in range(count)], minlength=4)
        assert drawn @ np.arange(drawn.size) / count == pytest.approx(law.expected(), rel=0.15)
        expected = masses(law)[:4]
        assert np.all(np.abs(drawn[:4] / count - expected) < 5 * np.sqrt(expected / count) + 1e-9)
        assert masses(law) @ np.arange(masses(law).size) == pytest.approx(law.expected())
    assert acc.Geometric(0.1).expected() == pytest.approx(10)
    # The hull of points is met and never undercut.
    epsilons = np.linspace(0, 9, 12)
    deltas = np.exp(-0.6 * epsilons - 0.1 * epsilons**2)
    pair = tuned.symmetric_pair(epsilons, deltas)
    found = of_pair(pair, epsilons)
    at_0 = np.min((np.expm1(epsilons) + 2 * deltas) / (np.exp(epsilons) + 1))
    assert found[0] == pytest.approx(at_0)
    np.testing.assert_allclose(found[5:], deltas[5:], rtol=1e-9)
    assert np.all(found <= deltas * (1 + 1e-9))
    mirrored = 1 - np.exp(-epsilons) * (1 - found)
    np.testing.assert_allclose(of_pair(pair, -epsilons), mirrored, rtol=1e-9)


def gaussian_best(law, z, q, output):
    """Densities of the best of K noisy outputs, without and with the record, [k] each."""
    k = np.arange(masses(law).size)
    weights = k[1:] * masses(law)[1:]
    out = []
    for share in (0.0, q):
        t, moved = output / z, (output - 1) / z
        below = (1 - share) * special.ndtr(t) + share * special.ndtr(moved)
        density = (1 - share) * np.exp(-0.5 * t * t) + share * np.exp(-0.5 * moved * moved)
        growth = np.polynomial.polynomial.polyval(below, weights)
        out.append(growth * density / (z * math.sqrt(2 * math.pi)))
    return out


@pytest.mark.parametrize(("law", "z", "q"), [
    (acc.Geometric(0.2), 2.0, 1.0), (acc.Logarithmic(0.05), 2.0, 1.0),
    (acc.PoissonTries(5.0), 2.0, 1.0), (acc.Geometric(0.05), 0.7, 0.01),
], ids=str)  # fmt: skip
def test_the_pair_of_tuned_gaussians_dominates_and_is_tighter_than_renyi(law, z, q):
    output = np.linspace(-25, 26, 20_001)
    event = acc.Tuned(acc.PoissonSampled(acc.Gaussian(z), q), law)
    (pair,) = event.pairs(ADD, True)
    assert event.pairs(ADD, False) == ()
    without, with_ = (d * (output[1] - output[0]) for d in gaussian_best(law, z, q, output))
    for epsilon in (0.0, 0.1, 0.7, 1.5, 2.5):
        bound = of_pair(pair, np.asarray([epsilon, -epsilon]))
        for a, b in ((without, with_), (with_, without)):
            assert profile(a, b, [epsilon])[0] <= bound[0]
            # Of no try both data sets say the same; it adds nothing beyond epsilon 0.
            none = masses(law)[0] * -math.expm1(-epsilon)
            assert profile(a, b, [-epsilon])[0] + none <= bound[1] * (1 + 1e-9)
    renyi = rdp.rdp_to_delta(event.renyi(ADD, np.asarray(rdp.DEFAULT_ORDERS)), 2.5)
    assert bound[0] < renyi
    assert np.sum(pair.p) + pair.infinite == pytest.approx(1, abs=1e-9)
    assert np.sum(pair.q) <= 1 + 1e-9


def test_tuning_costs_more_than_a_run_and_composes():
    one = run(0.01, 1.0, 300)
    event = acc.Tuned(one, acc.Geometric(0.1))
    alone, best_, both = (cost(e) for e in (one, event, acc.Composed((event, one))))
    assert alone < best_ < 4 * alone
    assert best_ < both < best_ + alone * 1.5
    # Where all scores are equal the best of at least one try is one, beside others too.
    twice = acc.epsilon(acc.Repeated(one, 2), 1e-5).lower
    tuned_twice = acc.Tuned(acc.Tuned(one, acc.Logarithmic(0.5)), acc.Geometric(0.1))
    for made, least in ((event, alone), (acc.Composed((event, one)), twice), (tuned_twice, alone)):
        found = acc.epsilon(made, 1e-5)
        assert found.lower == pytest.approx(least, rel=1e-3), made
        assert "between the ends" in found.note
    assert acc.delta(event, 0.5).lower == acc.delta(one, 0.5).lower > 0
    # Within events that hold others: of users, on a grid (whose distance is charged), in both.
    for within in (
        acc.PerUser(event, 3),
        acc.GridNoise(event, 1e-12),
        acc.PerUser(acc.GridNoise(event, 1e-12), 3),
    ):
        assert acc.epsilon(within, 1e-5).lower == pytest.approx(alone, rel=1e-3), within
    nothing = acc.Tuned(one, acc.PoissonTries(3.0))  # maybe no try at all
    assert acc.epsilon(nothing, 1e-5).lower == acc.delta(nothing, 0.5).lower == 0
    orders = np.asarray(rdp.DEFAULT_ORDERS)
    total = flatten(acc.Repeated(event, 3), ADD).renyi(ADD)
    np.testing.assert_allclose(total, 3 * event.renyi(ADD, orders))
    assert np.all(np.diff(event.renyi(ADD, orders)) >= 0)
    fixed = acc.FixedSizeSampled(acc.Gaussian(3.0), 1_000, 50)
    found = cost(acc.Tuned(fixed, acc.Geometric(0.5)), REPLACE)
    assert cost(fixed, REPLACE) < found < math.inf
    assert cost(acc.Tuned(acc.Gaussian(0.0), acc.Geometric(0.5))) == math.inf
    for law in LAWS:
        event = acc.Repeated(acc.Tuned(acc.PoissonSampled(acc.Gaussian(1.5), 0.1), law), 2)
        assert events.from_dict(json.loads(json.dumps(events.to_dict(event)))) == event


def test_wrong_laws_and_runs_without_a_renyi_curve_are_refused_by_name():
    all_refused([
        ("gamma must be .* got 0.0", lambda: acc.Geometric(0.0)), ("gamma must be .* got 1.0", lambda: acc.Geometric(1.0)),
        ("eta=-1.0", lambda: acc.NegativeBinomial(-1.0, 0.5)),
        ("mean must be .* got 0.0", lambda: acc.PoissonTries(0.0)),
        ("distribution=5", lambda: acc.Tuned(acc.Gaussian(1.0), 5)),
        ("event='run'", lambda: acc.Tuned("run", acc.Geometric(0.5))),
    ])  # fmt: skip

    class Unknown(acc.pairs.PairedEvent):
        pass

    unknown, stated, gaussian = (
        acc.Tuned(event, acc.Geometric(0.5))
        for event in (Unknown(), acc.EpsilonDelta(1.0, 1e-9), acc.Gaussian(1.0))
    )
    not_covered = "Tuned by accountant exact: not covered"
    all_refused([
        (r"Tuned .*no Renyi curve \(Unknown\)", lambda: acc.epsilon(unknown, 1e-5)),
        (r"Tuned .*EpsilonDelta", lambda: acc.epsilon(stated, 1e-5)),
        (not_covered, lambda: acc.epsilon(gaussian, 1e-5, accountant="exact")),
    ], acc.UnsupportedEventError)  # fmt: skip
    acc.Event.types.pop("Unknown")


def test_a_new_event_is_one_class():
    @dataclass(frozen=True)
    class Skellam(acc.pairs.PairedEvent):
        variance: float
        steps: int = 7  # a field of its own, and no block of steps
        words = "Skellam noise of variance {variance:g}"

        def renyi(self, relation, orders):
            # Agarwal, Kairouz and Liu 2021, arXiv:2110.04995, Theorem 3.5, of sensitivity 1.
            order, moved, mu = np.ceil(orders), relation.separation, self.variance
            rest = ((2 * order - 1) * moved**2 + 6 * moved) / (4 * mu**2)
            return order * moved**2 / (2 * mu) + np.minimum(rest, 3 * moved / (2 * mu))

    noise, steps = Skellam(25.0), run(0.02, 1.5, 20)
    for relation in (ADD, REPLACE):
        # Hardly worse than the Gaussian noise of its variance, and never better than it.
        found = acc.epsilon(acc.Repeated(noise, 20), 1e-5, relation)
        gauss = cost(acc.Repeated(acc.DiscreteGaussian(5.0), 20), relation, "rdp")
        assert gauss < found.upper < 1.05 * gauss
        assert (found.lower, found.estimate, found.accountant) == (0.0, None, "rdp")
    both = acc.Composed([steps, noise])
    assert max(cost(steps), cost(noise)) < cost(both) < cost(steps, accountant="rdp") + cost(noise)
    assert acc.events.from_dict(json.loads(json.dumps(acc.events.to_dict(both)))) == both
    assert both.describe().endswith("Skellam noise of variance 25")
    assert noise.block == 1
    assert cost(noise) < acc.group_epsilon(noise, 1e-5, 2).upper < math.inf
    assert cost(acc.Tuned(noise, acc.Geometric(0.5))) > cost(noise)
    assert not acc.supports(acc.PoissonSampled(noise, 0.1))
    # Ledgers know it by its name: only the same class, defined again, may take that.
    same = {"__module__": __name__, "__qualname__": Skellam.__qualname__}
    again = type("Skellam", (acc.Event,), dict(same))
    assert acc.Event.types["Skellam"] is again
    taken = lambda name: lambda: type(name, (acc.Event,), dict(same))  # noqa: E731
    all_refused([(f"type_name .*{n}", taken(n)) for n in ("Gaussian", "TruncatedPoisson")])
    acc.Event.types.pop("Skellam")


@pytest.mark.parametrize(("scale", "q"), [(1.5, 0.3), (4.0, 0.02), (0.2, 0.9)])
def test_sampled_discrete_laplace_is_what_its_masses_say(scale, q):
    """One step and two of them, by the masses of the outputs themselves, in both directions."""
    shift, reach = 3, 400
    k = np.arange(-reach, reach + 1)
    alone = np.exp(-abs(k) / scale) * np.tanh(0.5 / scale)
    moved = np.exp(-abs(k - shift) / scale) * np.tanh(0.5 / scale)
    mixed = (1 - q) * alone + q * moved
    event = acc.PoissonSampled(acc.DiscreteLaplace(scale, shift), q)
    for steps in (1, 2):
        pairs = [(mixed, alone), (alone, mixed)]
        if steps == 2:
            inside = abs(k) <= 60
            pairs = [tuple(np.outer(v[inside], v[inside]).ravel() for v in pair) for pair in pairs]
        run = acc.Repeated(event, steps)
        for epsilon in (0.0, 0.01, 0.1, 0.7):
            exact = max(np.maximum(p - np.exp(epsilon) * o, 0).sum() for p, o in pairs)
            for relation in (acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_SPECIAL):
                found = acc.delta(run, epsilon, relation)
                assert found.lower <= exact * (1 + 1e-9) + 1e-15
                assert exact * (1 - 1e-9) - 1e-15 <= found.upper <= exact * (1 + 1e-3) + 1e-9
        largest = steps * np.log1p(q * np.expm1(shift / scale))
        assert acc.epsilon(run, 0.0).upper == pytest.approx(largest, rel=1e-9)
        if steps == 1:
            kept = [(p[o > 1e-100], o[o > 1e-100]) for p, o in pairs]
            renyi = max(np.log(np.sum(p**3 / o**2)) / 2 for p, o in kept)
            assert acc.renyi_curve(run, orders=(3.0,))[0] == pytest.approx(renyi, rel=1e-6)


def test_what_of_sampled_laplace_noise_is_not_proven_is_refused():
    laplace = acc.DiscreteLaplace(2.0, 3)
    for event, relation in (
        (acc.PoissonSampled(laplace, 0.1), acc.Relation.REPLACE_ONE),
        (acc.PoissonSampled(acc.Repeated(laplace, 2), 0.1), acc.Relation.ADD_OR_REMOVE_ONE),
        (acc.PoissonSampled(acc.Laplace(2.0), 0.1), acc.Relation.ADD_OR_REMOVE_ONE),
        (
            acc.PoissonSampled(acc.Composed((acc.Gaussian(1.0), laplace)), 0.1),
            acc.Relation.ADD_OR_REMOVE_ONE,
        ),
        (acc.FixedSizeSampled(laplace, 10, 1), acc.Relation.REPLACE_ONE),
        *(  # what guarantees nothing is not passed over beside it
            (acc.PoissonSampled(acc.Composed((other, laplace)), 0.1), ADD)
            for other in (acc.NonPrivate("a line search"), acc.Gaussian(0.0), acc.Laplace(0.0))
        ),
    ):
        assert not acc.supports(event, relation)
    whole = acc.epsilon(acc.PoissonSampled(laplace, 1.0), 0.0, acc.Relation.REPLACE_ONE)
    assert whole.upper == pytest.approx(3.0)


def test_several_records_on_a_laplace_sample_cost_more_than_one():
    """Exactly, k records of which a binomial number is drawn, that all add the most."""
    scale, q, records = 2.0, 0.1, 3
    event, k = acc.PoissonSampled(acc.DiscreteLaplace(scale), q), np.arange(-200, 201)
    law = [np.exp(-abs(k - n) / scale) * np.tanh(0.5 / scale) for n in range(records + 1)]
    mixed = sum(special.comb(records, n) * q**n * (1 - q) ** (records - n) * law[n]
                for n in range(records + 1))  # fmt: skip
    for epsilon in (0.0, 0.05, 0.1):
        exact = max(np.maximum(a - np.exp(epsilon) * b, 0).sum()
                    for a, b in ((mixed, law[0]), (law[0], mixed)))  # fmt: skip
        assert acc.group_delta(event, epsilon, records).upper >= exact
    largest = np.log(np.max(mixed / law[0]))
    assert acc.group_epsilon(event, 0.0, records).upper >= largest > acc.epsilon(event, 0.0).upper
    whole = acc.PoissonSampled(acc.DiscreteLaplace(scale), 1.0)
    assert acc.group_epsilon(whole, 0.0, records).upper == pytest.approx(records / scale)


@pytest.mark.parametrize("q", [1e-9, 1e-16, 1e-250])
def test_the_largest_loss_on_a_laplace_sample_is_rounded_up(q):
    number = decimal.Decimal
    for loss in (29.9, 31.3, 70.7, 580.3):
        event = acc.PoissonSampled(acc.DiscreteLaplace(1 / loss), q)
        ((part, _),) = flatten(event, ADD).parts
        with decimal.localcontext(prec=320):
            exact = (1 + number(q) * ((1 / number(1 / loss)).exp() - 1)).ln()
            assert exact <= number(part.pure(ADD)) <= exact * (1 + number("2e-12"))
