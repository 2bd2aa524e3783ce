"""Renyi divergences, filters and curves, against the definition and other ways to compute them."""

import functools
import itertools
import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from jaxdp import accounting as acc
from jaxdp import schedules
from jaxdp.accounting import queries, rdp
from jaxdp.accounting.curves import largest_mu_between
from jaxdp.accounting.flat import FlatRun, GaussianStep, flatten
from jaxdp.accounting.gaussian import gaussian_delta
from jaxdp.accounting.pairs import bracket_decreasing
from jaxdp.accounting.queries import search
from tests.accounting.judging import ADD, REPLACE, SPECIAL, cost, plain, run
from tests.refusing import all_refused, refused

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
            value = rdp.poisson_renyi(z, q, ADD, (float(order),))[0]
            truth = binomial_rdp(q, z, order)
            assert truth * (1 - 1e-12) <= value <= truth * (1 + 1e-9) + 1e-18, (z, order)


def test_orders_that_are_infinite_too_large_or_next_to_one():
    assert rdp.rdp_to_epsilon(np.array([math.inf, math.inf]), 1e-5, (2.0, 3.0))[0] == math.inf
    assert rdp.rdp_to_delta(np.array([math.nan, math.inf]), 1.0, (2.0, 3.0)) == 1.0
    assert rdp.rdp_to_epsilon(np.array([math.inf, 1.0]), 1e-5, (2.0, 3.0))[1] == 3.0
    curve = rdp.poisson_renyi(0.01, 0.1, ADD, (1e5,))
    assert curve[0] == pytest.approx(1e5 / (2 * 0.01**2))
    # dp_accounting 0.6.0 answers 0 here once the order 1 + 1e-12 is added; the truth is 0.149.
    orders = (1 + 1e-12, *rdp.DEFAULT_ORDERS)
    curve = 1000 * rdp.poisson_renyi(1.0, 1e-3, ADD, orders)
    assert curve[0] == pytest.approx(curve[1], rel=0.05)
    assert rdp.rdp_to_epsilon(curve, 1e-5, orders)[0] > 0.149


def test_the_conversions_are_the_printed_ones():
    """Canonne, Kamath and Steinke 2020, Proposition 12, and Mironov 2017, Proposition 3."""
    spent, delta = np.asarray([0.7]), 1e-5
    for order in (1.5, 2.0, 20.0):
        epsilon = 0.7 + math.log((order - 1) / order) - (math.log(delta * order)) / (order - 1)
        assert rdp.rdp_to_epsilon(spent, delta, (order,)) == (pytest.approx(epsilon), order)
        assert rdp.rdp_to_delta(spent, epsilon, (order,)) == pytest.approx(delta)
    # Integer orders 2..64 with Mironov's conversion buy exactly these steps at (3, 1e-5).
    orders = np.arange(2.0, 65)
    for q, z, steps in (
        (512 / 60000, 1.23, 4698), (2048 / 60000, 2.15, 1157), (1024 / 50000, 1.54, 1435),
    ):  # fmt: skip
        one = rdp.poisson_renyi(z, q, ADD, tuple(orders))
        least, more = (np.min(n * one + math.log(1e5) / (orders - 1)) for n in (steps, steps + 1))
        assert least <= 3 < more, steps


@RELATIONS
def test_many_orders_and_many_steps_at_once_are_one_at_a_time(relation):
    steps = [GaussianStep(z, q) for z in (0.05, 0.3, 1.0, 30.0) for q in (1e-9, 1e-3, 0.4, 1.0)]
    orders = (1.001, 1.5, 2.0, 3.0, 3.99, 4.0, 17.0, 63.5, 300.0, 1e5)
    together = FlatRun(tuple((step, 3) for step in steps)).renyi(relation, orders)
    alone = sum(
        3 * np.array([step.renyi(relation, np.asarray([a]))[0] for a in orders]) for step in steps
    )
    np.testing.assert_allclose(together, alone, rtol=1e-12)


@RELATIONS
def test_steps_that_share_a_table_are_not_below_their_definition(relation):
    steps = ((0.45, 1e-5), (1.0, 0.01), (4.0, 0.3))
    orders = (1.01, 1.3, 2.0, 3.5, 9.0)
    found = FlatRun(tuple((GaussianStep(z, q), 1) for z, q in steps)).renyi(relation, orders)
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
            refused("event=", filter_.charge, event, error=acc.BudgetExceededError)
    assert filter_.spent() <= epsilon * (1 + 1e-12)
    assert cost(acc.Composed(charged)) <= epsilon


