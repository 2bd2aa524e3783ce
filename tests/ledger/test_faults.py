"""The ledger's file on storage that fails: it opens again, and misses nothing that was charged."""

import errno
import fcntl
import functools
import itertools
import os
import sys
from pathlib import Path

import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.ledger import durable, entries, file
from jaxdp.ledger import ledger as ledger_module
from jaxdp.ledger.durable import StorageError
from tests.ledger.small import KEY, OTHER, STEP, charged, charged_on, ended
from tests.refusing import all_refused, refused


def failing(number):
    return OSError(number, os.strerror(number))


def raising(error, *given):
    """What fails whatever it is given."""

    def fails(*args, **options):
        raise error(*given)

    return fails


full, interrupt = raising(failing, errno.ENOSPC), raising(KeyboardInterrupt)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


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
        write, cut, close, opened = os.write, os.ftruncate, os.close, durable.open_locked
        patch.setattr(os, "write", lambda handle, text: self.call(write, handle, bytes(text[:100])))
        patch.setattr(os, "ftruncate", lambda handle, size: self.call(cut, handle, size))
        patch.setattr(os, "fsync", lambda handle: self.call(self.sync, handle))
        patch.setattr(os, "close", lambda handle: (close(handle), self.call(int)))
        patch.setattr(durable, "open_locked", lambda *of: File(opened(*of), self))

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
@pytest.mark.parametrize("fault", ["full", "io", "ctrl-c"])
def test_whatever_call_fails_the_ledger_opens_again_and_misses_nothing(
    tmp_path, monkeypatch, quick, fault, lasts
):
    numbers, at, calls, left = {"full": errno.ENOSPC, "io": errno.EIO}, 0, 1, {}
    error = failing(numbers[fault]) if fault in numbers else KeyboardInterrupt()
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
                    ledger.charge(STEP, stream="s", first_step=step, again=True)
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


# Before: a line on disk that the process did not know, until it was started again.
def test_an_interrupt_at_any_line_leaves_file_and_memory_agreeing(tmp_path, quick):
    at, reached = 0, [""]
    while reached:
        at, reached = at + 1, []
        path = tmp_path / f"{at}.jsonl"
        ledger = jaxdp.Ledger(path, key=KEY)
        ledger.charge(STEP, 2, stream="s")
        trace = interrupting(at, reached)
        for deed, done in (
            (functools.partial(ledger.charge, STEP, 3, stream="s", first_step=2), 5),
            (functools.partial(ended, ledger, "s", 4), 4),
            (ledger.new_stream, None),
        ):
            if interrupted(deed, trace):
                assert jaxdp.Ledger(path, key=KEY).to_json() == ledger.to_json()
                if ledger.steps != done:
                    deed()
        assert ledger.steps == 4
        ledger.close()
        assert jaxdp.Ledger(path, key=KEY).to_json() == ledger.to_json()
    assert at > 200


FILES = {module.__file__ for module in (durable, entries, file, ledger_module)}


def interrupting(at, reached, files=FILES):
    """A trace that interrupts at the ``at``-th line of these modules."""
    lines = itertools.count(1)

    def trace(frame, event, arg):
        if frame.f_code.co_filename not in files:
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
def test_two_interrupts_are_made_good_and_a_failed_charge_leaves_the_budget(path, monkeypatch):
    ledger = charged(path)
    with monkeypatch.context() as patch:
        patch.setattr(file.LedgerFile, "_give_up", interrupt)
        patch.setattr(file.LedgerFile, "_parsed", interrupt)
        refused("", ledger.charge, STEP, 3, stream="b", error=KeyboardInterrupt)
    ledger.charge(STEP, 2, stream="c")
    assert ledger.steps == jaxdp.Ledger(path).steps == 4 + 3 + 2
    ledger.close()
    budget = acc.RenyiFilter(2.0, 1e-5)
    ledger = jaxdp.Ledger(path.with_name("other.jsonl"), budget)
    ledger.charge(STEP, 10)
    before = budget.spent()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for _ in range(3):
            words = "nothing was charged, and nothing"
            refused(words, ledger.charge, STEP, 400, error=StorageError)
    assert budget.spent() == before
    ledger.charge(STEP, 400)
    assert budget.spent() > before
    ledger.close()


# Before: a line in the page cache alone was counted, and its step released with nothing on disk.
def test_what_another_process_left_and_a_name_behind_a_link_are_durable(tmp_path, monkeypatch):
    (tmp_path / "far").mkdir()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "far" / "ledger.jsonl")
    fsync, synced = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda at: (fsync(at), synced.append(os.fstat(at).st_ino)))
    charged(tmp_path / "link.jsonl").close()
    assert (tmp_path / "far").stat().st_ino in synced
    synced.clear()
    ledger = jaxdp.Ledger(far := tmp_path / "far" / "ledger.jsonl")
    assert ledger.steps == 4
    ledger.join()
    assert far.stat().st_ino in synced
    ledger.close()


