"""One ledger for several processes: process 0 writes it, the others wait until it has.

A row reaches the others only once it is durable. They never write and give nothing back, so that
what one of them may use, process 0 has charged; what it fails to write stops them all.
"""

import functools
import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from jaxdp import _processes
from jaxdp._durable import StorageError
from jaxdp._entries import Entry, Streams
from jaxdp._ledger_file import Chain, Known, LedgerFile, LedgerMemory, Row

Rows = Iterable[tuple[str, Row]]
# Rows, and hashes of rows, of one message: a few hundred kilobytes; the service takes 4 MB at most.
_TOGETHER, _HEADS_TOGETHER = 500, 10_000
_named: dict[str, Iterator[int]] = defaultdict(itertools.count)


class Book(Protocol):
    """The place where a ledger's rows are: a file, memory, or process 0."""

    @property
    def chain(self) -> Chain:
        """The running hash over the rows."""

    @property
    def chained(self) -> bool:
        """True once there is a header."""

    @property
    def is_open(self) -> bool:
        """True while this process writes to a file."""

    @property
    def begins_anew(self) -> bool:
        """True if ``open`` will hand over all rows, also those that were read before."""

    def new_rows(self) -> Rows:
        """(where, row) for the rows beyond those already known."""

    def open(self, known: Known) -> None:
        """Takes the book for this process; ``known`` receives rows that were not known yet."""

    def append(self, row: Row) -> Row:
        """Returns the row once it is durable and was received by what ``open`` was given."""

    def begin(self) -> None:
        """Writes the header, if there is none."""

    def close(self) -> None:
        """Closes the file, so that other processes can write."""


def book_of(path: Path | None, key: bytes, read: bool) -> Book:
    """The book of a ledger in this process.

    Args:
        path: of the file; None for memory.
        key: as for ``Chain``.
        read: False leaves a file that process 0 writes unread until the ledger is taken.
    """
    own = LedgerMemory() if path is None else LedgerFile(path, key)
    if _processes.count() == 1:
        return own
    return Heard(own, path, read) if _processes.index() else Told(own, path)


def check_shared(book: Book) -> None:
    """Raises ValueError for a ledger that was made before its process was one of several."""
    if _processes.count() > 1 and not isinstance(book, Told | Heard):
        raise ValueError(
            "ledger must be made after jax.distributed.initialize(), got one that was made before: "
            "it would be charged by every process for itself"
        )


