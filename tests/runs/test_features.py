"""Runs on fixed features: the same guarantee, other numbers for the model to see."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from jax.sharding import Mesh

from jaxdp import _processes, features, runs
from jaxdp import accounting as acc
from jaxdp._placement import Placement
from jaxdp.batches import placed
from jaxdp.cli import app
from jaxdp.optimizers import registry
from jaxdp.runs import assemble, loop
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.rehearsal import rehearse
from jaxdp.seeds import Secret
from jaxdp.sources import arrays, as_source
from jaxdp.sources.identities import identities
from jaxdp.whitening import Whitening, whitened
from tests.runs import small
from tests.runs.small import refused


def config(**changes):
    return small.config(features="scattering", **changes)


def test_features_cost_nothing_and_change_what_the_model_sees():
    plain, made = small.config(), config()
    assert made.total(12) == plain.total(12)
    assert made.once() == ()
    assert made.example_shape() == (2, 2, 81)
    assert runs.RunConfig.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    row = {name: value for name, value in plain.to_dict().items() if name != "features"}
    assert runs.RunConfig.from_dict(row) == plain  # an older version's
    assert rehearse(made).step > 0


def test_a_run_on_features_is_that_on_the_images_made_before(tmp_path):
    rows, made = small.dataset(), config()
    result = small.go(tmp_path / "r", made, rows=rows)
    seen = assemble.featured(made, rows)
    np.testing.assert_array_equal(seen.train_x, features.by_name("scattering", rows.train_x))
    test = assemble.evaluator(assemble.model_of(made), seen.test_x, seen.test_y)
    assert test(result.params).items() <= result.history[-1].items()


def test_whitening_is_charged_before_the_first_step_and_kept(tmp_path):
    """A run goes on with its features and with no others, and its coins were tossed before."""
    rows, made = small.dataset(), config(whiten_noise_multiplier=8.0, canaries=20)
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
    assert told > acc.epsilon(config().total(12), made.delta).upper
    parts = Whitening(kept[:4], kept[4:])
    seen = features.by_name("scattering", rows.test_x)
    test = assemble.evaluator(assemble.model_of(made), whitened(seen, parts), rows.test_y)
    assert test(result.params).items() <= result.history[-1].items()


def test_groups_of_correlated_noise_are_those_of_the_images(tmp_path, monkeypatch):
    """Another machine's features end in other digits, and its groups stay."""
    banded = config(strategy="banded", bands=3, epsilon=3.0, noise_multiplier=None)
    rows = small.dataset()
    by_name, sources = features.by_name, []
    monkeypatch.setattr(loop, "_projected", lambda config, dataset, run: dataset)
    for number, change in enumerate((0, 1e-6)):
        monkeypatch.setattr(features, "by_name", lambda *a, c=change: by_name(*a) + c)
        folder = RunDirectory(tmp_path / str(number))
        run = loop.ConfiguredRun(banded, folder, rows, Secret.from_seed(1), small.ignore)
        sources.append(run._records(None))
    one, other = sources
    assert not np.array_equal(one.arrays[0], other.arrays[0])
    of_images = identities(as_source((rows.train_x, rows.train_y)))
    np.testing.assert_array_equal(identities(one), of_images)
    np.testing.assert_array_equal(identities(other), of_images)
    content = arrays.DeviceArrays.of(one.arrays)
    assert not np.array_equal(identities(content), of_images)
    mesh = Placement(Mesh(np.array(jax.devices()[:1]), ("data",)), ("data",))
    np.testing.assert_array_equal(identities(placed(one, mesh)), of_images)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(_processes, "count", lambda: 2)
    cfg = dataclasses.replace(config(), algorithm=next(iter(registry.ALGORITHMS)))
    refused("features must be left out in several processes, got sc", loop._check_several, cfg)


def test_the_command_line_reports_features(tmp_path):
    out = str(tmp_path / "r")
    options = "train --features scattering --steps 3 --epsilon 3 --canaries 20 --out".split()
    done = CliRunner().invoke(app, [*options, out])
    assert done.exception is None, done.output
    page = " ".join((tmp_path / "r" / "report.md").read_text().split())
    assert "scattering, a fixed function of each record, of no data of anybody's" in page
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert "--features scattering" in report["command"]
    assert report["guarantee"]["epsilon"] <= 3
