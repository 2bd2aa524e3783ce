"""Configurations of runs: what they resolve to, and what does not belong together."""

import dataclasses
import functools
import json

import pytest

from jaxdp import accounting as acc
from jaxdp import data, optimizers, runs
from jaxdp.cli import main
from jaxdp.mechanism import dp_mf
from jaxdp.noise import Workload, dyadic, optimise
from jaxdp.optimizers import registry
from jaxdp.runs import assemble, described, strategies
from jaxdp.runs.recipes import best
from jaxdp.runs.tuned import configured
from tests.refusing import all_refused
from tests.runs import small

GIVEN = {"batch_size": 40, "dataset_size": 200, "steps": 12, "model": "logistic"}
PROJECTION = {"pca_dimensions": 5, "pca_noise_multiplier": 20.0}
WHITENED = {"features": "scattering", "whiten_noise_multiplier": 8.0}
SPECIAL, ONE = {"relation": "replace_special"}, {"relation": "replace_one"}
ADD, CUT = {"relation": "add_or_remove_one"}, {"sampling": "truncated_poisson"}
OUT_OF_REACH = {
    **{"algorithm": "sa-dpsgd-private", "noise_multiplier": None},
    "settings": {"energy_noise": 0.3},
}


def recipe(dataset="mnist", **given):
    return runs.resolve(runs.recipe(dataset, **given))


def with_strategy(strategy="banded", **changes):
    return recipe("digits", **{"epsilon": 3.0, **GIVEN, "strategy": strategy, **changes})


def with_algorithm(algorithm="dp-sgd", **changes):
    return small.config(**{"algorithm": algorithm, "steps": 4, **changes})


def with_canaries(kind="gradient", **changes):
    return small.config(**{"canaries": 40, "canary_kind": kind, **changes})


def spent(config):
    relation = acc.Relation(config.relation)
    return config.mechanism().epsilon(config.steps, config.delta, relation).upper


def read_back(config):
    return runs.RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))


def test_every_recipe_resolves_to_its_budget_and_says_what_it_was_tuned_on():
    images = {"mnist": "scattering", "fashion_mnist": "two_layers"}
    images["cifar10"] = "two_layers_mirrored"
    for name in data.specs.SPECS:
        fields, origin = best(name)
        for config in (recipe(name), recipe(name, **fields)):
            assert 2.9 < spent(config) <= 3.0, name
        source, tuned = origin.lines()
        assert source.startswith("recipe: ")
        assert "epsilon" in tuned
        if name in images:
            assert (config.features, config.model) == (images[name], "logistic")
            assert "2011.11660" in source
            assert "tuned on this data set: yes" in tuned
            assert ("held-out training records of it" in tuned) == (name != "mnist")
    fields, origin = best(data.specs.DatasetSpec("mine", "mine", "", (4,), 2, 1_000, 0))
    assert fields == {}
    assert origin.tuned.startswith("no;")


