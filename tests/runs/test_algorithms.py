"""Algorithms and features in a whole run: resumed, charged and reported as what they are."""

import contextlib
import dataclasses
import datetime
import json
import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks.papers import queue
from jaxdp import accounting as acc
from jaxdp import runs
from jaxdp.cli import main
from jaxdp.devices import processes
from jaxdp.devices.placement import Placement
from jaxdp.optimizers import registry
from jaxdp.recipes import features
from jaxdp.recipes.preprocess import Whitening, whitened
from jaxdp.runs import RunDirectory, assemble, described, export, report
from jaxdp.runs.assemble import rehearse
from jaxdp.runs.starts import INTERRUPTED, Start
from jaxdp.sampling import Sampler, as_source
from jaxdp.sampling.hashes import identities
from jaxdp.sampling.source import ArraySource
from jaxdp.training.batches import placed
from tests.cli.calling import ran
from tests.refusing import refused
from tests.runs import small
from tests.runs.small import Stop, crash_at


def config(algorithm, **changes):
    given = {"steps": 4, "eval_every": 2, "physical_batch_size": 64, "learning_rate": 0.1}
    return small.config(algorithm=algorithm, **{**given, **changes})


CRASHED = {
    "adadp": {"noise_schedule": "step:0.5:3"},
    "sa-dpsgd-private": {
        "settings": {"energy_noise": 3.0, "energy_bound": 0.01, "energy_batch_size": 20},
        "pca_dimensions": 5,
        "pca_noise_multiplier": 4.0,
        "eval_every": 3,  # the last block is a short one
    },
}


def test_a_crash_costs_nothing(tmp_path):
    for name, changes in CRASHED.items():
        cfg, directory = config(name, **changes), RunDirectory(tmp_path / name)
        small.crash(directory.path, cfg, 3)
        components = directory.components.exists() and np.load(directory.components)
        resumed = small.go(directory.path, cfg)
        assert resumed.ledger.epsilon(1e-5).upper == acc.epsilon(cfg.total(4), 1e-5).upper
    np.testing.assert_array_equal(np.load(directory.components), components)
    # Everything is charged: the gradient, the energy on its own draws, and the projection.
    gradient = acc.PoissonSampled(acc.Gaussian(1.0), 0.2)
    energy = acc.PoissonSampled(acc.Gaussian(3.0), 0.1)
    truth = acc.Composed((acc.Gaussian(4.0), acc.Repeated(gradient, 4), acc.Repeated(energy, 4)))
    expected = acc.epsilon(truth, 1e-5).upper
    assert resumed.ledger.epsilon(1e-5).upper == pytest.approx(expected, rel=1e-9)
    parts = {entry.stream.partition("/")[2] for entry in resumed.ledger.entries}
    assert parts == {"", "energy", "pca"}
    assert resumed.history[-1]["proposals"] == 4


def test_a_finished_run_shows_nothing_sensitive_and_can_be_exported(tmp_path):
    """With fixed-size batches, whose sampler wants the declared number of records."""
    fixed = {"sampling": "fixed_size", "relation": "replace_one", "sensitive": True}
    cfg = config("dp-sgd", **fixed, steps=1, eval_every=1)
    first, seen = small.go(tmp_path / "r", cfg), []
    small.go(tmp_path / "r", cfg, lambda step, row: seen.append(row))
    assert seen == first.history
    assert set(seen[0]) == {"step", "update_norm", "test_accuracy", "test_loss", "epsilon"}
    directory = RunDirectory(tmp_path / "r")
    text = directory.sensitive.read_text()
    assert "SENSITIVE" in text
    assert "clipped_fraction" in text
    assert export.export_params(directory, tmp_path / "params.msgpack") == 1


def test_the_energys_draws_are_not_the_gradients(tmp_path, monkeypatch):
    cfg = config("sa-dpsgd-private", settings={"energy_noise": 3.0, "energy_bound": 0.01})
    made, drawn = Sampler.drawn, []

    def watched(self, step):
        found = made(self, step)
        drawn.append((self.issuer.stream, step, set(found.indices[found.mask])))
        return found

    monkeypatch.setattr(Sampler, "drawn", watched)
    small.go(tmp_path / "e", cfg)
    assert len(drawn) == len({(stream, step) for stream, step, _ in drawn}) == 8
    one, two = (records for _, step, records in drawn if step == 0)
    assert one != two


