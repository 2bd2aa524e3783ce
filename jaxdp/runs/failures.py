"""Interrupts and full disks in words: what of a run is safe, and how to go on."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jaxdp.ledger import interrupts
from jaxdp.ledger.durable import StorageError

_Result = TypeVar("_Result")


def in_words(folder: Path, call: Callable[[], _Result]) -> _Result:
    """Returns what ``call`` returns; what stops it is raised with one line and a short traceback.

    Ctrl-C stays a ``KeyboardInterrupt``, and a full disk a ``StorageError`` with its cause in
    ``__context__``; SIGTERM prints the line and is ``SystemExit(143)``. Of calls inside one another
    the outermost has the words: the command line, or a search, of whose tries nothing is told.

    Args:
        folder: of the run, or of the search, that ``call`` goes on with.
        call: the work.
    """
    if interrupts.is_guarded():
        return call()
    stop: BaseException
    try:
        with interrupts.guarded():
            return call()
    except interrupts.Terminated as error:
        print(f"jaxdp: terminated: {safe_in_words(folder)}", file=sys.stderr)
        stop = SystemExit(interrupts.status_of(error))
    except KeyboardInterrupt:
        stop = KeyboardInterrupt(f"interrupted: {safe_in_words(folder)}")
    except StorageError as error:
        stop = error.with_traceback(None)
    raise stop from None


def safe_in_words(folder: Path, command: str = "") -> str:
    """A line on what of a run or a search is safe, and how to go on; takes no locks.

    A signal handler may call it.

    Args:
        folder: of the run.
        command: that goes on with it; "" for a program.
    """
    same = f"continue with `{command}`" if command else "the same program goes on from there"
    secret = folder / "secret"
    if (secret / "tuning").exists():  # how far it got is secret
        again = "command" if command else "program"
        return f"what was done in {folder} is safe; the same {again} continues the tuning"
    if not (secret / "run.json").exists():
        return f"no run had begun in {folder}, and nothing was charged"
    checkpoints = secret / "checkpoints"
    names = [p.name for p in checkpoints.iterdir()] if checkpoints.exists() else []
    steps = [int(name) for name in names if name.isdecimal()]
    at = f"the checkpoint of step {max(steps)}" if steps else "its start (no checkpoint yet)"
    where = "" if command else f" in {folder}"
    return f"the ledger and {at}{where} are safe; {same}"
