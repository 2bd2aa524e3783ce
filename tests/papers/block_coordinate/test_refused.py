"""What block coordinate descent refuses, by the name that it was given, before anything is written."""

import dataclasses
import re

import numpy as np
import pytest

from jaxdp.cli import main
from jaxdp.papers import block_coordinate as bc
from jaxdp.papers.block_coordinate.command import configured, train_blocks
from jaxdp.papers.block_coordinate.patches import Patches
from jaxdp.papers.block_coordinate.run import BlockRun, command_of
from jaxdp.papers.block_coordinate.settings import records
from jaxdp.runs import RunDirectory
from jaxdp.seeds import Secret
from tests.papers.block_coordinate import test_forms, test_hidden, test_released
from tests.papers.block_coordinate.test_released import NET, data
from tests.papers.block_coordinate.test_run import SMALL, go, sweeps
from tests.runs.small import dataset, ignore

hidden, published, released = test_hidden.algorithm, test_hidden.published, test_released.algorithm


def of(make, *args, **given):
    return lambda: make(*args, **given)


def training(*shapes):
    return of(bc.train, released(), tuple(np.zeros(shape) for shape in shapes), 1)


REFUSED = [
    (of(bc.Proximal, weight_decay=-1), "weight_decay"),
    (of(bc.Proximal, sparsity=float("nan")), "sparsity"),
    (of(bc.Proximal, spectral_radius=0), "spectral_radius"),
    (of(bc.Rescale, 0.0), "radius"),
    (of(bc.Rescale, 1.0, 0), "iterations"),
    (of(bc.linear, 1.0, 0.0, 3), "factors"),
    (of(bc.linear, 1.0, 2.0, 1), "stages"),
    (of(bc.SweepSchedule, ()), "factors"),
    (of(bc.Network, (3,), 1.0), "widths"),
    (of(bc.Network, (3, 0), 1.0), "widths"),
    (of(bc.Network, (3, 2), 0.0), "activation_bound"),
    (of(bc.Network, (3, 2), 1e-20), "activation_bound must be in"),
    (of(bc.Network, (72, 9, 3), 1.0, patches=test_forms.PATCHES), "must begin with 72 and 16"),
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
    (training((4, 5), (4, 3)), "data"),
    (training((4, 6), (3, 3)), "data"),
    (of(bc.train, released(), data(64), -1), "steps"),
    (lambda: released().sampler(16), "dataset_size must be the number of records"),
    (of(hidden, step_size=0.9), "step_size"),
    (of(hidden, noise_multiplier=0.0), "noise_multiplier"),
    (of(hidden, l2_clip_norms=(1.0, 1.0, 1.0)), "l2_clip_norms"),
    (of(hidden, l2_clip_norms=(1.0, 1e11)), "l2_clip_norms must be in"),
    (of(hidden, batch_size=33), "batch_size"),
    (of(hidden, batch_size=5, average=True), "batch_size"),
    (of(hidden, inner_epochs=0), "inner_epochs"),
    (of(hidden, direct=True), "direct"),
    (of(bc.train_hidden, hidden(), data(31)), "dataset_size"),
    (of(published, noise_std=-1.0), "noise_std"),
    (of(published, epochs=0), "epochs"),
    (lambda: published().claim(0.0, 1e-5), "sensitivity"),
]


def test_bad_input_is_named():
    for build, name in REFUSED:
        with pytest.raises(ValueError, match=name):
            pytest.fail(f"{name}: not refused, {build()}")


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


def test_configurations_are_refused_by_the_names_that_they_were_given():
    for algorithm, given, words in CONFIGURED:
        with pytest.raises(ValueError, match=words):
            pytest.fail(f"{given}: {configured(algorithm, 'digits', SMALL | given)}")


def test_labels_that_are_no_classes_are_refused_before_anything_is_written(tmp_path):
    config = configured("sbcd", "digits", SMALL)
    for label in (-17, 37, 5.5):
        rows = dataset()
        odd = np.concatenate([np.asarray(rows.train_y)[:-1], [label]])
        rows = dataclasses.replace(rows, train_y=odd.astype(np.asarray(label).dtype))
        with pytest.raises(ValueError, match="train_y must be") as error:
            BlockRun(config, RunDirectory(tmp_path / "run"), rows, Secret.new(), ignore)
        assert str(label) not in str(error.value)
        assert not (tmp_path / "run").exists()
        with pytest.raises(ValueError, match="train_y must be"):
            records(config, rows)


def test_what_one_layer_would_not_read_is_refused(tmp_path):
    folder = RunDirectory(tmp_path / "run")
    for name, value in {"hidden": 64, "l2_clip_norm": 1e-3}.items():
        options = {"algorithm": "sbcd-one-layer", "dataset": "digits", **SMALL, name: value}
        with pytest.raises(ValueError, match=f"{name} must not be given"):
            train_blocks(
                folder, None, options, {name: value}, None, Secret.new(), None, False, None
            )
    command = command_of(configured("sbcd-one-layer", "digits", SMALL))
    assert "--hidden" not in command
    assert "--l2-clip-norm" not in command
    assert not (tmp_path / "run").exists()


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


def test_what_does_not_go_with_it_is_refused_in_words(tmp_path, capsys):
    for algorithm, more, words in COMMANDS:
        out = ["--out", str(tmp_path / "r"), *more.split()]
        with pytest.raises(SystemExit):
            pytest.fail(f"{more}: {main(['train', '--algorithm', algorithm, *out])}")
        assert re.search(words, capsys.readouterr().err), more
        assert not (tmp_path / "r" / "ledger.jsonl").exists(), more


def test_what_changed_is_refused_at_a_resumed_run(tmp_path, capsys):
    go(tmp_path / "r", sweeps())
    with pytest.raises(ValueError, match="the training data changed"):
        go(tmp_path / "r", sweeps(), data=dataset(1))
    with pytest.raises(ValueError, match=r"changed: learning_rate \(8.0 then, 1.0 now\)"):
        go(tmp_path / "r", sweeps(learning_rate=1.0))
    with pytest.raises(SystemExit):
        main(["train", "--resume", "--out", str(tmp_path / "r"), "--canaries", "3"])
    assert "canaries must not be given" in capsys.readouterr().err
