"""The targets of ``jaxdp reproduce``: their rows, page and plots."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.papers import agd as agd_rows
from benchmarks.papers import census, repeats
from benchmarks.papers import not_private as free
from benchmarks.papers.tables import (
    accepted,
    accountants,
    adadp,
    agd,
    claims,
    figure3,
    left,
    mlp,
    not_private,
    parameters,
    pareto,
    pigdo,
    printed,
    pums,
    pums_groups,
    pums_plot,
    short,
    table1,
    table3,
)
from benchmarks.papers.tables.page import Page, to_markdown
from benchmarks.papers.tables.rows import Results


@dataclasses.dataclass(frozen=True)
class Target:
    """A table or figure of the papers.

    Attributes:
        rows: names of its rows, in the order of running.
        page: makes the page of the rows that there are.
        figures: the plots by file name.
        file: where its rows are kept.
        runs: how often a row is run where nobody says.
    """

    rows: tuple[str, ...]
    page: Callable[[Results], Page]
    figures: dict[str, Callable[[Results], Figure]]
    file: str = "papers.json"
    runs: int = 1


TARGETS: dict[str, Target] = {
    "table1": Target(table1.NAMES, table1.page, {"table1.png": table1.figure}),
    "short": Target(short.NAMES, short.page, {}, runs=repeats.LEAST_RUNS),
    "not_private": Target(
        not_private.NAMES, not_private.page, {}, free.FILE, runs=repeats.LEAST_RUNS
    ),
    "accepted": Target(accepted.NAMES, accepted.page, {"accepted.png": accepted.figure}),
    "table3": Target(
        table3.NAMES, table3.page, {"table3.png": table3.figure, "figure3.png": figure3.figure}
    ),
    "pareto": Target(
        pareto.NAMES, pareto.page, {"pareto.png": pareto.figure}, runs=repeats.LEAST_RUNS
    ),
    "mlp": Target(
        mlp.NAMES,
        mlp.page,
        {
            "mlp.png": mlp.figure,
            "mlp_curves.png": mlp.curves,
            "mlp_epsilon.png": mlp.by_epsilon,
        },
    ),
    "adadp": Target(adadp.NAMES, adadp.page, {"adadp.png": adadp.figure}),
    "agd": Target(
        agd.NAMES,
        agd.page,
        {"agd.png": agd.figure},
        agd_rows.FILE,
        runs=repeats.LEAST_RUNS,
    ),
    "pigdo": Target(pigdo.NAMES, pigdo.page, {"pigdo.png": pigdo.figure}),
    "parameters": Target(parameters.NAMES, parameters.page, {"parameters.png": parameters.figure}),
    "pums": Target(
        tuple(census.ROWS), pums.page, {"pums.png": pums_plot.figure}, pums_groups.FILE, runs=10
    ),
    "accountants": Target(
        (),
        accountants.page,
        {
            "accountants.png": accountants.run_figure,
            "claims_over_truth.png": accountants.claims_figure,
        },
        accountants.FILE,
    ),
    "printed": Target(printed.NAMES, printed.page, {}),
    "left": Target(left.NAMES, left.page, {}),
    "claims": Target(claims.NAMES, claims.page, {"claims.png": claims.figure}),
}


def render(name: str, results: Results, folder: Path) -> list[Path]:
    """Writes ``name``.md and its plots into ``folder``; returns their paths."""
    target = TARGETS[name]
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{name}.md"]
    written[0].write_text(to_markdown(target.page(results)), encoding="utf-8")
    for file, draw in target.figures.items():
        FigureCanvasAgg(draw(results)).print_png(folder / file)
        written.append(folder / file)
    return written
