"""Samplings on the command line, and in the report of a run."""

import json

import pytest
from click.testing import CliRunner

from jaxdp import accounting as acc
from jaxdp import correlated, sampling
from jaxdp.cli import app
from jaxdp.cli.options import CORRELATED, RELATIONS, SAMPLINGS, STRATEGIES
from jaxdp.runs import strategies

EPOCH = ("--sampling", "allocation", "--steps-per-epoch", "4")
COMMON = ("--noise-multiplier", "2", "--steps", "6", "--delta", "1e-5")
EVENTS = {
    "allocation": acc.RandomAllocation(acc.Gaussian(1.0), 4),
    "shuffle": acc.ShuffledEpoch(acc.Gaussian(1.0), 4),
    "truncated_poisson": acc.TruncatedPoisson(acc.Gaussian(1.0), 0.1, 40, 200),
}


def needs(name):
    """Skips where no accountant bounds the sampling's event."""
    relation = sampling.relations(name)[-1]
    if not acc.supports(EVENTS[name], relation):
        pytest.skip(f"no accountant of {name}")
    return relation.value


def call(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=True)


def test_a_public_order_is_refused_where_a_record_is_removed():
    found = call("epsilon", "--sampling", "fixed_order", *COMMON)
    assert "one removed record shifts every position" in str(found.exception)
    alone = call("train", "--sampling", "fixed_order", "--dry-run")
    assert "strategy must be given with sampling fixed_order" in str(alone.exception)


def test_the_names_are_those_of_the_package():
    assert SAMPLINGS == sampling.NAMES
    assert CORRELATED == correlated.SAMPLINGS
    assert tuple(strategies.SAMPLINGS) == STRATEGIES
    assert {"dense", *STRATEGIES} == set(correlated.STRATEGIES)
    assert tuple(relation.value for relation in acc.Relation) == RELATIONS


@pytest.mark.parametrize(
    ("args", "event", "count"),
    [
        ((*EPOCH, *COMMON), acc.RandomAllocation(acc.Gaussian(2.0), 4), 2),
        (
            (*EPOCH, "--participations", "2", *COMMON),
            acc.RandomAllocation(acc.Gaussian(2.0), 4, 2),
            2,
        ),
        (
            ("--sampling", "shuffle", "--steps-per-epoch", "5", *COMMON),
            acc.ShuffledEpoch(acc.Gaussian(2.0), 5),
            2,
        ),
        (
            (
                *("--sampling", "truncated_poisson", "--sampling-prob", "0.1"),
                *("--cap", "30", "--dataset-size", "200", *COMMON),
            ),
            acc.TruncatedPoisson(acc.Gaussian(2.0), 0.1, 30, 200),
            6,
        ),
        (("--sampling", "full_batch", *COMMON), acc.Gaussian(2.0), 6),
        (
            ("--sampling", "cyclic_poisson", "--sampling-prob", "0.1", "--bands", "4", *COMMON),
            acc.CyclicPoisson(acc.Gaussian(2.0), 0.1, 4, 6),
            1,
        ),
        (("--sampling", "fixed_order", *COMMON), acc.CorrelatedNoise(acc.Gaussian(2.0), 6), 1),
    ],
)
def test_epsilon_asks_for_the_event_of_the_sampling(monkeypatch, args, event, count):
    asked = []

    def epsilon(found, *rest, **options):
        asked.append(found)
        return acc.Bound(0.0, 0.5, 1.0, "test")

    monkeypatch.setattr(acc, "epsilon", epsilon)
    answer = json.loads(call("epsilon", *args, "--json").output)
    assert asked == [acc.Repeated(event, count)]
    assert answer["sampling"] in (*args, "poisson")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--sampling", "shuffle", *COMMON), "--steps-per-epoch must come with --sampling shuffle"),
        (COMMON, "--sampling-prob must come with --sampling poisson"),
        ((*EPOCH, "--sampling-prob", "0.1", *COMMON), "--sampling-prob must not come with"),
        ((*EPOCH, "--claims", *COMMON), "--claims must come with --sampling poisson"),
        (
            ("--sampling", "cyclic_poisson", "--sampling-prob", "0.1", *COMMON),
            "--bands must come with --sampling cyclic_poisson",
        ),
        (("--sampling", "fixed_order", "--bands", "4", *COMMON), "--bands must not come with"),
    ],
)
def test_epsilon_refuses_numbers_of_another_sampling(monkeypatch, args, words):
    monkeypatch.setattr(acc, "epsilon", lambda *args: acc.Bound(0.0, 0.5, 1.0, "test"))
    assert words in call("epsilon", *args).output


@pytest.mark.parametrize(
    ("name", "relation", "words"),
    [
        ("shuffle", "add_or_remove_one", "relation must be one of replace_one, replace_special"),
        ("truncated_poisson", "add_or_remove_one", "relation must be one of replace_special"),
        ("truncated_poisson", "replace_one", "relation must be one of replace_special"),
        ("allocation", "replace_one", "relation must be one of add_or_remove_one, replace_special"),
    ],
)
def test_relations_that_are_not_covered_are_refused_before_any_work(
    tmp_path, name, relation, words
):
    found = call(
        "train", "--sampling", name, "--relation", relation, "--out", tmp_path / "r", "--steps", 4
    )
    assert isinstance(found.exception, ValueError)
    assert words in str(found.exception)
    assert f"with sampling {name}" in str(found.exception)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("poisson", "--cap", 5), "cap must be None but for truncated_poisson"),
        (("allocation", "--participations", 0), "participations must be a whole number"),
        (("shuffle", "--relation", "replace_special", "--participations", 2), "participations mus"),
        (("truncated_poisson", "--relation", "replace_special", "--cap", 0), "cap must be a whole"),
    ],
)
def test_numbers_of_another_sampling_are_refused(tmp_path, args, words):
    found = call("train", "--out", tmp_path / "r", "--steps", 4, "--sampling", *args)
    assert words in str(found.exception)


@pytest.mark.parametrize("name", ["allocation", "shuffle", "truncated_poisson"])
def test_a_run_on_the_digits(tmp_path, name):
    relation, out = needs(name), tmp_path / "r"
    found = call(
        *("train", "--sampling", name, "--relation", relation, "--epsilon", 8, "--steps", 7),
        *("--model", "logistic", "--out", out, "--seed", 3),
    )
    assert found.exception is None, found.output
    report = json.loads((out / "report.json").read_text())
    guarantee, page = report["guarantee"], (out / "report.md").read_text()
    assert (guarantee["sampling"], guarantee["relation"]) == (name, relation)
    assert guarantee["epsilon"] <= 8
    assert guarantee["releases"] == (7 if name == "truncated_poisson" else 12)
    about = [warning["about"] for warning in report["warnings"]]
    assert about == (["sampling"] if name == "shuffle" else [])
    if name == "shuffle":
        assert "Taking the batches for Poisson samples would claim" in page
        assert "which is no guarantee" in page
        assert "take sampling allocation instead" in page
    if name != "truncated_poisson":
        assert "steps was rounded up from 7 to 12, 2 epochs of 6 steps" in found.output
    assert {
        "allocation": "240 of 1,437 records expected",
        "shuffle": "one pass over the records",
    }.get(name, "of more than 384") in page
    command = report["command"]
    assert f"--sampling {name}" in command
