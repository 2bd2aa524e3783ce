"""Ways to draw batches against brute force: fixed size, truncated, shuffled, allocated.

No data set exceeds the upper pair, and some attain it.
"""

import itertools
import math

import numpy as np
import pytest
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting import allocation, batches
from jaxdp.accounting.flat import GaussianStep
from jaxdp.accounting.gaussian import gaussian_delta
from jaxdp.accounting.rdp import DEFAULT_ORDERS, rdp_to_epsilon
from tests.accounting.judging import ADD, REPLACE, SPECIAL, cost, largest, profile, run
from tests.refusing import all_refused

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
    upper, lower = (
        profiles(GaussianStep(z, b / n, "fixed_size").pairs(relation, up)) for up in (True, False)
    )
    np.testing.assert_allclose(truth, upper, atol=4e-6)
    assert (lower <= truth + 4e-6).all()


def test_a_fixed_size_costs_no_more_than_it_must():
    """256 of 50,000, noise equal to what a replacement moves, 2,000 steps.

    The two forms of Wang et al. say 2.4533."""
    renyi = GaussianStep(2.0, 256 / 50_000, "fixed_size").renyi(REPLACE, np.asarray(DEFAULT_ORDERS))
    assert rdp_to_epsilon(2000 * renyi, 1e-5)[0] == pytest.approx(1.7379, abs=5e-4)
    event = acc.Repeated(acc.FixedSizeSampled(acc.Gaussian(2.0), 50_000, 256), 2000)
    assert cost(event, REPLACE, accountant="rdp") < 1.7385
    # It costs more than Poisson batches and less than all.
    fixed, poisson, full = (
        cost(acc.Repeated(step, 1000), REPLACE)
        for step in (
            acc.FixedSizeSampled(acc.Gaussian(5.0), 60_000, 600),
            acc.PoissonSampled(acc.Gaussian(5.0), 0.01),
            acc.Gaussian(5.0),
        )
    )
    assert poisson < fixed < min(10 * poisson, full)


def test_other_relations_are_refused_and_what_does_not_fit():
    fixed = acc.FixedSizeSampled(acc.Gaussian(1.0), 100, 10)
    with pytest.raises(acc.UnsupportedEventError, match="neighbours of equal size"):
        acc.epsilon(fixed, 1e-5, ADD)
    capped = step(1.0, 0.1, 5, 20)
    assert all("replace_special" in capped.refuses(relation) for relation in (ADD, REPLACE))
    assert not capped.refuses(SPECIAL)
    assert "replace_special" in epoch(0.5, 2).refuses(ADD)
    one, long = (acc.RandomlyAllocated(acc.Gaussian(1.0), t) for t in (8, 10**8))
    assert "no dominating pair" in one.refuses(REPLACE)
    assert one.pairs(REPLACE, True) == ()
    assert "too many" in long.refuses(ADD)
    assert not one.refuses(SPECIAL)
    assert one.pairs(SPECIAL, True) is one.pairs(ADD, True)
    inside = acc.Composed([GAUSS, acc.Repeated(acc.PerUser(CYCLIC, 2), 3)])
    whole = "PoissonSampled of a CyclicPoisson event: it is a whole run"
    rows = (
        (ORDERED, ADD, "one removed record shifts every position.*replace_special"),
        (CYCLIC, REPLACE, "two records may be in different groups.*add_or_remove_one"),
        (acc.PoissonSampled(CYCLIC, 0.5), ADD, "PoissonSampled of a CyclicPoisson event"),
        (ALLOCATED, REPLACE, "CyclicAllocation under .*two records may be in different groups"),
        (acc.PoissonSampled(ALLOCATED, 0.5), ADD, "PoissonSampled of a CyclicAllocation event"),
        (acc.PoissonSampled(ORDERED, 1.0), SPECIAL, "PoissonSampled of a CorrelatedNoise event"),
        (acc.FixedSizeSampled(CYCLIC, 9, 3), SPECIAL, "FixedSizeSampled of a CyclicPoisson event"),
        (acc.PoissonSampled(inside, 0.5), ADD, whole),
    )
    all_refused(
        [(words, lambda e=e, r=r: acc.epsilon(e, 1e-5, r)) for e, r, words in rows],
        acc.UnsupportedEventError,
    )
    assert not any(acc.supports(event, relation) for event, relation, _ in rows)
    all_refused([
        ("expected a Gaussian", lambda: acc.CorrelatedNoise(acc.Laplace(1.0), 3)),
        ("steps must be a whole number of at least 1, got 0", lambda: acc.CorrelatedNoise(GAUSS, 0)),
        ("expected a Gaussian", lambda: acc.CyclicPoisson(CYCLIC, 0.1, 4, 10)),
        ("sampling_prob must be .* got 1.5", lambda: acc.CyclicPoisson(GAUSS, 1.5, 4, 10)),
        ("bands must be .* got 0", lambda: acc.CyclicPoisson(GAUSS, 0.1, 0, 10)),
        ("steps must be .* got 2.5", lambda: acc.CyclicPoisson(GAUSS, 0.1, 4, 2.5)),
    ])  # fmt: skip
    budget = acc.RenyiFilter(1.0, 1e-5)
    budget.charge(CYCLIC)
    with pytest.raises(acc.BudgetExceededError):
        budget.charge(acc.Repeated(CYCLIC, 1_000))
    with pytest.raises(acc.UnsupportedEventError):
        budget.charge(ORDERED)


