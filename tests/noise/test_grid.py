"""Noise on an integer grid: its sensitivity, what is released, and keys that are used once."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from benchmarks import grid_bits
from jaxdp.ledger.tickets import ON_GRID, NoiseKey, simulated_key
from jaxdp.noise import IntegerNoise, grid, grid_range, privatize
from jaxdp.types import Summed
from tests.mechanisms import sgd_of
from tests.refusing import all_refused

SIZE = 8000
PARAMS = jnp.zeros(SIZE)
TX = privatize(IntegerNoise(1.0), 1.0)


def key_of(seed, multiplier=1.0, part=ON_GRID):
    return simulated_key(jax.random.key(seed), {part: multiplier})


def released(key, value, l2=1.0, tx=TX):
    """What is released of a sum, float64."""
    found, _ = tx.update(Summed(value, jnp.float32(l2)), tx.init(PARAMS), PARAMS, key=key)
    return np.asarray(found, np.float64)


def scale_of(multiplier, count, l2):
    law = grid.integer_law(multiplier, count)
    return law, float(grid.grid_scale(law, multiplier, count, l2))


def exact_cells(x, c):
    """What the cells of float32 numbers should be before they are rounded, float64."""
    limit = float(np.float32(2**30) / np.float32(c))
    return np.clip(x.astype(np.float64), -limit, limit) * float(c)  # 36 digits at most


def on_grid(x, c):
    return np.asarray(grid.to_grid(jnp.asarray(x), jnp.float32(c)), np.float64)


def test_the_noise_is_at_least_that_of_the_theorem():
    for count in (1, 26_010, 4 * 10**6, 124 * 10**6, 2**32):
        rng = np.random.default_rng(count % 97)
        root = Fraction(math.isqrt(count * 4**40) + 1, 2**40)
        for multiplier in (0.3, 1.0, 7.77):
            for l2 in np.float32(np.exp(rng.uniform(-30, 30, 4))):
                law, c = scale_of(multiplier, count, l2)
                assert float(grid.with_12_digits(jnp.float32(c))) == c  # twelve digits
                z = Fraction(multiplier)
                moved = Fraction(c) * Fraction(float(l2)) + root * (1 + Fraction(1, 2**22))
                square = Fraction(law._variances()[0] - 4)
                assert (z * moved) ** 2 <= square, count
                # And hardly more: what rounding takes, and the twelve digits of the scale.
                assert (z * moved) ** 2 >= square * Fraction(998, 1000), count
                shape = jax.ShapeDtypeStruct((count,), np.float32)
                std = float(IntegerNoise(multiplier).std(shape, l2, 0))
                slack = 1.01 if count < 2**30 else 1.2
                assert multiplier * l2 <= std <= slack * multiplier * l2, count


def test_a_value_is_rounded_to_the_nearest_cell_and_moved_no_farther_than_is_charged():
    rng = np.random.default_rng(0)
    for _ in range(60):
        c = float(grid.with_12_digits(jnp.float32(np.exp(rng.uniform(-60, 60)))))
        x = np.float32(rng.standard_normal(SIZE) * np.exp(rng.uniform(-40, 25, SIZE)) / c)
        assert np.abs(on_grid(x, c) - exact_cells(x, c)).max() <= 0.5 + 2.0**-23
    special = np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-44])
    assert on_grid(special, 8.0).tolist() == [0, 2**30, -(2**30), 0, 0, 0]
    # Where a float's spacing changes, and where a cell does: the last bit either way.
    for power in (-40, -12, 0, 12, 23, 24, 29, 30):
        for digits in (1.0, 1.9995117, 1.0004883, 1.4140625):
            c = np.float32(digits * 2.0 ** (power % 7 * 9 - 27))
            assert grid.with_12_digits(jnp.asarray(c)) == c
            near = [np.float32(2.0**power / c * np.asarray([1.0, 0.5, 1.5, 0.75, 1.25]))]
            for end in (-np.inf, np.inf):
                step = near[0]
                for _ in range(3):
                    step = np.nextafter(step, np.float32(end))
                    near.append(step)
            x = np.concatenate([*near, *(-each for each in near)])
            assert np.abs(on_grid(x, c) - exact_cells(x, c)).max() <= 0.5 + 2.0**-23, power
    # Rounded the worst way.
    law, c = scale_of(1.0, SIZE, 1.0)
    cells = np.arange(SIZE) % 50 + 0.5
    up, down = (np.float32((cells + sign * np.float32(2.0**-12)) / c) for sign in (1, -1))
    apart = np.linalg.norm(on_grid(up, c) - on_grid(down, c))
    l2 = float(np.linalg.norm(up.astype(np.float64) - down.astype(np.float64)))
    assert apart > 0.9 * math.sqrt(SIZE)  # nearly all of what rounding may do
    assert apart <= c * l2 + math.sqrt(SIZE) * (1 + 2.0**-22)
    assert 1.0 * (c + math.sqrt(SIZE)) <= law.std


def test_integers_are_of_one_float32_whatever_computes_it_in_the_same_program():
    """A product that XLA contracted into the cut would have digits that no float32 sum has."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(SIZE) * s, jnp.float32) for s in (10, 20))
    rows = jnp.asarray(rng.standard_normal((5, SIZE)) * 30, jnp.float32)
    weights = jnp.asarray(rng.standard_normal(5), jnp.float32)
    law = grid.integer_law(1.0, SIZE)

    def whole(made, multiplier, l2, *args):
        c = grid.grid_scale(law, multiplier, SIZE, l2)
        return grid.to_grid(made(*args), c), c

    for name, made, args in (
        ("product", lambda a, b: a * b, (a, b)),
        ("product and sum", lambda a, b: a * b + b, (a, b)),
        ("quotient", lambda a, b: a / (b * b + 1.0), (a, b)),
        ("sum of products", lambda w, r: (w[:, None] * r).sum(0), (weights, rows)),
        ("matrix product", lambda w, r: w @ r, (weights, rows)),
        ("outer product", lambda w, r: w[:1] @ r[:1], (weights, rows)),
    ):
        run = jax.jit(whole, static_argnums=0)
        found, c = run(made, jnp.float32(1.0), jnp.float32(1.0), *args)
        inside = np.abs(np.asarray(found, np.int64)) < 2**30 - 64
        cells = np.asarray(found, np.float64)[inside]
        near = np.float32(cells / float(c))
        each = [near, *(np.nextafter(near, np.float32(end)) for end in (-np.inf, np.inf))]
        apart = [np.abs(x.astype(np.float64) * float(c) - cells) for x in each]
        assert inside.sum() > 6000, name
        assert np.min(apart, axis=0).max() <= 0.5 + 2.0**-23, name


