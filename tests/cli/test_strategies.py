"""`jaxdp train --strategy`: the run, its report, and going on."""

import json

import pytest
from click.testing import CliRunner

from jaxdp.cli import app

SMALL = ("--model", "logistic", "--steps", "8", "--batch-size", "200", "--epsilon", "3")


def train(*args):
    return CliRunner().invoke(app, ["train", *SMALL, *(str(arg) for arg in args)])


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    found = {}
    for name in ("banded", "buffered"):
        out = tmp_path_factory.mktemp("cli") / name
        result = train("--strategy", name, "--bands", 3, "--out", out)
        assert result.exception is None, result.output
        page = " ".join((out / "report.md").read_text().split())
        found[name] = (out, json.loads((out / "report.json").read_text()), page, result.output)
    return found


def test_noise_on_a_grid_is_correlated_too(tmp_path):
    out = tmp_path / "grid"
    result = train("--strategy", "banded", "--bands", 3, "--secure-noise", "--out", out)
    assert result.exception is None, result.output
    page = " ".join((out / "report.md").read_text().split())
    for words in (
        "a banded Toeplitz strategy of 3 bands",
        "what a step takes back of earlier noise is an integer too",
        "on an integer grid: the noise is within",
        "integers of s = 522,246 from ChaCha20",
        "cells of gamma = ",
    ):
        assert words in page
    assert "Floating-point attacks" not in page
    assert json.loads((out / "report.json").read_text())["guarantee"]["epsilon"] <= 3
    result = CliRunner().invoke(app, ["train", "--resume", "--out", str(out)])
    assert result.exception is None, result.output
    result = train("--strategy", "buffered", "--secure-noise", "--out", tmp_path / "no")
    assert result.exit_code
    assert "strategy must be one of banded" in str(result.exception)
    assert not (tmp_path / "no").exists()


def test_the_report_says_what_the_noise_multiplier_is_relative_to(reported):
    for name, words in [
        ("banded", "one draw of a record can move what the strategy makes of the run's sums"),
        ("buffered", "one record, in all of its steps together, can move what the strategy makes"),
    ]:
        _, report, page, _ = reported[name]
        assert words in page
        assert "not to be compared with one" in page
        assert "the whole run of 8 steps is one event, charged whole with its first step" in page
        assert "of what one record can add" not in page
        assert "1 times a run" not in page
        assert report["guarantee"]["epsilon"] <= 3
        assert {row["epsilon"] for row in report["history"]} == {report["guarantee"]["epsilon"]}


def test_the_report_names_strategy_sampling_and_relation(reported):
    _, report, page, said = reported["banded"]
    assert "a banded Toeplitz strategy of 3 bands" in page
    assert "every record is in one of 3 groups" in page
    guarantee = report["guarantee"]
    assert (guarantee["sampling"], guarantee["relation"]) == ("cyclic_poisson", "add_or_remove_one")
    assert "cyclic_poisson sampling" in said
    _, report, page, _ = reported["buffered"]
    assert "a buffered Toeplitz strategy (BLT) of 3 buffers" in page
    assert "every pass takes the records in one and the same order" in page
    assert "one record replaced by a null record" in page
    guarantee = report["guarantee"]
    assert (guarantee["sampling"], guarantee["relation"]) == ("fixed_order", "replace_special")


def test_a_finished_run_is_resumed_with_its_strategy(reported):
    out, report, _, _ = reported["banded"]
    again = CliRunner().invoke(app, ["train", "--resume", "--out", str(out)])
    assert again.exception is None, again.output
    after = json.loads((out / "report.json").read_text())
    assert after["history"] == report["history"]
    assert "--strategy banded --bands 3" in after["command"]
    other = CliRunner().invoke(app, ["train", "--resume", "--out", str(out), "--bands", "2"])
    assert "changed: bands (3 then, 2 now)" in str(other.exception)


def test_a_dry_run_says_what_it_costs():
    found = train("--strategy", "banded", "--bands", 3, "--dry-run", "--json")
    answer = json.loads(found.stdout.splitlines()[-1])
    assert 2.99 < answer["epsilon"] <= 3
    assert answer["steps"] == 8


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--strategy", "banded", "--sampling", "poisson"), "sampling must be one of cyclic_poi"),
        (("--strategy", "square_root", "--relation", "add_or_remove_one"), "relation must be one"),
        (("--strategy", "banded", "--canaries", 5), "canaries must be 0 with a strategy"),
        (("--bands", 2), "bands must be given with a strategy only, got 2"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(tmp_path, args, words):
    found = train("--out", tmp_path / "r", *args)
    assert words in str(found.exception)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("name", ["banded", "buffered"])
def test_a_run_is_audited_under_its_own_relation(reported, name):
    out, *_ = reported[name]
    result = CliRunner().invoke(
        app, ["audit", str(out), "--runs", "200", "--seed", "1", "--json", "--steps", "8"]
    )
    assert result.exception is None, result.output
    row = json.loads(result.output.splitlines()[-1])
    assert row["proven"] <= 3
    assert not row["broken"]
    assert not row["noise_refuted"]