def allocated(z, steps, participations, relation, upper):
    """Pairs of an epoch of random allocation."""
    event = acc.RandomlyAllocated(acc.Gaussian(z), steps, participations)
    return event.pairs(relation, upper)


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
    found = batches.batch_branches(q, cap, n)
    taken = sum(w for b, w in law.items() if 0 in b)
    assert found.free * q + found.full * found.kept == pytest.approx(taken)


@pytest.mark.parametrize(("n", "cap", "q"), [(3, 2, 0.5), (4, 2, 0.3), (3, 1, None), (4, 3, None)])
def test_no_two_adaptive_steps_exceed_two_pairs(n, cap, q):
    """Given each output of the first step the worst data set of a second, in both directions."""
    event = step(1.0, q, cap, n) if q else acc.FixedSizeSampled(acc.Gaussian(1.0), n, cap)
    law = kept(n, q, cap) if q else dict.fromkeys(itertools.combinations(range(n), cap), 1.0)
    weights = np.asarray(list(law.values())) / sum(law.values())
    both = []
    for others in itertools.combinations_with_replacement((-1, 0, 1), n - 1):
        sums = [[sum((a, *others)[i] for i in batch) for batch in law] for a in (1, 0)]
        normal = np.exp(-0.5 * (X - np.asarray(sums)[..., None]) ** 2)
        both.append((weights @ normal) * (X[1] - X[0]) / math.sqrt(2 * math.pi))
    grid = np.linspace(-15, 15, 1001)
    growth = np.exp(grid)[:, None]
    truth = np.zeros(3)
    for way in (1, -1):
        second = np.zeros(grid.size)
        for p, other in (pair[::way] for pair in both):
            second = np.maximum(second, np.maximum(p - growth * other, 0).sum(axis=1))
        for p, other in (pair[::way] for pair in both):
            left = np.asarray([0.3, 1.0, 2.0])[:, None] - np.log(p / other)
            # In the log: below the truth by what a cell of the grid is convex, 1e-4 of it.
            found = np.exp(np.interp(left, grid, np.log(np.maximum(second, 1e-300))))
            truth = np.maximum(truth, (p * found).sum(axis=1))
    ends = [acc.delta(acc.Repeated(event, 2), epsilon, SPECIAL) for epsilon in (0.3, 1.0, 2.0)]
    assert (truth <= np.asarray([end.upper for end in ends]) * (1 + 1e-3)).all()
    assert (np.asarray([end.lower for end in ends]) <= truth * (1 + 1e-3)).all()


