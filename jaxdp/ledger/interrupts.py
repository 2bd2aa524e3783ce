"""Ctrl-C and SIGTERM: the first is raised where no file is half written, the second ends it."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 2.0  # seconds of finishing after which it is said that something is being finished


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised like Ctrl-C."""


class _Guard:
    """The handler of one process: counts signals, and holds the first back while deferred."""

    def __init__(self, last_words: Callable[[], str] | None):
        self.last_words = last_words
        self.depth = 0
        self.seen = False
        self.pending: int | None = None
        self.raised: int | None = None
        self.timer: threading.Timer | None = None
        self.leaving = threading.Lock()  # two may see the second: handler and watching thread

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            if self.last_words is not None:
                self.leave(number)  # where no thread watches
                return
            self.pending = None
            raise _exception(number)
        self.seen = True
        if self.depth == 0:
            self.raised = number
            raise _exception(number)
        self.pending = number
        text = "jaxdp: finishing a checkpoint; interrupt again to end at once\n"
        self.timer = threading.Timer(_PATIENCE, _say, (text,))
        self.timer.daemon = True
        self.timer.start()

    def watch(self, end: socket.socket) -> None:
        """Ends the process at the second signal also while the main thread compiles."""
        seen = 0
        while received := end.recv(1):
            seen += received[0] in _SIGNALS
            if seen == 2:
                self.leave(received[0])

    def leave(self, number: int) -> None:
        """Ends a program with its last words; returns where another thread is doing so."""
        assert self.last_words is not None
        if self.leaving.acquire(blocking=False):
            _say(self.last_words() + "\n")
            os._exit(128 + number)

    def raise_lost(self) -> None:
        """Raises again what Python dropped, as in a callback of the garbage collector."""
        lost = self.last_words is not None and self.depth == 0
        if lost and self.raised is not None and sys.exc_info()[1] is None:
            raise _exception(self.raised)

    def release(self) -> None:
        """Raises what was held back."""
        if self.timer is not None:
            self.timer.cancel()
        if self.pending is not None:
            self.raised, self.pending = self.pending, None
            raise _exception(self.raised)


_guard: _Guard | None = None


@contextlib.contextmanager
def guarded(last_words: Callable[[], str] | None = None) -> Iterator[None]:
    """Raises ``KeyboardInterrupt`` at a first signal inside (``Terminated`` at SIGTERM).

    In a program a second ends the process at once, with one line on stderr and status 128 + signal:
    no teardown, during which threads that still write would crash the process. A library does not
    own the process: there a second signal is raised at once, also within ``deferred``, and a
    handler that somebody else has set stays. Without this context ``deferred`` does nothing.

    Args:
        last_words: of a program, makes the line; called in a signal handler, so it takes no locks.
            None for a library.
    """
    global _guard
    if threading.current_thread() is not threading.main_thread() or _guard is not None:
        yield
        return
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    taken = [n for n in _SIGNALS if last_words is not None or signal.getsignal(n) == usual[n]]
    _guard = _Guard(last_words)
    with contextlib.ExitStack() as after:
        if last_words is not None:
            here, there = socket.socketpair()
            after.callback(here.close)  # ends the thread, which leaves its own end to be collected
            here.setblocking(False)
            threading.Thread(target=_guard.watch, args=(there,), daemon=True).start()
            woken = signal.set_wakeup_fd(here.fileno(), warn_on_full_buffer=False)
            after.callback(signal.set_wakeup_fd, woken)
        before = {number: signal.signal(number, _guard) for number in taken}
        try:
            yield
        finally:
            _guard = None
            for number, handler in before.items():
                signal.signal(number, handler)


def is_guarded() -> bool:
    """True inside ``guarded``, in the thread that signals are raised in."""
    return _guard is not None and threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defers a first signal that arrives inside to the end of the block.

    One that arrived before, and whose exception was lost where Python drops them, is raised again.
    """
    guard = _guard
    if guard is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    guard.raise_lost()
    guard.depth += 1
    try:
        yield
    finally:
        guard.depth -= 1
        if guard.depth == 0:
            guard.release()


def status_of(error: KeyboardInterrupt) -> int:
    """The exit status of a program that ended so: 130, or 143 after SIGTERM."""
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)


def _exception(number: int) -> KeyboardInterrupt:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


def _say(text: str) -> None:
    """Writes past buffers that the interrupted code may hold locked."""
    os.write(2, text.encode())
