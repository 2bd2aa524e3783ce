"""Every way to use a parameter: sliced, multiplied, joined, looked up, in loops and branches.

The ghost engine against plain JAX. Many losses are one program, each a group of ``per_layer``.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdp
from jaxdp.clipping.ghost import leaves
from tests.clipping.architectures import opened
from tests.clipping.references import Reference, agrees, far, gap, together

D, RANK, DEPTH, TIME, ROWS, WORDS = 4, 2, 3, 5, 6, 7
tanh, scan, stop = jnp.tanh, lax.scan, lax.stop_gradient


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) * 0.4


PARAMS = {
    "w": normal(0, D, D), "v": normal(12, D, D), "a": normal(1, D, RANK), "b": normal(2, RANK, D),
    "stack": normal(3, DEPTH, D, D), "other": normal(13, DEPTH, D, D), "s": jnp.float32(0.7),
    "g": normal(6, D), "qkv": normal(7, D, 3 * D), "three": normal(8, 3, D, D),
    "qkvs": normal(4, DEPTH, D, 3 * D), "words": normal(9, WORDS, D),
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


def turn(w):
    return w.T


# Sliced, multiplied, joined, looked up. ---------------------------------------------------------


def fused_heads(p, x):
    """A slice of a slice, arranged otherwise in between."""
    q, k, v = (part[:, 0] for part in jnp.split(p["qkv"].reshape(D, 3, 1, D), 3, axis=1))
    return attention(x, *(part.reshape(D, D) for part in (q, k, v)))


def fused_layers(p, x):
    layer = lambda h, w: (tanh(attention(h, *jnp.split(0.5 * w, 3, axis=1))), None)  # noqa: E731
    return scan(layer, x, p["qkvs"])[0]


def scaled_in_a_loop(p, x):
    """The number is known outside, where it is negated, and met in a branch of a checkpoint."""
    w = -(p["w"] / jnp.sqrt(jnp.float32(D))).astype(jnp.float32)
    one, other = (lambda row: row @ w), (lambda row: (row * row) @ (3.0 * w.T))
    step = jax.checkpoint(lambda h, row: tanh(h + lax.cond(row[0] > 0, one, other, row)))
    return over_rows(step, x)


def one_by_one(p, x):
    """A convolution in a loop with a kernel of the example: rows are run one after the other."""
    step = lambda h, _: (lax.conv(h, x[:3, :3][None, None], (1, 1), "SAME"), None)  # noqa: E731
    return scan(step, x[None, None], None, length=2)[0][0, 0] @ (0.5 * p["w"])


def cells(p, x):
    """A table read in every pass of a loop, and once more outside of it."""
    read = lambda row: (2.0 * p["words"])[jnp.argmax(row)] + p["words"][jnp.argmin(row)]  # noqa: E731
    first = p["words"][jnp.argmax(x[:, :2], axis=1)]
    return over_rows(lambda h, row: tanh(h + read(row)), x) + first


def branches(p, x):
    def step(h, row):
        first = lambda h, row: tanh(h @ p["w"] + row)  # noqa: E731
        second = lambda h, row: row @ p["a"] @ p["b"] + h  # noqa: E731
        third = lambda h, row: jnp.sin(h @ p["w"].T)  # noqa: E731
        return lax.switch(jnp.argmax(row), [first, second, third, first], h, row), None

    return scan(step, jnp.ones(D), x)[0]


def biases(p, x):
    """Added as they are, a slice, turned and times a number, and one in each pass of a loop."""
    h = tanh(x[:D] @ p["w"] + p["qkv"][:, :D]) + p["qkv"][:, D : 2 * D].T * -0.5
    return scan(lambda h, bias: (tanh(bias + h), None), h, p["three"])[0]


def convolved_in_any_order(p, x):
    """Groups, holes, strides, axes in orders of their own, and a batch inside of the example."""
    picture = jnp.stack([x, 2.0 * x, x * x], axis=1)
    batch, numbers = jnp.stack([picture, jnp.cos(picture)]), ("NHWC", "HOIW", "CNHW")
    holes = {"lhs_dilation": (2, 1), "rhs_dilation": (1, 2), "feature_group_count": 2}
    edges = [(1, 0), (0, 1)]
    return lax.conv_general_dilated(
        batch, p["heads"], (2, 1), edges, dimension_numbers=numbers, **holes
    )


def halves_in_a_loop(p, x):
    """Two slices that share no entry, one of them looked up as well, at constant places."""
    left, right = jnp.split(p["w"], 2, axis=1)
    step = lambda h, row: (h, jnp.concatenate([row @ left, row @ right]))  # noqa: E731
    return scan(step, 0.0, x)[1] + jnp.tile(right[jnp.asarray([0, 1, 1, 2, 0])], 2)


def at_a_fixed_place(p, x):
    """A row whose place is written into the operation, read in a loop and outside of it."""
    first = lambda w, row: lax.dynamic_slice(w, (0, jnp.argmax(row)), (1, D))  # noqa: E731
    return over_rows(lambda h, row: tanh(h + first(p["w"], row)[0]), x) * first(p["v"], x[0])


# name -> (what is computed, the parameters, those that are differentiated whole)
SLICES = {
    "fused": (lambda p, x: attention(x, *jnp.split(p["qkv"], 3, axis=1)), "qkv", ""),
    "fused heads": (fused_heads, "qkv", ""),
    "fused layers": (fused_layers, "qkvs", ""),
    "stacked": (lambda p, x: attention(x, *p["three"]), "three", ""),
    "strided": (lambda p, x: x @ p["w"][:, ::2] + tanh(x) @ p["w"][:, 1::2], "w", ""),
    "a part": (lambda p, x: x[:, 1:3] @ p["w"][1:3], "w", ""),
    "joined": (
        lambda p, x: x @ jnp.concatenate([p["w"][:, :3], p["v"], p["w"][:, 3:], p["a"]], axis=1),
        "w v a",
        "",
    ),
    "cells": (cells, "words", ""),
    "convolved in any order": (convolved_in_any_order, "heads", ""),
    "places": (lambda p, x: tanh(x + p["words"][jnp.arange(TIME)]) @ p["w"], "words w", ""),
    "biases": (biases, "three qkv w", ""),
    "branches": (branches, "w a b", ""),
    "halves in a loop": (halves_in_a_loop, "w", ""),
    "at a fixed place": (at_a_fixed_place, "w v", ""),
    "trained number": (lambda p, x: x @ (p["s"] * p["w"]) + x @ p["w"].T, "w s", "s"),
    "scaled in a loop": (scaled_in_a_loop, "w", ""),
    "scaled stack": (lambda p, x: layers(x, p["stack"] * stop(p["s"])), "stack s", "s"),
}

# In loops. --------------------------------------------------------------------------------------


def layers_over_time(p, x):
    layer = lambda rows, w: (over_rows(cell(*w), rows, around=jax.checkpoint), None)  # noqa: E731
    return scan(layer, x, (p["stack"], p["other"]))[0]


def convolved(p, x):
    layer = lambda h, kernel: (tanh(lax.conv(h, -kernel, (1, 1), "SAME")), None)  # noqa: E731
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


def checkpoints_all_over(p, x):
    @jax.checkpoint
    def outer(h, row):
        inner = jax.checkpoint(lambda h, _: (tanh(h @ p["w"] + row @ p["v"]), h.sum()))
        return scan(inner, h, None, length=2, unroll=2)

    return scan(outer, jnp.zeros(D), x, reverse=True, unroll=3)[1]


LOOPS = {
    "over time": (lambda p, x: over_rows(cell(p["w"], p["v"]), x, reverse=True), "w v", ""),
    "layers over time": (layers_over_time, "stack other", ""),
    # The inner scan slices what the outer one slices, too, all of it at every pass.
    "whole stack at every pass": (
        lambda p, x: scan(lambda h, w: (tanh(layers(h, p["stack"]) @ w), None), x, p["stack"])[0],
        *("stack", ""),
    ),
    "slices unused": (lambda p, x: scan(lambda h, _: (h @ p["w"], 0), x, p["w"])[0], "w", ""),
    # One weight at every pass, and once more outside of the loop.
    "shared and alone": (
        lambda p, x: lax.fori_loop(0, 4, lambda _, h: tanh(h @ p["w"]), x) @ p["w"],
        *("w", ""),
    ),
    # Reshaped before the scan; it is turned inside.
    "arranged": (lambda p, x: layers(x, p["heads"].reshape(DEPTH, D, D), turn), "heads", ""),
    "convolved": (convolved, "kernels", ""),
    "constant results": (constant_results, "w", ""),
    "without data at first": (without_data_at_first, "w", ""),
    "joined to a shared weight": (slice_joined_to_a_shared_weight, "stack w", ""),
    # One stack by two loops, the second of which runs backwards with slices turned.
    "turned back": (
        lambda p, x: layers(layers(x, p["stack"]), p["stack"], turn, reverse=True),
        *("stack", ""),
    ),
    # The first layers by one loop, the last one by another.
    "stacks apart": (
        lambda p, x: layers(layers(x, p["stack"][:2]), p["stack"][2:], turn),
        *("stack", ""),
    ),
    "checkpoints all over": (checkpoints_all_over, "w v", ""),
    # Every pass once forwards and once backwards, inside the loss.
    "slope": (lambda p, x: jax.grad(lambda h: jnp.sum(layers(h, p["stack"])))(x), "stack", ""),
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


ADDED = "used by {}; write x @ (W + V) as x @ W + x @ V"
PRODUCT = "used by {}; write x @ (a @ b) as (x @ a) @ b"
GAIN = "used by {}; write x @ (W * g) as (x @ W) * g"
PLACE = "used by dynamic_slice in a scan; write W[i] at a computed place as a scan over W"
PASS = "used by gather of a slice in a scan, or by a scan without an iteration"
OVERLAP = "used by slices that overlap"
# name -> (what is computed, for each parameter the reason; "" where it is followed)
WHOLE = {
    "low rank": (
        lambda p, x: x @ (p["w"] + 0.5 * (p["a"] @ p["b"])),
        {"w": ADDED.format("add"), **dict.fromkeys("ab", PRODUCT.format("dot_general"))},
    ),
    "differences in a loop": (
        lambda p, x: layers(x, p["stack"], lambda w: w - p["v"]),
        dict.fromkeys(("stack", "v"), ADDED.format("sub in a scan")),
    ),
    "gain": (lambda p, x: x @ (p["g"][None] * p["w"]), dict.fromkeys("wg", GAIN.format("mul"))),
    "trained scales": (
        lambda p, x: x @ (p["w"] / jnp.exp(p["g"])[:, None]),
        {"w": GAIN.format("div"), "g": "used by exp"},
    ),
    "gram": (lambda p, x: x @ (p["a"] @ p["a"].T), {"a": PRODUCT.format("dot_general")}),
    "entry by entry": (lambda p, x: x @ (p["w"] * p["w"]), {"w": "used by mul"}),
    "divides": (lambda p, x: x @ (1.0 / p["w"]), {"w": "used by div"}),
    "masked by entry": (lambda p, x: x @ (p["w"] * jnp.eye(D)), {"w": "used by mul"}),
    "overlapping": (lambda p, x: x @ p["qkv"][:, :6] + x @ p["qkv"][:, 5:11], {"qkv": OVERLAP}),
    "a part and all": (lambda p, x: x[:, 1:3] @ p["w"][1:3] + x @ p["w"], {"w": OVERLAP}),
    "at a computed place": (
        lambda p, x: lax.fori_loop(0, 3, lambda i, h: tanh(h @ p["three"][i]), x),
        {"three": PLACE},
    ),
    "joined multiples": (
        lambda p, x: x @ jnp.concatenate([2.0 * p["w"], p["v"]], axis=1),
        dict.fromkeys("wv", "used by concatenate"),
    ),
    "by data": (lambda p, x: x @ (x[:D] * p["w"]), {"w": "used by mul"}),
    "added twice": (
        lambda p, x: tanh(x[:D] + p["w"]) - jnp.sin(p["w"] + x[:D]),
        {"w": "used by add"},
    ),
    "stopped": (lambda p, x: x @ stop(p["w"]) @ p["w"], {"w": "used by stop_gradient"}),
    "branch by parameters": (
        lambda p, x: lax.cond(jnp.sum(PARAMS["w"]) > 0, lambda x: x @ p["w"], lambda x: x, x),
        {"w": "used by cond"},
    ),
    "carried": (
        lambda p, x: scan(lambda h, r: (h @ p["v"], None), p["w"], x)[0],
        {"w": "used by scan", "v": PRODUCT.format("dot_general in a scan")},
    ),
    "returned": (
        lambda p, x: x @ scan(lambda c, _: (c, p["w"]), 0.0, x)[1][0],
        {"w": "used by leaves a scan in a scan"},
    ),
    "added in a loop": (
        lambda p, x: scan(lambda h, row: (h @ p["v"] + p["w"], None), x[:4], x)[0],
        {"w": "used by add in a scan", "v": ""},
    ),
    "joined batch": (
        lambda p, x: jnp.einsum("tij,tj->ti", jnp.concatenate([p["stack"], p["other"]])[:TIME], x),
        dict.fromkeys(("stack", "other"), "used by slice"),
    ),
    "looked up in a loop": (
        lambda p, x: lax.map(lambda w: w[jnp.argmax(x, axis=1)], p["stack"]),
        {"stack": PASS},
    ),
}

# name -> (the programs, how far sums may be off, and norms)
TABLES = {
    "slices": (SLICES, 1e-5, 1e-5),
    "loops": (LOOPS, 2e-3, 1e-5),
    "cancelling": (CANCELLING, 2e-3, 2e-3),
    "one by one": ({"one by one": (one_by_one, "w", "")}, 1e-5, 1e-5),
    "whole": (WHOLE, 1e-5, 1e-5),
}


def of(table, names=None, cast=jnp.float32):
    """The parameters and the loss of a table's programs together."""

    def one(fn, keys, *_):
        params = {k: PARAMS[k].astype(cast) for k in (keys.split() if keys == str(keys) else keys)}
        return params, lambda p, x: jnp.sum(jnp.sin(fn(p, x)), dtype=jnp.float32)

    return together({n: one(*row) for n, row in table.items() if names is None or n in names})


