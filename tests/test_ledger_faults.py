"""The ledger's file on storage that fails: it opens again, and misses nothing that was charged."""

import errno
import fcntl
import functools
import itertools
import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxdp
from jaxdp import _durable, _entries, _ledger_file
from jaxdp import accounting as acc
from jaxdp._durable import StorageError
from tests.test_ledger import OTHER, STEP, charged

KEY = b"k" * 32  # the same bytes every time
FULL, BROKEN = (OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EIO))


@pytest.fixture
def quick(monkeypatch):
    """A disk without waiting."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


class Disk:
    """A disk that takes 100 bytes at a time, and fails at one call or from it on.

    Attributes:
        calls: how many there were.
        durable: the ledger's file at its last fsync: what a power failure leaves.
        left: what a kill left after each call, with the most charges that had returned by then.
        returned: charges that returned.
    """

    def __init__(self, patch, path, at, error, lasts):
        self.path, self.at, self.error, self.lasts = path, at, error, lasts
        self.calls, self.returned, self.durable, self.left = 0, 0, b"", {}
        write, cut, close, opened = os.write, os.ftruncate, os.close, _durable.open_locked
        patch.setattr(os, "write", lambda handle, text: self.call(write, handle, bytes(text[:100])))
        patch.setattr(os, "ftruncate", lambda handle, size: self.call(cut, handle, size))
        patch.setattr(os, "fsync", lambda handle: self.call(self.sync, handle))
        patch.setattr(os, "close", lambda handle: (close(handle), self.call(int)))
        patch.setattr(_durable, "open_locked", lambda *of: File(opened(*of), self))

    def call(self, real, *given):
        self.calls += 1
        if self.calls == self.at or self.lasts and self.calls > self.at:
            raise self.error
        done = real(*given)
        self.note(self.path.read_bytes())
        return done

    def sync(self, handle):
        if os.path.samestat(os.fstat(handle), self.path.stat()):
            self.durable = self.path.read_bytes()

    def note(self, content):
        self.left[content] = max(self.left.get(content, 0), self.returned)

    def make_room(self):
        self.at, self.lasts = -1, False


class File:
    """A file whose ``close`` may say that it failed."""

    def __init__(self, file, disk):
        self.fileno, self._close, self._disk = file.fileno, file.close, disk

    def close(self):
        self._close()
        self._disk.call(int)


def counted(content, path):
    """The steps in a file of these bytes, which is opened, charged on and opened again."""
    path.write_bytes(content)
    ledger = jaxdp.Ledger(path, key=KEY)
    steps = ledger.steps
    ledger.charge(OTHER, stream="another")
    ledger.close()
    assert jaxdp.Ledger(path, key=KEY).steps == steps + 1
    return steps


# Before: closing wrote the buffered rest of a line behind the cut, and no ledger could be opened;
# a file that could not be cut had to be left to another process.
@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("error", [FULL, BROKEN, KeyboardInterrupt()], ids=["full", "io", "ctrl-c"])
def test_whatever_call_fails_the_ledger_opens_again_and_misses_nothing(
    tmp_path, monkeypatch, quick, error, lasts
):
    at, calls, left = 0, 1, {}
    while at < calls:
        at += 1
        path = tmp_path / f"{at}.jsonl"
        with monkeypatch.context() as patch:
            disk = Disk(patch, path, at, error, lasts)
            ledger = jaxdp.Ledger(path, key=KEY)
            for step in range(3):
                try:
                    ledger.charge(STEP, stream="s", first_step=step)
                except (StorageError, KeyboardInterrupt):
                    disk.make_room()
                    assert jaxdp.Ledger(path, key=KEY).steps == ledger.steps
                    assert lasts or ledger.steps == step  # where it could be cut, nothing counts
                    ledger.charge(STEP, stream="s", first_step=step, replay=True)
                disk.returned += 1
                disk.note(disk.durable)
            calls = disk.calls
            disk.make_room()
        assert ledger.steps == jaxdp.Ledger(path, key=KEY).steps == 3
        ledger.close()
        assert counted(path.read_bytes(), path) == 3
        for content, least in disk.left.items():
            left[content] = max(left.get(content, 0), least)
    assert at > 15
    for content, least in left.items():
        assert counted(content, tmp_path / "left.jsonl") >= least


def charged_until_full(ledger):
    """The steps that were charged when one could not be."""
    for step in range(9):
        try:
            ledger.charge(OTHER, stream="s", first_step=step)
        except StorageError:
            return step
    raise AssertionError("it was never full")


# Before: what did not fit was written behind the cut when the file was closed.
def test_a_ledger_that_is_cut_at_any_byte_goes_on(tmp_path, quick):
    """No file can grow beyond the limit, so that half a line is written where it ends."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (1, 100, 121, 122, 200, *range(210, 1_200, 37)):
        path = tmp_path / f"{limit}.jsonl"
        ledger = jaxdp.Ledger(path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
        try:
            steps = charged_until_full(ledger)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert jaxdp.Ledger(path).steps == ledger.steps == steps
        assert path.read_bytes().endswith(b"\n") or not path.read_bytes()
        ledger.charge(OTHER, stream="s", first_step=steps)
        ledger.close()
        assert jaxdp.Ledger(path).steps == steps + 1


# Before: a line on disk that the process did not know, until it was started again.
def test_an_interrupt_at_any_line_leaves_file_and_memory_agreeing(tmp_path, quick):
    at, reached = 0, [""]
    while reached:
        at, reached = at + 1, []
        path = tmp_path / f"{at}.jsonl"
        ledger = jaxdp.Ledger(path, key=KEY)
        ledger.charge(STEP, 2, stream="s")
        trace = interrupting(at, reached)
        for name, deed in (
            ("charge", functools.partial(ledger.charge, STEP, 3, stream="s", first_step=2)),
            ("give_back", functools.partial(ledger.give_back, "s", 4, 5)),
        ):
            if interrupted(deed, trace):
                assert jaxdp.Ledger(path, key=KEY).to_json() == ledger.to_json()
                if (name, ledger.steps) not in (("charge", 5), ("give_back", 4)):  # else it is done
                    deed()
        assert ledger.steps == 4
        ledger.close()
        assert jaxdp.Ledger(path, key=KEY).to_json() == ledger.to_json()
    assert at > 200


FILES = {module.__file__ for module in (_durable, _entries, _ledger_file, jaxdp.ledger)}


def interrupting(at, reached):
    """A trace that interrupts at the ``at``-th line of the ledger's modules."""
    lines = itertools.count(1)

    def trace(frame, event, arg):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line" and next(lines) == at:
            reached.append(frame.f_lineno)
            raise KeyboardInterrupt
        return trace

    return trace


def interrupted(deed, trace):
    """True if Ctrl-C came."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        deed()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


# Before: found by two signals in a row: a line that follows from none, and nothing opened again.
def test_two_interrupts_in_a_row_are_made_good_at_the_next_charge(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    ledger = charged(path)

    def twice(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_ledger_file.LedgerFile, "_give_up", twice)
        patch.setattr(_ledger_file.LedgerFile, "_parsed", lambda *args: twice(args))
        with pytest.raises(KeyboardInterrupt):
            ledger.charge(STEP, 3, stream="b")
    ledger.charge(STEP, 2, stream="c")
    assert ledger.steps == jaxdp.Ledger(path).steps == 4 + 3 + 2
    ledger.close()


def test_a_charge_that_failed_leaves_the_budget_as_it_was(tmp_path, monkeypatch):
    budget = acc.RenyiFilter(2.0, 1e-5)
    ledger = jaxdp.Ledger(tmp_path / "ledger.jsonl", budget)
    ledger.charge(STEP, 10)
    before = budget.spent()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for _ in range(3):
            with pytest.raises(StorageError, match="nothing was charged, and nothing"):
                ledger.charge(STEP, 400)
    assert budget.spent() == before
    ledger.charge(STEP, 400)
    assert budget.spent() > before
    ledger.close()


def full(*args):
    raise FULL


# Before: Ctrl-C in a charge, or a full disk, left an issuer that was refused its own steps.
@pytest.mark.parametrize("when", ["charging", "giving back"])
@pytest.mark.parametrize("stays", [False, True], ids=["cut", "not cut"])
def test_an_issuer_goes_on_after_a_full_disk_and_each_step_counts_once(
    tmp_path, monkeypatch, when, stays
):
    path = tmp_path / "ledger.jsonl"
    sampler = jaxdp.dp_sgd(1.0, 0.1, 5, 50).sampler(50, ledger=jaxdp.Ledger(path), reserve=4)
    for _ in range(4 if when == "charging" else 5):
        sampler.draw()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        if stays:
            patch.setattr(os, "ftruncate", full)
        words = "could not be removed and counts" if stays else "nothing was charged"
        with pytest.raises(StorageError, match=words):
            sampler.draw() if when == "charging" else sampler.close()
    drawn = 4 if when == "charging" else 5
    assert sampler.ledger.steps == jaxdp.Ledger(path).steps
    assert sampler.issuer.ahead() in (None, (sampler.issuer.stream, drawn))
    for step in range(drawn, 9):
        assert sampler.draw().ticket.step == step
        sampler.ledger.close() if step == 8 else None
        assert jaxdp.Ledger(path).steps >= step + 1
    assert jaxdp.Ledger(path).steps == (12 if when == "charging" else 9)


# Before: a line in the page cache alone was counted, and its step released with nothing on disk.
def test_what_another_process_left_is_durable_before_it_is_relied_on(tmp_path, monkeypatch):
    path, fsync, synced = tmp_path / "ledger.jsonl", os.fsync, []
    charged(path).close()

    def note(handle):
        fsync(handle)
        synced.append(os.fstat(handle).st_ino)

    monkeypatch.setattr(os, "fsync", note)
    ledger = jaxdp.Ledger(path)
    ledger.join()
    assert path.stat().st_ino in synced
    ledger.close()


def test_the_name_behind_a_link_is_durable(tmp_path, monkeypatch):
    (tmp_path / "far").mkdir()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "far" / "ledger.jsonl")
    fsync, synced = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda at: (fsync(at), synced.append(os.fstat(at).st_ino)))
    ledger = charged(tmp_path / "link.jsonl")
    ledger.close()
    assert (tmp_path / "far").stat().st_ino in synced
    assert jaxdp.Ledger(tmp_path / "far" / "ledger.jsonl").steps == ledger.steps


# Before: 1 of 2 steps counted, and the line was deleted at the next charge.
@pytest.mark.parametrize("tail", [b"", b"\0" * 7], ids=["", "zeros"])
@pytest.mark.parametrize("key", [None, KEY])
def test_a_whole_last_line_counts_without_its_newline(tmp_path, tail, key):
    path = tmp_path / "ledger.jsonl"
    ledger = charged(path, key=key)
    ledger.charge(OTHER, 5, stream="b")
    ledger.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + tail)
    assert jaxdp.Ledger(path).steps == 9  # a reader, also without the key
    assert path.read_bytes() == whole[:-1] + tail
    again = jaxdp.Ledger(path, key=key)
    again.charge(OTHER, 2, stream="c")
    again.close()
    assert path.read_bytes().startswith(whole)
    assert jaxdp.Ledger(path, key=key).steps == 11


def test_a_whole_last_line_that_does_not_fit_is_found(tmp_path):
    path = tmp_path / "ledger.jsonl"
    charged(path).close()
    path.write_bytes(path.read_bytes().replace(b'"steps": 4', b'"steps": 1')[:-1])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="line 2, must follow"):
        jaxdp.Ledger(path)
    assert path.read_bytes() == before


OTHERS = {
    "text": b"notes of a meeting",
    "picture": b"\x89PNG\r\n\x1a\n\0\0",
    "archive": b"PK\3\4\0\0",
    "zeros": b"\0" * 100,
    "list": b"[1, 2]\n",
    "number": b"7\n",
    "deep": b'{"a": ' * 100_000,
    "event alone": b'{"event": {"type": "Gaussian"}}',
    "seen": b'{"seen": 3}\n',
    "shown": b'{"shown": Infinity, "stream": "s"}\n',
    "header alone": b'{"ledger": 2}\n',
}


# Before: dropped without a word, and deleted by the first charge; lines that end in a carriage
# return alone were an empty ledger.
@pytest.mark.parametrize("kind", [*OTHERS, "carriage returns"])
def test_a_file_that_is_no_ledger_is_refused_in_words_and_left_alone(tmp_path, kind):
    path = tmp_path / "ledger.jsonl"
    charged(path).close()
    content = OTHERS.get(kind, path.read_bytes().replace(b"\n", b"\r"))
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"ledger.jsonl, line 1, must (be a ledger entry|follow)"):
        jaxdp.Ledger(path)
    assert path.read_bytes() == content


def test_lines_that_an_editor_ended_otherwise_count_as_before(tmp_path):
    path = tmp_path / "ledger.jsonl"
    charged(path).close()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    again = jaxdp.Ledger(path)
    again.charge(STEP, stream="b")
    again.close()
    assert jaxdp.Ledger(path).steps == 5


# Before: read until memory was gone, or for ever; IsADirectoryError.
@pytest.mark.parametrize("kind", ["/dev/zero", "/dev/full", "/dev/null", "pipe", "folder"])
def test_only_a_regular_file_is_read(tmp_path, kind):
    path = tmp_path / "ledger.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(kind)
    with pytest.raises(ValueError, match=r"ledger\.jsonl must be a regular file, got a (dev|fold)"):
        jaxdp.Ledger(path)


# Before: PermissionError, NotADirectoryError, FileNotFoundError.
def test_a_place_that_cannot_be_read_or_written_is_told_in_words(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(
        StorageError, match=r"l\.jsonl must be a file that can be read, got .*Not a"
    ):
        jaxdp.Ledger(tmp_path / "file" / "l.jsonl")
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "gone" / "l.jsonl")
    with pytest.raises(StorageError, match=r"dangling\.jsonl must be a file that can be written"):
        charged(tmp_path / "dangling.jsonl")
    denied = PermissionError(errno.EACCES, "Permission denied")

    def refuse(*args, **options):
        raise denied

    path = tmp_path / "l.jsonl"
    charged(path).close()
    before, ledger = path.read_bytes(), jaxdp.Ledger(path)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        StorageError, match=r"l\.jsonl must be a file that can be written, got .*den"
    ):
        ledger.charge(STEP, stream="b")
    with pytest.raises(
        StorageError, match=r"l\.jsonl must be a file that can be read, got .*denied"
    ):
        jaxdp.Ledger(path)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match=r"x\.jsonl must be a file that can be written"):
        charged(tmp_path / "sub" / "x.jsonl")
    monkeypatch.undo()
    assert path.read_bytes() == before
    ledger.charge(STEP, stream="b")
    ledger.close()


# Before: "is in use by another writer".
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_storage_without_locks_is_named_with_the_remedy(tmp_path, monkeypatch, number):
    def flock(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    words = rf"l\.jsonl must lie on storage that can lock .*{os.strerror(number)}.*local disk"
    with pytest.raises(StorageError, match=words):
        charged(tmp_path / "l.jsonl")


@pytest.mark.parametrize("number", [errno.EWOULDBLOCK, errno.EACCES])
def test_a_lock_that_somebody_holds_is_in_use(tmp_path, monkeypatch, number):
    def flock(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ValueError, match="in use by another writer"):
        charged(tmp_path / "l.jsonl")


def test_a_trainer_whose_give_back_failed_is_closed_later(tmp_path, monkeypatch):
    """Before: its issuer gave back up to a step that the ledger did not hold, for ever."""
    mechanism, path = jaxdp.dp_sgd(2.0, 1.0, 20, 60), tmp_path / "ledger.jsonl"
    sampler = mechanism.sampler(60, ledger=jaxdp.Ledger(path), reserve=12)
    write = os.write

    def full(handle, text):
        if b"given_back" in text:
            raise FULL
        return write(handle, text)

    first = sampler.draw()
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(StorageError):
            sampler.close()
    second = sampler.issuer.issue(until=4)
    assert (first.ticket.step, second.step) == (0, 1)
    sampler.close()
    sampler.ledger.close()
    again = jaxdp.Ledger(path)
    assert [(entry.first_step, entry.end) for entry in again.entries] == [(0, 2)]
    again.charge(OTHER)  # nobody holds it


def test_a_signal_handler_does_not_write_into_a_line(tmp_path, monkeypatch, quick):
    """Before: its line fitted no chain, and nobody could open the ledger again."""
    ledger = charged(tmp_path / "ledger.jsonl")
    after, found = _ledger_file.Chain.after, []

    def interrupted(self, row):
        value = after(self, row)
        if "first_step" in row and not found:
            found.append(row)
            with pytest.raises(ValueError, match="of a signal handler"):
                ledger.charge(OTHER)
        return value

    monkeypatch.setattr(_ledger_file.Chain, "after", interrupted)
    ledger.charge(OTHER)
    assert found
    assert jaxdp.Ledger(tmp_path / "ledger.jsonl").steps == ledger.steps == 5


@pytest.mark.parametrize("name", [("a", 1), frozenset("a"), 3])
def test_a_name_that_a_line_could_not_give_back_is_not_written(tmp_path, name):
    """Before: it was written, and the file was dead."""
    ledger = charged(tmp_path / "ledger.jsonl")
    for call in (
        lambda: ledger.charge(STEP, stream=name),
        lambda: ledger.new_stream(name),
        lambda: ledger.show(name, 3),
    ):
        with pytest.raises(ValueError, match="stream must be a string"):
            call()
    ledger.charge(STEP, np.int64(2), stream="a", first_step=np.int64(4))
    ledger.close()
    assert jaxdp.Ledger(tmp_path / "ledger.jsonl").steps == 6


def test_a_trainer_interrupted_after_its_give_back_is_closed_later():
    """What was given back by then, the ledger alone knows."""
    sampler = jaxdp.dp_sgd(2.0, 1.0, 20, 60).sampler(60, reserve=12)
    ledger, issuer = sampler.ledger, sampler.issuer
    give_back = ledger.give_back

    def interrupted(*given):
        give_back(*given)
        raise KeyboardInterrupt

    issuer.issue()
    ledger.give_back = interrupted
    with pytest.raises(KeyboardInterrupt):
        issuer.close()
    ledger.give_back = give_back
    issuer.close()
    assert [(entry.first_step, entry.end) for entry in ledger.entries] == [(0, 1)]
