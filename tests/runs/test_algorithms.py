"""Algorithms in a whole run: resumed, charged and reported as what they are."""

import dataclasses
import datetime
import math
import re

import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp import report, runs
from jaxdp.cli import main
from jaxdp.optimizers import registry
from jaxdp.papers import queue
from jaxdp.runs import assemble, described, export
from jaxdp.sampling import Sampler
from tests.runs import small
from tests.runs.test_resume import Stop, crash_at


def config(algorithm, **changes):
    given = {
        "steps": 4,
        "eval_every": 2,
        "physical_batch_size": 64,
        "learning_rate": 0.1,
        **changes,
    }
    return small.config(algorithm=algorithm, **given)


CRASHED = {
    "adadp": {"noise_schedule": "step:0.5:3"},
    "sa-dpsgd-private": {
        "settings": {"energy_noise": 3.0, "energy_bound": 0.01, "energy_batch_size": 20},
        "pca_dimensions": 5,
        "pca_noise_multiplier": 4.0,
    },
}


@pytest.mark.parametrize("name", CRASHED)
def test_a_crash_costs_nothing(tmp_path, name):
    cfg = config(name, **CRASHED[name])
    directory = runs.RunDirectory(tmp_path / "r")
    with pytest.raises(Stop):
        small.go(tmp_path / "r", cfg, crash_at(3))
    components = np.load(directory.components) if directory.components.exists() else None
    resumed = small.go(tmp_path / "r", cfg)
    assert resumed.ledger.epsilon(1e-5).upper == acc.epsilon(cfg.total(4), 1e-5).upper
    if name == "sa-dpsgd-private":
        everything_is_charged(cfg, resumed)
        np.testing.assert_array_equal(np.load(directory.components), components)


def everything_is_charged(cfg, result):
    """The gradient, the energy on its own draws, and the projection."""
    gradient = acc.PoissonSampled(acc.Gaussian(1.0), 0.2)
    energy = acc.PoissonSampled(acc.Gaussian(3.0), 0.1)
    truth = acc.Composed((acc.Gaussian(4.0), acc.Repeated(gradient, 4), acc.Repeated(energy, 4)))
    expected = acc.epsilon(truth, 1e-5).upper
    assert result.ledger.epsilon(1e-5).upper == pytest.approx(expected, rel=1e-9)
    assert acc.epsilon(cfg.total(4), 1e-5).upper == pytest.approx(expected, rel=1e-9)
    parts = {entry.stream.partition("/")[2] for entry in result.ledger.entries}
    assert parts == {"", "energy", "pca"}
    assert result.history[-1]["proposals"] == 4


def test_a_finished_run_shows_nothing_sensitive_and_can_be_exported(tmp_path):
    """With fixed-size batches, whose sampler wants the declared number of records."""
    cfg = config(
        "dp-sgd",
        sensitive=True,
        sampling="fixed_size",
        relation="replace_one",
        steps=1,
        eval_every=1,
    )
    first, seen = small.go(tmp_path / "r", cfg), []
    small.go(tmp_path / "r", cfg, lambda step, row: seen.append(row))
    assert seen == first.history
    assert "sensitive" not in seen[0]
    directory = runs.RunDirectory(tmp_path / "r")
    assert directory.sensitive.exists()
    assert export.export_params(directory, tmp_path / "params.msgpack") == 1


def test_a_projection_whose_charge_is_lost_is_not_used_again(tmp_path):
    cfg = config("dp-sgd", pca_dimensions=5, pca_noise_multiplier=4.0)
    with pytest.raises(Stop):
        small.go(tmp_path / "r", cfg, crash_at(0))
    directory = runs.RunDirectory(tmp_path / "r")
    assert directory.components.exists()
    directory.ledger.unlink()
    with pytest.raises(ValueError, match="must hold the charge of"):
        small.go(tmp_path / "r", cfg)


# Before: made again with other noise, within the charge of those that were shown.
def test_components_that_were_shown_and_lost_are_not_made_again(tmp_path):
    cfg = config("dp-sgd", pca_dimensions=5, pca_noise_multiplier=4.0)
    with pytest.raises(Stop):
        small.go(tmp_path / "r", cfg, crash_at(0))
    directory = runs.RunDirectory(tmp_path / "r")
    kept = directory.secret / directory.components.name
    shown = directory.components.read_bytes()
    for path in (directory.components, kept):
        path.unlink()
    with pytest.raises(ValueError, match="both are missing: the components were shown"):
        small.go(tmp_path / "r", cfg)
    directory.components.write_bytes(shown)
    assert small.go(tmp_path / "r", cfg).ledger.steps == cfg.steps + 1
    assert kept.read_bytes() == directory.components.read_bytes() == shown


