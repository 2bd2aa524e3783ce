"""The best recipes, and the words that say where they come from."""

import pytest

from jaxdp import data, runs
from jaxdp.cli import main
from jaxdp.runs.recipes import best


@pytest.mark.parametrize("name", list(data.specs.SPECS))
def test_every_best_recipe_resolves_and_has_an_origin(name):
    fields, origin = best(name)
    config = runs.resolve(runs.recipe(name, **fields))
    assert 2.9 < config.mechanism().epsilon(config.steps, config.delta).upper <= 3.0
    source, tuned = origin.lines()
    assert source.startswith("recipe: ")
    assert "epsilon" in tuned
    images = {
        "mnist": "scattering",
        "fashion_mnist": "pretrained",
        "cifar10": "pretrained_mirrored",
    }
    if name in images:
        assert (config.features, config.model) == (images[name], "logistic")
        assert "2011.11660" in source
        assert "tuned on this data set: yes" in tuned
        assert ("held-out training records of it" in tuned) == (name == "fashion_mnist")


def test_the_best_recipe_of_own_data_was_tuned_on_nothing():
    own = data.specs.DatasetSpec("mine", "mine", "", (4,), 2, 1_000, 0)
    fields, origin = best(own)
    assert fields == {}
    assert origin.tuned.startswith("no;")


def test_a_run_of_the_best_recipe_says_its_origin_first(tmp_path, capsys):
    out = tmp_path / "r"
    main(["train", "--recipe", "best", "--steps", "2", "--out", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("recipe: ")
    assert lines[1].startswith("tuned on this data set: ")
    assert "--recipe best" in (out / "report.md").read_text(encoding="utf-8")


def test_the_best_recipe_brings_its_own_numbers(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["train", "--recipe", "best", "--model", "mlp", "--out", str(tmp_path / "r")])
    assert "--model must not come with --recipe best" in capsys.readouterr().err