def test_a_filter_adds_up_and_stops():
    budget, step, admitted = acc.RenyiFilter(1.0, 1e-5), acc.Gaussian(20.0), 0
    while budget.admits(step) and admitted < 60:
        budget.charge(step)
        admitted += 1
    with pytest.raises(acc.BudgetExceededError):
        budget.charge(step)
    assert 10 < admitted < 60
    total = flatten(acc.Repeated(step, admitted), ADD).renyi(ADD, budget.orders)
    spent = rdp.rdp_to_epsilon(total, 1e-5 / len(budget.orders), budget.orders)[0]
    assert budget.spent() == pytest.approx(spent)
    assert spent <= 1.0
    # A fixed order wastes less.
    event = acc.PoissonSampled(acc.Gaussian(1.23), 512 / 60_000)
    many, one = acc.RenyiFilter(3.0, 1e-5), acc.RenyiFilter(3.0, 1e-5, orders=(8.0,))
    for filter_, most in ((many, 4500), (one, 5500)):
        filter_.charge(acc.Repeated(event, most))
        assert filter_.admits(event)
        assert not filter_.admits(acc.Repeated(event, 7245 - most))
    # No noise is never admitted.
    assert not acc.RenyiFilter(1e6, 1e-5).admits(acc.NonPrivate("it peeked"))
    refused("orders=", acc.RenyiFilter, 1.0, 1e-5, orders=(1.0,))


# Renyi curves, trade-off curves and Gaussian mu are never better than the truth.

RUN = run(0.05, 1.0, 30)


def test_renyi_curves_advantages_and_trade_offs_are_the_known_ones():
    orders, gaussians = np.array([1.2, 4.0, 50.0]), acc.Repeated(acc.Gaussian(2.0), 3)
    assert acc.renyi_curve(gaussians, orders) == pytest.approx(3 * orders / 8)
    assert acc.renyi_curve(gaussians, orders, REPLACE) == pytest.approx(3 * orders / 2)
    both = acc.renyi_curve(acc.Composed([RUN, acc.Repeated(acc.ZCDP(0.1, 0.2), 2)]), orders)
    assert both == pytest.approx(acc.renyi_curve(RUN, orders) + 2 * (0.2 + 0.1 * orders))
    assert acc.renyi_curve(acc.NonPrivate("no noise"), [1.5, 4.0]).tolist() == [math.inf] * 2
    refused(r"orders\[1\]=1.0", acc.renyi_curve, RUN, [2.0, 1.0])
    bound, true = acc.advantage(acc.Gaussian(2.0)), math.erf(0.25 / math.sqrt(2))
    assert bound.lower <= true <= bound.upper
    assert bound.upper == pytest.approx(true)
    rates = np.array([0.0, 1e-3, 0.01, 0.1, 0.5, 0.9, 1.0])
    found = acc.trade_off(acc.Gaussian(1.0), rates)
    true = special.ndtr(special.ndtri(1 - rates) - 1)
    assert (found <= true * (1 + 1e-12)).all()
    assert (found >= true - 0.02).all()
    assert (acc.trade_off(acc.Gaussian(0.0), rates) == 0).all()
    refused("rates=", acc.trade_off, acc.Gaussian(1.0), [1.5])


def test_mu_is_exact_without_sampling_and_ends_at_the_full_batch():
    for relation, mu in ((ADD, 1.0), (SPECIAL, 1.0), (REPLACE, 2.0)):
        bound = acc.mu_gdp(acc.Repeated(acc.Gaussian(2.0), 4), relation)
        assert bound.lower <= mu <= bound.upper <= mu * (1 + 1e-9)
    # It grows with what is told, and ends at the full batch.
    found = [acc.mu_gdp(RUN, ADD, least).upper for least in (1e-3, 1e-12, 0.0)]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(math.sqrt(30))
    assert acc.mu_gdp(acc.Composed(())).upper == 0
    assert acc.mu_gdp(acc.Repeated(acc.Gaussian(1e6), 1), delta_min=0.5).upper <= 1e-5
    assert acc.mu_gdp(acc.NonPrivate("no noise"), delta_min=1e-6).upper == math.inf
    assert acc.mu_gdp(acc.EpsilonDelta(1.0, 1e-9)).upper == math.inf
    refused("delta_min must be", acc.mu_gdp, RUN, delta_min=-1.0)
    # A step of delta that touches the Gaussian's at both ends needs no larger mu; a bulge does.
    ends = [(e, gaussian_delta(0.8, e)) for e in (0.2, 1.4)]
    at_ends, between = (
        max(largest_mu_between(point, point) for point in ends),
        largest_mu_between(*ends),
    )
    assert at_ends == pytest.approx(0.8, rel=1e-6)
    assert between > at_ends * 1.001
    for epsilon in np.linspace(0.2, 1.4, 50).tolist():
        share = math.expm1(epsilon - 0.2) / math.expm1(1.2)
        chord = (1 - share) * ends[0][1] + share * ends[1][1]
        assert gaussian_delta(between, epsilon) >= chord