def test_components_that_nobody_saw_are_made_again_at_no_cost(tmp_path, monkeypatch):
    cfg = config("dp-sgd", pca_dimensions=5, pca_noise_multiplier=4.0)

    def crashing(*_, **__):
        raise Stop

    monkeypatch.setattr("jaxdp.runs.loop.save_array", crashing)
    with pytest.raises(Stop):
        small.go(tmp_path / "r", cfg)
    monkeypatch.undo()
    assert small.go(tmp_path / "r", cfg).ledger.steps == cfg.steps + 1


def test_the_energys_draws_are_not_the_gradients(tmp_path, monkeypatch):
    cfg = config("sa-dpsgd-private", settings={"energy_noise": 3.0, "energy_bound": 0.01})
    drawn, draw = [], Sampler.draw

    def watched(self, until=None):
        drawn.append(draw(self, until))
        return drawn[-1]

    monkeypatch.setattr(Sampler, "draw", watched)
    small.go(tmp_path / "r", cfg)
    tickets = [d.ticket for d in drawn]
    assert len(tickets) == len({id(t) for t in tickets}) == 8
    assert len({(t.account is tickets[0].account, t.step) for t in tickets}) == 8
    first = [set(d.indices[d.mask]) for d in drawn if d.step == 0]
    assert first[0] != first[1]


def test_the_examples_that_judge_are_not_those_of_the_accuracy():
    rows = small.dataset()
    judge, rest = assemble.test_split(config("sa-dpsgd"), rows)
    assert len(judge[1]) == len(rest[1]) == 50
    assert not np.array_equal(judge[0], rest[0])
    whole, same = assemble.test_split(config("sa-dpsgd-as-published"), rows)
    assert whole[1] is same[1]
    assert len(whole[1]) == 100


def test_without_proof_the_report_says_so(tmp_path):
    result = small.go(tmp_path / "r", config("adadp-as-published", steps=2, eval_every=1))
    built = described.report(result)
    page = report.to_markdown(built)
    assert "Claimed by the paper: epsilon" in page
    assert "nothing is proven, for un-noised squared gradients" in page
    assert "Nothing is proven, so there is nothing to verify." in page
    assert "noised and charged by one mechanism" not in page
    assert built.guarantee.epsilon == math.inf
    report.save_plots(built, tmp_path)
    page = report.to_html(dataclasses.replace(built, label="<script>alert(1)</script>"), tmp_path)
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert "nothing is proven, for un-noised squared gradients" in page
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert page.count("<svg ") == 2
    assert all(source.startswith("#") for source in sources)


def test_a_run_that_diverged_and_one_that_never_moved_have_plots(tmp_path):
    result = small.go(tmp_path / "r", config("dp-sgd", steps=1, eval_every=1))
    for norm in (float("nan"), float("inf"), 0.0):
        history = [{**row, "update_norm": norm} for row in result.history]
        other = dataclasses.replace(result, history=history)
        paths = report.save_plots(described.report(other), tmp_path)
        assert all(path.stat().st_size > 1000 for path in paths)


@pytest.mark.parametrize("name", ["sa-dpsgd-private", "dp-sgd"])
def test_noise_is_calibrated_to_everything_that_is_released(name):
    extra = {"pca_dimensions": 5, "pca_noise_multiplier": 20.0}
    cfg = config(name, noise_multiplier=None, epsilon=3.0, **extra)
    spent = acc.epsilon(cfg.total(4), 1e-5).upper
    assert 2.98 < spent <= 3.0
    scheduled = config("dp-sgd", noise_multiplier=None, epsilon=3.0, noise_schedule="linear:0.5:1")
    assert 2.98 < acc.epsilon(scheduled.total(4), 1e-5).upper <= 3.0
    assert scheduled.noise()(3) == pytest.approx(scheduled.noise_multiplier / 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "sgd"}, "algorithm must be one of dp-sgd, auto-s"),
        ({"settings": {"beta": 1.0}}, "settings of dp-sgd must be among none; got 'beta'"),
        ({"noise_schedule": "exponential"}, "noise_schedule must be kind:number:every"),
        ({"noise_schedule": "exponential:0.1:1:1"}, "noise_schedule must be kind:number:every"),
        (
            {"noise_schedule": "step:0.5:1", "steps": None, "epsilon": 3.0},
            "steps must be given with",
        ),
        ({"pca_dimensions": 3}, "pca_dimensions and pca_noise_multiplier must be given together"),
        ({"pca_dimensions": 65, "pca_noise_multiplier": 1.0}, "must be at most the 64"),
        ({"pca_dimensions": 3, "pca_noise_multiplier": 0.0}, "pca_noise_multiplier must be"),
        ({"hidden": 0, "model": "mlp"}, "hidden must be a whole number"),
        (
            {
                "algorithm": "sa-dpsgd-private",
                "epsilon": 1.0,
                "noise_multiplier": None,
                "settings": {"energy_noise": 0.3},
            },
            "epsilon must be within reach of sa-dpsgd-private",
        ),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(ValueError, match=message):
        config(changes.pop("algorithm", "dp-sgd"), **changes)


