"""Advice from public numbers: what is found in them, and figures that the accountant confirms."""

import math

import pytest

import jaxdp
from jaxdp.audit import advice
from tests.refusing import refused

HEALTHY = {"epsilon": 3.0, "delta": 1e-6, "steps": 1_000, "batch_size": 256, "dataset_size": 60_000}
TINY = {"epsilon": 1.0, "steps": 400, "batch_size": 1, "dataset_size": 1_000, "delta": 1e-4}
HUGE = {**HEALTHY, "dataset_size": 10**6, "delta": 1e-7, "steps": 150}


@pytest.mark.parametrize(
    ("budget", "parameters", "kinds"),
    [
        pytest.param(HEALTHY, 100_000, [], id="healthy"),
        pytest.param(HUGE, 10**6, [], id="few epochs of many records"),
        pytest.param({**HEALTHY, "delta": 1 / 60_000}, 10, ["delta"], id="delta is one over n"),
        pytest.param({**HEALTHY, "steps": 20}, 10, ["epochs"], id="epochs in place of steps"),
        pytest.param({**HEALTHY, "steps": 10**6}, 10, ["epochs"], id="steps that nobody takes"),
        pytest.param(TINY, 10**6, ["signal"], id="noise beyond any signal"),
    ],
)
def test_what_public_numbers_show(budget, parameters, kinds):
    mechanism = jaxdp.dp_sgd(l2_clip_norm=0.5, **budget)
    found = advice.find_without_data(mechanism, parameters)
    assert [finding.kind for finding in found] == kinds
    assert [finding.certain for finding in found] == [kind == "delta" for kind in kinds]
    for finding in found:
        assert str(finding)
        assert finding.weight > 0


def test_figures_are_those_of_the_mechanisms_that_are_recommended():
    mechanism = jaxdp.dp_sgd(l2_clip_norm=0.5, **HEALTHY)
    now, twice, half, weaker, correlated = advice.outlooks(mechanism)
    z = mechanism.noise_multiplier
    assert now.noise == pytest.approx(z / 256 / math.sqrt(1_000))
    for row, change in (
        (twice, {"batch_size": 512}),
        (half, {"steps": 500}),
        (weaker, {"epsilon": 6.0}),
    ):
        other = jaxdp.dp_sgd(l2_clip_norm=0.5, **{**HEALTHY, **change})
        assert row.noise_multiplier == pytest.approx(other.noise_multiplier, rel=1e-3)
    assert correlated.noise < 0.6 * now.noise
    # The same epsilon, and twice the batch gains little.
    best = advice.worthwhile_batch(mechanism)
    assert best.epsilon(1_000, 1e-6).upper <= 3.0
    more = advice.with_budget(mechanism, batch_size=2 * best.batch_size)
    assert best.batch_size > 256
    assert more.noise_multiplier / 2 > 0.8 * best.noise_multiplier
    # A mechanism without a budget, or with correlated noise.
    plain = jaxdp.dp_sgd(noise_multiplier=1.0, l2_clip_norm=1.0, batch_size=10, dataset_size=100)
    refused("made for a budget", advice.explain, plain, 10)
    assert advice.find_without_data(plain, 10) == []
