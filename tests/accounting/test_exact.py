"""The exact accountant against known values, the definition, and the laws it must obey."""

import functools
import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp import accounting as acc
from jaxdp.accounting import contour, gaussian, queries
from jaxdp.accounting.contour import Line
from jaxdp.accounting.events import Bound
from jaxdp.accounting.flat import GaussianStep, flatten
from jaxdp.accounting.pairs import SampledGaussian
from tests.accounting.judging import ADD, REPLACE, SPECIAL, cost, largest, run
from tests.refusing import all_refused, refused

RELATIONS = pytest.mark.parametrize("relation", [ADD, REPLACE])


def test_values_known_to_seven_digits():
    for q, z, steps, epsilon in (
        (512 / 60000, 1.23, 5_000, 2.4478093), (0.01, 2.0, 40_000, 4.7357426),
        (0.01, 0.9, 1_800, 3.0635959), (0.001, 0.7, 10_000, 1.2449712),
        (0.000256, 0.6, 100_000, 1.5572681),
    ):  # fmt: skip
        bound = acc.epsilon(run(q, z, steps), 1e-5)
        assert bound.accountant == "exact"
        assert bound.estimate == pytest.approx(epsilon, abs=1e-7)
        assert bound.lower <= epsilon <= bound.upper, epsilon
        assert bound.upper - bound.lower <= 1.2e-4 * bound.upper, epsilon


@pytest.mark.parametrize(("q", "z", "steps", "delta", "relation", "epsilon"), [
    (0.2, 1.0, 50, 1e-5, ADD, 10.1279513119), (0.2, 1.0, 50, 1e-5, REPLACE, 15.4109265461),
    (0.5, 1.0, 3, 1e-3, ADD, 3.8657456811), (0.5, 1.0, 3, 1e-3, REPLACE, 5.6878215672),
    (0.01, 10.0, 1_000_000, 1e-3, ADD, 3.14871684328), (0.02, 0.8, 1000, 1e-6, ADD, 7.33694387198),
])  # fmt: skip
def test_a_known_epsilon(q, z, steps, delta, relation, epsilon):
    """By Fourier inversion of the definition with 30 digits, on a line chosen without care."""
    event = run(q, z, steps)
    found = acc.epsilon(event, delta, relation, "exact")
    assert found.estimate == pytest.approx(epsilon, rel=1e-10)
    assert epsilon * (1 - 1.2e-4) < found.lower < epsilon < found.upper < epsilon * (1 + 1.2e-4)
    renyi = acc.epsilon(event, delta, relation, "rdp")
    assert renyi.lower == 0
    assert epsilon < renyi.upper < 1.2 * epsilon


@RELATIONS
def test_full_batches_beside_sampled_steps(relation):
    """The integral and the certificate share no way of composing; the full batches dominate."""
    full = acc.Repeated(acc.Gaussian(3.0), 4)
    event = acc.Composed((full, run(0.01, 1.0, 2)))
    found = acc.epsilon(event, 1e-5, relation, "exact")
    integral = contour.epsilon(flatten(event, relation), relation, 1e-5)
    alone = cost(full, relation, "gdp")
    assert found.lower <= integral <= found.upper
    assert alone < found.lower < 1.05 * alone


def test_one_step_by_contour_and_a_full_batch_equal_the_closed_form():
    for relation in acc.Relation:
        exact, closed = (
            acc.epsilon(run(1.0, 5.0, 10), 1e-5, relation, name).estimate
            for name in ("exact", "gdp")
        )
        assert exact == pytest.approx(closed, rel=1e-9), relation
    for relation in (ADD, REPLACE):
        for q, z in ((0.3, 0.5), (0.9, 2.0), (0.5, 30.0)):
            for delta in (1e-3, 1e-12):
                closed = acc.epsilon(run(q, z, 1), delta, relation).estimate
                integral = contour.epsilon(flatten(run(q, z, 1), relation), relation, delta)
                assert integral == pytest.approx(closed, rel=1e-8), (q, z, delta)


@settings(deadline=None, max_examples=12)
@given(
    st.floats(1e-3, 0.9), st.floats(0.5, 20.0), st.integers(2, 10**5), st.floats(1e-9, 1e-2),
    st.sampled_from([ADD, REPLACE]),
)  # fmt: skip
def test_the_root_is_where_delta_says_and_nothing_is_silent(q, z, steps, delta, relation):
    event = run(q, z, steps)
    bound = acc.epsilon(event, delta, relation)
    assert 0 <= bound.lower <= bound.estimate <= bound.upper < math.inf
    if bound.upper == 0:
        assert "already below" in bound.note
    else:
        assert acc.delta(event, bound.upper, relation).lower <= delta * (1 + 1e-6)


