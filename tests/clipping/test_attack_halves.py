"""Attacks on bfloat16 factors, on products that are not written, and on sums by blocks of rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdp
from jaxdp.clipping.ghost import factors, leaves
from tests.compiling import AS_USERS, QUICK

HALF = jnp.bfloat16


def lengths(tree):
    """float64 [m]: the norms of sums [m, ...]."""
    squares = (np.square(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree))
    return np.sqrt(sum(np.sum(x, axis=tuple(range(1, x.ndim))) for x in squares))


def alternating(p, e):
    terms = e["b"].astype(HALF) * (e["x"].astype(HALF) @ p["w"])
    return jnp.sum(terms.astype(jnp.float32))


def tied_but_for_a_thousandth(p, e):
    y = e["b"] * e["x"][:, :5]
    found = jnp.sum((p["w"][e["k"]] * y.astype(HALF)).astype(jnp.float32))
    return found - jnp.sum((jax.nn.one_hot(e["k"], 6) * 1.001 @ p["w"].astype(jnp.float32)) * y)


def extreme(seed, rows=16, positions=12):
    """Positions that nearly cancel, at either end of the range."""
    rng = np.random.default_rng(seed)
    close = 10.0 ** rng.uniform(-4, 0, (rows, 1, 1))
    x = rng.uniform(0.1, 2, (rows, 1, 6)) + close * rng.normal(size=(rows, positions, 6))
    b = rng.normal(size=(rows, positions, 1))
    b -= b.mean(axis=1, keepdims=True) * (1 - close)
    x *= 2.0 ** rng.choice([-120.0, -60.0, 0.0, 30.0, 55.0], size=(rows, 1, 1))
    b *= 2.0 ** rng.choice([-120.0, -60.0, 0.0, 30.0, 55.0], size=(rows, 1, 1))
    tokens = rng.integers(0, 3, (rows, positions))
    return {"x": x.astype(np.float32), "b": b.astype(np.float32), "k": tokens}


@pytest.mark.parametrize("rule", [jaxdp.normalize(1.0), jaxdp.normalize(1e10), jaxdp.clip(1e-10)])
@pytest.mark.parametrize("loss_fn", [alternating, tied_but_for_a_thousandth])
def test_halves_at_the_ends_of_the_range_keep_the_bound(loss_fn, rule):
    grad_fn = jaxdp.clipped_grad(loss_fn, rule, "ghost")
    w = np.random.default_rng(0).normal(size=(6, 5))
    params = {"w": jnp.asarray(w, HALF)}

    @functools.partial(jax.jit, compiler_options=AS_USERS)
    def alone(rows):
        each = jnp.arange(16)
        return lax.map(lambda k: grad_fn(params, rows, each == k)[0].value, each)

    added = np.concatenate([lengths(alone(extreme(seed))) for seed in range(3)])
    assert 0.0 < np.max(added) <= rule.l2(params)


def dense(p, e):
    return jnp.sum((e["x"] @ p["w"]) * (e["p"] * e["q"] - e["r"]))


def in_halves(p, e):
    lost = (e["p"] * e["q"] - e["r"]).astype(HALF)
    return jnp.sum(((e["x"].astype(HALF) @ p["w"].astype(HALF)) * lost).astype(jnp.float32))


def multiple(p, e):
    return jnp.sum((e["x"] @ (0.3 * p["w"])) * (e["p"] * e["q"] - e["r"]))


@pytest.mark.parametrize("loss_fn", [dense, in_halves, multiple])
def test_a_large_layer_is_multiplied_out_once(loss_fn):
    rng = np.random.default_rng(0)
    p, q = rng.normal(size=(2, 72, 64, 64)).astype(np.float32) * 1e3
    rows = {"p": p, "q": q, "r": p * q, "x": np.full_like(p, 1e-3)}
    params = {"w": jnp.zeros((64, 64))}
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1e6))
    assert grad_fn.plan(params, rows)[0].engine == "layer"
    assert leaves._LARGE <= 72 * 64 * 64

    @functools.partial(jax.jit, compiler_options=AS_USERS)
    def run(rows, mask):
        summed, info = grad_fn(params, rows, mask)
        return summed.value, info.norms

    compiled = run.lower(rows, jnp.arange(72) == 3).compile()
    # One product for norm and sum both, and the weighted sum.
    assert compiled.as_text().count(" dot(") == 2
    value, norms = compiled(rows, jnp.arange(72) == 3)
    assert lengths(value["w"][None])[0] == pytest.approx(float(norms[3]), rel=1e-5)


def changed(p, e):
    x, k = e
    both = p["w"] - 0.7 * (p["a"] @ p["b"])
    one = lax.cond(k == 0, lambda x: jnp.sin(x @ both), lambda x: x @ p["w"], x)
    left, right = jnp.split(both, 2, axis=1)
    two = lax.scan(lambda h, row: (h, jnp.concatenate([row @ left, row @ right])), 0.0, x)[1]
    return jnp.sum(jnp.sin(one + two + p["w"][jnp.asarray([0, 1, 1, 2, 0])]))


def convolved(p, e):
    kernel = jnp.stack([p["w"], p["a"] @ p["b"]])
    numbers = ("NWC", "WIO", "NWC")
    y = lax.conv_general_dilated(e[0][None], kernel, (1,), "SAME", dimension_numbers=numbers)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.tanh(e[0] @ p["w"]) @ p["w"].T)


@pytest.mark.parametrize("engine", ["ghost", "auto"])
@pytest.mark.parametrize("loss_fn", [changed, convolved])
def test_rows_that_are_not_finite_touch_no_other_in_sums_by_blocks(loss_fn, engine, monkeypatch):
    monkeypatch.setattr(leaves, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(leaves, "_LARGE", 1)
    monkeypatch.setattr(factors, "_PATCH_BYTES", 16)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"w": (4, 4), "a": (4, 2), "b": (2, 4)}
    params = {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=False)}
    x = jax.random.normal(keys[3], (6, 5, 4)).at[2, 1, 1].set(jnp.inf).at[4, 0, 2].set(jnp.nan)
    rows, good = (x, jnp.asarray([0, 1, 0, 1, 0, 1])), np.asarray([0, 1, 5])
    mask = jnp.asarray([True, True, True, False, True, True])
    rule = jaxdp.normalize(1.0)
    finite = jax.tree.map(lambda leaf: leaf[good], rows)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run():
        found = jaxdp.clipped_grad(loss_fn, rule, engine)(params, rows, mask)
        wanted = jaxdp.clipped_grad(loss_fn, rule, "vmap")(params, finite, "all")
        return found[0].value, wanted[0].value

    found, wanted = run()
    for name in params:
        np.testing.assert_allclose(found[name], wanted[name], rtol=2e-4, atol=2e-5)
