"""Mixture pairs against quadrature, and the Renyi divergences that follow from their cells."""

import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp.accounting.canonical import Step
from jaxdp.accounting.mixture import Branches, Mixture, renyi
from jaxdp.accounting.rdp import step_rdp

EPSILONS = np.asarray([-1.0, -0.1, -1e-3, 0.0, 1e-3, 0.1, 0.5, 2.0])


def profile(pair, epsilons):
    p, q = pair.tails(epsilons)
    return p - np.exp(epsilons) * q


def numeric(k, z, means, epsilons):
    """Profile of (1-k) A + k B against (1-k) A + k C, by the trapezoid rule."""
    x = np.linspace(-3 - 12 * z, 3 + 12 * z, 200_001)
    a, b, c = (np.exp(-0.5 * ((x - m) / z) ** 2) / z / np.sqrt(2 * np.pi) for m in means)
    p, q = (1 - k) * a + k * b, (1 - k) * a + k * c
    return np.asarray([np.maximum(p - np.exp(e) * q, 0).sum() * (x[1] - x[0]) for e in epsilons])


@pytest.mark.parametrize(("k", "z"), [(0.3, 0.8), (0.01, 2.0), (1.0, 1.0)])
@pytest.mark.parametrize(
    ("distances", "above", "below"),
    [
        ((1, 0, 1), (0, 1, 0), (0, 1, 0)),
        ((0, 1, 1), (0, 0, 1), (0, 0, 1)),
        ((1, 1, 2), (0, 1, -1), (0, 1, -1)),
        ((2, 2, 2), (-1, 1, -1), (1, 1, -1)),
        ((2, 1, 1), (-1, 1, 0), (1, 1, 0)),
        ((1, 2, 1), (1, 0, 1), (-1, 0, 1)),
    ],
)
def test_the_profile_is_that_of_the_worst_means(k, z, distances, above, below):
    """Means of A, B and C that attain it for epsilon >= 0, and for epsilon <= 0."""
    found = profile(Mixture(k, z, distances), EPSILONS)
    for means, side in ((above, EPSILONS >= 0), (below, EPSILONS <= 0)):
        np.testing.assert_allclose(found[side], numeric(k, z, means, EPSILONS[side]), atol=1e-7)


@pytest.mark.parametrize("z", [1e-8, 0.05, 1.0, 1e4, 1e8])
@pytest.mark.parametrize("distances", [(1, 0, 1), (0, 1, 1), (2, 2, 2), (2, 1, 1)])
@pytest.mark.parametrize("k", [1e-12, 0.2, 1.0])
def test_cells_hold_all_mass_and_agree_with_tails(k, z, distances):
    pair = Mixture(k, z, distances)
    edges = np.concatenate([[-np.inf], np.linspace(-30, 30, 401), [np.inf]])
    for masses, tails in zip(pair.cells(edges), pair.tails(edges[1:-1]), strict=True):
        assert masses.sum() == pytest.approx(1, abs=1e-12)
        assert (masses >= 0).all()
        np.testing.assert_allclose(np.cumsum(masses[::-1])[::-1][1:], tails, atol=1e-12)


def test_spans_leave_about_the_tail():
    pair = Mixture(0.01, 0.7, (2, 1, 1))
    low, high = pair.span(1e-9)
    assert 1e-11 < pair.tails(np.asarray([high]))[0][0] < 1e-8
    assert pair.cells(np.asarray([-np.inf, low]))[0][0] < 1e-8


@pytest.mark.parametrize(("q", "z"), [(0.01, 1.0), (0.3, 0.5), (1e-6, 2.0), (1.0, 3.0)])
def test_renyi_is_just_above_the_truth(q, z):
    orders = np.asarray([1.05, 2.0, 3.5, 8.0])
    for relation, distances in (
        (acc.Relation.ADD_OR_REMOVE_ONE, (1, 0, 1)),
        (acc.Relation.REPLACE_ONE, (1, 1, 2)),
    ):
        truth = step_rdp(Step(z, q), relation, tuple(orders))
        excess = renyi(Mixture(q, z, distances), orders) / truth - 1
        assert (excess > -1e-9).all()
        assert (excess < 3e-4).all()


def test_branches_add_up():
    one, two = Mixture(0.1, 1.0, (1, 0, 1)), Mixture(0.1, 1.0, (2, 1, 1))
    both = Branches(((0.25, one), (0.75, two), (0.0, Mixture(1.0, 1.0, (2, 2, 2)))), 0.0)
    expected = 0.25 * profile(one, EPSILONS) + 0.75 * profile(two, EPSILONS)
    np.testing.assert_allclose(profile(both, EPSILONS), expected, rtol=1e-12)
