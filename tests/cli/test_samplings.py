"""Samplings and strategies on the command line, and in the report of a run."""

import json
import shutil

import pytest

from jaxdp import accounting as acc
from jaxdp import mechanism, sampling
from jaxdp.cli.accounting import _NEEDED
from jaxdp.cli.options import CORRELATED, RELATIONS, STRATEGIES
from jaxdp.noise import optimise
from jaxdp.runs import strategies
from tests.cli.calling import called, ran
from tests.runs.small import undrawn

COMMON = "--noise-multiplier 2 --steps 6 --delta 1e-5"
GAUSSIAN = acc.Gaussian(2.0)
SMALL = "--model logistic --steps 8 --batch-size 200 --epsilon 3"


def finished(command, *arguments):
    return ran(*command.split(), *arguments)


def page_and_report(folder):
    page = " ".join((folder / "report.md").read_text().split())
    return page, json.loads((folder / "report.json").read_text())


ALLOCATION = "allocation --steps-per-epoch 4"
CUT = "--sampling-prob 0.1 --cap 30 --dataset-size 200"
EVENTS = (
    (ALLOCATION, acc.RandomAllocation(GAUSSIAN, 4), 2),
    (f"{ALLOCATION} --participations 2", acc.RandomAllocation(GAUSSIAN, 4, 2), 2),
    ("shuffle --steps-per-epoch 5", acc.ShuffledEpoch(GAUSSIAN, 5), 2),
    (f"truncated_poisson {CUT}", acc.TruncatedPoisson(GAUSSIAN, 0.1, 30, 200), 6),
    ("full_batch", GAUSSIAN, 6),
    ("cyclic_poisson --sampling-prob 0.1 --bands 4", acc.CyclicPoisson(GAUSSIAN, 0.1, 4, 6), 1),
    ("fixed_order", acc.CorrelatedNoise(GAUSSIAN, 6), 1),
)


def test_epsilon_asks_for_the_event_of_the_sampling(monkeypatch):
    asked, answered = [], acc.Bound(0.0, 0.5, 1.0, "test")
    monkeypatch.setattr(acc, "epsilon", lambda found, *a, **k: asked.append(found) or answered)
    for args, event, count in EVENTS:
        answer = json.loads(finished(f"epsilon --sampling {args} {COMMON} --json"))
        assert asked == [acc.Repeated(event, count)], args
        assert answer["sampling"] == args.split()[0]
        asked.clear()
    # The names are those of the package.
    assert set(_NEEDED) == {*sampling.names(), *CORRELATED}
    assert CORRELATED == mechanism.CORRELATED_SAMPLINGS
    assert tuple(strategies.SAMPLINGS) == STRATEGIES
    assert {"dense", *STRATEGIES} == set(optimise.STRATEGIES)
    assert tuple(relation.value for relation in acc.Relation) == RELATIONS


# fmt: off
WORDS = {
    "allocation": ("in every epoch each is in 1 of 2 steps, drawn for it alone",),
    "shuffle": (
        "one pass over the records", "Taking the batches for Poisson samples would claim",
        "which is no guarantee", "take sampling allocation instead",
    ),
    "truncated_poisson": ("that many are kept at random (truncated Poisson sampling)",),
}
# fmt: on


@undrawn()
@pytest.mark.parametrize("name", WORDS)
def test_a_run_on_the_digits(tmp_path, name):
    relation, rounded = sampling.relations(name)[-1].value, name == "allocation"
    noise = "--epsilon 8" if rounded else "--noise-multiplier 1"
    options = f"--steps 3 --batch-size 720 --eval-every 4 --seed 3 --model logistic {noise} --out"
    told = finished(f"train --sampling {name} --relation {relation} {options}", tmp_path / "r")
    page, report = page_and_report(tmp_path / "r")
    guarantee = report["guarantee"]
    assert (guarantee["sampling"], guarantee["relation"]) == (name, relation)
    assert 0 < guarantee["epsilon"] <= (8 if rounded else 20)
    assert guarantee["releases"] == (4 if rounded else 3)
    assert ("steps was rounded up from 3 to 4, 2 epochs of 2 steps" in told) == rounded
    about = [warning["about"] for warning in report["warnings"]]
    assert about == (["sampling"] if name == "shuffle" else [])
    assert [words for words in WORDS[name] if words not in page] == []
    assert f"--sampling {name}" in report["command"]


OPTIONS = {"banded": "banded", "buffered": "buffered", "grid": "banded --secure-noise"}


@pytest.fixture(scope="module")
@undrawn()
def reported(tmp_path_factory):
    """Of each strategy: a run's folder, what it said, and its page and report."""
    found = {}
    for name, options in OPTIONS.items():
        out = tmp_path_factory.mktemp("cli") / name
        told = finished(f"train {SMALL} --strategy {options} --bands 3 --out", out)
        found[name] = (out, told, *page_and_report(out))
    return found


# What a report says of a strategy: its sampling and relation, and what its noise is relative to.
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
    "grid": (
        ("cyclic_poisson", "add_or_remove_one"),
        "a banded Toeplitz strategy of 3 bands",
        "what a step takes back of earlier noise is an integer too",
        "on an integer grid: the noise is within",
        "integers of s = 522,246 from ChaCha20",
        "cells of gamma = ",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_the_report_of_a_strategy(reported, name):
    _, told, page, report = reported[name]
    names, *words = SAID[name]
    words += ["not to be compared with one"]
    words += ["the whole run of 8 steps is one event, charged whole with its first step"]
    assert [each for each in words if each not in page] == []
    assert "of what one record can add" not in page
    assert "1 times a run" not in page
    assert ("Floating-point attacks" in page) == (name != "grid")
    guarantee = report["guarantee"]
    assert guarantee["epsilon"] <= 3
    assert {row["epsilon"] for row in report["history"]} == {guarantee["epsilon"]}
    assert (guarantee["sampling"], guarantee["relation"]) == names
    assert f"{names[0]} sampling" in told


@undrawn()
def test_a_finished_run_is_resumed_and_audited_with_its_strategy_and_relation(reported, tmp_path):
    for name in ("banded", "grid"):
        out = shutil.copytree(reported[name][0], tmp_path / name)
        finished("train --resume --out", out)
        after = page_and_report(out)[1]
        assert after["history"] == reported[name][3]["history"], name
        assert f"--strategy {OPTIONS[name].split()[0]} --bands 3" in after["command"]
        assert ("--secure-noise" in after["command"]) == (name == "grid")
        other = called(*"train --resume --bands 2 --out".split(), out)
        assert "changed: bands (3 then, 2 now)" in str(other.exception), name
    out = shutil.copytree(reported["buffered"][0], tmp_path / "buffered")
    told = finished("audit --runs 100 --seed 1 --json --steps 8", out)
    row = json.loads(told.splitlines()[-1])
    assert row["proven"] <= 3
    assert (row["broken"], row["noise_refuted"]) == (False, False)
