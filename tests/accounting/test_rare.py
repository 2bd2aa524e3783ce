"""Rare large losses counted one by one: against the contour integral, which works another way."""

import math

import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp.accounting import exact, rare, sums
from jaxdp.accounting.canonical import Step, flatten
from jaxdp.accounting.loss import Pair
from jaxdp.accounting.saddle import Composition

ADD, REPLACE = acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE


def run(q, z, steps):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize(
    ("event", "delta"),
    [
        (run(1e-3, 0.5, 20), 1e-9),
        (run(1e-5, 0.5, 1000), 1e-9),
        (run(1e-4, 1.0, 100), 1e-13),
        (acc.Composed([run(1e-4, 0.5, 10), run(1e-5, 0.7, 300)]), 1e-8),
    ],
)
def test_the_contour_integral_lies_inside(event, delta, relation):
    run_ = flatten(event, relation)
    line = exact.exact_epsilon(run_, relation, delta)
    assert line.upper - line.lower <= 1e-5 * line.upper
    bound = rare.rare_epsilon(run_, relation, delta, tolerance=5e-3)
    assert bound.lower <= line.upper
    assert line.lower <= bound.upper
    assert bound.upper - bound.lower <= 5e-3 * bound.upper
    again = rare.rare_delta(run_, relation, line.estimate, tolerance=1e-2)
    assert again.lower <= delta * (1 + 1e-4)
    assert again.upper >= delta * (1 - 1e-4)


@pytest.mark.parametrize("q", [1e-6, 1e-3])
@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_the_contracted_losses_lie_below_the_step(q, relation):
    """Its privacy profile, epsilon by epsilon: what makes the lower end a lower end."""
    pair = Pair(Step(0.5, q), relation)
    composition = Composition(((pair, 1),), 0.0, math.log(1e-20))
    width = 3 * q
    atoms = sums.contracted(composition, pair, width, 4000 * width)
    loss = atoms.offset + width * atoms.index
    for epsilon in np.linspace(0.0, 500 * width, 41):
        below = atoms.mass @ np.maximum(-np.expm1(epsilon - loss), 0.0)
        top = float(rare.large(pair, epsilon, epsilon)[2])
        kept = top - float(rare.large(pair, atoms.top, epsilon)[2])
        assert below <= kept + 1e-12 * q
        if epsilon > 20 * width:
            assert below >= kept * (1 - 1e-2)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_a_kind_of_step_that_hardly_loses_anything_beside_one_that_does(relation):
    """All of the former lies inside one cell of the grid: that cell counts whole."""
    event = acc.Composed([run(1e-3, 0.5, 20), run(8e-9, 4.3, 100)])
    alone = exact.exact_epsilon(flatten(run(1e-3, 0.5, 20), relation), relation, 1e-6)
    bound = rare.rare_epsilon(flatten(event, relation), relation, 1e-6, tolerance=5e-3)
    assert alone.lower <= bound.upper
    assert bound.lower <= alone.upper * (1 + 1e-4)
    assert bound.upper - bound.lower <= 5e-3 * bound.upper
    pair = Pair(Step(4.3, 8e-9), relation)
    atoms = sums.contracted(Composition(((pair, 1),), 0.0, -40.0), pair, 1e-6, 1.0)
    assert atoms.mass.sum() == pytest.approx(1.0)


def test_two_large_losses_count_where_they_need_not_exceed_epsilon():
    """The remainder against an integral over the other step, with the cap below half of epsilon."""
    step, epsilon, cap = Step(0.5, 0.02), 1.0, 0.3
    pair = Pair(step, ADD)
    composition = Composition(((pair, 2),), 0.0, -60.0)
    high = rare._side(composition, cap, epsilon, 1 << 14, True)
    z, q, top = 0.5, 0.02, high.atoms[0][1].top
    x = np.linspace(float(rare.inverse_loss(pair, np.asarray([top]))[0]), 8.0, 2001)
    density = ((1 - q) * np.exp(-0.5 * (x / z) ** 2) + q * np.exp(-0.5 * ((x - 1) / z) ** 2)) / (
        z * math.sqrt(2 * math.pi)
    )
    loss = np.log1p(q * np.expm1((x - 0.5) / z**2))
    lack = np.maximum(np.expm1(epsilon - loss[:, None] - loss), 0.0)
    missing = float(density @ lack @ density) * (x[1] - x[0]) ** 2
    probability = rare._several(high.atoms, epsilon)[2]
    found = rare.Rare(high, 16 * cap / (1 << 14), cap)._shortfall(epsilon) * probability
    assert 0 < missing <= found
