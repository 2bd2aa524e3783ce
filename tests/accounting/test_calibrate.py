"""Calibrated values never exceed the budget when asked again, and are not wasteful."""

import pytest

from jaxdp import accounting as acc

Q, T = 512 / 60_000, 5_000


def run(q, z, steps):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)


@pytest.mark.parametrize("relation", list(acc.Relation))
@pytest.mark.parametrize(("epsilon", "q", "steps"), [(3.0, Q, T), (0.1, 1.0, 10), (20.0, 0.2, 50)])
def test_noise_multiplier(relation, epsilon, q, steps):
    z = acc.calibrate_noise_multiplier(epsilon, 1e-5, q, steps, relation)
    assert acc.epsilon(run(q, z, steps), 1e-5, relation).upper <= epsilon
    assert acc.epsilon(run(q, z * (1 - 1e-5), steps), 1e-5, relation).upper > epsilon


def test_steps():
    steps = acc.calibrate_steps(3.0, 1e-5, Q, 1.23)
    assert acc.epsilon(run(Q, 1.23, steps), 1e-5).upper <= 3
    assert acc.epsilon(run(Q, 1.23, steps + 1), 1e-5).upper > 3


def test_sampling_prob():
    q = acc.calibrate_sampling_prob(3.0, 1e-5, T, 1.23)
    assert acc.epsilon(run(q, 1.23, T), 1e-5).upper <= 3
    assert acc.epsilon(run(q * (1 + 1e-5), 1.23, T), 1e-5).upper > 3


def test_budgets_that_need_nothing_or_fit_nothing():
    assert acc.calibrate_noise_multiplier(1.0, 1e-5, 0.0, 100) == 0
    assert acc.calibrate_steps(1e-6, 1e-5, 1.0, 0.5) == 0
    assert acc.calibrate_sampling_prob(100.0, 1e-5, 1, 1.0) == 1
    with pytest.raises(ValueError, match="sampling_prob="):
        acc.calibrate_steps(1.0, 1e-5, 0.0, 1.0)
