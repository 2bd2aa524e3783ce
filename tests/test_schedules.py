import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdp
from jaxdp import accounting as acc
from jaxdp import schedules
from jaxdp.ledger.tickets import simulated_key
from tests.laws import is_gaussian
from tests.mechanisms import sgd_of
from tests.refusing import all_refused, refused

LEVELS = st.lists(st.tuples(st.floats(0.1, 9.0), st.integers(1, 7)), min_size=1, max_size=5)
TWO = schedules.NoiseSchedule(((1.0, 1), (5.0, 2)))
MECH = sgd_of(TWO, 0.5, 10, 100)


def test_the_published_shapes():
    exp = schedules.decaying("exponential", 10.0, 0.01, every=3, steps=7)
    once, twice = 10 * math.exp(-0.01), 10 * math.exp(-0.02)
    assert [exp(t) for t in (0, 2, 3, 6)] == [10.0, 10.0, once, twice]
    assert schedules.decaying("time", 8.0, 0.5, 2, 4).levels == ((8.0, 2), (8.0 / 1.5, 2))
    assert schedules.decaying("step", 8.0, 0.5, 2, 5).levels == ((8.0, 2), (4.0, 2), (2.0, 1))
    linear = schedules.decaying("linear", 4.0, 0.25, 1, 4)
    np.testing.assert_allclose([linear(t) for t in range(4)], [4, 3, 2, 1])
    assert schedules.from_multipliers([2, 2, 1.0]).levels == ((2.0, 2), (1.0, 1))
    assert schedules.from_multipliers([2.0]).times(1.5).levels == ((3.0, 1),)


@given(levels=LEVELS, data=st.data())
def test_the_ledgers_stretches_are_the_devices_table(levels, data):
    schedule = schedules.NoiseSchedule(tuple(levels))
    first = data.draw(st.integers(0, schedule.steps - 1))
    steps = data.draw(st.integers(1, schedule.steps - first))
    charged = {}
    for multiplier, start, count in schedule.levels_between(first, steps):
        charged |= {step: np.float32(multiplier) for step in range(start, start + count)}
    assert charged == dict(enumerate(schedule.table()[first : first + steps], first))


def test_every_step_gets_the_noise_it_is_charged_for():
    params = {"w": jnp.zeros(20_000)}
    tx, sampler = MECH.privatize(), MECH.sampler(100)
    state, summed = tx.init(params), jaxdp.Summed(params, MECH.l2(params))
    update = jax.jit(lambda s, key: tx.update(summed, s, params, key=key))
    share = MECH.l2(params) / 0.5  # the rounding of the sum counts: between 1 and 1.02
    assert 1.0 < share < 1.02
    for step, std in enumerate((0.05 * share, 0.25 * share, 0.25 * share)):
        draw = sampler.draw()
        assert draw.step == step
        noise, state = update(state, draw.key())
        assert is_gaussian(noise["w"], std)
        assert not is_gaussian(noise["w"], 1.5 * std)
        assert MECH.event_at(step) == acc.PoissonSampled(acc.Gaussian(TWO(step)), 0.1)
        np.testing.assert_allclose(MECH.noise_std(params, jnp.asarray(step)), std, rtol=1e-6)
        assert sampler.ledger.entries[-1].event == MECH.event_at(step)
    refused("must cover the 4 steps", sampler.draw)
    beyond, _ = update(state, MECH.simulated_key(jax.random.key(0), 3))
    assert np.isnan(beyond["w"]).all()  # no step without its charge


