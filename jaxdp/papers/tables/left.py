"""Rows that were run, rows that are left, and how long each takes, by page."""

from collections.abc import Sequence

from jaxdp.papers.row import Row
from jaxdp.papers.rows import ROWS
from jaxdp.papers.tables import (
    accepted,
    adadp,
    claims,
    mlp,
    parameters,
    pareto,
    pigdo,
    rows,
    short,
    table1,
)
from jaxdp.papers.tables.page import Page, Section, Table
from jaxdp.papers.tables.rows import Results

# Each row stands with the first page that has it.
_PAGES = {
    "table1": table1.NAMES,
    "short": short.NAMES,
    "accepted": accepted.NAMES,
    "pareto": pareto.EVERY,
    "mlp": mlp.NAMES,
    "adadp": adadp.NAMES,
    "parameters": parameters.NAMES,
    "pigdo": pigdo.NAMES,
    "claims": claims.NAMES,
}
NAMES: tuple[str, ...] = ()


def grouped() -> dict[str, list[Row]]:
    """The rows of the queue by the first page that shows them."""
    found: dict[str, list[Row]] = {page: [] for page in _PAGES}
    for name, row in ROWS.items():
        found[next(page for page, names in _PAGES.items() if name in names)].append(row)
    return found


def page(results: Results) -> Page:
    """A table of the pages, and one of the rows that are left."""
    groups = grouped()
    left = {page: [row for row in of if not results.runs(row.name)] for page, of in groups.items()}
    summary = [
        [f"[{page}]({page}.md)", str(len(of)), str(len(of) - len(left[page])), *_told(left[page])]
        for page, of in groups.items()
    ]
    everything = [row for of in left.values() for row in of]
    total = sum(map(len, groups.values()))
    summary.append(["all", str(total), str(total - len(everything)), *_told(everything)])
    body = [
        [f"[{page}]({page}.md)", f"`{row.name}`", _hours(row)]
        for page, of in left.items()
        for row in of
    ]
    return Page(
        "Rows: run, left, and hours each",
        (
            "Made from the queue itself (`jaxdp reproduce list`) and the rows that are there. A "
            "row that several pages show stands with the first. Hours are estimated for two cores "
            "by the time of a few steps; *under ½*: a row of less than half an hour. Rows of "
            "census data, of accountants and without privacy have files of their own and are not "
            "in this queue.",
        ),
        (),
        (
            Section(
                "By page", (), Table(("page", "rows", "run", "left", "hours of the long"), summary)
            ),
            Section(
                f"Left ({rows.MISSING})",
                (),
                Table(("page", "row", "hours"), body or [["–", "none", ""]]),
            ),
        ),
        "jaxdp reproduce left",
    )


def _told(left: Sequence[Row]) -> list[str]:
    """Their number, and the hours of those of half an hour and more."""
    hours = sum(row.hours for row in left)
    brief = sum(1 for row in left if not row.hours)
    return [str(len(left)), f"{hours:g}" + (f", and {brief} rows under ½" if brief else "")]


def _hours(row: Row) -> str:
    return f"{row.hours:g}" if row.hours else "under ½"
