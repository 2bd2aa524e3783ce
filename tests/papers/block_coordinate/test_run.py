"""Runs of block coordinate descent in a folder: resumed, copied back, looked at, charged."""

import contextlib
import dataclasses
import json
import re

import chex
import jax
import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp.cli import main
from jaxdp.cli.blocks import train_blocks
from jaxdp.ledger.seeds import Secret
from jaxdp.papers import block_coordinate as bc
from jaxdp.papers.block_coordinate import training
from jaxdp.papers.block_coordinate.network import Patches
from jaxdp.papers.block_coordinate.released import Charged
from jaxdp.papers.block_coordinate.run import block_run, command_of, train
from jaxdp.papers.block_coordinate.settings import configured, records
from jaxdp.runs import RunDirectory
from jaxdp.runs.export import export_params
from tests.papers.block_coordinate.test_forms import NET, PATCHES, data
from tests.papers.block_coordinate.test_forms import algorithm as released
from tests.papers.block_coordinate.test_hidden import algorithm as hidden_blocks
from tests.papers.block_coordinate.test_hidden import published
from tests.refusing import all_refused, refused
from tests.runs.small import Stop, dataset, ignore, kept, undrawn

SMALL = {"batch_size": 40, "dataset_size": 200, "hidden": 4, "noise_multiplier": 1.0}


def config(algorithm="sbcd", **given):
    return configured(algorithm, "digits", {**SMALL, **given})


def sweeps(**given):
    return config(steps=6, eval_every=2, **given)


def hidden(**settings):
    return config("sbcd-hidden", settings={"epochs": 2, "sweeps": 2, **settings})


def go(folder, cfg, progress=ignore, seed=None, data=None):
    directory = RunDirectory(folder)
    secret = None if directory.exists() else Secret.new()
    secret = Secret.from_seed(seed) if secret is not None and seed is not None else secret
    run = block_run(cfg, directory, data or dataset(), secret, progress)
    return run, train(run, cfg)


REPLACED = acc.Relation.REPLACE_ONE


def outside(folder):
    """Every file outside ``secret/``, with its content."""
    files = (p for p in folder.rglob("*") if p.is_file() and "secret" not in p.parts)
    return {p.name: p.read_bytes() for p in files}


def test_a_sweep_run_that_crashes_is_charged_once_and_takes_back_nothing(tmp_path, monkeypatch):
    used, seen, step, folder = [], [], training.ReleasedBlocks.step, tmp_path / "r"

    def watched(self, weights, data, draw):
        used.append((draw.step, draw.ticket.tag.tobytes(), draw.indices))
        return step(self, weights, data, draw)

    monkeypatch.setattr(training.ReleasedBlocks, "step", watched)

    def crash(at, row):
        seen.append(row)
        if at == 5 and len([s for s, *_ in used if s == 4]) == 1:
            raise Stop

    with pytest.raises(Stop):
        go(folder, sweeps(), crash)
    put_back = kept(folder / "secret")
    _, result = go(folder, sweeps(), crash)
    event = sweeps().blocks().event()
    assert result.ledger.event == acc.Composed((acc.Repeated(event, 6),))
    assert [row["step"] for row in result.history] == [2, 4, 6]
    assert [row for row in seen if row and row not in result.history] == []
    assert len(used) > 6  # some were done again
    assert len({key for _, key, _ in used}) == len(used)  # never with the noise of before
    again = [rows for s, _, rows in used if s == 4]
    assert len(again) == 2
    assert not np.array_equal(*again)  # nor on the same draw
    assert result.ledger.epsilon(1e-5).upper == pytest.approx(result.history[-1]["epsilon"])
    assert any("interrupted" in said for said in result.ledger.unverified())
    # An old copy of the secrets is charged anew: what is after the checkpoint that was put back.
    put_back()
    before = len(used)
    _, result = go(folder, sweeps())
    assert result.ledger.steps == 6 + len(used[before:]) > 6


