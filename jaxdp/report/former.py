"""Keys and names that older versions of report.json have."""

from collections.abc import Mapping
from typing import Any

# What version 1 called these algorithms.
_FORMER = {
    "dp-adam": "dp-adam-bc",
    "dpgdo": "dp-adam",
    "adan": "adadp-noise-only",
    "adal": "adadp-step-only",
}


def former_algorithm(row: Mapping[str, Any]) -> dict[str, Any]:
    """An object whose key was "method", with "algorithm" and its name of today instead."""
    if "method" not in row:
        return dict(row)
    name = row["method"]
    kept = {key: value for key, value in row.items() if key != "method"}
    return {**kept, "algorithm": _FORMER.get(name, name)}


def of_version_1(row: Mapping[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """A report of version 1 with the keys of version 2.

    Args:
        row: the report.
        measured: the number that it is judged by, where it does not say.
    """
    row = former_algorithm(row)
    proven = dict(row["guarantee"])
    proven["accountant"] = proven.pop("method", None) or proven.pop("algorithm", "")
    for name in ("config", "audited"):
        if row.get(name):
            row[name] = former_algorithm(row[name])
    if "measured" not in row and "test_accuracy" in row:
        row["measured"] = measured
    if not row.get("title"):
        row["title"] = f"{str(row['algorithm']).upper()} on {row['dataset']}"
    return {**row, "guarantee": proven}