def test_components_are_made_again_until_they_are_shown_and_then_never(tmp_path, monkeypatch):
    """A keeps some and is killed; B makes and shows others; then A's are put back."""
    cfg = config("dp-sgd", pca_dimensions=5, pca_noise_multiplier=4.0)
    run = RunDirectory(tmp_path / "r")
    kept, public = run.secret / run.components.name, run.components

    show = Start.show_release

    def killed(before):
        def dies(self, *args):
            if not before:
                show(self, *args)
            raise small.Killed

        with monkeypatch.context() as patch:
            patch.setattr(Start, "show_release", dies)
            with pytest.raises(small.Killed):
                small.go(run.path, cfg, seed=None)
        return kept.read_bytes()

    def refused_where_lines_are_cut(words):
        text = run.ledger.read_text()
        lines = text.splitlines(keepends=True)
        charged = next(i for i, line in enumerate(lines) if '/pca"' in line)
        run.ledger.write_text("".join(lines[: charged + 1]))
        refused(words, small.go, run.path, cfg)
        run.ledger.write_text(text)

    first, second = killed(before=True), killed(before=False)
    assert first != second
    assert not public.exists()
    # Each start has a line of its own: one that was read may never have reached the disk.
    lines = run.ledger.read_text().splitlines()
    assert sum('/pca"' in line and "event" in line for line in lines) == 2
    assert INTERRUPTED in run.checked_ledger().unverified()
    refused_where_lines_are_cut("must hold the start of the run, but lines are missing")
    small.crash(run.path, cfg, 3)
    assert public.read_bytes() == second
    state = run.load_state()
    run.save_state(dataclasses.replace(state, head=None, shown=0))
    refused_where_lines_are_cut("must hold the release of")
    run.save_state(state)
    for left in (b"", first):  # others are another release
        kept.write_bytes(first)
        public.write_bytes(left)
        refused("must hold the components that were shown", small.go, run.path, cfg)
    kept.write_bytes(second)
    result = small.go(run.path, cfg)
    assert public.read_bytes() == second
    assert result.ledger.epsilon(1e-5).upper == acc.epsilon(cfg.total(4), 1e-5).upper


def test_without_proof_the_report_says_so(tmp_path):
    result = small.go(tmp_path / "r", config("adadp-as-published", steps=2, eval_every=1))
    built = described.report(result)
    page = report.to_markdown(built)
    assert "Claimed by the paper: epsilon" in page
    assert "nothing is proven, for un-noised squared gradients" in page
    assert "Nothing is proven, so there is nothing to verify." in page
    assert "noised and charged by one mechanism" not in page
    assert built.guarantee.epsilon == math.inf


def test_the_queue_keeps_what_is_finished_and_goes_on(tmp_path, monkeypatch):
    given = {"noise_multiplier": 1.0, "steps": 2, "batch_size": 40, "dataset_size": 200}
    given |= {"model": "logistic", "algorithm": "sa-dpsgd-as-published"}
    monkeypatch.setattr(queue, "ROWS", {"tiny": queue.Row("tiny", "digits", given)})
    monkeypatch.setattr(queue.data, "load", lambda name, folder: small.dataset())
    results, folder = tmp_path / "results" / "papers.json", tmp_path / "q"

    def work(progress, runs=1):
        shown = lambda row: contextlib.nullcontext(progress)  # noqa: E731
        return queue.work(["tiny"], folder, results, None, described.report, shown, runs)

    with pytest.raises(Stop):
        work(crash_at(1))
    assert queue.finished(results) == {}
    assert work(small.ignore) == [("tiny", 1)]
    assert work(small.ignore) == []
    assert work(small.ignore, runs=2) == [("tiny", 2)]
    assert (folder / "tiny.run-2").is_dir()
    line = queue.finished(results)["tiny", 1]
    assert line["seconds"] > 0  # measured by the queue: the report holds no time
    told = {"date": str(datetime.date.today()), "steps": 2, "steps_timed": 2}
    told |= {"command": "jaxdp reproduce run tiny --runs 1", "acceptance_rate": 1.0}
    assert line.items() >= told.items()
    assert line["curve"][-1] == [2, line["proven_epsilon"], line["test_accuracy"]]
    assert len(line["test_losses"]) == len(line["curve"])
    assert line["test_losses"][-1] > 0
    assert line["claimed_epsilon"] > line["proven_epsilon"] > 0  # both accepted; a loose formula
    assert line["judged_by"].startswith("Not held out")
    main(["reproduce", "status", "--results", str(results), "--out", str(folder)])
    refused("rows must be among those of", queue.row_named, "x")


