"""A run's folder that is opened again: what reads it changes nothing of it."""

import json
import shutil

import jax.numpy as jnp
import numpy as np

import jaxdp
from tests.refusing import refused
from tests.runs.own import MECHANISM, again, run


def contents(folder, secret=True):
    """Every file's bytes and when it was written."""
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (secret or folder / "secret" not in path.parents)
    }


def evaluated(folder, **options):
    one = run(folder, evaluate=lambda params: {"accuracy": 0.5}, report=True, **options)
    return one, one.fit()


def test_a_finished_run_is_not_changed_by_being_opened(tmp_path):
    """Before: page and history became those of the program that looked (case 16)."""
    folder = tmp_path / "r"
    one, params = evaluated(folder, about={"Title": "Mine"})
    before = contents(folder, secret=False)
    other = run(folder, report=True, about={"Title": "Theirs"})
    np.testing.assert_array_equal(other.fit()["w"], params["w"])
    assert other.history == one.history
    assert other.result.steps_run == 0
    refused(r"at least the 12 .* finished, got 5: .*Run.open\(", other.fit, 5)
    assert contents(folder, secret=False) == before
    # Without its page it writes one; on purpose another takes its place, and says so.
    (folder / "report.json").unlink()
    other.fit()
    report = json.loads((folder / "report.json").read_text())
    assert report["title"] == "Theirs"
    assert "Rendered anew" not in str(report)
    one.report()
    report = json.loads((folder / "report.json").read_text())
    assert report["title"] == "Mine"
    assert "by run.report()" in str(report["facts"])


def test_a_folder_is_read_without_model_and_changes_nothing(tmp_path):
    """Before, while, and after somebody trains there; also what is left without ``secret/``."""
    folder, seen = tmp_path / "r", []

    def look(step, row):
        if row is not None:
            found = jaxdp.Run.open(folder)
            steps = [row["step"] for row in found.history]
            seen.append((row["step"], steps[-1], found.epsilon().upper <= 3.0))

    one = run(folder, progress=look, report=True)
    params = one.fit()
    assert seen == [(step, step, True) for step in (3, 6, 9, 12)]
    before = contents(folder)
    found = jaxdp.Run.open(folder)
    np.testing.assert_array_equal(found.params["w"], params["w"])
    assert (found.history, found.report["epochs"], found.audit) == (one.history, 2.4, None)
    assert found.epsilon().upper == one.epsilon().upper == MECHANISM.epsilon(12, 1e-3).upper
    assert found.epsilon(1e-5).upper == one.epsilon(1e-5).upper
    assert found.unverified() == one.unverified()
    assert contents(folder) == before

    shutil.rmtree(folder / "secret")
    found = jaxdp.Run.open(folder)
    assert found.epsilon().upper == MECHANISM.epsilon(12, 1e-3).upper
    assert "secret/ is not there" in found.unverified()[-1]
    refused("must hold a run", lambda: found.params)
    refused("folder must hold a run of jaxdp.Run", jaxdp.Run.open, tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_run_with_canaries_and_one_that_began_are_read_too(tmp_path, six):
    found = jaxdp.Run.open(six)
    kept = again(six).fit(6)
    np.testing.assert_array_equal(found.params["w"], kept["w"])
    assert found.report is None
    (tmp_path / "q").mkdir()
    one = run(tmp_path / "q", loss=lambda params, x, y: jnp.sum(params["w"]))
    one.directory.create()
    refused("folder must hold a run", jaxdp.Run.open, tmp_path / "q")
