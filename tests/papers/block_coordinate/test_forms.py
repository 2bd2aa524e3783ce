"""The closed forms against brute force, the clipped block step by search, and what a record adds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.clipping.rounding import MARGIN
from jaxdp.papers import block_coordinate as bc
from jaxdp.papers.block_coordinate import forms
from jaxdp.papers.block_coordinate.patches import Patches
from jaxdp.papers.block_coordinate.sweep import clipped_sum

GRID = np.linspace(-12, 12, 40_001)
PATCHES = Patches((6, 6, 2), 3, 2, 4)
NET = bc.Network((72, PATCHES.outputs, 3), 1.5, patches=PATCHES)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def float32(*arrays):
    return [np.asarray(t, np.float32) for t in arrays]


def relu(x):
    return np.maximum(x, 0)


def excess(objective, found):
    """How far the objective is above its minimum on the grid."""
    return float(objective(np.float64(found)) - objective(GRID).min())


def test_hidden_u_minimises_its_objective():
    rng = np.random.default_rng(0)
    v, product, ratio = 2 * rng.normal(size=300), 2 * rng.normal(size=300), rng.uniform(0.2, 4, 300)
    found = jax.jit(jax.vmap(forms.hidden_u))(*float32(v, product, ratio))
    for a, b, g, u in zip(v, product, ratio, found, strict=True):
        cost = lambda t, a=a, b=b, g=g: 0.5 * (relu(t) - a) ** 2 + 0.5 * g * (t - b) ** 2  # noqa: E731
        assert excess(cost, u) < 1e-6


def test_last_u_and_last_v_minimise_theirs():
    rng = np.random.default_rng(1)
    a, b, gamma = 2 * rng.normal(size=50), 2 * rng.normal(size=50), rng.uniform(0.2, 4, 50)
    one, two, three = float32(a, b, gamma)
    middles, outputs = forms.last_u(one, two), forms.last_v(one, two, three)
    for x, y, g, u, v in zip(a, b, gamma, middles, outputs, strict=True):
        assert excess(lambda t, x=x, y=y: (t - x) ** 2 + (t - y) ** 2, u) < 1e-6
        cost = lambda t, x=x, y=y, g=g: 0.5 * (t - x) ** 2 + 0.5 * g * (t - y) ** 2  # noqa: E731
        assert excess(cost, v) < 1e-6


@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (4, 4), (7, 4), (3, 6)])
def test_hidden_v_minimises_its_objective(shape):
    """Both branches (plain and Woodbury), against the exact answer and all around it."""
    rng = np.random.default_rng(3)
    w, u, u_next = rng.normal(size=shape), rng.normal(size=shape[1]), rng.normal(size=shape[0])
    one, *args = float32(w, u, u_next)
    v = np.float64(forms.hidden_v(one, forms.ridge_factor(one), *args))
    exact = np.linalg.solve(np.eye(shape[1]) + w.T @ w, relu(u) + w.T @ u_next)
    np.testing.assert_allclose(v, exact, rtol=1e-4, atol=1e-5)
    cost = lambda t: np.sum((t - relu(u)) ** 2) + np.sum((u_next - w @ t) ** 2)  # noqa: E731
    around = [cost(exact + 1e-3 * rng.normal(size=v.shape)) for _ in range(100)]
    assert cost(v) - cost(exact) < 1e-6
    assert min(around) > cost(exact)


def test_the_last_u_of_cross_entropy_is_stationary():
    y = forms.one_hot(jnp.array([0.1, 0.7, 0.2]))
    np.testing.assert_array_equal(y, [0, 1, 0])
    product = 3 * normal(6, 3)
    for gamma in (0.5, 1.0, 4.0):
        u = forms.softmax_u(y, product, gamma)
        slope = jax.nn.softmax(u) - y + gamma * (u - product)
        np.testing.assert_allclose(slope, np.zeros(3), atol=1e-3)


def test_clip_to_ball():
    near, far = jnp.asarray([0.3, 0.4]), jnp.asarray([3e3, -4e3])
    np.testing.assert_array_equal(forms.clip_to_ball(near, 1.0), near)
    assert 1 - 1.01 * MARGIN < float(jnp.linalg.norm(forms.clip_to_ball(far, 1.0))) <= 1
    for bad in (jnp.nan, jnp.inf):
        short = forms.clip_to_ball(jnp.asarray([bad, 1.0]), 1.0)
        np.testing.assert_array_equal(short, jnp.zeros(2))
    for value in (1e-38, 1e-25, 1.0, 1e25, 1e33):
        for shape in ((300,), (20, 15)):
            short = forms.clip_to_ball(jnp.full(shape, value, jnp.float32), 1e-3)
            norm = np.linalg.norm(np.asarray(short, np.float64))
            assert norm == pytest.approx(min(1e-3, value * 300**0.5), rel=3e-3)


def test_length_is_between_the_spectral_and_the_frobenius_norm():
    for seed in range(20):
        v = normal(seed, 7, 5) * 10.0 ** (seed - 10)
        spectral, frobenius = np.linalg.norm(v, 2), np.linalg.norm(v)
        assert spectral * (1 - 1e-5) <= float(forms.length(v)) <= frobenius * (1 + 1e-5)
    assert float(forms.length(jnp.ones(4))) == pytest.approx(2.0)
    assert not np.any(forms.clip_to_ball(jnp.full((3, 2), jnp.nan), 1.0))


def test_the_convolution_is_that_of_lax():
    x, (w, *_) = normal(0, 72) / 9, NET.init(jax.random.key(1))
    product = NET.forward((w,), x)[1][0]
    kernel = w.reshape(4, 3, 3, 2).transpose(1, 2, 3, 0)
    wanted = jax.lax.conv_general_dilated(
        x.reshape(1, 6, 6, 2), kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    assert float(forms.length(PATCHES.cut(x))) < 1.5
    np.testing.assert_allclose(product, np.ravel(wanted), atol=1e-5)


# Clipped steps and sums -------------------------------------------------------------------------


def block_step(w, v, u, mask, clip, step_size):
    return w - step_size / v.shape[0] * clipped_sum(v @ w.T - u, v, mask, clip)


def test_the_clipped_block_step_is_convex_and_expands_nothing():
    """3,000 random problems, in double precision: the ratio is at most 1 + 1e-6."""
    trials, rows, d_in, d_out = 3000, 5, 5, 4
    rng = np.random.default_rng(4)
    v, u = rng.normal(size=(trials, rows, d_in)), 3 * rng.normal(size=(trials, rows, d_out))
    mask = rng.random((trials, rows)) < 0.7
    clip = rng.uniform(0.1, 3, trials)
    step_size = 2 / np.max(np.sum(v**2, axis=2), axis=1) * rng.uniform(0.1, 1, trials)
    w = 2 * rng.normal(size=(trials, d_out, d_in))
    other = w + rng.normal(size=w.shape) * 10 ** rng.uniform(-3, 1, (trials, 1, 1))
    with jax.enable_x64(True):
        run = jax.jit(jax.vmap(block_step))
        new, new_other = (run(at, v, u, mask, clip, step_size) for at in (w, other))
    before, after = w - other, np.asarray(new - new_other)
    norm = lambda t: np.sqrt(np.sum(t**2, axis=(1, 2)))  # noqa: E731
    assert np.max(norm(after) / norm(before)) <= 1 + 1e-6
    # Convexity: gradients are monotone. (step_size > 0, so the sign is that of the steps.)
    assert np.min(np.sum((before - after) * before, axis=(1, 2)) / norm(before) ** 2) >= -1e-9


def test_a_step_twice_as_long_does_expand():
    """The test above can fail: beyond 2/smoothness distances grow."""
    v, u = jnp.ones((1, 1)), jnp.zeros((1, 1))
    step = jax.jit(block_step)
    one, two = (step(jnp.full((1, 1), t), v, u, jnp.ones(1, bool), 1e6, 4.0) for t in (0.0, 1.0))
    assert float(jnp.abs(one - two)[0, 0]) > 2


SUM = jax.jit(clipped_sum, static_argnums=4)
ROWS = [
    ([1e3, -1e3], [1e3, 1e3, 1e3]),
    ([1e-3, 0.0], [1e4, 0.0, 0.0]),
    ([np.nan, 1.0], [1.0, 1.0, 1.0]),
    ([1e30, 1e30], [1e30, 1.0, 1.0]),
    ([np.inf, 1.0], [0.0, 0.0, 0.0]),
]


def test_no_record_moves_the_sum_by_more_than_the_clip_norm():
    for residual, v in ROWS:
        rng = np.random.default_rng(5)
        r, x = rng.normal(size=(6, 2)), rng.normal(size=(6, 3))
        r[0], x[0] = residual, v
        with_it, without = (SUM(*float32(r, x), np.arange(6) >= first, 0.7) for first in (0, 1))
        moved = np.linalg.norm(np.float64(with_it) - np.float64(without))
        assert moved <= 0.7, residual
        if np.isfinite(residual).all() and np.abs(residual).max() < 1e20:
            assert moved > 0.7 * (1 - 1.01 * MARGIN), residual


@jax.jit
def _added(residuals, v, l2_clip_norm):
    mask = jnp.ones(len(residuals), bool)
    return [clipped_sum(residuals, v, mask, l2_clip_norm, convex) for convex in (True, False)]


def norms_of(residuals, v, l2_clip_norm):
    """Of what one record adds, clipped so that the block stays convex, or by its own norm."""
    parts = (jnp.asarray(part, jnp.float32)[None] for part in (residuals, v))
    return [np.linalg.norm(np.float64(total)) for total in _added(*parts, np.float32(l2_clip_norm))]


BEYOND_FLOAT32 = [
    (np.full(256, 0.9e-19), np.full(4, 4.9e9), 1e-10),  # the residual's squares are zero
    (np.full(4, 1e18), np.full(784, 0.9e-19), 0.05),  # the input's are
    (np.full(4, 1e37), np.full(784, 1e-36), 0.05),
    (np.full(4, 1e20), np.full(4, 1e-10), 1e9),  # the residual's are infinite
]


def test_no_record_adds_more_than_the_clip_norm_or_falls_out():
    for residual, v, clip in BEYOND_FLOAT32:
        # One that is dropped where its neighbours are shortened would make a hidden step expand.
        for added in norms_of(residual, v, clip):
            assert 0.99 * clip < added <= clip, (residual[0], v[0])
    # Positions of tiny inputs.
    for added in norms_of(np.full(9 * 2, 1e18), np.full((9, 4), 0.9e-19), 0.05):
        assert 0 < added <= 0.05


@pytest.mark.parametrize("convex", [False, True])
def test_a_convolution_is_clipped_over_all_positions_together(convex):
    v, r = normal(1, 9, 4, 18), normal(2, 9, 16)
    r = r.at[0].multiply(1e6).at[1].set(jnp.nan).at[2].multiply(1e-6)
    grads = np.einsum("mtp,mtq->mpq", r.reshape(9, 4, 4), v)
    total = lambda mask: np.asarray(SUM(r, v, mask, jnp.float32(0.5), convex))  # noqa: E731
    parts = [total(jnp.arange(9) == i) for i in range(9)]
    for i, one in enumerate(parts):
        length = np.linalg.norm(one)
        assert length <= 0.5
        if i == 1:
            assert not length
            continue
        # In the gradient's own direction; without convexity as long as the bound allows.
        assert np.sum(one * grads[i]) == pytest.approx(length * np.linalg.norm(grads[i]), rel=1e-3)
        if not convex:
            assert length == pytest.approx(min(0.5, np.linalg.norm(grads[i])), rel=3e-3)
    np.testing.assert_allclose(total(jnp.arange(9) != 3), sum(parts) - parts[3], atol=1e-5)
