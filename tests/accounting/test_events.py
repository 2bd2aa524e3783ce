"""Events: what they refuse and keep in files; groups of records; releases near another; commands."""

import itertools
import json
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting import certificate
from jaxdp.accounting.flat import flatten, flatten_exactly
from jaxdp.accounting.groups import group_event
from jaxdp.accounting.pairs import PairedEvent
from jaxdp.cli import accounting as cli
from tests.accounting.judging import ADD, REPLACE, cost, largest, run
from tests.refusing import all_refused, refused

GAUSS = acc.Gaussian(1.0)
_gaussian = st.builds(acc.Gaussian, st.floats(1e-3, 1e4))
_sizes = st.integers(1, 99), st.integers(0, 99)
_events = st.recursive(
    _gaussian | st.builds(acc.NonPrivate, st.text(min_size=1)),
    lambda inner: (
        st.builds(acc.PoissonSampled, inner, st.floats(0, 1))
        | st.builds(acc.WeightedPoissonSampled, inner, st.floats(0, 1))
        | st.builds(lambda e, n, b: acc.FixedSizeSampled(e, n + b, b), inner, *_sizes)
        | st.builds(acc.CyclicAllocation, _gaussian, *[st.integers(1, 99)] * 3)
        | st.builds(acc.Repeated, inner, st.integers(0, 10**9))
        | st.builds(acc.Composed, st.lists(inner, max_size=3))
    ),
    max_leaves=6,
)


@settings(max_examples=25)
@given(_events)
def test_json_round_trip(event):
    assert acc.events.from_dict(json.loads(json.dumps(acc.events.to_dict(event)))) == event


def test_what_ledgers_hold_keeps_its_names():
    for name, event in {
        "CyclicPoisson": acc.CyclicPoissonSampled(GAUSS, 0.1, 3, 10),
        "RandomAllocation": acc.RandomlyAllocated(GAUSS, 5),
        "TruncatedPoisson": acc.TruncatedPoissonSampled(GAUSS, 0.1, 30, 200),
    }.items():
        assert acc.events.to_dict(event)["type"] == name
        assert acc.events.from_dict(acc.events.to_dict(event)) == event
        assert getattr(acc, name) is type(event)


def test_bad_input_is_named():
    # fmt: off
    rows = [
        ("noise_multiplier", lambda: acc.Gaussian(-1.0)),
        ("noise_multiplier", lambda: acc.Gaussian(math.nan)),
        ("noise_multiplier", lambda: acc.Gaussian("1")),
        ("noise_multiplier", lambda: acc.Gaussian(np.array(True))),
        ("noise_multiplier", lambda: acc.Gaussian(np.str_("1"))),
        ("noise_multiplier", lambda: acc.Gaussian(np.timedelta64(1, "s"))),
        ("noise_multiplier", lambda: acc.Gaussian(np.complex64(1))),
        ("sampling_prob", lambda: acc.PoissonSampled(GAUSS, np.array(True))),
        ("count", lambda: acc.Repeated(GAUSS, np.bool_(True))),
        ("sampling_prob", lambda: acc.PoissonSampled(GAUSS, 1.5)),
        ("event", lambda: acc.PoissonSampled(1.0, 0.5)),
        ("noise_multiplier", lambda: acc.Gaussian(jnp.array(True))),
        ("count", lambda: acc.Repeated(GAUSS, -1)), ("count", lambda: acc.Repeated(GAUSS, 10.0)),
        ("count", lambda: acc.Repeated(GAUSS, np.array(True))),
        ("count", lambda: acc.Repeated(GAUSS, np.array([10.0]))),
        ("batch_size", lambda: acc.FixedSizeSampled(GAUSS, 10, 11)),
        ("dataset_size", lambda: acc.FixedSizeSampled(GAUSS, 0, 0)),
        (r"events\[1\]", lambda: acc.Composed([GAUSS, 3])),
        ("reason", lambda: acc.NonPrivate("")),
        ("noise_multipliers", lambda: acc.events.joint_gaussian([])),
        (r"noise_multipliers\[1\]", lambda: acc.events.joint_gaussian([1.0, -2.0])),
        ("description", lambda: acc.events.from_dict({"type": "Laplacian"})),
        ("description", lambda: acc.events.from_dict({"type": "Gaussian", "sigma": 1.0})),
        ("delta", lambda: acc.epsilon(GAUSS, 1e-310)), ("delta", lambda: acc.epsilon(GAUSS, 1.5)),
        ("relation", lambda: acc.epsilon(GAUSS, 1e-5, "replace_one")),
        ("accountant", lambda: acc.epsilon(GAUSS, 1e-5, accountant="best")),
        ("event", lambda: acc.epsilon(3.0, 1e-5)), ("epsilon", lambda: acc.delta(GAUSS, -1.0)),
        ("epsilon", lambda: acc.delta(GAUSS, math.nan)),
        ("epsilon", lambda: acc.delta(GAUSS, -math.inf)),
        ("epsilon", lambda: acc.calibrate_noise_multiplier(0.0, 1e-5, 0.1, 10)),
        ("steps", lambda: acc.calibrate_noise_multiplier(1.0, 1e-5, 0.1, 10.5)),
        ("noise_multiplier", lambda: acc.calibrate_steps(1.0, 1e-5, 0.1, 0.0)),
        ("sampling_prob", lambda: acc.calibrate_steps(1.0, 1e-5, 0.0, 1.0)),
        ("records", lambda: acc.group_epsilon(GAUSS, 1e-5, 0)),
        *(("distance", lambda bad=bad: acc.GridNoise(STEP, bad)) for bad in (-1e-9, 1.5, math.nan)),
    ]
    # fmt: on
    rows = [(words + "(=| must be )", call) for words, call in rows]
    rows += [
        ("noise_stds", lambda: acc.events.anisotropic_gaussian([1.0], [1.0, 2.0])),
        ("on a grid already", lambda: acc.GridNoise(acc.GridNoise(STEP, 0.0), 0.0)),
    ]
    all_refused(rows)
    event = acc.FixedSizeSampled(GAUSS, 100, 10)
    refused("FixedSizeSampled", acc.epsilon, event, 1e-5, ADD, error=acc.UnsupportedEventError)