def test_a_hidden_run_that_crashes_stays_one_hidden_state(tmp_path, monkeypatch):
    """Attacks: look outside ``secret/`` before and after each block; put an old ``secret/`` back.

    That was a second ending for one charge.
    """
    found, looks, shown, train = [], [], [], training.train_block
    folder, event = tmp_path / "r", hidden().blocks().event()

    def spying(algorithm, block, weights, batches, key, sweep, watch):
        looks.append(outside(folder))
        if len(looks) == 5:
            raise Stop  # before the third training
        assert watch is None
        words = np.asarray(jax.random.key_data(key))
        found.append((np.asarray(batches[0]).tobytes(), words.tobytes()))
        new = train(algorithm, block, weights, batches, key, sweep, watch)
        looks.append(outside(folder))
        return new

    monkeypatch.setattr(training, "train_block", spying)
    with pytest.raises(Stop):
        go(folder, hidden())
    assert set(outside(folder)) == {"ledger.jsonl"}  # charged, and nothing else is to be seen
    early = tmp_path / "early"
    refused("must have a checkpoint that was shown", export_params, RunDirectory(folder), early)
    assert not early.exists()
    put_back = kept(folder / "secret")
    _, result = go(folder, hidden(), lambda step, row: shown.append(row))
    assert len(looks) == 5 + 4
    assert all(look == each[0] for each in (looks[:5], looks[5:]) for look in each)
    assert set(looks[0]) == set(looks[5]) == {"ledger.jsonl"}
    assert [row["step"] for row in shown if row is not None] == [1]
    # Two blocks, two sweeps: the two that were kept are not trained again.
    assert len(found) == len({key for _, key in found}) == 4
    assert len({partition for partition, _ in found}) == 1
    assert result.ledger.event == acc.Composed((acc.Repeated(event, 1),))
    assert [row["step"] for row in result.history] == [1]
    assert not (folder / "secret" / "blocks.json").exists()
    # An old copy of the secrets costs a whole run more.
    put_back()
    _, second = go(folder, hidden())
    assert second.ledger.event == acc.Composed((acc.Repeated(event, 2),))
    ends = [end.ledger.epsilon(1e-5, REPLACED).upper for end in (result, second)]
    assert ends[0] < ends[1]
    assert len(found) == 4 + 4  # from the start, not from the block that was kept
    assert len({partition for partition, _ in found}) == 2
    assert len({key for _, key in found}) == 8


def test_of_every_training_one_version_is_seen_wherever_what_was_kept_is_put_back(
    tmp_path, monkeypatch
):
    """A and B are killed before the same training; C goes on from what A kept, and shows it."""
    event, trained, left = hidden().blocks().event(), [], []

    def train(algorithm, block, weights, batches, key, sweep, watch):
        if not left:
            raise Stop
        left.pop()
        words = np.asarray(jax.random.key_data(key))
        trained.append((np.asarray(batches[0]).tobytes(), words.tobytes()))
        return (*weights[:block], weights[block] + 2.0 ** len(trained), *weights[block + 1 :])

    def started(trainings):
        """The trainings, counted from 1, that are seen at the end; None without an end."""
        left[:] = range(trainings)
        with contextlib.suppress(Stop):
            run, result = go(folder, hidden())
            first = hidden().blocks().init(run._secret.jax_key("init"))
            ends = zip(result.params.values(), first, strict=True)
            bits = sum(round(float(np.mean(end - begin))) for end, begin in ends)
            assert result.ledger.event == acc.Composed((acc.Repeated(event, charged),))
            return [n for n in range(bits.bit_length()) if bits >> n & 1]

    monkeypatch.setattr(training, "train_block", train)
    for killed in (1, 2, 3):
        trained.clear()
        folder, charged = tmp_path / str(killed) / "r", 1
        blocks = folder / "secret" / "blocks.json"
        assert started(killed) is None
        kept_by_a, put_back = blocks.read_bytes(), kept(folder / "secret")
        blocks.unlink()
        assert started(killed) is None
        blocks.write_bytes(kept_by_a)
        seen = started(9)
        assert seen == [*range(1, killed + 1), *range(2 * killed + 1, len(trained) + 1)]
        assert len(seen) == 4
        blocks.write_bytes(kept_by_a)
        assert started(0) == seen
        assert len({partition for partition, _ in trained}) == 1
        # As a whole the secrets of before are charged anew: nothing that A kept is seen again.
        put_back()
        charged, before = 2, len(trained)
        assert started(9) == [before + n for n in range(1, 5)]
        assert len({partition for partition, _ in trained}) == 2
        assert len({key for _, key in trained}) == len(trained)


