"""Runs that end before their time: what they cost, what they refuse, and who may read them."""

import contextlib
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from jaxdp import _durable, runs
from jaxdp import accounting as acc
from jaxdp._ledger_file import Chain
from jaxdp.ledger import Ledger
from jaxdp.runs import assemble
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.run import INTERRUPTED
from jaxdp.seeds import Secret
from jaxdp.tickets import Ticket
from jaxdp.trainer import Trainer
from tests.runs import small
from tests.runs.small import Stop, crash_at, refused


@pytest.mark.parametrize("crashes", [(0,), (1, 3, 5, 9, 12)])
def test_a_crash_costs_nothing(tmp_path, whole, crashes):
    shown, whole = [], whole[0]
    for step in crashes:

        def progress(now, row, step=step):
            shown.extend([] if row is None else [row])
            crash_at(step)(now, row)

        with pytest.raises(Stop):
            small.go(tmp_path / "r", small.config(), progress)
    result = small.go(tmp_path / "r", small.config())
    assert result.ledger.event == whole.ledger.event
    assert result.ledger.steps == 12
    assert [row["step"] for row in result.history] == [3, 6, 9, 12]
    assert [row["epsilon"] for row in result.history] == [row["epsilon"] for row in whole.history]
    assert [row for row in shown if row not in result.history] == []  # what was seen stays
    said = set(result.ledger.unverified()) - set(whole.ledger.unverified())
    assert said == ({INTERRUPTED} if any(crashes) else set())


def test_a_kill_at_one_of_the_first_writes_leaves_a_folder_that_starts(tmp_path, monkeypatch):
    """Before: killed between the ledger's first line and its secret, no run could start there."""
    left, writes, fsync = [], itertools.count(1), os.fsync

    def kept(handle):
        if (write := next(writes)) in (1, 2, 4, 6):
            left.append(shutil.copytree(tmp_path / "r", tmp_path / str(write)))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", kept)
    small.go(tmp_path / "r", small.config(steps=3))
    monkeypatch.undo()
    assert len(left) == 4
    for folder in left:
        assert small.go(folder, small.config(steps=3)).ledger.steps == 3, folder


def test_runs_of_one_seed_are_equal_and_of_other_numbers_are_not(tmp_path, whole):
    again = small.go(tmp_path / "again", small.config())
    assert small.outcome(again) == small.outcome(whole[0])
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


def test_the_ledger_is_ahead_of_every_step_and_epsilon_is_the_accountants(tmp_path, monkeypatch):
    directory, seen = RunDirectory(tmp_path / "r"), []
    generator = Ticket.generator

    def watched(self):
        charged = {s for e in Ledger(directory.ledger).entries for s in range(e.first_step, e.end)}
        assert self.step in charged
        seen.append(self.step)
        return generator(self)

    monkeypatch.setattr(Ticket, "generator", watched)
    result = small.go(tmp_path / "r", small.config())
    assert set(seen) == set(range(12))
    step = acc.PoissonSampled(acc.Gaussian(1.0), 0.2)
    for row in result.history:
        expected = acc.epsilon(acc.Repeated(step, row["step"]), 1e-5).upper
        assert row["epsilon"] == pytest.approx(expected, rel=1e-9)


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
    small.crash(tmp_path / "r", quiet, 8)
    small.go(tmp_path / "r", quiet)
    twice = [(draw, change) for step, draw, change in seen if step == 8]
    assert len(twice) == 2
    (one, first), (two, second) = twice
    assert not np.array_equal(np.sort(one), np.sort(two))
    assert abs(np.corrcoef(first, second)[0, 1]) < 6 / np.sqrt(len(first))


def test_steps_behind_a_damaged_checkpoint_were_seen_and_are_charged_again(finished):
    newest = finished.checkpoints / "12"
    for path in newest.rglob("*"):
        if path.is_file() and path.name != "digests.json":
            path.write_bytes(b"damaged")
    result = small.go(finished.path, small.config())
    assert result.ledger.steps == 12 + 3
    assert len({entry.stream for entry in result.ledger.entries}) == 2
    shutil.rmtree(newest)  # the same for one that was deleted
    assert small.go(finished.path, small.config()).ledger.steps == 12 + 3 + 3
    assert small.go(finished.path, small.config()).ledger.steps == 12 + 3 + 3