def test_one_draw_and_anisotropic_noise_are_one_event():
    """Composition inside a sample is the joint Gaussian, not two sampled steps (contract 4)."""
    joint, inside = acc.events.joint_gaussian([1.0, 1.0]), acc.Composed([GAUSS, GAUSS])
    truth, found = (
        cost(acc.Repeated(acc.PoissonSampled(both, 0.01), 1000)) for both in (joint, inside)
    )
    assert found == pytest.approx(truth, rel=1e-9)
    assert truth > 1.5 * cost(run(0.01, 1.0, 2000))
    event = acc.events.anisotropic_gaussian([0.5, 2.0, 0.0], [1.0, 8.0, 0.0])
    assert event.noise_multiplier == pytest.approx((0.25 + 0.0625) ** -0.5)
    assert acc.events.anisotropic_gaussian([1.0, 1.0], [1.0, 0.0]) == acc.Gaussian(0.0)


def test_trivial_runs_say_why():
    for event, epsilon, word in (
        (acc.PoissonSampled(acc.Gaussian(0.0), 0.1), math.inf, "no noise"),
        (acc.Composed([GAUSS, acc.NonPrivate("it peeked")]), math.inf, "it peeked"),
        (acc.PoissonSampled(acc.Gaussian(0.0), 0.0), 0.0, "nothing"),
        (acc.Repeated(acc.Gaussian(0.0), 0), 0.0, "nothing"),
        (acc.Composed([]), 0.0, "nothing"),
    ):
        for relation in acc.Relation:
            bound = acc.epsilon(event, 1e-5, relation)
            assert (bound.lower, bound.upper) == (0, epsilon), event
            assert word in bound.note
            assert acc.delta(event, 1.0, relation).upper == min(epsilon, 1.0)
    # delta at infinity is the probability of an infinite loss.
    noisy = acc.Repeated(acc.Gaussian(0.5), 3)
    for accountant in acc.queries.ACCOUNTANTS:
        if accountant == "log_sobolev":  # refuses what has no hidden state, at every epsilon
            continue
        bound = acc.delta(noisy, math.inf, accountant=accountant)
        assert (bound.lower, bound.estimate, bound.upper) == (0, 0, 0), accountant
        assert "infinite loss" in bound.note
        for event in (acc.NonPrivate("it peeked"), acc.Gaussian(0.0)):
            both = acc.Composed([noisy, event])
            bound = acc.delta(both, np.float64("inf"), accountant=accountant)
            assert (bound.lower, bound.upper) == (0, 1), accountant
            assert "no guarantee" in bound.note
    fixed = acc.FixedSizeSampled(acc.Gaussian(0.5), 100, 10)
    assert acc.delta(fixed, math.inf, REPLACE).upper == 0
    assert acc.delta(acc.PoissonSampled(acc.Gaussian(0.5), 0.1), math.inf).upper == 0
    assert acc.delta(acc.PoissonSampled(acc.Gaussian(0.0), 0.1), math.inf).upper == 1
    with pytest.raises(acc.UnsupportedEventError, match="ShuffledEpoch"):
        acc.delta(acc.ShuffledEpoch(GAUSS, 10), math.inf)