def test_a_long_run_is_charged_without_counting_its_steps_and_a_seed_gives_one(tmp_path):
    schedule = bc.SweepSchedule((1.0, 0.5, 1.0), steps_each=2)
    blocks = config().blocks()
    blocks = dataclasses.replace(blocks, schedule=schedule)
    for steps in range(9):
        each = [blocks.event(step) for step in range(steps)]
        parts = blocks.events(steps).events
        assert {part.event: part.count for part in parts} == {e: each.count(e) for e in each}
    assert sum(part.count for part in blocks.events(10**12).events) == 10**12
    for step, end in ((0, 2), (1, 2), (2, 4), (3, 4), (4, 10**18), (9, 10**18)):
        event, multipliers, found = Charged(blocks).stretch(step)  # as an issuer charges it
        assert found == end
        assert {event} == {blocks.event(n) for n in range(step, min(end, step + 5))}
        assert event.event.noise_multiplier == multipliers["sweep"]
    # One seed gives one run.
    for cfg in (sweeps(), hidden()):
        ends = (go(tmp_path / f"{cfg.algorithm}{i}", cfg, seed=3)[1].params for i in range(2))
        chex.assert_trees_all_equal(*ends)


@undrawn()
def test_the_command_line_trains_reports_resumes_and_exports(tmp_path, capsys):
    folder = tmp_path / "r"
    options = "--algorithm sbcd-one-layer --noise-multiplier 5 --set epochs=2 --batch-size 479"
    main(["train", *options.split(), "--json", "--out", str(folder)])
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["relation"] == "replace_one"
    assert row["sampling"] == "secret_partition"
    assert 0 < row["epsilon"] < row["claimed_epsilon"] or row["epsilon"] > 0
    text, words = (folder / "report.md").read_text(), "secret partition that was drawn once"
    assert "every intermediate model" not in text
    for part in ("one look at a state between", words, "DP-SBCD, Theorem 4.6"):
        assert part in text
    proven = json.loads((folder / "report.json").read_text())["guarantee"]["epsilon"]
    main(["train", "--resume", "--out", str(folder)])  # nothing is left to do, nor charged
    assert json.loads((folder / "report.json").read_text())["guarantee"]["epsilon"] == proven
    main(["export", str(folder), "--to", str(tmp_path / "p.msgpack")])
    assert (tmp_path / "p.msgpack").stat().st_size > 4 * 650
    main(["algorithms"])
    printed = capsys.readouterr().out
    assert "sbcd-one-layer" in printed
    assert "kernel" in printed
    # The audit of a run goes into its report.
    options = "--algorithm sbcd --noise-multiplier 2 --steps 2 --batch-size 100 --out"
    main(["train", *options.split(), str(tmp_path / "q")])
    main(["audit", str(tmp_path / "q"), "--runs", "200", "--seed", "1", "--json"])
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["audited"] <= row["proven"]
    assert not row["broken"]
    assert json.loads((tmp_path / "q/report.json").read_text())["audited"]["runs"] == 400


def test_other_settings_and_longer_fits_of_a_hidden_run_have_partitions_of_their_own(
    tmp_path, monkeypatch
):
    """An average over the partition is taken once: two events over one would be too little."""
    found, partition = [], training.secret_partition

    def watched(data, batch_size, rng):
        batches = partition(data, batch_size, rng)
        found.append(np.asarray(batches[0])[0].tobytes())
        return batches

    def begun(name, secret, epochs):
        cfg = config("sbcd-one-layer", settings={"epochs": epochs})
        run = block_run(cfg, RunDirectory(tmp_path / name), dataset(), secret, ignore)
        return run, cfg

    monkeypatch.setattr(training, "secret_partition", watched)
    for epochs in (1, 2):  # of one seed
        train(*begun(str(epochs), Secret.from_seed(3), epochs))
    assert len(set(found)) == 2
    found.clear()
    run, _ = begun("run", Secret.new(), 1)
    run.fit(2)
    assert len(set(found)) == 2
    moved = [row["update_norm"] for row in run.history]
    assert len(moved) == 2
    assert min(moved) > 0
    said = acc.epsilon(run.algorithm.total(2), 1e-5, REPLACED).upper
    assert said == pytest.approx(run.epsilon(1e-5).upper)
    assert said > acc.epsilon(run.algorithm.total(1), 1e-5, REPLACED).upper


