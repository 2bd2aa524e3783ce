"""Prefetching: a background thread makes the next items while the device works."""

import collections
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NoReturn, TypeVar

from jaxdp import arguments
from jaxdp.ledger.ledger import this_process

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
        """Stops the thread and waits for it; what was not consumed is dropped, in silence.

        An item that is just being made is finished first. A second call does nothing.
        """
        self._abandon.detach()
        self._lane.close()

    def __enter__(self) -> "Prefetched[Item]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a prefetched iterator cannot be pickled: its thread is in this process")


def prefetch(producer: Iterable[Item], size: int = 2) -> Prefetched[Item]:
    """Returns an iterator over the items of ``producer``, made ahead of time in a thread.

    The thread begins at once. An error of the producer is raised, with its traceback, where its
    item would have come, and nowhere else.

    JAX's configuration contexts (``jax.default_device``, ``jax.enable_x64``) belong to a thread:
    enter them in the producer.

    Args:
        producer: an iterable, such as a generator.
        size: the largest number of items made and not yet consumed, at least 1.

    Raises:
        ValueError: an argument is none of the above.
    """
    arguments.integer("size", size, least=1)
    if not isinstance(producer, Iterable):
        raise ValueError(f"producer must be an iterable, got {type(producer).__name__}")
    return Prefetched(_Lane(producer, int(size)))


class _Lane(Generic[Item]):
    """A bounded queue of items, and the thread that fills it."""

    def __init__(self, producer: Iterable[Item], size: int) -> None:
        self._producer, self._size = producer, size
        self._items: collections.deque[Item] = collections.deque()
        self._changed = threading.Condition()
        self._stop = False  # no item will be taken any more
        self._made_all = self._orphaned = False
        self._failure: BaseException | None = None  # raised where the next item would be
        self._process = this_process()
        self._consumer = threading.current_thread()
        # No daemon: it would run on into an interpreter that is being taken down.
        self.thread = threading.Thread(target=self._run, name="jaxdp-prefetch", daemon=False)

    # What the consumer calls.

    def take(self) -> Item:
        """The next item, waiting for it if need be."""
        if this_process() != self._process:
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
        if this_process() != self._process:
            return
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def abandon(self) -> None:
        """Stops the thread without waiting and without the lock, for the garbage collector."""
        self._stop = True

    def _ending(self) -> BaseException:
        """The exception at the end of the items: the failure once, then StopIteration."""
        if self._orphaned:
            return RuntimeError("prefetched items were dropped: the program was ending")
        failure, self._failure = self._failure, None
        return StopIteration() if failure is None or self._stop else failure

    # What the thread does.

    def _run(self) -> None:
        try:
            for item in self._producer:
                with self._changed:
                    self._items.append(item)
                    self._changed.notify_all()
                    del item  # or it would be held while the next one is made
                    self._rest_until(lambda: len(self._items) < self._size)
                    if self._stop:
                        break
        except BaseException as error:  # for the consumer, whatever it is
            self._failure = error
        with self._changed:
            self._made_all = True
            self._changed.notify_all()
            if self._stop:
                self._items.clear()

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