def test_a_refusal_names_every_step_it_is_about(monkeypatch):
    fixed = [acc.FixedSizeSampled(acc.Gaussian(z), 100, 10) for z in (2.0, 3.0)]
    event = acc.Composed([acc.PoissonSampled(acc.Gaussian(1.5), 0.1), *fixed])
    words = r"(?s)noise_multiplier=2\.0.*noise_multiplier=3\.0"
    with pytest.raises(acc.UnsupportedEventError, match=words):
        acc.epsilon(event, 1e-5, REPLACE, accountant="gdp")

    def unresolved(*given, near):
        raise certificate.Unresolved("no upper end was found")

    monkeypatch.setattr(certificate, "bounds", unresolved)
    words = r"(?s)noise_multiplier=1e-09.*noise_multiplier=2e-09"
    both = acc.Composed([run(1e-7, z, 5) for z in (1e-9, 2e-9)])
    refused(words, acc.epsilon, both, 1e-7, accountant="exact", error=acc.UnsupportedEventError)


def test_an_event_that_nobody_knows_is_refused_wherever_it_stands():
    class Foreign(acc.Event):
        pass

    acc.Event.types.pop("Foreign")
    for event in (
        acc.Event(), Foreign(), acc.Repeated(Foreign(), 2), acc.Composed([GAUSS, Foreign()]),
        acc.PoissonSampled(Foreign(), 0.1), acc.PerUser(acc.GridNoise(Foreign(), 1e-9), 2),
    ):  # fmt: skip
        for ask in (acc.epsilon, acc.delta):
            refused(r"that jaxdp\.accounting knows", ask, event, 0.5)


# Before: a charged Gaussian was read back from the ledger as the other class, with epsilon 0.
def test_an_event_of_the_users_own_never_takes_the_name_of_another():
    gaussian, made = acc.Event.types["Gaussian"], {"__module__": "mine"}
    for name, options in (("Gaussian", {}), ("Mine", {"type_name": "Gaussian"})):
        with pytest.raises(ValueError, match="type_name must be a name that no other event has"):
            type(name, (PairedEvent,), dict(made), **options)
    assert acc.Event.types["Gaussian"] is gaussian
    try:
        first, again = (type("Mine", (PairedEvent,), dict(made)) for _ in range(2))
        assert acc.Event.types["Mine"] is again is not first
    finally:
        acc.Event.types.pop("Mine", None)


# Several records of one person, against laws written out by hand.


def sampled(noise, rate):
    return acc.PoissonSampled(acc.Gaussian(noise), rate)


def test_groups_from_one_record_to_a_full_batch():
    event = acc.Repeated(acc.Gaussian(3.0), 4)
    for relation in acc.Relation:
        group = acc.group_epsilon(event, 1e-6, 3, relation)
        assert group == acc.epsilon(acc.Gaussian(0.5), 1e-6, relation)
    event = run(0.05, 1.0, 20)
    for relation in (ADD, REPLACE):
        one = acc.group_epsilon(event, 1e-5, 1, relation), acc.group_delta(event, 1.0, 1, relation)
        assert one == (acc.epsilon(event, 1e-5, relation), acc.delta(event, 1.0, relation))
        assert acc.group_epsilon(event, 1e-5, 3, relation).relation is relation
        assert acc.group_delta(event, 1.0, 3, relation).relation is relation
    event = run(0.02, 1.5, 50)
    found = [acc.group_epsilon(event, 1e-6, k).upper for k in (1, 2, 4)]
    assert found[0] < found[1] < found[2]
    assert found[2] <= acc.epsilon(acc.Repeated(acc.Gaussian(1.5 / 4), 50), 1e-6).upper
    # Tiny probabilities of many records are never left out.
    chances = group_event(sampled(1.0, 1e-5), 200, ADD).probabilities
    assert len(chances) == 201
    assert chances[-1] == 1e-300
    assert math.fsum(chances) == pytest.approx(1, abs=1e-13)


