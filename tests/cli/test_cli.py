import json
import subprocess
import sys

import flax.serialization
import numpy as np
import pytest
from click.testing import CliRunner

from jaxdp.cli import app, main

SMALL = [
    "train", "--dataset", "digits", "--model", "logistic", "--steps", "6", "--epsilon", "2",
    "--batch-size", "200", "--eval-every", "2",
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
    for word in ("loss", "gradient_norm", "clipped_fraction", "entropy", "SENSITIVE"):
        assert word not in public
    report = json.loads((folder / "report.json").read_text())
    assert set(report["history"][0]) == {"step", "update_norm", "test_accuracy", "epsilon"}


def test_resuming_a_finished_run_changes_nothing(run):
    folder, _ = run
    ledger = (folder / "ledger.jsonl").read_bytes()
    before = json.loads((folder / "report.json").read_text())["history"]
    result = CliRunner().invoke(app, ["train", "--out", str(folder), "--resume"])
    assert result.exit_code == 0, result.output
    assert (folder / "ledger.jsonl").read_bytes() == ledger
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


@pytest.mark.parametrize("command", [[], ["train"], ["epsilon"], ["calibrate"], ["data"], ["export"]])
def test_help_shows_an_example(command):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "jaxdp " in result.output


def test_data_list():
    output = CliRunner().invoke(app, ["data", "list"]).output
    assert "digits" in output
    assert "60,000 training" in output


def test_an_interrupt_says_how_to_go_on(monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxdp.cli.train._run", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["train"])
    assert end.value.code == 130
    assert "--resume" in capsys.readouterr().err


def test_python_m_jaxdp():
    out = subprocess.run(
        [sys.executable, "-m", "jaxdp", "--version"], capture_output=True, text=True, check=True
    )
    assert out.stdout.startswith("jaxdp, version")
