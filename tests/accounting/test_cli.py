"""The accountant on the command line."""

import json

import pytest
from click.testing import CliRunner

from jaxdp import accounting as acc
from jaxdp.cli import accounting
from jaxdp.cli.accounting import calibrate, epsilon

ARGS = "--sampling-prob 0.0085333333 --noise-multiplier 1.23 --steps 5000 --delta 1e-5".split()


def test_epsilon_prints_the_bound_as_json():
    result = CliRunner().invoke(epsilon, [*ARGS, "--json"])
    answer = json.loads(result.stdout)
    event = acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.23), 0.0085333333), 5000)
    assert answer["upper"] == acc.epsilon(event, 1e-5).upper
    assert answer["relation"] == "add_or_remove_one"
    assert {"lower", "estimate", "upper", "accountant"} <= set(answer)


def test_no_noise_is_infinite_and_still_json():
    args = "--sampling-prob 0.1 --noise-multiplier 0 --steps 5 --delta 1e-5 --json".split()
    assert json.loads(CliRunner().invoke(epsilon, args).stdout)["upper"] == "inf"


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ("--sampling-prob 0.01 --steps 100", "noise_multiplier"),
        ("--sampling-prob 0.01 --noise-multiplier 1", "steps"),
        ("--steps 100 --noise-multiplier 1", "sampling_prob"),
    ],
)
def test_calibrate_finds_whichever_is_missing(args, name):
    result = CliRunner().invoke(
        calibrate, ["--epsilon", "2", "--delta", "1e-5", "--json", *args.split()]
    )
    answer = json.loads(result.stdout)
    assert answer[name] > 0
    assert answer["epsilon"] <= 2


def test_wrong_arguments_are_one_error():
    two_missing = CliRunner().invoke(calibrate, "--epsilon 2 --delta 1e-5 --steps 10".split())
    assert two_missing.exit_code == 2
    bad = CliRunner().invoke(epsilon, [*ARGS[:-1], "2"])
    assert isinstance(bad.exception, ValueError)
    assert "delta=2.0" in str(bad.exception)


def test_tables_and_help_for_people():
    assert "upper" in CliRunner().invoke(epsilon, ARGS).stdout
    assert "Example" in CliRunner().invoke(calibrate, ["--help"]).stdout


def test_claims_are_set_against_the_truth():
    args = "--sampling-prob 0.05 --noise-multiplier 1 --steps 10 --delta 1e-5 --claims".split()
    answer = json.loads(CliRunner().invoke(epsilon, [*args, "--json"]).stdout)
    verdicts = {c["name"]: c["verdict"] for c in answer["claims"]}
    assert "below the truth" in verdicts["PIGDO MMA"]
    assert "above the proven" in verdicts["moments accountant"]
    assert "below the truth" in CliRunner().invoke(epsilon, args).stdout


def test_the_table_never_shows_less_than_was_proven():
    assert accounting._rounded("epsilon", 3.00000001) == "3.000001"
    assert accounting._rounded("upper", 2.0) == "2"
    assert accounting._rounded("lower", 2.99999999) == "2.999999"
    assert accounting._rounded("noise_multiplier", 1.06897880025) == "1.068979"
    assert accounting._rounded("epsilon", float("inf")) == "inf"
