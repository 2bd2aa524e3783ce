"""Correlated noise on an integer grid in whole programs: what is charged, and a whole run."""

import dataclasses
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.clipping import rules
from jaxdp.noise import Toeplitz, dyadic, grid, grid_correlated, sensitivity
from jaxdp.noise.participation import participation
from tests.noise.refusals import assert_refused

PARAMS = {"w": jnp.zeros(5), "b": jnp.ones(())}
RNG = np.random.default_rng(0)
DATA = jax.tree.map(np.float32, {"x": RNG.normal(size=(300, 5)), "y": RNG.normal(size=300)})
NUMBERS = {"l2_clip_norm": 0.5, "batch_size": 30, "dataset_size": 300, "steps": 8}
SAMPLINGS = {
    "cyclic_poisson": acc.Relation.ADD_OR_REMOVE_ONE,
    "fixed_order": acc.Relation.REPLACE_SPECIAL,
}


def loss_fn(w, example):
    return (example["x"] @ w["w"] + w["b"] - example["y"]) ** 2


def made(noise_multiplier=1.0, noise="grid", bands=3, **changes):
    return jaxdp.dp_mf(noise_multiplier, noise=noise, bands=bands, **{**NUMBERS, **changes})


@pytest.fixture
def far(monkeypatch):
    """A distance that shows in every epsilon."""
    monkeypatch.setattr(grid, "DISTANCE", 2e-11)


def test_a_mechanism_charges_the_distance_of_all_steps_and_says_its_noise():
    for sampling, relation in SAMPLINGS.items():
        mechanism, ordinary = (
            made(sampling=sampling, strategy="banded", noise=noise)
            for noise in ("grid", "gaussian")
        )
        assert mechanism.event == acc.GridNoise(ordinary.event, 8 * 2.0**-78)
        assert mechanism.strategy == dyadic(ordinary.strategy)
        (part,) = mechanism.multipliers(0)
        assert part == grid_correlated.part_on_grid(mechanism.strategy)
        stds = np.array([float(mechanism.noise_std(PARAMS, step)) for step in range(8)])
        rows = mechanism.strategy.inverse_row_norms()
        wanted = mechanism.l2(PARAMS) * mechanism.fresh / 30 * rows
        assert (stds >= wanted * (1 - 1e-6)).all()
        assert (stds <= wanted * 1.01).all()
        told, usual = (m.epsilon(8, 1e-5, relation) for m in (mechanism, ordinary))
        assert told.upper >= usual.upper * (1 - 1e-12)


@pytest.mark.usefixtures("far")
def test_a_budget_pays_for_the_distance_of_every_step():
    for sampling, relation in SAMPLINGS.items():
        asked = {"epsilon": 3.0, "delta": 1e-5, "strategy": "banded", "sampling": sampling}
        plain, gridded = (made(None, noise, bands=2, **asked) for noise in ("gaussian", "grid"))
        assert gridded.event.distance == 8 * 2e-11
        assert gridded.noise_multiplier >= plain.noise_multiplier
        taken = gridded.epsilon(8, 1e-5, relation).upper
        assert taken <= 3.0
        same = dataclasses.replace(plain, noise_multiplier=gridded.noise_multiplier)
        assert same.epsilon(8, 1e-5, relation).upper < taken
        sampler = gridded.sampler(300, identities=range(300))
        sampler.draw()  # the whole run is charged with its first step
        assert sampler.ledger.epsilon(1e-5, relation).upper >= taken * (1 - 1e-9)


