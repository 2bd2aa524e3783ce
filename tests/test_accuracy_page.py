"""The accuracies that README and the how-to tell are those of the committed runs."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import accuracy_page

ROOT = Path(__file__).parent.parent
HOW_TO = (ROOT / "docs" / "howto" / "accuracy.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_is_that_of_the_runs():
    assert "\n".join(accuracy_page.table()) in HOW_TO


@pytest.mark.parametrize("dataset", accuracy_page.SHOWN)
def test_the_five_runs_and_their_mean_are_told(dataset):
    runs = accuracy_page.rows(dataset)[0][3]
    assert len(runs) == 5
    title, mean = accuracy_page.SHOWN[dataset], accuracy_page.shown(runs)
    assert f"| {title} | **{mean} %** |" in README
    (line,) = [x for x in HOW_TO.splitlines() if re.match(rf"\| {title} \| \w+ \|", x)]
    assert f"**{mean} %**" in line
    assert [float(x) for x in line.split("|")[4].split(",")] == runs


def test_a_plot_holds_no_epsilon_at_another_delta(tmp_path, monkeypatch):
    lines = [
        {"dataset": "mnist", "delta": delta, "proven_epsilon": epsilon, "test_accuracy": 0.9}
        for delta, epsilon in ((1e-5, 3.0), (1e-4, 2.0), (1e-5, "inf"))
    ]
    (tmp_path / "papers.json").write_text(json.dumps(lines))
    monkeypatch.setattr(accuracy_page, "RESULTS", tmp_path / "accuracy.json")
    assert accuracy_page.papers("mnist") == [(3.0, 90.0)]
