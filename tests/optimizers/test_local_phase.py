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
from jaxdp.training.step import PrivateStep
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


SIZES = (1, 64, 4_096)


def test_the_threshold_is_on_the_size_of_one_examples_gradient_and_sides_are_of_the_mean():
    """Sizes 0 and 2d have variance d²: one d is just above G = 1e-6, one just below."""
    for size in SIZES:
        box = dataclasses.replace(BOX, batch_size=size)
        for d, local in ((1.01e-3, True), (0.99e-3, False)):
            moment = roots(size, 0.0, 2 * d)
            assert float(variance(box.sizes(moment))) == pytest.approx(d * d, rel=1e-5)
            assert bool(box.local(moment)) is local
            assert bool(jnp.all(box.sides(moment) == box.even_side(moment))) is not local
    # Gradients that cancel: E′ of their mean is that of one over L, and the box undoes it.
    for size in SIZES:
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


def test_a_run_counts_its_local_steps_and_as_published_by_the_papers_own_moment():
    found = trained(with_rule(jaxdp.coordinate_box(1.0), 1e-3, LOT, 256))
    assert found[2] == {"local_began": 0, "local_steps": 0}  # the third release made them differ
    assert found[3] == {"local_began": 4, "local_steps": 1}
    never = trained(with_rule(jaxdp.coordinate_box(1.0), 1e-3, LOT, 256), threshold=1e3)
    assert never[-1] == {"local_began": 0, "local_steps": 0}
    # As published E′ averages squares of one example's gradients: nothing is scaled.
    algorithm = adadp_as_published(1.0, LOT, 256, 0.1)
    state = algorithm.after_noise.init(jnp.zeros(2))
    zero = jnp.zeros(2)
    for d, local in ((1.01e-3, 1), (0.99e-3, 0)):
        moment = jnp.square(jnp.float32([0.0, 2 * d]))
        at = (state[0]._replace(moment=moment), *state[1:])
        _, after = algorithm.after_noise.update(zero, at, zero, leaked=zero)
        assert int(after[0].local) == local


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
    even = BOX.even_side(moment)
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
    shapes = {"a": (40,), "b": (7,), "w": (40, 7), "c": (31,)}
    keys = ("a", "b", "c") if loss is outer else ("w", "c")
    return {k: np.float32(0.1 * rng.normal(size=(rows, *shapes[k]))) for k in keys}


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


@functools.cache
def summer(loss):
    grad_fn = MECHANISM.clipped_grad(loss)
    return jit(lambda batch, mask, scale: grad_fn(ZEROS, batch, mask, scale=scale).value)


def sums(loss, batch, place, scale):
    """Of the record at a place alone, of all with it, and of those without it."""
    here = np.arange(len(batch["c"])) == place
    found = [summer(loss)(batch, jnp.asarray(m), scale) for m in (here, here | True, ~here)]
    return [np.concatenate([np.float64(one[k]).ravel() for k in SHAPES]) for one in found]


DROPPED = ("nan", "inf", "one nan", "one inf", "too long")
LONGEST = ("at the sides", "just above", "minus the sides", "signs", "huge")


def test_no_record_moves_the_sum_by_more_than_the_noise_is_measured_in():
    """In units of the sides a record adds at most 1 to each coordinate, so √m; with rounding l2."""
    sides, rows, l2 = unlike_sides(), 70, MECHANISM.l2(ZEROS)
    for name, record in adversaries(sides).items():
        for place in (0, 35, rows - 1):
            batch = batches(table, rows, 1)
            batch["w"][place], batch["c"][place] = record["w"], record["v"]
            alone, with_it, without = sums(table, batch, place, sides)
            assert np.max(np.abs(alone)) <= 1.0, name
            assert np.linalg.norm(alone) <= math.sqrt(SIZE), name
            assert np.linalg.norm(with_it - without) <= l2, name
            assert np.all(np.isfinite(with_it)), name
            if name in DROPPED:
                np.testing.assert_array_equal(with_it, without, err_msg=name)
        if name in LONGEST:  # it does try
            assert np.linalg.norm(alone) == pytest.approx(math.sqrt(SIZE), rel=1e-6), name


# Of 1,000 rows a CPU clips one by one.
@pytest.mark.parametrize(("size", "rows"), [(1e-30, 70), (1e15, 70), (1e15, 1_000)])
def test_outer_products_stay_within_the_sides_too(size, rows):
    """The engine that never forms a whole batch's gradients, of rows of every magnitude."""
    sides, batch = unlike_sides(2), batches(outer, rows, 3)
    for key in ("a", "b", "c"):
        batch[key][4] *= np.float32(math.sqrt(size) if key != "c" else size) * 100
    alone, with_it, without = sums(outer, batch, 4, sides)
    assert np.max(np.abs(alone)) <= 1.0
    assert np.linalg.norm(with_it - without) <= MECHANISM.l2(ZEROS)


# Its noise -------------------------------------------------------------------------------------


def test_every_coordinate_gets_the_noise_of_its_own_side():
    """σ_i = σ √m s_i, so that Σ (s_i / σ_i)² = 1/σ²: Lemma 1, with equality but for the margin."""
    sigma, draws = 1.7, 4_000
    mechanism = with_rule(jaxdp.coordinate_box(1.0), sigma, LOT, 256)
    sides = unlike_sides(5)
    step = PrivateStep.of(adadp(mechanism, 0.1), table)
    begun = mechanism.privatize().init(ZEROS)
    summed = jaxdp.Summed(ZEROS, mechanism.l2(ZEROS), sides)

    def noise(key):
        found, _ = step.noise.update(summed, begun, ZEROS, key=mechanism.simulated_key(key))
        return jnp.concatenate([jnp.ravel(found[k]) for k in SHAPES])

    keys = jax.random.split(jax.random.key(8), draws)
    found = np.asarray(jax.jit(lambda keys: jax.lax.map(noise, keys))(keys), np.float64) * LOT
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


# Membership ------------------------------------------------------------------------------------


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
    assert not attack.broken(*shown, event, steps)
    half = attack.runs(in_the_local_phase(1.0), steps=steps, count=4_000)
    assert attack.broken(*half, event, steps)
