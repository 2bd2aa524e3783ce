"""Steps with correlated noise on an integer grid: what they release, refusals, whole runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.noise import (
    Buffered,
    Dense,
    Toeplitz,
    banded_inverse_square_root,
    dyadic,
    grid,
    grid_correlated,
    optimal_banded,
    privatize_correlated,
    privatize_correlated_on_grid,
    privatize_on_grid,
)
from jaxdp.tickets import simulated_key
from jaxdp.types import Summed
from tests.noise.test_grid_correlated import (
    PARAMS,
    SIZE,
    STEPS,
    STRATEGIES,
    compiled,
    flat,
    keys_of,
)


def run(strategy, values, keys, l2=1.0, multiplier=1.5):
    tx = privatize_correlated_on_grid(strategy, multiplier, 1.0)
    update, state = compiled(tx, values[0]), tx.init(values[0])
    found = []
    for value, key in zip(values, keys, strict=True):
        out, state = update(state, value, key, l2)
        found.append(flat(out))
    return np.stack(found), state


def test_the_noise_is_the_strategy_s_and_of_the_size_that_is_told():
    strategy, size = STRATEGIES[0], 4000
    zeros = [jnp.zeros(size)] * STEPS
    found, _ = run(strategy, zeros, keys_of(strategy))
    fresh = strategy.matrix() @ found
    assert np.abs(fresh.std(axis=1) / 1.5 - 1).max() < 0.05
    assert np.abs(np.corrcoef(fresh) - np.eye(STEPS)).max() < 0.07
    rows = 1.5 * strategy.inverse_row_norms()
    assert np.abs(found.std(axis=1) / rows - 1).max() < 0.05
    # And the sums are there: the noise of the same keys is the same.
    moved, _ = run(strategy, [jnp.full(size, 3.0)] * STEPS, keys_of(strategy))
    assert np.abs(moved - found - 3.0).max() < 1e-4


def test_a_sensitivity_that_changes_between_steps_changes_the_cells_alone():
    """The noise of a step is for its own l2, and what it takes back is in cells."""
    strategy = STRATEGIES[0]
    tx = privatize_correlated_on_grid(strategy, 1.5, 1.0)
    update, state, same = compiled(tx), tx.init(PARAMS), tx.init(PARAMS)
    law = grid.law_for(1.5, SIZE, grid_correlated.carried(strategy))
    for step, key in enumerate(keys_of(strategy)[:4]):
        l2 = (1.0, 0.25, 8.0, 1.0)[step]
        scales = [float(grid.grid_scale(law, 1.5, SIZE, x)) for x in (l2, 1.0)]
        out, state = update(state, PARAMS, key, l2)
        other, same = update(same, PARAMS, key, 1.0)
        cells = [np.round(flat(x) * c) for x, c in zip((out, other), scales, strict=True)]
        assert (cells[0] == cells[1]).all()


def test_a_wrong_state_releases_nothing_now_or_later():
    strategy = STRATEGIES[0]
    tx = privatize_correlated_on_grid(strategy, 1.5, 1.0)
    update, keys = compiled(tx), keys_of(strategy)
    states = [tx.init(PARAMS)]
    for key in keys[:3]:
        out, after = update(states[-1], PARAMS, key)
        assert np.isfinite(flat(out)).all()
        states.append(after)
    for state, key in ((states[0], keys[1]), (states[2], keys[1]), (states[3], keys[2])):
        out, after = update(state, PARAMS, key)
        assert np.isnan(flat(out)).all()
        for later in keys:
            out, _ = update(after, PARAMS, later)
            assert np.isnan(flat(out)).all()
    # Of the right step, and with another past.
    other = dataclasses.replace(keys[3], before=np.array([7, 9], np.uint32))
    assert np.isnan(flat(update(states[3], PARAMS, other)[0])).all()
    # Beyond the strategy's steps.
    beyond = states[3]._replace(step=jnp.asarray(STEPS, jnp.int32))
    key = simulated_key(jax.random.key(0), {grid_correlated.part_on_grid(strategy): 1.5}, STEPS)
    assert np.isnan(flat(update(beyond, PARAMS, key)[0])).all()


def test_members_of_a_vmap_have_noise_of_their_own():
    strategy = STRATEGIES[0]
    tx = privatize_correlated_on_grid(strategy, 1.5, 1.0)
    part = grid_correlated.part_on_grid(strategy)

    def member(seed, value):
        state, found = tx.init(value), []
        for step in range(3):
            key = simulated_key(jax.random.fold_in(seed, step), {part: 1.5}, step)
            out, state = tx.update(Summed(value, jnp.float32(1.0)), state, value, key=key)
            found.append(out)
        return jnp.stack(found)

    seeds, values = jax.random.split(jax.random.key(4), 2), jnp.zeros((2, 900))
    found = jax.vmap(member)(seeds, values)
    assert (found[1] == member(seeds[1], values[1])).all()
    assert abs(np.corrcoef(found[0].ravel(), found[1].ravel())[0, 1]) < 0.08
    with pytest.raises(ValueError, match="another one for every member"):
        jax.vmap(lambda value: member(seeds[0], value))(values)


def test_the_steps_in_a_scan_are_those_one_by_one():
    strategy = STRATEGIES[0]
    tx = privatize_correlated_on_grid(strategy, 1.5, 1.0)
    values = jnp.asarray(np.random.default_rng(2).standard_normal((STEPS, 40)), jnp.float32)
    keys = jax.tree.map(lambda *x: jnp.stack([jnp.asarray(y) for y in x]), *keys_of(strategy))

    def step(state, both):
        key, value = both
        out, state = tx.update(Summed(value, jnp.float32(1.0)), state, value, key=key)
        return state, out

    _, scanned = jax.lax.scan(step, tx.init(values[0]), (keys, values))
    found, _ = run(strategy, list(values), keys_of(strategy))
    assert (np.asarray(scanned) == found).all()


def test_noises_are_not_taken_for_each_other():
    strategy = STRATEGIES[0]
    gridded = privatize_correlated_on_grid(strategy, 1.5, 1.0)
    other = privatize_correlated_on_grid(Toeplitz((1.0, 0.5), STEPS), 1.5, 1.0)
    ordinary, plain = privatize_correlated(strategy, 1.5, 1.0), privatize_on_grid(1.5, 1.0)
    key = keys_of(strategy)[0]
    for tx in (other, ordinary, plain):
        with pytest.raises(ValueError, match="charged for"):
            tx.update(Summed(PARAMS, 1.0), tx.init(PARAMS), PARAMS, key=key)
    with pytest.raises(ValueError, match="charged for"):
        gridded.update(
            Summed(PARAMS, 1.0), gridded.init(PARAMS), PARAMS, key=keys_of(strategy, 1.0)[0]
        )


def test_what_cannot_be_on_the_grid_is_refused_in_words():
    rational = optimal_banded(STEPS, 3)
    for bad, match in (
        (rational, r"jaxdp\.noise\.dyadic"),
        (Buffered((0.5,), (0.5,), STEPS), "must be a banded Toeplitz one"),
        (banded_inverse_square_root(STEPS, 3), "Take strategy='banded'"),
        (Dense.of(np.eye(STEPS)), "must be a banded Toeplitz one"),
        (Toeplitz((1.0, *([1.0, -1.0] * 35)), 2000), "add up to at most 64|within float32"),
        (Toeplitz((1.0, 1.0), 2000), "32 bits of the grid"),
    ):
        with pytest.raises(ValueError, match=match):
            privatize_correlated_on_grid(bad, 1.0, 1.0)
    for bad in (rational, Buffered((0.5,), (0.5,), STEPS)):
        ordinary = jaxdp.dp_mf(1.0, 0.5, 30, 300, "fixed_order", steps=STEPS, strategy=bad)
        with pytest.raises(ValueError, match="strategy must"):
            dataclasses.replace(ordinary, noise="grid")
    for name in ("buffered", "dense", "banded_inverse"):
        with pytest.raises(ValueError, match="strategy must be one of banded, square_root"):
            jaxdp.dp_mf(1.0, 0.5, 30, 300, "fixed_order", steps=9, strategy=name, noise="grid")
    with pytest.raises(ValueError, match="noise must be one of gaussian, grid"):
        jaxdp.dp_mf(1.0, 0.5, 30, 300, steps=9, bands=2, noise="secure")
    with pytest.raises(ValueError, match="noise_multiplier must be in"):
        privatize_correlated_on_grid(STRATEGIES[0], 1e7, 1.0)
    tx, key = privatize_correlated_on_grid(STRATEGIES[0], 1.5, 1.0), keys_of(STRATEGIES[0])[0]
    doubles = {name: np.zeros(leaf.shape) for name, leaf in PARAMS.items()}
    with pytest.raises(ValueError, match="must be of float32"):
        tx.update(Summed(doubles, 1.0), tx.init(PARAMS), PARAMS, key=key)


def made_mechanism(**changes):
    numbers = {"l2_clip_norm": 0.5, "batch_size": 30, "dataset_size": 300, "steps": 8, "bands": 3}
    return jaxdp.dp_mf(**{"noise": "grid", "noise_multiplier": 1.0, **numbers, **changes})


@pytest.mark.parametrize("sampling", ["cyclic_poisson", "fixed_order"])
def test_a_mechanism_charges_the_distance_of_all_steps_and_says_its_noise(sampling):
    mechanism, ordinary = (
        made_mechanism(sampling=sampling, strategy="banded", noise=noise)
        for noise in ("grid", "gaussian")
    )
    assert mechanism.event == acc.GridNoise(ordinary.event, 8 * 2.0**-78)
    assert mechanism.strategy == dyadic(ordinary.strategy)
    (part,) = mechanism.multipliers(0)
    assert part == grid_correlated.part_on_grid(mechanism.strategy)
    stds = [float(mechanism.noise_std(PARAMS, step)) for step in range(8)]
    wanted = mechanism.l2(PARAMS) * mechanism.fresh / 30 * mechanism.strategy.inverse_row_norms()
    assert (np.array(stds) >= wanted * (1 - 1e-6)).all()
    assert (np.array(stds) <= wanted * 1.01).all()
    relation = "add_or_remove_one" if sampling == "cyclic_poisson" else "replace_special"
    told, usual = (m.epsilon(8, 1e-5, acc.Relation(relation)) for m in (mechanism, ordinary))
    assert told.upper >= usual.upper * (1 - 1e-12)


def data_of():
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((300, 5)), "y": rng.standard_normal(300)}
    return jax.tree.map(np.float32, data)


def loss_fn(w, example):
    return (example["x"] @ w["w"] + w["b"] - example["y"]) ** 2


def test_a_trainer_s_run_its_ledger_and_its_last_step(tmp_path):
    mechanism, file = made_mechanism(), tmp_path / "ledger.jsonl"
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), data_of(), ledger=file)
    state = trainer.init({"w": jnp.zeros(5), "b": jnp.zeros(())})
    states = [jax.tree.map(np.asarray, state)]
    for batch in trainer.batches():
        state, _ = trainer.step(state, batch)
        states.append(jax.tree.map(np.asarray, state))
    assert np.isfinite(flat(state.params)).all()
    assert len(states) == 9
    assert trainer.unverified() == []
    told = trainer.epsilon(delta=1e-5)
    with pytest.raises(ValueError, match="steps"):
        trainer.batches(1)
    trainer.close()
    read = jaxdp.Ledger(file)
    assert read.epsilon(1e-5) == told
    assert [(entry.event, entry.steps) for entry in read.entries] == [(mechanism.event, 8)]
    noise = jax.tree.leaves(state.opt_state[0].buffers)
    assert {leaf.dtype for leaf in noise} == {np.dtype(np.int32)}


def test_frozen_parameters_and_an_old_state(tmp_path):
    mechanism = made_mechanism()
    trainer = jaxdp.Trainer(
        loss_fn, mechanism, optax.sgd(0.1), data_of(), trainable={"w": True, "b": False}
    )
    state = trainer.init({"w": jnp.zeros(5), "b": jnp.ones(())})
    old = None
    for batch in trainer.batches():
        if batch.draw.step == 2:
            old = jax.tree.map(jnp.array, state)
        if batch.draw.step == 4:
            with pytest.raises(ValueError, match="that of the step before for correlated noise"):
                trainer.step(old, batch)
        state, _ = trainer.step(state, batch)
    assert state.params["b"] == 1.0
    assert np.isfinite(state.params["w"]).all()
    assert jax.tree.leaves(state.opt_state[0].buffers)[0].shape == (2, 5)
