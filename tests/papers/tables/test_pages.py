"""Every committed page is what the committed rows give; nothing is dropped, nothing invented."""

import json
import re
from pathlib import Path

import click
import numpy as np
import pytest
from matplotlib.image import imread

from jaxdp import accounting as acc
from jaxdp.cli import main
from jaxdp.papers import census, claims, queue, repeats, tables
from jaxdp.papers.command import _TARGETS, reproduce
from jaxdp.papers.rows import ROWS
from jaxdp.papers.sweeps import SWEEPS
from jaxdp.papers.tables import left, pareto, rows, table3

ROOT = Path(__file__).parent.parent.parent.parent
RESULTS = tables.Results(ROOT / "benchmarks" / "results")
PAGES = ROOT / "docs" / "results"


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


@pytest.mark.parametrize("name", tables.TARGETS)
def test_the_committed_page_is_what_the_committed_rows_give(name):
    target = tables.TARGETS[name]
    assert (PAGES / f"{name}.md").read_text() == tables.to_markdown(target.page(RESULTS)), (
        f"run: jaxdp reproduce {name} --render-only"
    )
    for file in target.figures:
        picture = np.round(255 * imread(PAGES / file)).astype(np.uint8)
        assert min(picture.shape[:2]) > 400, file
        colours, counts = np.unique(picture.view(np.uint32), return_counts=True)
        assert len(colours) > 100, file  # letters and marks have soft edges: it is not blank
        assert counts.max() < 0.98 * counts.sum(), file


def test_no_mark_of_claims_lies_beyond_its_panel():
    (draw,) = tables.TARGETS["claims"].figures.values()
    for panel in draw(RESULTS).axes:
        low, high = panel.get_xlim()
        marks = [x for mark in panel.lines for x in mark.get_xdata()]
        assert marks
        assert low < min(marks)
        assert max(marks) < high


@pytest.mark.parametrize("name", tables.TARGETS)
def test_a_page_and_its_plots_are_made_of_no_rows_at_all(name, tmp_path):
    paths = tables.render(name, tables.Results(tmp_path), tmp_path / "out")
    assert [path.name for path in paths] == [f"{name}.md", *tables.TARGETS[name].figures]
    assert rows.MISSING in paths[0].read_text()


@pytest.mark.parametrize("name", [n for n, t in tables.TARGETS.items() if t.file == "papers.json"])
def test_every_row_of_a_target_is_on_its_page(name, tmp_path):
    target = tables.TARGETS[name]
    text = tables.to_markdown(target.page(tables.Results(tmp_path)))
    for row in target.rows:
        shown = next(x for x in text.splitlines() if f"`{row}`" in x)
        assert rows.status(row) in shown


def test_the_commands_are_the_targets():
    assert set(_TARGETS) == set(tables.TARGETS)
    for name in tables.TARGETS:
        assert name in reproduce.list_commands(click.Context(reproduce))


def test_cells_show_every_run_and_round_to_the_safe_side(tmp_path):
    found = results(
        tmp_path,
        line("mnist-dp-sgd-tanh", proven_epsilon=2.5000001),
        line(
            "mnist-dp-sgd-tanh",
            run=2,
            proven_epsilon="inf",
            audited_epsilon=7.80699,
            steps_timed=40,
            acceptance_rate=0.276,
        ),
    )
    first, second = rows.lines(found, "mnist-dp-sgd-tanh")
    assert first == [
        "`mnist-dp-sgd-tanh`",
        "98.77 %",
        "1.235",
        "2.501",
        "–",
        "–",
        "12",
        "1",
        "2 cores, cpu",
    ]
    assert second[3:8] == ["∞", "≥ 7.806", "27.6 %", "12 (last 40 of 100 steps)", "2"]
    assert len(first) == len(rows.COLUMNS)


