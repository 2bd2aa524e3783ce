"""Steps of many noises are taken together, on the safe side of both ends."""

import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp.accounting import kinds, queries
from jaxdp.accounting.canonical import flatten

ADD = acc.Relation.ADD_OR_REMOVE_ONE


def schedule(count, each=3, q=0.02):
    """Noise that falls from 2 to 1, another one for every few steps."""
    noise = np.geomspace(2.0, 1.0, count)
    return acc.Composed(
        [acc.Repeated(acc.PoissonSampled(acc.Gaussian(float(z)), q), each) for z in noise]
    )


@pytest.mark.parametrize("most", [1, 7, 40])
def test_groups_hold_every_step_between_their_least_and_most_noise(most):
    steps = flatten(acc.Composed([schedule(60), schedule(30, 2, 0.05)]), ADD).steps
    groups, spread = kinds._alike(steps, most)
    assert len(groups) <= most + 4
    assert sum(n for _, n in groups) == sum(n for _, n in steps) == 60 * 3 + 30 * 2
    for (least, last), _ in groups:
        assert least.sampling_prob == last.sampling_prob
        assert 1 <= last.noise_multiplier / least.noise_multiplier <= np.exp(spread) * (1 + 1e-12)
    for step, _ in steps:
        assert any(
            low.sampling_prob == step.sampling_prob
            and low.noise_multiplier <= step.noise_multiplier <= high.noise_multiplier
            for (low, high), _ in groups
        )


def test_few_kinds_are_left_as_they_are():
    steps = flatten(schedule(20), ADD).steps
    assert kinds._alike(steps, 20) == ([((s, s), n) for s, n in steps], 0.0)


def test_a_schedule_of_many_noises_is_enclosed():
    """The estimate tells all of them apart."""
    event = schedule(250, 1)
    bound = acc.epsilon(event, 1e-5)
    assert bound.lower < bound.estimate < bound.upper < 1.03 * bound.lower
    rough = queries.rough_delta(event, bound.estimate)
    assert 1e-5 <= rough <= 2e-5
