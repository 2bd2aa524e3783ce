"""The rows of the papers, and pages and plots of small rows: nothing is dropped, nothing invented.

All numbers round to the safe side. Rows are named for what they do, in an order to run.
"""

import dataclasses
import json
import math
import re
import subprocess
import sys

import click
import numpy as np
import pytest
from scipy.stats import ttest_ind

from benchmarks import printed_gaps
from benchmarks.papers import (
    adadp_rows,
    agd,
    census,
    command,
    cost,
    not_private,
    order,
    pigdo_sweeps,
    queue,
    repeats,
    tables,
)
from benchmarks.papers.command import _TARGETS, reproduce
from benchmarks.papers.rows import CIFAR_SHORT, EXP_EPSILON, MLP_SETTINGS, PAPER, ROWS
from benchmarks.papers.sweeps import SWEEPS
from benchmarks.papers.tables import (
    adadp,
    cells,
    figure3,
    gaps,
    left,
    parameters,
    pareto,
    phases,
    printed,
    pums_groups,
    pums_plot,
    rows,
    short,
    style,
    table3,
)
from jaxdp import accounting as acc
from jaxdp.cli import main
from jaxdp.papers import claims
from tests.compiling import with_flags


def line(name, **changes):
    """A finished row."""
    # fmt: off
    return {
        "name": name, "test_accuracy": 0.98765, "claimed_epsilon": 1.23401, "proven_epsilon": 2.5,
        "seconds": 12.0, "steps": 100, "steps_timed": 100, "machine": "2 cores, cpu",
        "acceptance_rate": None, **changes,
    }
    # fmt: on


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


def test_table_3_tells_the_first_evaluation_and_charges_the_papers_noise(tmp_path):
    curve = [[10, 0.5, 0.93], [20, 0.9, 0.951], [30, 1.2, 0.94], [40, 1.5, 0.961]]
    row = line("mnist-dp-sgd-tanh", curve=curve)
    assert [table3.crossing(row, at) for at in (94, 96, 98)] == [(20, 0.9), (40, 1.5), None]
    # Of no curve: its end.
    assert [table3.crossing(line("x"), at) for at in (98, 99)] == [(100, 2.5), None]
    text = text_of("table3", results(tmp_path, row))
    assert "| 94 % | DP-SGD, tanh | 1.23 | `mnist-dp-sgd-tanh` | step 20 of 100 | 95.10 % |" in text
    assert "not reached" in text
    # Several runs are one line: means of those that got there, and how many did.
    late = {**row, "run": 2, "curve": [[10, 0.5, 0.9], [20, 0.9, 0.95]]}
    never = {**row, "run": 3, "curve": [[10, 0.5, 0.9]]}
    text = text_of("table3", results(tmp_path, row, late, never))
    told = "step 20 of 100, 2 of 3 runs | 95.05 ± 0.07 % | – | 1.235 | 0.900 ± 0.000 |"
    assert f"`mnist-dp-sgd-tanh` | {told}" in text
    # A run until accepted is compared with the paper's own.
    until = "SA-DPSGD, as published, momentum 0.9, until accepted"
    name = "mnist-sa-dpsgd-as-published-momentum-until-accepted"
    text = text_of("table3", results(tmp_path, line(name, curve=curve)))
    assert f"| 94 % | {until} | 1.21 | `{name}` |" in text
    # The paper's noise, from the experiments' curves: a row at 2.15 stands there, another does not.
    curve = [[100, 0.83], [200, 0.85], [300, 0.84]]
    name, kept = "fashion_mnist-dp-sgd-tanh-noise-2.15", {"steps": 300, "curve": curve}
    kept |= {"dataset": "fashion_mnist", "algorithm": "dp-sgd", "test_accuracy": 0.84}
    other = {**kept, "name": "adadp-of-lot", "algorithm": "adadp-as-published"}
    (tmp_path / "printed_gaps.json").write_text(json.dumps([{**kept, "name": name}, other]))
    first, second, third = table3.page(results(tmp_path)).sections[-1].table.rows
    claimed = [claims.sa_dpsgd_theorem_1(2_048 / 60_000, 2.15, n, 1e-5).value for n in (100, 200)]
    at = list(map(rows.shown_epsilon, claimed))
    assert first == ["Fashion-MNIST", "DP-SGD, tanh", "2.15", "82 %", "1.73", first[-1]]
    assert first[-1] == f"{at[0]} at step 100 of 300"
    assert (second[-1], third[-1]) == (f"{at[1]} at step 200 of 300", "not reached")
    # A short row stands in for a long one without a curve.
    long, brief = line("mnist-auto-s"), line("mnist-auto-s-short", curve=[[1, 0.1, 0.99]])
    assert table3.with_curve(results(tmp_path, long, brief), "mnist-auto-s") == [brief]
    alone = results(tmp_path, long)
    assert table3.with_curve(alone, "mnist-auto-s") == [long]
    assert "step 100 of 100 or before; curve not kept" in text_of("table3", alone)


