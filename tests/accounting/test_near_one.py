"""Deltas close to 1: epsilon hangs on the last digits of delta, and once took minutes."""

import pytest

from jaxdp import accounting as acc
from jaxdp.accounting import exact
from jaxdp.accounting.canonical import flatten

ADD, REPLACE = acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize(
    ("q", "z", "steps", "delta"),
    [(0.5, 0.1, 10, 0.999), (0.5, 0.1, 10, 0.99), (0.9, 0.1, 3, 0.9999)],
)
def test_the_certificate_and_the_integral_agree(q, z, steps, delta, relation):
    event = acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)
    bound = acc.epsilon(event, delta, relation)
    integral = exact.exact_epsilon(flatten(event, relation), relation, delta)
    assert bound.lower <= integral.upper
    assert integral.lower <= bound.upper
    assert bound.upper - bound.lower <= 1.2e-4 * bound.upper