def whole(table):
    """Path -> why, of the parameters that are differentiated whole; None for any reason."""
    found = {}
    for name, (_, keys, *without) in table.items():
        why = keys if isinstance(keys, dict) else dict.fromkeys(without[0].split())
        found |= {f"['{name}']['{key}']": reason for key, reason in why.items() if reason != ""}
    return found


@pytest.mark.parametrize("table", TABLES)
def test_what_is_done_to_parameters_is_clipped_as_by_plain_jax(table):
    """Beside a record that is not finite, too; and the plan says why, and how to write it."""
    programs, within, norms = TABLES[table]
    params, loss_fn = of(programs)
    reference = Reference(params, loss_fn, BATCH)
    rule = reference.half()
    grad_fn = jaxdp.clipped_grad(loss_fn, rule, "ghost")
    found = {row.path: row.reason for row in grad_fn.plan(params, BATCH) if row.engine == "vmap"}
    assert found == {path: why or found[path] for path, why in whole(programs).items()}
    run = opened(grad_fn)
    everyone = jnp.ones(ROWS, bool)
    info = agrees(run, reference, rule, params, BATCH, everyone, within=within, norms=norms)
    others = np.arange(ROWS) != 2
    for value in (jnp.inf, jnp.nan):
        found, again = run(params, BATCH.at[2, 1, 1].set(value), everyone)
        assert not np.isfinite(again.norms[2])
        np.testing.assert_allclose(again.norms[others], info.norms[others], rtol=1e-6)
        assert not far(found, reference.clipped(rule, others), within)


