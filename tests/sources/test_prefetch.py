"""The background thread: order, errors, how it ends, and that nothing is lost on the way."""

import gc
import pickle
import threading
import time
import traceback

import numpy as np
import pytest

from jaxdp.sources import _lane, as_source, prefetch

BEFORE = set()  # of tests elsewhere that keep an iterator open, such as in an error they caught


def threads():
    alive = {thread for thread in threading.enumerate() if thread.name == "jaxdp-prefetch"}
    return alive - BEFORE


@pytest.fixture(autouse=True)
def no_thread_is_left():
    BEFORE.clear()
    BEFORE.update(threads())
    yield
    until(lambda: not threads())


def until(ready, limit=60.0):
    end = time.monotonic() + limit
    while not ready():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


class Producer:
    """Counts up; keeps what happened, in order, and in which thread."""

    def __init__(self, count=10**9, fail_at=None, pause=0.0):
        self.count, self.fail_at, self.pause = count, fail_at, pause
        self.made, self.events, self.threads = 0, [], set()

    def __call__(self):
        try:
            for item in range(self.count):
                self.threads.add(threading.current_thread().name)
                time.sleep(self.pause)
                if item == self.fail_at:
                    raise KeyError("private reader")
                self.made += 1
                yield item
        finally:
            self.events.append("finally")

    def unused(self, item):
        self.threads.add(threading.current_thread().name)
        self.events.append(item)


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_every_item_comes_once_and_in_order(size, count):
    producer = Producer(count)
    items = prefetch(producer, size, unused=producer.unused)
    assert list(items) == list(range(count))
    assert next(items, None) is None
    items.close()
    assert producer.events == ["finally"]
    assert producer.threads <= {"jaxdp-prefetch"}


@pytest.mark.parametrize(
    "producer", [range(3), iter([0, 1, 2]), (i for i in range(3)), lambda: range(3)]
)
def test_producers_of_every_kind(producer):
    assert list(prefetch(producer)) == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 3])
def test_items_are_made_ahead_but_never_more_than_size(size):
    producer = Producer()
    with prefetch(producer, size) as items:
        for taken in range(5):
            until(lambda taken=taken: producer.made == taken + size)
            time.sleep(0.005)
            assert producer.made == taken + size
            assert next(items) == taken


def test_an_error_comes_at_its_place_with_its_traceback():
    producer = Producer(fail_at=3)
    items = prefetch(producer, size=10)
    until(lambda: producer.events == ["finally"])
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="private reader") as caught:
        next(items)
    assert "raise KeyError" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert next(items, "end") == "end"
    items.close()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration("early")])
def test_errors_of_every_kind(error):
    def producer():
        raise error
        yield

    with prefetch(producer) as items, pytest.raises((type(error), RuntimeError)) as caught:
        next(items)
    assert error in (caught.value, caught.value.__cause__)


def test_a_function_that_fails_before_the_first_item():
    def producer():
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        list(prefetch(producer))


def test_put_is_applied_in_the_thread():
    names = []

    def put(item):
        names.append(threading.current_thread().name)
        return item * 2

    assert list(prefetch(range(3), put=put)) == [0, 2, 4]
    assert set(names) == {"jaxdp-prefetch"}


@pytest.mark.parametrize("error", [ValueError("device"), StopIteration()])
def test_an_item_that_put_failed_on_is_given_back_behind_the_others(error):
    asked = []

    def put(item):
        asked.append(item)
        if item == 2:
            raise error
        return str(item)

    producer = Producer()
    items = prefetch(producer, 5, put=put, unused=producer.unused)
    assert next(items) == "0"
    until(lambda: 2 in asked)
    items.close()
    assert producer.events == [1, 2, "finally"]

    producer = Producer()
    items = prefetch(producer, 5, put=put, unused=producer.unused)
    assert [next(items), next(items)] == ["0", "1"]
    with pytest.raises((ValueError, RuntimeError)):
        next(items)
    items.close()
    assert producer.events == [2, "finally"]


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_close_gives_back_in_order_then_closes_the_producer(taken):
    producer = Producer()
    items = prefetch(producer, 3, put=str, unused=producer.unused)
    for _ in range(taken):
        next(items)
    until(lambda: producer.made == taken + 3)
    items.close()
    assert not threads()
    assert producer.events == [taken, taken + 1, taken + 2, "finally"]
    assert producer.threads == {"jaxdp-prefetch"}
    assert next(items, "end") == "end"
    items.close()
    assert len(producer.events) == 4


