"""AdaDp's local phase: when it begins, and attacks on the box whose sides differ by coordinate."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.mechanism import with_rule
from jaxdp.optimizers.adadp import Box, adadp, variance
from jaxdp.papers.adadp import adadp_as_published
from tests.compiling import AS_USERS
from tests.optimizers import attack

# Rounding depends on how loops are fused: compiled as users do.
jit = functools.partial(jax.jit, compiler_options=AS_USERS)
LOT = 64
BOX = Box(4.0, LOT, beta=1.2, threshold=1e-6, floor=0.1, cap=1.0)


def roots(size, *sizes):
    """E′ of a mean over ``size`` examples whose own gradients have these sizes."""
    return jnp.square(jnp.float32(sizes)) / size


# When it begins ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 64, 4_096])
def test_the_threshold_is_on_the_size_of_one_examples_gradient(size):
    """Sizes 0 and 2d have variance d²: one d is just above G = 1e-6, one just below."""
    box = dataclasses.replace(BOX, batch_size=size)
    for d, local in ((1.01e-3, True), (0.99e-3, False)):
        moment = roots(size, 0.0, 2 * d)
        assert float(variance(box.sizes(moment))) == pytest.approx(d * d, rel=1e-5)
        assert bool(box.local(moment)) is local
        assert bool(jnp.all(box.sides(moment) == box.even(moment))) is not local


@pytest.mark.parametrize("size", [1, 64, 4_096])
def test_a_mean_of_more_examples_gives_the_same_sides(size):
    """Gradients that cancel: E′ of their mean is that of one over L, and the box undoes it."""
    box = dataclasses.replace(BOX, batch_size=size, floor=1e-3)
    found = box.sides(roots(size, 0.1, 0.4, 0.9, 3.0))
    np.testing.assert_allclose(found, [0.12, 0.48, 1.08, 2.0], rtol=1e-5)


def trained(mechanism, **settings):
    """Counts after each of four releases, by hand: gradients given, noise none but known."""
    algorithm = adadp(mechanism, 0.1, bound=1.0, **settings)
    params = jnp.zeros(4)
    state, found = algorithm.after_noise.init(params), []
    for grad in ([0.1] * 4, [0.1] * 4, [0.0, 0.0, 0.0, 0.3], [0.0, 0.0, 0.0, 0.3]):
        _, state = algorithm.after_noise.update(jnp.float32(grad), state, params)
        found.append(algorithm.counts_of((None, state)))
    return found


def test_a_run_counts_its_local_steps_and_remembers_the_first():
    found = trained(with_rule(jaxdp.coordinate_box(1.0), 1e-3, LOT, 256))
    assert found[2] == {"local_began": 0, "local_steps": 0}  # the third release made them differ
    assert found[3] == {"local_began": 4, "local_steps": 1}
    never = trained(with_rule(jaxdp.coordinate_box(1.0), 1e-3, LOT, 256), threshold=1e3)
    assert never[-1] == {"local_began": 0, "local_steps": 0}


def test_as_published_the_threshold_is_the_papers_on_its_own_moment():
    """E′ averages squares of one example's gradients there: nothing is scaled."""
    algorithm = adadp_as_published(1.0, LOT, 256, 0.1)
    state = algorithm.after_noise.init(jnp.zeros(2))
    zero = jnp.zeros(2)
    for d, local in ((1.01e-3, 1), (0.99e-3, 0)):
        moment = jnp.square(jnp.float32([0.0, 2 * d]))
        at = (state[0]._replace(moment=moment), *state[1:])
        _, after = algorithm.after_noise.update(zero, at, zero, leaked=zero)
        assert int(after[0].local) == local


