"""Short runs whose epsilon is known, and every end of an answer that must count its own error.

The values are those that `test_exact.py` finds from the definition, in many digits.
"""

import math

import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp.accounting import accountants, estimate, gaussian, rdp, single
from jaxdp.accounting.bounds import Bound
from jaxdp.accounting.canonical import Step, flatten
from jaxdp.accounting.contour import Line
from jaxdp.accounting.pairs import SampledGaussian

ADD, REPLACE = acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE
KNOWN = [
    (0.2, 1.0, 50, 1e-5, ADD, 10.1279513119),
    (0.2, 1.0, 50, 1e-5, REPLACE, 15.4109265461),
    (0.5, 1.0, 3, 1e-3, ADD, 3.8657456811),
    (0.5, 1.0, 3, 1e-3, REPLACE, 5.6878215672),
]


def run(q, z, steps):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)


@pytest.mark.parametrize(("q", "z", "steps", "delta", "relation", "epsilon"), KNOWN)
def test_a_known_epsilon(q, z, steps, delta, relation, epsilon):
    event = run(q, z, steps)
    found = acc.epsilon(event, delta, relation, "exact")
    assert found.estimate == pytest.approx(epsilon, rel=1e-10)
    assert epsilon * (1 - 1.2e-4) < found.lower < epsilon < found.upper < epsilon * (1 + 1.2e-4)
    renyi = acc.epsilon(event, delta, relation, "rdp")
    assert renyi.lower == 0
    assert epsilon < renyi.upper < 1.2 * epsilon


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_full_batches_beside_sampled_steps(relation):
    """The integral and the certificate share no way of composing; the full batches dominate."""
    full = acc.Repeated(acc.Gaussian(3.0), 4)
    event = acc.Composed((full, run(0.01, 1.0, 2)))
    found = acc.epsilon(event, 1e-5, relation, "exact")
    integral = estimate.epsilon(flatten(event, relation), relation, 1e-5)
    alone = acc.epsilon(full, 1e-5, relation, "gdp").upper
    assert found.lower <= integral <= found.upper
    assert alone < found.lower < 1.05 * alone


def test_the_error_of_an_integral_holds_all_of_its_parts():
    def line(shorter, rounding):
        values = [np.asarray([v + 0j]) for v in (1e-5, shorter)]
        return Line(1.0, np.zeros(1), *values, 0.0, rounding, False)

    assert line(1e-5, 0.0).doubt(0.0) < 1e-10
    assert line(1.1e-5, 0.0).doubt(0.0) == pytest.approx(0.1)
    assert line(1e-5, 0.01).doubt(1.0) == pytest.approx(0.01)


@pytest.mark.parametrize("doubt", [0.0, 1e-3])
def test_an_estimate_that_is_not_good_enough_is_none(monkeypatch, doubt):
    flat = flatten(run(0.2, 1.0, 50), ADD)
    real = Line.doubt
    monkeypatch.setattr(Line, "doubt", lambda *args: real(*args) + doubt)
    for found in (
        accountants.quick_epsilon(flat, ADD, 1e-5),
        accountants.quick_delta(flat, ADD, 10.0),
    ):
        assert (found is None) == (doubt > 0)


def test_a_contradiction_is_an_error_that_names_both():
    low, high = Bound(1.0, 1.1, 1.2, "rdp"), Bound(1.9, 2.0, 2.1, "exact")
    with pytest.raises(ArithmeticError, match=r"exact's lower end 1\.9 and rdp's upper end 1\.2"):
        accountants._tighter(high, lambda: low)
    for ends in ((1.3, 1.4), (0.8, 0.9)):
        with pytest.raises(ArithmeticError, match=r"certificate .* and the contour integral's"):
            accountants._joined(*ends, 1.1, True, "epsilon")
    rounded = accountants._joined(1.0, 1.1, 1.1 * (1 + 1e-7), True, "epsilon")
    assert rounded.estimate == 1.1


def test_bounds_that_agree_are_joined():
    loose = accountants._tighter(Bound(1.0, 1.4, 1.5, "exact"), lambda: Bound(0, None, 1.2, "rdp"))
    assert (loose.lower, loose.estimate, loose.upper, loose.accountant) == (1.0, 1.2, 1.2, "rdp")
    tight = Bound(1.0, 1.1, 1.2, "exact")
    assert accountants._tighter(tight, lambda: Bound(0, None, 1.5, "rdp")) == tight
    joined = accountants._joined(1.0, 1.1, 1.05, True, "epsilon")
    assert (joined.lower, joined.estimate, joined.upper) == (1.0, 1.05, 1.1)
    assert accountants._joined(1.0, 1.1, None, True, "epsilon").estimate is None
    one = accountants._joined(0.0, 1.1, 1.05, False, "epsilon")
    assert (one.lower, one.estimate, one.upper) == (0.0, None, 1.1)
    assert "upper bound only" in one.note


