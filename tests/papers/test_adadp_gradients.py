"""AdaDp's Figure 4 (c): gradients of public records, and their estimates."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxdp.papers import adadp_gradients, adadp_noise, algorithms  # noqa: F401  (registers them)
from jaxdp.runs.config import resolve
from jaxdp.runs.recipes import recipe
from tests.runs import small

ROOT = Path(__file__).parent.parent.parent


def test_two_arrays_are_compared_coordinate_by_coordinate():
    squared = np.array([1e-2, 1e-4, 1e-6, 0.0])
    found = adadp_gradients.compared(squared, 9 * squared)
    assert sum(found["gradient"]) == sum(found["estimate"]) == 4
    assert (found["zero"], found["within_factor_2"]) == (0.25, 0.0)
    assert found["correlation_of_logs"] == pytest.approx(1.0)
    assert adadp_gradients.compared(squared, 2 * squared)["within_factor_2"] == 1.0


def test_public_records_are_trained_on_and_the_moment_is_that_of_the_gradients(monkeypatch):
    """After one step E′ is (1 − γ′) g², so that √E′ of the second is √0.1 of the first's |g|."""
    dataset = small.dataset()
    given = {"model": "logistic", "noise_multiplier": 1.0, "batch_size": 10, "steps": 3}
    given |= {"dataset_size": 200, "physical_batch_size": 16, "algorithm": "adadp-as-published"}
    config = resolve(recipe("digits", **given))
    seen = []
    monkeypatch.setattr(adadp_gradients, "compared", lambda g, e: seen.append((g, e)) or {})
    found = adadp_gradients.run(config, dataset, (1, 2))
    assert found["records"] == len(dataset.test_x) != len(dataset.train_x)
    assert [at["step"] for at in found["at"]] == [1, 2]
    # No moment, so no spread of it: the noise of the first step is that of global clipping.
    assert found["at"][0]["noise"]["top"] == pytest.approx(1.0 * config.l2_clip_norm)
    assert found["at"][0]["noise"]["quantiles"]["0.05"] == pytest.approx(config.l2_clip_norm)
    (first, none), (second, estimate) = seen
    assert first.shape == (64 * 10 + 10,)
    assert not none.any()
    assert first.max() > 0 < second.max()
    np.testing.assert_allclose(estimate, 0.1 * first, rtol=1e-5, atol=1e-9)
    by_the_text = 1.2 * 1.0 * np.sqrt(estimate.size * estimate)  # β σ √m √E′
    assert found["at"][1]["noise"]["top"] == pytest.approx(by_the_text.max(), rel=1e-5)


def test_the_page_has_the_noise_of_the_stored_run():
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    kept = json.loads((ROOT / "benchmarks/results" / adadp_gradients.FILE).read_text())
    for at in kept["at"]:
        low, middle, high = adadp_noise.shares(at["noise"])
        assert f"| {low:.1f} % | {middle:.1f} % | {high:.1f} %, also above 32 |" in text


def test_the_figure_tells_what_it_shows():
    squared = np.geomspace(1e-6, 1e-2, 5)
    noise = {"under_10": 0.5, "from_10_to_20": 0.25}
    at = {"step": 100, **adadp_gradients.compared(squared, 4 * squared), "noise": noise}
    made, told = adadp_gradients.figure({"at": [at]})
    assert len(made.axes) == 1
    assert "step 100: medians 0.01 and 0.02" in told
    assert "above 50.0, 25.0, 25.0 %" in told
