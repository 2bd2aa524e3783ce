"""Samplings and strategies on the command line, and in the report of a run."""

import json
import shutil

import pytest
from click.testing import CliRunner

from jaxdp import accounting as acc
from jaxdp import correlated, sampling
from jaxdp.cli import app
from jaxdp.cli.options import CORRELATED, RELATIONS, SAMPLINGS, STRATEGIES
from jaxdp.runs import strategies

COMMON = "--noise-multiplier 2 --steps 6 --delta 1e-5"
GAUSSIAN = acc.Gaussian(2.0)
SMALL = "--model logistic --steps 8 --batch-size 200 --epsilon 3"


def call(command, *args):
    return CliRunner().invoke(app, [*command.split(), *(str(arg) for arg in args)])


def finished(command, *args):
    found = call(command, *args)
    assert found.exception is None, found.output
    return found.output


def page_of(folder):
    return " ".join((folder / "report.md").read_text().split())


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def test_the_names_are_those_of_the_package():
    assert SAMPLINGS == sampling.NAMES
    assert CORRELATED == correlated.SAMPLINGS
    assert tuple(strategies.SAMPLINGS) == STRATEGIES
    assert {"dense", *STRATEGIES} == set(correlated.STRATEGIES)
    assert tuple(relation.value for relation in acc.Relation) == RELATIONS


def test_epsilon_asks_for_the_event_of_the_sampling(monkeypatch):
    asked = []

    def epsilon(found, *rest, **options):
        asked.append(found)
        return acc.Bound(0.0, 0.5, 1.0, "test")

    monkeypatch.setattr(acc, "epsilon", epsilon)
    for args, event, count in (
        ("allocation --steps-per-epoch 4", acc.RandomAllocation(GAUSSIAN, 4), 2),
        (
            "allocation --steps-per-epoch 4 --participations 2",
            acc.RandomAllocation(GAUSSIAN, 4, 2),
            2,
        ),
        ("shuffle --steps-per-epoch 5", acc.ShuffledEpoch(GAUSSIAN, 5), 2),
        (
            "truncated_poisson --sampling-prob 0.1 --cap 30 --dataset-size 200",
            acc.TruncatedPoisson(GAUSSIAN, 0.1, 30, 200),
            6,
        ),
        ("full_batch", GAUSSIAN, 6),
        ("cyclic_poisson --sampling-prob 0.1 --bands 4", acc.CyclicPoisson(GAUSSIAN, 0.1, 4, 6), 1),
        ("fixed_order", acc.CorrelatedNoise(GAUSSIAN, 6), 1),
    ):
        answer = json.loads(finished(f"epsilon --sampling {args} {COMMON} --json"))
        assert asked.pop() == acc.Repeated(event, count)
        assert not asked
        assert answer["sampling"] == args.split()[0]


@pytest.mark.parametrize("name", ["allocation", "shuffle", "truncated_poisson"])
def test_a_run_on_the_digits(tmp_path, name):
    relation, out = sampling.relations(name)[-1].value, tmp_path / "r"
    noise = "--epsilon 8" if name == "allocation" else "--noise-multiplier 1"
    options = f"--steps 3 --batch-size 720 --eval-every 4 --seed 3 --model logistic {noise} --out"
    told = finished(f"train --sampling {name} --relation {relation} {options}", out)
    report, page = report_of(out), page_of(out)
    guarantee = report["guarantee"]
    assert (guarantee["sampling"], guarantee["relation"]) == (name, relation)
    assert 0 < guarantee["epsilon"] <= (8 if name == "allocation" else 20)
    assert guarantee["releases"] == (4 if name == "allocation" else 3)
    about = [warning["about"] for warning in report["warnings"]]
    assert about == (["sampling"] if name == "shuffle" else [])
    if name == "shuffle":
        assert "Taking the batches for Poisson samples would claim" in page
        assert "which is no guarantee" in page
        assert "take sampling allocation instead" in page
    if name == "allocation":
        assert "steps was rounded up from 3 to 4, 2 epochs of 2 steps" in told
    assert {
        "allocation": "in every epoch each is in 1 of 2 steps, drawn for it alone",
        "shuffle": "one pass over the records",
        "truncated_poisson": "that many are kept at random (truncated Poisson sampling)",
    }[name] in page
    assert f"--sampling {name}" in report["command"]


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    found = {}
    for name in ("banded", "buffered"):
        out = tmp_path_factory.mktemp("cli") / name
        told = finished(f"train {SMALL} --strategy {name} --bands 3 --out", out)
        found[name] = (out, report_of(out), page_of(out), told)
    return found


# What a report says of a strategy: what its noise is relative to, its sampling and relation.
SAID = {
    "banded": (
        ("cyclic_poisson", "add_or_remove_one"),
        "one draw of a record can move what the strategy makes of the run's sums",
        "a banded Toeplitz strategy of 3 bands",
        "every record is in one of 3 groups",
    ),
    "buffered": (
        ("fixed_order", "replace_special"),
        "one record, in all of its steps together, can move what the strategy makes",
        "a buffered Toeplitz strategy (BLT) of 3 buffers",
        "every pass takes the records in one and the same order",
        "one record replaced by a null record",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_the_report_of_a_strategy(reported, name):
    _, report, page, said = reported[name]
    names, *words = SAID[name]
    for each in (
        *words,
        "not to be compared with one",
        "the whole run of 8 steps is one event, charged whole with its first step",
    ):
        assert each in page, each
    assert "of what one record can add" not in page
    assert "1 times a run" not in page
    guarantee = report["guarantee"]
    assert guarantee["epsilon"] <= 3
    assert {row["epsilon"] for row in report["history"]} == {guarantee["epsilon"]}
    assert (guarantee["sampling"], guarantee["relation"]) == names
    assert f"{names[0]} sampling" in said


def test_noise_on_a_grid_is_correlated_too(tmp_path):
    out = tmp_path / "grid"
    finished(f"train {SMALL} --strategy banded --bands 3 --secure-noise --out", out)
    page = page_of(out)
    for words in (
        "a banded Toeplitz strategy of 3 bands",
        "what a step takes back of earlier noise is an integer too",
        "on an integer grid: the noise is within",
        "integers of s = 522,246 from ChaCha20",
        "cells of gamma = ",
    ):
        assert words in page
    assert "Floating-point attacks" not in page
    assert report_of(out)["guarantee"]["epsilon"] <= 3


def test_a_finished_run_is_resumed_with_its_strategy(reported, tmp_path):
    out = shutil.copytree(reported["banded"][0], tmp_path / "banded")
    finished("train --resume --out", out)
    after = report_of(out)
    assert after["history"] == reported["banded"][1]["history"]
    assert "--strategy banded --bands 3" in after["command"]
    other = call("train --resume --bands 2 --out", out)
    assert "changed: bands (3 then, 2 now)" in str(other.exception)


def test_a_dry_run_of_a_strategy_says_what_it_costs():
    told = finished(f"train {SMALL} --strategy banded --bands 3 --dry-run --json")
    answer = json.loads(told.splitlines()[-1])
    assert 2.99 < answer["epsilon"] <= 3
    assert answer["steps"] == 8


def test_a_run_is_audited_under_its_own_relation(reported, tmp_path):
    out = shutil.copytree(reported["buffered"][0], tmp_path / "buffered")
    told = finished("audit --runs 100 --seed 1 --json --steps 8", out)
    row = json.loads(told.splitlines()[-1])
    assert row["proven"] <= 3
    assert not row["broken"]
    assert not row["noise_refuted"]
