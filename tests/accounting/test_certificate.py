"""Certificates of compositions against a plain convolution that shares nothing with them."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting import certificate, kinds, plan
from jaxdp.accounting.base import Discrete
from jaxdp.accounting.canonical import flatten
from jaxdp.accounting.certificate import Direction

ADD, REPLACE = acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_ONE


def run(q, z, steps):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)


def bounds(event, relation, delta):
    flat = flatten(event, relation)
    directions = kinds.directions(flat, relation, math.log(delta), 9e-5)
    return certificate.epsilon_bounds(directions, None)


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


def plain_delta(kinds, relation, epsilon, span, size=1 << 20):
    """delta by an untilted FFT on a grid of mean-preserving splits, the larger direction's."""
    width, answers = span / size, []
    for reverse in (False,) if relation is REPLACE else (False, True):
        spectrum = np.ones(size // 2 + 1, dtype=complex)
        for q, z, n in kinds:
            mass, loss = slices(q, z, relation, reverse)
            cell = np.floor(loss / width)
            up = np.expm1(cell * width - loss) / np.expm1(-width)
            index = cell.astype(int)
            law = np.bincount(index % size, mass * (1 - up), minlength=size)
            law += np.bincount((index + 1) % size, mass * up, minlength=size)
            spectrum *= np.fft.rfft(law) ** n
        total = np.fft.irfft(spectrum, size)
        losses = np.fft.fftfreq(size, 1 / span)
        answers.append(float(total @ np.maximum(-np.expm1(np.minimum(epsilon - losses, 0)), 0)))
    return max(answers)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize(
    ("kinds", "delta", "span"),
    [
        (((0.2, 1.0, 50),), 1e-5, 80.0),
        (((0.01, 0.8, 500),), 1e-6, 60.0),
        (((0.05, 1.0, 30), (0.02, 2.0, 100), (0.3, 5.0, 20)), 1e-4, 60.0),
        (((1e-3, 0.5, 100),), 1e-5, 120.0),
        (((1e-4, 0.4, 1000),), 1e-4, 150.0),
    ],
)
def test_both_ends_hold_the_plain_convolutions_value(kinds, delta, span, relation):
    event = acc.Composed([run(*kind) for kind in kinds])
    lower, upper = bounds(event, relation, delta)
    assert 0 < upper - lower <= 1e-3 * upper
    # The plain convolution lies above by its grid.
    assert plain_delta(kinds, relation, upper, span) <= delta * (1 + 2e-5)
    assert plain_delta(kinds, relation, lower, span) >= delta * (1 - 1e-6)


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 5, 6])
def test_random_rare_steps_of_little_noise(seed):
    """The certificate's delta where single steps lose far more than all others together."""
    rng = np.random.default_rng(seed)
    q, z = 10.0 ** rng.uniform(-6, -2), rng.uniform(0.25, 1.0)
    steps = max(1, round(10.0 ** rng.uniform(-4, 0.5) / q))
    relation = (ADD, REPLACE)[seed % 2]
    epsilon, flat = rng.uniform(0.3, 3.0), flatten(run(q, z, steps), relation)
    truth = plain_delta(((q, z, steps),), relation, epsilon, 200.0)
    directions = kinds.directions(flat, relation, math.log(truth), 9e-5)
    lower, upper = certificate.delta_bounds(directions, epsilon)
    # The plain convolution rounds, and its coarse grid lies above.
    assert lower - 1e-13 - 2e-4 * truth <= truth <= upper + 1e-13 + 4e-3 * truth
    assert upper - lower <= 1e-2 * upper


def tuples_delta(kinds, epsilon):
    """delta by going through all combinations of losses."""
    losses, masses = np.zeros(1), np.ones(1)
    survived = 1.0
    for pair, n in kinds:
        for _ in range(n):
            losses = (losses[:, None] + pair.loss).ravel()
            masses = (masses[:, None] * pair.p).ravel()
            survived *= 1 - pair.infinite
    return 1 - survived + float(masses @ np.maximum(-np.expm1(epsilon - losses), 0.0))