def test_the_gaussian_of_mu_is_no_better_anywhere_above_the_least_delta():
    deltas = {e: acc.delta(RUN, e).lower for e in np.linspace(0, 4, 13).tolist()}
    for smallest in (1e-4, 1e-8):
        bound = acc.mu_gdp(RUN, ADD, smallest)
        assert bound.lower <= bound.upper <= bound.lower * 1.01
        for epsilon, delta in deltas.items():
            assert delta <= max(gaussian_delta(bound.upper, epsilon), smallest), (smallest, epsilon)
    # Pure privacy has the mu of its corner.
    mu = acc.mu_gdp(acc.Laplace(1.0)).upper
    assert special.ndtr(-mu / 2) == pytest.approx(1 / (1 + math.e))
    rates = np.linspace(0, 1, 101)
    gaussian = special.ndtr(special.ndtri(1 - rates) - mu)
    lines = np.maximum(1 - math.e * rates, (1 - rates) / math.e)
    assert (gaussian <= np.maximum(lines, 0) + 1e-12).all()


# Calibrated values never exceed the budget by another way of computing, and are not wasteful ------

Q, T = 512 / 60_000, 5_000


def judged_delta(q, z, steps, epsilon, relation=ADD):
    """delta by a plain convolution of 400,000 slices of the output, extrapolated in the grid."""
    if q == 1:
        mu = (2 if relation is REPLACE else 1) * steps**0.5 / z
        tails = special.log_ndtr([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu])
        return float(np.exp(tails[0]) - np.exp(epsilon + tails[1]))
    once = ((q, z, steps),)
    coarse, fine = (
        plain(once, relation, 120.0, size, 400_000)(epsilon) for size in (1 << 18, 1 << 19)
    )
    return fine + (fine - coarse) / 3


def test_noise_steps_and_rate_are_the_least_and_the_most_that_fit():
    rows = [(3.0, Q, T, ADD), (20.0, 0.2, 50, REPLACE), (3.0, Q, T, REPLACE)]
    rows += [(0.1, 1.0, 10, relation) for relation in acc.Relation]
    for epsilon, q, steps, relation in rows:
        z = acc.calibrate_noise_multiplier(epsilon, 1e-5, q, steps, relation)
        assert judged_delta(q, z, steps, epsilon, relation) <= 1e-5 * (1 + 1e-6), (q, relation)
        assert judged_delta(q, z * (1 - 1e-4), steps, epsilon, relation) > 1e-5, (q, relation)
    steps = acc.calibrate_steps(3.0, 1e-5, Q, 1.23)
    assert judged_delta(Q, 1.23, steps, 3.0) <= 1e-5 < judged_delta(Q, 1.23, steps + 1, 3.0)
    q = acc.calibrate_sampling_prob(3.0, 1e-5, T, 1.23)
    assert judged_delta(q, 1.23, T, 3.0) <= 1e-5 * (1 + 1e-6)
    assert judged_delta(q * (1 + 1e-4), 1.23, T, 3.0) > 1e-5


def test_budgets_that_need_nothing_or_fit_nothing_and_wrong_arguments():
    assert acc.calibrate_noise_multiplier(1.0, 1e-5, 0.0, 100) == 0
    assert acc.calibrate_steps(1e-6, 1e-5, 1.0, 0.5) == 0
    assert acc.calibrate_sampling_prob(100.0, 1e-5, 1, 1.0) == 1
    assert acc.calibrate(lambda z: acc.Composed(()), 1.0, 1e-5) == pytest.approx(1e-9)
    with pytest.raises(ValueError, match=r"epsilon=1\.0: .* at 1e\+09, .* 4\.37718 is proven"):
        acc.calibrate(lambda z: acc.Composed((acc.Gaussian(z), acc.Gaussian(1.0))), 1.0, 1e-5)
    with pytest.raises(acc.UnsupportedEventError, match="ShuffledEpoch"):
        acc.calibrate(lambda z: acc.ShuffledEpoch(acc.Gaussian(z), 5), 1.0, 1e-5)
    rows = (
        ("between=.*smaller number first", {"between": (2.0, 1.0)}),
        ("between=3.0: expected two numbers", {"between": 3.0}),
        ("between must be a finite number above 0, got 0.0", {"between": (0.0, 1.0)}),
        ("between must be a whole number .* got 2.5", {"between": (1, 2.5), "whole": True}),
        ("tolerance must be .* got 0.0", {"tolerance": 0.0}),
        ("epsilon must be .* got -1.0", {"epsilon": -1.0}),
        ("delta must be .* got 1.0", {"delta": 1.0}),
        ("accountant='best'", {"accountant": "best"}),
    )
    usual = {"epsilon": 1.0, "delta": 1e-5}
    calls = [functools.partial(acc.calibrate, scheduled, **{**usual, **k}) for _, k in rows]
    all_refused(zip((words for words, _ in rows), calls, strict=True))


