"""SIGKILL at twenty random moments: what is resumed equals what was never stopped, bit by bit."""

import os
import random
import signal
import subprocess
import sys
import time

from jaxdp import runs
from tests.runs import small

KILLS = 20
STEPS, EVAL_EVERY = 400, 20
DEADLINE = 240  # seconds, for a machine that is far too busy


def launch(folder):
    code = [sys.executable, "-m", "tests.runs.small", str(folder), str(STEPS), str(EVAL_EVERY)]
    cache = {  # compiling again in each of the twenty lives would be most of the test's time
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    env = {**os.environ, **cache}
    return subprocess.Popen(code, stdout=subprocess.PIPE, text=True, env=env)


def lifetime(folder):
    """Seconds from start to the first and the last step of an uninterrupted process."""
    began, process, first = time.monotonic(), launch(folder), None
    for _ in process.stdout:
        first = first or time.monotonic() - began
    assert process.wait() == 0
    return first, time.monotonic() - began


def test_killed_at_random_moments(tmp_path):
    # Run once undisturbed, in a process like those that are killed.
    lifetime(tmp_path / "warm")
    first, whole = lifetime(tmp_path / "whole")
    expected = result_of(tmp_path / "whole")
    assert result_of(tmp_path / "warm") == expected
    rng, kills, finished, began = random.Random(1), 0, 0, time.monotonic()
    folder = tmp_path / "killed0"
    while kills < KILLS or not finished:
        assert time.monotonic() - began < DEADLINE
        process = launch(folder)
        # Half of the kills while it starts up and restores, the others while it trains.
        late = first + rng.random() * (whole - first)
        time.sleep(rng.uniform(0.3, 1.0) * first if rng.random() < 0.4 else late)
        process.send_signal(signal.SIGKILL)
        done = process.wait() == 0
        process.stdout.close()
        kills += not done
        if done or complete(folder):
            assert result_of(folder) == expected
            finished += 1
            folder = tmp_path / f"killed{finished}"
    assert finished >= 1


def complete(folder):
    return os.path.isdir(runs.RunDirectory(folder).checkpoints / str(STEPS))


def result_of(folder):
    """Resuming a finished run takes no step and returns what was released."""
    result = small.go(folder, small.config(steps=STEPS, eval_every=EVAL_EVERY))
    assert result.steps_run == 0
    return small.outcome(result, folder)
