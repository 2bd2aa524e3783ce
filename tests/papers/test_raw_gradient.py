"""Sums of contributions that un-noised moments set, taken together and one by one."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.papers import raw_gradient
from jaxdp.papers.adadp import adadp_as_published
from jaxdp.papers.pigdo import pigdo_as_published
from jaxdp.papers.raw_gradient import RawGradient
from tests.optimizers.test_attacks import flat

X = jax.random.normal(jax.random.key(3), (12, 5))
Y = jnp.arange(12, dtype=jnp.float32) / 6
MASK = jnp.arange(12) % 5 != 2
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 5), "b": jnp.float32(0.5)}
MADE = {
    "piadam": lambda: pigdo_as_published(flat(), 0.1),
    "piadagrad": lambda: pigdo_as_published(flat(), 0.1, "adagrad"),
    "adadp": lambda: adadp_as_published(2.0, 10, 100, 0.1, bound=1.0),
}


def loss_fn(params, example):
    x, y = example
    return (x @ params["w"] + params["b"] - y) ** 2


def moments(algorithm):
    state = algorithm.raw(algorithm.after_noise.init(PARAMS))
    return jax.tree.map(
        lambda leaf: leaf + jnp.arange(1, 1 + leaf.size, dtype=leaf.dtype).reshape(leaf.shape),
        state,
    )


def opened(summed, info):
    rows = (info.norms, info.losses, info.clipped, info.mask)
    return summed.value, summed.leaked, summed.unscale, rows


@pytest.mark.parametrize("name", MADE)
def test_one_by_one_is_the_sum_that_all_together_give(name, monkeypatch):
    """Of moments that vary between coordinates."""
    algorithm = MADE[name]()
    grad_fn, raw = algorithm.gradient(loss_fn), moments(algorithm)
    sums = []
    for together in (raw_gradient._TOGETHER, 0):
        monkeypatch.setattr(raw_gradient, "_TOGETHER", together)
        sums.append(jax.jit(lambda raw, f=grad_fn: opened(*f(PARAMS, (X, Y), MASK, raw=raw)))(raw))
    one, other = sums
    chex.assert_trees_all_close(one, other, rtol=2e-6, atol=2e-6)
    chex.assert_trees_all_equal_shapes_and_dtypes(one, other)


@pytest.mark.parametrize("most", [0, 10**9])
def test_the_sums_are_of_the_rows_that_count(most, monkeypatch):
    monkeypatch.setattr(raw_gradient, "_TOGETHER", most)
    grad_fn = RawGradient(
        lambda w, x: w @ x, lambda raw: lambda g: (g * raw, 2 * g), lambda p: 1.0, None, 4
    )
    x = X.at[7].set(jnp.nan)
    summed, info = grad_fn(jnp.ones(5), x, MASK, raw=jnp.float32(3.0))
    counted = np.asarray(MASK) & (np.arange(12) != 7)
    rows = np.asarray(X)[counted]
    np.testing.assert_allclose(summed.value, 3 * rows.sum(0), rtol=1e-5)
    np.testing.assert_allclose(summed.leaked, 2 * rows.sum(0) / 4, rtol=1e-5)
    np.testing.assert_array_equal(info.clipped, counted)
    np.testing.assert_allclose(info.norms[counted], np.linalg.norm(rows, axis=1), rtol=1e-5)
