"""Ordinary training of SA-DPSGD's networks: no guarantee, and it says so."""

import json

import numpy as np

from jaxdp import data
from jaxdp.papers import not_private, tables


def images(rows=512):
    """Two kinds of noisy images that a network tells apart, in the shape of MNIST."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, rows).astype(np.int32)
    x = rng.random((rows, 28, 28, 1), np.float32) * 0.2
    x[label == 1, 8:20, 8:20] += 0.8
    return data.Dataset(data.specs.spec("mnist"), x, label, x[:100], label[:100])


def test_it_learns_and_has_no_guarantee(tmp_path, monkeypatch):
    monkeypatch.setattr(not_private.data, "load", lambda *_: images())
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
