"""Signals while a checkpoint is written: one line, a status, and nothing that is lost."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

from jaxdp import _interrupts
from jaxdp.cli import failures, main


def begin(folder):
    """The program, once it writes its second checkpoint."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.interrupted", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    while not (folder / "writing").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    return process


def ended(process):
    """(status, lines on stderr that tell neither of progress nor of the wait)."""
    out, err = process.communicate()
    assert "accuracy" not in out
    lines = [line for line in err.splitlines() if "finishing a checkpoint" not in line]
    return process.returncode, [line for line in lines if not line.startswith("step ")]


def resumed(folder, capsys):
    main(["train", "--out", str(folder / "run"), "--resume", "--json"])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_first_signal_lets_the_checkpoint_be_finished(tmp_path, capsys):
    process = begin(tmp_path)
    process.send_signal(signal.SIGTERM)
    (tmp_path / "go on").touch()
    status, (line,) = ended(process)
    assert status == 143
    assert "the ledger and the checkpoint of step 4 are safe; continue with `jaxdp train" in line
    assert resumed(tmp_path, capsys)["releases"] == 6


def test_the_second_signal_ends_at_once(tmp_path, capsys):
    process = begin(tmp_path)
    process.send_signal(signal.SIGINT)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)  # signals that are not yet taken would be merged
        time.sleep(0.05)
    status, (line,) = ended(process)
    assert status == 130
    assert "checkpoint of step 2 are safe" in line
    assert resumed(tmp_path, capsys)["releases"] == 6
    assert not list((tmp_path / "run/secret/checkpoints").glob("*tmp*"))


def test_the_last_words_are_said_once_whoever_sees_the_second_signal(monkeypatch):
    said, exits = [], []
    both = threading.Barrier(2)

    def words():
        said.append("interrupted")
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # where two say them, both are here
        return ""

    guard = _interrupts._Guard(words)
    monkeypatch.setattr(_interrupts, "_say", lambda text: None)
    monkeypatch.setattr(_interrupts.os, "_exit", exits.append)
    threads = [threading.Thread(target=guard.leave, args=(2,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == ["interrupted"]
    assert exits == [130]


def test_a_folder_in_which_no_run_had_begun_is_told_as_such(tmp_path):
    assert failures._safe(tmp_path) == f"no run had begun in {tmp_path}, and nothing was charged"
