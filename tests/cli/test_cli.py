import functools
import itertools
import json
import re
import shutil
import subprocess
import sys
import types

import flax.serialization
import numpy as np
import pytest
from click.testing import CliRunner

from jaxdp import data
from jaxdp.cli import app, main
from jaxdp.ledger import Ledger
from jaxdp.optimizers import registry
from jaxdp.report.schema import AuditRow
from jaxdp.runs import RunDirectory
from jaxdp.runs import run as run_module
from jaxdp.runs.audit import into_report

SMALL = "train --model logistic --steps 6 --epsilon 2 --batch-size 200 --eval-every 2".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "run"
    result = CliRunner().invoke(app, [*SMALL, "--out", str(folder)], catch_exceptions=False)
    assert result.exit_code == 0
    return folder, result.output


def public(folder):
    """What is published of a run, without figures of test examples, as the accuracy beside it."""
    parts = [p.read_text() for p in folder.iterdir() if p.suffix in (".json", ".md", ".jsonl")]
    return "".join(parts).replace("test_loss", "")


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def test_a_run_leaves_its_report(run):
    folder, output = run
    report = report_of(folder)
    guarantee = report["guarantee"]
    assert 0 < guarantee["epsilon"] <= 2
    assert guarantee["relation"] == "add_or_remove_one"
    assert guarantee["releases"] == 6
    assert report["label"] is None
    assert [row["step"] for row in report["history"]] == [2, 4, 6]
    for name in ("accuracy_and_epsilon.png", "update_norm.png"):
        assert (folder / name).read_bytes()[:4] == b"\x89PNG"
    page = (folder / "report.md").read_text()
    for part in ("one record added or removed", "6 times a sum", "Outside the guarantee"):
        assert part in page
    assert "test accuracy" in output
    assert "step 6/6" in output


def test_nothing_public_is_computed_from_unnoised_training_data(run):
    folder, _ = run
    for word in ("loss", "gradient_norm", "clipped_fraction", "entropy", "SENSITIVE"):
        assert word not in public(folder)
    names = {"step", "update_norm", "test_accuracy", "test_loss", "epsilon"}
    assert set(report_of(folder)["history"][0]) == names


def test_published_files_are_the_same_bytes_however_long_the_run_took(tmp_path, monkeypatch):
    """A step takes as long as its draw is large: time would tell of the private data."""
    published, said = [], []
    for number, tick in enumerate((1.0, 12_345.6)):
        clock = types.SimpleNamespace(perf_counter=itertools.count(0.0, tick).__next__)
        monkeypatch.setattr(run_module, "time", clock)
        folder = tmp_path / str(number)
        args = [*SMALL, "--seed", "987654321", "--sensitive", "--out", str(folder)]
        said.append(CliRunner().invoke(app, args, catch_exceptions=False).output)
        files = [path for path in folder.rglob("*") if path.is_file()]
        published.append(
            {path.name: path.read_bytes() for path in files if "secret" not in path.parts}
        )
    assert {"report.json", "report.md", "report.html", "ledger.jsonl"} < set(published[0])
    assert published[0] == published[1]
    assert "12345.6 s for 6 steps (said here only" in said[1]
    # A chosen seed is labelled, and not reported.
    assert "No guarantee against whoever knows the seed" in report_of(folder)["label"]
    assert "987654321" not in public(folder) + said[1]
    assert "no guarantee" in (folder / "SENSITIVE.json").read_text()


def test_an_audit_takes_the_time_out_of_an_older_report(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "older")
    path = folder / "report.json"
    report = {**report_of(folder), "seconds": 777.7, "steps_in_this_sitting": 6}
    path.write_text(json.dumps(report))
    audited = AuditRow(
        **{"what": "this very run, once", "steps": 6, "runs": 1, "confidence": 0.95},
        **{"proven": 2.0, "audited": 0.5, "adversary": "a canary", "verdict": "Nothing."},
    )
    into_report(RunDirectory(folder), audited)
    assert json.loads(path.read_text())["audited"] == audited.to_dict()
    for name in ("report.json", "report.md", "report.html"):
        text = (folder / name).read_text()
        assert "777.7" not in text
        assert "steps_in_this_sitting" not in text


