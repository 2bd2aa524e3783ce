"""Attacks on the stated bound: no record may move the clipped sum by more than rule.l2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdp
from jaxdp.clipping import reduce


def norm64(tree):
    return np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree)))


def contribution(rule, grad):
    """What one record with this gradient adds to the sum."""
    rows = jax.tree.map(lambda g: jnp.asarray(g)[None], grad)
    return reduce.clipped_sum(rule, rows, jnp.ones(1, bool))[0]


@given(
    st.floats(1e-6, 1e6), st.floats(-12, 12), st.integers(1, 400), st.integers(0, 2**31 - 1)
)
def test_no_record_exceeds_the_bound(bound, magnitude, size, seed):
    rng = np.random.default_rng(seed)
    spread = 10.0 ** (magnitude + rng.uniform(-3, 3, size))
    grad = {"a": (rng.normal(size=size) * spread).astype(np.float32), "b": np.float32([1e-3])}
    assert norm64(contribution(jaxdp.clip(bound), grad)) <= bound


@pytest.mark.parametrize("value", [1.0, 1 / 3, 0.1, 1.0000001, 0.99999994])
@pytest.mark.parametrize("size", [1_000, 1_000_000])
def test_rounding_of_many_equal_squares_stays_below_the_bound(value, size):
    # The worst neighbour for float32 norms: every partial sum rounds the same way.
    grad = np.full(size, value, np.float32)
    norm = norm64(grad)
    for ratio in (0.5, 0.999, 1 - 2e-7, 1.0, 1 + 2e-7, 1.001, 100.0):
        bound = float(norm / ratio)
        assert norm64(contribution(jaxdp.clip(bound), grad)) <= bound


def test_the_worst_neighbour_reaches_the_bound():
    rng = np.random.default_rng(0)
    rule = jaxdp.clip(0.1)
    worst = max(
        norm64(contribution(rule, rng.normal(size=50).astype(np.float32) * 10.0**k))
        for k in range(-3, 6)
    )
    assert 0.99 * rule.l2 <= worst <= rule.l2


def test_short_gradients_pass_unchanged():
    grad = np.float32([0.03, -0.04])
    np.testing.assert_array_equal(contribution(jaxdp.clip(0.1), grad), grad)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_low_precision_gradients_keep_the_bound(dtype):
    grad = jnp.asarray(np.random.default_rng(1).normal(size=5_000), dtype)
    total = contribution(jaxdp.clip(1.0), grad)
    assert total.dtype == jnp.float32
    assert 0.99 <= norm64(total) <= 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_broken_example_contributes_exactly_zero(bad):
    rows = {"w": jnp.asarray([[1.0, 2.0], [bad, bad], [3.0, 4.0]]), "b": jnp.ones((3, 1))}
    keep = jnp.asarray([True, False, True])
    total, _, clipped = reduce.clipped_sum(jaxdp.clip(1.0), rows, jnp.ones(3, bool))
    without, _, _ = reduce.clipped_sum(
        jaxdp.clip(1.0), jax.tree.map(lambda r: jnp.where(keep[:, None], r, 0.0), rows), keep
    )
    jax.tree.map(np.testing.assert_array_equal, total, without)
    np.testing.assert_array_equal(clipped, keep)


@pytest.mark.parametrize("bound", [0, -1, float("nan"), float("inf"), 1e-11, 1e11, "0.1", True])
def test_bad_bound(bound):
    with pytest.raises(ValueError, match="l2_clip_norm"):
        jaxdp.clip(bound)
