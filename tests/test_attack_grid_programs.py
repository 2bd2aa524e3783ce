"""Attacks on noise on an integer grid by whole programs: rules, draws, precisions, modes of JAX."""

import functools
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp import clipping
from jaxdp.noise import _cells, _chacha, grid, privatize_on_grid
from jaxdp.sampling import named
from jaxdp.tickets import ON_GRID, simulated_key
from jaxdp.types import Summed

DATA = jnp.asarray(np.random.default_rng(0).standard_normal((60, 5)), jnp.float32)
PARAMS = {"w": jnp.zeros(5), "b": jnp.zeros(())}
RULES = {
    "flat": clipping.clip(0.7),
    "auto": clipping.auto_s(0.7),
    "normalised": clipping.normalize(0.7),
    "layers": clipping.per_layer({"w": 0.5, "b": 0.3}),
    "box": clipping.coordinate_box(0.2),
}
RELATIONS = {
    "shuffle": acc.Relation.REPLACE_ONE,
    "fixed_size": acc.Relation.REPLACE_ONE,
    "truncated_poisson": acc.Relation.REPLACE_SPECIAL,
}


def loss_fn(params, example):
    return (example @ params["w"] + params["b"] - 1.0) ** 2


def made(rule="flat", sampling="poisson", noise="grid", multiplier=1.0):
    return jaxdp.dp_sgd(
        noise_multiplier=multiplier,
        rule=RULES[rule],
        batch_size=60 if sampling == "full_batch" else 12,
        dataset_size=60,
        sampling=sampling,
        noise=noise,
    )


@pytest.mark.parametrize("sampling", named.NAMES)
def test_every_draw_is_charged_as_ordinary_noise_and_the_distance(sampling):
    mechanism, ordinary = made(sampling=sampling), made(sampling=sampling, noise="gaussian")
    assert mechanism.event == acc.GridNoise(ordinary.event, ordinary.event.block * 2.0**-78)
    relation = RELATIONS.get(sampling, acc.Relation.ADD_OR_REMOVE_ONE)
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), DATA)
    state = trainer.init(PARAMS)
    for batch in trainer.batches(5):
        state, _ = trainer.step(state, batch)
    told = trainer.epsilon(1e-5, relation).upper
    assert told >= ordinary.epsilon(5, 1e-5, relation).upper * (1 - 1e-12)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_releases_whole_cells_alone(rule):
    """One step of plain SGD: the parameters moved by whole cells of c over the batch size."""
    mechanism = made(rule)
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(1.0), DATA)
    state, off = trainer.init(PARAMS), []
    law = grid.law_for(1.0, 6)
    scale = float(grid.grid_scale(law, np.float32(1.0), 6, mechanism.l2(PARAMS)))
    (batch,) = trainer.batches(1)
    state, _ = trainer.step(state, batch)
    for name, leaf in state.params.items():
        unscale = {"w": 0.5, "b": 0.3}[name] if rule == "layers" else 1.0
        found = np.asarray(leaf, np.float64) * 12 * scale / unscale
        off.append(np.abs(found - np.round(found)) / (1 + np.abs(found)))
    assert max(map(np.max, off)) <= 2.0**-21


@functools.cache
def integers_of(size):
    tx, params = privatize_on_grid(1.0, 1.0), jnp.zeros(size, jnp.float32)
    key = simulated_key(jax.random.key(3), {ON_GRID: 1.0})
    value = jnp.linspace(-1, 1, size, dtype=jnp.float32)
    return lambda: np.asarray(tx.update(Summed(value, 1.0), tx.init(params), params, key=key)[0])