def scheduled(z):
    plan = schedules.decaying("exponential", 2.0, 0.1, 10, 40).times(z)
    return acc.Composed([run(0.05, level, n) for level, n in plan.levels])


@pytest.mark.parametrize(("make", "relation"), [
    (lambda z: run(0.05, z, 100), ADD), (acc.Gaussian, ADD), (scheduled, ADD),
    (lambda z: acc.Composed((run(0.05, z, 50), acc.Gaussian(10 * z))), ADD),
    (lambda z: acc.FixedSizeSampled(acc.Gaussian(z), 1_000, 50), REPLACE),
], ids=["sampled", "full batch", "a schedule", "mixed", "fixed size"])  # fmt: skip
def test_the_least_value_of_any_event(make, relation):
    found = []
    for epsilon in (0.5, 2.0):
        value = acc.calibrate(make, epsilon, 1e-5, relation)
        assert cost(make(value), relation) <= epsilon
        assert cost(make(value * (1 - 2e-4)), relation) > epsilon
        found.append(value)
    assert found[0] > found[1]


def test_any_argument_rising_or_falling_and_any_count():
    def epochs(count):
        return run(0.01, 1.0, 100 * count)

    most = acc.calibrate(epochs, 3.0, 1e-5, between=(1, 10**6), most=True, whole=True)
    assert cost(epochs(most)) <= 3 < cost(epochs(most + 1))

    def sizes(dataset_size):
        return run(64 / dataset_size, 1.0, 500)

    size = acc.calibrate(sizes, 3.0, 1e-5, between=(64, 10**9), whole=True)
    assert isinstance(size, int)
    assert cost(sizes(size)) <= 3 < cost(sizes(size - 1))
    closer = [acc.calibrate(scheduled, 3.0, 1e-5, tolerance=t) for t in (1e-2, 1e-6)]
    assert closer[1] < closer[0] < closer[1] * 1.02

    def make(count):
        return acc.Composed((acc.Gaussian(5.0), run(0.05, 1.0, count)))

    count = acc.queries.calibrate_count(make, 2.0, 1e-5)
    assert cost(make(count)) <= 2 < cost(make(count + 1))
    assert acc.queries.calibrate_count(make, 0.1, 1e-5) == 0


@pytest.mark.parametrize(("epsilon", "delta", "q", "steps"), [
    (3.0, 0.5, 0.01, 1_000), pytest.param(1e9, 1e-5, 0.01, 10**9, marks=pytest.mark.slow),
    pytest.param(3.0, 1e-5, 1e-9, 10**9, marks=pytest.mark.slow), (3.0, 1e-5, 1e-7, 10**7),
    (1e-6, 1e-30, 0.9, 100),
])  # fmt: skip
def test_corners_are_answered_by_few_evaluations(monkeypatch, epsilon, delta, q, steps):
    asked, proofs = [], []
    real = queries.epsilon

    def counted(*args, tolerance=None):
        (asked if tolerance == math.inf else proofs).append(args)
        return real(*args, tolerance=tolerance)

    monkeypatch.setattr(queries, "epsilon", counted)
    z = acc.calibrate_noise_multiplier(epsilon, delta, q, steps)
    assert len(asked) <= 30
    assert len(proofs) <= 4
    assert acc.epsilon(run(q, z, steps), delta).upper <= epsilon


