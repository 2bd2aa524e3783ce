"""The closed forms against brute force, the clipped block step by search, projections."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdp
from jaxdp import accounting as acc
from jaxdp.audit import audit_event, two_worlds
from jaxdp.clipping.rounding import MARGIN
from jaxdp.papers import block_coordinate as bc
from jaxdp.papers.block_coordinate import audit, forms, proximal, released
from jaxdp.papers.block_coordinate import sweep as sweeping
from jaxdp.papers.block_coordinate.network import Patches
from jaxdp.papers.block_coordinate.sweep import clipped_sum
from tests.compiling import compilations
from tests.laws import are_uncorrelated, is_gaussian
from tests.refusing import refused

GRID = np.linspace(-12, 12, 40_001)
PATCHES = Patches((6, 6, 2), 3, 2, 4)
CONV = bc.Network((72, PATCHES.outputs, 3), 1.5, patches=PATCHES)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def float32(*arrays):
    return [np.asarray(t, np.float32) for t in arrays]


def relu(x):
    return np.maximum(x, 0)


def excess(objective, found):
    """How far the objective is above its minimum on the grid."""
    return float(objective(np.float64(found)) - objective(GRID).min())


def test_splitting_variables_minimise_their_objectives_and_the_convolution_is_that_of_lax():
    rng = np.random.default_rng(0)
    v, product, ratio = 2 * rng.normal(size=300), 2 * rng.normal(size=300), rng.uniform(0.2, 4, 300)
    found = jax.jit(jax.vmap(forms.hidden_u))(*float32(v, product, ratio))
    for a, b, g, u in zip(v, product, ratio, found, strict=True):
        cost = lambda t, a=a, b=b, g=g: 0.5 * (relu(t) - a) ** 2 + 0.5 * g * (t - b) ** 2  # noqa: E731
        assert excess(cost, u) < 1e-6
    rng = np.random.default_rng(1)
    a, b, gamma = 2 * rng.normal(size=50), 2 * rng.normal(size=50), rng.uniform(0.2, 4, 50)
    one, two, three = float32(a, b, gamma)
    middles, outputs = forms.last_u(one, two), forms.last_v(one, two, three)
    for x, y, g, u, v in zip(a, b, gamma, middles, outputs, strict=True):
        assert excess(lambda t, x=x, y=y: (t - x) ** 2 + (t - y) ** 2, u) < 1e-6
        cost = lambda t, x=x, y=y, g=g: 0.5 * (t - x) ** 2 + 0.5 * g * (t - y) ** 2  # noqa: E731
        assert excess(cost, v) < 1e-6

    # The hidden v, by both branches (plain and Woodbury), is the exact answer.
    for rows, columns in ((5, 1), (4, 4), (7, 4), (3, 6)):
        w, u, u_next = (rng.normal(size=shape) for shape in ((rows, columns), columns, rows))
        one, *args = float32(w, u, u_next)
        v = np.float64(forms.hidden_v(one, forms.ridge_factor(one), *args))
        exact = np.linalg.solve(np.eye(columns) + w.T @ w, relu(u) + w.T @ u_next)
        np.testing.assert_allclose(v, exact, rtol=1e-4, atol=1e-5)
    # The last u of cross-entropy is stationary.
    y = forms.one_hot(jnp.array([0.1, 0.7, 0.2]))
    np.testing.assert_array_equal(y, [0, 1, 0])
    product = 3 * normal(6, 3)
    for gamma in (0.5, 1.0, 4.0):
        u = forms.softmax_u(y, product, gamma)
        slope = jax.nn.softmax(u) - y + gamma * (u - product)
        np.testing.assert_allclose(slope, np.zeros(3), atol=1e-3)
    # The convolution is that of lax.
    x, (w, *_) = normal(0, 72) / 9, CONV.init(jax.random.key(1))
    product = CONV.forward((w,), x)[1][0]
    kernel = w.reshape(4, 3, 3, 2).transpose(1, 2, 3, 0)
    wanted = jax.lax.conv_general_dilated(
        x.reshape(1, 6, 6, 2), kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    assert float(forms.length(PATCHES.extract(x))) < 1.5
    np.testing.assert_allclose(product, np.ravel(wanted), atol=1e-5)


def test_clip_to_ball_and_length():
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
    # Length is between the spectral and the Frobenius norm.
    for seed in range(20):
        v = normal(seed, 7, 5) * 10.0 ** (seed - 10)
        spectral, frobenius = np.linalg.norm(v, 2), np.linalg.norm(v)
        assert spectral * (1 - 1e-5) <= float(forms.length(v)) <= frobenius * (1 + 1e-5)
    assert float(forms.length(jnp.ones(4))) == pytest.approx(2.0)
    assert not np.any(forms.clip_to_ball(jnp.full((3, 2), jnp.nan), 1.0))


# Clipped steps and sums
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
    # The test can fail: beyond 2/smoothness distances grow.
    v, u = jnp.ones((1, 1)), jnp.zeros((1, 1))
    step = jax.jit(block_step)
    one, two = (step(jnp.full((1, 1), t), v, u, jnp.ones(1, bool), 1e6, 4.0) for t in (0.0, 1.0))
    assert float(jnp.abs(one - two)[0, 0]) > 2


SUM = jax.jit(clipped_sum, static_argnums=4)
EXTREME = [
    ([1e3, -1e3], [1e3, 1e3, 1e3]), ([1e-3, 0.0], [1e4, 0.0, 0.0]),
    ([np.nan, 1.0], [1.0, 1.0, 1.0]), ([1e30, 1e30], [1e30, 1.0, 1.0]),
    ([np.inf, 1.0], [0.0, 0.0, 0.0]),
]  # fmt: skip


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
    # Among others.
    for residual, v in EXTREME:
        rng = np.random.default_rng(5)
        r, x = rng.normal(size=(6, 2)), rng.normal(size=(6, 3))
        r[0], x[0] = residual, v
        with_it, without = (SUM(*float32(r, x), np.arange(6) >= first, 0.7) for first in (0, 1))
        moved = np.linalg.norm(np.float64(with_it) - np.float64(without))
        assert moved <= 0.7, residual
        if np.isfinite(residual).all() and np.abs(residual).max() < 1e20:
            assert moved > 0.7 * (1 - 1.01 * MARGIN), residual


def test_a_convolution_is_clipped_over_all_positions_together():
    v, r = normal(1, 9, 4, 18), normal(2, 9, 16)
    r = r.at[0].multiply(1e6).at[1].set(jnp.nan).at[2].multiply(1e-6)
    grads = np.einsum("mtp,mtq->mpq", r.reshape(9, 4, 4), v)
    norms = np.linalg.norm(grads, axis=(1, 2))
    for convex in (False, True):
        total = lambda mask, convex=convex: np.asarray(SUM(r, v, mask, np.float32(0.5), convex))  # noqa: E731
        parts = [total(jnp.arange(9) == i) for i in range(9)]
        for i, one in enumerate(parts):
            length = np.linalg.norm(one)
            assert length <= 0.5
            if i == 1:
                assert not length
                continue
            # In the gradient's own direction; without convexity as long as the bound allows.
            assert np.sum(one * grads[i]) == pytest.approx(length * norms[i], rel=1e-3)
            assert convex or length == pytest.approx(min(0.5, norms[i]), rel=3e-3)
        np.testing.assert_allclose(total(jnp.arange(9) != 3), sum(parts) - parts[3], atol=1e-5)


# Projection and rescaling: which of them a hidden chain may use
def pairs(shape, count=200, seed=0):
    keys = jax.random.split(jax.random.key(seed), 2 * count)
    draw = jax.jit(jax.vmap(lambda k: 2 * jax.random.normal(k, shape)))(keys)
    return draw[:count], draw[count:]


def stretch(function, a, b):
    norm = lambda t: np.sqrt(np.sum(np.square(t, dtype=np.float64), axis=(1, 2)))  # noqa: E731
    apply = jax.jit(jax.vmap(function))
    return float(np.max(norm(apply(a) - apply(b)) / norm(a - b)))


def test_clipping_singular_values_is_the_projection_and_rescaling_expands_as_documented():
    project = jax.jit(lambda w: proximal.clip_singular_values(w, 1.0))
    for shape in ((6, 4), (3, 7), (5, 5)):
        a, b = pairs(shape)
        assert stretch(project, a, b) <= 1 + 1e-5
        inside = project(a[0])
        assert np.linalg.norm(inside, 2) <= 1 + 1e-5
        np.testing.assert_allclose(project(inside), inside, atol=1e-5)
        # Nearer than any other matrix of the ball.
        others = np.asarray(jax.vmap(project)(b))
        distances = np.sqrt(np.sum((np.asarray(a[0]) - others) ** 2, axis=(1, 2)))
        assert np.linalg.norm(a[0] - inside) <= np.min(distances) + 1e-5
    # Rescaling, by a norm from below.
    one = jnp.eye(100)
    two = one.at[0, 0].add(1e-3)
    exact = lambda w: w * jnp.minimum(1.0, 1.0 / jnp.linalg.norm(w, 2))  # noqa: E731
    ratio = jnp.linalg.norm(exact(one) - exact(two)) / jnp.linalg.norm(one - two)
    assert float(ratio) == pytest.approx(9.94, abs=0.05)
    assert stretch(lambda w: proximal.clip_singular_values(w, 1.0), one[None], two[None]) <= 1
    # Power iteration never exceeds the norm and comes close.
    ws = pairs((8, 6))[0]
    keys = jax.random.split(jax.random.key(3), len(ws))
    for iterations, close in ((1, 0.4), (30, 0.9)):
        run = jax.jit(jax.vmap(lambda w, k, n=iterations: proximal.power_iteration(w, k, n)))
        ratio = np.asarray(run(ws, keys)) / np.linalg.norm(ws, 2, axis=(1, 2))
        assert np.max(ratio) <= 1 + 1e-5
        assert np.min(ratio) > close
    small = jnp.eye(3) * 0.1
    np.testing.assert_array_equal(bc.Rescale(1.0)(small, jax.random.key(0)), small)


def test_proximal_steps_contract_as_the_accountant_is_told():
    a, b = pairs((5, 4), seed=1)
    for numbers in ((), (2.0,), (0.0, 0.3), (0.0, 0.0, 0.7), (1.0, 0.2, 0.7)):
        proximal = bc.Proximal(*numbers)
        step = lambda w, proximal=proximal: proximal(w, 0.5)  # noqa: E731
        assert stretch(step, a, b) <= (1 + 1e-5) / (1 + 0.5 * proximal.weight_decay), numbers
        if (reach := proximal.diameter((5, 4))) is not None:
            far = np.asarray(jax.vmap(step)(100 * a) - jax.vmap(step)(-100 * a))
            gap = np.max(np.linalg.norm(far, axis=(1, 2)))
            assert 0.5 * reach / (1 + 0.5 * proximal.weight_decay) < gap <= reach, numbers


@given(st.floats(1e-9, 10.0), st.floats(1e-3, 10.0))
def test_the_accountant_counts_on_no_more_decay_than_float32_gives(decay, step_size):
    """By division and, as a compiler may have it, by a rounded reciprocal."""
    counted = 1 / (1 + step_size * bc.Proximal(weight_decay=decay).certain_decay(step_size))
    divisor = np.float32(1 + step_size * decay)
    assert counted >= 1 / float(divisor)
    assert counted >= float(np.float32(1) / divisor)
    assert counted <= 1 / (1 + step_size * decay) * (1 + 1e-6)


def test_proximal_steps_minimise_and_count_no_decay_that_float32_cannot_show():
    w = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
    proximal = bc.Proximal(weight_decay=2e-8)
    np.testing.assert_array_equal(jax.jit(lambda w: proximal(w, 1.0))(w), w)
    assert proximal.certain_decay(1.0) == 0.0
    assert bc.Proximal(weight_decay=0.5).certain_decay(0.8) == pytest.approx(0.5, rel=1e-5)
    # argmin 1/2 (t - w)^2 + eta (lambda_1 |t| + lambda_2/2 t^2), on a grid.
    grid = np.linspace(-3, 3, 60_001)
    for w in (-2.0, -0.1, 0.05, 1.3):
        for decay, sparsity in ((0.0, 0.0), (2.0, 0.0), (0.0, 0.6), (2.0, 0.6)):
            found = bc.Proximal(decay, sparsity)(jnp.full((1, 1), w), 0.5)[0, 0]
            cost = lambda t: 0.5 * (t - w) ** 2 + 0.5 * (sparsity * abs(t) + decay / 2 * t**2)  # noqa: E731, B023
            assert float(cost(np.float64(found)) - cost(grid).min()) < 1e-6
    assert bc.constant().over(3) == (1, 1, 1)
    assert bc.linear(3.0, 1.0, 3).over(4) == (3, 2, 1, 1)
    assert bc.linear(3.0, 1.0, 3, steps_each=2).over(5) == (3, 3, 2, 2, 1)
    assert bc.step(4.0, 0.5, 2, 5).over(6) == (4, 4, 2, 2, 1, 1)


# R1: sensitivity by neighbours, noise by statistics, one draw one event, one compiled sweep
NET = bc.Network((6, 8, 3), 1.5)
SOFTMAX = bc.Network((5, 4, 3), 1.5, loss="softmax")
DEEP = bc.Network((6, 5, 7, 3), 1.5)  # both branches of the ridge solve


def data(rows, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 6))
    y = np.eye(3)[np.argmax(x[:, :3], axis=1)]
    return jnp.asarray(x / np.sqrt(6), jnp.float32), jnp.asarray(y, jnp.float32)


def algorithm(z=2.0, clip=0.3, net=NET, **options):
    return bc.ReleasedBlocks(net, z, clip, 0.5, 16, 64, **options)


lift = jax.jit(bc.Network.lift, static_argnums=(0, 1))


def sweep(m, weights, x, y, mask, z=0.0, key=0):
    clips = jnp.asarray(m.l2_clip_norms, jnp.float32)
    return released.compiled_sweep(
        m.network, m.proximal, m.rescale, m.step_size, float(m.batch_size), weights, x, y,
        jnp.asarray(mask), clips, z * clips, jax.random.key(key),
    )  # fmt: skip


def test_a_sweep_is_the_forms_in_order():
    """Against a loop over records and blocks, written from the formulas in NumPy."""
    m = algorithm(clip=0.2, net=DEEP)
    weights = DEEP.init(jax.random.key(3))
    x, y = data(5)
    new = [np.float64(w) for w in weights]
    rows = []
    for record in np.float64(x):
        vs, us = [], []
        for i, w in enumerate(new):
            v = record if i == 0 else np.maximum(us[-1], 0)
            vs.append(v * min(1, 1.5 / np.linalg.norm(v)))
            us.append(w @ vs[-1])
        rows.append((vs, us))
    targets = [None] * 5
    for i in (2, 1, 0):
        gradient = np.zeros_like(new[i])
        for n, (vs, us) in enumerate(rows):
            if i == 2:
                u = ((np.float64(y[n]) + us[2]) / 2 + us[2]) / 2
            else:
                w = new[i + 1]
                v = np.linalg.solve(
                    np.eye(len(w.T)) + w.T @ w, np.maximum(us[i], 0) + w.T @ targets[n]
                )
                v = v * min(1, 1.5 / np.linalg.norm(v))
                plus, minus = np.maximum((v + us[i]) / 2, 0), np.minimum(us[i], 0)
                cost = lambda t, v=v, b=us[i]: (np.maximum(t, 0) - v) ** 2 + (t - b) ** 2  # noqa: E731
                u = np.where(cost(plus) <= cost(minus), plus, minus)
            targets[n] = u
            r = us[i] - u
            gradient += np.outer(
                r * min(1, 0.2 / (np.linalg.norm(r) * np.linalg.norm(vs[i]))), vs[i]
            )
        new[i] = new[i] - 0.5 / 16 * gradient
    found = sweep(m, weights, x, y, np.ones(5, bool))
    for a, b in zip(found, new, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    # The splitting variables of a record are functions of it alone.
    weights = NET.init(jax.random.key(1))
    x, y = data(16)
    other_x, other_y = data(16, seed=9)
    for block in range(2):
        mine = lift(NET, block, weights, x, y)
        among_others = lift(NET, block, weights, other_x.at[2].set(x[2]), other_y.at[2].set(y[2]))
        for a, b in zip(mine, among_others, strict=True):
            np.testing.assert_array_equal(a[2], b[2])
            assert not np.array_equal(a[3], b[3])


def test_noise_has_the_stated_scale_in_every_block_and_is_never_used_twice():
    net = bc.Network((60, 50, 40), 1.0)
    m = bc.ReleasedBlocks(net, (2.0, 3.0), (0.3, 0.1), 0.5, 16, 64)
    weights = tuple(jnp.zeros(net.shape(i)) for i in range(2))
    x, y = jnp.zeros((64, 60)), jnp.zeros((64, 40))
    ledger, secret = jaxdp.Ledger(), jaxdp.Secret.new()
    samplers = [m.sampler(64, ledger=ledger, secret=secret) for _ in range(2)]
    draws = [samplers[0].draw(), samplers[0].draw(), samplers[1].draw()]
    # Before: a draw of other records was released as if the sampler had drawn them.
    nobody = [dataclasses.replace(d, mask=np.zeros_like(d.mask)) for d in draws]
    refused("draw must come from sampler", m.step, weights, (x, y), nobody[0])
    first, second, other = (
        m.step(weights, (x, y), none.carrying(d.ticket))
        for none, d in zip(nobody, draws, strict=True)
    )
    for i, std in enumerate((2.0 * 0.3, 3.0 * 0.1)):
        std *= released.noise_share(m.batch_size)
        assert is_gaussian(first[i], std * 0.5 / 16)
        assert not is_gaussian(first[i], 1.2 * std * 0.5 / 16)
    assert are_uncorrelated(first[0], second[0])
    assert are_uncorrelated(first[0], other[0])  # another sampler of the same secret
    assert are_uncorrelated(first[0].ravel()[:2000], first[1].ravel()[:2000])
    refused("ticket must be spent once", m.step, weights, (x, y), draws[0])
    by_hand = jaxdp.types.Draw(draws[0].indices, draws[0].mask, 0, 64)
    refused("draw must come from sampler", m.step, weights, (x, y), by_hand)
    assert ledger.steps == 3
    assert ledger.unverified() == []


def test_one_sweep_is_one_event_charged_before_its_draw_with_its_own_noise():
    m = algorithm(z=(2.0, 4.0))
    assert m.event() == acc.PoissonSampled(acc.events.joint_gaussian([2.0, 4.0]), 16 / 64)
    apart = acc.Composed([acc.PoissonSampled(acc.Gaussian(z), 0.25) for z in (2.0, 4.0)])
    together = acc.epsilon(acc.Repeated(m.event(), 50), 1e-5).upper
    assert together > acc.epsilon(acc.Repeated(apart, 50), 1e-5).upper
    ledger, seen = jaxdp.Ledger(), []
    m = algorithm(schedule=bc.linear(2.0, 1.0, 2, steps_each=2))

    def look(step, weights):
        seen.append((step, ledger.steps))

    bc.train(m, data(64), 3, ledger=ledger, on_step=look)
    assert ledger.unverified() == []
    assert seen == [(1, 1), (2, 2), (3, 3)]
    assert [e.event for e in ledger.entries] == [m.event(0), m.event(2)]
    assert m.event(0).event.noise_multiplier == pytest.approx(2 * 2.0 / np.sqrt(2))
    assert ledger.epsilon(1e-5).upper == pytest.approx(acc.epsilon(m.events(3), 1e-5).upper)


def test_a_run_is_a_function_of_its_secret_compiles_once_and_learns():
    m = algorithm(schedule=bc.linear(2.0, 1.0, 4))
    with compilations("_step") as programs:
        runs = [bc.train(m, data(64), 4, secret=jaxdp.Secret.from_seed(s)) for s in (1, 1, 2)]
    assert len(programs) <= 1  # none where another test compiled it
    jax.tree.map(np.testing.assert_array_equal, runs[0], runs[1])
    assert not np.array_equal(runs[0][0], runs[2][0])
    secret, ledger = jaxdp.Secret.from_seed(1), jaxdp.Ledger()
    again = [bc.train(m, data(64), 4, secret=secret, ledger=ledger) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, runs[0], again[0])
    assert not np.array_equal(again[0][0], again[1][0])
    # Larger draws are not cut.
    m = algorithm(z=0.0)
    weights, data_ = NET.init(jax.random.key(1)), data(64)
    indices, mask = np.arange(16, dtype=np.int32).reshape(2, 8), np.ones((2, 8), bool)
    draw = m.sampler(64).draw()
    larger = dataclasses.replace(draw, indices=indices, mask=mask).carrying(draw.ticket)
    both = m.step(weights, data_, larger)
    exact = sweep(m, weights, *data_, np.arange(64) < 16)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), both, exact)
    # It learns without noise, and projection keeps it Lipschitz.
    x, y = data(64)
    m = algorithm(z=0.0, clip=1.0, proximal=bc.Proximal(spectral_radius=1.0))
    weights = bc.train(m, (x, y), 150, secret=jaxdp.Secret.from_seed(0))
    assert np.mean(np.argmax(NET.apply(weights, x), 1) == np.argmax(y, 1)) > 0.7
    assert max(np.linalg.norm(w, 2) for w in weights) < 1.001


EVIL = {
    "nan": np.full(6, np.nan), "one nan": np.array([np.nan, 1, 1, 1, 1, 1]),
    "inf": np.array([np.inf, -np.inf, 1, 1, 1, 1]), "largest": np.full(6, 3e38),
    "signs": np.array([1e37, -1e37, 1e37, 1e37, -1e37, -1e37]),
    "the others": np.array([-1e37, 1e37, -1e37, -1e37, 1e37, 1e37]),
    "far apart": np.array([3e38, 1e-38, 1e-38, 0, 0, 0]), "denormal": np.full(6, 1e-40),
    "zero": np.zeros(6),
}  # fmt: skip


@pytest.mark.parametrize("loss", ["squared", "softmax"])
@pytest.mark.parametrize("grown", [1.0, 1e4])
def test_no_record_whatever_it_holds_moves_a_release_by_more_than_its_clip_norm(loss, grown):
    network = bc.Network((6, 5, 3), 1.5, loss=loss)
    weights = tuple(w * grown for w in network.init(jax.random.key(1)))
    rng = np.random.default_rng(0)
    x, y = np.float32(rng.normal(size=(16, 6))), np.eye(3, dtype=np.float32)[np.zeros(16, int)]
    x[:, 1], x[2:6] = 0, x[1]  # a column of zeros, duplicates, one class alone
    norms, stds = np.float32([0.3, 0.1]), np.full(2, 0.01, np.float32)  # the last block's is 0.1

    def moved(x, y, there):
        new = released.compiled_sweep(
            network, bc.Proximal(), None, 5.0, 4.0, weights, x, y, there, norms, stds,
            jax.random.key(3),
        )  # fmt: skip
        assert all(np.isfinite(np.asarray(w)).all() for w in new)
        return np.asarray(new[-1], np.float64)

    far = 0.0
    for record in EVIL.values():
        for wanted in ([0, 0, 1], [np.nan, 0, 0], [np.inf, 0, 0], [3e38, -3e38, 0]):
            rows, labels = x.copy(), y.copy()
            rows[7], labels[7] = record, wanted
            for others in (np.ones(16, bool), np.zeros(16, bool)):  # an empty lot
                with_it, without = others.copy(), others.copy()
                with_it[7], without[7] = True, False
                gap = moved(rows, labels, with_it) - moved(rows, labels, without)
                far = max(far, float(np.linalg.norm(gap)))
    assert 0.1 * 5 / 4 * 0.5 < far <= 0.1 * 5 / 4 + 3e-6 * grown


def test_labels_that_are_no_classes_count_as_the_largest():
    """So that no label makes a softmax gradient longer than sqrt(2) B."""
    wild = jnp.array([[1e30, -5.0, jnp.inf], [0.2, 0.2, 0.1]])
    r = SOFTMAX.residual(1, jnp.zeros((2, 3)), wild, wild)
    assert float(jnp.max(jnp.linalg.norm(r, axis=1))) <= np.sqrt(2)


R1 = bc.ReleasedBlocks(SOFTMAX, 2.5, 0.05, 1.0, 1, 4)


def scores(algorithm, count=1200):
    small = audit.tiny(algorithm)
    run = audit.released_run(small, audit._alone(small), 3)
    return small, two_worlds(run, count, seed=3)


@pytest.mark.slow
def test_the_softmax_block_in_two_worlds_and_half_its_noise(monkeypatch):
    small, (inside, outside) = scores(R1)
    assert not audit_event(inside, outside, small.events(3)).refuted
    # The attack is worth its name: the score tells the worlds apart, and catches half the noise.
    assert np.mean(inside) > np.mean(outside) + 0.2 * np.std(outside)
    added = sweeping.add_normals
    monkeypatch.setattr(sweeping, "add_normals", lambda tree, std, key: added(tree, std / 3, key))
    small, (inside, outside) = scores(R1)
    assert audit_event(inside, outside, small.events(3)).refuted


def test_an_audit_computes_the_sums_of_a_sweep_and_refuses_what_its_score_does_not_fit():
    """Without noise: what moved the weights is what ``sums_given`` says, block by block."""
    x, y = jax.random.normal(jax.random.key(8), (6, 5)) / 3, jnp.eye(3)[jnp.arange(6) % 3]
    old, clips, mask = SOFTMAX.init(jax.random.key(2)), jnp.full(2, 0.1), jnp.arange(6) < 5
    given = (SOFTMAX, bc.Proximal(), None, 0.5, 4.0, old, x, y, mask, clips, jnp.zeros(2))
    new = released.compiled_sweep(*given, jax.random.key(0))
    sums = sweeping.sums_given(SOFTMAX, old, new, x, y, mask, clips)
    for before, after, total in zip(old, new, sums, strict=True):
        np.testing.assert_allclose((before - after) * 4 / 0.5, total, atol=1e-5)
    data, other = audit._alone(audit.tiny(R1)), dataclasses.replace(R1, rescale=bc.Rescale(1.0))
    refused("must not rescale", audit.released_run, other, data, 2)