@small.undrawn()
def test_a_run_of_the_best_recipe_says_its_origin_first_and_what_is_not_given_follows(
    tmp_path, capsys
):
    out = tmp_path / "r"
    main(["train", "--recipe", "best", "--steps", "2", "--out", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("recipe: ")
    assert lines[1].startswith("tuned on this data set: ")
    assert "--recipe best" in (out / "report.md").read_text(encoding="utf-8")
    # Recipes for features bring a linear model.
    found = runs.recipe("mnist", features="scattering")
    assert (found.model, found.batch_size, found.learning_rate) == ("logistic", 8_192, 16.0)
    assert found.steps == -(-40 * 60_000 // 8_192)
    assert runs.recipe("digits", features="scattering").model == "logistic"
    # Of whitened features the rate follows: the noise in a score is the same at every budget.
    fields = best("cifar10")[0]
    for epsilon in (1.0, 8.0):
        found = recipe("cifar10", epsilon=epsilon, **fields)
        noise = found.learning_rate * found.noise_multiplier * 0.1 / 8_192 / 0.1
        assert noise * (366 * 12_288) ** 0.5 == pytest.approx(2.12, rel=0.01)
    # A search's is that of the noise that its whole budget leaves, not of one run's.
    searched = configured(
        "cifar10", acc.Geometric(0.2), epsilon=1.0, noise_multiplier=None, **fields
    )
    assert searched.noise_multiplier > found.noise_multiplier
    noise = searched.learning_rate * searched.noise_multiplier * 0.1 / 8_192 / 0.1
    assert noise * (366 * 12_288) ** 0.5 == pytest.approx(2.12, rel=0.01)
    assert recipe("mnist", features="scattering", whiten_noise_multiplier=8.0).learning_rate < 5
    assert recipe("cifar10", learning_rate=2.0, **fields).learning_rate == 2.0
    assert recipe("cifar10", optimizer="adam", **fields).learning_rate == 4.0
    assert runs.recipe("mnist", features="scattering", model="mlp", steps=5).steps == 5
    assert runs.recipe("mnist").model == "mnist-cnn"
    # Two of three give the third.
    both = recipe(noise_multiplier=1.23, epsilon=3.0)
    assert spent(both) <= 3.0
    step = acc.PoissonSampled(acc.Gaussian(1.23), 512 / 60_000)
    assert acc.epsilon(acc.Repeated(step, both.steps + 1), 1e-5).upper > 3.0
    given = recipe(noise_multiplier=1.23, steps=10)
    assert (given.steps, given.noise_multiplier, given.epsilon) == (10, 1.23, None)


def test_passes_are_longer_where_no_gradients_of_examples_are_held():
    for rows, given in (
        (256, {"model": "mlp"}),
        (168, {"model": "mlp", "batch_size": 100}),
        (32, {"model": "mlp", "physical_batch_size": 32}),
        (64, {"model": "mlp", "algorithm": "adadp-as-published"}),
        (64, {"model": "mnist-cnn"}),
        ("auto", {"model": "mlp", "physical_batch_size": "auto"}),
    ):
        config = recipe(**{"noise_multiplier": 1.2, "steps": 1, "batch_size": 600, **given})
        assert config.physical_batch_size == rows, given
        assert read_back(config) == config, given


# Of each kind of configuration: what is changed in it (each alone), and words of the refusal.
# fmt: off
REFUSED = {
    recipe: [
        ({"dataset": "cifar100"}, "dataset must be one of"),
        ({"steps": "auto"}, "steps must be a whole number"),
        ({"epsilon": 0.01, "noise_multiplier": 0.3}, "epsilon must allow at least one"),
        ({"momentum": 0.9, "algorithm": "dp-adam-bc"}, "momentum must not be given for algorithm"),
        ({"momentum": 0.9, "optimizer": "adam"}, "dp-sgd with optimizer adam"),
        ({"algorithm": "adadp", "optimizer": "adam"}, "optimizer must be sgd for algorithm adadp"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, adam"),
        ({"relation": "remove"}, "relation must be one of"), ({"eval_every": -2}, "eval_every m"),
        ({"sampling": "fixed_size", "noise_multiplier": 1.0}, "FixedSize"),
        ({"physical_batch_size": 0}, {"physical_batch_size": "all"}, "size must be a whole number"),
        ({"dataset": "pums", "features": "scattering"}, r"given images .* got examples \(9,\)"),
        ({"features": "wavelets"}, "one of scattering, random_convolutions, pretrained, pretrain"),
        ({"features": "scattering", **PROJECTION}, "must be None with features, of which a record"),
        ({"whiten_noise_multiplier": 8.0}, "whiten_noise_multiplier must be None without features"),
        ({"features": "two_layers", "whiten_noise_multiplier": 8.0}, "which are whitened by public"),
    ],
    with_algorithm: [
        ({"algorithm": "sgd"}, "algorithm must be one of dp-sgd, auto-s"),
        ({"settings": {"beta": 1.0}}, "settings of dp-sgd must be among none; got 'beta'"),
        ({"noise_schedule": "exponential:0.1:1:1"}, "noise_schedule must be kind:number:every"),
        ({"noise_schedule": "step:0.5:1", "steps": None, "epsilon": 3.0}, "steps must be given"),
        ({"pca_dimensions": 3}, "pca_dimensions and pca_noise_multiplier must be given together"),
        ({**PROJECTION, "pca_dimensions": 65}, "must be at most the 64"),
        ({**PROJECTION, "pca_noise_multiplier": 0.0}, "pca_noise_multiplier must be"),
        ({"hidden": 0, "model": "mlp"}, "hidden must be a whole number"),
        ({**OUT_OF_REACH, "epsilon": 1.0}, "epsilon must be within reach of sa-dpsgd-private"),
        ({**WHITENED, "secure_noise": True}, "whiten_noise_multiplier must be None with secure_n"),
        ({**ADD, "sampling": "shuffle"}, "one of replace_one, replace_special; got .* shuffle"),
        ({**CUT, **ADD}, {**CUT, **ONE}, "one of replace_special; got .* truncated_poisson"),
        ({**ONE, "sampling": "allocation"}, "one of add_or_remove_one, replace_special; got .* al"),
        ({"cap": 5}, "cap must be None but for truncated_poisson"),
        ({**CUT, **SPECIAL, "cap": 0}, "cap must be a whole"),
        ({"sampling": "allocation", "participations": 0}, "participations must be a whole number"),
        ({**SPECIAL, "sampling": "shuffle", "participations": 2}, "participations must be 1"),
    ],
    with_strategy: [
        ({"strategy": "dense"}, "strategy must be one of banded, buffered"),
        ({"strategy": "buffered", "secure_noise": True}, "one of banded, square_root, identity"),
        ({"strategy": None, "bands": 4}, "bands must be given with a strategy only, got 4"),
        ({"strategy": None, "sampling": "cyclic_poisson"}, "strategy must be given with sampling"),
        ({"sampling": "poisson"}, {"sampling": "allocation"}, "must be one of cyclic_poisson, fix"),
        ({"strategy": "buffered", "sampling": "cyclic_poisson"}, "sampling must be fixed_order"),
        ({"sampling": "fixed_order", "relation": "add_or_remove_one"}, "one of replace_one, repl"),
        ({"relation": "replace_one"}, "one of add_or_remove_one, replace_special"),
        ({"noise_multiplier": 1.0}, "steps must be given|two of epsilon"),
        ({"noise_multiplier": 1.0, "epsilon": None}, "bands must be given with noise_multiplier"),
        ({"steps": None, "noise_multiplier": 1.0}, "steps must be given with strategy banded"),
        ({"noise_schedule": "exponential:0.01:2"}, "noise_schedule must be None with a strategy"),
        ({"canaries": 3}, "canaries must be 0 with a strategy"),
        ({"cap": 99}, "cap must be None with a strategy"),
        ({"participations": 2}, "participations must be 1 with a strategy"),
        (PROJECTION, "pca_dimensions must be None"), ({"bands": 0}, "bands must be a whole number"),
        ({"strategy": "identity", "bands": 2}, "bands must be None with strategy identity"),
        ({"bands": 6}, "bands must be at most dataset_size / batch_size = 5"),
        ({"sampling": "fixed_order", "bands": 13}, r"bands must be at most steps \(12\)"),
        ({"batch_size": 300}, "batch_size must be at most dataset_size"),
        ({"algorithm": "sa-dpsgd"}, {"algorithm": "sa-dpsgd-private"}, "must be None for anneal"),
        ({"algorithm": "adadp"}, {"algorithm": "piadam"}, "must be None with correlated noise"),
    ],
    with_canaries: [
        ({"canaries": -1}, "canaries must be a whole number of at least 0, got -1"),
        ({"canaries": 2.5}, "canaries must be a whole number"),
        ({"canaries": 641}, "canaries must be at most the 640 coordinates"),
        (SPECIAL, {**ONE, "sampling": "fixed_size"}, "must be 0 but under add_or_remove_one"),
        ({"algorithm": "adadp"}, "clips every coordinate by itself"),
        ({"sensitive": True}, "sensitive must be False with canaries"),
        ({"kind": "black"}, "canary_kind must be one of"),
        ({"kind": "noise", "canaries": 0}, "at least 1 with canary_kind noise, got 0"),
        ({"kind": "mislabelled", "canaries": 400}, "canaries must be at most half of the"),
        ({"kind": "noise", **SPECIAL}, "canaries must be 0 but under"),
        ({"kind": "noise", "algorithm": "piadam"}, "a number for an algorithm that scales"),
        ({"kind": "noise", **PROJECTION}, "canary_kind must be gradient with"),
    ],
}
# fmt: on


def test_what_does_not_belong_together_is_refused_in_words():
    all_refused(
        (words, functools.partial(kind, **changes), kind.__name__, changes)
        for kind, rows in REFUSED.items()
        for *each, words in rows
        for changes in each
    )


def test_noise_is_calibrated_to_everything_that_is_released(monkeypatch):
    free = {"noise_multiplier": None, "epsilon": 3.0}
    for name in ("sa-dpsgd-private", "dp-sgd"):
        cfg = with_algorithm(name, **free, **PROJECTION)
        assert 2.98 < acc.epsilon(cfg.total(4), 1e-5).upper <= 3.0, name
    scheduled = with_algorithm(**free, noise_schedule="linear:0.5:1")
    assert 2.98 < acc.epsilon(scheduled.total(4), 1e-5).upper <= 3.0
    assert scheduled.noise()(3) == pytest.approx(scheduled.noise_multiplier / 2)

    # A registered algorithm by what it releases. Before: by the noise that it was given, of which it
    # may add a tenth.
    def quiet(numbers):
        tenth = dataclasses.replace(numbers, noise_multiplier=numbers.noise_multiplier / 10)
        return optimizers.sgd(tenth.mechanism(), numbers.learning_rate)

    monkeypatch.setitem(registry.ALGORITHMS, "quiet", registry.AlgorithmEntry(quiet))
    config = recipe("digits", algorithm="quiet", epsilon=1.0, steps=20)
    plain = recipe("digits", epsilon=1.0, steps=20)
    assert config.noise_multiplier == pytest.approx(10 * plain.noise_multiplier, rel=1e-3)
    assert acc.epsilon(config.total(20), config.delta).upper <= 1.0
    # Every method has a configuration.
    monkeypatch.undo()
    for name in registry.ALGORITHMS:
        changes = {"settings": {"energy_noise": 50.0}} if name == "sa-dpsgd-private" else {}
        found = with_algorithm(name, **changes).private_algorithm()
        assert found.mechanism.noise_multiplier == 1.0, name


def test_the_examples_that_judge_are_not_those_of_the_accuracy():
    rows = small.dataset()
    (judge, y), (rest, z) = assemble.test_split(with_algorithm("sa-dpsgd"), rows)
    assert len(y) == len(z) == 50
    assert not (judge == rest).all()
    whole, same = assemble.test_split(with_algorithm("sa-dpsgd-as-published"), rows)
    assert whole[1] is same[1]
    assert len(whole[1]) == 100


# Correlated noise.
def test_every_strategy_resolves_to_its_budget_reads_back_the_same_and_is_that_of_dp_mf():
    for name, usual in strategies.SAMPLINGS.items():
        config = with_strategy(name)
        assert config.sampling == usual
        assert config.relation == strategies.usual_relation(usual)
        assert 2.99 < spent(config) <= 3.0, name
        again = read_back(config)
        assert again == config
        assert repr(again.mechanism()) == repr(config.mechanism())
        assert (config.bands is None) == (name in ("lambda", "square_root", "identity"))
        command = described.command_of(config)
        assert f"--strategy {name}" in command
        assert (f"--bands {config.bands}" in command) == (config.bands is not None)
    # The mechanism is that of dp_mf.
    sizes = {key: GIVEN[key] for key in ("batch_size", "dataset_size", "steps")}
    budget = {"epsilon": 3.0, "delta": 1e-5, "l2_clip_norm": 1.0, "workload": Workload(0.5)}
    for name in ("banded", "buffered"):
        config = with_strategy(name, momentum=0.5, l2_clip_norm=1.0)
        sampling = strategies.SAMPLINGS[name]
        made = dp_mf(strategy=name, sampling=sampling, **sizes, **budget)
        assert config.mechanism().strategy == made.strategy
        assert config.noise_multiplier == pytest.approx(made.noise_multiplier, abs=2e-4)


def test_secure_noise_takes_the_strategy_with_binary_fractions_for_what_moves_the_parameters(
    monkeypatch,
):
    for name in optimise.ON_GRID:
        config, ordinary = (with_strategy(name, secure_noise=secure) for secure in (True, False))
        mechanism = config.mechanism()
        assert mechanism.noise == "grid"
        assert mechanism.strategy == dyadic(ordinary.mechanism().strategy)
        assert isinstance(mechanism.event, acc.GridNoise)
        assert read_back(config).mechanism() == mechanism
        assert "--secure-noise" in described.command_of(config)
        assert 2.99 < spent(config) <= 3.0, name
    # Only what moves the parameters is optimised for.
    assert strategies.workload(with_strategy(momentum=0.9)) == Workload(0.9)
    assert strategies.workload(with_strategy(algorithm="dp-adam-bc")) == Workload()
    assert strategies.workload(with_strategy(optimizer="adam")) == Workload()
    # A resolved configuration does not choose again.
    config = with_strategy()
    monkeypatch.setattr(strategies, "dp_mf", lambda *a, **k: pytest.fail("chosen again"))
    again = read_back(config)
    assert again.mechanism() == config.mechanism()
    assert again.sampling_rule().bands == config.bands
