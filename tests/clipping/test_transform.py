import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.tickets import simulated_key


def test_the_optax_native_way_equals_the_function(linear):
    params, batch, loss_fn = linear
    data, mask = batch(9), jnp.arange(9) < 7
    key = simulated_key(jax.random.key(3), {"gradient": 0.5})
    tx = optax.chain(jaxdp.clip_and_sum(jaxdp.clip(1.0)), jaxdp.privatize(0.5, 8.0), optax.sgd(0.1))

    @jax.jit
    def step(params, state, key):
        grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, data)
        return tx.update(grads, state, params, mask=mask, key=key)[0]

    native = step(params, tx.init(params), key)
    summed, _ = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))(params, data, mask)
    plain = optax.chain(jaxdp.privatize(0.5, 8.0), optax.sgd(0.1))
    direct, _ = plain.update(summed, plain.init(params), params, key=key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), native, direct)


def test_gradients_of_a_batch_mean_are_refused_where_shapes_tell():
    tx = jaxdp.clip_and_sum(jaxdp.clip(1.0))
    grads = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(())}
    with pytest.raises(ValueError, match="updates must be per-example gradients"):
        tx.update(grads, tx.init(grads), grads, mask="all")
    one = {"w": jnp.zeros((7, 4))}
    with pytest.raises(ValueError, match=r"over parameters \[\(7, 4\)\], got \[\(7, 4\)\]"):
        tx.update(one, tx.init(one), one, mask="all")
    with pytest.raises(ValueError, match="params must be passed"):
        tx.update(one, tx.init(one), mask="all")
    ragged = {"a": jnp.zeros((3, 2)), "b": jnp.zeros((4, 2))}
    with pytest.raises(ValueError, match="one and the same m"):
        tx.update(ragged, tx.init(one), {"a": jnp.zeros(2), "b": jnp.zeros(2)}, mask="all")
    with pytest.raises(ValueError, match="mask must be bool"):
        tx.update(one, tx.init(one), {"w": jnp.zeros(4)}, mask=jnp.ones(2, bool))


@pytest.mark.parametrize("noise", ["gaussian", "grid"])
def test_noise_std_is_that_of_the_noise_that_the_mechanism_adds(noise):
    """Before: ``clip_and_sum(rule)`` allowed for 2^14 records, and the noise was 2 % larger."""
    mech = jaxdp.dp_sgd(1.0, 0.5, 16, 200, noise=noise)
    params = {"w": jnp.zeros(50)}
    key, noise_only = mech.simulated_key(jax.random.key(1)), mech.privatize()
    summed = jaxdp.Summed(params, mech.l2(params))  # noise_std is noise_multiplier times this l2
    wanted, _ = noise_only.update(summed, noise_only.init(params), params, key=key)
    for clip in (jaxdp.clip_and_sum(mech.rule), mech.clip_and_sum()):
        tx = optax.chain(clip, mech.privatize())
        none = {"w": jnp.zeros((4, 50))}
        found, _ = tx.update(none, tx.init(params), params, mask="all", key=key)
        np.testing.assert_array_equal(found["w"], wanted["w"])


def test_noise_covers_rows_that_the_mechanism_does_not_expect_and_sums_of_several_devices():
    """What a part of the records is allowed for does not do for a sum of parts."""
    mech = jaxdp.dp_sgd(1.0, 0.5, 16, 200)
    params, key = {"w": jnp.zeros(50)}, mech.simulated_key(jax.random.key(1))
    clip, add = jaxdp.clip_and_sum(mech.rule), mech.privatize()

    def noise_of(summed):
        return float(jnp.linalg.norm(add.update(summed, add.init(params), params, key=key)[0]["w"]))

    def sum_of(rows):
        grads = {"w": jnp.zeros((rows, 50))}
        return clip.update(grads, clip.init(params), params, mask="all")[0]

    few, many = sum_of(4), sum_of(mech.most_records + 1)
    added = dataclasses.replace(few, value=jax.tree.map(jnp.add, few.value, few.value))
    assert noise_of(few) < noise_of(many) == noise_of(added)
    with pytest.raises(ValueError, match="most_records must be at least"):
        mech.clip_and_sum().update({"w": jnp.zeros((1057, 50))}, None, params, mask="all")