EVERY = {**SLICES, **LOOPS}
MIXED = (
    *("fused", "fused layers", "strided", "scaled in a loop", "cells", "arranged", "convolved"),
    "layers over time",
)


@functools.cache
def mixed(names):
    params, loss_fn = of(EVERY, names)
    return params, loss_fn, Reference(params, loss_fn, BATCH)


# Boxes multiply all out, whatever the engine.
@pytest.mark.parametrize("box", [False, True])
def test_scales_and_boxes_of_all_of_them(box):
    params, loss_fn, reference = mixed(MIXED)
    keys = iter(range(20, 99))
    scale = jax.tree.map(lambda p: jnp.exp(normal(next(keys), *p.shape)), params)
    rule = jaxdp.coordinate_box(0.02) if box else reference.half(scale)
    run = opened(jaxdp.clipped_grad(loss_fn, rule, "auto" if box else "ghost"))
    agrees(run, reference, rule, params, BATCH, scale=scale)


STACKED = ("layers over time", "shared and alone", "fused layers")
FEW = {  # one row, or two where that is what fits; and all that is large is added row by row
    1: (*STACKED, "fused", "cells"),
    2 * DEPTH * TIME * D * 4 * 2: STACKED,
    64: ("halves in a loop", "trained number", "fused"),
}


