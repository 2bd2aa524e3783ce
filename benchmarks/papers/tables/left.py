"""Rows that were run, rows that are left, and how long each takes, by page."""

from collections.abc import Sequence

from benchmarks.papers import cost, order, repeats
from benchmarks.papers.row import Row
from benchmarks.papers.rows import AVERAGED
from benchmarks.papers.tables import (
    accepted,
    adadp,
    claims,
    mlp,
    parameters,
    pareto,
    phases,
    pigdo,
    rows,
    short,
    table1,
)
from benchmarks.papers.tables.page import Page, Section, TextTable
from benchmarks.papers.tables.rows import Results

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
    for name, row in order.ordered().items():
        found[next(page for page, names in _PAGES.items() if name in names)].append(row)
    return found


def missing(results: Results, row: Row) -> int:
    """The number of runs that are left, those included that are wanted again."""
    return max(0, row.runs - sum(not phases.before(line) for line in results.runs(row.name)))


def why(results: Results, row: Row) -> str:
    """The reason for which runs of a row are left."""
    found = results.runs(row.name)
    if any(map(phases.before, found)):
        return phases.BEFORE
    if found:
        few = "as the paper averages" if row.runs == AVERAGED else "for mean and spread"
        return f"{row.runs} wanted, {few}"
    return (
        f"{cost.LONG / 60:.0f} hours or more of two cores" if cost.long(row) else "not reached yet"
    )


def page(results: Results) -> Page:
    """A table of the pages, and one of the rows that are left, in the order of running."""
    groups = grouped()
    summary = [
        [f"[{page}]({page}.md)", *_told(results, of), *_ran(results, of), _left(results, of)]
        for page, of in groups.items()
    ]
    every = [row for of in groups.values() for row in of]
    summary.append(["all", *_told(results, every), *_ran(results, every), _left(results, every)])
    page_of = {row.name: page for page, of in groups.items() for row in of}
    body = [
        [
            order.GROUPS[order.group(row)],
            f"`{name}`",
            f"[{page_of[name]}]({page_of[name]}.md)",
            str(missing(results, row)),
            cost.shown(row),
            why(results, row),
        ]
        for name, row in order.ordered().items()
        if missing(results, row)
    ]
    headers = (
        *("page", "rows", "run", "more runs wanted", "not run"),
        *("hours of the runs that ended", "on a GPU", "hours left"),
    )
    return Page(
        "Rows: run, left, and time each",
        (
            "Made from the queue itself (`jaxdp reproduce list`) and the rows that are there. A "
            "row that several pages show stands with the first. Times are estimates for two cores "
            "that other work shares, by measured steps of rows like it "
            "(`benchmarks.papers.cost`): 204 runs took 0.14 to 1.8 times their estimate, half of "
            "them less than a third, on a core each. "
            "What ended is told by its own clock, of a resumed run since it was resumed; *on a "
            "GPU* apart, whose hours say nothing of two cores. "
            f"The algorithms that SA-DPSGD's Table 1 prints are wanted {AVERAGED} times, for its "
            "figures are averages of five; the rows of [short](short.md) and the repeated ones of "
            f"[pareto](pareto.md) {repeats.LEAST_RUNS} times, the others once. Rows of census "
            "data, of accountants and without privacy have files of their own and are not in this "
            "queue, nor are the experiments of `python -m benchmarks.printed_gaps`. "
            f"*{phases.BEFORE.capitalize()}*: AdaDp's runs that [a mend](../papers.md"
            "#adadps-threshold) has made old (`jaxdp reproduce run --again NAME`).",
            "Taken out, for they would tell nothing of the paper: 13 sweeps of SA-DPSGD [without "
            "momentum](parameters.md), an estimated 5 hours of two cores. Never in it: what the "
            "texts do not define or leave to the reader ([printed](printed.md) says so of each "
            "figure).",
        ),
        (),
        (
            Section("By page", (), TextTable(headers, summary)),
            Section(
                f"Left ({rows.MISSING}, or not often enough), in the order of running",
                (),
                TextTable(
                    ("group", "row", "page", "runs left", "time of a run", "why"),
                    body or [["–", "none", "", "", "", ""]],
                ),
            ),
        ),
        "jaxdp reproduce left",
    )


def _told(results: Results, of: Sequence[Row]) -> list[str]:
    """Numbers of rows: all, those with all their runs, with some, with none."""
    whole = sum(not missing(results, row) for row in of)
    none = sum(not results.runs(row.name) for row in of)
    return [str(number) for number in (len(of), whole, len(of) - whole - none, none)]


def _ran(results: Results, of: Sequence[Row]) -> list[str]:
    """The hours of all their runs, without a GPU and on one."""
    found = [line for row in of for line in results.runs(row.name)]
    apart = [
        [line["seconds"] / 60 for line in found if rows.on_cpu(line) is cpu]
        for cpu in (True, False)
    ]
    return [_hours(sum(minutes)) for minutes in apart]


def _left(results: Results, of: Sequence[Row]) -> str:
    """The estimated hours of what is left."""
    return _hours(sum(cost.minutes(row) * missing(results, row) for row in of))


def _hours(minutes: float) -> str:
    return f"{minutes / 60:.1f}" if minutes else "0"
