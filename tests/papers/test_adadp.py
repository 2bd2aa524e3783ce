"""AdaDp in its paper's settings: its moment as published, when its sides differ, and Figure 4 (c, d)."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.cli import main
from jaxdp.optimizers import registry
from jaxdp.papers import adadp_gradients, adadp_noise, adadp_phase, queue
from jaxdp.papers.adadp import adadp_as_published
from jaxdp.papers.row import Row
from jaxdp.runs import described
from jaxdp.runs.config import resolve
from jaxdp.runs.recipes import recipe
from jaxdp.seeds import Secret
from tests.runs import small

GIVEN = {"model": "logistic", "batch_size": 40, "dataset_size": 200, "physical_batch_size": 16}
GIVEN |= {"algorithm": "adadp", "noise_multiplier": 2.0, "steps": 6}


def config(**given):
    return resolve(recipe("digits", **{**GIVEN, **given}))


# What E′ averages -----------------------------------------------------------------------------

GRADS = np.array([[1.0, -2.0], [-3.0, 2.0]], np.float32)


@pytest.mark.parametrize(
    ("of_lot", "squares"), [(False, np.mean(GRADS**2, axis=0)), (True, np.mean(GRADS, axis=0) ** 2)]
)
def test_the_published_moment_is_of_examples_or_of_the_lots_mean(of_lot, squares):
    made = adadp_as_published(1.0, 2, 8, 0.1, of_lot=of_lot)
    params = jnp.zeros(2)
    state = made.after_noise.init(params)
    gradient = made.gradient(lambda params, example: jnp.sum(params * example))
    summed, _ = gradient(params, jnp.asarray(GRADS), "all", raw=made.raw(state))
    _, state = made.after_noise.update(params, state, params, leaked=summed.leaked)
    np.testing.assert_allclose(made.raw(state), 0.1 * squares, rtol=1e-5)
    numbers = registry.Numbers(1.0, 4.0, 2, 8, 0.1)
    assert registry.build("adadp-as-published", numbers, {"of_lot": int(of_lot)}).claim


# When its sides differ ------------------------------------------------------------------------


def test_noise_alone_opens_the_phase_unless_the_threshold_is_above_what_it_does():
    assert adadp_phase.noise_alone(config(), 650, 20) == (2, 19)
    assert adadp_phase.noise_alone(config(settings={"threshold": 1e6}), 650, 20) == (0, 0)
    # Noise of sd σC/L on a mean: its squares differ by 0.14 σ²C²/L² or so after one step.
    size = 0.1 * 2.0**0.5 * (2.0 * 4.0) ** 2 / 40  # of L · E′
    about = config(settings={"threshold": size})
    assert adadp_phase.noise_alone(about, 650, 20) == (0, 0)
    assert adadp_phase.noise_alone(config(settings={"threshold": size / 20}), 650, 20)[0] == 2


@pytest.mark.parametrize("name", ["adadp", "adadp-noise-only", "dp-sgd"])
def test_a_rows_line_tells_its_phase_and_that_of_noise_alone(name, tmp_path):
    given = {**GIVEN, "algorithm": name, **({"l2_clip_norm": 1.0} if name == "dp-sgd" else {})}
    row = Row("mine", "digits", given)
    shown = queue.run_row(row, tmp_path / "run", small.dataset(), lambda step, row: None)
    found = queue.line_of(row, described.report(shown))
    if name == "dp-sgd":
        assert "local_began" not in found
        return
    assert (found["local_began"], found["local_share"]) == (2, 5 / 6)
    assert (found["noise_began"], found["noise_share"]) == (2, 5 / 6)
    assert shown.history[-1]["local_steps"] == 5


# The noise of every coordinate ----------------------------------------------------------------


def test_a_histogram_counts_every_coordinate():
    found = adadp_noise.histogram(np.array([1.0, 9.99, 10.0, 19.0, 20.0, 40.0]))
    assert sum(found["counts"]) == 6
    assert (found["under_10"], found["from_10_to_20"]) == pytest.approx((1 / 3, 1 / 3))
    assert found["quantiles"]["0.5"] == pytest.approx(14.5)
    assert adadp_noise.shares(found) == pytest.approx([100 / 3] * 3)
    # The first noise is that of global clipping.
    np.testing.assert_allclose(adadp_noise.noise_alone(50, 0), 8 * 4.0, rtol=1e-6)


def test_a_run_tells_its_noise_and_its_epsilon():
    found = adadp_noise.run(config(), small.dataset(), Secret.new(), (2, 5))
    assert [at["step"] for at in found["histograms"]] == [2, 5]
    globally = 2 * config().l2_clip_norm
    for at in found["histograms"]:
        assert sum(at["counts"]) == 64 * 10 + 10
        # Sides lie between a tenth of those of global clipping and those.
        assert 0.1 * globally < at["top"] * 1.001
        assert at["top"] < globally * 1.001
    assert 0 < found["proven_epsilon"] < 100


def test_figures_say_what_they_leave_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jaxdp.papers.figures.save_all", lambda folder, results: [])
    main(["reproduce", "figures", "--results-dir", str(tmp_path), "--to", str(tmp_path)])
    assert "left out" in capsys.readouterr().err


# Gradients of public records and their estimates ----------------------------------------------


def test_two_arrays_are_compared_coordinate_by_coordinate():
    squared = np.array([1e-2, 1e-4, 1e-6, 0.0])
    found = adadp_gradients.compared(squared, 9 * squared)
    assert sum(found["gradient"]) == sum(found["estimate"]) == 4
    assert (found["zero"], found["within_factor_2"]) == (0.25, 0.0)
    assert found["correlation_of_logs"] == pytest.approx(1.0)
    assert adadp_gradients.compared(squared, 2 * squared)["within_factor_2"] == 1.0


def test_public_records_are_trained_on_and_the_moment_is_that_of_the_gradients(monkeypatch):
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


def test_the_figure_tells_what_it_shows():
    squared = np.geomspace(1e-6, 1e-2, 5)
    noise = {"under_10": 0.5, "from_10_to_20": 0.25}
    at = {"step": 100, **adadp_gradients.compared(squared, 4 * squared), "noise": noise}
    made, told = adadp_gradients.figure({"at": [at]})
    assert len(made.axes) == 1
    assert "step 100: medians 0.01 and 0.02" in told
    assert "above 50.0, 25.0, 25.0 %" in told
