"""Runs with audit canaries: their coins are a secret, and nothing public depends on them."""

import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import accounting as acc
from jaxdp import data, dp_sgd, features
from jaxdp.cli import main
from jaxdp.clipping import ClippedGrad
from jaxdp.ledger import Ledger
from jaxdp.ledger.seeds import Secret
from jaxdp.noise import gaussian
from jaxdp.runs import RunDirectory, assemble, canaries
from jaxdp.runs.audit import audit_run
from jaxdp.runs.described import report as build
from jaxdp.runs.export import export_params
from jaxdp.runs.report import to_html, to_markdown
from tests.refusing import refused
from tests.runs import own, small
from tests.runs.small import Stop, crash_at

M = 300
RECORDS = 40


def config(kind="gradient", **changes):
    given = {"canaries": M if kind == "gradient" else RECORDS, "canary_kind": kind}
    return small.config(**{**given, **changes})


def reported(folder, cfg, **options):
    result = small.go(folder, cfg, **options)
    (folder / "report.json").write_text(json.dumps(build(result).to_dict()))
    return result, RunDirectory(folder)


@pytest.fixture(scope="module")
def tossed(tmp_path_factory):
    return reported(tmp_path_factory.mktemp("tossed") / "run", config())


def test_coins_are_fair_secret_named_take_part_and_cost_nothing_more(tossed, whole, tmp_path):
    result, directory = tossed
    coins = canaries.coins_of(directory, M)
    assert abs(coins.sum() - M / 2) < 5 * np.sqrt(M) / 2
    assert directory.coins.parent == directory.secret  # closed to others, as test_resume.py shows
    words, report = "300 audit canaries, of which a random half took part", build(result)
    assert result.ledger.notes() == Ledger(directory.ledger).notes() == [words]
    assert words in to_markdown(report)
    with small.undrawn():
        assert words in to_html(report, directory.path)
    assert canaries.released(directory).shape == (12, M)
    assert export_params(directory, tmp_path / "p.msgpack") == 12
    for found in (result, small.go(tmp_path / "r", config("noise"))):
        assert found.ledger.event == whole[0].ledger.event
        assert found.config.dataset_size == whole[0].config.dataset_size
        moved = jax.tree.map(jnp.subtract, found.params, whole[0].params)
        assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(moved)) > 0


@pytest.mark.parametrize("changed", ["gradient", "noise", "records"])
def test_nothing_public_depends_on_the_coins_or_on_the_records(tmp_path, monkeypatch, changed):
    """With equal releases (a clipped sum replaced by zero), others must change no figure."""
    original, philox, test = ClippedGrad.clip_physical_batch, Secret.philox, small.dataset()

    def blind(self, *args, **options):
        summed, info = original(self, *args, **options)
        zeros = jax.tree.map(jnp.zeros_like, summed.value)
        return dataclasses.replace(summed, value=zeros), info

    monkeypatch.setattr(ClippedGrad, "clip_physical_batch", blind)
    cfg = small.config(steps=6) if changed == "records" else config(changed, steps=6)
    found, coins = [], []
    for turn in range(2):

        def turned(self, name, counter, turn=turn):
            return philox(self, name, counter + (turn if name == "canary coins" else 0))

        monkeypatch.setattr(Secret, "philox", turned)
        train = small.dataset(seed=turn if changed == "records" else 0)
        rows = data.Dataset(train.spec, train.train_x, train.train_y, test.test_x, test.test_y)
        result, directory = reported(tmp_path / str(turn), cfg, rows=rows)
        if cfg.canaries:
            coins.append(canaries.coins_of(directory, cfg.canaries))
            released = directory.canary_gradients.read_bytes()
            found.append((small.outcome(result), build(result), released))
        else:
            found.append(result.history)
    assert found[0] == found[1]
    assert not coins or not np.array_equal(*coins)


