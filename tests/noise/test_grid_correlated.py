"""Correlated noise on an integer grid: its integers, their sensitivity, and what goes on."""

import dataclasses
import itertools
import math
from fractions import Fraction
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import noise
from jaxdp.ledger.tickets import ON_GRID, simulated_key
from jaxdp.noise import grid
from jaxdp.noise._integers import integers
from jaxdp.types import Summed
from tests.refusing import all_refused

STEPS = 9
UNIT = 2**grid.DIGITS
STRATEGIES = [
    noise.Toeplitz((1.0, 0.5703125, 0.4375, 0.3515625), STEPS),
    noise.Toeplitz((1.0, -0.75), STEPS),
    noise.Toeplitz((1.0, 0.0, 0.5, -0.00390625, 0.0), STEPS),
    noise.dyadic(noise.square_root(STEPS)),
]
FOUR = STRATEGIES[0]
PARAMS = {"a": jnp.zeros(61), "b": jnp.zeros((3, 13)), "c": jnp.zeros(()), "d": jnp.zeros((3, 0))}
SIZE = 101


def keys_of(strategy, multiplier=1.5, part=None):
    part = part or noise.IntegerMatrixNoise(multiplier, strategy).part
    return [simulated_key(jax.random.key(t), {part: multiplier}, t) for t in range(STEPS)]


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@cache
def update_of(strategy):
    """(a compiled update of (state, sum, key, l2), its first state)."""
    tx = jaxdp.privatize(noise.IntegerMatrixNoise(1.5, strategy), 1.0)

    @jax.jit
    def update(state, value, key, l2=1.0):
        return tx.update(Summed(value, jnp.float32(l2)), state, PARAMS, key=key)

    return update, tx.init(PARAMS)


def law_of(strategy):
    return grid.integer_law(1.5, SIZE, grid.growth(strategy))


def whole_numbers(values):
    return np.asarray(values).astype(object)


