"""The exact private choice of AGD's step size, and the published one that it stands in for."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate

from jaxdp.papers import choices
from tests.laws import is_binomial


def probabilities(totals, epsilon):
    """Of every place, by all orders in which places are tried."""
    found = np.zeros(len(totals))
    orders = list(itertools.permutations(range(len(totals))))
    for order in orders:
        left = 1.0
        for place in order:
            heads = math.exp(-epsilon * (totals[place] - min(totals)))
            found[place] += left * heads
            left *= 1 - heads
    return found / len(orders)


@pytest.mark.parametrize("x", [Fraction(0), Fraction(1, 7), Fraction(1), Fraction(12, 5)])
def test_it_happens_with_probability_e_to_the_minus_x(x):
    rng = np.random.default_rng(5)
    hits = sum(choices.happens(x, rng) for _ in range(20_000))
    assert is_binomial(hits, 20_000, math.exp(-x))


def test_the_choice_has_the_law_of_permute_and_flip():
    totals, epsilon = (30, 10, 25, 10), Fraction(1, 20)
    rng = np.random.default_rng(6)
    found = np.bincount(
        [choices.permute_and_flip(totals, epsilon, rng) for _ in range(20_000)], minlength=4
    )
    for hits, p in zip(found, probabilities(totals, float(epsilon)), strict=True):
        assert is_binomial(int(hits), 20_000, p)


small = st.integers(0, 6)


@given(st.lists(st.tuples(small, st.integers(0, 3)), min_size=2, max_size=4), st.floats(0.01, 2))
def test_a_record_changes_a_probability_by_its_epsilon_at_most(places, epsilon):
    totals = [total for total, _ in places]
    without = probabilities(totals, epsilon)
    with_it = probabilities([total + added for total, added in places], epsilon)
    assert np.abs(np.log(with_it / without)).max() <= 3 * epsilon + 1e-9


def published(totals, epsilon):
    """P(place 0) where the least of total + noise is taken, its noise exponential of rate epsilon.

    The choice of the program of AGD's authors.
    """

    def density(t):
        others = (math.exp(-epsilon * max(0.0, t - other)) for other in totals[1:])
        return epsilon * math.exp(-epsilon * (t - totals[0])) * math.prod(others)

    return integrate.quad(density, totals[0], totals[0] + 60 / epsilon)[0]


@pytest.mark.parametrize("places", [3, 21])
def test_a_record_changes_the_published_choice_by_that_for_every_other_place(places):
    """Losses level, and a record whose loss is 0 after every step but one."""
    epsilon = 0.25
    alike, moved = [5] * places, [6] + [5] * (places - 1)
    ratio = published(alike, epsilon) / published(moved, epsilon)
    assert math.log(ratio) == pytest.approx((places - 1) * epsilon, rel=1e-6)
    sound = probabilities(alike[:3], epsilon)[0] / probabilities(moved[:3], epsilon)[0]
    assert math.log(sound) <= epsilon
