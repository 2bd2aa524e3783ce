"""Configurations of runs with correlated noise."""

import dataclasses
import json
import shutil

import pytest

from jaxdp import accounting as acc
from jaxdp import correlated, runs
from jaxdp.noise import Workload, dyadic
from jaxdp.runs import described, strategies
from jaxdp.runs.rehearsal import rehearse
from tests.runs import small

GIVEN = {"batch_size": 40, "dataset_size": 200, "steps": 12, "model": "logistic"}


def resolved(strategy, **changes):
    given = {"epsilon": 3.0, **GIVEN, "strategy": strategy, **changes}
    return runs.resolve(runs.recipe("digits", **given))


@pytest.mark.parametrize("name", list(strategies.SAMPLINGS))
def test_every_strategy_resolves_to_its_budget_and_reads_back_the_same(name):
    config = resolved(name)
    usual = strategies.SAMPLINGS[name]
    assert config.sampling == usual
    assert config.relation == strategies.usual_relation(usual)
    found = config.mechanism().epsilon(12, config.delta, acc.Relation(config.relation)).upper
    assert 2.99 < found <= 3.0
    again = runs.RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert repr(again.mechanism()) == repr(config.mechanism())
    assert (config.bands is None) == (name in ("square_root", "identity"))


@pytest.mark.parametrize("name", ["banded", "buffered"])
def test_the_mechanism_is_that_of_dp_mf(name):
    config = resolved(name, momentum=0.5, l2_clip_norm=1.0)
    sampling = strategies.SAMPLINGS[name]
    sizes = {key: GIVEN[key] for key in ("batch_size", "dataset_size", "steps")}
    budget = {"epsilon": 3.0, "delta": 1e-5, "l2_clip_norm": 1.0, "workload": Workload(0.5)}
    made = correlated.dp_mf(strategy=name, sampling=sampling, **sizes, **budget)
    assert config.mechanism().strategy == made.strategy
    assert config.noise_multiplier == pytest.approx(made.noise_multiplier, abs=2e-4)


@pytest.mark.parametrize("name", correlated.ON_GRID)
def test_secure_noise_takes_the_strategy_with_binary_fractions(name):
    config, ordinary = (resolved(name, secure_noise=secure) for secure in (True, False))
    mechanism = config.mechanism()
    assert mechanism.noise == "grid"
    assert mechanism.strategy == dyadic(ordinary.mechanism().strategy)
    assert isinstance(mechanism.event, acc.GridNoise)
    again = runs.RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.mechanism() == mechanism
    assert "--secure-noise" in described.command_of(config)
    found = mechanism.epsilon(12, config.delta, acc.Relation(config.relation)).upper
    assert 2.99 < found <= 3.0


def test_only_what_moves_the_parameters_is_optimised_for():
    assert strategies.workload(resolved("banded", momentum=0.9)) == Workload(0.9)
    assert strategies.workload(resolved("banded", algorithm="dp-adam-bc")) == Workload()
    assert strategies.workload(resolved("banded", optimizer="adam")) == Workload()


