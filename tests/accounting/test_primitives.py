"""Pairs of other noise and of stated guarantees, against their definitions by other means."""

import itertools
import json
import math

import mpmath as mp
import numpy as np
import pytest
from scipy import integrate, special

from jaxdp import accounting as acc
from jaxdp.report.words import describe

ADD, REPLACE, SPECIAL = acc.Relation
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


def profile(event, relation, epsilon):
    """Delta of the pairs, from their tails."""
    found = []
    for pair in event.pairs(relation, True):
        p, q = pair.tails(np.asarray([epsilon]))
        found.append(float(p[0]) - math.exp(epsilon) * float(q[0]))
    return max(found)


def lattice(mass, shift, epsilon):
    """Delta of noise with these masses on the integers -n..n, shifted."""
    p, q = np.append(mass, np.zeros(shift)), np.append(np.zeros(shift), mass)
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 2.0])
def test_laplace_noise_has_its_known_profile(epsilon):
    for b, relation, distance in ((1.0, ADD, 1), (0.4, REPLACE, 2), (0.7, SPECIAL, 1)):
        a = distance / b
        true = max(0.0, 1 - math.exp((epsilon - a) / 2))  # Balle, Barthe and Gaboardi 2018
        assert profile(acc.Laplace(b), relation, epsilon) == pytest.approx(true, rel=1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 0.2, 0.9])
def test_noise_on_the_integers_is_summed_from_its_masses(epsilon):
    k = np.arange(-400, 401)
    geometric = np.exp(-np.abs(k) / 2.5)
    gaussian = np.exp(-0.5 * (k / 3.0) ** 2)
    for relation, factor in ((ADD, 1), (REPLACE, 2)):
        for event, mass in (
            (acc.DiscreteLaplace(2.5, 3), geometric / geometric.sum()),
            (acc.DiscreteGaussian(3.0, 3), gaussian / gaussian.sum()),
        ):
            true = lattice(mass, 3 * factor, epsilon)
            assert profile(event, relation, epsilon) == pytest.approx(true, rel=1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.5])
def test_randomised_response_is_counted_over_its_answers(epsilon):
    p, k = 0.4, 5
    own, other = 1 - p + p / k, p / k
    law, neighbour = np.full(k, other), np.full(k, other)
    law[0], neighbour[1] = own, own
    true = float(np.maximum(law - math.exp(epsilon) * neighbour, 0).sum())
    for relation in (REPLACE, SPECIAL):
        assert profile(acc.RandomizedResponse(p, k), relation, epsilon) == pytest.approx(true)


@pytest.mark.parametrize("eta", [0.1, 1.2, 4.0])
def test_bounded_range_is_the_worst_of_all_choices(eta):
    """Every mechanism with two losses eta apart: the best of them attains the pair's profile."""
    for epsilon in np.linspace(0, eta, 5)[:-1]:
        t = np.linspace(max(epsilon, 1e-9), eta, 20001)
        p = np.expm1(eta - t) / (np.exp(eta - t) - np.exp(-t))
        worst = float(np.max(p * -np.expm1(epsilon - t)))
        found = profile(acc.ExponentialMechanism(eta), ADD, float(epsilon))
        assert worst <= found * (1 + 1e-12)
        assert found == pytest.approx(worst, rel=1e-5)


def test_no_exponential_mechanism_leaks_more():
    rng = np.random.default_rng(0)
    event = acc.ExponentialMechanism(1.5)
    for _ in range(200):
        u = rng.uniform(0, 3, 6)
        v = u + rng.choice([-1.0, 1.0], 6)
        p, q = special.softmax(1.5 * u / 2), special.softmax(1.5 * v / 2)
        for epsilon in (0.0, 0.4, 1.0):
            delta = np.maximum(p - math.exp(epsilon) * q, 0).sum()
            assert delta <= profile(event, ADD, epsilon) + 1e-15
        for order in (1.5, 4.0, 30.0):
            renyi = math.log(float((p**order * q ** (1 - order)).sum())) / (order - 1)
            assert renyi <= event.renyi(ADD, np.asarray([order]))[0] * (1 + 1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5, 3.0])
