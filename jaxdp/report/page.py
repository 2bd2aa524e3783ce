"""The report of a run as one self-contained web page."""

from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from jaxdp.report import audited, cautions, facts, levels, markdown, plots, roc, svg
from jaxdp.report.subject import measured
from jaxdp.report.words import show_audited, show_delta, show_epsilon, title

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


def to_html(report: dict[str, Any], folder: Path) -> str:
    """report.html from the dictionary of report.json, and of an audit's roc.svg in ``folder``.

    The page holds its plots, follows the reader's colours and asks no other place for anything.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("jaxdp.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(_shown(report, folder))


def _shown(report: dict[str, Any], folder: Path) -> dict[str, Any]:
    guarantee, claim, row = report["guarantee"], report["claim"], report.get("audited")
    return {
        "title": title(report),
        "date": report.get("date"),
        "colours": Markup(svg.style()),
        "measured": _measured(report),
        "compared": levels.sentences(report),
        "epsilon": _epsilon(guarantee["epsilon"]),
        "weak": any(each["about"] == "epsilon" for each in report.get("warnings", ())),
        "delta": show_delta(guarantee["delta"]),
        "neighbours": facts.neighbours(report),
        "claim": claim and {**claim, "shown": show_epsilon(claim["epsilon"])},
        "warnings": cautions.shown(report),
        "judged_by": report["judged_by"],
        "meaning": markdown.meaning(report),
        "attack": markdown.attack(report),
        "gaussian": markdown.gaussian(report),
        "audited": row
        and {
            "table": audited.table(row),
            "how": audited.how(row),
            "verdict": audited.verdict(row),
            "shown": show_audited(row["audited"]),
            "confidence": f"{row['confidence']:.0%}",
            "what": row.get("what", audited.TINY),
        },
        "limits": _limits(report),
        "roc": _roc(row, folder),
        "progress": _progress(report),
        "groups": report.get("facts", ()),
        "code": facts.CODE,
        "sections": markdown.sections(report),
        "glossary": markdown.GLOSSARY,
        "version": report["jaxdp"],
    }


def _epsilon(epsilon: float | str) -> str:
    return "infinite" if epsilon == "inf" else show_epsilon(epsilon)


def _limits(report: dict[str, Any]) -> list[dict[str, Any]]:
    if not report.get("tradeoff"):
        return []
    return [_plot("tradeoff", plots.tradeoff(report["tradeoff"]), _TRADEOFF)]


def _measured(report: dict[str, Any]) -> dict[str, str] | None:
    found = measured(report)
    if found is None:
        return None
    return {"name": found.name, "shown": found.shown(float(report[found.column]))}


def _progress(report: dict[str, Any]) -> list[dict[str, Any]]:
    found, caption = measured(report), _PROGRESS
    if found is not None:
        caption = _BOTH.format(name=found.name, percent=" in percent" if found.share else "")
    return [
        _plot("progress", plots.accuracy_and_epsilon(report), caption),
        _plot("norm", plots.update_norm(report), _NORM),
    ]


def _plot(name: str, figure: Any, caption: str) -> dict[str, Any]:
    return {"image": Markup(svg.inline(figure, name, caption)), "caption": caption}


def _roc(row: dict[str, Any] | None, folder: Path) -> list[dict[str, Any]]:
    path = folder / "roc.svg"
    if not row or not path.exists():
        return []
    image = Markup(svg.embedded(path.read_text(encoding="utf-8")))
    return [{"image": image, "caption": roc.WORDS}]
