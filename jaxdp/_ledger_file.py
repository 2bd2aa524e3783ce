"""The ledger's file: whole lines, each chained to those before, written by one process."""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from jaxdp import _durable

FORMAT = 2
Row = dict[str, Any]


class Chain:
    """A running hash over rows, so that an edited, dropped or inserted one is found.

    Args:
        key: a secret that makes it a MAC: without it nobody can make a row that fits. b"" finds
            accidents only, and tells ledgers apart.
    """

    def __init__(self, key: bytes = b""):
        self._key = key
        self.head = b""
        self.heads: dict[bytes, int] = {}  # and their order

    def next(self, row: Row) -> str:
        """Appends one row, and returns its hash in hexadecimal."""
        found = self.after(row)
        self.take(found)
        return found.hex()

    def after(self, row: Row) -> bytes:
        """The hash of the chain with one more row."""
        text = json.dumps(row, sort_keys=True).encode()
        return hashlib.blake2b(
            self.head + text, digest_size=16, key=self._key[:64], person=b"jaxdp ledger"
        ).digest()

    def holds(self, head: bytes, since: bytes = b"") -> bool:
        """True if ``head`` was once the head, after ``since`` if that is given."""
        heads = self.heads
        return head in heads and (not since or heads[head] > heads.get(since, len(heads)))

    def take(self, found: bytes) -> None:
        """Continues from a hash."""
        self.head = found
        self.heads.setdefault(found, len(self.heads))


def header(key: bytes = b"") -> Row:
    """The first row of a ledger: its name, random or of its key, and whether there is a key."""
    random = key or secrets.token_bytes(32)
    name = hashlib.blake2b(key=random[:64], digest_size=16, person=b"jaxdp ledger id")
    return {"ledger": FORMAT, "id": name.hexdigest(), "keyed": bool(key)}


class LedgerMemory:
    """Rows that only this process has."""

    chained, is_open, begins_anew = True, False, False

    def __init__(self) -> None:
        self.chain = Chain()
        self.chain.next(header())
        self._process = os.getpid()

    def new_rows(self) -> list[tuple[str, Row]]:
        """None."""
        return []

    def open(self, known: Callable[[list[tuple[str, Row]]], None]) -> None:
        """Raises ValueError after a fork."""
        if self._process != os.getpid():
            raise ValueError(
                "ledger must be charged by the process that made it, got a forked one: each would "
                "miss what the other releases"
            )

    def append(self, row: Row) -> Row:
        """Chains one row, and returns it."""
        self.chain.next(row)
        return row

    def begin(self) -> None:
        """Does nothing: the header is there."""

    def close(self) -> None:
        """Does nothing."""


