"""Every way to use a parameter: changed linearly, sliced, joined, looked up, in loops and branches.

The ghost engine against plain JAX. Many losses are one program, each a group of ``per_layer``.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdp
from jaxdp.clipping.ghost import factors, leaves
from tests.clipping.architectures import opened
from tests.clipping.references import Reference, agrees, far, gap, together

D, RANK, DEPTH, TIME, ROWS, WORDS = 4, 2, 3, 5, 6, 7
tanh, scan, stop = jnp.tanh, lax.scan, lax.stop_gradient


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) * 0.4


PARAMS = {
    "w": normal(0, D, D), "v": normal(12, D, D), "a": normal(1, D, RANK), "b": normal(2, RANK, D),
    "stack": normal(3, DEPTH, D, D), "other": normal(13, DEPTH, D, D),
    "downs": normal(4, DEPTH, D, RANK), "ups": normal(5, DEPTH, RANK, D),
    "s": jnp.float32(0.7), "g": normal(6, D), "qkv": normal(7, D, 3 * D), "three": normal(8, 3, D, D),
    "words": normal(9, WORDS, D), "down": normal(10, WORDS, RANK),
    "heads": normal(14, DEPTH, D, 2, D // 2), "kernels": normal(15, DEPTH, 1, 1, 3, 3),
}  # fmt: skip
BATCH = normal(11, ROWS, TIME, D)


def attention(x, q, k, v):
    return jax.nn.softmax((x @ q) @ (x @ k).T) @ (x @ v)


def layers(h, weights, weight=lambda w: w, **options):
    return scan(lambda h, w: (tanh(h @ weight(w)), None), h, weights, **options)[0]


def over_rows(step, rows, h=None, around=lambda step: step, **options):
    """Every state of a loop over rows."""
    h = jnp.zeros_like(rows[0]) if h is None else h
    return scan(around(lambda h, row: (step(h, row),) * 2), h, rows, **options)[1]


def cell(u, v):
    return lambda h, row: tanh(row @ u + h @ v)


def thin(p):
    return p["a"] @ p["b"]


def updated(p, by=1.0):
    return p["w"] + by * thin(p)


def table(p):
    return p["words"] + p["down"] @ p["b"]


def turn(w):
    return w.T


# Changed before they meet data. -----------------------------------------------------------------


def low_rank_layers(p, x):
    weights = (p["stack"], p["downs"], p["ups"])
    return layers(x, weights, lambda w: w[0] + 0.5 * (w[1] @ w[2]))


def over_time(p, x):
    w = updated(p)
    return over_rows(cell(w, w), x)


def stacked_before(p, x):
    return layers(x, p["stack"] - 0.5 * (p["downs"] @ p["ups"]), turn)


def half_stacked_before(p, x):
    return layers(x, p["stack"] + jnp.tensordot(p["downs"], p["b"], 1))


def scaled_stack(p, x):
    return layers(x, p["stack"] * jnp.exp(stop(p["downs"][:, :1, :1])))


# name -> (what is computed, the parameters, those that are differentiated whole)
UPDATES = {
    "low rank": (lambda p, x: x @ updated(p, 0.5), "w a b", ""),
    "scaled before": (lambda p, x: x @ (p["w"] + (0.5 * p["a"]) @ p["b"]), "w a b", ""),
    "turned": (lambda p, x: x @ (p["w"] - thin(p).T), "w a b", ""),
    "as heads": (lambda p, x: jnp.tensordot(x, updated(p).reshape(D, 2, 2), 1), "w a b", ""),
    "trained scale": (lambda p, x: x @ updated(p, p["s"]), "w a b s", "s"),
    "trained scales": (lambda p, x: x @ (p["w"] / jnp.exp(p["g"])[:, None]), "w g", "g"),
    "columns": (lambda p, x: x @ (p["g"][None] * p["w"]), "w g", "g"),
    "low-rank layers": (low_rank_layers, "stack downs ups", ""),
    "shared by layers": (
        lambda p, x: layers(x, p["stack"], lambda w: w + thin(p)),
        "stack a b",
        "",
    ),
    "stacked before": (stacked_before, "stack downs ups", ""),
    "half stacked before": (half_stacked_before, "stack downs b", "b"),
    "scaled stack": (scaled_stack, "stack downs", "downs"),
    "over time": (over_time, "w a b", ""),
    "gram": (lambda p, x: x @ (p["a"] @ p["a"].T), "a", ""),
    "squared": (lambda p, x: x @ (p["w"] @ p["w"]), "w", ""),
    "symmetric": (lambda p, x: x @ (p["w"] + p["w"].T - 0.3 * p["w"]), "w", ""),
    "both ways": (lambda p, x: tanh(x @ p["a"]) @ p["b"] + x @ thin(p), "a b", ""),
    "three": (lambda p, x: x @ (thin(p) @ p["w"]), "w a b", ""),
    "a vector": (lambda p, x: x @ (p["w"] @ p["b"][0])[:, None], "w b", ""),
}

# Sliced, joined, looked up. ---------------------------------------------------------------------


def overlapping(p, x):
    wide = jnp.tile(x @ p["qkv"][:, :6], 2)
    return wide + (x @ p["qkv"])[:, :12] + jnp.tile(x @ p["qkv"][:, 3:11:2], 3)


def at_a_place(p, x):
    at = jnp.int32(1)
    return attention(x, p["three"][at], p["three"][at + 1], p["three"][0])


def out_of_range(p, x):
    zero, sizes = jnp.int32(0), (1, D, D)
    low, high = (
        lax.dynamic_slice(p["three"], (at, zero, zero), sizes, allow_negative_indices=False)[0]
        for at in (jnp.int32(-2), jnp.int32(9))
    )
    return tanh(x @ low) @ high


def one_by_one(p, x):
    """A convolution in a loop with a kernel of the example: rows are run one after the other."""
    step = lambda h, _: (lax.conv(h, x[:3, :3][None, None], (1, 1), "SAME"), None)  # noqa: E731
    return scan(step, x[None, None], None, length=2)[0][0, 0] @ updated(p)


def joined(p, x):
    return x @ jnp.concatenate([thin(p), updated(p), 2.0 * p["a"]], axis=1)


def cells(p, x):
    """A table read in every pass of a loop, and once more outside of it."""
    read = lambda row: p["words"][jnp.argmax(row)] + p["words"][jnp.argmin(row)]  # noqa: E731
    first = p["words"][jnp.argmax(x[:, :2], axis=1)]
    return over_rows(lambda h, row: tanh(h + read(row)), x) + first


def branches(p, x):
    def step(h, row):
        first = lambda h, row: tanh(h @ p["w"] + row)  # noqa: E731
        second = lambda h, row: row @ p["a"] @ p["b"] + h  # noqa: E731
        third = lambda h, row: jnp.sin(h @ p["w"].T)  # noqa: E731
        return lax.switch(jnp.argmax(row), [first, second, third, first], h, row), None

    return scan(step, jnp.ones(D), x)[0]


def loop_in_a_branch(p, x):
    w = updated(p)
    looped = lambda x: over_rows(lambda h, row: tanh(h @ w + row), x)[-1]  # noqa: E731
    return lax.cond(x[0, 0] > 0, looped, lambda x: x[0] @ w.T, x)


def halved_in_a_loop(p, x):
    both = updated(p, -0.7)
    one = lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x @ both), lambda x: x @ p["w"], x)
    left, right = jnp.split(both, 2, axis=1)
    two = scan(lambda h, row: (h, jnp.concatenate([row @ left, row @ right])), 0.0, x)[1]
    return one + two + p["w"][jnp.asarray([0, 1, 1, 2, 0])]


def stacked_as_a_kernel(p, x):
    kernel, numbers = jnp.stack([p["w"], thin(p)]), ("NWC", "WIO", "NWC")
    y = lax.conv_general_dilated(x[None], kernel, (1,), "SAME", dimension_numbers=numbers)
    return y[0] + tanh(x @ p["w"]) @ p["w"].T


SLICES = {
    "fused": (lambda p, x: attention(x, *jnp.split(p["qkv"], 3, axis=1)), "qkv", ""),
    "stacked": (lambda p, x: attention(x, *p["three"]), "three", ""),
    "at a place": (at_a_place, "three", ""),
    "out of range": (out_of_range, "three", ""),
    "overlapping": (overlapping, "qkv", ""),
    "rows": (lambda p, x: x[:, 1:3] @ p["w"][1:3] + x @ p["w"], "w", ""),
    "joined": (joined, "w a b", ""),
    "table": (lambda p, x: table(p)[jnp.argmax(x, axis=1)], "words down b", "b"),
    "cells": (cells, "words", ""),
    "places": (lambda p, x: tanh(x + p["words"][jnp.arange(TIME)]) @ p["w"], "words w", ""),
    "branches": (branches, "w a b", ""),
    "loop in a branch": (loop_in_a_branch, "w a b", ""),
    "halved in a loop": (halved_in_a_loop, "w a b", ""),
    "stacked as a kernel": (stacked_as_a_kernel, "w a b", "w a b"),
}

# In loops. --------------------------------------------------------------------------------------


def layers_over_time(p, x):
    layer = lambda rows, w: (over_rows(cell(*w), rows, around=jax.checkpoint), None)  # noqa: E731
    return scan(layer, x, (p["stack"], p["other"]))[0]


def whole_stack_at_every_pass(p, x):
    """The inner scan slices what the outer one slices, too, all of it at every pass."""
    return scan(lambda h, w: (tanh(layers(h, p["stack"]) @ w), None), x, p["stack"])[0]


def outer_slices_unused(p, x):
    return scan(lambda h, _: (layers(h, p["stack"]), None), x, p["stack"])[0]


def shared_and_alone(p, x):
    """One weight at every pass, and once more outside of the loop."""
    return lax.fori_loop(0, 4, lambda _, h: tanh(h @ p["w"]), x) @ p["w"]


def convolved(p, x):
    layer = lambda h, kernel: (tanh(lax.conv(h, kernel, (1, 1), "SAME")), None)  # noqa: E731
    return scan(layer, x.reshape(1, 1, TIME, D), p["kernels"])[0]


def constant_results(p, x):
    """What a loop returns may be literals, which JAX does not hash."""
    (h, _), ones = scan(lambda c, r: ((tanh(r @ p["w"]), c[1]), 1.0), (x[0], 2.0), x)
    return h * ones[0]


def without_data_at_first(p, x):
    """What the weight meets is a constant in the first pass, and data from the second on."""
    step = lambda c, _: ((c[1], tanh(c[0] @ p["w"])), None)  # noqa: E731
    return scan(step, (jnp.ones(D), x[0]), None, length=4)[0][1]


def slice_joined_to_a_shared_weight(p, x):
    def layer(h, w):
        both = jnp.concatenate([w, p["w"], w.T], axis=0)
        return tanh(jnp.concatenate([h, h * h, 1.0 - h], axis=1) @ both), None

    return scan(layer, x, p["stack"])[0]


def turned_back(p, x):
    """One stack by two loops, the second of which runs backwards with slices turned."""
    return layers(layers(x, p["stack"]), p["stack"], turn, reverse=True)


def checkpoints_all_over(p, x):
    @jax.checkpoint
    def outer(h, row):
        inner = jax.checkpoint(lambda h, _: (tanh(h @ p["w"] + row @ p["v"]), h.sum()))
        return scan(inner, h, None, length=2, unroll=2)

    return scan(outer, jnp.zeros(D), x, reverse=True, unroll=3)[1]


def slope(p, x):
    """Every pass once forwards and once backwards, inside the loss."""
    return jax.grad(lambda h: jnp.sum(layers(h, p["stack"])))(x)


def as_a_stack(heads):
    """Reshaped before the scan; it is turned inside."""
    return heads.reshape(DEPTH, D, D)


LOOPS = {
    "over layers": (lambda p, x: layers(x, p["stack"]), "stack", ""),
    "over time": (lambda p, x: over_rows(cell(p["w"], p["v"]), x, reverse=True), "w v", ""),
    "layers over time": (layers_over_time, "stack other", ""),
    "whole stack at every pass": (whole_stack_at_every_pass, "stack", ""),
    "outer slices unused": (outer_slices_unused, "stack", ""),
    "shared and alone": (shared_and_alone, "w", ""),
    "arranged": (lambda p, x: layers(x, as_a_stack(p["heads"]), turn), "heads", ""),
    "convolved": (convolved, "kernels", ""),
    "constant results": (constant_results, "w", ""),
    "without data at first": (without_data_at_first, "w", ""),
    "joined to a shared weight": (slice_joined_to_a_shared_weight, "stack w", ""),
    "turned back": (turned_back, "stack", ""),
    "checkpoints all over": (checkpoints_all_over, "w v", ""),
    "slope": (slope, "stack", ""),
}


def joined_either_way(p, x):
    """Along an axis of the result, and along one that is summed over."""
    both = jnp.concatenate([p["w"], p["v"]], axis=1)
    tall = jnp.concatenate([p["v"], p["w"], p["v"]], axis=0)
    first = jnp.einsum("ab,tb->at", jnp.concatenate([p["w"], p["v"]], axis=0), x)
    return jnp.concatenate([x @ both, jnp.tile(x, 3) @ tall, first.T], axis=1)


# Positions of one product that cancel in part: the norm is enlarged for its rounding.
CANCELLING = {"joined either way": (joined_either_way, "w v", "")}

# Differentiated whole. --------------------------------------------------------------------------


def joined_batch(p, x):
    return jnp.einsum("tij,tj->ti", jnp.concatenate([p["stack"], p["other"]])[:TIME], x)


def product_in_a_branch(p, x):
    return lax.cond(x[0, 0] > 0, lambda x: x @ (p["w"] @ p["w"]), lambda x: x, x)


def branch_by_parameters(p, x):
    return lax.cond(jnp.sum(PARAMS["w"]) > 0, lambda x: x @ p["w"], lambda x: x, x)


def added_in_a_loop(p, x):
    return scan(lambda h, row: (h @ p["v"] + p["w"], None), x[:4], x)[0]


def looked_up_in_a_loop(p, x):
    return lax.map(lambda w: w[jnp.argmax(x, axis=1)], p["stack"])


WHOLE = {
    "entry by entry": (lambda p, x: x @ (p["w"] * p["w"]), "w", "w"),
    "normed": (lambda p, x: x @ (p["w"] / jnp.sqrt(jnp.sum(jnp.square(p["w"])))), "w", "w"),
    "divides": (lambda p, x: x @ (1.0 / p["w"]), "w", "w"),
    "by data": (lambda p, x: x @ (x[:D] * p["w"]), "w", "w"),
    "masked by entry": (lambda p, x: x @ (p["w"] * jnp.eye(D)), "w", "w"),
    "added to data": (lambda p, x: tanh(x[:D] + p["w"]), "w", "w"),
    "stopped": (lambda p, x: x @ (stop(p["w"]) @ p["w"]), "w", "w"),
    "product in a branch": (product_in_a_branch, "w", "w"),
    "branch by parameters": (branch_by_parameters, "w", "w"),
    "too many terms": (lambda p, x: x @ jnp.linalg.matrix_power(p["w"], 9), "w", "w"),
    "carried": (lambda p, x: scan(lambda h, r: (h @ p["v"], None), p["w"], x)[0], "w v", "w v"),
    "returned": (lambda p, x: x @ scan(lambda c, _: (c, p["w"]), 0.0, x)[1][0], "w", "w"),
    "added in a loop": (added_in_a_loop, "w v", "w"),
    "joined batch": (joined_batch, "stack other", "stack other"),
    "looked up in a loop": (looked_up_in_a_loop, "stack", "stack"),
}

# name -> (the programs, how far sums may be off, and norms)
TABLES = {
    "updates": (UPDATES, 1e-5, 1e-5),
    "slices": (SLICES, 1e-5, 1e-5),
    "loops": (LOOPS, 2e-3, 1e-5),
    "cancelling": (CANCELLING, 2e-3, 2e-3),
    "one by one": ({"one by one": (one_by_one, "w a b", "")}, 1e-5, 1e-5),
    "whole": (WHOLE, 1e-5, 1e-5),
}


def of(table, names=None, cast=None):
    """The parameters and the loss of a table's programs together."""

    def one(fn, keys):
        params = {k: PARAMS[k].astype(cast or jnp.float32) for k in keys.split()}
        return params, lambda p, x: jnp.sum(jnp.sin(fn(p, x)), dtype=jnp.float32)

    return together({n: one(*row[:2]) for n, row in table.items() if names is None or n in names})


