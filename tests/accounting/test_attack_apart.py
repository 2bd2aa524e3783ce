"""Small losses apart: point masses at the ends of the interval, ratios far from 1, no small loss."""

import math

import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp.accounting.apart import Inner, Outer, most
from jaxdp.accounting.base import Discrete, Unresolved
from jaxdp.accounting.discretise import above, below

REPLACE = acc.Relation.REPLACE_ONE


def pair(high):
    """Losses of which one is ``high``, with a fifth of the probability."""
    loss = high * np.asarray([-12.0, -0.4, 0.0, 0.3, 1.0, 15.0])
    return Discrete(loss, np.asarray([1e-4, 0.1, 0.6, 0.1, 0.1998, 1e-4]))


def test_a_point_mass_at_the_largest_small_loss_is_kept():
    """high - shift + shift may be less than high by rounding."""
    moved = 0
    for high in np.geomspace(1e-4, 1.0, 301).tolist():
        inner = Inner(pair(high), -high, high)
        moved += high - inner.shift + inner.shift < high
        atoms = above(inner, high / 50, *inner.span(0.0), 0.01)
        assert atoms.mass.sum() >= 1
        assert atoms.over[0] == 0
        top = high - inner.shift
        first, _ = inner.tails(np.asarray([top - 1e-6 * high, top]))
        assert first[0] == pytest.approx(0.1998 / 0.9998)
        assert first[1] == 0
    assert moved > 3


@pytest.mark.parametrize("ratio", [-9.0, -0.5, 0.5, 9.0])
def test_small_losses_are_known_to_their_doubt(ratio):
    """Also where the two probabilities of a small loss differ: the masses of a loss cancel."""
    mass = np.asarray([0.2, 0.3])
    one = Discrete(np.asarray([ratio, ratio + 5]), mass, q=np.asarray([0.2 / math.exp(ratio), 0.0]))
    inner = Inner(one, ratio - 1, ratio + 1)
    assert abs(inner.shift - ratio) <= inner.doubt < 1e-10
    _, _, gain, error = inner.masses(np.asarray([-1.0, 1.0]) * inner.doubt * 2)
    assert abs(gain[0]) <= error[0]
    assert inner.doubt >= 0.999 * one.rounding * abs(math.expm1(-ratio))


def test_no_small_loss_is_refused():
    for ends in ((0.1, 0.2), (-3.0, -2.0)):
        with pytest.raises(Unresolved):
            Inner(pair(1.0), *ends)


def test_all_steps_may_be_large():
    assert most(7, 1.0, -30.0) == most(7, 0.99, -30.0) == 7


def test_a_randomised_response_does_not_widen_rare_samplings():
    """All of its losses are small, whichever of them is the likeliest."""
    rare = acc.Repeated(acc.PoissonSampled(acc.Gaussian(0.8), 1e-5), 10**7)
    bound = acc.epsilon(acc.Composed([rare, acc.RandomizedResponse(1 - 1e-9)]), 1e-9, REPLACE)
    alone = acc.epsilon(rare, 1e-9, REPLACE)
    assert bound.upper - bound.lower < 5e-4 * bound.upper
    assert bound.upper >= alone.lower
    assert bound.lower <= alone.upper + 1e-8


def test_outcomes_are_of_one_pair_or_the_other():
    """The merged outcome and the others have all of the masses, point masses at the ends too."""
    one = pair(1.0)
    for low, high in ((-0.4, 1.0), (-0.4, 0.3), (-12.0, 15.0), (-13.0, 16.0)):
        inner = Inner(one, low, high)
        outer = Outer(inner)
        atoms = above(outer, 0.1, -14.0, 16.0, 0.01), below(outer, 0.1, -14.0, 16.0, 0.01)
        assert atoms[0].mass.sum() >= 1 - 1e-15 >= atoms[1].mass.sum() >= 1 - 1e-12
        inside = (one.loss > low) & (one.loss <= high)
        assert outer.chance() == pytest.approx(one.p[~inside].sum(), abs=1e-12)