@pytest.mark.parametrize("k", [2, 5])
def test_sampled_records_take_part_in_binomial_numbers(k):
    """The best test is a threshold: its rates are those of a binomial mixture."""
    z, q = 0.9, 0.03
    event = group_event(sampled(z, q), k, ADD)
    chances = [math.comb(k, j) * q**j * (1 - q) ** (k - j) for j in range(k + 1)]
    assert event.probabilities == pytest.approx(chances, rel=1e-12)
    cuts = np.linspace(-6, 12, 400_001)
    hits = sum(p * special.ndtr((j - cuts) / z) for j, p in enumerate(chances))
    alarms = special.ndtr(-cuts / z)
    for epsilon in (0.0, 0.2, 1.0, 3.0):
        forward = float(np.max(hits - math.exp(epsilon) * alarms))
        reverse = float(np.max((1 - alarms) - math.exp(epsilon) * (1 - hits)))
        for pair, true in zip(event.pairs(ADD, True), (forward, reverse), strict=True):
            found = largest([pair], epsilon)
            assert found == pytest.approx(max(true, 0.0), rel=1e-6, abs=1e-12)


def test_the_groups_own_event_is_no_worse_than_a_chain():
    response = acc.RandomizedResponse(0.5)
    for event, relation, expected in (
        (acc.Laplace(3.0), ADD, acc.Laplace(1.0)),
        (acc.DiscreteLaplace(3.0, 2), REPLACE, acc.DiscreteLaplace(3.0, 6)),
        (acc.DiscreteGaussian(3.0), ADD, acc.DiscreteGaussian(3.0, 3)),
        (response, REPLACE, acc.Repeated(response, 3)),
        (acc.ExponentialMechanism(0.5), ADD, acc.ExponentialMechanism(1.5)),
        (acc.ZCDP(0.1), ADD, acc.ZCDP(0.9)),
        (acc.PerUser(acc.Gaussian(3.0), 5), ADD, acc.PerUser(GAUSS, 5)),
        (sampled(1.0, 0.1), REPLACE, None),
        (acc.ZCDP(0.1, 0.1), ADD, None),
        (acc.MixtureOfGaussians(1.0, (0, 1), (0.5, 0.5)), ADD, None),
        (acc.Composed([acc.Laplace(3.0), acc.ZCDP(0.1, 0.1)]), ADD, None),
    ):
        found = group_event(event, 3, relation)
        assert repr(found) == repr(expected) or found.rho == pytest.approx(expected.rho), event
    # Stated guarantees follow the chain of neighbours.
    found = group_event(acc.EpsilonDelta(0.5, 1e-6), 3, ADD)
    assert found.epsilon == 1.5
    assert found.delta == pytest.approx(1e-6 * (1 + math.exp(0.5) + math.exp(1.0)))
    assert group_event(acc.EpsilonDelta(0.5, 0.9), 3, ADD).infinite()
    # Full batches under the black box of a chain would be looser.
    e = 0.7
    chain = acc.delta(acc.Gaussian(4.0), e / 2).upper * (1 + math.exp(e / 2))
    assert acc.group_delta(acc.Gaussian(4.0), e, 2).upper < chain
    event = sampled(2.0, 0.1)
    assert acc.group_epsilon(event, 1.0, 4, REPLACE).upper == 0
    assert acc.group_epsilon(event, 0.0, 4, REPLACE).upper == math.inf
    assert acc.group_delta(event, math.inf, 4, REPLACE).upper == 0
    assert acc.group_epsilon(acc.NonPrivate("no noise"), 1e-5, 4).upper == math.inf


