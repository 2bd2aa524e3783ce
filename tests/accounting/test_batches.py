"""Ways to draw batches against brute force: fixed size, truncated, shuffled, allocated.

No data set exceeds the upper pair, and some attain it.
"""

import itertools
import math

import mpmath as mp
import numpy as np
import pytest
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting import allocation, fixed_size, truncated
from jaxdp.accounting.gaussian import gaussian_delta
from jaxdp.accounting.rdp import DEFAULT_ORDERS, rdp_to_epsilon
from tests.accounting.judging import ADD, REPLACE, SPECIAL, largest, profile

EPSILONS = np.asarray([-1.0, -0.1, 0.0, 0.02, 0.3, 1.0, 2.0])
X = np.linspace(-12, 12, 4001)


def profiles(pairs):
    return np.max([profile(pair, EPSILONS) for pair in pairs], axis=0)


def worst(law, n, z, changes):
    """The largest profile over what all others contribute, -1, 0 or 1, and changes of record 0.

    ``law`` maps batches to probabilities.
    """
    batches, weights = list(law), np.asarray(list(law.values()))
    scale = z * math.sqrt(2 * math.pi)

    def density(records):
        sums = np.asarray([sum(records[i] for i in batch) for batch in batches])
        return weights @ np.exp(-0.5 * ((X - sums[:, None]) / z) ** 2) / scale

    best = np.zeros(EPSILONS.size)
    for others in itertools.combinations_with_replacement((-1, 0, 1), n - 1):  # batches are sets
        for a, b in changes:
            p, q = density((a, *others)), density((b, *others))
            excess = np.maximum(p - np.exp(EPSILONS)[:, None] * q, 0)
            best = np.maximum(best, excess.sum(axis=1) * (X[1] - X[0]))
    return best


@pytest.mark.parametrize("relation", [REPLACE, SPECIAL])
@pytest.mark.parametrize(("n", "b", "z"), [(3, 1, 1.0), (4, 2, 0.7), (4, 3, 1.0)])
def test_the_pair_is_attained_and_never_exceeded(n, b, z, relation):
    batches = list(itertools.combinations(range(n), b))
    law = dict.fromkeys(batches, 1 / len(batches))
    truth = worst(law, n, z, ((1, -1), (-1, 1)) if relation is REPLACE else ((1, 0), (0, 1)))
    upper, lower = (profiles(fixed_size.pairs(z, b / n, relation, up)) for up in (True, False))
    np.testing.assert_allclose(truth, upper, atol=4e-6)
    assert (lower <= truth + 4e-6).all()


def test_renyi_of_a_fixed_size_is_no_larger_than_it_must_be():
    """256 of 50,000, noise equal to what a replacement moves, 2,000 steps.

    The two forms of Wang et al. say 2.4533.
    """
    renyi = fixed_size.renyi(2.0, 256 / 50_000, REPLACE, np.asarray(DEFAULT_ORDERS))
    assert rdp_to_epsilon(2000 * renyi, 1e-5)[0] == pytest.approx(1.7379, abs=5e-4)
    event = acc.Repeated(acc.FixedSizeSampled(acc.Gaussian(2.0), 50_000, 256), 2000)
    assert acc.epsilon(event, 1e-5, REPLACE, accountant="rdp").upper < 1.7385


def test_a_fixed_size_costs_more_than_poisson_and_less_than_all():
    fixed, poisson, full = (
        acc.epsilon(acc.Repeated(step, 1000), 1e-5, REPLACE).upper
        for step in (
            acc.FixedSizeSampled(acc.Gaussian(5.0), 60_000, 600),
            acc.PoissonSampled(acc.Gaussian(5.0), 0.01),
            acc.Gaussian(5.0),
        )
    )
    assert poisson < fixed < min(10 * poisson, full)


def test_other_relations_are_refused():
    fixed = acc.FixedSizeSampled(acc.Gaussian(1.0), 100, 10)
    with pytest.raises(acc.UnsupportedEventError, match="neighbours of equal size"):
        acc.epsilon(fixed, 1e-5, ADD)
    capped = step(1.0, 0.1, 5, 20)
    assert all("replace_special" in capped.refuses(relation) for relation in (ADD, REPLACE))
    assert not capped.refuses(SPECIAL)
    assert "replace_special" in epoch(0.5, 2).refuses(ADD)
    assert "no dominating pair" in allocation.refuses(8, REPLACE)
    assert allocation.pairs(1.0, 8, 1, REPLACE, True) == ()
    assert "too many" in allocation.refuses(10**8, ADD)
    assert not allocation.refuses(8, SPECIAL)
    assert allocation.pairs(1.0, 8, 1, SPECIAL, True) is allocation.pairs(1.0, 8, 1, ADD, True)