def response(epsilon, infinite=0.0):
    """Randomised response, with a chance to show everything."""
    p = (1 - infinite) / (1 + math.exp(-epsilon))
    masses = np.asarray([p * math.exp(-epsilon), p])
    return Discrete(np.asarray([-epsilon, epsilon]), masses, infinite)


@pytest.mark.parametrize(
    ("kinds", "epsilon"),
    [
        (((response(0.5), 10),), 2.0),
        (((response(0.5, 1e-3), 6), (response(0.3, 2e-3), 4)), 1.0),
        (((response(2.0), 2), (response(0.1), 8)), 3.0),
        (((response(1.0, 0.3), 3),), 0.5),
    ],
)
def test_randomised_responses(kinds, epsilon):
    truth = tuples_delta(kinds, epsilon)
    direction = Direction(kinds, kinds, math.log(truth), 1e-4)
    lower, upper = certificate.delta_bounds([direction], epsilon)
    assert lower <= truth * (1 + 1e-13)
    assert truth * (1 - 1e-13) <= upper
    # No finer than the grid's own splits of point masses.
    assert upper - lower <= 3e-3 * upper


def test_an_upper_bound_alone_has_no_lower_end():
    kinds = ((response(0.5), 10),)
    direction = Direction(kinds, None, math.log(1e-2), 1e-4)
    assert not direction.two_sided
    lower, upper = certificate.delta_bounds([direction], 2.0)
    assert lower == 0 < tuples_delta(kinds, 2.0) <= upper


@pytest.mark.parametrize("seed", range(5))
def test_the_chance_of_two_or_more(seed):
    rng = np.random.default_rng(seed)
    chances = [
        (int(n), float(p)) for n, p in zip((1, 2, 4), 10.0 ** rng.uniform(-6, -0.5, 3), strict=True)
    ]
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
    from jaxdp.accounting.discretise import Atoms

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


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_delta_at_epsilon_0_is_the_total_variation(relation):
    event = run(0.1, 1.0, 20)
    bound = acc.delta(event, 0.0, relation)
    truth = plain_delta(((0.1, 1.0, 20),), relation, 0.0, 80.0)
    assert bound.lower * (1 - 1e-6) <= truth <= bound.upper * (1 + 1e-6)
    assert bound.upper - bound.lower <= 1e-2 * bound.upper


def test_the_worse_direction_decides_however_little_worse():
    """Two directions whose deltas differ by a fifth, in either order."""

    def direction(p):
        loss = np.asarray([-math.log(3.0), math.log(3.0)])
        pair = Discrete(loss, np.asarray([1 - p, p]), rounding=1e-15)
        return Direction(((pair, 6),), ((pair, 6),), math.log(0.1), 1e-4)

    alone = certificate.epsilon_bounds([direction(0.75)], None)
    assert alone[0] > 1.02 * certificate.epsilon_bounds([direction(0.73)], None)[1]
    for pair in ((0.75, 0.73), (0.73, 0.75)):
        lower, upper = certificate.epsilon_bounds([direction(p) for p in pair], None)
        assert lower <= alone[1]
        assert upper >= alone[0]


@pytest.mark.parametrize("delta", [1e-3, 1e-5])
def test_two_losses_above_their_cap_are_counted(monkeypatch, delta):
    """With a cap so low that often two steps are above it, the upper end still is one."""
    flat = flatten(run(0.001, 0.8, 300), ADD)
    truth = acc.epsilon(run(0.001, 0.8, 300), delta).estimate
    monkeypatch.setattr(plan, "best", lambda k, e, log_delta: plan.plan(k, e, log_delta, 0.6))
    direction = kinds.directions(flat, ADD, math.log(delta), 1e-4)[0]
    assert direction.delta_end(False, truth, 1e-4) <= 1 <= direction.delta_end(True, truth, 1e-4)