def test_what_is_left_is_every_row_without_its_runs_and_what_a_row_until_accepted_took(tmp_path):
    groups = left.grouped()
    assert sorted(row.name for of in groups.values() for row in of) == sorted(ROWS)
    names = ("mnist-auto-s-short", "mnist-auto-s", "mnist-mlp-adadp-noise-4")
    runs = [line("mnist-auto-s-short", run=n, seconds=3_600) for n in (1, 2)]
    gpu = {"machine": "16 cores, NVIDIA H100 80GB HBM3", "seconds": 3_600 - 12}
    old = line("mnist-mlp-adadp-noise-8", seconds=0)  # that tells of no phase
    found = results(tmp_path, *runs, line(names[1]), line(names[2], **gpu, **PHASE), old)
    assert [left.missing(found, ROWS[name]) for name in names] == [1, 4, 0]
    assert left.missing(found, ROWS["mnist-piadam-repeated-epsilon-3"]) == 3
    missing = [name for name, row in order.ordered().items() if left.missing(found, row)]
    text = text_of("left", found)
    assert [x.split("`")[1] for x in text.splitlines() if "| `" in x] == missing
    assert len(missing) == len(ROWS) - 1
    told = {row[0]: row for row in left.page(found).sections[0].table.rows}
    brief = told["[short](short.md)"]
    assert brief[2:5] == ["0", "1", str(int(brief[1]) - 1)]  # begun, more runs wanted
    assert told["all"][5:7] == ["2.0", "1.0"]  # hours, and those on a GPU
    # The reason is told: a mean that the paper has, one of ours, the time, or nothing of these.
    reasons = {"mnist-auto-s": "5 wanted, as the paper averages", names[0]: "3 wanted, for mean"}
    reasons |= {
        old["name"]: "of before the",
        "cifar10-sa-dpsgd": "3 hours or more of",
        "mnist-dp-sgd-tanh": "not reached yet",
    }
    for name, reason in reasons.items():
        assert left.why(found, ROWS[name]).startswith(reason), name
    none = text_of("left", results(tmp_path))
    assert f"| all | {len(ROWS)} | 0 | 0 | {len(ROWS)} |" in none
    # A row until accepted shows claimed, taken and proven.
    name = "fashion_mnist-sa-dpsgd-as-published-until-accepted"
    curve = [[2_000, 9.3937, 0.8], [3_500, 9.3937, 0.87654]]
    step = acc.PoissonSampled(acc.Gaussian(2.15), 2_048 / 60_000)
    taken = acc.epsilon(acc.Repeated(step, 3_500), 1e-5).upper
    made = line(name, accepted=1_160, steps=3_500, steps_timed=3_500, curve=curve)
    made |= {"proven_epsilon": 9.3937, "test_accuracy": 0.87654}
    text = text_of("accepted", results(tmp_path, made))
    (shown,) = [x for x in text.splitlines() if f"`{name}`" in x]
    assert "| 87.41 % |" in shown
    assert 4.4 < taken <= 4.401
    assert "| 87.65 % | 1,160 / 3,500 | 3.004 | 4.401 | 9.394 |" in shown
    fewer = results(tmp_path, {**made, "accepted": 900})
    assert "900 / 3,500, of 1,157 to reach" in text_of("accepted", fewer)
    tables.TARGETS["accepted"].figures["accepted.png"](fewer)