def test_steps_of_a_network_are_those_of_a_float64_program():
    """MLP 6-5-3 for 30 steps on the same draws and noise, most of them in the local phase."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 6)).astype(np.float32), rng.integers(0, 3, 40)
    params = {
        "a": jnp.asarray(rng.normal(size=(6, 5)) / 3, jnp.float32),
        "b": jnp.asarray(rng.normal(size=(5, 3)) / 3, jnp.float32),
    }
    noise, lot, rate = 0.8, 16, 0.01

    def loss(p, example):
        logits = jnp.tanh(example[0] @ p["a"]) @ p["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, example[1])

    mechanism = with_rule(jaxdp.coordinate_box(1.0), noise, lot, 40)
    algorithm = adadp(mechanism, rate, bound=2.0)
    step = algorithm.step(loss)

    @jax.jit
    def one(params, state, mask, key, t):
        context = step.clipped_by(state)
        summed, _ = step.grad_fn(params, (jnp.asarray(x), jnp.asarray(y)), mask, **context)
        key = mechanism.simulated_key(key, t)
        nothing = dataclasses.replace(summed, value=jax.tree.map(jnp.zeros_like, summed.value))
        added, _ = step.noise.update(nothing, state[0], params, key=key)
        return *step.release(params, state, summed, key)[:2], added, context["scale"]

    state, size, local = step.init(params), 45, 0
    p = {k: np.asarray(v, np.float64) for k, v in params.items()}
    even, unit = 2.0 / math.sqrt(size), 1.2 * math.sqrt(lot)
    std = noise * math.sqrt(size) / lot * (1 + 0.0132 + 24 * 2.0**-24 * (2 * lot + 1_024))
    moment = {k: np.full(v.shape, (even / unit) ** 2) for k, v in p.items()}
    mean_square = {k: np.zeros(v.shape) for k, v in p.items()}
    for t in range(30):
        mask = rng.random(40) < lot / 40
        key = jax.random.fold_in(jax.random.key(5), t)
        params, state, added, scale = one(params, state, jnp.asarray(mask), key, t)
        sizes = {k: np.sqrt(lot * np.maximum(m, 0)) for k, m in moment.items()}
        is_local = np.var(np.concatenate([s.ravel() for s in sizes.values()])) > 1e-6
        local += is_local
        z = {k: np.asarray(added[k], np.float64) / (std * np.asarray(scale[k])) for k in p}
        grads = dict.fromkeys(p, 0.0)
        sides = {
            k: np.clip(1.2 * s, 0.1 * even, even) if is_local else np.full(s.shape, even)
            for k, s in sizes.items()
        }
        for example, label in zip(x[mask].astype(np.float64), y[mask], strict=True):
            hidden = np.tanh(example @ p["a"])
            raw = np.exp(hidden @ p["b"])
            down = raw / raw.sum() - np.eye(3)[label]
            of_one = {
                "a": np.outer(example, (p["b"] @ down) * (1 - hidden**2)),
                "b": np.outer(hidden, down),
            }
            grads = {k: grads[k] + np.clip(of_one[k], -sides[k], sides[k]) for k in p}
        for k in p:
            g = grads[k] / lot + std * sides[k] * z[k]
            moment[k] = 0.9 * moment[k] + 0.1 * (g**2 - (std * sides[k]) ** 2)
            mean_square[k] = 0.9 * mean_square[k] + 0.1 * g**2
            p[k] = p[k] - rate * g / np.sqrt(mean_square[k] + 1e-8)
    for k in p:
        np.testing.assert_allclose(params[k], p[k], atol=3e-4)
    assert int(state[1][0].local) == local == 29
    assert int(state[1][0].began) == 2


# What one record adds, in units of noise -------------------------------------------------------

SHAPES = {"w": (40, 7), "v": (31,)}
SIZE = 40 * 7 + 31


def unlike_sides(seed=0):
    """Sides from floor to cap, and between, of a moment as noise leaves it; partly negative."""
    rng = np.random.default_rng(seed)
    moment = {
        k: jnp.asarray(rng.choice([-1.0, 1e-12, 3e-4, 2e-3, 1e2], s) * rng.random(s), jnp.float32)
        for k, s in SHAPES.items()
    }
    sides = BOX.sides(moment)
    even = BOX.even(moment)
    flat = np.concatenate([np.ravel(s) for s in sides.values()]) / even
    assert flat.min() == pytest.approx(0.1)
    assert flat.max() == pytest.approx(1.0)
    assert np.mean((flat > 0.11) & (flat < 0.99)) > 0.1
    return sides


def outer(p, example):
    """Its gradient in w is the outer product of two vectors of the example, in v a third."""
    return example["a"] @ p["w"] @ example["b"] + jnp.vdot(p["v"], example["c"])


def table(p, example):
    """Its gradient in every parameter is the example's own array: any gradient can be had."""
    return jnp.vdot(p["w"], example["w"]) + jnp.vdot(p["v"], example["c"])


