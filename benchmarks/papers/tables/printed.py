"""Every figure that a paper prints, and the rows of ours that answer it, side by side."""

from collections.abc import Sequence

from benchmarks.papers.tables import gaps, rows
from benchmarks.papers.tables.gaps import Entry
from benchmarks.papers.tables.page import Page, Section, TextTable
from benchmarks.papers.tables.printed_adadp import ADADP
from benchmarks.papers.tables.printed_pigdo import PIGDO
from benchmarks.papers.tables.printed_sa import OWN_PROTOCOL, SA
from benchmarks.papers.tables.rows import Results

NAMES: tuple[str, ...] = ()


def page(results: Results) -> Page:
    """A table a paper."""
    return Page(
        "Printed beside ours",
        (
            "Every figure that a paper prints, and the rows of ours that answer it. Ours: one run, "
            "or mean ± standard deviation of several; of single runs a few tenths of a point say "
            "nothing, and the papers print no spread. *Not explained* means just that: no "
            "experiment here tells the cause. The epsilons of [SA-DPSGD's Table 3](table3.md), "
            "the networks [without privacy](not_private.md), [AGD](agd.md) of AdaDp's Figure 2 and "
            "[DP-SBCD's figures]"
            "(../block_coordinate.md#the-papers-figure-2-and-table-1) are on their own pages, "
            "beside the printed ones; the slides print none.",
            "Table 3: [at the paper's noise and charged by its "
            "accountant](table3.md#at-the-papers-noise), DP-SGD with tanh costs up to an "
            "accuracy about what it prints, and so does SA-DPSGD by the paper's protocol if it has "
            "momentum; DP-SGD with ReLU costs more. Where our proven epsilons are smaller, our "
            "accountant and the noise that it allows make them so.",
        ),
        (),
        (
            _section(results, "SA-DPSGD: Table 1 at (3, 1e-5), and Figure 4", SA),
            _section(results, "AdaDp", ADADP),
            _section(results, "PIGDO", PIGDO),
        ),
        "jaxdp reproduce printed",
    )


def _section(results: Results, title: str, entries: Sequence[Entry]) -> Section:
    body = []
    for what, paper, ours, why in entries:
        told = "; ".join(_told(results, before, name) for before, name in ours)
        telling = [
            name
            for _, name in ours
            if not why.startswith(OWN_PROTOCOL) or name.endswith("-accepted")
        ]
        found = any(not name or results.runs(name) for name in telling)
        body.append([what, paper, told, gaps.told(results, why) if found and why else "–"])
    return Section(
        title, (), TextTable(("printed", "by the paper", "ours", "the difference"), body)
    )


def _told(results: Results, before: str, name: str) -> str:
    """A word and what the runs of a row gave."""
    if not name:
        return before
    found = rows.accuracies(results, name)
    share = rows.mean_and_spread(found)[0] if found else rows.MISSING
    return f"{before} {share} `{name}`".strip()
