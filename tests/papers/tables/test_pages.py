"""Pages and plots of small rows: nothing is dropped, nothing invented, and all round to the safe side."""

import json

import click
import matplotlib.pyplot as plt
import pytest

from jaxdp import accounting as acc
from jaxdp.cli import main
from jaxdp.papers import adadp_rows, claims, order, tables
from jaxdp.papers.command import _TARGETS, reproduce
from jaxdp.papers.rows import ROWS
from jaxdp.papers.tables import adadp, figure3, gaps, left, phases, rows, short, style, table3


def line(name, **changes):
    """A finished row."""
    return {
        "name": name,
        "test_accuracy": 0.98765,
        "claimed_epsilon": 1.23401,
        "proven_epsilon": 2.5,
        "seconds": 12.0,
        "steps": 100,
        "steps_timed": 100,
        "machine": "2 cores, cpu",
        "acceptance_rate": None,
        **changes,
    }


def results(tmp_path, *lines):
    (tmp_path / "papers.json").write_text(json.dumps(lines))
    return tables.Results(tmp_path)


def text_of(name, found):
    return tables.to_markdown(tables.TARGETS[name].page(found))


@pytest.mark.parametrize("name", tables.TARGETS)
def test_a_page_and_its_plots_are_made_of_no_rows_at_all(name, tmp_path):
    target = tables.TARGETS[name]
    paths = tables.render(name, tables.Results(tmp_path), tmp_path / "out")
    assert [path.name for path in paths] == [f"{name}.md", *target.figures]
    text = paths[0].read_text()
    assert rows.MISSING in text
    assert f"`jaxdp reproduce {name}`" in text or name in ("agd", "printed", "accountants", "pums")
    for row in target.rows if target.file == "papers.json" else ():
        assert rows.status(row) in next(x for x in text.splitlines() if f"`{row}`" in x)
    assert name in _TARGETS
    assert name in reproduce.list_commands(click.Context(reproduce))


def test_the_commands_are_the_targets_and_render_without_running(tmp_path, capsys):
    assert set(_TARGETS) == set(tables.TARGETS)
    arguments = ["--render-only", "--results-dir", str(tmp_path), "--to", str(tmp_path)]
    main(["reproduce", "pareto", *arguments])
    assert (tmp_path / "pareto.png").exists()
    assert "pareto.md" in capsys.readouterr().out


def test_cells_show_every_run_and_round_to_the_safe_side(tmp_path):
    name, changes = "mnist-dp-sgd-tanh", {"proven_epsilon": "inf", "audited_epsilon": 7.80699}
    changes |= {"run": 2, "steps_timed": 40, "acceptance_rate": 0.276}
    found = results(tmp_path, line(name, proven_epsilon=2.5000001), line(name, **changes))
    first, second = rows.lines(found, name)
    shown = [f"`{name}`", "98.77 %", "1.235", "2.501", "–", "–", "12", "1", "2 cores, cpu"]
    assert first == shown
    assert second[3:8] == ["∞", "≥ 7.806", "27.6 %", "12 (last 40 of 100 steps)", "2"]
    assert len(first) == len(rows.COLUMNS)


def test_the_epsilon_of_an_accuracy_is_that_of_its_first_evaluation(tmp_path):
    curve = [[10, 0.5, 0.93], [20, 0.9, 0.951], [30, 1.2, 0.94], [40, 1.5, 0.961]]
    row = line("mnist-dp-sgd-tanh", curve=curve)
    assert table3.crossing(row, 94) == (20, 0.9)
    assert table3.crossing(row, 96) == (40, 1.5)
    assert table3.crossing(row, 98) is None
    assert table3.crossing(line("x"), 98) == (100, 2.5)  # no curve: its end
    assert table3.crossing(line("x"), 99) is None
    text = text_of("table3", results(tmp_path, row))
    assert "| 94 % | DP-SGD, tanh | 1.23 | `mnist-dp-sgd-tanh` | step 20 of 100 | 95.10 % |" in text
    assert "not reached" in text
    # A run until accepted is compared with the paper's own.
    until = "SA-DPSGD, as published, momentum 0.9, until accepted"
    name = "mnist-sa-dpsgd-as-published-momentum-until-accepted"
    text = text_of("table3", results(tmp_path, line(name, curve=curve)))
    assert f"| 94 % | {until} | 1.21 | `{name}` |" in text


def test_the_papers_noise_is_charged_by_its_accountant(tmp_path):
    """From the experiments' curves: a row at 2.15 stands there, another experiment does not."""
    curve = [[100, 0.83], [200, 0.85], [300, 0.84]]
    name, kept = "fashion_mnist-dp-sgd-tanh-noise-2.15", {"steps": 300, "curve": curve}
    kept |= {"dataset": "fashion_mnist", "algorithm": "dp-sgd", "test_accuracy": 0.84}
    other = {**kept, "name": "adadp-of-lot", "algorithm": "adadp-as-published"}
    (tmp_path / "printed_gaps.json").write_text(json.dumps([{**kept, "name": name}, other]))
    first, second, third = table3.page(results(tmp_path)).sections[-1].table.rows
    at = [
        claims.sa_dpsgd_theorem_1(2_048 / 60_000, 2.15, steps, 1e-5).value for steps in (100, 200)
    ]
    assert first == ["Fashion-MNIST", "DP-SGD, tanh", "2.15", "82 %", "1.73", first[-1]]
    assert first[-1] == f"{rows.shown_epsilon(at[0])} at step 100 of 300"
    assert second[-1] == f"{rows.shown_epsilon(at[1])} at step 200 of 300"
    assert third[-1] == "not reached"


