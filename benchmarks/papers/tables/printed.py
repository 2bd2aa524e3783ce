"""Every figure that a paper prints, and the rows of ours that answer it, side by side."""

from collections import Counter
from collections.abc import Sequence

from benchmarks.papers.tables import cells
from benchmarks.papers.tables.cells import Cell
from benchmarks.papers.tables.page import Page, Section, TextTable
from benchmarks.papers.tables.printed_adadp import ADADP
from benchmarks.papers.tables.printed_pigdo import PIGDO
from benchmarks.papers.tables.printed_sa import SA
from benchmarks.papers.tables.rows import Results

NAMES: tuple[str, ...] = ()
PAPERS = {"SA-DPSGD": SA, "AdaDp": ADADP, "PIGDO": PIGDO}


def page(results: Results) -> Page:
    """The count, and a table a paper."""
    deviation, repeated = cells.spread(results)
    return Page(
        "Printed beside ours",
        (
            "Every figure that a paper prints, each on its own, and the rows of ours that answer "
            "it. Ours: one run, or mean ± standard deviation of several. The epsilons of "
            "[SA-DPSGD's Table 3](table3.md) (36 figures) and [DP-SBCD's Table 1]"
            "(../block_coordinate.md#the-papers-figure-2-and-table-1) (20) are on their own "
            "pages, beside the printed ones, and are not counted here; the slides print none.",
            "**The margin.** Two single runs differ by more than 2√2 standard deviations once in "
            f"twenty; the median deviation of the {repeated} rows with three or more runs is "
            f"{deviation:.2f} points, so that {cells.margin(results):g} points count as met, and "
            "√2 as many of a difference of two. Where a row has three runs or more, twice the "
            "standard error of its mean and of a mean of five counts if it is more. An epsilon "
            "counts as met where the accuracy is reached at no more than a tenth above it, what is "
            "computed where it rounds to the printed figure, words where they hold of ours.",
            "Table 3: [at the paper's noise and charged by its "
            "accountant](table3.md#at-the-papers-noise), DP-SGD with tanh costs up to an "
            "accuracy about what it prints, and so does SA-DPSGD by the paper's protocol if it has "
            "momentum; DP-SGD with ReLU costs more. Where our proven epsilons are smaller, our "
            "accountant and the noise that it allows make them so.",
        ),
        (),
        (
            Section("The count", (), _count(results)),
            *(_section(results, paper, of) for paper, of in PAPERS.items()),
        ),
        "jaxdp reproduce printed",
    )


def _count(results: Results) -> TextTable:
    counts = {paper: Counter(cell.verdict(results) for cell in of) for paper, of in PAPERS.items()}
    body = [
        [verdict, means, *(str(of[verdict]) for of in counts.values()), str(_all(counts, verdict))]
        for verdict, means in cells.VERDICTS.items()
    ]
    totals = [len(of) for of in PAPERS.values()]
    body.append(["all", "", *map(str, totals), str(sum(totals))])
    return TextTable(("figures", "which means", *PAPERS, "all"), body)


def _all(counts: dict[str, Counter[str]], verdict: str) -> int:
    return sum(of[verdict] for of in counts.values())


def _section(results: Results, title: str, of: Sequence[Cell]) -> Section:
    headers = ("printed", "by the paper", "ours", "which is", "by what, or what was tried")
    return Section(title, (), TextTable(headers, [cell.line(results) for cell in of]))
