"""AGD of AdaDp's Figure 2: accuracy, and after how many steps its budget is spent."""

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers import agd
from benchmarks.papers.rows import MLP_SETTINGS
from benchmarks.papers.tables import rows, style
from benchmarks.papers.tables.page import Page, Plot, Section, TextTable
from benchmarks.papers.tables.rows import Results

NAMES = tuple(agd.ROWS)
SHOWN = {"equal": "AGD, equal budgets", "program": "AGD, its authors' budgets"}
# AdaDp, the text to Figure 2: points of AdaDp over AGD, and over DpSgd.
PRINTED = {8.0: (8.8, 5.9), 4.0: (9.5, 2.7), 2.0: (6.7, 1.0)}


def page(results: Results) -> Page:
    """One table."""
    return Page(
        "AdaDp's Figure 2: AGD (Lee and Kifer 2018)",
        (
            "MNIST, DP-PCA-60-1000-10, lots of 600, clipping norm 4. AGD takes a noisy gradient, "
            "then chooses privately among 20 step sizes along it and none. None: the direction is "
            "too noisy, is averaged with another noisy gradient, and later ones get more budget. "
            "AdaDp's paper states neither budgets nor step sizes; they are those of the authors' "
            "program: the budget grows by a tenth, step sizes reach to 2 at first, a record's loss "
            "is cut at 3. A choice's share of the budget is open: *equal* gives it the ρ of the "
            "first gradient, *its authors'* the epsilon for which that gradient's noise is the "
            "classical one (23 times the ρ).",
            "**What is proven.** Noise and the number of steps follow earlier releases, so a Rényi "
            "filter admits each one, on a Poisson draw of its own, until the epsilon that DP-SGD "
            "proves at the same noise and epochs is spent; DP-PCA is charged first. The choice is "
            "permute-and-flip in whole numbers. The program's own choice, the least of loss *plus* "
            "exponential noise, is not what its budget pays for: with 21 candidates a record can "
            "change a probability by e^(20 ε), where e^ε is charged "
            "([proof](../algorithms.md#agds-choice-of-a-step-size)). It also takes the candidate "
            "before the chosen one. Neither is copied.",
            "**What comes out.** As AdaDp's paper says, the budget is spent after few epochs, and "
            "accuracy stays behind DP-SGD's of the whole run; after the same few epochs it is "
            "level (noise 8) or ahead (noise 4).",
        ),
        (
            Plot(
                "agd.png",
                "Test accuracy by epochs, all runs: AGD ends where its budget does; the others "
                "are rows of [mlp](mlp.md), from their first evaluation on.",
            ),
        ),
        (_table(results),),
        "jaxdp reproduce agd",
    )


def _table(results: Results) -> Section:
    kept = results.read(agd.FILE) or []
    body = []
    for name, row in agd.ROWS.items():
        lines = [line for line in kept if line["name"] == name]
        beside = [rows.percent(line["test_accuracy"]) for line in results.runs(row.beside)]
        over_agd, over_sgd = PRINTED[row.noise]
        printed = f"{over_sgd - over_agd:+.1f}"
        first = [f"{row.noise:g}", SHOWN[row.split], f"`{name}`"]
        found = _found(lines) if lines else [rows.MISSING, *[""] * 5]
        body.append([*first, *found, ", ".join(beside) or rows.MISSING, printed])
    headers = (
        *("noise", "algorithm", "row", "test accuracy", "runs", "steps", "directions refused"),
        *("last noise", "proven ε", "DP-SGD at that ε", "printed: AGD over DpSgd, points"),
    )
    return Section("Accuracy when the budget is spent, delta 1e-5", (), TextTable(headers, body))


def _found(lines: list[dict[str, float]]) -> list[str]:
    def mean(key: str) -> float:
        return statistics.mean(line[key] for line in lines)

    return [
        *rows.mean_and_spread([line["test_accuracy"] for line in lines]),
        f"{mean('steps'):.0f}",
        f"{mean('directions_refused'):.0f}",
        f"{mean('last_noise_multiplier'):.2f}",
        rows.shown_epsilon(max(line["proven_epsilon"] for line in lines)),
    ]


def figure(results: Results) -> Figure:
    """A panel a noise multiplier."""
    kept = results.read(agd.FILE) or []
    made, axes = style.panels(1, 3, (12, 5.2), sharey=True)
    for panel, (noise, *_) in zip(axes, MLP_SETTINGS, strict=True):
        for split, shown in SHOWN.items():
            name = agd.AgdRow(noise, split).name
            for line in kept:
                if line["name"] == name:
                    _curve(panel, line["curve"], f"agd-{split}", shown)
        for shown, name in (("DP-SGD", "dp-sgd"), ("AdaDp, as published", "adadp-as-published")):
            for row in results.runs(f"mnist-mlp-pca-{name}-noise-{noise:g}"):
                _curve(panel, row["curve"], name, shown)
        panel.set_xscale("log")
        panel.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
        panel.set_xlabel("epochs (log scale)")
        style.title(panel, f"noise {noise:g}")
    axes[0].set_ylabel("test accuracy (%)")
    style.legend(made, axes, 4)
    return made


def _curve(panel: Axes, curve: Sequence[Sequence[Any]], name: str, shown: str) -> None:
    """From the first evaluation after the start, which a log scale has no place for."""
    after = [(at[0] / 100, 100 * at[-1]) for at in curve if at[0]]
    style.curve(panel, after, name, shown)