def test_a_lost_or_shortened_ledger_is_refused(finished):
    lines = finished.ledger.read_text().splitlines(keepends=True)
    last = max(n for n, line in enumerate(lines) if "event" in line)
    shortened = "must hold the 12 steps that were shown"
    for left, words in (
        ("", shortened),
        ("".join(lines[:last]), shortened),
        ("".join(lines[1:]), "which is gone"),
        ("".join(lines[:2] + lines[3:]), "a line was edited, inserted or removed"),
    ):
        finished.ledger.write_text(left)
        refused(words, small.go, finished.path, small.config())
    finished.ledger.unlink()
    refused(shortened, small.go, finished.path, small.config())


def test_nobody_without_the_secret_can_write_a_line_that_fits(finished):
    reader = Ledger(finished.ledger)
    assert reader.steps == 12
    refused("must be continued with the key", reader.charge, acc.Gaussian(1.0))
    rows = [json.loads(line) for line in finished.ledger.read_text().splitlines()]
    chain, forged = Chain(), []
    for row in rows:
        row.pop("chain")
        row = {**row, "steps": 1} if "steps" in row else row
        forged.append(json.dumps({**row, "chain": chain.next(row)}))
    finished.ledger.write_text("\n".join(forged) + "\n")
    refused("a line was edited", small.go, finished.path, small.config())


def test_another_run_is_refused_and_two_at_once(stopped):
    folder, cfg = stopped.path, small.config()
    refused("the training data changed", small.go, folder, cfg, rows=small.dataset(seed=1))
    other = small.config(learning_rate=0.7)
    refused(r"changed: learning_rate \(0.3 then, 0.7 now\)", small.go, folder, other)
    stopped.lock()
    refused("in use by another process", small.go, folder, cfg)
    stopped.unlock()
    assert small.go(folder, cfg).steps_run > 0
    start = (RunDirectory(folder), small.dataset(), Secret.new(), small.ignore)
    refused("pass --resume", runs.start, cfg, *start)
    nowhere = RunDirectory(folder / "x")
    refused("hold a run to resume", runs.resume, cfg, nowhere, small.dataset(), small.ignore)


def test_what_is_left_of_a_run_or_of_an_older_version_is_refused(finished):
    finished.save_state(dataclasses.replace(finished.load_state(), starts=None))
    refused("must hold a run of this version", small.go, finished.path, small.config())
    finished.state_file.unlink()
    left = "holds a ledger or checkpoints but not the secret state"
    refused(left, small.go, finished.path, small.config())


def test_two_starts_in_one_folder_are_one_run(finished, monkeypatch):
    monkeypatch.setattr(RunDirectory, "create", lambda self: None)  # looked before the other began
    again = (RunDirectory(finished.path), small.dataset(), Secret.from_seed(6), small.ignore)
    refused("a run began there", runs.start, small.config(), *again)


def test_copies_of_a_seeded_run_share_no_noise_once_they_part(tmp_path):
    """Their second starts have one number, and their parameters are not the same."""

    def starts(name, step):
        with contextlib.suppress(Stop):
            small.go(tmp_path / name, small.config(), crash_at(step), seed=7)
        return runs.RunDirectory(tmp_path / name).load_state().starts

    (one,), (two,) = starts("one", 3), starts("two", 6)
    assert one == two  # a run that is not interrupted can be made again
    assert starts("one", 9)[1] != starts("two", 9)[1]


# SIGKILL at random moments: nothing re-used, nothing taken back, no epsilon lost or gained.

STEPS, EVERY = 40, 5


def launch(folder):
    code = [sys.executable, "-m", "tests.runs.small", str(folder), str(STEPS), str(EVERY)]
    return subprocess.Popen(code, stdout=subprocess.PIPE, text=True)


