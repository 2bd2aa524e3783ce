"""Sums that no grid resolves: both ends from moments alone, against inversion with 60 digits."""

import math

import mpmath as mp
import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp.accounting import certificate, kinds, tails
from jaxdp.accounting.canonical import flatten

ADD, REPLACE = acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE


def run(q, z, steps):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)


def inverted(q, z, steps, epsilon, relation):
    """delta by Laplace inversion at the saddle point, for so little noise that draws are seen.

    Then a step loses log(1 - q) (nothing, for replace-one) where the record is not drawn and is
    Gaussian where it is, up to e^(-1/(8 z^2)) of the probability.
    """
    with mp.workdps(60):
        q, z, epsilon = mp.mpf(q), mp.mpf(z), mp.mpf(epsilon)
        absent = mp.log1p(-q) if relation is ADD else mp.mpf(0)
        mean = 1 / (2 * z * z) + mp.log(q) - (0 if relation is ADD else mp.log1p(-q))

        def log_moment(s):
            return steps * mp.log(
                (1 - q) * mp.exp(s * absent) + q * mp.exp(s * mean + s * s / (2 * z * z))
            )

        def slope(c):
            drawn = q * mp.exp(c * mean + c * c / (2 * z * z))
            none = (1 - q) * mp.exp(c * absent)
            return steps * (none * absent + drawn * (mean + c / (z * z))) / (none + drawn)

        low, high = mp.mpf(10) ** -30, mp.mpf(10) ** 3
        for _ in range(400):
            c = mp.sqrt(low * high)
            low, high = (low, c) if slope(c) > epsilon + 1 / c + 1 / (1 + c) else (c, high)
        bend = (slope(c * (1 + mp.mpf(10) ** -9)) - slope(c)) / (c * mp.mpf(10) ** -9)
        width = mp.mpf(1) / 4 / mp.sqrt(bend + 1 / c**2)

        def value(k):
            s = mp.mpc(c, k * width)
            return mp.exp(log_moment(s) - s * epsilon - mp.log(s) - mp.log1p(s)).real

        total = value(0) / 2 + mp.fsum(value(k) for k in range(1, 60))
        return total * width / mp.pi


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize(
    ("q", "z", "steps", "delta"),
    [
        (0.52234, 0.05, 10**9, 1e-300),
        (0.5, 0.05, 10**9, 1e-10),
        (0.9, 0.05, 10**9, 1e-300),
        (0.1, 0.06, 10**9, 1e-300),
        (0.5, 0.05, 10**8, 1e-300),
        (0.02, 0.03, 3 * 10**10, 1e-100),
    ],
)
def test_a_million_nats_or_more(q, z, steps, delta, relation):
    bound = acc.epsilon(run(q, z, steps), delta, relation)
    assert bound.upper - bound.lower <= 1e-3 * bound.upper
    assert inverted(q, z, steps, bound.upper, relation) <= delta
    assert inverted(q, z, steps, bound.lower, relation) >= delta


@pytest.mark.parametrize("epsilon", [9.9e10, 1e11])
def test_delta_of_such_a_sum(epsilon):
    bound = acc.delta(run(0.5, 0.05, 10**9), epsilon)
    truth = inverted(0.5, 0.05, 10**9, epsilon, ADD) if epsilon > 9.94e10 else 1.0
    assert 0.0 <= bound.lower <= truth <= bound.upper
    assert (bound.lower > 0.99) == (epsilon < 9.92e10)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("seed", range(2))
def test_moments_alone_hold_what_the_convolution_finds(seed, relation):
    rng = np.random.default_rng(seed)
    q, z = 10.0 ** rng.uniform(-4, -0.3), 10.0 ** rng.uniform(-0.7, 0.5)
    steps, delta = round(10.0 ** rng.uniform(0.5, 3)), 10.0 ** rng.uniform(-20, -2)
    flat = flatten(run(q, z, steps), relation)
    for direction in kinds.directions(flat, relation, math.log(delta), 1e-4):
        lower, upper = certificate.epsilon_bounds([direction], None)
        above, below = direction.total(True), direction.total(False)
        assert tails.lower_epsilon(below, direction.log_delta) <= upper
        assert tails.upper_epsilon(above, direction.log_delta) >= lower
        at = max(upper, 0.1)
        least, most = certificate.delta_bounds([direction], at)
        assert tails.lower_delta(below, at) <= most
        assert tails.upper_delta(above, at) >= least


def test_losses_that_come_in_multiples_have_an_estimate():
    """Nearly a multiple of what one draw loses: the integrand comes back far beyond its first dip."""
    q, z, steps, delta = 6.934e-4, 0.03899, 7019, 3.586e-15
    bound = acc.epsilon(run(q, z, steps), delta, REPLACE)
    assert bound.lower <= bound.estimate <= bound.upper <= bound.lower * (1 + 1e-4)
    assert float(draws(q, z, steps, bound.estimate)) == pytest.approx(delta, rel=1e-9)


def draws(q, z, steps, epsilon):
    """delta under replace-one by the number of draws, of which each has a Gaussian loss."""
    with mp.workdps(40):
        q, z = mp.mpf(q), mp.mpf(z)
        mean, total = 1 / (2 * z * z) + mp.log(q) - mp.log1p(-q), mp.mpf(0)
        for k in range(1, 120):
            chance = mp.binomial(steps, k) * q**k * (1 - q) ** (steps - k)
            s = mp.sqrt(k) / z
            t = (k * mean - epsilon) / s
            total += chance * (mp.ncdf(t) - mp.exp(epsilon - k * mean + s * s / 2) * mp.ncdf(t - s))
        return total


def test_full_batches_of_little_noise_beside_sampled_ones_have_a_lower_end():
    """Before: lower 0, since one direction gave up before the moments were asked."""
    full = acc.Repeated(acc.Gaussian(0.05), 10**8)
    found = acc.epsilon(acc.Composed((run(0.5, 1.0, 1000), full)), 1e-10)
    # The full batches alone are one Gaussian; beside 2e10, the sampled ones are nothing.
    alone = acc.epsilon(full, 1e-10).lower
    assert found.lower <= found.upper <= 1.01 * alone
    assert found.lower >= 0.99 * alone


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_an_epsilon_beyond_all_losses_has_a_delta(relation):
    """Before: NumPy's "zero-size array"."""
    for epsilon in (1e12, 1e30, 1e100):
        assert acc.delta(run(0.01, 1.0, 1000), epsilon, relation).upper < 1e-300


def test_no_exponential_overflows_where_most_of_the_window_lies_far_below():
    event = acc.TruncatedPoisson(acc.Gaussian(0.64), 0.7, 6, 100)
    found = acc.epsilon(acc.Repeated(event, 3464), 9.8e-292, acc.Relation.REPLACE_SPECIAL)
    assert 500 < found.lower < found.upper < 2000
