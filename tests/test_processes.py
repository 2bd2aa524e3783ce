"""Two processes charge one ledger, draw alike and train one model; what differs is refused."""

import json
import socket
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

import jaxdp
from jaxdp import _processes
from jaxdp import accounting as acc
from tests import two_trainers
from tests.compiling import with_flags


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def both(folder, *which):
    """What two processes print, by scenario; with two devices each."""
    program, port = [sys.executable, "-m", "tests.two_processes"], free_port()
    started = [
        subprocess.Popen(
            [*program, str(port), str(index), str(folder), *which],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=with_flags("--xla_force_host_platform_device_count=2"),
        )
        for index in range(2)
    ]
    until = time.monotonic() + 600
    # Where one fails, the other would wait for it.
    while time.monotonic() < until and all(p.poll() in (None, 0) for p in started):
        if all(process.poll() == 0 for process in started):
            break
        time.sleep(0.1)
    for process in started:
        process.kill()
    found = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 0], found
    # JAX's own lines about its connections are among them.
    said = [[line for line in out.splitlines() if line.startswith('["')] for out, _ in found]
    return [dict(map(json.loads, lines)) for lines in said]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def said(folder):
    return both(folder)


@pytest.fixture(scope="module")
def trained(folder):
    return both(folder, "trainers")


def test_two_processes_say_the_same(said):
    assert len(said[0]) > 10
    assert said[0] == said[1]


def test_two_processes_train_one_model(trained):
    assert len(trained[0]) > 12
    assert trained[0] == trained[1]


def test_draws_differ_from_step_to_step(said):
    (positions, keys), steps, _ = said[0]["the_draws_and_keys_are_one"]
    assert len({tuple(p) for p in positions}) == len({str(k) for k in keys}) == steps == 3


def test_process_0_wrote_every_charge_once(said):
    _, entries, _ = said[0]["a_file_is_written_once"]
    assert [(e["first_step"], e["steps"]) for e in entries] == [(0, 8)]
    _, steps, begun = said[0]["it_is_opened_again"]
    assert (steps, begun) == (10, 2)


def test_a_file_of_many_rows_is_known_to_all(said):
    steps, _ = said[0]["a_long_file_is_told_in_parts"]
    assert steps == 1_201


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
    # Both would add one noise, each to what it computed from records of its own.
    assert said[0]["a_sum_of_one_process_is_refused"] == [True, True, True]
    assert "must be computed in one process" in said[0]["a_projection_is_refused"]


def test_charges_ahead_stay_and_are_used(said):
    first, second, steps = said[0]["more_are_charged_than_used_and_none_given_back"]
    assert first[0] != second[0]
    assert steps == 8


def test_a_ledger_from_text_keeps_its_charges_in_all_processes(said):
    steps, epsilon = said[1]["a_ledger_from_text_keeps_its_charges"]
    assert steps == 5
    assert epsilon == acc.epsilon(acc.Repeated(acc.Gaussian(2.0), 5), 1e-5).upper


def test_their_model_is_that_of_one_device_to_rounding(trained):
    params, steps = two_trainers.trained(two_trainers.X)
    several = trained[0]
    for name in ("arrays_of_the_host", "in_several_passes", "records_on_all_devices"):
        found, charged = several[name]
        assert charged == steps
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-7), found, params)
    for name, mechanism in (
        ("noise_on_a_grid", two_trainers.ON_GRID),
        ("correlated_noise_on_a_grid", two_trainers.CORRELATED),
    ):
        one, steps = two_trainers.trained(two_trainers.Read(), mechanism=mechanism)
        found, charged = several[name]
        assert charged == steps == 4
        # A sum that is rounded to another cell moves the parameters by less.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), found, one)
        assert one != params
    (found, _), few, own = several["records_one_by_one"]
    assert (found, few, own) == (several["arrays_of_the_host"][0], True, True)
    assert several["a_secret_of_the_system"][0] != params


def test_what_differs_or_is_apart_is_refused(trained):
    for name, words in (
        ("no_mesh_is_refused", "mesh must hold devices of all 2 processes"),
        ("a_mesh_of_one_process_is_refused", "mesh must hold devices of all 2 processes"),
        ("other_records_are_refused", "source must be the same in every process"),
        ("a_run_of_other_records_is_refused", "source must be the same in every process"),
        ("canaries_are_refused", "canaries must be 0 in several processes"),
    ):
        assert trained[0][name].startswith(words), name
    for name, words in (
        ("other_parameters_are_refused", "params must be the same"),
        ("other_meshes_are_refused", "mesh must be the same"),
        ("other_physical_batches_are_refused", "physical_batch_size must be the same"),
    ):
        found, steps = trained[0][name]
        assert found.startswith(words), name
        assert steps == 0, name
    assert trained[0]["what_process_0_refuses_stops_all"]
    records, params = trained[0]["other_copies_on_the_mesh_are_refused"]
    assert records.startswith("source must be the same")
    assert params.startswith("params must be the same")