def test_table_1_figure_3_and_the_local_phase_of_adadp(tmp_path):
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
    # Figure 3 draws rows of one length together, and says of which no loss was kept.
    curve = [[1, 0.5, 0.8], [2, "inf", 0.9], [3, 1.0, 0.95]]
    long = line("mnist-dp-sgd-tanh", curve=curve, steps=4_700)
    kept = line("mnist-auto-s", curve=curve, steps=4_700, test_losses=[2.0, 1.5, None])
    brief = line("mnist-dp-sgd-tanh-short", curve=curve, test_losses=[2.0, 1.5, None])
    found = results(tmp_path, long, kept, brief)
    points, _ = figure3.drawn(found, "mnist-dp-sgd-tanh", figure3.accuracies)
    assert points == [(0.5, 80.0), (1.0, 95.0)]
    assert figure3.drawn(found, "mnist-dp-sgd-tanh", figure3.losses) is None
    assert figure3.drawn(found, "mnist-auto-s", figure3.losses)[0] == [(0.5, 2.0)]
    panels = figure3.figure(found).axes
    assert (len(panels[0].lines), len(panels[3].lines), len(panels[1].lines)) == (2, 1, 0)
    assert panels[0].get_title("left") == "MNIST, 40 epochs"
    assert panels[3].texts[0].get_text() == "no losses kept:\nDP-SGD, tanh"
    panels = figure3.figure(results(tmp_path, long)).axes
    assert (len(panels[3].lines), panels[3].axison) == (0, False)
    brief = {**brief, "steps": 600}  # alone: a panel of short rows, which says so
    panels = figure3.figure(results(tmp_path, brief)).axes
    assert (len(panels[3].lines), panels[0].get_title("left")) == (1, "MNIST, 5 epochs")
    # Pages tell what opens AdaDp's local phase.
    for page, name in OF_ADADP.items():
        for changes, told in PHASES if page == "table1" else PHASES[:1]:
            text = text_of(page, results(tmp_path, line(name, **changes)))
            assert f"| `{name}` | 1 | {told} |" in text, (page, told)


def test_an_algorithm_has_one_colour_and_its_forms_differ(tmp_path):
    every = {name: style.look(name) for name in (*ROWS, *(f"agd-{split}" for split in agd.SPLITS))}
    colours = {}
    for look in every.values():
        colours.setdefault(look["color"], set()).add((str(look["linestyle"]), look["marker"]))
    assert len(colours) == len({colour for colour, _ in style._ALGORITHMS.values()}) - 1  # DP-SBCD
    forms = ["", "-as-published", "-momentum", "-as-published-momentum"]
    looks = [style.look(f"fashion_mnist-sa-dpsgd{form}-until-accepted") for form in forms]
    assert {look["color"] for look in looks} == {style.ORANGE}
    for what in ("linestyle", "marker"):
        assert len({str(look[what]) for look in looks}) == 4
    assert style.look("mnist-mlp-pca-adadp-noise-8") == style.look("adadp")
    assert style.look("mnist-dp-adam-bc")["color"] != style.look("dp-adam")["color"]
    # A legend has no entry without a mark: of two rows, two, and what filled and hollow mean.
    curve = [[10, 0.5, 0.95], [20, 0.9, 0.97]]
    rows_of = [line(f"mnist-{name}", curve=curve) for name in ("sa-dpsgd", "piadam")]
    drawn = table3.figure(results(tmp_path, *rows_of))
    labels = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert {"SA-DPSGD, repaired", "PIAdam, repaired"} < set(labels)
    assert not {"AdaDp, repaired", "SA-DPSGD, repaired, momentum 0.9"} & set(labels)
    # Beginnings are left out, with an arrow where a curve comes from below.
    _, (panel,) = style.panels(1, 1, (4, 4))
    style.curve(panel, [(x, min(10.0 * x, 90.0 + x)) for x in range(1, 40)], "adadp", "AdaDp")
    style.from_below(panel)
    low, high = panel.get_ylim()
    assert 90 < low < 99 + 1
    assert high > 129
    (arrow,) = panel.texts
    assert arrow.xy == (pytest.approx(low / 10, rel=0.02), low)
    # Of the sweeps those that are complete are drawn, a row of panels for each setting.
    sweep = SWEEPS[-1]
    runs_of = [line(name) for name in sweep.rows.values()]
    for lines, words in ((runs_of, {f"{sweep.algorithm}: {sweep.setting}"}), (runs_of[1:], set())):
        shown = parameters.figure(results(tmp_path, *lines)).axes
        titles = {text.get_text() for panel in shown if panel.axison for text in panel.texts}
        assert words <= titles
        assert bool(words) == any("Paper: " in title for title in titles)


