"""Correlated noise on an integer grid: its integers, their law, coefficients and sensitivity."""

import functools
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.noise import (
    Cyclic,
    FixedOrder,
    Toeplitz,
    Workload,
    _cells,
    dyadic,
    grid,
    grid_correlated,
    identity,
    optimal_banded,
    privatize_correlated_on_grid,
    privatize_on_grid,
    rms_error,
    sensitivity,
    square_root,
)
from jaxdp.noise._integers import Sum, made
from jaxdp.tickets import ON_GRID, simulated_key
from jaxdp.types import Summed

STEPS = 9
UNIT = 2**grid_correlated.DIGITS
STRATEGIES = [
    Toeplitz((1.0, 0.5703125, 0.4375, 0.3515625), STEPS),
    Toeplitz((1.0, -0.75), STEPS),
    Toeplitz((1.0, 0.0, 0.5, -0.00390625, 0.0), STEPS),
    dyadic(square_root(STEPS)),
]
PARAMS = {"a": jnp.zeros(61), "b": jnp.zeros((3, 13))}
SIZE = 100


def keys_of(strategy, multiplier=1.5, part=None):
    part = part or grid_correlated.part_on_grid(strategy)
    return [simulated_key(jax.random.key(t), {part: multiplier}, t) for t in range(STEPS)]


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def compiled(tx, params=PARAMS):
    @jax.jit
    def update(state, value, key, l2=1.0):
        return tx.update(Summed(value, jnp.float32(l2)), state, params, key=key)

    return update


def whole_numbers(values):
    return np.asarray(values).astype(object)


