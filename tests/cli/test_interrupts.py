"""Signals while a checkpoint is written: one line, a status, and nothing that is lost."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from jaxdp.cli import main
from jaxdp.ledger import interrupts
from jaxdp.runs.failures import safe_in_words
from tests.runs.small import undrawn


def alive(process, number=0):
    """Whether it is there; sends it a signal."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
        return True
    return False


def test_the_first_signal_lets_the_checkpoint_be_finished_and_the_second_ends_at_once(
    tmp_path, capsys
):
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, "-m", "tests.cli.interrupted", *map(str, folders)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        for folder in folders:
            process = int(program.stdout.readline())
            while not (folder / "writing").exists():
                assert alive(process), (folder / "err").read_text()
                time.sleep(0.01)
            if folder.name == "first":
                os.kill(process, signal.SIGTERM)
                (folder / "go on").touch()
            while folder.name == "second" and alive(process, signal.SIGINT):
                time.sleep(0.05)  # signals that are not yet taken would be merged
            status = int(program.stdout.readline())
            assert "accuracy" not in (folder / "out").read_text()
            err = (folder / "err").read_text().splitlines()
            # But for lines that tell of progress or of the wait.
            (line,) = (x for x in err if "finishing a checkpoint" not in x and x[:5] != "step ")
            assert status == (143 if folder.name == "first" else 130)
            step = 4 if folder.name == "first" else 2
            assert f"checkpoint of step {step} are safe; continue with `jaxdp train" in line
    for folder in folders:
        with undrawn():
            main(["train", "--out", str(folder / "run"), "--resume", "--json"])
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["releases"] == 6
    assert not list((tmp_path / "second/run/secret/checkpoints").glob("*tmp*"))


def test_the_last_words_are_said_once_whoever_sees_the_second_signal(tmp_path, monkeypatch):
    said, exits = [], []
    both = threading.Barrier(2)

    def words():
        said.append("interrupted")
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # where two say them, both are here
        return ""

    guard = interrupts._Guard(words)
    monkeypatch.setattr(interrupts, "_say", lambda text: None)
    monkeypatch.setattr(interrupts.os, "_exit", exits.append)
    threads = [threading.Thread(target=guard.leave, args=(2,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (said, exits) == (["interrupted"], [130])
    # Where no run had begun, that is said; before: status 130.
    ending = lambda *_: signal.raise_signal(signal.SIGTERM)  # noqa: E731
    monkeypatch.setattr("jaxdp.cli._Lazy.get_command", ending)
    with pytest.raises(SystemExit) as ended:
        main(["train"])
    assert ended.value.code == 143
    assert safe_in_words(tmp_path) == f"no run had begun in {tmp_path}, and nothing was charged"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_in_a_callback_is_raised_at_the_next_checkpoint():
    class Array:
        """What is deleted; its callback is where the signal arrives."""

    with interrupts.guarded(str):
        array = Array()
        weakref.finalize(array, signal.raise_signal, signal.SIGTERM)
        del array  # Python prints what a callback raises, and goes on
        # Never while an exception is on its way, which the end of a run waits for.
        with contextlib.suppress(OSError):
            try:
                raise OSError
            finally:
                with interrupts.deferred():
                    pass
        written = []
        with pytest.raises(interrupts.Terminated), interrupts.deferred():
            written.append("a checkpoint")
        assert not written