def test_binomial_tails():
    """Summed in 40 digits: P(cap - 1 others or more), and given these what is kept, what is near."""
    for n, q, cap, full, given, near in (
        (60_000, 512 / 60_000, 576, 0.00318372389636539, 0.00843712190617997, 0.12216384603444),
        (10**8, 1e-5, 1100, 0.00106706137713669, 9.92292080076512e-6, 0.0979172624647746),
    ):
        found = batches.batch_branches(q, cap, n)
        assert found[:2] == pytest.approx((1 - full, full), rel=1e-11), n
        assert given * (1 - 1e-14) <= found.kept <= given * (1 + 1e-9), n
        assert near * (1 - 4e-9) <= found.near <= near * (1 + 1e-14), n
    # Ends: a batch of one, no record in it for sure, all for sure.
    for n, q, cap in ((3, 0.3, 1), (10**6, 1e-9, 100), (4, 1.0, 2)):
        found = batches.batch_branches(q, cap, n)
        assert found.free + found.full == pytest.approx(1)
        assert all(0 <= share <= 1 for share in found)


def test_others_that_point_away_tell_nearly_all_that_is_charged():
    """500 steps; lower ends by a transform of 400,000 bins, upper ends of cap 110 likewise."""
    fixed = acc.Repeated(acc.FixedSizeSampled(acc.Gaussian(1.0), 10_000, 100), 500)
    found = acc.epsilon(fixed, 1e-5, SPECIAL)
    assert found.lower == pytest.approx(8.0365, abs=1e-3)
    assert found.upper < 1.01 * found.lower
    capped = acc.epsilon(acc.Repeated(step(1.0, 0.01, 110, 10_000), 500), 1e-5, SPECIAL)
    assert capped.upper == pytest.approx(2.37434, abs=1e-4)  # a batch shown to be full: 4.8873
    # Where the noise leaves no bin of both laws, the others contribute nothing.
    assert acc.epsilon(acc.FixedSizeSampled(acc.Gaussian(0.02), 10, 5), 1e-5, SPECIAL).lower > 900


def test_a_cap_that_is_never_reached_is_none_and_a_lower_one_costs_more():
    plain = [batches.BatchGaussian(0.01, 1.0, d) for d in ((1, 0, 1), (0, 1, 1))]
    for cap, n in ((100, 100), (1000, 1001)):
        found = profiles(step(1.0, 0.01, cap, n).pairs(SPECIAL, True))
        np.testing.assert_allclose(found, profiles(plain), rtol=1e-8)
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
    # Of noise too small there is no lower pair.
    assert epoch(1e-3, 10).pairs(SPECIAL, False) == ()
    orders = np.asarray([2.0])
    once, twice = (epoch(0.5, 2).renyi(relation, orders) for relation in (SPECIAL, REPLACE))
    assert twice == pytest.approx(4 * once)


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


# Random allocation: certified intervals against quadrature, Monte Carlo and known values.


def of_losses(pair, epsilon):
    over = pair.loss > epsilon
    return pair.infinite + float(pair.p[over] @ -np.expm1(epsilon - pair.loss[over]))


def interval(z, steps, epsilon, direction, participations=1):
    """(lower, upper) delta of an epoch, direction 0 forward and 1 reverse."""
    ends = []
    for upper, sign in ((False, -1), (True, 1)):
        found = allocated(z, steps, participations, ADD, upper)
        if found:
            pair = found[direction]
            ends.append(of_losses(pair, epsilon) * (1 + sign * pair.rounding))
    return ends


def epsilons(z, steps, delta):
    """(lower, upper) epsilon of an epoch."""
    return [
        max(epsilon_at(lambda e, pair=pair: of_losses(pair, e), delta) for pair in found)
        for found in (allocated(z, steps, 1, ADD, upper) for upper in (False, True))
    ]


def test_one_group_of_all_steps_is_a_plain_gaussian_and_two_steps_a_double_integral():
    for z, full, relative in itertools.product((0.3, 1.0, 5.0), (1, 4), (0.2, 1.0, 3.0)):
        mu = math.sqrt(full) / z
        epsilon = relative * max(mu, mu * mu / 2)
        truth = gaussian_delta(mu, epsilon)
        for upper in (False, True):
            found = largest(allocated(z, full, full, ADD, upper), epsilon)
            assert found == pytest.approx(truth, rel=1e-8), (z, full, relative)
    # Two steps match a double integral, the inner in closed form and the outer on a grid.
    for z, epsilon, *truths in (
        (0.5, 1.0, 0.4045775003764, 0.380339194396),
        (0.5, 8.0, 0.0001419324979308, 9.846264927175e-07),
        (1.0, 0.5, 0.1491775231341, 0.1426869658224),
        (1.0, 3.0, 0.0001677027714102, 1.590265081858e-05),
        (4.0, 0.6, 2.485132732286e-05, 2.278518955413e-05),
        (3.0, 0.0, 0.09501352129568, 0.09501352129568),
    ):
        for direction, truth in enumerate(truths):
            lower, upper = interval(z, 2, epsilon, direction)
            assert lower * (1 - 1e-8) <= truth <= upper * (1 + 1e-8) + 1e-20, (z, epsilon)
            assert upper - lower < 0.01 * truth + 1e-20, (z, epsilon)
        bound = acc.delta(acc.RandomAllocation(acc.Gaussian(z), 2), epsilon)
        assert bound.lower * (1 - 1e-6) <= max(truths) <= bound.upper * (1 + 1e-6), (z, epsilon)


