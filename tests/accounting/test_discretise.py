"""Losses on a grid lie above, or below, the pair that they stand for."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp.accounting import Relation, discretise
from jaxdp.accounting.base import Discrete, Unresolved
from jaxdp.accounting.canonical import Step
from jaxdp.accounting.discretise import above, below
from jaxdp.accounting.pairs import SampledGaussian

WAYS = [
    (Relation.ADD_OR_REMOVE_ONE, False),
    (Relation.ADD_OR_REMOVE_ONE, True),
    (Relation.REPLACE_ONE, False),
]


def profile(pair, epsilon):
    """delta(epsilon) of a pair, by its tails."""
    p, q = pair.tails(np.asarray([epsilon]))
    return float(p[0] - math.exp(epsilon) * q[0]), 1e-11 * float(p[0] + math.exp(epsilon) * q[0])


def atoms_profile(atoms, width, epsilon):
    """delta(epsilon) of atoms for epsilons up to their top, with all that is above it."""
    assert epsilon <= atoms.top
    loss = atoms.offset + width * atoms.index
    inside = float(atoms.mass @ np.maximum(-np.expm1(epsilon - loss), 0.0))
    return inside + atoms.over[0] - math.exp(epsilon) * atoms.over[1]


def both_ends(pair, width, low, cap, fine):
    """Checks the order of both profiles at epsilons up to the cap; returns the largest distance."""
    high, less = (make(pair, width, low, cap, fine) for make in (above, below))
    top = min(high.top, less.top)
    apart = 0.0
    for epsilon in np.linspace(low, top, 41):
        truth, error = profile(pair, float(epsilon))
        upper, lower = (atoms_profile(a, width, float(epsilon)) for a in (high, less))
        assert lower <= truth + error
        assert truth - error <= upper
        apart = max(apart, upper - lower)
    return apart


@pytest.mark.parametrize(("relation", "reverse"), WAYS)
@settings(deadline=None, max_examples=40)
@given(
    st.floats(0.2, 10.0),
    st.floats(-7.0, 0.0),
    st.integers(20, 2000),
    st.floats(0.05, 1.0),
    st.floats(1e-3, 0.05),
)
def test_profiles_lie_in_order(relation, reverse, z, log_q, points, share, fine):
    pair = SampledGaussian(Step(z, 10.0**log_q), relation, reverse)
    low, high = pair.span(1e-12)
    cap = pair.center + share * (high - pair.center)
    both_ends(pair, (high - low) / points, low, cap, fine)


@pytest.mark.parametrize(("relation", "reverse"), WAYS)
@pytest.mark.parametrize(("q", "z"), [(0.3, 0.8), (0.1, 1.0), (1.0, 2.0)])
def test_profiles_meet_as_the_grid_is_refined(relation, reverse, q, z):
    pair = SampledGaussian(Step(z, q), relation, reverse)
    low, high = pair.span(1e-12)
    coarse, fine = (both_ends(pair, (high - low) / n, low, high, 1e-4) for n in (200, 1600))
    # Second order in the width, or nearly.
    assert fine < 0.08 * coarse


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-4.0, 4.0), min_size=1, max_size=6, unique=True),
    st.lists(st.floats(1e-9, 1.0), min_size=6, max_size=6),
    st.floats(0.0, 0.3),
    st.floats(0.005, 0.5),
)
def test_profiles_of_point_masses_lie_in_order(losses, weights, infinite, width):
    loss = np.sort(np.asarray(losses))
    p = np.asarray(weights[: loss.size])
    p = p / p.sum() * (1 - infinite)
    # Q masses above 1 are those of no pair; what matters here is the profile at each epsilon.
    pair = Discrete(loss, p, infinite)
    both_ends(pair, width, float(loss[0]) - 0.1, float(loss[-1]) + 0.1, 0.02)


def test_point_masses_on_the_grid_stay_where_they_are():
    pair = Discrete(np.asarray([-1.0, 0.0, 2.0]), np.asarray([0.2, 0.5, 0.3]))
    atoms = above(pair, 0.5, -1.5, 2.0, 0.02)
    loss = atoms.offset + 0.5 * atoms.index
    for at, mass in zip(pair.loss, pair.p, strict=True):
        assert atoms.mass[np.abs(loss - at) < 0.01].sum() == pytest.approx(mass, rel=1e-12)
    assert atoms.over[0] == 0.0


def test_what_is_above_the_cap_is_rounded_outwards():
    pair = SampledGaussian(Step(1.0, 0.1), Relation.ADD_OR_REMOVE_ONE)
    for make, sign in ((above, 1), (below, -1)):
        atoms = make(pair, 0.01, pair.span(1e-9)[0], 1.0, 0.02)
        p, q = (float(v[0]) for v in pair.tails(np.asarray([atoms.top])))
        assert sign * (atoms.over[0] - p * (1 + sign * pair.rounding)) > 0
        assert sign * (q * (1 - sign * pair.rounding) - atoms.over[1]) > 0
        assert atoms.over == pytest.approx((p, q), rel=1e-11)


@pytest.mark.parametrize(("relation", "reverse"), WAYS)
def test_masses_are_rounded_outwards(relation, reverse):
    """Also by the error of the pair's own masses, here a large one."""

    class Rough(SampledGaussian):
        rounding = 1e-3

    step = Step(1.0, 0.2)
    rough, exact = (cls(step, relation, reverse) for cls in (Rough, SampledGaussian))
    low, high = exact.span(1e-12)
    for epsilon in (0.0, 0.2 * high, 0.6 * high):
        truth, _ = profile(exact, epsilon)
        p, q = (float(v[0]) for v in exact.tails(np.asarray([epsilon])))
        # Masses up to a thousandth off may move the profile by this much.
        off = 0.2e-3 * (p + math.exp(epsilon) * q)
        upper, lower = (make(rough, 1e-3, low, high, 1e-4) for make in (above, below))
        assert atoms_profile(upper, 1e-3, epsilon) >= truth + off
        assert atoms_profile(lower, 1e-3, epsilon) <= truth - 1e-3 * truth


