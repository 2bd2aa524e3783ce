"""``jaxdp audit`` on the command line."""

import json

import pytest

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
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message):
    status, shown = run(capsys, *arguments)
    assert status == 2
    assert message in shown.err
    assert shown.err.count("\n") == 1
