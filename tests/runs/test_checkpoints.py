"""Checkpoints that are damaged, do not fit on the disk, or are written while training goes on."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import runs
from jaxdp.cli import main
from jaxdp.ledger.durable import StorageError
from jaxdp.runs import checkpoints as module
from jaxdp.runs import files as run_files
from jaxdp.runs.checkpoints import Checkpoints
from jaxdp.runs.directory import KeptSecret, RunState
from jaxdp.runs.export import export_params
from jaxdp.training.trainer import TrainState
from tests.refusing import refused
from tests.runs.own import MECHANISM, again
from tests.runs.small import stopping_before, undrawn


def state(value, step, size=50_000):
    params = {"w": jnp.full((size,), value), "b": jnp.full((3,), value)}
    return TrainState(params, {"m": jnp.full((size,), 2 * value)}, step, np.zeros(4, np.uint32))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    checkpoints = Checkpoints(folder := tmp_path_factory.mktemp("two") / "secret")
    for step in (1, 2):
        checkpoints.save(state(float(step), step), [{"step": step}])
    checkpoints.wait()
    checkpoints.close()
    return folder


@pytest.fixture
def folder(two, tmp_path):
    """Of two checkpoints."""
    return shutil.copytree(two, tmp_path / "secret")


def files(folder, step):
    """All that hold something of the state, the largest first."""
    found = [path for path in (folder / str(step) / "state").rglob("*") if path.is_file()]
    found = [path for path in found if path.name != "commit_success.txt"]
    return sorted((p for p in found if p.stat().st_size), key=lambda p: -p.stat().st_size)


def restored(folder):
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        return checkpoints.restore(state(0.0, 0))


def garbled(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


# What is done to which of a checkpoint's files.
DAMAGES = [
    *((which, garbled) for which in range(3)),
    (0, lambda path: path.write_bytes(path.read_bytes()[:-1])),
    (1, lambda path: path.write_bytes(b"")),
    (2, lambda path: path.unlink()),
]


@pytest.mark.parametrize(("which", "damage"), DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder, capfd, which, damage):
    damage(files(folder, 2)[which])
    (folder.parent / "damaged-checkpoint-2").mkdir()  # what was set aside is not overwritten
    found, history = restored(folder)
    assert (found.step, history) == (1, [{"step": 1}])
    np.testing.assert_array_equal(found.params["w"], np.full(50_000, 1.0))
    assert (folder.parent / "damaged-checkpoint-2-2" / "state").exists()
    (line,) = capfd.readouterr().err.splitlines()
    assert "the checkpoint of step 2 is damaged (" in line
    assert "going on from the one of step 1" in line
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        checkpoints.restore(state(0.0, 0))
        checkpoints.save(state(2.5, 2), [])  # the same step again
        checkpoints.wait()
        assert checkpoints.durable_step() == 2
        assert checkpoints.restore(state(0.0, 0))[0].params["b"][0] == 2.5


TRANSIENT = {
    "stale": OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
    "descriptors": OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "memory": MemoryError("cannot allocate 3.1 GiB"),
    "device": jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory on the device"),
    "tensorstore": ValueError("INTERNAL: Error opening file [OS error 24: Too many open files]"),
}


def names(folder):
    """Of all files of a run's secret folder, but its lock."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def failing(monkeypatch, error, step=None, name="_read"):
    """Makes the read of a checkpoint raise, until it is undone."""
    read = getattr(Checkpoints, name)

    def fails(self, number, *more):
        if step in (None, number):
            raise error
        return read(self, number, *more)

    monkeypatch.setattr(Checkpoints, name, fails)


def test_only_what_the_seal_says_is_damage(folder, monkeypatch):
    """Before: any error while the newest was read renamed it, and its steps were charged again."""
    before = names(folder)
    for where, which in [*(("read", each) for each in TRANSIENT), ("seal", "stale")]:

        def broken(*args, error=TRANSIENT[which]):
            raise error

        with monkeypatch.context() as patched:
            if where == "read":
                failing(patched, TRANSIENT[which])
            else:
                patched.setattr(module, "broken_seal", broken)
            with pytest.raises(StorageError, match=r"step 2 .* cannot be read here") as raised:
                restored(folder)
        assert "new run" not in str(raised.value), which
        descriptors = which in ("descriptors", "tensorstore")
        assert ("ulimit -n" in str(raised.value)) == descriptors, which
        assert names(folder) == before, which
        assert restored(folder)[0].step == 2
    # Pythons from 3.13 on leave out of ``rglob`` what cannot be listed.
    with monkeypatch.context() as patched:
        patched.setattr(run_files, "_digests", lambda *a: {})
        refused("could not be listed", restored, folder, error=StorageError)
    assert names(folder) == before
    for step in (1, 2):
        garbled(files(folder, step)[0])
    words = r"none is whole and usable \(step 2: .* step 1: .*\).*set_aside_unreadable=True"
    refused(words, restored, folder, error=StorageError)
    assert (folder / "2").exists()


