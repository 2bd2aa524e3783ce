"""Renyi curves, trade-off curves and Gaussian mu are never better than the truth."""

import math

import numpy as np
import pytest
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting.curves import mu_between
from jaxdp.accounting.gaussian import gaussian_delta

ADD, REPLACE, SPECIAL = acc.Relation
RUN = acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.0), 0.05), 30)


def test_the_renyi_curve_of_gaussians_is_a_line():
    orders = [1.2, 2.0, 50.0]
    event = acc.Repeated(acc.Gaussian(2.0), 3)
    assert acc.renyi_curve(event, orders) == pytest.approx(3 * np.asarray(orders) / 8)
    assert acc.renyi_curve(event, orders, REPLACE) == pytest.approx(3 * np.asarray(orders) / 2)


def test_parts_add_to_the_renyi_curve():
    orders = [1.5, 4.0]
    both = acc.renyi_curve(acc.Composed([RUN, acc.Repeated(acc.ZCDP(0.1, 0.2), 2)]), orders)
    assert both == pytest.approx(acc.renyi_curve(RUN, orders) + 2 * (0.2 + 0.1 * np.array(orders)))
    assert acc.renyi_curve(acc.NonPrivate("no noise"), orders).tolist() == [math.inf, math.inf]
    with pytest.raises(ValueError, match=r"orders\[1\]=1.0"):
        acc.renyi_curve(RUN, [2.0, 1.0])


def test_the_advantage_of_a_gaussian_is_its_total_variation():
    bound = acc.advantage(acc.Gaussian(2.0))
    true = math.erf(0.25 / math.sqrt(2))
    assert bound.lower <= true <= bound.upper
    assert bound.upper == pytest.approx(true)


def test_the_trade_off_of_a_gaussian_is_below_the_known_one_and_near():
    rates = np.array([0.0, 1e-3, 0.01, 0.1, 0.5, 0.9, 1.0])
    found = acc.trade_off(acc.Gaussian(1.0), rates)
    true = special.ndtr(special.ndtri(1 - rates) - 1)
    assert (found <= true * (1 + 1e-12)).all()
    assert (found >= true - 0.02).all()
    assert (acc.trade_off(acc.Gaussian(0.0), rates) == 0).all()
    with pytest.raises(ValueError, match="rates="):
        acc.trade_off(acc.Gaussian(1.0), [1.5])


def test_without_sampling_mu_is_exact():
    for relation, mu in ((ADD, 1.0), (SPECIAL, 1.0), (REPLACE, 2.0)):
        bound = acc.mu_gdp(acc.Repeated(acc.Gaussian(2.0), 4), relation)
        assert bound.lower <= mu <= bound.upper <= mu * (1 + 1e-9)


@pytest.mark.parametrize("least", [1e-4, 1e-8])
def test_the_gaussian_of_mu_is_no_better_anywhere_above_the_least_delta(least):
    bound = acc.mu_gdp(RUN, ADD, least)
    assert bound.lower <= bound.upper <= bound.lower * 1.01
    for epsilon in np.linspace(0, 4, 23).tolist():
        delta = acc.delta(RUN, epsilon).lower
        assert delta <= max(gaussian_delta(bound.upper, epsilon), least)


def test_mu_grows_with_what_is_told_and_ends_at_the_full_batch():
    found = [acc.mu_gdp(RUN, ADD, least).upper for least in (1e-3, 1e-6, 1e-12, 0.0)]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(math.sqrt(30))


def test_a_chord_is_compared_between_its_ends_too():
    """A step of delta that touches the Gaussian's at both ends needs no larger mu; a bulge does."""
    ends = [(e, gaussian_delta(0.8, e)) for e in (0.2, 1.4)]
    at_ends = max(mu_between(point, point) for point in ends)
    between = mu_between(*ends)
    assert at_ends == pytest.approx(0.8, rel=1e-6)
    assert between > at_ends * 1.001
    for epsilon in np.linspace(0.2, 1.4, 50).tolist():
        share = math.expm1(epsilon - 0.2) / math.expm1(1.2)
        chord = (1 - share) * ends[0][1] + share * ends[1][1]
        assert gaussian_delta(between, epsilon) >= chord


def test_pure_privacy_has_the_mu_of_its_corner():
    mu = acc.mu_gdp(acc.Laplace(1.0)).upper
    assert special.ndtr(-mu / 2) == pytest.approx(1 / (1 + math.e))
    rates = np.linspace(0, 1, 101)
    gaussian = special.ndtr(special.ndtri(1 - rates) - mu)
    lines = np.maximum(1 - math.e * rates, (1 - rates) / math.e)
    assert (gaussian <= np.maximum(lines, 0) + 1e-12).all()


def test_mu_where_nothing_is_left_or_guaranteed():
    assert acc.mu_gdp(acc.Composed(())).upper == 0
    assert acc.mu_gdp(acc.Repeated(acc.Gaussian(1e6), 1), delta_min=0.5).upper <= 1e-5
    assert acc.mu_gdp(acc.NonPrivate("no noise"), delta_min=1e-6).upper == math.inf
    assert acc.mu_gdp(acc.EpsilonDelta(1.0, 1e-9)).upper == math.inf
    with pytest.raises(ValueError, match="delta_min="):
        acc.mu_gdp(RUN, delta_min=-1.0)
