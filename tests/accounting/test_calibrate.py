"""Calibrated values never exceed the budget by another way of computing, and are not wasteful."""

import functools
import itertools
import math

import numpy as np
import pytest
from scipy import special

from jaxdp import accounting as acc
from jaxdp import schedules
from jaxdp.accounting import queries
from jaxdp.accounting.roots import bracket_decreasing, least
from tests.accounting.judging import ADD, REPLACE, refusals, run

Q, T = 512 / 60_000, 5_000


def judged_delta(q, z, steps, epsilon, relation=ADD):
    """delta by a plain convolution of 400,000 slices of the output, extrapolated in the grid."""
    replace = relation is REPLACE
    if q == 1:
        mu = (2 if replace else 1) * steps**0.5 / z
        tails = special.log_ndtr([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu])
        return float(np.exp(tails[0]) - np.exp(epsilon + tails[1]))
    edges = np.linspace(-9 * z - 1, 1 + 9 * z, 400_001)
    x = (edges[1:] + edges[:-1]) / 2

    def loss_of(at):
        return np.log1p(q * np.expm1((at - 0.5) / z**2))

    none, sampled = (np.diff(special.ndtr((edges - m) / z)) for m in (0, 1))
    forward = (1 - q) * none + q * sampled, loss_of(x) - (loss_of(-x) if replace else 0)
    ways = [forward] if replace else [forward, (none, -loss_of(x))]
    found = []
    for way in ways:
        coarse, fine = (on_grid(*way, steps, epsilon, size) for size in (1 << 18, 1 << 19))
        found.append(fine + (fine - coarse) / 3)
    return max(found)


def on_grid(mass, loss, steps, epsilon, size, span=120.0):
    width = span / size
    cell = np.floor(loss / width)
    up = np.expm1(cell * width - loss) / np.expm1(-width)
    index = cell.astype(int)
    law = np.bincount(index % size, mass * (1 - up), minlength=size)
    law += np.bincount((index + 1) % size, mass * up, minlength=size)
    total = np.fft.irfft(np.fft.rfft(law) ** steps, size)
    losses = np.fft.fftfreq(size, 1 / span)
    return float(total @ np.maximum(-np.expm1(np.minimum(epsilon - losses, 0.0)), 0.0))


def test_noise_multiplier():
    rows = [(3.0, Q, T, ADD), (20.0, 0.2, 50, REPLACE), (3.0, Q, T, REPLACE)]
    rows += [(0.1, 1.0, 10, relation) for relation in acc.Relation]
    for epsilon, q, steps, relation in rows:
        z = acc.calibrate_noise_multiplier(epsilon, 1e-5, q, steps, relation)
        assert judged_delta(q, z, steps, epsilon, relation) <= 1e-5 * (1 + 1e-6), (q, relation)
        assert judged_delta(q, z * (1 - 1e-4), steps, epsilon, relation) > 1e-5, (q, relation)


def test_steps_and_sampling_prob():
    steps = acc.calibrate_steps(3.0, 1e-5, Q, 1.23)
    assert judged_delta(Q, 1.23, steps, 3.0) <= 1e-5 < judged_delta(Q, 1.23, steps + 1, 3.0)
    q = acc.calibrate_sampling_prob(3.0, 1e-5, T, 1.23)
    assert judged_delta(q, 1.23, T, 3.0) <= 1e-5 * (1 + 1e-6)
    assert judged_delta(q * (1 + 1e-4), 1.23, T, 3.0) > 1e-5


def test_budgets_that_need_nothing_or_fit_nothing():
    assert acc.calibrate_noise_multiplier(1.0, 1e-5, 0.0, 100) == 0
    assert acc.calibrate_steps(1e-6, 1e-5, 1.0, 0.5) == 0
    assert acc.calibrate_sampling_prob(100.0, 1e-5, 1, 1.0) == 1
    assert acc.calibrate(lambda z: acc.Composed(()), 1.0, 1e-5) == pytest.approx(1e-9)
    with pytest.raises(ValueError, match=r"epsilon=1\.0: .* at 1e\+09, .* 4\.37718 is proven"):
        acc.calibrate(lambda z: acc.Composed((acc.Gaussian(z), acc.Gaussian(1.0))), 1.0, 1e-5)
    with pytest.raises(acc.UnsupportedEventError, match="ShuffledEpoch"):
        acc.calibrate(lambda z: acc.ShuffledEpoch(acc.Gaussian(z), 5), 1.0, 1e-5)


def scheduled(z):
    plan = schedules.exponential_decay(2.0, 0.1, 10, 40).times(z)
    return acc.Composed([run(0.05, level, n) for level, n in plan.levels])