def test_a_crash_changes_neither_the_coins_nor_what_was_shown(tmp_path, tossed):
    small.crash(tmp_path / "r", config(), 8)
    stopped = RunDirectory(tmp_path / "r")
    before, shown = stopped.coins.read_bytes(), canaries.released(stopped)
    assert len(shown) in (3, 6)  # of the durable blocks alone
    # Changed or lost coins and rows are refused.
    refused("changed: canaries", small.go, stopped.path, config(canaries=M + 1))
    kept = stopped.secret / stopped.canary_gradients.name
    rows = np.load(kept)
    for changed in (rows[:4], rows + (np.arange(len(rows)) == 5)[:, None]):
        np.save(kept, changed)
        refused("gradients of the 6 steps that the check", small.go, stopped.path, config())
    np.save(kept, rows)
    row = json.loads(before)
    row["included"][0] = 1 - row["included"][0]
    edited = (json.dumps(row), "it was changed: the canaries of a run cannot be")
    for text, words in (edited, ("{}", "must hold coins")):
        stopped.coins.write_text(text)
        refused(words, small.go, stopped.path, config())
    stopped.coins.unlink()
    refused("must hold its canaries' coins, but", small.go, stopped.path, config())
    stopped.coins.write_bytes(before)
    result = small.go(stopped.path, config())
    assert stopped.coins.read_bytes() == before
    np.testing.assert_array_equal(canaries.released(stopped)[: len(shown)], shown)
    assert canaries.released(stopped).shape == (12, M)
    assert result.ledger.event == tossed[0].ledger.event
    # Coins are never tossed again.
    directory = RunDirectory(tmp_path / "left")
    directory.create()
    canaries.write_coins(directory, canaries.tossed(M, Secret.from_seed(1)))
    before = directory.coins.read_bytes()
    canaries.write_coins(directory, canaries.tossed(M, Secret.from_seed(2)))
    refused("what is left of an audit", small.go, directory.path, config())
    assert directory.coins.read_bytes() == before


def test_gradients_of_another_start_are_not_published_beside_a_checkpoint(tmp_path):
    """Two starts go on from step 3; the file that one left is put beside what the other shows."""
    one, two = (RunDirectory(tmp_path / name) for name in ("one", "two"))
    cfg = config(steps=9)
    small.crash(one.path, cfg, 5, seed=None)
    shutil.copytree(one.path, two.path)
    for each in (one, two):
        small.crash(each.path, cfg, 8)
    kept, other = (each.secret / each.canary_gradients.name for each in (one, two))
    np.testing.assert_array_equal(np.load(kept)[:3], np.load(other)[:3])
    assert not np.any(np.load(kept)[3:] == np.load(other)[3:])
    mine, before = kept.read_bytes(), one.canary_gradients.read_bytes()
    kept.write_bytes(other.read_bytes())
    refused("they are another release", small.go, one.path, cfg)
    assert one.canary_gradients.read_bytes() == before
    kept.write_bytes(mine)
    result = small.go(one.path, cfg)
    np.testing.assert_array_equal(canaries.released(one)[:6], np.load(kept)[:6])
    assert all("canaries" not in row for row in result.history)
    assert "canaries" not in one.history.read_text()


def test_a_kill_at_any_write_before_the_first_step_leaves_one_set_of_coins(tmp_path, monkeypatch):
    """The folder as each kill leaves it goes on, with the coins and the release that it has."""
    cfg = small.config(pca_dimensions=4, pca_noise_multiplier=8.0, canaries=20)
    replace, left = os.replace, []

    def kept(*names):
        replace(*names)
        shutil.copytree(tmp_path / "r", tmp_path / str(len(left)))
        left.append(str(names[1]))

    monkeypatch.setattr(os, "replace", kept)
    records = len(small.planned(tmp_path / "r", cfg))
    monkeypatch.setattr(os, "replace", replace)
    assert any("canaries.json" in name for name in left[1:])
    assert any("components.npy" in name for name in left)
    coins = canaries.coins_of(RunDirectory(tmp_path / "r"), 20)
    for number in range(len(left)):
        directory = RunDirectory(tmp_path / str(number))
        charged = directory.ledger.exists() and Ledger(directory.ledger).entries
        assert directory.coins.exists() or not charged
        before = directory.components.read_bytes() if directory.components.exists() else None
        assert len(small.planned(directory.path, cfg)) == records
        np.testing.assert_array_equal(canaries.coins_of(directory, 20), coins)
        assert before in (None, directory.components.read_bytes())
        assert [e.event for e in Ledger(directory.ledger).entries] == [acc.Gaussian(8.0)]


