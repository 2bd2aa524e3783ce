"""Parameters used inside scans, and joined ones, by the ghost engine against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from tests.clipping.architectures import ARCHITECTURES, opened

D, DEPTH, ROWS, TIME = 4, 3, 6, 5


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) * 0.4


def over_layers(params, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])[0]


def over_time(params, x):
    def step(h, row):
        h = jnp.tanh(row @ params["u"] + h @ params["v"])
        return h, h

    return jax.lax.scan(step, jnp.zeros(D), x, reverse=True)[1]


def layers_over_time(params, x):
    def layer(rows, weights):
        def step(h, row):
            h = jnp.tanh(row @ weights["w"] + h @ weights["z"])
            return h, h

        return jax.lax.scan(jax.checkpoint(step), jnp.zeros(D), rows)[1], None

    return jax.lax.scan(layer, x, {"w": params["w"], "z": params["z"]})[0]


def whole_stack_at_every_pass(params, x):
    """The inner scan slices what the outer one slices, too, all of it at every pass."""

    def outer(h, w):
        h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["w"])[0]
        return jnp.tanh(h @ w), None

    return jax.lax.scan(outer, x, params["w"])[0]


def outer_slices_unused(params, x):
    def outer(h, _):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["w"])[0], None

    return jax.lax.scan(outer, x, params["w"])[0]


def shared_and_alone(params, x):
    """One weight at every pass, and once more outside of the loop."""
    h = jax.lax.fori_loop(0, 4, lambda _, h: jnp.tanh(h @ params["u"]), x)
    return h @ params["u"]


def arranged(params, x):
    """A stack that is reshaped before the scan, and turned inside."""
    stack = params["heads"].reshape(DEPTH, D, D)
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w.T), None), x, stack)[0]


def convolved(params, x):
    def layer(h, kernel):
        return jnp.tanh(jax.lax.conv(h, kernel, (1, 1), "SAME")), None

    return jax.lax.scan(layer, x.reshape(1, 1, TIME, D), params["k"])[0]


def joined(params, x):
    """Along an axis of the result, and along one that is summed over."""
    both = jnp.concatenate([params["u"], params["v"]], axis=1)
    tall = jnp.concatenate([params["v"], params["u"], params["v"]], axis=0)
    first = jnp.einsum("ab,tb->at", jnp.concatenate([params["u"], params["v"]], axis=0), x)
    return jnp.concatenate([x @ both, jnp.tile(x, 3) @ tall, first.T], axis=1)


PROGRAMS = {
    "over_layers": (over_layers, "w"),
    "over_time": (over_time, "uv"),
    "layers_over_time": (layers_over_time, "wz"),
    "whole_stack_at_every_pass": (whole_stack_at_every_pass, "w"),
    "outer_slices_unused": (outer_slices_unused, "w"),
    "shared_and_alone": (shared_and_alone, "u"),
    "arranged": (arranged, ["heads"]),
    "convolved": (convolved, "k"),
    "joined": (joined, "uv"),
}
PARAMS = {
    "w": normal(0, DEPTH, D, D),
    "z": normal(1, DEPTH, D, D),
    "u": normal(2, D, D),
    "v": normal(3, D, D),
    "heads": normal(4, DEPTH, D, 2, D // 2),
    "k": normal(5, DEPTH, 1, 1, 3, 3),
}


def run(name, engine, rule, **options):
    fn, names = PROGRAMS[name]
    params = {key: PARAMS[key] for key in names}
    grad_fn = jaxdp.clipped_grad(lambda p, x: jnp.sum(jnp.sin(fn(p, x))), rule, engine)
    plan = grad_fn.plan(params, BATCH)
    if "scale" in options:
        options["scale"] = {key: SCALE[key] for key in names}
    return *opened(grad_fn)(params, BATCH, **options), {leaf.engine for leaf in plan}


BATCH = normal(6, ROWS, TIME, D)
SCALE = {k: jnp.exp(normal(7 + i, *v.shape)) for i, (k, v) in enumerate(PARAMS.items())}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("options", [{}, {"scale": None}], ids=["plain", "scaled"])
@pytest.mark.parametrize("rule", [jaxdp.clip(0.3), jaxdp.coordinate_box(0.02)], ids=["l2", "box"])
def test_loops_and_joined_parameters_are_clipped_as_by_the_reference(name, options, rule):
    expected, reference, _ = run(name, "vmap", rule, **options)
    for engine in ("ghost", "auto"):
        found, info, engines = run(name, engine, rule, **options)
        assert "vmap" not in engines
        np.testing.assert_allclose(
            info.norms, reference.norms, rtol=2e-3 if name == "joined" else 1e-5
        )
        for key, leaf in found.items():
            np.testing.assert_allclose(leaf, expected[key], rtol=2e-3, atol=2e-5, err_msg=key)


REFUSED = {
    "carried": (lambda p, x: jax.lax.scan(lambda h, r: (h @ p["v"], None), p["u"], x)[0], "u"),
    "returned": (lambda p, x: x @ jax.lax.scan(lambda c, _: (c, p["u"]), 0.0, x)[1][0], "u"),
    "added": (
        lambda p, x: jax.lax.scan(lambda h, r: (h @ p["v"] + p["u"], None), x[:4], x)[0],
        "u",
    ),
    "joined batch": (
        lambda p, x: jnp.einsum("tij,tj->ti", jnp.concatenate([p["w"], p["z"]])[:TIME], x),
        "w",
    ),
    "looked up": (
        lambda p, x: jax.lax.map(lambda w: w[jnp.argmax(x, axis=1)], p["w"]),
        "w",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_factored_is_differentiated_whole(name):
    fn, leaf = REFUSED[name]
    loss_fn = lambda p, x: jnp.sum(jnp.sin(fn(p, x)))  # noqa: E731
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.3), "ghost")
    engines = {p.path: p.engine for p in grad_fn.plan(PARAMS, BATCH)}
    assert engines[f"['{leaf}']"] == "vmap"
    found = opened(grad_fn)(PARAMS, BATCH)[0]
    expected = opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.3), "vmap"))(PARAMS, BATCH)[0]
    for key, value in found.items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["over_layers", "layers_over_time", "shared_and_alone"])
def test_large_stacks_are_worked_on_a_few_rows_at_a_time(name, monkeypatch):
    expected, reference, _ = run(name, "vmap", jaxdp.clip(0.3))
    # Six rows: two at a time where that is what fits, or one.
    for size in (1, 2 * DEPTH * TIME * D * 4 * 2):
        monkeypatch.setattr("jaxdp.clipping.ghost.leaves._CHUNK_BYTES", size)
        found, info, _ = run(name, "ghost", jaxdp.clip(0.3))
        np.testing.assert_allclose(info.norms, reference.norms, rtol=1e-5)
        for key, leaf in found.items():
            np.testing.assert_allclose(leaf, expected[key], rtol=1e-3, atol=3e-5, err_msg=key)


@pytest.mark.parametrize("name", ["tied", "heads", "used_twice", "scanned"])
def test_large_factors_are_worked_on_a_few_rows_at_a_time(name, monkeypatch):
    params, loss_fn, batch = ARCHITECTURES[name]()
    expected, reference = opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.3), "vmap"))(
        params, batch
    )
    monkeypatch.setattr("jaxdp.clipping.ghost.leaves._CHUNK_BYTES", 1)
    found, info = opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.3), "ghost"))(params, batch)
    np.testing.assert_allclose(info.norms, reference.norms, rtol=1e-5)
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-6)
