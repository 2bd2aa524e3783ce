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


def test_a_run_goes_on_with_its_features_and_with_no_others(tmp_path):
    stopped = []

    def stop(step, row):
        if step == 6 and not stopped:
            stopped.append(step)
            raise KeyError

    whole = small.go(tmp_path / "whole", config())
    with pytest.raises(KeyError):
        small.go(tmp_path / "r", config(), stop)
    with pytest.raises(ValueError, match=r"changed: features .'scattering' then, None now"):
        small.go(tmp_path / "r", small.config())
    result = small.go(tmp_path / "r", config())
    assert [row["epsilon"] for row in result.history] == [row["epsilon"] for row in whole.history]


def test_whitening_is_charged_before_the_first_step_and_kept(tmp_path):
    rows, made = small.dataset(), config(whiten_noise_multiplier=8.0)
    assert made.once() == (acc.Gaussian(8.0),)
    stopped = []

    def stop(step, row):
        if step == 6 and not stopped:
            stopped.append(step)
            raise KeyError

    with pytest.raises(KeyError):
        small.go(tmp_path / "r", made, stop, rows=rows)
    kept = np.load(tmp_path / "r" / "components.npy")
    assert kept.shape == (2 * 2 + 81, 81)
    result = small.go(tmp_path / "r", made, rows=rows)
    np.testing.assert_array_equal(np.load(tmp_path / "r" / "components.npy"), kept)
    told = result.history[-1]["epsilon"]
    assert told == pytest.approx(acc.epsilon(made.total(12), made.delta).upper)
    assert told > acc.epsilon(config().total(12), made.delta).upper
    parts = Whitening(kept[:4], kept[4:])
    seen = features.by_name("scattering", rows.test_x)
    test = assemble.evaluator(assemble.model_of(made), whitened(seen, parts), rows.test_y)
    assert test(result.params).items() <= result.history[-1].items()


def test_coins_of_canaries_are_tossed_before_a_whitening_or_projection_is_charged(tmp_path):
    whitened_first = config(whiten_noise_multiplier=8.0, canaries=20)
    projected_first = small.config(pca_dimensions=4, pca_noise_multiplier=8.0, canaries=20)
    for name, made in (("w", whitened_first), ("p", projected_first)):
        small.go(tmp_path / name, made)
        assert (tmp_path / name / "secret" / "canaries.json").exists()


def test_whitening_without_features_or_on_the_grid_is_refused():
    with pytest.raises(ValueError, match="whiten_noise_multiplier must be None without features"):
        runs.resolve(runs.recipe("digits", whiten_noise_multiplier=8.0))
    with pytest.raises(ValueError, match="whiten_noise_multiplier must be None with secure_noise"):
        runs.resolve(config(whiten_noise_multiplier=8.0, secure_noise=True))


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


def test_recipes_for_features_bring_a_linear_model():
    found = runs.recipe("mnist", features="scattering")
    assert (found.model, found.batch_size, found.learning_rate) == ("logistic", 8_192, 16.0)
    assert found.steps == -(-40 * 60_000 // 8_192)
    assert runs.recipe("digits", features="scattering").model == "logistic"
    assert runs.recipe("mnist", features="scattering", model="mlp", steps=5).steps == 5
    assert runs.recipe("mnist").model == "mnist-cnn"


@pytest.mark.parametrize(
    ("dataset", "changes", "words"),
    [
        ("pums", {}, r"features scattering must be given images .* got examples \(9,\)"),
        (
            "digits",
            {"features": "wavelets"},
            "features must be one of scattering, random_convolutions, pretrained, pretrained_mirrored; got 'wavelets'",
        ),
        (
            "digits",
            {"pca_dimensions": 5, "pca_noise_multiplier": 4.0},
            "pca_dimensions must be None with features, of which a record has 324",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_words(dataset, changes, words):
    with pytest.raises(ValueError, match=words):
        runs.resolve(runs.recipe(dataset, **{"features": "scattering", **changes}))


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(_processes, "count", lambda: 2)
    with pytest.raises(ValueError, match="features must be left out in several processes, got sc"):
        loop._check_several(
            dataclasses.replace(config(), algorithm=next(iter(registry.ALGORITHMS)))
        )


def test_the_command_line_reports_and_resumes(tmp_path):
    out = str(tmp_path / "r")
    given = ["--features", "scattering", "--steps", "6", "--epsilon", "3", "--canaries", "20"]
    first = CliRunner().invoke(app, ["train", *given, "--out", out])
    assert first.exception is None, first.output
    page = " ".join((tmp_path / "r" / "report.md").read_text().split())
    assert "scattering, a fixed function of each record, of no data of anybody's" in page
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert "--features scattering" in report["command"]
    assert report["guarantee"]["epsilon"] <= 3
    again = CliRunner().invoke(app, ["train", "--resume", "--out", out])
    assert again.exception is None, again.output
    after = json.loads((tmp_path / "r" / "report.json").read_text())
    assert after["history"] == report["history"]
