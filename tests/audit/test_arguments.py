"""Every audit refuses arguments out of their range, by name, before it computes anything."""

import math
from functools import partial

import numpy as np

from jaxdp import accounting as acc
from jaxdp import audit
from jaxdp.audit import algorithms, bounds, guesses, scores
from jaxdp.audit import attack_measures as measured
from jaxdp.audit.bounds import ErrorCounts
from jaxdp.optimizers import registry
from tests.refusing import all_refused

COINS = np.arange(100) % 2 == 0
PERFECT = COINS.astype(float)
APART = np.linspace(3, 4, 50), np.linspace(0, 1, 50)
METHOD = registry.build(
    "dp-sgd", registry.Numbers(1.0, 1.0, 4, 4, learning_rate=0.1, sampling="full_batch")
)


def many_runs(**changes):
    return algorithms.audit_algorithm(METHOD, 2, **{"delta": 1e-5, "runs": 10, **changes})


def whole_event(**changes):
    return audit.audit_event(*APART, acc.Gaussian(1.0), **changes)


LEVEL = {"confidence": 0.9}
BOUND = {"delta": 1e-5, **LEVEL}
COUNTS = {"counts": ErrorCounts(3, 1_000, 400, 1_000)}
SCORES = {"with_record": APART[0], "without": APART[1], **BOUND}
SPLIT = {"seed": 0, "held_out": 0.3}
RUN = {"scores": PERFECT, "included": COINS, **BOUND, "seed": 0}
# Of a function: its arguments, all right. Every one answers with them.
RIGHT = {
    audit.epsilon_bound: {**COUNTS, **BOUND},
    audit.audit_scores: {**SCORES, **SPLIT},
    audit.audit_one_run: RUN,
    audit.audit_one_run_family: {**RUN, "family": acc.Gaussian, "noise": 1.0},
    whole_event: {**LEVEL, **SPLIT},
    scores.family_bound: {**SCORES, "family": acc.Gaussian, "noise": 1.0},
    audit.audit_canaries: {
        **{"seen": PERFECT[None], "coins": COINS, "algorithm": METHOD, "event": acc.Gaussian(1.0)},
        **BOUND,
    },
}
CONFIDENCES = (0, 0.0, -1, -2.9, 1, 1.5, math.nan, math.inf, "0.9", None, True)
WRONG = {
    "confidence": CONFIDENCES,
    "delta": (-1e-9, 1.0, math.nan, math.inf, "0", None),
    "seed": (-1, 0.5, "0"),
    "held_out": (0, 1, -1, math.nan),
    "counts": ((3, 1_000, 400, 1_000), None),
    "noise": (0.0, -1.0, math.nan),
}
ALSO = [
    *((many_runs, {"confidence": value}) for value in CONFIDENCES),
    *((many_runs, {name: value}) for name, value in (("seed", -1), ("runs", 9), ("chunk", 0))),
    *((many_runs, {"delta": 0.0}), (scores.family_bound, {"delta": 0.0})),
    *((f, {"delta": 0.0}) for f in (audit.audit_canaries, audit.audit_one_run_family)),
    (audit.audit_scores, {"delta": 0.0, "kind": "gaussian"}),
    *((audit.audit_scores, {"threshold": value}) for value in (math.nan, [1.0, 2.0])),
]


def out_of_range():
    for function, right in RIGHT.items():
        for name in (name for name in right if name in WRONG):
            yield from ((function, {name: value}) for value in WRONG[name])
    yield from ALSO


def test_what_is_out_of_range_is_refused_by_name(monkeypatch):
    def computed(*_, **__):
        raise AssertionError("an argument is checked only after something was computed")

    for module, work in (
        *((bounds, "_grid"), (bounds, "_cell_ends"), (guesses, "_first_grid_place")),
        *((scores, "candidate_tests"), (algorithms, "tiny_worlds")),
    ):
        monkeypatch.setattr(module, work, computed)
    all_refused(
        (
            rf"^{next(iter(changes))} must .*got ",
            partial(function, **{**RIGHT.get(function, {}), **changes}),
            f"{function.__name__} {changes}",
        )
        for function, changes in out_of_range()
    )


def test_what_is_in_range_is_answered():
    for function, right in RIGHT.items():
        function(**right)


def seen(rows, coins, **more):
    return audit.audit_canaries(
        np.zeros(rows), np.ones(coins, bool), METHOD, acc.Gaussian(1.0), 1e-5, **more
    )


def worlds_of_seed(seed):
    return audit.two_worlds(lambda words, member: words, 2, seed=seed)


NINE, PAIR, D = np.zeros(9), (np.zeros(300), np.ones(300)), 1e-5
THREE, ONES, TWICE = np.zeros(3), np.ones(3, bool), np.zeros((5, 2))
NO_SCORES = (["a"], np.ones(5) * 1j, [[1.0], [1.0, 2.0]], None)
REFUSED = [
    *(("^seed must be a whole number", partial(worlds_of_seed, seed)) for seed in (-1, 0.5)),
    ("alarms must be .* at most 4, got 5", partial(ErrorCounts, 5, 4, 0, 4)),
    ("without must be a whole number", partial(ErrorCounts, 0, 0, 0, 4)),
    ("alarms must be a whole number", partial(ErrorCounts, -1, 4, 0, 4)),
    ("kind must be one of", partial(audit.audit_scores, NINE, NINE, D, kind="guess")),
    ("without must have 1 columns", partial(audit.audit_scores, NINE, np.zeros((9, 2)), D)),
    ("with_record must be scores", partial(audit.audit_scores, np.zeros(0), NINE, D)),
    ("included must be bool", partial(audit.audit_one_run, NINE, NINE, D)),
    # Two columns would count twice the correct guesses.
    (r"^scores must be \[m\]", partial(audit.audit_one_run, TWICE, TWICE > 0, D)),
    ("looks must be one of both, top", partial(guesses.count_right, COINS, [(5, "left")])),
    ("looks must be .* at most 100, got 101", partial(guesses.count_right, COINS, [(101, "top")])),
    (r"seen must be \[steps, m\]", partial(seen, (3, 2), 3)),
    (r"seen must be \[steps, 3 m\]", partial(seen, (3, 4), 4, records=True)),
    ("one a run, got 2 columns", partial(measured, TWICE, TWICE, D)),
    (r"false_positive_rates\[0\] must", partial(measured, *PAIR, D, false_positive_rates=(0.0,))),
    *(("^with_record must be scores", partial(measured, x, NINE, D)) for x in NO_SCORES),
    *(("^without must be scores", partial(audit.audit_scores, NINE, x, D)) for x in NO_SCORES),
    *(("^scores must be", partial(audit.audit_one_run, x, ONES, D)) for x in NO_SCORES),
    *(("^delta must", partial(measured, *PAIR, delta)) for delta in ("0", None, 1.0)),
    (
        "missed must be .* at most 5, got 6",
        partial(bounds.rank_p_value, 0, 5, 6, 5, bounds.gaussian_dp(1.0)),
    ),
]


def test_what_no_audit_can_read_is_refused_in_words():
    all_refused(REFUSED)
