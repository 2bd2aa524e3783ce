"""Privacy loss distributions where the second law underflows, against the closed form.

A full batch whose epsilon passes 660 leaves the second law no probability that a float can hold.
"""

import mpmath as mp
import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp.accounting.canonical import Step
from jaxdp.accounting.loss import Pair
from jaxdp.accounting.pld import Atoms, compose, optimistic
from jaxdp.accounting.saddle import Composition, Unresolved

ADD = acc.Relation.ADD_OR_REMOVE_ONE
REPLACE = acc.Relation.REPLACE_ONE


def full_batch_delta(z, steps, relation, epsilon):
    """Balle and Wang 2018, Theorem 8, in 60 digits and more."""
    with mp.workdps(60):
        mu = mp.sqrt(steps) * (2 if relation is REPLACE else 1) / mp.mpf(z)
        e = mp.mpf(epsilon)
        first, second = mu / 2 - e / mu, -mu / 2 - e / mu
        return mp.ncdf(first) - mp.exp(e) * mp.erfc(-second / mp.sqrt(2)) / 2


@pytest.mark.parametrize(
    ("z", "steps", "delta", "relation"),
    [
        (0.1, 100, 1e-5, ADD),
        (0.1, 100, 1e-100, ADD),
        (1.0, 10_000, 0.5, REPLACE),
        (0.03, 1, 0.9, ADD),
        (0.01, 4, 1e-5, ADD),
        (1e-3, 1, 0.5, ADD),
    ],
)
def test_a_full_batch_with_a_large_epsilon(z, steps, delta, relation):
    event = acc.Repeated(acc.Gaussian(z), steps)
    bound = acc.epsilon(event, delta, relation, accountant="pld")
    assert full_batch_delta(z, steps, relation, bound.upper) <= delta
    assert full_batch_delta(z, steps, relation, bound.lower) >= delta
    assert 0 < bound.lower <= bound.upper <= bound.lower * (1 + 1e-3)


@pytest.mark.parametrize(("z", "epsilon"), [(0.1, 4_000.0), (0.1, 5_000.0), (0.1, 5_400.0)])
def test_delta_of_a_full_batch_at_a_large_epsilon(z, epsilon):
    bound = acc.delta(acc.Repeated(acc.Gaussian(z), 100), epsilon, accountant="pld")
    truth = full_batch_delta(z, 100, ADD, epsilon)
    assert bound.lower <= truth <= bound.upper
    assert bound.upper - bound.lower <= 2e-3 * bound.upper


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_a_full_batch_with_a_large_epsilon_beside_sampled_steps(relation):
    sampled = acc.Repeated(acc.PoissonSampled(acc.Gaussian(0.5), 0.5), 10)
    event = acc.Composed([acc.Gaussian(0.03), sampled])
    pld = acc.epsilon(event, 1e-5, relation, accountant="pld")
    exact = acc.epsilon(event, 1e-5, relation, accountant="exact")
    assert pld.lower <= exact.upper
    assert exact.lower <= pld.upper
    assert pld.upper <= exact.upper * (1 + 1e-3)
    assert pld.lower >= exact.lower * (1 - 1e-3)


@pytest.mark.parametrize(
    ("noise", "reason"),
    [(1e-4, "need too many nodes"), (1e-20, "have noise multiplier 1e-20, below 1e-6")],
)
def test_what_the_grid_cannot_hold_is_refused_with_a_remedy(noise, reason):
    said = (
        rf"Step\(noise_multiplier={noise}.*pld under add_or_remove_one.*{reason}.*accountant 'auto'"
    )
    with pytest.raises(acc.UnsupportedEventError, match=said):
        acc.epsilon(acc.Gaussian(noise), 1e-5, accountant="pld")
    assert acc.epsilon(acc.Gaussian(noise), 1e-5).lower > 0


def test_a_grid_that_holds_no_probability_is_refused():
    pair = Pair(Step(1e-20), ADD)
    with pytest.raises(Unresolved, match="every cell of the grid has too little probability"):
        optimistic(Composition(((pair, 1),)), pair, 1e18, 1e22, 1.0)


def test_the_lower_end_is_taken_from_the_side_below():
    """Bisection stops one part in 1e9 wide: its two sides are not the same number."""
    # One outcome at loss 6 with probability 0.5: delta(e) = (1 - e^(e - 6))/2 on both sides.
    atoms = Atoms(np.asarray([6_000]), np.asarray([0.5]), 0.0, 0.0)
    composed = compose([(atoms, 1)], 0.001, 1 << 15, 0.0, 1.0)
    lower, upper = composed.epsilon(0.2, -1), composed.epsilon(0.2, 1)
    assert composed.delta(lower) - composed.error(lower) > 0.2
    assert composed.delta(upper) + composed.error(upper) <= 0.2