@pytest.mark.parametrize(
    ("make", "relation"),
    [
        (lambda z: run(0.05, z, 100), ADD),
        (acc.Gaussian, ADD),
        (scheduled, ADD),
        (lambda z: acc.Composed((run(0.05, z, 50), acc.Gaussian(10 * z))), ADD),
        (lambda z: acc.FixedSizeSampled(acc.Gaussian(z), 1_000, 50), REPLACE),
    ],
    ids=["sampled", "full batch", "a schedule", "mixed", "fixed size"],
)
def test_the_least_value_of_any_event(make, relation):
    found = []
    for epsilon in (0.5, 2.0):
        value = acc.calibrate(make, epsilon, 1e-5, relation)
        assert acc.epsilon(make(value), 1e-5, relation).upper <= epsilon
        assert acc.epsilon(make(value * (1 - 2e-4)), 1e-5, relation).upper > epsilon
        found.append(value)
    assert found[0] > found[1]


def test_the_largest_count_of_any_event():
    def make(count):
        return acc.Composed((acc.Gaussian(5.0), run(0.05, 1.0, count)))

    count = acc.calibration.calibrate_count(make, 2.0, 1e-5)
    assert acc.epsilon(make(count), 1e-5).upper <= 2 < acc.epsilon(make(count + 1), 1e-5).upper
    assert acc.calibration.calibrate_count(make, 0.1, 1e-5) == 0


def test_any_argument_rising_or_falling():
    def epochs(count):
        return run(0.01, 1.0, 100 * count)

    most = acc.calibrate(epochs, 3.0, 1e-5, between=(1, 10**6), most=True, whole=True)
    assert acc.epsilon(epochs(most), 1e-5).upper <= 3 < acc.epsilon(epochs(most + 1), 1e-5).upper

    def sizes(dataset_size):
        return run(64 / dataset_size, 1.0, 500)

    size = acc.calibrate(sizes, 3.0, 1e-5, between=(64, 10**9), whole=True)
    assert isinstance(size, int)
    assert acc.epsilon(sizes(size), 1e-5).upper <= 3 < acc.epsilon(sizes(size - 1), 1e-5).upper
    closer = [acc.calibrate(scheduled, 3.0, 1e-5, tolerance=t) for t in (1e-2, 1e-6)]
    assert closer[1] < closer[0] < closer[1] * 1.02


def test_wrong_arguments_are_named():
    rows = (
        ("between=.*smaller number first", {"between": (2.0, 1.0)}),
        ("between=3.0: expected two numbers", {"between": 3.0}),
        ("between=0.0: expected a finite number > 0", {"between": (0.0, 1.0)}),
        ("between=2.5: expected an integer", {"between": (1, 2.5), "whole": True}),
        ("tolerance=0.0", {"tolerance": 0.0}),
        ("epsilon=-1.0", {"epsilon": -1.0}),
        ("delta=1.0", {"delta": 1.0}),
        ("accountant='best'", {"accountant": "best"}),
    )
    usual = {"epsilon": 1.0, "delta": 1e-5}
    calls = [functools.partial(acc.calibrate, scheduled, **{**usual, **k}) for _, k in rows]
    refusals(ValueError, zip((words for words, _ in rows), calls, strict=True))


@pytest.mark.parametrize(
    ("epsilon", "delta", "q", "steps"),
    [
        (3.0, 0.5, 0.01, 1_000),
        pytest.param(1e9, 1e-5, 0.01, 10**9, marks=pytest.mark.slow),
        pytest.param(3.0, 1e-5, 1e-9, 10**9, marks=pytest.mark.slow),
        (3.0, 1e-5, 1e-7, 10**7),
        (1e-6, 1e-30, 0.9, 100),
    ],
)
def test_corners_are_answered_by_few_evaluations(monkeypatch, epsilon, delta, q, steps):
    asked, proofs = [], []
    quick, proven = queries.quick_epsilon, queries.epsilon
    monkeypatch.setattr(queries, "quick_epsilon", lambda *a: asked.append(a) or quick(*a))
    monkeypatch.setattr(queries, "epsilon", lambda *a: proofs.append(a) or proven(*a))
    z = acc.calibrate_noise_multiplier(epsilon, delta, q, steps)
    assert len(asked) <= 30
    assert len(proofs) <= 4
    assert acc.epsilon(run(q, z, steps), delta).upper <= epsilon


