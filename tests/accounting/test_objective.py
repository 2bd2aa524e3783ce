"""Objective perturbation against the densities of its minimum in one dimension."""

import math

import numpy as np
import pytest
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting.gaussian import gaussian_delta

ADD, ONE, ZERO = (
    acc.Relation.ADD_OR_REMOVE_ONE,
    acc.Relation.REPLACE_ONE,
    acc.Relation.REPLACE_SPECIAL,
)
W = np.linspace(-60, 60, 240_001)


def density(signed, noise, ridge):
    """Of the minimum at W, by the change of variables from the random linear term."""
    gradient, curvature = ridge * W, np.full(W.shape, ridge)
    for x in signed:  # features times labels
        wrong = special.expit(-W * x)
        gradient = gradient - x * wrong
        curvature = curvature + x * x * wrong * special.expit(W * x)
    return np.exp(-0.5 * (gradient / noise) ** 2) / (noise * math.sqrt(2 * math.pi)) * curvature


def profile(p, q, epsilon):
    return float(np.sum(np.maximum(p - math.exp(epsilon) * q, 0)) * (W[1] - W[0]))


@pytest.mark.parametrize("seed", range(12))
def test_no_record_is_told_better_than_the_bound_says(seed):
    rng = np.random.default_rng(seed)
    noise, ridge = rng.uniform(0.4, 3), rng.uniform(0.3, 3)
    others = rng.uniform(-1, 1, rng.integers(0, 4))
    record = rng.choice([-1, 1, rng.uniform(-1, 1)])
    without, with_it = density(others, noise, ridge), density([*others, record], noise, ridge)
    assert np.sum(without) * (W[1] - W[0]) == pytest.approx(1, abs=1e-9)
    event = acc.ObjectivePerturbation(noise, 1 / (4 * ridge))
    for epsilon in (0.0, 0.05, 0.2, 0.7, 1.5, 3.0):
        bound = acc.delta(event, epsilon).upper
        assert profile(without, with_it, epsilon) <= bound + 1e-9
        assert profile(with_it, without, epsilon) <= bound + 1e-9


def test_the_gaussian_part_is_reached_without_its_factor_of_two():
    # The ridge is so small that the derivative is 0 or 1 nearly everywhere.
    noise, ridge = 1.0, 0.05
    without, with_it = density([], noise, ridge), density([1.0], noise, ridge)
    for epsilon in (0.5, 1.0, 2.0):
        exact = profile(without, with_it, epsilon)
        assert 0.9 * gaussian_delta(1.0, epsilon) < exact <= gaussian_delta(1.0, epsilon) + 1e-9


def test_the_curvature_must_be_charged():
    noise, ridge = 6.0, 0.5
    without, with_it = density([], noise, ridge), density([1.0], noise, ridge)
    exact = profile(with_it, without, 0.2)
    assert exact > 1.5 * gaussian_delta(1 / noise, 0.2)
    assert exact <= acc.delta(acc.ObjectivePerturbation(noise, 1 / (4 * ridge)), 0.2).upper


def test_the_bound_is_the_shifted_profile():
    event, shift = acc.ObjectivePerturbation(2.0, 0.05), math.log1p(0.05)
    for epsilon in (0.5, 1.0, 2.0, 3.0):
        exact = gaussian_delta(0.5, epsilon - shift)
        assert exact <= acc.delta(event, epsilon).upper <= exact * 1.02
    bound = acc.epsilon(event, 1e-5)
    assert bound.upper == pytest.approx(
        acc.epsilon(acc.Gaussian(2.0), 1e-5).upper + shift, rel=3e-4
    )
    assert bound.lower == 0


def test_relations_and_composition():
    event = acc.ObjectivePerturbation(2.0, 0.05)
    assert acc.epsilon(event, 1e-5, ZERO).upper == acc.epsilon(event, 1e-5, ADD).upper
    with pytest.raises(acc.UnsupportedEventError, match="zeroing out"):
        acc.epsilon(event, 1e-5, ONE)
    both = acc.epsilon(acc.Composed((event, acc.Gaussian(3.0))), 1e-5).upper
    assert acc.epsilon(event, 1e-5).upper < both < 2 * acc.epsilon(event, 1e-5).upper
    with pytest.raises(acc.UnsupportedEventError, match="too small"):
        acc.epsilon(acc.ObjectivePerturbation(0.01, 0.05), 1e-5)


@pytest.mark.parametrize("numbers", [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (1.0, math.inf)])
def test_numbers_out_of_range_are_refused(numbers):
    with pytest.raises(ValueError, match="expected"):
        acc.ObjectivePerturbation(*numbers)
