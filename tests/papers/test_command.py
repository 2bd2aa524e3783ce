"""``jaxdp reproduce``, by somebody who does not know it: damaged files, wrong folders, interrupts."""

import json

import pytest

from jaxdp.cli import main
from jaxdp.papers import queue
from jaxdp.papers.row import Row
from jaxdp.papers.tables import Results
from tests.runs import small

GIVEN = {
    "model": "logistic",
    "noise_multiplier": 1.0,
    "batch_size": 40,
    "dataset_size": 200,
    "steps": 4,
    "eval_every": 2,
    "physical_batch_size": 16,
}


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


def test_a_row_without_its_columns_is_named_by_those_that_show_it(go, tmp_path, capsys):
    (tmp_path / "papers.json").write_text('[{"name": "tiny"}]')
    assert go("status", "--results", "papers.json") == 2
    assert "acceptance_rate" in capsys.readouterr().err
    with pytest.raises(ValueError, match="test_accuracy"):
        Results(tmp_path)
    (tmp_path / "papers.json").write_text("[]")
    (tmp_path / "other.json").write_text("{")
    with pytest.raises(ValueError, match=r"results must be a JSON file, got .*other\.json"):
        Results(tmp_path).read("other.json")


def test_no_result_is_said_so(go, capsys):
    assert go("status", *PLACES) == 0
    assert "no row is finished: there is none in results.json" in capsys.readouterr().err


def test_a_page_of_no_folder_is_not_written_over_one(go, tmp_path, capsys):
    assert go("left", "--render-only", "--results-dir", "nowhere", "--to", "pages") == 2
    assert "results-dir must be a folder with result rows, got nowhere" in capsys.readouterr().err
    assert not (tmp_path / "pages").exists()


def test_files_where_folders_should_be_get_a_line(go, tmp_path, capsys):
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
    assert go("run", "tiny", *PLACES) == 0  # nothing is left


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


def test_what_an_older_version_left_out_counts_as_its_default(go, tmp_path, capsys, monkeypatch):
    assert go("run", "tiny", *PLACES) == 0
    (tmp_path / "results.json").unlink()
    (kept,) = [path for path in tmp_path.rglob("run.json") if path.parent.name == "secret"]
    row = json.loads(kept.read_text())
    row["config"].pop("average")  # None by default
    kept.write_text(json.dumps(row))
    monkeypatch.setattr(queue, "ROWS", {"tiny": Row("tiny", "digits", {**GIVEN, "average": 0.9})})
    assert go("run", "tiny", *PLACES) == 2
    assert "with average None instead of 0.9" in capsys.readouterr().err
    row["config"] = None
    kept.write_text(json.dumps(row))
    assert go("run", "tiny", *PLACES) == 2
    assert "got one of a program" in capsys.readouterr().err
