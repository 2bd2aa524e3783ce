"""Certificates of compositions against plain convolutions that share nothing with them."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting import certificate, kinds, plan, queries
from jaxdp.accounting.base import Discrete
from jaxdp.accounting.canonical import Step, flatten
from jaxdp.accounting.certificate import Direction, delta_bounds, epsilon_bounds
from jaxdp.accounting.discretise import Atoms
from jaxdp.accounting.gaussian import gaussian_delta
from jaxdp.accounting.pairs import gaussian_pairs
from tests.accounting.judging import ADD, REPLACE, directions, run

RELATIONS = pytest.mark.parametrize("relation", [ADD, REPLACE])


def slices(q, z, relation, reverse):
    """(masses, losses) of 100,000 slices of the output of a step."""
    edges = np.linspace(-10 * z - 1, 1 + 10 * z, 100_001)
    x = (edges[1:] + edges[:-1]) / 2

    def ratio(at):
        return np.log1p(-q) + np.log1p(q / (1 - q) * np.exp((at - 0.5) / z**2))

    none, sampled = (np.diff(special.ndtr((edges - m) / z)) for m in (0, 1))
    loss = ratio(x) - (ratio(-x) if relation is REPLACE else 0)
    mass = none if reverse else (1 - q) * none + q * sampled
    return mass, -loss if reverse else loss


def plain(steps, relation, span, size=1 << 20):
    """delta, as a function of epsilon, by an untilted FFT on a grid of mean-preserving splits."""
    width, totals = span / size, []
    for reverse in (False,) if relation is REPLACE else (False, True):
        spectrum = np.ones(size // 2 + 1, dtype=complex)
        for q, z, n in steps:
            mass, loss = slices(q, z, relation, reverse)
            cell = np.floor(loss / width)
            up = np.expm1(cell * width - loss) / np.expm1(-width)
            index = cell.astype(int)
            law = np.bincount(index % size, mass * (1 - up), minlength=size)
            law += np.bincount((index + 1) % size, mass * up, minlength=size)
            spectrum *= np.fft.rfft(law) ** n
        totals.append(np.fft.irfft(spectrum, size))
    losses = np.fft.fftfreq(size, 1 / span)

    def delta(epsilon):
        gain = np.maximum(-np.expm1(np.minimum(epsilon - losses, 0)), 0)
        return max(float(total @ gain) for total in totals)

    return delta


@RELATIONS
@pytest.mark.parametrize(
    ("steps", "delta", "span"),
    [
        (((0.2, 1.0, 50),), 1e-5, 80.0),
        (((0.01, 0.8, 500),), 1e-6, 60.0),
        (((0.05, 1.0, 30), (0.02, 2.0, 100), (0.3, 5.0, 20)), 1e-4, 60.0),
        (((1e-3, 0.5, 100),), 1e-5, 120.0),
        (((1e-4, 0.4, 1000),), 1e-4, 150.0),
    ],
)
def test_both_ends_hold_the_plain_convolutions_value(steps, delta, span, relation):
    event = acc.Composed([run(*kind) for kind in steps])
    lower, upper = epsilon_bounds(directions(event, relation, delta), None)
    assert 0 < upper - lower <= 1e-3 * upper
    # The plain convolution lies above by its grid.
    truth = plain(steps, relation, span)
    assert truth(upper) <= delta * (1 + 2e-5)
    assert truth(lower) >= delta * (1 - 1e-6)


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 5, 6])
def test_random_rare_steps_of_little_noise(seed):
    """The certificate's delta where single steps lose far more than all others together."""
    rng = np.random.default_rng(seed)
    q, z = 10.0 ** rng.uniform(-6, -2), rng.uniform(0.25, 1.0)
    steps = max(1, round(10.0 ** rng.uniform(-4, 0.5) / q))
    relation, epsilon = (ADD, REPLACE)[seed % 2], rng.uniform(0.3, 3.0)
    truth = plain(((q, z, steps),), relation, 200.0)(epsilon)
    lower, upper = delta_bounds(directions(run(q, z, steps), relation, truth), epsilon)
    # The plain convolution rounds, and its coarse grid lies above.
    assert lower - 1e-13 - 2e-4 * truth <= truth <= upper + 1e-13 + 4e-3 * truth
    assert upper - lower <= 1e-2 * upper


