"""Discrete Laplace noise: its law, its scale, an audit at delta 0, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxdp
from jaxdp import accounting as acc
from jaxdp.audit import bounds
from jaxdp.noise import LaplaceNoise, laplace
from jaxdp.noise.grid import with_12_digits
from jaxdp.noise.laplace import CELLS, discrete_laplace, laplace_event
from jaxdp.types import Summed
from tests.refusing import refused

KEYS = jax.random.bits(jax.random.key(4), (8000, 8), jnp.uint32)


def made(multiplier, **given):
    sizes = {"batch_size": 10, "dataset_size": 10, "sampling": "full_batch", **given}
    return jaxdp.dp_sgd(noise_multiplier=multiplier, l2_clip_norm=0.3, noise="laplace", **sizes)


@pytest.mark.parametrize("scale", [1, 7, 1000])
def test_the_integers_have_the_law(scale):
    draw = jax.jit(lambda keys: jax.lax.map(lambda key: discrete_laplace(key, scale), keys))
    found, r = np.asarray(draw(KEYS)), np.exp(-1 / scale)
    # In cells of about equal mass, by the closed form of the distribution function.
    ends = np.unique(np.round(scale * np.array([-3, -2, -1, -0.5, 0, 0.5, 1, 2, 3]) - 0.5))
    below = [
        r ** -np.floor(e) / (1 + r) if e < 0 else 1 - r ** np.floor(e + 1) / (1 + r) for e in ends
    ]
    counts = np.histogram(found, [-np.inf, *(np.floor(ends) + 0.5), np.inf])[0]
    assert stats.chisquare(counts, len(found) * np.diff([0, *below, 1])).pvalue > 1e-4
    assert abs(found).max() > 5 * scale


def released(mechanism, values, keys):
    """The noisy sums of one number each, [n], in cells of the grid."""
    link, l2 = mechanism.privatize(), mechanism.l2(jnp.zeros(()))

    def one(given):
        value, key = given
        key = mechanism.simulated_key(jax.random.wrap_key_data(key))
        return link.update(Summed(value, l2), link.init(jnp.zeros(())), key=key)[0]

    noisy = jax.jit(lambda given: jax.lax.map(one, given))((jnp.float32(values), keys))
    cells = np.asarray(noisy, float) * 10 * with_12_digits(laplace._CELLS_OF_L2 / np.float32(l2))
    # Nothing else is released than integers: no other digit knows the sum.
    np.testing.assert_allclose(cells, np.round(cells), atol=2e-3 + 2e-7 * abs(cells).max())
    return np.round(cells)


def test_two_worlds_come_near_the_epsilon_and_not_above_it():
    mechanism, keys = made(1.0), jax.random.key_data(jax.random.split(jax.random.key(5), 12_000))
    l2 = mechanism.l2(jnp.zeros(()))
    values = np.repeat([l2, 0.0], 6000)
    there, gone = released(mechanism, values, keys).reshape(2, 6000)
    # The threshold that tells best: above the larger of the two sums.
    alarms, misses = int(np.sum(gone >= CELLS)), int(np.sum(there < CELLS))
    found = bounds.epsilon_bound(bounds.ErrorCounts(alarms, 6000, misses, 6000), 0.0)
    upper = acc.epsilon(mechanism.event, 0.0).upper
    assert upper == pytest.approx(1.0, rel=1e-9)
    assert 0.85 < found < upper
    std = mechanism.noise_std(jnp.zeros(())) * 10 / l2 * CELLS
    assert np.std(gone) == pytest.approx(std, rel=0.05)


def test_a_record_moves_the_integers_by_no_more_than_is_charged():
    mechanism = made(0.1)
    l2 = mechanism.l2(jnp.zeros(()))
    values = np.random.default_rng(1).uniform(-50, 50, 500).astype(np.float32)
    # One key, and so one noise: what is left is what a record moves.
    key = jnp.broadcast_to(jax.random.key_data(jax.random.key(6)), (500, 2))
    with_it = np.nextafter(values + np.float32(l2), np.float32(-np.inf))
    moved = released(mechanism, with_it, key) - released(mechanism, values, key)
    assert (moved <= CELLS).all()
    assert (moved >= CELLS - 2).all()
    # A sum beyond all bounds ends at the last cell.
    ends = released(mechanism, np.float32([1e30, -1e30]), key[:2])
    np.testing.assert_allclose(ends, [2.0**29, -(2.0**29)], rtol=1e-6)


def test_the_event_is_discrete_laplace_and_goes_to_json_and_back():
    mechanism = made(2.0, batch_size=2, sampling="poisson")
    assert mechanism.event == acc.PoissonSampled(acc.DiscreteLaplace(2 * CELLS, CELLS), 0.2)
    assert acc.events.from_dict(acc.events.to_dict(mechanism.event)) == mechanism.event
    assert laplace_event(0.3333).scale >= 0.3333 * CELLS
    with pytest.raises(acc.UnsupportedEventError, match="replace_one"):
        acc.epsilon(mechanism.event, 0.0, acc.Relation.REPLACE_ONE)


def test_a_key_of_the_step_before_gives_no_number():
    mechanism, zero = made(1.0), jnp.zeros(())
    link, key = mechanism.privatize(), mechanism.simulated_key(jax.random.key(1))
    first, state = link.update(Summed(zero, 0.3), link.init(zero), key=key)
    again, _ = link.update(Summed(zero, 0.3), state, key=key)
    assert np.isfinite(first)
    assert np.isnan(again)


def test_what_it_does_not_take_is_refused():
    refused("one number", lambda: made(1.0).privatize().init(jnp.zeros(2)))
    for wrong in (0.001, 5000.0, jaxdp.schedules.from_multipliers([1.0, 2.0])):
        refused("noise_multiplier", lambda wrong=wrong: LaplaceNoise(wrong))
    refused("count_noise_multiplier", lambda: jaxdp.Mechanism(
        jaxdp.clip(1.0), 1.0, jaxdp.sampling.Poisson(0.1), 1, 10,
        count_noise_multiplier=5.0, noise="laplace",
    ))  # fmt: skip
