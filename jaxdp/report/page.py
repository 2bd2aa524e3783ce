"""The report of a run as one self-contained web page."""

import base64
from pathlib import Path
from typing import Any

import jinja2

from jaxdp import accounting as acc
from jaxdp.report import markdown
from jaxdp.report.words import RELATIONS, show_audited, show_delta, show_epsilon, title

_PLOTS = {
    "accuracy_and_epsilon.png": "Test accuracy in percent (left axis) and the proven epsilon of "
    "everything released so far (right axis), by step.",
    "update_norm.png": "Euclidean norm of the noisy update, mean of each block of steps.",
    "roc.png": "The attack's errors, and the region that the proven epsilon leaves to any attack.",
}


def to_html(report: dict[str, Any], folder: Path) -> str:
    """report.html from the dictionary of report.json and the plots in ``folder``.

    The page holds its images and asks no other place for anything.
    """
    loader = jinja2.PackageLoader("jaxdp.report", "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html.jinja").render(_shown(report, folder))


def _shown(report: dict[str, Any], folder: Path) -> dict[str, Any]:
    guarantee, claim = report["guarantee"], report["claim"]
    shown_claim = claim and {**claim, "shown": show_epsilon(claim["epsilon"])}
    audited = report.get("audited")
    return {
        "audited": audited and _audited(audited),
        "title": title(report),
        "accuracy": f"{report['test_accuracy']:.2%}",
        "epsilon": show_epsilon(guarantee["epsilon"]),
        "delta": show_delta(guarantee["delta"]),
        "neighbours": RELATIONS[acc.Relation(guarantee["relation"])],
        "claim": shown_claim,
        "warnings": [text for text in (report["label"], report["judged_by"]) if text],
        "released": guarantee["in_words"],
        "plots": [
            {"source": _embedded(folder / name), "caption": caption}
            for name, caption in _PLOTS.items()
            if (folder / name).exists()
        ],
        "rows": markdown.rows(report)[1:],
        "sections": markdown.sections(report),
        "version": report["jaxdp"],
    }


def _audited(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "what": markdown.TINY, **row, "shown": show_audited(row["audited"]),
        "shown_proven": show_epsilon(row["proven"]),
    }


def _embedded(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
