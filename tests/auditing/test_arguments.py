"""Every audit refuses arguments out of their range, by name, before it computes anything."""

import math

import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp import auditing
from jaxdp.auditing import adversaries, audit, bounds, events, scores
from jaxdp.optimizers import registry

COUNTS = auditing.bounds.Counts(3, 1_000, 400, 1_000)
COINS = np.arange(100) % 2 == 0
APART = np.linspace(3, 4, 50), np.linspace(0, 1, 50)
METHOD = registry.build(
    "dp-sgd",
    registry.Numbers(
        noise_multiplier=1.0,
        l2_clip_norm=1.0,
        learning_rate=0.1,
        sampling="full_batch",
        batch_size=4,
        dataset_size=4,
    ),
)


def many_runs(**changes):
    return audit.audit_algorithm(METHOD, 2, **{"delta": 1e-5, "runs": 10, **changes})


def whole_event(**changes):
    return auditing.audit_event(*APART, acc.Gaussian(1.0), **changes)


# Of a function: its arguments, all right. Every one answers with them.
RIGHT = {
    auditing.epsilon_bound: {"counts": COUNTS, "delta": 1e-5, "confidence": 0.9},
    auditing.gaussian_bound: {"counts": COUNTS, "delta": 1e-5, "confidence": 0.9},
    auditing.bounds.mu_bound: {"counts": COUNTS, "confidence": 0.9},
    auditing.bounds.one_run_bound: {
        "correct": 50,
        "guesses": 50,
        "canaries": 100,
        "delta": 1e-5,
        "confidence": 0.9,
    },
    auditing.bounds.one_run_p_value: {
        "correct": 50,
        "guesses": 50,
        "canaries": 100,
        "epsilon": 1.0,
        "delta": 1e-5,
    },
    auditing.audit_scores: {
        "with_record": APART[0],
        "without": APART[1],
        "delta": 1e-5,
        "confidence": 0.9,
        "seed": 0,
        "held_out": 0.2,
    },
    auditing.scores.audit_all_thresholds: {
        "with_record": APART[0],
        "without": APART[1],
        "delta": 1e-5,
        "thresholds": [2.0],
        "confidence": 0.9,
    },
    auditing.audit_one_run: {
        "scores": COINS.astype(float),
        "included": COINS,
        "delta": 1e-5,
        "confidence": 0.9,
    },
    whole_event: {"confidence": 0.9, "seed": 0, "held_out": 0.3},
    auditing.events.family_bound: {
        "with_record": APART[0],
        "without": APART[1],
        "family": acc.Gaussian,
        "noise": 1.0,
        "delta": 1e-5,
        "confidence": 0.9,
        "seed": 0,
        "held_out": 0.3,
    },
    auditing.audit_canaries: {
        "seen": np.where(COINS, 1.0, 0.0)[None],
        "coins": COINS,
        "algorithm": METHOD,
        "event": acc.Gaussian(1.0),
        "delta": 1e-5,
        "confidence": 0.9,
    },
    auditing.features.discriminant: {
        "with_record": APART[0][:, None],
        "without": APART[1][:, None],
        "seed": 0,
        "keep": 1,
        "held_out": 0.3,
    },
}
CONFIDENCES = (0, 0.0, -1, -2.9, 1, 1.5, math.nan, math.inf, "0.9", None, True)
DELTAS = (-1e-9, 1.0, math.nan, math.inf, "0", None)
SEEDS = (-1, 0.5, "0")
WRONG = {
    "confidence": CONFIDENCES,
    "delta": DELTAS,
    "seed": SEEDS,
    "held_out": (0, 1, -1, math.nan),
    "counts": ((3, 1_000, 400, 1_000), None),
    "canaries": (-1, 99.5, "100"),
    "guesses": (-1, 50.5, 101),
    "correct": (-1, 49.5, 51),
    "keep": (0, -1, 1.5),
    "thresholds": ([], [math.nan], [[1.0]]),
}
ALSO = [(many_runs, {"confidence": c}, "confidence") for c in CONFIDENCES] + [
    (many_runs, {"delta": 0.0}, "delta"),
    (many_runs, {"seed": -1}, "seed"),
    (many_runs, {"runs": 9}, "runs"),
    (many_runs, {"chunk": 0}, "chunk"),
    (auditing.events.family_bound, {"delta": 0.0}, "delta"),
    (auditing.audit_canaries, {"delta": 0.0}, "delta"),
    (auditing.gaussian_bound, {"delta": 0.0}, "delta"),
    (auditing.audit_scores, {"delta": 0.0, "kind": "gaussian"}, "delta"),
    (auditing.scores.audit_all_thresholds, {"delta": 0.0, "kind": "gaussian"}, "delta"),
    (auditing.audit_scores, {"threshold": math.nan}, "threshold"),
    (auditing.audit_scores, {"threshold": [1.0, 2.0]}, "threshold"),
    (auditing.audit_one_run, {"looks": []}, "looks"),
]


def cases():
    for function, right in RIGHT.items():
        for name in (name for name in WRONG if name in right):
            for value in WRONG[name]:
                yield function, {name: value}, name
    yield from ALSO


@pytest.mark.parametrize(
    ("function", "changes", "name"),
    [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in cases()],
)
def test_what_is_out_of_range_is_refused_by_name(function, changes, name, monkeypatch):
    def computed(*_, **__):
        raise AssertionError("an argument is checked only after something was computed")

    for module, work in (
        (bounds, "_grid"),
        (bounds, "_binomial_tail"),
        (scores, "candidates"),
        (events, "candidates"),
        (audit, "tiny_worlds"),
    ):
        monkeypatch.setattr(module, work, computed)
    with pytest.raises(ValueError, match=rf"^{name} must ") as refused:
        function(**{**RIGHT.get(function, {}), **changes})
    assert "got " in str(refused.value)


@pytest.mark.parametrize("function", RIGHT, ids=lambda function: function.__name__)
def test_what_is_in_range_is_answered(function):
    function(**RIGHT[function])


@pytest.mark.parametrize("seed", [-1, 0.5])
def test_worlds_and_canaries_refuse_a_wrong_seed(seed):
    with pytest.raises(ValueError, match=r"^seed must be a whole number"):
        auditing.two_worlds(lambda words, member: words, 2, seed=seed)
    with pytest.raises(ValueError, match=r"^seed must be a whole number"):
        adversaries.random_dirac({"w": np.zeros(3)}, seed)


def test_expand_refuses_wrong_stretches():
    for steps in (0, -1, 1.5):
        with pytest.raises(ValueError, match=r"^steps must be a whole number"):
            auditing.features.expand(np.zeros((2, 4)), steps)


def test_scores_of_several_columns_are_not_taken_for_canaries():
    """Two columns would count twice the correct guesses."""
    coins = np.stack([COINS, COINS], axis=1)
    with pytest.raises(ValueError, match=r"^scores must be \[m\]"):
        auditing.audit_one_run(coins.astype(float), coins, 1e-5)
