"""`jaxdp plan`: the errors of mechanisms for one budget."""

import json

import pytest

import jaxdp
from jaxdp.cli.plan import _best, _Budget, _makers
from tests.cli.calling import called

REFERENCE = {"epsilon": 2.0, "delta": 1e-5, "steps": 2_000, "batch_size": 500}
SMALL = {"epsilon": 2.0, "delta": 1e-5, "steps": 30, "batch_size": 20, "dataset_size": 200}


def call(numbers, *args):
    given = [part for name, v in numbers.items() for part in (f"--{name.replace('_', '-')}", v)]
    return called("plan", *given, *args)


def test_the_reference_has_its_numbers():
    makers = dict(_makers(0.0, _Budget(**REFERENCE, dataset_size=50_000)))
    plain, banded, buffered = (makers[name]() for name in ("DP-SGD", "BandMF", "BLT"))
    assert (banded.bands, banded.memory) == (8, 7)
    assert banded.noise_multiplier == pytest.approx(2.70808, rel=2e-4)
    assert banded.rms_error == pytest.approx(31.3595, rel=2e-4)
    assert plain.rms_error == pytest.approx(36.35, rel=2e-4)
    assert plain.memory == 0
    assert (buffered.relation, buffered.memory) == ("replace_special", 4)
    assert _best([plain, banded, buffered], "add_or_remove_one") is banded
    assert all(1.999 < row.epsilon <= 2 for row in (plain, banded, buffered))


def test_json_has_every_mechanism_its_errors_and_the_best():
    answer = json.loads(call(SMALL, "--json").stdout.splitlines()[-1])
    names = "DP-SGD, Poisson sampling|DP-SGD, random allocation|BandMF, cyclic Poisson"
    names += "|BLT, fixed order|banded, fixed order"
    assert [row["name"] for row in answer["rows"]] == names.split("|")
    strict = [row for row in answer["rows"] if row["relation"] == "add_or_remove_one"]
    assert answer["best"] == min(strict, key=lambda row: row["rms_error"])["name"]
    assert answer["refused"] == {}
    assert {name: answer[name] for name in SMALL} == SMALL
    assert all(row["epsilon"] <= 2 and row["max_error"] >= row["rms_error"] for row in strict)
    found, mechanism = answer["rows"][2], jaxdp.dp_mf(l2_clip_norm=1.0, **SMALL)
    assert found["rms_error"] == jaxdp.correlated.expected_error(mechanism)
    assert found["max_error"] == jaxdp.correlated.expected_error(mechanism, error="max")
    assert found["noise_multiplier"] == mechanism.noise_multiplier


def test_the_table_says_which_to_take_and_what_the_weaker_promise_is():
    found = call({**SMALL, "batch_size": 19, "momentum": 0.9})
    assert found.exit_code == 0
    assert "Least error under add_or_remove_one: take " in found.stdout
    assert "another, weaker promise" in " ".join(found.stdout.split())
    assert "random allocation: whole epochs, 33 steps with 19 records each" in found.stdout
    assert "about ten seconds" in found.stderr
    table = found.stdout.splitlines()
    (start,) = (i for i, line in enumerate(table) if line.split()[:1] == ["relation"])
    assert all("  " in line for line in table[start + 1 : start + 6])
    # Momentum makes the errors those of the parameters.
    one, other = (dict(_makers(m, _Budget(**SMALL)))["DP-SGD"]() for m in (0.0, 0.9))
    assert other.noise_multiplier == one.noise_multiplier
    assert other.rms_error > 3 * one.rms_error


def test_a_mechanism_that_cannot_be_had_is_named(monkeypatch):
    def refuse(*args, **options):
        raise ValueError("no bound")

    monkeypatch.setattr(jaxdp.correlated, "dp_mf", refuse)
    small = {**SMALL, "steps": 10}
    found = call(small)
    assert "BandMF: not possible: no bound" in found.stdout
    monkeypatch.setattr(jaxdp.mechanism, "dp_sgd", refuse)
    assert str(call(small).exception) == "no bound"