# What is refused, by the name that it was given, before anything is written
def of(make, *args, **given):
    return lambda: make(*args, **given)


def trained_on(*shapes):
    return of(bc.train, released(), tuple(np.zeros(shape) for shape in shapes), 1)


REFUSED = [
    (of(bc.Proximal, weight_decay=-1), "weight_decay"),
    (of(bc.Proximal, sparsity=float("nan")), "sparsity"),
    (of(bc.Proximal, spectral_radius=0), "spectral_radius"), (of(bc.Rescale, 0.0), "radius"),
    (of(bc.Rescale, 1.0, 0), "iterations"), (of(bc.linear, 1.0, 0.0, 3), "factors"),
    (of(bc.linear, 1.0, 2.0, 1), "stages"), (of(bc.SweepSchedule, ()), "factors"),
    (of(bc.Network, (3,), 1.0), "widths"), (of(bc.Network, (3, 0), 1.0), "widths"),
    (of(bc.Network, (3, 2), 0.0), "activation_bound"),
    (of(bc.Network, (3, 2), 1e-20), "activation_bound must be in"),
    (of(bc.Network, (72, 9, 3), 1.0, patches=PATCHES), "must begin with 72 and 16"),
    (of(bc.Network, (4, 3), 1.0, loss="hinge"), "loss must be one of squared, softmax"),
    (of(Patches, (6, 6, 1), 7, 1, 1), "kernel must be within an image"),
    (of(Patches, (6, 6), 2, 1, 1), "shape must be"),
    (of(Patches, (6, 6, 1), 2, 0, 1), "stride must be"),
    (of(released, z=-1.0), "noise_multipliers"),
    (of(released, z=(1.0, 2.0, 3.0)), "noise_multipliers"),
    (of(released, clip=0.0), "l2_clip_norms"),
    (of(released, clip=1e-25), "l2_clip_norms must be in"),
    (of(bc.ReleasedBlocks, NET, 1.0, 1.0, 0.0, 1, 1), "step_size"),
    (of(bc.ReleasedBlocks, NET, 1.0, 1.0, 1.0, 2, 1), "batch_size"),
    (trained_on((4, 5), (4, 3)), "data"), (trained_on((4, 6), (3, 3)), "data"),
    (of(bc.train, released(), data(64), -1), "steps"),
    (lambda: released().sampler(16), "dataset_size must be the number of records"),
    (of(hidden_blocks, step_size=0.9), "step_size"),
    (of(hidden_blocks, noise_multiplier=0.0), "noise_multiplier"),
    (of(hidden_blocks, l2_clip_norms=(1.0, 1.0, 1.0)), "l2_clip_norms"),
    (of(hidden_blocks, l2_clip_norms=(1.0, 1e11)), "l2_clip_norms must be in"),
    (of(hidden_blocks, batch_size=33), "batch_size"),
    (of(hidden_blocks, batch_size=5, average=True), "batch_size"),
    (of(hidden_blocks, inner_epochs=0), "inner_epochs"),
    (of(hidden_blocks, direct=True), "direct"),
    (of(bc.train_hidden, hidden_blocks(), data(31)), "dataset_size"),
    (of(published, noise_std=-1.0), "noise_std"), (of(published, epochs=0), "epochs"),
    (lambda: published().claim(0.0, 1e-5), "sensitivity"),
]  # fmt: skip


