"""The experiments on printed figures: each was run as it stands in benchmarks/printed_gaps.py."""

import json

from benchmarks.printed_gaps import COMPUTED, GAPS, RESULTS

LINES = {line["name"]: line for line in json.loads(RESULTS.read_text(encoding="utf-8"))}


def test_every_experiment_has_its_result_and_no_other_is_kept():
    assert set(LINES) == {*COMPUTED, *GAPS}


def test_a_result_is_of_the_settings_that_are_written_down():
    for name, (row, changed) in GAPS.items():
        line = LINES[name]
        assert line["given"] == row.given
        assert line["changed"] == changed
        assert line["steps"] == row.config().steps
        assert line["curve"][-1] == [line["steps"], line["test_accuracy"]]
