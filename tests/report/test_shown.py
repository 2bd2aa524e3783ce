"""What is shown is never better than what is proven: neither numbers nor the curve of an attack."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting.curves import misses, profile
from jaxdp.report.tradeoff import tradeoff
from jaxdp.report.words import show_audited, show_delta, show_epsilon, show_factor, show_rate

ADD = acc.Relation.ADD_OR_REMOVE_ONE
NEARLY = 1 - 1e-15  # up to the rounding of epsilon * 1000 itself, and the like


@given(st.floats(1e-12, 0.9), st.floats(0.0, 1e6), st.floats(0.0, 15.9), st.floats(0.0, 1.0))
def test_shown_numbers_are_never_better_than_the_proven_ones(delta, epsilon, small, rate):
    assert delta <= float(show_delta(delta)) <= delta * (1 + 1.1e-5)
    assert float(show_epsilon(epsilon)) >= epsilon * NEARLY
    assert float(show_audited(epsilon)) <= epsilon * (2 - NEARLY)  # a lower bound that was found
    assert float(show_factor(small).replace(",", "")) >= math.exp(small) * NEARLY
    assert float(show_rate(rate).removesuffix("%")) >= 100 * rate * NEARLY


def test_very_large_factors_are_powers_of_ten_and_round_deltas_stay_as_they_are():
    assert (show_factor(3.0), show_factor(50.0), show_factor(1e4)) == ("21", "10²²", "10⁴³⁴³")
    for delta, shown in ((1e-5, "1e-5"), (0.1, "0.1"), (1.2345644e-5, "1.23457e-5")):
        assert show_delta(delta) == shown
    assert show_delta(1e-12) == "1e-12"


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


def test_mu_is_twice_as_large_under_replacement_and_else_that_of_the_epsilon_or_larger():
    found = tradeoff(acc.Repeated(acc.Gaussian(4.0), 4), acc.Relation.REPLACE_ONE, 1e-5)
    assert found.mu == pytest.approx(1.0, rel=1e-5)
    event = sampled(3.2, 0.178, 150)
    found = tradeoff(event, ADD, 1e-5)
    assert found.mu_is == "approximate"
    gaussian = acc.epsilon(acc.Gaussian(1 / found.mu), 1e-5).lower
    assert gaussian >= acc.epsilon(event, 1e-5).upper * (1 - 1e-4)


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


def test_where_nothing_is_proven_there_is_no_curve_and_next_to_no_noise_has_no_mu():
    nothing = acc.NonPrivate("no noise"), acc.Repeated(acc.Gaussian(0.0), 3)
    for event in (*nothing, acc.FixedSizeSampled(acc.Gaussian(1.0), 100, 10)):
        assert tradeoff(event, ADD, 1e-5) is None, event
    found = tradeoff(sampled(1e-9, 0.125, 2), ADD, 1e-5)
    assert found is None or (found.mu is None and found.mu_is == "")
