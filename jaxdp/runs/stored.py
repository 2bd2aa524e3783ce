"""Files of a run that cannot be written or read, in words that say what is safe."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from jaxdp.ledger.durable import StorageError

_AGAIN = "start the same program again (`jaxdp train` with --resume where the run had begun)"


@contextlib.contextmanager
def writing(path: Path, then: str = _AGAIN) -> Iterator[None]:
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
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in text:
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
