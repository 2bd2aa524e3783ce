"""Noise on an integer grid: sensitivity, what is released, refusals, attacks, whole runs."""

import dataclasses
import functools
import json
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.noise import _cells, grid, grid_range, privatize, privatize_on_grid
from jaxdp.tickets import ON_GRID, NoiseKey, simulated_key
from jaxdp.types import Summed

SIZE = 8000
PARAMS = jnp.zeros(SIZE)


def key_of(seed, multiplier=1.0, part=ON_GRID):
    return simulated_key(jax.random.key(seed), {part: multiplier})


@functools.cache
def released(l2=1.0):
    tx = privatize_on_grid(1.0, 1.0)
    state = tx.init(PARAMS)

    @jax.jit
    def of(key, value):
        return tx.update(Summed(value, jnp.float32(l2)), state, PARAMS, key=key)[0]

    return lambda key, value: np.asarray(of(key, value), np.float64)


def scale_of(multiplier, count, l2):
    law = grid.law_for(multiplier, count)
    return law, float(grid.grid_scale(law, multiplier, count, l2))


@pytest.mark.parametrize("count", [1, 26_010, 4 * 10**6, 124 * 10**6, 2**32])
def test_the_noise_is_at_least_that_of_the_theorem(count):
    rng = np.random.default_rng(count % 97)
    root = Fraction(math.isqrt(count * 4**40) + 1, 2**40)
    for multiplier in (0.3, 1.0, 7.77):
        for l2 in np.float32(np.exp(rng.uniform(-30, 30, 4))):
            law, c = scale_of(multiplier, count, l2)
            assert float(_cells.shortened(jnp.float32(c))) == c  # twelve digits
            assert float(_cells.shortened(jnp.float32(c))) == c  # twelve digits
            z = Fraction(multiplier)
            moved = Fraction(c) * Fraction(float(l2)) + root * (1 + Fraction(1, 2**22))
            square = Fraction(law._variances()[0] - 4)
            assert (z * moved) ** 2 <= square
            # And hardly more: what rounding takes, and the twelve digits of the scale.
            assert (z * moved) ** 2 >= square * Fraction(998, 1000)
            std = float(grid.grid_std(law, multiplier, count, l2))
            slack = 1.01 if count < 2**30 else 1.2
            assert multiplier * l2 <= std <= slack * multiplier * l2


def test_a_value_is_rounded_to_the_nearest_cell_at_every_magnitude():
    rng = np.random.default_rng(0)
    for _ in range(60):
        c = float(_cells.shortened(jnp.float32(np.exp(rng.uniform(-60, 60)))))
        x = np.float32(rng.standard_normal(SIZE) * np.exp(rng.uniform(-40, 25, SIZE)) / c)
        made = np.asarray(_cells.on_grid(jnp.asarray(x), jnp.float32(c)), np.int64)
        limit = float(np.float32(2**30) / np.float32(c))
        exact = np.clip(x.astype(np.float64), -limit, limit) * c  # 36 digits at most
        assert np.abs(made - exact).max() <= 0.5 + 2.0**-23
    special = jnp.asarray([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-44])
    assert _cells.on_grid(special, jnp.float32(8.0)).tolist() == [0, 2**30, -(2**30), 0, 0, 0]


def test_rounding_the_worst_way_moves_the_integers_no_farther_than_is_charged():
    law, c = scale_of(1.0, SIZE, 1.0)
    cells = np.arange(SIZE) % 50 + 0.5
    near = np.float32(2.0**-12)
    up, down = (np.float32((cells + sign * near) / c) for sign in (1, -1))
    both = [
        np.asarray(_cells.on_grid(jnp.asarray(x), jnp.float32(c)), np.float64) for x in (up, down)
    ]
    apart = np.linalg.norm(both[0] - both[1])
    l2 = float(np.linalg.norm(up.astype(np.float64) - down.astype(np.float64)))
    assert apart > 0.9 * math.sqrt(SIZE)  # nearly all of what rounding may do
    assert apart <= c * l2 + math.sqrt(SIZE) * (1 + 2.0**-22)
    assert 1.0 * (c + math.sqrt(SIZE)) <= law.std


