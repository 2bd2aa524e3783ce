"""One ledger for several processes: process 0 writes each row, and all wait until it has."""

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxdp.devices import processes
from jaxdp.ledger.durable import StorageError
from jaxdp.ledger.entries import Chain, Known, LedgerRows, Row, Rows
from jaxdp.ledger.file import LedgerFile

# Rows, and hashes of rows, of one message: a few hundred kilobytes; the service takes 4 MB at most.
_TOGETHER, _HEADS = 500, 10_000
_PROMPT = 5.0  # how long process 0 waits at a close for what the others say, in seconds
_named: dict[str, Iterator[int]] = defaultdict(itertools.count)


def rows_of(path: Path | None, key: bytes, read: bool) -> LedgerRows:
    """The rows of a ledger in this process.

    Args:
        path: of the file; None for memory.
        key: as for ``Chain``.
        read: False leaves a file that process 0 writes unread until the ledger is taken.
    """
    own = LedgerRows() if path is None else LedgerFile(path, key)
    return own if processes.count() == 1 else RowsOfAll(own, path, read)


class RowsOfAll(LedgerRows):
    """The rows of a ledger of several processes, which process 0 writes.

    Each row is a barrier: every process tells the hash of its own row, process 0 writes it if all
    are the same, and tells the head of the chain with it, or why it could not. So what any of them
    may use is durable. Who was interrupted asks for the same barrier again.

    Args:
        own: process 0's; in the others the same file, which is only read, and only until the ledger
            is taken.
        path: of the file.
        read: False does not read it.
    """

    several = True

    def __init__(self, own: LedgerFile | LedgerRows, path: Path | None, read: bool):
        self._own, self._reads, self._first = own, read, processes.index() == 0
        self._count, self._path = processes.count(), str(path or "")
        self.chain = own.chain
        self._name = ""  # of the messages; "" until the ledger is taken
        self._number = 0  # of the next barrier
        self._asked = -1  # the last one that this process told its row for
        self._told = 0  # heads that process 0 has told
        self._ended: set[str] = set()  # what another process has told of its ends
        self._notes: list[Row] = []  # of another process, until process 0 has them
        self._old: list[Row] = []  # read by process 0 before the others asked

    @property
    def chained(self) -> bool:
        """As for ``LedgerRows``."""
        return bool(self._name)

    @property
    def is_open(self) -> bool:
        """As for ``LedgerRows``."""
        return self._first and self._own.is_open

    def new_rows(self) -> Rows:
        """As for ``LedgerRows``."""
        rows = list(self._own.new_rows()) if self._first or self._reads else []
        self._old += [row for _, row, _ in rows]
        return rows

    def open(self, known: Known, forget: Callable[[], None]) -> None:
        """As for ``LedgerRows``; the first time process 0 tells the others all rows."""
        if processes.count() != self._count:
            raise ValueError(
                f"ledger must be used by the {self._count} processes that it was made in, got "
                f"{processes.count()}: each would miss what the others release. Close it before "
                "jax.distributed.shutdown()"
            )
        self._known = known
        if self._name and not self._first:
            return
        named = hashlib.blake2b(self._path.encode(), digest_size=8).hexdigest()
        name = self._name or f"ledger/{named}/{next(_named[named])}"
        if self._first and self._name:
            self._own.open(known, forget)
        elif self._first:
            self._tell_old(name, known, forget)
        else:  # what is in memory alone, as after ``Ledger.from_json``, stays
            if isinstance(self._own, LedgerFile):
                forget()
            self._hear_old(name, forget)
        self._name = name

    def begin(self) -> None:
        """Does nothing: whoever takes the ledger writes the header."""

    def append(self, row: Row) -> None:
        """As for ``LedgerRows``: a barrier."""
        text = json.dumps(row, sort_keys=True)
        mine = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        key = f"{self._name}/{self._number}"
        if self._first:
            self._write(key, row, mine)
            return
        if self._asked < self._number:
            self._tell(f"{key}/{processes.index()}", mine)
            self._asked = self._number
        answer = json.loads(processes.hear(key))
        if "failed" in answer:
            self._number += 1
            raise StorageError(f"process 0 could not charge, so nobody goes on: {answer['failed']}")
        if answer["row"] != mine:
            raise ValueError(f"every process must charge the same, got another row here: {text}")
        for head in map(bytes.fromhex, answer["heads"]):
            self.chain.take(head)
        self._known([(f"row {self._number} of process 0", row, self.chain.head)])
        self._number += 1

    def note(self, row: Row) -> None:
        """As for ``LedgerRows``; process 0 has those of the others at the next barrier."""
        if self._first:
            self._own.append(row)
            return
        self._notes.append(row)
        self._known([("a note of this process", row, self.chain.head)])

    def end(self, row: Row) -> None:
        """As for ``LedgerRows``: process 0 writes the largest step, if all tell theirs in time."""
        key = f"{self._name}/{self._number}/ended {row['stream']}"
        if not self._first:
            if key not in self._ended:
                self._ended.add(key)
                self._tell(f"{key}/{processes.index()}", str(row["ended"]))
            return
        told = [self._heard(f"{key}/{n}", _PROMPT) for n in range(1, self._count)]
        steps = [int(step) for step in told if step is not None]
        if len(steps) == len(told):
            self._own.append({**row, "ended": max(row["ended"], *steps)})

    def agreed(self, text: str) -> str:
        """As for ``LedgerRows``."""
        return processes.first(lambda: text)

    def close(self) -> None:
        """As for ``LedgerRows``; takes what the others have noted since the last barrier."""
        key = f"{self._name}/closed after {self._number}"
        if self._name and not self._first and self._notes:
            self._tell(f"{key}/{processes.index()}", "")
        elif self._name and self._own.is_open and processes.count() == self._count:
            for n in range(1, self._count):
                self._heard(f"{key}/{n}", 0.0)
        self._own.close()

    def _write(self, key: str, row: Row, mine: str) -> None:
        """A barrier in process 0: hears all, writes the row, tells that it is durable."""
        try:
            found = [self._heard(f"{key}/{n}") for n in range(1, self._count)]
            if any(other != mine for other in found):
                raise ValueError(
                    "every process must charge the same, got another row in process "
                    f"{next(n for n, other in enumerate(found, 1) if other != mine)} than {row}"
                )
            self._own.append(row)
        except BaseException as error:  # an interrupt too: the others would wait for nothing
            processes.tell(key, json.dumps({"failed": str(error).split("\n")[0] or repr(error)}))
            self._number += 1
            raise
        heads = [head.hex() for head in list(self.chain.heads)[self._told :]]
        processes.tell(key, json.dumps({"row": mine, "heads": heads}))
        self._told += len(heads)
        self._number += 1

    def _tell(self, key: str, text: str) -> None:
        """Tells process 0 a text, and the notes that it has not yet."""
        notes, self._notes = self._notes, []
        processes.tell(key, json.dumps({"text": text, "notes": notes}))

    def _heard(self, key: str, patience: float | None = None) -> str | None:
        """The text that another process told process 0, whose notes are written; None in vain."""
        found = processes.hear(key) if patience is None else processes.heard(key, patience)
        if found is None:
            return None
        message = json.loads(found)
        for row in message["notes"]:
            self._own.append(row)
        return str(message["text"])

    def _tell_old(self, name: str, known: Known, forget: Callable[[], None]) -> None:
        """Takes the ledger in process 0, and tells the others its rows and heads."""

        def noted(rows: Rows) -> Rows:
            for found in rows:
                yield found
                self._old.append(found[1])

        try:
            self._own.open(lambda rows: known(noted(rows)), forget)
            self._own.begin()
        except BaseException as error:
            processes.tell(f"{name}/old/0", json.dumps({"failed": str(error) or repr(error)}))
            raise
        heads = [head.hex() for head in self.chain.heads]
        rows = range(0, len(self._old), _TOGETHER)
        parts: list[Row] = [{"rows": self._old[i : i + _TOGETHER]} for i in rows]
        parts += [{"heads": heads[i : i + _HEADS]} for i in range(0, len(heads), _HEADS)]
        for n, part in enumerate([*parts, {"last": True}]):
            processes.tell(f"{name}/old/{n}", json.dumps(part))
        self._told = len(heads)
        self._old.clear()

    def _hear_old(self, name: str, forget: Callable[[], None]) -> None:
        """Takes the rows and heads of process 0, in place of what this process has read."""
        if not isinstance(self._own, LedgerFile):
            self._own.open(self._known, forget)
        chain, found = Chain(), []
        for n in itertools.count():
            part = json.loads(str(processes.hear(f"{name}/old/{n}")))
            if "failed" in part:
                raise StorageError(f"process 0 could not open the ledger: {part['failed']}")
            found += part.get("rows", ())
            for head in part.get("heads", ()):
                chain.take(bytes.fromhex(head))
            if "last" in part:
                break
        self.chain = chain
        self._known([(f"row {n} of process 0", row, b"") for n, row in enumerate(found)])