def test_the_release_is_an_integer_over_the_scale_whatever_the_sum_or_nothing():
    _, c = scale_of(1.0, SIZE, 1.0)
    rng = np.random.default_rng(1)
    for size in (0.0, 1e-30, 1.0, 100.0):
        value = jnp.asarray(size * rng.standard_normal(SIZE), jnp.float32)
        cells = released(key_of(1), value) * c
        assert np.abs(cells - np.round(cells)).max() <= 2.0**-22 * np.abs(cells).max()
    nothing = released(key_of(1), PARAMS)
    moved = released(key_of(1), PARAMS + np.float32(1000 / c))
    assert (np.round(moved * c) - np.round(nothing * c) == 1000).all()
    clipped = released(key_of(1), PARAMS + 1e30)
    assert np.abs(clipped / grid_range(1.0, SIZE) - 1).max() < 0.01
    for bad in (jnp.nan, jnp.inf, -jnp.inf):  # a public number in its place, with its noise
        assert np.isfinite(released(key_of(1), PARAMS.at[0].set(bad))).all(), bad
    for l2 in (0.0, -1.0, jnp.inf, jnp.nan, 1e-38, 3e38, 1e-45):
        assert np.isnan(released(key_of(1), PARAMS + 1e6, l2)).all(), l2
    # The ends of multipliers and norms have their noise, or release nothing.
    for multiplier in (1e-6, 1.0, 1e5):
        tx, key = privatize(IntegerNoise(multiplier), 1.0), key_of(1, multiplier)
        for l2 in (1e-22, 1.0, 1e22):
            for value in (0.0, l2, 1e-45):
                found = released(key, PARAMS + np.float32(value), l2, tx)
                if np.isnan(found).all():
                    scale = grid.integer_law(multiplier, SIZE).std / (multiplier * l2)
                    assert not 2.0**-99 < scale < 2.0**99, (multiplier, l2)
                    continue
                spread = np.std(found) / (multiplier * l2)
                assert 0.9 <= spread <= 1.1 / (1 - 2 * grid._MOST), (multiplier, l2)


