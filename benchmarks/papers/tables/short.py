"""Short rows of Table 1's algorithms: mean and spread where there are several runs."""

from benchmarks.papers.rows import ROWS
from benchmarks.papers.tables import phases, rows, table1
from benchmarks.papers.tables.page import Page, Section, TextTable
from benchmarks.papers.tables.rows import Results
from jaxdp.data.specs import spec

DATASETS = ("mnist", "fashion_mnist")
_SETTING = {
    "mnist": "600 steps of 512 (5.1 epochs)",
    "fashion_mnist": "150 steps of 2,048 (5.1 epochs)",
}
NAMES = tuple(
    name
    for dataset in DATASETS
    for algorithm in table1.COLUMNS
    for name in [f"{dataset}-{algorithm}-short"]
    if name in ROWS
)


def page(results: Results) -> Page:
    """One table a data set."""
    return Page(
        "Five epochs at a proven epsilon of 3",
        (
            "The algorithms of [Table 1](table1.md), with as many steps as some minutes allow and "
            "the noise that proves (3, 1e-5) for them. Rates are those of the papers or ours for "
            "40 epochs, not chosen for so few. Runs of a row differ in starting weights, draws and "
            "noise; *single* means one run, so that nothing is known of chance. SA-DPSGD "
            "*repaired* is told of the 5,000 test examples that judged nothing.",
            rows.EPSILONS_LEGEND,
        ),
        (),
        (
            *(_section(results, dataset) for dataset in DATASETS),
            phases.section(results, NAMES),
        ),
        "jaxdp reproduce short",
    )


def _section(results: Results, dataset: str) -> Section:
    body = []
    for algorithm, shown in table1.COLUMNS.items():
        name = f"{dataset}-{algorithm}-short"
        if name not in ROWS:
            continue
        lines = results.runs(name)
        if not lines:
            body.append([shown, f"`{name}`", rows.status(name), *[""] * 4])
            continue
        shares = [line["test_accuracy"] for line in lines]
        proven = max((line["proven_epsilon"] for line in lines), key=float)
        ends = [rows.percent(x) for x in (min(shares), max(shares))] if len(lines) > 1 else ["", ""]
        found = rows.mean_and_spread(shares)
        body.append([shown, f"`{name}`", *found, *ends, rows.shown_epsilon(proven)])
    headers = ("algorithm", "row", "test accuracy", "runs", "worst", "best", "proven ε")
    return Section(f"{spec(dataset).title}, {_SETTING[dataset]}", (), TextTable(headers, body))
