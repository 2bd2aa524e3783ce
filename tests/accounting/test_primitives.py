"""Other noise, stated guarantees and objective perturbation, against their definitions."""

import json
import math

import mpmath as mp
import numpy as np
import pytest
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting.gaussian import gaussian_delta
from jaxdp.report.words import describe
from tests.accounting.judging import ADD, REPLACE, SPECIAL, largest, refusals, run

MIXED = acc.MixtureOfGaussians(1.3, (0.0, 1.0, 2.0), (0.8, 0.15, 0.05))
ALL = [
    (acc.Laplace(2.0), REPLACE),
    (acc.DiscreteLaplace(2.0, 3), ADD),
    (acc.DiscreteGaussian(1.5, 2), ADD),
    (acc.RandomizedResponse(0.3, 4), REPLACE),
    (acc.EpsilonDelta(1.0, 1e-3), ADD),
    (acc.EpsilonDelta(1.0, relation=SPECIAL), SPECIAL),
    (acc.ExponentialMechanism(1.2), ADD),
    (MIXED, ADD),
]


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


def test_no_exponential_mechanism_leaks_more():
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


def test_a_mixture_is_integrated_from_its_densities():
    event = acc.MixtureOfGaussians(0.7, (0.5, 1.0, 3.0), (0.3, 0.6, 0.1))
    y = np.linspace(-9, 12, 1_000_001)
    unit = (y[1] - y[0]) / (0.7 * math.sqrt(2 * math.pi))
    none, *parts = (unit * np.exp(-0.5 * ((y - s) / 0.7) ** 2) for s in (0, *event.sensitivities))
    mixed = sum(p * part for p, part in zip(event.probabilities, parts, strict=True))
    for pair, (p, q) in zip(event.pairs(ADD, True), ((mixed, none), (none, mixed)), strict=True):
        for epsilon in (0.0, 0.1, 0.5, 3.0):
            true = pytest.approx(excess(p, q, epsilon), rel=1e-7, abs=1e-11)
            assert largest([pair], epsilon) == true, epsilon


def test_a_mixture_of_two_is_a_sampled_gaussian():
    q, z = 0.02, 0.8
    step = acc.PoissonSampled(acc.Gaussian(z), q)
    event = acc.MixtureOfGaussians(z, (1, 0), (q, 1 - q))
    for epsilon in (0.0, 0.01, 0.5, 3.0):
        bound = acc.delta(step, epsilon)
        assert bound.lower * (1 - 1e-9) <= delta(event, ADD, epsilon) <= bound.upper * (1 + 1e-9)
    orders = np.asarray([1.01, 1.5, 2.0, 7.0, 40.0])
    assert event.renyi(ADD, orders) == pytest.approx(acc.renyi_curve(step, orders), rel=1e-5)


@pytest.mark.parametrize(("event", "relation"), ALL)
def test_the_masses_of_cells_are_those_of_the_tails(event, relation):
    edges = np.concatenate([[-np.inf], np.linspace(-0.4, 0.4, 1001), [1.0, 2.0, 9.0, np.inf]])
    for pair in event.pairs(relation, True):
        beyond = pair.tails(edges)
        p, q = pair.cells(edges)
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
    masses = [pair.cells(edges)[0] for pair in event.pairs(relation, True)]
    for order, value in zip(orders.tolist(), event.renyi(relation, orders), strict=True):
        weight = np.exp((order - 1) * edges[:-1])
        moment = max(math.log(float(p @ weight)) / (order - 1) for p in masses)
        if not isinstance(event, acc.ExponentialMechanism):
            assert value >= moment
        if not isinstance(event, acc.ExponentialMechanism | acc.DiscreteGaussian):
            assert value <= moment * 1.001 + 5e-4


def test_the_renyi_curve_of_a_mixture_is_that_of_the_definition():
    """By the trapezoid rule, which is as good as exact for densities like these."""
    with mp.workdps(20):
        nodes = [mp.mpf(k) / 10 for k in range(-300, 600)]
        ratios = [
            0.8 + 0.15 * mp.exp((y - 0.5 / 1.3) / 1.3) + 0.05 * mp.exp(2 * (y - 1 / 1.3) / 1.3)
            for y in nodes
        ]
        for order in (1.5, 7.5):
            total = sum(mp.npdf(y) * r**order for y, r in zip(nodes, ratios, strict=True)) / 10
            true = float(mp.log(total) / (order - 1))
            value = float(MIXED.renyi(ADD, np.asarray([order]))[0])
            assert true <= value <= true * (1 + 1e-8)


def test_pure_privacy_is_the_randomised_response_of_its_epsilon():
    """Kairouz, Oh and Viswanath 2015: they dominate, alone and composed."""
    pair = acc.EpsilonDelta(0.4).pairs(ADD, True)[0]
    np.testing.assert_allclose(pair.loss, [-0.4, 0.4])
    np.testing.assert_allclose(pair.p, special.expit([-0.4, 0.4]))


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


def test_lower_ends_rest_on_tight_pairs_alone():
    tight = {type(e).__name__ for e, r in ALL if e.pairs(r, False)}
    stated = {"EpsilonDelta", "ExponentialMechanism"}
    assert tight == {type(e).__name__ for e, _ in ALL} - stated
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
    for event, relation in ALL:  # none of them may be sampled
        inside = acc.Composed([acc.Gaussian(1.0), event])
        for sampled in (acc.PoissonSampled(event, 0.1), acc.PoissonSampled(inside, 0.1)):
            assert not acc.supports(sampled, relation), event
            rows.append((sampled, relation, type(event).__name__))
    refusals(
        acc.UnsupportedEventError,
        [(words, lambda e=e, r=r: acc.epsilon(e, 1e-5, r)) for e, r, words in rows],
    )


