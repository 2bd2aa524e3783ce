"""Runs with canaries that are records: they are ordinary records, and nothing public knows coins."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp import features
from jaxdp.clipping import ClippedGrad
from jaxdp.ledger import Ledger
from jaxdp.noise import gaussian
from jaxdp.runs import RunDirectory, assemble, canaries, canary_inputs, front
from jaxdp.runs.audit import audit_run
from jaxdp.runs.described import report as build
from jaxdp.seeds import Secret
from tests.runs import small
from tests.runs.test_resume import Stop, crash_at

M = 40


def config(kind="noise", **changes):
    return small.config(**{"canaries": M, "canary_kind": kind, **changes})


def test_candidates_are_made_of_nothing_that_is_trained_on():
    data = small.dataset()
    for kind in ("noise", "pixel"):
        x, y = canary_inputs.asked_for(config(kind), data)
        assert (x.shape, x.dtype, y.dtype) == ((M, 8, 8, 1), np.float32, data.train_y.dtype)
        assert set(y.tolist()) <= set(range(10))
        assert len(np.unique(x.reshape(M, -1), axis=0)) == M  # of up to 64 pixels all differ
    lit = canary_inputs.asked_for(config("pixel"), data)[0].reshape(M, -1)
    np.testing.assert_array_equal(np.sum(lit != 0, axis=1), 1)
    x, y = canary_inputs.asked_for(config("mislabelled"), data)
    np.testing.assert_array_equal(x, data.test_x[-M:])
    assert not np.any(y == data.test_y[-M:])
    assert canary_inputs.asked_for(small.config(canaries=7), data) == 7


def test_noise_has_no_coarse_waves_where_there_is_an_image_to_hide_in():
    noise = np.random.default_rng(0).standard_normal((5, 16, 12, 2)).astype(np.float32)
    found = canary_inputs._fine(noise)
    assert (found.shape, found.dtype) == (noise.shape, np.float32)
    assert np.std(found) == pytest.approx(1.0, rel=1e-3)
    waves = np.abs(np.fft.fft2(found, axes=(1, 2)))
    assert np.max(waves[:, :5, :4]) < 1e-3 < np.min(waves[:, 6:9, 4:7].max(axis=(0, 3)))
    for plain in (noise[:, :4], noise[0]):  # too small, and no image
        np.testing.assert_array_equal(canary_inputs._fine(plain), plain)


def test_accuracy_is_measured_on_tests_that_are_no_candidates():
    data = small.dataset()
    for kind, left in (("mislabelled", 100 - M), ("noise", 100)):
        (x, _), (_, y) = assemble.test_split(config(kind), data)
        assert len(x) == len(y) == left
        np.testing.assert_array_equal(x, data.test_x[:left])


def test_nothing_public_depends_on_the_coins(tmp_path, monkeypatch):
    """With equal releases (a clipped sum replaced by zero), other coins must change no figure."""
    original = ClippedGrad.one_pass

    def blind(self, *args, **options):
        clipped, info = original(self, *args, **options)
        return clipped._replace(total=jax.tree.map(jnp.zeros_like, clipped.total)), info

    monkeypatch.setattr(ClippedGrad, "one_pass", blind)
    found, philox = [], Secret.philox
    for turn in range(2):

        def turned(self, name, counter, turn=turn):
            return philox(self, name, counter + (turn if name == "canary coins" else 0))

        monkeypatch.setattr(Secret, "philox", turned)
        result = small.go(tmp_path / str(turn), config())
        directory = RunDirectory(tmp_path / str(turn))
        public = small.outcome(result), directory.canary_gradients.read_bytes(), build(result)
        found.append((public, canaries.coins_of(directory, M)))
    assert found[0][0] == found[1][0]
    assert not np.array_equal(found[0][1], found[1][1])


def test_canaries_take_part_and_cost_nothing_more(tmp_path):
    with_them, without = (
        small.go(tmp_path / name, chosen)
        for name, chosen in (("a", config()), ("b", small.config()))
    )
    assert with_them.ledger.event == without.ledger.event
    assert with_them.config.dataset_size == without.config.dataset_size
    moved = jax.tree.map(jnp.subtract, with_them.params, without.params)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(moved)) > 0


def test_a_right_run_is_audited_and_a_broken_one_caught(tmp_path, monkeypatch):
    def finished(name, cfg):
        result = small.go(tmp_path / name, cfg)
        (tmp_path / name / "report.json").write_text(json.dumps(build(result).to_dict()))
        return audit_run(RunDirectory(tmp_path / name))

    quiet = {"canaries": 64, "noise_multiplier": 2.0, "steps": 20, "eval_every": 20}
    found = finished("right", config("pixel", **quiet))
    assert found.records
    assert not found.broken
    added = gaussian.noised
    monkeypatch.setattr(gaussian, "noised", lambda tree, std, *key: added(tree, std / 100, *key))
    broken = finished("broken", config("pixel", **{**quiet, "noise_multiplier": 50.0}))
    assert broken.proven < 0.7
    assert broken.broken


class Planned(Exception):
    """Raised where the first step would be taken."""


def planned(folder, cfg, monkeypatch):
    """What a run would train on and watch, as a start or a resumed start has it."""
    found = []

    def taken(run, plan, progress):
        found.append((np.asarray(jax.tree.leaves(plan.source.arrays)[0]), plan.algorithm))
        raise Planned

    monkeypatch.setattr(front, "trained", taken)
    with pytest.raises(Planned):
        small.go(folder, cfg)
    return found[0]


def test_candidates_are_whitened_by_what_was_released_of_the_others(tmp_path, monkeypatch):
    cfg = config("mislabelled", features="scattering", whiten_noise_multiplier=8.0)
    rows, folder = small.dataset(), RunDirectory(tmp_path / "r")
    first, again = (planned(folder.path, cfg, monkeypatch)[0] for _ in range(2))
    np.testing.assert_array_equal(first, again)
    coins, kept = canaries.coins_of(folder, M), np.load(folder.components)
    made = features.by_name("scattering", rows.test_x[-M:])
    expected = assemble.whitened_by(kept, made)[coins]
    np.testing.assert_allclose(first[200:], expected, rtol=1e-6, atol=1e-6)
    real = assemble.whitened_by(kept, features.by_name("scattering", rows.train_x))
    np.testing.assert_allclose(first[:200], real, rtol=1e-6, atol=1e-6)


def test_what_is_whitened_by_is_made_of_the_real_records_alone(tmp_path, monkeypatch):
    seen, made = [], assemble.dp_whitening

    def watched(x, *args, **options):
        seen.append(x)
        return made(x, *args, **options)

    monkeypatch.setattr(assemble, "dp_whitening", watched)
    cfg = config("noise", features="scattering", whiten_noise_multiplier=8.0)
    planned(tmp_path / "r", cfg, monkeypatch)
    np.testing.assert_array_equal(seen[0], features.by_name("scattering", small.dataset().train_x))


def test_a_kill_at_any_write_before_the_first_step_leaves_one_set_of_coins(tmp_path, monkeypatch):
    """The folder as each kill leaves it goes on, with the coins and the release that it has."""
    cfg = small.config(pca_dimensions=4, pca_noise_multiplier=8.0, canaries=20)
    replace, left = os.replace, []

    def kept(*names):
        replace(*names)
        shutil.copytree(tmp_path / "r", tmp_path / str(len(left)))
        left.append(str(names[1]))

    monkeypatch.setattr(os, "replace", kept)
    whole = planned(tmp_path / "r", cfg, monkeypatch)
    monkeypatch.setattr(os, "replace", replace)
    assert any("canaries.json" in name for name in left)
    assert any("components.npy" in name for name in left)
    coins, directory = canaries.coins_of(RunDirectory(tmp_path / "r"), 20), None
    for number in range(len(left)):
        directory = RunDirectory(tmp_path / str(number))
        charged = directory.ledger.exists() and Ledger(directory.ledger).entries
        assert directory.coins.exists() or not charged
        before = directory.components.read_bytes() if directory.components.exists() else None
        again = planned(directory.path, cfg, monkeypatch)
        np.testing.assert_array_equal(canaries.coins_of(directory, 20), coins)
        assert len(again[0]) == len(whole[0])
        assert before in (None, directory.components.read_bytes())
        assert [e.event for e in Ledger(directory.ledger).entries] == [acc.Gaussian(8.0)]


RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(200, 20)).astype(np.float32), RNG.integers(0, 3, 200).astype(np.int32)
CX, CY = RNG.normal(size=(30, 20)).astype(np.float32), RNG.integers(0, 3, 30).astype(np.int32)


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"], y)


def run(folder, records=(CX, CY), **changes):
    mechanism = jaxdp.dp_sgd(1.0, 1.0, 40, 200)
    given = {"params": {"w": jnp.zeros((20, 3))}, "delta": 1e-4, "every": 3, **changes}
    given.setdefault("progress", small.ignore)
    return jaxdp.Run(folder, loss_fn, mechanism, optax.sgd(0.1), (X, Y), canaries=records, **given)


def test_records_of_ones_own_are_audited_and_a_run_goes_on_with_the_same(tmp_path):
    with pytest.raises(Stop):
        run(tmp_path / "r", progress=crash_at(8)).fit(12)
    with pytest.raises(ValueError, match="mechanism must stay that of the run"):
        run(tmp_path / "r", (CX + 1, CY)).fit(12)
    one = run(tmp_path / "r")
    one.fit(12)
    assert canaries.released(one.directory).shape == (12, 90)
    found = one.audit()
    assert (found.canaries, found.records, found.broken) == (30, True, False)
    row = json.loads((tmp_path / "r/report.json").read_text())["audited"]
    assert row["last_of"] == "the losses of the last iterate alone"
    assert "the losses of the last iterate alone" in (tmp_path / "r/report.md").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "black"}, "canary_kind must be one of"),
        ({"canaries": 0}, "canaries must be at least 1 with canary_kind noise, got 0"),
        ({"kind": "mislabelled", "canaries": 400}, "canaries must be at most half of the"),
        ({"relation": "replace_special"}, "canaries must be 0 but under add_or_remove_one"),
        ({"algorithm": "piadam"}, "canaries must be a number for an algorithm that scales"),
        ({"pca_dimensions": 4, "pca_noise_multiplier": 5.0}, "canary_kind must be gradient with"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((CX[:, :5], CY), "canaries must be records like"),
        (-1, "canaries must be a whole number of at least 0, got -1"),
        (2.5, "canaries must be a whole number"),
    ],
)
def test_bad_records(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "r", given)