def test_nested_and_repeated_events_count_as_often_as_they_occur():
    one, other = run(0.2, 1.0, 1), run(0.1, 2.0, 2)
    both = acc.Composed((one, other, acc.Repeated(one, 3)))
    flat = flatten(acc.Repeated(acc.Repeated(both, 2), 5), ADD)
    assert dict(flat.steps) == {Step(1.0, 0.2): 40, Step(2.0, 0.1): 20}
    full = flatten(acc.Repeated(acc.Composed((acc.Gaussian(2.0), acc.Gaussian(2.0))), 8), ADD)
    assert full.steps == ((Step(0.5), 1),)


@pytest.mark.parametrize("order", [1.5, 2.0, 20.0])
def test_the_conversions_are_the_printed_ones(order):
    """Canonne, Kamath and Steinke 2020, Proposition 12, and Mironov 2017, Proposition 3."""
    spent, delta, orders = np.asarray([0.7]), 1e-5, (order,)
    improved = 0.7 + math.log((order - 1) / order) - (math.log(delta * order)) / (order - 1)
    plain = 0.7 + math.log(1 / delta) / (order - 1)
    for name, epsilon in (("improved", improved), ("mironov", plain)):
        assert rdp.rdp_to_epsilon(spent, delta, orders, name) == (pytest.approx(epsilon), order)
        assert rdp.rdp_to_delta(spent, epsilon, orders, name) == pytest.approx(delta)


def test_a_batch_of_nearly_all_records_costs_as_much_as_all():
    orders = np.asarray([2.0, 8.0, 64.0])
    full = 0.5 * orders * (2 / 3.0) ** 2  # replacing a record moves the sum by two contributions
    found = rdp.step_rdp(Step(3.0, 0.9999, "fixed_size"), REPLACE, tuple(orders))
    np.testing.assert_allclose(found, full, rtol=1e-2)
    twice = rdp.run_rdp(flatten(fixed(10), REPLACE), REPLACE, tuple(orders))
    once = rdp.run_rdp(flatten(fixed(1), REPLACE), REPLACE, tuple(orders))
    np.testing.assert_allclose(twice, 10 * once)


def fixed(steps):
    return acc.Repeated(acc.FixedSizeSampled(acc.Gaussian(3.0), 1000, 10), steps)


@pytest.mark.parametrize("ratio", [0.1, 3.0, 7.0])
def test_the_profile_of_much_noise_keeps_its_digits(ratio):
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(40):
        mu = mpmath.mpf(9e-4)
        epsilon = ratio * mu
        truth = mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(
            -mu / 2 - epsilon / mu
        )
        found = gaussian.gaussian_delta(9e-4, float(epsilon))
        assert abs(found / truth - 1) < 2e-11


@pytest.mark.parametrize(("z", "q"), [(0.8, 0.3), (0.3, 0.01), (2.0, 0.999)])
def test_one_sampled_step_has_the_profile_of_its_pair_and_the_reverse_no_larger_one(z, q):
    step = Step(z, q)
    for epsilon in (0.0, 0.002, 0.1, 0.3, 0.7, 2.2):
        forward, reverse = (
            float(p[0] - math.exp(epsilon) * other[0])
            for way in (False, True)
            for p, other in (SampledGaussian(step, ADD, way).tails(np.asarray([epsilon])),)
        )
        assert single.single_delta(step, ADD, epsilon) == pytest.approx(forward, abs=1e-13)
        assert reverse <= forward + 1e-15


def test_releases_of_one_draw_and_rates_of_a_fixed_size():
    assert acc.events.joint_gaussian([3.0, 4.0]).noise_multiplier == pytest.approx(2.4)
    assert flatten(fixed(7), REPLACE).steps == ((Step(3.0, 0.01, "fixed_size"), 7),)
    inner = acc.PoissonSampled(acc.Gaussian(1.0), 0.5)
    for outer in (acc.PoissonSampled(inner, 0.5), acc.FixedSizeSampled(inner, 10, 2)):
        with pytest.raises(acc.UnsupportedEventError, match="nested sampling"):
            flatten(outer, REPLACE)


def test_the_total_variation_is_that_of_every_step():
    for relation, apart in ((ADD, 0.3829249225), (REPLACE, 0.6826894921)):
        found = single.total_variation(flatten(run(0.01, 1.0, 10), relation), relation)
        assert found == pytest.approx(10 * 0.01 * apart)


def test_a_filter_adds_up_and_stops():
    budget, step = acc.RenyiFilter(1.0, 1e-5), acc.Gaussian(20.0)
    admitted = 0
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
