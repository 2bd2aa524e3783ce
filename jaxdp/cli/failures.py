"""Interrupts and full disks as one line on stderr and an exit status."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from jaxdp.ledger.durable import StorageError
from jaxdp.ledger.interrupts import status_of

if TYPE_CHECKING:
    from jaxdp.runs.directory import RunDirectory
    from jaxdp.runs.tries import TuneDirectory

_running: list[Callable[[], str]] = []  # words of the runs under way, innermost last


class Stopped(click.ClickException):
    """A command ended with a line on stderr and a status of its own."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def explain_failures(directory: "RunDirectory | TuneDirectory") -> Iterator[None]:
    """Turns interrupts and a folder that cannot be written into one line about the run."""
    from jaxdp.runs.failures import safe_in_words  # needs the packages of a run

    command = f"jaxdp train --out {directory.path} --resume"
    state = functools.partial(safe_in_words, directory.path, command)
    _running.append(state)
    try:
        yield
    except KeyboardInterrupt as error:
        raise Stopped(interrupt_message(), status_of(error)) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        where = error.filename or directory.path
        why = f"{where} cannot be written or read: {error.strerror or error}"
        raise StorageError(f"{why}. {state()}") from error
    finally:
        _running.pop()


@contextlib.contextmanager
def silence_late_messages() -> Iterator[None]:
    """Silences later messages of a failed checkpoint's other threads."""
    before = sys.unraisablehook

    def hook(failed: "sys.UnraisableHookArgs") -> None:
        if str(failed.exc_value) != "Event loop is closed":
            before(failed)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def interrupt_message() -> str:
    """The line that an interrupt prints; takes no locks, as a signal handler may not."""
    return f"interrupted: {_running[-1]()}" if _running else "interrupted"