def test_a_short_row_stands_in_for_a_long_one_without_a_curve(tmp_path):
    long, brief = line("mnist-auto-s"), line("mnist-auto-s-short", curve=[[1, 0.1, 0.99]])
    assert table3.with_curve(results(tmp_path, long, brief), "mnist-auto-s") == [brief]
    alone = results(tmp_path, long)
    assert table3.with_curve(alone, "mnist-auto-s") == [long]
    assert "step 100 of 100 or before; curve not kept" in text_of("table3", alone)


def test_what_is_left_is_every_row_without_its_runs(tmp_path):
    groups = left.grouped()
    assert sorted(row.name for of in groups.values() for row in of) == sorted(ROWS)
    names = ("mnist-auto-s-short", "mnist-auto-s", "mnist-mlp-adadp-noise-4")
    found = results(
        tmp_path,
        *(line("mnist-auto-s-short", run=n, seconds=3_600) for n in (1, 2)),
        *(line(name) for name in names[1:]),
    )
    assert [left.missing(found, name) for name in names] == [1, 0, 0]
    assert left.missing(found, "mnist-piadam-repeated-epsilon-3") == 3
    missing = [name for name in order.ordered() if len(found.runs(name)) < left.wanted(name)]
    text = text_of("left", found)
    assert [x.split("`")[1] for x in text.splitlines() if "| `" in x] == missing
    assert len(missing) == len(ROWS) - 2
    told = {row[0]: row for row in left.page(found).sections[0].table.rows}
    brief = told["[short](short.md)"]
    assert brief[2:5] == ["0", "1", str(int(brief[1]) - 1)]  # begun, more runs wanted
    assert told["all"][5] == "2.0"  # hours
    none = text_of("left", results(tmp_path))
    assert f"| all | {len(ROWS)} | 0 | 0 | {len(ROWS)} |" in none


def test_a_row_until_accepted_shows_claimed_taken_and_proven(tmp_path):
    name = "fashion_mnist-sa-dpsgd-as-published-until-accepted"
    curve = [[2_000, 9.3937, 0.8], [3_500, 9.3937, 0.87654]]
    step = acc.PoissonSampled(acc.Gaussian(2.15), 2_048 / 60_000)
    taken = acc.epsilon(acc.Repeated(step, 3_500), 1e-5).upper
    made = line(name, accepted=1_160, steps=3_500, steps_timed=3_500, curve=curve)
    made |= {"proven_epsilon": 9.3937, "test_accuracy": 0.87654}
    (shown,) = [
        x for x in text_of("accepted", results(tmp_path, made)).splitlines() if f"`{name}`" in x
    ]
    assert "| 87.41 % |" in shown
    assert 4.4 < taken <= 4.401
    assert "| 87.65 % | 1,160 / 3,500 | 3.004 | 4.401 | 9.394 |" in shown
    fewer = results(tmp_path, {**made, "accepted": 900})
    assert "900 / 3,500, of 1,157 to reach" in text_of("accepted", fewer)
    tables.TARGETS["accepted"].figures["accepted.png"](fewer)


def test_adadps_table_1_tells_the_first_epoch_that_reached_an_accuracy(tmp_path):
    curve = [[100, 0.2, 0.9], [200, 0.3, 0.925], [300, 0.4, 0.92]]
    name = adadp_rows.table_1_name("dp-sgd")
    found = results(tmp_path, line(name, curve=curve, steps=300))
    claimed = claims.adadp_theorem_1(0.01, 3.0, 200, 1e-4).value
    assert adadp.MNIST.theorem_1(200) == claimed
    first, second, *_ = [x for x in text_of("adadp", found).splitlines() if f"`{name}`" in x]
    assert "| 92 % | DP-SGD | 1.10 |" in first
    assert f"| step 200 of 300 | 98.77 % | {rows.shown_epsilon(claimed)} | 0.300 |" in first
    assert "not reached" in second
    drawn = tables.TARGETS["adadp"].figures["adadp.png"](found).axes[0]
    assert any(list(mark.get_ydata()) == [claimed] for mark in drawn.lines)


