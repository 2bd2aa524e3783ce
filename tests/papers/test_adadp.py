"""AdaDp's moment as published, and sums of contributions that un-noised moments set."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdp.optimizers import registry
from jaxdp.papers import raw_gradient
from jaxdp.papers.adadp import adadp_as_published
from jaxdp.papers.pigdo import pigdo_as_published
from jaxdp.papers.raw_gradient import RawGradient
from tests.optimizers.test_attacks import flat

# What E′ averages
GRADS = np.array([[1.0, -2.0], [-3.0, 2.0]], np.float32)


def test_the_published_moment_is_of_examples_or_of_the_lots_mean():
    params, numbers = jnp.zeros(2), registry.Numbers(1.0, 4.0, 2, 8, 0.1)
    means = (np.mean(GRADS**2, axis=0), np.mean(GRADS, axis=0) ** 2)
    for of_lot, squares in enumerate(means):
        made = adadp_as_published(1.0, 2, 8, 0.1, of_lot=bool(of_lot))
        state = made.after_noise.init(params)
        gradient = made.gradient(lambda params, example: jnp.sum(params * example))
        summed = gradient(params, jnp.asarray(GRADS), "all", raw=made.raw(state))
        _, state = made.after_noise.update(params, state, params, leaked=summed.leaked)
        np.testing.assert_allclose(made.raw(state), 0.1 * squares, rtol=1e-5)
        assert registry.build("adadp-as-published", numbers, {"of_lot": of_lot}).claim


# Sums of contributions that un-noised moments set, taken together and one by one
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
        sums.append(
            jax.jit(lambda raw, f=grad_fn: opened(*f.with_info(PARAMS, (X, Y), MASK, raw=raw)))(raw)
        )
    one, other = sums
    chex.assert_trees_all_close(one, other, rtol=2e-6, atol=2e-6)
    chex.assert_trees_all_equal_shapes_and_dtypes(one, other)


@pytest.mark.parametrize("most", [0, 10**9])
def test_the_sums_are_of_the_rows_that_count_also_where_devices_share_them(most, monkeypatch):
    monkeypatch.setattr(raw_gradient, "_TOGETHER", most)
    parts = lambda raw: lambda g: (g * raw, 2 * g)  # noqa: E731
    grad_fn = RawGradient(lambda w, x: w @ x, parts, lambda p: 1.0, None, 4)
    x = X.at[7].set(jnp.nan)
    found, info = grad_fn.with_info(jnp.ones(5), x, MASK, raw=jnp.float32(3.0))
    counted = np.asarray(MASK) & (np.arange(12) != 7)
    rows = np.asarray(X)[counted]
    np.testing.assert_allclose(found.value, 3 * rows.sum(0), rtol=1e-5)
    np.testing.assert_allclose(found.leaked, 2 * rows.sum(0) / 4, rtol=1e-5)
    np.testing.assert_array_equal(info.clipped, counted)
    np.testing.assert_allclose(info.norms[counted], np.linalg.norm(rows, axis=1), rtol=1e-5)

    def summed(params, batch, mask):
        found = grad_fn(params, batch, mask, raw=jnp.float32(1.0))
        return jax.lax.psum(found.value, "data")

    mesh = Mesh(np.array(jax.devices()), ("data",))
    specs = (P(), P("data"), P("data"))
    shared = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=specs, out_specs=P()))
    rows = 4 * mesh.size
    x = jnp.ones((rows, 3))
    np.testing.assert_allclose(shared(jnp.zeros(3), x, jnp.ones(rows, bool)), rows * np.ones(3))
