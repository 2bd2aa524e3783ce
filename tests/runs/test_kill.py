"""SIGKILL at random moments: nothing re-used, nothing taken back, no epsilon lost or gained."""

import json
import os
import random
import signal
import subprocess
import sys

import numpy as np

from jaxdp import accounting as acc
from jaxdp.ledger import Ledger
from jaxdp.runs import RunDirectory

KILLS = 5
STEPS, EVERY = 40, 5


def launch(folder):
    cache = {  # compiling again in each life would be most of the test's time
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    code = [sys.executable, "-m", "tests.runs.small", str(folder), str(STEPS), str(EVERY)]
    return subprocess.Popen(code, stdout=subprocess.PIPE, text=True, env={**os.environ, **cache})


def moves(folder):
    """(step, change of the parameters) of every step that any life took."""
    width = 1 + 650
    rows = np.fromfile(folder.with_suffix(".moves"), np.float32)
    rows = rows[: len(rows) // width * width].reshape(-1, width)
    return rows[:, 0].astype(int), rows[:, 1:]


def test_killed_at_random_moments(tmp_path):
    folder, rng, shown, kills, code = tmp_path / "run", random.Random(1), [], 0, 1
    while code:
        process = launch(folder)
        # By lines, not by time: a slow machine is killed at the same moments.
        last = None if kills >= KILLS else rng.randint(1, 2)
        for line in process.stdout:
            shown.append(json.loads(line))
            last = None if last is None else last - 1
            if last == 0:
                process.send_signal(signal.SIGKILL)
        code = process.wait()
        kills += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL)
    assert kills >= 3
    step = acc.PoissonSampled(acc.Gaussian(50.0), 0.2)
    ledger = Ledger(RunDirectory(folder).ledger)
    assert ledger.event == acc.Composed((acc.Repeated(step, STEPS),))
    # What was shown before a kill is what the finished run holds.
    held = json.loads(folder.with_suffix(".history").read_text())
    final = {row["step"]: row for row in held}
    assert sorted(final) == [row["step"] for row in held] == list(range(EVERY, STEPS + 1, EVERY))
    assert len(shown) >= len(held) - KILLS
    assert [row for row in shown if row != final[row["step"]]] == []
    steps, changes = moves(folder)
    assert len(steps) > STEPS  # some were done again
    noises = changes / np.linalg.norm(changes, axis=1, keepdims=True)
    alike = np.abs(noises @ noises.T - np.eye(len(noises)))
    assert alike.max() < 6 / np.sqrt(noises.shape[1])
