"""The exact accountant against known values, the definition, and the laws it must obey."""

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp import accounting as acc
from jaxdp.accounting import certificate, estimate, kinds
from jaxdp.accounting.canonical import flatten

ADD, REPLACE, SPECIAL = (
    acc.Relation.ADD_OR_REMOVE_ONE,
    acc.Relation.REPLACE_ONE,
    acc.Relation.REPLACE_SPECIAL,
)


def run(q, z, steps):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)


@pytest.mark.parametrize(
    ("q", "z", "steps", "epsilon"),
    [
        (512 / 60000, 1.23, 5_000, 2.4478093),
        (0.01, 2.0, 40_000, 4.7357426),
        (0.01, 0.9, 1_800, 3.0635959),
        (0.001, 0.7, 10_000, 1.2449712),
        (0.000256, 0.6, 100_000, 1.5572681),
    ],
)
def test_values_known_to_seven_digits(q, z, steps, epsilon):
    bound = acc.epsilon(run(q, z, steps), 1e-5)
    assert bound.accountant == "exact"
    assert bound.estimate == pytest.approx(epsilon, abs=1e-7)
    assert bound.lower <= epsilon <= bound.upper
    assert bound.upper - bound.lower <= 1.2e-4 * bound.upper


def delta_from_definition(q, z, steps, epsilon, relation, reverse=False):
    """The tail of the loss by Fourier inversion with 40 digits, on a line chosen without care.

    The moments are trapezoid sums over the output, the line is at real part c = 1/2 whatever the
    saddle point: nothing is shared with the code under test but the identity itself.
    """
    with mp.workdps(40):
        q, z, epsilon, c = mp.mpf(q), mp.mpf(z), mp.mpf(epsilon), mp.mpf(1) / 2
        width = min(z / 5, z * z / 5)
        nodes = [width * k for k in range(int(-11 * z / width), int((11 * z + 2) / width) + 1)]

        def ratio(x):
            return mp.log(1 - q + q * mp.exp((x - mp.mpf(1) / 2) / z**2))

        weights, losses = [], []
        for x in nodes:
            first = mp.npdf(x, 0, z) * width
            loss = ratio(x) - (ratio(-x) if relation is REPLACE else 0)
            if not reverse:
                first *= mp.exp(ratio(x))
            else:
                loss = -loss
            weights.append(first)
            losses.append(loss)
        step = 2 * mp.pi / (120 / c)
        start = [w * mp.exp(c * loss) for w, loss in zip(weights, losses, strict=True)]
        turn = [mp.expj(step * loss) for loss in losses]
        total, peak = mp.mpf(0), None
        for k in range(4000):
            s = mp.mpc(c, k * step)
            moment = mp.fsum(start)
            term = moment**steps * mp.exp(-s * epsilon) / (s * (s + 1))
            total += term.real * (mp.mpf(1) / 2 if k == 0 else 1)
            peak = peak or abs(term)
            if abs(term) < 1e-26 * peak:
                break
            start = [w * t for w, t in zip(start, turn, strict=True)]
        return total * step / mp.pi


@pytest.mark.parametrize(
    ("q", "z", "steps", "delta", "relation"),
    [
        (0.2, 1.0, 50, 1e-5, ADD),
        (0.02, 0.8, 1000, 1e-6, ADD),
        (0.2, 1.0, 50, 1e-5, REPLACE),
        (0.01, 10.0, 1_000_000, 1e-3, ADD),
    ],
)
def test_epsilon_satisfies_the_definition(q, z, steps, delta, relation):
    bound = acc.epsilon(run(q, z, steps), delta, relation)
    ways = (False,) if relation is REPLACE else (False, True)
    truth = max(delta_from_definition(q, z, steps, bound.estimate, relation, way) for way in ways)
    assert float(truth) == pytest.approx(delta, rel=1e-8)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize(
    ("q", "z", "steps", "delta"),
    [
        (512 / 60000, 1.23, 5000, 1e-5),
        (0.01, 2.0, 1000, 1e-5),
        (0.5, 1.0, 3, 1e-18),
        (0.1, 0.3, 10, 1e-5),
    ],
)
def test_certified_bounds_enclose_the_exact_value(q, z, steps, delta, relation):
    """The integral and the certificate compose in ways that share nothing but the loss."""
    flat = flatten(run(q, z, steps), relation)
    integral = estimate.epsilon(flat, relation, delta)
    lower, upper = certificate.epsilon_bounds(
        kinds.directions(flat, relation, math.log(delta), 9e-5), None
    )
    assert lower <= integral <= upper
    assert upper - lower <= 1.2e-4 * upper
    assert lower <= acc.epsilon(run(q, z, steps), delta, relation, "rdp").upper


