"""The background thread in whole programs: it ends with them, by signals and across a fork."""

import os
import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import itertools, os, signal, sys, threading, time, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
from jaxdp.sources import prefetch
def producer():
    try:
        yield from itertools.count()
    finally:
        print("finally", flush=True)
unused = lambda item: print("unused", item, flush=True)
"""


def program(code, limit=60):
    whole = PRELUDE + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", whole], capture_output=True, text=True, timeout=limit
    )
    return done.returncode, done.stdout.split("\n")[:-1], done.stderr


def test_a_program_ends_though_nothing_was_closed():
    code, out, err = program(
        """
        import atexit
        atexit.register(lambda: print("atexit", flush=True))
        items = prefetch(producer, unused=unused)
        print(next(items))
        time.sleep(0.05)
        """
    )
    assert (code, err) == (0, "")
    assert out == ["0", "unused 1", "unused 2", "finally", "atexit"]


def test_a_program_ends_by_an_error_though_nothing_was_closed():
    code, out, err = program("items = prefetch(producer)\nnext(items)\nraise SystemExit(5)")
    assert (code, out, err) == (5, ["finally"], "")


def test_a_consumer_thread_may_outlive_the_main_thread():
    code, out, err = program(
        """
        def consume():
            with prefetch(producer) as items:
                for item in itertools.islice(items, 6):
                    time.sleep(0.08)
                print("consumed", item)
        threading.Thread(target=consume).start()
        """
    )
    assert (code, out, err) == (0, ["consumed 5", "finally"], "")


def test_a_daemon_consumer_does_not_keep_the_program():
    code, out, _ = program(
        """
        box = []
        def consume():
            box.append(prefetch(producer))
            next(box[0])
            time.sleep(1000)
        threading.Thread(target=consume, daemon=True).start()
        time.sleep(0.2)
        """
    )
    assert (code, out) == (0, ["finally"])


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("waiting", ["time.sleep(30)", "next(slow)"])
def test_an_interrupt_ends_the_program(waiting):
    code, out, err = program(
        f"""
        def sleeper():
            yield 1
            for _ in range(30):
                time.sleep(0.05)
            yield 2
        slow = prefetch(sleeper)
        next(slow)
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            with prefetch(producer, unused=unused) as items:
                next(items)
                {waiting}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        del slow
        """
    )
    assert (code, err) == (0, "")
    assert out == ["unused 1", "unused 2", "finally", "interrupted"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_another_process_is_refused_and_gives_nothing_back():
    code, out, err = program(
        """
        items = prefetch(producer, unused=unused)
        next(items)
        time.sleep(0.05)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
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
        """
    )
    assert (code, err) == (0, "")
    assert out[0].startswith("refused: prefetched items belong to the process")
    assert out[1] == "1"
    assert out[2:][-1] == "finally"
    assert out[2:-1] in (["unused 2"], ["unused 2", "unused 3"])
