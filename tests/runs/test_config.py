import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxdp import accounting as acc
from jaxdp import data, optimizers, runs
from jaxdp.clipping import ClippedGrad
from jaxdp.optimizers import registry
from tests.runs import small


@pytest.mark.parametrize("name", list(data.specs.SPECS))
def test_every_recipe_resolves_to_its_budget(name):
    config = runs.resolve(runs.recipe(name))
    epsilon = config.mechanism().epsilon(config.steps, config.delta).upper
    assert 2.9 < epsilon <= 3.0


def test_two_of_three_give_the_third():
    both = runs.resolve(runs.recipe("mnist", noise_multiplier=1.23, epsilon=3.0))
    epsilon = config_epsilon(both)
    assert epsilon <= 3.0
    step = acc.PoissonSampled(acc.Gaussian(1.23), 512 / 60_000)
    assert acc.epsilon(acc.Repeated(step, both.steps + 1), 1e-5).upper > 3.0
    given = runs.resolve(runs.recipe("mnist", noise_multiplier=1.23, steps=10))
    assert (given.steps, given.noise_multiplier, given.epsilon) == (10, 1.23, None)


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({"model": "mlp", "batch_size": 600}, 256),
        ({"model": "mlp", "batch_size": 100}, 168),
        ({"model": "mlp", "batch_size": 600, "physical_batch_size": 32}, 32),
        ({"model": "mlp", "batch_size": 600, "algorithm": "adadp-as-published"}, 64),
        ({"model": "mnist-cnn", "batch_size": 600}, 64),
    ],
)
def test_passes_are_longer_where_no_gradients_of_examples_are_held(given, rows):
    config = runs.resolve(runs.recipe("mnist", noise_multiplier=1.2, steps=1, **given))
    assert config.physical_batch_size == rows


def config_epsilon(config):
    return config.mechanism().epsilon(config.steps, config.delta).upper


@pytest.mark.parametrize(
    ("dataset", "given", "message"),
    [
        ("cifar100", {}, "dataset must be one of"),
        ("mnist", {"epsilon": -1.0}, "epsilon must be a finite number above 0, got -1.0"),
        ("mnist", {"delta": 1.0}, "delta must be above 0 and below 1, got 1.0"),
        ("mnist", {"delta": 0.0}, "delta must be"),
        ("mnist", {"noise_multiplier": 0.0}, "noise_multiplier must be"),
        ("mnist", {"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ("mnist", {"epsilon": 1.0, "noise_multiplier": 1.0, "steps": 5}, "two of epsilon"),
        ("mnist", {"batch_size": 70_000}, "batch_size must be at most dataset_size"),
        ("mnist", {"learning_rate": 0.0}, "learning_rate must be"),
        ("mnist", {"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        (
            "mnist",
            {"momentum": 0.9, "algorithm": "dp-adam-bc"},
            "momentum must not be given for algorithm",
        ),
        ("mnist", {"momentum": 0.9, "optimizer": "adam"}, "dp-sgd with optimizer adam"),
        (
            "mnist",
            {"algorithm": "adadp", "optimizer": "adam"},
            "optimizer must be sgd for algorithm adadp",
        ),
        ("mnist", {"optimizer": "lion"}, "optimizer must be one of sgd, adam"),
        ("mnist", {"algorithm": "sgd"}, "algorithm must be one of dp-sgd"),
        ("mnist", {"relation": "remove"}, "relation must be one of"),
        ("mnist", {"model": "cifar-cnn"}, "model cifar-cnn must be given examples"),
        ("mnist", {"sampling": "fixed_size", "noise_multiplier": 1.0}, "FixedSize"),
        ("mnist", {"eval_every": -2}, "eval_every must be"),
        ("mnist", {"physical_batch_size": 0}, "physical_batch_size must be"),
        ("mnist", {"epsilon": 0.01, "noise_multiplier": 0.3}, "epsilon must allow at least one"),
    ],
)
def test_bad_input(dataset, given, message):
    with pytest.raises(ValueError, match=message):
        runs.resolve(runs.recipe(dataset, **given))


def test_sensitive_statistics_are_asked_for_and_apart(tmp_path):
    small.go(tmp_path / "quiet", small.config())
    assert not (tmp_path / "quiet/SENSITIVE.json").exists()
    result = small.go(tmp_path / "loud", small.config(sensitive=True))
    text = (tmp_path / "loud/SENSITIVE.json").read_text()
    assert "SENSITIVE" in text
    assert "clipped_fraction" in text
    keys = {"step", "update_norm", "test_accuracy", "test_loss", "epsilon"}
    assert all(set(row) == keys for row in result.history)


def test_reports_depend_on_releases_alone(tmp_path, monkeypatch):
    # With the same releases (here: a clipped sum replaced by zero), other training data must not
    # change one figure of the history.
    original = ClippedGrad.one_pass

    def blind(self, *args, **options):
        clipped, info = original(self, *args, **options)
        return clipped._replace(total=jax.tree.map(jnp.zeros_like, clipped.total)), info

    monkeypatch.setattr(ClippedGrad, "one_pass", blind)
    one = small.go(tmp_path / "a", small.config())
    rows = small.dataset(seed=1)
    same_test = data.Dataset(
        rows.spec, rows.train_x, rows.train_y, small.dataset().test_x, small.dataset().test_y
    )
    two = small.go(tmp_path / "b", small.config(), rows=same_test)
    assert one.history == two.history


def test_a_registered_algorithm_is_calibrated_by_what_it_releases(monkeypatch):
    """Before: by the noise that it was given, of which it may add a tenth."""

    def quiet(numbers):
        tenth = dataclasses.replace(numbers, noise_multiplier=numbers.noise_multiplier / 10)
        return optimizers.sgd(tenth.mechanism(), numbers.learning_rate)

    monkeypatch.setitem(registry.ALGORITHMS, "quiet", registry.Entry(quiet))
    config = runs.resolve(runs.recipe("digits", algorithm="quiet", epsilon=1.0, steps=20))
    plain = runs.resolve(runs.recipe("digits", epsilon=1.0, steps=20))
    assert config.noise_multiplier == pytest.approx(10 * plain.noise_multiplier, rel=1e-3)
    assert acc.epsilon(config.total(20), config.delta).upper <= 1.0


def test_as_many_rows_as_fit_can_be_asked_for():
    config = runs.resolve(runs.recipe("digits", epsilon=3.0, physical_batch_size="auto"))
    assert config.physical_batch_size == "auto"
    assert runs.RunConfig.from_dict(config.to_dict()) == config
    for wrong in ("all", 0, 2.5):
        with pytest.raises(ValueError, match="physical_batch_size must be a whole number"):
            runs.resolve(dataclasses.replace(config, physical_batch_size=wrong))
    with pytest.raises(ValueError, match="steps must be a whole number"):
        runs.resolve(dataclasses.replace(config, steps="auto"))
