"""One ledger for several processes: process 0 writes each row, and all wait until it has."""

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator

from jaxdp.devices import processes
from jaxdp.ledger.durable import StorageError
from jaxdp.ledger.entries import Chain, Known, LedgerRows, Row, Rows
from jaxdp.ledger.file import LedgerFile

_TOGETHER = 500  # rows of one message: a few hundred kilobytes; the service takes 4 MB at most
_PROMPT = 5.0  # how long a close waits for what another process says, in seconds
_named: dict[str, Iterator[int]] = defaultdict(itertools.count)


class RowsOfAll(LedgerRows):
    """The rows of a ledger of several processes, which process 0 writes.

    A row is a barrier. Every process tells its own under the barrier's number; process 0 writes it
    once all are the same, and tells what it wrote since the barrier before, or why it could not.
    Who was interrupted asks for the same number again; where process 0 was, or could not write, all
    ask for the next one.

    Args:
        own: the rows of process 0; in the others the same file, which is only read, and only until
            the ledger is taken.
        read: False leaves the file of process 0 unread until the ledger is taken.
    """

    several = True

    def __init__(self, own: LedgerRows, read: bool):
        self._own, self._reads = own, read
        self._count, self._index = processes.count(), processes.index()
        self.chain = own.chain  # then of the rows that all have: between barriers all have one head
        self._name = ""  # of the messages, once the ledger is opened
        self._number = 0  # of the next barrier
        self._untold: list[tuple[Row, str]] = []  # of process 0: rows, and heads
        self._noted: list[Row] = []  # that process 0 wrote; in another one what it did not yet

    @property
    def chained(self) -> bool:
        return self._number > 0

    @property
    def is_open(self) -> bool:
        return self._own.is_open and processes.count() == self._count

    def new_rows(self) -> Rows:
        if self._index:
            return self._own.new_rows() if self._reads else []
        return self._kept(self._own.new_rows())

    def open(self, known: Known, forget: Callable[[], None]) -> None:
        """As for ``LedgerRows``; the first time process 0 tells the others all rows."""
        self._known = known
        if not self._name:
            place = processes.hashed(str(getattr(self._own, "path", "")))
            self._name = f"ledger/{place}/{next(_named[place])}"
        if self._index:
            if not self._number:
                # What is in memory alone, as after ``Ledger.from_json``, stays.
                self._hear(forget if isinstance(self._own, LedgerFile) else lambda: None)
            return
        with self._failing():
            self._own.open(lambda rows: known(self._kept(rows)), forget)
            if not self._number:
                self._own.begin()
        if not self._number:
            self._tell()

    def append(self, row: Row) -> None:
        """As for ``LedgerRows``: a barrier."""
        # The others send a hash of their row and wait: they go on once the row is on disk.
        mine, what = _hashed(row), str(self._number)
        if self._index:
            self._say(what, mine)
            if _hashed(self._hear()) != mine:
                raise ValueError(_UNLIKE.format(0, row))
            self._noted = []
            return
        # Process 0 compares before it writes: a row on which they disagree charges nothing.
        with self._failing():
            for number, other in enumerate(self._said(what), 1):
                if other != mine:
                    raise ValueError(_UNLIKE.format(number, row))
            self._own.append(row)
        self._tell()

    def note(self, row: Row) -> None:
        """As for ``LedgerRows``; process 0 has those of the others at the next barrier."""
        if self._index == 0:
            self._own.append(row)
        else:
            self._noted.append(row)
            self._known([("a note of this process", row, self.chain.head)])

    def end(self, stream: str, step: int, held: int) -> None:
        """As for ``LedgerRows``, at the largest step of all, if all say theirs within seconds.

        They say it under the number of the next barrier: who asks for that was handed all that it
        may be of the ones before.
        """
        # No barrier: a process that has ended would be waited for. Without all answers nothing is
        # written, and the whole reservation counts.
        what = f"{self._number}/end of {stream}"
        try:
            if self._index:
                self._say(what, str(step))
                step = int(processes.receive(f"{self._name}/{what}", 2 * _PROMPT))
            else:
                step = max(step, *map(int, self._said(what, _PROMPT)))
                processes.send(f"{self._name}/{what}", str(step))
        except processes.LostError:
            return
        row = {"ended": step, "stream": stream}
        if held and step <= held and self._index == 0:
            self._own.append(row)
        elif held and step <= held:
            self._known([("the end of a stream", row, self.chain.head)])

    def close(self) -> None:
        """As for ``LedgerRows``; process 0 takes what the others noted since the last barrier."""
        try:
            if self._index and self._name and processes.count() == self._count:
                self._say("closed", "")
            elif self.is_open:
                with contextlib.suppress(processes.LostError):
                    self._said("closed", _PROMPT)
        finally:
            self._own.close()

    def _kept(self, rows: Rows) -> Rows:
        """The rows, which process 0 keeps until it sends them to the others."""
        for where, row, head in rows:
            yield where, row, head
            self._untold.append((row, head.hex()))
            if "assumed" in row or "trusted" in row:
                self._noted.append(row)

    def _say(self, what: str, text: str) -> None:
        """Sends process 0 a text, and the notes of this process."""
        processes.send(f"{self._name}/{what}/{self._index}", json.dumps([text, self._noted]))

    def _said(self, what: str, patience: float | None = None) -> list[str]:
        """The texts that the others sent process 0, which writes their notes into the ledger."""
        found = []
        for number in range(1, self._count):
            text, noted = json.loads(processes.receive(f"{self._name}/{what}/{number}", patience))
            for row in noted:
                if row not in self._noted:
                    self._own.append(row)
            found.append(text)
        return found

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Sends the others the error that ends a barrier in process 0: else they would wait."""
        try:
            yield
        except BaseException as error:  # an interrupt too
            self._tell(str(error).split("\n")[0] or repr(error))
            raise

    def _tell(self, failed: str = "") -> None:
        """Ends a barrier: sends the others all rows that process 0 wrote since the last one."""
        found, self._untold = self._untold, []
        name, self._number = f"{self._name}/{self._number}", self._number + 1
        head = self._own.chain.head.hex()
        self._follow(found, head)
        for first in range(0, len(found) + 1, _TOGETHER):
            rows, last = found[first : first + _TOGETHER], first + _TOGETHER > len(found)
            message = {"rows": rows, "head": head, "failed": failed, "last": last}
            processes.send(f"{name}/from {first}", json.dumps(message))

    def _hear(self, forget: Callable[[], None] = lambda: None) -> Row:
        """Receives the rows that process 0 sends at the end of a barrier; returns the last one."""
        found: list[tuple[Row, str]] = []
        last = False
        while not last:
            text = processes.receive(f"{self._name}/{self._number}/from {len(found)}")
            message = json.loads(text)
            found, last = found + message["rows"], message["last"]
        forget()
        self._known([("a row of process 0", row, bytes.fromhex(head)) for row, head in found])
        self._follow(found, message["head"])
        self._number += 1
        if failed := message["failed"]:
            raise StorageError(f"process 0 could not charge, so nobody goes on: {failed}")
        return found[-1][0] if found else {}

    def _follow(self, found: list[tuple[Row, str]], head: str) -> None:
        if self.chain is self._own.chain:
            self.chain = Chain()
        for each in filter(None, (*(head for _, head in found), head)):
            self.chain.take(bytes.fromhex(each))


_UNLIKE = "every process must charge the same, got another row in process {} than {}"


def _hashed(row: Row) -> str:
    return processes.hashed(json.dumps(row, sort_keys=True))