# Truncated Poisson batches.


def step(z, q, cap, n):
    return acc.TruncatedPoisson(acc.Gaussian(z), q, cap, n)


def kept(n, q, cap):
    """The law of the kept records, draw by draw."""
    law = {}
    for drawn in itertools.product((False, True), repeat=n):
        records = [i for i in range(n) if drawn[i]]
        subsets = list(itertools.combinations(records, min(cap, len(records))))
        for subset in subsets:
            weight = q ** len(records) * (1 - q) ** (n - len(records)) / len(subsets)
            law[subset] = law.get(subset, 0.0) + weight
    return law


@pytest.mark.parametrize(
    ("n", "cap", "q", "z"),
    [(3, 1, 0.3, 1.0), (4, 2, 0.5, 0.7), (4, 1, 0.9, 0.6), (4, 3, 0.7, 0.8), (4, 2, 1.0, 0.8)],
)
def test_no_data_set_exceeds_the_pair(n, cap, q, z):
    law = kept(n, q, cap)
    truth = worst(law, n, z, ((1, 0), (0, 1)))
    upper, lower = (profiles(step(z, q, cap, n).pairs(SPECIAL, up)) for up in (True, False))
    assert (truth <= upper + 4e-6).all()
    assert (upper[2] - truth[2]) < 0.02 * truth[2]  # nearly attained at epsilon 0
    assert (lower <= truth + 4e-6).all()
    free, full, given = truncated.branches(q, cap, n)
    assert free * q + full * given == pytest.approx(sum(w for b, w in law.items() if 0 in b))


def test_binomial_tails():
    def tail(records, least):
        with mp.workdps(30):
            rate = mp.mpf(q)
            term = mp.binomial(records, least) * rate**least * (1 - rate) ** (records - least)
            total, j = mp.mpf(0), least
            while term > total * mp.mpf(10) ** -20:
                total, term = total + term, term * (records - j) / (j + 1) * rate / (1 - rate)
                j += 1
            return total

    for n, q, cap in ((60_000, 512 / 60_000, 576), (10**8, 1e-5, 1100)):
        free, full, given = truncated.branches(q, cap, n)
        truth = tail(n - 1, cap)
        assert full == pytest.approx(float(truth), rel=1e-11)
        assert free == pytest.approx(float(1 - truth), rel=1e-11)
        exact = float(cap * tail(n, cap + 1) / n / truth)
        assert exact <= given <= exact * (1 + 1e-9), n


def test_a_cap_that_is_never_reached_is_no_cap():
    plain = [truncated.Mixture(0.01, 1.0, d) for d in ((1, 0, 1), (0, 1, 1))]
    for cap, n in ((100, 100), (1000, 1001)):
        found = profiles(step(1.0, 0.01, cap, n).pairs(SPECIAL, True))
        np.testing.assert_allclose(found, profiles(plain), rtol=1e-8)


def test_renyi_grows_as_the_cap_falls():
    orders = np.asarray([1.5, 2.0, 8.0, 20.0])
    curves = [step(1.23, 0.0085, cap, 60_000).renyi(SPECIAL, orders) for cap in (700, 576, 512)]
    assert (curves[0] < curves[1]).all()
    assert (curves[1] < curves[2]).all()
    assert (curves[2] <= 0.5 * orders / 1.23**2).all()
    assert not step(1.0, 0.0, 5, 10).renyi(SPECIAL, orders).any()


# A shuffled epoch.


def epoch(z, steps):
    return acc.ShuffledEpoch(acc.Gaussian(z), steps)


def epsilon_at(delta_at, delta):
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high


def test_figures_of_ten_thousand_batches():
    """Noise multiplier 0.5, delta 1e-6: Poisson accounting would say 1.95322."""
    pairs = [epoch(0.5, 10_000).pairs(SPECIAL, up)[:1] for up in (False, True)]
    lower, upper = (epsilon_at(lambda e, pair=pair: largest(pair, e), 1e-6) for pair in pairs)
    assert lower == pytest.approx(10.9948, abs=5e-5)
    assert upper == pytest.approx(10.99715, abs=5e-6)