def test_a_transient_error_costs_a_run_nothing(six, monkeypatch):
    with monkeypatch.context() as patched:
        failing(patched, TRANSIENT["memory"])
        refused("Make memory free", again(six).fit, error=StorageError)
    one = again(six)
    one.fit()
    assert one.epsilon().upper == MECHANISM.epsilon(12, 1e-3).upper


UNREADABLE = OSError(errno.EIO, "Input/output error")


def test_a_checkpoint_that_stays_unreadable_is_set_aside_and_charged_anew(
    six, tmp_path, monkeypatch, capfd
):
    for unreadable, left in ((6, 3), (None, 0)):
        folder = shutil.copytree(six, tmp_path / str(left))
        with monkeypatch.context() as patched:
            failing(patched, UNREADABLE, unreadable)
            one = again(folder, set_aside_unreadable=True)
            one.fit(9)
        assert one.directory.checked_ledger().steps == 6 + (9 - left)
        assert (folder / "secret/damaged-checkpoint-6").exists()
        assert (folder / "secret/damaged-checkpoint-3").exists() is (unreadable is None)
        assert "step 6 cannot be read (" in capfd.readouterr().err


def test_what_is_set_aside_is_charged_anew_although_it_was_not_shown(tmp_path, monkeypatch):
    """Its owner may have read it elsewhere before she gave it up."""
    with stopping_before(6, monkeypatch):
        again(tmp_path / "r").fit(6)
    failing(monkeypatch, UNREADABLE, 6)
    one = again(tmp_path / "r", set_aside_unreadable=True)
    one.fit(9)
    assert one.directory.checked_ledger().steps == 6 + 6


def test_nothing_is_set_aside_where_the_ledger_lacks_what_was_shown(six, monkeypatch):
    """Before: the checkpoint alone knew what was missing, and set aside it said so no more."""
    ledger = six / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    failing(monkeypatch, UNREADABLE, None)
    for lost in (3, 0):
        ledger.write_bytes(b"".join(lines[:lost]))
        given_up = again(six, set_aside_unreadable=True)
        refused("must hold the 6 steps that were shown", given_up.fit)
        assert not list((six / "secret").glob("damaged-checkpoint-*"))


def test_export_moves_nothing_and_takes_no_older_checkpoint(finished, tmp_path, monkeypatch):
    """Before: without the run's lock it renamed the newest and exported the one before it."""
    target, before = tmp_path / "params.msgpack", names(finished.path)

    def says(words, error=StorageError):
        refused(words, export_params, finished, target, error=error)

    with monkeypatch.context() as patched:
        failing(patched, TRANSIENT["memory"], name="_read_params")
        says(r"step 12 .* cannot be read here")
    newest = files(finished.checkpoints, 12)[0]
    kept = newest.read_bytes()
    garbled(newest)
    says("must be whole to be read, got a damaged one")
    assert names(finished.path) == before
    newest.write_bytes(kept)
    assert export_params(finished, target) == 12
    (finished.checkpoints / "12").rename(tmp_path / "away")
    says(r"must have the checkpoint of step 12.*the one of step 9", ValueError)


@undrawn()
def test_the_command_line_sets_aside_when_it_is_told_to(tmp_path, monkeypatch, capsys):
    options = ["--model", "logistic", "--batch-size", "100"]
    out = ["--out", str(tmp_path / "run")]
    main(["train", *options, "--steps", "4", "--eval-every", "2", "--seed", "3", *out])
    failing(monkeypatch, UNREADABLE, 4)
    for given, words in (
        (["train", *out, "--resume"], "--set-aside-unreadable"),
        (["train", *options, "--set-aside-unreadable"], "must come with --resume"),
    ):
        with pytest.raises(SystemExit):
            main(given)
        assert words in capsys.readouterr().err
    main(["train", *out, "--resume", "--set-aside-unreadable"])
    assert jaxdp.Ledger(tmp_path / "run" / "ledger.jsonl").steps == 6


