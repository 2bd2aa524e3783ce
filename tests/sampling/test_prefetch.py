"""The background thread: order, errors, how it ends (alone and with its program), and no loss."""

import gc
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from itertools import product

import pytest

import jaxdp
from jaxdp.sampling import prefetch, prefetching
from tests.refusing import refused
from tests.training.test_batches import at_line, interrupt

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

    def __iter__(self):
        try:
            for item in range(self.count):
                self.threads.add(threading.current_thread().name)
                time.sleep(self.pause)
                if item == self.fail_at:
                    raise KeyError("private reader")
                self.made += 1
                yield item
        finally:
            self.threads.add(threading.current_thread().name)
            self.events.append("finally")


def started(size=2, **options):
    producer = Producer(**options)
    return producer, prefetch(producer, size)


def test_every_item_comes_once_and_in_order():
    for size, count in product((1, 2, 100), (0, 1, 50)):
        producer, items = started(size, count=count)
        assert list(items) == list(range(count)), (size, count)
        assert next(items, None) is None
        until(lambda: not threads())  # what is exhausted leaves none
        items.close()
        assert producer.events == ["finally"], (size, count)
        assert producer.threads <= {"jaxdp-prefetch"}
    for producer in (range(3), iter([0, 1, 2]), (i for i in range(3))):
        assert list(prefetch(producer)) == [0, 1, 2]


def test_items_are_made_ahead_but_never_more_than_size():
    for size in (1, 3):
        producer, ahead = started(size)
        with ahead as items:
            for taken in range(5):
                until(lambda least=taken + size, made=producer: made.made == least)
                time.sleep(0.005)
                assert producer.made == taken + size
                assert next(items) == taken


def test_an_error_comes_at_its_place_with_its_traceback_and_bad_input_is_refused():
    producer, items = started(10, fail_at=3)
    until(lambda: producer.events == ["finally"])
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="private reader") as caught:
        next(items)
    assert "raise KeyError" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert next(items, "end") == "end"
    items.close()
    for error in (SystemExit(3), KeyboardInterrupt(), StopIteration("early")):

        def raising(error=error):
            raise error
            yield

        with prefetch(raising()) as items, pytest.raises((type(error), RuntimeError)) as caught:
            next(items)
        assert error in (caught.value, caught.value.__cause__)

    class Broken(list):
        def __iter__(self):
            raise OSError("no such file")

    refused("no such file", lambda: list(prefetch(Broken())), error=OSError)
    for size in (0, -1, 1.5, True, None):
        refused("size", prefetch, range(3), size)
    refused("producer must be an iterable, got int", prefetch, 3)
    with prefetch(range(3)) as items:
        refused("this process", pickle.dumps, items, error=TypeError)


def test_close_ends_thread_and_producer_and_what_was_made_ahead_is_dropped_in_silence(monkeypatch):
    for taken in (0, 1, 4):
        producer, items = started(3)
        consumed = [next(items) for _ in range(taken)]
        until(lambda least=taken + 3, made=producer: made.made == least)
        for _ in range(2):
            items.close()
            assert not threads()
            assert (consumed, producer.events) == (list(range(taken)), ["finally"])
            assert producer.threads == {"jaxdp-prefetch"}
            assert next(items, "end") == "end"
    # An error that nobody came to is told by nobody, as is one of an item that is being made.
    for pause in (0.0, 0.05):
        producer, items = started(5, fail_at=1, pause=pause)
        until(lambda made=producer: made.made == 1)
        items.close()
        assert next(items, "end") == "end"
    # Several consumers share them.
    items, found = prefetch(range(200), 3), [[], []]
    workers = [threading.Thread(target=lambda mine=mine: mine.extend(items)) for mine in found]
    for deed in ("start", "join"):
        for worker in workers:
            getattr(worker, deed)()
    assert sorted(found[0] + found[1]) == list(range(200))
    # Closing wakes the thread though the line is full.
    monkeypatch.setattr(prefetching, "_LOOK_AGAIN", 120.0)  # longer than `until` waits
    producer, items = started(1)
    until(lambda: producer.made == 1)
    closing = threading.Thread(target=items.close, daemon=True)
    closing.start()
    until(lambda: not closing.is_alive())
    assert not threads()


def test_leaving_a_with_block_or_forgetting_what_is_ahead_stops_the_thread():
    producer, items = started()
    until(lambda: producer.made == 2)
    with pytest.raises(KeyboardInterrupt), items:
        raise KeyboardInterrupt
    assert producer.events == ["finally"]
    producer = Producer()

    def outer():
        with prefetch(producer) as items:
            yield from items

    generator = outer()
    assert next(generator) == 0
    generator.close()
    assert producer.events == ["finally"]
    # What is forgotten is collected and stops.
    for cyclic in (False, True):
        producer, items = started()
        assert next(items) == 0
        until(lambda made=producer: made.made == 3)
        if cyclic:
            items.itself = items
        del items
        gc.collect()
        until(lambda made=producer: made.events == ["finally"])