def test_roots_that_a_fixed_cut_off_gets_wrong_or_that_are_zero():
    """q T = 1: the integrand decays slowly, and a shortened probe answered 0.861 for 0.3036."""
    bound = acc.epsilon(run(1e-3, 1.0, 1000), 2e-7)
    there = acc.delta(run(1e-3, 1.0, 1000), bound.estimate)
    assert there.estimate == pytest.approx(2e-7, rel=1e-4)
    assert there.lower <= 2e-7 <= there.upper
    # Epsilon is zero and says so where delta at zero is below the target.
    for event in (run(1e-7, 1.0, 10), run(0.01, 100.0, 10)):
        bound = acc.epsilon(event, 1e-2)
        assert bound.upper == 0
        assert "already below" in bound.note
        assert acc.delta(event, 0.0).upper <= 1e-2


def test_monotone_in_every_argument_and_relation():
    """Zero-out is add/remove with a public count; replacing moves the sum by twice as much."""
    one, special, two = (
        acc.epsilon(run(0.01, 1.0, 1000), 1e-6, relation).upper
        for relation in (ADD, SPECIAL, REPLACE)
    )
    assert one == special < two
    for relation in (ADD, REPLACE):

        @functools.cache
        def at(q=0.01, z=1.0, steps=1000, delta=1e-6, relation=relation):
            return acc.epsilon(run(q, z, steps), delta, relation).upper

        assert at(q=1e-4) < at() < at(q=0.5) < at(q=1.0), relation
        assert at(z=0.4) > at() > at(z=30.0) > at(z=300.0), relation
        assert at(steps=10) < at() < at(steps=10**7), relation
        assert at(delta=1e-15) > at() > at(delta=1e-2), relation


def test_published_runs_and_unlike_events_in_any_order():
    for q, z, steps in (
        (512 / 60000, 1.23, 7245), (2048 / 60000, 2.15, 1771), (1024 / 50000, 1.54, 2228),
    ):  # fmt: skip
        assert acc.calibrate_steps(3.0, 1e-5, q, z) == steps
    a, b, c = run(0.01, 1.0, 500), run(0.02, 2.0, 300), acc.Gaussian(6.0)
    first = acc.epsilon(acc.Composed([a, b, c]), 1e-5)
    assert first == acc.epsilon(acc.Composed([c, acc.Composed([b, a])]), 1e-5)
    assert first.accountant == "exact"
    assert first.lower > max(cost(e) for e in (a, b, c))
    assert first.upper - first.lower <= 1.2e-4 * first.upper


def test_a_tolerance_narrows_the_interval_and_the_cost_does_not_grow_with_the_steps():
    event = run(0.01, 1.0, 1000)
    usual, narrow = acc.epsilon(event, 1e-5), acc.epsilon(event, 1e-5, tolerance=2e-6)
    assert usual.lower <= narrow.lower < narrow.upper <= usual.upper
    assert narrow.upper - narrow.lower <= 2e-6 * narrow.upper < usual.upper - usual.lower
    all_refused(
        [
            ("tolerance must be", lambda wrong=wrong: acc.epsilon(event, 1e-5, tolerance=wrong))
            for wrong in (0.0, -1.0, math.nan)
        ]
    )
    # Nodes, not seconds: the line has about as many for 1e7 steps as for 1e2.
    sizes = []
    for steps in (100, 10**7):
        flat = flatten(run(0.01, 2.0, steps), ADD)
        composition, c, tables = contour.choose_order(flat, ADD, -11.5)
        epsilon = composition.saddle(tables, c)[0]
        sizes.append(contour.choose_line(composition, tables, c, epsilon, -11.5).y.size)
    assert sizes[1] <= 3 * sizes[0]


POISSON = acc.PoissonSampled(acc.Gaussian(1.0), 0.01)


def test_one_release_by_two_names():
    for one, other, relation in (
        (acc.MixtureOfGaussians(1.0, (0, 1), (0.99, 0.01)), POISSON, ADD),
        (acc.TruncatedPoisson(acc.Gaussian(1.0), 0.01, 1000, 1000), POISSON, SPECIAL),
        (acc.RandomAllocation(acc.Gaussian(6.0), 4, 4), acc.Gaussian(3.0), ADD),
        (acc.ShuffledEpoch(acc.Gaussian(3.0), 1), acc.Gaussian(3.0), REPLACE),
        (acc.FixedSizeSampled(acc.Gaussian(3.0), 10, 10), acc.Gaussian(3.0), REPLACE),
        (acc.PoissonSampled(acc.Gaussian(3.0), 1 - 1e-15), acc.Gaussian(3.0), ADD),
    ):
        first, second = (acc.epsilon(acc.Repeated(e, 4), 1e-6, relation) for e in (one, other))
        assert first.lower <= second.upper * (1 + 1e-12), one
        assert second.lower <= first.upper * (1 + 1e-12), one


