"""Parameters changed linearly before they meet data, by the ghost engine against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from tests.clipping.architectures import opened
from tests.clipping.test_ghost import gap

D, RANK, DEPTH, TIME, ROWS, WORDS = 4, 2, 3, 5, 6, 7


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) * 0.4


PARAMS = {
    "w": normal(0, D, D),
    "a": normal(1, D, RANK),
    "b": normal(2, RANK, D),
    "stack": normal(3, DEPTH, D, D),
    "downs": normal(4, DEPTH, D, RANK),
    "ups": normal(5, DEPTH, RANK, D),
    "s": jnp.float32(0.7),
    "g": normal(6, D),
    "qkv": normal(7, D, 3 * D),
    "three": normal(8, 3, D, D),
    "words": normal(9, WORDS, D),
    "down": normal(10, WORDS, RANK),
}
BATCH = normal(11, ROWS, TIME, D)


def attention(x, q, k, v):
    return jax.nn.softmax((x @ q) @ (x @ k).T) @ (x @ v)


def through_layers(h, weights, weight):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ weight(w)), None), h, weights)[0]


def as_heads(p, x):
    return jnp.einsum("td,dhe->the", x, (p["w"] + p["a"] @ p["b"]).reshape(D, 2, D // 2))


def low_rank_layers(p, x):
    weights = (p["stack"], p["downs"], p["ups"])
    return through_layers(x, weights, lambda w: w[0] + 0.5 * (w[1] @ w[2]))


def rematerialised_layers(p, x):
    step = jax.checkpoint(lambda h, w: (jnp.tanh(h @ (w[0] + 0.5 * (w[1] @ w[2]))), None))
    return jax.lax.scan(step, x, (p["stack"], p["downs"], p["ups"]))[0]


def shared_by_layers(p, x):
    return through_layers(x, p["stack"], lambda w: w + p["a"] @ p["b"])


def stacked_before(p, x):
    return through_layers(x, p["stack"] - 0.5 * (p["downs"] @ p["ups"]), lambda w: w.T)


def half_stacked_before(p, x):
    update = jnp.einsum("ldr,rn->ldn", p["downs"], p["b"])
    return through_layers(x, p["stack"] + update, lambda w: w)


def scaled_stack(p, x):
    scales = jnp.exp(jax.lax.stop_gradient(p["downs"][:, :1, :1]))
    return through_layers(x, p["stack"] * scales, lambda w: w)


def over_time(p, x):
    w = p["w"] + p["a"] @ p["b"]
    return jax.lax.scan(lambda h, row: (jnp.tanh(row @ w + h @ w), h), jnp.zeros(D), x)[1]


def overlapping(p, x):
    wide = jnp.tile(x @ p["qkv"][:, :6], 2)
    return wide + (x @ p["qkv"])[:, :12] + jnp.tile(x @ p["qkv"][:, 3:11:2], 3)


def at_a_place(p, x):
    at = jnp.int32(1)
    return attention(x, p["three"][at], p["three"][at + 1], p["three"][0])


def out_of_range(p, x):
    zero, sizes = jnp.int32(0), (1, D, D)
    low, high = (
        jax.lax.dynamic_slice(p["three"], (at, zero, zero), sizes, allow_negative_indices=False)[0]
        for at in (jnp.int32(-2), jnp.int32(9))
    )
    return jnp.tanh(x @ low) @ high


def one_by_one(p, x):
    """A convolution in a loop with a kernel of the example: rows are run one after the other."""
    step = lambda h, _: (jax.lax.conv(h, x[:3, :3][None, None], (1, 1), "SAME"), None)  # noqa: E731
    h = jax.lax.scan(step, x[None, None], None, length=2)[0]
    return h[0, 0] @ (p["w"] + p["a"] @ p["b"])


def joined(p, x):
    update = p["a"] @ p["b"]
    return x @ jnp.concatenate([update, p["w"] + update, 2.0 * p["a"]], axis=1)


def cells(p, x):
    """A table read in every pass of a loop, and once more outside of it."""

    def step(h, row):
        h = jnp.tanh(h + p["words"][jnp.argmax(row)] + p["words"][jnp.argmin(row)])
        return h, h

    first = p["words"][jnp.argmax(x[:, :2], axis=1)]
    return jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1] + first


def branches(p, x):
    def step(h, row):
        first = lambda h, row: jnp.tanh(h @ p["w"] + row)  # noqa: E731
        second = lambda h, row: row @ p["a"] @ p["b"] + h  # noqa: E731
        third = lambda h, row: jnp.sin(h @ p["w"].T)  # noqa: E731
        return jax.lax.switch(jnp.argmax(row), [first, second, third, first], h, row), None

    return jax.lax.scan(step, jnp.ones(D), x)[0]


def loop_in_a_branch(p, x):
    w = p["w"] + p["a"] @ p["b"]
    step = lambda h, row: (jnp.tanh(h @ w + row), None)  # noqa: E731
    looped = lambda x: jax.lax.scan(step, jnp.ones(D), x)[0]  # noqa: E731
    return jax.lax.cond(x[0, 0] > 0, looped, lambda x: x[0] @ w.T, x)


# name -> (what is computed, the parameters, those that are differentiated whole)
PROGRAMS = {
    "low rank": (lambda p, x: x @ (p["w"] + 0.5 * (p["a"] @ p["b"])), "wab", ""),
    "scaled before": (lambda p, x: x @ (p["w"] + (0.5 * p["a"]) @ p["b"]), "wab", ""),
    "turned": (lambda p, x: x @ (p["w"] - (p["a"] @ p["b"]).T), "wab", ""),
    "as_heads": (as_heads, "wab", ""),
    "trained scale": (lambda p, x: x @ (p["w"] + p["s"] * (p["a"] @ p["b"])), "wabs", "s"),
    "trained scales": (lambda p, x: x @ (p["w"] / jnp.exp(p["g"])[:, None]), "wg", "g"),
    "columns": (lambda p, x: x @ (p["g"][None] * p["w"]), "wg", "g"),
    "low_rank_layers": (low_rank_layers, ["stack", "downs", "ups"], ""),
    "rematerialised_layers": (rematerialised_layers, ["stack", "downs", "ups"], ""),
    "shared_by_layers": (shared_by_layers, ["stack", "a", "b"], ""),
    "stacked_before": (stacked_before, ["stack", "downs", "ups"], ""),
    "half_stacked_before": (half_stacked_before, ["stack", "downs", "b"], "b"),
    "scaled_stack": (scaled_stack, ["stack", "downs"], ["downs"]),
    "over_time": (over_time, "wab", ""),
    "gram": (lambda p, x: x @ (p["a"] @ p["a"].T), "a", ""),
    "squared": (lambda p, x: x @ (p["w"] @ p["w"]), "w", ""),
    "symmetric": (lambda p, x: x @ (p["w"] + p["w"].T - 0.3 * p["w"]), "w", ""),
    "both ways": (lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"] + x @ (p["a"] @ p["b"]), "ab", ""),
    "three": (lambda p, x: x @ (p["a"] @ p["b"] @ p["w"]), "wab", ""),
    "a vector": (lambda p, x: x @ (p["w"] @ p["b"][0])[:, None], "wb", ""),
    "fused": (lambda p, x: attention(x, *jnp.split(p["qkv"], 3, axis=1)), ["qkv"], ""),
    "stacked": (lambda p, x: attention(x, *p["three"]), ["three"], ""),
    "at_a_place": (at_a_place, ["three"], ""),
    "out_of_range": (out_of_range, ["three"], ""),
    "overlapping": (overlapping, ["qkv"], ""),
    "rows": (lambda p, x: x[:, 1:3] @ p["w"][1:3] + x @ p["w"], "w", ""),
    "joined": (joined, "wab", ""),
    "one_by_one": (one_by_one, "wab", ""),
    "table": (
        lambda p, x: (p["words"] + p["down"] @ p["b"])[jnp.argmax(x, axis=1)],
        ["words", "down", "b"],
        "b",
    ),
    "cells": (cells, ["words"], ""),
    "places": (lambda p, x: jnp.tanh(x + p["words"][jnp.arange(TIME)]) @ p["w"], "w", ""),
    "branches": (branches, "wab", ""),
    "loop_in_a_branch": (loop_in_a_branch, "wab", ""),
}
PROGRAMS["places"] = (PROGRAMS["places"][0], ["words", "w"], "")


def run(name, engine, rule=None, cast=None, batch=BATCH, **options):
    fn, names, _ = PROGRAMS[name]
    params = {key: PARAMS[key] if cast is None else PARAMS[key].astype(cast) for key in names}
    batch = batch if cast is None else batch.astype(cast)
    loss_fn = lambda p, x: jnp.sum(jnp.sin(fn(p, x)), dtype=jnp.float32)  # noqa: E731
    grad_fn = jaxdp.clipped_grad(loss_fn, rule or jaxdp.clip(0.3), engine, **options)
    scale = {key: jnp.exp(normal(20, *params[key].shape)) for key in names}
    plan = {row.path[2:-2]: row.engine for row in grad_fn.plan(params, batch)}
    return lambda scaled: opened(grad_fn)(params, batch, scale=scale if scaled else None), plan


MANY = ["low rank", "stacked_before", "gram", "fused", "cells"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_linear_in_a_parameter_is_clipped_as_by_the_reference(name):
    expected, reference = run(name, "vmap")[0](False)
    assert np.max(reference.norms) > 0.3
    for engine in ("ghost", "auto") if name in MANY else ("ghost",):
        sums, plan = run(name, engine)
        found, info = sums(False)
        whole = {leaf for leaf, engine in plan.items() if engine == "vmap"}
        assert whole == set(PROGRAMS[name][2])
        np.testing.assert_allclose(info.norms, reference.norms, rtol=1e-5, atol=1e-7)
        assert gap(found, expected) < 1e-5


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize(
    ("rule", "scaled"),
    [(jaxdp.clip(0.3), True), (jaxdp.coordinate_box(0.02), False)],
    ids=["scaled", "box"],
)
def test_scales_and_boxes_of_derived_factors(name, rule, scaled):
    expected, reference = run(name, "vmap", rule)[0](scaled)
    found, info = run(name, "ghost", rule)[0](scaled)
    np.testing.assert_allclose(info.norms, reference.norms, rtol=1e-5, atol=1e-7)
    assert gap(found, expected) < 1e-5


@pytest.mark.parametrize("name", ["low rank", "low_rank_layers", "fused", "cells"])
def test_bfloat16_and_a_few_rows_at_a_time(name, monkeypatch):
    monkeypatch.setattr("jaxdp.clipping.ghost.leaves._CHUNK_BYTES", 1)
    expected, reference = run(name, "vmap", cast=jnp.bfloat16)[0](False)
    found, info = run(name, "ghost", cast=jnp.bfloat16)[0](False)
    np.testing.assert_allclose(info.norms, reference.norms, rtol=3e-2)
    assert gap(found, expected) < 3e-2


def test_frozen_and_grouped_parts_of_a_sum():
    options = {"trainable": lambda path: "w" not in path}
    rule = jaxdp.per_layer({"w": None, "a": 0.1, "b": 0.2})
    expected, reference = run("low rank", "vmap", rule, **options)[0](False)
    sums, plan = run("low rank", "ghost", rule, **options)
    found, info = sums(False)
    assert plan == {"w": "frozen", "a": "ghost", "b": "ghost"}
    assert found["w"] is None
    np.testing.assert_allclose(info.norms, reference.norms, rtol=1e-5)
    assert gap(found, expected) < 1e-5


@pytest.mark.parametrize("name", ["stacked_before", "fused", "branches", "cells"])
def test_a_broken_row_changes_no_other(name):
    broken = BATCH.at[2, 1, 1].set(jnp.nan).at[4, 0, 0].set(jnp.inf)
    found, info = run(name, "ghost", batch=broken)[0](False)
    expected, reference = run(name, "vmap", batch=broken)[0](False)
    np.testing.assert_array_equal(np.isfinite(info.norms), np.isfinite(reference.norms))
    assert gap(found, expected) < 1e-5


@pytest.mark.parametrize(
    "other",
    [
        lambda x, w: jnp.sqrt((x - x) @ w),
        lambda x, w: (x / (x - x)) @ w,
        lambda x, w: jnp.sqrt(jnp.abs(x @ w) - 1e9),
    ],
    ids=["infinite slope", "infinite input", "not a number"],
)
def test_a_branch_that_does_not_count_is_as_in_jax(other):
    def loss_fn(p, x):
        return jnp.sum(jax.lax.cond(x[0, 0] > 0, other, lambda x, w: x @ w, x, p["w"]))

    params = {"w": PARAMS["w"]}
    per_example = jax.vmap(jax.grad(loss_fn), (None, 0))(params, BATCH)["w"]
    finite = np.isfinite(per_example).all((1, 2))
    assert 0 < finite.sum() < ROWS
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1e3), "ghost")
    assert grad_fn.plan(params, BATCH)[0].engine == "ghost"
    found, info = opened(grad_fn)(params, BATCH)
    np.testing.assert_array_equal(np.isfinite(info.norms), finite)
    np.testing.assert_allclose(found["w"], per_example[finite].sum(0), rtol=1e-5)


REFUSED = {
    "squared": lambda p, x: x @ (p["w"] * p["w"]),
    "normed": lambda p, x: x @ (p["w"] / jnp.sqrt(jnp.sum(jnp.square(p["w"])))),
    "divides": lambda p, x: x @ (1.0 / p["w"]),
    "by data": lambda p, x: x @ (x[:D] * p["w"]),
    "masked by entry": lambda p, x: x @ (p["w"] * jnp.eye(D)),
    "added to data": lambda p, x: jnp.tanh(x[:D] + p["w"]),
    "stopped": lambda p, x: x @ (jax.lax.stop_gradient(p["w"]) @ p["w"]),
    "product in a branch": lambda p, x: jax.lax.cond(
        x[0, 0] > 0, lambda x: x @ (p["w"] @ p["w"]), lambda x: x, x
    ),
    "branch by parameters": lambda p, x: jax.lax.cond(
        jnp.sum(PARAMS["w"]) > 0, lambda x: x @ p["w"], lambda x: x, x
    ),
    "too many terms": lambda p, x: x @ jnp.linalg.matrix_power(p["w"], 9),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_linear_is_differentiated_whole(name):
    loss_fn = lambda p, x: jnp.sum(jnp.sin(REFUSED[name](p, x)))  # noqa: E731
    params = {"w": PARAMS["w"]}
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.3), "ghost")
    assert grad_fn.plan(params, BATCH)[0].engine == "vmap"
    found = opened(grad_fn)(params, BATCH)[0]
    expected = opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.3), "vmap"))(params, BATCH)[0]
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-5, atol=1e-7)


def test_factors_of_a_low_rank_update_are_those_in_float64():
    params = {key: PARAMS[key] for key in "wab"}
    loss_fn = lambda p, x: jnp.sum(jnp.square(x @ (p["w"] + p["a"] @ p["b"])))  # noqa: E731
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1e6), "ghost")
    found = opened(grad_fn)(params, BATCH)[0]
    w, a, b, x = (np.asarray(v, np.float64) for v in (*params.values(), BATCH))
    whole = np.einsum("mtp,mtq->pq", x, 2.0 * (x @ (w + a @ b)))
    expected = {"w": whole, "a": whole @ b.T, "b": a.T @ whole}
    assert gap(found, expected) < 1e-6


def test_slices_that_meet_the_same_data_have_its_positions_once():
    def whole(p, x):
        q, k, v = jnp.split(x @ p["qkv"], 3, axis=1)
        return jax.nn.softmax(q @ k.T) @ v

    reasons = []
    for fn in (whole, PROGRAMS["fused"][0]):
        grad_fn = jaxdp.clipped_grad(lambda p, x, fn=fn: jnp.sum(fn(p, x)), jaxdp.clip(1.0))
        reasons.append(grad_fn.plan({"qkv": PARAMS["qkv"]}, BATCH)[0].reason)
    assert "operations" in reasons[0]
    assert reasons[0] == reasons[1]
