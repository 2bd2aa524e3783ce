"""Files that survive a crash: whole, and on disk before the next line of code runs."""

import fcntl
import os
from pathlib import Path
from typing import TextIO


def open_locked(path: Path, mode: str, busy: str) -> TextIO:
    """Opens a file for this process alone, until it is closed or the process ends.

    Raises:
        ValueError: another process or object holds it; the message is ``busy``.
    """
    file: TextIO = path.open(mode, encoding="utf-8")  # type: ignore[assignment]
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ValueError(busy) from error
    return file


def append_line(file: TextIO, line: str) -> None:
    """Appends one line; it is on disk when this returns."""
    file.write(line + "\n")
    file.flush()
    os.fsync(file.fileno())


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file without a last one that a crash has torn."""
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replaces a file by ``text``: after a crash, the old file or the new one is there, whole."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # left by a crash, perhaps readable by others
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Makes the names in a folder durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
