"""Planted losses, pipelines and loops are found where they stand; their twins and right ones pass."""

import inspect

import pytest

from benchmarks import planted_noise
from benchmarks import planted_pipelines as planted

KINDS = {
    "statistics_of_the_records": "captured", "closure_over_a_batch": "captured",
    "cache_of_the_first_example": "state", "python_counter": "state",
    "shared_dropout_key": "company", "batch_norm_under_vmap": "company",
    "collective_in_the_loss": "refused", "divided_by_the_batch": "divisor",
    "table_outside_the_source": "captured", "callback_to_python": "refused",
    "fitted_preprocessing": "preprocess", "fitted_vocabulary": "preprocess",
    "duplicates_removed_by_their_neighbours": "preprocess",
    "class_weights_of_the_records": "captured", "shuffling_loader": "sampling",
    "source_with_a_memory": "source", "padding_to_the_longest": "collate",
    "clip_bound_of_the_records": "public", "schedule_of_the_records": "public",
}  # fmt: skip


@pytest.mark.parametrize("function", planted.PIPELINES, ids=lambda f: f.__name__)
def test_a_planted_mistake_is_found_where_it_stands(function):
    (first, *_) = function(False).findings
    # A table whose rows the records number: it may as well be a coincidence.
    assert first.certain == (function is not planted.table_outside_the_source)
    assert first.kind == KINDS[function.__name__]
    file, line = first.where.split(":")
    assert file == "benchmarks/planted_pipelines.py"
    home = planted.RunningMean if first.kind == "source" else function
    lines, start = inspect.getsourcelines(home)
    assert start <= int(line) < start + len(lines)
    assert function(True).findings == ()  # its twin


# Each fault by the finding that must name it; the others are in the benchmark, and take minutes.
NOISE = {
    "one key for all leaves": "shared", "one coordinate without noise": "noise",
    "noise without its mean": "shared", "no noise where nobody was drawn": "noise",
    "noise that falls with the steps": "sensitivity", "one leaf's noise comes again": "repeat",
    "a fifth of the noise in one layer": "sensitivity", "uniform noise": "noise",
    "momentum of un-noised sums": "sensitivity", "batches of one size": "sampling",
    "a batch that is not finite skipped": "sensitivity", "four drawn records kept": "sampling",
    "a draw repeated until it has two": "sampling",
}  # fmt: skip
RIGHT_NOISE = [
    "frozen leaves, a counter, a rate", "unlike noise by layer", "unlike noise by coordinate",
    "momentum of noisy sums, released", "dp_mf, banded", "steps that nobody was drawn for",
]  # fmt: skip


@pytest.mark.parametrize("name", NOISE)
def test_a_faulty_loop_is_accused(name):
    found = planted_noise.checked(name)
    assert NOISE[name] in {finding.kind for finding in found.broken}


@pytest.mark.parametrize("name", RIGHT_NOISE)
def test_a_right_loop_is_not_accused(name):
    assert planted_noise.checked(name).findings == ()
