"""The report of a run as one self-contained web page."""

import base64
import math
from pathlib import Path
from typing import Any

import jinja2

from jaxdp.runs.report import audited, cautions, facts, levels, markdown, plots
from jaxdp.runs.report.schema import Report
from jaxdp.runs.report.words import encodable, show_audited, show_delta, show_epsilon

_TRADEOFF = (
    "The most that any attack can achieve: true positives against false positives, both on "
    "logarithmic axes; nothing is possible in the shaded region. The dots are the rates of the "
    "table."
)
_PROGRESS = "The proven epsilon of everything released so far, by step."
_BOTH = (
    "{name}{percent} (above) and the proven epsilon of everything released so far (below), by step."
)
_NORM = "Euclidean norm of the noisy update, mean of each block of steps."


def to_html(report: Report, folder: Path) -> str:
    """The text of report.html, with an audit's roc.svg from ``folder``.

    The page holds its plots, on white, follows the reader's colours in all else and asks no other
    place for anything.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("jaxdp.runs.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.jinja").render(_template_values(report, folder))
    return encodable(page)


def _template_values(report: Report, folder: Path) -> dict[str, Any]:
    """The names that the template of the page uses."""
    guarantee, claim, row = report.guarantee, report.claim, report.audited

    # The plots: limits of any attack, the audit's own (a file of the folder), the progress.
    found, limits, attacked, caption = report.measured, [], [], _PROGRESS
    if report.tradeoff is not None:
        limits = [_plot(plots.svg_text(plots.tradeoff(report.tradeoff)), _TRADEOFF)]
    if row and (folder / "roc.svg").exists():
        text = (folder / "roc.svg").read_text(encoding="utf-8")
        attacked = [_plot(text, plots.ROC_CAPTION)]
    if found is not None:
        caption = _BOTH.format(name=found.name, percent=" in percent" if found.share else "")
    progress = [
        _plot(plots.svg_text(plots.accuracy_and_epsilon(report)), caption),
        _plot(plots.svg_text(plots.update_norm(report)), _NORM),
    ]

    # Words and numbers as the template shows them; it escapes whatever may be a caller's.
    return {
        "title": report.title,
        "date": report.date,
        "measured": None
        if found is None or report.value is None
        else {"name": found.name, "shown": found.shown(report.value)},
        "compared": levels.describe_levels(report),
        "epsilon": "infinite" if math.isinf(guarantee.epsilon) else show_epsilon(guarantee.epsilon),
        "weak": any(each.about == "epsilon" for each in report.warnings),
        "delta": show_delta(guarantee.delta),
        "provided": guarantee.provided,
        "neighbours": facts.describe_relation(report),
        "claim": claim and {"shown": show_epsilon(claim.epsilon), "verdict": claim.verdict},
        "warnings": cautions.all_warnings(report),
        "judged_by": report.judged_by,
        "meaning": markdown.meaning(report),
        "attack": markdown.attack_limits(report),
        "gaussian": markdown.describe_gaussian(report),
        "audited": row
        and {
            "table": audited.table(row),
            "advice": audited.advice(row),
            "how": audited.describe_audit(row),
            "verdict": audited.verdict(row),
            "shown": show_audited(row.audited),
            "most": None if row.reachable is None else f"{row.reachable:.2f}",
            "confidence": f"{row.confidence:.0%}",
            "what": row.what,
        },
        "limits": limits,
        "roc": attacked,
        "progress": progress,
        "groups": report.facts,
        "code": facts.CODE,
        "sections": markdown.sections(report),
        "glossary": markdown.glossary(report),
        "version": report.jaxdp,
    }


def _plot(svg: str, caption: str) -> dict[str, str]:
    """An SVG as the address of an image that holds it, so that the page asks for no other file."""
    data = base64.b64encode(svg.encode()).decode()
    return {"image": f"data:image/svg+xml;base64,{data}", "caption": caption}
