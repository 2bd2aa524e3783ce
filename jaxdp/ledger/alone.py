"""One at a time: a lock that refuses signal handlers, finalizers and forks half-way."""

import functools
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

_forks = 0  # of which this process is the last


def _forked() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def this_process() -> tuple[int, int]:
    """(id, number of forks) of this process: an id alone may be that of another namespace."""
    return os.getpid(), _forks


class Guard:
    """The lock of an object, the process that made it, and the frame that is inside."""

    def __init__(self) -> None:
        self.lock, self.process = threading.RLock(), this_process()
        self.inside: types.FrameType | None = None


class Guarded(Protocol):
    """An object with a guard, of its own or that of its ledger."""

    guard: Guard


_Self = TypeVar("_Self", bound=Guarded)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def alone(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """Runs a method with the lock of its object's guard, as the only one inside.

    Other threads wait. Refused are the thread that is inside already (a signal handler, or a
    finalizer that the garbage collector runs there: it would see a charge that is half made), and a
    fork. Who is inside is told by the frame that runs: an interrupt leaves no flag behind.

    Raises:
        ValueError: it is refused.
    """

    def guarded(self: _Self, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        guard = self.guard
        if this_process() != guard.process:  # before the lock: a thread of the process that was
            raise ValueError(  # forked may have held it
                "a ledger, sampler, trainer or its batches must be used by the process that made "
                "them, got a forked one: both would release with the same draws and noise, and "
                "each miss what the other releases. Make them after the fork, with a ledger of "
                "their own"
            )
        with guard.lock:
            if _is_running(guard.inside):
                raise ValueError(
                    "a ledger, sampler, trainer or its batches must not be used by a signal "
                    "handler or a finalizer that interrupts them, got one: let it set a flag, and "
                    "look at it after the step"
                )
            guard.inside = sys._getframe()
            try:
                return method(self, *args, **kwargs)
            finally:
                guard.inside = None

    functools.update_wrapper(guarded, method)
    return guarded


def _is_running(frame: types.FrameType | None) -> bool:
    """True for a frame that called this one, as what a signal handler has interrupted did."""
    above: types.FrameType | None = sys._getframe() if frame is not None else None
    while above is not None and above is not frame:
        above = above.f_back
    return above is not None
