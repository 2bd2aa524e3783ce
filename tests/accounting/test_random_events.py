"""Random events of every kind: no question contradicts another about the same event."""

import math

import numpy as np
import pytest

from jaxdp import accounting as acc
from tests.accounting.judging import ADD, REPLACE, SPECIAL, run


def drawn(rng):
    """Events of all kinds with relations that they have a bound under, and a delta."""
    z, q = 10.0 ** rng.uniform(-0.3, 0.7), 10.0 ** rng.uniform(-3, -0.5)
    n, gauss, delta = round(10.0 ** rng.uniform(0, 3)), acc.Gaussian(z), 10.0 ** rng.uniform(-9, -3)
    steps, laplace = run(q, z, n), acc.Repeated(acc.Laplace(10 * z), 20)
    mixed = acc.Composed([steps, laplace, acc.EpsilonDelta(0.2, delta / 100), acc.Gaussian(9.0)])
    tuned = acc.Tuned(steps, acc.Geometric(0.3))
    discrete = acc.Composed([acc.DiscreteLaplace(9 * z, 2), acc.DiscreteGaussian(9 * z)])
    answers = acc.Composed([acc.Repeated(acc.RandomizedResponse(0.8), 9), gauss])
    either = acc.MixtureOfGaussians(z, (0, 1, 2), (0.9, 0.07, 0.03))
    return delta, [
        (steps, ADD), (steps, REPLACE), (laplace, REPLACE), (mixed, ADD), (tuned, ADD),
        (acc.PerUser(acc.GridNoise(steps, 1e-18), 3), ADD), (discrete, ADD), (answers, REPLACE),
        (acc.Repeated(either, 20), SPECIAL), (acc.CorrelatedNoise(gauss, n), REPLACE),
        (acc.Repeated(acc.TruncatedPoisson(gauss, q, 30, 300), n), SPECIAL),
        (acc.Repeated(acc.FixedSizeSampled(gauss, 100, 7), n), REPLACE),
        (acc.Repeated(acc.ShuffledEpoch(gauss, 50), 3), SPECIAL),
        (acc.Repeated(acc.RandomAllocation(gauss, 20), 3), ADD),
        (acc.CyclicPoisson(gauss, q, 4, n), ADD),
        (acc.Parallel(acc.Gaussian(9.0), {"a": steps, "b": laplace}), SPECIAL),
        (acc.Repeated(acc.WeightedPoissonSampled(gauss, q), n), REPLACE),
        (acc.Composed([acc.ObjectivePerturbation(3 * z, 0.1), steps]), ADD),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1])
def test_questions_about_one_event_agree(seed):
    delta, rows = drawn(np.random.default_rng(seed))
    for event, relation in rows:
        usual, rough, quick = (
            acc.epsilon(event, delta, relation, tolerance=aim) for aim in (None, 1e-2, math.inf)
        )
        assert 0 <= usual.lower <= usual.upper < math.inf, event
        assert rough.upper >= usual.lower, event
        assert quick.upper >= usual.lower, event
        if quick.estimate is not None:
            assert usual.lower * (1 - 1e-6) <= quick.estimate <= usual.upper * (1 + 1e-6), event
        there = acc.delta(event, usual.upper, relation)
        assert there.lower <= delta * (1 + 1e-9), event
        assert acc.delta(event, usual.upper, relation, tolerance=1e-2).upper >= there.lower, event
        if not isinstance(event, acc.Repeated) or event.count == 20:  # others take seconds
            assert acc.group_epsilon(event, delta, 2, relation).upper >= usual.lower, event
        if acc.supports(event, relation, "rdp") and not isinstance(event, acc.PerUser):
            assert acc.epsilon(event, delta, relation, "rdp").upper >= usual.lower, event