def test_figure_3_draws_losses_where_a_run_kept_them_and_falls_back_on_a_short_one(tmp_path):
    curve = [[1, 0.5, 0.8], [2, "inf", 0.9], [3, 1.0, 0.95]]
    long = line("mnist-dp-sgd-tanh", curve=curve)
    brief = line("mnist-dp-sgd-tanh-short", curve=curve, test_losses=[2.0, 1.5, None])
    found = results(tmp_path, long, brief)
    accuracies = figure3.drawn(found, "mnist-dp-sgd-tanh", figure3.accuracies)
    assert accuracies == ([(0.5, 80.0), (1.0, 95.0)], False)
    assert figure3.drawn(found, "mnist-dp-sgd-tanh", figure3.losses) == ([(0.5, 2.0)], True)
    assert figure3.drawn(found, "mnist-auto-s", figure3.losses) is None
    panels = figure3.figure(found).axes
    assert (len(panels[0].lines), len(panels[3].lines), len(panels[1].lines)) == (1, 1, 0)


def test_short_rows_are_single_until_they_are_several(tmp_path):
    name = "mnist-auto-s-short"
    runs = [line(name, test_accuracy=x, run=i) for i, x in enumerate((0.9, 0.92, 0.94), 1)]
    one = text_of("short", results(tmp_path, runs[0]))
    assert f"| AUTO-S | `{name}` | 90.00 % | single |  |  | 2.500 |" in one
    three = text_of("short", results(tmp_path, *runs))
    assert f"| AUTO-S | `{name}` | 92.00 ± 2.00 % | 3 | 90.00 % | 94.00 % | 2.500 |" in three
    assert tables.TARGETS["short"].runs == 3
    # Of both data sets; with momentum MNIST has one, which was run, and Fashion-MNIST none.
    assert len(short.NAMES) == 25


PHASE = {"local_began": 2, "local_share": 0.9967, "noise_began": 2, "noise_share": 0.5}
PHASES = [
    (PHASE, "2 | 99.7 % | 2 | 50.0 % | noise alone"),
    ({**PHASE, "noise_began": 1_234}, "2 | 99.7 % | 1,234 | 50.0 % | gradients"),
    ({**PHASE, "noise_began": 0, "noise_share": 0.0}, "2 | 99.7 % | never | 0.0 % | gradients"),
    ({**PHASE, "local_began": 0, "local_share": 0.0}, "never | 0.0 % | 2 | 50.0 % | nothing"),
    ({}, f"{phases.BEFORE} |  |  |  | "),
]
OF_ADADP = {
    "table1": "mnist-adadp",
    "short": "mnist-adadp-short",
    "pareto": "mnist-adadp-repeated-epsilon-1",
    "mlp": "mnist-mlp-pca-adadp-noise-8",
    "adadp": "mnist-mlp-pca-adadp-noise-only-noise-8",
    "parameters": "mnist-mlp-1000-adadp-beta-2",
    "claims": "mnist-mlp-64-adadp-claims",
}


def test_pages_tell_what_opens_adadps_local_phase(tmp_path):
    for page, name in OF_ADADP.items():
        for changes, cells in PHASES if page == "table1" else PHASES[:1]:
            text = text_of(page, results(tmp_path, line(name, **changes)))
            assert f"| `{name}` | 1 | {cells} |" in text, (page, cells)


def test_printed_figures_stand_beside_ours(tmp_path):
    found = results(
        tmp_path,
        line("mnist-auto-s", test_accuracy=0.97921),
        *(line("mnist-dp-sgd-tanh", test_accuracy=x, run=n) for n, x in ((1, 0.98), (2, 0.982))),
    )
    text = text_of("printed", found)  # one run is its figure, and several are mean and spread
    assert "| 98.12 % | 97.92 % `mnist-auto-s` | a few tenths" in text
    assert "98.10 ± 0.14 % `mnist-dp-sgd-tanh`" in text
    assert "| 84.42 % | not run `fashion_mnist-dp-sgd-relu` | – |" in text


def test_no_cause_is_told_before_the_experiment_that_tells_it(tmp_path):
    name = "mnist-sa-dpsgd-as-published"
    before = text_of("printed", results(tmp_path, line(name, test_accuracy=0.97)))
    assert f"97.00 % `{name}`" in before
    assert "by experiment" not in before
    after = text_of("printed", results(tmp_path, line(f"{name}-until-accepted")))
    assert after.count("by experiment") == 1


def test_a_name_in_a_sentence_becomes_its_accuracy(tmp_path):
    found = results(tmp_path)
    assert gaps.told(found, "{a-0.05}") == "not run"
    lines = [{"name": "a-0.05", "test_accuracy": 0.9}, {"name": "lemma-1"}]
    (tmp_path / gaps.FILE).write_text(json.dumps(lines))
    told = gaps.told(tables.Results(tmp_path), "{a-0.05}, {b}, {}")
    assert told == "90.00 %, not run, {}"


@pytest.mark.parametrize(("label", "rows"), [("short", 1), ("a label that takes much room", 2)])
def test_a_legend_has_as_many_columns_as_the_figure_is_wide(label, rows):
    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    for number in range(4):
        axes.plot([0, 1], [number, 1], label=f"{number} {label}")
    style.legend(figure, (axes,), 4)
    (legend,) = figure.legends
    figure.canvas.draw()
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert len({round(text.get_window_extent().y0) for text in legend.get_texts()}) == rows
    plt.close(figure)
