"""SA-DPSGD by its paper's protocol: a run ends by its accepted steps, and all it may take is charged."""

import contextlib
import dataclasses
import json

import pytest

from jaxdp import accounting as acc
from jaxdp import runs
from jaxdp.papers import accepted, queue
from jaxdp.papers.row import Row
from jaxdp.papers.rows import ROWS
from jaxdp.runs.described import report
from tests.runs import small
from tests.runs.test_resume import Stop, crash_at

STEPS = {"fashion_mnist": 1_157, "mnist": 4_698}
GIVEN = {
    "model": "logistic",
    "noise_multiplier": 1.0,
    "batch_size": 40,
    "dataset_size": 200,
    "steps": 30,
    "eval_every": 2,
    "physical_batch_size": 16,
}


def row(algorithm="sa-dpsgd", number=5):
    return Row("until", "digits", {**GIVEN, "algorithm": algorithm}, accepted=number)


def whole(row):
    """The epsilon of all steps that a run of the row may take."""
    return acc.epsilon(row.config().total(GIVEN["steps"]), 1e-5).upper


def test_the_accepted_steps_claim_3_and_one_more_does_not():
    for dataset, number in STEPS.items():
        assert accepted.affordable(3.0, dataset) == number
        assert accepted.claimed(number, dataset) <= 3.0 < accepted.claimed(number + 1, dataset)
    # Equation 4 as printed affords few.
    assert accepted.affordable(3.0, "fashion_mnist", printed=True) == 63
    assert accepted.affordable(3.0, "mnist", printed=True) == 27


def test_the_rows_have_the_papers_noise_and_can_always_reach_their_number():
    for row in accepted.ROWS:
        config = row.config()
        assert ROWS[row.name] is row
        assert config.noise_multiplier == {"fashion_mnist": 2.15, "mnist": 1.23}[row.dataset]
        assert row.accepted == STEPS[row.dataset]
        assert config.steps == (config.settings["max_rejections"] + 1) * row.accepted


@pytest.mark.parametrize("algorithm", ["sa-dpsgd", "sa-dpsgd-as-published", "sa-dpsgd-private"])
def test_a_run_ends_with_its_number_and_is_charged_for_all_it_may_take(tmp_path, algorithm):
    result = queue.run_row(row(algorithm), tmp_path / "r", small.dataset(), small.ignore)
    counts = [shown["accepted"] for shown in result.history]
    assert counts[-1] >= 5 > counts[-2]
    assert result.steps_run == result.history[-1]["step"] < GIVEN["steps"]
    assert result.ledger.epsilon(1e-5).upper == whole(row(algorithm))
    line = queue.line_of(row(algorithm), report(result))
    assert line["proven_epsilon"] == whole(row(algorithm))
    assert {epsilon for _, epsilon, _ in line["curve"]} == {line["proven_epsilon"]}
    assert (line["steps"], line["accepted"]) == (result.steps_run, counts[-1])


def test_everything_is_charged_before_the_first_step(tmp_path):
    with pytest.raises(Stop):
        queue.run_row(row(), tmp_path / "r", small.dataset(), crash_at(0))
    ledger = runs.RunDirectory(tmp_path / "r").checked_ledger()
    assert ledger.steps == GIVEN["steps"]
    with pytest.raises(Stop):
        queue.run_row(row(), tmp_path / "r", small.dataset(), crash_at(1))
    assert runs.RunDirectory(tmp_path / "r").checked_ledger().steps == GIVEN["steps"]


@pytest.mark.parametrize("step", [1, 4])  # in the first block of the history, and after one
def test_an_interrupted_run_goes_on_within_its_charge(tmp_path, step):
    with pytest.raises(Stop):
        queue.run_row(row(), tmp_path / "r", small.dataset(), crash_at(step))
    result = queue.run_row(row(), tmp_path / "r", small.dataset(), small.ignore)
    assert result.history[-1]["accepted"] >= 5
    assert result.ledger.epsilon(1e-5).upper == whole(row())
    # Where releases decide the number of steps, no row tells less.
    assert {told["epsilon"] for told in result.history} == {whole(row())}
    again = queue.run_row(row(), tmp_path / "r", small.dataset(), small.ignore)
    assert (again.steps_run, again.history) == (0, result.history)


def test_nothing_un_noised_decides(tmp_path):
    seen = []

    def enough(shown):
        seen.append(shown)
        return False

    config = small.config(steps=2, eval_every=1, sensitive=True)
    directory, secret = runs.RunDirectory(tmp_path / "r"), runs.loop.Secret.new()
    runs.start(config, directory, small.dataset(), secret, small.ignore, enough=enough)
    assert seen
    assert not any("sensitive" in shown for shown in seen)


def test_a_run_that_never_gets_there_takes_what_it_was_charged_for(tmp_path):
    never = dataclasses.replace(
        row(number=100), given={**GIVEN, "algorithm": "sa-dpsgd", "steps": 4}
    )
    result = queue.run_row(never, tmp_path / "r", small.dataset(), small.ignore)
    assert result.history[-1]["step"] == result.ledger.steps == 4


def test_the_queue_keeps_such_a_row(tmp_path, monkeypatch):
    monkeypatch.setitem(ROWS, "until", row())
    monkeypatch.setattr(queue.data, "load", lambda *_: small.dataset())
    rows, folder = tmp_path / "rows.json", tmp_path / "runs"
    shown = lambda row: contextlib.nullcontext(small.ignore)  # noqa: E731
    assert queue.work(["until"], folder, rows, None, report, shown) == [("until", 1)]
    (line,) = json.loads(rows.read_text())
    assert line["accepted"] >= 5
    assert queue.work(["until"], folder, rows, None, report, shown) == []
