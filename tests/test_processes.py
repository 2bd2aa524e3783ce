import json
import os
import socket
import subprocess
import sys
import time

import pytest


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def both(module, folder, *arguments, timeout=240):
    """The lines that two processes print, by scenario."""
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(port), str(index), str(folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for index in range(2)
    ]
    until = time.monotonic() + timeout
    # Where one fails, the other would wait for it.
    while time.monotonic() < until and all(p.poll() in (None, 0) for p in started):
        if all(process.poll() == 0 for process in started):
            break
        time.sleep(0.1)
    for process in started:
        process.kill()
    found = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 0], found
    return [dict(map(json.loads, out.splitlines())) for out, _ in found]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return both("tests.two_processes", tmp_path_factory.mktemp("two"))


def test_two_processes_say_the_same(said):
    assert len(said[0]) > 10
    assert said[0] == said[1]


def test_draws_differ_from_step_to_step(said):
    (positions, keys), steps, _ = said[0]["the_draws_and_keys_are_one"]
    assert len({tuple(p) for p in positions}) == len({str(k) for k in keys}) == steps == 3


def test_process_0_wrote_every_charge_once(said):
    _, entries, _ = said[0]["a_file_is_written_once"]
    assert [(e["first_step"], e["steps"]) for e in entries] == [(0, 8)]
    _, steps, begun = said[0]["it_is_opened_again"]
    assert (steps, begun) == (10, 2)


def test_disagreements_are_refused_in_all_processes_before_a_charge(said):
    words, exists = said[0]["other_mechanisms_are_refused"]
    assert words.startswith("mechanism must be the same in every process")
    assert not exists
    assert said[0]["other_secrets_are_refused"].startswith("secret must be the same")
    assert said[0]["other_events_are_refused"]


def test_a_full_disk_of_process_0_stops_both(said):
    refused, _ = said[0]["what_process_0_cannot_write_nobody_draws"]
    assert refused


def test_refusals(said):
    assert "made after jax.distributed.initialize" in said[0]["a_ledger_from_before_is_refused"]
    assert "two releases from one draw" in said[0]["a_step_is_charged_once"]


def test_charges_ahead_stay_and_are_used(said):
    first, second, steps = said[0]["more_are_charged_than_used_and_none_given_back"]
    assert first[0] != second[0]
    assert steps == 8
