"""Layerwise blocks: one group moves, with its own noise, and the rest is exactly still."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.clipping import rounding
from jaxdp.optimizers import LayerwiseGrad, by_top_level, layerwise
from jaxdp.optimizers.layerwise_blocks import layerwise_method
from jaxdp.tickets import simulated_key
from tests.statistics import are_uncorrelated, is_gaussian

PARAMS = {"a": {"w": jnp.ones((30, 40)), "b": jnp.ones(40)}, "z": {"w": jnp.ones((40, 50))}}
GROUPS = by_top_level(PARAMS)


def test_groups_follow_the_outermost_level():
    assert GROUPS == {"a": {"b": 0, "w": 0}, "z": {"w": 1}}
    assert by_top_level({"params": PARAMS}) == {"params": GROUPS}
    assert by_top_level([jnp.ones(2), {"x": jnp.ones(3)}]) == [0, {"x": 1}]


def loss_fn(params, example):
    h = jnp.tanh(example @ params["a"]["w"] + params["a"]["b"])
    return jnp.sum(jnp.square(h @ params["z"]["w"]))


def clipped(grad_fn):
    return jax.jit(lambda params, batch: grad_fn(params, batch, "all")[0].value)


def test_the_clip_norm_is_spent_on_the_active_group_alone():
    grad = LayerwiseGrad(loss_fn, jaxdp.clip(0.5), GROUPS)
    batch = 0.1 * jax.random.normal(jax.random.key(0), (4, 30))
    full = clipped(jaxdp.clipped_grad(loss_fn, jaxdp.clip(1e6)))(PARAMS, batch)
    for step in range(2):
        active, still = ("a", "z") if step % 2 == 0 else ("z", "a")
        value = clipped(grad.of_step(step))(PARAMS, batch[:1])
        assert float(optax.tree.norm(value[active])) == pytest.approx(
            0.5 * (1.0 - rounding.MARGIN), rel=1e-5
        )
        assert float(optax.tree.norm(value[still])) == 0
        free = clipped(LayerwiseGrad(loss_fn, jaxdp.clip(1e6), GROUPS).of_step(step))(PARAMS, batch)
        np.testing.assert_allclose(free[active]["w"], full[active]["w"], rtol=1e-4, atol=1e-4)
    assert grad.of_step(2) is grad.of_step(0)


def key_of(step, noise):
    return simulated_key(jax.random.fold_in(jax.random.key(1), step), {"gradient": noise}, step)


def zeros():
    return jaxdp.Summed(jax.tree.map(jnp.zeros_like, PARAMS), 0.5)


def test_only_the_active_group_is_noised_and_the_others_are_exactly_still():
    tx = layerwise(optax.sgd(1.0), GROUPS, 3.0, 10.0)
    state, moves = tx.init(PARAMS), []
    update = jax.jit(lambda state, key: tx.update(zeros(), state, PARAMS, key=key))
    for step in range(4):
        updates, state = update(state, key_of(step, 3.0))
        active, still = ("a", "z") if step % 2 == 0 else ("z", "a")
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(updates[still]))
        assert is_gaussian(updates[active]["w"], 3.0 * 0.5 / 10)
        assert not is_gaussian(updates[active]["w"], 1.15 * 3.0 * 0.5 / 10)
        moves.append(updates[active]["w"])
    assert are_uncorrelated(moves[0], moves[2])
    again, _ = update(state, key_of(3, 3.0))  # in the other group's turn
    assert np.isnan(again["a"]["w"]).all()


def test_an_un_noised_sum_of_another_group_never_gets_through():
    """A gradient for all groups, or for the wrong one: only the active group's noisy part moves."""
    tx = layerwise(optax.sgd(1.0), GROUPS, 0.0, 1.0)
    everything = jaxdp.Summed(jax.tree.map(lambda p: 7 * jnp.ones_like(p), PARAMS), 0.5)
    update = jax.jit(lambda state, key: tx.update(everything, state, PARAMS, key=key))
    updates, _ = update(tx.init(PARAMS), key_of(0, 0.0))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(updates["z"]))
    np.testing.assert_array_equal(updates["a"]["w"], -7 * jnp.ones((30, 40)))


def test_the_state_of_a_waiting_group_rests():
    tx = layerwise(optax.sgd(0.1, momentum=0.9), GROUPS, 1.0, 1.0)
    state = tx.init(PARAMS)
    update = jax.jit(lambda state, key: tx.update(zeros(), state, PARAMS, key=key))
    _, one = update(state, key_of(0, 1.0))
    jax.tree.map(np.testing.assert_array_equal, one.inner[1], state.inner[1])
    assert np.any(one.inner[0][0].trace["a"]["w"])
    updates, two = update(one, key_of(1, 1.0))
    jax.tree.map(np.testing.assert_array_equal, two.inner[0], one.inner[0])
    assert not np.any(updates["a"]["w"])
    assert int(two.step) == 2
    assert not np.array_equal(two.noise.last, one.noise.last)


def test_it_trains_with_the_ordinary_trainer_for_one_event_a_step():
    data = 0.3 * np.random.default_rng(0).normal(size=(64, 30)).astype(np.float32)
    mech, ledger = jaxdp.dp_sgd(1.0, 0.5, 16, 64), jaxdp.Ledger()
    method = layerwise_method(mech, optax.sgd(0.1), GROUPS)
    trainer = jaxdp.Trainer(loss_fn, method, source=data, ledger=ledger)
    state = trainer.init(PARAMS)
    for step, batch in enumerate(trainer.batches(4)):
        before = jax.tree.map(np.asarray, state.params)
        state, _ = trainer.step(state, batch)
        active, still = ("a", "z") if step % 2 == 0 else ("z", "a")
        np.testing.assert_array_equal(state.params[still]["w"], before[still]["w"])
        assert np.all(state.params[active]["w"] != before[active]["w"])
    assert ledger.event == acc.Composed((acc.Repeated(mech.event, 4),))
    assert trainer.unverified() == []


@pytest.mark.parametrize("groups", [{"a": 0, "z": 2}, {"a": -1, "z": 0}, {}, {"a": 0.5, "z": 1}])
def test_groups_are_numbered_from_0(groups):
    with pytest.raises(ValueError, match="groups"):
        layerwise(optax.sgd(1.0), groups, 1.0, 1.0)


def test_groups_must_fit_the_parameters():
    with pytest.raises(ValueError, match="groups"):
        layerwise(optax.sgd(1.0), {"a": 0, "z": 1}, 1.0, 1.0).init(PARAMS)
