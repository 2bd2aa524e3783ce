"""Projection and rescaling: which of them a hidden chain may use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdp.papers import block_coordinate as bc
from jaxdp.papers.block_coordinate import spectral


def pairs(shape, count=200, seed=0):
    keys = jax.random.split(jax.random.key(seed), 2 * count)
    draw = jax.jit(jax.vmap(lambda k: 2 * jax.random.normal(k, shape)))(keys)
    return draw[:count], draw[count:]


def expansion(function, a, b):
    norm = lambda t: np.sqrt(np.sum(np.square(t, dtype=np.float64), axis=(1, 2)))  # noqa: E731
    apply = jax.jit(jax.vmap(function))
    return float(np.max(norm(apply(a) - apply(b)) / norm(a - b)))


@pytest.mark.parametrize("shape", [(6, 4), (3, 7), (5, 5)])
def test_clipping_singular_values_is_the_projection(shape):
    a, b = pairs(shape)
    project = jax.jit(lambda w: spectral.clip_singular_values(w, 1.0))
    assert expansion(project, a, b) <= 1 + 1e-5
    inside = project(a[0])
    assert np.linalg.norm(inside, 2) <= 1 + 1e-5
    np.testing.assert_allclose(project(inside), inside, atol=1e-5)
    # Nearer than any other matrix of the ball.
    others = np.asarray(jax.vmap(project)(b))
    distances = np.sqrt(np.sum((np.asarray(a[0]) - others) ** 2, axis=(1, 2)))
    assert np.linalg.norm(a[0] - inside) <= np.min(distances) + 1e-5


def test_rescaling_expands_distances_as_documented():
    one = jnp.eye(100)
    two = one.at[0, 0].add(1e-3)
    exact = lambda w: w * jnp.minimum(1.0, 1.0 / jnp.linalg.norm(w, 2))  # noqa: E731
    ratio = jnp.linalg.norm(exact(one) - exact(two)) / jnp.linalg.norm(one - two)
    assert float(ratio) == pytest.approx(9.94, abs=0.05)
    assert expansion(lambda w: spectral.clip_singular_values(w, 1.0), one[None], two[None]) <= 1


def test_power_iteration_never_exceeds_the_norm_and_comes_close():
    ws = pairs((8, 6))[0]
    keys = jax.random.split(jax.random.key(3), len(ws))
    for iterations, close in ((1, 0.4), (30, 0.9)):
        run = jax.jit(jax.vmap(lambda w, k, n=iterations: spectral.power_iteration(w, k, n)))
        ratio = np.asarray(run(ws, keys)) / np.linalg.norm(ws, 2, axis=(1, 2))
        assert np.max(ratio) <= 1 + 1e-5
        assert np.min(ratio) > close
    small = jnp.eye(3) * 0.1
    np.testing.assert_array_equal(bc.Rescale(1.0)(small, jax.random.key(0)), small)


@pytest.mark.parametrize(
    "proximal",
    [
        bc.Proximal(), bc.Proximal(weight_decay=2.0), bc.Proximal(sparsity=0.3),
        bc.Proximal(spectral_radius=0.7), bc.Proximal(1.0, 0.2, 0.7),
    ],
)  # fmt: skip
def test_proximal_steps_contract_as_the_accountant_is_told(proximal):
    a, b = pairs((5, 4), seed=1)
    found = expansion(lambda w: proximal(w, 0.5), a, b)
    assert found <= (1 + 1e-5) / (1 + 0.5 * proximal.weight_decay)
    reach = proximal.diameter((5, 4))
    if reach is not None:
        far = jax.jit(jax.vmap(lambda w: jnp.linalg.norm(proximal(w, 0.5) - proximal(-w, 0.5))))
        gaps = far(100 * a)
        assert 0.5 * reach < float(jnp.max(gaps)) * (1 + 0.5 * proximal.weight_decay)
        assert float(jnp.max(gaps)) <= reach


@given(st.floats(1e-9, 10.0), st.floats(1e-3, 10.0))
def test_the_accountant_counts_on_no_more_decay_than_float32_gives(decay, step_size):
    """By division and, as a compiler may have it, by a rounded reciprocal."""
    counted = 1 / (1 + step_size * bc.Proximal(weight_decay=decay).certain_decay(step_size))
    divisor = np.float32(1 + step_size * decay)
    assert counted >= 1 / float(divisor)
    assert counted >= float(np.float32(1) / divisor)
    assert counted <= 1 / (1 + step_size * decay) * (1 + 1e-6)


def test_a_decay_that_float32_cannot_show_counts_for_nothing():
    w = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
    proximal = bc.Proximal(weight_decay=2e-8)
    np.testing.assert_array_equal(jax.jit(lambda w: proximal(w, 1.0))(w), w)
    assert proximal.certain_decay(1.0) == 0.0
    assert bc.Proximal(weight_decay=0.5).certain_decay(0.8) == pytest.approx(0.5, rel=1e-5)


def test_proximal_steps_minimise():
    """argmin 1/2 (t - w)^2 + eta (lambda_1 |t| + lambda_2/2 t^2), on a grid."""
    grid = np.linspace(-3, 3, 60_001)
    for w in (-2.0, -0.1, 0.05, 1.3):
        for decay, sparsity in ((0.0, 0.0), (2.0, 0.0), (0.0, 0.6), (2.0, 0.6)):
            found = bc.Proximal(decay, sparsity)(jnp.full((1, 1), w), 0.5)[0, 0]
            cost = lambda t: 0.5 * (t - w) ** 2 + 0.5 * (sparsity * abs(t) + decay / 2 * t**2)  # noqa: E731, B023
            assert float(cost(np.float64(found)) - cost(grid).min()) < 1e-6


def test_schedules():
    assert bc.constant().over(3) == (1, 1, 1)
    assert bc.linear(3.0, 1.0, 3).over(4) == (3, 2, 1, 1)
    assert bc.linear(3.0, 1.0, 3, steps_each=2).over(5) == (3, 3, 2, 2, 1)
    assert bc.step(4.0, 0.5, 2, 5).over(6) == (4, 4, 2, 2, 1, 1)