class _Line:
    """The messages about one ledger, in order.

    Named when the ledger is first taken, so that one that is only read in some processes, for a
    report, counts in none.
    """

    def __init__(self, path: Path | None):
        self._path, self._next = str(path or ""), 0

    @functools.cached_property
    def _name(self) -> str:
        of = hashlib.blake2b(self._path.encode(), digest_size=8).hexdigest()
        return f"ledger/{of}/{next(_named[of])}"

    def tell(self, **message: Any) -> None:
        _processes.tell(f"{self._name}/{self._next}", json.dumps(message))
        self._next += 1

    def hear(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(_processes.hear(f"{self._name}/{self._next}"))
        self._next += 1  # not where Ctrl-C came first
        return found


class Told:
    """Process 0's book: every row is told to the others once it is durable."""

    begins_anew = False

    def __init__(self, own: LedgerFile | LedgerMemory, path: Path | None):
        self._own, self._line = own, _Line(path)
        self._read: list[tuple[Row, str]] = []  # before the others asked
        self._joined = False

    @property
    def chain(self) -> Chain:
        """The chain of the rows on disk."""
        return self._own.chain

    @property
    def chained(self) -> bool:
        """True once there is a header."""
        return self._own.chained

    @property
    def is_open(self) -> bool:
        """True while the file is open."""
        return self._own.is_open

    def new_rows(self) -> Rows:
        """As for ``Book``."""
        return self._noted(self._own.new_rows())

    def open(self, known: Known) -> None:
        """As for ``Book``; the first time it tells the others all rows."""
        with _Failing(self._line):
            self._own.open(lambda rows: known(self._noted(rows)))
        if self._read or not self._joined:
            self._tell_read()

    def append(self, row: Row) -> Row:
        """As for ``Book``."""
        before = self._own.chained
        with _Failing(self._line):
            self._own.append(row)
        if not before:
            self._line.tell(rows=[({"ledger": 0}, "")])
        self._line.tell(rows=[(row, self.chain.head.hex())])
        self._read.clear()
        return row

    def begin(self) -> None:
        """As for ``Book``."""
        if not self.chained:
            with _Failing(self._line):
                self._own.begin()
            self._line.tell(rows=[({"ledger": 0}, self.chain.head.hex())])
            self._read.clear()

    def close(self) -> None:
        """As for ``Book``."""
        self._own.close()

    def _noted(self, rows: Rows) -> Rows:
        for where, row in rows:
            yield where, row
            self._read.append((row, ""))

    def _tell_read(self) -> None:
        rows, self._read = self._read, []
        for first in range(0, len(rows), _TOGETHER):
            self._line.tell(rows=rows[first : first + _TOGETHER], old=True)
        heads = [head.hex() for head in self.chain.heads]
        for first in range(0, len(heads), _HEADS_TOGETHER):
            self._line.tell(rows=[], heads=heads[first : first + _HEADS_TOGETHER])
        self._line.tell(rows=[], head=self.chain.head.hex(), chained=self.chained)
        self._joined = True


class _Failing:
    """Tells the others that a row was not written, so that they stop too."""

    def __init__(self, line: _Line):
        self._line = line

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._line.tell(failed=str(error).splitlines()[0] if str(error) else repr(error))


class Heard:
    """The book of another process than 0: it waits where process 0 writes.

    Args:
        own: the same file, which is only read, and only until the ledger is taken.
        path: of the file.
        read: False does not read it.
    """

    is_open = False
    _known: Known

    def __init__(self, own: LedgerFile | LedgerMemory, path: Path | None, read: bool):
        self._own, self._line, self._reads = own, _Line(path), read
        self.chain, self.chained, self._joined = own.chain, own.chained, False
        self._written = Streams()
        self._begun: list[str] = []
        self._shown: dict[str, int] = defaultdict(int)
        self._count = itertools.count(1)

    def new_rows(self) -> Rows:
        """As for ``Book``."""
        rows = list(self._own.new_rows()) if self._reads else []
        self.chained = self._own.chained
        return rows

    @property
    def begins_anew(self) -> bool:
        """As for ``Book``; what is in memory alone, as after ``Ledger.from_json``, stays."""
        return not self._joined and isinstance(self._own, LedgerFile)

    def open(self, known: Known) -> None:
        """Waits, the first time, until process 0 has taken the file, for all that it holds."""
        if isinstance(self._own, LedgerMemory):
            self._own.open(known)
        self._known = known
        if self._joined:
            return
        self.chain = Chain()
        while not self._joined:
            self._hear()

    def append(self, row: Row) -> Row:
        """The row, once process 0 has written it; what is assumed or counted it says by itself."""
        if "begun" in row:
            row = {"begun": self._next_begun(row)}
        if "event" in row:
            self._wait_for(Entry.from_dict(row))
        if "shown" in row:
            while self._shown[row["stream"]] < row["shown"]:
                self._hear()
        if "given_back" in row:
            raise ValueError("charges must stay where several processes may have used them")
        self._know(row)
        return row

    def begin(self) -> None:
        """Waits for the header."""
        while not self.chained:
            self._hear()

    def close(self) -> None:
        """Does nothing."""

    def _next_begun(self, row: Row) -> str:
        while not self._begun:
            self._hear()
        return self._begun.pop(0)

    def _wait_for(self, entry: Entry) -> None:
        place = (entry.stream, entry.first_step, entry.end)
        while self._written.missing(*place, entry.event):
            if not self._written.missing(*place):
                raise ValueError(
                    f"event of step {entry.first_step} must be the one that process 0 charged, "
                    f"got {entry.event}"
                )
            self._hear()

    def _hear(self) -> None:
        """Takes in one message."""
        message = self._line.hear()
        if "failed" in message:
            raise StorageError(
                f"process 0 could not charge, so nobody goes on: {message['failed']}"
            )
        for head in message.get("heads", ()):
            self.chain.heads.setdefault(bytes.fromhex(head), len(self.chain.heads))
        if "chained" in message:
            self.chain.head, self.chained = bytes.fromhex(message["head"]), message["chained"]
            self._joined = True
        old = message.get("old", False)
        for row, head in message["rows"]:
            self._take_in(row, old)
            if head:
                self.chain.take(bytes.fromhex(head))

    def _take_in(self, row: Row, old: bool) -> None:
        if "ledger" in row:
            self.chained = True
        elif "event" in row:
            self._written.insert(Entry.from_dict(row))
        elif "given_back" in row:
            self._written.remove(row["stream"], *row["given_back"])
        elif "begun" in row and not old:
            self._begun.append(row["begun"])
        elif "shown" in row:
            self._shown[row["stream"]] = row["shown"]
        if old:
            self._know(row)

    def _know(self, row: Row) -> None:
        self._known([(f"row {next(self._count)} of the ledger of process 0", row)])
