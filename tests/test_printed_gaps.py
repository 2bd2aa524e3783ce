"""The experiments on printed figures: each was run as it stands in benchmarks/printed_gaps.py."""

import json

from benchmarks.printed_gaps import COMPUTED, GAPS, RESULTS

LINES = {line["name"]: line for line in json.loads(RESULTS.read_text(encoding="utf-8"))}


def test_every_experiment_has_its_result_and_no_other_is_kept():
    assert set(LINES) == {*COMPUTED, *GAPS}


def test_the_page_tells_the_order_that_rates_and_noise_make_on_beales_function():
    told = LINES["beale"]
    ours, theirs = told["distances"].values()
    nearer = [at for at in ours if theirs[at] < ours[at]]
    assert list(told["distances"]) == ["DP-SGD", "AdaDp, as published"]
    assert len(ours) == len(theirs) == 18
    assert nearer == ["noise 1, rate 0.2", "noise 2, rate 0.1", "noise 2, rate 0.2"]
    pair = ours["noise 1, rate 0.2"], theirs["noise 1, rate 0.005"]
    assert [round(x, 2) for x in pair] == [1.05, 0.26]
    ends = told["ends_without_noise_from_the_minimum"]
    ends = ends["DP-SGD"]["rate 0.2"], ends["AdaDp, as published"]["rate 0.005"]
    assert [round(x, 1) for x in ends] == [0.6, 2.2]


def test_a_result_is_of_the_settings_that_are_written_down():
    for name, (row, changed) in GAPS.items():
        line = LINES[name]
        assert line["given"] == row.given
        assert line["changed"] == changed
        assert line["steps"] == row.config().steps
        assert line["curve"][-1] == [line["steps"], line["test_accuracy"]]