def test_cells_show_every_run_and_round_to_the_safe_side(tmp_path):
    name = "mnist-auto-s-short"
    runs = [line(name, test_accuracy=x, run=i) for i, x in enumerate((0.9, 0.92, 0.94), 1)]
    one = text_of("short", results(tmp_path, runs[0]))
    assert f"| AUTO-S | `{name}` | 90.00 % | single |  |  | 2.500 |" in one
    three = text_of("short", results(tmp_path, *runs))
    assert f"| AUTO-S | `{name}` | 92.00 ± 2.00 % | 3 | 90.00 % | 94.00 % | 2.500 |" in three
    assert tables.TARGETS["short"].runs == 3
    # Table 1 is averages of five: one line, the largest epsilons, the first audit, each machine apart.
    name, gpu = "mnist-sa-dpsgd-as-published", "16 cores, NVIDIA H100 80GB HBM3"
    changes = [{"audited_epsilon": 0.2, "proven_epsilon": "inf"}, {"claimed_epsilon": 1.4}]
    changes = [*changes, {"machine": gpu, "seconds": 3.0}, {"machine": gpu, "seconds": 4.0}]
    many = [line(name, run=i, acceptance_rate=i / 4, **at) for i, at in enumerate(changes, 1)]
    shown = "98.77 ± 0.00 % | 1.400 | ∞ | ≥ 0.200 | 62.5 % | 12; 3.5 | 2 + 2"
    text = text_of("table1", results(tmp_path, *many))
    assert f"as published | 98.35 % | `{name}` | {shown} | 2 cores, cpu; {gpu} |" in text
    part = [{"steps_timed": 40}, {"steps_timed": 50, "seconds": 5.0}]
    assert rows.mean_seconds([line(name, **at) for at in part]) == "12 (last 40 of 100 steps)"
    found = results(tmp_path, *(line(name, **{**at, "run": i}) for i, at in enumerate(part, 1)))
    shown = f"as published | 98.35 % | 98.77 ± 0.00 % | `{name}-until-accepted`"
    assert shown in text_of("accepted", found)
    # Of both data sets; with momentum MNIST has one, which was run, and Fashion-MNIST none.
    assert len(short.NAMES) == 25
    name, changes = "mnist-dp-sgd-tanh", {"proven_epsilon": "inf", "audited_epsilon": 7.80699}
    changes |= {"run": 2, "steps_timed": 40, "acceptance_rate": 0.276}
    found = results(tmp_path, line(name, proven_epsilon=2.5000001), line(name, **changes))
    first, second = rows.lines(found, name)
    shown = [f"`{name}`", "98.77 %", "1.235", "2.501", "–", "–", "12", "1", "2 cores, cpu"]
    assert first == shown
    assert second[3:8] == ["∞", "≥ 7.806", "27.6 %", "12 (last 40 of 100 steps)", "2"]
    assert len(first) == len(rows.COLUMNS)


PHASE = {"local_began": 2, "local_share": 0.9967, "noise_began": 2, "noise_share": 0.5}
PHASES = [
    (PHASE, "2 | 99.7 % | 2 | 50.0 % | noise alone"),
    ({**PHASE, "noise_began": 1_234}, "2 | 99.7 % | 1,234 | 50.0 % | gradients"),
    ({**PHASE, "noise_began": 0, "noise_share": 0.0}, "2 | 99.7 % | never | 0.0 % | gradients"),
    ({**PHASE, "local_began": 0, "local_share": 0.0}, "never | 0.0 % | 2 | 50.0 % | nothing"),
    ({}, f"{phases.BEFORE} |  |  |  | "),
]
OF_ADADP = {
    "table1": "mnist-adadp", "short": "mnist-adadp-short",
    "pareto": "mnist-adadp-repeated-epsilon-1", "mlp": "mnist-mlp-pca-adadp-noise-8",
    "adadp": "mnist-mlp-pca-adadp-noise-only-noise-8",
    "parameters": "mnist-mlp-1000-adadp-beta-2", "claims": "mnist-mlp-64-adadp-claims",
}  # fmt: skip


def verdict(tmp_path, cell, *lines):
    return cell.verdict(results(tmp_path, *lines))