def of(value):
    """The nearest integer of a whole number of last digits, halves upwards, in Python integers."""
    return (int(value) + UNIT // 2) // UNIT


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_rows_are_those_of_the_recurrence_in_python_integers(strategy):
    rng = np.random.default_rng(0)
    (update, state), law = update_of(strategy), law_of(strategy)
    c = grid.grid_scale(law, 1.5, SIZE, 1.0)
    weights = [int(UNIT * w) for w in strategy.coefficients]
    draws = jax.jit(lambda key: integers(key, SIZE, law, True))
    rows, released, exact, fresh = [], [], [], []
    for step, key in enumerate(keys_of(strategy)):
        value = jax.tree.map(
            lambda p: jnp.asarray(
                np.exp(rng.uniform(-9, 9)) * rng.standard_normal(p.shape), p.dtype
            ),
            PARAMS,
        )
        out, state = update(state, value, key)
        coarse, fine = (whole_numbers(x) for x in draws(jnp.asarray(key.long)))
        fresh.append(UNIT * coarse + fine)
        back = sum(weights[j] * rows[-j] for j in range(1, min(step + 1, len(weights))))
        rows.append(np.array([of(z) for z in fresh[-1] - back], dtype=object))
        sums = whole_numbers(flat(jax.tree.map(lambda x: grid.to_grid(x, c), value)))
        wanted = np.float32((sums + rows[-1]).astype(np.int64)) * (1 / c)
        assert (flat(out) == wanted).all(), step
        # What is released is a function of C S + Z alone: the decoder sees neither S nor N.
        history = [*exact, sums]
        coded = sum(weights[j] * history[-1 - j] for j in range(min(step + 1, len(weights))))
        known = sum(weights[j] * released[-j] for j in range(1, min(step + 1, len(weights))))
        decoded = np.array([of(y) for y in coded + fresh[-1] - known], dtype=object)
        assert (decoded == sums + rows[-1]).all()
        exact, released = history, [*released, decoded]
    drawn = np.concatenate(fresh)
    assert len(set(drawn.tolist())) == STEPS * SIZE  # none comes twice
    assert abs(np.std(drawn.astype(float)) / UNIT / float(c) / 1.5 - 1) < 0.1
    kept = np.concatenate([np.reshape(x, (len(x), -1)) for x in jax.tree.leaves(state.buffers)], 1)
    assert kept.dtype == np.int32
    for lag in range(1, strategy.bands):
        assert (kept[(STEPS - lag) % (strategy.bands - 1)] == rows[-lag]).all()


def test_no_row_leaves_32_bits_and_each_is_exact_up_to_the_ends_of_what_the_buffers_hold():
    """The worst signs of every draw, in Python integers, against the law that is taken."""
    long, taken = noise.Toeplitz((1.0, 0.98828125), 2000), 0
    for strategy, (multiplier, count) in itertools.product(
        [*STRATEGIES, long], [(1.0, 10), (8.0, 10**8)]
    ):
        most, column = grid.growth(strategy), strategy.first_inverse_column()
        assert most >= np.abs(column).sum()
        try:
            law = grid.integer_law(multiplier, count, most)
        except ValueError as refused:
            assert "coordinates" in str(refused)  # noqa: PT017
            continue
        weights = [int(UNIT * w) for w in strategy.coefficients]
        rows: list[int] = []
        for sign in np.sign(column[::-1]):
            z = int(sign or 1) * (UNIT * law.largest + 2**15)
            back = sum(weights[j] * rows[-j] for j in range(1, min(len(rows) + 1, len(weights))))
            rows.append(of(z - back))
        assert max(map(abs, rows)) < 2**31
        assert abs(rows[-1]) >= 0.99 * law.largest * np.abs(column).sum()
        taken += 1
    assert taken >= 5
    # Exact also where high and low parts, taken for themselves, are beyond 32 bits.
    rng = np.random.default_rng(1)
    digits = grid.DIGITS
    for total in (2**14, 300, 1):
        weights = np.array([total - total // 3, -(total // 3), 0])
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
        parts = jnp.asarray(high, jnp.int32), jnp.asarray(low, jnp.int32)
        rest = (fine.astype(object) - past + 2**digits // 2) // 2**digits
        wrapped = (coarse + rest + 2**31) % 2**32 - 2**31
        assert (whole_numbers(grid._correlated_row(own, parts)) == wrapped).all(), total


def test_one_band_is_the_grid_without_correlation_bit_for_bit():
    kinds = noise.IntegerMatrixNoise(1.5, noise.identity(STEPS)), noise.IntegerNoise(1.5)
    both = [jaxdp.privatize(kind, 2.0) for kind in kinds]
    states = [tx.init(PARAMS) for tx in both]
    pairs = zip(keys_of(noise.identity(STEPS)), keys_of(None, part=ON_GRID), strict=True)
    rng = np.random.default_rng(3)
    for keys in itertools.islice(pairs, 3):
        value = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), PARAMS)
        found = []
        for n, (tx, key) in enumerate(zip(both, keys, strict=True)):
            out, states[n] = tx.update(Summed(value, 1.0), states[n], PARAMS, key=key)
            found.append(flat(out))
        assert (found[0] == found[1]).all()
    assert jax.tree.leaves(states[0].buffers)[0].shape == (0, 61)


def test_dyadic_coefficients_are_near_stay_below_one_and_cost_a_thousandth_of_the_error():
    uneven = noise.Toeplitz((1.0, 0.999, -0.9999, 1.5), 4)
    for strategy in (uneven, noise.square_root(9), noise.identity(3)):
        made_of = noise.dyadic(strategy)
        assert (made_of.steps, made_of.bands) == (strategy.steps, strategy.bands)
        for a, b in zip(made_of.coefficients, strategy.coefficients, strict=True):
            assert a * UNIT == round(a * UNIT)
            assert abs(a - b) <= 1 / UNIT
            assert abs(a) < 1 or abs(b) >= 1
        assert noise.dyadic(made_of) == made_of
    assert noise.dyadic(noise.Toeplitz((1.0, 0.5, 1e-4), 5)).coefficients == (1.0, 0.5, 0.0)
    for bands, momentum in itertools.product((2, 8, 32), (0.0, 0.9)):
        workload = noise.Workload(momentum)
        exact = noise.optimal_banded(300, bands, workload)
        errors = [
            noise.sensitivity(each, noise.Cyclic(bands)) * noise.rms_error(each, workload)
            for each in (exact, noise.dyadic(exact))
        ]
        assert errors[0] * (1 - 1e-6) <= errors[1] <= errors[0] * 1.001, (bands, momentum)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_a_record_moves_the_integers_no_farther_than_the_noise_is_for(strategy):
    """Theorem 5 in exact arithmetic, for sums that round the worst way in every step."""
    count, multiplier = 50, 1.25
    times = noise.FixedEpochOrder(3, -(-STEPS // 3))
    for participation, steps in ((noise.Cyclic(strategy.bands), [0]), (times, [0, 3, 6])):
        sens = noise.sensitivity(strategy, participation)
        fresh = float(np.nextafter(np.float32(multiplier * sens), np.float32(np.inf)))
        law = grid.integer_law(fresh, count, grid.growth(strategy))
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


def test_neither_sensitivities_nor_sums_change_what_is_taken_back():
    """The noise of a step is for its own l2, what it takes back is in cells; no sum is kept."""
    (update, start), law, keys = update_of(FOUR), law_of(FOUR), keys_of(FOUR)
    state = same = start
    for key, l2 in zip(keys, (1.0, 0.25, 8.0, 1.0), strict=False):
        scales = [float(grid.grid_scale(law, 1.5, SIZE, x)) for x in (l2, 1.0)]
        out, state = update(state, PARAMS, key, l2)
        other, same = update(same, PARAMS, key, 1.0)
        cells = [np.round(flat(x) * c) for x, c in zip((out, other), scales, strict=True)]
        assert (cells[0] == cells[1]).all()
    buffers = []
    for size in (0.0, 3e38, -3e38, np.nan):  # both ends of the grid
        state = start
        for step, key in enumerate(keys):
            sign = np.float32(size if step % 2 else -size)
            out, state = update(state, jax.tree.map(lambda p, by=sign: p + by, PARAMS), key)
            assert np.isfinite(flat(out)).all()
        buffers.append(flat(state.buffers))
    assert all((each == buffers[0]).all() for each in buffers)


def test_a_wrong_state_releases_nothing_now_or_later():
    (update, start), keys = update_of(FOUR), keys_of(FOUR)
    states = [start]
    for key in keys[:3]:
        out, after = update(states[-1], PARAMS, key)
        assert np.isfinite(flat(out)).all()
        states.append(after)
    for at, key in ((0, keys[1]), (1, keys[0]), (2, keys[1]), (3, keys[2])):
        out, after = update(states[at], PARAMS, key)
        assert np.isnan(flat(out)).all(), at
        assert after.step == -1, at
        for later in keys:
            assert np.isnan(flat(update(after, PARAMS, later)[0])).all(), at
    # Of the right step, and with another past.
    other = dataclasses.replace(keys[3], previous_tag=np.array([7, 9], np.uint32))
    assert np.isnan(flat(update(states[3], PARAMS, other)[0])).all()
    # Beyond the strategy's steps.
    beyond = states[3]._replace(step=jnp.asarray(STEPS, jnp.int32))
    key = simulated_key(jax.random.key(0), {noise.IntegerMatrixNoise(1.5, FOUR).part: 1.5}, STEPS)
    assert np.isnan(flat(update(beyond, PARAMS, key)[0])).all()


def test_the_steps_of_a_scan_in_a_vmap_are_those_one_by_one_with_keys_of_their_own():
    tx, (update, start) = jaxdp.privatize(noise.IntegerMatrixNoise(1.5, FOUR), 1.0), update_of(FOUR)
    rng, part = np.random.default_rng(2), noise.IntegerMatrixNoise(1.5, FOUR).part
    values = jax.tree.map(
        lambda p: jnp.asarray(rng.standard_normal((2, STEPS, *p.shape)), jnp.float32), PARAMS
    )
    seeds = jax.random.split(jax.random.key(4), (2, STEPS))
    key_of = lambda seed, step: simulated_key(seed, {part: 1.5}, step)  # noqa: E731

    def step(state, given):
        number, seed, value = given
        key = key_of(seed, number)
        out, state = tx.update(Summed(value, jnp.float32(1.0)), state, PARAMS, key=key)
        return state, out

    def member(seeds, values):
        return jax.lax.scan(step, start, (jnp.arange(STEPS), seeds, values))[1]

    found, states = jax.vmap(member)(seeds, values), [start, start]
    for m, t in itertools.product(range(2), range(STEPS)):
        value = jax.tree.map(lambda x, m=m, t=t: x[m, t], values)
        out, states[m] = update(states[m], value, key_of(seeds[m, t], t))
        assert (flat(out) == flat(jax.tree.map(lambda x, m=m, t=t: x[m, t], found))).all(), (m, t)
    assert (flat(states[0].buffers) != flat(states[1].buffers)).mean() > 0.9
    with pytest.raises(ValueError, match="another one for every member"):
        jax.vmap(lambda value: step(start, (0, seeds[0, 0], value))[1])(
            jax.tree.map(lambda x: x[0], values)
        )


def test_what_cannot_be_on_the_grid_is_refused_in_words():
    rational, buffered = noise.optimal_banded(STEPS, 3), noise.Buffered((0.5,), (0.5,), STEPS)
    inverse, dense = noise.banded_inverse_square_root(STEPS, 3), noise.Dense.of(np.eye(STEPS))
    rough = noise.Toeplitz((1.0, *([1.0, -1.0] * 35)), 2000)
    numbers = {"l2_clip_norm": 0.5, "batch_size": 30, "dataset_size": 300, "steps": STEPS}
    cyclic, made = partial(jaxdp.dp_mf, noise_multiplier=1.0, **numbers), noise.IntegerMatrixNoise
    ordered = partial(cyclic, sampling="fixed_order")
    banded, kinds = "must be a banded Toeplitz one", "strategy must be one of banded, square_root"
    rows = [
        (r"jaxdp\.noise\.dyadic", partial(made, 1.0, rational)),
        (banded, partial(made, 1.0, buffered)),
        ("Take strategy='banded'", partial(made, 1.0, inverse)),
        (banded, partial(made, 1.0, dense)),
        ("add up to at most 64|within float32", partial(made, 1.0, rough)),
        ("32 bits of the grid", partial(made, 1.0, noise.Toeplitz((1.0, 1.0), 2000))),
        ("noise_multiplier must be in", partial(made, 1e7, FOUR)),
        ("noise must be one of gaussian, grid", partial(cyclic, bands=2, noise="secure")),
    ]
    for bad in (rational, buffered):
        ordinary = ordered(strategy=bad)
        rows.append(("strategy must", partial(dataclasses.replace, ordinary, noise="grid"), bad))
    for name in ("buffered", "dense", "banded_inverse"):
        rows.append((kinds, partial(ordered, strategy=name, noise="grid"), name))

    # Nor are noises taken for each other.
    def updated(adds, multiplier=1.5, sums=PARAMS):
        tx, key = jaxdp.privatize(adds, 1.0), keys_of(FOUR, multiplier)[0]
        return lambda: tx.update(Summed(sums, 1.0), tx.init(PARAMS), PARAMS, key=key)

    gridded, other = (made(1.5, each) for each in (FOUR, noise.Toeplitz((1.0, 0.5), STEPS)))
    kinds = other, noise.MatrixNoise(1.5, FOUR), noise.IntegerNoise(1.5)
    rows += [("charged for", updated(kind), n) for n, kind in enumerate(kinds)]
    doubles = {name: np.zeros(leaf.shape) for name, leaf in PARAMS.items()}
    rows.append(("must be of float32", updated(gridded, sums=doubles)))
    all_refused([*rows, ("charged for", updated(gridded, 1.0), "multiplier")])
