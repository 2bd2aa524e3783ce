"""The report of a run as a page."""

from typing import Any

from jaxdp import accounting as acc
from jaxdp.report.words import RELATIONS, show, show_audited, show_delta, show_epsilon, title

TINY = "the same mechanism on a tiny network"  # reports older than the audit of a run itself


def to_markdown(report: dict[str, Any]) -> str:
    """report.md from the dictionary of report.json."""
    guarantee = report["guarantee"]
    delta = show_delta(guarantee["delta"])
    lines = [
        f"# {title(report)}",
        "",
        f"**Test accuracy {report['test_accuracy']:.2%}** at a proven "
        f"**(epsilon {show_epsilon(guarantee['epsilon'])}, delta {delta})**.",
        "",
    ]
    if report["label"]:
        lines += [f"> {report['label']}", ""]
    if report["claim"]:
        claim = report["claim"]
        lines += [
            f"Claimed by the paper: epsilon {show_epsilon(claim['epsilon'])} after "
            f"{claim['steps']:,} counted steps ({claim['source']}): {claim['verdict']}.", "",
        ]
    if report.get("audited"):
        lines += [_audited(report["audited"]), ""]
    if report["judged_by"]:
        lines += [report["judged_by"], ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows(report)), ""]
    lines += ["![Test accuracy and epsilon](accuracy_and_epsilon.png)", ""]
    lines += ["![Norm of the noisy update](update_norm.png)", ""]
    for heading, items in sections(report):
        lines += [f"## {heading}", "", *(f"- {item}" for item in items), ""]
    return "\n".join(lines)


def _audited(row: dict[str, Any]) -> str:
    claimed = "-" if row["claimed"] is None else show_epsilon(row["claimed"])
    return "\n".join((
        f"| claimed | proven | audited, at {row['confidence']:.0%} confidence |",
        "|---|---|---|",
        f"| {claimed} | {show_epsilon(row['proven'])} | at least {show_audited(row['audited'])} |",
        "",
        f"Audited: {row.get('what', TINY)}, {row['steps']:,} steps, "
        f"{row['runs']:,} {'run' if row['runs'] == 1 else 'runs'}, {row['adversary']}: "
        f"{row['verdict']}",
        "",
        "![ROC of the attack and the proven region](roc.png)",
    ))


def rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of what the page tabulates, what was released first."""
    guarantee = report["guarantee"]
    relation = acc.Relation(guarantee["relation"])
    return [
        ("Released", guarantee["in_words"]),
        *_counted(report["counts"]),
        *(("Audit", note) for note in report.get("notes", ())),
        ("Neighbours", RELATIONS[relation]),
        ("Sampling", f"{guarantee['sampling']}, probability {guarantee['sampling_prob']:.4g}"),
        ("Noise multiplier", show(guarantee["noise_multiplier"])),
        ("Clipping norm", show(guarantee["l2_clip_norm"])),
        ("Accountant", guarantee["method"]),
        ("Model", f"{report['model']} ({report['activation']})"),
        ("Time", f"{report['seconds']:.1f} s for {report['steps_in_this_sitting']:,} steps on "
                 f"{report['machine']}"),
        ("jaxdp", report["jaxdp"]),
    ]


def _counted(counts: dict[str, int]) -> list[tuple[str, str]]:
    if not counts:
        return []
    return [(
        "Candidates",
        f"{counts['proposals']:,} evaluated and charged, {counts['accepted']:,} accepted "
        f"({counts['accepted'] / counts['proposals']:.1%}), {counts['forced']:,} of them by force",
    )]


def sections(report: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Headings and items of what a reader must take into account."""
    return [
        ("Could not be verified", report["unverified"] or [_verified(report["guarantee"])]),
        ("Assumed", report["assumed"]),
        ("Outside the guarantee", report["outside_the_guarantee"]),
    ]


def _verified(guarantee: dict[str, Any]) -> str:
    if guarantee["epsilon"] == "inf":
        return "Nothing is proven, so there is nothing to verify."
    return "Nothing: every release was drawn, clipped, noised and charged by one mechanism."
