"""AdaDp in its paper's settings: when its sides differ, Figure 4 (c, d), and printed figures."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.papers import adadp_gradients, adadp_noise, adadp_phase, queue
from benchmarks.papers.row import Row
from benchmarks.printed_gaps import COMPUTED, GAPS, RESULTS
from jaxdp.cli import main
from jaxdp.ledger.seeds import Secret
from jaxdp.papers.adadp import _RawClipping
from jaxdp.runs import described
from jaxdp.runs.config import resolve
from jaxdp.runs.recipes import recipe
from tests.runs import small

GIVEN = {"model": "logistic", "batch_size": 40, "dataset_size": 200, "physical_batch_size": 16}
GIVEN |= {"algorithm": "adadp", "noise_multiplier": 2.0, "steps": 6}


def config(**given):
    return resolve(recipe("digits", **{**GIVEN, **given}))


# When its sides differ
def test_noise_alone_opens_the_phase_unless_the_threshold_is_above_what_it_does(tmp_path):
    assert adadp_phase.noise_alone(config(), 650, 20) == (2, 19)
    assert adadp_phase.noise_alone(config(settings={"threshold": 1e6}), 650, 20) == (0, 0)
    # Noise of sd σC/L on a mean: its squares differ by 0.14 σ²C²/L² or so after one step.
    size = 0.1 * 2.0**0.5 * (2.0 * 4.0) ** 2 / 40  # of L · E′
    about = config(settings={"threshold": size})
    assert adadp_phase.noise_alone(about, 650, 20) == (0, 0)
    assert adadp_phase.noise_alone(config(settings={"threshold": size / 20}), 650, 20)[0] == 2
    # A row's line tells its phase, and that of noise alone.
    for name in ("adadp", "adadp-noise-only"):
        row = Row("mine", "digits", {**GIVEN, "algorithm": name})
        shown = queue.run_row(row, tmp_path / name, small.dataset(), small.ignore)
        found = queue.line_of(row, described.report(shown))
        assert (found["local_began"], found["local_share"]) == (2, 5 / 6)
        assert (found["noise_began"], found["noise_share"]) == (2, 5 / 6)
        assert shown.history[-1]["local_steps"] == 5


# The noise of every coordinate
def test_a_histogram_counts_every_coordinate_and_a_run_tells_its_noise_and_epsilon():
    found = adadp_noise.histogram(np.array([1.0, 9.99, 10.0, 19.0, 20.0, 40.0]))
    assert sum(found["counts"]) == 6
    assert (found["under_10"], found["from_10_to_20"]) == pytest.approx((1 / 3, 1 / 3))
    assert found["quantiles"]["0.5"] == pytest.approx(14.5)
    assert adadp_noise.shares(found) == pytest.approx([100 / 3] * 3)
    # The first noise is that of global clipping.
    np.testing.assert_allclose(adadp_noise.noise_alone(50, 0), 8 * 4.0, rtol=1e-6)
    found = adadp_noise.run(config(), small.dataset(), Secret.new(), (2, 5))
    assert [at["step"] for at in found["histograms"]] == [2, 5]
    globally = 2 * config().l2_clip_norm
    for at in found["histograms"]:
        assert sum(at["counts"]) == 64 * 10 + 10
        # Sides lie between a tenth of those of global clipping and those.
        assert 0.1 * globally < at["top"] * 1.001
        assert at["top"] < globally * 1.001
    assert 0 < found["proven_epsilon"] < 100


# Gradients of public records and their estimates


def test_public_records_are_trained_on_and_the_moment_is_that_of_the_gradients(
    monkeypatch, tmp_path, capsys
):
    """After one step E′ is (1 − γ′) g², so that √E′ of the second is √0.1 of the first's |g|."""
    dataset, seen = small.dataset(), []
    given = {"algorithm": "adadp-as-published", "noise_multiplier": 1.0, "batch_size": 10}
    made = config(**given, steps=3)
    monkeypatch.setattr(adadp_gradients, "compared", lambda g, e: seen.append((g, e)) or {})
    found = adadp_gradients.run(made, dataset, (1, 2))
    assert found["records"] == len(dataset.test_x) != len(dataset.train_x)
    assert [at["step"] for at in found["at"]] == [1, 2]
    # No moment, so no spread of it: the noise of the first step is that of global clipping.
    assert found["at"][0]["noise"]["top"] == pytest.approx(1.0 * made.l2_clip_norm)
    assert found["at"][0]["noise"]["quantiles"]["0.05"] == pytest.approx(made.l2_clip_norm)
    (first, none), (second, estimate) = seen
    assert first.shape == (64 * 10 + 10,)
    assert not none.any()
    assert first.max() > 0 < second.max()
    np.testing.assert_allclose(estimate, 0.1 * first, rtol=1e-5, atol=1e-9)
    by_the_text = 1.2 * 1.0 * np.sqrt(estimate.size * estimate)  # β σ √m √E′
    assert found["at"][1]["noise"]["top"] == pytest.approx(by_the_text.max(), rel=1e-5)
    # Arrays are compared by coordinate, and figures tell what they show.
    monkeypatch.undo()
    squared = np.array([1e-2, 1e-4, 1e-6, 0.0])
    found = adadp_gradients.compared(squared, 9 * squared)
    assert sum(found["gradient"]) == sum(found["estimate"]) == 4
    assert (found["zero"], found["within_factor_2"]) == (0.25, 0.0)
    assert found["correlation_of_logs"] == pytest.approx(1.0)
    assert adadp_gradients.compared(squared, 2 * squared)["within_factor_2"] == 1.0
    squared = np.geomspace(1e-6, 1e-2, 5)
    noise = {"under_10": 0.5, "from_10_to_20": 0.25}
    at = {"step": 100, **adadp_gradients.compared(squared, 4 * squared), "noise": noise}
    made, told = adadp_gradients.figure({"at": [at]})
    assert len(made.axes) == 1
    assert "step 100: medians 0.01 and 0.02" in told
    assert "above 50.0, 25.0, 25.0 %" in told
    monkeypatch.setattr("benchmarks.papers.figures.save_all", lambda folder, results: [])
    main(["reproduce", "figures", "--results-dir", str(tmp_path), "--to", str(tmp_path)])
    assert "left out" in capsys.readouterr().err


# Experiments on printed figures that others were not told how to make
def test_experiments_are_kept_with_their_settings_and_say_what_they_clip():
    row, changed = GAPS["adadp-of-mean"]
    assert "examples clipped at 600 β √E′" in changed
    given = row.given
    clipping = _RawClipping(given["l2_clip_norm"], given["settings"]["beta"], 1e-6, True)
    moment = jnp.array([1.0, 4.0])  # E′, of roots 1 and 2
    parts, _ = clipping.contribution(moment)(jnp.array([5e3, -1e4]))
    found = parts * clipping.sides(moment)
    np.testing.assert_allclose(found, 600 * 1.2 * jnp.array([1.0, -2.0]), rtol=1e-5)
    lines = {line["name"]: line for line in json.loads(RESULTS.read_text(encoding="utf-8"))}
    assert {*COMPUTED} <= set(lines) <= {*COMPUTED, *GAPS}  # some wait for a faster machine
    for name in set(lines) - {*COMPUTED}:
        (row, changed), line = GAPS[name], lines[name]
        assert (line["given"], line["changed"]) == (row.given, changed), name
        assert line["curve"][-1] == [line["steps"], line["test_accuracy"]]
