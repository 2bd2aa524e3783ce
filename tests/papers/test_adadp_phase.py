"""When AdaDp's sides differ: what a run tells, what noise alone does, what a page says."""

import pytest

from jaxdp.papers import adadp_phase, queue, tables
from jaxdp.papers.row import Row
from jaxdp.papers.tables import phases
from jaxdp.runs import described
from jaxdp.runs.config import resolve
from jaxdp.runs.recipes import recipe
from tests.papers.tables.test_pages import line, results
from tests.runs import small


def configured(algorithm="adadp", **given):
    return {
        "algorithm": algorithm,
        "model": "logistic",
        "noise_multiplier": 2.0,
        "batch_size": 40,
        "dataset_size": 200,
        "steps": 6,
        "physical_batch_size": 16,
        **given,
    }


def config(**given):
    return resolve(recipe("digits", **configured(**given)))


def test_noise_alone_opens_the_phase_unless_the_threshold_is_above_what_it_does():
    assert adadp_phase.noise_alone(config(), 650, 20) == (2, 19)
    assert adadp_phase.noise_alone(config(settings={"threshold": 1e6}), 650, 20) == (0, 0)
    # Noise of sd σC/L on a mean: its squares differ by 0.14 σ²C²/L² or so after one step.
    size = 0.1 * 2.0**0.5 * (2.0 * 4.0) ** 2 / 40  # of L · E′
    about = config(settings={"threshold": size})
    assert adadp_phase.noise_alone(about, 650, 20) == (0, 0)
    assert adadp_phase.noise_alone(config(settings={"threshold": size / 20}), 650, 20)[0] == 2


@pytest.mark.parametrize("name", ["adadp", "adadp-noise-only"])
def test_a_rows_line_tells_its_phase_and_that_of_noise_alone(name, tmp_path):
    row = Row("mine", "digits", configured(name))
    shown = queue.run_row(row, tmp_path / "run", small.dataset(), lambda step, row: None)
    found = queue.line_of(row, described.report(shown))
    assert (found["local_began"], found["local_share"]) == (2, 5 / 6)
    assert (found["noise_began"], found["noise_share"]) == (2, 5 / 6)
    assert [at["local_steps"] for at in shown.history][-1] == 5


def test_a_line_of_another_algorithm_tells_none(tmp_path):
    row = Row("mine", "digits", configured("dp-sgd", l2_clip_norm=1.0))
    shown = queue.run_row(row, tmp_path / "run", small.dataset(), lambda step, row: None)
    assert "local_began" not in queue.line_of(row, described.report(shown))


PHASE = {"local_began": 2, "local_share": 0.9967, "noise_began": 2, "noise_share": 0.5}


@pytest.mark.parametrize(
    ("changes", "cells"),
    [
        (PHASE, "2 | 99.7 % | 2 | 50.0 % | noise alone"),
        ({**PHASE, "noise_began": 1_234}, "2 | 99.7 % | 1,234 | 50.0 % | gradients"),
        ({**PHASE, "noise_began": 0, "noise_share": 0.0}, "2 | 99.7 % | never | 0.0 % | gradients"),
        (
            {**PHASE, "local_began": 0, "local_share": 0.0},
            "never | 0.0 % | 2 | 50.0 % | nothing",
        ),
        ({}, f"{phases.BEFORE} |  |  |  | "),
    ],
)
@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("table1", "mnist-adadp"),
        ("short", "mnist-adadp-short"),
        ("pareto", "mnist-adadp-repeated-epsilon-1"),
        ("mlp", "mnist-mlp-pca-adadp-noise-8"),
        ("adadp", "mnist-mlp-pca-adadp-noise-only-noise-8"),
        ("parameters", "mnist-mlp-1000-adadp-beta-2"),
        ("claims", "mnist-mlp-64-adadp-claims"),
    ],
)
def test_a_page_tells_what_opens_the_phase(tmp_path, page, name, changes, cells):
    found = results(tmp_path, line(name, **changes))
    text = tables.to_markdown(tables.TARGETS[page].page(found))
    assert f"| `{name}` | 1 | {cells} |" in text