def test_every_row_of_the_queue_is_a_run_that_can_start():
    def repeated(event):
        """The repeated events of a composition, however deep."""
        if isinstance(event, acc.Composed):
            return [part for inner in event.events for part in repeated(inner)]
        return [event]

    names = [n for n in queue.ROWS if n.startswith("mnist") and "noise-8" in n]
    assert len(names) >= 6
    for name in names:
        row = queue.ROWS[name]
        cfg = runs.resolve(runs.recipe(row.dataset, **row.given))
        parts = repeated(cfg.private_algorithm().total(cfg.steps))
        assert sum(part.count for part in parts) == cfg.steps == row.given["steps"]
        leaks = {isinstance(part.event, acc.NonPrivate) for part in parts}
        assert leaks == {"as-published" in name}


# Features of the records: the same guarantee, other numbers for the model to see.
def scattered(**changes):
    return small.config(features="scattering", **changes)


def test_features_cost_nothing_and_change_what_the_model_sees(monkeypatch):
    plain, made, rows = small.config(), scattered(), small.dataset()
    seen = assemble.featured(made, rows)
    np.testing.assert_array_equal(seen.train_x, features.by_name("scattering", rows.train_x))
    assert made.total(12) == plain.total(12)
    assert made.once() == ()
    assert made.example_shape() == (2, 2, 81)
    assert runs.RunConfig.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    row = {name: value for name, value in plain.to_dict().items() if name != "features"}
    assert runs.RunConfig.from_dict(row) == plain  # an older version's
    assert rehearse(made).step > 0
    # In several processes they are refused.
    monkeypatch.setattr(processes, "count", lambda: 2)
    cfg = dataclasses.replace(made, algorithm=next(iter(registry.ALGORITHMS)))
    refused(
        "features must be left out in several processes, got sc",
        assemble.check_several_processes,
        cfg,
    )


def test_whitening_is_charged_before_the_first_step_and_kept(tmp_path):
    """A run goes on with its features and with no others, and its coins were tossed before."""
    rows, made = small.dataset(), scattered(whiten_noise_multiplier=8.0, canaries=20)
    assert made.once() == (acc.Gaussian(8.0),)
    small.crash(tmp_path / "r", made, 6, rows=rows)
    assert (tmp_path / "r" / "secret" / "canaries.json").exists()
    kept = np.load(tmp_path / "r" / "components.npy")
    assert kept.shape == (2 * 2 + 81, 81)
    plain = small.config(canaries=20)
    refused(r"features .'scattering' then, None now", small.go, tmp_path / "r", plain)
    result = small.go(tmp_path / "r", made, rows=rows)
    np.testing.assert_array_equal(np.load(tmp_path / "r" / "components.npy"), kept)
    told = result.history[-1]["epsilon"]
    assert told == pytest.approx(acc.epsilon(made.total(12), made.delta).upper)
    assert told > acc.epsilon(scattered().total(12), made.delta).upper
    seen = whitened(features.by_name("scattering", rows.test_x), Whitening(kept[:4], kept[4:]))
    # The figures of the last row, measured anew.
    test = assemble.evaluator(assemble.model_of(made), seen, rows.test_y)
    assert test(result.params).items() <= result.history[-1].items()


def test_groups_of_correlated_noise_are_those_of_the_images(monkeypatch):
    """Another machine's features end in other digits, and its groups stay."""
    banded = scattered(strategy="banded", bands=3, epsilon=3.0, noise_multiplier=None)
    rows = small.dataset()
    by_name, sources = features.by_name, []
    monkeypatch.setattr(assemble, "_projected", lambda config, dataset, start: dataset)
    for change in (0, 1e-6):
        monkeypatch.setattr(features, "by_name", lambda *a, c=change: by_name(*a) + c)
        sources.append(assemble.prepared(banded, rows, None, None).source)
    one, other = sources
    assert not np.array_equal(one.arrays[0], other.arrays[0])
    mesh = Placement(Mesh(np.array(jax.devices()[:1]), ("data",)), ("data",))
    of_images = identities(as_source((rows.train_x, rows.train_y)))
    for source in (one, other, placed(one, mesh)):
        np.testing.assert_array_equal(identities(source), of_images)
    assert not np.array_equal(identities(ArraySource.of(one.arrays)), of_images)


@small.undrawn()
def test_the_command_line_reports_features(tmp_path):
    options = "train --features scattering --steps 3 --epsilon 3 --canaries 20 --out".split()
    ran(*options, tmp_path / "r")
    page = " ".join((tmp_path / "r" / "report.md").read_text().split())
    assert "scattering, a fixed function of each record, of no data of anybody's" in page
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert "--features scattering" in report["command"]
    assert report["guarantee"]["epsilon"] <= 3
