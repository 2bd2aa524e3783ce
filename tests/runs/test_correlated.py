"""Runs with correlated noise: interrupted, gone on with, and put back."""

import dataclasses
import itertools
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp import runs
from jaxdp._entries import event_counts
from jaxdp.runs import described
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.rehearsal import rehearse
from tests.laws import are_uncorrelated, is_gaussian
from tests.runs import small
from tests.runs.small import Stop, crash_at, refused
from tests.runs.test_config import with_strategy

N, BATCH, STEPS, WIDE = 60, 6, 12, 4000
DATA = {"x": np.arange(N, dtype=np.float32)}


def flat_loss(w, example):
    """The gradient is zero: what moves the parameters is noise."""
    return 0.0 * jnp.sum(w) + 0.0 * example["x"]


def mechanism(sampling="cyclic_poisson", **options):
    return jaxdp.dp_mf(1.0, 1.0, BATCH, N, sampling, steps=STEPS, **options)


EVERY = {
    "amplified": mechanism(bands=3),
    "in order": mechanism("fixed_order", strategy="buffered", bands=2),
    "amplified on the grid": mechanism(bands=3, noise="grid"),
    "in order on the grid": mechanism("fixed_order", strategy="banded", bands=2, noise="grid"),
    "alone": mechanism(bands=1),  # noise that looks back at no step
}
IN_ORDER = [name for name in EVERY if name.startswith("in order")]


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
        progress=progress or small.ignore,
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


@pytest.mark.parametrize("name", EVERY)
def test_a_run_goes_on_with_the_noise_that_it_had(tmp_path, name):
    """What the strategy makes of a run, also of one that stopped, is independent noise."""
    mechanism, shown = EVERY[name], []
    made(tmp_path / "r", mechanism, shown=shown).fit(5)
    made(tmp_path / "r", mechanism, shown=shown).fit()
    # The last parameters are shown once more at the start: a crash may have come before.
    trajectory = [shown[0]] + [b for a, b in itertools.pairwise(shown) if (a != b).any()]
    assert len(trajectory) == STEPS
    found = normals(mechanism, trajectory)
    assert is_gaussian(found, 1.0)
    for one, other in itertools.combinations(found, 2):
        assert are_uncorrelated(one, other)
    assert charges(tmp_path / "r") == {mechanism.event: 1}


@pytest.mark.parametrize("name", list(EVERY)[:4])
def test_a_crash_costs_nothing(tmp_path, name):
    mechanism = EVERY[name]
    for step in (4,) if "grid" in name else (1, 4, 8):
        with pytest.raises(Stop):
            made(tmp_path / "r", mechanism, crash_at(step)).fit()
    last = made(tmp_path / "r", mechanism).fit()
    assert np.isfinite(last).all()
    assert charges(tmp_path / "r") == {mechanism.event: 1}


def put_back(folder, mechanism):
    """A run of 6 steps whose checkpoint after the third was put back."""
    made(folder, mechanism).fit(3)
    shutil.copytree(folder / "secret/checkpoints", folder / "kept")
    made(folder, mechanism).fit(6)
    shutil.rmtree(folder / "secret/checkpoints")
    shutil.move(folder / "kept", folder / "secret/checkpoints")


@pytest.mark.parametrize("name", IN_ORDER)
def test_steps_that_were_shown_and_are_repeated_cost_the_whole_event_again(
    tmp_path, monkeypatch, name
):
    """And keep the order of the records."""
    mechanism, seen, step_and_look = EVERY[name], [], jaxdp.Trainer.step_and_look

    def stepping(self, state, batch, told=True):
        seen.append((batch.step, frozenset(batch.draw.indices[batch.draw.mask].tolist())))
        return step_and_look(self, state, batch, told)

    monkeypatch.setattr(jaxdp.Trainer, "step_and_look", stepping)
    put_back(tmp_path / "r", mechanism)
    made(tmp_path / "r", mechanism).fit()
    assert charges(tmp_path / "r") == {mechanism.event: 2}
    assert len(seen) == 6 + 9
    for step, records in seen:
        assert {other for at, other in seen if at % 10 == step % 10} == {records}


@pytest.mark.parametrize("name", ["amplified", "amplified on the grid"])
def test_repeated_steps_of_amplified_noise_are_refused(tmp_path, name):
    mechanism = EVERY[name]
    put_back(tmp_path / "r", mechanism)
    words = "the checkpoint must hold all steps that were shown"
    refused(words, made(tmp_path / "r", mechanism).fit)
    assert charges(tmp_path / "r") == {mechanism.event: 1}


# Strategies by name.


@pytest.mark.parametrize("name", ["banded", "buffered", "identity"])
def test_a_configured_run_that_was_interrupted_goes_on_as_it_began(tmp_path, name):
    config = with_strategy(name, eval_every=3)
    small.crash(tmp_path / "r", config, 7)
    kept = runs.RunConfig.from_dict(runs.RunDirectory(tmp_path / "r").load_state().config)
    assert kept == config
    if name == "banded":
        numbers = {**config.strategy_numbers, "coefficients": [1.0, 0.25]}
        other = dataclasses.replace(config, strategy_numbers=numbers)
        refused("changed: strategy_numbers", small.go, tmp_path / "r", other)
    result = small.go(tmp_path / "r", kept)
    relation = acc.Relation(config.relation)
    once = config.mechanism().epsilon(12, 1e-5, relation).upper
    assert result.ledger.epsilon(1e-5, relation).upper == once
    assert [row["step"] for row in result.history] == [3, 6, 9, 12]
    assert {row["epsilon"] for row in result.history} == {once}
    command = described.command_of(config)
    assert f"--strategy {name}" in command
    assert (f"--bands {config.bands}" in command) == (config.bands is not None)


def test_projections_are_made_in_a_fixed_order(tmp_path):
    config = with_strategy("buffered", pca_dimensions=4, pca_noise_multiplier=9.0)
    result = small.go(tmp_path / "r", config)
    assert result.ledger.epsilon(1e-5, acc.Relation.REPLACE_SPECIAL).upper <= 3.0


def test_a_rehearsal_ends_where_the_strategy_does():
    config = dataclasses.replace(with_strategy(steps=1), physical_batch_size=16)
    assert rehearse(config).step > 0
