"""What is printed beside ours: every name is a row, every figure that of its runs."""

import json
import re
from pathlib import Path

import pytest

from jaxdp.papers import tables
from jaxdp.papers.rows import PAPER, ROWS
from jaxdp.papers.tables import printed

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
ENTRIES = (*printed.SA, *printed.ADADP, *printed.PIGDO)
NAMED = [name for _, _, ours, _ in ENTRIES for _, name in ours if name]


def shown(tmp_path, *lines):
    (tmp_path / "papers.json").write_text(json.dumps(lines))
    return tables.to_markdown(printed.page(tables.Results(tmp_path)))


def line(name, accuracy, run=1):
    return {
        **{"name": name, "run": run, "test_accuracy": accuracy, "claimed_epsilon": None},
        **{"proven_epsilon": 3.0, "acceptance_rate": None, "seconds": 1.0, "steps": 1},
        **{"steps_timed": 1, "machine": ""},
    }


def test_every_name_is_a_row():
    assert len(set(NAMED)) > 40
    assert set(NAMED) <= set(ROWS)
    assert set(re.findall(r"`((?:mnist|fashion_mnist|cifar10)-[\w.-]+)`", TEXT)) <= set(ROWS)


@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist"])
def test_the_papers_column_is_that_of_table_1(dataset):
    for _, paper, ours, _ in printed.SA:
        for _, name in ours[:1]:
            algorithm = name.removeprefix(f"{dataset}-")
            if algorithm in PAPER[dataset]:
                assert paper == f"{PAPER[dataset][algorithm]:.2f} %"


def test_one_run_is_its_figure_and_several_are_mean_and_spread(tmp_path):
    text = shown(
        tmp_path,
        line("mnist-auto-s", 0.97921),
        *(line("mnist-dp-sgd-tanh", share, run) for run, share in enumerate((0.98, 0.982), 1)),
    )
    assert "| 98.12 % | 97.92 % `mnist-auto-s` | a few tenths" in text
    assert "98.10 ± 0.14 % `mnist-dp-sgd-tanh`" in text
    assert "| 84.42 % | not run `fashion_mnist-dp-sgd-relu` | – |" in text


def test_no_cause_is_told_before_the_experiment_that_tells_it(tmp_path):
    before = shown(tmp_path, line("mnist-sa-dpsgd-as-published", 0.97))
    assert "97.00 % `mnist-sa-dpsgd-as-published`" in before
    assert "by experiment" not in before
    after = shown(tmp_path, line("mnist-sa-dpsgd-as-published-until-accepted", 0.97))
    assert after.count("by experiment") == 1


def test_the_seconds_of_table_2_are_those_that_were_measured():
    (told,) = (ours[0][0] for what, _, ours, _ in printed.ADADP if what.startswith("Table II"))
    found = json.loads((ROOT / "benchmarks/results/adadp_cost.json").read_text(encoding="utf-8"))
    ratios = {line["algorithm"]: round(line["ratio_to_dp_sgd"], 1) for line in found["rows"]}
    shown = [float(number) for number in re.findall(r"[\d.]+(?=[,;]| \()", told)]
    assert shown == [ratios[name] for name in ("adadp-as-published", "adadp", "agd")]
