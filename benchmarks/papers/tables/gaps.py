"""Printed figures beside ours, and the experiments of ``python -m benchmarks.printed_gaps``."""

import re
from collections.abc import Sequence

from benchmarks.papers.tables import rows
from benchmarks.papers.tables.rows import Results

FILE = "printed_gaps.json"
# What is printed, the figure, ours (a word before the name of a row, or a figure found without
# one), and the difference, which quotes experiments by `{name}`.
Entry = tuple[str, str, Sequence[tuple[str, str]], str]
_NAME = re.compile(r"\{([\w.-]+)\}")


def told(results: Results, text: str) -> str:
    """The text with the accuracy of an experiment in the place of its ``{name}``.

    Args:
        results: in whose folder the file of the experiments lies.
        text: with names in braces; one that was not run is said to be so.
    """
    found: dict[str, list[float]] = {}
    for line in results.read(FILE) or []:
        found.setdefault(line["name"], []).append(line.get("test_accuracy"))

    def shown(match: re.Match[str]) -> str:
        shares = found.get(match[1])
        return rows.mean_and_spread(shares)[0] if shares else rows.MISSING

    return _NAME.sub(shown, text)
