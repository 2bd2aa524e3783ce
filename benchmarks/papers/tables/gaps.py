"""Runs by name wherever they are kept, and sentences that quote them."""

import functools
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.papers import agd, not_private
from benchmarks.papers.tables import rows
from benchmarks.papers.tables.rows import Results

# Of ``python -m benchmarks.printed_gaps``.
FILE = "printed_gaps.json"
_NAME = re.compile(r"\{([\w.-]+)\}")


def lines(results: Results, name: str) -> Sequence[Any]:
    """The runs of a row of the queue, of an experiment, of AGD or without privacy."""
    return results.runs(name) or _others(results).get(name, [])


@functools.lru_cache(maxsize=1)
def _others(results: Results) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for file in (FILE, agd.FILE, not_private.FILE):
        for line in results.read(file) or []:
            if "test_accuracy" in line:
                found.setdefault(line["name"], []).append(line)
    return found


def shares(results: Results, name: str) -> list[float]:
    """The test accuracies of those runs, of 1."""
    return [line["test_accuracy"] for line in lines(results, name)]


def curves(results: Results, name: str) -> list[list[tuple[int, float]]]:
    """Step and accuracy of every look at the test set, of the runs that kept them."""
    kept = [line["curve"] for line in lines(results, name) if line.get("curve")]
    return [[(look[0], look[-1]) for look in curve] for curve in kept]


def told(results: Results, text: str) -> str:
    """The text with the accuracy of a row or an experiment in the place of its ``{name}``.

    Args:
        results: in whose folder the runs lie.
        text: with names in braces; one that was not run is said to be so.
    """

    def shown(match: re.Match[str]) -> str:
        found = shares(results, match[1])
        return rows.mean_and_spread(found)[0] if found else rows.MISSING

    return _NAME.sub(shown, text)