def test_a_mixture_is_integrated_from_its_densities(epsilon):
    event = acc.MixtureOfGaussians(0.7, (0.5, 1.0, 3.0), (0.3, 0.6, 0.1))

    def densities(y):
        mixed = sum(
            p * math.exp(-0.5 * ((y - s) / 0.7) ** 2)
            for s, p in zip(event.sensitivities, event.probabilities, strict=True)
        )
        scale = 0.7 * math.sqrt(2 * math.pi)
        return mixed / scale, math.exp(-0.5 * (y / 0.7) ** 2) / scale

    def excess(y, reverse):
        p, q = densities(y)[::-1] if reverse else densities(y)
        return max(p - math.exp(epsilon) * q, 0.0)

    for reverse in (False, True):
        pair = event.pairs(ADD, True)[reverse]
        p, q = pair.tails(np.asarray([epsilon]))
        grid = np.linspace(-7, 10, 120)
        true = sum(
            integrate.quad(excess, a, b, (reverse,), epsabs=1e-13)[0]
            for a, b in itertools.pairwise(grid)
        )
        assert float(p[0] - math.exp(epsilon) * q[0]) == pytest.approx(true, rel=1e-7, abs=1e-11)


def test_a_mixture_of_two_is_a_sampled_gaussian():
    q, z = 0.02, 0.8
    step = acc.PoissonSampled(acc.Gaussian(z), q)
    event = acc.MixtureOfGaussians(z, (1, 0), (q, 1 - q))
    for epsilon in (0.0, 0.01, 0.5, 3.0):
        bound = acc.delta(step, epsilon)
        assert bound.lower * (1 - 1e-9) <= profile(event, ADD, epsilon) <= bound.upper * (1 + 1e-9)
    orders = np.asarray([1.01, 1.5, 2.0, 7.0, 40.0])
    exact = acc.renyi_curve(step, orders)
    assert event.renyi(ADD, orders) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(("event", "relation"), ALL)
def test_the_masses_of_cells_are_those_of_the_tails(event, relation):
    edges = np.concatenate([[-np.inf], np.linspace(-0.4, 0.4, 1001), [1.0, 2.0, 9.0, np.inf]])
    for pair in event.pairs(relation, True):
        beyond_p, beyond_q = pair.tails(edges)
        for cell, beyond in zip(pair.cells(edges), (beyond_p, beyond_q), strict=True):
            assert cell == pytest.approx(-np.diff(beyond), abs=3e-15)
        assert beyond_p[-1] == pair.infinite
        p, q = pair.cells(edges)
        low, high = np.exp(edges[:-1]), np.exp(edges[1:-1])
        assert (p >= q * low * (1 - 1e-9) - 1e-17).all()
        assert (p[:-1] <= q[:-1] * high * (1 + 1e-9) + 1e-17).all()


def moment(event, relation, order):
    """log E_P[e^((order - 1) loss)]/(order - 1) of the pairs, by cells that are narrow."""
    found = []
    for pair in event.pairs(relation, True):
        edges = np.linspace(-14, 14, 70_001)
        p, _ = pair.cells(edges)
        found.append(math.log(float(p @ np.exp((order - 1) * edges[:-1]))) / (order - 1))
    return max(found)


@pytest.mark.parametrize(("event", "relation"), [a for a in ALL if getattr(a[0], "delta", 0) == 0])
def test_renyi_divergences_are_no_less_than_those_of_the_pairs(event, relation):
    orders = np.asarray([1.01, 1.5, 2.0, 4.0])
    for order, value in zip(orders, event.renyi(relation, orders), strict=True):
        if not isinstance(event, acc.ExponentialMechanism):
            assert value >= moment(event, relation, order)
        if not isinstance(event, acc.ExponentialMechanism | acc.DiscreteGaussian):
            assert value <= moment(event, relation, order) * 1.001 + 5e-4