def test_modes_of_jax_change_no_bit():
    usual = integers_of(40)()
    assert len(np.unique(usual)) == 40
    jax.clear_caches()
    with jax.enable_x64(True):
        wide = integers_of.__wrapped__(40)()
    assert wide.dtype == np.float32
    assert (wide == usual).all()
    with jax.disable_jit():
        assert (integers_of.__wrapped__(40)() == usual).all()
    with jax.numpy_rank_promotion("raise"), jax.default_matmul_precision("bfloat16"):
        assert (integers_of.__wrapped__(40)() == usual).all()


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float16])
def test_parameters_of_few_digits_get_the_integers_of_the_same_sum(kind):
    tx = privatize_on_grid(1.0, 1.0)
    key = simulated_key(jax.random.key(5), {ON_GRID: 1.0})
    value = jnp.linspace(-1, 1, 300).astype(kind)
    found = []
    for like in (kind, jnp.float32):
        params = jnp.zeros(300, like)
        summed = Summed(value.astype(like), jnp.float32(1.0))
        found.append(tx.update(summed, tx.init(params), params, key=key)[0].astype(kind))
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize("power", [-40, -12, 0, 12, 23, 24, 29, 30])
def test_neighbours_of_powers_of_two_and_of_half_cells_are_rounded_as_charged(power):
    """Where a float's spacing changes, and where a cell does: the last bit either way."""
    for digits in (1.0, 1.9995117, 1.0004883, 1.4140625):
        c = np.float32(digits * 2.0 ** (power % 7 * 9 - 27))
        assert _cells.shortened(jnp.asarray(c)) == c
        at = np.float32(2.0**power / c * np.asarray([1.0, 0.5, 1.5, 0.75, 1.25]))
        near = [at]
        for end in (-np.inf, np.inf):
            step = at
            for _ in range(3):
                step = np.nextafter(step, np.float32(end))
                near.append(step)
        x = np.concatenate([*near, *(-each for each in near)])
        cells = np.asarray(_cells.on_grid(jnp.asarray(x), jnp.asarray(c)), np.float64)
        limit = float(np.float32(2.0**30) / c)
        exact = np.clip(x.astype(np.float64), -limit, limit) * float(c)
        assert np.abs(cells - exact).max() <= 0.5 + 2.0**-23


def test_a_key_of_64_bit_words_is_refused():
    """With x64 a simulated key had them: adding and rotating 64 bits is no ChaCha20."""
    with jax.enable_x64(True):
        assert simulated_key(jax.random.key(3), {ON_GRID: 1.0}).long.dtype == np.uint32
        wide = jnp.zeros(8, jnp.uint64)
        with pytest.raises(ValueError, match="key must be uint32, got uint64"):
            _chacha.block(wide, jnp.zeros(1, jnp.uint32), (0, 0, 0))
        with pytest.raises(ValueError, match="counter must be uint32, got int64"):
            _chacha.block(jnp.zeros(8, jnp.uint32), jnp.zeros(1, jnp.int64), (0, 0, 0))


