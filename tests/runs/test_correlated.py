"""Runs with correlated noise: interrupted, gone on with, and put back."""

import itertools
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp._entries import event_counts
from jaxdp.runs.directory import RunDirectory
from tests.laws import are_uncorrelated, is_gaussian
from tests.runs.test_resume import Stop, crash_at

N, BATCH, STEPS, WIDE = 60, 6, 12, 4000
DATA = {"x": np.arange(N, dtype=np.float32)}


def flat_loss(w, example):
    """The gradient is zero: what moves the parameters is noise."""
    return 0.0 * jnp.sum(w) + 0.0 * example["x"]


def amplified():
    return jaxdp.dp_mf(1.0, 1.0, BATCH, N, steps=STEPS, bands=3)


def in_order():
    return jaxdp.dp_mf(1.0, 1.0, BATCH, N, "fixed_order", steps=STEPS, strategy="buffered", bands=2)


def amplified_on_grid():
    return jaxdp.dp_mf(1.0, 1.0, BATCH, N, steps=STEPS, bands=3, noise="grid")


def in_order_on_grid():
    return jaxdp.dp_mf(
        1.0, 1.0, BATCH, N, "fixed_order", steps=STEPS, bands=2, noise="grid", strategy="banded"
    )


EVERY = [amplified, in_order, amplified_on_grid, in_order_on_grid]


def made(folder, mechanism, progress=None, shown=None):
    def evaluate(params):
        shown.append(np.asarray(params))
        return {}

    return jaxdp.Run(
        folder,
        flat_loss,
        mechanism,
        optax.sgd(1.0),
        DATA,
        params=jnp.zeros(WIDE),
        evaluate=None if shown is None else evaluate,
        every=1 if shown is not None else 3,
        progress=progress or (lambda step, row: None),
        relation=acc.Relation.REPLACE_SPECIAL,
        report=False,
    )


def normals(mechanism, trajectory):
    """Z [n, parameters], from the parameters after every step."""
    moved = -np.diff(np.stack([np.zeros(WIDE), *trajectory]).astype(float), axis=0) * BATCH
    strategy = mechanism.strategy
    part = next(iter(mechanism.multipliers(0).values()))
    return (
        strategy.matrix()[: len(moved), : len(moved)] @ moved / (part * mechanism.l2(jnp.zeros(3)))
    )


def charges(folder):
    return event_counts(RunDirectory(folder).checked_ledger().entries)


@pytest.mark.parametrize("make", EVERY)
def test_what_the_strategy_makes_of_a_run_is_independent_noise(tmp_path, make):
    shown = []
    made(tmp_path / "r", make(), shown=shown).fit()
    found = normals(make(), shown)
    assert is_gaussian(found, 1.0)
    for i, one in enumerate(found):
        assert all(are_uncorrelated(one, other) for other in found[i + 1 :])
    assert charges(tmp_path / "r") == {make().event: 1}


@pytest.mark.parametrize("make", EVERY)
def test_a_run_goes_on_with_the_noise_that_it_had(tmp_path, make):
    shown = []
    made(tmp_path / "r", make(), shown=shown).fit(5)
    made(tmp_path / "r", make(), shown=shown).fit()
    # The last parameters are shown once more at the start: a crash may have come before.
    trajectory = [shown[0]] + [b for a, b in itertools.pairwise(shown) if (a != b).any()]
    assert len(trajectory) == STEPS
    assert is_gaussian(normals(make(), trajectory), 1.0)
    assert charges(tmp_path / "r") == {make().event: 1}


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize("step", [1, 4, 8])
def test_a_crash_costs_nothing(tmp_path, make, step):
    with pytest.raises(Stop):
        made(tmp_path / "r", make(), crash_at(step)).fit()
    last = made(tmp_path / "r", make()).fit()
    assert np.isfinite(last).all()
    assert charges(tmp_path / "r") == {make().event: 1}


def put_back(folder, mechanism):
    """A run of 6 steps whose checkpoint after the third was put back."""
    made(folder, mechanism).fit(3)
    shutil.copytree(folder / "secret/checkpoints", folder / "kept")
    made(folder, mechanism).fit(6)
    shutil.rmtree(folder / "secret/checkpoints")
    shutil.move(folder / "kept", folder / "secret/checkpoints")


@pytest.mark.parametrize("make", [in_order, in_order_on_grid])
def test_steps_that_were_shown_and_are_repeated_cost_the_whole_event_again(tmp_path, make):
    put_back(tmp_path / "r", make())
    made(tmp_path / "r", make()).fit()
    assert charges(tmp_path / "r") == {make().event: 2}


def test_repeated_steps_keep_the_order_of_the_records(tmp_path, monkeypatch):
    seen, step_and_look = [], jaxdp.Trainer.step_and_look

    def stepping(self, state, batch, told=True):
        seen.append((batch.step, frozenset(batch.draw.indices[batch.draw.mask].tolist())))
        return step_and_look(self, state, batch, told)

    monkeypatch.setattr(jaxdp.Trainer, "step_and_look", stepping)
    put_back(tmp_path / "r", in_order())
    made(tmp_path / "r", in_order()).fit()
    for step, records in seen:
        assert {other for at, other in seen if at % 10 == step % 10} == {records}


@pytest.mark.parametrize("make", [amplified, amplified_on_grid])
def test_repeated_steps_of_amplified_noise_are_refused(tmp_path, make):
    put_back(tmp_path / "r", make())
    with pytest.raises(ValueError, match="the checkpoint must hold all steps that were shown"):
        made(tmp_path / "r", make()).fit()
    assert charges(tmp_path / "r") == {make().event: 1}


def test_noise_that_looks_back_at_no_step_is_checkpointed_too(tmp_path):
    alone = jaxdp.dp_mf(1.0, 1.0, BATCH, N, steps=STEPS, bands=1)
    shown = []
    made(tmp_path / "r", alone, shown=shown).fit(5)
    made(tmp_path / "r", alone, shown=shown).fit()
    assert len(shown) == STEPS + 1
    assert charges(tmp_path / "r") == {alone.event: 1}
