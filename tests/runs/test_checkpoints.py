"""Checkpoints that are damaged, do not fit on the disk, or are written while training goes on."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import _durable, runs
from jaxdp.cli import main
from jaxdp.runs import branches
from jaxdp.runs import checkpoints as module
from jaxdp.runs.checkpoints import Checkpoints
from jaxdp.runs.export import export_params
from jaxdp.runs.run import Started
from jaxdp.runs.state import KeptSecret, RunState
from jaxdp.trainer import TrainState
from tests.runs import small
from tests.runs.test_own import MECHANISM, run
from tests.runs.test_resume import Stop


def state(value, step, size=50_000):
    params = {"w": jnp.full((size,), value), "b": jnp.full((3,), value)}
    return TrainState(params, {"m": jnp.full((size,), 2 * value)}, step, np.zeros(4, np.uint32))


@pytest.fixture
def folder(tmp_path):
    checkpoints = Checkpoints(tmp_path / "secret")
    for step in (1, 2):
        checkpoints.save(state(float(step), step), [{"step": step}])
    checkpoints.wait()
    checkpoints.close()
    return tmp_path / "secret"


def files(folder, step):
    """All that hold something of the state, the largest first."""
    found = [path for path in (folder / str(step) / "state").rglob("*") if path.is_file()]
    found = [path for path in found if path.name != "commit_success.txt"]
    return sorted((p for p in found if p.stat().st_size), key=lambda p: -p.stat().st_size)


def restored(folder):
    checkpoints = Checkpoints(folder)
    try:
        return checkpoints, checkpoints.restore(state(0.0, 0))
    finally:
        checkpoints.close()


def garbled(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


DAMAGES = {
    "garbled": garbled,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder, capfd, damage, which):
    DAMAGES[damage](files(folder, 2)[which])
    checkpoints, found = restored(folder)
    assert found[0].step == 1
    np.testing.assert_array_equal(found[0].params["w"], np.full(50_000, 1.0))
    assert found[1] == [{"step": 1}]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "the checkpoint of step 2 is damaged" in lines[0]
    assert "going on from the one of step 1" in lines[0]
    checkpoints = Checkpoints(folder)
    checkpoints.restore(state(0.0, 0))
    checkpoints.save(state(2.5, 2), [])  # the same step again
    checkpoints.wait()
    assert checkpoints.durable_step() == 2
    assert checkpoints.restore(state(0.0, 0))[0].params["b"][0] == 2.5
    checkpoints.close()


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


@pytest.mark.parametrize(
    ("where", "which"),
    [*(("read", each) for each in TRANSIENT), ("seal", "stale"), ("seal", "descriptors")],
)
def test_only_what_the_seal_says_is_damage(folder, monkeypatch, where, which):
    """Before: any error while the newest was read renamed it, and its steps were charged again."""
    error, before = TRANSIENT[which], names(folder)
    with monkeypatch.context() as patched:
        if where == "read":
            failing(patched, error)
        else:
            patched.setattr(module, "broken_seal", lambda *a: (_ for _ in ()).throw(error))
        with pytest.raises(_durable.StorageError, match=r"step 2 .* cannot be read here") as raised:
            restored(folder)
    assert "new run" not in str(raised.value)
    assert ("ulimit -n" in str(raised.value)) == (which in ("descriptors", "tensorstore"))
    assert names(folder) == before
    assert restored(folder)[1][0].step == 2


def test_a_folder_that_cannot_be_listed_is_not_damaged(folder, monkeypatch):
    """Pythons from 3.13 on leave out of ``rglob`` what cannot be listed."""
    before = names(folder)
    with monkeypatch.context() as patched:
        patched.setattr(_durable, "_digests", lambda *a: {})
        with pytest.raises(_durable.StorageError, match="could not be listed"):
            restored(folder)
    assert names(folder) == before


def test_a_transient_error_costs_a_run_nothing(tmp_path, monkeypatch):
    run(tmp_path / "r", report=False).fit(6)
    with monkeypatch.context() as patched:
        failing(patched, MemoryError("cannot allocate 3.1 GiB"))
        with pytest.raises(_durable.StorageError, match="Make memory free"):
            run(tmp_path / "r", report=False).fit()
    again = run(tmp_path / "r", report=False)
    again.fit()
    assert again.epsilon().upper == MECHANISM.epsilon(12, 1e-3).upper


@pytest.mark.parametrize("unreadable", [6, None])
def test_a_checkpoint_that_stays_unreadable_is_set_aside_and_charged_anew(
    tmp_path, monkeypatch, capfd, unreadable
):
    run(tmp_path / "r", report=False).fit(6)
    secret = tmp_path / "r" / "secret"
    failing(monkeypatch, OSError(errno.EIO, "Input/output error"), unreadable)
    again = run(tmp_path / "r", report=False, set_aside_unreadable=True)
    again.fit(9)
    left = 3 if unreadable else 0
    assert again.directory.checked_ledger().steps == 6 + (9 - left)
    assert (secret / "damaged-checkpoint-6").exists()
    assert (secret / "damaged-checkpoint-3").exists() is (unreadable is None)
    assert "step 6 cannot be read (" in capfd.readouterr().err


def test_what_is_set_aside_is_charged_anew_although_it_was_not_shown(tmp_path, monkeypatch):
    """Its owner may have read it elsewhere before she gave it up."""
    with monkeypatch.context() as patched:
        shows = Started.shows

        def crash(self, step):
            if step == 6:
                raise Stop
            shows(self, step)

        patched.setattr(Started, "shows", crash)
        with pytest.raises(Stop):
            run(tmp_path / "r", report=False).fit(6)
    failing(monkeypatch, OSError(errno.EIO, "Input/output error"), 6)
    again = run(tmp_path / "r", report=False, set_aside_unreadable=True)
    again.fit(9)
    assert again.directory.checked_ledger().steps == 6 + 6


def test_a_checkpoint_is_not_given_up_where_its_steps_cannot_be_charged_again():
    """Nor moved: with correlated noise that is amplified by sampling no bound would be proven."""
    options = {"steps": 4, "strategy": "banded", "bands": 2}
    for rule in ("cyclic_poisson", "fixed_order"):
        mechanism = jaxdp.dp_mf(1.0, 1.0, 20, 200, rule, **options)
        if rule == "fixed_order":
            branches.check_given_up(mechanism)
            continue
        with pytest.raises(ValueError, match="set_aside_unreadable must be False"):
            branches.check_given_up(mechanism)
    branches.check_given_up(MECHANISM)


def test_nothing_that_was_set_aside_is_overwritten(folder):
    (folder.parent / "damaged-checkpoint-2").mkdir()
    garbled(files(folder, 2)[0])
    assert restored(folder)[1][0].step == 1
    assert (folder.parent / "damaged-checkpoint-2-2" / "state").exists()


def test_export_moves_nothing_and_takes_no_older_checkpoint(tmp_path, monkeypatch):
    """Before: without the run's lock it renamed the newest and exported the one before it."""
    small.go(tmp_path / "r", small.config())
    directory, target = runs.RunDirectory(tmp_path / "r"), tmp_path / "params.msgpack"
    before = names(directory.path)
    with monkeypatch.context() as patched:
        failing(patched, MemoryError("cannot allocate"), name="_read_params")
        with pytest.raises(_durable.StorageError, match=r"step 12 .* cannot be read here"):
            export_params(directory, target)
    assert names(directory.path) == before
    newest = files(directory.checkpoints, 12)[0]
    kept = newest.read_bytes()
    garbled(newest)
    with pytest.raises(_durable.StorageError, match="must be whole to be read, got a damaged one"):
        export_params(directory, target)
    assert names(directory.path) == before
    newest.write_bytes(kept)
    assert export_params(directory, target) == 12
    (directory.checkpoints / "12").rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"must have the checkpoint of step 12.*the one of step 9"):
        export_params(directory, target)