def test_close_wakes_the_thread_though_the_line_is_full(monkeypatch):
    monkeypatch.setattr(_lane, "_LOOK_AGAIN", 120.0)  # it does not look before `until` gives up
    producer = Producer()
    items = prefetch(producer, 1)
    until(lambda: producer.made == 1)
    closing = threading.Thread(target=items.close, daemon=True)
    closing.start()
    until(lambda: not closing.is_alive())
    assert not threads()


def test_every_item_is_either_consumed_or_given_back():
    for seed in range(60):
        producer = Producer(pause=0.0)
        items = prefetch(producer, 1 + seed % 4, unused=producer.unused)
        consumed = [next(items) for _ in range(seed % 7)]
        items.close()
        assert consumed + producer.events[:-1] == list(range(producer.made))


def test_leaving_a_with_block_by_an_error_stops_the_thread():
    producer = Producer()
    items = prefetch(producer, unused=producer.unused)
    until(lambda: producer.made == 2)
    with pytest.raises(KeyboardInterrupt), items:
        raise KeyboardInterrupt
    assert producer.events == [0, 1, "finally"]


def test_a_generator_that_is_closed_closes_what_it_uses():
    producer = Producer()

    def outer():
        with prefetch(producer) as items:
            yield from items

    generator = outer()
    assert next(generator) == 0
    generator.close()
    assert producer.events == ["finally"]


@pytest.mark.parametrize("cyclic", [False, True])
def test_what_is_forgotten_is_collected_and_stops(cyclic):
    producer = Producer()
    items = prefetch(producer, unused=producer.unused)
    assert next(items) == 0
    until(lambda: producer.made == 3)
    if cyclic:
        items.itself = items
    del items
    gc.collect()
    until(lambda: producer.events == [1, 2, "finally"])


def test_what_is_exhausted_leaves_no_thread():
    items = prefetch(range(3))
    assert list(items) == [0, 1, 2]
    until(lambda: not threads())
    items.close()


def test_close_raises_what_giving_back_raised_and_still_gives_back_the_rest():
    events = []

    def unused(item):
        events.append(item)
        raise OSError(f"ledger {item}")

    producer = Producer()
    items = prefetch(producer, 3, unused=unused)
    until(lambda: producer.made == 3)
    with pytest.raises(OSError, match="ledger 0"):
        items.close()
    assert events == [0, 1, 2]
    items.close()


def test_close_raises_what_the_producers_finally_raised():
    def producer():
        try:
            while True:
                yield 1
        finally:
            raise OSError("disk full")

    items = prefetch(producer)
    next(items)
    with pytest.raises(OSError, match="disk full"):
        items.close()


def test_a_close_from_the_thread_itself_does_not_wait_for_itself():
    box = []
    box.append(prefetch(range(9), unused=lambda _: box[0].close()))
    next(box[0])
    box[0].close()


def test_a_slow_producer_finishes_its_item_and_gives_it_back():
    producer = Producer(pause=0.05)
    items = prefetch(producer, unused=producer.unused)
    items.close()
    assert producer.events in ([0, "finally"], ["finally"], [])  # [] where it had not begun


def test_several_consumers_share_the_items():
    items = prefetch(range(200), 3)
    found = [[], []]
    workers = [threading.Thread(target=lambda mine=mine: mine.extend(items)) for mine in found]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(found[0] + found[1]) == list(range(200))


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None])
def test_sizes_are_whole_numbers_from_one(size):
    with pytest.raises(ValueError, match="size"):
        prefetch(range(3), size)


def test_a_producer_must_be_iterable():
    with pytest.raises(ValueError, match="producer"):
        prefetch(3)


def test_it_cannot_be_pickled():
    with prefetch(range(3)) as items, pytest.raises(TypeError, match="this process"):
        pickle.dumps(items)


def test_gathered_batches_come_ahead_of_time():
    import jax

    source = as_source({"x": np.arange(20, dtype=np.float32)})
    draws = [(np.array([i, i + 1]), np.array([True, i % 2 == 0])) for i in range(5)]
    batches = prefetch((source.gather(*draw) for draw in draws), put=jax.device_put)
    for i, batch in enumerate(batches):
        assert isinstance(batch["x"], jax.Array)
        np.testing.assert_array_equal(batch["x"], [i, i + 1 if i % 2 == 0 else 0])