def moves(folder):
    """(step, change of the parameters) of every step that any life took."""
    width = 1 + 650
    rows = np.fromfile(folder.with_suffix(".moves"), np.float32)
    rows = rows[: len(rows) // width * width].reshape(-1, width)
    return rows[:, 0].astype(int), rows[:, 1:]


@pytest.mark.parametrize("most", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path, most):
    folder, rng, shown, kills, code = tmp_path / "run", random.Random(1), [], 0, 1
    while code:
        process = launch(folder)
        # By lines, not by time: a slow machine is killed at the same moments.
        last = None if kills >= most else rng.randint(1, 2)
        for line in process.stdout:
            shown.append(json.loads(line))
            last = None if last is None else last - 1
            if last == 0:
                process.send_signal(signal.SIGKILL)
        code = process.wait()
        kills += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL)
    assert kills >= min(most, 3)
    step = acc.PoissonSampled(acc.Gaussian(50.0), 0.2)
    ledger = Ledger(RunDirectory(folder).ledger)
    assert ledger.event == acc.Composed((acc.Repeated(step, STEPS),))
    # What was shown before a kill is what the finished run holds.
    held = json.loads(folder.with_suffix(".history").read_text())
    final = {row["step"]: row for row in held}
    assert sorted(final) == [row["step"] for row in held] == list(range(EVERY, STEPS + 1, EVERY))
    assert len(shown) >= len(held) - most
    assert [row for row in shown if row != final[row["step"]]] == []
    steps, changes = moves(folder)
    assert len(steps) > STEPS  # some were done again
    noises = changes / np.linalg.norm(changes, axis=1, keepdims=True)
    alike = np.abs(noises @ noises.T - np.eye(len(noises)))
    assert alike.max() < 6 / np.sqrt(noises.shape[1])


# What is secret is for its owner alone, whatever the umask; what is public is not narrowed.


@contextlib.contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
        assert os.umask(mask) == mask  # nothing left it changed
    finally:
        os.umask(before)


def assert_private(secret):
    found = [secret, *secret.rglob("*")]
    assert len(found) > 8
    for path in found:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path}: {mode:o}"


@pytest.mark.parametrize(
    ("mask", "changes"), [(0o000, {"canaries": 20}), (0o022, {"sensitive": True})]
)
def test_secret_files_are_private_whatever_the_umask(tmp_path, mask, changes):
    directory = RunDirectory(tmp_path / "r")
    with umask(mask):
        small.crash(tmp_path / "r", small.config(**changes), 8)
        assert_private(directory.secret)  # also of a run that ended before its time
        small.go(tmp_path / "r", small.config(**changes))
    assert_private(directory.secret)
    if "sensitive" in changes:
        assert stat.S_IMODE(directory.sensitive.stat().st_mode) == 0o600
    public = stat.S_IMODE(directory.ledger.stat().st_mode)
    assert public == 0o666 & ~mask
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o777 & ~mask
    state, ledger = directory.load_state(), directory.ledger.read_text()
    for secret in (state.secret.entropy, state.data, *state.starts):
        assert secret not in ledger


def test_resuming_closes_what_older_versions_left_open(stopped, tmp_path):
    outside = tmp_path / "mine.txt"
    outside.write_text("not of the run")
    (stopped.secret / "link").symlink_to(outside)
    for path in stopped.secret.rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    outside.chmod(0o644)
    stopped.secret.chmod(0o755)
    stopped.lock()
    stopped.unlock()
    (stopped.secret / "link").unlink()
    assert_private(stopped.secret)
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644


def test_a_secret_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(1, "Operation not permitted", str(path))

    directory = RunDirectory(tmp_path / "r")
    directory.create()
    monkeypatch.setattr("jaxdp.runs.directory.make_private", refuse)
    refused("out must be a run whose secret folder can be closed", directory.lock)
    monkeypatch.undo()
    directory.lock()  # it is not held
    directory.unlock()


def test_a_lock_without_fcntl(tmp_path, monkeypatch):
    """As on Windows."""
    held = set()

    def locking(descriptor, mode, count):
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == _durable._LOCK_AT  # never where data lie
        inode = os.fstat(descriptor).st_ino
        if inode in held:
            raise OSError(36, "Resource deadlock avoided")
        held.add(inode)

    fake = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
    monkeypatch.setattr(_durable, "fcntl", None)
    monkeypatch.setattr(_durable, "msvcrt", fake, raising=False)
    first = _durable.open_locked(tmp_path / "lock", "w", "busy")
    refused("busy", _durable.open_locked, tmp_path / "lock", "a", "busy")
    _durable.append_line(first, "written at the start")
    first.close()
    assert (tmp_path / "lock").read_text() == "written at the start\n"