def fine(found):
    """Share of the small outputs whose float32 has bits finer than 2^-24 of one record."""
    small = found[(np.abs(found) < 2.0**-4) & (found != 0)]
    assert len(small) > 100
    return np.mean(small * 2.0**24 != np.round(small * 2.0**24))


def test_low_bits_tell_the_sums_apart_in_float32_and_not_on_the_grid():
    worlds = PARAMS, PARAMS + 1.0
    # Mironov 2012: what is added to 1 and comes out small is a multiple of 2^-24; noise is finer.
    plain = privatize(1.0, 1.0)
    floats = [released(key_of(n, 1.0, "gradient"), x, tx=plain) for n, x in enumerate(worlds)]
    assert fine(floats[0]) > 0.9
    assert fine(floats[1]) == 0.0
    integers = [released(key_of(n), x) for n, x in enumerate(worlds)]
    shares = [fine(found) for found in integers]
    assert abs(shares[0] - shares[1]) < 0.1
    # The lowest bits of the integers themselves.
    _, c = scale_of(1.0, SIZE, 1.0)
    low = [np.bincount(np.round(x * c).astype(int) % 16, minlength=16) for x in integers]
    assert all(np.sum((counts - SIZE / 16) ** 2 / (SIZE / 16)) < 45 for counts in low)


def test_the_bits_refute_ordinary_noise_and_nothing_of_them_the_grid():
    found = grid_bits.audited("gaussian", 2_000)
    assert found["refuted"]["representable"]
    assert found["empirical"]["representable"] > 3 * found["proven"]
    assert min(found["decided_by_representability"]) > 0.6
    for kind in ("grid", "correlated on a grid"):
        found = grid_bits.audited(kind, 2_000)
        assert set(found["refuted"]) == {"representable", "low bits", "last digits"}
        assert not any(found["refuted"].values()), kind
        assert max(found["empirical"].values()) <= found["proven"], kind
        # Every release is an integer of the grid, and every such integer is one of both worlds.
        assert found["decided_by_representability"] == [0.0, 0.0], kind
    # What an audit learns tells labels apart that differ.
    rng = np.random.default_rng(0)
    one, other = (rng.integers(0, top, (4_000, 1)).astype(np.float32) for top in (6, 12))
    score = grid_bits.learned(one, other, lambda released: released.astype(int))
    assert score(other[:50]).min() < -3 < 0.5 < score(one[:50]).min()
    assert score(np.full((2, 1), 99.0)).tolist() == [0.0, 0.0]