@pytest.mark.parametrize("table", TABLES)
def test_what_is_done_to_parameters_is_clipped_as_by_plain_jax(table):
    """Beside a record that is not finite, too."""
    programs, within, norms = TABLES[table]
    params, loss_fn = of(programs)
    reference = Reference(params, loss_fn, BATCH)
    rule = reference.half()
    grad_fn = jaxdp.clipped_grad(loss_fn, rule, "ghost")
    wanted = {f"['{n}']['{key}']" for n, (_, _, keys) in programs.items() for key in keys.split()}
    plan = grad_fn.plan(params, BATCH)
    assert {row.path for row in plan if row.engine == "vmap"} == wanted
    run = opened(grad_fn)
    everyone = jnp.ones(ROWS, bool)
    info = agrees(run, reference, rule, params, BATCH, everyone, within=within, norms=norms)
    others = np.arange(ROWS) != 2
    for value in (jnp.inf, jnp.nan):
        found, again = run(params, BATCH.at[2, 1, 1].set(value), everyone)
        assert not np.isfinite(again.norms[2])
        np.testing.assert_allclose(again.norms[others], info.norms[others], rtol=1e-6)
        assert not far(found, reference.clipped(rule, others), within)


EVERY = {**UPDATES, **SLICES, **LOOPS}
MIXED = [
    *("low rank", "stacked before", "gram", "fused", "cells", "over layers", "over time"),
    *("layers over time", "whole stack at every pass", "outer slices unused"),
    *("shared and alone", "arranged", "convolved"),
]


