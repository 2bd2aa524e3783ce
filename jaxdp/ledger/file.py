"""The ledger's file: whole lines, each chained to those before, written by one process."""

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from jaxdp.ledger import durable
from jaxdp.ledger.entries import FORMAT, Chain, Known, LedgerRows, Row, header


class _Read(NamedTuple):
    """The place up to which a file was read, in one value: Ctrl-C leaves this or the next."""

    lines: int = 0
    head: bytes = b""
    chained: bool = False  # True once the header was met
    readable_only: bool = False  # keyed by somebody else
    format: int = FORMAT  # the newest that a row names


class LedgerFile(LedgerRows):
    """Rows of JSON on disk; appended by one process at a time, durable when a call returns.

    A row is known as it is read, whether it was written just now or by somebody else, and only then
    counts as read: whatever stops this in between, what is on disk is known after the next look.

    Args:
        path: the file; nothing is touched before the first ``append``.
        key: as for ``Chain``.
    """

    def __init__(self, path: Path, key: bytes = b""):
        self.path, self._key = path, key
        self.chain = Chain(key)
        self._read, self._size = _Read(), 0
        self._file: TextIO | None = None
        self._writing = False  # also after a write that was cut short

    @property
    def chained(self) -> bool:
        return self._read.chained

    @property
    def is_open(self) -> bool:
        return self._file is not None and not self._writing

    def new_rows(self) -> Iterator[tuple[str, Row, bytes]]:
        """(where, row, head) for the rows beyond those known; none where there is no file yet.

        Raises:
            ValueError: a line that is no JSON, or that does not fit the chain; no regular file.
        """
        lines = self._on_disk()
        self._check_known(lines)
        return self._parsed(lines[self._read.lines :])

    def whole(self) -> list[tuple[bytes, Row]]:
        """(head, row) for all rows as the file holds them now; none is written, nothing is locked.

        Raises:
            ValueError: as ``new_rows``; it is another's, whose key is missing; it no longer holds
                what was read from it.
        """
        again, found, chained = LedgerFile(self.path, self._key), [], False
        for _, row, head in again.new_rows():
            chained = chained or "ledger" in row
            found.append((head if chained else secrets.token_bytes(16), row))
        if again._read.readable_only:
            raise ValueError(
                f"ledger {self.path} must be opened with the key that it was begun with to be "
                "merged, got none: nobody can say which of its lines others have too"
            )
        if self._read.head and self._read.head not in again.chain.heads:
            raise ValueError(
                f"ledger {self.path} must hold what was read from it, but it was replaced or cut"
            )
        return found

    def open(self, known: Known, forget: Callable[[], None]) -> None:
        """Opens the file for this process; ``known`` receives the rows that others wrote since.

        Raises:
            ValueError: another process writes; the file is damaged or gone.
            StorageError: it cannot be written or locked.
        """
        if self.is_open:
            self._check()
            return
        self.close()
        self._known = known
        # The lock comes first, then what others wrote meanwhile: nobody writes in between.
        if not durable.is_file(self.path):
            self._check_known([])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = durable.open_locked(
                self.path,
                "a",
                f"ledger {self.path} is in use by another writer: "
                "a process, or a trainer or ledger of this one that was not closed, close()",
            )
            try:
                lines = self._on_disk()
                self._check_known(lines)
                known(self._parsed(lines[self._read.lines :]))
                if self._read.readable_only:
                    raise ValueError(
                        f"ledger {self.path} must be continued with the key that it was begun "
                        "with, got none: it belongs to a run and can only be read here"
                    )
                self._mend(file.fileno(), lines)
                size = os.fstat(file.fileno()).st_size
            except BaseException:
                file.close()  # and with it the lock
                raise
        except OSError as error:
            raise durable.StorageError(
                f"ledger {self.path} must be a file that can be written, got {error}: nothing was "
                "charged, and nothing released"
            ) from error
        self._size, self._writing = size, False
        self._file = file

    def append(self, row: Row) -> None:
        assert self._file is not None
        self._check()
        if "ledger" not in row and "format" not in row:
            self.begin()
        # The row is read back from the line that was written: memory and file cannot differ.
        found = self.chain.after(row)
        line = json.dumps({**row, "chain": found.hex()}, sort_keys=True)
        self._writing = True
        try:
            durable.append_line(self._file, line)
            self._known(self._parsed([line.encode()]))
            self._size += len(line) + 1
            self._writing = False
        except BaseException as error:
            self._give_up()
            if not isinstance(error, OSError):
                raise
            safe = "nothing was charged, and nothing released"
            if self.chain.head == found:
                safe = "the last line could not be removed and counts, though nothing was released"
            raise durable.StorageError(
                f"ledger {self.path} must be writable, got {error}: {safe}. Make room and try again"
            ) from error

    def begin(self) -> None:
        """Writes the header, if there is none; in a file of before, what its version refuses."""
        if not self.chained:
            self.append(header(self._key))
        elif self._read.format < FORMAT:
            self.append({"format": FORMAT})

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # every line is on disk
                file.close()

    def _give_up(self) -> None:
        """Closes the file, of which nobody knows how it ends, after a look at it."""
        try:
            with contextlib.suppress(ValueError):  # then ``open`` looks again
                lines = self._on_disk()
                self._check_known(lines)
                self._known(self._parsed(lines[self._read.lines :]))
        finally:
            self.close()

    def _on_disk(self) -> list[bytes]:
        """The lines of the file, without a last one that was torn; [] where there is no file."""
        lines = durable.lines_of(self.path) if durable.is_file(self.path) else []
        if lines and not lines[-1].endswith(b"\n"):
            last = lines.pop().rstrip(b"\0")  # zeros: room that was made and not written to
            if not _is_torn(last, bool(lines)):
                lines.append(last)
        return lines

    def _mend(self, handle: int, lines: list[bytes]) -> None:
        """Ends the file after its last whole line, and makes durable what was read from it.

        A torn last line was never followed by its release: the fsync comes first. A whole one may
        have been written by a process that died before its fsync.
        """
        os.ftruncate(handle, sum(len(line) for line in lines))
        if lines and not lines[-1].endswith(b"\n"):
            os.write(handle, b"\n")
        durable.sync(handle)
        durable.sync_directory(self.path.resolve().parent)

    def _check_known(self, lines: list[bytes]) -> None:
        """Refuses a file that no longer holds the lines that were read from it."""
        read = self._read
        last = lines[read.lines - 1] if 0 < read.lines <= len(lines) else b""
        kept = len(lines) >= read.lines and read.head.hex().encode() in last
        if read.lines and not kept:
            raise ValueError(
                f"ledger {self.path} must stay where it is, but it was moved, replaced, cut or "
                "deleted since it was read: what it held would be lost"
            )

    def _check(self) -> None:
        assert self._file is not None
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

    def _parsed(self, lines: list[bytes]) -> Iterator[tuple[str, Row, bytes]]:
        """(where, row, head) for each of the next lines; it counts as read once it was taken in."""
        for line in lines:
            at, head, chained, readable_only, newest = self._read
            self.chain.head = head  # Ctrl-C may have left the next one
            where = f"{self.path}, line {at + 1},"
            # What kind of row: a header begins the chain, and a newer format is announced.
            row, chain = _row(where, line)
            if "ledger" in row or "format" in row:
                newest = int(row["ledger"] if "ledger" in row else row["format"])
                if newest not in (2, FORMAT) or chained == ("ledger" in row):
                    raise ValueError(f"{where} must not begin a ledger of format {newest!r}")
            if "ledger" in row:
                chained, readable_only = True, bool(row.get("keyed")) and not self._key
            # Each line must follow from the one before, unless its key is somebody else's.
            found = self.chain.after(row)
            if chained and not readable_only and chain != found.hex():
                raise ValueError(
                    f"{where} must follow from the lines before it, but it does not: a line was "
                    "edited, inserted or removed, so that what was released is no longer known"
                )
            if not chained and (chain is not None or self._key):
                raise ValueError(f"{where} must follow the first line of its ledger, which is gone")
            yield where, row, found
            if chained and not readable_only:  # only what is on disk may stand in a state
                self.chain.take(found)
                head = found
            self._read = _Read(at + 1, head, chained, readable_only, newest)


def _row(where: str, line: bytes) -> tuple[Row, Any]:
    """A line's row and its hash; ValueError for a line that is none."""
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be a ledger entry: {error}") from error
    return row, row.pop("chain", None)


def _is_torn(last: bytes, follows: bool) -> bool:
    """True for a beginning of a line, which a crash left; a whole one counts without its newline.

    Args:
        last: the end of the file, where it has no newline.
        follows: True if there are lines before it.
    """
    if not last:
        return follows
    try:
        json.JSONDecoder().raw_decode(last.decode(errors="replace"))
    except ValueError:
        return b'{"'.startswith(last[:2])  # else it was never a ledger's line
    except RecursionError:
        pass
    return False