def batches(loss, rows, seed):
    rng = np.random.default_rng(seed)
    made = {
        "a": rng.normal(size=(rows, 40)),
        "b": rng.normal(size=(rows, 7)),
        "w": rng.normal(size=(rows, 40, 7)),
        "c": rng.normal(size=(rows, 31)),
    }
    names = ("a", "b", "c") if loss is outer else ("w", "c")
    return {k: made[k].astype(np.float32) * 0.1 for k in names}


def adversaries(sides):
    """Gradients of one record for ``table``, by name."""
    s = {k: np.asarray(v) for k, v in sides.items()}
    signs = {
        k: np.where(np.indices(v.shape).sum(0) % 2, -1, 1).astype(np.float32) for k, v in s.items()
    }
    whole = lambda make: {k: np.asarray(make(v), np.float32) for k, v in s.items()}  # noqa: E731
    one = whole(np.zeros_like)
    one["w"].flat[np.argmin(s["w"])] = 1e30
    mixed = whole(lambda v: 1e-42 * np.ones_like(v))
    mixed["v"][:] = 3e18
    return {
        "huge": whole(lambda v: np.full_like(v, 1e18)),
        "at the sides": s,
        "just above": whole(lambda v: np.nextafter(v, np.float32(np.inf))),
        "just below": whole(lambda v: np.nextafter(v, np.float32(0))),
        "minus the sides": whole(lambda v: -v),
        "signs": {k: 2 * v * signs[k] for k, v in s.items()},
        "one coordinate, at the floor": one,
        "denormal": whole(lambda v: np.full_like(v, 1e-42)),
        "denormal and huge": mixed,
        "too long": whole(lambda v: np.full_like(v, 3e38)),
        "nan": whole(lambda v: np.full_like(v, np.nan)),
        "inf": whole(lambda v: np.full_like(v, np.inf)),
        "one nan": {**s, "v": np.where(np.arange(31) == 3, np.float32(np.nan), s["v"])},
        "one inf": {**s, "v": np.where(np.arange(31) == 3, np.float32(-np.inf), s["v"])},
    }


MECHANISM = with_rule(jaxdp.coordinate_box(1.0), 1.0, LOT, 256)
ZEROS = {k: jnp.zeros(s) for k, s in SHAPES.items()}


def summer(loss):
    grad_fn = MECHANISM.clipped_grad(loss)

    @jit
    def total(batch, mask, scale):
        return grad_fn(ZEROS, batch, mask, scale=scale)[0].value

    def flat(batch, mask, scale):
        found = total(batch, jnp.asarray(mask), scale)
        return np.concatenate([np.ravel(np.asarray(found[k], np.float64)) for k in SHAPES])

    return flat


@functools.cache
def table_sum():
    return summer(table)