def test_epsilon_of_epochs_is_within_independent_and_narrow_bounds():
    for steps, low, high in ((8, 3.71825, 3.71903), (64, 1.79843, 1.79919)):
        lower, upper = epsilons(1.0, steps, 1e-8)
        assert low < upper
        assert lower < high
        assert upper - lower < 5e-4 * upper
    for z, steps, wide in ((1.0, 1000, 1e-3), (0.3, 300, 1e-3), (5.0, 60, 1.5e-3)):
        for delta in (1e-5, 1e-12):
            low, high = epsilons(z, steps, delta)
            assert low < high < low * (1 + wide), (z, delta)
    # PLD_accounting 2.0, of Feldman and Shenfeld 2026 (arXiv:2602.17284), has 0.2079 to 0.2170.
    epoch = acc.RandomAllocation(acc.Gaussian(1.0), 500)
    for epochs, low, high in ((1, 0.2118, 0.21195), (10, 0.6828, 0.68328)):
        bound = acc.epsilon(acc.Repeated(epoch, epochs), 1e-5)
        assert low < bound.lower < bound.upper < high
    # 1.555 by plain convolutions; bins that stay the same for all epochs would cost 13.1.
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
            assert ends[0] - error < value.mean() < ends[1] + error
            if participations == 1:
                assert ends[1] - ends[0] < error + 1e-12


def test_more_participations_than_one_have_an_upper_bound_between_one_group_and_no_sampling():
    lone, several = (allocated(1.0, 20, count, ADD, True)[0] for count in (1, 4))
    for epsilon in (0.5, 2.0, 5.0):
        most = gaussian_delta(2.0, epsilon)
        assert of_losses(lone, epsilon) < of_losses(several, epsilon) < most
    # Seven steps, three participations: groups of 2, 2 and 3 steps.
    factors = np.exp(np.random.default_rng(1).normal(size=(500_000, 7)) - 0.5)
    ratios = factors[:, :2].mean(1) * factors[:, 2:4].mean(1) * factors[:, 4:].mean(1)
    upper = allocated(1.0, 7, 3, ADD, True)[0]
    for epsilon in (0.5, 1.5):
        value = np.maximum(ratios - math.exp(epsilon), 0)
        error = 5 * value.std() / 700
        assert value.mean() - error < of_losses(upper, epsilon) < 1.003 * value.mean() + error


def test_two_of_three_steps_match_a_double_integral():
    """Given two outputs the ratio is linear in the third's: an option's price in closed form."""
    z, y = 0.8, np.linspace(-9, 9, 1201)
    first = np.exp(y / z - 0.5 / z**2)
    mass = np.exp(-0.5 * y * y) * (y[1] - y[0]) / math.sqrt(2 * math.pi)
    a, b = first[:, None] * first / 3, (first[:, None] + first) / 3
    for epsilon in (0.2, 1.0, 3.0):
        strike = (math.exp(epsilon) - a) / b
        with np.errstate(all="ignore"):
            d = np.where(strike > 0, -np.log(strike) * z + 0.5 / z, np.inf)
        call = b * (special.ndtr(d) - strike * special.ndtr(d - 1 / z))
        lower, upper = interval(z, 3, epsilon, 0, 2)
        truth = float(mass @ call @ mass)
        assert 0.75 * truth < lower < truth < upper, epsilon