# Every end of an answer must count its own error.


def test_an_error_holds_all_of_its_parts_and_a_doubtful_estimate_is_none(monkeypatch):
    def line(shorter, rounding):
        values = [np.asarray([v + 0j]) for v in (1e-5, shorter)]
        return Line(1.0, np.zeros(1), *values, 0.0, rounding, False)

    assert line(1e-5, 0.0).relative_error(0.0) < 1e-10
    assert line(1.1e-5, 0.0).relative_error(0.0) == pytest.approx(0.1)
    assert line(1e-5, 0.01).relative_error(1.0) == pytest.approx(0.01)
    event, real = run(0.2, 1.0, 50), Line.relative_error
    for doubt in (0.0, 1e-3):
        monkeypatch.setattr(Line, "relative_error", lambda *args, doubt=doubt: real(*args) + doubt)
        for ask, at in ((acc.epsilon, 1e-5), (acc.delta, 10.0)):
            # Without an estimate a proof answers.
            unproven = "no end is proven" in ask(event, at, tolerance=math.inf).note
            assert unproven == (doubt == 0), ask


def test_a_contradiction_is_an_error_that_names_both():
    low, high = Bound(1.0, 1.1, 1.2, "rdp"), Bound(1.9, 2.0, 2.1, "exact")
    with pytest.raises(ArithmeticError, match=r"exact's lower end 1\.9 and rdp's upper end 1\.2"):
        queries._tighten(high, low)
    for ends in ((1.3, 1.4), (0.8, 0.9)):
        with pytest.raises(ArithmeticError, match=r"certificate .* and the contour integral's"):
            queries._with_estimate(*ends, 1.1, True, "epsilon")
    rounded = queries._with_estimate(1.0, 1.1, 1.1 * (1 + 1e-7), True, "epsilon")
    assert rounded.estimate == 1.1
    # Bounds that agree are joined.
    loose = queries._tighten(Bound(1.0, 1.4, 1.5, "exact"), Bound(0, None, 1.2, "rdp"))
    assert (loose.lower, loose.estimate, loose.upper, loose.accountant) == (1.0, 1.2, 1.2, "rdp")
    tight = Bound(1.0, 1.1, 1.2, "exact")
    assert queries._tighten(tight, Bound(0, None, 1.5, "rdp")) == tight
    joined = queries._with_estimate(1.0, 1.1, 1.05, True, "epsilon")
    assert (joined.lower, joined.estimate, joined.upper) == (1.0, 1.05, 1.1)
    assert queries._with_estimate(1.0, 1.1, None, True, "epsilon").estimate is None
    one = queries._with_estimate(0.0, 1.1, 1.05, False, "epsilon")
    assert (one.lower, one.estimate, one.upper) == (0.0, None, 1.1)
    assert "upper bound only" in one.note


def test_nested_and_repeated_events_count_as_often_as_they_occur():
    one, other = run(0.2, 1.0, 1), run(0.1, 2.0, 2)
    both = acc.Composed((one, other, acc.Repeated(one, 3)))
    flat = flatten(acc.Repeated(acc.Repeated(both, 2), 5), ADD)
    assert dict(flat.steps) == {GaussianStep(1.0, 0.2): 40, GaussianStep(2.0, 0.1): 20}
    full = flatten(acc.Repeated(acc.Composed((acc.Gaussian(2.0), acc.Gaussian(2.0))), 8), ADD)
    assert full.steps == ((GaussianStep(0.5), 1),)
    assert acc.events.joint_gaussian([3.0, 4.0]).noise_multiplier == pytest.approx(2.4)
    assert flatten(fixed(7), REPLACE).steps == ((GaussianStep(3.0, 0.01, "fixed_size"), 7),)
    inner = acc.PoissonSampled(acc.Gaussian(1.0), 0.5)
    for outer in (acc.PoissonSampled(inner, 0.5), acc.FixedSizeSampled(inner, 10, 2)):
        refused("nested sampling", flatten, outer, REPLACE, error=acc.UnsupportedEventError)


def fixed(steps):
    return acc.Repeated(acc.FixedSizeSampled(acc.Gaussian(3.0), 1000, 10), steps)