def one_way(kinds, delta, tolerance=1e-4):
    return Direction(kinds, kinds, math.log(delta), tolerance)


def tuples_delta(kinds, epsilon):
    """delta by going through all combinations of losses."""
    losses, masses, survived = np.zeros(1), np.ones(1), 1.0
    for pair, n in kinds:
        for _ in range(n):
            losses = (losses[:, None] + pair.loss).ravel()
            masses = (masses[:, None] * pair.p).ravel()
            survived *= 1 - pair.infinite
    return 1 - survived + float(masses @ np.maximum(-np.expm1(epsilon - losses), 0.0))


def response(epsilon, infinite=0.0):
    """Randomised response, with a chance to show everything."""
    p = (1 - infinite) / (1 + math.exp(-epsilon))
    return Discrete(
        np.asarray([-epsilon, epsilon]), np.asarray([p * math.exp(-epsilon), p]), infinite
    )


def test_randomised_responses():
    for steps, epsilon in (
        (((response(0.5), 10),), 2.0),
        (((response(0.5, 1e-3), 6), (response(0.3, 2e-3), 4)), 1.0),
        (((response(2.0), 2), (response(0.1), 8)), 3.0),
        (((response(1.0, 0.3), 3),), 0.5),
    ):
        truth = tuples_delta(steps, epsilon)
        lower, upper = delta_bounds([one_way(steps, truth)], epsilon)
        assert lower <= truth * (1 + 1e-13), (epsilon, lower)
        assert truth * (1 - 1e-13) <= upper, (epsilon, upper)
        # No finer than the grid's own splits of point masses.
        assert upper - lower <= 3e-3 * upper, epsilon


def test_an_upper_bound_alone_has_no_lower_end():
    kinds = ((response(0.5), 10),)
    direction = Direction(kinds, None, math.log(1e-2), 1e-4)
    assert not direction.two_sided
    lower, upper = delta_bounds([direction], 2.0)
    assert lower == 0 < tuples_delta(kinds, 2.0) <= upper


@pytest.mark.parametrize("seed", range(5))
def test_the_chance_of_two_or_more(seed):
    drawn = 10.0 ** np.random.default_rng(seed).uniform(-6, -0.5, 3)
    chances = list(zip((1, 2, 4), drawn.tolist(), strict=True))
    none = math.prod((1 - p) ** n for n, p in chances)
    exactly = sum(n * p / (1 - p) for n, p in chances) * none
    value, error = plan.two_or_more(chances)
    pairs = list(itertools.chain.from_iterable([p] * n for n, p in chances))
    # In the rare case the leading term, where 1 - none - exactly has no digits.
    leading = sum(a * b for a, b in itertools.combinations(pairs, 2))
    assert abs(value - (1 - none - exactly)) <= error + 1e-14
    assert leading * (1 - sum(pairs)) - error <= value <= leading + error
    assert plan.one_or_more(chances) == pytest.approx(1 - none, abs=1e-15, rel=1e-9)


def test_a_shortfall_counts_only_what_raises_it():
    """Of steps that may be small: E[(e^-(epsilon' + sum) - 1)+], of any number of them."""
    below = Atoms(np.asarray([-1, 1]), np.asarray([0.5, 0.4]), 0.0, 2.0, (0.1, 0.0))
    above = Atoms(np.asarray([3, 4]), np.asarray([0.5, 0.4]), 0.0, 4.0, (0.1, 0.0))
    alone = plan.shortfall([([(below, 3)], 0.5)], 1.0)
    assert -math.inf < alone
    # Gains of steps that can only gain do not pay for the losses of others: they may be the large.
    assert plan.shortfall([([(below, 3)], 0.5), ([(above, 5)], 0.5)], 1.0) >= alone - 1e-9


