"""Nothing is traced again while training, whatever the draws hold; shapes have named dimensions."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp

ROWS, STEPS = 400, 200


def of_example(params, x, y):
    return jnp.square(jnp.dot(params["w"], x) + params["b"] - y)


def data(width=3):
    x = jax.random.normal(jax.random.key(0), (ROWS, width))
    return x, jnp.sum(x, axis=1)


def begun(width=3):
    return {"w": jnp.zeros(width), "b": jnp.zeros([])}


@pytest.mark.parametrize("rows", [None, 16], ids=["one physical batch", "several"])
def test_two_hundred_draws_of_unlike_sizes_trace_the_loss_twice(rows):
    # Once for the plan, and once for the compiled step.
    chex.clear_trace_counter()
    loss_fn = chex.assert_max_traces(of_example, n=2)
    mechanism = jaxdp.dp_sgd(1.0, 1.0, 40, ROWS)
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.01), data(), physical_batch_size=rows)
    state, sizes = trainer.init(begun()), set()
    for batch in trainer.batches(STEPS):
        sizes.add(int(np.count_nonzero(batch.draw.mask)))
        state, _ = trainer.step(state, batch)
    assert len(sizes) > 20
    trainer.close()


def test_a_user_jit_of_the_sum_and_the_update_is_traced_once():
    chex.clear_trace_counter()
    mechanism = jaxdp.dp_sgd(1.0, 1.0, 40, ROWS)
    grad_fn = mechanism.clipped_grad(of_example)
    tx = optax.chain(mechanism.privatize(), optax.sgd(0.01))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, opt_state, batch, key):
        summed, _ = grad_fn(params, batch)
        updates, opt_state = tx.update(summed, opt_state, params, key=key)
        return optax.apply_updates(params, updates), opt_state

    sampler = mechanism.sampler(ROWS, physical_batch_size=128)
    params, opt_state = begun(), tx.init(begun())
    for _ in range(20):
        draw = sampler.draw()
        (batch,) = draw.batches(data())
        params, opt_state = step(params, opt_state, batch, draw.key())
    chex.assert_tree_all_finite(params)


@pytest.mark.parametrize("engine", ["auto", "ghost", "vmap"])
def test_the_shapes_of_a_clipped_sum(engine):
    dims = chex.Dimensions(B=12, D=5)
    params = begun(dims.D)
    batch = tuple(leaf[: dims.B] for leaf in data(dims.D))
    grad_fn = jaxdp.clipped_grad(of_example, jaxdp.clip(1.0), engine=engine)
    summed, info = grad_fn(params, batch, "all")
    chex.assert_trees_all_equal_shapes(summed.value, params)
    chex.assert_type(jax.tree.leaves(summed.value), jnp.float32)
    chex.assert_shape([info.norms, info.losses, info.clipped, info.mask], dims["B"])
    chex.assert_scalar_non_negative(float(summed.l2))
