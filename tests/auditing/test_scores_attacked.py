"""Bounds of two worlds on constructed scores stay below the truth: atoms, infinities, few runs."""

import numpy as np
import pytest
from scipy import stats

from jaxdp import auditing

AUDITS = 120
MOST = stats.binom.ppf(0.999, AUDITS, 0.05)
BOUNDS = {
    "ranks": lambda i, o, d: auditing.audit_ranks(i, o, d),
    "one split": lambda i, o, d: auditing.audit_scores(i, o, d),
    "splits": lambda i, o, d: auditing.audit_splits(i, o, d, splits=3),
}


def told(rng, runs, there, epsilon, delta):
    """Randomised response that shows the truth outright, as an infinity, with probability delta."""
    right = np.exp(epsilon) / (1 + np.exp(epsilon))
    answers = np.where(rng.random(runs) < (right if there else 1 - right), 1.0, 0.0)
    outright = np.inf if there else -np.inf
    return np.where(rng.random(runs) < delta, outright, answers)


def wrong(audit, made, truth):
    found = [audit(*made(np.random.default_rng([13, seed]))).epsilon for seed in range(AUDITS)]
    return np.sum(np.array(found) > truth + 1e-9)


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.5, 0.05), (1.0, 0.2), (0.0, 0.5), (2.0, 0.9), (1.0, 1e-5)]
)
def test_atoms_and_infinities(kind, epsilon, delta):
    def made(rng):
        return *(told(rng, 40, there, epsilon, delta) for there in (True, False)), delta

    assert wrong(BOUNDS[kind], made, epsilon) <= MOST


@pytest.mark.parametrize("sizes", [(5, 300), (300, 5), (3, 3)])
def test_few_runs_of_one_world(sizes):
    def made(rng):
        return rng.normal(size=sizes[0]), rng.normal(size=sizes[1]), 1e-5

    gaussian = lambda i, o, d: auditing.audit_scores(i, o, d, kind="gaussian")  # noqa: E731
    for audit in (BOUNDS["ranks"], gaussian):
        assert wrong(audit, made, 0.0) <= MOST


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -np.inf, 7])
@pytest.mark.parametrize("kind", BOUNDS)
def test_scores_that_are_all_equal_tell_nothing(kind, value):
    assert BOUNDS[kind](np.full(500, value), np.full(400, value), 1e-5).epsilon == 0.0