def test_a_step_beyond_the_end_gets_no_level_whatever_its_key_says():
    tx, params = jaxdp.privatize(TWO, 10.0), {"w": jnp.zeros(2)}
    state, summed = tx.init(params), jaxdp.Summed(params, 1.0)
    update = jax.jit(lambda key: tx.update(summed, state, params, key=key)[0]["w"])
    last, beyond = (
        update(simulated_key(jax.random.key(0), {"gradient": 5.0}, step)) for step in (2, 3)
    )
    assert np.isfinite(last).all()
    assert np.isnan(beyond).all()
    # Nor another's: the key of step 1 as that of step 0 would add too little noise.
    key = MECH.simulated_key(jax.random.key(3), 1)
    wrong = dataclasses.replace(key, step=jnp.asarray(0, jnp.int32))
    assert np.isnan(update(wrong)).all()
    tx, plain = MECH.privatize(), sgd_of(1.0, 0.5, 10, 100).privatize()
    tx.update(summed, tx.init(params), params, key=key)
    words = "must be the one that the step was charged for, 5.0"
    all_refused(
        (words, partial(link.update, summed, link.init(params), params, key=given_key))
        for link, given_key in ((tx, wrong), (plain, key))
    )
    sampler = MECH.sampler(100, first_step=1, reserve=9)  # that begins later
    assert sampler.draw().key().multipliers == [5.0]
    assert [(e.first_step, e.end) for e in sampler.ledger.reserved] == [(1, 3)]
    assert sampler.ledger.event == acc.Composed((acc.Repeated(MECH.event_at(1), 1),))


def test_a_schedule_costs_its_heterogeneous_composition():
    schedule = schedules.NoiseSchedule(((2.0, 30), (1.0, 10)))
    mech, ledger = sgd_of(schedule, 0.5, 10, 100), jaxdp.Ledger()
    sampler = mech.sampler(100, ledger=ledger)
    for _ in range(40):
        sampler.draw()
    loud, quiet = (acc.PoissonSampled(acc.Gaussian(z), 0.1) for z in (2.0, 1.0))
    both = acc.Composed((acc.Repeated(loud, 30), acc.Repeated(quiet, 10)))
    truth = acc.epsilon(both, 1e-5).upper
    assert ledger.epsilon(1e-5).upper == pytest.approx(truth, rel=1e-9)
    assert mech.epsilon(40, 1e-5).upper == pytest.approx(truth, rel=1e-9)
    least = sgd_of(2.0, 0.5, 10, 100).epsilon(40, 1e-5).lower
    assert least < truth < sgd_of(1.0, 0.5, 10, 100).epsilon(40, 1e-5).upper
    refused("must cover the 41 steps of the run, got one of 40", sampler.draw)
    assert ledger.steps == 40


def test_a_schedule_is_scaled_to_its_budget_and_bad_ones_are_refused():
    shape = schedules.NoiseSchedule(((2.0, 1), (1.0, 2)))
    budget = {"epsilon": 1.0, "delta": 1e-5, "steps": 3, "schedule": shape}
    mech = sgd_of(None, 1.0, 100, 100, "full_batch", **budget)
    (first, one), (second, two) = mech.noise_multiplier.levels
    assert (one, two) == (1, 2)
    assert first == pytest.approx(2 * second)
    assert 0.999 < mech.epsilon(3, 1e-5).upper <= 1.0
    underflow = r"the noise multiplier of step 2 must be a finite number above 0, got 0\.0"
    falling = partial(schedules.decaying, "exponential")
    all_refused(
        [
            ("levels must hold at least one", lambda: schedules.NoiseSchedule(())),
            (r"levels\[0\] must be a finite", lambda: schedules.NoiseSchedule(((-1.0, 3),))),
            (r"levels\[0\] must be a whole", lambda: schedules.NoiseSchedule(((1.0, 0),))),
            ("number must be a finite", lambda: falling(1.0, -0.1, 1, 5)),
            ("number must be above 0", lambda: schedules.decaying("step", 1.0, 1.5, 1, 5)),
            ("number must be a finite", lambda: schedules.decaying("linear", 1.0, 0.0, 1, 5)),
            ("every must be a whole number", lambda: schedules.decaying("time", 1.0, 0.1, 0, 5)),
            ("initial must be a finite", lambda: falling(0.0, 0.1, 1, 5)),
            (underflow, lambda: falling(2.0, 5000.0, 2, 5)),
            (r"ask event_at\(step\) or total\(steps\)", lambda: MECH.event),
            ("must cover the 4 steps", lambda: MECH.epsilon(4, 1e-5)),
        ]
    )