@functools.cache
def mixed(names):
    params, loss_fn = of(EVERY, names)
    return params, loss_fn, Reference(params, loss_fn, BATCH)


@pytest.mark.parametrize(("names", "within"), [(MIXED[:5], 1e-5), (LOOPS, 2e-3)])
def test_the_engine_that_chooses_agrees(names, within):
    params, loss_fn, reference = mixed(tuple(names))
    run = opened(jaxdp.clipped_grad(loss_fn, reference.half(), "auto"))
    agrees(run, reference, reference.half(), params, BATCH, within=within)


# Boxes multiply all out, whatever the engine.
@pytest.mark.parametrize(("box", "scaled"), [(False, True), (True, False), (True, True)])
def test_scales_and_boxes_of_all_of_them(box, scaled):
    params, loss_fn, reference = mixed(tuple(MIXED))
    keys = iter(range(20, 99))
    scale = jax.tree.map(lambda p: jnp.exp(normal(next(keys), *p.shape)), params)
    scale = scale if scaled else None
    rule = jaxdp.coordinate_box(0.02) if box else reference.half(scale)
    run = opened(jaxdp.clipped_grad(loss_fn, rule, "ghost" if scaled else "auto"))
    agrees(run, reference, rule, params, BATCH, scale=scale)


STACKED = ("over layers", "layers over time", "shared and alone")
FEW = {  # one row, or two where that is what fits; and all that is large is added row by row
    1: (*STACKED, "low rank", "fused", "cells"),
    2 * DEPTH * TIME * D * 4 * 2: STACKED,
    64: ("halved in a loop", "stacked as a kernel", "fused"),
}


