"""An audit as a table, and as words that say the same."""

import math
import re

from jaxdp.runs.report.schema import THIS_RUN, AuditRow
from jaxdp.runs.report.words import show_audited, show_delta, show_epsilon

_NEAR = 0.8  # of what could be found
_RARE = 1e-3  # a false-positive rate that is shown, or said to be out of reach


def table(row: AuditRow) -> list[tuple[str, str, str]]:
    """Rows of the table: (which epsilon, its value, its share of the proven one)."""
    found = []
    if row.claimed is not None:
        found.append(("Claimed by the paper", show_epsilon(row.claimed), ""))
    proven = "nothing" if math.isinf(row.proven) else f"at most {show_epsilon(row.proven)}"
    found.append((f"Proven, for the {count_steps(row)} attacked", proven, ""))
    found.append(
        (
            f"Audited, at {row.confidence:.0%} confidence",
            f"at least {show_audited(row.audited)}",
            _share(row, row.audited),
        )
    )
    if row.reachable is not None:
        name = "The most that this audit could show, if all that is proven leaked"
        found.append((name, f"about {row.reachable:.2f}", _share(row, row.reachable)))
    for value, provided in (
        (row.audited_profile, f"provided that {row.profile_assumes}"),
        (row.audited_family, f"provided that {row.family_assumes}"),
        (row.audited_last, f"from {describe_last(row)}"),
    ):
        if value is not None:
            shown = f"at least {show_audited(value)}"
            found.append((f"Audited, {provided}", shown, _share(row, value)))

    # The ROC curve at a few rates, and whether the audit was large enough to tell the rarest.
    if row.points and row.points[0][0] > 2 * _RARE:
        # A thousand unused ones: half of the canaries. Short, for no cell of numbers is broken.
        more = "more runs" if row.canaries is None else "over 2,000 canaries"
        found.append((_found_at(_RARE), f"needs {more}", ""))
    for alarms, _, _, hits, low, high in row.points or ():
        found.append((_found_at(alarms), f"{hits:.1%} ({low:.1%} to {high:.1%})", ""))
    return found


def _found_at(alarms: float) -> str:
    """The name of a row of the ROC curve."""
    return f"Used records found, where {100 * alarms:.2g}% of the unused ones are accused"


def count_steps(row: AuditRow) -> str:
    """The number of attacked steps in words."""
    return f"{row.steps:,} {'step' if row.steps == 1 else 'steps'}"


def describe_last(row: AuditRow) -> str:
    """The releases that the audit of the end of a run alone was computed from."""
    return row.last_of or "the sum of the noisy gradients alone"


def advice(row: AuditRow) -> str:
    """A paragraph on what to do, for readers who are no statisticians."""
    if row.broken or row.noise_refuted:
        return (
            "Do not publish this model. The attack shows that the program does not keep the "
            "guarantee that it states: something is wrong in the code or in what was charged. Find "
            "it, and train anew."
        )
    if math.isinf(row.proven):
        return (
            "Do not rely on privacy here: nothing is proven. The audited number tells only what "
            "this one attack found; another may find more."
        )
    proven = f"at most {show_epsilon(row.proven)}"
    if row.what == THIS_RUN:
        words = f"Go by the proven number, {show_epsilon(row.proven)}. "
        attacked = "it attacks the program"
    else:
        # Other steps, records and parameters have another epsilon than the run.
        words = "Go by the guarantee of the run, and not by the numbers of this table. "
        attacked = f"it attacks {row.what} ({count_steps(row)}, proven: {proven})"
    words += (
        f"The audit is an alarm that did not ring: {attacked} and looks for more leakage than is "
        "proven, and found none. "
    )
    if row.reachable is None:
        return words + "A small audited number does not mean that the model leaks little."
    if row.reachable < 0.05:
        return words + (
            "But this audit was too small to hear anything: ask for more canaries or more runs."
        )
    part = row.audited / row.reachable
    if part >= _NEAR:
        judged = "so it found about all that it could have found"
    else:
        judged = f"so the attack got {part:.0%} of what a perfect one would have got"
    words += (
        f"Its own number, {show_audited(row.audited)}, is no measure of privacy: even a program "
        f"that leaks all of {show_epsilon(row.proven)} would have shown only about "
        f"{row.reachable:.2f} here, {judged}."
    )
    if row.canaries is not None and row.reachable < row.proven / 2:
        # Not this one again: that would be another release of the same records.
        words += " To see more, give the next run more canaries."
    return words


def describe_audit(row: AuditRow) -> str:
    """The attacked run or mechanism, the number of steps and runs, and the adversary, in words."""
    runs = f"{row.runs:,} {'run' if row.runs == 1 else 'runs'}"
    delta = f", delta {show_delta(row.delta)}" if row.delta is not None else ""
    return f"Audited: {row.what}, {count_steps(row)}, {runs}{delta}, {row.adversary}"


def verdict(row: AuditRow) -> str:
    """The audit's verdict, with every share that it names a row of the table.

    Where it names the larger of two lower bounds alone, both are given.
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
    """A number as a share of the proven epsilon; "" where nothing is proven."""
    if not math.isfinite(row.proven):
        return ""
    return f"{value / row.proven if row.proven else 1.0:.0%}"
