"""What is broken is caught, what is right is not; the full lists are in benchmarks/auditing.py."""

import pytest
from scipy import stats

from benchmarks.planted import BUGS, CORRECT, many_verdicts

QUICK = (
    "noise calibrated to the mean",
    "one leaf without noise",
    "one key for two leaves",
    "twice the bound",
    "a non-finite example passes",
    "PIGDO's raw moments",
    "one key for two steps",
    "noise reused after a resume",
)


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_flagged(name):
    assert BUGS[name].verdict(1500).p_value < 1e-3


@pytest.mark.parametrize("name", ["dp-sgd, sampled", "adadp"])
def test_correct_algorithms_are_not_accused(name):
    assert name in CORRECT
    accused = sum(verdict.refuted for verdict in many_verdicts(name, 10, 600))
    assert accused <= stats.binom.ppf(0.999, 10, 0.05)