# Canaries that are records.
def test_candidates_are_made_of_nothing_that_is_trained_on():
    rows = small.dataset()
    for kind in ("noise", "pixel"):
        x, y = assemble.canary_records(config(kind), rows)
        assert (x.shape, x.dtype, y.dtype) == ((RECORDS, 8, 8, 1), np.float32, rows.train_y.dtype)
        assert set(y.tolist()) <= set(range(10))
        assert len(np.unique(x.reshape(RECORDS, -1), axis=0)) == RECORDS  # of 64 pixels all differ
    lit = assemble.canary_records(config("pixel"), rows)[0].reshape(RECORDS, -1)
    np.testing.assert_array_equal(np.sum(lit != 0, axis=1), 1)
    x, y = assemble.canary_records(config("mislabelled"), rows)
    np.testing.assert_array_equal(x, rows.test_x[-RECORDS:])
    assert not np.any(y == rows.test_y[-RECORDS:])
    assert assemble.canary_records(small.config(canaries=7), rows) == 7
    assert small.config().candidates() is None
    # And accuracy is measured on tests that are no candidates.
    for kind, left in (("mislabelled", 100 - RECORDS), ("noise", 100)):
        (x, _), (_, y) = assemble.test_split(config(kind), rows)
        assert len(x) == len(y) == left
        np.testing.assert_array_equal(x, rows.test_x[:left])
    # Noise has no coarse waves where there is an image to hide in.
    noise = np.random.default_rng(0).standard_normal((5, 16, 12, 2)).astype(np.float32)
    found = assemble._without_coarse_waves(noise)
    assert (found.shape, found.dtype) == (noise.shape, np.float32)
    assert np.std(found) == pytest.approx(1.0, rel=1e-3)
    waves = np.abs(np.fft.fft2(found, axes=(1, 2)))
    assert np.max(waves[:, :5, :4]) < 1e-3 < np.min(waves[:, 6:9, 4:7].max(axis=(0, 3)))
    for plain in (noise[:, :4], noise[0]):  # too small, and no image
        np.testing.assert_array_equal(assemble._without_coarse_waves(plain), plain)