def test_ends_that_cross_are_an_error():
    crossed = SimpleNamespace(
        size=lambda _: 1 << 13,
        two_sided=True,
        tolerance=1e-4,
        epsilon_end=None,
        delta_end=lambda high, *_: 0.5 if high else 0.6,
    )
    with pytest.raises(ArithmeticError, match="lower end"):
        certificate._refine(crossed, crossed.delta_end, 1.0)


@RELATIONS
def test_delta_at_epsilon_0_is_the_total_variation(relation):
    bound = acc.delta(run(0.1, 1.0, 20), 0.0, relation)
    truth = plain(((0.1, 1.0, 20),), relation, 80.0)(0.0)
    assert bound.lower * (1 - 1e-6) <= truth <= bound.upper * (1 + 1e-6)
    assert bound.upper - bound.lower <= 1e-2 * bound.upper


def test_the_worse_direction_decides_however_little_worse():
    """Two directions whose deltas differ by a fifth, in either order."""

    def direction(p):
        loss = np.asarray([-math.log(3.0), math.log(3.0)])
        return one_way(((Discrete(loss, np.asarray([1 - p, p]), rounding=1e-15), 6),), 0.1)

    alone = epsilon_bounds([direction(0.75)], None)
    assert alone[0] > 1.02 * epsilon_bounds([direction(0.73)], None)[1]
    for pair in ((0.75, 0.73), (0.73, 0.75)):
        lower, upper = epsilon_bounds([direction(p) for p in pair], None)
        assert lower <= alone[1]
        assert upper >= alone[0]


def test_two_losses_above_their_cap_are_counted(monkeypatch):
    """With a cap so low that often two steps are above it, the upper end still is one."""
    event = run(0.001, 0.8, 300)
    truths = {delta: acc.epsilon(event, delta).estimate for delta in (1e-3, 1e-5)}
    monkeypatch.setattr(plan, "best", lambda k, e, log_delta: plan.plan(k, e, log_delta, 0.6))
    for delta, truth in truths.items():
        direction = directions(event, ADD, delta, 1e-4)[0]
        low, high = (direction.delta_end(high, truth, 1e-4) for high in (False, True))
        assert low <= 1 <= high, delta


# Steps of many noises are taken together, on the safe side of both ends.


def schedule(count, each=3, q=0.02):
    """Noise that falls from 2 to 1, another one for every few steps."""
    return acc.Composed([run(q, z, each) for z in np.geomspace(2.0, 1.0, count).tolist()])


def test_groups_hold_every_step_between_their_least_and_most_noise():
    steps = flatten(acc.Composed([schedule(60), schedule(30, 2, 0.05)]), ADD).steps
    for most in (1, 7, 40):
        groups, spread = kinds._alike(steps, most)
        assert len(groups) <= most + 4
        assert sum(n for _, n in groups) == sum(n for _, n in steps) == 60 * 3 + 30 * 2
        for (least, last), _ in groups:
            assert least.sampling_prob == last.sampling_prob
            apart = last.noise_multiplier / least.noise_multiplier
            assert 1 <= apart <= np.exp(spread) * (1 + 1e-12)
        for step, _ in steps:
            assert any(
                low.sampling_prob == step.sampling_prob
                and low.noise_multiplier <= step.noise_multiplier <= high.noise_multiplier
                for (low, high), _ in groups
            )
    few = flatten(schedule(20), ADD).steps
    assert kinds._alike(few, 20) == ([((s, s), n) for s, n in few], 0.0)


