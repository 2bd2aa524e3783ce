"""The audited column of the papers' rows."""

import contextlib
import dataclasses
import json
import re

import pytest

from jaxdp.cli import main
from jaxdp.papers import queue
from jaxdp.papers.column import audit_rows, audited_columns
from jaxdp.report.schema import AuditRow
from jaxdp.runs.described import report as build
from tests.runs import small


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A finished row of a short run, and its report."""
    folder = tmp_path_factory.mktemp("rows")
    report = build(small.go(folder / "run", small.config(steps=3, noise_multiplier=0.5)))
    row = queue.Row("short", "digits", {})
    queue.keep(folder / "rows.json", queue.line_of(row, report))
    return folder / "rows.json", row, report


def quiet(name, runs):
    return contextlib.nullcontext(lambda done: None)


def test_a_row_without_an_audit_says_so_and_an_audit_fills_it(kept, tmp_path):
    path, _, _ = kept
    (before,) = json.loads(path.read_text())
    assert before["audited_epsilon"] is None
    assert not re.search(r"\b(seed|secret|entropy)\b", path.read_text())
    results = tmp_path / "rows.json"
    results.write_text(path.read_text())
    # A second run of the row, audited before, stays as it is.
    queue.keep(results, {**before, "run": 2, "audited_epsilon": 0.125, "audited": "before"})
    (filled,) = audit_rows(results, runs=500, seed=1, progress=quiet)
    after, second = json.loads(results.read_text())
    assert after == filled
    assert second["audited_epsilon"] == 0.125
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"audited_epsilon", "audited"}
    assert 0 < after["audited_epsilon"] < after["proven_epsilon"]
    assert after["audited"] == (
        "the same mechanism on a tiny network, 3 steps, 1,000 runs, at 95% confidence"
    )
    assert audit_rows(results, runs=500, progress=quiet) == []


def test_an_audit_of_the_run_itself_is_named_as_such(kept, tmp_path):
    _, row, report = kept
    numbers = {"steps": 3, "runs": 1, "proven": 2.0, "audited": 0.25, "confidence": 0.95}
    audited = AuditRow(what="this very run, once", adversary="a canary", verdict="", **numbers)
    told = dataclasses.replace(report, audited=audited)
    queue.keep(tmp_path / "rows.json", queue.line_of(row, told))
    (line,) = json.loads((tmp_path / "rows.json").read_text())
    assert line["audited_epsilon"] == 0.25
    assert line["audited"] == "this very run, once, 3 steps, 1 run, at 95% confidence"
    assert audited_columns(None) == {"audited_epsilon": None, "audited": None}


def test_rows_that_no_audit_covers_stay_empty(kept, tmp_path):
    path, _, _ = kept
    (row,) = json.loads(path.read_text())
    row["config"]["relation"] = "replace_special"
    results = tmp_path / "rows.json"
    results.write_text(json.dumps([row]))
    assert audit_rows(results, runs=500, progress=quiet) == []


def test_bad_input(tmp_path, capsys):
    (tmp_path / "other.json").write_text('[{"a": 1}]')
    for file, runs, words in (
        ("none.json", 500, "results must be a file of finished rows"),
        ("other.json", 500, "results must hold rows"),
        ("other.json", 0, "runs must be a whole number"),
    ):
        with pytest.raises(ValueError, match=words):
            audit_rows(tmp_path / file, runs=runs, progress=quiet)
    with pytest.raises(SystemExit) as stop:
        main(["audit", "--results", str(tmp_path / "other.json"), "--algorithm", "dp-sgd"])
    assert stop.value.code == 2
    assert "algorithm must not be given with --results" in capsys.readouterr().err
