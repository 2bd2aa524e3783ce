"""Files of a run: for its owner alone, sealed, replaced durably, their errors in words."""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.ledger.durable import StorageError, sync, sync_directory, write_atomically


def write_bytes_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """As ``write_atomically``, for bytes."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            sync(file.fileno())
        os.replace(temporary, path)
    except OSError:  # a full disk: nobody could tell what is left
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def rewrite(path: Path, content: bytes) -> None:
    """Fills a file that is there; a crash may leave it torn, so nobody may rely on it before."""
    with path.open("r+b") as file:
        file.truncate()
        file.write(content)
        file.flush()
        sync(file.fileno())


def save_array(path: Path, array: Any, mode: int = 0o666) -> None:
    """Replaces a .npy file by an array, durably: after a crash the old or the new one is there."""
    unfinished = path.with_suffix(".tmp.npy")
    unfinished.unlink(missing_ok=True)  # left by a crash, perhaps readable by others
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "wb") as file:
        np.save(file, array)
        file.flush()
        sync(file.fileno())
    unfinished.replace(path)
    sync_directory(path.parent)


@contextlib.contextmanager
def private() -> Iterator[None]:
    """Creates whatever is created inside for its owner alone: files 0600, folders 0700.

    The umask belongs to the whole process: what another thread creates meanwhile is private too.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def make_private(folder: Path) -> None:
    """Removes other users' access to a folder and all in it; links are left alone."""
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():
            continue
        mode = 0o700 if path.is_dir() else 0o600
        if path.stat().st_mode & 0o777 != mode:
            path.chmod(mode)


def seal(folder: Path, name: str, skip: tuple[str, ...] = ()) -> None:
    """Makes every file in a folder durable and private, and keeps their digests in ``name``."""
    digests = _digests(folder, (name, *skip))
    write_atomically(folder / name, json.dumps(digests, indent=1), mode=0o600)
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            sync_directory(path)
    make_private(folder)


def broken_seal(folder: Path, name: str, skip: tuple[str, ...] = ()) -> str:
    """The first file missing or changed since ``seal``; "" if none, or nothing was sealed."""
    if not (folder / name).exists():
        return ""
    try:
        kept = json.loads((folder / name).read_text(encoding="utf-8"))
    except ValueError:
        return name
    found = _digests(folder, (name, *skip))
    return next((file for file in kept if kept[file] != found.get(file)), "")


def _digests(folder: Path, skip: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in skip:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            found[path.relative_to(folder).as_posix()] = digest.hexdigest()
    return found


_FULL = ("No space left", "File too large")  # in words, where other libraries have no number
AGAIN = "start the same program again (`jaxdp train` with --resume where the run had begun)"


@contextlib.contextmanager
def writing(path: Path, then: str = AGAIN) -> Iterator[None]:
    """Turns an OSError of what is written inside into a StorageError about ``path``.

    Args:
        path: of the file.
        then: what to do once there is room, in words.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {first_line(error)}. What was charged stands in the ledger,"
            f" and what was written before is whole. {remedy(error)}, and {then}"
        ) from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an OSError of what is read inside into a StorageError about ``path``.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read: {first_line(error)}. Nothing says that it is damaged, and it "
            f"was left as it is. {remedy(error)}, and start the same program again"
        ) from error


def remedy(error: BaseException) -> str:
    """A remedy for the cause of an error, in words, without an end."""
    number, text = getattr(error, "errno", None), str(error)
    if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text:
        return "Raise the limit of open files (`ulimit -n`), or close some"
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(each in text for each in _FULL):
        return "Make room"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        return "Make memory free on the host or the device"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Give yourself the right to read and write there"
    if isinstance(error, OSError):
        return "Mount the storage anew, or take away what keeps it from being reached"
    return "Take away the cause"


def first_line(error: BaseException) -> str:
    """The first line of what went wrong, without the sources of the library that found it."""
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    if "No space left" in str(error):
        return "a full disk (No space left on device)"
    return line.split(" [source locations=")[0][:200]