@pytest.mark.parametrize(("event", "relation"), [
    (run(0.1, 2.0, 5), REPLACE), (acc.MixtureOfGaussians(2.0, (0, 1), (0.7, 0.3)), ADD),
    pytest.param(acc.FixedSizeSampled(acc.Gaussian(2.0), 100, 5), REPLACE, marks=pytest.mark.slow),
])  # fmt: skip
def test_without_a_pair_of_its_own_a_group_is_a_chain_of_records(event, relation):
    bound = acc.group_epsilon(event, 1e-6, 3, relation)
    one = acc.epsilon(event, 1e-6, relation)
    assert bound.upper > 3 * one.lower
    assert bound.lower <= one.lower
    e = bound.upper / 3
    chain = acc.delta(event, e, relation).upper * (1 + math.exp(e) + math.exp(2 * e))
    assert 0.99e-6 <= chain <= 1e-6
    again = acc.group_delta(event, bound.upper, 3, relation)
    assert again.upper == pytest.approx(chain, rel=1e-6)


# Releases near a Gaussian's in total variation: what that takes of delta.

STEP = sampled(1.0, 0.01)
STEPS = acc.Repeated(STEP, 500)


def on_grid(distance, steps=500):
    return acc.Repeated(acc.GridNoise(STEP, distance), steps)


@pytest.mark.parametrize("share", [1e-6, 1e-3, 0.05])
def test_epsilon_is_that_of_what_the_distance_leaves_of_delta(share):
    delta = 1e-5
    top = acc.epsilon(STEPS, delta).upper
    distance = share * delta / (1 + math.exp(top)) / 500
    found = acc.epsilon(on_grid(distance), delta)
    # The definition, checked by the other query: delta of the ideal run and the distance's share.
    whole = acc.delta(STEPS, found.upper).upper + (1 + math.exp(found.upper)) * 500 * distance
    assert whole <= delta * (1 + 1e-3)
    assert found.upper > top * (1 - 1e-4)
    assert found.lower <= found.estimate <= found.upper
    # The lower end is not above that of a release that is exact at more of delta.
    assert found.lower <= acc.epsilon(STEPS, delta * (1 - 2 * share)).upper
    assert found.lower <= top


def test_what_a_distance_takes_of_delta():
    plain, found = acc.epsilon(STEPS, 1e-5), acc.epsilon(on_grid(2.0**-61), 1e-5)
    assert plain.upper * (1 - 1e-9) <= found.upper <= plain.upper * (1 + 1e-6)
    assert plain.lower * (1 - 1e-6) <= found.lower <= plain.lower
    for bound in (acc.epsilon(on_grid(1e-8), 1e-6), acc.epsilon(on_grid(1e-30), 0.0)):
        assert bound.upper == math.inf
        assert "nothing of delta is left" in bound.note
    assert acc.delta(on_grid(1e-3), 1.0).upper == 1.0
    assert acc.delta(on_grid(1e-30), math.inf).upper == 1.0
    assert acc.epsilon(on_grid(1e-3), 1.0).upper == 0.0
    # The search starts from an upper end at half of delta.
    flat = flatten(STEPS, ADD)
    assert flat.renyi(ADD).min() >= 0
    # delta grows by the share of the distance.
    plain, found, share = acc.delta(STEPS, 1.0), acc.delta(on_grid(1e-12), 1.0), 1 + math.e
    assert found.upper == pytest.approx(plain.upper + share * 500e-12, rel=1e-9)
    assert found.upper >= plain.upper + share * 500e-12
    assert found.lower <= plain.lower
    assert acc.delta(on_grid(1e-6), 1.0, tolerance=1e-2).upper >= share * 500e-6
    # Distances add up over steps, epochs and events.
    epoch = acc.GridNoise(acc.RandomAllocation(acc.Gaussian(2.0), 50), 1e-9)
    assert epoch.block == 50
    both = acc.Composed((acc.Repeated(epoch, 3), acc.PerUser(acc.GridNoise(STEP, 2e-9), 4)))
    plain = acc.delta(acc.Composed((acc.Repeated(epoch.event, 3), STEP)), 1.0)
    assert acc.delta(both, 1.0).upper >= plain.upper + share * 5e-9 * (1 - 1e-6)


