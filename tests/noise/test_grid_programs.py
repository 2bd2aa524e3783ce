"""Noise on an integer grid in whole programs: what is charged, whole runs, and what is refused."""

import dataclasses
import json
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
from jaxdp.noise import (
    grid,
    grid_range,
    identity,
    privatize,
    privatize_correlated,
    privatize_correlated_on_grid,
    privatize_on_grid,
)
from jaxdp.optimizers import registry
from jaxdp.sampling import named
from jaxdp.tickets import ON_GRID, simulated_key
from jaxdp.types import Summed
from tests.noise.refusals import assert_refused

DATA = jnp.asarray(np.random.default_rng(0).standard_normal((60, 5)), jnp.float32)
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


def loss_fn(params, example):
    return (example @ params["w"] + params["b"] - 1.0) ** 2


def made(sampling="poisson", noise="grid", multiplier=1.0, rule=RULES["flat"], **changes):
    batch = 60 if sampling == "full_batch" else 12
    return jaxdp.dp_sgd(
        multiplier, None, batch, 60, sampling=sampling, noise=noise, rule=rule, **changes
    )


@pytest.fixture
def far(monkeypatch):
    """A distance that shows in every epsilon."""
    monkeypatch.setattr(grid, "DISTANCE", 2e-11)


def test_every_draw_is_charged_as_ordinary_noise_and_the_distance():
    for sampling in named.NAMES:
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


def test_a_mechanism_says_its_noise():
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
    summed, _ = grad_fn.sum(PARAMS, DATA, mechanism.sampler(60).draw())
    updates, _ = tx.update(summed, tx.init(PARAMS), PARAMS)
    law = grid.law_for(1.0, 6)
    scale = float(grid.grid_scale(law, np.float32(1.0), 6, mechanism.l2(PARAMS)))
    for name, leaf in updates.items():
        unscale = LAYERS[name] if rule == "layers" else 1.0
        found = np.asarray(leaf, np.float64) * 12 * scale / unscale
        assert (found != 0).all()
        assert (np.abs(found - np.round(found)) <= 2.0**-21 * (1 + np.abs(found))).all()


@pytest.mark.usefixtures("far")
def test_a_budget_pays_for_the_distance():
    budget = {"epsilon": 3.0, "delta": 1e-5, "steps": 100}
    plain, gridded = (
        made(noise=noise, multiplier=None, **budget) for noise in ("gaussian", "grid")
    )
    assert gridded.noise_multiplier > plain.noise_multiplier
    assert 2.99 < gridded.epsilon(100, 1e-5).upper <= 3.0
    same = made(noise="gaussian", multiplier=gridded.noise_multiplier)
    assert same.epsilon(100, 1e-5).upper < gridded.epsilon(100, 1e-5).upper


@pytest.mark.usefixtures("far")
def test_a_trainer_s_run_and_its_ledger_pay_for_the_distance(tmp_path):
    mechanism, file = made(), tmp_path / "ledger.jsonl"
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), DATA, ledger=file)
    state = trainer.init(PARAMS)
    for batch in trainer.batches(4):
        state, _ = trainer.step(state, batch)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    assert trainer.unverified() == []
    told, taken = trainer.epsilon(delta=1e-5), mechanism.epsilon(4, 1e-5).upper
    trainer.close()
    read = jaxdp.Ledger(file)
    assert read.epsilon(1e-5) == told
    assert {entry.event for entry in read.entries} == {mechanism.event}
    assert '"GridNoise"' in json.dumps(acc.events.to_dict(read.event))
    assert told.upper >= taken * (1 - 1e-9) > made(noise="gaussian").epsilon(4, 1e-5).upper


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


def test_what_has_no_bound_for_the_grid_is_refused():
    run = acc.Repeated(made().event, 10)
    ledger = jaxdp.Ledger(budget=acc.RenyiFilter(3.0, 1e-5))
    assert_refused(
        [
            (lambda: acc.epsilon(acc.Tuned(run, acc.Geometric(0.1)), 1e-5), "GridNoise"),
            (lambda: ledger.charge(made().event), "GridNoise"),
            (lambda: made().sampler(60, ledger=ledger).draw(), "GridNoise"),
        ],
        acc.UnsupportedEventError,
    )


