"""The queue: estimated minutes, the order of running, and rows that are what their names say."""

import json
from pathlib import Path

import pytest

from jaxdp import accounting as acc
from jaxdp.papers import cost, order
from jaxdp.papers.rows import EXP_EPSILON, MLP_SETTINGS, ROWS
from jaxdp.papers.tables import Results, left

STORED = Path(__file__).parent.parent.parent / "benchmarks" / "results" / "papers.json"
LINES = [x for x in json.loads(STORED.read_text()) if x["steps_timed"] == x["steps"] > 1_000]


def test_the_order_holds_every_row_once_and_short_ones_first_in_a_group():
    found = list(order.ordered().values())
    assert sorted(row.name for row in found) == sorted(ROWS)
    keys = [(order.group(row), cost.minutes(row)) for row in found]
    assert keys == sorted(keys)
    assert {group for group, _ in keys} == set(range(len(order.GROUPS)))


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("fashion_mnist-sa-dpsgd-until-accepted", 0),
        ("mnist-sa-dpsgd-as-published-until-accepted", 1),
        ("mnist-mlp-adadp-noise-4", 2),
        ("fashion_mnist-mlp-piadam-noise-8", 2),
        ("mnist-mlp-pca-adadp-as-published-noise-3", 3),
        ("cifar10-features-adadp-noise-6", 3),
        ("mnist-piadam-repeated-epsilon-3", 4),
        ("cifar10-auto-s-short", 5),
        ("mnist-mlp-1000-adadp-noise-4", 6),
        ("mnist-mlp-piadam-figure-7-noise-8", 6),
        ("mnist-sa-dpsgd-learning-rate-1.5", 6),
    ],
)
def test_groups_are_those_of_the_issue(name, group):
    assert order.group(ROWS[name]) == group


def test_estimates_are_of_the_size_of_what_was_measured():
    ratios = sorted(60 * cost.minutes(ROWS[x["name"]]) / x["seconds"] for x in LINES)
    assert len(ratios) > 20
    # The machine was shared for most rows and idle for others, so that single rows differ by more.
    assert 0.6 < ratios[len(ratios) // 2] < 2.0
    assert ratios[len(ratios) // 10] > 0.25
    assert ratios[-len(ratios) // 10] < 6


def test_times_are_shown_in_minutes_up_to_two_hours():
    assert cost.shown(ROWS["mnist-mlp-dp-sgd-noise-8"]) == "2 min"
    assert cost.shown(ROWS["mnist-mlp-piadam-as-published-noise-2"]) == "3.9 h"


def test_runs_that_are_left_are_counted(tmp_path):
    line = {"test_accuracy": 0.9, "claimed_epsilon": None, "proven_epsilon": 3.0}
    line |= {"acceptance_rate": None, "seconds": 1.0, "steps": 1, "steps_timed": 1, "machine": ""}
    names = ("mnist-auto-s-short", "mnist-auto-s")
    (tmp_path / "papers.json").write_text(json.dumps([{"name": n, **line} for n in names]))
    results = Results(tmp_path)
    assert [left.missing(results, name) for name in names] == [2, 0]
    assert left.missing(results, "mnist-piadam-repeated-epsilon-3") == 3
    page = left.page(results)
    (short,) = [x for x in page.sections[0].table.rows if x[0] == "[short](short.md)"]
    assert short[2:5] == ["0", "1", str(int(short[1]) - 1)]


@pytest.mark.parametrize(("noise", "epochs"), [(n, e) for n, _, e in MLP_SETTINGS])
def test_exp_has_the_epsilon_of_dp_sgd_and_falls_to_one_half(noise, epochs):
    exp = ROWS[f"mnist-mlp-exp-noise-{noise:g}"].config()
    even = ROWS[f"mnist-mlp-dp-sgd-noise-{noise:g}"].config()
    assert (exp.steps, exp.learning_rate, exp.momentum) == (even.steps, 0.1, 0.0)
    proven = [acc.epsilon(c.total(c.steps), 1e-5).upper for c in (exp, even)]
    assert proven == pytest.approx([EXP_EPSILON[noise]] * 2, abs=1e-3)
    schedule = exp.noise()
    assert schedule(0) / schedule(exp.steps - 1) == pytest.approx(2 ** ((epochs - 1) / epochs))
    assert schedule(0) > noise > schedule(exp.steps - 1)
