"""Events document themselves, refuse nonsense, and survive JSON."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdp import accounting as acc
from jaxdp.accounting import certificate

_noise = st.floats(1e-3, 1e4)
_leaf = st.builds(acc.Gaussian, _noise) | st.builds(acc.NonPrivate, st.text(min_size=1))
_events = st.recursive(
    _leaf,
    lambda inner: (
        st.builds(acc.PoissonSampled, inner, st.floats(0, 1))
        | st.builds(
            lambda e, n, b: acc.FixedSizeSampled(e, n + b, b),
            inner,
            st.integers(1, 99),
            st.integers(0, 99),
        )
        | st.builds(acc.Repeated, inner, st.integers(0, 10**9))
        | st.builds(acc.Composed, st.lists(inner, max_size=3))
    ),
    max_leaves=6,
)


@given(_events)
def test_json_round_trip(event):
    assert acc.events.from_dict(json.loads(json.dumps(acc.events.to_dict(event)))) == event


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: acc.Gaussian(-1.0), "noise_multiplier"),
        (lambda: acc.Gaussian(math.nan), "noise_multiplier"),
        (lambda: acc.Gaussian("1"), "noise_multiplier"),
        (lambda: acc.PoissonSampled(acc.Gaussian(1.0), 1.5), "sampling_prob"),
        (lambda: acc.PoissonSampled(1.0, 0.5), "event"),
        (lambda: acc.Repeated(acc.Gaussian(1.0), -1), "count"),
        (lambda: acc.Repeated(acc.Gaussian(1.0), 10.0), "count"),
        (lambda: acc.FixedSizeSampled(acc.Gaussian(1.0), 10, 11), "batch_size"),
        (lambda: acc.FixedSizeSampled(acc.Gaussian(1.0), 0, 0), "dataset_size"),
        (lambda: acc.Composed([acc.Gaussian(1.0), 3]), r"events\[1\]"),
        (lambda: acc.NonPrivate(""), "reason"),
        (lambda: acc.events.joint_gaussian([]), "noise_multipliers"),
        (lambda: acc.events.joint_gaussian([1.0, -2.0]), r"noise_multipliers\[1\]"),
        (lambda: acc.events.from_dict({"type": "Laplacian"}), "description"),
        (lambda: acc.events.from_dict({"type": "Gaussian", "sigma": 1.0}), "description"),
        (lambda: acc.epsilon(acc.Gaussian(1.0), 1e-310), "delta"),
        (lambda: acc.epsilon(acc.Gaussian(1.0), 1.5), "delta"),
        (lambda: acc.epsilon(acc.Gaussian(1.0), 1e-5, "replace_one"), "relation"),
        (lambda: acc.epsilon(acc.Gaussian(1.0), 1e-5, accountant="best"), "accountant"),
        (lambda: acc.epsilon(3.0, 1e-5), "event"),
        (lambda: acc.delta(acc.Gaussian(1.0), -1.0), "epsilon"),
        (lambda: acc.delta(acc.Gaussian(1.0), math.nan), "epsilon"),
        (lambda: acc.delta(acc.Gaussian(1.0), -math.inf), "epsilon"),
        (lambda: acc.calibrate_noise_multiplier(0.0, 1e-5, 0.1, 10), "epsilon"),
        (lambda: acc.calibrate_noise_multiplier(1.0, 1e-5, 0.1, 10.5), "steps"),
        (lambda: acc.calibrate_steps(1.0, 1e-5, 0.1, 0.0), "noise_multiplier"),
        (lambda: acc.epsilons_over_steps(acc.Gaussian(1.0), [1, -1], 1e-5), r"steps\[1\]"),
    ],
)
def test_bad_input_is_named(build, name):
    with pytest.raises(ValueError, match=name + "="):
        build()


def test_fixed_size_batches_have_no_add_or_remove_neighbours():
    event = acc.FixedSizeSampled(acc.Gaussian(1.0), 100, 10)
    with pytest.raises(acc.UnsupportedEventError, match="FixedSizeSampled"):
        acc.epsilon(event, 1e-5, acc.Relation.ADD_OR_REMOVE_ONE)


def test_one_draw_is_one_event():
    """Composition inside a sample is the joint Gaussian, not two sampled steps (contract 4)."""
    joint = acc.Repeated(acc.PoissonSampled(acc.events.joint_gaussian([1.0, 1.0]), 0.01), 1000)
    inside = acc.Repeated(
        acc.PoissonSampled(acc.Composed([acc.Gaussian(1.0), acc.Gaussian(1.0)]), 0.01), 1000
    )
    apart = acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.0), 0.01), 2000)
    truth = acc.epsilon(joint, 1e-5).upper
    assert acc.epsilon(inside, 1e-5).upper == pytest.approx(truth, rel=1e-9)
    assert truth > 1.5 * acc.epsilon(apart, 1e-5).upper


@pytest.mark.parametrize(
    ("event", "epsilon", "word"),
    [
        (acc.PoissonSampled(acc.Gaussian(0.0), 0.1), math.inf, "no noise"),
        (acc.Composed([acc.Gaussian(1.0), acc.NonPrivate("it peeked")]), math.inf, "it peeked"),
        (acc.PoissonSampled(acc.Gaussian(0.0), 0.0), 0.0, "nothing"),
        (acc.Repeated(acc.Gaussian(0.0), 0), 0.0, "nothing"),
        (acc.Composed([]), 0.0, "nothing"),
    ],
)
def test_trivial_runs_say_why(event, epsilon, word):
    for relation in acc.Relation:
        bound = acc.epsilon(event, 1e-5, relation)
        assert bound.upper == epsilon
        assert bound.lower == 0
        assert word in bound.note
        assert acc.delta(event, 1.0, relation).upper == min(epsilon, 1.0)


# log_sobolev refuses what has no hidden state, at every epsilon.
@pytest.mark.parametrize(
    "accountant", ["auto", *(m for m in acc.accountants.ACCOUNTANTS if m != "log_sobolev")]
)
def test_delta_at_infinity_is_the_probability_of_an_infinite_loss(accountant):
    noisy = acc.Repeated(acc.Gaussian(0.5), 3)
    bound = acc.delta(noisy, math.inf, accountant=accountant)
    assert (bound.lower, bound.estimate, bound.upper) == (0, 0, 0)
    assert "infinite loss" in bound.note
    for event in (acc.NonPrivate("it peeked"), acc.Gaussian(0.0)):
        bound = acc.delta(acc.Composed([noisy, event]), np.float64("inf"), accountant=accountant)
        assert (bound.lower, bound.upper) == (0, 1)
        assert "no guarantee" in bound.note


def test_delta_at_infinity_of_sampled_and_refused_events():
    fixed = acc.FixedSizeSampled(acc.Gaussian(0.5), 100, 10)
    assert acc.delta(fixed, math.inf, acc.Relation.REPLACE_ONE).upper == 0
    assert acc.delta(acc.PoissonSampled(acc.Gaussian(0.5), 0.1), math.inf).upper == 0
    assert acc.delta(acc.PoissonSampled(acc.Gaussian(0.0), 0.1), math.inf).upper == 1
    with pytest.raises(acc.UnsupportedEventError, match="ShuffledEpoch"):
        acc.delta(acc.ShuffledEpoch(acc.Gaussian(1.0), 10), math.inf)


def test_accounting_never_imports_jax():
    """A process in which jax cannot be imported can still account."""
    code = (
        "import sys; sys.modules['jax'] = sys.modules['flax'] = sys.modules['optax'] = None\n"
        "from jaxdp import accounting as acc\n"
        "from jaxdp.cli import accounting\n"
        "step = acc.PoissonSampled(acc.Gaussian(1.0), 0.01)\n"
        "assert acc.epsilon(acc.Repeated(step, 100), 1e-5).upper > 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_refusal_names_every_step_it_is_about():
    fixed = [acc.FixedSizeSampled(acc.Gaussian(z), 100, 10) for z in (2.0, 3.0)]
    event = acc.Composed([acc.PoissonSampled(acc.Gaussian(1.5), 0.1), *fixed])
    with pytest.raises(acc.UnsupportedEventError) as refusal:
        acc.epsilon(event, 1e-5, acc.Relation.REPLACE_ONE, accountant="gdp")
    assert "noise_multiplier=2.0" in str(refusal.value)
    assert "noise_multiplier=3.0" in str(refusal.value)


def test_a_composition_that_cannot_be_resolved_is_named_whole(monkeypatch):
    def unresolved(*given):
        raise certificate.Unresolved("no upper end was found")

    monkeypatch.setattr(certificate, "epsilon_bounds", unresolved)
    steps = [acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), 1e-7), 5) for z in (1e-9, 2e-9)]
    with pytest.raises(acc.UnsupportedEventError) as refusal:
        acc.epsilon(acc.Composed(steps), 1e-7, accountant="exact")
    assert "noise_multiplier=1e-09" in str(refusal.value)
    assert "noise_multiplier=2e-09" in str(refusal.value)
