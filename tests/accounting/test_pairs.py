"""Masses of normal cells and of sampled Gaussian steps against sums in many digits."""

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp.accounting import Relation
from jaxdp.accounting.base import Discrete
from jaxdp.accounting.canonical import Step
from jaxdp.accounting.cells import normal_cells
from jaxdp.accounting.pairs import SampledGaussian, gaussian_pairs

WAYS = [
    (Relation.ADD_OR_REMOVE_ONE, False),
    (Relation.ADD_OR_REMOVE_ONE, True),
    (Relation.REPLACE_ONE, False),
]
steps = st.builds(Step, st.floats(0.2, 20.0), st.floats(1e-7, 1.0))


def exact_normal(left, right, mean, z):
    """The mass of [left, right], with the sign turned to where nothing cancels."""
    a, b = (mp.mpf(left) - mean) / z, (mp.mpf(right) - mean) / z
    if a > 0:
        a, b = -b, -a
    return mp.ncdf(b) - mp.ncdf(a)


@settings(deadline=None, max_examples=60)
@given(
    st.floats(-35.0, 35.0),
    st.lists(st.floats(1e-12, 5.0), min_size=1, max_size=6),
    st.floats(0.01, 50.0),
    st.sampled_from([-1.0, 0.0, 1.0]),
)
def test_normal_cells_keep_their_digits(start, widths, z, mean):
    x = np.unique(z * (start + np.concatenate([[0.0], np.cumsum(widths)])))
    found = normal_cells(x, mean, z)
    with mp.workdps(60):
        for mass, left, right in zip(found, x[:-1], x[1:], strict=True):
            truth = exact_normal(left, right, mean, z)
            if truth > 1e-290:
                assert abs(mass / truth - 1) < 4e-13


def test_normal_cells_that_do_not_end():
    found = normal_cells(np.asarray([-np.inf, -30.0, 0.0, 30.0, np.inf]), 0.0, 1.0)
    tail = float(mp.ncdf(-30))
    np.testing.assert_allclose(found, [tail, 0.5, 0.5, tail], rtol=4e-13)


@pytest.mark.parametrize(("relation", "reverse"), WAYS)
@settings(deadline=None, max_examples=15)
@given(steps, st.lists(st.floats(-0.97, 0.97), min_size=2, max_size=5, unique=True))
def test_masses_of_a_step_are_those_of_outputs_that_are_nearly_the_edges(
    relation, reverse, step, shares
):
    pair = SampledGaussian(step, relation, reverse)
    low, high = pair.span(1e-12)
    edges = np.unique([low + (high - low) * (0.5 + 0.5 * s) for s in shares])
    masses, slack = pair.masses(edges), pair.slack(edges)
    assert all(map(np.array_equal, pair.cells(edges), masses[:2]))
    assert slack <= 1e-10 * max(1.0, np.abs(edges).max())
    x = pair.output(-edges if reverse else edges)
    with mp.workdps(50):
        for edge, at in zip(edges, x, strict=True):
            assert abs(exact_loss(step, relation, mp.mpf(at)) * (-1 if reverse else 1) - edge) <= (
                slack
            )
        for i, (p, q, gain, error) in enumerate(zip(*masses, strict=True)):
            ends = sorted(x[i : i + 2])
            truth = exact_masses(step, relation, *ends)[:: -1 if reverse else 1]
            if min(truth) > 1e-280:
                assert abs(p / truth[0] - 1) <= pair.rounding + 2e-15
                assert abs(q / truth[1] - 1) <= pair.rounding + 2e-15
                assert abs(gain - (truth[0] - truth[1])) <= error * (1 + 1e-2)


def exact_output(step, relation, loss):
    """The output of a forward loss, by bisection."""
    low, high = mp.mpf(-(10**7)), mp.mpf(10**7)
    for _ in range(150):
        x = (low + high) / 2
        low, high = (x, high) if exact_loss(step, relation, x) < loss else (low, x)
    return low


def exact_loss(step, relation, x):
    q, z = mp.mpf(step.sampling_prob), mp.mpf(step.noise_multiplier)

    def ratio(at):
        return mp.log(1 - q + q * mp.exp((at - mp.mpf(1) / 2) / z**2))

    return ratio(x) - ratio(-x) if relation is Relation.REPLACE_ONE else ratio(x)


def exact_masses(step, relation, left, right):
    q, z = mp.mpf(step.sampling_prob), mp.mpf(step.noise_multiplier)
    base, present = (exact_normal(left, right, mean, z) for mean in (0, 1))
    absent = exact_normal(left, right, -1, z) if relation is Relation.REPLACE_ONE else base
    return (1 - q) * base + q * present, (1 - q) * base + q * absent


@pytest.mark.parametrize(("relation", "reverse"), WAYS)
@pytest.mark.parametrize(("q", "z"), [(1.0, 2.0), (0.3, 0.5), (1e-4, 1.0), (0.01, 8.0)])
def test_tails_are_those_of_the_definition(relation, reverse, q, z):
    pair = SampledGaussian(Step(z, q), relation, reverse)
    low, high = pair.span(1e-9)
    losses = np.linspace(low, high, 7)[1:-1]
    first, second = pair.tails(losses)
    with mp.workdps(40):
        for loss, p, other in zip(losses, first, second, strict=True):
            x = exact_output(pair.step, relation, -loss if reverse else loss)
            ends = (-mp.inf, x) if reverse else (x, mp.inf)
            truth = exact_masses(pair.step, relation, *ends)
            truth = truth[::-1] if reverse else truth
            assert p == pytest.approx(float(truth[0]), rel=1e-9)
            assert other == pytest.approx(float(truth[1]), rel=1e-9)
    whole = pair.cells(np.asarray([-np.inf, *losses, np.inf]))
    assert [float(m.sum()) for m in whole] == pytest.approx([1, 1], rel=1e-12)
    np.testing.assert_allclose(np.cumsum(whole[0][::-1])[::-1][1:], first, rtol=1e-9)


def test_a_span_leaves_about_the_tail_outside():
    pairs = gaussian_pairs(Step(1.0, 0.01), Relation.ADD_OR_REMOVE_ONE)
    assert len(pairs) == 2
    assert len(gaussian_pairs(Step(1.0, 0.01), Relation.REPLACE_ONE)) == 1
    for pair in (*pairs, *gaussian_pairs(Step(1.0, 0.01), Relation.REPLACE_ONE)):
        low, high = pair.span(1e-9)
        inside = pair.cells(np.asarray([-np.inf, low, high, np.inf]))[0]
        assert inside[0] <= 3e-9
        assert inside[2] <= 3e-9
        assert low <= pair.center <= high


def test_finitely_many_losses_are_counted_where_they_lie():
    """Cells hold their right edge, tails do not hold their loss."""
    pair = Discrete(np.asarray([-1.0, 0.0, 2.0]), np.asarray([0.2, 0.5, 0.2]), 0.1)
    p, q = pair.cells(np.asarray([-1.0, 0.0, 1.0, 2.0]))
    np.testing.assert_array_equal(p, [0.5, 0.0, 0.2])
    np.testing.assert_allclose(q, [0.5, 0.0, 0.2 * np.exp(-2)])
    p, q = pair.tails(np.asarray([2.0, 1.9, -1.0, -1.1]))
    np.testing.assert_allclose(p, [0.1, 0.3, 0.8, 1.0])
    np.testing.assert_allclose(q[:2], [0.0, 0.2 * np.exp(-2)])
    assert pair.center == 0.0
    assert pair.rounding >= 7 * 2.0**-52
