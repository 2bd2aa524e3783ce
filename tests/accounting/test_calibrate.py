"""Calibrated values never exceed the budget by another way of computing, and are not wasteful."""

import numpy as np
import pytest
from scipy import special

from jaxdp import accounting as acc
from jaxdp import schedules
from jaxdp.accounting import queries

Q, T = 512 / 60_000, 5_000


def run(q, z, steps):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)


def judged_delta(q, z, steps, epsilon, relation=acc.Relation.ADD_OR_REMOVE_ONE):
    """delta by a plain convolution of 400,000 slices of the output, extrapolated in the grid."""
    replace = relation is acc.Relation.REPLACE_ONE
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
    return max(convolved(*way, steps, epsilon) for way in ways)


def convolved(mass, loss, steps, epsilon):
    coarse, fine = (on_grid(mass, loss, steps, epsilon, size) for size in (1 << 18, 1 << 19))
    return fine + (fine - coarse) / 3


def on_grid(mass, loss, steps, epsilon, size):
    span = 120.0
    width = span / size
    cell = np.floor(loss / width)
    up = np.expm1(cell * width - loss) / np.expm1(-width)
    index = cell.astype(int)
    law = np.bincount(index % size, mass * (1 - up), minlength=size)
    law += np.bincount((index + 1) % size, mass * up, minlength=size)
    total = np.fft.irfft(np.fft.rfft(law) ** steps, size)
    losses = np.fft.fftfreq(size, 1 / span)
    return float(total @ np.maximum(-np.expm1(np.minimum(epsilon - losses, 0.0)), 0.0))


@pytest.mark.parametrize("relation", list(acc.Relation))
@pytest.mark.parametrize(("epsilon", "q", "steps"), [(3.0, Q, T), (0.1, 1.0, 10), (20.0, 0.2, 50)])
def test_noise_multiplier(relation, epsilon, q, steps):
    z = acc.calibrate_noise_multiplier(epsilon, 1e-5, q, steps, relation)
    assert judged_delta(q, z, steps, epsilon, relation) <= 1e-5 * (1 + 1e-6)
    assert judged_delta(q, z * (1 - 1e-4), steps, epsilon, relation) > 1e-5


def test_steps():
    steps = acc.calibrate_steps(3.0, 1e-5, Q, 1.23)
    assert judged_delta(Q, 1.23, steps, 3.0) <= 1e-5
    assert judged_delta(Q, 1.23, steps + 1, 3.0) > 1e-5


def test_sampling_prob():
    q = acc.calibrate_sampling_prob(3.0, 1e-5, T, 1.23)
    assert judged_delta(q, 1.23, T, 3.0) <= 1e-5 * (1 + 1e-6)
    assert judged_delta(q * (1 + 1e-4), 1.23, T, 3.0) > 1e-5


def test_budgets_that_need_nothing_or_fit_nothing():
    assert acc.calibrate_noise_multiplier(1.0, 1e-5, 0.0, 100) == 0
    assert acc.calibrate_steps(1e-6, 1e-5, 1.0, 0.5) == 0
    assert acc.calibrate_sampling_prob(100.0, 1e-5, 1, 1.0) == 1
    with pytest.raises(ValueError, match="sampling_prob="):
        acc.calibrate_steps(1.0, 1e-5, 0.0, 1.0)


def scheduled(z):
    plan = schedules.exponential_decay(2.0, 0.1, 10, 40).times(z)
    return acc.Composed(
        tuple(
            acc.Repeated(acc.PoissonSampled(acc.Gaussian(level), 0.05), n)
            for level, n in plan.levels
        )
    )


EVENTS = {
    "sampled": lambda z: run(0.05, z, 100),
    "full batch": lambda z: acc.Gaussian(z),
    "a schedule": scheduled,
    "mixed": lambda z: acc.Composed((run(0.05, z, 50), acc.Gaussian(20.0), acc.Gaussian(10 * z))),
    "fixed size": lambda z: acc.Repeated(acc.FixedSizeSampled(acc.Gaussian(z), 1_000, 50), 4),
}


@pytest.mark.parametrize("name", EVENTS)
def test_the_least_value_of_any_event(name):
    make, found = EVENTS[name], []
    relation = list(acc.Relation)[1] if name == "fixed size" else acc.Relation.ADD_OR_REMOVE_ONE
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


def test_what_no_value_meets_and_what_every_value_meets():
    with pytest.raises(ValueError, match=r"epsilon=1\.0: .* at 1e\+09, .* 4\.37718 is proven"):
        acc.calibrate(lambda z: acc.Composed((acc.Gaussian(z), acc.Gaussian(1.0))), 1.0, 1e-5)
    assert acc.calibrate(lambda z: acc.Composed(()), 1.0, 1e-5) == pytest.approx(1e-9)
    with pytest.raises(acc.UnsupportedEventError, match="ShuffledEpoch"):
        acc.calibrate(lambda z: acc.ShuffledEpoch(acc.Gaussian(z), 5), 1.0, 1e-5)


def epochs(count):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.0), 0.01), 100 * count)