def test_links_and_mechanisms_of_two_noises_do_not_meet():
    gridded, ordinary = made(), made(noise="gaussian")

    def step(mechanism, tx):
        draw = mechanism.sampler(60).draw()
        summed, _ = mechanism.clipped_grad(loss_fn).sum(PARAMS, DATA, draw)
        return tx.update(summed, tx.init(PARAMS), PARAMS)

    assert_refused(
        (lambda m=mechanism, tx=tx: step(m, tx), "charged for")
        for mechanism, tx in (
            (gridded, privatize(1.0, 12)),
            (gridded, ordinary.privatize()),
            (ordinary, gridded.privatize()),
            (gridded, privatize_on_grid(0.5, 12)),
        )
    )
    key = simulated_key(jax.random.key(0), {ON_GRID: 2.0})
    tx = privatize_on_grid(1.0, 1.0)
    with pytest.raises(ValueError, match="charged for"):
        tx.update(Summed(PARAMS, 1.0), tx.init(PARAMS), PARAMS, key=key)


def test_no_algorithm_passes_over_noise_on_a_grid():
    """AdaDP as published made a mechanism of its own, with ordinary noise, and said nothing."""
    key = jax.random.key(0)
    numbers = registry.Numbers(1.0, 1.0, 10, 100, 0.1, "poisson", key=key, noise="grid")
    refused = {"adadp-as-published": "noise", "sa-dpsgd-private": "private energy"}
    for name in registry.ALGORITHMS:
        if name in refused:
            assert_refused([(lambda name=name: registry.build(name, numbers), refused[name])])
            continue
        algorithm = registry.build(name, numbers)
        assert algorithm.mechanism.noise == "grid", name
        assert algorithm.noise is None, name
        assert algorithm.energy is None, name
        event = algorithm.mechanism.event
        assert algorithm.mechanism.leak or isinstance(event, acc.GridNoise), name


def test_numbers_that_the_grid_has_no_noise_for_are_refused():
    assert_refused(
        [
            *(
                (lambda bad=bad: privatize_on_grid(bad, 1.0), "noise_multiplier")
                for bad in (0.0, 1e-9, 1e9, math.nan)
            ),
            (lambda: dataclasses.replace(made(), noise="secure"), "noise"),
            (
                lambda: dataclasses.replace(made(), count_noise_multiplier=10.0),
                "count_noise_multiplier",
            ),
            (lambda: made(multiplier=0.0), "noise_multiplier must be above 0"),
        ]
    )


ON = "--xla_cpu_enable_fast_math=true"
REFUSED = "must not have xla_cpu_enable_fast_math"


def test_fast_math_is_refused(tmp_path, monkeypatch):
    """With it a sum was 63.7 cells from where it should be (40 scales, 8,000 values each)."""
    each = identity(3)
    makers = (
        lambda: privatize(1.0, 1.0),
        lambda: privatize_correlated(each, 1.0, 1.0),
        lambda: privatize_on_grid(1.0, 1.0),
        lambda: privatize_correlated_on_grid(each, 1.0, 1.0),
        made().privatize,
    )
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
        assert_refused([(make, REFUSED) for make in makers])
    file.write_text("--xla_dump_to=", encoding="utf-8")
    for flags in ("--xla_cpu_enable_fast_math=false", str(file), str(tmp_path / "nowhere")):
        monkeypatch.setenv("XLA_FLAGS", flags)
        privatize_on_grid(1.0, 1.0)


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
    """Sums were 31.5 cells off."""
    file = tmp_path / "flags"
    file.write_text(f"--xla_dump_to=\n{ON}\n", encoding="utf-8")
    monkeypatch.setenv("XLA_FLAGS", str(file))
    command = [sys.executable, "-c", PROBE]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout == "True\n"
    assert REFUSED in found.stderr