def test_printed_figures_stand_beside_ours_and_their_verdicts_follow_from_the_rows(tmp_path):
    two = [line("mnist-dp-sgd-tanh", test_accuracy=x, run=n) for n, x in ((1, 0.98), (2, 0.982))]
    text = text_of("printed", results(tmp_path, *two))
    assert "| 98.05 % | 98.10 ± 0.14 % `mnist-dp-sgd-tanh`; at the paper's noise not run" in text
    assert "| Table 1, MNIST: AUTO-S | 98.12 % | not run `mnist-auto-s`" in text
    # A figure of 90: by the text, or by what was tried, within the margin.
    cell = cells.Cell("a", "90 %", 90.0, [cells.Run("", "a")], [cells.Run("", "b")])
    near, far = {"test_accuracy": 0.897}, {"test_accuracy": 0.88}
    assert cells.margin(results(tmp_path)) == 0.6  # 2 √2 of 0.2: no row was run three times
    assert verdict(tmp_path, cell) == "not run"
    assert verdict(tmp_path, cell, line("a", **near), line("b", **near)) == "met"
    assert verdict(tmp_path, cell, line("a", **far), line("b", **near)) == "explained by experiment"
    assert verdict(tmp_path, cell, line("a", **far), line("b", **far)) == "not explained"
    # A reason is told where no row decides, and never instead of a run.
    reasoned = dataclasses.replace(cell, tag=cells.REASONING)
    assert verdict(tmp_path, reasoned) == "not run"
    assert verdict(tmp_path, reasoned, line("a", **far)) == cells.REASONING
    assert verdict(tmp_path, reasoned, line("a", **near)) == "met"
    # Three runs or more have a margin of their own: 2 · 3 · √(1/3 + 1/5) = 4.4 points, not 8.5.
    three = [line("a", run=n, test_accuracy=x) for n, x in enumerate((0.83, 0.86, 0.89), 1)]
    wide = dataclasses.replace(cell, ours=[cells.Run("", "a")], tried=())
    assert verdict(tmp_path, wide, *three) == "met"
    assert verdict(tmp_path, dataclasses.replace(wide, value=91.0), *three) == "not explained"
    # The margin is that of single runs: the median of rows that ran three times.
    kept = [
        line("mnist-auto-s", run=n, test_accuracy=x) for n, x in enumerate((0.9, 0.91, 0.92), 1)
    ]
    assert cells.spread(results(tmp_path, *kept)) == (pytest.approx(1.0), 1)
    assert cells.margin(results(tmp_path, *kept)) == 2.8
    # Points of one over another, and percent.
    a, b = line("a", test_accuracy=0.96), line("b", test_accuracy=0.90)
    lead, gain = cells.Lead("", "a", "b"), cells.Gain("", "a", "b")
    found = results(tmp_path, a, b)
    assert (lead.number(found), gain.number(found)) == pytest.approx((6.0, 100 * 6 / 90))
    assert lead.told(found) == "+6.0 `a` over `b`"
    assert (lead.meets(found, 6.8), lead.meets(found, 6.9)) == (True, False)  # √2 · 0.6
    # An epsilon is met where the accuracy is reached at no more than a tenth above it.
    at = cells.Epsilon("", "a", 95.0, lambda step: step / 10)
    found = results(tmp_path, line("a", curve=[[10, 0.1, 0.90], [11, 0.2, 0.95], [12, 0.3, 0.97]]))
    assert [at.meets(found, epsilon) for epsilon in (0.9, 1.0, 5.0)] == [False, True, True]
    assert dataclasses.replace(at, level=98.0).told(found) == "not reached `a`"
    # Words hold of rows or do not.
    words = cells.Holds("so", {"a": "A", "b": "B"}, lambda x, room: x[0] > x[1] + room)
    holds = cells.Cell("a", "in words", ours=[words])
    assert words.told(results(tmp_path, a, b)) == "so: A 96.00 %, B 90.00 %"
    assert [verdict(tmp_path, holds, *of) for of in ((a, b), (a,), (b, {**a, "test_accuracy": 0.9}))] == [
        *("met", "not run", "not explained"),
    ]  # fmt: skip
    # A name in a sentence becomes its accuracy.
    assert gaps.told(results(tmp_path), "{a-0.05}") == "not run"
    lines = [{"name": "a-0.05", "test_accuracy": 0.9}, {"name": "lemma-1"}]
    (tmp_path / gaps.FILE).write_text(json.dumps(lines))
    told = gaps.told(tables.Results(tmp_path), "{a-0.05}, {b}, {}")
    assert told == "90.00 %, not run, {}"