class LedgerFile:
    """Rows of JSON on disk; appended by one process at a time, durable when a call returns.

    Args:
        path: the file; nothing is touched before the first ``append``.
        key: as for ``Chain``.
    """

    begins_anew = False

    def __init__(self, path: Path, key: bytes = b""):
        self.path, self._key = path, key
        self.chain = Chain(key)
        self.chained = False  # once the header was met
        self._readable_only = False  # keyed by somebody else
        self._lines = self._size = 0
        self._file: TextIO | None = None
        self._process = 0

    @property
    def is_open(self) -> bool:
        """True while this process writes."""
        return self._file is not None

    def new_rows(self) -> list[tuple[str, Row]]:
        """(where, row) for the rows beyond those already known; [] where there is no file yet.

        Raises:
            ValueError: a line that is no JSON, or that does not fit the chain.
        """
        if not self.path.exists():
            self._check_known([])
            return []
        return self._parsed(_durable.whole_lines(self.path))

    def open(self, known: Callable[[list[tuple[str, Row]]], None]) -> None:
        """Opens the file for this process; ``known`` receives the rows that others wrote since.

        Raises:
            ValueError: another process writes; the file is damaged or gone; after a fork.
        """
        if self._file is not None:
            self._check()
            return
        if not self.path.exists():
            self._check_known([])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = _durable.open_locked(
            self.path,
            "a",
            f"ledger {self.path} is in use by another writer: "
            "a process, or a trainer or ledger of this one that was not closed, close()",
        )
        try:
            whole = _durable.whole_lines(self.path)
            self._check_known(whole)
            known(self._parsed(whole))
            self._check_key()
        except ValueError:
            file.close()  # and with it the lock
            raise
        # A torn last line was never followed by its release: the fsync comes first.
        os.truncate(self.path, sum(len(line) for line in whole))
        _durable.sync_directory(self.path.parent)
        self._file, self._process = file, os.getpid()
        self._size = os.fstat(file.fileno()).st_size

    def append(self, row: Row) -> Row:
        """Writes one row, and returns it."""
        assert self._file is not None
        self._check()
        if "ledger" not in row:
            self.begin()
        found = self.chain.after(row)
        chained = {**row, "chain": found.hex()}
        before = self._size, self._lines
        try:
            _durable.append_line(self._file, json.dumps(chained, sort_keys=True))
            self._size, self._lines = os.fstat(self._file.fileno()).st_size, self._lines + 1
            # Only what is on disk may stand in a state.
            self.chain.take(found)
            self.chained = True
        except BaseException as error:
            if self.chain.head == found:  # an interrupt after the deed
                self.chained = True
                raise
            self._size, self._lines = before
            self._give_up(self._size)
            if not isinstance(error, OSError):  # Ctrl-C: as if it had come before
                raise
            raise _durable.StorageError(
                f"ledger {self.path} must be writable, got {error}: the step was not charged, and "
                "nothing of it was released. Make room and try again"
            ) from error
        return row

    def begin(self) -> None:
        """Writes the header, if there is none."""
        if not self.chained:
            self.append(header(self._key))

    def close(self) -> None:
        """Closes the file, so that other processes can write."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, size: int) -> None:
        """Closes a file in which half a line was written."""
        assert self._file is not None
        with contextlib.suppress(OSError):
            os.ftruncate(self._file.fileno(), size)
        with contextlib.suppress(OSError):
            self._file.close()
        self._file = None

    def _check_key(self) -> None:
        if self._readable_only:
            raise ValueError(
                f"ledger {self.path} must be continued with the key that it was begun with, got "
                "none: it belongs to a run and can only be read here"
            )

    def _check_known(self, lines: list[bytes]) -> None:
        """Refuses a file that no longer holds the lines that were read from it."""
        last = lines[self._lines - 1] if 0 < self._lines <= len(lines) else b""
        kept = len(lines) >= self._lines and self.chain.head.hex().encode() in last
        if self._lines and not kept:
            raise ValueError(
                f"ledger {self.path} must stay where it is, but it was moved, replaced, cut or "
                "deleted since it was read: what it held would be lost"
            )

    def _check(self) -> None:
        assert self._file is not None
        if os.getpid() != self._process:
            raise ValueError(
                f"ledger {self.path} must be charged by the process that opened it, got a forked "
                "one: each would miss what the other releases. Open it anew after the fork"
            )
        try:
            found = os.fstat(self._file.fileno())
            same = os.path.samestat(found, self.path.stat()) and found.st_size == self._size
        except OSError:
            same = False
        if not same:
            raise ValueError(
                f"ledger {self.path} must stay where it is, but it was moved, replaced, deleted or "
                "written to by somebody else: what is charged from now on would be lost"
            )

    def _parsed(self, lines: list[bytes]) -> list[tuple[str, Row]]:
        rows = []
        for number, line in enumerate(lines[self._lines :], self._lines + 1):
            where = f"{self.path}, line {number},"
            rows.append((where, self._row(where, line)))
            self._lines = number
        return rows

    def _row(self, where: str, line: bytes) -> Row:
        try:
            row: Row = json.loads(line)
            chain = row.pop("chain", None)
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{where} must be a ledger entry: {error}") from error
        if "ledger" in row:
            if row["ledger"] != FORMAT or self.chained:
                raise ValueError(f"{where} must not begin a ledger of format {row['ledger']!r}")
            self.chained = True
            self._readable_only = row["keyed"] and not self._key
        if self._readable_only:
            return row
        if self.chained and chain != self.chain.next(row):
            raise ValueError(
                f"{where} must follow from the lines before it, but it does not: a line was "
                "edited, inserted or removed, so that what was released is no longer known"
            )
        if not self.chained and (chain is not None or self._key):
            raise ValueError(f"{where} must follow the first line of its ledger, which is gone")
        return row