@pytest.mark.parametrize("make", [above, below])
def test_losses_are_moved_by_the_slack_of_their_edges(make):
    class Loose(SampledGaussian):
        def slack(self, edges):
            return 0.25

    step = Step(1.0, 0.2)
    loose, tight = (cls(step, Relation.ADD_OR_REMOVE_ONE) for cls in (Loose, SampledGaussian))
    moved, still = (make(pair, 0.01, -0.2, 5.0, 1e-3) for pair in (loose, tight))
    expected = 0.25 if make is above else -0.25
    assert moved.offset - still.offset == pytest.approx(expected, abs=1e-9)
    sign = 1 if make is above else -1
    assert sign * (still.offset - (still.offset - sign * tight.slack(np.asarray([5.0])))) > 0


def test_a_merged_cell_has_no_more_than_its_mean_loss():
    p, q = np.asarray([0.3, 0.2, 0.1]), np.asarray([0.2, 0.2, 0.3])
    error = np.full(3, 1e-3)
    masses = discretise.Masses(p, q, p - q, error)
    loss = discretise._merged(masses, np.full(3, -9.0), 1e-4)
    truth = np.log(p / q)
    assert (loss < truth - 1e-3).all()
    np.testing.assert_allclose(loss, truth, atol=2e-2)
    # Masses that underflow say nothing: the cell's least loss stands for them.
    none = discretise._merged(
        discretise.Masses(p[:1], np.zeros(1), p[:1], error[:1]), np.asarray([600.0]), 1e-4
    )
    assert none[0] == 600.0


def test_grids_widen_away_from_the_point_mass_and_reach_the_end():
    for last, fine in ((1.0, 0.02), (37.4, 0.02), (5000.2, 0.02), (1e7, 0.001)):
        index = discretise._spaced(last, fine)
        steps = np.diff(index)
        assert index[0] == 0
        assert index[-1] >= last
        assert (steps >= 1).all()
        assert (steps <= np.maximum(1.0, 1.05 * fine * index[1:] + 1)).all()


@pytest.mark.parametrize("low", [-4.0, -0.2, 0.3])
def test_losses_below_the_lowest_are_raised_to_it_not_dropped(low):
    pair = SampledGaussian(Step(1.0, 1.0, "poisson"), Relation.ADD_OR_REMOVE_ONE)
    atoms = above(pair, 1e-2, low, 3.0, 0.01)
    assert atoms.mass.sum() + atoms.over[0] >= 1 - 1e-12


def test_a_grid_is_not_numbered_beyond_its_integers():
    """Was a fault: the index of a far loss wrapped round to the other end of the grid."""
    pair = SampledGaussian(Step(1e-4, 1.0, "poisson"), Relation.ADD_OR_REMOVE_ONE)
    with pytest.raises(Unresolved):
        discretise.above(pair, 1e-12, *pair.span(1e-9), 0.01)
