"""Experiments on the census, and ordinary training of SA-DPSGD's networks."""

import json

import jax
import numpy as np
import pytest
from sklearn.calibration import calibration_curve

from benchmarks.papers import census, not_private, tables
from jaxdp import data, models
from jaxdp.data.sources import PUMS_COLUMNS
from jaxdp.ledger.seeds import Secret
from jaxdp.runs import assemble


def people(rows=400, seed=0):
    """Random census columns and a label that follows two of them."""
    rng = np.random.default_rng(seed)
    x = np.where(rng.random((rows, 9)) < 0.5, 1, -1).astype(np.float32)
    chance = 1 / (1 + np.exp(-(x[:, 0] + 0.5 * x[:, 2]).astype(np.float64)))
    return x, (rng.random(rows) < chance).astype(np.int32), chance


def test_reliability_is_scikit_learns_and_has_the_error_of_a_known_fault():
    _, label, chance = people()
    bins = census.reliability(chance, label)
    found, predicted = calibration_curve(label, chance, n_bins=census.BINS)
    np.testing.assert_allclose([row["found"] for row in bins], found)
    np.testing.assert_allclose([row["predicted"] for row in bins], predicted)
    assert sum(row["size"] for row in bins) == len(label)
    label = np.array([1] * 30 + [0] * 70)
    right, wrong = np.full(100, 0.3), np.full(100, 0.75)
    assert census.calibration_error(census.reliability(right, label)) == pytest.approx(0.0)
    assert census.calibration_error(census.reliability(wrong, label)) == pytest.approx(0.45)
    # A chance of exactly 1 belongs to the last bin.
    assert census.reliability(np.ones(3), np.ones(3))[0]["size"] == 3


def test_groups_are_read_from_their_columns_and_their_errors_add_up():
    sex, black, asian = (PUMS_COLUMNS.index(name) for name in ("sex", "black", "asian"))
    x = -np.ones((4, 9), np.float32)
    x[1:3, black] = x[2:4, sex] = x[3, asian] = 1
    found = census.groups(x)
    assert found["neither, men"].tolist() == [True, False, False, False]
    assert found["Asian, women"].tolist() == [False, False, False, True]
    assert found["Black"].tolist() == [False, True, True, False]
    # The added column is one for black women alone.
    added = census.with_blackfemale(x)
    assert added.dtype == np.float32
    np.testing.assert_array_equal(added[:, :9], x)
    assert added[:, 9].tolist() == [-1, -1, 1, -1]
    row = census.ROWS["pums-logistic-blackfemale-epsilon-1"]
    np.testing.assert_array_equal(row.features(x), added)
    assert census.ROWS["pums-logistic-epsilon-1"].features(x) is x
    x, label, chance = people()
    found = census.measure(chance, x, label)
    groups = {row["group"]: row for row in found["groups"]}
    wrong = int(((chance >= 0.5) != (label == 1)).sum())
    assert groups["all"]["errors"] == wrong == round((1 - found["test_accuracy"]) * len(label))
    for key in ("size", "errors", "unemployed", "missed"):
        for race in ("", "Black, ", "Asian, ", "neither, "):
            men, women = (groups[f"{race}{of}"] for of in ("men", "women"))
            assert men[key] + women[key] == groups[race[:-2] or "all"][key]
    both = int(((x[:, 2] > 0) & (x[:, 3] > 0)).sum())
    assert sum(groups[race]["size"] for race in ("Black", "Asian", "neither")) - both == 400
    assert 0.5 < found["auc"] < 1


def test_a_private_run_keeps_its_epsilon_and_another_has_none(monkeypatch, tmp_path):
    x, label, _ = people(2_000)
    spec = data.specs.spec("pums")
    many = np.resize(x, (spec.dataset_size, 9)), np.resize(label, spec.dataset_size)
    rows = data.Dataset(spec, *many, x, label)
    monkeypatch.setattr(census.data, "load", lambda name, folder: rows)
    names = ("pums-logistic-epsilon-0.5", "pums-logistic-not-private")
    monkeypatch.setattr(census, "ROWS", {name: census.ROWS[name] for name in names})
    done = []
    for _ in range(2):  # the second finds everything done
        census.work(tmp_path / "pums.json", tmp_path / "q", None, 1, done.append)
    private, free = json.loads((tmp_path / "pums.json").read_text())
    assert done == [0, 1, 2, 2]
    assert 0.49 < private["proven_epsilon"] <= 0.5
    assert private["noise_multiplier"] > 1
    assert (free["proven_epsilon"], free["private"], free["l2_clip_norm"]) == ("inf", False, None)
    assert free["noise_multiplier"] == 0
    assert free["auc"] > 0.7


def test_no_logistic_gradient_is_longer_than_its_clipping():
    for name, inputs in (("logistic", 10), ("logistic-blackfemale", 11)):
        row = census.ROWS[f"pums-{name}-epsilon-1"]
        model, x = assemble.model_of(row.config()), row.features(people(64)[0])
        params = models.init(model, Secret.new().jax_key("init"), x.shape[1:])
        params = jax.tree.map(lambda leaf: 50.0 * leaf, params)
        grad = jax.vmap(jax.grad(models.cross_entropy(model)), (None, 0))
        grads = grad(params, (np.tile(x, (2, 1)), np.repeat(np.int32([0, 1]), 64)))
        squares = sum((leaf.reshape(128, -1) ** 2).sum(axis=1) for leaf in jax.tree.leaves(grads))
        longest, bound = float(np.sqrt(squares.max())), np.sqrt(2 * inputs)
        assert 0.9 * bound < longest <= bound * (1 + 1e-5) < row.config().l2_clip_norm


# Ordinary training of SA-DPSGD's networks: no guarantee, and it says so
def test_it_learns_and_has_no_guarantee(tmp_path, monkeypatch):
    # Two kinds of noisy images that a network tells apart, in the shape of MNIST.
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, 512).astype(np.int32)
    x = rng.random((512, 28, 28, 1), np.float32) * 0.2
    x[label == 1, 8:20, 8:20] += 0.8
    images = data.Dataset(data.specs.spec("mnist"), x, label, x[:100], label[:100])
    monkeypatch.setattr(not_private.data, "load", lambda *_: images)
    monkeypatch.setattr(not_private.FreeRow, "batch", 128)
    row = not_private.FreeRow("mnist", "tanh", 4)
    monkeypatch.setattr(not_private, "ROWS", {row.name: row})
    done = []
    file = tmp_path / not_private.FILE
    for runs in (1, 2):
        not_private.work(file, tmp_path / "q", None, runs, done.append)
    lines = json.loads(file.read_text())
    assert done == [0, 1, 1, 2]
    for line in lines:
        assert (line["private"], line["proven_epsilon"]) == (False, "inf")
        assert [at[0] for at in line["curve"]] == [1, 2, 3, 4]
        assert line["test_accuracy"] == line["curve"][-1][1] > 0.9
    text = tables.to_markdown(tables.TARGETS["not_private"].page(tables.Results(tmp_path)))
    (shown,) = [x for x in text.splitlines() if "`mnist-tanh-not-private`" in x]
    assert "| 99.09 % |" in shown
    assert " ± " in shown
    assert "**no guarantee at all**" in text
