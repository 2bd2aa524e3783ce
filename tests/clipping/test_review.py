"""Losses and numbers that once made a norm, a gradient or a refusal wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdp
from jaxdp.types import Draw
from tests.clipping.architectures import jit, opened
from tests.clipping.test_ghost import gap
from tests.clipping.test_rules import AIM, norm64

KEYS = jax.random.split(jax.random.key(0), 3)
SQUARE = {"w": jax.random.normal(KEYS[0], (6, 6))}
X = jax.random.normal(KEYS[1], (3, 4, 6))
TOKENS = jnp.arange(15, dtype=jnp.int32).reshape(3, 5) * 7 % 6


def wave(x):
    return jnp.sum(jnp.sin(x))


def rows_and_columns(p, tokens):
    return wave(p["w"][tokens]) + jnp.sum(jnp.cos(p["w"][:, tokens[::-1]]))


def reshaped_in_another_order(p, x):
    return wave(x @ lax.reshape(p["w"], (6, 6), (1, 0))) + wave(jnp.cos(x) @ p["w"])


def kernels_under_vmap(p, x):
    one = lambda w, x: lax.conv_general_dilated(x[None], w, (1,), "VALID")  # noqa: E731
    return wave(jax.vmap(one)(p["w"], x.reshape(2, 3, 4)))


def complex_data(p, x):
    x = x.astype(jnp.complex64) * jnp.complex64(1.0 + 2.0j)
    product = lax.dot_general(x, p["w"], (((1,), (0,)), ((), ())))
    return jnp.sum(jnp.square(jnp.abs(product)))


def empty_weight(p, x):
    return wave(x @ p["empty"]) + wave(x @ p["w"])


def indices_beyond_the_rows(p, tokens):
    return wave(p["w"].at[tokens.astype(jnp.uint32) + jnp.uint32(2**32 - 3)].get(mode="clip"))


FOLLOWED = {
    "rows_and_columns": (rows_and_columns, SQUARE, TOKENS),
    "reshape": (reshaped_in_another_order, SQUARE, X),
    "kernels": (kernels_under_vmap, {"w": jax.random.normal(KEYS[2], (2, 4, 3, 2))}, X),
    "complex": (complex_data, SQUARE, X),
    "empty": (empty_weight, {**SQUARE, "empty": jnp.zeros((6, 0))}, X),
    "indices": (indices_beyond_the_rows, SQUARE, TOKENS),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_parameters_are_followed_rightly_or_not_at_all(name):
    loss_fn, params, batch = FOLLOWED[name]
    found, expected = (
        opened(jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0), engine))(params, batch)
        for engine in ("ghost", "vmap")
    )
    np.testing.assert_allclose(found[1].norms, expected[1].norms, rtol=1e-5)
    assert gap(found[0], expected[0]) < 1e-5


def test_a_record_that_looks_up_a_row_and_a_column_of_one_table_keeps_the_bound():
    # Both uses add to one entry, so the norm is the sum of theirs, not the root of their squares.
    def loss_fn(p, e):
        return jnp.sum(p["w"][e[0]] * e[1]) + jnp.sum(p["w"][:, e[0] + 1].T * e[2])

    first, second = (100.0 * jax.nn.one_hot(jnp.full((1, 1), at), 6) for at in (1, 0))
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0), "ghost")
    value, info = opened(grad_fn)(SQUARE, (jnp.zeros((1, 1), jnp.int32), first, second))
    np.testing.assert_allclose(info.norms, [200.0])
    assert norm64(value) <= 1.0


@pytest.mark.parametrize(
    ("small", "huge", "scale"),
    [(1e-20, 1e18, 1e-3), (1e-20, 1e18, 1e-8), (1e-12, 1e19, 1e8), (1e-30, 1e30, 1e-2)],
)
def test_scaled_gradients_of_tiny_inputs_and_huge_cotangents_are_clipped(small, huge, scale):
    loss_fn = lambda p, x: x[3] * jnp.sum(x[:3] @ p["w"])  # noqa: E731
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.1), "ghost")
    params, batch = {"w": jnp.zeros((3, 4))}, jnp.asarray([[small] * 3 + [huge]])
    value, info = opened(grad_fn)(params, batch, scale={"w": jnp.full((3, 4), scale)})
    np.testing.assert_allclose(info.norms, np.sqrt(12.0) * small * huge / scale, rtol=1e-5)
    assert 0.1 * AIM <= norm64(value) <= 0.1


def test_a_scale_in_low_precision_is_the_same_for_norm_and_sum():
    loss_fn = lambda p, x: jnp.sum(x @ p["w"])  # noqa: E731
    scale = {"w": jnp.linspace(0.1, 1.0, 18).reshape(6, 3).astype(jnp.bfloat16)}
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0), "ghost")
    for row in range(3):
        batch = 1e3 * X[row : row + 1, 0]
        value, _ = opened(grad_fn)({"w": jnp.zeros((6, 3))}, batch, scale=scale)
        assert AIM <= norm64(value) <= 1.0


@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_a_bound_at_run_time_that_is_no_bound_is_made_a_safe_one(engine):
    loss_fn = lambda p, x: jnp.sum(x @ p["w"])  # noqa: E731
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0), engine)

    @jit
    def run(batch, bound):
        summed, _ = grad_fn({"w": jnp.zeros((6, 2))}, batch, "all", bound=bound)
        return summed.value, summed.l2

    for bad in (np.nan, -1.0, 0.0, 1e-30, np.inf):
        for size in (0.0, 1e-20, 1e-9, 1.0, 1e12):
            value, l2 = run(jnp.full((1, 6), size), jnp.float32(bad))
            assert 1e-11 < l2 < 1e11
            assert norm64(value) <= l2


@pytest.mark.parametrize(
    "bad", [-1.0, 0, float("nan"), 1e-11, True, "1", jnp.ones(3), jnp.int32(1), np.ones(2)]
)
def test_bad_bounds_are_refused_by_name(bad):
    grad_fn = jaxdp.clipped_grad(lambda p, x: wave(x @ p["w"]), jaxdp.clip(1.0))
    draw = Draw(np.zeros((1, 2), np.int32), np.ones((1, 2), bool), 0, 3)
    for call in (
        lambda: grad_fn(SQUARE, X, "all", bound=bad),
        lambda: grad_fn.sum(SQUARE, X, draw, bound=bad),
    ):
        with pytest.raises(ValueError, match="bound must be"):
            call()


def test_a_loss_that_is_a_constant_is_refused_in_words():
    grad_fn = jaxdp.clipped_grad(lambda p, x: jnp.float32(1.0), jaxdp.clip(1.0))
    with pytest.raises(ValueError, match="must depend on its example"):
        grad_fn(SQUARE, X, "all")


def test_numpy_batches_in_double_precision_are_taken():
    grad_fn = jaxdp.clipped_grad(lambda p, x: wave(x @ p["w"]), jaxdp.clip(1.0), "ghost")
    batch = np.asarray(X, np.float64)
    assert grad_fn.plan(SQUARE, batch)[0].engine == "ghost"
    value = jit(lambda params: grad_fn(params, batch, "all")[0].value)(SQUARE)
    assert gap(value, opened(grad_fn)(SQUARE, X)[0]) < 1e-6


@pytest.mark.parametrize("rule", [jaxdp.clip(1.0), jaxdp.coordinate_box(0.1)], ids=["clip", "box"])
def test_an_empty_batch_gives_zero(rule):
    grad_fn = jaxdp.clipped_grad(lambda p, x: wave(x @ p["w"]), rule, "ghost")
    assert norm64(opened(grad_fn)(SQUARE, X[:0])[0]) == 0.0


@pytest.mark.parametrize("rule", [jaxdp.clip(1.0), jaxdp.coordinate_box(0.1)], ids=["clip", "box"])
def test_double_precision_models_are_summed_in_float32_microbatches_included(rule):
    with jax.enable_x64(True):
        params = {"w": jnp.ones((6, 3), jnp.float64)}
        batch = jnp.asarray(np.asarray(X), jnp.float64)
        loss_fn = lambda p, x: wave(x @ p["w"])  # noqa: E731
        for size in (None, 2):
            grad_fn = jaxdp.clipped_grad(loss_fn, rule, "ghost", microbatch_size=size)
            assert opened(grad_fn)(params, batch)[0]["w"].dtype == jnp.float32
