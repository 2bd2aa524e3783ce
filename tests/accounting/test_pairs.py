"""Pairs against sums in many digits, and their losses on a grid above or below them."""

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp import accounting as acc
from jaxdp.accounting import grid
from jaxdp.accounting.events import Unresolved
from jaxdp.accounting.flat import GaussianStep
from jaxdp.accounting.grid import dominated_atoms, dominating_atoms
from jaxdp.accounting.pairs import (
    BatchGaussian,
    Branches,
    Discrete,
    Masses,
    SampledGaussian,
    discrete_pair,
    normal_cells,
)
from jaxdp.accounting.rdp import poisson_renyi
from tests.accounting.judging import ADD, REPLACE, profile

DIRECTIONS = [(ADD, False), (ADD, True), (REPLACE, False)]
WAYS = pytest.mark.parametrize(("relation", "reverse"), DIRECTIONS)
steps = st.tuples(st.floats(0.2, 20.0), st.floats(1e-7, 1.0))


def exact_normal(left, right, mean, z):
    """The mass of [left, right], with the sign turned to where nothing cancels."""
    a, b = (mp.mpf(left) - mean) / z, (mp.mpf(right) - mean) / z
    if a > 0:
        a, b = -b, -a
    return mp.ncdf(b) - mp.ncdf(a)


@settings(deadline=None, max_examples=60)
@given(
    st.floats(-35.0, 35.0), st.lists(st.floats(1e-12, 5.0), min_size=1, max_size=6),
    st.floats(0.01, 50.0), st.sampled_from([-1.0, 0.0, 1.0]),
)  # fmt: skip
def test_normal_cells_keep_their_digits(start, widths, z, mean):
    x = np.unique(z * (start + np.concatenate([[0.0], np.cumsum(widths)])))
    found = normal_cells(x, mean, z)
    with mp.workdps(60):
        for mass, left, right in zip(found, x[:-1], x[1:], strict=True):
            truth = exact_normal(left, right, mean, z)
            if truth > 1e-290:
                assert abs(mass / truth - 1) < 4e-13


@WAYS
@settings(deadline=None, max_examples=15)
@given(steps, st.lists(st.floats(-0.97, 0.97), min_size=2, max_size=5, unique=True))
def test_masses_of_a_step_are_those_of_outputs_that_are_nearly_the_edges(
    relation, reverse, step, shares
):
    pair, sign = SampledGaussian(*step, relation, reverse), -1 if reverse else 1
    low, high = pair.span(1e-12)
    edges = np.unique([low + (high - low) * (0.5 + 0.5 * s) for s in shares])
    masses, slack = pair.masses(edges), pair.slack(edges)
    assert slack <= 1e-10 * max(1.0, np.abs(edges).max())
    x = pair.output(sign * edges)
    with mp.workdps(50):
        for edge, at in zip(edges, x, strict=True):
            assert abs(sign * exact_loss(step, relation, mp.mpf(at)) - edge) <= slack
        for i, (p, q, gain, error) in enumerate(zip(*masses[:4], strict=True)):
            truth = exact_masses(step, relation, *sorted(x[i : i + 2]))[::sign]
            if min(truth) > 1e-280:
                assert abs(p / truth[0] - 1) <= pair.rounding + 2e-15
                assert abs(q / truth[1] - 1) <= pair.rounding + 2e-15
                assert abs(gain - (truth[0] - truth[1])) <= error * (1 + 1e-2)


def exact_loss(step, relation, x):
    z, q = map(mp.mpf, step)

    def ratio(at):
        return mp.log(1 - q + q * mp.exp((at - mp.mpf(1) / 2) / z**2))

    return ratio(x) - ratio(-x) if relation is REPLACE else ratio(x)


def exact_masses(step, relation, left, right):
    z, q = map(mp.mpf, step)
    base, present = (exact_normal(left, right, mean, z) for mean in (0, 1))
    absent = exact_normal(left, right, -1, z) if relation is REPLACE else base
    return (1 - q) * base + q * present, (1 - q) * base + q * absent


