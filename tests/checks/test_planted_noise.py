"""Faults of the noise, the draw and the memory of a loop are found; loops that are right pass."""

import pytest

from benchmarks import planted_noise as planted

# Each fault by the finding that must name it; the others are in the benchmark, and take minutes.
KINDS = {
    "one key for all leaves": "shared",
    "one coordinate without noise": "noise",
    "noise without its mean": "shared",
    "no noise where nobody was drawn": "noise",
    "noise that falls with the steps": "sensitivity",
    "one leaf's noise comes again": "repeat",
    "a fifth of the noise in one layer": "sensitivity",
    "uniform noise": "noise",
    "momentum of un-noised sums": "sensitivity",
    "a batch that is not finite skipped": "sensitivity",
    "four drawn records kept": "sampling",
    "a draw repeated until it has two": "sampling",
    "batches of one size": "sampling",
}
PASS = [
    "frozen leaves, a counter, a rate",
    "unlike noise by layer",
    "unlike noise by coordinate",
    "momentum of noisy sums, released",
    "dp_mf, banded",
    "steps that nobody was drawn for",
]


@pytest.mark.parametrize("name", KINDS)
def test_a_faulty_loop_is_accused(name):
    found = planted.checked(name)
    assert KINDS[name] in {finding.kind for finding in found.broken}


@pytest.mark.parametrize("name", PASS)
def test_a_right_loop_is_not_accused(name):
    assert planted.checked(name).findings == ()