def test_what_holds_for_a_replaced_record_holds_for_a_null_record():
    stated = acc.EpsilonDelta(1.0, 1e-6, relation="replace_one")
    assert stated.relation is REPLACE
    assert acc.supports(stated, SPECIAL)
    assert not acc.supports(stated, ADD)


def test_they_round_trip_through_json_and_have_words():
    for event in [e for e, _ in ALL] + [acc.ZCDP(0.5, 0.1, relation=REPLACE)]:
        both = acc.Composed([acc.Gaussian(2.0), event])
        assert acc.events.from_dict(json.loads(json.dumps(acc.events.to_dict(both)))) == both
        assert repr(event) not in describe(both)


def test_bad_parameters_are_named():
    refusals(
        ValueError,
        [
            ("noise_multiplier=", lambda: acc.Laplace(-1.0)),
            ("scale=", lambda: acc.DiscreteLaplace(0.0)),
            ("sensitivity=", lambda: acc.DiscreteLaplace(1.0, 1.5)),
            ("sensitivity=", lambda: acc.DiscreteGaussian(1.0, 0)),
            ("noise_prob=", lambda: acc.RandomizedResponse(1.2)),
            ("buckets=", lambda: acc.RandomizedResponse(0.5, 1)),
            ("epsilon=", lambda: acc.EpsilonDelta(-1.0)),
            ("delta=", lambda: acc.EpsilonDelta(1.0, 1.1)),
            ("relation='one'", lambda: acc.EpsilonDelta(1.0, relation="one")),
            ("epsilon=", lambda: acc.ExponentialMechanism(0.0)),
            ("rho=", lambda: acc.ZCDP(math.inf)),
            (r"sensitivities\[1\]=", lambda: acc.MixtureOfGaussians(1.0, (1, -1), (0.5, 0.5))),
            ("probabilities has length 1", lambda: acc.MixtureOfGaussians(1.0, (1, 2), (1.0,))),
            ("sum to 0.9", lambda: acc.MixtureOfGaussians(1.0, (1, 2), (0.5, 0.4))),
            ("expected", lambda: acc.ObjectivePerturbation(0.0, 1.0)),
            ("expected", lambda: acc.ObjectivePerturbation(1.0, 0.0)),
            ("expected", lambda: acc.ObjectivePerturbation(-1.0, 1.0)),
            ("expected", lambda: acc.ObjectivePerturbation(1.0, math.inf)),
        ],
    )


def test_without_noise_nothing_is_guaranteed():
    for event in (
        acc.Laplace(0.0),
        acc.Laplace(1e-9),
        acc.EpsilonDelta(0.0, 1.0),
        acc.EpsilonDelta(1e9),
        acc.MixtureOfGaussians(0.0, (0, 1), (0.5, 0.5)),
    ):
        assert acc.epsilon(event, 1e-5).upper == math.inf, event
        assert acc.delta(event, 1.0).upper == 1, event


def test_at_the_ends_of_delta_and_epsilon_there_are_answers():
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
    with pytest.raises(ValueError, match="delta=1e-301: expected 0, 1 or a number"):
        acc.epsilon(step, 1e-301)


# Objective perturbation, against the densities of its minimum in one dimension.

W = np.linspace(-60, 60, 240_001)


def density(signed, noise, ridge):
    """Of the minimum at W, by the change of variables from the random linear term."""
    gradient, curvature = ridge * W, np.full(W.shape, ridge)
    for x in signed:  # features times labels
        wrong = special.expit(-W * x)
        gradient = gradient - x * wrong
        curvature = curvature + x * x * wrong * special.expit(W * x)
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


def test_the_gaussian_part_is_reached_without_its_factor_of_two():
    # The ridge is so small that the derivative is 0 or 1 nearly everywhere.
    without, with_it = density([], 1.0, 0.05), density([1.0], 1.0, 0.05)
    for epsilon in (0.5, 1.0, 2.0):
        exact = integrated(without, with_it, epsilon)
        assert 0.9 * gaussian_delta(1.0, epsilon) < exact <= gaussian_delta(1.0, epsilon) + 1e-9


def test_the_curvature_must_be_charged():
    noise, ridge = 6.0, 0.5
    exact = integrated(density([1.0], noise, ridge), density([], noise, ridge), 0.2)
    assert exact > 1.5 * gaussian_delta(1 / noise, 0.2)
    assert exact <= acc.delta(acc.ObjectivePerturbation(noise, 1 / (4 * ridge)), 0.2).upper


def test_the_bound_of_an_objective_is_the_shifted_profile():
    event, shift = acc.ObjectivePerturbation(2.0, 0.05), math.log1p(0.05)
    for epsilon in (0.5, 1.0, 2.0, 3.0):
        exact = gaussian_delta(0.5, epsilon - shift)
        assert exact <= acc.delta(event, epsilon).upper <= exact * 1.02
    bound = acc.epsilon(event, 1e-5)
    plain = acc.epsilon(acc.Gaussian(2.0), 1e-5).upper
    assert bound.upper == pytest.approx(plain + shift, rel=3e-4)
    assert bound.lower == 0
    assert acc.epsilon(event, 1e-5, SPECIAL).upper == bound.upper
    both = acc.epsilon(acc.Composed((event, acc.Gaussian(3.0))), 1e-5).upper
    assert bound.upper < both < 2 * bound.upper
