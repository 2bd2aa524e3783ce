"""Random allocation: certified intervals against quadrature, Monte Carlo and known values."""

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, signal, special

from jaxdp.accounting import allocation
from jaxdp.accounting.bounds import Relation
from jaxdp.accounting.gaussian import gaussian_delta

ONE = Relation.ADD_OR_REMOVE_ONE


def profile(pair, epsilon):
    over = pair.loss > epsilon
    return pair.infinite + float(pair.p[over] @ -np.expm1(epsilon - pair.loss[over]))


def interval(z, steps, epsilon, direction, participations=1):
    """(lower, upper) delta of an epoch, direction 0 forward and 1 reverse."""
    ends = []
    for upper, sign in ((False, -1), (True, 1)):
        found = allocation.pairs(z, steps, participations, ONE, upper)
        if found:
            pair = found[direction]
            ends.append(profile(pair, epsilon) * (1 + sign * pair.rounding))
    return ends


def epsilon_at(delta_at, delta):
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high


def convolved(pair, count, width, upper):
    """Loss and mass of ``count`` epochs: losses moved outwards onto a grid, plain convolutions."""
    rounded = np.ceil if upper else np.floor
    index = rounded(pair.loss / width).astype(int)
    one = np.bincount(index - index.min(), pair.p)
    total, low = np.ones(1), 0
    for _ in range(count):
        total, low = signal.fftconvolve(total, one), low + index.min()
        used = np.flatnonzero(total > 1e-15)
        total, low = total[used[0] : used[-1] + 1], low + used[0]
    loss = width * (np.arange(total.size) + low)
    return loss, total, count * pair.infinite


@pytest.mark.parametrize("z", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("full", [1, 4])
def test_a_record_in_every_step_is_a_plain_gaussian(z, full):
    for relative in (0.2, 1.0, 3.0):
        mu = math.sqrt(full) / z
        epsilon = relative * max(mu, mu * mu / 2)
        truth = gaussian_delta(mu, epsilon)
        for upper in (False, True):
            (pair,) = allocation.pairs(z, full, full, ONE, upper)
            p, q = pair.tails(np.asarray([epsilon]))
            assert p[0] - math.exp(epsilon) * q[0] == pytest.approx(truth, rel=1e-8)


def two_steps(z, epsilon):
    """(remove, add) delta for two steps: an inner integral in closed form, the outer by quad."""

    def inner(x, remove):
        # (e^X + e^Y) / 2 > e^epsilon for Y beyond y; X = x/z - 1/2z^2.
        left = math.exp(x / z - 0.5 / z**2)
        edge = math.exp(epsilon if remove else -epsilon)
        gap = 2 * edge - left
        y = z * math.log(gap) + 0.5 / z if gap > 0 else -math.inf
        over, mean = special.ndtr(-y), special.ndtr(1 / z - y)
        if remove:
            value = (left * over + mean) / 2 - edge * over
        else:
            value = (1 - over) - ((1 - mean) + left * (1 - over)) / 2 / edge
        return math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi) * max(value, 0.0)

    # Cut where the inner integral has its kink, and around the record's own step.
    kinks = [z * math.log(2 * math.exp(s * epsilon)) + 0.5 / z for s in (1, -1)]
    cuts = sorted({-12.0, 0.0, 1 / z, 12.0 + 1 / z, *(k for k in kinks if abs(k) < 12)})
    return tuple(
        sum(
            integrate.quad(inner, a, b, (remove,), epsabs=1e-18, epsrel=1e-9, limit=400)[0]
            for a, b in itertools.pairwise(cuts)
        )
        for remove in (True, False)
    )


@pytest.mark.parametrize(
    ("z", "epsilon"), [(0.5, 1.0), (0.5, 8.0), (1.0, 0.5), (1.0, 3.0), (4, 0.6)]
)
def test_two_steps_match_a_double_integral(z, epsilon):
    for direction, truth in enumerate(two_steps(z, epsilon)):
        lower, upper = interval(z, 2, epsilon, direction)
        assert lower * (1 - 1e-8) <= truth <= upper * (1 + 1e-8) + 1e-20
        assert upper - lower < 0.01 * truth + 1e-20


@pytest.mark.parametrize(("steps", "low", "high"), [(8, 3.71825, 3.71903), (64, 1.79843, 1.79919)])
def test_epsilon_of_an_epoch_is_within_independent_bounds(steps, low, high):
    ends = []
    for upper in (False, True):
        found = allocation.pairs(1.0, steps, 1, ONE, upper)
        ends.append(max(epsilon_at(lambda e, p=p: profile(p, e), 1e-8) for p in found))
    assert low < ends[1]
    assert ends[0] < high
    assert ends[1] - ends[0] < 5e-4 * ends[1]


@pytest.mark.parametrize(
    ("z", "steps", "wide"), [(1.0, 1000, 1e-3), (0.3, 300, 1e-3), (5.0, 60, 1.5e-3)]
)
def test_the_interval_is_narrow(z, steps, wide):
    for delta in (1e-5, 1e-12):
        low, high = (
            max(epsilon_at(lambda e, p=p: profile(p, e), delta) for p in found)
            for found in (allocation.pairs(z, steps, 1, ONE, upper) for upper in (False, True))
        )
        assert low < high < low * (1 + wide)