def test_the_command_line_sets_aside_when_it_is_told_to(tmp_path, monkeypatch, capsys):
    options = ["--dataset", "digits", "--model", "logistic", "--batch-size", "100"]
    out = ["--out", str(tmp_path / "run")]
    main(["train", *options, "--steps", "4", "--eval-every", "2", "--seed", "3", *out])
    failing(monkeypatch, OSError(errno.EIO, "Input/output error"), 4)
    for given, words in (
        (["train", *out, "--resume"], "--set-aside-unreadable"),
        (["train", *options, "--set-aside-unreadable"], "must come with --resume"),
    ):
        with pytest.raises(SystemExit):
            main(given)
        assert words in capsys.readouterr().err
    main(["train", *out, "--resume", "--set-aside-unreadable"])
    assert jaxdp.Ledger(tmp_path / "run" / "ledger.jsonl").steps == 6


def test_where_none_is_whole_it_is_said_and_nothing_is_moved(folder):
    for step in (1, 2):
        garbled(files(folder, step)[0])
    with pytest.raises(_durable.StorageError, match=r"none is whole \(step 2: .* step 1: .*\)"):
        restored(folder)
    assert (folder / "2").exists()


def test_a_run_whose_last_checkpoint_is_damaged_goes_on(tmp_path, capfd):
    small.go(tmp_path / "b", small.config())
    garbled(files(runs.RunDirectory(tmp_path / "b").checkpoints, 12)[0])
    result = small.go(tmp_path / "b", small.config())
    assert result.steps_run == 3
    assert result.ledger.steps == 12 + 3  # what it held had been shown
    assert "damaged" in capfd.readouterr().err


def test_what_is_written_is_what_was_saved_although_its_memory_is_used_again(tmp_path):
    """The trainer's update donates the buffers of the state that is being written."""
    update = jax.jit(lambda t: jax.tree.map(lambda x: x * 0 - 7, t), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path / "secret")
    kept = state(1.0, 1, size=4_000_000)
    checkpoints.save(kept, [])
    params, opt_state = kept.params, kept.opt_state
    for _ in range(3):
        params, opt_state = update((params, opt_state))
    jax.block_until_ready(params)
    checkpoints.wait()
    found = checkpoints.restore(state(0.0, 0, size=4_000_000))[0]
    checkpoints.close()
    assert (np.asarray(found.params["w"]) == 1).all()
    assert (np.asarray(found.opt_state["m"]) == 2).all()