def test_what_knows_no_distance_refuses_it_and_all_else_keeps_it():
    event = on_grid(1e-20)
    inside = acc.PoissonSampled(acc.GridNoise(GAUSS, 0.1), 0.5)
    all_refused([
        ("GridNoise", lambda: acc.renyi_curve(event, (2.0,))),
        ("GridNoise", lambda: acc.RenyiFilter(1.0, 1e-5).charge(event)),
        ("GridNoise", lambda: acc.epsilon(inside, 1e-5)),
        ("GridNoise", lambda: flatten_exactly(event, ADD)),
        ("", lambda: acc.epsilon(event, 1e-5, accountant="gdp")),
    ], acc.UnsupportedEventError)  # fmt: skip
    assert not acc.supports(acc.Tuned(event, acc.Geometric(0.5)))
    assert acc.mu_gdp(event).upper == math.inf
    assert 0 < acc.mu_gdp(event, delta_min=1e-3).upper < math.inf
    event = on_grid(1e-12)
    assert acc.group_delta(event, 1.0, 2).upper >= 500e-12
    assert acc.events.from_dict(json.loads(json.dumps(acc.events.to_dict(event)))) == event
    noise = acc.calibrate(
        lambda z: acc.Repeated(acc.GridNoise(sampled(z, 0.01), 1e-11), 500), 2.0, 1e-7
    )
    assert 1 < noise / acc.calibrate_noise_multiplier(2.0, 1e-7, 0.01, 500) < 1.2
    assert cost(on_grid(1e-20), accountant="rdp") < 5
    assert cost(acc.GridNoise(acc.Gaussian(0.0), 1e-20)) == math.inf
    assert cost(on_grid(1e-3, 0)) == 0.0


# The accountant on the command line.

ARGS = "--sampling-prob 0.0085333333 --noise-multiplier 1.23 --steps 5000 --delta 1e-5".split()


def said(command, args):
    return CliRunner().invoke(command, args.split() if isinstance(args, str) else args).stdout


def test_the_commands_print_bounds_claims_and_what_is_missing_and_never_less_than_was_proven():
    answer = json.loads(said(cli.epsilon, [*ARGS, "--json"]))
    assert answer["upper"] == cost(run(0.0085333333, 1.23, 5000))
    assert answer["relation"] == "add_or_remove_one"
    assert {"lower", "estimate", "upper", "accountant"} <= set(answer)
    none = "--sampling-prob 0.1 --noise-multiplier 0 --steps 5 --delta 1e-5 --json"
    assert json.loads(said(cli.epsilon, none))["upper"] == "inf"
    assert "upper" in said(cli.epsilon, ARGS)
    assert "Example" in said(cli.calibrate, "--help")
    args = "--sampling-prob 0.05 --noise-multiplier 1 --steps 10 --delta 1e-5 --claims"
    answer = json.loads(said(cli.epsilon, args + " --json"))
    verdicts = {c["name"]: c["verdict"] for c in answer["claims"]}
    assert "below the truth" in verdicts["PIGDO MMA"]
    assert "above the proven" in verdicts["moments accountant"]
    assert "below the truth" in said(cli.epsilon, args)
    # The table never shows less than was proven.
    for name, value, told in (
        ("epsilon", 3.00000001, "3.000001"), ("upper", 2.0, "2"),
        ("lower", 2.99999999, "2.999999"), ("noise_multiplier", 1.06897880025, "1.068979"),
        ("epsilon", math.inf, "inf"),
    ):  # fmt: skip
        assert cli._rounded(name, value) == told
    # calibrate finds whichever is missing.
    given = {"sampling_prob": "0.01", "steps": "100", "noise_multiplier": "1"}
    for name in given:
        args = [(f"--{k.replace('_', '-')}", v) for k, v in given.items() if k != name]
        args = ["--epsilon", "2", "--delta", "1e-5", "--json", *itertools.chain(*args)]
        answer = json.loads(said(cli.calibrate, args))
        assert answer[name] > 0
        assert answer["epsilon"] <= 2, name
    two_missing = CliRunner().invoke(cli.calibrate, "--epsilon 2 --delta 1e-5 --steps 10".split())
    assert two_missing.exit_code == 2
    bad = CliRunner().invoke(cli.epsilon, [*ARGS[:-1], "2"])
    assert isinstance(bad.exception, ValueError)
    assert re.search("delta must be .* got 2.0", str(bad.exception))
