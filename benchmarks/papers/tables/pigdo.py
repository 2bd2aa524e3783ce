"""PIGDO's Figure 7, small: parameters of its three algorithms moved one at a time."""

from matplotlib.figure import Figure

from benchmarks.papers import pigdo_sweeps as pigdo
from benchmarks.papers.tables import rows, style
from benchmarks.papers.tables.page import Page, Plot, Section, TextTable
from benchmarks.papers.tables.rows import Results

NAMES = tuple(row.name for row in pigdo.ROWS)

# Section 5.2's words on its own figure; it prints no numbers but the first.
_PRINTED = {
    "hidden": "The paper: the accuracy changes by at most 3 points from 200 to 1,600 units.",
    "l2_clip_norm": "The paper: PIAdagrad gains by a larger C, the two others change a little.",
    "batch_size": "The paper: PIAdam is ahead of the two others at every lot size.",
    "noise_multiplier": "The paper: a large impact, as noise buys epochs at a given budget; here "
    "the epochs are given.",
}


def page(results: Results) -> Page:
    """A table for each parameter."""
    return Page(
        "PIGDO's Figure 7, small: its parameters",
        (
            "MNIST, 784-1000-10, one parameter moved at a time from the values of PIGDO's Section "
            f"5.2 (1,000 hidden units, C 4, lot 600, σ 4), rate 0.001, repaired. **{pigdo.EPOCHS} "
            "epochs** instead of the 100 that the text gives at this noise, so that accuracies are "
            "of the beginning of a training and do not compare with the paper's; one run each. The "
            "range of the hidden units is the paper's, the other values are ours: the text states "
            "none. Noise is given, not a budget: the proven epsilon follows.",
            "Choosing parameters by looking at such tables costs privacy that no column counts.",
            rows.EPSILONS_LEGEND,
        ),
        (
            Plot(
                "pigdo.png",
                f"Test accuracy in percent after {pigdo.EPOCHS} epochs against one parameter (log "
                "scales).",
            ),
        ),
        tuple(_section(results, parameter) for parameter in pigdo.VALUES),
        "jaxdp reproduce pigdo",
    )


def _section(results: Results, parameter: str) -> Section:
    body = [
        [shown, f"{value:g}", *line]
        for algorithm, shown in pigdo.ALGORITHMS.items()
        for value in pigdo.VALUES[parameter]
        for line in rows.lines(results, pigdo.row_name(algorithm, parameter, value))
    ]
    told = pigdo.SHOWN[parameter]
    return Section(
        told[0].upper() + told[1:], (), TextTable(("algorithm", told, *rows.COLUMNS), body)
    )


def figure(results: Results) -> Figure:
    """A panel for each parameter, a curve for each algorithm."""
    drawn, axes = style.panels(1, 4, (12, 4.6), sharey=True)
    for panel, (parameter, values) in zip(axes, pigdo.VALUES.items(), strict=True):
        for algorithm, shown in pigdo.ALGORITHMS.items():
            points = [
                (value, 100 * share)
                for value in values
                for share in rows.accuracies(results, pigdo.row_name(algorithm, parameter, value))
            ]
            if points:
                look = style.look(algorithm)
                panel.plot(*zip(*points, strict=True), markersize=8, label=shown, **look)
        if not panel.lines:
            style.nothing_yet(panel)
        panel.set_xscale("log")
        panel.set_xticks(values, [f"{value:g}" for value in values])
        panel.minorticks_off()
        panel.set_xlim(values[0] / 1.2, values[-1] * 1.2)
        panel.set_xlabel(pigdo.SHOWN[parameter])
    axes[0].set_ylabel("test accuracy (%)")
    style.legend(drawn, axes, 3)
    return drawn