@pytest.mark.parametrize("relation", [SPECIAL, REPLACE])
def test_no_data_set_exceeds_the_upper_pair(relation):
    """Two batches of one and of two records, all orders, both noisy sums on a grid."""
    z = 0.9
    x = np.linspace(-8, 8, 161)
    gauss = {s: np.exp(-0.5 * ((x - s) / z) ** 2) * (x[1] - x[0]) for s in range(-3, 4)}

    def law(records):
        orders = list(itertools.permutations(records))
        terms = (np.outer(gauss[r[0]], gauss[r[1] + r[2]]) for r in orders)
        return sum(terms) / (2 * math.pi * z * z * len(orders))

    upper, lower = (epoch(z, 2).pairs(relation, up)[:1] for up in (True, False))
    assert (lower[0].p.sum(), lower[0].q.sum()) == pytest.approx((1, 1), abs=1e-12)
    changes = ((1, 0), (0, 1)) if relation is SPECIAL else ((1, -1), (-1, 1))
    for eps in (0.0, 0.5, 1.5):
        found = max(
            np.maximum(law((a, *o)) - math.exp(eps) * law((b, *o)), 0).sum()
            for a, b in changes
            for o in itertools.combinations_with_replacement((-1, 0, 1), 2)
        )
        assert largest(lower, eps) - 1e-4 <= found <= largest(upper, eps) + 1e-4, eps


def test_a_shuffled_epoch_of_noise_too_small_has_no_lower_pair():
    assert epoch(1e-3, 10).pairs(SPECIAL, False) == ()
    orders = np.asarray([2.0])
    once, twice = (epoch(0.5, 2).renyi(relation, orders) for relation in (SPECIAL, REPLACE))
    assert twice == pytest.approx(4 * once)


# Random allocation: certified intervals against quadrature, Monte Carlo and known values.


def of_losses(pair, epsilon):
    over = pair.loss > epsilon
    return pair.infinite + float(pair.p[over] @ -np.expm1(epsilon - pair.loss[over]))


def interval(z, steps, epsilon, direction, participations=1):
    """(lower, upper) delta of an epoch, direction 0 forward and 1 reverse."""
    ends = []
    for upper, sign in ((False, -1), (True, 1)):
        found = allocation.pairs(z, steps, participations, ADD, upper)
        if found:
            pair = found[direction]
            ends.append(of_losses(pair, epsilon) * (1 + sign * pair.rounding))
    return ends


def epsilons(z, steps, delta):
    """(lower, upper) epsilon of an epoch."""
    return [
        max(epsilon_at(lambda e, pair=pair: of_losses(pair, e), delta) for pair in found)
        for found in (allocation.pairs(z, steps, 1, ADD, upper) for upper in (False, True))
    ]


def test_a_record_in_every_step_is_a_plain_gaussian():
    for z, full, relative in itertools.product((0.3, 1.0, 5.0), (1, 4), (0.2, 1.0, 3.0)):
        mu = math.sqrt(full) / z
        epsilon = relative * max(mu, mu * mu / 2)
        truth = gaussian_delta(mu, epsilon)
        for upper in (False, True):
            found = largest(allocation.pairs(z, full, full, ADD, upper), epsilon)
            assert found == pytest.approx(truth, rel=1e-8), (z, full, relative)


def two_steps(z, epsilon):
    """(remove, add) delta for two steps: an inner integral in closed form, the outer on a grid."""
    x = np.linspace(-12 * z, 1 + 12 * z, 300_001)
    weight = np.exp(-0.5 * (x / z) ** 2) * (x[1] - x[0]) / (z * math.sqrt(2 * math.pi))
    first, found = np.exp((x - 0.5) / z**2), []
    for sign in (1, -1):
        # The mean ratio is above e^epsilon, or below e^-epsilon, for a second output beyond y.
        level = 2 * math.exp(sign * epsilon) - first
        y = np.where(level > 0, z * z * np.log(np.maximum(level, 1e-300)) + 0.5, -np.inf)
        absent = special.ndtr(-sign * y / z)
        present = 0.5 * first * absent + 0.5 * special.ndtr(-sign * (y - 1) / z)
        one, other = (present, absent) if sign > 0 else (absent, present)
        found.append(float(weight @ (one - math.exp(epsilon) * other)))
    return found


