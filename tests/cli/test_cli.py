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
from jaxdp.report.schema import AuditRow
from jaxdp.runs import RunDirectory
from jaxdp.runs import run as run_module
from jaxdp.runs.audit import into_report

SMALL = [
    "train",
    "--dataset",
    "digits",
    "--model",
    "logistic",
    "--steps",
    "6",
    "--epsilon",
    "2",
    "--batch-size",
    "200",
    "--eval-every",
    "2",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "run"
    result = CliRunner().invoke(app, [*SMALL, "--out", str(folder)], catch_exceptions=False)
    assert result.exit_code == 0
    return folder, result.output


def test_a_run_leaves_its_report(run):
    folder, output = run
    report = json.loads((folder / "report.json").read_text())
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
    public = "".join(
        p.read_text() for p in folder.iterdir() if p.suffix in (".json", ".md", ".jsonl")
    )
    # Of test examples, as the accuracy beside it.
    public = public.replace("test_loss", "")
    for word in ("loss", "gradient_norm", "clipped_fraction", "entropy", "SENSITIVE"):
        assert word not in public
    report = json.loads((folder / "report.json").read_text())
    assert set(report["history"][0]) == {
        "step",
        "update_norm",
        "test_accuracy",
        "test_loss",
        "epsilon",
    }


def test_published_files_are_the_same_bytes_however_long_the_run_took(tmp_path, monkeypatch):
    """A step takes as long as its draw is large: time would tell of the private data."""
    published, said = [], []
    for number, tick in enumerate((1.0, 12_345.6)):
        clock = types.SimpleNamespace(perf_counter=itertools.count(0.0, tick).__next__)
        monkeypatch.setattr(run_module, "time", clock)
        folder = tmp_path / str(number)
        args = [*SMALL, "--seed", "3", "--sensitive", "--out", str(folder)]
        said.append(CliRunner().invoke(app, args, catch_exceptions=False).output)
        files = [path for path in folder.rglob("*") if path.is_file()]
        published.append(
            {path.name: path.read_bytes() for path in files if "secret" not in path.parts}
        )
    assert {"report.json", "report.md", "report.html", "ledger.jsonl"} < set(published[0])
    assert published[0] == published[1]
    assert "12345.6 s for 6 steps (said here only" in said[1]


def test_an_audit_takes_the_time_out_of_an_older_report(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "older")
    path = folder / "report.json"
    report = {**json.loads(path.read_text()), "seconds": 777.7, "steps_in_this_sitting": 6}
    path.write_text(json.dumps(report))
    audited = AuditRow(
        what="this very run, once",
        steps=6,
        runs=1,
        confidence=0.95,
        proven=2.0,
        audited=0.5,
        adversary="a canary",
        verdict="Nothing contradicts it.",
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
    before = json.loads((folder / "report.json").read_text())["history"]
    result = CliRunner().invoke(app, ["train", "--out", str(folder), "--resume"])
    assert result.exit_code == 0, result.output
    assert Ledger(folder / "ledger.jsonl").entries == ledger
    assert json.loads((folder / "report.json").read_text())["history"] == before


def test_resuming_with_other_options_is_refused(run, capsys):
    folder, _ = run
    with pytest.raises(SystemExit) as end:
        main(["train", "--out", str(folder), "--resume", "--learning-rate", "0.9"])
    assert end.value.code == 2
    assert "changed: learning_rate (0.3 then, 0.9 now)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*SMALL, "--out", str(folder)])
    assert "pass --resume to continue it" in capsys.readouterr().err


def test_the_last_line_is_the_result_and_a_large_delta_gets_a_warning(tmp_path, capsys):
    main([*SMALL, "--delta", "0.01", "--json", "--out", str(tmp_path / "r")])
    shown = capsys.readouterr()
    row = json.loads(shown.out.splitlines()[-1])
    report = json.loads((tmp_path / "r/report.json").read_text())
    assert row["epsilon"] == report["guarantee"]["epsilon"]
    assert row["test_accuracy"] == report["test_accuracy"]
    assert "seconds" not in row
    assert "jaxdp: warning: delta 0.01 is at least 1/1437" in shown.err


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
    asked, load = [], data.load
    monkeypatch.setattr(data, "load", lambda name, where: asked.append(where) or load(name))
    out = ["--out", str(tmp_path / "r")]
    main([*SMALL, *out, "--data-dir", str(tmp_path / "sets")])
    main(["train", *out, "--resume"])
    main(["train", *out, "--resume", "--data-dir", str(tmp_path / "moved")])
    assert asked == [tmp_path / "sets", tmp_path / "sets", tmp_path / "moved"]


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


def test_a_chosen_seed_is_labelled_and_not_reported(tmp_path):
    args = [*SMALL, "--out", str(tmp_path / "r"), "--seed", "987654321", "--sensitive"]
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    report = (tmp_path / "r/report.json").read_text()
    assert "No guarantee against whoever knows the seed" in json.loads(report)["label"]
    public = report + (tmp_path / "r/report.md").read_text() + result.output
    assert "987654321" not in public
    assert "no guarantee" in (tmp_path / "r/SENSITIVE.json").read_text()


@pytest.mark.parametrize(
    "command", [[], ["train"], ["epsilon"], ["calibrate"], ["data"], ["export"]]
)
def test_help_shows_an_example(command):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "jaxdp " in result.output


def test_data_list():
    output = CliRunner().invoke(app, ["data", "list"]).output
    assert "digits" in output
    assert "60,000 training" in output


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
