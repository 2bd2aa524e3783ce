"""``jaxdp audit`` on the command line."""

import json
from types import SimpleNamespace

import pytest

from jaxdp import accounting as acc
from jaxdp.cli import main


def run(capsys, *arguments):
    try:
        main(["audit", *arguments])
        status = 0
    except SystemExit as stop:
        status = stop.code
    return status, capsys.readouterr()


def test_an_audit_prints_three_numbers_and_writes_its_files(capsys, tmp_path):
    status, shown = run(
        capsys,
        "--algorithm",
        "dp-sgd",
        "--sampling",
        "full_batch",
        "--steps",
        "2",
        "--runs",
        "400",
        "--seed",
        "1",
        "--json",
        "--out",
        str(tmp_path / "a"),
    )
    row = json.loads(shown.out)
    assert status in (0, None)
    assert row["audited"] < row["proven"]
    assert row["claimed"] is None
    assert row["noise"].startswith("noise: as charged (26 tests, smallest p ")
    assert not row["noise_refuted"]
    assert json.loads((tmp_path / "a" / "audit.json").read_text()) == row
    assert (tmp_path / "a" / "roc.png").stat().st_size > 10_000


def test_random_allocation_is_audited(capsys):
    arguments = ("--steps", "4", "--noise-multiplier", "0.5", "--delta", "0.01", "--seed", "1")
    status, shown = run(
        capsys, "--sampling", "allocation", *arguments, "--runs", "150", "--json"
    )  # fmt: skip
    row = json.loads(shown.out)
    assert status in (0, None)
    event = acc.RandomAllocation(acc.Gaussian(0.5), 4)
    assert row["proven"] == acc.epsilon(event, 0.01).upper
    assert 0 < row["audited"] < row["proven"]
    assert not row["broken"]


def test_a_run_of_a_sampling_with_other_relations_is_refused(capsys, monkeypatch):
    """A shuffled run, say: its relations are replace_one and replace_special."""
    config = SimpleNamespace(relation="replace_special", canaries=0, sampling="shuffle")
    monkeypatch.setattr("jaxdp.cli.audit._config", lambda run: config)
    monkeypatch.setattr("jaxdp.cli.audit._of_blocks", lambda run, algorithm: None)
    status, shown = run(capsys, "a-run")
    assert status == 2
    assert "under add_or_remove_one to be audited, got replace_special" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--algorithm", "magic"), "algorithm must be one of"),
        (("nowhere",), "run must be the folder of a finished run"),
        (("nowhere", "--algorithm", "dp-sgd"), "algorithm must not be given with a run"),
        (("--runs", "0"), "runs must be a whole number"),
        (("--confidence", "1"), "confidence must be above 0 and below 1"),
        (("--steps", "0"), "steps must be a whole number"),
        (("--delta", "0"), "delta must be a finite number above 0"),
        (("--sampling", "shuffle"), "'shuffle' is not one of"),
        (("--sampling", "truncated_poisson"), "'truncated_poisson' is not one of"),
        (("--sampling", "fixed_size"), "'fixed_size' is not one of"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message):
    status, shown = run(capsys, *arguments)
    assert status == 2
    assert message in shown.err
    assert shown.err.count("\n") == 1
