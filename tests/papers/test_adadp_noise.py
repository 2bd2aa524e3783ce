"""AdaDp's Figure 4 (d): the noise of every coordinate."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxdp.cli import main
from jaxdp.papers import adadp_noise
from jaxdp.runs.config import resolve
from jaxdp.runs.recipes import recipe
from jaxdp.seeds import Secret
from tests.runs import small

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results"


def test_a_histogram_counts_every_coordinate():
    found = adadp_noise.histogram(np.array([1.0, 9.99, 10.0, 19.0, 20.0, 40.0]))
    assert sum(found["counts"]) == 6
    assert (found["under_10"], found["from_10_to_20"]) == pytest.approx((1 / 3, 1 / 3))
    assert found["quantiles"]["0.5"] == pytest.approx(14.5)
    assert adadp_noise.shares(found) == pytest.approx([100 / 3] * 3)


def test_the_first_noise_is_that_of_global_clipping():
    np.testing.assert_allclose(adadp_noise.noise_alone(50, 0), 8 * 4.0, rtol=1e-6)


def test_a_run_tells_its_noise_and_its_epsilon():
    config = resolve(
        recipe(
            "digits",
            model="logistic",
            algorithm="adadp",
            noise_multiplier=2.0,
            batch_size=40,
            dataset_size=200,
            steps=6,
            physical_batch_size=16,
        )
    )
    found = adadp_noise.run(config, small.dataset(), Secret.new(), (2, 5))
    assert [at["step"] for at in found["histograms"]] == [2, 5]
    for at in found["histograms"]:
        assert sum(at["counts"]) == 64 * 10 + 10
        # Sides lie between a tenth of those of global clipping and those.
        assert 0.1 * 2 * config.l2_clip_norm < at["top"] * 1.001
        assert at["top"] < 2 * config.l2_clip_norm * 1.001
    assert 0 < found["proven_epsilon"] < 100


def test_at_noise_8_the_noise_of_a_coordinate_follows_noise_alone():
    """The finding of docs/algorithms.md, by the stored run."""
    kept = json.loads((RESULTS / adadp_noise.FILE).read_text())
    assert kept["row"] == adadp_noise.ROW
    size = 60 * 1_000 + 1_000 + 1_000 * 10 + 10
    alone = adadp_noise.histogram(adadp_noise.noise_alone(size, 100))
    for at in kept["histograms"]:
        assert sum(at["counts"]) == size
        assert adadp_noise.shares(at) == pytest.approx(adadp_noise.shares(alone), abs=0.5)
        assert at["under_10"] > 0.9


def test_figures_say_what_they_leave_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jaxdp.papers.figures.save_all", lambda folder, results: [])
    main(["reproduce", "figures", "--results-dir", str(tmp_path), "--to", str(tmp_path)])
    assert "left out" in capsys.readouterr().err
