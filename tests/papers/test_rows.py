"""The rows of the papers: named for what they do, with the papers' numbers, in an order to run."""

import dataclasses
import math
import subprocess
import sys

import pytest

from jaxdp import accounting as acc
from jaxdp.papers import (
    adadp_rows,
    census,
    command,
    cost,
    not_private,
    order,
    pigdo_sweeps,
    queue,
    repeats,
)
from jaxdp.papers.rows import CIFAR_SHORT, EXP_EPSILON, MLP_SETTINGS, PAPER, ROWS
from jaxdp.papers.sweeps import SWEEPS
from jaxdp.papers.tables import pareto, printed, rows
from tests.compiling import with_flags

GROUPS = {
    "fashion_mnist-sa-dpsgd-until-accepted": 0, "mnist-sa-dpsgd-as-published-until-accepted": 1,
    "mnist-mlp-adadp-noise-4": 2, "fashion_mnist-mlp-piadam-noise-8": 2,
    "mnist-mlp-pca-adadp-as-published-noise-3": 3, "cifar10-features-adadp-noise-6": 3,
    "mnist-piadam-repeated-epsilon-3": 4, "cifar10-auto-s-short": 5,
    "mnist-mlp-1000-adadp-noise-4": 6, "mnist-mlp-piadam-figure-7-noise-8": 6,
    "mnist-sa-dpsgd-learning-rate-1.5": 6,
}  # fmt: skip
ALONE = """
from jaxdp.papers.row import Row
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


def test_the_rows_are_named_for_what_they_do():
    for algorithm in pareto.COLUMNS:
        for epsilon in pareto.EPSILONS:
            given = ROWS[pareto.row_name(algorithm, epsilon)].given
            assert (given["epsilon"], given["steps"]) == (epsilon, 600)
    for algorithm in repeats.REPEATED:
        for epsilon in repeats.EPSILONS:
            given = ROWS[repeats.row_name(algorithm, epsilon)].given
            chosen = epsilon, repeats.CHOSEN[algorithm]
            assert (given["epsilon"], given["learning_rate"]) == chosen
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
    # What is printed is beside a row, and that of Table 1.
    entries = (*printed.SA, *printed.ADADP, *printed.PIGDO)
    named = {name for _, _, ours, _ in entries for _, name in ours if name}
    assert len(named) > 40
    assert named <= set(ROWS)
    for dataset in ("mnist", "fashion_mnist"):
        for _, paper, ours, _ in printed.SA:
            told = [PAPER[dataset].get(name.removeprefix(f"{dataset}-")) for _, name in ours[:1]]
            assert all(each is None or paper == f"{each:.2f} %" for each in told)
    assert (not_private.PAPER["mnist"], not_private.PAPER["cifar10"]) == (99.09, 79.02)


def test_the_rows_have_the_settings_of_their_papers():
    for dataset in ("mnist", "fashion_mnist"):
        has(quickly(f"{dataset}-adadp-clip-4"), learning_rate=0.002, l2_clip_norm=4.0)
        has(quickly(f"{dataset}-piadam-clip-4"), learning_rate=0.001, l2_clip_norm=4.0)
    for algorithm in adadp_rows.TABLE_1:
        config = ROWS[adadp_rows.table_1_name(algorithm)].config()
        has(config, noise_multiplier=3.0, pca_noise_multiplier=6.0)
        has(config, delta=1e-4, batch_size=600, eval_every=100)
    for algorithm, rate in adadp_rows.ABLATIONS.items():
        config = ROWS[adadp_rows.ablation_name(algorithm)].config()
        has(config, learning_rate=rate, noise_multiplier=8.0, pca_noise_multiplier=16.0)
        has(config, steps=3_000, l2_clip_norm=4.0)
    for name in CIFAR_SHORT:
        assert ROWS[f"cifar10-{name}-short"].given["epsilon"] == 3.0
        brief, whole = (quickly(f"cifar10-{name}{end}") for end in ("-short", ""))
        assert (brief.steps, whole.steps) == (150, 1_465)
        has(brief, learning_rate=whole.learning_rate, settings=whole.settings)
    for algorithm, rate, momentum in (("dp-sgd", 0.1, 0.0), ("piadam", 0.001, None)):
        given = ROWS[f"mnist-mlp-{algorithm}-noise-4"].given
        assert (given["learning_rate"], given.get("momentum")) == (rate, momentum)
        assert "pca_dimensions" not in given  # PIGDO's baselines see all pixels
        numbers = given["steps"], given["batch_size"], given["noise_multiplier"]
        assert numbers == (10_000, 600, 4.0)
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
