import contextlib
import dataclasses
import itertools
import json
import os
import shutil

import jax
import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp import runs
from jaxdp._ledger_file import Chain
from jaxdp.ledger import Ledger
from jaxdp.runs import assemble
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.run import INTERRUPTED
from jaxdp.seeds import Secret
from jaxdp.tickets import Ticket
from jaxdp.trainer import Trainer
from tests.runs import small


class Stop(Exception):
    """A crash at a chosen step."""


def crash_at(step):
    def progress(now, row):
        if now == step:
            raise Stop

    return progress


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return small.go(tmp_path_factory.mktemp("whole") / "run", small.config())


@pytest.mark.parametrize("step", [0, 1, 3, 5, 9, 12])
def test_a_crash_costs_nothing(tmp_path, whole, step):
    shown = []

    def progress(now, row):
        shown.extend([] if row is None else [row])
        crash_at(step)(now, row)

    with pytest.raises(Stop):
        small.go(tmp_path / "r", small.config(), progress)
    result = small.go(tmp_path / "r", small.config())
    assert result.ledger.event == whole.ledger.event
    assert result.ledger.steps == 12
    assert [row["step"] for row in result.history] == [3, 6, 9, 12]
    assert [row["epsilon"] for row in result.history] == [row["epsilon"] for row in whole.history]
    assert result.history[: len(shown)] == shown  # what was seen stays as it was
    said = set(result.ledger.unverified()) - set(whole.ledger.unverified())
    assert said == ({INTERRUPTED} if step else set())


@pytest.mark.parametrize("write", range(1, 7))
def test_a_crash_before_any_of_the_first_writes_leaves_a_folder_that_starts(
    tmp_path, monkeypatch, write
):
    """Before: killed between the ledger's first line and its secret, no run could start there."""
    calls, fsync = itertools.count(1), os.fsync

    def crashing(handle):
        if next(calls) == write:
            raise Stop
        fsync(handle)

    monkeypatch.setattr(os, "fsync", crashing)
    with pytest.raises(Stop):
        small.go(tmp_path / "r", small.config(steps=3))
    monkeypatch.setattr(os, "fsync", fsync)
    result = small.go(tmp_path / "r", small.config(steps=3))
    assert result.ledger.steps == 3


def test_runs_of_one_seed_are_equal_and_of_other_numbers_are_not(tmp_path, whole):
    again = small.go(tmp_path / "again", small.config())
    assert small.outcome(again) == small.outcome(whole)
    moves = []
    for rate in (1e-4, 2e-4):  # with one seed: the noise, which is most of it, must not be shared
        cfg = small.config(
            learning_rate=rate, momentum=0.0, noise_multiplier=100.0, steps=1, eval_every=1
        )
        result = small.go(tmp_path / str(rate), cfg)
        moves.append(np.ravel(jax.tree.leaves(result.params)[1]) / rate)
    start = assemble.fresh_params(small.config(), Secret.from_seed(5))
    begun = np.ravel(jax.tree.leaves(start)[1])
    one, two = (move - begun / rate for move, rate in zip(moves, (1e-4, 2e-4), strict=True))
    assert abs(np.corrcoef(one, two)[0, 1]) < 6 / np.sqrt(len(one))


def test_the_ledger_is_ahead_of_every_step(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path / "r")
    generator = Ticket.generator

    def watched(self):
        charged = {s for e in Ledger(directory.ledger).entries for s in range(e.first_step, e.end)}
        assert self.step in charged
        return generator(self)

    monkeypatch.setattr(Ticket, "generator", watched)
    small.go(tmp_path / "r", small.config())


def test_changed_data_are_refused(tmp_path):
    with pytest.raises(Stop):
        small.go(tmp_path / "r", small.config(), crash_at(8))
    with pytest.raises(ValueError, match="the training data changed"):
        small.go(tmp_path / "r", small.config(), rows=small.dataset(seed=1))


def spied(monkeypatch):
    """Every draw, and every change of the parameters, by step."""
    seen, step = [], Trainer.step_and_look

    def spy(self, state, batch, told=True):
        before = jax.tree.map(np.array, state.params)
        out = step(self, state, batch, told)
        after = jax.tree.map(np.asarray, out[0].params)
        change = np.ravel(jax.tree.leaves(after)[1] - jax.tree.leaves(before)[1])
        seen.append((out[0].step, batch.draw.indices[batch.draw.mask], change))
        return out

    monkeypatch.setattr(Trainer, "step_and_look", spy)
    return seen


def test_steps_that_are_done_again_have_other_draws_and_other_noise(tmp_path, monkeypatch):
    seen = spied(monkeypatch)
    quiet = small.config(noise_multiplier=100.0, momentum=0.0)
    with pytest.raises(Stop):
        small.go(tmp_path / "r", quiet, crash_at(8))
    small.go(tmp_path / "r", quiet)
    twice = [(draw, change) for step, draw, change in seen if step == 8]
    assert len(twice) == 2
    (one, first), (two, second) = twice
    assert not np.array_equal(np.sort(one), np.sort(two))
    assert abs(np.corrcoef(first, second)[0, 1]) < 6 / np.sqrt(len(first))


