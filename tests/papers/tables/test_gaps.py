"""Sentences with measured figures in them."""

import json
import re
from pathlib import Path

from jaxdp.papers.tables import Results, gaps, printed

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def test_a_name_becomes_its_accuracy(tmp_path):
    lines = [{"name": "a-0.05", "test_accuracy": 0.9}, {"name": "lemma-1"}]
    (tmp_path / "papers.json").write_text("[]")
    assert gaps.told(Results(tmp_path), "{a-0.05}") == "not run"
    (tmp_path / gaps.FILE).write_text(json.dumps(lines))
    assert gaps.told(Results(tmp_path), "{a-0.05}, {b}, {}") == "90.00 %, not run, {}"


def test_every_experiment_that_is_quoted_was_run():
    quoted = {
        name
        for entries in (printed.SA, printed.ADADP, printed.PIGDO)
        for *_, why in entries
        for name in re.findall(r"\{([\w.-]+)\}", why)
    }
    assert len(quoted) > 5
    assert quoted <= {line["name"] for line in json.loads((RESULTS / gaps.FILE).read_text())}