@pytest.mark.usefixtures("far")
def test_a_trainer_s_run_with_frozen_parameters_its_ledger_and_an_old_state(tmp_path):
    mechanism, file = made(), tmp_path / "ledger.jsonl"
    taken = mechanism.epsilon(8, 1e-5).upper
    trainer = jaxdp.Trainer(
        loss_fn, mechanism, optax.sgd(0.1), DATA, trainable={"w": True, "b": False}, ledger=file
    )
    state, old = trainer.init(PARAMS), None
    for batch in trainer.batches():
        if batch.draw.step == 2:
            old = jax.tree.map(jnp.array, state)
        if batch.draw.step == 4:
            with pytest.raises(ValueError, match="that of the step before for correlated noise"):
                trainer.step(old, batch)
        state, _ = trainer.step(state, batch)
        assert trainer.epsilon(1e-5).upper >= taken * (1 - 1e-9)
    assert state.params["b"] == 1.0
    assert np.isfinite(state.params["w"]).all()
    (buffers,) = jax.tree.leaves(state.opt_state[0].buffers)
    assert (buffers.shape, buffers.dtype) == ((2, 5), np.int32)
    (said,) = trainer.unverified()
    assert said.endswith("the frozen parameter ['b']")
    told = trainer.epsilon(delta=1e-5)
    with pytest.raises(ValueError, match="steps"):
        trainer.batches(1)
    trainer.close()
    read = jaxdp.Ledger(file)
    assert read.epsilon(1e-5) == told
    assert [(entry.event, entry.steps) for entry in read.entries] == [(mechanism.event, 8)]


def test_a_multiplier_of_few_digits_has_the_noise_that_is_charged():
    """The fresh noise of float16(2.68) was rounded to 16 bits: 6e-4 below what was charged."""
    for noise, sampling in itertools.product(("grid", "gaussian"), SAMPLINGS):
        start = made(noise=noise, sampling=sampling, strategy="banded")
        moved = sensitivity(start.strategy, participation(start.sampling, 300)).value
        for kind in (np.float16, np.float32, np.float64):
            for number in np.linspace(0.3, 3, 40):
                fresh = dataclasses.replace(start, noise_multiplier=kind(number)).fresh
                assert Fraction(fresh) >= Fraction(float(kind(number))) * Fraction(moved)
                assert fresh == np.float32(fresh)


def test_a_bound_of_few_digits_is_not_rounded_in_the_sensitivity():
    """The box of float16(0.45) said a norm 1.8e-4 below that of a clipped record."""
    params = {"a": jnp.zeros(7), "b": jnp.zeros(3)}
    for kind in (np.float16, np.float32):
        for number in np.linspace(0.1, 2, 50).astype(kind):
            exact = float(number)
            assert rules.CoordinateBox(number).l2(params) >= exact * math.sqrt(10)
            groups = rules.per_layer({"a": number, "b": number})
            assert groups.l2(params) == pytest.approx(exact * math.sqrt(2), rel=1e-15)


def test_the_sensitivity_is_that_of_the_rounded_coefficients():
    """Rounding made some larger: the sensitivity before it would be too low."""
    steep = Toeplitz((1.0, 0.9999, 0.9999, 0.9999), 8)
    rough = Toeplitz((1.0, 0.50196, 0.50196), 8)
    for exact in (steep, rough):

        def ordered(strategy):
            return made(strategy=strategy, bands=None, sampling="fixed_order", batch_size=150)

        taken = dyadic(exact)
        mechanism = ordered(taken)
        moved = sensitivity(taken, participation(mechanism.sampling, 300)).value
        column = taken.matrix()[:, ::2].sum(axis=1)
        assert moved >= np.linalg.norm(column) * (1 - 1e-12)
        assert mechanism.fresh >= moved
        assert_refused([(lambda exact=exact: ordered(exact), "8 binary digits")])
    tiny, wide = dyadic(Toeplitz((1.0, 0.001, -0.0015), 8)), Toeplitz((1.0, -0.75, 0.5), 8)
    of_tiny, of_wide = (made(strategy=strategy, bands=None) for strategy in (tiny, wide))
    assert tiny.coefficients == (1.0, 0.0, 0.0)
    assert of_tiny.fresh == pytest.approx(1.0, rel=1e-6)
    assert of_tiny.sampling.bands == 3  # more groups than are needed cost, and are safe
    norm = math.sqrt(1 + 0.75**2 + 0.5**2)
    assert norm <= of_wide.fresh <= norm * (1 + 1e-5)