def test_processes_at_different_steps_release_nothing(trained):
    # Else both would add one noise to other sums, or other noises to one.
    found = trained[0]["a_process_that_lost_a_step_releases_nothing"]
    for before, *lost, words in (found[:4], found[4:]):
        assert before
        assert lost == [True, True]
        assert words.startswith("step must be the same in every process")


def test_a_checkpoint_that_process_0_finds_damaged_is_left_out_by_all(trained):
    # What was shown of steps 3 and 4 stays charged.
    assert trained[0]["a_damaged_checkpoint_is_left_out"] == [8, [2, 4, 6]]


def test_a_run_of_two_processes_goes_on_in_one(trained, folder):
    _, steps, epsilon, shown = trained[0]["a_run_goes_on_where_it_was"]
    assert (steps, shown) == (6, [2, 4, 6])
    assert epsilon == two_trainers.MECH.epsilon(6, 1e-5).upper
    rest = two_trainers.run("run", folder, mesh=None)
    rest.fit(8)
    assert [row["step"] for row in rest.history] == [2, 4, 6, 8]
    assert rest.epsilon().upper == two_trainers.MECH.epsilon(8, 1e-5).upper
    assert (folder / "run" / "report.html").exists()


class Service:
    """JAX's key-value store, seen by one of two processes while the other one says nothing."""

    def __init__(self, monkeypatch, index):
        self.told, self.asked = {}, 0
        state = types.SimpleNamespace(client=self, num_processes=2, process_id=index)
        monkeypatch.setattr(_processes, "_state", lambda: state)

    def key_value_set(self, key, text):
        self.told[key] = text

    def blocking_key_value_get(self, key, milliseconds):
        self.asked += 1
        if self.asked > 100:
            raise RuntimeError("it was asked for ever")
        raise RuntimeError("DEADLINE_EXCEEDED: nobody told it")


def test_a_wait_for_process_0_has_an_end_in_words(monkeypatch):
    """Before: a fault in process 0 left the others waiting for an hour, and a test for 500 s."""
    service = Service(monkeypatch, 1)
    monkeypatch.setattr(_processes, "PATIENCE", 0.0)
    with pytest.raises(ValueError, match=r"process 1 waited 0 s .* \(first/\d+: DEADLINE_EXCEEDED"):
        _processes.first(lambda: "never called")
    assert service.asked == 1


@pytest.mark.parametrize("error", [ValueError("a full disk"), KeyboardInterrupt()])
def test_what_ends_process_0_is_told_to_the_others(monkeypatch, error):
    service = Service(monkeypatch, 0)
    with pytest.raises(type(error)):
        _processes.first(lambda: (_ for _ in ()).throw(error))
    (text,) = service.told.values()
    assert json.loads(text) == {"failed": str(error) or "KeyboardInterrupt"}
    heard = Service(monkeypatch, 1)
    heard.blocking_key_value_get = lambda key, milliseconds: text
    with pytest.raises(
        ValueError, match=r"process 0 cannot go on: (a full disk|KeyboardInterrupt)"
    ):
        _processes.first(lambda: "never called")


def test_processes_that_nothing_joined_are_refused(monkeypatch):
    """As on a TPU slice without jax.distributed: each would draw, and add noise, by itself."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    mechanism = jaxdp.dp_sgd(1.0, 1.0, 20, 200)
    for make in (lambda: jaxdp.Secret.of_all_processes(None), lambda: mechanism.sampler(200)):
        with pytest.raises(ValueError, match="got 2 that were not joined by it"):
            make()


def test_another_process_shows_nothing_before_process_0_has_written_it_down(monkeypatch):
    """A rank that went on would show a step whose row a crash of process 0 has not made durable."""
    Service(monkeypatch, 1)
    head = "00" * 16
    shown = [{"rows": [({"shown": step, "stream": "a"}, head)]} for step in (3, 5)]
    messages = [{"rows": [], "head": head, "chained": True}, *shown]
    monkeypatch.setattr(_processes, "hear", lambda key: json.dumps(messages.pop(0)))
    ledger = jaxdp.Ledger()
    ledger.join()
    assert len(messages) == 2
    ledger.show("a", 5)
    assert messages == []
    assert ledger.shown("a") == 5