@WAYS
def test_tails_are_sums_of_cells(relation, reverse):
    for q, z in ((1.0, 2.0), (0.3, 0.5), (1e-4, 1.0), (0.01, 8.0)):
        pair = SampledGaussian(z, q, relation, reverse)
        losses = np.linspace(*pair.span(1e-9), 7)[1:-1]
        for cells, beyond in zip(
            pair.masses(np.asarray([-np.inf, *losses, np.inf]))[:2], pair.tails(losses), strict=True
        ):
            assert float(cells.sum()) == pytest.approx(1, rel=1e-12), (q, z)
            np.testing.assert_allclose(np.cumsum(cells[::-1])[::-1][1:], beyond, rtol=1e-9)


def test_a_span_leaves_about_the_tail_outside():
    pairs = [GaussianStep(1.0, 0.01).pairs(relation, True) for relation in (ADD, REPLACE)]
    assert [len(of) for of in pairs] == [2, 1]
    for pair in sum(pairs, ()):
        low, high = pair.span(1e-9)
        inside = pair.masses(np.asarray([-np.inf, low, high, np.inf])).p
        assert max(inside[0], inside[2]) <= 3e-9
        assert low <= pair.center <= high
    pair = BatchGaussian(0.01, 0.7, (2, 1, 1))
    low, high = pair.span(1e-9)
    assert 1e-11 < pair.tails(np.asarray([high]))[0][0] < 1e-8
    assert pair.masses(np.asarray([-np.inf, low])).p[0] < 1e-8


def test_finitely_many_losses_are_counted_where_they_lie():
    """Cells hold their right edge, tails do not hold their loss."""
    pair = Discrete(np.asarray([-1.0, 0.0, 2.0]), np.asarray([0.2, 0.5, 0.2]), 0.1)
    p, q, *_ = pair.masses(np.asarray([-1.0, 0.0, 1.0, 2.0]))
    np.testing.assert_array_equal(p, [0.5, 0.0, 0.2])
    np.testing.assert_allclose(q, [0.5, 0.0, 0.2 * np.exp(-2)])
    p, q = pair.tails(np.asarray([2.0, 1.9, -1.0, -1.1]))
    np.testing.assert_allclose(p, [0.1, 0.3, 0.8, 1.0])
    np.testing.assert_allclose(q[:2], [0.0, 0.2 * np.exp(-2)])
    assert pair.center == 0.0
    assert pair.rounding >= 7 * 2.0**-52
    # Cells of a normal law that do not end.
    found = normal_cells(np.asarray([-np.inf, -30.0, 0.0, 30.0, np.inf]), 0.0, 1.0)
    tail = float(mp.ncdf(-30))
    np.testing.assert_allclose(found, [tail, 0.5, 0.5, tail], rtol=4e-13)


# Before: halved masses of randomized response had an epsilon below its own, and a Q that weighs e^3
# had epsilon 0.
def test_masses_that_are_no_law_are_refused():
    for loss, p, infinite in (
        ([-1.0, 1.0], [0.135, 0.365], 0.0), ([-1.0, 1.0], [0.9, 0.9], 0.0), ([-3.0], [1.0], 0.0),
        ([-1.0, 1.0], [-0.5, 1.5], 0.0), ([1.0, -1.0], [0.5, 0.5], 0.0),
        ([-1.0, np.inf], [0.5, 0.5], 0.0), ([-1.0, 1.0], [np.nan, 0.5], 0.0),
        ([-1.0, 1.0], [0.2, 0.7], 0.2),
    ):  # fmt: skip
        for upper in (True, False):
            with pytest.raises(ValueError, match="expected"):
                discrete_pair(np.asarray(loss), np.asarray(p), upper, infinite)
    p = 0.9 / (1 + np.exp(-1)) * np.asarray([np.exp(-1), 1])
    assert discrete_pair(np.asarray([-1.0, 1.0]), p, True, 0.1).infinite == 0.1
    for epsilon in (0.0, 1.0, 700.0):
        found = acc.epsilon(acc.EpsilonDelta(epsilon, 1e-7), 1e-5).upper
        assert found <= epsilon * (1 + 1e-5)