def test_the_release_is_an_integer_over_the_scale_whatever_the_sum():
    _, c = scale_of(1.0, SIZE, 1.0)
    rng = np.random.default_rng(1)
    for size in (0.0, 1e-30, 1.0, 100.0):
        value = jnp.asarray(size * rng.standard_normal(SIZE), jnp.float32)
        cells = released()(key_of(1), value) * c
        assert np.abs(cells - np.round(cells)).max() <= 2.0**-22 * np.abs(cells).max()
    nothing = released()(key_of(1), jnp.zeros(SIZE))
    moved = released()(key_of(1), jnp.full(SIZE, 1000 / c, jnp.float32))
    assert (np.round(moved * c) - np.round(nothing * c) == 1000).all()
    clipped = released()(key_of(1), jnp.full(SIZE, 1e30, jnp.float32))
    assert np.abs(clipped / grid_range(1.0, SIZE) - 1).max() < 0.01


def fine(found):
    """Share of the small outputs whose float32 has bits finer than 2^-24 of one record."""
    small = found[(np.abs(found) < 2.0**-4) & (found != 0)]
    assert len(small) > 100
    return np.mean(small * 2.0**24 != np.round(small * 2.0**24))


def test_low_bits_tell_the_sums_apart_in_float32_and_not_on_the_grid():
    tx = privatize(1.0, 1.0)
    state = tx.init(PARAMS)
    worlds = jnp.zeros(SIZE), jnp.ones(SIZE)
    # Mironov 2012: what is added to 1 and comes out small is a multiple of 2^-24; noise is finer.
    floats = [
        tx.update(Summed(x, 1.0), state, PARAMS, key=key_of(n, part="gradient"))[0]
        for n, x in enumerate(worlds)
    ]
    assert fine(np.asarray(floats[0], np.float64)) > 0.9
    assert fine(np.asarray(floats[1], np.float64)) == 0.0
    integers = [released()(key_of(n), x) for n, x in enumerate(worlds)]
    shares = [fine(found) for found in integers]
    assert abs(shares[0] - shares[1]) < 0.1
    # The lowest bits of the integers themselves.
    _, c = scale_of(1.0, SIZE, 1.0)
    low = [np.bincount(np.round(x * c).astype(int) % 16, minlength=16) for x in integers]
    assert all(np.sum((counts - SIZE / 16) ** 2 / (SIZE / 16)) < 45 for counts in low)


def test_a_key_is_used_once_and_shared_by_no_member_of_a_vmap():
    tx = privatize_on_grid(1.0, 1.0)
    state = tx.init(PARAMS)
    first, state = tx.update(Summed(PARAMS, 1.0), state, PARAMS, key=key_of(0))
    again, _ = tx.update(Summed(PARAMS, 1.0), state, PARAMS, key=key_of(0))
    assert np.isfinite(first).all()
    assert np.isnan(again).all()

    def member(seed, value):
        key = simulated_key(seed, {ON_GRID: 1.0})
        return tx.update(Summed(value, jnp.float32(1.0)), tx.init(PARAMS), PARAMS, key=key)[0]

    seeds, values = jax.random.split(jax.random.key(4), 2), jnp.zeros((2, SIZE))
    found = jax.vmap(member)(seeds, values)
    assert np.abs(np.corrcoef(found)[0, 1]) < 0.06
    assert (found[1] == member(seeds[1], values[1])).all()
    assert np.isnan(jax.vmap(member)(seeds[jnp.asarray([0, 0])], values)).all()
    with pytest.raises(ValueError, match="another one for every member"):
        jax.vmap(lambda value: member(seeds[0], value))(values)


def test_several_leaves_have_one_stream_between_them():
    tree = {"a": jnp.zeros((70, 100)), "b": jnp.zeros(999), "c": jnp.zeros(())}
    tx = privatize_on_grid(1.0, 1.0)
    made, _ = tx.update(Summed(tree, 1.0), tx.init(tree), tree, key=key_of(1))
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(made)])
    # 8,000 coordinates, as one array has them.
    assert (flat == released()(key_of(1), PARAMS)).all()
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, tree)


def test_the_grid_and_ordinary_noise_are_not_taken_for_each_other():
    ordinary, gridded = privatize(1.0, 1.0), privatize_on_grid(1.0, 1.0)
    for tx, part in ((ordinary, ON_GRID), (gridded, "gradient")):
        with pytest.raises(ValueError, match="charged for"):
            tx.update(Summed(PARAMS, 1.0), tx.init(PARAMS), PARAMS, key=key_of(0, part=part))
    key = key_of(0, 2.0)
    with pytest.raises(ValueError, match="charged for"):
        gridded.update(Summed(PARAMS, 1.0), gridded.init(PARAMS), PARAMS, key=key)