def test_resuming_a_finished_run_changes_nothing(run):
    folder, _ = run
    ledger = Ledger(folder / "ledger.jsonl").entries
    before = report_of(folder)["history"]
    result = CliRunner().invoke(app, ["train", "--out", str(folder), "--resume"])
    assert result.exit_code == 0, result.output
    assert Ledger(folder / "ledger.jsonl").entries == ledger
    assert report_of(folder)["history"] == before


def test_resuming_with_other_options_is_refused(run, capsys):
    out = ["--out", str(run[0])]
    for given, words in (
        (["train", "--resume", "--learning-rate", "0.9"], "learning_rate (0.3 then, 0.9 now)"),
        (SMALL, "pass --resume to continue it"),
    ):
        with pytest.raises(SystemExit) as end:
            main([*given, *out])
        assert end.value.code == 2
        assert words in capsys.readouterr().err


def test_a_dry_run_says_what_it_costs_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxdp.data.load", lambda *a: pytest.fail("the data were read"))
    main([*SMALL, "--dry-run", "--json", "--out", str(tmp_path / "r")])
    row = json.loads(capsys.readouterr().out)
    assert 0 < row["epsilon"] <= 2
    assert row["steps"] == 6
    assert row["seconds"] > row["seconds_to_compile"] > 0
    assert not list(tmp_path.iterdir())


def test_a_dry_run_prints_the_grid_and_its_inequality(capsys):
    main([*SMALL, "--secure-noise", "--dry-run"])
    told = capsys.readouterr().out
    found = re.search(
        r"s = ([\d,]+) from ChaCha20.* gamma = (\S+) clip.* z = (\S+) and d = ([\d,]+),", told
    )
    s, cell, z, d = (float(number.replace(",", "")) for number in found.groups())
    assert 0.998 * s <= z * (1 / cell + d**0.5) <= s * (1 + 1e-2)  # printed with three digits
    main([*SMALL, "--dry-run"])
    assert "gamma" not in capsys.readouterr().out


def test_a_resumed_run_remembers_where_its_data_lie(tmp_path, monkeypatch, capsys):
    """Its last line is its result, and a large delta gets a warning."""
    asked, load = [], data.load
    monkeypatch.setattr(data, "load", lambda name, where: asked.append(where) or load(name))
    out = ["--out", str(tmp_path / "r")]
    main([*SMALL, *out, "--delta", "0.01", "--json", "--data-dir", str(tmp_path / "sets")])
    shown, report = capsys.readouterr(), report_of(tmp_path / "r")
    row = json.loads(shown.out.splitlines()[-1])
    assert row["epsilon"] == report["guarantee"]["epsilon"]
    assert row["test_accuracy"] == report["test_accuracy"]
    assert "seconds" not in row
    assert "jaxdp: warning: delta 0.01 is at least 1/1437" in shown.err
    main(["train", *out, "--resume"])
    main(["train", *out, "--resume", "--data-dir", str(tmp_path / "moved")])
    assert asked == [tmp_path / "sets", tmp_path / "sets", tmp_path / "moved"]