def test_two_steps_match_a_double_integral():
    for z, epsilon in ((0.5, 1.0), (0.5, 8.0), (1.0, 0.5), (1.0, 3.0), (4, 0.6), (3.0, 0.0)):
        truths = two_steps(z, epsilon)
        for direction, truth in enumerate(truths):
            lower, upper = interval(z, 2, epsilon, direction)
            assert lower * (1 - 1e-8) <= truth <= upper * (1 + 1e-8) + 1e-20, (z, epsilon)
            assert upper - lower < 0.01 * truth + 1e-20, (z, epsilon)
        bound = acc.delta(acc.RandomAllocation(acc.Gaussian(z), 2), epsilon)
        assert bound.lower * (1 - 1e-6) <= max(truths) <= bound.upper * (1 + 1e-6), (z, epsilon)


def test_epsilon_of_an_epoch_is_within_independent_bounds():
    for steps, low, high in ((8, 3.71825, 3.71903), (64, 1.79843, 1.79919)):
        lower, upper = epsilons(1.0, steps, 1e-8)
        assert low < upper
        assert lower < high
        assert upper - lower < 5e-4 * upper


def test_the_interval_is_narrow():
    for z, steps, wide in ((1.0, 1000, 1e-3), (0.3, 300, 1e-3), (5.0, 60, 1.5e-3)):
        for delta in (1e-5, 1e-12):
            low, high = epsilons(z, steps, delta)
            assert low < high < low * (1 + wide), (z, delta)


def test_ten_epochs_drawn_afresh():
    """1.555 by plain convolutions; bins that stay the same for all epochs would cost 13.1."""
    bound = acc.epsilon(acc.Repeated(acc.RandomAllocation(acc.Gaussian(1.0), 117), 10), 1e-5)
    assert bound.lower < 1.5555
    assert bound.upper > 1.5545
    assert bound.lower < bound.upper < bound.lower * 1.002


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
    lone, several = (allocation.pairs(1.0, 20, count, ADD, True)[0] for count in (1, 4))
    assert allocation.pairs(1.0, 20, 4, ADD, False) == ()
    for epsilon in (0.5, 2.0, 5.0):
        most = gaussian_delta(2.0, epsilon)
        assert of_losses(lone, epsilon) < of_losses(several, epsilon) < most


def test_uneven_groups_are_a_product_of_both_sizes():
    """Seven steps, three participations: groups of 2, 2 and 3 steps."""
    factors = np.exp(np.random.default_rng(1).normal(size=(500_000, 7)) - 0.5)
    ratios = factors[:, :2].mean(1) * factors[:, 2:4].mean(1) * factors[:, 4:].mean(1)
    upper = allocation.pairs(1.0, 7, 3, ADD, True)[0]
    for epsilon in (0.5, 1.5):
        value = np.maximum(ratios - math.exp(epsilon), 0)
        error = 5 * value.std() / 700
        assert value.mean() - error < of_losses(upper, epsilon) < 1.003 * value.mean() + error


def test_means_and_masses_are_kept():
    for z, steps in ((0.4, 50), (1.0, 20_003), (8.0, 300)):
        for pair in allocation.pairs(z, steps, 1, ADD, True):
            assert pair.p.sum() + pair.infinite == pytest.approx(1, abs=1e-6)
            assert pair.infinite < 1e-19, z
        for pair in allocation.pairs(z, steps, 1, ADD, False):
            assert 1 - 1e-6 < pair.p.sum() < 1 + 1e-9, z
            assert pair.infinite == 0


def test_noise_too_small_is_charged_without_sampling():
    for z, loss in ((0.1, 90.0), (0.001, 1e6), (1e-20, 1e40)):
        (pair,) = allocation.pairs(z, 50, 2, ADD, True)
        truth = gaussian_delta(math.sqrt(2) / z, loss)
        at = np.asarray([loss])
        beyond, _ = pair.tails(at - pair.slack(at))  # what is subtracted is 3 % at most
        assert truth <= beyond[0] * (1 + pair.rounding) < truth * 1.05, z
        assert allocation.pairs(z, 50, 1, ADD, False) == (), z
    assert allocation.renyi(2.0, 3, np.array([2.0, 16.0])) == pytest.approx([0.75, 6.0])