def test_modes_of_jax_and_leaves_change_no_bit():
    params, key = jnp.zeros(40), key_of(3)
    value = jnp.linspace(-1, 1, 40, dtype=jnp.float32)

    def integers():
        tx = privatize(IntegerNoise(1.0), 1.0)
        return np.asarray(tx.update(Summed(value, 1.0), tx.init(params), params, key=key)[0])

    usual = integers()
    assert len(np.unique(usual)) == 40
    with jax.enable_x64(True):
        assert key_of(3).long.dtype == np.uint32
        wide = integers()
    assert wide.dtype == np.float32
    assert (wide == usual).all()
    with jax.disable_jit():
        assert (integers() == usual).all()
    with jax.numpy_rank_promotion("raise"), jax.default_matmul_precision("bfloat16"):
        assert (integers() == usual).all()
    # Several leaves have one stream between them: 8,000 coordinates, as one array has them.
    tree = {"a": jnp.zeros((70, 100)), "b": jnp.zeros(999), "c": jnp.zeros(())}
    made, _ = TX.update(Summed(tree, 1.0), TX.init(tree), tree, key=key_of(1))
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(made)])
    assert (flat == released(key_of(1), PARAMS)).all()
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, tree)


def test_a_sum_of_few_digits_gets_the_same_integers_and_one_rounded_again_is_refused():
    """Rounding moved two float64 sums at a distance of 1e-10 by 2,048 cells, 63 being charged."""

    def made(value, kind):
        params = jnp.zeros(SIZE, kind)
        return TX.update(Summed(value, jnp.float32(1.0)), TX.init(params), params, key=key_of(5))[0]

    for kind in (jnp.bfloat16, jnp.float16):
        value = jnp.linspace(-1, 1, SIZE).astype(kind)
        full = made(value.astype(jnp.float32), jnp.float32).astype(kind)
        assert (made(value, kind) == full).all(), kind
    words = "must be of float32, bfloat16, float16"
    wide = (np.ones(SIZE, kind) for kind in (np.float64, np.int32))
    all_refused((words, functools.partial(made, ones, jnp.float32), ones.dtype) for ones in wide)


def test_keys_are_of_256_bits_and_one_step_used_once_and_shared_by_no_member_of_a_vmap():
    first, state = TX.update(Summed(PARAMS, 1.0), TX.init(PARAMS), PARAMS, key=key_of(0))
    again, _ = TX.update(Summed(PARAMS, 1.0), state, PARAMS, key=key_of(0))
    assert np.isfinite(first).all()
    assert np.isnan(again).all()

    def member(seed, value=PARAMS):
        key = simulated_key(seed, {ON_GRID: 1.0})
        return TX.update(Summed(value, jnp.float32(1.0)), TX.init(PARAMS), PARAMS, key=key)[0]

    seeds = jax.random.split(jax.random.key(9), 6).reshape(2, 3)
    found = np.asarray(jax.vmap(jax.vmap(member))(seeds)).reshape(6, SIZE)
    assert np.abs(np.corrcoef(found) - np.eye(6)).max() < 0.06
    assert (found == np.stack([member(seed) for seed in seeds.reshape(-1)])).all()
    twice = seeds.at[1, 2].set(seeds[0, 0])
    assert np.isnan(jax.vmap(jax.vmap(member))(twice)).all()
    assert np.isnan(jax.vmap(member)(twice.reshape(-1)[jnp.asarray([0, 5])])).all()
    with pytest.raises(ValueError, match="another one for every member"):
        jax.vmap(lambda value: member(seeds[0, 0], value))(jnp.zeros((2, SIZE)))
    # Of a sampler they have 256 bits.
    sampler = sgd_of(1.0, 0.5, 30, 300, noise="grid").sampler(300)
    draws = [sampler.draw() for _ in range(3)]
    keys = [draw.key() for draw in draws]
    assert all(isinstance(key, NoiseKey) and key.long.shape == (8,) for key in keys)
    assert len({word for key in keys for word in key.long.tolist()}) == 24
    with pytest.raises(ValueError, match="spent"):  # a second program finds none
        draws[0].key()
    assert sgd_of(1.0, 0.5, 30, 300).sampler(300).draw().key().long is None
    secret = jaxdp.ledger.seeds.Secret.from_seed(1)
    assert len(secret.key("a")) == 32
    assert secret.key("a") != secret.key("b")
    assert secret.key("a")[:16] != secret.stream("a")