def test_an_interrupt_at_any_line_loses_an_item_at_most_and_never_the_end():
    """Before: who was interrupted with the end in hand waited for it for ever."""
    number, reached = 0, [0]
    while reached:
        number += 1
        items, found, told = prefetch(range(2)), [], []
        with at_line(number, interrupt) as reached:
            while "StopIteration" not in told:
                try:
                    found.append(next(items))
                except (KeyboardInterrupt, StopIteration) as error:
                    told.append(type(error).__name__)
        assert found in ([0, 1], [0], [1])
    assert number > 20


# Each program is a process of its own, forked where all is imported, which ends as programs end.
PRELUDE = """
import atexit, itertools, json, os, signal, sys, threading, time, warnings
import jaxdp, numpy
from jaxdp.training.batches import Batches
from jaxdp.sampling import as_source, prefetch, prefetching
warnings.simplefilter("ignore")  # of forks
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
def producer():
    try:
        yield from itertools.count()
    finally:
        print("finally", flush=True)
folder, ended = sys.argv[1], {}
for name, code in json.loads(sys.argv[2]).items():
    child = os.fork()
    if not child:
        for number in (1, 2):
            os.dup2(os.open(f"{folder}/{name}.{number}", os.O_CREAT | os.O_WRONLY), number)
        exec(code)
        break
    ended[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    print(json.dumps(ended))
"""

INTERRUPTED = """
    def sleeper():
        yield 1
        for _ in range(30):
            time.sleep(0.05)
        yield 2
    slow = prefetch(sleeper())
    next(slow)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        with prefetch(producer()) as items:
            next(items)
            WAIT
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    del slow
"""
PROGRAMS = {
    "nothing was closed": """
        atexit.register(lambda: print("atexit", flush=True))
        items = prefetch(producer())
        print(next(items))
        time.sleep(0.05)
    """,
    "a loop was left": """
        ledger = jaxdp.Ledger(f"{folder}/ledger.jsonl")
        named = {"noise_multiplier": 1.0, "l2_clip_norm": 1.0, "batch_size": 20}
        sampler = jaxdp.dp_sgd(**named, dataset_size=60).sampler(60, ledger=ledger, reserve=8)
        batches = Batches(sampler, as_source(numpy.zeros(60)), 20)
        print(next(batches).step, next(batches).step)
    """,
    "by an error": """
        items = prefetch(producer())
        next(items)
        raise SystemExit(5)
    """,
    "a consumer outlives the main thread": """
        def consume():
            with prefetch(producer()) as items:
                for item in itertools.islice(items, 6):
                    time.sleep(0.08)
                print("consumed", item)
        threading.Thread(target=consume).start()
    """,
    "a daemon consumer": """
        box = []
        def consume():
            box.append(prefetch(producer()))
            next(box[0])
            time.sleep(1000)
        threading.Thread(target=consume, daemon=True).start()
        time.sleep(0.2)
    """,
    "interrupted asleep": INTERRUPTED.replace("WAIT", "time.sleep(30)"),
    "interrupted waiting": INTERRUPTED.replace("WAIT", "next(slow)"),
    "another process": """
        items = prefetch(producer())
        next(items)
        time.sleep(0.05)
        child = os.fork()
        if child == 0:
            try:
                next(items)
            except RuntimeError as error:
                print("refused:", error, flush=True)
            items.close()
            del items
            os._exit(0)
        os.waitpid(child, 0)
        print(next(items), flush=True)
        items.close()
    """,
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_the_thread_ends_with_its_program(tmp_path):
    programs = json.dumps({name: textwrap.dedent(code) for name, code in PROGRAMS.items()})
    command = [sys.executable, "-c", PRELUDE, str(tmp_path), programs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ended, found = json.loads(done.stdout), {}
    for name in PROGRAMS:
        out, err = ((tmp_path / f"{name}.{number}").read_text() for number in (1, 2))
        found[name] = out.splitlines()
        assert (ended[name], err) == (5 if name == "by an error" else 0, ""), name
    # Nothing is written at the end of a program: what was reserved counts.
    assert jaxdp.Ledger(tmp_path / "ledger.jsonl").steps == 8
    last = found.pop("another process")
    assert found == {
        "nothing was closed": ["0", "finally", "atexit"],
        "a loop was left": ["0 1"],
        "by an error": ["finally"],
        "a consumer outlives the main thread": ["consumed 5", "finally"],
        "a daemon consumer": ["finally"],
        "interrupted asleep": ["finally", "interrupted"],
        "interrupted waiting": ["finally", "interrupted"],
    }
    assert last[0].startswith("refused: prefetched items belong to the process")
    assert last[1:] == ["1", "finally"]