@pytest.mark.parametrize("most", [False, True])
def test_estimates_lead_and_proofs_decide(monkeypatch, most):
    """Of estimates too large, too small and cut off to 0, the answer is what the proofs say."""
    proofs, ratio, least_loss = [], 1.0, 0.0

    def loss(event):
        z = event.noise_multiplier
        spent = (z if most else 1 / z) ** 1.3
        return 0.0 if spent < least_loss else spent

    def answered(event, *_, tolerance=None):
        if tolerance == math.inf:
            return acc.Bound(0.0, ratio * loss(event), math.inf)
        proofs.append(event.noise_multiplier)
        return acc.Bound(0.0, 0.0, loss(event))

    monkeypatch.setattr(queries, "_epsilon_of", answered)
    ratios = (1e-3, 0.5, 1 - 1e-5, 1 + 1e-5, 2.0, 1e3)
    for case in itertools.product(ratios, (1e-9, 3.0, 1e6), (0.0, 1.5)):
        proofs.clear()
        ratio, epsilon, least_loss = case
        value = acc.calibrate(acc.Gaussian, epsilon, 1e-5, most=most)
        assert value in proofs, case
        assert loss(acc.Gaussian(value)) <= epsilon, case
        assert loss(acc.Gaussian(value * (1 + 2e-4 if most else 1 - 2e-4))) > epsilon, case
        assert len(proofs) <= 25, case


def test_renyi_noise_is_the_least_to_a_millionth():
    """The search starts from the accountant that was asked for, and does not give up digits."""
    for epsilon, delta, q, steps, relation in (
        (1.0, 1e-6, 0.01, 128, ADD),
        (0.417, 2.2e-11, 0.0144, 38, REPLACE),
        (3.0, 1e-5, Q, T, ADD),
    ):
        z = acc.calibrate_noise_multiplier(epsilon, delta, q, steps, relation, "rdp")
        found, less = (
            acc.epsilon(run(q, noise, steps), delta, relation, "rdp").upper
            for noise in (z, z * (1 - 1e-6))
        )
        assert found <= epsilon < less, (epsilon, delta)


# Brackets of roots: both ends evaluated, and few evaluations.


def asking(f):
    """(f, the list of what it was asked)."""
    asked = []
    return (lambda x: asked.append(x) or f(x)), asked


def test_a_secant_step_moves_the_farther_end():
    for f, root, low, high in (
        (lambda x: math.exp(-x) - 0.3, -math.log(0.3), 0.0, 9.0),
        (lambda x: 2 - x**3, 2 ** (1 / 3), 0.0, 4.0),
        (lambda x: 1 / x - 5, 0.2, 0.01, 3.0),
    ):
        counted, asked = asking(f)
        low, high = bracket_decreasing(counted, low, high, rtol=1e-10)
        assert low <= root <= high
        assert high - low <= 1e-10 * high, root
        assert low in asked
        assert high in asked
        assert len(asked) <= 40, root  # moving the nearer end takes over 70


@pytest.mark.parametrize("sign", [1, -1])
def test_a_search_returns_what_was_found_within(sign):
    """Of a jump, from either side; smooth costs take a handful of evaluations."""
    ends = (1e-9, 1e9)[::sign]
    for edge in (0.3, 1e-7, 5e6):

        def jump(value, size, edge=edge):
            return math.copysign(size, sign * (edge - value))

        for size in (1.0, math.inf):
            found, _ = search(functools.partial(jump, size=size), 1.0, -1.0, ends, 1e-6)
            assert 0 <= sign * (found - edge) < 1e-4 * edge, (edge, size)
        smooth, asked = asking(lambda v, edge=edge: sign * 0.7 * math.log(edge / v))
        found, slope = search(smooth, 1.0, -1.0, ends, 1e-6)
        assert 0 <= sign * (found / edge - 1) < 2e-6, edge
        assert found in asked
        assert len(asked) <= 10, edge
        assert slope == pytest.approx(-0.7)


def test_a_search_of_whole_numbers_finds_the_last():
    for last in (1, 2, 3, 17, 7245, 10**9 + 7, 10**12):
        for power in (0.5, 3.0):
            excess, asked = asking(lambda n, a=power, b=last: a * math.log(n / (b + 0.5)))
            found, _ = search(excess, 1, -1.5, (10**12, 1), 1e-4, whole=True)
            assert isinstance(found, int)
            assert found in asked
            assert last * (1 - 1e-7) <= found <= last, power
            assert len(asked) <= 25, last
    # Nothing, everything, and noise.
    assert search(lambda v: 1.0, 1.0, -1.0, (1e-9, 1e9), 1e-6)[0] is None
    assert search(lambda n: math.inf, 1, -1.0, (10**12, 1), 1e-6, whole=True)[0] is None
    assert search(lambda v: -math.inf, 1.0, -1.0, (1e-9, 1e9), 1e-6)[0] == 1e-9
    rng = np.random.default_rng(0)
    random, asked = asking(lambda v: rng.normal())
    found, _ = search(random, 1.0, -1.0, (1e-9, 1e9), 1e-9)
    assert len(asked) <= 60
    assert found is None or found in asked