EPSILONS = np.asarray([-1.0, -0.1, -1e-3, 0.0, 1e-3, 0.1, 0.5, 2.0])


def numeric(k, z, means, epsilons, near=0.0):
    """Profile of (1-k) A + k B against (1-k) A + k C, by the trapezoid rule; a share of A is at 0."""
    x = np.linspace(-3 - 12 * z, 3 + 12 * z, 200_001)
    a, b, c = (np.exp(-0.5 * ((x - m) / z) ** 2) / z / np.sqrt(2 * np.pi) for m in means)
    a = (1 - near) * a + near * np.exp(-0.5 * (x / z) ** 2) / z / np.sqrt(2 * np.pi)
    p, q = (1 - k) * a + k * b, (1 - k) * a + k * c
    return np.asarray([np.maximum(p - np.exp(e) * q, 0).sum() * (x[1] - x[0]) for e in epsilons])


@pytest.mark.parametrize(
    ("distances", "above", "below"),
    [
        ((1, 0, 1), (0, 1, 0), (0, 1, 0)), ((0, 1, 1), (0, 0, 1), (0, 0, 1)),
        ((1, 1, 2), (0, 1, -1), (0, 1, -1)), ((2, 2, 2), (-1, 1, -1), (1, 1, -1)),
        ((2, 1, 1), (-1, 1, 0), (1, 1, 0)), ((1, 2, 1), (1, 0, 1), (-1, 0, 1)),
    ],
)  # fmt: skip
def test_the_profile_of_a_mixture_is_that_of_the_worst_means(distances, above, below):
    """Means of A, B and C that attain it for epsilon >= 0, and for epsilon <= 0."""
    for k, z, near in ((0.3, 0.8, 0.0), (0.01, 2.0, 0.0), (1.0, 1.0, 0.0), (0.3, 0.8, 0.4)):
        if near and max(distances[:2]) < 2:
            continue
        found = profile(BatchGaussian(k, z, distances, near), EPSILONS)
        for means, side in ((above, EPSILONS >= 0), (below, EPSILONS <= 0)):
            truth = numeric(k, z, means, EPSILONS[side], near)
            np.testing.assert_allclose(found[side], truth, atol=1e-7, err_msg=f"{k}, {z}")


@pytest.mark.parametrize("z", [1e-8, 0.05, 1.0, 1e4, 1e8])
def test_cells_of_a_mixture_hold_all_mass_and_agree_with_tails(z):
    edges = np.concatenate([[-np.inf], np.linspace(-30, 30, 401), [np.inf]])
    for *distances, near in (
        (1, 0, 1, 0),
        (0, 1, 1, 0),
        (2, 2, 2, 0),
        (2, 1, 1, 0),
        (1, 2, 1, 0.3),
    ):
        for k in (1e-12, 0.2, 1.0):
            pair = BatchGaussian(k, z, tuple(distances), near)
            for masses, tails in zip(pair.masses(edges)[:2], pair.tails(edges[1:-1]), strict=True):
                assert masses.sum() == pytest.approx(1, abs=1e-12), (distances, k)
                assert (masses >= 0).all()
                np.testing.assert_allclose(np.cumsum(masses[::-1])[::-1][1:], tails, atol=1e-12)


