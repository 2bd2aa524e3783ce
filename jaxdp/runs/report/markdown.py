"""report.md, and the sentences that report.html shares with it.

Whatever may hold words of a caller, a file or a folder is written as text: no HTML, link or picture
of theirs becomes a part of the page.
"""

import math
import re
from collections.abc import Iterable, Sequence

from jaxdp.runs.report import audited, cautions, facts, levels
from jaxdp.runs.report.schema import AuditRow, Report
from jaxdp.runs.report.words import (
    FLOATS,
    HIDDEN,
    encodable,
    show_delta,
    show_epsilon,
    show_factor,
    show_rate,
)

GLOSSARY = (
    (
        "Epsilon",
        "how far, at most, one record can move the probability of anything that this run "
        "shows: by a factor of e to the power of epsilon. 0 is perfect privacy; smaller is better.",
    ),
    (
        "Delta",
        "how much probability is left over in which that need not hold. It has to be well "
        "below one over the number of records.",
    ),
    (
        "Privacy unit",
        "what one count of the guarantee is: for a person with k records in the data, "
        "epsilon is k times as large or more.",
    ),
    (
        "Ledger",
        "the file ledger.jsonl, in which every release was written down before it was made. "
        "Epsilon is computed from it alone.",
    ),
    (
        "Audit",
        "an attack on the run, or on one like it. It can show that a guarantee is false, "
        "never that it is true.",
    ),
)


def to_markdown(report: Report) -> str:
    """The text of report.md."""
    guarantee, found, value = report.guarantee, report.measured, report.value
    proven = (
        f"**(epsilon {show_epsilon(guarantee.epsilon)}, delta {show_delta(guarantee.delta)})**"
        f"{', ' + guarantee.provided if guarantee.provided else ''}."
    )
    headline, progress = f"Proven: {proven}", "Epsilon"
    if found is not None:
        progress = f"{found.name} and epsilon"
        if value is not None:
            headline = f"**{_escape(found.name)} {found.shown(value)}** at a proven {proven}"
    lines = [f"# {_escape(report.title)}", "", headline, ""]
    # Warnings stand before all that reads well, and the guarantee before the attacks on it.
    for text in cautions.all_warnings(report):
        lines += [f"> **Warning.** {_escape(text)}", ""]
    if report.judged_by:
        lines += [f"> {_escape(report.judged_by)}", ""]
    lines += [*levels.describe_levels(report), "", *meaning(report), ""]
    if claim := report.claim:
        lines += [
            f"Claimed by the paper: epsilon {show_epsilon(claim.epsilon)} after "
            f"{claim.steps:,} counted steps ({_escape(claim.source)}): {_escape(claim.verdict)}.",
            "",
        ]
    if hits := attack_limits(report):
        lines += ["## What an attack could do at most", ""]
        lines += _table(("wrongly accused", "rightly found", "by guessing"), hits)
        lines += [*(f"{text}\n" for text in describe_gaussian(report))]
    if report.audited:
        lines += ["## Audit", "", *_audited(report.audited), ""]

    # The facts, the plots, and what no number of this page covers.
    for heading, rows in report.facts:
        lines += [f"## {_escape(heading)}", ""]
        lines += _table(
            ("", ""), [(_escape(name), _escape_value(name, value)) for name, value in rows]
        )
    lines += [f"![{_escape(progress)}](accuracy_and_epsilon.png)", ""]
    lines += ["![Norm of the noisy update](update_norm.png)", ""]
    for heading, items in sections(report):
        lines += [f"## {heading}", "", *(f"- {_escape(item)}" for item in items), ""]
    lines += ["## Words", "", *(f"- **{word}**: {text}" for word, text in glossary(report)), ""]
    return encodable("\n".join(lines))