@pytest.mark.parametrize("name", adversaries(unlike_sides()))
def test_no_record_moves_the_sum_by_more_than_the_noise_is_measured_in(name):
    """In units of the sides a record adds at most 1 to each coordinate, so √m; with rounding l2."""
    sides, rows = unlike_sides(), 70
    record, batch = adversaries(sides)[name], batches(table, rows, 1)
    l2 = MECHANISM.l2(ZEROS)
    for place in (0, 35, rows - 1):
        for key, name_of in (("w", "w"), ("v", "c")):
            batch[name_of][place] = record[key]
        alone = table_sum()(batch, np.arange(rows) == place, sides)
        assert np.max(np.abs(alone)) <= 1.0
        assert np.linalg.norm(alone) <= math.sqrt(SIZE)
        with_it = table_sum()(batch, np.ones(rows, bool), sides)
        without = table_sum()(batch, np.arange(rows) != place, sides)
        assert np.linalg.norm(with_it - without) <= l2
        assert np.all(np.isfinite(with_it))
        if name in ("nan", "inf", "one nan", "one inf", "too long"):
            np.testing.assert_array_equal(with_it, without)
        batch = batches(table, rows, 1)
    if name in ("at the sides", "just above", "minus the sides", "signs", "huge"):
        assert np.linalg.norm(alone) == pytest.approx(math.sqrt(SIZE), rel=1e-6)  # it does try


# Of 1,000 rows a CPU clips one by one.
@pytest.mark.parametrize(("size", "rows"), [(1e-30, 70), (1e-3, 70), (1e15, 70), (1e15, 1_000)])
def test_outer_products_stay_within_the_sides_too(size, rows):
    """The engine that never forms a whole batch's gradients, of rows of every magnitude."""
    sides, total = unlike_sides(2), summer(outer)
    batch = batches(outer, rows, 3)
    for key in ("a", "b", "c"):
        batch[key][4] *= np.float32(math.sqrt(size) if key != "c" else size) * 100
    alone = total(batch, np.arange(rows) == 4, sides)
    assert np.max(np.abs(alone)) <= 1.0
    moved = total(batch, np.ones(rows, bool), sides) - total(batch, np.arange(rows) != 4, sides)
    assert np.linalg.norm(moved) <= MECHANISM.l2(ZEROS)