@pytest.mark.parametrize("size", FEW)
def test_a_few_rows_at_a_time(size, monkeypatch):
    params, loss_fn, reference = mixed(FEW[size])
    monkeypatch.setattr(leaves, "_CHUNK_BYTES", size)
    if size == 64:
        monkeypatch.setattr(leaves, "_LARGE", 1)
        monkeypatch.setattr(factors, "_PATCH_BYTES", 16)
    rule = reference.half()
    broken = BATCH.at[2, 1, 1].set(jnp.inf).at[4, 0, 2].set(jnp.nan)
    kept = np.asarray([True, True, True, False, True, True])
    for engine in ("ghost", "auto") if size == 64 else ("ghost",):
        run = opened(jaxdp.clipped_grad(loss_fn, rule, engine))
        agrees(run, reference, rule, params, BATCH, np.ones(ROWS, bool), within=1e-3)
        found = run(params, broken, kept)[0]
        finite = ~np.isin(np.arange(ROWS), (2, 4))
        assert not far(found, reference.clipped(rule, kept & finite), 1e-3)


def test_bfloat16_a_few_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(leaves, "_CHUNK_BYTES", 1)
    batch = BATCH.astype(jnp.bfloat16)
    params, loss_fn = of(EVERY, ["low rank", "low-rank layers", "fused", "cells"], jnp.bfloat16)
    reference = Reference(params, loss_fn, batch)
    run = opened(jaxdp.clipped_grad(loss_fn, reference.half(), "ghost"))
    agrees(run, reference, reference.half(), params, batch, within=3e-2, norms=3e-2)