@pytest.mark.parametrize("most", [False, True])
def test_estimates_lead_and_proofs_decide(monkeypatch, most):
    """Of estimates too large, too small and cut off to 0, the answer is what the proofs say."""
    proofs, ratio, least_loss = [], 1.0, 0.0

    def loss(event):
        z = event.noise_multiplier
        spent = (z if most else 1 / z) ** 1.3
        return 0.0 if spent < least_loss else spent

    def proven(event, *_):
        proofs.append(event.noise_multiplier)
        return acc.Bound(0.0, 0.0, loss(event))

    monkeypatch.setattr(queries, "epsilon", proven)
    monkeypatch.setattr(queries, "quick_epsilon", lambda event, *_: ratio * loss(event))
    ratios = (1e-3, 0.5, 1 - 1e-5, 1 + 1e-5, 2.0, 1e3)
    for case in itertools.product(ratios, (1e-9, 3.0, 1e6), (0.0, 1.5)):
        proofs.clear()
        ratio, epsilon, least_loss = case
        value = acc.calibrate(acc.Gaussian, epsilon, 1e-5, most=most)
        assert value in proofs, case
        assert loss(acc.Gaussian(value)) <= epsilon, case
        assert loss(acc.Gaussian(value * (1 + 2e-4 if most else 1 - 2e-4))) > epsilon, case
        assert len(proofs) <= 25, case


def test_renyi_noise_is_the_least_to_a_millionth():
    """The search starts from the accountant that was asked for, and does not give up digits."""
    for epsilon, delta, q, steps, relation in (
        (1.0, 1e-6, 0.01, 128, ADD),
        (0.417, 2.2e-11, 0.0144, 38, REPLACE),
        (3.0, 1e-5, Q, T, ADD),
    ):
        z = acc.calibrate_noise_multiplier(epsilon, delta, q, steps, relation, "rdp")
        found, less = (
            acc.epsilon(run(q, noise, steps), delta, relation, "rdp").upper
            for noise in (z, z * (1 - 1e-6))
        )
        assert found <= epsilon < less, (epsilon, delta)


# Brackets of roots: both ends evaluated, and few evaluations.


def asking(f):
    """(f, the list of what it was asked)."""
    asked = []
    return (lambda x: asked.append(x) or f(x)), asked


def test_a_secant_step_moves_the_farther_end():
    for f, root, low, high in (
        (lambda x: math.exp(-x) - 0.3, -math.log(0.3), 0.0, 9.0),
        (lambda x: 2 - x**3, 2 ** (1 / 3), 0.0, 4.0),
        (lambda x: 1 / x - 5, 0.2, 0.01, 3.0),
    ):
        counted, asked = asking(f)
        low, high = bracket_decreasing(counted, low, high, rtol=1e-10)
        assert low <= root <= high
        assert high - low <= 1e-10 * high, root
        assert low in asked
        assert high in asked
        assert len(asked) <= 40, root  # moving the nearer end takes over 70


@pytest.mark.parametrize("sign", [1, -1])
def test_a_search_returns_what_was_found_within(sign):
    """Of a jump, from either side; smooth costs take a handful of evaluations."""
    ends = (1e-9, 1e9)[::sign]
    for edge in (0.3, 1e-7, 5e6):

        def jump(value, size, edge=edge):
            return math.copysign(size, sign * (edge - value))

        for size in (1.0, math.inf):
            found, _ = least(functools.partial(jump, size=size), 1.0, -1.0, ends, 1e-6)
            assert 0 <= sign * (found - edge) < 1e-4 * edge, (edge, size)
        smooth, asked = asking(lambda v, edge=edge: sign * 0.7 * math.log(edge / v))
        found, slope = least(smooth, 1.0, -1.0, ends, 1e-6)
        assert 0 <= sign * (found / edge - 1) < 2e-6, edge
        assert found in asked
        assert len(asked) <= 10, edge
        assert slope == pytest.approx(-0.7)


def test_a_search_of_whole_numbers_finds_the_last():
    for last in (1, 2, 3, 17, 7245, 10**9 + 7, 10**12):
        for power in (0.5, 3.0):
            excess, asked = asking(lambda n, a=power, b=last: a * math.log(n / (b + 0.5)))
            found, _ = least(excess, 1, -1.5, (10**12, 1), 1e-4, whole=True)
            assert isinstance(found, int)
            assert found in asked
            assert last * (1 - 1e-7) <= found <= last, power
            assert len(asked) <= 25, last


def test_a_search_that_finds_nothing_or_everything():
    assert least(lambda v: 1.0, 1.0, -1.0, (1e-9, 1e9), 1e-6)[0] is None
    assert least(lambda n: math.inf, 1, -1.0, (10**12, 1), 1e-6, whole=True)[0] is None
    assert least(lambda v: -math.inf, 1.0, -1.0, (1e-9, 1e9), 1e-6)[0] == 1e-9
    rng = np.random.default_rng(0)
    random, asked = asking(lambda v: rng.normal())
    found, _ = least(random, 1.0, -1.0, (1e-9, 1e9), 1e-9)
    assert len(asked) <= 60
    assert found is None or found in asked