def test_the_count_of_printed_figures_is_that_of_the_lines_below(tmp_path):
    for found in (tables.Results(tmp_path), tables.Results(printed_gaps.RESULTS.parent)):
        counted, *papers = printed.page(found).sections
        verdicts = [row[3] for paper in papers for row in paper.table.rows]
        for name, _, *of, every in counted.table.rows[:-1]:
            assert (verdicts.count(name), sum(map(int, of))) == (int(every), int(every))
        assert counted.table.rows[-1][-1] == str(len(verdicts))
        assert set(verdicts) <= set(cells.VERDICTS)
    # Of PIGDO's gains the one over ADPPL at noise 8 does not follow from its own figures.
    wrong = [row for row in papers[2].table.rows if "does not follow" in row[4]]
    assert [row[1] for row in wrong] == ["1.65 %"]
    assert "of its own figures 1.21 %" in wrong[0][4]


# The plot of the README: repeated runs alone, at the proven epsilon, at public rates
METHOD = "dp-sgd-tanh"


def runs(epsilon, *accuracies, **changes):
    name = repeats.row_name(METHOD, epsilon)
    numbered = enumerate(accuracies, 1)
    return [line(name, test_accuracy=accuracy, run=i, **changes) for i, accuracy in numbered]


def test_repeated_runs_are_told_with_their_number_and_rate_and_drawn_at_their_proven_epsilon(
    tmp_path,
):
    three = runs(3.0, 0.94, 0.95, 0.99, proven_epsilon=2.75)
    found = results(tmp_path, *runs(1.0, 0.91, 0.93), *three)
    assert pareto.drawn(found) == {METHOD: [(2.75, pytest.approx([94.0, 95.0, 99.0]))]}
    text = tables.to_markdown(pareto.page(found))
    assert "| DP-SGD, tanh | 1 | 2 | 92.00 % | 1.41 | 91.00 % | 93.00 % |" in text
    assert "| DP-SGD, tanh | 3 | 3 | 96.00 % | 2.65 | 94.00 % | 99.00 % |" in text
    assert ", 3 runs a point" in text
    text = tables.to_markdown(pareto.page(results(tmp_path, *runs(1.0, 0.91))))
    assert "| DP-SGD, tanh | 1 | 1 | 91.00 %, single |  |  |  |" in text
    assert "| AUTO-S | 1 | 0 | not run |  |  |  |" in text
    found = results(tmp_path, *runs(1.0, *3 * [0.9]), *runs(3.0, *5 * [0.9]))
    assert "3 to 5 runs a point" in pareto.caption(found)
    name = repeats.row_name("sa-dpsgd-momentum", 1.0)
    found = results(tmp_path, *[line(name, run=i) for i in (1, 2, 3)])
    assert "(SA-DPSGD: DP-SGD's rate)" in pareto.caption(found)
    assert "DP-SGD's" not in pareto.caption(results(tmp_path, *runs(1.0, *3 * [0.9])))
    # The mean stands within the runs, at the proven epsilon.
    found = results(tmp_path, *runs(1.0, 0.9, 0.9, 0.96, 0.96, proven_epsilon=0.875))
    (axes,) = pareto.figure(found).axes
    mean, dots = axes.lines
    assert (*mean.get_xdata(), *mean.get_ydata()) == pytest.approx((0.875, 93.0))
    assert (*dots.get_xdata(), *dots.get_ydata()) == pytest.approx((*[0.875] * 4, 90, 90, 96, 96))
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (min(band), max(band)) == pytest.approx((90.0, 96.0))


# The groups of the census
def group(errors, size=100):
    row = {"group": "g", "size": size, "unemployed": 40, "missed": 0}
    return [{**row, "errors": each} for each in errors]


def test_shifts_are_welchs_intervals_wilsons_and_bins_weighed_by_their_size():
    rng = np.random.default_rng(0)
    first, second = rng.integers(20, 60, 10).tolist(), rng.integers(30, 40, 8).tolist()
    mean, low, high = pums_groups.shift(group(first), group(second))
    welch = ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    assert mean == pytest.approx(np.mean(first) - np.mean(second))
    assert (low, high) == pytest.approx((welch.low, welch.high))
    # Runs that agree shift nothing and warn of nothing.
    assert pums_groups.shift(group([30, 30]), group([30, 30])) == (0.0, 0.0, 0.0)
    # The interval is wider for fewer people.
    sizes = ((5, 10), (500, 1_000))
    few, many = (pums_groups.interval(group([errors] * 3, of)) for errors, of in sizes)
    # Wilson's interval of 5 in 10, worked out by hand: (5 + z²/2 ± z √(2.5 + z²/4)) / (10 + z²).
    z = 1.959964
    half = z * np.sqrt(2.5 + z**2 / 4) / (10 + z**2)
    assert few == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    assert many[1] - many[0] < 0.1
    # The mean calibration curve weighs bins by their size.
    one, far, other = (
        {"size": size, "predicted": predicted, "found": found}
        for size, predicted, found in ((30, 0.12, 0.1), (5, 0.9, 0.0), (90, 0.16, 0.5))
    )
    lines = [{"reliability": [one, far]}, {"reliability": [other]}]
    assert pums_plot.reliability_mean(lines) == [(pytest.approx(0.15), pytest.approx(0.4))]


