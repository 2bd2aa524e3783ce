"""Renyi divergences, filters and curves, against the definition and other ways to compute them."""

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting import rdp
from jaxdp.accounting.canonical import Run, Step, flatten
from jaxdp.accounting.curves import mu_between
from jaxdp.accounting.gaussian import gaussian_delta
from tests.accounting.judging import ADD, REPLACE, SPECIAL, run

RELATIONS = pytest.mark.parametrize("relation", [ADD, REPLACE])


def binomial_rdp(q, z, order):
    """Mironov, Talwar and Zhang 2019, Section 3.3: the finite sum for integer orders, exactly."""
    with mp.workdps(40):
        total = mp.fsum(
            mp.binomial(order, i)
            * (1 - mp.mpf(q)) ** (order - i)
            * mp.mpf(q) ** i
            * mp.exp(mp.mpf(i * (i - 1)) / (2 * mp.mpf(z) ** 2))
            for i in range(order + 1)
        )
        return float(mp.log(total) / (order - 1))


def quadrature_rdp(q, z, order, relation):
    """From the definition, with 40 digits, by a trapezoid rule.

    It loses e^(-2 pi d / width) for an integrand that is analytic up to a distance d from the real
    line, here that to the zeros of the density, pi z^2, and for a Gaussian e^(-2 (pi z / width)^2).
    """
    with mp.workdps(40):
        q, z, order = mp.mpf(q), mp.mpf(z), mp.mpf(order)
        width = min(z / 6, z * z / 3)

        def p(x):
            return (1 - q) * mp.npdf(x, 0, z) + q * mp.npdf(x, 1, z)

        def other(x):
            return p(-x) if relation is REPLACE else mp.npdf(x, 0, z)

        first, last = (int(end / width) for end in (-16 * z - 3, 2 * order + 16 * z))
        nodes = (k * width for k in range(first, last + 1))
        total = width * mp.fsum(p(x) ** order * other(x) ** (1 - order) for x in nodes)
        return float(mp.log(total) / (order - 1))


@pytest.mark.parametrize("q", [1e-6, 1e-2, 0.3, 0.999])
def test_integer_orders_match_the_binomial_sum(q):
    for z in (0.4, 1.0, 20.0):
        for order in (2, 5, 33):
            value = rdp.step_rdp(Step(z, q), ADD, (float(order),))[0]
            truth = binomial_rdp(q, z, order)
            assert truth * (1 - 1e-12) <= value <= truth * (1 + 1e-9) + 1e-18, (z, order)


@RELATIONS
def test_fractional_orders_match_the_definition(relation):
    for q, z, order in ((0.01, 1.0, 1.5), (0.3, 0.5, 2.7), (0.2, 3.0, 1.01)):
        value = rdp.step_rdp(Step(z, q), relation, (order,))[0]
        assert value == pytest.approx(quadrature_rdp(q, z, order, relation), rel=1e-9)


def test_orders_next_to_one_are_kept_and_sound():
    """dp_accounting 0.6.0 answers 0 here once the order 1 + 1e-12 is added; the truth is 0.149."""
    orders = (1 + 1e-12, *rdp.DEFAULT_ORDERS)
    curve = 1000 * rdp.step_rdp(Step(1.0, 1e-3), ADD, orders)
    assert curve[0] == pytest.approx(curve[1], rel=0.05)
    assert rdp.rdp_to_epsilon(curve, 1e-5, orders)[0] > 0.149


def test_an_order_that_cannot_be_tabulated_is_charged_without_sampling():
    curve = rdp.step_rdp(Step(0.01, 0.1), ADD, (1e5,))
    assert curve[0] == pytest.approx(1e5 / (2 * 0.01**2))


def test_infinite_orders_are_dropped_not_zeroed():
    assert rdp.rdp_to_epsilon(np.array([math.inf, math.inf]), 1e-5, (2.0, 3.0))[0] == math.inf
    assert rdp.rdp_to_delta(np.array([math.nan, math.inf]), 1.0, (2.0, 3.0)) == 1.0
    assert rdp.rdp_to_epsilon(np.array([math.inf, 1.0]), 1e-5, (2.0, 3.0))[1] == 3.0


def test_the_conversions_are_the_printed_ones():
    """Canonne, Kamath and Steinke 2020, Proposition 12, and Mironov 2017, Proposition 3."""
    spent, delta = np.asarray([0.7]), 1e-5
    for order in (1.5, 2.0, 20.0):
        improved = 0.7 + math.log((order - 1) / order) - (math.log(delta * order)) / (order - 1)
        plain = 0.7 + math.log(1 / delta) / (order - 1)
        for name, epsilon in (("improved", improved), ("mironov", plain)):
            found = rdp.rdp_to_epsilon(spent, delta, (order,), name)
            assert found == (pytest.approx(epsilon), order)
            assert rdp.rdp_to_delta(spent, epsilon, (order,), name) == pytest.approx(delta)


def test_steps_of_the_published_tables():
    """Integer orders 2..64 with Mironov's conversion buy exactly these steps at (3, 1e-5)."""
    orders = tuple(float(a) for a in range(2, 65))
    for q, z, steps in (
        (512 / 60000, 1.23, 4698),
        (2048 / 60000, 2.15, 1157),
        (1024 / 50000, 1.54, 1435),
    ):
        one = rdp.step_rdp(Step(z, q), ADD, orders)
        assert rdp.rdp_to_epsilon(steps * one, 1e-5, orders, "mironov")[0] <= 3, steps
        assert rdp.rdp_to_epsilon((steps + 1) * one, 1e-5, orders, "mironov")[0] > 3, steps