def test_the_lower_end_of_several_participations_is_that_of_a_statistic(monkeypatch):
    # Its two laws, against all outcomes and all sets of steps.
    z, edges = 0.9, np.asarray([0.1, 1.2])
    monkeypatch.setattr(allocation, "_thresholds", lambda *_: edges)
    pairs = allocation.score_pairs.__wrapped__(z, 4, 2)
    cells = [np.diff(np.r_[0, special.ndtr((edges - mean) / z), 1]) for mean in (0, 1)]
    laws = np.zeros((2, 9))
    for own in itertools.combinations(range(4), 2):
        for score in itertools.product(range(3), repeat=4):
            laws[0, sum(score)] += math.prod(cells[i in own][s] for i, s in enumerate(score)) / 6
            laws[1, sum(score)] += math.prod(cells[0][s] for s in score) / 6
    for pair, (p, q) in zip(pairs, (laws, laws[::-1]), strict=True):
        order = np.argsort(p / q)
        np.testing.assert_allclose((pair.p, pair.q), (p[order], q[order]), rtol=1e-12)
    monkeypatch.undo()
    # Five epochs of 4 of 100: 5.88 at the same rate by Poisson.
    bound = acc.epsilon(acc.Repeated(acc.RandomAllocation(acc.Gaussian(1.0), 100, 4), 5), 1e-5)
    assert 5.28 < bound.lower < bound.upper < 5.41
    # Importance sampling of one epoch says 2.316, 1.205, and 8.142, to a hundredth.
    for steps, k, truth in ((100, 4, 2.316), (100, 2, 1.205), (50, 10, 8.142)):
        bound = acc.epsilon(acc.RandomAllocation(acc.Gaussian(1.0), steps, k), 1e-5)
        assert 0.99 * truth < bound.lower < truth + 0.01 < bound.upper, steps
    # Much noise, all steps but one, too many steps.
    for z, steps, k in ((1e3, 50, 3), (1.0, 8, 7), (0.5, 50, 10)):
        bound = acc.epsilon(acc.RandomAllocation(acc.Gaussian(z), steps, k), 1e-6)
        assert 0.85 * bound.upper < bound.lower < bound.upper, (z, steps)
    assert allocated(1.0, 10**6, 10, ADD, False) == ()
    # No score is likely with the record and without.
    bound = acc.epsilon(acc.RandomAllocation(acc.Gaussian(0.15), 60, 59), 1e-5)
    assert bound.lower == 0 < bound.upper < 2_000


def test_a_score_of_one_participation_is_below_the_law_that_is_tight():
    for z, steps in ((0.15, 3), (1.0, 2), (50.0, 10)):
        above = allocation.epoch_pairs(z, steps, 1, True)
        for below, tight in zip(allocation.score_pairs(z, steps, 1), above, strict=True):
            epsilons = np.linspace(0, below.loss[-1], 40)
            p, q = below.tails(epsilons)
            most, least = tight.tails(epsilons)
            shown = p * (1 - below.rounding) - np.exp(epsilons) * q
            assert np.all(shown <= most * (1 + 1e-9) - np.exp(epsilons) * least * (1 - 1e-9))
            assert shown[0] > 0.98 * (most[0] - least[0])


def test_means_and_masses_are_kept_and_noise_too_small_is_charged_without_sampling():
    for z, loss in ((0.1, 90.0), (0.001, 1e6), (1e-20, 1e40)):
        (pair,) = allocated(z, 50, 2, ADD, True)
        truth = gaussian_delta(math.sqrt(2) / z, loss)
        at = np.asarray([loss])
        beyond, _ = pair.tails(at - pair.slack(at))  # what is subtracted is 3 % at most
        assert truth <= beyond[0] * (1 + pair.rounding) < truth * 1.05, z
        assert allocated(z, 50, 1, ADD, False) == (), z
    assert acc.RandomlyAllocated(acc.Gaussian(2.0), 9, 3).renyi(
        ADD, np.array([2.0, 16.0])
    ) == pytest.approx([0.75, 6.0])
    for z, steps in ((0.4, 50), (1.0, 20_003), (8.0, 300)):
        for pair in allocated(z, steps, 1, ADD, True):
            assert pair.p.sum() + pair.infinite == pytest.approx(1, abs=1e-6)
            assert pair.infinite < 1e-19, z
        for pair in allocated(z, steps, 1, ADD, False):
            assert 1 - 1e-6 < pair.p.sum() < 1 + 1e-9, z
            assert pair.infinite == 0


