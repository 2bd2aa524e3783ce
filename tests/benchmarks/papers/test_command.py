"""``jaxdp reproduce``, by somebody who does not know it: damaged files, wrong folders, interrupts."""

import contextlib
import dataclasses
import json
import os
import re

import pytest

from benchmarks.papers import accepted, queue
from benchmarks.papers.column import audit_rows, audited_columns
from benchmarks.papers.row import Row
from benchmarks.papers.rows import ROWS
from benchmarks.papers.tables import Results
from jaxdp import accounting as acc
from jaxdp import runs
from jaxdp.cli import main
from jaxdp.runs.described import report as build
from jaxdp.runs.report.schema import AuditRow
from tests.refusing import refused
from tests.runs import small
from tests.runs.small import Stop, crash_at

GIVEN = {"model": "logistic", "noise_multiplier": 1.0, "batch_size": 40, "dataset_size": 200}
GIVEN |= {"steps": 4, "eval_every": 2, "physical_batch_size": 16}


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Runs ``jaxdp reproduce`` with a queue of one small row; returns the exit status."""
    monkeypatch.setattr(queue, "ROWS", {"tiny": Row("tiny", "digits", GIVEN)})
    monkeypatch.setattr(queue.data, "load", lambda *_: small.dataset())
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        try:
            main(["reproduce", *arguments])
        except SystemExit as ended:
            return ended.code
        return 0

    return run


PLACES = ("--results", "results.json", "--out", "out")


DAMAGED = {
    '[{"nam': "results must be a JSON file, got results.json",
    '{"a": 1}': "results must be a list of rows",
    "[1]": "results must be a list of rows",
    '[{"proven_epsilon": 3}]': "results must be a list of rows",
}


def test_damaged_results_are_named_before_anything_runs(go, tmp_path, capsys):
    for content, words in DAMAGED.items():
        (tmp_path / "results.json").write_text(content)
        for command in (("status",), ("run", "tiny"), ("run", "--detach", "tiny")):
            assert go(*command, *PLACES) == 2, (content, command)
            assert words in capsys.readouterr().err, (content, command)
            assert not (tmp_path / "out").exists(), (content, command)
    # A row without its columns is named by those that show it.
    (tmp_path / "papers.json").write_text('[{"name": "tiny"}]')
    assert go("status", "--results", "papers.json") == 2
    assert "acceptance_rate" in capsys.readouterr().err
    refused("test_accuracy", Results, tmp_path)
    (tmp_path / "papers.json").write_text("[]")
    (tmp_path / "other.json").write_text("{")
    words = r"results must be a JSON file, got .*other\.json"
    refused(words, Results(tmp_path).read, "other.json")
    # No result, no folder, and files for folders get a line.
    (tmp_path / "results.json").unlink()
    assert go("status", *PLACES) == 0
    assert "no row is finished: there is none in results.json" in capsys.readouterr().err
    assert go("left", "--render-only", "--results-dir", "nowhere", "--to", "pages") == 2
    assert "results-dir must be a folder with result rows, got nowhere" in capsys.readouterr().err
    assert not (tmp_path / "pages").exists()
    (tmp_path / "file").write_text("")
    assert go("run", "tiny", "--out", "file", "--results", "results.json") == 1
    assert "file cannot be written or read" in capsys.readouterr().err
    assert go("run", "--detach", "--out", "file", "--results", "results.json") == 1
    assert go("left", "--results-dir", ".", "--to", "file") == 1
    assert "Traceback" not in capsys.readouterr().err


def test_an_interrupted_row_goes_on_and_says_so(go, tmp_path, capsys, monkeypatch):
    real, seen = queue.start, []

    def interrupted(config, directory, dataset, secret, progress, enough=None):
        def stop(step, row):
            seen.append(step)
            if step == 3:
                raise KeyboardInterrupt

        return real(config, directory, dataset, secret, stop, enough=enough)

    monkeypatch.setattr(queue, "start", interrupted)
    assert go("run", "tiny", *PLACES) != 0
    said = capsys.readouterr().err
    assert "interrupted: rows that are done are in results.json; the same command goes on" in said
    go("status", *PLACES)
    assert "begun, not finished" in capsys.readouterr().out
    assert go("run", "tiny", *PLACES) == 0
    (row,) = json.loads((tmp_path / "results.json").read_text())
    assert row["steps"] == 4
    assert seen == [0, 1, 2, 3]  # the second command went on with it
    go("status", *PLACES)
    assert f" s, {os.cpu_count()} cores, cpu\n" in capsys.readouterr().out
    assert go("run", "tiny", *PLACES) == 0  # nothing is left
    # Again, elsewhere: its line is replaced, and others stay.
    queue.keep(tmp_path / "results.json", {**row, "run": 2})
    queue.keep(tmp_path / "results.json", {**row, "name": "other"})
    assert go("run", "tiny", "--again", *PLACES) == 2
    assert "out must hold no run of a row that is run again" in capsys.readouterr().err
    monkeypatch.setattr(queue, "start", real)
    assert go("run", "tiny", "--again", *PLACES[:3], "anew") == 0
    other, anew = json.loads((tmp_path / "results.json").read_text())
    assert (other["name"], anew["name"], anew["run"]) == ("other", "tiny", 1)
    assert anew["steps_timed"] == 4


def test_a_run_of_another_configuration_does_not_get_the_rows_name(
    go, tmp_path, capsys, monkeypatch
):
    def again(**changes):
        row = Row("tiny", "digits", {**GIVEN, **changes})
        monkeypatch.setattr(queue, "ROWS", {"tiny": row})
        status = go("run", "tiny", *PLACES)
        return status, capsys.readouterr().err

    assert go("run", "tiny", *PLACES) == 0
    (tmp_path / "results.json").unlink()
    status, said = again(noise_multiplier=2.0)
    assert status == 2
    assert "must hold a run of row tiny, got one of another configuration" in said
    assert "noise_multiplier 1.0 instead of 2.0" in said
    assert not (tmp_path / "results.json").exists()
    # That of another accountant, of the same budget, is the row's.
    assert again(noise_multiplier=1.001)[0] == 0
    # What an older version left out counts as its default.
    (tmp_path / "results.json").unlink()
    (kept,) = [path for path in tmp_path.rglob("run.json") if path.parent.name == "secret"]
    row = json.loads(kept.read_text())
    row["config"].pop("average")  # None by default
    kept.write_text(json.dumps(row))
    status, said = again(average=0.9)
    assert status == 2
    assert "with average None instead of 0.9" in said
    kept.write_text(json.dumps({**row, "config": None}))
    status, said = again()
    assert status == 2
    assert "got one of a program" in said


# The audited column of the rows
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


def test_a_row_without_an_audit_says_so_and_an_audit_fills_it(kept, tmp_path, capsys):
    path, _, _ = kept
    (before,) = json.loads(path.read_text())
    assert before["audited_epsilon"] is None
    assert "local_began" not in before  # which AdaDp's rows tell
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
    told = "the same mechanism on a tiny network, 3 steps, 1,000 runs, at 95% confidence"
    assert after["audited"] == told
    assert audit_rows(results, runs=500, progress=quiet) == []
    # An audit of the run itself is named as such.
    _, row, report = kept
    numbers = {"steps": 3, "runs": 1, "proven": 2.0, "audited": 0.25, "confidence": 0.95}
    audited = AuditRow(what="this very run, once", adversary="a canary", verdict="", **numbers)
    told = dataclasses.replace(report, audited=audited)
    queue.keep(tmp_path / "told.json", queue.line_of(row, told))
    (line,) = json.loads((tmp_path / "told.json").read_text())
    assert line["audited_epsilon"] == 0.25
    assert line["audited"] == "this very run, once, 3 steps, 1 run, at 95% confidence"
    assert audited_columns(None) == {"audited_epsilon": None, "audited": None}
    # Rows that no audit covers stay empty.
    path, _, _ = kept
    (row,) = json.loads(path.read_text())
    row["config"]["relation"] = "replace_special"
    results = tmp_path / "rows.json"
    results.write_text(json.dumps([row]))
    assert audit_rows(results, runs=500, progress=quiet) == []
    # Bad input is named.
    (tmp_path / "other.json").write_text('[{"a": 1}]')
    for file, number, words in (
        ("none.json", 500, "results must be a file of finished rows"),
        ("other.json", 500, "results must hold rows"),
        ("other.json", 0, "runs must be a whole number"),
    ):
        refused(words, audit_rows, tmp_path / file, runs=number, progress=quiet)
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "audit", str(tmp_path / "other.json")])
    assert stop.value.code == 2
    assert "results must hold rows" in capsys.readouterr().err
    (tmp_path / "other.json").write_text(path.read_text())
    main(["reproduce", "audit", str(tmp_path / "other.json"), "--runs", "500"])
    assert f"short{' ' * 39}at least " in capsys.readouterr().out


# SA-DPSGD by its paper's protocol: a run ends by its accepted steps, and all it may take is charged
LONG = {**GIVEN, "steps": 30}
STEPS = {"fashion_mnist": 1_157, "mnist": 4_698}


def row(algorithm="sa-dpsgd", number=5):
    return Row("until", "digits", {**LONG, "algorithm": algorithm}, accepted=number)


def whole(row):
    """The epsilon of all steps that a run of the row may take."""
    return acc.epsilon(row.config().total(LONG["steps"]), 1e-5).upper


def test_the_accepted_steps_claim_3_and_one_more_does_not():
    for dataset, number in STEPS.items():
        assert accepted.affordable(3.0, dataset) == number
        assert accepted.claimed(number, dataset) <= 3.0 < accepted.claimed(number + 1, dataset)
    # Equation 4 as printed affords few.
    assert accepted.affordable(3.0, "fashion_mnist", printed=True) == 63
    assert accepted.affordable(3.0, "mnist", printed=True) == 27
    # The rows have the papers' noise and can always reach their number.
    for row in accepted.ROWS:
        config = row.config()
        assert ROWS[row.name] is row
        assert config.noise_multiplier == {"fashion_mnist": 2.15, "mnist": 1.23}[row.dataset]
        assert row.accepted == STEPS[row.dataset]
        assert config.steps == (config.settings["max_rejections"] + 1) * row.accepted


@pytest.mark.parametrize("algorithm", ["sa-dpsgd-as-published", "sa-dpsgd-private"])
def test_a_run_ends_with_its_number_and_is_charged_for_all_it_may_take(tmp_path, algorithm):
    result = queue.run_row(row(algorithm), tmp_path / "r", small.dataset(), small.ignore)
    counts = [shown["accepted"] for shown in result.history]
    assert counts[-1] >= 5 > counts[-2]
    assert result.steps_run == result.history[-1]["step"] < LONG["steps"]
    assert result.ledger.epsilon(1e-5).upper == whole(row(algorithm))
    line = queue.line_of(row(algorithm), build(result))
    assert line["proven_epsilon"] == whole(row(algorithm))
    assert {epsilon for _, epsilon, _ in line["curve"]} == {line["proven_epsilon"]}
    assert (line["steps"], line["accepted"]) == (result.steps_run, counts[-1])


def test_all_is_charged_before_the_first_step_and_an_interrupted_run_goes_on_within_it(tmp_path):
    def go(progress):
        return queue.run_row(row(), tmp_path / "r", small.dataset(), progress)

    for step in (0, 1, 4):  # at the start, in the first block of the history, and after one
        with pytest.raises(Stop):
            go(crash_at(step))
        assert runs.RunDirectory(tmp_path / "r").checked_ledger().steps == LONG["steps"], step
    result = go(small.ignore)
    assert result.history[-1]["accepted"] >= 5
    assert result.ledger.epsilon(1e-5).upper == whole(row())
    # Where releases decide the number of steps, no row tells less.
    assert {told["epsilon"] for told in result.history} == {whole(row())}
    again = go(small.ignore)
    assert (again.steps_run, again.history) == (0, result.history)
    # Nothing un-noised decides.
    seen = []

    def enough(shown):
        seen.append(shown)
        return False

    config = small.config(steps=2, eval_every=1, sensitive=True)
    directory, secret = runs.RunDirectory(tmp_path / "q"), runs.assemble.Secret.new()
    runs.start(config, directory, small.dataset(), secret, small.ignore, enough=enough)
    assert seen
    assert not any("sensitive" in shown for shown in seen)
    # A run that never gets there takes what it was charged for.
    given = {**LONG, "algorithm": "sa-dpsgd", "steps": 4}
    never = dataclasses.replace(row(number=100), given=given)
    result = queue.run_row(never, tmp_path / "n", small.dataset(), small.ignore)
    assert result.history[-1]["step"] == result.ledger.steps == 4
