"""The plot of the README: repeated runs alone, at the epsilon that is proven, at public rates."""

import json

import pytest

from benchmarks import accuracy_page
from jaxdp.papers import repeats, tables
from jaxdp.papers.tables import pareto
from tests.papers.tables.test_pages import line, results

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


def test_the_plot_of_the_recipes_holds_no_epsilon_at_another_delta(tmp_path, monkeypatch):
    lines = [
        {"dataset": "mnist", "delta": delta, "proven_epsilon": epsilon, "test_accuracy": 0.9}
        for delta, epsilon in ((1e-5, 3.0), (1e-4, 2.0), (1e-5, "inf"))
    ]
    (tmp_path / "papers.json").write_text(json.dumps(lines))
    monkeypatch.setattr(accuracy_page, "RESULTS", tmp_path / "accuracy.json")
    assert accuracy_page.papers("mnist") == [(3.0, 90.0)]