# The rows.
GROUPS = {
    "fashion_mnist-sa-dpsgd-until-accepted": 0, "mnist-sa-dpsgd-as-published-until-accepted": 1,
    "mnist-mlp-adadp-noise-4": 2, "fashion_mnist-mlp-piadam-noise-8": 2,
    "mnist-mlp-pca-adadp-as-published-noise-3": 3, "cifar10-features-adadp-noise-6": 3,
    "mnist-piadam-repeated-epsilon-3": 4, "cifar10-auto-s-short": 5,
    "mnist-mlp-1000-adadp-noise-4": 7, "mnist-mlp-piadam-figure-7-noise-8": 7,
    "mnist-sa-dpsgd-learning-rate-1.5": 6, "cifar10-auto-s": 6, "mnist-auto-s-short": 7,
    "fashion_mnist-auto-s-rate-4": 7, "mnist-mlp-64-sa-dpsgd-claims": 7,
}  # fmt: skip
ALONE = """
from benchmarks.papers.row import Row
given = {"algorithm": "piadam-as-published", "noise_multiplier": 2.0, "steps": 3}
print(Row("name", "mnist", given).config().model)
"""


def test_the_order_holds_every_row_once_and_those_of_hours_are_left_out(monkeypatch, capsys):
    found = list(order.ordered().values())
    assert sorted(row.name for row in found) == sorted(ROWS)
    keys = [(order.group(row), cost.minutes(row)) for row in found]
    assert keys == sorted(keys)
    assert {group for group, _ in keys} == set(range(len(order.GROUPS)))
    assert {name: order.group(ROWS[name]) for name in GROUPS} == GROUPS
    # Rows that take hours are named and left out.
    short, *names = "mnist-dp-sgd-tanh", "mnist-mlp-piadam-as-published-noise-2"
    assert command._runnable((short, *names)) == (short,)
    assert "1 rows take hours" in capsys.readouterr().err
    assert rows.status(names[0]) == "not run: 3.9 h"
    assert rows.status("mnist-mlp-dp-sgd-noise-8") == "not run: 2 min"
    monkeypatch.setattr(queue, "has_gpu", lambda: True)
    assert command._runnable((short, *names)) == (short, *names)
    main(["reproduce", "list"])
    told = {told.split()[0]: told for told in capsys.readouterr().out.splitlines()}
    assert list(told) == [row.name for row in found]
    assert told[short].endswith("11 min × 5  98.05 % (SA-DPSGD, Table 1)")
    # A row by itself knows the networks and algorithms that it names.
    given = [sys.executable, "-c", ALONE]
    told = subprocess.run(given, capture_output=True, text=True, env=with_flags())
    assert told.stdout == "mnist-cnn\n", told.stderr


def quickly(name):
    """Its configuration, but for the noise: no calibration to its epsilon."""
    row = ROWS[name]
    given = {key: value for key, value in row.given.items() if key != "epsilon"}
    given.setdefault("noise_multiplier", 1.0)
    return dataclasses.replace(row, given=given).config()


def has(config, **numbers):
    assert {name: getattr(config, name) for name in numbers} == numbers


def test_exp_has_the_epsilon_of_dp_sgd_and_falls_to_one_half():
    for noise, _, epochs in MLP_SETTINGS:
        given = ROWS[f"mnist-mlp-exp-noise-{noise:g}"].given
        even = ROWS[f"mnist-mlp-dp-sgd-noise-{noise:g}"].config()
        assert (given["steps"], given["epsilon"]) == (even.steps, EXP_EPSILON[noise])
        proven = acc.epsilon(even.total(even.steps), 1e-5).upper
        assert proven == pytest.approx(EXP_EPSILON[noise], abs=1e-3)
        rate = float(given["noise_schedule"].split(":")[1])
        assert rate * epochs == pytest.approx(math.log(2), rel=1e-5)
    noise, _, epochs = min(MLP_SETTINGS, key=lambda setting: setting[2])
    exp = ROWS[f"mnist-mlp-exp-noise-{noise:g}"].config()
    has(exp, learning_rate=0.1, momentum=0.0)
    proven = acc.epsilon(exp.total(exp.steps), 1e-5).upper
    assert proven == pytest.approx(EXP_EPSILON[noise], abs=1e-3)
    schedule = exp.noise()
    assert schedule(0) / schedule(exp.steps - 1) == pytest.approx(2 ** ((epochs - 1) / epochs))
    assert schedule(0) > noise > schedule(exp.steps - 1)