@pytest.mark.parametrize("multiplier", [0.0, 1e-9, 1e9, math.nan])
def test_bad_multipliers_are_refused(multiplier):
    with pytest.raises(ValueError, match="noise_multiplier"):
        privatize_on_grid(multiplier, 1.0)


def make(**changes):
    return jaxdp.dp_sgd(1.0, 0.5, 30, 300, noise="grid", **changes)


def test_a_mechanism_charges_the_distance_and_says_its_noise():
    mechanism, ordinary = make(), jaxdp.dp_sgd(1.0, 0.5, 30, 300)
    assert mechanism.event == acc.GridNoise(ordinary.event, 2.0**-78)
    assert mechanism.multipliers(3) == {ON_GRID: 1.0}
    ratio = float(mechanism.noise_std(PARAMS)) / ordinary.noise_std(PARAMS)
    assert 1 <= ratio < 1.001
    epochs = jaxdp.dp_sgd(1.0, 0.5, 30, 300, sampling="allocation", noise="grid")
    assert epochs.event == acc.GridNoise(epochs.event.event, 10 * 2.0**-78)
    levels = jaxdp.schedules.from_multipliers([2.0, 2.0, 1.0])
    scheduled = jaxdp.dp_sgd(levels, 0.5, 30, 300, noise="grid")
    stds = [float(scheduled.noise_std(PARAMS, step)) for step in (0, 2)]
    assert stds[0] / stds[1] == pytest.approx(2, rel=2e-3)
    assert grid_range(levels, SIZE) == grid_range(1.0, SIZE)
    budget = jaxdp.dp_sgd(
        epsilon=2.0, delta=1e-5, steps=5, l2_clip_norm=0.5, batch_size=30, dataset_size=300,
        noise="grid",
    )  # fmt: skip
    assert budget.epsilon(5, 1e-5).upper <= 2.0


def test_what_would_have_ordinary_noise_is_refused():
    for name, bad in (("noise", "secure"), ("count_noise_multiplier", 10.0)):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(make(), **{name: bad})
    with pytest.raises(ValueError, match="noise_multiplier must be above 0"):
        jaxdp.dp_sgd(0.0, 0.5, 30, 300, noise="grid")
    numbers = jaxdp.optimizers.registry.Numbers(
        1.0, 0.5, 30, 300, 0.1, key=jax.random.key(0), noise="grid"
    )
    with pytest.raises(ValueError, match="private energy"):
        jaxdp.optimizers.registry.build("sa-dpsgd-private", numbers)
    assert jaxdp.optimizers.registry.build("dp-adam-bc", numbers).mechanism.noise == "grid"


def test_a_trainer_s_run_and_its_ledger(tmp_path):
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((300, 5)), "y": rng.standard_normal(300)}
    data = jax.tree.map(np.float32, data)

    def loss_fn(w, example):
        return (example["x"] @ w - example["y"]) ** 2

    mechanism, file = make(), tmp_path / "ledger.jsonl"
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), data, ledger=file)
    state = trainer.init(jnp.zeros(5))
    for batch in trainer.batches(4):
        state, _ = trainer.step(state, batch)
    assert np.isfinite(state.params).all()
    assert trainer.unverified() == []
    told = trainer.epsilon(delta=1e-5)
    trainer.close()
    read = jaxdp.Ledger(file)
    assert read.epsilon(1e-5) == told
    assert {entry.event for entry in read.entries} == {mechanism.event}
    assert '"GridNoise"' in json.dumps(acc.events.to_dict(read.event))
    assert told.upper >= jaxdp.dp_sgd(1.0, 0.5, 30, 300).epsilon(4, 1e-5).upper * (1 - 1e-12)
    budget = jaxdp.Ledger(budget=acc.RenyiFilter(5.0, 1e-5))
    with pytest.raises(acc.UnsupportedEventError, match="GridNoise"):
        budget.charge(mechanism.event)


def test_keys_are_of_256_bits_and_of_one_step():
    sampler = make().sampler(300)
    keys = [sampler.draw().key() for _ in range(3)]
    assert all(isinstance(key, NoiseKey) and key.long.shape == (8,) for key in keys)
    assert len({word for key in keys for word in key.long.tolist()}) == 24
    plain = jaxdp.dp_sgd(1.0, 0.5, 30, 300).sampler(300).draw().key()
    assert plain.long is None
    secret = jaxdp.seeds.Secret.from_seed(1)
    assert len(secret.key("a")) == 32
    assert secret.key("a") != secret.key("b")
    assert secret.key("a")[:16] != secret.stream("a")