@pytest.mark.parametrize("flag", ["", "=true", "=1", "=false --xla_cpu_enable_fast_math=true"])
def test_fast_math_is_refused(flag, monkeypatch):
    """With it a sum was 63.7 cells from where it should be (40 scales, 8,000 values each)."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to= --xla_cpu_enable_fast_math{flag}")
    identity = jaxdp.noise.identity(3)
    for make in (
        lambda: jaxdp.privatize(1.0, 1.0),
        lambda: jaxdp.noise.privatize_correlated(identity, 1.0, 1.0),
        lambda: privatize_on_grid(1.0, 1.0),
        lambda: jaxdp.noise.privatize_correlated_on_grid(identity, 1.0, 1.0),
        made().privatize,
    ):
        with pytest.raises(ValueError, match="must not have xla_cpu_enable_fast_math"):
            make()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    privatize_on_grid(1.0, 1.0)


ON = "--xla_cpu_enable_fast_math=true"
PROBE = """
import jax, numpy as np
from jaxdp.noise import privatize_on_grid, _cells
x = np.random.default_rng(0).normal(size=2000).astype(np.float32) * 300
scale = np.asarray(_cells.shortened(np.float32(307203.7)))
exact = x.astype(np.float64) * float(scale)
print(np.abs(np.asarray(jax.jit(_cells.on_grid)(x, scale)) - exact).max() > 0.6)
privatize_on_grid(1.0, 1.0)
"""


def test_a_file_of_flags_is_read_as_xla_reads_it(tmp_path, monkeypatch):
    """XLA_FLAGS may name a file: fast math was on, sums were 31.5 cells off, and all was taken."""
    file = tmp_path / "flags"
    file.write_text(f"--xla_dump_to=\n{ON}\n", encoding="utf-8")
    monkeypatch.setenv("XLA_FLAGS", str(file))
    with pytest.raises(ValueError, match="must not have xla_cpu_enable_fast_math"):
        privatize_on_grid(1.0, 1.0)
    command = [sys.executable, "-c", PROBE]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout == "True\n"
    assert "must not have xla_cpu_enable_fast_math" in found.stderr
    file.write_text("--xla_dump_to=", encoding="utf-8")
    privatize_on_grid(1.0, 1.0)
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "nowhere"))
    privatize_on_grid(1.0, 1.0)


@pytest.mark.parametrize("other", ["--xla_dump_to=a--xla_cpu_enable_fast_math=false", "='true'"])
def test_the_name_of_the_flag_in_another_one_does_not_hide_it(other, monkeypatch):
    """The last name that was found counted, though XLA takes it for a part of a path."""
    monkeypatch.setenv("XLA_FLAGS", f"{ON} {other}" if other[0] == "-" else f"{ON[:-5]}{other}")
    with pytest.raises(ValueError, match="must not have xla_cpu_enable_fast_math"):
        privatize_on_grid(1.0, 1.0)


def test_no_epsilon_is_told_at_a_delta_that_the_distance_takes():
    mechanism, steps = made(multiplier=5.0), 100
    distance = steps * 2.0**-78
    assert mechanism.epsilon(steps, distance).upper == math.inf
    assert mechanism.epsilon(steps, 1e-9).upper < math.inf


@pytest.mark.parametrize("multiplier", [1e-6, 1.0, 1e5])
@pytest.mark.parametrize("l2", [1e-22, 1.0, 1e22])
def test_the_ends_of_multipliers_and_norms_have_their_noise_or_release_nothing(multiplier, l2):
    size = 2_000
    tx, params = privatize_on_grid(multiplier, 1.0), jnp.zeros(size)
    key = simulated_key(jax.random.key(1), {ON_GRID: multiplier})
    for value in (0.0, l2, 1e-45):
        summed = Summed(jnp.full(size, value, jnp.float32), jnp.float32(l2))
        found = np.asarray(tx.update(summed, tx.init(params), params, key=key)[0], np.float64)
        if np.isnan(found).all():
            scale = grid.law_for(multiplier, size).std / (multiplier * l2)
            assert not 2.0**-99 < scale < 2.0**99
            continue
        spread = np.std(found) / (multiplier * l2)
        assert 0.9 <= spread <= 1.1 / (1 - 2 * grid._MOST)


def test_one_draw_has_a_key_for_one_program():
    """A draw hands its key out once; a second program finds none."""
    draw = made().sampler(60).draw()
    draw.key()
    with pytest.raises(ValueError, match="spent"):
        draw.key()


def test_members_of_two_vmaps_and_of_a_map_within_share_no_noise():
    tx, params = privatize_on_grid(1.0, 1.0), jnp.zeros(64)

    def member(seed):
        key = simulated_key(seed, {ON_GRID: 1.0})
        return tx.update(Summed(params, jnp.float32(1.0)), tx.init(params), params, key=key)[0]

    seeds = jax.random.split(jax.random.key(9), 6).reshape(2, 3)
    found = np.asarray(jax.vmap(jax.vmap(member))(seeds)).reshape(6, 64)
    assert len(np.unique(found, axis=0)) == 6
    alone = np.stack([member(seed) for seed in seeds.reshape(-1)])
    assert (found == alone).all()
    twice = seeds.at[1, 2].set(seeds[0, 0])
    assert np.isnan(jax.vmap(jax.vmap(member))(twice)).all()


@pytest.mark.parametrize("sampling", ["poisson", "allocation"])
def test_a_state_that_is_put_back_has_other_noise(sampling):
    trainer = jaxdp.Trainer(loss_fn, made(sampling=sampling), optax.sgd(1.0), DATA)
    state = trainer.init(PARAMS)
    copies = [jax.tree.map(jnp.copy, state) for _ in range(3)]
    found = []
    for copy, batch in zip(copies, trainer.batches(3), strict=True):
        after, _ = trainer.step(copy, batch)
        found.append(np.append(after.params["w"], after.params["b"]))
    assert len(np.unique(np.round(found, 6), axis=0)) == 3
    assert len(trainer.ledger.entries)
