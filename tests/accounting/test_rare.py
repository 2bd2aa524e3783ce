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