@RELATIONS
def test_many_orders_and_many_steps_at_once_are_one_at_a_time(relation):
    steps = [Step(z, q) for z in (0.05, 0.3, 1.0, 30.0) for q in (1e-9, 1e-3, 0.4, 1.0)]
    orders = (1.001, 1.5, 2.0, 3.0, 3.99, 4.0, 17.0, 63.5, 300.0, 1e5)
    together = rdp.run_rdp(Run(tuple((step, 3) for step in steps)), relation, orders)
    alone = sum(
        3 * np.array([rdp.step_rdp(step, relation, (a,))[0] for a in orders]) for step in steps
    )
    np.testing.assert_allclose(together, alone, rtol=1e-12)


@RELATIONS
def test_steps_that_share_a_table_are_not_below_their_definition(relation):
    steps = ((0.45, 1e-5), (1.0, 0.01), (4.0, 0.3))
    orders = (1.3, 2.0, 3.5, 9.0)
    found = rdp.run_rdp(Run(tuple((Step(z, q), 1) for z, q in steps)), relation, orders)
    for order, value in zip(orders, found, strict=True):
        truth = sum(quadrature_rdp(q, z, order, relation) for z, q in steps)
        assert truth * (1 - 1e-12) <= value <= truth * (1 + 1e-9), order


# Adaptive runs stop before the budget is passed.


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0.5, 5.0), min_size=1, max_size=40), st.floats(0.2, 4.0))
def test_what_was_admitted_fits_the_budget_in_hindsight(noise_multipliers, epsilon):
    filter_, charged = acc.RenyiFilter(epsilon, 1e-5), []
    for z in noise_multipliers:
        event = acc.PoissonSampled(acc.Gaussian(z), 0.1)
        if filter_.admits(event):
            filter_.charge(event)
            charged.append(event)
        else:
            with pytest.raises(acc.BudgetExceededError, match="event="):
                filter_.charge(event)
    assert filter_.spent() <= epsilon * (1 + 1e-12)
    assert acc.epsilon(acc.Composed(charged), 1e-5).upper <= epsilon


def test_a_filter_adds_up_and_stops():
    budget, step, admitted = acc.RenyiFilter(1.0, 1e-5), acc.Gaussian(20.0), 0
    while budget.admits(step) and admitted < 60:
        budget.charge(step)
        admitted += 1
    with pytest.raises(acc.BudgetExceededError):
        budget.charge(step)
    assert 10 < admitted < 60
    total = rdp.run_rdp(flatten(acc.Repeated(step, admitted), ADD), ADD, budget.orders)
    spent = rdp.rdp_to_epsilon(total, 1e-5 / len(budget.orders), budget.orders)[0]
    assert budget.spent() == pytest.approx(spent)
    assert spent <= 1.0


def test_a_fixed_order_wastes_less():
    event = acc.PoissonSampled(acc.Gaussian(1.23), 512 / 60_000)
    many, one = acc.RenyiFilter(3.0, 1e-5), acc.RenyiFilter(3.0, 1e-5, orders=(8.0,))
    for filter_, least in ((many, 4500), (one, 5500)):
        filter_.charge(acc.Repeated(event, least))
        assert filter_.admits(event)
        assert not filter_.admits(acc.Repeated(event, 7245 - least))


def test_no_noise_is_never_admitted():
    assert not acc.RenyiFilter(1e6, 1e-5).admits(acc.NonPrivate("it peeked"))
    with pytest.raises(ValueError, match="orders="):
        acc.RenyiFilter(1.0, 1e-5, orders=(1.0,))


# Renyi curves, trade-off curves and Gaussian mu are never better than the truth.

RUN = run(0.05, 1.0, 30)


def test_parts_add_to_the_renyi_curve():
    orders, gaussians = np.array([1.2, 4.0, 50.0]), acc.Repeated(acc.Gaussian(2.0), 3)
    assert acc.renyi_curve(gaussians, orders) == pytest.approx(3 * orders / 8)
    assert acc.renyi_curve(gaussians, orders, REPLACE) == pytest.approx(3 * orders / 2)
    both = acc.renyi_curve(acc.Composed([RUN, acc.Repeated(acc.ZCDP(0.1, 0.2), 2)]), orders)
    assert both == pytest.approx(acc.renyi_curve(RUN, orders) + 2 * (0.2 + 0.1 * orders))
    assert acc.renyi_curve(acc.NonPrivate("no noise"), [1.5, 4.0]).tolist() == [math.inf] * 2
    with pytest.raises(ValueError, match=r"orders\[1\]=1.0"):
        acc.renyi_curve(RUN, [2.0, 1.0])


def test_the_advantage_of_a_gaussian_is_its_total_variation():
    bound, true = acc.advantage(acc.Gaussian(2.0)), math.erf(0.25 / math.sqrt(2))
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


def test_the_gaussian_of_mu_is_no_better_anywhere_above_the_least_delta():
    deltas = {e: acc.delta(RUN, e).lower for e in np.linspace(0, 4, 13).tolist()}
    for least in (1e-4, 1e-8):
        bound = acc.mu_gdp(RUN, ADD, least)
        assert bound.lower <= bound.upper <= bound.lower * 1.01
        for epsilon, delta in deltas.items():
            assert delta <= max(gaussian_delta(bound.upper, epsilon), least), (least, epsilon)


def test_mu_grows_with_what_is_told_and_ends_at_the_full_batch():
    found = [acc.mu_gdp(RUN, ADD, least).upper for least in (1e-3, 1e-12, 0.0)]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(math.sqrt(30))


def test_a_chord_is_compared_between_its_ends_too():
    """A step of delta that touches the Gaussian's at both ends needs no larger mu; a bulge does."""
    ends = [(e, gaussian_delta(0.8, e)) for e in (0.2, 1.4)]
    at_ends, between = max(mu_between(point, point) for point in ends), mu_between(*ends)
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