def test_saving_returns_before_it_is_durable(tmp_path, monkeypatch):
    going, seal = threading.Event(), Checkpoints._seal
    monkeypatch.setattr(Checkpoints, "_seal", lambda self: going.wait() and seal(self))

    def full(*args):
        raise OSError(28, "No space left on device")

    with contextlib.closing(Checkpoints(tmp_path / "secret")) as checkpoints:
        checkpoints.save(state(1.0, 1), [])
        assert checkpoints.durable_step() is None
        going.set()
        checkpoints.wait()
        assert checkpoints.durable_step() == 1
        # A write that fails in the thread is said by ``wait``.
        monkeypatch.setattr(module, "seal", full)
        checkpoints.save(state(2.0, 2), [])
        refused(r"full disk.*that of step 1 is whole", checkpoints.wait, error=StorageError)
    # What is written lies in memory of its own: the next step's update is given the buffers of the
    # state, while they are written.
    monkeypatch.undo()
    checkpoints, sent = Checkpoints(tmp_path / "other"), []
    manager = checkpoints._manager
    monkeypatch.setattr(manager, "save", lambda step, args: sent.append(args["state"].item))
    kept = state(1.0, 1)
    checkpoints.save(kept, [])
    checkpoints.close()
    written, given = sent[0], {"params": kept.params, "opt_state": kept.opt_state}
    for part, name, value in (("params", "w", 1), ("params", "b", 1), ("opt_state", "m", 2)):
        one, other = written[part][name], given[part][name]
        assert (np.asarray(one) == value).all()
        assert one.unsafe_buffer_pointer() != other.unsafe_buffer_pointer(), name


def synced(monkeypatch, path):
    """(inode, whether ``path`` had its name by then) of everything that is put on disk."""
    events, fsync = [], os.fsync

    def spied(handle):
        events.append((os.fstat(handle).st_ino, path.exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", spied)
    return events


def test_what_was_waited_for_keeps_its_name_through_a_power_failure(tmp_path, monkeypatch):
    folder = tmp_path / "secret"
    with monkeypatch.context() as patched:
        events = synced(patched, folder / "1")
        with contextlib.closing(Checkpoints(folder)) as checkpoints:
            checkpoints.save(state(1.0, 1), [])
            checkpoints.wait()
    assert (folder.stat().st_ino, True) in events  # the folder, after orbax's rename
    # The secret state is on disk before its name, and its name after it.
    directory = runs.RunDirectory(tmp_path / "r")
    directory.create()
    events = synced(monkeypatch, directory.state_file)
    directory.save_state(RunState(secret=KeptSecret.of(jaxdp.Secret.new())))
    file, folder = directory.state_file.stat().st_ino, directory.secret.stat().st_ino
    assert events == [(file, False), (folder, True)]


LIMITED = """
import os, resource, signal, sys
from jaxdp.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
*limits, folder = sys.argv[1:]
options = "train --model mlp --hidden 200 --steps 2 --batch-size 100 --eval-every 1 --seed 3 --out"
for limit in map(int, limits):
    if not os.fork():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        main([*options.split(), f"{folder}/{limit}"])
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_full_disk_is_one_line_that_says_what_is_safe(tmp_path):
    """No file can grow beyond the limit: the checkpoint's cannot, or not even the ledger."""
    # Nothing is written to the cache of programs, whose files the limit would cut.
    given = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9", "PYTHONPATH": os.getcwd()}
    given = {**os.environ, **given}
    command = [sys.executable, "-c", LIMITED, "200", "20000", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=given)
    assert done.stdout.splitlines() == ["1", "1"], done.stderr
    first, second = (row for row in done.stderr.splitlines() if not row.startswith("step "))
    assert str(tmp_path / "200") in first
    assert str(tmp_path / "20000") in second
    assert "the ledger holds every charge. Make room, and start the same program again" in second
    main(["train", "--out", str(tmp_path / "20000"), "--resume"])
    # They open again, whatever the limit cut.
    assert jaxdp.Ledger(tmp_path / "20000" / "ledger.jsonl").steps == 2
    assert jaxdp.Ledger(tmp_path / "200" / "ledger.jsonl").steps == 0