@pytest.mark.parametrize("relation", list(acc.Relation))
def test_a_full_batch_equals_the_closed_form(relation):
    event = run(1.0, 5.0, 10)
    assert acc.epsilon(event, 1e-5, relation, "exact").estimate == pytest.approx(
        acc.epsilon(event, 1e-5, relation, "gdp").estimate, rel=1e-9
    )


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize(("q", "z"), [(0.3, 0.5), (0.9, 2.0), (0.5, 30.0)])
@pytest.mark.parametrize("delta", [1e-3, 1e-12])
def test_one_step_by_contour_equals_the_closed_form(relation, q, z, delta):
    closed = acc.epsilon(run(q, z, 1), delta, relation)
    contour = estimate.epsilon(flatten(run(q, z, 1), relation), relation, delta)
    assert contour == pytest.approx(closed.estimate, rel=1e-8)


@settings(deadline=None, max_examples=20)
@given(
    st.floats(1e-3, 0.9),
    st.floats(0.5, 20.0),
    st.integers(2, 10**5),
    st.floats(1e-9, 1e-2),
    st.sampled_from([ADD, REPLACE]),
)
def test_the_root_is_where_delta_says_and_nothing_is_silent(q, z, steps, delta, relation):
    event = run(q, z, steps)
    bound = acc.epsilon(event, delta, relation)
    assert 0 <= bound.lower <= bound.estimate <= bound.upper < math.inf
    if bound.upper == 0:
        assert "already below" in bound.note
    else:
        again = acc.delta(event, bound.upper, relation)
        assert again.lower <= delta * (1 + 1e-6)


def test_a_root_that_a_fixed_cut_off_gets_wrong():
    """q T = 1: the integrand decays slowly, and a shortened probe answered 0.861 for 0.3036."""
    bound = acc.epsilon(run(1e-3, 1.0, 1000), 2e-7)
    there = acc.delta(run(1e-3, 1.0, 1000), bound.estimate)
    assert there.estimate == pytest.approx(2e-7, rel=1e-4)
    assert there.lower <= 2e-7 <= there.upper


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_monotone_in_every_argument(relation):
    def at(q=0.01, z=1.0, steps=1000, delta=1e-6):
        return acc.epsilon(run(q, z, steps), delta, relation).upper

    assert np.all(np.diff([at(q=q) for q in (1e-4, 1e-3, 0.01, 0.1, 0.5, 1.0)]) > 0)
    assert np.all(np.diff([at(z=z) for z in (0.4, 0.6, 1.0, 3.0, 30.0, 300.0)]) < 0)
    assert np.all(np.diff([at(steps=n) for n in (10, 100, 1000, 10**5, 10**7)]) > 0)
    assert np.all(np.diff([at(delta=d) for d in (1e-15, 1e-12, 1e-9, 1e-5, 1e-2)]) < 0)


def test_relations_are_ordered():
    """Zero-out is add/remove with a public count; replacing moves the sum by twice as much."""
    event = run(0.01, 1.0, 1000)
    one, special, two = (acc.epsilon(event, 1e-6, r).upper for r in (ADD, SPECIAL, REPLACE))
    assert one == special < two


def test_steps_of_the_published_runs_by_exact_accounting():
    for q, z, steps in (
        (512 / 60000, 1.23, 7245),
        (2048 / 60000, 2.15, 1771),
        (1024 / 50000, 1.54, 2228),
    ):
        assert acc.calibrate_steps(3.0, 1e-5, q, z) == steps


def test_unlike_events_compose_in_any_order_and_with_full_batches():
    a, b, c = run(0.01, 1.0, 500), run(0.02, 2.0, 300), acc.Gaussian(6.0)
    first = acc.epsilon(acc.Composed([a, b, c]), 1e-5)
    second = acc.epsilon(acc.Composed([c, acc.Composed([b, a])]), 1e-5)
    assert first == second
    assert first.accountant == "exact"
    assert first.lower > max(acc.epsilon(e, 1e-5).upper for e in (a, b, c))
    assert first.upper - first.lower <= 1.2e-4 * first.upper


def test_epsilon_is_zero_and_says_so_when_delta_at_zero_is_below_the_target():
    for event in (run(1e-7, 1.0, 10), run(0.01, 100.0, 10)):
        bound = acc.epsilon(event, 1e-2)
        assert bound.upper == 0
        assert "already below" in bound.note
        assert acc.delta(event, 0.0).upper <= 1e-2


def test_the_cost_does_not_grow_with_the_number_of_steps():
    """Nodes, not seconds: the line has about as many for 1e7 steps as for 1e2."""
    sizes = []
    for steps in (100, 10**7):
        composition = estimate.composition(flatten(run(0.01, 2.0, steps), ADD), ADD, -11.5)
        sizes.append(estimate.settle(composition, 1e-5)[0].y.size)
    assert sizes[1] <= 3 * sizes[0]


def test_a_tolerance_narrows_the_interval():
    event = run(0.01, 1.0, 1000)
    usual, narrow = acc.epsilon(event, 1e-5), acc.epsilon(event, 1e-5, tolerance=2e-6)
    assert usual.lower <= narrow.lower < narrow.upper <= usual.upper
    assert narrow.upper - narrow.lower <= 2e-6 * narrow.upper < usual.upper - usual.lower
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="tolerance="):
            acc.epsilon(event, 1e-5, tolerance=wrong)