def of(value):
    """The nearest integer of a whole number of last digits, halves upwards, in Python integers."""
    return (int(value) + UNIT // 2) // UNIT


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_rows_are_those_of_the_recurrence_in_python_integers(strategy):
    rng = np.random.default_rng(0)
    tx = privatize_correlated_on_grid(strategy, 1.5, 1.0)
    update, state = compiled(tx), tx.init(PARAMS)
    law = grid.law_for(1.5, SIZE, grid_correlated.carried(strategy))
    c = grid.grid_scale(law, 1.5, SIZE, 1.0)
    weights = [int(UNIT * w) for w in strategy.coefficients]
    noise, released, exact = [], [], []
    for step, key in enumerate(keys_of(strategy)):
        value = jax.tree.map(
            lambda p: jnp.asarray(
                np.exp(rng.uniform(-9, 9)) * rng.standard_normal(p.shape), p.dtype
            ),
            PARAMS,
        )
        out, state = update(state, value, key)
        coarse, fine = (whole_numbers(x) for x in made(jnp.asarray(key.long), SIZE, law, True))
        back = sum(weights[j] * noise[-j] for j in range(1, min(step + 1, len(weights))))
        noise.append(np.array([of(z) for z in UNIT * coarse + fine - back], dtype=object))
        sums = whole_numbers(flat(jax.tree.map(lambda x: _cells.on_grid(x, c), value)))
        wanted = np.float32((sums + noise[-1]).astype(np.int64)) * (1 / c)
        assert (flat(out) == wanted).all(), step
        # What is released is a function of C S + Z alone: the decoder sees neither S nor N.
        history = [*exact, sums]
        coded = sum(weights[j] * history[-1 - j] for j in range(min(step + 1, len(weights))))
        coded = coded + UNIT * coarse + fine
        known = sum(weights[j] * released[-j] for j in range(1, min(step + 1, len(weights))))
        decoded = np.array([of(y) for y in coded - known], dtype=object)
        assert (decoded == sums + noise[-1]).all()
        exact, released = history, [*released, decoded]
    kept = np.concatenate([np.reshape(x, (len(x), -1)) for x in jax.tree.leaves(state.buffers)], 1)
    assert kept.dtype == np.int32
    for lag in range(1, strategy.bands):
        assert (kept[(STEPS - lag) % (strategy.bands - 1)] == noise[-lag]).all()


def test_a_row_is_exact_up_to_the_ends_of_what_the_buffers_hold():
    """Also where high and low parts, taken for themselves, are beyond 32 bits."""
    rng = np.random.default_rng(1)
    for digits in (1, 8):
        for total in (2**14, 300, 1):
            weights = np.array([total - total // 3, -(total // 3), 0][:3])
            rows = rng.choice([-(2**31), 2**31 - 1, 65535, -65536, -1, 0, 1], (3, 400))
            rows[:, 200:] = rng.integers(-(2**31), 2**31, (3, 200))
            past = (weights.astype(object)[:, None] * rows.astype(object)).sum(axis=0)
            wanted = -past + rng.integers(-(2**30), 2**30, 400).astype(object) * 2**digits
            coarse = wanted // 2**digits  # so that the result is near 0, whatever the past
            fine = rng.integers(-(2**15), 2**15, 400)
            high = (weights[:, None] * (rows >> 16)).sum(axis=0)
            low = (weights[:, None] * (rows & 0xFFFF)).sum(axis=0)
            assert np.abs(low).max() < 2**31 - 2**15
            assert np.abs(high).max() < 2**31
            own = [
                jnp.asarray(x.astype(np.int64).astype(np.uint32).view(np.int32))
                for x in (coarse % 2**32, fine)
            ]
            made_row = _cells._row(
                own, (jnp.asarray(high, jnp.int32), jnp.asarray(low, jnp.int32)), digits
            )
            exact = coarse + np.array(
                [
                    (int(f) - int(p) + 2**digits // 2) // 2**digits
                    for f, p in zip(fine, past, strict=True)
                ],
                dtype=object,
            )
            assert (np.asarray(made_row).astype(object) == (exact + 2**31) % 2**32 - 2**31).all()


@pytest.mark.parametrize("strategy", [*STRATEGIES, Toeplitz((1.0, 0.98828125), 2000)], ids=repr)
def test_no_row_leaves_32_bits_whatever_the_random_bits_are(strategy):
    """The worst signs of every draw, in Python integers, against the law that is taken."""
    most = grid_correlated.carried(strategy)
    column = strategy.first_inverse_column()
    assert most >= np.abs(column).sum()
    for multiplier, count in ((1.0, 10), (8.0, 10**8)):
        try:
            law = grid.law_for(multiplier, count, most)
        except ValueError as refused:
            assert "coordinates" in str(refused)  # noqa: PT017
            continue
        weights = [int(UNIT * w) for w in strategy.coefficients]
        signs = np.sign(column[::-1])
        noise: list[int] = []
        for sign in signs:
            z = int(sign or 1) * (UNIT * law.most + 2**15)
            back = sum(weights[j] * noise[-j] for j in range(1, min(len(noise) + 1, len(weights))))
            noise.append(of(z - back))
        assert max(map(abs, noise)) < 2**31
        assert abs(noise[-1]) >= 0.99 * law.most * np.abs(column).sum()


def test_most_is_the_largest_integer_of_a_law():
    law = Sum((3,), sigma=8, slot_bits=8)
    assert law.most == 4 * 128
    assert grid._LAWS[-1].most == 2**15 * (1 + 1250 * 33)


@functools.cache
def of_one_band():
    return privatize_correlated_on_grid(identity(STEPS), 1.5, 2.0), privatize_on_grid(1.5, 2.0)


def test_one_band_is_the_grid_without_correlation_bit_for_bit():
    one, plain = of_one_band()
    states = [tx.init(PARAMS) for tx in (one, plain)]
    pairs = zip(keys_of(identity(STEPS)), keys_of(None, part=ON_GRID), strict=True)
    rng = np.random.default_rng(3)
    for keys in itertools.islice(pairs, 3):
        value = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), PARAMS)
        found = []
        for n, (tx, key) in enumerate(zip((one, plain), keys, strict=True)):
            out, states[n] = tx.update(Summed(value, 1.0), states[n], PARAMS, key=key)
            found.append(flat(out))
        assert (found[0] == found[1]).all()
    assert jax.tree.leaves(states[0].buffers)[0].shape == (0, 61)


def test_dyadic_coefficients_are_near_and_stay_below_one():
    for strategy in (Toeplitz((1.0, 0.999, -0.9999, 1.5), 4), square_root(9), identity(3)):
        made_of = dyadic(strategy)
        assert made_of.steps == strategy.steps
        assert made_of.bands == strategy.bands
        for a, b in zip(made_of.coefficients, strategy.coefficients, strict=True):
            assert a * UNIT == round(a * UNIT)
            assert abs(a - b) <= 1 / UNIT
            assert abs(a) < 1 or abs(b) >= 1
        assert dyadic(made_of) == made_of
    assert dyadic(Toeplitz((1.0, 0.5, 1e-4), 5)).coefficients == (1.0, 0.5, 0.0)


@pytest.mark.parametrize("bands", [2, 8, 32])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rounding_the_coefficients_costs_less_than_a_thousandth_of_the_error(bands, momentum):
    workload = Workload(momentum)
    exact = optimal_banded(300, bands, workload)
    errors = [
        sensitivity(each, Cyclic(bands)).value * rms_error(each, workload)
        for each in (exact, dyadic(exact))
    ]
    assert errors[0] * (1 - 1e-6) <= errors[1] <= errors[0] * 1.001


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_a_record_moves_the_integers_no_farther_than_the_noise_is_for(strategy):
    """Theorem 5 in exact arithmetic, for sums that round the worst way in every step."""
    count, multiplier = 50, 1.25
    once = Cyclic(strategy.bands)
    times = FixedOrder(3, -(-STEPS // 3))
    for participation, steps in ((once, [0]), (times, [0, 3, 6])):
        sens = sensitivity(strategy, participation).value
        fresh = float(np.nextafter(np.float32(multiplier * sens), np.float32(np.inf)))
        law = grid.law_for(fresh, count, grid_correlated.carried(strategy))
        c = float(grid.grid_scale(law, fresh, count, 1.0))
        # c l2 cells in one direction, and all that rounding may add in the same.
        moved = Fraction(c) / Fraction(math.isqrt(count * 4**40), 2**40) + 1 + Fraction(1, 2**22)
        weights = [Fraction(w) * UNIT for w in strategy.coefficients]
        rows = [
            sum((weights[i - j] for j in steps if 0 <= i - j < len(weights)), Fraction(0))
            for i in range(STEPS)
        ]
        apart = count * sum((row * moved) ** 2 for row in rows)
        # Of the fine integers' variance all but 4 is a Gaussian's.
        assert law._variances()[0] * UNIT**2 + 2560**2 - 4 >= Fraction(multiplier) ** 2 * apart


def test_the_law_of_the_fine_integers_is_near_enough():
    for digits in (1, 8):
        whole = [Sum((2**digits, *law.factors)) for law in grid._LAWS]
        assert min(min(law.joints) for law in whole) > 2
    assert grid.distance(8) * grid.COORDINATES <= grid.DISTANCE
    assert grid.distance() < grid.distance(8)


def test_the_finer_draw_is_another_and_changes_no_integer():
    key, law = jnp.arange(8, dtype=jnp.uint32), Sum((511,))
    (alone,) = made(key, 5000, law)
    coarse, fine = made(key, 5000, law, True)
    assert (alone == coarse).all()
    three = made(key, 5000, Sum((511, 2)))[0]
    assert (three == coarse + 511 * 2 * fine).all()  # it is the next draw of the same streams
    assert abs(np.std(fine) / 2560 - 1) < 0.05
