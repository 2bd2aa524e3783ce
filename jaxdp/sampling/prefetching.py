"""Prefetching: a background thread makes the next items while the device works."""

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator
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
        self._lane = lane  # which is all that the thread holds, so that this can be collected
        lane.thread.start()

    def __del__(self) -> None:
        if hasattr(self, "_lane"):  # an interrupt may have come before
            self._lane.stop()

    def __next__(self) -> Item:
        return self._lane.take()

    def close(self) -> None:
        """Stops the thread and waits for it; what was not consumed is dropped, in silence.

        An item that is just being made is finished first. A second call does nothing.
        """
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
    """A bounded queue of items, and the thread that fills it.

    Nobody holds a lock: an interrupt in the middle of ``with condition`` would leave it held, and
    the other side would wait for ever.
    """

    def __init__(self, producer: Iterable[Item], size: int) -> None:
        self._size = size
        # Items, and a last None for who waits.
        self._items: queue.SimpleQueue[tuple[Item] | None] = queue.SimpleQueue()
        self._end: BaseException | None = None  # raised behind the last item
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._stopped = self._orphaned = False
        self._process = this_process()
        self._consumer = threading.current_thread()
        # No daemon: it would run on into an interpreter that is being taken down.
        self.thread = threading.Thread(
            target=self._run, args=(producer,), name="jaxdp-prefetch", daemon=False
        )

    def take(self) -> Item:
        """The next item, waiting for it if need be."""
        if this_process() != self._process:
            # The thread may have been in the middle of something when the process was forked.
            raise RuntimeError("prefetched items belong to the process that began to make them")
        self._consumer = threading.current_thread()
        while not self._stopped:
            if self._end is not None and self._items.empty():
                failure, self._end = self._end, StopIteration()
                try:
                    raise failure
                finally:
                    del failure  # its traceback would hold itself
            try:
                # With a limit, so that an interrupt is noticed on every system.
                found = self._items.get(timeout=_LOOK_AGAIN)
            except queue.Empty:
                continue
            # Waking the thread for every item costs the consumer more than the items.
            if self._items.qsize() <= self._size // 2:
                self._woken.put(None)
            if found is not None:
                return found[0]
        if self._orphaned:
            raise RuntimeError("prefetched items were dropped: the program was ending")
        raise StopIteration

    def stop(self) -> None:
        """Lets the thread end; no item is taken any more. Finalizers and signal handlers may."""
        self._stopped = True
        self._woken.put(None)

    def close(self) -> None:
        """Stops the thread and waits for it."""
        if this_process() == self._process:
            self.stop()
            if threading.current_thread() is not self.thread:
                self.thread.join()

    def _run(self, producer: Iterable[Item]) -> None:
        """Fills the queue, in the thread."""
        try:
            for item in producer:
                self._items.put((item,))
                del item  # or it would be held while the next one is made
                while self._items.qsize() >= self._size and not self._stopped:
                    # Once the program waits only for its last threads, of which this may be one,
                    # nobody is left to take an item.
                    user, main = self._consumer, threading.main_thread()
                    if main.is_alive() or (user.is_alive() and not user.daemon):
                        with contextlib.suppress(queue.Empty):
                            self._woken.get(timeout=_LOOK_AGAIN)
                    else:
                        self._orphaned = self._stopped = True
                if self._stopped:
                    break
            self._end = StopIteration()
        except BaseException as error:  # for the consumer, whatever it is
            self._end = error
        self._items.put(None)
        if self._stopped:
            self._items = queue.SimpleQueue()