def test_a_schedule_of_many_noises_is_enclosed():
    """The estimate tells all of them apart."""
    event = schedule(250, 1)
    bound = acc.epsilon(event, 1e-5)
    assert bound.lower < bound.estimate < bound.upper < 1.03 * bound.lower
    assert 1e-5 <= queries.rough_delta(event, bound.estimate) <= 2e-5


# Attacks by independent judges.


def test_delta_expected_far_off():
    kinds = ((gaussian_pairs(Step(3.0), ADD)[0], 9),)
    for epsilon in (0.0, 0.5, 2.0):
        truth = gaussian_delta(1.0, epsilon)
        for log_delta in (-690.0, -60.0, -1.0, -0.1) if epsilon == 0.5 else (-13.8,):
            lower, upper = delta_bounds([Direction(kinds, kinds, log_delta, 1e-4)], epsilon)
            assert lower <= truth * (1 + 1e-9), (epsilon, log_delta)
            assert upper >= truth * (1 - 1e-9), (epsilon, log_delta)


class Misplaced:
    """A pair whose hint is wrong."""

    def __init__(self, pair, span):
        self.pair, self._span = pair, span
        self.center, self.infinite, self.rounding = pair.center, pair.infinite, pair.rounding
        self.cells, self.tails = pair.cells, pair.tails

    def span(self, tail):
        return self._span


def test_nothing_rests_on_the_span():
    truth = gaussian_delta(1.0, 1.0)
    # The second was a fault (certificate.py): no loss above 0 is believed, and delta said to be 0.
    for span in ((-5.0, 50.0), (-3.0, -1.0)):
        kinds = ((Misplaced(gaussian_pairs(Step(3.0), ADD)[0], span), 9),)
        lower, upper = delta_bounds([one_way(kinds, truth)], 1.0)
        assert lower <= truth * (1 + 1e-9), span
        assert upper >= truth * (1 - 1e-9), span


def test_infinite_losses_alone_are_charged():
    """Was a fault (certificate.py): with no positive loss but an infinite one delta was 0."""
    for delta, epsilon, count in itertools.product((1e-7, 0.5), (0.0, 1.0, 50.0), (1, 10)):
        truth = -math.expm1(count * math.log1p(-delta))
        event = acc.Repeated(acc.EpsilonDelta(0.0, delta), count)
        assert acc.delta(event, epsilon).upper >= truth * (1 - 1e-12), (delta, epsilon, count)
    # Was a fault, too: the grid's width is that of the narrowest kind, also where that is 0.
    event = acc.Composed((acc.Repeated(acc.EpsilonDelta(5.0), 3), acc.EpsilonDelta(0.0)))
    assert acc.delta(event, 0.0).upper <= 1


def normal_delta(epsilon):
    """The profile of Gaussian noise 1, for negative epsilons too."""
    b = float(special.log_ndtr(-0.5 - epsilon))
    return float(special.ndtr(0.5 - epsilon) - math.exp(epsilon + b))


def test_a_rare_large_loss_beside_a_gaussian():
    up = special.expit(5.0)
    for epsilon in (0.0, 3.0, 7.0):
        bound = acc.delta(acc.Composed((acc.EpsilonDelta(5.0, 1e-7), acc.Gaussian(1.0))), epsilon)
        rest = up * normal_delta(epsilon - 5) + (1 - up) * normal_delta(epsilon + 5)
        truth = 1e-7 + (1 - 1e-7) * rest
        assert truth * (1 - 1e-10) <= bound.upper <= 1.01 * truth, epsilon
    # Steps that show the record once it is sampled.
    for q, count in ((1e-12, 10_000), (1e-4, 2)):
        bound = acc.delta(acc.Composed((run(q, 0.02, count), acc.Gaussian(1.0))), 2.0)
        none = math.exp(count * math.log1p(-q))
        truth = 1 - none + none * normal_delta(2.0 - count * math.log1p(-q))
        assert bound.lower * (1 - 1e-10) <= truth <= bound.upper * (1 + 1e-10), q
