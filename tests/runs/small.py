"""A small run for the tests of this room; also a program, to be killed at any moment."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxdp
from jaxdp import data, runs
from jaxdp.ledger.seeds import Secret
from jaxdp.runs.starts import Start
from jaxdp.training.trainer import Trainer


class Stop(Exception):
    """A crash at a chosen step."""


class Killed(BaseException):
    """The process, from outside."""


class Planned(Exception):
    """Raised where the first step would be taken."""


def crash_at(step, how=Stop):
    def progress(now, row):
        if now == step:
            raise how

    return progress


@contextlib.contextmanager
def undrawn():
    """Reports without their plots, which take most of the time that a small report takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxdp.runs.report.plots.save_png", lambda figure, path: None)
        patch.setattr("jaxdp.runs.report.plots.svg_text", lambda figure: "<svg></svg>")
        yield


def dataset(seed=0):
    """Random data in the shape of the digits."""
    rng = np.random.default_rng(seed)
    x = rng.random((300, 8, 8, 1), np.float32)
    y = rng.integers(0, 10, 300).astype(np.int32)
    return data.Dataset(data.specs.spec("digits"), x[:200], y[:200], x[200:], y[200:])


def config(**changes):
    """200 records in steps of 40."""
    given = {"model": "logistic", "noise_multiplier": 1.0, "steps": 12, "batch_size": 40}
    given |= {"dataset_size": 200, "eval_every": 3, "physical_batch_size": 16, **changes}
    return runs.resolve(runs.recipe("digits", **given))


def ignore(step, row):
    """No progress shown."""


def go(folder, cfg, progress=ignore, seed=5, rows=None):
    """Starts or resumes the run in ``folder``."""
    directory = runs.RunDirectory(folder)
    rows = dataset() if rows is None else rows
    if directory.exists():
        return runs.resume(cfg, directory, rows, progress)
    secret = Secret.new() if seed is None else Secret.from_seed(seed)
    return runs.start(cfg, directory, rows, secret, progress)


def crash(folder, cfg, step, **options):
    """The same, until it crashes after the step."""
    try:
        go(folder, cfg, crash_at(step), **options)
    except Stop:
        return
    raise AssertionError(f"no step {step}")


@contextlib.contextmanager
def stopping_before(step, monkeypatch):
    """Ends a run where it would write down that this step is shown; its checkpoint is durable."""
    shows = Start.show

    def stopping(self, now, past):
        if now >= step:
            raise Stop
        return shows(self, now, past)

    with monkeypatch.context() as patched:
        patched.setattr(Start, "show", stopping)
        with pytest.raises(Stop):
            yield


def kept(folder, count=itertools.count()):  # noqa: B008
    """A copy of a run's secrets or checkpoints, as somebody may make one; what puts it back."""
    copy = shutil.copytree(folder, folder.parents[1] / f"kept {next(count)}")

    def put_back():
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)

    return put_back


def planned(folder, cfg, **options):
    """The records that a run would train on, as a start or a resumed start has them."""
    found = []

    def taken(self, start, state, source, *others):
        found.append(np.asarray(jax.tree.leaves(source.arrays)[0]))
        raise Planned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxdp.Run, "_trainer", taken)
        with pytest.raises(Planned):
            go(folder, cfg, **options)
    return found[0]


def outcome(result):
    """Everything that is equal in runs of one seed that were never interrupted."""
    params = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result.params)]
    return params, result.ledger.epsilon(1e-5).upper, result.history


def watched(folder, steps, every):
    """A run whose every move of the parameters is written down, as nobody outside could see it.

    Each line of standard output is a row that was shown. The noise is so large that the moves of
    two steps correlate only if they share it.
    """
    step_with_info, log = Trainer.step_with_info, Path(folder).with_suffix(".moves").open("ab")

    def spied(self, state, batch, return_info=True):
        before = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.params)])
        out = step_with_info(self, state, batch, return_info)
        after = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(out[0].params)])
        log.write(np.concatenate([[out[0].step], after - before]).astype(np.float32).tobytes())
        log.flush()
        return out

    def shown(step, row):
        if row is not None:
            print(json.dumps(row), flush=True)

    Trainer.step_with_info = spied
    options = {"noise_multiplier": 50.0, "momentum": 0.0}
    result = go(folder, config(steps=steps, eval_every=every, **options), shown, None)
    Path(folder).with_suffix(".history").write_text(json.dumps(result.history))


if __name__ == "__main__":  # a life after another, each in a fork: what they import is the same
    code = -signal.SIGKILL
    while code == -signal.SIGKILL:
        if not os.fork():
            print(os.getpid(), flush=True)
            watched(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.wait()[1])
    sys.exit(code)