# Runs with correlated noise, against whole releases worked out by brute force ---------------------

GAUSS = acc.Gaussian(2.0)
ORDERED = acc.CorrelatedNoise(GAUSS, 10)
CYCLIC = acc.CyclicPoisson(GAUSS, 0.1, 4, 10)
ALLOCATED = acc.CyclicAllocation(GAUSS, 4, 2, 10)
BANDED = np.asarray([[0.8, 0, 0, 0], [0.6, 0.8, 0, 0], [0, 0.6, 0.8, 0], [0, 0, 0.6, 0.8]])
SIGMA = 0.9


def test_cyclic_poisson_is_one_poisson_step_a_round_and_a_public_order_one_gaussian():
    for bands, steps, rounds in ((1, 10, 10), (4, 10, 3), (5, 10, 2), (99, 7, 1)):
        event, plain = acc.CyclicPoisson(GAUSS, 0.1, bands, steps), run(0.1, 2.0, rounds)
        for relation, accountant in ((ADD, "auto"), (SPECIAL, "exact"), (ADD, "rdp")):
            found = acc.epsilon(event, 1e-5, relation, accountant)
            assert found == acc.epsilon(plain, 1e-5, relation, accountant), (bands, accountant)
        for relation in (ADD, SPECIAL):
            assert acc.delta(event, 0.5, relation) == acc.delta(plain, 0.5, relation), bands

    # 500 of 50,000 records expected in each of 2,000 steps, epsilon 2 at delta 1e-5.
    def noise(bands):
        q = bands * 500 / 50_000
        return acc.calibrate(
            lambda z: acc.CyclicPoisson(acc.Gaussian(z), q, bands, 2_000), 2.0, 1e-5, tolerance=1e-6
        )

    assert noise(8) == pytest.approx(2.70808, rel=1e-4)
    assert noise(1) == acc.calibrate_noise_multiplier(2.0, 1e-5, 0.01, 2_000)
    # Allocation in a group's slots: epochs of them, whole ones.
    epoch = acc.RandomAllocation(GAUSS, 4)
    for steps, epochs in ((7, 1), (8, 1), (15, 2), (16, 2)):  # without the last group's last step
        event = acc.CyclicAllocation(GAUSS, 4, 2, steps)
        assert acc.epsilon(event, 1e-5) == acc.epsilon(acc.Repeated(epoch, epochs), 1e-5), steps
    # One that is cut short costs the whole, and its record may never have been drawn.
    for steps, epochs in ((1, 1), (6, 1), (9, 2), (14, 2)):
        event = acc.CyclicAllocation(GAUSS, 4, 2, steps)
        found, all_drawn = (acc.epsilon(e, 1e-5) for e in (event, acc.Repeated(epoch, epochs)))
        assert found.upper == pytest.approx(all_drawn.upper, rel=1e-4), steps
        least = acc.epsilon(acc.Repeated(epoch, epochs - 1), 1e-5).upper
        assert 0.998 * least <= found.lower <= least, steps
    event = acc.CyclicAllocation(acc.Gaussian(2.7081), 12, 8, 21 * 96)
    assert cost(event) == pytest.approx(2.0163, abs=2e-3)  # cyclic Poisson: 2.1020
    # A public order is one Gaussian.
    for relation in (REPLACE, SPECIAL):
        for accountant in ("auto", "exact", "gdp", "rdp"):
            found = acc.epsilon(ORDERED, 1e-5, relation, accountant)
            assert found == acc.epsilon(GAUSS, 1e-5, relation, accountant), accountant
    half = cost(acc.CorrelatedNoise(acc.Gaussian(1.0), 10), SPECIAL)
    assert cost(ORDERED, REPLACE) == pytest.approx(half, rel=1e-9)
    both = acc.Composed([acc.Repeated(acc.PerUser(CYCLIC, 3), 2), ORDERED])
    kinds = ORDERED, CYCLIC, ALLOCATED
    assert {e.block for one in kinds for e in (one, acc.PerUser(one, 2))} == {10}
    for event in (*kinds, both):
        assert acc.events.from_dict(acc.events.to_dict(event)) == event
        assert "10 steps" in event.describe()
    steps = run(0.1, 2.0, 3)
    together = acc.Composed([acc.Repeated(CYCLIC, 2), acc.PerUser(ORDERED, 2), acc.Laplace(3.0)])
    plain = acc.Composed([acc.Repeated(steps, 2), GAUSS, acc.Laplace(3.0)])
    assert acc.epsilon(together, 1e-5, SPECIAL) == acc.epsilon(plain, 1e-5, SPECIAL)
    assert acc.epsilon(acc.PerUser(CYCLIC, 3), 1e-5) == acc.epsilon(CYCLIC, 1e-5)
    tuned, alike = (acc.Tuned(one, acc.Geometric(0.2)) for one in (CYCLIC, steps))
    assert acc.epsilon(tuned, 1e-5) == acc.epsilon(alike, 1e-5)
    # The records of a group may be in different groups: a chain.
    third = acc.epsilon(acc.Gaussian(2.0 / 3), 1e-5, SPECIAL)
    assert acc.group_epsilon(ORDERED, 1e-5, 3, SPECIAL) == third
    one, three = acc.epsilon(CYCLIC, 1e-5), acc.group_epsilon(CYCLIC, 1e-5, 3)
    assert three.lower == one.lower
    assert three.upper > 3 * one.upper
    for event in (acc.CorrelatedNoise(acc.Gaussian(0.0), 3), acc.CyclicPoisson(GAUSS, 1.0, 2, 3)):
        assert cost(event, SPECIAL) > 1
    nothing = acc.CyclicPoisson(acc.Gaussian(0.0), 0.5, 2, 3)
    assert cost(nothing) == math.inf
    assert cost(acc.CyclicPoisson(GAUSS, 0.0, 2, 3)) == 0


