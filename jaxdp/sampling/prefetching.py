"""Prefetching: a background thread makes the next items while the device works."""

import collections
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NoReturn, TypeVar

from jaxdp import arguments

Item = TypeVar("Item")
# How long a wait may last before it looks whether the program is ending. Only who waits looks.
_LOOK_AGAIN = 0.05


class Prefetched(Iterator[Item]):
    """An iterator over items made ahead of time, in order; ``prefetch`` makes it.

    Leaving a ``with`` block, ``close`` and garbage collection stop the thread.
    """

    def __init__(self, lane: "_Lane[Item]") -> None:
        self._lane = lane
        # Not of the object itself: the thread holds the lane only, so that this can be collected.
        self._abandon = weakref.finalize(self, lane.abandon)
        self._abandon.atexit = False  # the thread notices by itself that the program ends
        lane.thread.start()

    def __next__(self) -> Item:
        return self._lane.take()

    def close(self) -> None:
        """Stops the thread, gives back what was not consumed, and waits for both.

        An item that is just being made is finished first. A second call does nothing.

        Raises:
            Exception: what ``unused`` or the producer's ``finally`` raised, the first of them.
        """
        self._abandon.detach()
        self._lane.close()

    def __enter__(self) -> "Prefetched[Item]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a prefetched iterator cannot be pickled: its thread is in this process")


def prefetch(
    producer: Iterable[Item], size: int = 2, *, unused: Callable[[Item], None] | None = None
) -> Prefetched[Item]:
    """Returns an iterator over the items of ``producer``, made ahead of time in a thread.

    The thread begins at once. An error of the producer is raised, with its traceback, where its
    item would have come. At a ``close`` the thread calls ``unused`` for every item that was made
    but not consumed, in order, and then closes the producer (its ``finally`` runs), so that both
    still see an open producer and never run at the same time as it. An item that an interrupt
    loses on its way to the consumer counts as consumed.

    JAX's configuration contexts (``jax.default_device``, ``jax.enable_x64``) belong to a thread:
    enter them in the producer.

    Args:
        producer: an iterable, such as a generator.
        size: the largest number of items made and not yet consumed, at least 1.
        unused: called with each item that no consumer got.

    Raises:
        ValueError: an argument is none of the above.
    """
    arguments.integer("size", size, least=1)
    if not isinstance(producer, Iterable):
        raise ValueError(f"producer must be an iterable, got {type(producer).__name__}")
    return Prefetched(_Lane(producer, int(size), unused))


class _Lane(Generic[Item]):
    """A bounded queue of items, the thread that fills it, and its outcome."""

    def __init__(
        self, producer: Iterable[Item], size: int, unused: Callable[[Item], None] | None
    ) -> None:
        self._producer, self._size, self._unused = producer, size, unused
        self._items: collections.deque[Item] = collections.deque()
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

    def take(self) -> Item:
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
                raise self._ending()  # in no variable here: its traceback would hold itself
            item = self._items.popleft()
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
        iterator: Iterator[Item] | None = None
        try:
            iterator = iter(self._producer)
            while self._has_room():
                try:
                    item = next(iterator)
                except StopIteration:
                    break
                with self._changed:
                    self._items.append(item)
                    self._changed.notify_all()
                del item  # or it would be held while the next one is made
        except BaseException as error:  # for the consumer, whatever it is
            self._failure = error
        with self._changed:
            self._made_all = True
            self._changed.notify_all()
            self._rest_until(lambda: not self._items)

        left = list(self._items)
        self._items.clear()
        if self._unused is not None:
            for item in left:
                self._attempt(functools.partial(self._unused, item))
        self._attempt(getattr(iterator, "close", lambda: None))
        if self._abandoned and self._late is not None:
            raise self._late  # nobody is left to raise it to: the thread's hook prints it

    def _has_room(self) -> bool:
        """Waits for room for one more item; False where none will be taken any more."""
        with self._changed:
            self._rest_until(lambda: len(self._items) < self._size)
            return not self._stop

    def _rest_until(self, ready: Callable[[], bool]) -> None:
        """Waits, with the lock, for ``ready()``, for the end, or for the end of the program."""
        while not ready() and not self._stop:
            # Once the program waits only for its last threads, of which this may be one, nobody
            # is left to take an item.
            user = self._consumer
            taker = threading.main_thread().is_alive() or (user.is_alive() and not user.daemon)
            if not taker:
                self._orphaned = self._stop = True
            else:
                self._changed.wait(_LOOK_AGAIN)

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self._late = self._late or error
