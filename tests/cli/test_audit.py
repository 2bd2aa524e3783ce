"""``jaxdp audit`` on the command line."""

import json
from types import SimpleNamespace

from jaxdp import accounting as acc
from jaxdp.cli import main


def run(capsys, command):
    try:
        main(["audit", *command.split()])
        status = 0
    except SystemExit as stop:
        status = stop.code
    return status or 0, capsys.readouterr()


def test_an_audit_prints_three_numbers_and_writes_its_files(capsys, tmp_path):
    options = "--algorithm dp-sgd --sampling full_batch --steps 2 --runs 200 --seed 1 --json"
    status, shown = run(capsys, f"{options} --out {tmp_path}/a")
    row = json.loads(shown.out)
    assert status == 0
    assert row["audited"] < row["proven"]
    assert row["claimed"] is None
    assert row["noise"].startswith("noise: as charged (26 tests, smallest p ")
    assert not row["noise_refuted"]
    assert json.loads((tmp_path / "a" / "audit.json").read_text()) == row
    assert (tmp_path / "a" / "roc.png").stat().st_size > 10_000


def test_random_allocation_is_audited(capsys):
    options = "--steps 4 --noise-multiplier 0.5 --delta 0.01 --seed 1 --runs 150 --json"
    status, shown = run(capsys, f"--sampling allocation {options}")
    row = json.loads(shown.out)
    assert status == 0
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