def test_ten_epochs_drawn_afresh():
    """1.555 at delta 1e-5; bins that stay the same for all epochs would cost 13.1."""
    ends = []
    for upper in (False, True):
        worst = 0.0
        for pair in allocation.pairs(1.0, 117, 1, ONE, upper):
            loss, mass, infinite = convolved(pair, 10, 5e-5, upper)

            def delta(epsilon, loss=loss, mass=mass, infinite=infinite):
                over = loss > epsilon
                return infinite + mass[over] @ -np.expm1(epsilon - loss[over])

            worst = max(worst, epsilon_at(delta, 1e-5))
        ends.append(worst)
    assert ends[0] < ends[1] < ends[0] * 1.002
    assert ends[0] < 1.5555
    assert ends[1] > 1.5545


def sampled_ratio(z, steps, participations, count, seed):
    """Likelihood ratios under the record's absence: elementary symmetric means of e^X."""
    draws = np.random.default_rng(seed).normal(size=(count, steps))
    factors = np.exp(draws / z - 0.5 / z**2)
    sums = np.zeros((participations + 1, count))
    sums[0] = 1.0
    for i in range(steps):
        sums[1:] += sums[:-1] * factors[:, i]
    return sums[-1] / math.comb(steps, participations)


@pytest.mark.parametrize(
    ("z", "steps", "participations"),
    [(1.0, 5, 1), (0.7, 37, 1), (1.0, 4, 2), (1.5, 11, 3), (2.0, 9, 7)],
)
def test_intervals_hold_sampled_deltas(z, steps, participations):
    ratios = sampled_ratio(z, steps, participations, 200_000, 0)
    for epsilon in (0.1, 0.5, 1.5):
        values = (
            np.maximum(ratios - math.exp(epsilon), 0),
            np.maximum(1 - math.exp(epsilon) * ratios, 0),
        )
        for direction, value in enumerate(values):
            ends = interval(z, steps, epsilon, direction, participations)
            error = 5 * value.std() / math.sqrt(value.size) + 20 / value.size  # never drawn
            assert value.mean() < ends[-1] + error
            if participations == 1:
                assert value.mean() > ends[0] - error
                assert ends[1] - ends[0] < error + 1e-12


def test_more_participations_than_one_have_an_upper_bound_between_one_group_and_no_sampling():
    lone = allocation.pairs(1.0, 20, 1, ONE, True)[0]
    several = allocation.pairs(1.0, 20, 4, ONE, True)[0]
    assert allocation.pairs(1.0, 20, 4, ONE, False) == ()
    for epsilon in (0.5, 2.0, 5.0):
        assert profile(lone, epsilon) < profile(several, epsilon) < gaussian_delta(2.0, epsilon)


def test_uneven_groups_are_a_product_of_both_sizes():
    """Seven steps, three participations: groups of 2, 2 and 3 steps."""
    rng = np.random.default_rng(1)
    factors = np.exp(rng.normal(size=(500_000, 7)) - 0.5)
    ratios = factors[:, :2].mean(1) * factors[:, 2:4].mean(1) * factors[:, 4:].mean(1)
    upper = allocation.pairs(1.0, 7, 3, ONE, True)[0]
    for epsilon in (0.5, 1.5):
        value = np.maximum(ratios - math.exp(epsilon), 0)
        error = 5 * value.std() / 700
        assert value.mean() - error < profile(upper, epsilon) < 1.003 * value.mean() + error


@pytest.mark.parametrize(("z", "steps"), [(0.4, 50), (1.0, 20_003), (8.0, 300)])
def test_means_and_masses_are_kept(z, steps):
    above = allocation.pairs(z, steps, 1, ONE, True)
    below = allocation.pairs(z, steps, 1, ONE, False)
    for pair in above:
        assert pair.p.sum() + pair.infinite == pytest.approx(1, abs=1e-6)
        assert pair.infinite < 1e-19
    for pair in below:
        assert 1 - 1e-6 < pair.p.sum() < 1 + 1e-9
        assert pair.infinite == 0


def test_noise_too_small_is_charged_without_sampling():
    for z, loss in ((0.1, 90.0), (0.001, 1e6), (1e-20, 1e40)):
        (pair,) = allocation.pairs(z, 50, 2, ONE, True)
        truth = gaussian_delta(math.sqrt(2) / z, loss)
        at = np.asarray([loss])
        beyond, _ = pair.tails(at - pair.slack(at))  # what is subtracted is 3 % at most
        assert truth <= beyond[0] * (1 + pair.rounding) < truth * 1.05
        assert allocation.pairs(z, 50, 1, ONE, False) == ()


def test_replacing_a_record_is_refused_and_a_null_record_is_not():
    assert "no dominating pair" in allocation.refuses(8, Relation.REPLACE_ONE)
    assert allocation.pairs(1.0, 8, 1, Relation.REPLACE_ONE, True) == ()
    assert "too many" in allocation.refuses(10**8, ONE)
    assert not allocation.refuses(8, Relation.REPLACE_SPECIAL)
    special_pairs = allocation.pairs(1.0, 8, 1, Relation.REPLACE_SPECIAL, True)
    assert special_pairs is allocation.pairs(1.0, 8, 1, ONE, True)


def test_renyi_is_that_of_full_participation():
    orders = np.array([2.0, 16.0])
    assert allocation.renyi(2.0, 3, orders) == pytest.approx([0.75, 6.0])