def test_the_whole_release_of_four_steps_and_two_bands():
    """Deltas of all rows under BANDED, the worse direction, of a record that always contributes 1.

    From the densities on a grid of the two directions in which the laws of its draws differ.
    """
    for epsilon, attained, less in (
        (0.0, 0.30060467, 0.2732630817), (0.4, 0.2008008896, 0.1705441933),
        (1.0, 0.09909076201, 0.0744445886), (2.0, 0.02365219685, 0.01374468168),
    ):  # fmt: skip
        bound = acc.delta(acc.CyclicPoisson(acc.Gaussian(SIGMA), 0.5, 2, 4), epsilon)
        assert attained == pytest.approx(bound.estimate, rel=2e-4)
        assert bound.lower * (1 - 2e-4) <= attained <= bound.upper * (1 + 2e-4), epsilon
        assert less < bound.lower, epsilon  # of the second group: its last column is shorter


def sampled_deltas(mean, rows, draws, epsilons, size=400_000):
    """(delta, standard error) of a release of dependent rows, from the world without the record.

    ``mean(i, w, drawn)`` is the mean of row i, [size], after rows w, [i, size], where ``drawn`` are
    the steps in which the record was drawn; ``draws`` gives the probability of each of them.
    """
    rng, w = np.random.default_rng(1), np.zeros((0, size))
    for i in range(rows):
        w = np.vstack([w, mean(i, w, ()) + SIGMA * rng.standard_normal(size)])

    def law(drawn):
        squares = sum((w[i] - mean(i, w[:i], drawn)) ** 2 for i in range(rows))
        return np.exp(-squares / (2 * SIGMA**2))

    ratio = sum(chance * law(drawn) for drawn, chance in draws.items()) / law(())
    for e in np.exp(epsilons):
        both = [np.maximum(ratio - e, 0), np.maximum(1 - e * ratio, 0)]
        yield max((float(v.mean()), float(v.std()) / math.sqrt(size)) for v in both)


def others(j, w):
    """The others' sum in step j, which depends on the rows before."""
    return 5 * np.sin(w[:j].sum(axis=0)) if j else 0.0


def own(j, w):
    """The record's contribution, of norm 1, which it chooses after the rows before."""
    return np.where(w[j - 1] + w[0] > 0.5, 1.0, -1.0) if j else 1.0


