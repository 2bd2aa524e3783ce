"""Adaptive quantile clipping: one event, its two noises, and where the bound goes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.optimizers import quantile
from jaxdp.train import Trainer
from jaxdp.types import Summed

PARAMS = {"w": jnp.zeros(3)}


def test_gradient_and_count_are_one_gaussian_of_the_stated_multiplier():
    mechanism, _ = quantile.quantile_clip(1.1, 50, 1000, count_noise_multiplier=4.0)
    assert mechanism.event == acc.PoissonSampled(acc.Gaussian(1.1), 0.05)
    z_g = quantile.split_noise(1.1, 4.0)
    assert z_g > 1.1
    assert (z_g**-2 + 4.0**-2) ** -0.5 == pytest.approx(1.1, rel=1e-9)


def test_both_noises_have_their_standard_deviations_and_are_independent():
    z, z_c, batch, bound = 0.9, 3.0, 20, 0.5

    def once(key):
        _, tx = quantile.quantile_clip(
            z, batch, 100, initial_bound=bound, count_noise_multiplier=z_c, key=key
        )
        summed = Summed(PARAMS, bound, votes=jnp.float32(2.5))
        mean, state = tx.update(summed, tx.init(PARAMS), PARAMS)
        return mean["w"], state.bound

    means, bounds = jax.jit(jax.vmap(once))(jax.random.split(jax.random.key(0), 20_000))
    within = 0.5 - np.log(np.asarray(bounds, np.float64) / bound) / 0.2
    count = (within - 0.5) * batch
    z_g = quantile.split_noise(z, z_c)
    # Twelve standard errors wide at most; half or twice the noise is a hundred away.
    assert np.std(means * batch) == pytest.approx(z_g * bound, rel=0.02)
    assert np.std(count) == pytest.approx(0.5 * z_c, rel=0.03)
    assert np.mean(count) == pytest.approx(2.5, abs=0.06)
    assert abs(np.corrcoef(count, means[:, 0])[0, 1]) < 0.03


@pytest.mark.parametrize("target", [0.3, 0.8])
def test_the_bound_goes_to_the_quantile(target):
    data = jnp.linspace(0.01, 2.0, 400)[:, None] * jnp.ones((1, 3)) / np.float32(np.sqrt(3))
    mechanism, tx = quantile.quantile_clip(
        0.3, 400, 400, initial_bound=0.05, target_quantile=target, learning_rate=0.3,
        sampling="full_batch", key=jax.random.key(0),
    )
    grad_fn = mechanism.clipped_grad(lambda p, x: jnp.vdot(p["w"], x))
    trainer = Trainer(
        grad_fn, optax.chain(tx, optax.sgd(1e-3)), mechanism.sampler(400, physical_batch_size=400),
        context=lambda state: {"bound": state[0].bound},
    )
    state, bounds = trainer.init(PARAMS), []
    for _ in range(60):
        state, _, _ = trainer.step(state, data)
        bounds.append(float(state.opt_state[0].bound))
    assert np.mean(bounds[-20:]) == pytest.approx(2.0 * target, rel=0.12)


def test_a_sum_without_votes_and_bad_numbers_are_refused():
    _, tx = quantile.quantile_clip(1.0, 10, 100, key=jax.random.key(0))
    with pytest.raises(ValueError, match="updates must carry votes"):
        tx.update(Summed(PARAMS, 0.1), tx.init(PARAMS), PARAMS)
    with pytest.raises(TypeError, match="Summed"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    for bad, message in [
        ({"count_noise_multiplier": 0.9}, "count_noise_multiplier must be above"),
        ({"target_quantile": 1.0}, "target_quantile must be in"),
        ({"target_quantile": 0.0}, "target_quantile"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"initial_bound": -1.0}, "l2_clip_norm"),
    ]:
        with pytest.raises(ValueError, match=message):
            quantile.quantile_clip(1.0, 10, 100, **bad)
    assert jaxdp.optimizers.quantile_clip is quantile.quantile_clip
