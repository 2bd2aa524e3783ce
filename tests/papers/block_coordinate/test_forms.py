"""The closed forms against brute force, and the clipped block step by search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.clipping.rounding import MARGIN
from jaxdp.papers.block_coordinate import forms
from jaxdp.papers.block_coordinate.sweep import clipped_sum

GRID = np.linspace(-12, 12, 120_001)


def relu(x):
    return np.maximum(x, 0)


def excess(objective, found):
    """How far the objective is above its minimum on the grid."""
    return float(objective(np.float64(found)) - objective(GRID).min())


def test_hidden_u_minimises_its_objective():
    rng = np.random.default_rng(0)
    v, product, ratio = 2 * rng.normal(size=300), 2 * rng.normal(size=300), rng.uniform(0.2, 4, 300)
    found = jax.jit(jax.vmap(forms.hidden_u))(*(t.astype(np.float32) for t in (v, product, ratio)))
    for a, b, g, u in zip(v, product, ratio, found, strict=True):
        cost = lambda t, a=a, b=b, g=g: 0.5 * (relu(t) - a) ** 2 + 0.5 * g * (t - b) ** 2  # noqa: E731
        assert excess(cost, u) < 1e-6


def test_last_u_and_last_v_minimise_theirs():
    rng = np.random.default_rng(1)
    a, b, gamma = 2 * rng.normal(size=50), 2 * rng.normal(size=50), rng.uniform(0.2, 4, 50)
    one, two, three = (t.astype(np.float32) for t in (a, b, gamma))
    middles, outputs = forms.last_u(one, two), forms.last_v(one, two, three)
    for x, y, g, u, v in zip(a, b, gamma, middles, outputs, strict=True):
        assert excess(lambda t, x=x, y=y: (t - x) ** 2 + (t - y) ** 2, u) < 1e-6
        cost = lambda t, x=x, y=y, g=g: 0.5 * (t - x) ** 2 + 0.5 * g * (t - y) ** 2  # noqa: E731
        assert excess(cost, v) < 1e-6


@pytest.mark.parametrize("shape", [(1, 1), (5, 1)])
def test_hidden_v_minimises_its_objective_on_a_grid(shape):
    rng = np.random.default_rng(2)
    hidden_v = jax.jit(lambda w, u, n: forms.hidden_v(w, forms.ridge_factor(w), u, n))
    for _ in range(50):
        w, u, u_next = rng.normal(size=shape), rng.normal(size=1), rng.normal(size=shape[0])
        args = [jnp.asarray(t, jnp.float32) for t in (w, u, u_next)]
        v = hidden_v(*args)[0]

        def cost(t, w=w, u=u, u_next=u_next):
            gap = u_next[:, None] - w * np.atleast_1d(t)[None, :]
            return 0.5 * (t - relu(u)) ** 2 + 0.5 * np.sum(gap**2, axis=0)

        assert float(cost(np.float64(v)).min() - cost(GRID).min()) < 1e-6


@pytest.mark.parametrize("shape", [(4, 4), (7, 4), (3, 6)])
def test_hidden_v_in_many_dimensions(shape):
    """Both branches (plain and Woodbury) against the objective around the answer."""
    rng = np.random.default_rng(3)
    w, u, u_next = rng.normal(size=shape), rng.normal(size=shape[1]), rng.normal(size=shape[0])
    args = [jnp.asarray(t, jnp.float32) for t in (w, u, u_next)]
    v = np.float64(forms.hidden_v(args[0], forms.ridge_factor(args[0]), *args[1:]))
    exact = np.linalg.solve(np.eye(shape[1]) + w.T @ w, relu(u) + w.T @ u_next)
    np.testing.assert_allclose(v, exact, rtol=1e-4, atol=1e-5)
    cost = lambda t: np.sum((t - relu(u)) ** 2) + np.sum((u_next - w @ t) ** 2)  # noqa: E731
    around = [cost(exact + 1e-3 * rng.normal(size=v.shape)) for _ in range(100)]
    assert cost(v) - cost(exact) < 1e-6 < min(around) - cost(exact)


def test_clip_to_ball():
    near, far = jnp.asarray([0.3, 0.4]), jnp.asarray([3e3, -4e3])
    np.testing.assert_array_equal(forms.clip_to_ball(near, 1.0), near)
    assert 1 - 1.01 * MARGIN < float(jnp.linalg.norm(forms.clip_to_ball(far, 1.0))) <= 1
    for bad in (jnp.nan, jnp.inf):
        np.testing.assert_array_equal(
            forms.clip_to_ball(jnp.asarray([bad, 1.0]), 1.0), jnp.zeros(2)
        )


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
        new, new_other = (
            run(w, v, u, mask, clip, step_size),
            run(other, v, u, mask, clip, step_size),
        )
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


SUM = jax.jit(clipped_sum)
ROWS = [
    (np.array([1e3, -1e3]), np.array([1e3, 1e3, 1e3])),
    (np.array([1e-3, 0.0]), np.array([1e4, 0.0, 0.0])),
    (np.array([np.nan, 1.0]), np.array([1.0, 1.0, 1.0])),
    (np.array([1e30, 1e30]), np.array([1e30, 1.0, 1.0])),
    (np.array([np.inf, 1.0]), np.array([0.0, 0.0, 0.0])),
]


@pytest.mark.parametrize(("residual", "v"), ROWS)
def test_no_record_moves_the_sum_by_more_than_the_clip_norm(residual, v):
    rng = np.random.default_rng(5)
    r, x = rng.normal(size=(6, 2)), rng.normal(size=(6, 3))
    r[0], x[0] = residual, v
    r, x = jnp.asarray(r, jnp.float32), jnp.asarray(x, jnp.float32)
    with_it, without = (SUM(r, x, np.arange(6) >= first, 0.7) for first in (0, 1))
    moved = np.linalg.norm(np.float64(with_it) - np.float64(without))
    assert moved <= 0.7
    if np.isfinite(residual).all() and np.abs(residual).max() < 1e20:
        assert moved > 0.7 * (1 - 1.01 * MARGIN)
