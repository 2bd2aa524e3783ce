"""Guarantees for several records of one person, against laws written out by hand."""

import math

import numpy as np
import pytest
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting.groups import grouped

ADD, REPLACE, SPECIAL = acc.Relation


def sampled(noise, rate):
    return acc.PoissonSampled(acc.Gaussian(noise), rate)


@pytest.mark.parametrize("relation", list(acc.Relation))
def test_a_full_batch_moves_as_many_times_as_far(relation):
    event = acc.Repeated(acc.Gaussian(3.0), 4)
    group = acc.group_epsilon(event, 1e-6, 3, relation)
    assert group == acc.epsilon(acc.Gaussian(0.5), 1e-6, relation)


def test_one_record_is_a_group_of_one():
    event = acc.Repeated(sampled(1.0, 0.05), 20)
    assert acc.group_epsilon(event, 1e-5, 1) == acc.epsilon(event, 1e-5)
    assert acc.group_delta(event, 1.0, 1) == acc.delta(event, 1.0)


@pytest.mark.parametrize("k", [2, 5])
def test_sampled_records_take_part_in_binomial_numbers(k):
    """The best test is a threshold: its rates are those of a binomial mixture."""
    z, q = 0.9, 0.03
    event = grouped(sampled(z, q), k, ADD)
    chances = [math.comb(k, j) * q**j * (1 - q) ** (k - j) for j in range(k + 1)]
    assert event.probabilities == pytest.approx(chances, rel=1e-12)
    cuts = np.linspace(-6, 12, 400_001)
    hits = sum(p * special.ndtr((j - cuts) / z) for j, p in enumerate(chances))
    alarms = special.ndtr(-cuts / z)
    for epsilon in (0.0, 0.2, 1.0, 3.0):
        forward = float(np.max(hits - math.exp(epsilon) * alarms))
        reverse = float(np.max((1 - alarms) - math.exp(epsilon) * (1 - hits)))
        pairs = event.pairs(ADD, True)
        for pair, true in zip(pairs, (forward, reverse), strict=True):
            p, other = pair.tails(np.asarray([epsilon]))
            found = float(p[0] - math.exp(epsilon) * other[0])
            assert found == pytest.approx(max(true, 0.0), rel=1e-6, abs=1e-12)


def test_a_group_costs_more_than_a_record_and_at_most_a_full_batch():
    event = acc.Repeated(sampled(1.5, 0.02), 50)
    found = [acc.group_epsilon(event, 1e-6, k).upper for k in (1, 2, 4)]
    assert found[0] < found[1] < found[2]
    assert found[2] <= acc.epsilon(acc.Repeated(acc.Gaussian(1.5 / 4), 50), 1e-6).upper


def test_many_records_and_tiny_probabilities_are_never_left_out():
    chances = grouped(sampled(1.0, 1e-5), 200, ADD).probabilities
    assert len(chances) == 201
    assert chances[-1] == 1e-300
    assert math.fsum(chances) == pytest.approx(1, abs=1e-13)


@pytest.mark.parametrize(
    ("event", "relation", "expected"),
    [
        (acc.Laplace(3.0), ADD, acc.Laplace(1.0)),
        (acc.DiscreteLaplace(3.0, 2), REPLACE, acc.DiscreteLaplace(3.0, 6)),
        (acc.DiscreteGaussian(3.0), ADD, acc.DiscreteGaussian(3.0, 3)),
        (acc.RandomizedResponse(0.5), REPLACE, acc.Repeated(acc.RandomizedResponse(0.5), 3)),
        (acc.ExponentialMechanism(0.5), ADD, acc.ExponentialMechanism(1.5)),
        (acc.ZCDP(0.1), ADD, acc.ZCDP(0.9)),
        (acc.PerUser(acc.Gaussian(3.0), 5), ADD, acc.PerUser(acc.Gaussian(1.0), 5)),
        (sampled(1.0, 0.1), REPLACE, None),
        (acc.ZCDP(0.1, 0.1), ADD, None),
        (acc.MixtureOfGaussians(1.0, (0, 1), (0.5, 0.5)), ADD, None),
        (acc.Composed([acc.Laplace(3.0), acc.ZCDP(0.1, 0.1)]), ADD, None),
    ],
)
def test_the_groups_own_event(event, relation, expected):
    found = grouped(event, 3, relation)
    assert repr(found) == repr(expected) or found.rho == pytest.approx(expected.rho)


def test_stated_guarantees_follow_the_chain_of_neighbours():
    found = grouped(acc.EpsilonDelta(0.5, 1e-6), 3, ADD)
    assert found.epsilon == 1.5
    assert found.delta == pytest.approx(1e-6 * (1 + math.exp(0.5) + math.exp(1.0)))
    assert grouped(acc.EpsilonDelta(0.5, 0.9), 3, ADD).infinite()


@pytest.mark.parametrize(
    "event", [acc.Repeated(sampled(2.0, 0.1), 5), acc.FixedSizeSampled(acc.Gaussian(2.0), 100, 5)]
)
def test_without_a_pair_of_its_own_a_group_is_a_chain_of_records(event):
    bound = acc.group_epsilon(event, 1e-6, 3, REPLACE)
    one = acc.epsilon(event, 1e-6, REPLACE)
    assert bound.upper > 3 * one.lower
    assert bound.lower <= one.lower
    e = bound.upper / 3
    chain = acc.delta(event, e, REPLACE).upper * (1 + math.exp(e) + math.exp(2 * e))
    assert 0.99e-6 <= chain <= 1e-6
    again = acc.group_delta(event, bound.upper, 3, REPLACE)
    assert again.upper == pytest.approx(chain, rel=1e-6)


def test_a_chain_is_no_better_than_the_pair_of_the_group():
    """Of the same event both are known: full batches under the black box would be looser."""
    e = 0.7
    chain = acc.delta(acc.Gaussian(4.0), e / 2).upper * (1 + math.exp(e / 2))
    assert acc.group_delta(acc.Gaussian(4.0), e, 2).upper < chain


def test_ends_and_bad_input():
    event = sampled(2.0, 0.1)
    assert acc.group_epsilon(event, 1.0, 4, REPLACE).upper == 0
    assert acc.group_epsilon(event, 0.0, 4, REPLACE).upper == math.inf
    assert acc.group_delta(event, math.inf, 4, REPLACE).upper == 0
    assert acc.group_epsilon(acc.NonPrivate("no noise"), 1e-5, 4).upper == math.inf
    with pytest.raises(ValueError, match="records=0"):
        acc.group_epsilon(event, 1e-5, 0)


def test_a_bound_of_a_group_says_its_relation():
    steps = acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.0), 0.01), 100)
    for relation in (acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE):
        for records in (1, 3):
            found = acc.group_epsilon(steps, 1e-5, records=records, relation=relation)
            assert found.relation is relation
            assert acc.group_delta(steps, 1.0, records, relation).relation is relation
