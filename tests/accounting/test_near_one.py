"""Deltas close to 1: epsilon hangs on the last digits of delta, and once took minutes."""

import pytest

from jaxdp import accounting as acc

ADD, REPLACE = acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize(
    ("q", "z", "steps", "delta"),
    [(0.5, 0.1, 10, 0.999), (0.5, 0.1, 10, 0.99)],
)
def test_epsilon_and_delta_agree(q, z, steps, delta, relation):
    event = acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)
    bound = acc.epsilon(event, delta, relation)
    assert bound.upper - bound.lower <= 4e-3 * bound.upper
    again = acc.delta(event, bound.upper, relation)
    assert again.lower <= delta <= acc.delta(event, bound.lower, relation).upper