def test_a_resolved_configuration_does_not_choose_again(monkeypatch):
    config = resolved("banded")

    def refuse(*args, **options):
        raise AssertionError("chosen again")

    monkeypatch.setattr(correlated, "dp_mf", refuse)
    monkeypatch.setattr(strategies.correlated, "dp_mf", refuse)
    again = runs.RunConfig.from_dict(config.to_dict())
    assert again.mechanism() == config.mechanism()
    assert again.sampling_rule().bands == config.bands


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategy": "dense"}, "strategy must be one of banded, buffered"),
        (
            {"strategy": "buffered", "secure_noise": True},
            "strategy must be one of banded, square_root, identity with secure_noise, got buffered",
        ),
        ({"strategy": None, "bands": 4}, "bands must be given with a strategy only, got 4"),
        ({"strategy": None, "sampling": "cyclic_poisson"}, "strategy must be given with sampling"),
        ({"sampling": "poisson"}, "sampling must be one of cyclic_poisson, fixed_order"),
        ({"strategy": "buffered", "sampling": "cyclic_poisson"}, "sampling must be fixed_order"),
        ({"sampling": "allocation"}, "sampling must be one of cyclic_poisson, fixed_order"),
        ({"sampling": "fixed_order", "relation": "add_or_remove_one"}, "one of replace_one, repl"),
        ({"relation": "replace_one"}, "one of add_or_remove_one, replace_special"),
        ({"noise_multiplier": 1.0}, "steps must be given|two of epsilon"),
        ({"noise_multiplier": 1.0, "epsilon": None}, "bands must be given with noise_multiplier"),
        ({"steps": None, "noise_multiplier": 1.0}, "steps must be given with strategy banded"),
        ({"noise_schedule": "exponential:0.01:2"}, "noise_schedule must be None with a strategy"),
        ({"canaries": 3}, "canaries must be 0 with a strategy"),
        ({"cap": 99}, "cap must be None with a strategy"),
        ({"participations": 2}, "participations must be 1 with a strategy"),
        ({"pca_dimensions": 3, "pca_noise_multiplier": 9.0}, "pca_dimensions must be None"),
        ({"strategy": "identity", "bands": 2}, "bands must be None with strategy identity"),
        ({"bands": 0}, "bands must be a whole number of at least 1"),
        ({"bands": 6}, "bands must be at most dataset_size / batch_size = 5"),
        ({"sampling": "fixed_order", "bands": 13}, r"bands must be at most steps \(12\)"),
        ({"batch_size": 300}, "batch_size must be at most dataset_size"),
        ({"algorithm": "sa-dpsgd"}, "strategy must be None for annealing"),
        ({"algorithm": "sa-dpsgd-private"}, "strategy must be None for annealing"),
        ({"algorithm": "adadp"}, "must be None with correlated noise"),
        ({"algorithm": "piadam"}, "must be None with correlated noise"),
    ],
)
def test_what_does_not_belong_together_is_refused_in_words(changes, words):
    given = {"epsilon": 3.0, **GIVEN, "strategy": "banded", **changes}
    with pytest.raises(ValueError, match=words):
        runs.resolve(runs.recipe("digits", **given))


@pytest.mark.parametrize("name", ["banded", "buffered", "identity"])
def test_a_run_that_was_interrupted_goes_on_as_it_began(tmp_path, name):
    class Stop(Exception):
        pass

    def stop(step, row):
        if step == 7:
            raise Stop

    config = resolved(name, eval_every=3)
    with pytest.raises(Stop):
        small.go(tmp_path / "r", config, stop)
    kept = runs.RunConfig.from_dict(runs.RunDirectory(tmp_path / "r").load_state().config)
    assert kept == config
    result = small.go(tmp_path / "r", kept)
    relation = acc.Relation(config.relation)
    once = config.mechanism().epsilon(12, 1e-5, relation).upper
    assert result.ledger.epsilon(1e-5, relation).upper == once
    assert [row["step"] for row in result.history] == [3, 6, 9, 12]
    assert {row["epsilon"] for row in result.history} == {once}
    command = described.command_of(config)
    assert f"--strategy {name}" in command
    assert (f"--bands {config.bands}" in command) == (config.bands is not None)


def test_another_strategy_from_the_same_words_is_refused(tmp_path):
    config = resolved("banded", eval_every=3)
    small.go(tmp_path / "r", config)
    shutil.rmtree(tmp_path / "r/secret/checkpoints")
    numbers = {**config.strategy_numbers, "coefficients": [1.0, 0.25]}
    other = dataclasses.replace(config, strategy_numbers=numbers)
    with pytest.raises(ValueError, match=r"changed: strategy_numbers"):
        small.go(tmp_path / "r", other)


def test_projections_are_made_in_a_fixed_order(tmp_path):
    config = resolved("buffered", pca_dimensions=4, pca_noise_multiplier=9.0)
    result = small.go(tmp_path / "r", config)
    assert result.ledger.epsilon(1e-5, acc.Relation.REPLACE_SPECIAL).upper <= 3.0


def test_a_rehearsal_ends_where_the_strategy_does():
    config = resolved("banded", steps=1)
    config = dataclasses.replace(config, physical_batch_size=16)
    assert rehearse(config).step > 0
