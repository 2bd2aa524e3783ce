"""Attacks on parameters in loops and joined ones: those that succeeded, and some that held."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from tests.clipping import search
from tests.clipping.architectures import opened
from tests.clipping.test_loops import BATCH, PARAMS, D

tanh = jnp.tanh


def constant_results(p, x):
    """What a loop returns may be literals, which JAX does not hash."""
    (h, _), ones = jax.lax.scan(lambda c, r: ((tanh(r @ p["u"]), c[1]), 1.0), (x[0], 2.0), x)
    return h * ones[0]


def without_data_at_first(p, x):
    """What the weight meets is a constant in the first pass, and data from the second on."""
    step = lambda c, _: ((c[1], tanh(c[0] @ p["u"])), None)  # noqa: E731
    return jax.lax.scan(step, (jnp.ones(D), x[0]), None, length=4)[0][1]


def slice_joined_to_a_shared_weight(p, x):
    def layer(h, w):
        both = jnp.concatenate([w, p["u"], w.T], axis=0)
        return tanh(jnp.concatenate([h, h * h, 1.0 - h], axis=1) @ both), None

    return jax.lax.scan(layer, x, p["w"])[0]


def turned_back(p, x):
    """One stack by two loops, the second of which runs backwards with slices turned."""
    h = jax.lax.scan(lambda h, w: (tanh(h @ w), None), x, p["w"])[0]
    return jax.lax.scan(lambda h, w: (tanh(h @ w.T), None), h, p["w"], reverse=True)[0]


def checkpoints_all_over(p, x):
    @jax.checkpoint
    def outer(h, row):
        inner = jax.checkpoint(lambda h, _: (tanh(h @ p["u"] + row @ p["v"]), h.sum()))
        return jax.lax.scan(inner, h, None, length=2, unroll=2)

    return jax.lax.scan(outer, jnp.zeros(D), x, reverse=True, unroll=3)[1]


def slope(p, x):
    """Every pass once forwards and once backwards, inside the loss."""
    through = lambda h: jax.lax.scan(lambda h, w: (tanh(h @ w), None), h, p["w"])[0]  # noqa: E731
    return jax.grad(lambda h: jnp.sum(through(h)))(x)


ATTACKS = {
    fn.__name__: (fn, names)
    for fn, names in (
        (constant_results, "u"),
        (without_data_at_first, "u"),
        (slice_joined_to_a_shared_weight, "wu"),
        (turned_back, "w"),
        (checkpoints_all_over, "uv"),
        (slope, "w"),
    )
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_broken_record_in_a_loop_changes_nothing_for_others(name):
    fn, names = ATTACKS[name]
    params = {key: PARAMS[key] for key in names}
    loss_fn = lambda p, x: jnp.sum(jnp.sin(fn(p, x)))  # noqa: E731
    broken = BATCH.at[1, 0, 2].set(jnp.inf)
    ghost = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.3), "ghost")
    assert {row.engine for row in ghost.plan(params, broken)} == {"ghost"}
    found, info = opened(ghost)(params, broken)
    reference = opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.3), "vmap"))
    expected, plain = reference(params, BATCH, jnp.arange(len(BATCH)) != 1)
    others = np.arange(len(BATCH)) != 1
    np.testing.assert_allclose(info.norms[others], plain.norms[others], rtol=1e-5)
    for key, leaf in found.items():
        np.testing.assert_allclose(leaf, expected[key], rtol=2e-3, atol=2e-5, err_msg=key)


def over_layers_and_time(p, x):
    """Positions that cancel, of two loops in one another, both checkpointed."""

    def layer(total, w):
        step = lambda total, row: (total + jnp.sum(row[-1] * (row[:-1] @ w)), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(step), total, x)[0], None

    return jax.lax.scan(jax.checkpoint(layer), jnp.float32(0.0), p["w"])[0]


def in_and_after_a_loop(p, x):
    step = lambda total, row: (total + jnp.sum(row[-1] * (row[:-1] @ p["w"])), None)  # noqa: E731
    total = jax.lax.scan(step, jnp.float32(0.0), x[:5])[0]
    return total + jnp.sum(x[5:, -1:] * (x[5:, :-1] @ p["w"]))


def gates_in_bfloat16(p, x):
    both = jnp.concatenate([p["w"], p["v"], p["w"]], axis=1).astype(jnp.bfloat16)

    def step(total, row):
        gates = row[:-1].astype(jnp.bfloat16) @ both
        return total + jnp.sum(row[-1] * gates.astype(jnp.float32)), None

    return jax.lax.scan(step, jnp.float32(0.0), x, reverse=True)[0]


WEIGHTS = {"w": search._dense(20, 4)["w"], "v": search._dense(20, 3, 1)["w"]}
CANCELLING = {
    "layers and time": (over_layers_and_time, {"w": jnp.stack([WEIGHTS["w"]] * 2)}),
    "in and after": (in_and_after_a_loop, {"w": WEIGHTS["w"]}),
    "gates": (gates_in_bfloat16, WEIGHTS),
}


@pytest.mark.parametrize("rows_at_once", [True, False], ids=["blocks", "whole"])
@pytest.mark.parametrize("name", CANCELLING)
def test_no_record_whose_passes_cancel_adds_more_than_the_bound(name, rows_at_once, monkeypatch):
    if rows_at_once:  # a prime number of rows: one at a time
        monkeypatch.setattr("jaxdp.clipping.ghost.leaves._CHUNK_BYTES", 1)
    loss_fn, params = CANCELLING[name]
    batch = search.records(search._cancelling(9, 20), 13, seed=1)
    found = search.contributed(loss_fn, params, batch, jaxdp.normalize(1e-3), "ghost")
    assert 0.0 < np.max(found) <= 1e-3
