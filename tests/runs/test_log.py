"""``Run(log=)``: every row once, after the ledger says that it was shown."""

import json
import re
from pathlib import Path

import pytest

import jaxdp
from jaxdp.runs import RunDirectory
from tests.refusing import refused
from tests.runs.own import run
from tests.runs.small import Stop, crash_at

ROOT = Path(__file__).parent.parent.parent


def test_a_row_is_logged_once_and_after_it_is_durable_and_shown(tmp_path):
    seen = []

    def log(row):
        shown = RunDirectory(tmp_path / "r").last_shown()
        kept = max(int(path.name) for path in (tmp_path / "r/secret/checkpoints").iterdir())
        seen.append((row["step"], shown.step, kept >= row["step"]))
        row.clear()  # its own copy

    given = {"log": log}
    with pytest.raises(Stop):
        run(tmp_path / "r", progress=crash_at(8), **given).fit()
    one = run(tmp_path / "r", **given)
    one.fit()
    run(tmp_path / "r", **given).fit()  # finished: nothing is new
    assert [row[0] for row in seen] == [row["step"] for row in one.history] == [3, 6, 9, 12]
    assert all(shown >= step and durable for step, shown, durable in seen)


@pytest.mark.parametrize("at", [3, 6, 12])
def test_a_log_that_raises_stops_the_run_in_words_and_loses_nothing(tmp_path, at):
    rows = []

    def log(row):
        if row["step"] == at and not rows.count("failed"):
            rows.append("failed")
            raise OSError("no route to host")
        rows.append(row["step"] if row["accuracy"] == 0.5 else row)

    given = {"log": log, "evaluate": lambda params: {"accuracy": 0.5}}
    words = f"log must take every row, got OSError: no route to host at the row of step {at}"
    refused(words, run(tmp_path / "r", **given).fit)
    one = run(tmp_path / "r", **given)
    one.fit()
    assert [row for row in rows if row != "failed"] == [3, 6, 9, 12]
    assert [row["step"] for row in json.loads((tmp_path / "r/history.json").read_text())] == [
        *(3, 6, 9, 12)
    ]
    assert one.epsilon().upper == run(tmp_path / "q").algorithm.mechanism.epsilon(12, 1e-3).upper
    refused("log must be a function", run, tmp_path / "s", log="tensorboard")
    assert jaxdp.Run.open(tmp_path / "r").params["w"].shape == (20, 3)


@pytest.mark.parametrize("package", ["tensorboardX", "wandb"])
def test_the_page_is_right_about_packages_that_the_tests_do_not_bring(tmp_path, package):
    """`pip install tensorboardX wandb` in an environment of its own runs it."""
    pytest.importorskip(package)
    page = (ROOT / "docs/howto/watch_a_run.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"```py\n(import {package}\n.*?)```", page, flags=re.DOTALL)
    rows = []
    watched = lambda name, log: run(tmp_path / name, log=lambda row: rows.append(log(row)))  # noqa: E731
    exec(compile(block, package, "exec"), {"folder": str(tmp_path), "watched": watched})
    assert len(rows) == 4