def test_a_batch_of_nearly_all_records_costs_as_much_as_all():
    orders = (2.0, 8.0, 64.0)
    # Replacing a record moves the sum by two contributions.
    full = 0.5 * np.asarray(orders) * (2 / 3.0) ** 2
    found = GaussianStep(3.0, 0.9999, "fixed_size").renyi(REPLACE, np.asarray(orders))
    np.testing.assert_allclose(found, full, rtol=1e-2)
    ten, one = (flatten(fixed(n), REPLACE).renyi(REPLACE, orders) for n in (10, 1))
    np.testing.assert_allclose(ten, 10 * one)


def test_one_sampled_step_has_the_profile_of_its_pair_and_total_variations_add_up():
    for z, q in ((0.8, 0.3), (0.3, 0.01), (2.0, 0.999)):
        pairs = [SampledGaussian(z, q, ADD, way) for way in (False, True)]
        for epsilon in (0.0, 0.002, 0.1, 0.3, 0.7, 2.2):
            forward, reverse = (largest([pair], epsilon) for pair in pairs)
            found = gaussian.sampled_delta(z, q, ADD, epsilon)
            assert found == pytest.approx(forward, abs=1e-13), (z, q, epsilon)
            assert reverse <= forward + 1e-15, (z, q, epsilon)
    # So little noise that the steps' total variations hardly overlap; in closed form.
    for relation, apart in ((ADD, 0.9991419), (REPLACE, 1.0)):
        for share in (0.998, 1 + 1e-6):
            bound = acc.epsilon(run(1e-6, 0.15, 10), share * 10 * 1e-6 * apart, relation)
            assert (bound.upper == 0) == (share > 1), (relation, share)


# The unsampled Gaussian mechanism.


def test_the_profile_of_a_gaussian_is_that_of_the_definition_to_its_last_digits():
    """The closed form in 60 digits, which is the integral's."""
    for mu in (1e-7, 1e-3, 0.3, 1.0, 4.0, 30.0):
        for ratio in (0.0, 0.5, 3.0, 8.0):
            with mp.workdps(60):
                m, e = mp.mpf(mu), mp.mpf(mu * ratio)
                truth = mp.ncdf(m / 2 - e / m) - mp.exp(e) * mp.ncdf(-m / 2 - e / m)
            found = gaussian.gaussian_delta(mu, mu * ratio)
            assert found == pytest.approx(float(truth), rel=2e-9), (mu, ratio)
    # The profile of much noise keeps its digits.
    with mp.workdps(40):
        for ratio in (0.1, 3.0, 7.0):
            mu = mp.mpf(9e-4)
            epsilon = ratio * mu
            truth = mp.ncdf(mu / 2 - epsilon / mu)
            truth -= mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)
            found = gaussian.gaussian_delta(9e-4, float(epsilon))
            assert abs(found / truth - 1) < 2e-11, ratio


def test_ten_full_batch_steps_under_each_relation_and_by_the_central_limit():
    """Replace-one is twice the distance, because the noise multiplier is relative to ONE record."""
    event = acc.Repeated(acc.Gaussian(5.0), 10)
    assert cost(event) == pytest.approx(2.594, abs=5e-4)
    assert cost(event, SPECIAL) < 2.5945
    assert cost(event, REPLACE) == pytest.approx(5.759, abs=5e-4)
    # The central limit runs below the exact value here: an estimate, without an upper end.
    full, event = event, run(512 / 60_000, 1.23, 5_000)
    clt = acc.epsilon(event, 1e-5, accountant="clt")
    assert clt.upper == math.inf
    assert clt.estimate < acc.epsilon(event, 1e-5).lower
    assert acc.delta(event, 2.0, accountant="clt").upper == 1
    exact = acc.epsilon(full, 1e-5).estimate
    assert acc.epsilon(full, 1e-5, accountant="clt").estimate == pytest.approx(exact, rel=1e-9)
    with pytest.raises(acc.UnsupportedEventError, match="central limit"):
        acc.epsilon(event, 1e-5, REPLACE, "clt")


@given(st.floats(1e-3, 1e3), st.floats(1e-15, 0.5))
def test_epsilon_and_delta_invert_each_other(z, delta):
    bound = acc.epsilon(acc.Gaussian(z), delta)
    assert bound.lower <= bound.estimate <= bound.upper
    assert acc.delta(acc.Gaussian(z), bound.upper).estimate <= delta
    if bound.lower > 0:
        assert acc.delta(acc.Gaussian(z), bound.lower).upper >= delta
    else:
        assert "already below" in bound.note
