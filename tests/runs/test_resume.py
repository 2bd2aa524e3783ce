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

from jaxdp import accounting as acc
from jaxdp import runs
from jaxdp.ledger import Ledger, durable
from jaxdp.ledger.file import Chain
from jaxdp.ledger.seeds import Secret
from jaxdp.ledger.tickets import Issuer
from jaxdp.runs import RunDirectory, assemble
from jaxdp.runs.checkpoints import Checkpoints
from jaxdp.runs.starts import INTERRUPTED
from jaxdp.sampling import Sampler
from jaxdp.training.trainer import Trainer
from tests.mechanisms import mf_of
from tests.refusing import refused
from tests.runs import own, small
from tests.runs.small import Stop, crash_at

STEP = acc.PoissonSampled(acc.Gaussian(1.0), 0.2)


def test_a_crash_costs_nothing(tmp_path, whole):
    whole = whole[0]
    for crashes in ((0,), (1, 3, 5, 12)):
        folder, shown = tmp_path / str(len(crashes)), []
        for step in crashes:

            def progress(now, row, step=step, shown=shown):
                shown.extend([] if row is None else [row])
                crash_at(step)(now, row)

            with pytest.raises(Stop):
                small.go(folder, small.config(), progress)
        result = small.go(folder, small.config())
        assert (result.ledger.event, result.ledger.steps) == (whole.ledger.event, 12)
        told = [(row["step"], row["epsilon"]) for row in result.history]
        assert told == [(row["step"], row["epsilon"]) for row in whole.history]
        assert [step for step, _ in told] == [3, 6, 9, 12]
        assert [row for row in shown if row not in result.history] == []  # what was seen stays
        said = set(result.ledger.unverified()) - set(whole.ledger.unverified())
        assert said == ({INTERRUPTED} if any(crashes) else set())


class Unreadable:
    """Records of which half cannot be read for a while."""

    def __init__(self):
        self.broken = False

    def __len__(self):
        return len(own.X)

    def __getitem__(self, index):
        if self.broken and index % 2:
            raise OSError("it is gone")
        return own.X[index], own.Y[index]


CORRELATED = mf_of(2.0, 1.0, 40, 200, "fixed_order", steps=12, strategy="buffered")


@pytest.mark.parametrize(
    "mechanism", [own.MECHANISM, CORRELATED], ids=["independent", "correlated"]
)
def test_a_step_whose_records_cannot_be_read_is_passed_over_for_good(
    mechanism, tmp_path, monkeypatch
):
    """Nobody is drawn there by any start, however the records read by then."""
    source, sizes, drawn = Unreadable(), {}, Sampler.drawn
    monkeypatch.setattr(Sampler, "drawn", lambda self, step: noted(step, drawn(self, step)))

    def noted(step, draw):
        sizes.setdefault(step, []).append(int(draw.mask.sum()))
        return draw

    def started(progress):
        return own.run(tmp_path, source, mechanism, progress=progress)

    one = started(lambda now, row: vars(source).update(broken=now > 0))
    with pytest.raises(OSError, match="it is gone") as failed:
        one.fit()
    assert failed.value.__notes__ == [
        "The step that this batch was for is charged, and passed over for good"
    ]
    (path,) = one.directory.secret.glob("passed over *")
    at, stream = int(path.suffix[1:]), one.directory.checked_ledger().reserved[0].stream
    found = [one.directory.passed_over(name) for name in (stream, f"{stream}/1")]
    assert found == [{at}, set()]
    charged = one.directory.checked_ledger().reserved
    assert max(entry.end for entry in charged) >= at + 1
    assert len(sizes[at]) == 1
    assert sizes[at][0] > 0
    source.broken = False
    with pytest.raises(Stop):
        started(crash_at(at + 1)).fit()
    run = started(small.ignore)
    run.fit()
    assert set(sizes[at][1:]) == {0}
    assert all(0 not in counts for step, counts in sizes.items() if step != at)
    assert (run.history[-1]["step"], run.directory.checked_ledger().steps) == (12, 12)


def test_processes_may_pass_over_a_step_at_once(tmp_path, monkeypatch):
    """Before: one took the other's unfinished file away, which then told of a folder."""
    directory = RunDirectory(tmp_path)
    directory.create()
    replace = os.replace

    def late(one, two):
        monkeypatch.setattr(os, "replace", replace)
        directory.pass_over("run", 3)  # the other process, meanwhile
        replace(one, two)

    monkeypatch.setattr(os, "replace", late)
    directory.pass_over("run", 3)
    assert directory.passed_over("run") == {3}


