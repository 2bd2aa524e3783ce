"""Norm and sum read the same numbers: XLA computes none of them again for one of the two.

A cotangent ``p q - r`` with r the rounded product is zero, or what the product lost by rounding
where multiplication and subtraction are fused. Computed anew for the sum, it may be one for the
norm and the other for the sum: a record of norm 1e-18 added 5e-5, and as much more as p is larger.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.clipping import rounding
from tests.compiling import AS_USERS


def halved(params, e):
    lost = e["p"] * e["q"] - e["r"]
    part = jax.nn.relu(lost) - 0.5 * lost
    return jnp.sum((part @ params["w"]) * e["x"]) + jnp.sum((e["x"] @ params["v"]) * part)


def plain(params, e):
    lost = e["p"] * e["q"] - e["r"]
    return jnp.sum((e["x"] @ params["w"]) * lost) + jnp.sum((e["x"] @ params["v"]) * lost)


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("engine", ["ghost", "auto", "vmap"])
@pytest.mark.parametrize("loss_fn", [halved, plain])
def test_what_is_lost_by_rounding_is_the_same_for_norm_and_sum(loss_fn, engine, size):
    p, q = np.random.default_rng(0).normal(size=(2, 8, size)).astype(np.float32) * 1e3
    rows = {"p": p, "q": q, "r": p * q, "x": np.full_like(p, 1e-3)}
    params = {"w": jnp.zeros((size, size)), "v": jnp.zeros((size, size))}
    grad_fn = jaxdp.clipped_grad(loss_fn, jaxdp.clip(0.5), engine)

    @functools.partial(jax.jit, compiler_options=AS_USERS)
    def run(params, rows, mask):
        summed, info = grad_fn(params, rows, mask)
        return summed.value, info.norms

    value, norms = run(params, rows, np.arange(8) == 3)
    added = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in value.values()))
    assert added == pytest.approx(float(norms[3]), rel=1e-5, abs=1e-16)


def test_every_reader_reads_what_was_written():
    @functools.partial(jax.jit, compiler_options=AS_USERS)
    def run(p, q, r):
        lost = rounding.written(
            {"lost": p * q - r, "constant": jnp.zeros(3), "count": jnp.arange(3)}
        )
        return lost

    p, q = np.random.default_rng(0).normal(size=(2, 8, 16)).astype(np.float32)
    text = run.lower(p, q, p * q).compile().as_text()
    assert "while(" in text
    found = run(p, q, p * q)
    assert found["lost"].shape == (8, 16)
    np.testing.assert_array_equal(found["constant"], np.zeros(3))
    np.testing.assert_array_equal(found["count"], np.arange(3))
    nan = run(p * np.nan, q, p)["lost"]
    assert np.isnan(nan).all()