@pytest.mark.parametrize("size", FEW)
def test_a_few_rows_at_a_time(size, monkeypatch):
    params, loss_fn, reference = mixed(FEW[size])
    monkeypatch.setattr(leaves, "_CHUNK_BYTES", size)
    if size == 64:
        monkeypatch.setattr(leaves, "_LARGE", 1)
        monkeypatch.setattr(leaves, "_PATCH_BYTES", 16)
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
    params, loss_fn = of(EVERY, ["trained number", "fused layers", "cells"], jnp.bfloat16)
    reference = Reference(params, loss_fn, batch)
    run = opened(jaxdp.clipped_grad(loss_fn, reference.half(), "ghost"))
    agrees(run, reference, reference.half(), params, batch, within=3e-2, norms=3e-2)


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


def test_a_frozen_parameter_between_trained_ones():
    params, loss_fn = of({"low rank": (lambda p, x: x @ p["w"] + x @ p["a"] @ p["b"], "w a b")})
    rule = jaxdp.clip(0.1)
    grad_fn = jaxdp.clipped_grad(loss_fn, rule, "ghost", trainable=lambda path: "'w'" not in path)
    plan = {row.path[-3]: row.engine for row in grad_fn.plan(params, BATCH)}
    assert plan == {"w": "frozen", "a": "ghost", "b": "ghost"}
    found, _ = opened(grad_fn)(params, BATCH)
    assert found["low rank"].pop("w") is None
    reference = Reference(params, loss_fn, BATCH)
    reference.grads["low rank"].pop("w")
    assert gap(found, reference.clipped(rule)) < 1e-5


def test_no_gradient_of_an_example_is_held_also_of_slices_that_fill_a_weight_or_of_a_multiple():

    def temporary(loss_of, engine="auto"):
        loss_fn = lambda p, x: jnp.sum(jnp.sin(loss_of(p["w"], x)))  # noqa: E731
        params, batch = {"w": jnp.zeros((256, 768))}, jnp.ones((16, 8, 256))
        grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0), engine)
        lowered = jax.jit(lambda p, b: grad_fn(p, b, "all").value).lower(params, batch)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    held = 4 * 16 * 256 * 768
    for loss_of, share in (
        (lambda w, x: x[0] @ w, 0.02),
        (lambda w, x: attention(x, *jnp.split(w, 3, axis=1)), 0.5),
        (lambda w, x: x @ (w / 16.0), 0.5),
    ):
        assert temporary(loss_of) < share * held
        assert temporary(loss_of, "vmap") > 0.5 * held