def test_the_renyi_curve_of_a_mixture_is_that_of_the_definition():
    with mp.workdps(20):
        for order in (1.5, 7.5):
            total = mp.quad(
                lambda y, order=order: (
                    mp.npdf(y)
                    * (
                        0.8
                        + 0.15 * mp.exp((y - 0.5 / 1.3) / 1.3)
                        + 0.05 * mp.exp(2 * (y - 1 / 1.3) / 1.3)
                    )
                    ** order
                ),
                list(range(-30, 61, 2)),
            )
            true = float(mp.log(total) / (order - 1))
            value = float(MIXED.renyi(ADD, np.asarray([order]))[0])
            assert true <= value <= true * (1 + 1e-8)


def test_a_vector_of_laplace_noise_is_no_worse_than_the_line():
    """Two coordinates that share the distance, convolved on a fine grid, against one of all."""
    whole = acc.Laplace(1.0)
    parts = [acc.Laplace(1 / 0.3), acc.Laplace(1 / 0.7)]
    edges = np.linspace(-1.0005, 1.0005, 2002)
    laws = [part.pairs(ADD, True)[0].cells(edges)[0] for part in parts]
    total, loss = np.convolve(*laws), np.linspace(-2.0, 2.0, 4001)
    for epsilon in (0.0, 0.2, 0.5, 0.8):
        delta = float(total @ np.maximum(-np.expm1(epsilon - loss), 0))
        assert delta <= profile(whole, ADD, epsilon) + 1e-3


def test_pure_answers_compose_as_the_binomial_law_says():
    """Kairouz, Oh and Viswanath 2015, Theorem 3.3: epsilon-private releases, delta by counting."""
    n, e = 6, 0.4
    pair = acc.EpsilonDelta(e).pairs(ADD, True)[0]
    losses, p = pair.loss, pair.p
    total = np.ones(1)
    for _ in range(n):
        total = np.convolve(total, p)
    loss = np.linspace(n * losses[0], n * losses[1], n + 1)
    for i in range(n // 2 + 1):
        epsilon = (n - 2 * i) * e
        true = (
            sum(
                math.comb(n, j) * (math.exp((n - j) * e) - math.exp(epsilon + j * e))
                for j in range(i)
            )
            / (1 + math.exp(e)) ** n
        )
        assert float(total @ np.maximum(-np.expm1(epsilon - loss), 0)) == pytest.approx(true)


def test_they_are_accounted_alone_and_beside_a_sampled_run():
    run = acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.5), 0.02), 200)
    for event, relation in [*ALL, (acc.ZCDP(0.02), ADD)]:
        if relation is not ADD or getattr(event, "delta", 0) > 0:
            continue
        alone = acc.epsilon(event, 1e-6, relation).upper
        both = acc.epsilon(acc.Composed([run, event]), 1e-6, relation).upper
        assert alone >= 0
        assert max(alone, acc.epsilon(run, 1e-6, relation).upper) * (1 - 1e-9) <= both < 20


def test_inside_a_sampled_event_they_are_refused_by_name():
    for event, relation in ALL:
        for sampled in (
            acc.PoissonSampled(event, 0.1),
            acc.PoissonSampled(acc.Composed([acc.Gaussian(1.0), event]), 0.1),
        ):
            assert not acc.supports(sampled, relation)
            with pytest.raises(acc.UnsupportedEventError, match=type(event).__name__):
                acc.epsilon(sampled, 1e-5, relation)


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


@pytest.mark.parametrize(
    ("event", "relation", "words"),
    [
        (acc.RandomizedResponse(0.5), ADD, "replace_one"),
        (acc.EpsilonDelta(1.0), REPLACE, "proven under add_or_remove_one"),
        (acc.ZCDP(1.0, relation=SPECIAL), ADD, "proven under replace_special"),
        (acc.ExponentialMechanism(1.0), SPECIAL, "proven under add_or_remove_one"),
        (MIXED, REPLACE, "MixtureOfGaussians"),
    ],
)
def test_relations_without_a_proof_are_refused(event, relation, words):
    with pytest.raises(acc.UnsupportedEventError, match=words):
        acc.epsilon(event, 1e-5, relation)


