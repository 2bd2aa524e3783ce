"""The audit of a run in a table, and in words that say the same."""

import math
import re
from typing import Any

from jaxdp.report.words import show_audited, show_delta, show_epsilon

TINY = "the same mechanism on a tiny network"  # reports older than the audit of a run itself


def table(row: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(which epsilon, its value, its share of the proven one) of ``report["audited"]``."""
    found = []
    if row["claimed"] is not None:
        found.append(("Claimed by the paper", show_epsilon(row["claimed"]), ""))
    proven = "nothing" if row["proven"] == "inf" else f"at most {show_epsilon(row['proven'])}"
    found.append((f"Proven, for the {row['steps']:,} steps attacked", proven, ""))
    found.append(
        (
            f"Audited, at {row['confidence']:.0%} confidence",
            f"at least {show_audited(row['audited'])}",
            _share(row, row["audited"]),
        )
    )
    if row.get("audited_profile") is not None:
        found.append(
            (
                f"Audited, provided that {row['profile_assumes']}",
                f"at least {show_audited(row['audited_profile'])}",
                _share(row, row["audited_profile"]),
            )
        )
    return found


def how(row: dict[str, Any]) -> str:
    """Words for what was attacked, and how often."""
    runs = f"{row['runs']:,} {'run' if row['runs'] == 1 else 'runs'}"
    delta = f", delta {show_delta(row['delta'])}" if "delta" in row else ""
    return (
        f"Audited: {row.get('what', TINY)}, {row['steps']:,} steps, {runs}{delta}, "
        f"{row['adversary']}"
    )


def verdict(row: dict[str, Any]) -> str:
    """The audit's own words, so that every share in them is a line of the table.

    Where they speak of the larger of two bounds alone, both are said.
    """
    words, profile = row["verdict"], row.get("audited_profile")
    if profile is not None and profile > row["audited"]:
        words = re.sub(
            r"the attack reaches \d+% of it",
            f"the attack reaches {_share(row, row['audited'])} of it, and {_share(row, profile)} "
            f"provided that {row['profile_assumes']}",
            words,
        )
    if row.get("noise_refuted"):
        words = words.replace(
            "Nothing contradicts the proven guarantee",
            "The attack does not contradict the proven guarantee",
        )
    return words


def _share(row: dict[str, Any], value: float) -> str:
    proven = float(row["proven"])
    if not math.isfinite(proven):
        return ""
    return f"{value / proven if proven else 1.0:.0%}"