@pytest.mark.parametrize("count", [70, 700])
def test_others_that_all_round_alike_move_no_further(count):
    """Thirds of a side, whose sums round the same way in every coordinate."""
    sides = unlike_sides(4)
    third = {k: np.asarray(v) / np.float32(3) for k, v in sides.items()}
    batch = {"w": np.tile(third["w"], (count, 1, 1)), "c": np.tile(third["v"], (count, 1))}
    for place in (0, count // 2, count - 1):
        batch["w"][place], batch["c"][place] = (-1e20 * np.asarray(sides[k]) for k in SHAPES)
        moved = table_sum()(batch, np.ones(count, bool), sides)
        moved = moved - table_sum()(batch, np.arange(count) != place, sides)
        assert np.linalg.norm(moved) <= MECHANISM.l2(ZEROS)


# Its noise -------------------------------------------------------------------------------------


def test_every_coordinate_gets_the_noise_of_its_own_side():
    """σ_i = σ √m s_i, so that Σ (s_i / σ_i)² = 1/σ²: Lemma 1, with equality but for the margin."""
    sigma, draws = 1.7, 4_000
    mechanism = with_rule(jaxdp.coordinate_box(1.0), sigma, LOT, 256)
    sides = unlike_sides(5)
    step = adadp(mechanism, 0.1).step(table)
    begun = mechanism.privatize().init(ZEROS)
    summed = jaxdp.Summed(ZEROS, mechanism.l2(ZEROS), sides)

    @jax.jit
    def noises(keys):
        def one(key):
            found, _ = step.noise.update(summed, begun, ZEROS, key=mechanism.simulated_key(key))
            return jnp.concatenate([jnp.ravel(found[k]) for k in SHAPES])

        return jax.lax.map(one, keys)

    found = np.asarray(noises(jax.random.split(jax.random.key(8), draws)), np.float64) * LOT
    flat = np.concatenate([np.ravel(sides[k]) for k in SHAPES]).astype(np.float64)
    wanted = sigma * math.sqrt(SIZE) * flat
    ratio = found.std(0) / wanted
    assert np.max(np.abs(ratio - ratio.mean())) < 5 / math.sqrt(2 * draws)
    assert 1.0 < ratio.mean() < 1.03  # the margin for rounding, E
    units = found / found.std(0)
    between = units.T @ units / draws - np.eye(SIZE)
    assert np.max(np.abs(between)) < 6 / math.sqrt(draws)
    exact = float(mechanism.noise_std(ZEROS)) * LOT * flat
    assert np.sum((flat / exact) ** 2) <= 1 / sigma**2


# What the sides follow -------------------------------------------------------------------------


def test_neighbours_with_equal_releases_have_equal_sides_and_parameters():
    """A noise that ends in the same release whatever the data: nothing else may tell them apart."""
    mechanism = with_rule(jaxdp.coordinate_box(1.0), 1.0, 4, 8)
    algorithm = adadp(mechanism, 0.1, bound=1.0)
    shown = jnp.asarray(np.random.default_rng(6).normal(size=(12, 3)) * 0.4, jnp.float32)

    def update(summed, state, params=None, *, key=None, **extra):
        return {"w": shown[state]}, state + 1

    fixed = optax.GradientTransformationExtraArgs(lambda params: jnp.int32(0), update)
    step = dataclasses.replace(algorithm, noise=fixed).step(attack.loss_fn)

    @jax.jit
    def one(params, state, batch, t):
        scale = step.clipped_by(state)["scale"]
        summed, _ = step.grad_fn(params, batch, jnp.ones(5, bool), scale=scale)
        key = mechanism.simulated_key(jax.random.key(0), t)
        noisy, noise = step.noise.update(summed, state[0], params, key=key)
        updates, after = step.after.update(noisy, state[1], params)
        return optax.apply_updates(params, updates), (noise, after), scale

    found = []
    for record in (attack.RECORD, 1e6 * attack.RECORD, jnp.zeros((1, 3))):
        batch = jnp.concatenate([attack.OTHERS, record])
        params, state, seen = {"w": jnp.full(3, 0.1)}, step.init({"w": jnp.full(3, 0.1)}), []
        for t in range(12):
            params, state, scale = one(params, state, batch, t)
            seen.append((scale["w"], params["w"]))
        assert algorithm.counts_of(state)["local_steps"] == 11
        found.append(np.asarray(jax.tree.leaves(seen)))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def in_the_local_phase(noise):
    """AdaDp begun with sides at the cap, between, and at the floor, and that hold on to them."""
    mechanism = with_rule(jaxdp.coordinate_box(1.0), noise, 5, 5, "full_batch")
    algorithm = adadp(mechanism, 0.1, bound=1.0, moment_decay=0.99)
    init = algorithm.after_noise.init

    def begun(params):
        state = init(params)
        moment = {"w": jnp.float32([10.0, 0.02, -10.0])}
        return (state[0]._replace(moment=moment), *state[1:])

    after = optax.GradientTransformationExtraArgs(begun, algorithm.after_noise.update)
    return dataclasses.replace(algorithm, after_noise=after)


def test_the_attacks_of_membership_hold_in_the_local_phase_and_fall_with_half_the_noise():
    steps = 4
    event = in_the_local_phase(2.0).mechanism.total(steps)
    shown = attack.runs(in_the_local_phase(2.0), steps=steps, count=4_000)
    # The first two of what is shown: the step at which the phase began, and how many were local.
    for part in shown:
        np.testing.assert_array_equal(part[:, :steps], 1)
        np.testing.assert_array_equal(part[:, steps : 2 * steps], np.tile(range(1, 5), (4_000, 1)))
    assert attack.broken(*shown, event, steps) is None
    half = attack.runs(in_the_local_phase(1.0), steps=steps, count=4_000)
    assert attack.broken(*half, event, steps)
