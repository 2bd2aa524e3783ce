"""The thread behind ``prefetch``, and the state that it shares with the consumer."""

import collections
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxdp.types import PyTree

# How long a wait may last before it looks whether the program is ending. Only who waits looks.
_LOOK_AGAIN = 0.05


class Lane:
    """A bounded queue of items, the thread that fills it, and its outcome."""

    def __init__(
        self,
        producer: "Iterable[PyTree] | Callable[[], Iterable[PyTree]]",
        size: int,
        put: "Callable[[PyTree], PyTree] | None",
        unused: "Callable[[PyTree], None] | None",
    ) -> None:
        self._producer, self._size, self._put, self._unused = producer, size, put, unused
        self._items: collections.deque[tuple[Any, Any]] = collections.deque()  # (given, put)
        self._spoilt: list[Any] = []  # the item that put failed on
        self._changed = threading.Condition()
        self._stop = False  # no item will be taken any more
        self._made_all = False
        self._failure: BaseException | None = None  # raised where the next item would be
        self._late: BaseException | None = None  # raised by close
        self._abandoned = self._orphaned = False
        self._process = os.getpid()
        self._consumer = threading.current_thread()
        # No daemon: it would run on into an interpreter that is being taken down.
        self.thread = threading.Thread(target=self._run, name="jaxdp-prefetch", daemon=False)

    # What the consumer calls.

    def take(self) -> Any:
        """The next item, waiting for it if need be."""
        if os.getpid() != self._process:
            # Before the lock: the thread may have held it when the process was forked.
            raise RuntimeError("prefetched items belong to the process that began to make them")
        with self._changed:
            self._consumer = threading.current_thread()
            while not (self._items or self._made_all or self._stop):
                # With a limit, so that an interrupt is noticed on every system.
                self._changed.wait(_LOOK_AGAIN)
            if self._stop or not self._items:
                raise self._ending()
            item = self._items.popleft()[1]
            # Waking the thread for every item costs the consumer more than the items.
            if len(self._items) <= self._size // 2:
                self._changed.notify_all()
            return item

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # what was not consumed is the parent's to give back
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if threading.current_thread() is self.thread:
            return
        self.thread.join()
        late, self._late = self._late, None
        if late is not None:
            raise late

    def abandon(self) -> None:
        """Stops the thread without waiting and without the lock, for the garbage collector."""
        if os.getpid() == self._process:
            self._abandoned = self._stop = True

    def _ending(self) -> BaseException:
        """The exception at the end of the items: the failure once, then StopIteration."""
        if self._orphaned:
            return RuntimeError("prefetched items were given back: the program was ending")
        failure, self._failure = self._failure, None
        return StopIteration() if failure is None or self._stop else failure

    # What the thread does.

    def _run(self) -> None:
        """Makes items, then gives back what is left and closes the producer."""
        iterator: Any = None
        try:
            producer = self._producer
            iterator = iter(producer if isinstance(producer, Iterable) else producer())
            self._fill(iterator)
        except BaseException as error:  # for the consumer, whatever it is
            self._failure = error
        with self._changed:
            self._made_all = True
            self._changed.notify_all()
            self._rest_until(lambda: not self._items)
        self._give_back()
        self._attempt(getattr(iterator, "close", lambda: None))
        if self._abandoned and self._late is not None:
            raise self._late  # nobody is left to raise it to: the thread's hook prints it

    def _fill(self, iterator: Iterator[PyTree]) -> None:
        while self._has_room():
            try:
                given = next(iterator)
            except StopIteration:
                return
            self._line_up(given)

    def _has_room(self) -> bool:
        """Waits for room for one more item; False if no more are wanted."""
        with self._changed:
            self._rest_until(lambda: len(self._items) < self._size)
            return not self._stop

    def _line_up(self, given: PyTree) -> None:
        try:
            item = given if self._put is None else self._put(given)
        except BaseException as error:
            self._spoilt.append(given)
            if isinstance(error, StopIteration):  # it would look like the end of the items
                raise RuntimeError("put raised StopIteration") from error
            raise
        with self._changed:
            # ``given`` is kept only where somebody wants it back: it may be a copy on the host.
            self._items.append((given if self._unused is not None else None, item))
            self._changed.notify_all()

    def _rest_until(self, ready: Callable[[], bool]) -> None:
        """Waits, with the lock, for ``ready()``, for the end, or for the end of the program."""
        while not ready() and not self._stop:
            if not self._has_consumer():
                self._orphaned = self._stop = True
            else:
                self._changed.wait(_LOOK_AGAIN)

    def _has_consumer(self) -> bool:
        """False once the program waits only for its last threads, of which this may be one."""
        user = self._consumer
        return threading.main_thread().is_alive() or (user.is_alive() and not user.daemon)

    def _give_back(self) -> None:
        left = [given for given, _ in self._items] + self._spoilt
        self._items.clear()
        if self._unused is not None:
            for given in left:
                self._attempt(self._unused, given)

    def _attempt(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except BaseException as error:
            self._late = self._late or error
