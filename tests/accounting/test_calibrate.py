"""Calibrated values never exceed the budget by another way of computing, and are not wasteful."""

import numpy as np
import pytest
from scipy import special

from jaxdp import accounting as acc

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
