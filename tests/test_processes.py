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
from jaxdp.devices import processes
from tests import two_processes
from tests.compiling import with_flags
from tests.mechanisms import sgd_of
from tests.refusing import refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def said(folder):
    """What two processes print, by scenario; with two devices each."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    program = [sys.executable, "-m", "tests.two_processes", port]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options["env"] = with_flags("--xla_force_host_platform_device_count=2")
    started = [subprocess.Popen([*program, str(n), str(folder)], **options) for n in range(2)]
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


def test_two_processes_charge_draw_and_refuse_alike(said):
    """What they find by themselves they assert; a scenario that fails ends both."""
    assert len(said[0]) == 11
    assert said[0] == said[1]


def test_their_model_is_that_of_one_device_to_rounding_and_their_run_goes_on_in_one(said, folder):
    params, steps = two_processes.trained(two_processes.X)
    models = said[0]["models_of_one_seed"]
    for name in ("arrays", "in passes", "on devices"):
        found, charged = models[name]
        assert charged == steps
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-7), found, params)
    for name, mech in (("grid", two_processes.ON_GRID), ("correlated", two_processes.CORRELATED)):
        one, steps = two_processes.trained(two_processes.Read(), mechanism=mech)
        found, charged = models[name]
        assert charged == steps == 4
        # A sum that is rounded to another cell moves the parameters by less.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), found, one)
        assert one != params
    assert models["secret of the system"][0] != params
    assert said[0]["records_one_by_one"] == models["arrays"]
    # A checkpoint that process 0 finds damaged is left out by all; what it showed stays charged.
    _, told = said[0]["a_run_goes_on_where_it_was_and_leaves_out_a_damaged_checkpoint"]
    of = lambda steps: two_processes.MECH.epsilon(steps, 1e-5).upper  # noqa: E731
    assert told == [[6, of(6), [2, 4, 6]], [10, of(10), [2, 4, 6, 8]]]
    shown = jaxdp.Run.open(folder / "run").params  # read on fewer devices than it was written from
    rest = two_processes.run("run", folder, mesh=None)
    np.testing.assert_array_equal(rest.fit(8)["w"], shown["w"])
    rest.fit(10)
    assert [row["step"] for row in rest.history] == [2, 4, 6, 8, 10]
    assert rest.epsilon().upper == of(12)
    assert (folder / "run" / "report.html").exists()


class Service:
    """JAX's key-value store, seen by one of two processes while the other one says nothing."""

    def __init__(self, monkeypatch, index):
        self.told, self.asked = {}, 0
        state = types.SimpleNamespace(client=self, num_processes=2, process_id=index)
        monkeypatch.setattr(processes, "_state", lambda: state)
        monkeypatch.setattr(processes, "count", lambda: 2)

    def key_value_set(self, key, text, allow_overwrite):
        self.told[key] = text

    def blocking_key_value_get(self, key, milliseconds):
        self.asked += 1
        if self.asked > 100:
            raise RuntimeError("it was asked for ever")
        raise RuntimeError("DEADLINE_EXCEEDED: nobody told it")


def test_a_wait_for_process_0_has_an_end_in_words(monkeypatch):
    """Before: a fault in process 0 left the others waiting for an hour, and a test for 500 s."""
    service = Service(monkeypatch, 1)
    monkeypatch.setattr(processes, "PATIENCE", 0.0)
    words = r"process 1 waited 0 s .* \(from process 0/\d+: DEADLINE_EXCEEDED"
    refused(words, processes.from_process_0, lambda: "never called")
    assert service.asked == 1


def test_what_ends_process_0_is_told_to_the_others(monkeypatch):
    for error, told in (
        (ValueError("a full disk"),) * 2,
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ):
        service = Service(monkeypatch, 0)
        with pytest.raises(type(error)):
            processes.from_process_0(lambda error=error: (_ for _ in ()).throw(error))
        (text,) = service.told.values()
        assert json.loads(text) == {"failed": str(told)}
        heard = Service(monkeypatch, 1)
        heard.blocking_key_value_get = lambda key, milliseconds, text=text: text
        refused(f"process 0 cannot go on: {told}", processes.from_process_0, lambda: "never called")


def test_processes_that_nothing_joined_are_refused(monkeypatch):
    """As on a TPU slice without jax.distributed: each would draw, and add noise, by itself."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    mechanism = sgd_of(1.0, 1.0, 20, 200)
    words = "got 2 that were not joined by it"
    refused(words, jaxdp.Secret.of_all_processes, None)
    refused(words, mechanism.sampler, 200)