def test_bad_input_is_named(tmp_path, capsys):
    all_refused([(words, build) for build, words in REFUSED])
    all_refused(
        (words, of(configured, algorithm, "digits", SMALL | given), given)
        for algorithm, given, words in CONFIGURED
    )
    # Labels that are no classes, before anything is written.
    config, folder = configured("sbcd", "digits", SMALL), RunDirectory(tmp_path / "run")
    for label in (-17, 37, 5.5):
        rows = dataset()
        odd = np.concatenate([np.asarray(rows.train_y)[:-1], [label]])
        rows = dataclasses.replace(rows, train_y=odd.astype(np.asarray(label).dtype))
        with pytest.raises(ValueError, match="train_y must be") as error:
            block_run(config, folder, rows, Secret.new(), ignore)
        assert str(label) not in str(error.value)
        refused("train_y must be", records, config, rows)
    for name, value in {"hidden": 64, "l2_clip_norm": 1e-3}.items():
        options = {"algorithm": "sbcd-one-layer", "dataset": "digits", **SMALL, name: value}
        given = (options, {name: value}, None, Secret.new(), None, False, None)
        refused(f"{name} must not be given", train_blocks, folder, None, *given)
    command = command_of(configured("sbcd-one-layer", "digits", SMALL))
    assert "--hidden" not in command
    assert "--l2-clip-norm" not in command
    assert not folder.path.exists()
    # What does not go together on the command line.
    for algorithm, more, words in COMMANDS:
        out = ["--out", str(tmp_path / "r"), *more.split()]
        with pytest.raises(SystemExit):
            pytest.fail(f"{more}: {main(['train', '--algorithm', algorithm, *out])}")
        assert re.search(words, capsys.readouterr().err), more
        assert not (tmp_path / "r" / "ledger.jsonl").exists(), more


CONFIGURED = [
    ("sbcd", {"settings": {"channels": 1_000_000_000}}, "channels must make at most"),
    ("sbcd", {"settings": {"layers": 1_000_000_000}}, "layers must be at most 1,000"),
    ("sbcd", {"hidden": 1_000_000_000}, "hidden, layers and channels must make at most"),
    ("sbcd", {"settings": {"kernel": 3}}, "kernel must not be set without channels"),
    ("sbcd", {"settings": {"stride": 1, "channels": 0}}, "stride must not be set without channels"),
    ("sbcd", {"learning_rate": 1e30}, "learning_rate must be at most 1e"),
    ("sbcd", {"learning_rate": -1.0}, "learning_rate must be a finite number above 0"),
    ("sbcd", {"noise_multiplier": 0.0}, "noise_multiplier must be a finite number above 0"),
    ("sbcd", {"l2_clip_norm": 0.0}, "l2_clip_norm must be a finite number above 0"),
    ("sbcd-hidden", {"steps": 3}, "steps of a hidden run must be 1"),
    ("sbcd-hidden", {"settings": {"bound": 1e-6}}, "in block 1, .* lost in the rounding"),
]


COMMANDS = [
    ("sbcd", "--canaries 5", "canaries must not be given with algorithm sbcd"),
    ("sbcd", "--strategy banded", "strategy must not be given with algorithm sbcd"),
    ("sbcd", "--devices 2", "devices must"),
    ("sbcd", "--model mlp", "model must not be given"),
    ("sbcd", "--sampling shuffle", "sampling must not be given"),
    ("sbcd", "--optimizer adam", "optimizer must not be given"),
    ("sbcd", "--features scattering", "features must not be given"),
    ("sbcd", "--sensitive", "sensitive must not be given"),
    ("sbcd", "--dry-run", "dry_run must not be given"),
    ("sbcd", "--set epochs=2", "settings of sbcd must be among"),
    ("sbcd", "--epsilon 3 --noise-multiplier 1", "and not both"),
    ("sbcd-hidden", "--steps 5", "a hidden run is one release"),
    ("sbcd-hidden", "--eval-every 5", "would release the state that is hidden"),
    ("sbcd-hidden", "--relation add_or_remove_one", "relation must be one of replace_one"),
    ("sbcd-one-layer", "--set layers=2", "settings of sbcd-one-layer must be among"),
    ("sbcd-hidden", "--learning-rate 9", r"step_size must be at most 2/\(gamma B\^2\)"),
]


def test_what_changed_is_refused_at_a_resumed_run(tmp_path, capsys):
    go(tmp_path / "r", sweeps())
    refused("the training data changed", go, tmp_path / "r", sweeps(), data=dataset(1))
    words = "changed: learning_rate (8.0 then, 1.0 now)"
    refused(words, go, tmp_path / "r", sweeps(learning_rate=1.0))
    with pytest.raises(SystemExit):
        main(["train", "--resume", "--out", str(tmp_path / "r"), "--canaries", "3"])
    assert "canaries must not be given" in capsys.readouterr().err
