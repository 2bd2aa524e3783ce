"""Layerwise blocks: one group moves, with its own noise, and the rest is exactly still."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.optimizers import LayerwiseGrad, by_top_level, layerwise
from jaxdp.train import Trainer
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
    return jax.jit(lambda params, batch: grad_fn(params, batch)[0].value)


def test_the_clip_norm_is_spent_on_the_active_group_alone():
    grad = LayerwiseGrad(loss_fn, jaxdp.clip(0.5), GROUPS)
    batch = 0.1 * jax.random.normal(jax.random.key(0), (4, 30))
    full = clipped(jaxdp.clipped_grad(loss_fn, jaxdp.clip(1e6)))(PARAMS, batch)
    for step in range(2):
        active, still = ("a", "z") if step % 2 == 0 else ("z", "a")
        value = clipped(grad.of_step(step))(PARAMS, batch[:1])
        assert float(optax.tree.norm(value[active])) == pytest.approx(0.5, rel=1e-3)
        assert float(optax.tree.norm(value[still])) == 0
        free = clipped(LayerwiseGrad(loss_fn, jaxdp.clip(1e6), GROUPS).of_step(step))(PARAMS, batch)
        np.testing.assert_allclose(free[active]["w"], full[active]["w"], rtol=1e-4, atol=1e-4)
    assert grad.of_step(2) is grad.of_step(0)


def zeros():
    return jaxdp.Summed(jax.tree.map(jnp.zeros_like, PARAMS), 0.5)


def test_only_the_active_group_is_noised_and_the_others_are_exactly_still():
    tx = layerwise(optax.sgd(1.0), GROUPS, 3.0, 10.0, jax.random.key(1))
    state, moves = tx.init(PARAMS), []
    update = jax.jit(lambda state: tx.update(zeros(), state, PARAMS))
    for step in range(4):
        updates, state = update(state)
        active, still = ("a", "z") if step % 2 == 0 else ("z", "a")
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(updates[still]))
        assert is_gaussian(updates[active]["w"], 3.0 * 0.5 / 10)
        assert not is_gaussian(updates[active]["w"], 1.15 * 3.0 * 0.5 / 10)
        moves.append(updates[active]["w"])
    assert are_uncorrelated(moves[0], moves[2])


def test_an_un_noised_sum_of_another_group_never_gets_through():
    """A gradient for all groups, or for the wrong one: only the active group's noisy part moves."""
    tx = layerwise(optax.sgd(1.0), GROUPS, 0.0, 1.0, jax.random.key(1))
    everything = jaxdp.Summed(jax.tree.map(lambda p: 7 * jnp.ones_like(p), PARAMS), 0.5)
    updates, _ = jax.jit(lambda state: tx.update(everything, state, PARAMS))(tx.init(PARAMS))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(updates["z"]))
    np.testing.assert_array_equal(updates["a"]["w"], -7 * jnp.ones((30, 40)))


def test_the_state_of_a_waiting_group_rests():
    tx = layerwise(optax.sgd(0.1, momentum=0.9), GROUPS, 1.0, 1.0, jax.random.key(1))
    state = tx.init(PARAMS)
    update = jax.jit(lambda state: tx.update(zeros(), state, PARAMS))
    _, one = update(state)
    jax.tree.map(np.testing.assert_array_equal, one.inner[1], state.inner[1])
    assert np.any(one.inner[0][0].trace["a"]["w"])
    updates, two = update(one)
    jax.tree.map(np.testing.assert_array_equal, two.inner[0], one.inner[0])
    assert not np.any(updates["a"]["w"])
    assert int(two.noise.step) == 2


def test_it_trains_with_the_ordinary_trainer_for_one_event_a_step():
    data = (0.3 * jax.random.normal(jax.random.key(0), (64, 30)),)
    mech, ledger = jaxdp.dp_sgd(1.0, 0.5, 16, 64), jaxdp.Ledger()
    secret = jaxdp.Secret.from_seed(5)
    grad = LayerwiseGrad(lambda p, e: loss_fn(p, e[0]), mech.rule, GROUPS)
    tx = layerwise(optax.sgd(0.1), GROUPS, mech.noise_multiplier, 16, secret.jax_key("noise"))
    trainer = Trainer(grad, tx, mech.sampler(64, ledger=ledger, secret=secret))
    state = trainer.init(PARAMS)
    for step in range(4):
        before = jax.tree.map(np.asarray, state.params)
        state, _, _ = trainer.step(state, data)
        active, still = ("a", "z") if step % 2 == 0 else ("z", "a")
        np.testing.assert_array_equal(state.params[still]["w"], before[still]["w"])
        assert np.all(state.params[active]["w"] != before[active]["w"])
    assert ledger.event == acc.Composed((acc.Repeated(mech.event, 4),))


@pytest.mark.parametrize("groups", [{"a": 0, "z": 2}, {"a": -1, "z": 0}, {}, {"a": 0.5, "z": 1}])
def test_groups_are_numbered_from_0(groups):
    with pytest.raises(ValueError, match="groups"):
        layerwise(optax.sgd(1.0), groups, 1.0, 1.0)


def test_groups_must_fit_the_parameters():
    with pytest.raises(ValueError, match="groups"):
        layerwise(optax.sgd(1.0), {"a": 0, "z": 1}, 1.0, 1.0, jax.random.key(0)).init(PARAMS)