def test_what_holds_for_a_replaced_record_holds_for_a_null_record():
    stated = acc.EpsilonDelta(1.0, 1e-6, relation="replace_one")
    assert stated.relation is REPLACE
    assert acc.supports(stated, SPECIAL)
    assert not acc.supports(stated, ADD)


@pytest.mark.parametrize("event", [e for e, _ in ALL] + [acc.ZCDP(0.5, 0.1, relation=REPLACE)])
def test_they_round_trip_through_json_and_have_words(event):
    both = acc.Composed([acc.Gaussian(2.0), event])
    assert acc.events.from_dict(json.loads(json.dumps(acc.events.to_dict(both)))) == both
    assert repr(event) not in describe(both)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: acc.Laplace(-1.0), "noise_multiplier="),
        (lambda: acc.DiscreteLaplace(0.0), "scale="),
        (lambda: acc.DiscreteLaplace(1.0, 1.5), "sensitivity="),
        (lambda: acc.DiscreteGaussian(1.0, 0), "sensitivity="),
        (lambda: acc.RandomizedResponse(1.2), "noise_prob="),
        (lambda: acc.RandomizedResponse(0.5, 1), "buckets="),
        (lambda: acc.EpsilonDelta(-1.0), "epsilon="),
        (lambda: acc.EpsilonDelta(1.0, 1.1), "delta="),
        (lambda: acc.EpsilonDelta(1.0, relation="one"), "relation='one'"),
        (lambda: acc.ExponentialMechanism(0.0), "epsilon="),
        (lambda: acc.ZCDP(math.inf), "rho="),
        (lambda: acc.MixtureOfGaussians(1.0, (1, -1), (0.5, 0.5)), r"sensitivities\[1\]="),
        (lambda: acc.MixtureOfGaussians(1.0, (1, 2), (1.0,)), "probabilities has length 1"),
        (lambda: acc.MixtureOfGaussians(1.0, (1, 2), (0.5, 0.4)), "sum to 0.9"),
    ],
)
def test_bad_parameters_are_named(build, name):
    with pytest.raises(ValueError, match=name):
        build()


@pytest.mark.parametrize(
    "event",
    [
        acc.Laplace(0.0),
        acc.Laplace(1e-9),
        acc.EpsilonDelta(0.0, 1.0),
        acc.EpsilonDelta(1e9),
        acc.MixtureOfGaussians(0.0, (0, 1), (0.5, 0.5)),
    ],
)
def test_without_noise_nothing_is_guaranteed(event):
    assert acc.epsilon(event, 1e-5).upper == math.inf
    assert acc.delta(event, 1.0).upper == 1


def test_at_the_ends_of_delta_and_epsilon_there_are_answers():
    run = acc.PoissonSampled(acc.Gaussian(1.0), 0.1)
    assert acc.epsilon(run, 0.0).lower == math.inf
    assert acc.epsilon(run, 1.0).upper == 0
    pure = acc.Composed([acc.Laplace(2.0), acc.Repeated(acc.DiscreteLaplace(4.0), 3)])
    bound = acc.epsilon(pure, 0.0)
    assert bound.lower <= 0.5 + 0.75 <= bound.upper <= 1.25 * (1 + 1e-9)
    assert acc.epsilon(acc.Composed([pure, run]), 0.0).upper == math.inf
    answers = acc.Repeated(acc.RandomizedResponse(0.5, 2), 2)
    assert acc.epsilon(answers, 0.0, REPLACE).upper == pytest.approx(2 * math.log(3))
    assert acc.epsilon(acc.EpsilonDelta(1.0, 1e-9), 0.0).upper == math.inf
    assert acc.delta(acc.Repeated(acc.EpsilonDelta(1.0, 0.1), 2), math.inf).upper == pytest.approx(
        0.19
    )
    assert acc.delta(acc.Composed([run, acc.Laplace(1.0), acc.ZCDP(1.0)]), math.inf).upper == 0
    with pytest.raises(ValueError, match="delta=1e-301: expected 0, 1 or a number"):
        acc.epsilon(run, 1e-301)