def test_any_argument_rising_or_falling():
    most = acc.calibrate(epochs, 3.0, 1e-5, between=(1, 10**6), most=True, whole=True)
    assert acc.epsilon(epochs(most), 1e-5).upper <= 3 < acc.epsilon(epochs(most + 1), 1e-5).upper

    def sizes(dataset_size):
        return acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.0), 64 / dataset_size), 500)

    size = acc.calibrate(sizes, 3.0, 1e-5, between=(64, 10**9), whole=True)
    assert isinstance(size, int)
    assert acc.epsilon(sizes(size), 1e-5).upper <= 3 < acc.epsilon(sizes(size - 1), 1e-5).upper
    closer = [acc.calibrate(scheduled, 3.0, 1e-5, tolerance=t) for t in (1e-2, 1e-6)]
    assert closer[1] < closer[0] < closer[1] * 1.02


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"between": (2.0, 1.0)}, "between=.*smaller number first"),
        ({"between": 3.0}, "between=3.0: expected two numbers"),
        ({"between": (0.0, 1.0)}, "between=0.0: expected a finite number > 0"),
        ({"between": (1, 2.5), "whole": True}, "between=2.5: expected an integer"),
        ({"tolerance": 0.0}, "tolerance=0.0"),
        ({"epsilon": -1.0}, "epsilon=-1.0"),
        ({"delta": 1.0}, "delta=1.0"),
        ({"accountant": "best"}, "accountant='best'"),
    ],
)
def test_wrong_arguments_are_named(keywords, words):
    given = {"epsilon": 1.0, "delta": 1e-5, **keywords}
    with pytest.raises(ValueError, match=words):
        acc.calibrate(scheduled, **given)


@pytest.mark.parametrize(
    ("epsilon", "delta", "q", "steps"),
    [
        (3.0, 0.5, 0.01, 1_000),
        (1e9, 1e-5, 0.01, 10**9),
        (3.0, 1e-5, 1e-7, 10**7),
        pytest.param(3.0, 1e-5, 1e-9, 10**9, marks=pytest.mark.slow),
        (1e-6, 1e-30, 0.9, 100),
    ],
)
def test_corners_are_answered_by_few_evaluations(monkeypatch, epsilon, delta, q, steps):
    asked, proofs = counted(monkeypatch)
    z = acc.calibrate_noise_multiplier(epsilon, delta, q, steps)
    assert len(asked) <= 30
    assert len(proofs) <= 4
    assert acc.epsilon(run(q, z, steps), delta).upper <= epsilon


def counted(monkeypatch):
    asked, proofs = [], []
    quick, proven = queries.quick_epsilon, queries.epsilon
    monkeypatch.setattr(queries, "quick_epsilon", lambda *a: asked.append(a) or quick(*a))
    monkeypatch.setattr(queries, "epsilon", lambda *a: proofs.append(a) or proven(*a))
    return asked, proofs


@pytest.mark.parametrize("most", [False, True])
@pytest.mark.parametrize("ratio", [1e-3, 0.5, 1 - 1e-5, 1 + 1e-5, 2.0, 1e3])
@pytest.mark.parametrize("epsilon", [1e-9, 3.0, 1e6])
@pytest.mark.parametrize("least_loss", [0.0, 1.5])
def test_estimates_lead_and_proofs_decide(monkeypatch, most, ratio, epsilon, least_loss):
    """Of estimates too large, too small and cut off to 0, the answer is what the proofs say."""
    proofs = []

    def loss(event):
        (z,) = (event.noise_multiplier,)
        spent = (z if most else 1 / z) ** 1.3
        return 0.0 if spent < least_loss else spent

    def proven(event, *_):
        proofs.append(event.noise_multiplier)
        return acc.Bound(0.0, 0.0, loss(event))

    monkeypatch.setattr(queries, "epsilon", proven)
    monkeypatch.setattr(queries, "quick_epsilon", lambda event, *_: ratio * loss(event))
    value = acc.calibrate(acc.Gaussian, epsilon, 1e-5, most=most)
    assert value in proofs
    assert loss(acc.Gaussian(value)) <= epsilon
    assert loss(acc.Gaussian(value * (1 + 2e-4 if most else 1 - 2e-4))) > epsilon
    assert len(proofs) <= 25


@pytest.mark.parametrize(
    ("epsilon", "delta", "q", "steps", "relation"),
    [
        (1.0, 1e-6, 0.01, 128, acc.Relation.ADD_OR_REMOVE_ONE),
        (0.417, 2.2e-11, 0.0144, 38, acc.Relation.REPLACE_ONE),
        (3.0, 1e-5, Q, T, acc.Relation.ADD_OR_REMOVE_ONE),
    ],
)
def test_renyi_noise_is_the_least_to_a_millionth(epsilon, delta, q, steps, relation):
    """The search starts from the accountant that was asked for, and does not give up digits."""

    def upper(z):
        return acc.epsilon(run(q, z, steps), delta, relation, "rdp").upper

    found = acc.calibrate_noise_multiplier(epsilon, delta, q, steps, relation, "rdp")
    assert upper(found) <= epsilon
    assert upper(found * (1 - 1e-6)) > epsilon
