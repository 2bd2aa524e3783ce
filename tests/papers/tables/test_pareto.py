"""The plot of the README: repeated runs alone, at the epsilon that is proven, at public rates."""

import re
from pathlib import Path

import pytest

from jaxdp.papers import repeats, tables
from jaxdp.papers.rows import ROWS
from jaxdp.papers.tables import pareto
from tests.papers.tables.test_pages import PAGES, RESULTS, line, results

ROOT = Path(__file__).parent.parent.parent.parent
METHOD = "dp-sgd-tanh"


def runs(epsilon, *accuracies, **changes):
    return [
        line(repeats.row_name(METHOD, epsilon), test_accuracy=accuracy, run=i, **changes)
        for i, accuracy in enumerate(accuracies, 1)
    ]


def test_a_point_with_fewer_runs_is_not_drawn_and_stays_on_the_page(tmp_path):
    found = results(
        tmp_path,
        *runs(1.0, 0.91, 0.93),
        *runs(3.0, 0.94, 0.95, 0.99, proven_epsilon=2.75),
    )
    assert pareto.drawn(found) == {METHOD: [(2.75, pytest.approx([94.0, 95.0, 99.0]))]}
    text = tables.to_markdown(pareto.page(found))
    assert "| DP-SGD, tanh | 1 | 2 | 92.00 % | 1.41 | 91.00 % | 93.00 % |" in text
    assert "| DP-SGD, tanh | 3 | 3 | 96.00 % | 2.65 | 94.00 % | 99.00 % |" in text
    assert ", 3 runs a point" in text


def test_one_run_is_called_single(tmp_path):
    text = tables.to_markdown(pareto.page(results(tmp_path, *runs(1.0, 0.91))))
    assert "| DP-SGD, tanh | 1 | 1 | 91.00 %, single |  |  |  |" in text
    assert "| AUTO-S | 1 | 0 | not run |  |  |  |" in text


def test_every_algorithm_has_a_rate_and_a_name():
    assert set(repeats.REPEATED) == set(repeats.CHOSEN) <= set(pareto.COLUMNS)
    untried = set(repeats.CHOSEN) - set(repeats.TRIED)
    assert untried == {"sa-dpsgd-momentum"}
    assert repeats.CHOSEN["sa-dpsgd-momentum"] == repeats.CHOSEN[METHOD]


def test_the_mean_stands_within_the_runs_at_the_proven_epsilon(tmp_path):
    found = results(tmp_path, *runs(1.0, 0.9, 0.9, 0.96, 0.96, proven_epsilon=0.875))
    (axes,) = pareto.figure(found).axes
    mean, dots = axes.lines
    assert (*mean.get_xdata(), *mean.get_ydata()) == pytest.approx((0.875, 93.0))
    assert (*dots.get_xdata(), *dots.get_ydata()) == pytest.approx((*[0.875] * 4, 90, 90, 96, 96))
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (min(band), max(band)) == pytest.approx((90.0, 96.0))


def test_the_caption_says_whose_rate_is_anothers(tmp_path):
    name = repeats.row_name("sa-dpsgd-momentum", 1.0)
    found = results(tmp_path, *[line(name, run=i) for i in (1, 2, 3)])
    assert "(SA-DPSGD: DP-SGD's rate)" in pareto.caption(found)
    assert "DP-SGD's" not in pareto.caption(results(tmp_path, *runs(1.0, *3 * [0.9])))


def test_the_number_of_runs_is_told_where_points_differ(tmp_path):
    found = results(tmp_path, *runs(1.0, *3 * [0.9]), *runs(3.0, *5 * [0.9]))
    assert "3 to 5 runs a point" in pareto.caption(found)


@pytest.mark.parametrize("algorithm", repeats.TRIED)
def test_the_rate_is_the_best_on_public_data_and_no_edge_of_those_tried(algorithm):
    found = {
        rate: RESULTS.runs(repeats.rate_name(algorithm, rate)) for rate in repeats.TRIED[algorithm]
    }
    accuracy = {rate: lines[0]["test_accuracy"] for rate, lines in found.items()}
    assert max(accuracy, key=accuracy.get) == repeats.CHOSEN[algorithm]
    assert min(accuracy) < repeats.CHOSEN[algorithm] < max(accuracy)
    assert all(
        ROWS[repeats.rate_name(algorithm, rate)].dataset == "fashion_mnist" for rate in accuracy
    )


def test_committed_repeats_tell_their_date_and_command():
    drawn = pareto.drawn(RESULTS)
    assert len(drawn[METHOD]) == len(repeats.EPSILONS)
    for name in pareto.NAMES:
        for row in RESULTS.runs(name):
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
            assert row["command"] == f"jaxdp reproduce run {name} --runs {row['run']}"
            assert row["config"]["learning_rate"] == ROWS[name].given["learning_rate"]


def test_the_readme_and_the_page_tell_the_same_of_the_plot():
    told = re.search(r"\d+( to \d+)? runs a point", pareto.caption(RESULTS))[0]
    assert told in (ROOT / "README.md").read_text().replace("\n", " ")
    assert pareto.caption(RESULTS) in (PAGES / "pareto.md").read_text()