@pytest.mark.parametrize("group", [0, 1])
def test_contributions_that_depend_on_the_release_cost_no_more(group):
    def mean(i, w, drawn):
        return sum(
            BANDED[i, j] * (others(j, w) + (own(j, w) if j in drawn else 0)) for j in range(i + 1)
        )

    steps = (group, group + 2)
    draws = {
        tuple(j for j, on in zip(steps, choice, strict=True) if on): 0.25
        for choice in itertools.product((0, 1), repeat=2)
    }
    epsilons = (0.0, 0.5, 1.5)
    deltas = sampled_deltas(mean, 4, draws, epsilons)
    for epsilon, (found, error) in zip(epsilons, deltas, strict=True):
        bound = acc.delta(acc.CyclicPoisson(acc.Gaussian(SIGMA), 0.5, 2, 4), epsilon)
        assert found <= bound.upper + 4 * error, epsilon
        if group == 0:  # every block is moved as far as a block can be
            assert found == pytest.approx(bound.upper, abs=5 * error), epsilon


@pytest.mark.parametrize("kind", ["poisson", "min-sep", "allocation", "group"])
def test_draws_that_are_not_cyclic_under_two_bands(kind):
    """docs/proofs/correlated_noise.md, Theorems 4 and 5."""

    def mean(i, w, drawn):
        return sum(
            BANDED[i, j] * (others(j, w) + (own(j, w) if j in drawn else 0)) for j in range(i + 1)
        )

    p, draws = 0.3, {}
    for drawn in itertools.product((0, 1), repeat=4):
        chance, blocked = 1.0, False
        for on in drawn:
            hazard = 0.0 if blocked and kind == "min-sep" else p
            chance, blocked = chance * (hazard if on else 1 - hazard), bool(on)
        draws[tuple(np.flatnonzero(drawn))] = chance
    split = acc.Gaussian(SIGMA / math.sqrt(float((BANDED.T @ BANDED).sum(axis=1).max())))
    event = acc.Repeated(acc.PoissonSampled(split, p), 4)
    if kind == "allocation":
        draws, event = {(j,): 0.25 for j in range(4)}, acc.RandomAllocation(split, 4)
    if kind == "group":
        draws, event = {(0,): 0.5, (2,): 0.5}, acc.CyclicAllocation(acc.Gaussian(SIGMA), 2, 2, 4)
    assert sum(draws.values()) == pytest.approx(1)
    draws = {drawn: chance for drawn, chance in draws.items() if chance}
    epsilons = (0.0, 0.5, 1.5)
    deltas = sampled_deltas(mean, 4, draws, epsilons)
    for epsilon, (found, error) in zip(epsilons, deltas, strict=True):
        upper = acc.delta(event, epsilon).upper
        assert found <= upper + 4 * error, epsilon
        if kind == "group":  # attained
            assert found == pytest.approx(upper, abs=5 * error), epsilon


STRATEGY = np.asarray([[1.0, 0, 0, 0], [0.5, 1, 0, 0], [0.4, 0.5, 1, 0], [0.3, 0.4, 0.5, 1]])


def test_a_public_order_and_its_tail_made_again():
    """The record is in steps 0 and 2; rows 2 and 3 are released again, after new contributions."""
    sensitivity = np.linalg.norm(STRATEGY[:, 0] + STRATEGY[:, 2])

    def mean(i, w, drawn):
        again = i > 3
        row, seen = (i - 2, np.vstack([w[:2], w[4:]])) if again else (i, w)

        def moved(j):
            if j not in drawn:
                return 0.0
            # The second run has seen the whole first one.
            return np.sign(w[3] - w[1]) if again and j == 2 else own(j, w)

        return sum(STRATEGY[row, j] * (others(j, seen) + moved(j)) for j in range(row + 1))

    for rows, times in ((4, 1), (6, 2)):
        deltas = sampled_deltas(mean, rows, {(0, 2): 1.0}, (0.0, 1.0, 2.5))
        event = acc.CorrelatedNoise(acc.Gaussian(SIGMA / sensitivity), 4)
        for epsilon, (found, error) in zip((0.0, 1.0, 2.5), deltas, strict=True):
            bound = acc.delta(acc.Repeated(event, times), epsilon, SPECIAL)
            assert found <= bound.upper + 4 * error, (rows, epsilon)
