"""Prefetching: a background thread makes the next items while the device works."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxdp import arguments
from jaxdp.sources._lane import Lane
from jaxdp.types import PyTree


class Prefetched(Iterator[Any]):
    """An iterator over items made ahead of time, in order; ``prefetch`` makes it.

    Leaving a ``with`` block, ``close`` and garbage collection stop the thread.
    """

    def __init__(self, lane: "Lane") -> None:
        self._lane = lane
        # Not of the object itself: the thread holds the lane only, so that this can be collected.
        self._abandon = weakref.finalize(self, lane.abandon)
        self._abandon.atexit = False  # the thread notices by itself that the program ends
        lane.thread.start()

    def __next__(self) -> Any:
        return self._lane.take()

    def close(self) -> None:
        """Stops the thread, gives back what was not consumed, and waits for both.

        An item that is just being made is finished first. A second call does nothing.

        Raises:
            Exception: what ``unused`` or the producer's ``finally`` raised, the first of them.
        """
        self._abandon.detach()
        self._lane.close()

    def __enter__(self) -> "Prefetched":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a prefetched iterator cannot be pickled: its thread is in this process")


def prefetch(
    producer: Iterable[PyTree] | Callable[[], Iterable[PyTree]],
    size: int = 2,
    *,
    put: Callable[[PyTree], PyTree] | None = None,
    unused: Callable[[PyTree], None] | None = None,
) -> Prefetched:
    """Returns an iterator over the items of ``producer``, made ahead of time in a thread.

    The thread begins at once. An error of the producer is raised, with its traceback, where its
    item would have come. At a ``close`` the thread calls ``unused`` for every item that was made
    but not consumed, in order, and then closes the producer (its ``finally`` runs), so that both
    still see an open producer and never run at the same time as it. An item that an interrupt
    loses on its way to the consumer counts as consumed.

    ``put`` runs in the thread: ``prefetch(batches, put=jax.device_put)`` begins the transfer to the
    device early. JAX's configuration contexts (``jax.default_device``, ``jax.enable_x64``) belong
    to a thread: enter them in the producer, or give ``put`` the device by name.

    Args:
        producer: an iterable, or a function without arguments that returns one, called in the
            thread.
        size: the largest number of items made and not yet consumed, at least 1.
        put: applied to each item in the thread; the consumer gets its result.
        unused: called with each item as the producer gave it, before ``put``, that no consumer got.

    Raises:
        ValueError: an argument is none of the above.
    """
    arguments.integer("size", size, least=1)
    if not isinstance(producer, Iterable) and not callable(producer):
        raise ValueError(
            "producer must be an iterable or a function that returns one, got "
            f"{type(producer).__name__}"
        )
    return Prefetched(Lane(producer, int(size), put, unused))