# Before: dropped without a word, and deleted by the first charge; lines that end in a carriage
# return alone were an empty ledger.
def test_a_file_that_is_no_ledger_is_refused_in_words_and_left_alone(path):
    charged(path).close()
    whole = path.read_bytes()
    # fmt: off
    others = {
        "last line": whole.replace(b'"steps": 4', b'"steps": 1')[:-1],
        "carriage returns": whole.replace(b"\n", b"\r"), "text": b"notes of a meeting",
        "picture": b"\x89PNG\r\n\x1a\n\0\0", "archive": b"PK\3\4\0\0", "zeros": b"\0" * 100,
        "list": b"[1, 2]\n", "number": b"7\n", "deep": b'{"a": ' * 100_000,
        "event alone": b'{"event": {"type": "Gaussian"}}', "header alone": b'{"ledger": 2}\n',
        "seen": b'{"seen": 3}\n', "shown": b'{"shown": Infinity, "stream": "s"}\n',
    }
    # fmt: on
    for kind, content in others.items():
        path.write_bytes(content)
        line = 2 if kind == "last line" else 1
        words = rf"ledger.jsonl, line {line}, must (be a ledger entry|follow)"
        all_refused([(words, lambda: jaxdp.Ledger(path), kind)])
        assert path.read_bytes() == content, kind
    # Lines that an editor ended otherwise count as before.
    path.write_bytes(b"\xef\xbb\xbf" + whole.replace(b"\n", b"\r\n"))
    charged_on(path)
    assert jaxdp.Ledger(path).steps == 5


# Before: PermissionError, NotADirectoryError, FileNotFoundError.
def test_a_place_that_cannot_be_read_or_written_is_told_in_words(tmp_path, monkeypatch):
    def told(words, deed, *given, **options):
        words = rf"\.jsonl must be a file that can be {words}"
        refused(words, deed, *given, error=StorageError, **options)

    refuse = raising(failing, errno.EACCES)
    (tmp_path / "file").touch()
    told("read, got .*Not a", jaxdp.Ledger, tmp_path / "file" / "l.jsonl")
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "gone" / "l.jsonl")
    told("written", charged, tmp_path / "dangling.jsonl")
    path = tmp_path / "l.jsonl"
    charged(path).close()
    before, ledger = path.read_bytes(), jaxdp.Ledger(path)
    monkeypatch.setattr(Path, "open", refuse)
    told("written, got .*denied", ledger.charge, STEP, stream="b")
    told("read, got .*denied", jaxdp.Ledger, path)
    monkeypatch.setattr(Path, "mkdir", refuse)
    told("written", charged, tmp_path / "sub" / "x.jsonl")
    monkeypatch.undo()
    assert path.read_bytes() == before
    ledger.charge(STEP, stream="b")
    ledger.close()
    # Before: what is no regular file was read until memory was gone, or for ever.
    os.mkfifo(tmp_path / "pipe-ledger.jsonl")
    (tmp_path / "folder-ledger.jsonl").mkdir()
    for kind in ("zero", "full", "null", "pipe", "folder"):
        place = tmp_path / f"{kind}-ledger.jsonl"
        if not place.exists():
            place.symlink_to(f"/dev/{kind}")
        refused(r"ledger\.jsonl must be a regular file, got a (dev|fold)", jaxdp.Ledger, place)


# Before: "is in use by another writer", also where the storage has no locks; and the line of a
# signal handler within another fitted no chain, and nobody could open the ledger again.
def test_storage_without_locks_a_lock_in_use_and_a_signal_handler_are_told(path, monkeypatch):
    ledger = charged(path)
    after, found = entries.Chain.after, []

    def interrupted(self, row):
        value = after(self, row)
        if "first_step" in row and not found:
            found.append(row)
            refused("by a signal handler", ledger.charge, OTHER)
        return value

    with monkeypatch.context() as patch:
        patch.setattr(entries.Chain, "after", interrupted)
        ledger.charge(OTHER)
    assert found
    assert jaxdp.Ledger(path).steps == ledger.steps == 5
    ledger.close()
    # In memory it would be charged for the steps of the charge that it has interrupted.
    ledger, append = jaxdp.Ledger(), entries.LedgerRows.append
    with monkeypatch.context() as patch:
        patch.setattr(
            entries.LedgerRows,
            "append",
            lambda *of: (refused("by a signal handler", ledger.charge, OTHER), append(*of)),
        )
        ledger.charge(OTHER)
    ledger.charge(OTHER)
    assert ledger.steps == 2
    lockless = "ledger.jsonl must lie on storage that can lock .*{}.*local d"
    for words, error, numbers in (
        (lockless, StorageError, (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO)),
        ("in use by another writer", ValueError, (errno.EWOULDBLOCK, errno.EACCES)),
    ):
        for number in numbers:
            monkeypatch.setattr(fcntl, "flock", raising(failing, number))
            refused(words.format(os.strerror(number)), charged, path, error=error)
