"""Algorithms in a whole run: resumed, charged and reported as what they are."""

import contextlib
import dataclasses
import datetime
import math
import re

import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp import report, runs
from jaxdp.cli import main
from jaxdp.papers import queue
from jaxdp.runs import described, export
from jaxdp.sampling import Sampler
from tests.runs import small
from tests.runs.small import Stop, crash_at, refused


def config(algorithm, **changes):
    given = {"steps": 4, "eval_every": 2, "physical_batch_size": 64, "learning_rate": 0.1}
    return small.config(algorithm=algorithm, **{**given, **changes})


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
    small.crash(tmp_path / "r", cfg, 3)
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
    fixed = {"sampling": "fixed_size", "relation": "replace_one", "sensitive": True}
    cfg = config("dp-sgd", **fixed, steps=1, eval_every=1)
    first, seen = small.go(tmp_path / "r", cfg), []
    small.go(tmp_path / "r", cfg, lambda step, row: seen.append(row))
    assert seen == first.history
    assert set(seen[0]) == {"step", "update_norm", "test_accuracy", "test_loss", "epsilon"}
    directory = runs.RunDirectory(tmp_path / "r")
    text = directory.sensitive.read_text()
    assert "SENSITIVE" in text
    assert "clipped_fraction" in text
    assert export.export_params(directory, tmp_path / "params.msgpack") == 1


def test_components_whose_charge_or_secret_copy_is_lost_are_not_made_again(tmp_path):
    """Before: made again with other noise, within the charge of those that were shown."""
    cfg = config("dp-sgd", pca_dimensions=5, pca_noise_multiplier=4.0)
    small.crash(tmp_path / "r", cfg, 0)
    directory = runs.RunDirectory(tmp_path / "r")
    assert not directory.sensitive.exists()
    charged = directory.ledger.read_bytes()
    directory.ledger.unlink()
    refused("must hold the charge of", small.go, tmp_path / "r", cfg)
    directory.ledger.write_bytes(charged)
    kept = directory.secret / directory.components.name
    shown = directory.components.read_bytes()
    for path in (directory.components, kept):
        path.unlink()
    refused("both are missing: the components were shown", small.go, tmp_path / "r", cfg)
    directory.components.write_bytes(shown)
    assert small.go(tmp_path / "r", cfg).ledger.steps == cfg.steps + 1
    assert kept.read_bytes() == directory.components.read_bytes() == shown


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


def test_the_queue_keeps_what_is_finished_and_goes_on(tmp_path, monkeypatch):
    given = {"noise_multiplier": 1.0, "steps": 2, "batch_size": 40, "dataset_size": 200}
    given |= {"model": "logistic", "algorithm": "sa-dpsgd-as-published"}
    row = queue.Row("tiny", "digits", given)
    monkeypatch.setattr(queue, "ROWS", {"tiny": row})
    monkeypatch.setattr(queue.data, "load", lambda name, folder: small.dataset())
    results = tmp_path / "results" / "papers.json"

    def work(progress, runs=1):
        shown = lambda row: contextlib.nullcontext(progress)  # noqa: E731
        folder = tmp_path / "q"
        return queue.work(["tiny"], folder, results, None, described.report, shown, runs)

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
    refused("rows must be among those of", queue.row_named, "x")


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
