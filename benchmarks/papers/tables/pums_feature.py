"""The slides' column blackfemale: a logistic regression with it beside the same without."""

import statistics

from benchmarks.papers.tables import pums_groups as groups
from benchmarks.papers.tables import rows
from benchmarks.papers.tables.page import Section, TextTable
from benchmarks.papers.tables.rows import Results

# Names the rows as a model does.
MODEL = "logistic-blackfemale"
_OF = ("all", "Black, women", "Black, men", "neither, women", "neither, men")


def section(results: Results) -> Section:
    """Errors of five groups without the column and with it, budget by budget."""
    body = [_cells(results, group, budget) for group in _OF for budget in groups.BUDGETS]
    headers = ("group", "budget", "error without", "error with", "points, with over without")
    return Section(
        "`blackfemale`: the logistic regression with and without it",
        (
            "One more column of the slides is 1 for Black women. It is the product of two that "
            "are there: a logistic regression cannot form it, an MLP can. Gradients are clipped to "
            "4.7, where none of eleven inputs is longer, so that noise is 4 % larger; all else is "
            "equal. Mean ± standard deviation between runs; in brackets Welch's 95 % interval over "
            "the runs, each cell by itself, for these test records.",
        ),
        TextTable(headers, body),
        (_found(results),),
    )


def _cells(results: Results, group: str, budget: str) -> list[str]:
    lines = [groups.found(results, model, budget) for model in ("logistic", MODEL)]
    shown = [group, groups.SHOWN[budget]]
    if not all(lines):
        return [*shown, rows.MISSING, "", ""]
    without, added = (groups.by_group(line)[group] for line in lines)
    errors = [groups.spread(groups.errors(one), digits=1) for one in (without, added)]
    return [*shown, *errors, groups.shift_cell(added, without)]


def _found(results: Results) -> str:
    """A sentence of the accuracy, where nothing is private."""
    lines = [groups.found(results, model, "not-private") for model in ("logistic", MODEL)]
    if not all(lines):
        return "Nothing has been run."
    without, added = (
        100 * statistics.mean(line["test_accuracy"] for line in found) for found in lines
    )
    of_mlp = groups.found(results, "mlp", "not-private")
    mlp = 100 * statistics.mean(line["test_accuracy"] for line in of_mlp) if of_mlp else None
    told = f" (the MLP: {mlp:.2f} %)" if mlp is not None else ""
    return (
        f"Without privacy the accuracy is {without:.2f} % without the column and {added:.2f} % "
        f"with it{told}."
    )