def meaning(report: Report) -> list[str]:
    """Paragraphs that explain the guarantee to a reader who is not of the field."""
    guarantee, neighbours = report.guarantee, facts.describe_relation(report)
    epsilon = guarantee.epsilon
    if math.isinf(epsilon):
        return ["Nothing is promised: no bound on what this run reveals of a record is proven."]
    delta, seen = show_delta(guarantee.delta), "sees every intermediate model"
    if guarantee.delta < 0.01:
        delta += f" (1 in {math.floor((1 + 1e-9) / guarantee.delta):,})"
    if guarantee.sampling == HIDDEN:
        seen = (
            "sees the released model alone (one look at a state between, also an accuracy of it, "
            "voids the number)"
        )
    but = ", for ideal noise: see below" if FLOATS in report.outside_the_guarantee else ""
    found = [
        f"With {neighbours}, the probability of anything that this run shows changes by a factor "
        f"of at most {show_factor(epsilon)}, but for a probability of {delta}. This holds against "
        f"whoever {seen} and knows all other records{but}."
    ]
    found += [
        f"An attacker who may wrongly accuse {show_rate(rate)} of the records that were not used "
        f"rightly finds at most {show_rate(hits)} of those that were; guessing finds "
        f"{show_rate(rate)}."
        for rate, hits in _hits(report)[-1:]
    ]
    return [facts.of_unit(report, each) for each in found]


def glossary(report: Report) -> list[tuple[str, str]]:
    """The words that a report explains: (word, text)."""
    unit = facts.of_unit(report, "a person with k records in the data")
    unit = unit.replace("with k users", "who is k users")
    texts = [
        (word, text.replace("a person with k records in the data", unit)) for word, text in GLOSSARY
    ]
    return [(word, facts.of_unit(report, text)) for word, text in texts]


def attack_limits(report: Report) -> list[tuple[str, str, str]]:
    """Rows in words: (false-positive rate, most true positives, those of guessing)."""
    return [
        (show_rate(rate), f"at most {show_rate(hits)}", show_rate(rate))
        for rate, hits in _hits(report)
    ]


def describe_gaussian(report: Report) -> list[str]:
    """A sentence on mu of the equivalent Gaussian mechanism; [] where there is none."""
    found = report.tradeoff
    if found is None or found.mu is None:
        return []
    kind, hard, sure = "exact", "exactly as hard as", ""
    if found.mu_is != "exact":
        kind, hard = "approximate", "about as hard as, or harder than,"
        sure = " It was compared at some points of the curve and is not proven; epsilon is."
    mu = f"{found.mu:.3g}"
    of = facts.of_unit(report, "a record")
    return [
        f"Equivalent Gaussian (GDP), {kind}: mu {mu}. Telling whether {of} was used is {hard} "
        "telling from one measurement with noise of standard deviation 1 whether the truth is 0 or "
        f"{mu}.{sure}"
    ]


def sections(report: Report) -> list[tuple[str, Sequence[str]]]:
    """(heading, items) of the assumptions and of what no guarantee covers."""
    verified = (
        "Nothing that was noticed: every release was drawn, clipped, noised and charged by one "
        "mechanism."
    )
    if math.isinf(report.guarantee.epsilon):
        verified = "Nothing is proven, so there is nothing to verify."
    return [
        ("Could not be verified", report.unverified or [verified]),
        ("Assumed", report.assumed),
        ("Outside the guarantee", report.outside_the_guarantee),
    ]


def _hits(report: Report) -> list[tuple[float, float]]:
    """Pairs (false-positive rate, most true positives)."""
    found = report.tradeoff.tpr_at_fpr if report.tradeoff else {}
    return [(float(rate), hits) for rate, hits in found.items()]


def _audited(row: AuditRow) -> list[str]:
    """The lines of the audit."""
    rows = [(_escape(name), value, share or "-") for name, value, share in audited.table(row)]
    return [
        _escape(audited.advice(row)),
        "",
        f"{_escape(audited.describe_audit(row))}.",
        "",
        *_table(("", "value", "of the proven"), rows),
        _escape(audited.verdict(row)),
        "",
        "![ROC of the attack and the proven region](roc.png)",
    ]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = [heads, ("---",) * len(heads), *rows]
    # A caller's own words may hold what ends a cell.
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return [*("| " + " | ".join(line) + " |" for line in cells), ""]


def _escape_value(name: str, value: str) -> str:
    """The value of a fact: code in a fence, other words escaped."""
    if name not in facts.CODE:
        return _escape(value)
    # A fence longer than any in the value, which could end it.
    longest = max((len(run) for run in re.findall("`+", value)), default=0)
    fence, space = "`" * (longest + 1), " " * bool(longest)
    return f"{fence}{space}{value}{space}{fence}"


def _escape(said: str) -> str:
    """The words on one line, as Markdown that shows them as they are."""
    escaped = re.sub(r"([\\\[\]])", r"\\\1", " ".join(said.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