def test_steps_behind_a_damaged_checkpoint_were_seen_and_are_charged_again(tmp_path, monkeypatch):
    small.go(tmp_path / "r", small.config())
    newest = RunDirectory(tmp_path / "r").checkpoints / "12"
    for path in newest.rglob("*"):
        if path.is_file() and path.name != "digests.json":
            path.write_bytes(b"damaged")
    result = small.go(tmp_path / "r", small.config())
    assert result.ledger.steps == 12 + 3
    assert len({entry.stream for entry in result.ledger.entries}) == 2
    shutil.rmtree(newest)  # the same for one that was deleted
    assert small.go(tmp_path / "r", small.config()).ledger.steps == 12 + 3 + 3
    assert small.go(tmp_path / "r", small.config()).ledger.steps == 12 + 3 + 3


def test_a_lost_or_shortened_ledger_is_refused(tmp_path):
    small.go(tmp_path / "r", small.config())
    ledger = RunDirectory(tmp_path / "r").ledger
    lines = ledger.read_text().splitlines(keepends=True)
    last = max(n for n, line in enumerate(lines) if "event" in line)
    shortened = "must hold the 12 steps that were shown"
    for left, words in (
        ("", shortened),
        ("".join(lines[:last]), shortened),
        ("".join(lines[1:]), "which is gone"),
        ("".join(lines[:2] + lines[3:]), "a line was edited, inserted or removed"),
    ):
        ledger.write_text(left)
        with pytest.raises(ValueError, match=words):
            small.go(tmp_path / "r", small.config())
    ledger.unlink()
    with pytest.raises(ValueError, match=shortened):
        small.go(tmp_path / "r", small.config())


def test_nobody_without_the_secret_can_write_a_line_that_fits(tmp_path):
    small.go(tmp_path / "r", small.config())
    path = RunDirectory(tmp_path / "r").ledger
    reader = Ledger(path)
    assert reader.steps == 12
    with pytest.raises(ValueError, match="must be continued with the key"):
        reader.charge(acc.Gaussian(1.0))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    chain = Chain()
    forged = []
    for row in rows:
        row.pop("chain")
        row = {**row, "steps": 1} if "steps" in row else row
        forged.append(json.dumps({**row, "chain": chain.next(row)}))
    path.write_text("\n".join(forged) + "\n")
    with pytest.raises(ValueError, match="a line was edited"):
        small.go(tmp_path / "r", small.config())


def test_a_run_of_an_older_version_is_refused(tmp_path):
    small.go(tmp_path / "r", small.config())
    directory = RunDirectory(tmp_path / "r")
    directory.save_state(dataclasses.replace(directory.load_state(), starts=None))
    with pytest.raises(ValueError, match="must hold a run of this version"):
        small.go(tmp_path / "r", small.config())


def test_what_is_left_of_a_run_is_no_place_for_another(tmp_path):
    small.go(tmp_path / "r", small.config())
    RunDirectory(tmp_path / "r").state_file.unlink()
    with pytest.raises(ValueError, match="holds a ledger or checkpoints but not the secret state"):
        small.go(tmp_path / "r", small.config())


def test_a_changed_configuration_is_refused(tmp_path):
    with pytest.raises(Stop):
        small.go(tmp_path / "r", small.config(), crash_at(4))
    with pytest.raises(ValueError, match=r"changed: learning_rate \(0.3 then, 0.7 now\)"):
        small.go(tmp_path / "r", small.config(learning_rate=0.7))


def test_one_process_at_a_time(tmp_path):
    with pytest.raises(Stop):
        small.go(tmp_path / "r", small.config(), crash_at(4))
    first = RunDirectory(tmp_path / "r")
    first.lock()
    with pytest.raises(ValueError, match="in use by another process"):
        small.go(tmp_path / "r", small.config())
    first.unlock()
    assert small.go(tmp_path / "r", small.config()).steps_run > 0


def test_a_folder_holds_one_run(tmp_path):
    small.go(tmp_path / "r", small.config())
    directory = RunDirectory(tmp_path / "r")
    with pytest.raises(ValueError, match="pass --resume"):
        runs.start(small.config(), directory, small.dataset(), Secret.new(), small.ignore)
    with pytest.raises(ValueError, match="must hold a run to resume"):
        runs.resume(small.config(), RunDirectory(tmp_path / "x"), small.dataset(), small.ignore)


def test_secrets_lie_in_the_secret_folder_alone(tmp_path):
    small.go(tmp_path / "r", small.config())
    directory = RunDirectory(tmp_path / "r")
    assert directory.secret.stat().st_mode & 0o077 == 0
    assert directory.state_file.stat().st_mode & 0o077 == 0
    state, ledger = directory.load_state(), directory.ledger.read_text()
    assert state.secret.entropy not in ledger
    assert state.data not in ledger
    assert not any(start in ledger for start in state.starts)


def test_epsilon_is_the_accountants_for_the_steps_taken(tmp_path):
    result = small.go(tmp_path / "r", small.config())
    step = acc.PoissonSampled(acc.Gaussian(1.0), 0.2)
    for row in result.history:
        expected = acc.epsilon(acc.Repeated(step, row["step"]), 1e-5).upper
        assert row["epsilon"] == pytest.approx(expected, rel=1e-9)


def test_copies_of_a_seeded_run_share_no_noise_once_they_part(tmp_path):
    """Their second starts have one number, and their parameters are not the same."""

    def starts(name, step):
        with contextlib.suppress(Stop):
            small.go(tmp_path / name, small.config(), crash_at(step), seed=7)
        return runs.RunDirectory(tmp_path / name).load_state().starts

    (one,), (two,) = starts("one", 3), starts("two", 6)
    assert one == two  # a run that is not interrupted can be made again
    assert starts("one", 9)[1] != starts("two", 9)[1]
