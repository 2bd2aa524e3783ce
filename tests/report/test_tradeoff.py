"""The curve that is shown is never below what an attack can do, and close to it."""

import math

import numpy as np
import pytest
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting.curves import misses, profile
from jaxdp.report.tradeoff import tradeoff

ADD = acc.Relation.ADD_OR_REMOVE_ONE


def sampled(noise, rate, steps):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(noise), rate), steps)


def test_of_a_gaussian_it_is_the_known_curve():
    for noise in (0.3, 1.0, 4.0):
        found = tradeoff(acc.Gaussian(noise), ADD, 1e-5)
        assert found.mu_is == "exact"
        assert found.mu == pytest.approx(1 / noise, rel=1e-5)
        rates, hits = np.array(found.curve).T
        true = special.ndtr(special.ndtri(rates) + 1 / noise)
        assert (hits >= true * (1 - 1e-6)).all(), noise
        assert (hits <= 1.15 * true + 1e-8).all(), noise
        at_one_percent = special.ndtr(special.ndtri(0.01) + 1 / noise)
        assert found.tpr_at_fpr["0.01"] == pytest.approx(at_one_percent, rel=0.03)


def test_under_replacement_mu_is_twice_as_large():
    found = tradeoff(acc.Repeated(acc.Gaussian(4.0), 4), acc.Relation.REPLACE_ONE, 1e-5)
    assert found.mu == pytest.approx(1.0, rel=1e-5)


def test_one_sampled_step_stays_above_the_best_test():
    """Of one draw, the best test is by the size of the noisy value: its rates are known."""
    noise, rate = 1.0, 0.1
    points = profile(sampled(noise, rate, 1), ADD, 1e-5)
    cuts = np.linspace(-2.0, 5.0, 50)
    alarms = special.ndtr(-cuts / noise)
    hits = (1 - rate) * alarms + rate * special.ndtr((1 - cuts) / noise)
    most = 1 - misses(points, alarms)
    assert (most >= hits).all()
    assert (most <= 1.1 * hits + 1e-8).all()


def test_the_approximate_mu_is_that_of_the_epsilon_or_larger():
    event = sampled(3.2, 0.178, 150)
    found = tradeoff(event, ADD, 1e-5)
    assert found.mu_is == "approximate"
    gaussian = acc.epsilon(acc.Gaussian(1 / found.mu), 1e-5).lower
    assert gaussian >= acc.epsilon(event, 1e-5).upper * (1 - 1e-4)


def test_absurd_runs_have_rates_between_guessing_and_certainty():
    for event, delta in (
        (sampled(2.0, 0.1, 1), 0.5),
        (sampled(0.05, 0.5, 500), 1e-5),
        (acc.Gaussian(1e-4), 1e-5),
        (acc.Gaussian(1e6), 0.9),
        (sampled(1.0, 0.01, 10), 1e-30),
    ):
        found = tradeoff(event, ADD, delta)
        for rate, hits in [*found.curve, *((float(k), v) for k, v in found.tpr_at_fpr.items())]:
            assert rate * (1 - 1e-5) <= hits <= 1, (event, delta)
        assert found.mu is None or (found.mu >= 0 and math.isfinite(found.mu))


def test_where_nothing_is_proven_there_is_no_curve():
    assert tradeoff(acc.NonPrivate("no noise"), ADD, 1e-5) is None
    assert tradeoff(acc.Repeated(acc.Gaussian(0.0), 3), ADD, 1e-5) is None
    fixed = acc.FixedSizeSampled(acc.Gaussian(1.0), 100, 10)
    assert tradeoff(fixed, ADD, 1e-5) is None


def test_next_to_no_noise_has_a_curve_and_no_mu():
    found = tradeoff(sampled(1e-9, 0.125, 2), ADD, 1e-5)
    assert found is None or (found.mu is None and found.mu_is == "")