def test_renyi_of_a_mixture_is_just_above_the_truth_and_branches_add_up():
    orders = np.asarray([1.05, 2.0, 3.5, 8.0])
    for q, z in ((0.01, 1.0), (0.3, 0.5), (1e-6, 2.0), (1.0, 3.0)):
        for relation, distances in ((ADD, (1, 0, 1)), (REPLACE, (1, 1, 2))):
            truth = poisson_renyi(z, q, relation, tuple(orders))
            excess = BatchGaussian(q, z, distances).renyi(orders) / truth - 1
            assert (excess > -1e-9).all(), (q, z, relation)
            assert (excess < 3e-4).all(), (q, z, relation)
    # With a share of A nearer, by integration: gains on one line, losses on the other.
    x = np.linspace(-12, 13, 50_001)
    normal = [
        np.exp(-0.5 * (x - m) ** 2) / math.sqrt(2 * math.pi) * (x[1] - x[0]) for m in range(3)
    ]
    lines = []
    for distances, (far, near, b, c) in (((2, 1, 1), (2, 1, 0, 1)), ((1, 2, 1), (1, 0, 0, 1))):
        base = 0.8 * (0.7 * normal[far] + 0.3 * normal[near])
        p, q = base + 0.2 * normal[b], base + 0.2 * normal[c]
        lines.append((distances, p[p > q], q[p > q]))
    for (distances, p, q), (_, less, more) in zip(lines, lines[::-1], strict=True):
        rest = 1 - p.sum() - more.sum()
        truth = [(p**a * q ** (1 - a)).sum() + (more**a * less ** (1 - a)).sum() for a in orders]
        excess = BatchGaussian(0.2, 1.0, distances, 0.3).renyi(orders)
        excess = excess * (orders - 1) / np.log(np.asarray(truth) + rest) - 1
        assert (excess > -1e-9).all(), distances
        assert (excess < 6e-4).all(), distances
    one, two = BatchGaussian(0.1, 1.0, (1, 0, 1)), BatchGaussian(0.1, 1.0, (2, 1, 1))
    both = Branches(((0.25, one), (0.75, two), (0.0, BatchGaussian(1.0, 1.0, (2, 2, 2)))), 0.0)
    expected = 0.25 * profile(one, EPSILONS) + 0.75 * profile(two, EPSILONS)
    np.testing.assert_allclose(profile(both, EPSILONS), expected, rtol=1e-12)


def on_grid(atoms, width, epsilon):
    """delta(epsilon) of atoms for epsilons up to their top, with all that is above it."""
    assert epsilon <= atoms.top
    loss = atoms.offset + width * atoms.index
    inside = float(atoms.mass @ np.maximum(-np.expm1(epsilon - loss), 0.0))
    return inside + atoms.over[0] - math.exp(epsilon) * atoms.over[1]


def both_ends(pair, width, low, cap, fine):
    """Checks the order of both profiles at epsilons up to the cap; returns the largest distance."""
    high, less = (make(pair, width, low, cap, fine) for make in (dominating_atoms, dominated_atoms))
    top = min(high.top, less.top)
    apart = 0.0
    for epsilon in np.linspace(low, top, 41).tolist():
        p, q = (float(v[0]) for v in pair.tails(np.asarray([epsilon])))
        truth, error = p - math.exp(epsilon) * q, 1e-11 * (p + math.exp(epsilon) * q)
        upper, lower = (on_grid(a, width, epsilon) for a in (high, less))
        assert lower <= truth + error
        assert truth - error <= upper
        apart = max(apart, upper - lower)
    return apart


@WAYS
@settings(deadline=None, max_examples=40)
@given(
    st.floats(0.2, 10.0), st.floats(-7.0, 0.0), st.integers(20, 2000),
    st.floats(0.05, 1.0), st.floats(1e-3, 0.05),
)  # fmt: skip
def test_profiles_lie_in_order(relation, reverse, z, log_q, points, share, fine):
    pair = SampledGaussian(z, 10.0**log_q, relation, reverse)
    low, high = pair.span(1e-12)
    cap = pair.center + share * (high - pair.center)
    both_ends(pair, (high - low) / points, low, cap, fine)


@WAYS
def test_profiles_meet_as_the_grid_is_refined(relation, reverse):
    for q, z in ((0.3, 0.8), (0.1, 1.0), (1.0, 2.0)):
        pair = SampledGaussian(z, q, relation, reverse)
        low, high = pair.span(1e-12)
        coarse, fine = (both_ends(pair, (high - low) / n, low, high, 1e-4) for n in (200, 1600))
        assert fine < 0.08 * coarse, (q, z)  # second order in the width, or nearly


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


