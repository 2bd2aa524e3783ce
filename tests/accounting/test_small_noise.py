"""Corners where an accountant once answered too low, against oracles computed another way.

The epsilons were found by a tilted FFT over 400,000 cells that splits each cell's mass between two
grid points, extrapolated in the grid width; those near q = 1 by the full batch's closed form less
its largest possible error.
"""

import math

import mpmath as mp
import pytest

from jaxdp import accounting as acc
from jaxdp.accounting import rdp
from jaxdp.accounting.canonical import Step

REPLACE = acc.Relation.REPLACE_ONE


def run(q, z, steps):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)


@pytest.mark.parametrize(
    ("q", "z", "steps", "delta", "epsilon"),
    [
        (0.01, 0.1, 1_000, 1e-3, 970.0297),
        (1e-3, 0.1, 1_000, 1e-5, 342.25081),
        (0.01, 0.1, 50, 0.01, 127.80305),
        (0.3, 0.1, 3, 0.01, 152.21664),
        (0.3, 0.3, 3, 0.1, 10.3194834),
        (0.1, 0.3, 10, 0.01, 17.4653802),
    ],
)
def test_replace_one_with_little_noise(q, z, steps, delta, epsilon):
    bound = acc.epsilon(run(q, z, steps), delta, REPLACE)
    assert epsilon * (1 - 3e-8) <= bound.upper <= epsilon * (1 + 2e-4)
    assert bound.lower <= epsilon * (1 + 1e-7)


@pytest.mark.parametrize(
    ("q", "z", "steps", "delta", "epsilon"),
    [
        (1 - 1.2e-16, 50.0, 1_000, 0.01, 3.18398),
        (1 - 1e-14, 500.0, 100_000, 0.05, 2.2554),
        (1 - 1e-13, 50.0, 1_000, 0.01, 3.18398),
        (1 - 1e-12, 50.0, 1_000, 0.1, 1.75217),
        (1 - 1e-6, 5.0, 10, 0.1, 1.7521716413),
    ],
)
@pytest.mark.parametrize("relation", [REPLACE, acc.Relation.ADD_OR_REMOVE_ONE])
def test_sampling_nearly_everybody(q, z, steps, delta, epsilon, relation):
    bound = acc.epsilon(run(q, z, steps), delta, relation)
    full = acc.epsilon(acc.Repeated(acc.Gaussian(z), steps), delta, relation)
    if relation is REPLACE:
        assert bound.upper >= epsilon * (1 - 3e-6)
    assert full.lower * (1 - 1e-5) <= bound.upper <= full.upper * (1 + 1e-2)


@pytest.mark.parametrize(("q", "z"), [(1e-30, 0.15), (1e-24, 0.17), (1e-11, 0.25), (1e-6, 0.3)])
def test_order_two_of_tiny_sampling_and_noise(q, z):
    # E_Q[(P/Q)^2] = 1 + q^2 (e^(1/z^2) - 1) exactly.
    with mp.workdps(60):
        truth = mp.log1p(mp.mpf(q) ** 2 * mp.expm1(1 / mp.mpf(z) ** 2))
    found = rdp.step_rdp(Step(z, q), acc.Relation.ADD_OR_REMOVE_ONE, (2.0,))[0]
    assert float(truth) * (1 - 1e-13) <= found <= float(truth) * 1.01


@pytest.mark.parametrize(
    ("q", "z", "delta"), [(0.1, 1e7, 1e-9), (0.999999, 1e7, 1e-15), (0.9, 1e4, 1e-15)]
)
def test_one_replaced_record_in_much_noise(q, z, delta):
    bound = acc.epsilon(run(q, z, 1), delta, REPLACE)
    assert 0 < bound.lower <= bound.upper
    assert replace_one_delta(q, z, bound.upper) <= delta
    assert replace_one_delta(q, z, bound.lower) >= delta
    assert bound.upper - bound.lower <= 1e-6 * bound.upper


def test_a_huge_epsilon_of_one_replaced_record():
    bound = acc.epsilon(run(0.5, 0.02, 1), 1e-5, REPLACE)
    assert replace_one_delta(0.5, 0.02, bound.upper) <= 1e-5
    assert replace_one_delta(0.5, 0.02, bound.lower) >= 1e-5


def replace_one_delta(q, z, epsilon):
    """From the definition, by bisection for the threshold, in 60 digits."""
    with mp.workdps(60):
        q, z, epsilon = mp.mpf(q), mp.mpf(z), mp.mpf(epsilon)

        def density(x, sign):
            return (1 - q) + q * mp.e ** ((sign * x - mp.mpf(1) / 2) / z**2)

        low, high = mp.mpf(0), mp.mpf(1) + 40 * z
        for _ in range(200):
            x = (low + high) / 2
            below = mp.log(density(x, 1) / density(x, -1)) < epsilon
            low, high = (x, high) if below else (low, x)

        def beyond(mean):
            return mp.erfc((x - mean) / z / mp.sqrt(2)) / 2

        first = (1 - q) * beyond(0) + q * beyond(1)
        second = (1 - q) * beyond(0) + q * beyond(-1)
        return first - mp.e**epsilon * second


@pytest.mark.parametrize("relation", [REPLACE, acc.Relation.ADD_OR_REMOVE_ONE])
@pytest.mark.parametrize("z", [1e-160, 1e-29, 1e29])
def test_absurd_noise_gets_an_answer(z, relation):
    for event in (acc.Gaussian(z), run(0.5, z, 1), run(0.5, z, 5)):
        bound = acc.epsilon(event, 1e-5, relation)
        assert bound.upper >= bound.lower >= 0
        assert (bound.upper > 1e6) == (z < 1)


def test_no_guarantee_has_no_lower_end():
    bound = acc.epsilon(acc.PoissonSampled(acc.Gaussian(0.0), 0.01), 0.5)
    assert (bound.lower, bound.upper) == (0.0, math.inf)
    assert acc.epsilon(acc.PoissonSampled(acc.NonPrivate("peeked"), 0.0), 1e-5).upper == math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: acc.Gaussian(1e160), "noise_multiplier=1e"),
        (lambda: acc.Repeated(acc.Gaussian(1.0), 10**400), "expected an integer"),
        (lambda: acc.epsilon(acc.Gaussian(1.0), 5e-324), "delta=5e-324"),
        (lambda: acc.RenyiFilter(1.0, 1e-5, "replace"), "relation='replace'"),
    ],
)
def test_out_of_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()