# AdaN as published.
ADAN = {
    "mnist-mlp-pca-adadp-noise-only-as-published-noise-8",
    "cifar10-features-adadp-noise-only-as-published-noise-6",
}


def test_the_rows_are_named_for_what_they_do():
    for sweep in SWEEPS:
        assert list(sweep.rows) == sorted(sweep.rows)
        for value, name in sweep.rows.items():
            given = ROWS[name].given
            numbers = (*given.values(), *given.get("settings", {}).values())
            base = name == min(sweep.rows.values(), key=len)
            named = base and "-".join(name.split("-")[:5]) in name
            assert value in {v for v in numbers if isinstance(v, (int, float))} or named, name
    for name, row in census.ROWS.items():
        assert ("not-private" in name) == (row.epsilon is None)
    # Every algorithm of the README's plot has a rate, chosen on public data, and a name.
    assert set(repeats.REPEATED) == set(repeats.CHOSEN) <= set(pareto.COLUMNS)
    assert set(repeats.CHOSEN) - set(repeats.TRIED) == {"sa-dpsgd-momentum"}
    assert repeats.CHOSEN["sa-dpsgd-momentum"] == repeats.CHOSEN["dp-sgd-tanh"]
    tried = [
        repeats.rate_name(name, rate) for name in repeats.TRIED for rate in repeats.TRIED[name]
    ]
    assert {ROWS[name].dataset for name in tried} == {"fashion_mnist"}
    # What is printed is beside a run that can be made, and that of Table 1.
    entries = [cell for of in printed.PAPERS.values() for cell in of]
    every = [vars(one) for cell in entries for one in (*cell.ours, *cell.tried)]
    named = {
        name for of in every for name in (of.get("name"), of.get("over"), *of.get("names", ()))
    }
    quoted = {name for cell in entries for name in re.findall(r"\{([\w.-]+)\}", cell.why)}
    known = {*ROWS, *printed_gaps.GAPS, *not_private.ROWS, *agd.ROWS, None}
    assert len(named) > 100
    assert {name for name in named | quoted if name not in known} <= ADAN
    for cell in entries:
        for one in map(vars, cell.ours):
            dataset, _, name = one.get("name", "").partition("-")
            if paper := PAPER.get(dataset, {}).get(name):
                assert cell.value == paper or "after the slash" in cell.what, cell.what
        if cell.value != 1.0 and cell.printed[0].isdigit():
            first = float(cell.printed.split()[0])
            assert cell.value in (first, pytest.approx(100 * first)), cell.what
    assert (not_private.PAPER["mnist"], not_private.PAPER["cifar10"]) == (99.09, 79.02)


def test_short_rows_annealed_ones_and_sweeps_differ_from_others_as_they_say():
    for name in CIFAR_SHORT:
        assert ROWS[f"cifar10-{name}-short"].given["epsilon"] == 3.0
        brief, whole = (quickly(f"cifar10-{name}{end}") for end in ("-short", ""))
        assert (brief.steps, whole.steps) == (150, 1_465)
        has(brief, learning_rate=whole.learning_rate, settings=whole.settings)
    # SA-DPSGD has no momentum but where its name says so.
    for name, row in ROWS.items():
        if "sa-dpsgd" in name and "mlp-64" not in name:
            config = quickly(name)
            assert config.momentum == (0.9 if "momentum" in name else 0.0), name
            rejections = config.settings.get("max_rejections", 10)
            assert rejections == 5 or row.dataset != "cifar10", name
    # Figure 7 moves one parameter at a time.
    assert len(pigdo_sweeps.ROWS) == 3 * (1 + 3 + 3 + 2 + 2)
    for row in pigdo_sweeps.ROWS:
        moved = [key for key, value in pigdo_sweeps.BASE.items() if row.given[key] != value]
        assert len(moved) == (0 if row.name.endswith("figure-7") else 1)
        assert row.given["steps"] * row.given["batch_size"] == pigdo_sweeps.EPOCHS * 60_000
        assert ROWS[row.name] is row