@WAYS
def test_masses_are_rounded_outwards(relation, reverse):
    """Also by the error of the pair's own masses, here a large one."""

    class Rough(SampledGaussian):
        rounding = 1e-3

    rough, exact = (cls(1.0, 0.2, relation, reverse) for cls in (Rough, SampledGaussian))
    low, high = exact.span(1e-12)
    upper, lower = (
        make(rough, 1e-3, low, high, 1e-4) for make in (dominating_atoms, dominated_atoms)
    )
    for epsilon in (0.0, 0.2 * high, 0.6 * high):
        truth = float(profile(exact, epsilon)[0])
        p, q = (float(v[0]) for v in exact.tails(np.asarray([epsilon])))
        # Masses up to a thousandth off may move the profile by this much.
        off = 0.2e-3 * (p + math.exp(epsilon) * q)
        assert on_grid(upper, 1e-3, epsilon) >= truth + off
        assert on_grid(lower, 1e-3, epsilon) <= truth - 1e-3 * truth


def test_losses_are_moved_by_the_slack_of_their_edges():
    class Loose(SampledGaussian):
        def slack(self, edges):
            return 0.25

    loose, tight = (cls(1.0, 0.2, ADD) for cls in (Loose, SampledGaussian))
    for make, sign in ((dominating_atoms, 1), (dominated_atoms, -1)):
        moved, still = (make(pair, 0.01, -0.2, 5.0, 1e-3) for pair in (loose, tight))
        assert moved.offset - still.offset == pytest.approx(sign * 0.25, abs=1e-9)
    assert tight.slack(np.asarray([5.0])) > 0


def test_a_merged_cell_has_no_more_than_its_mean_loss():
    p, q = np.asarray([0.3, 0.2, 0.1]), np.asarray([0.2, 0.2, 0.3])
    error = np.full(3, 1e-3)
    masses = Masses(p, q, p - q, error)
    loss = grid._merged_loss(masses, np.full(3, -9.0), 1e-4)
    truth = np.log(p / q)
    assert (loss < truth - 1e-3).all()
    np.testing.assert_allclose(loss, truth, atol=2e-2)
    # Masses that are known but for their rounding.
    for rounding in (1e-4, 1e-9):
        exact = Masses(p, q, p - q, np.zeros(3))
        assert (grid._merged_loss(exact, np.full(3, -9.0), rounding) <= truth).all(), rounding
    # Masses that underflow say nothing: the cell's least loss stands for them.
    underflown = Masses(p[:1], np.zeros(1), p[:1], error[:1])
    assert grid._merged_loss(underflown, np.asarray([600.0]), 1e-4)[0] == 600.0


def test_what_is_above_the_cap_is_rounded_outwards_and_what_is_below_is_not_dropped():
    pair = SampledGaussian(1.0, 1.0, ADD)
    for low in (-4.0, -0.2, 0.3):
        atoms = dominating_atoms(pair, 1e-2, low, 3.0, 0.01)
        assert atoms.mass.sum() + atoms.over[0] >= 1 - 1e-12, low
    # Was a fault: the index of a far loss wrapped round to the other end of the grid.
    pair = SampledGaussian(1e-4, 1.0, ADD)
    with pytest.raises(Unresolved):
        dominating_atoms(pair, 1e-12, *pair.span(1e-9), 0.01)
    pair = SampledGaussian(1.0, 0.1, ADD)
    for make, sign in ((dominating_atoms, 1), (dominated_atoms, -1)):
        atoms = make(pair, 0.01, pair.span(1e-9)[0], 1.0, 0.02)
        p, q = (float(v[0]) for v in pair.tails(np.asarray([atoms.top])))
        assert sign * (atoms.over[0] - p * (1 + sign * pair.rounding)) > 0
        assert sign * (q * (1 - sign * pair.rounding) - atoms.over[1]) > 0
        assert atoms.over == pytest.approx((p, q), rel=1e-11)
    # The same on every grid: else a loss between two grids' tops is counted twice, or not at all.
    pair = Discrete(np.asarray([-0.1, 0.0, 0.1, 1.003]), np.asarray([0.4, 0.2, 0.399, 0.001]))
    for put in (dominating_atoms, dominated_atoms):
        for cap in (0.9, 0.98, 1.0, 1.01):
            fine, coarse = (put(pair, width, -0.1, cap, 1e-3) for width in (0.004, 0.03))
            assert fine.top == coarse.top == cap
            assert fine.over == coarse.over
            assert (fine.over[0] > 0) == (cap < 1.003)