def names_in(value):
    """Every name of a value of JSON, at any depth."""
    if isinstance(value, dict):
        for name, inside in value.items():
            yield name
            yield from names_in(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from names_in(inside)


def test_no_page_holds_a_seed():
    pages = list(PAGES.glob("*.md"))
    assert {page.stem for page in pages} >= set(tables.TARGETS)
    for page in pages:
        assert not re.search(r"\bseeds?\b", page.read_text())
    for file in ("papers.json", "pums.json", "accountants.json"):
        kept = RESULTS.read(file)
        assert kept, file
        assert not {"seed", "secret", "entropy"} & set(names_in(kept)), file


def test_the_epsilon_of_an_accuracy_is_that_of_its_first_evaluation(tmp_path):
    curve = [[10, 0.5, 0.93], [20, 0.9, 0.951], [30, 1.2, 0.94], [40, 1.5, 0.961]]
    row = line("mnist-dp-sgd-tanh", curve=curve)
    assert table3.crossing(row, 94) == (20, 0.9)
    assert table3.crossing(row, 96) == (40, 1.5)
    assert table3.crossing(row, 98) is None
    assert table3.crossing(line("x"), 98) == (100, 2.5)  # no curve: its end
    assert table3.crossing(line("x"), 99) is None
    text = tables.to_markdown(table3.page(results(tmp_path, row)))
    assert "| 94 % | DP-SGD, tanh | 1.23 | `mnist-dp-sgd-tanh` | step 20 of 100 | 95.10 % |" in text
    assert "not reached" in text


def test_the_papers_noise_is_charged_by_its_accountant(tmp_path):
    """From the experiments' curves: a row at 2.15 stands there, another experiment does not."""
    curve = [[100, 0.83], [200, 0.85], [300, 0.84]]
    name, kept = "fashion_mnist-dp-sgd-tanh-noise-2.15", {"steps": 300, "curve": curve}
    kept |= {"dataset": "fashion_mnist", "algorithm": "dp-sgd", "test_accuracy": 0.84}
    other = {**kept, "name": "adadp-of-lot", "algorithm": "adadp-as-published"}
    (tmp_path / "printed_gaps.json").write_text(json.dumps([{**kept, "name": name}, other]))
    section = table3.page(results(tmp_path)).sections[-1]
    first, second, third = section.table.rows
    at = [
        claims.sa_dpsgd_theorem_1(2_048 / 60_000, 2.15, steps, 1e-5).value for steps in (100, 200)
    ]
    assert first == ["Fashion-MNIST", "DP-SGD, tanh", "2.15", "82 %", "1.73", first[-1]]
    assert first[-1] == f"{rows.shown_epsilon(at[0])} at step 100 of 300"
    assert second[-1] == f"{rows.shown_epsilon(at[1])} at step 200 of 300"
    assert third[-1] == "not reached"


def test_a_run_until_accepted_is_compared_with_the_papers_own():
    name = "mnist-sa-dpsgd-as-published-momentum-until-accepted"
    at = "| 94 % | SA-DPSGD, as published, momentum 0.9, until accepted | 1.21 | "
    assert at + f"`{name}` |" in tables.to_markdown(table3.page(RESULTS))


def test_hours_that_ran_are_those_of_the_rows(tmp_path):
    found = results(tmp_path, *(line("mnist-auto-s-short", run=n, seconds=3_600) for n in (1, 2)))
    told = {row[0]: row for row in left.page(found).sections[0].table.rows}
    assert told["[short](short.md)"][3] == "1"  # begun, more runs wanted
    assert told["all"][5] == "2.0"


def test_a_short_row_stands_in_for_a_long_one_without_a_curve(tmp_path):
    long, short = line("mnist-auto-s"), line("mnist-auto-s-short", curve=[[1, 0.1, 0.99]])
    assert table3.with_curve(results(tmp_path, long, short), "mnist-auto-s") == [short]
    alone = results(tmp_path, long)
    assert table3.with_curve(alone, "mnist-auto-s") == [long]
    assert "step 100 of 100 or before; curve not kept" in tables.to_markdown(table3.page(alone))


def test_the_rows_are_named_for_what_they_do():
    for algorithm in pareto.COLUMNS:
        for epsilon in pareto.EPSILONS:
            row = ROWS[pareto.row_name(algorithm, epsilon)]
            assert (row.given["epsilon"], row.given["steps"]) == (epsilon, 600)
    for algorithm in repeats.REPEATED:
        for epsilon in repeats.EPSILONS:
            given = ROWS[repeats.row_name(algorithm, epsilon)].given
            assert (given["epsilon"], given["learning_rate"]) == (
                epsilon,
                repeats.CHOSEN[algorithm],
            )
    for sweep in SWEEPS:
        assert list(sweep.rows) == sorted(sweep.rows)
        for value, name in sweep.rows.items():
            given = ROWS[name].given
            numbers = {
                v
                for v in (*given.values(), *given.get("settings", {}).values())
                if isinstance(v, (int, float))
            }
            assert value in numbers or "-".join(name.split("-")[:5]) in name, name
            if name != min(sweep.rows.values(), key=len):
                assert value in numbers, name


def test_sa_dpsgd_has_no_momentum_but_where_its_name_says_so():
    for name, row in ROWS.items():
        if "sa-dpsgd" in name and "mlp-64" not in name:
            config = row.config()
            assert config.momentum == (0.9 if "momentum" in name else 0.0), name
            rejections = config.settings.get("max_rejections", 10)
            if row.dataset == "cifar10":
                assert rejections == 5, name
    for line in RESULTS.read("papers.json"):
        if "sa-dpsgd" in line["name"]:
            assert line["config"]["momentum"] == ROWS[line["name"]].config().momentum


def test_the_rows_at_the_rates_of_their_papers_have_them():
    for dataset in ("mnist", "fashion_mnist"):
        adadp = ROWS[f"{dataset}-adadp-clip-4"].config()
        assert (adadp.learning_rate, adadp.l2_clip_norm) == (0.002, 4.0)
        piadam = ROWS[f"{dataset}-piadam-clip-4"].config()
        assert (piadam.learning_rate, piadam.l2_clip_norm) == (0.001, 4.0)


def test_a_row_until_accepted_shows_claimed_taken_and_proven(tmp_path):
    name = "fashion_mnist-sa-dpsgd-as-published-until-accepted"
    curve = [[2_000, 9.3937, 0.8], [3_500, 9.3937, 0.87654]]
    step = acc.PoissonSampled(acc.Gaussian(2.15), 2_048 / 60_000)
    taken = acc.epsilon(acc.Repeated(step, 3_500), 1e-5).upper
    made = line(name, accepted=1_160, steps=3_500, steps_timed=3_500, curve=curve)
    made |= {"proven_epsilon": 9.3937, "test_accuracy": 0.87654}
    text = tables.to_markdown(tables.TARGETS["accepted"].page(results(tmp_path, made)))
    (shown,) = [x for x in text.splitlines() if f"`{name}`" in x]
    assert "| 87.41 % |" in shown
    assert 4.4 < taken <= 4.401
    assert "| 87.65 % | 1,160 / 3,500 | 3.004 | 4.401 | 9.394 |" in shown
    short = results(tmp_path, {**made, "accepted": 900})
    assert "900 / 3,500, of 1,157 to reach" in tables.to_markdown(
        tables.TARGETS["accepted"].page(short)
    )
    tables.TARGETS["accepted"].figures["accepted.png"](short)


def test_a_target_is_rendered_without_running(tmp_path, capsys):
    arguments = ["--render-only", "--results-dir", str(tmp_path), "--to", str(tmp_path)]
    main(["reproduce", "pareto", *arguments])
    assert (tmp_path / "pareto.png").exists()
    assert "pareto.md" in capsys.readouterr().out


def test_rows_that_take_hours_are_named_and_left_out(monkeypatch, capsys):
    from jaxdp.papers import command

    names = ("mnist-dp-sgd-tanh", "mnist-mlp-piadam-as-published-noise-2")
    assert command._runnable(names) == names[:1]
    assert "1 rows take hours" in capsys.readouterr().err
    assert rows.status(names[1]) == "not run: 3.9 h"
    assert rows.status("mnist-mlp-dp-sgd-noise-8") == "not run: 2 min"
    monkeypatch.setattr(queue, "has_gpu", lambda: True)
    assert command._runnable(names) == names


def test_census_rows_are_private_or_say_that_they_are_not():
    for name, row in census.ROWS.items():
        assert ("not-private" in name) == (row.epsilon is None)
    text = (PAGES / "pums.md").read_text()
    assert "**no guarantee at all**" in text