def test_what_is_written_lies_in_memory_of_its_own(tmp_path, monkeypatch):
    """The next step reuses that of the state, and would wait until it is written."""
    checkpoints, sent = Checkpoints(tmp_path / "secret"), []
    manager = checkpoints._manager
    monkeypatch.setattr(manager, "save", lambda step, args: sent.append(args["state"].item))
    kept = state(1.0, 1)
    checkpoints.save(kept, [])
    checkpoints.close()
    written, given = sent[0]["params"]["w"], kept.params["w"]
    assert (np.asarray(written) == 1).all()
    assert written.unsafe_buffer_pointer() != given.unsafe_buffer_pointer()


def test_saving_returns_before_it_is_durable(tmp_path, monkeypatch):
    going = threading.Event()
    seal = Checkpoints._seal
    monkeypatch.setattr(Checkpoints, "_seal", lambda self: going.wait() and seal(self))
    checkpoints = Checkpoints(tmp_path / "secret")
    checkpoints.save(state(1.0, 1), [])
    assert checkpoints.durable_step() is None
    going.set()
    checkpoints.wait()
    assert checkpoints.durable_step() == 1
    checkpoints.close()


def test_a_write_that_fails_in_a_thread_is_said_by_wait(tmp_path, monkeypatch):
    def full(self):
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(tmp_path / "secret")
    checkpoints.save(state(1.0, 1), [])
    checkpoints.wait()
    monkeypatch.setattr(_durable, "_digests", full)
    monkeypatch.setattr("jaxdp.runs.checkpoints.seal", lambda *a: full(a))
    checkpoints.save(state(2.0, 2), [])
    with pytest.raises(_durable.StorageError, match=r"full disk.*that of step 1 is whole"):
        checkpoints.wait()
    checkpoints.close()


def synced(monkeypatch, path):
    """(inode, whether ``path`` had its name by then) of everything that is put on disk."""
    events, fsync = [], os.fsync

    def spied(handle):
        events.append((os.fstat(handle).st_ino, path.exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", spied)
    return events


def test_a_checkpoint_that_was_waited_for_keeps_its_name_through_a_power_failure(
    tmp_path, monkeypatch
):
    folder = tmp_path / "secret"
    events = synced(monkeypatch, folder / "1")
    checkpoints = Checkpoints(folder)
    checkpoints.save(state(1.0, 1), [])
    checkpoints.wait()
    assert (folder.stat().st_ino, True) in events  # the folder, after orbax's rename
    checkpoints.close()


def test_the_secret_state_is_on_disk_before_its_name_and_its_name_after_it(tmp_path, monkeypatch):
    directory = runs.RunDirectory(tmp_path / "r")
    directory.create()
    events = synced(monkeypatch, directory.state_file)
    directory.save_state(RunState(secret=KeptSecret.of(jaxdp.Secret.new())))
    file, folder = directory.state_file.stat().st_ino, directory.secret.stat().st_ino
    assert events == [(file, False), (folder, True)]


LIMITED = """
import resource, signal, sys
from jaxdp.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.argv = ["jaxdp", "train", "--dataset", "digits", "--model", "mlp", "--hidden", "2000",
            "--steps", "2", "--batch-size", "100", "--eval-every", "1", "--seed", "3", "--out",
            sys.argv[2]]
main()
"""


def without_cache():
    """The environment without the tests' cache of programs, whose files the limit would cut."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "JAXDP_TESTS"))}


@pytest.mark.parametrize("limit", [20_000, 200])
def test_a_full_disk_is_one_line_that_says_what_is_safe(tmp_path, limit):
    """No file can grow beyond the limit: the checkpoint's cannot, or not even the ledger."""
    assert resource.RLIMIT_FSIZE is not None
    assert signal.SIGXFSZ
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env={**without_cache(), "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("step ")]
    assert len(lines) == 1, done.stderr
    assert str(tmp_path / "run") in lines[0]
    if limit > 1_000:
        assert "the ledger holds every charge: make room and continue with --resume" in lines[0]
        main(["train", "--out", str(tmp_path / "run"), "--resume"])
    # It opens again, whatever the limit cut.
    assert jaxdp.Ledger(tmp_path / "run" / "ledger.jsonl").steps == (2 if limit > 1_000 else 0)


@pytest.mark.parametrize("lost", [3, 0])
def test_nothing_is_set_aside_where_the_ledger_lacks_what_was_shown(tmp_path, monkeypatch, lost):
    """Before: the checkpoint alone knew what was missing, and set aside it said so no more."""
    run(tmp_path / "r", report=False).fit(6)
    ledger = tmp_path / "r" / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:lost]))
    failing(monkeypatch, OSError(errno.EIO, "Input/output error"), None)
    with pytest.raises(ValueError, match="must hold the 6 steps that were shown"):
        run(tmp_path / "r", report=False, set_aside_unreadable=True).fit()
    assert not list((tmp_path / "r" / "secret").glob("damaged-checkpoint-*"))
