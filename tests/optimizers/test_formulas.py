"""Two steps of every adaptive algorithm against its formulas, written down again in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.optimizers import adaptive, pigdo
from jaxdp.optimizers.adadp import Box, scale_by_adadp, variance

B1, B2, EPS, FLOOR = 0.9, 0.8, 1e-3, 0.5
# In the first two coordinates the noise's variance is more than is seen, so that the floor holds.
GRADS = np.array([[0.05, 0.3, 2.0, -1.0], [0.1, -0.2, -1.5, 0.7]], np.float32)
STDS = np.array([0.4, 0.3, 0.1], np.float32)
SCALE = np.array([0.5, 1.0, 2.0, 1.5], np.float32)


def expected(kind, scale=1.0):
    """The directions of the steps (Tang et al. 2023, arXiv:2312.14334, Algorithm 1)."""
    m, v, n = np.zeros(4), np.zeros(4), np.zeros(4)
    found = []
    for t, (g, s) in enumerate(zip(GRADS.astype(float), STDS, strict=False), 1):
        noise = (s * scale) ** 2
        keep, take = (1.0, 1.0) if kind == "adagrad" else (B2, 1 - B2)
        v, n = keep * v + take * (g**2 - noise), keep * n + take * noise
        m = B1 * m + (1 - B1) * g
        bias = 1 - B2**t if kind == "adam" else 1.0
        direction = m / (1 - B1**t) if kind == "adam" else g
        found.append(direction / (np.sqrt(np.maximum(v / bias, FLOOR * n / bias)) + EPS))
    return found


MOMENTS = {
    "adam": lambda: adaptive.adam_moments(B1, B2, EPS, FLOOR),
    "rmsprop": lambda: adaptive.rmsprop_moments(B2, EPS, FLOOR),
    "adagrad": lambda: adaptive.adagrad_moments(EPS, FLOOR),
}


@pytest.mark.parametrize("kind", MOMENTS)
@pytest.mark.parametrize("scaled", [False, True])
def test_two_steps_are_those_of_the_formulas(kind, scaled):
    tx = adaptive.scale_by_moments(
        MOMENTS[kind](),
        lambda params, step: jnp.asarray(STDS)[step],
        (lambda state: jnp.asarray(SCALE)) if scaled else None,
    )
    params = jnp.zeros(4)
    state, found = tx.init(params), []
    for g in GRADS:
        out, state = tx.update(jnp.asarray(g), state, params)
        found.append(out)
    np.testing.assert_allclose(found, expected(kind, SCALE if scaled else 1.0), rtol=2e-5)
    assert int(state.step) == 2


BOUND, BETA, GAMMA, KEEP, RATE_EPS = 4.0, 1.2, 0.1, 0.9, 1e-2


def test_two_steps_of_adadp_are_those_of_the_formulas_with_sides_between_floor_and_cap():
    mechanism = jaxdp.mechanism.with_rule(jaxdp.coordinate_box(1.0), 0.5, 16, 64)
    box = Box(BOUND, 16, BETA, threshold=1e-6, floor=0.2, cap=0.6)
    tx = scale_by_adadp(mechanism, box, GAMMA, KEEP, RATE_EPS)
    params, size = {"a": jnp.zeros(3), "b": jnp.zeros(1)}, 4
    even = BOUND / np.sqrt(size)
    moment = np.full(size, (even / (BETA * np.sqrt(16))) ** 2)
    rate, std = np.zeros(size), float(mechanism.noise_std(params))
    sides, state = np.full(size, even), tx.init(params)
    for g in np.array([[0.01, 0.4, 3.0, -1.0], [0.02, -0.3, -2.0, 0.5], [0.0, 0.2, 2.0, 0.4]]):
        found = box.sides(state.moment)
        np.testing.assert_allclose(np.r_[found["a"], found["b"]], sides, rtol=1e-5)
        grads = {"a": jnp.asarray(g[:3], jnp.float32), "b": jnp.asarray(g[3:], jnp.float32)}
        out, state = tx.update(grads, state, params)
        moment = KEEP * moment + (1 - KEEP) * (g**2 - (std * sides) ** 2)
        rate = (1 - GAMMA) * rate + GAMMA * g**2
        np.testing.assert_allclose(
            np.r_[out["a"], out["b"]], g / np.sqrt(rate + RATE_EPS), rtol=1e-4, atol=1e-7
        )
        np.testing.assert_allclose(
            np.r_[state.moment["a"], state.moment["b"]], moment, rtol=1e-4, atol=1e-6
        )
        wanted = BETA * np.sqrt(16) * np.sqrt(np.maximum(moment, 0.0))
        sides = np.clip(wanted, 0.2 * even, 0.6 * even)
    # Sides stay between floor and cap, and begin even.
    box = Box(BOUND, 16, BETA, threshold=1e-6, floor=0.2, cap=0.6)
    even, unit = BOUND / 2.0, 1.0 / (BETA * np.sqrt(16))
    moment = jnp.asarray([-1.0, (0.1 * unit) ** 2, (0.8 * unit) ** 2, (9.0 * unit) ** 2])
    np.testing.assert_allclose(box.sides(moment), [0.4, 0.4, 0.8, 1.2], rtol=1e-5)
    np.testing.assert_allclose(box.sides(jnp.full(4, 0.3)), even, rtol=1e-6)
    np.testing.assert_allclose(box.sides(box.first_moment(jnp.zeros(4))), even, rtol=1e-6)
    assert float(variance([jnp.asarray([1.0, 2.0]), jnp.asarray([6.0])])) == pytest.approx(
        np.var([1.0, 2.0, 6.0])
    )


def test_pigdos_divisor_is_of_mean_square_one_and_held_to_its_spread():
    moments = adaptive.rmsprop_moments(B2, EPS, FLOOR)
    diagonal = pigdo.Preconditioner(moments, spread=1.5)
    state = moments.init({"a": jnp.zeros(3), "b": jnp.zeros(2)})
    jax.tree.map(lambda d: np.testing.assert_array_equal(d, 1.0), diagonal(state))
    squares = {"a": jnp.asarray([0.01, 1.0, 1.44]), "b": jnp.asarray([1.0, 9.0])}
    state = moments.take_in(state, jax.tree.map(jnp.sqrt, squares), moments.init(squares).nu)
    roots = np.sqrt((1 - B2) * np.array([0.01, 1.0, 1.44, 1.0, 9.0])) + EPS
    wanted = np.clip(roots / np.sqrt(np.mean(roots**2)), 1 / 1.5, 1.5)
    found = diagonal(state)
    np.testing.assert_allclose(np.r_[found["a"], found["b"]], wanted, rtol=1e-5)
    assert wanted[0] == 1 / 1.5
    assert wanted[-1] == 1.5
    assert 1 / 1.5 < wanted[2] < 1.5