def test_every_method_is_listed_and_has_a_configuration(capsys):
    main(["algorithms"])
    printed = capsys.readouterr().out
    for name in registry.ALGORITHMS:
        assert name in printed
        changes = {"settings": {"energy_noise": 50.0}} if name == "sa-dpsgd-private" else {}
        assert config(name, **changes).private_algorithm().mechanism.noise_multiplier == 1.0


def test_settings_on_the_command_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["train", "--algorithm", "adadp", "--set", "beta", "--out", str(tmp_path / "r")])
    assert "--set must be NAME=VALUE with a number" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--algorithm", "adadp", "--set", "beta=1", "--set", "beta=2"])
    assert "--set must name beta once, got 'beta=2'" in capsys.readouterr().err


def test_the_queue_keeps_what_is_finished_and_goes_on(tmp_path, monkeypatch):
    given = {
        "noise_multiplier": 1.0,
        "steps": 2,
        "model": "logistic",
        "batch_size": 40,
        "dataset_size": 200,
    }
    row = queue.Row("tiny", "digits", {**given, "algorithm": "sa-dpsgd-as-published"})
    monkeypatch.setattr(queue, "ROWS", {"tiny": row})
    monkeypatch.setattr(queue.data, "load", lambda name, folder: small.dataset())
    results = tmp_path / "results" / "papers.json"

    def work(progress, runs=1):
        import contextlib

        return queue.work(
            ["tiny"],
            tmp_path / "q",
            results,
            None,
            described.report,
            lambda row: contextlib.nullcontext(progress),
            runs,
        )

    with pytest.raises(Stop):
        work(crash_at(1))
    assert queue.finished(results) == {}
    assert work(small.ignore) == [("tiny", 1)]
    assert work(small.ignore) == []
    assert work(small.ignore, runs=2) == [("tiny", 2)]
    assert (tmp_path / "q" / "tiny.run-2").is_dir()
    line = queue.finished(results)["tiny", 1]
    assert line["seconds"] > 0  # measured by the queue: the report holds no time
    assert line["date"] == str(datetime.date.today())
    assert line["command"] == "jaxdp reproduce run tiny --runs 1"
    assert line["steps_timed"] == 2
    assert line["curve"][-1] == [2, line["proven_epsilon"], line["test_accuracy"]]
    assert len(line["test_losses"]) == len(line["curve"])
    assert line["test_losses"][-1] > 0
    assert line["steps"] == 2
    assert line["claimed_epsilon"] > line["proven_epsilon"] > 0  # both accepted; a loose formula
    assert line["judged_by"].startswith("Not held out")
    assert line["acceptance_rate"] == 1.0
    main(["reproduce", "status", "--results", str(results), "--out", str(tmp_path / "q")])
    with pytest.raises(ValueError, match="rows must be among those of"):
        queue.row_named("x")


def repeated(event):
    """The repeated events of a composition, however deep."""
    if isinstance(event, acc.Composed):
        return [part for inner in event.events for part in repeated(inner)]
    return [event]


def test_every_row_of_the_queue_is_a_run_that_can_start():
    names = [n for n in queue.ROWS if n.startswith("mnist") and "noise-8" in n]
    assert len(names) >= 6
    for name in names:
        row = queue.ROWS[name]
        cfg = runs.resolve(runs.recipe(row.dataset, **row.given))
        parts = repeated(cfg.private_algorithm().total(cfg.steps))
        assert sum(part.count for part in parts) == cfg.steps == row.given["steps"]
        leaks = [isinstance(part.event, acc.NonPrivate) for part in parts]
        assert set(leaks) == {"as-published" in name}
