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
