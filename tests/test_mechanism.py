import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc


def test_the_event_says_what_is_done():
    mech = jaxdp.dp_sgd(1.23, 0.1, 512, 60_000)
    assert mech.event == acc.PoissonSampled(acc.Gaussian(1.23), 512 / 60_000)
    assert mech.sampler(10).sampling.sampling_prob == 512 / 60_000
    fixed = jaxdp.dp_sgd(1.0, 0.1, 5, 50, sampling="fixed_size")
    assert fixed.event == acc.FixedSizeSampled(acc.Gaussian(1.0), 50, 5)
    assert jaxdp.dp_sgd(1.0, 0.1, 50, 50, sampling="full_batch").event == acc.Gaussian(1.0)


def test_noise_follows_the_mechanism_whatever_the_sum():
    mech = jaxdp.dp_sgd(3.0, 0.2, 10, 100)
    params = {"w": jnp.zeros(20_000)}
    tx = mech.privatize(jax.random.key(0))
    update, _ = tx.update(jaxdp.Summed(params, mech.rule.l2(params)), tx.init(params), params)
    np.testing.assert_allclose(np.std(update["w"]), 3.0 * 0.2 / 10, rtol=0.03)


def test_a_step_is_charged_before_it_is_drawn():
    mech, ledger = jaxdp.dp_sgd(1.0, 0.1, 5, 50), jaxdp.Ledger()
    sampler = mech.sampler(50, ledger=ledger)
    for _ in range(3):
        sampler.draw()
    assert ledger.steps == 3
    assert ledger.epsilon(1e-5).upper == mech.epsilon(3, 1e-5).upper
    assert "clipped record by record" in ledger.unverified()[0]


def test_a_second_run_is_charged_again():
    mech, ledger = jaxdp.dp_sgd(1.0, 0.1, 5, 50), jaxdp.Ledger()
    for _ in range(2):
        sampler = mech.sampler(50, ledger=ledger)
        for _ in range(4):
            sampler.draw()
    assert ledger.steps == 8


def test_a_draw_is_charged_once_and_made_once():
    mech, ledger = jaxdp.dp_sgd(1.0, 0.1, 5, 50), jaxdp.Ledger()
    secret = jaxdp.Secret.new()
    one, two = (mech.sampler(50, ledger=ledger, secret=secret) for _ in range(2))
    one.draw()
    with pytest.raises(ValueError, match="was not charged for, got 0"):
        two.draw()
    one.step = 0
    with pytest.raises(ValueError, match="two releases from one draw are not two events"):
        one.draw()
    assert ledger.steps == 1


def test_end_to_end_epsilon_is_that_of_the_steps_taken(linear):
    params, batch, loss_fn = linear
    mech, ledger = jaxdp.dp_sgd(1.0, 0.1, 5, 50), jaxdp.Ledger()
    tx = optax.chain(mech.privatize(), optax.sgd(0.1, momentum=0.9))
    update, state = jaxdp.compile_update(tx), tx.init(params)
    sampler, grad_fn, data = mech.sampler(50, ledger=ledger), mech.clipped_grad(loss_fn), batch(50)
    for _ in range(6):
        summed, _ = grad_fn.sum(params, data, sampler.draw())
        params, state, info = update(params, state, summed)
        assert info.update_norm > 0
    assert ledger.epsilon(1e-5).upper == mech.epsilon(6, 1e-5).upper


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": -0.1}, "noise_multiplier must be"),
        ({"l2_clip_norm": 0.0}, "l2_clip_norm must be"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": 1.5}, "batch_size must be a whole number"),
        ({"batch_size": 101}, r"batch_size must be at most dataset_size \(100\), got 101"),
        ({"dataset_size": -3}, "dataset_size must be"),
        ({"sampling": "shuffled"}, "sampling must be one of poisson, fixed_size, full_batch"),
        ({"sampling": "full_batch"}, "batch_size must be dataset_size"),
    ],
)
def test_bad_input(changes, message):
    good = {"noise_multiplier": 1.0, "l2_clip_norm": 1.0, "batch_size": 10, "dataset_size": 100}
    with pytest.raises(ValueError, match=message):
        jaxdp.dp_sgd(**{**good, **changes})


def test_fixed_size_needs_the_declared_number_of_records():
    mech = jaxdp.dp_sgd(1.0, 0.1, 5, 50, sampling="fixed_size")
    with pytest.raises(ValueError, match="dataset_size must be the number of records"):
        mech.sampler(49)
