"""Releases near a Gaussian's in total variation: what that takes of delta."""

import json
import math

import pytest

from jaxdp import accounting as acc
from jaxdp.accounting import near
from jaxdp.accounting.canonical import flatten
from jaxdp.accounting.rdp import run_rdp

Q = 0.01
STEP = acc.PoissonSampled(acc.Gaussian(1.0), Q)
ADD = acc.Relation.ADD_OR_REMOVE_ONE


def run(distance: float, steps: int = 500) -> acc.Event:
    return acc.Repeated(acc.GridNoise(STEP, distance), steps)


@pytest.mark.parametrize("share", [1e-6, 1e-3, 0.05])
def test_epsilon_is_that_of_what_the_distance_leaves_of_delta(share):
    delta, plain = 1e-5, acc.Repeated(STEP, 500)
    top = acc.epsilon(plain, delta).upper
    distance = share * delta / (1 + math.exp(top)) / 500
    found = acc.epsilon(run(distance), delta)
    # The definition, checked by the other query: delta of the ideal run and the distance's share.
    whole = acc.delta(plain, found.upper).upper + (1 + math.exp(found.upper)) * 500 * distance
    assert whole <= delta * (1 + 1e-3)
    assert found.upper > top * (1 - 1e-4)
    exact = acc.epsilon(plain, delta * (1 + share)).lower, acc.epsilon(plain, delta).upper
    assert found.lower <= exact[1]
    assert found.lower <= found.estimate <= found.upper
    # The lower end is not above that of a release that is exact at more of delta.
    assert found.lower <= acc.epsilon(plain, delta * (1 - 2 * share)).upper


def test_a_distance_too_small_for_a_float_still_costs_no_less():
    plain = acc.epsilon(acc.Repeated(STEP, 500), 1e-5)
    found = acc.epsilon(run(2.0**-61), 1e-5)
    assert plain.upper * (1 - 1e-9) <= found.upper <= plain.upper * (1 + 1e-6)
    assert plain.lower * (1 - 1e-6) <= found.lower <= plain.lower


def test_nothing_is_guaranteed_where_the_distance_takes_all_of_delta():
    for bound in (acc.epsilon(run(1e-8), 1e-6), acc.epsilon(run(1e-30), 0.0)):
        assert bound.upper == math.inf
        assert "nothing of delta is left" in bound.note
    assert acc.delta(run(1e-3), 1.0).upper == 1.0
    assert acc.delta(run(1e-30), math.inf).upper == 1.0
    assert acc.epsilon(run(1e-3), 1.0).upper == 0.0


def test_delta_grows_by_the_share_of_the_distance():
    plain = acc.delta(acc.Repeated(STEP, 500), 1.0)
    found = acc.delta(run(1e-12), 1.0)
    share = (1 + math.e) * 500e-12
    assert found.upper == pytest.approx(plain.upper + share, rel=1e-9)
    assert found.upper >= plain.upper + share
    assert found.lower <= plain.lower
    rough = acc.queries.rough_delta(run(1e-6), 1.0)
    assert rough >= (1 + math.e) * 500e-6


def test_distances_add_up_over_steps_epochs_and_events():
    epoch = acc.GridNoise(acc.RandomAllocation(acc.Gaussian(2.0), 50), 1e-9)
    assert epoch.block == 50
    both = acc.Composed((acc.Repeated(epoch, 3), acc.PerUser(acc.GridNoise(STEP, 2e-9), 4)))
    share = (1 + math.e) * 5e-9
    plain = acc.Composed((acc.Repeated(epoch.event, 3), STEP))
    assert acc.delta(both, 1.0).upper >= acc.delta(plain, 1.0).upper + share * (1 - 1e-6)


def test_what_knows_no_distance_refuses_it():
    event = run(1e-20)
    for ask in (
        lambda: acc.renyi_curve(event, (2.0,)),
        lambda: acc.RenyiFilter(1.0, 1e-5).charge(event),
        lambda: acc.epsilon(acc.PoissonSampled(acc.GridNoise(acc.Gaussian(1.0), 0.1), 0.5), 1e-5),
        lambda: flatten(event, ADD),
    ):
        with pytest.raises(acc.UnsupportedEventError, match="GridNoise"):
            ask()
    tuned = acc.Tuned(event, acc.Geometric(0.5))
    assert not acc.supports(tuned)
    assert acc.mu_gdp(event).upper == math.inf
    assert 0 < acc.mu_gdp(event, delta_min=1e-5).upper < math.inf


def test_groups_calibration_and_the_file_keep_the_distance():
    event = run(1e-12)
    bound = acc.group_delta(event, 1.0, 2)
    assert bound.upper >= 500e-12
    assert acc.events.from_dict(json.loads(json.dumps(acc.events.to_dict(event)))) == event
    noise = acc.calibrate(
        lambda z: acc.Repeated(acc.GridNoise(acc.PoissonSampled(acc.Gaussian(z), Q), 1e-11), 500),
        2.0,
        1e-7,
    )
    plain = acc.calibrate_noise_multiplier(2.0, 1e-7, Q, 500)
    assert plain < noise < 1.2 * plain


def test_accountants_answer_or_refuse_as_without_a_distance():
    assert acc.epsilon(run(1e-20), 1e-5, accountant="rdp").upper < 5
    with pytest.raises(acc.UnsupportedEventError):
        acc.epsilon(run(1e-20), 1e-5, accountant="gdp")
    noiseless = acc.GridNoise(acc.Gaussian(0.0), 1e-20)
    assert acc.epsilon(noiseless, 1e-5).upper == math.inf
    nothing = acc.Repeated(acc.GridNoise(STEP, 1e-3), 0)
    assert acc.epsilon(nothing, 1e-5).upper == 0.0


def test_bad_fields_are_refused():
    for bad in (-1e-9, 1.5, math.nan):
        with pytest.raises(ValueError, match="distance"):
            acc.GridNoise(STEP, bad)
    with pytest.raises(ValueError, match="on a grid already"):
        acc.GridNoise(acc.GridNoise(STEP, 0.0), 0.0)


def test_the_start_is_an_upper_end_at_half_of_delta():
    flat = flatten(acc.Repeated(STEP, 500), ADD)
    assert run_rdp(flat, ADD).min() >= 0
    assert near._start(flat, ADD, "auto", 1e-5) >= acc.epsilon(acc.Repeated(STEP, 500), 5e-6).lower
