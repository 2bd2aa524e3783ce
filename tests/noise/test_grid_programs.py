"""Noise on an integer grid in whole programs: what is charged, whole runs, and what is refused."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp import clipping
from jaxdp.clipping import rules
from jaxdp.ledger.tickets import ON_GRID, simulated_key
from jaxdp.mechanism import participation
from jaxdp.noise import (
    NOISES,
    IntegerMatrixNoise,
    IntegerNoise,
    Toeplitz,
    dyadic,
    grid,
    grid_range,
    sensitivity,
)
from jaxdp.optimizers import registry
from jaxdp.sampling import names
from jaxdp.types import Summed
from tests.ledger.small import trained
from tests.mechanisms import sgd_of
from tests.refusing import all_refused

DATA = jnp.asarray(np.random.default_rng(0).standard_normal((60, 5)), jnp.float32)
MANY = jnp.asarray(np.random.default_rng(0).standard_normal((300, 5)), jnp.float32)
PARAMS = {"w": jnp.zeros(5), "b": jnp.zeros(())}
LAYERS = {"w": 0.5, "b": 0.3}
RULES = {
    "flat": clipping.clip(0.7),
    "auto": clipping.auto_s(0.7),
    "normalised": clipping.normalize(0.7),
    "layers": clipping.per_layer(LAYERS),
    "box": clipping.coordinate_box(0.2),
}
RELATIONS = {
    "shuffle": acc.Relation.REPLACE_ONE,
    "fixed_size": acc.Relation.REPLACE_ONE,
    "truncated_poisson": acc.Relation.REPLACE_SPECIAL,
}
NUMBERS = {"l2_clip_norm": 0.5, "batch_size": 30, "dataset_size": 300, "steps": 8}
SAMPLINGS = {
    "cyclic_poisson": acc.Relation.ADD_OR_REMOVE_ONE,
    "fixed_order": acc.Relation.REPLACE_SPECIAL,
}


def loss_fn(params, example):
    return (example @ params["w"] + params["b"] - 1.0) ** 2


def made(sampling="poisson", noise="grid", multiplier=1.0, rule=RULES["flat"], **changes):
    batch = 60 if sampling == "full_batch" else 12
    return sgd_of(multiplier, None, batch, 60, sampling=sampling, noise=noise, rule=rule, **changes)


@pytest.fixture
def far(monkeypatch):
    """A distance that shows in every epsilon."""
    monkeypatch.setitem(NOISES, "grid", NOISES["grid"]._replace(distance=2e-11))


def correlated(noise_multiplier=1.0, noise="grid", bands=3, **changes):
    return jaxdp.dp_mf(
        noise_multiplier=noise_multiplier, noise=noise, bands=bands, **{**NUMBERS, **changes}
    )


def test_every_draw_is_charged_as_ordinary_noise_and_the_distance():
    for sampling in names():
        mechanism, ordinary = made(sampling), made(sampling, "gaussian")
        distance = ordinary.event.block * 2.0**-78
        assert mechanism.event == acc.GridNoise(ordinary.event, distance), sampling
        relation = RELATIONS.get(sampling, acc.Relation.ADD_OR_REMOVE_ONE)
        sampler = mechanism.sampler(60)
        for _ in range(5):
            sampler.draw()
        told = sampler.ledger.epsilon(1e-5, relation).upper
        assert told >= ordinary.epsilon(5, 1e-5, relation).upper * (1 - 1e-12), sampling
    ((event, _, _),) = made("allocation").events(0, 25)
    assert event.distance == 5 * grid.DISTANCE
    # And a mechanism says its noise.
    mechanism, ordinary = made(), made(noise="gaussian")
    assert mechanism.multipliers(3) == {ON_GRID: 1.0}
    params = jnp.zeros(8000)
    assert 1 <= float(mechanism.noise_std(params)) / ordinary.noise_std(params) < 1.001
    levels = jaxdp.schedules.from_multipliers([2.0, 2.0, 1.0])
    stds = [float(made(multiplier=levels).noise_std(params, step)) for step in (0, 2)]
    assert stds[0] / stds[1] == pytest.approx(2, rel=2e-3)
    assert grid_range(levels, 8000) == grid_range(1.0, 8000)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_releases_whole_cells_alone(rule):
    mechanism = made(rule=RULES[rule])
    grad_fn, tx = mechanism.clipped_grad(loss_fn), mechanism.privatize()
    summed = grad_fn(PARAMS, DATA, mechanism.sampler(60).draw())
    updates, _ = tx.update(summed, tx.init(PARAMS), PARAMS)
    law = grid.integer_law(1.0, 6)
    scale = float(grid.grid_scale(law, np.float32(1.0), 6, mechanism.l2(PARAMS)))
    for name, leaf in updates.items():
        unscale = LAYERS[name] if rule == "layers" else 1.0
        found = np.asarray(leaf, np.float64) * 12 * scale / unscale
        assert (found != 0).all()
        assert (np.abs(found - np.round(found)) <= 2.0**-21 * (1 + np.abs(found))).all()


@pytest.mark.usefixtures("far")
def test_a_trainer_s_run_and_its_ledger_pay_for_the_distance(tmp_path):
    mechanism, file = made(), tmp_path / "ledger.jsonl"
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), DATA, ledger=file)
    state = trained(trainer, 4, params=PARAMS)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    assert trainer.unverified() == []
    told, taken = trainer.epsilon(delta=1e-5), mechanism.epsilon(4, 1e-5).upper
    trainer.close()
    read = jaxdp.Ledger(file)
    assert read.epsilon(1e-5) == told
    assert {entry.event for entry in read.entries} == {mechanism.event}
    assert '"GridNoise"' in json.dumps(acc.events.to_dict(read.event))
    assert told.upper >= taken * (1 - 1e-9) > made(noise="gaussian").epsilon(4, 1e-5).upper


# Correlated noise.
def test_a_mechanism_charges_the_distance_of_all_steps_and_says_its_noise():
    for sampling, relation in SAMPLINGS.items():
        banded = {"sampling": sampling, "strategy": "banded"}
        mechanism, ordinary = (correlated(noise=n, **banded) for n in ("grid", "gaussian"))
        assert mechanism.event == acc.GridNoise(ordinary.event, 8 * 2.0**-78)
        assert mechanism.strategy == dyadic(ordinary.strategy)
        (part,) = mechanism.multipliers(0)
        assert part == IntegerMatrixNoise(1.0, mechanism.strategy).part
        stds = np.array([float(mechanism.noise_std(PARAMS, step)) for step in range(8)])
        rows = mechanism.strategy.inverse_row_norms()
        wanted = mechanism.l2(PARAMS) * mechanism.uncorrelated_multiplier / 30 * rows
        assert (stds >= wanted * (1 - 1e-6)).all()
        assert (stds <= wanted * 1.01).all()
        told, usual = (m.epsilon(8, 1e-5, relation) for m in (mechanism, ordinary))
        assert told.upper >= usual.upper * (1 - 1e-12)


@pytest.mark.usefixtures("far")
def test_a_budget_pays_for_the_distance_of_every_step():
    budget, noises = {"epsilon": 3.0, "delta": 1e-5}, ("gaussian", "grid")
    plain, gridded = (made(noise=n, multiplier=None, steps=100, **budget) for n in noises)
    assert gridded.noise_multiplier > plain.noise_multiplier
    assert 2.99 < gridded.epsilon(100, 1e-5).upper <= 3.0
    same = made(noise="gaussian", multiplier=gridded.noise_multiplier)
    assert same.epsilon(100, 1e-5).upper < gridded.epsilon(100, 1e-5).upper
    for sampling, relation in SAMPLINGS.items():
        asked = {**budget, "strategy": "banded", "sampling": sampling}
        plain, gridded = (correlated(None, n, bands=2, **asked) for n in noises)
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
    mechanism, file = correlated(), tmp_path / "ledger.jsonl"
    taken = mechanism.epsilon(8, 1e-5).upper
    given = {"trainable": {"w": True, "b": False}, "ledger": file}
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), MANY, **given)
    state, old = trainer.init(PARAMS), None
    for batch in trainer.batches():
        if batch.draw.step == 2:
            old = jax.tree.map(jnp.array, state)
        if batch.draw.step == 4:
            with pytest.raises(ValueError, match="that of the step before for correlated noise"):
                trainer.step(old, batch)
        state, _ = trainer.step(state, batch)
        assert trainer.epsilon(1e-5).upper >= taken * (1 - 1e-9)
    assert state.params["b"] == 0.0
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


def test_multipliers_and_bounds_of_few_digits_have_the_noise_that_is_charged():
    """The fresh noise of float16(2.68) was rounded to 16 bits: 6e-4 below what was charged."""
    for noise, sampling in itertools.product(("grid", "gaussian"), SAMPLINGS):
        start = correlated(noise=noise, sampling=sampling, strategy="banded")
        moved = sensitivity(start.strategy, participation(start.sampling, 300))
        for kind in (np.float16, np.float32, np.float64):
            for number in np.linspace(0.3, 3, 40):
                fresh = dataclasses.replace(
                    start, noise_multiplier=kind(number)
                ).uncorrelated_multiplier
                assert Fraction(fresh) >= Fraction(float(kind(number))) * Fraction(moved)
                assert fresh == np.float32(fresh)
    # The box of float16(0.45) said a norm 1.8e-4 below that of a clipped record.
    params = {"a": jnp.zeros(7), "b": jnp.zeros(3)}
    for kind in (np.float16, np.float32):
        for number in np.linspace(0.1, 2, 50).astype(kind):
            exact = float(number)
            assert rules.CoordinateBox(number).l2(params) >= exact * math.sqrt(10)
            groups = rules.per_layer({"a": number, "b": number})
            assert groups.l2(params) == pytest.approx(exact * math.sqrt(2), rel=1e-15)


def test_the_sensitivity_is_that_of_the_rounded_coefficients():
    """Rounding made some larger: the sensitivity before it would be too low."""

    def ordered(strategy):
        return correlated(strategy=strategy, bands=None, sampling="fixed_order", batch_size=150)

    for weights in ((1.0, 0.9999, 0.9999, 0.9999), (1.0, 0.50196, 0.50196)):
        exact = Toeplitz(weights, 8)
        taken = dyadic(exact)
        mechanism = ordered(taken)
        moved = sensitivity(taken, participation(mechanism.sampling, 300))
        column = taken.matrix()[:, ::2].sum(axis=1)
        assert moved >= np.linalg.norm(column) * (1 - 1e-12)
        assert mechanism.uncorrelated_multiplier >= moved
        all_refused([("8 binary digits", lambda exact=exact: ordered(exact))])
    tiny, wide = dyadic(Toeplitz((1.0, 0.001, -0.0015), 8)), Toeplitz((1.0, -0.75, 0.5), 8)
    of_tiny, of_wide = (correlated(strategy=strategy, bands=None) for strategy in (tiny, wide))
    assert tiny.coefficients == (1.0, 0.0, 0.0)
    assert of_tiny.uncorrelated_multiplier == pytest.approx(1.0, rel=1e-6)
    assert of_tiny.sampling.bands == 3  # more groups than are needed cost, and are safe
    norm = math.sqrt(1 + 0.75**2 + 0.5**2)
    assert norm <= of_wide.uncorrelated_multiplier <= norm * (1 + 1e-5)


def test_the_distance_of_groups_repetitions_and_epochs_adds_up():
    t = 1e-12
    step = acc.PoissonSampled(acc.Gaussian(1.0), 0.01)
    run, whole = acc.Repeated(acc.GridNoise(step, t), 1000), acc.Repeated(step, 1000)
    nested = acc.GridNoise(acc.Repeated(acc.GridNoise(step, t), 500), 500 * t)
    of_two = lambda event, at: acc.group_delta(event, at, 2)  # noqa: E731
    for asked, more, less in (
        (acc.delta, run, whole),
        (of_two, run, whole),
        (acc.delta, nested, acc.Repeated(step, 500)),
    ):
        added = asked(more, 1.0).upper - asked(less, 1.0).upper
        assert added == pytest.approx((1 + math.e) * 1000 * t, rel=1e-2)
    assert acc.group_epsilon(run, 1e-5, 2).upper > acc.group_epsilon(whole, 1e-5, 2).upper
    for bound in (acc.epsilon(run, 0.0), acc.mu_gdp(run)):
        assert bound.upper == math.inf
    mechanism = made(multiplier=5.0)
    assert mechanism.epsilon(100, 100 * 2.0**-78).upper == math.inf
    assert mechanism.epsilon(100, 1e-9).upper < math.inf


def test_no_algorithm_passes_over_noise_on_a_grid():
    """AdaDP as published made a mechanism of its own, with ordinary noise, and said nothing."""
    key = jax.random.key(0)
    numbers = registry.Numbers(1.0, 1.0, 10, 100, 0.1, "poisson", key=key, noise="grid")
    refused = {"adadp-as-published": "noise", "sa-dpsgd-private": "private energy"}
    refused["dp-zo"], refused["adadp-noise-only-as-published"] = "noise link", "noise"
    for name in registry.ALGORITHMS:
        if name in refused:
            all_refused([(refused[name], lambda name=name: registry.build(name, numbers))])
            continue
        algorithm = registry.build(name, numbers)
        assert algorithm.mechanism.noise == "grid", name
        assert algorithm.noise is None, name
        assert algorithm.energy is None, name
        event = algorithm.mechanism.event
        assert algorithm.mechanism.leak or isinstance(event, acc.GridNoise), name


def test_links_of_two_noises_and_numbers_and_bounds_that_the_grid_has_not_are_refused():
    bad = (0.0, 1e-9, 1e9, math.nan)
    rows = [("noise_multiplier", partial(IntegerNoise, each), each) for each in bad]
    counted, replaced = {"count_noise_multiplier": 10.0}, partial(dataclasses.replace, made())
    all_refused(
        [
            *rows,
            ("noise", partial(replaced, noise="secure")),
            ("count_noise_multiplier", partial(replaced, **counted)),
            ("must be a finite number above 0", lambda: made(multiplier=0.0)),
        ]
    )
    run = acc.Repeated(made().event, 10)
    ledger = jaxdp.Ledger(budget=acc.RenyiFilter(3.0, 1e-5))
    all_refused(
        [
            ("GridNoise", lambda: acc.epsilon(acc.Tuned(run, acc.Geometric(0.1)), 1e-5), "tuned"),
            ("GridNoise", lambda: ledger.charge(made().event), "charged"),
            ("GridNoise", lambda: made().sampler(60, ledger=ledger).draw(), "drawn"),
        ],
        acc.UnsupportedEventError,
    )
    gridded, ordinary = made(), made(noise="gaussian")

    def step(mechanism, tx):
        draw = mechanism.sampler(60).draw()
        summed = mechanism.clipped_grad(loss_fn)(PARAMS, DATA, draw)
        return tx.update(summed, tx.init(PARAMS), PARAMS)

    kinds = (1.0, 12), (IntegerNoise(0.5), 12), (IntegerNoise(1.0), 1.0)
    plain, half, one = (jaxdp.privatize(*kind) for kind in kinds)
    pairs = [(gridded, plain), (gridded, ordinary.privatize()), (ordinary, gridded.privatize())]
    rows = [partial(step, *each) for each in (*pairs, (gridded, half))]
    key = simulated_key(jax.random.key(0), {ON_GRID: 2.0})
    rows.append(partial(one.update, Summed(PARAMS, 1.0), one.init(PARAMS), PARAMS, key=key))
    all_refused(("charged for", call, n) for n, call in enumerate(rows))


ON = "--xla_cpu_enable_fast_math=true"
REFUSED = "must not have xla_cpu_enable_fast_math"


def test_fast_math_is_refused_and_a_file_of_flags_read_as_xla_reads_it(tmp_path, monkeypatch):
    """With it a sum was 63.7 cells from where it should be (40 scales, 8,000 values each)."""
    makers = [partial(jaxdp.privatize, kind, 1.0) for kind in (1.0, IntegerNoise(1.0))]
    makers.append(made().privatize)
    file = tmp_path / "flags"  # XLA_FLAGS may name a file: fast math was on, and all was taken
    file.write_text(f"--xla_dump_to=\n{ON}\n", encoding="utf-8")
    for flags in (
        "--xla_dump_to= --xla_cpu_enable_fast_math",
        f"--xla_dump_to= {ON}",
        "--xla_cpu_enable_fast_math=1",
        f"--xla_cpu_enable_fast_math=false {ON}",
        str(file),
        # The last name that was found counted, though XLA takes it for a part of a path.
        f"{ON} --xla_dump_to=a--xla_cpu_enable_fast_math=false",
        "--xla_cpu_enable_fast_math='true'",
    ):
        monkeypatch.setenv("XLA_FLAGS", flags)
        all_refused([(REFUSED, make) for make in makers])
    file.write_text("--xla_dump_to=", encoding="utf-8")
    for flags in ("--xla_cpu_enable_fast_math=false", str(file), str(tmp_path / "nowhere")):
        monkeypatch.setenv("XLA_FLAGS", flags)
        jaxdp.privatize(IntegerNoise(1.0), 1.0)
    # As XLA reads the file: sums were 31.5 cells off.
    file.write_text(f"--xla_dump_to=\n{ON}\n", encoding="utf-8")
    monkeypatch.setenv("XLA_FLAGS", str(file))
    command = [sys.executable, "-c", PROBE]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout == "True\n"
    assert REFUSED in found.stderr


PROBE = """
import jax, numpy as np
from jaxdp.noise import IntegerMatrixNoise, IntegerNoise, grid, privatize
x = np.random.default_rng(0).normal(size=2000).astype(np.float32) * 300
scale = np.asarray(grid.with_12_digits(np.float32(307203.7)))
exact = x.astype(np.float64) * float(scale)
print(np.abs(np.asarray(jax.jit(grid.to_grid)(x, scale)) - exact).max() > 0.6)
privatize(IntegerNoise(1.0), 1.0)
"""