def test_frozen_and_grouped_parts_of_a_sum():
    params, loss_fn = of(EVERY, ["low rank"])
    params, one = params["low rank"], lambda p, x: loss_fn({"low rank": p}, x)
    rule = jaxdp.per_layer({"w": None, "a": 0.1, "b": 0.2})
    grad_fn = jaxdp.clipped_grad(one, rule, "ghost", trainable=lambda path: "w" not in path)
    plan = {row.path[2:-2]: row.engine for row in grad_fn.plan(params, BATCH)}
    assert plan == {"w": "frozen", "a": "ghost", "b": "ghost"}
    found, _ = opened(grad_fn)(params, BATCH)
    assert found.pop("w") is None
    reference = Reference(params, one, BATCH)
    reference.grads.pop("w")
    assert gap(found, reference.clipped(jaxdp.per_layer({"a": 0.1, "b": 0.2}))) < 1e-5


OTHERS = {
    "infinite slope": lambda x, w: jnp.sqrt((x - x) @ w),
    "infinite input": lambda x, w: (x / (x - x)) @ w,
    "not a number": lambda x, w: jnp.sqrt(jnp.abs(x @ w) - 1e9),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_branch_that_does_not_count_is_as_in_jax(other):
    def loss_fn(p, x):
        return jnp.sum(lax.cond(x[0, 0] > 0, OTHERS[other], lambda x, w: x @ w, x, p["w"]))

    params = {"w": PARAMS["w"]}
    per_example = Reference(params, loss_fn, BATCH).grads["w"]
    finite = np.isfinite(per_example).all((1, 2))
    assert 0 < finite.sum() < ROWS
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1e3), "ghost")
    assert grad_fn.plan(params, BATCH)[0].engine == "ghost"
    found, info = opened(grad_fn)(params, BATCH)
    np.testing.assert_array_equal(np.isfinite(info.norms), finite)
    np.testing.assert_allclose(found["w"], per_example[finite].sum(0), rtol=1e-5)


def test_slices_that_meet_the_same_data_have_its_positions_once():
    def whole(p, x):
        q, k, v = jnp.split(x @ p["qkv"], 3, axis=1)
        return jax.nn.softmax(q @ k.T) @ v

    reasons = []
    for fn in (whole, SLICES["fused"][0]):
        grad_fn = jaxdp.clipped_grad(lambda p, x, fn=fn: jnp.sum(fn(p, x)), jaxdp.clip(1.0))
        reasons.append(grad_fn.plan({"qkv": PARAMS["qkv"]}, BATCH)[0].reason)
    assert "operations" in reasons[0]
    assert reasons[0] == reasons[1]