def test_candidates_are_whitened_by_what_was_released_of_the_others(tmp_path, monkeypatch):
    cfg = config("mislabelled", features="scattering", whiten_noise_multiplier=8.0)
    rows, folder = small.dataset(), RunDirectory(tmp_path / "r")
    seen, made = [], assemble.dp_whitening
    spied = lambda x, *args, **given: seen.append(x) or made(x, *args, **given)  # noqa: E731
    monkeypatch.setattr(assemble, "dp_whitening", spied)
    first, again = (small.planned(folder.path, cfg) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    real = features.by_name("scattering", rows.train_x)
    (given,) = seen
    np.testing.assert_array_equal(given, real)  # of the real records alone
    coins, kept = canaries.coins_of(folder, RECORDS), np.load(folder.components)
    candidates = features.by_name("scattering", rows.test_x[-RECORDS:])[coins]
    for found, expected in ((first[:200], real), (first[200:], candidates)):
        expected = assemble.whitened_by(kept, expected)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@small.undrawn()
def test_records_of_ones_own_are_audited_and_a_run_goes_on_with_the_same(tmp_path):
    rng = np.random.default_rng(3)
    x, cx = (rng.normal(size=(n, 20)).astype(np.float32) for n in (200, 30))
    y, cy = (rng.integers(0, 3, n).astype(np.int32) for n in (200, 30))

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"], y)

    def run(cx=cx, **given):
        params = {"w": jnp.zeros((20, 3))}
        given = {"params": params, "delta": 1e-4, "canaries": (cx, cy), **given}
        return own.run(tmp_path / "r", (x, y), own.PLAIN, loss, **given)

    with pytest.raises(Stop):
        run(progress=crash_at(8)).fit(12)
    refused("mechanism must stay that of the run", run(cx + 1).fit, 12)
    one = run(report=True)
    one.fit(12)
    assert canaries.released(one.directory).shape == (12, 90)
    found = one.audit()
    assert (found.canaries, found.broken) == (30, False)
    row = json.loads((tmp_path / "r/report.json").read_text())["audited"]
    assert row["last_of"] == "the losses of the last iterate alone"
    assert "the losses of the last iterate alone" in (tmp_path / "r/report.md").read_text()


@small.undrawn()
def test_of_the_last_iterate_alone_no_step_keeps_anything_and_the_audit_needs_no_training(tmp_path):
    """A run that memorises; it stops, goes on, and is audited by a program that did not train."""
    rng = np.random.default_rng(3)
    x, cx = (rng.normal(size=(n, 100)).astype(np.float32) for n in (40, 140))
    y, cy = (rng.integers(0, 3, n).astype(np.int32) for n in (40, 140))

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"] + params["b"], y)

    def run(place="r", scores="last", **given):
        params = {"w": jnp.zeros((100, 3)), "b": jnp.zeros(3)}
        mechanism = dp_sgd(noise_multiplier=0.0, l2_clip_norm=9.0, batch_size=20, dataset_size=40)
        given = {"delta": 1e-4, "canaries": (cx, cy), "canary_scores": scores, **given}
        given["trainable"] = {"w": True, "b": False}
        return own.run(tmp_path / place, (x, y), mechanism, loss, params=params, **given)

    with pytest.raises(Stop):
        run(progress=crash_at(8), secret=Secret.from_seed(2)).fit(12)
    refused("mechanism must stay that of the run", run(scores="trajectory").fit, 12)
    refused("mechanism must stay that of the run", run(canaries=(cx + 1, cy)).fit, 12)
    run(report=True).fit(12)
    assert not list((tmp_path / "r").rglob("canary_gradients.npy"))
    found = run().audit()
    assert (found.steps, found.canaries, found.last, found.broken) == (12, 140, None, False)
    assert 0.5 < found.audited.epsilon <= found.all_right
    assert "140 canaries: records, by their losses before" in (tmp_path / "r/report.md").read_text()
    assert json.loads((tmp_path / "r/audit.json").read_text())["audited"] == found.audited.epsilon
    refused('canary_scores must be "trajectory" for canaries that', run, "n", canaries=5)
    refused("canary_scores must be one of", run, "n", "both")


# Audits.


# Of a kind: how many, what the noise is divided by, the noise that is charged, and epsilon's most.
BROKEN = [
    pytest.param("gradient", 300, 50, 20.0, 1.5, marks=pytest.mark.slow),
    ("pixel", 64, 100, 50.0, 0.7),
]


@pytest.mark.parametrize(("kind", "number", "less", "charged", "most"), BROKEN)
def test_a_right_run_is_audited_and_a_broken_one_caught(
    tmp_path, monkeypatch, kind, number, less, charged, most
):
    quiet = {"canaries": number, "noise_multiplier": 2.0, "steps": 12, "eval_every": 12}
    found = audit_run(reported(tmp_path / "right", config(kind, **quiet))[1])
    assert not found.broken
    ledger = Ledger(tmp_path / "right/ledger.jsonl")
    assert found.proven == pytest.approx(ledger.epsilon(1e-5).upper)
    added = gaussian.add_normals
    monkeypatch.setattr(
        gaussian, "add_normals", lambda tree, std, *key: added(tree, std / less, *key)
    )
    quiet["noise_multiplier"] = charged
    broken = audit_run(reported(tmp_path / "broken", config(kind, **quiet))[1])
    assert broken.proven < most
    assert broken.broken


def test_the_audit_reads_releases_and_the_coins_alone(tossed, whole, finished, tmp_path, capsys):
    directory = RunDirectory(shutil.copytree(tossed[1].path, tmp_path / "r2"))
    folder = directory.path
    for path in list(directory.secret.iterdir()):
        if path != directory.coins:
            path.rename(tmp_path / path.name)
    main(["audit", str(folder), "--json"])
    row = json.loads(capsys.readouterr().out)
    assert (row["canaries"], row["runs"], row["what"]) == (M, 1, "this very run, once")
    assert 0 <= row["audited"] < row["proven"]
    assert json.loads((folder / "report.json").read_text())["audited"] == row
    assert f"{M} audit canaries" in (folder / "report.html").read_text()
    assert "Audited: this very run" in (folder / "report.md").read_text()
    assert (folder / "roc.png").stat().st_size > 10_000
    refused(r"no report\.json", audit_run, RunDirectory(tmp_path))
    (finished.path / "report.json").write_text(json.dumps(build(whole[0]).to_dict()))
    refused("must have audit canaries", audit_run, finished)

    def says(words, *arguments):
        with pytest.raises(SystemExit) as end:
            main(["audit", str(folder), *arguments])
        assert end.value.code == 2
        assert words in capsys.readouterr().err

    says("runs must not be given with a run that has canaries", "--runs", "10")
    says("delta must be above 0 and below 1", "--delta", "2")
    # Without its ledger nothing would be proven of the run, and any bound above 0 would accuse it.
    ledger = directory.ledger.rename(tmp_path / "ledger.jsonl")
    says("releases of report.json, got 0")
    ledger.rename(directory.ledger)
    directory.canary_gradients.write_bytes(b"")
    says("cannot be read")
