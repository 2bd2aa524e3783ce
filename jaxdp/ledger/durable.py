"""Files that survive a crash: whole, and on disk when a call returns."""

import contextlib
import errno
import os
import stat
import sys
from pathlib import Path
from typing import Any, TextIO

if sys.platform == "win32":
    import msvcrt

    fcntl: Any = None
else:
    import fcntl

    msvcrt: Any = None

_HELD = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}  # by somebody else
_LOCK_AT = 1 << 30  # of Windows' lock, which is mandatory: a byte that is never written


class StorageError(ValueError):
    """A folder that cannot be written, or is damaged; the message says what is safe."""


def open_locked(path: Path, mode: str, busy: str) -> TextIO:
    """Opens a file for this process alone, until it is closed or the process ends.

    Raises:
        ValueError: another process or object holds it; the message is ``busy``.
        StorageError: it lies on storage without locks.
    """
    # The same bytes on every system, for they are hashed and counted.
    file: TextIO = path.open(mode, encoding="utf-8", newline="\n")  # type: ignore[assignment]
    try:
        _lock(file)
    except BaseException as error:
        file.close()
        if not isinstance(error, OSError):
            raise
        if fcntl is None or error.errno in _HELD:
            raise ValueError(busy) from error
        raise StorageError(
            f"{path} must lie on storage that can lock files, got {error}: without a lock two "
            "processes could write at once, and each would miss what the other releases. Work in a "
            "folder on a local disk, or on a file system that is mounted with locks, and copy it "
            "afterwards"
        ) from error
    return file


def _lock(file: TextIO) -> None:
    """Takes the file, or raises OSError at once; the system gives it back when the file closes."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    # By the position of the descriptor, which belongs to what is written: it is put back.
    position = os.lseek(file.fileno(), 0, os.SEEK_CUR)
    os.lseek(file.fileno(), _LOCK_AT, os.SEEK_SET)
    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    finally:
        os.lseek(file.fileno(), position, os.SEEK_SET)


def append_line(file: TextIO, line: str) -> None:
    """Appends one line; it is on disk when this returns.

    Where this raises, nothing of it is there; only if the file could not be cut again either, a
    beginning or all of it. Nothing is buffered that a later call or ``close`` could write.
    """
    handle, rest = file.fileno(), (line + "\n").encode()
    size = os.fstat(handle).st_size
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
        sync(handle)
    except BaseException:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, size)
        raise


def sync(handle: int) -> None:
    """Puts on disk what was written; macOS' own fsync leaves it in the cache of the drive."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):  # a file system that cannot
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
            return
    os.fsync(handle)


def is_file(path: Path) -> bool:
    """True if there is a regular file, False if there is nothing.

    Raises:
        ValueError: there is something else, which may have no end; it is not opened.
        StorageError: it cannot be said.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"{path} must be a file that can be read, got {error}") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
        raise ValueError(f"{path} must be a regular file, got {kind}")
    return True


def lines_of(path: Path) -> list[bytes]:
    """The lines of a file, each with its newline; the last one may lack it.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.readlines()
    except OSError as error:
        raise StorageError(f"{path} must be a file that can be read, got {error}") from error


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replaces a file by ``text``: after a crash, the old file or the new one is there, whole."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # left by a crash, perhaps readable by others
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        sync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Makes the names in a folder durable; Windows opens no folders, and needs none of it."""
    if os.name == "nt":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        sync(handle)
    finally:
        os.close(handle)
