"""AdaDp's local phase: for every row of a page, when it begins, and what noise alone does."""

from collections.abc import Sequence

from benchmarks.papers.adadp_phase import ALGORITHMS
from benchmarks.papers.row import ResultRow
from benchmarks.papers.rows import ROWS
from benchmarks.papers.tables.page import Section, TextTable
from benchmarks.papers.tables.rows import Results

HEADERS = (
    "row",
    "run",
    "begins at step",
    "local steps",
    "noise alone: begins at",
    "noise alone: local steps",
    "what opens it",
)
BEFORE = "of before the threshold was scaled"


def section(results: Results, names: Sequence[str]) -> Section:
    """The runs of repaired AdaDp among the rows of a page.

    Args:
        results: the finished rows.
        names: of the page's rows.
    """
    found = [
        line
        for name in names
        if ROWS[name].given.get("algorithm") in ALGORITHMS
        for line in results.runs(name)
    ]
    return Section(
        "When AdaDp's sides differ by coordinate",
        (
            "Repaired AdaDp clips to equal sides until the sizes √(L · E′) of its coordinates have "
            "a variance above G = 1e-6 (the *local phase*). *Noise alone*: the same algorithm, "
            "noise and steps on as many gradients of zero. Where that opens the phase at the same "
            "step, noise opens it, and not what the gradients tell. "
            f"*{BEFORE.capitalize()}*: G was compared with the variance of √E′ of the mean, for "
            "which it is L times too large.",
        ),
        TextTable(HEADERS, [_cells(line) for line in found]),
    )


def before(line: ResultRow) -> bool:
    """True of a run whose threshold was not scaled yet: it is wanted again."""
    return ROWS[line["name"]].given.get("algorithm") in ALGORITHMS and "local_began" not in line


def _cells(line: ResultRow) -> list[str]:
    first = [f"`{line['name']}`", str(line.get("run", 1))]
    if before(line):
        return [*first, BEFORE, *[""] * 4]
    began, alone = line["local_began"], line["noise_began"]
    return [
        *first,
        _step(began),
        f"{100 * line['local_share']:.1f} %",
        _step(alone),
        f"{100 * line['noise_share']:.1f} %",
        _opened(began, alone),
    ]


def _step(number: int) -> str:
    return f"{number:,}" if number else "never"


def _opened(began: int, alone: int) -> str:
    if not began:
        return "nothing"
    return "noise alone" if 0 < alone <= began else "gradients"