def test_a_file_is_trained_on_reported_and_resumed(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.integers(0, 256, (100, 4, 4)).astype(np.uint8), "y": rng.integers(0, 3, 100)}
    tests = {"x_test": arrays["x"][:20], "y_test": arrays["y"][:20]}
    path, out = str(tmp_path / "mine.npz"), str(tmp_path / "run")

    def train(*arguments):
        return CliRunner().invoke(app, ["train", *arguments])

    own = ("--data", path, "--classes", "3", "--steps", "3")
    np.savez(path, **arrays)
    done = train(*own, "--out", str(tmp_path / "no tests"))
    assert "no test records   proven epsilon" in done.output
    assert "Test accuracy" not in (tmp_path / "no tests/report.html").read_text()
    np.savez(path, **arrays, **tests)
    done = train(*own, "--out", out)
    assert done.exit_code == 0, done.output
    assert "the number of records, 100, is taken from the file and will be published" in done.output
    assert "taken from the file" not in train(*own, "--dataset-size", "90", "--dry-run").output
    report = report_of(tmp_path / "run")
    assert (report["title"], report["levels"]["chance"]) == ("DP-SGD on mine", 1 / 3)
    assert report["command"] == "jaxdp train --data mine.npz --classes 3 --steps 3"
    assert report["config"]["own"] == {"example_shape": [4, 4], "num_classes": 3, "test_size": 20}
    np.savez(path, **{**arrays, **tests, "x": np.zeros((100, 4, 4), np.uint8)})
    assert "the training data changed" in str(train("--resume", "--out", out).exception)


def test_the_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    bunch, found = load_digits(), data.load("digits")
    pixels = np.concatenate([found.train_x, found.test_x])[..., 0]
    np.testing.assert_array_equal(np.round(pixels * 255), np.round(bunch.images * (255 / 16)))
    np.testing.assert_array_equal(np.concatenate([found.train_y, found.test_y]), bunch.target)


def test_training_imports_nothing_slow_that_it_does_not_need():
    code = (
        "import sys, jaxdp.runs, jaxdp.cli.train, jaxdp.cli.launch; from jaxdp import data;"
        "data.load('digits'); print([m for m in "
        "('sklearn', 'scipy.stats', 'matplotlib', 'jaxdp.report') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_export_writes_parameters_and_nothing_else(run, tmp_path):
    folder, _ = run
    target = tmp_path / "params.msgpack"
    result = CliRunner().invoke(app, ["export", str(folder), "--to", str(target)])
    assert result.exit_code == 0, result.output
    exported = flax.serialization.msgpack_restore(target.read_bytes())
    assert set(exported) == {"params"}
    assert exported["params"]["Dense_0"]["kernel"].shape == (64, 10)
    assert all(np.isfinite(leaf).all() for leaf in exported["params"]["Dense_0"].values())


def test_help_shows_an_example():
    for command in ("", "train", "epsilon", "calibrate", "data", "export"):
        result = CliRunner().invoke(app, [*command.split(), "--help"])
        assert result.exit_code == 0
        assert "jaxdp " in result.output, command


def test_data_and_algorithms_and_rows_of_the_queue_are_listed(capsys):
    main(["data", "list"])
    output = capsys.readouterr().out
    assert "digits" in output
    assert "60,000 training" in output
    main(["algorithms"])
    printed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    for name in registry.ALGORITHMS:
        for setting in registry.settings_of(name):
            assert setting in printed[name], name
    main(["reproduce", "list"])
    printed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "mnist-sa-dpsgd" in printed
    assert printed["mnist-sa-dpsgd-as-published"].endswith("98.35 % (SA-DPSGD, Table 1)")
    assert re.search(r" [0-9.]+ h  59.34 % \(SA-DPSGD, Table 1\)$", printed["cifar10-auto-s"])
    assert printed["mnist-sa-dpsgd-as-published-batch-256"].endswith("98.89 % (SA-DPSGD, Table 1)")


def test_an_interrupt_says_how_to_go_on(monkeypatch, capsys, tmp_path):
    def interrupted(config, directory, *args, begun):
        if begun:
            directory.create()
            directory.state_file.write_text("{}")
        raise KeyboardInterrupt

    for begun, words in (
        (False, "nothing was charged"),
        (True, "continue with `jaxdp train --out"),
    ):
        monkeypatch.setattr("jaxdp.cli.launch.launch", functools.partial(interrupted, begun=begun))
        with pytest.raises(SystemExit) as end:
            main(["train", "--out", str(tmp_path / "r")])
        assert end.value.code == 130
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1


def test_python_m_jaxdp():
    out = subprocess.run(
        [sys.executable, "-m", "jaxdp", "--version"], capture_output=True, text=True, check=True
    )
    assert out.stdout.startswith("jaxdp, version")
