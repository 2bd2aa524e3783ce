"""An audit as a table, and as words that say the same."""

import math
import re

from jaxdp.report.schema import AuditRow
from jaxdp.report.words import show_audited, show_delta, show_epsilon


def table(row: AuditRow) -> list[tuple[str, str, str]]:
    """Rows of the table: (which epsilon, its value, its share of the proven one)."""
    found = []
    if row.claimed is not None:
        found.append(("Claimed by the paper", show_epsilon(row.claimed), ""))
    proven = "nothing" if math.isinf(row.proven) else f"at most {show_epsilon(row.proven)}"
    found.append((f"Proven, for the {row.steps:,} steps attacked", proven, ""))
    found.append(
        (
            f"Audited, at {row.confidence:.0%} confidence",
            f"at least {show_audited(row.audited)}",
            _share(row, row.audited),
        )
    )
    if row.audited_profile is not None:
        found.append(
            (
                f"Audited, provided that {row.profile_assumes}",
                f"at least {show_audited(row.audited_profile)}",
                _share(row, row.audited_profile),
            )
        )
    return found


def how(row: AuditRow) -> str:
    """The attacked run or mechanism, the number of steps and runs, and the adversary, in words."""
    runs = f"{row.runs:,} {'run' if row.runs == 1 else 'runs'}"
    delta = f", delta {show_delta(row.delta)}" if row.delta is not None else ""
    return f"Audited: {row.what}, {row.steps:,} steps, {runs}{delta}, {row.adversary}"


def verdict(row: AuditRow) -> str:
    """The audit's verdict, with every share that it names a row of the table.

    Where it names the larger of two lower bounds alone, both are told.
    """
    words, profile = row.verdict, row.audited_profile
    if profile is not None and profile > row.audited:
        words = re.sub(
            r"the attack reaches \d+% of it",
            f"the attack reaches {_share(row, row.audited)} of it, and {_share(row, profile)} "
            f"provided that {row.profile_assumes}",
            words,
        )
    if row.noise_refuted:
        words = words.replace(
            "Nothing contradicts the proven guarantee",
            "The attack does not contradict the proven guarantee",
        )
    return words


def _share(row: AuditRow, value: float) -> str:
    if not math.isfinite(row.proven):
        return ""
    return f"{value / row.proven if row.proven else 1.0:.0%}"