def test_a_kill_at_one_of_the_first_writes_leaves_a_folder_that_starts(tmp_path, monkeypatch):
    """Before: killed between the ledger's first line and its secret, no run could start there."""
    left, writes, fsync = [], itertools.count(1), os.fsync

    def kept(handle):
        if (write := next(writes)) in (1, 2, 4, 6):
            left.append(shutil.copytree(tmp_path / "r", tmp_path / str(write)))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", kept)
    small.planned(tmp_path / "r", small.config())
    monkeypatch.undo()
    assert len(left) == 4
    for folder in left:
        assert len(small.planned(folder, small.config())) == 200, folder
    assert small.go(left[1], small.config()).ledger.steps == 12


def test_the_ledger_is_ahead_of_every_step_and_runs_of_one_seed_are_equal(
    tmp_path, monkeypatch, whole
):
    """And of other numbers they are not."""
    directory, seen, take = RunDirectory(tmp_path / "r"), [], Issuer.take

    def watched(self, *args):
        ticket = take(self, *args)
        charged = {s for e in Ledger(directory.ledger).entries for s in range(e.first_step, e.end)}
        assert ticket.step in charged
        seen.append(ticket.step)
        return ticket

    monkeypatch.setattr(Issuer, "take", watched)
    result = small.go(tmp_path / "r", small.config())
    assert seen == list(range(12))
    for row in result.history:
        expected = acc.epsilon(acc.Repeated(STEP, row["step"]), 1e-5).upper
        assert row["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert small.outcome(result) == small.outcome(whole[0])
    # With one seed: the noise, which is most of it, must not be shared.
    monkeypatch.undo()
    given = {"momentum": 0.0, "noise_multiplier": 100.0, "steps": 1, "eval_every": 1}
    begun = jax.tree.leaves(assemble.fresh_params(small.config(), Secret.from_seed(5)))[1]
    moves = []
    for rate in (1e-4, 2e-4):
        result = small.go(tmp_path / str(rate), small.config(learning_rate=rate, **given))
        moves.append(np.ravel(jax.tree.leaves(result.params)[1] - begun) / rate)
    assert abs(np.corrcoef(*moves)[0, 1]) < 6 / np.sqrt(moves[0].size)


def test_steps_that_are_done_again_have_other_draws_and_other_noise(tmp_path, monkeypatch):
    seen, step_with_info = [], Trainer.step_with_info

    def spy(self, state, batch, return_info=True):
        before = np.array(jax.tree.leaves(state.params)[1])
        out = step_with_info(self, state, batch, return_info)
        if out[0].step == 8:
            change = np.ravel(np.asarray(jax.tree.leaves(out[0].params)[1]) - before)
            seen.append((np.sort(batch.draw.indices[batch.draw.mask]), change))
        return out

    monkeypatch.setattr(Trainer, "step_with_info", spy)
    quiet = small.config(noise_multiplier=100.0, momentum=0.0)
    small.crash(tmp_path / "r", quiet, 8)
    small.go(tmp_path / "r", quiet)
    (one, first), (two, second) = seen
    assert not np.array_equal(one, two)
    assert abs(np.corrcoef(first, second)[0, 1]) < 6 / np.sqrt(len(first))

    # Copies of a seeded run share no noise once they part: their second starts have one number, and
    # their parameters are not the same.
    def starts(name, step):
        small.crash(tmp_path / name, small.config(), step, seed=7)
        return RunDirectory(tmp_path / name).load_state().starts

    (one,), (two,) = starts("one", 3), starts("two", 6)
    assert one == two  # a run that is not interrupted can be made again
    assert starts("one", 9)[1] != starts("two", 9)[1]


def test_steps_behind_a_damaged_checkpoint_were_seen_and_are_charged_again(finished):
    newest = finished.checkpoints / "12"
    for path in newest.rglob("*"):
        if path.is_file() and path.name != "digests.json":
            path.write_bytes(b"damaged")
    ledger = small.go(finished.path, small.config()).ledger
    assert ledger.steps == 12 + 3
    assert len({entry.stream for entry in ledger.entries}) == 2
    shutil.rmtree(newest)  # the same for one that was deleted
    for _ in range(2):
        assert small.go(finished.path, small.config()).ledger.steps == 12 + 3 + 3


def test_a_ledger_or_a_state_that_is_lost_shortened_forged_or_old_is_refused(finished, monkeypatch):
    reader, whole, cfg = Ledger(finished.ledger), finished.ledger.read_bytes(), small.config()
    assert reader.steps == 12
    refused("must be continued with the key", reader.charge, acc.Gaussian(1.0))
    lines = finished.ledger.read_text().splitlines(keepends=True)
    last = max(n for n, line in enumerate(lines) if "event" in line)
    chain, forged = Chain(), []  # nobody without the secret can write a line that fits
    for row in map(json.loads, lines):
        row.pop("chain")
        row = {**row, "steps": 1} if "steps" in row else row
        chain.take(chain.after(row))
        forged.append(json.dumps({**row, "chain": chain.head.hex()}) + "\n")
    shortened = "must hold the 12 steps that were shown"
    for left, words in (
        ([], shortened),
        (lines[:last], shortened),
        (lines[1:], "which is gone"),
        (lines[:2] + lines[3:], "a line was edited, inserted or removed"),
        (forged, "a line was edited"),
    ):
        finished.ledger.write_text("".join(left))
        refused(words, small.go, finished.path, cfg)
    finished.ledger.unlink()
    refused(shortened, small.go, finished.path, cfg)
    # What is left of a run of an older version, or of another start.
    finished.ledger.write_bytes(whole)
    state = finished.load_state()
    finished.save_state(dataclasses.replace(state, starts=None))
    refused("must hold a run of this version", small.go, finished.path, cfg)
    finished.state_file.unlink()
    left = "holds a ledger or checkpoints but not the secret state"
    refused(left, small.go, finished.path, cfg)
    finished.save_state(state)
    monkeypatch.setattr(RunDirectory, "create", lambda self: None)  # looked before the other began
    again = (RunDirectory(finished.path), small.dataset(), Secret.from_seed(6), small.ignore)
    refused("a run began there", runs.start, cfg, *again)


def test_another_run_is_refused_and_two_at_once(stopped):
    folder, cfg, rows = stopped.path, small.config(), small.dataset()
    refused("the training data changed", small.go, folder, cfg, rows=small.dataset(seed=1))
    other = small.config(learning_rate=0.7)
    refused(r"changed: learning_rate \(0.3 then, 0.7 now\)", small.go, folder, other)
    stopped.lock()
    refused("in use by another process", small.go, folder, cfg)
    stopped.unlock()
    assert small.go(folder, cfg).steps_run > 0
    start = (RunDirectory(folder), rows, Secret.new(), small.ignore)
    refused("pass --resume", runs.start, cfg, *start)
    nowhere = RunDirectory(folder / "x")
    refused("hold a run that has begun", runs.resume, cfg, nowhere, rows, small.ignore)


# Runs that end when a judge of their own rows has enough.
def begin(folder, enough, progress=small.ignore):
    """A run that ends when it has enough: (its folder, its configuration, its data)."""
    begun = RunDirectory(folder), small.config(steps=12, eval_every=2), small.dataset()
    with contextlib.suppress(Stop):
        runs.start(begun[1], begun[0], begun[2], Secret.new(), progress, enough=enough)
    return begun


def test_a_row_is_durable_before_it_decides(tmp_path, monkeypatch):
    """A decision may be shown; the steps of a row that a crash takes are done again, uncharged."""
    seen, save = [], Checkpoints.save

    def crash(self, state, history):
        if state.step == 4:  # never on disk, as where the power fails while it is written
            monkeypatch.setattr(Checkpoints, "wait", lost)
            return
        save(self, state, history)

    def lost(self):
        raise Stop

    def enough(row):
        seen.append(row)
        return False

    monkeypatch.setattr(Checkpoints, "save", crash)
    directory, config, data = begin(tmp_path / "r", enough)
    monkeypatch.undo()
    runs.resume(config, directory, data, small.ignore, enough=enough)
    told = {}
    for row in seen:
        told.setdefault(row["step"], set()).add(row["update_norm"])
    assert set(told) == {2, 4, 6, 8, 10}
    assert all(len(norms) == 1 for norms in told.values())  # one release of each step


def test_a_later_start_that_forgets_to_ask_or_began_before_tells_and_costs_no_less(tmp_path):
    directory, config, data = begin(tmp_path / "r", lambda row: row["step"] >= 4)
    with pytest.raises(Stop):
        runs.resume(config, directory, data, crash_at(10))
    history = directory.load_history()
    assert [row["step"] for row in history][:3] == [2, 4, 6]
    whole = acc.epsilon(config.total(12), config.delta).upper
    assert {row["epsilon"] for row in history} == {whole}
    # An older copy of the secrets is charged for all once more: steps that were shown are other
    # releases when they are done again, and so is their number.
    copied = tmp_path / "older"

    def keep(step, row):
        if row is not None and row["step"] == 2:
            shutil.copytree(tmp_path / "q" / "secret", copied)

    directory, config, data = begin(tmp_path / "q", lambda row: row["step"] >= 6, keep)
    shutil.rmtree(directory.secret)
    shutil.copytree(copied, directory.secret)
    result = runs.resume(config, directory, data, small.ignore, enough=lambda row: row["step"] >= 4)
    assert [row["step"] for row in result.history] == [2, 4]
    assert result.ledger.steps == 12 + 10
    assert result.history[-1]["epsilon"] == result.ledger.epsilon(config.delta).upper


# SIGKILL at random moments: nothing re-used, nothing taken back, no epsilon lost or gained.

STEPS, EVERY = 40, 5


@pytest.mark.parametrize("most", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path, most):
    folder, rng, shown, kills, last = tmp_path / "run", random.Random(1), [], 0, 0
    program = [sys.executable, "-m", "tests.runs.small", str(folder), str(STEPS), str(EVERY)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    for row in map(json.loads, process.stdout):
        if isinstance(row, int):  # another life
            # By lines, not by time: a slow machine is killed at the same moments.
            life, last = row, rng.randint(1, 2)
            continue
        shown.append(row)
        last -= 1
        if last == 0 and kills < most:
            os.kill(life, signal.SIGKILL)
            kills += 1
    assert process.wait() == 0
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
    # Every step that any life took: its number, and the change of the parameters.
    moves = np.fromfile(folder.with_suffix(".moves"), np.float32)
    moves = moves[: len(moves) // 651 * 651].reshape(-1, 651)
    assert len(moves) > STEPS  # some were done again
    noises = moves[:, 1:] / np.linalg.norm(moves[:, 1:], axis=1, keepdims=True)
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


def test_secret_files_are_private_whatever_the_umask(tmp_path):
    for mask, changes in ((0o000, {"canaries": 20}), (0o022, {"sensitive": True})):
        directory = RunDirectory(tmp_path / f"{mask:o}")
        with umask(mask):
            small.crash(directory.path, small.config(**changes), 8)
            assert_private(directory.secret)  # also of a run that ended before its time
            small.go(directory.path, small.config(**changes))
        assert_private(directory.secret)
        modes = {directory.ledger: 0o666 & ~mask, directory.path: 0o777 & ~mask}
        modes |= {directory.sensitive: 0o600} if "sensitive" in changes else {}
        assert {path: stat.S_IMODE(path.stat().st_mode) for path in modes} == modes
        state, ledger = directory.load_state(), directory.ledger.read_text()
        for secret in (state.secret.entropy, state.data, *state.starts):
            assert secret not in ledger


def test_a_lock_closes_what_older_versions_left_open_or_is_refused(stopped, tmp_path, monkeypatch):
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

    # In a secret folder of somebody else.
    def refuse(path):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr("jaxdp.runs.directory.make_private", refuse)
    refused("out must be a run whose secret folder can be closed", stopped.lock)
    monkeypatch.undo()
    stopped.lock()  # it is not held
    stopped.unlock()


def test_a_lock_without_fcntl(tmp_path, monkeypatch):
    """As on Windows."""
    held = set()

    def locking(descriptor, mode, count):
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == durable._LOCK_AT  # never where data lie
        inode = os.fstat(descriptor).st_ino
        if inode in held:
            raise OSError(36, "Resource deadlock avoided")
        held.add(inode)

    fake = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
    monkeypatch.setattr(durable, "fcntl", None)
    monkeypatch.setattr(durable, "msvcrt", fake, raising=False)
    first = durable.open_locked(tmp_path / "lock", "w", "busy")
    refused("busy", durable.open_locked, tmp_path / "lock", "a", "busy")
    durable.append_line(first, "written at the start")
    first.close()
    assert (tmp_path / "lock").read_text() == "written at the start\n"
