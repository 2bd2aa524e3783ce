"""Accuracies of rows down a panel: ours and the paper's."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from benchmarks.papers.rows import ROWS
from benchmarks.papers.tables import rows, style
from benchmarks.papers.tables.rows import Results


def draw(
    panel: Axes, results: Results, names: Sequence[str], paper: Sequence[float | None]
) -> None:
    """One place a row: ours filled, the paper's hollow; why there is no mark where there is none.

    Args:
        panel: matplotlib's axes.
        results: the finished rows.
        names: of the rows, from the top.
        paper: what the paper prints for each, in percent.
    """
    for place, (name, printed) in enumerate(zip(names, paper, strict=True)):
        found = rows.accuracies(results, name)
        if found:
            mean, low, high = style.mean_and_range([100 * value for value in found])
            panel.errorbar(
                mean,
                place,
                xerr=[[low], [high]],
                fmt="o",
                color=style.BLUE,
                markersize=9,
                capsize=4,
                label="ours",
            )
        if printed is not None:
            panel.plot(
                printed,
                place,
                "D",
                color=style.ORANGE,
                markersize=8,
                fillstyle="none",
                markeredgewidth=1.8,
                label="paper",
            )
        if not found and name in ROWS:
            style.waiting(panel, place, rows.status(name))
    panel.set_xlabel("test accuracy (%)")
    low, high = panel.get_xlim()
    panel.set_xlim(low - 0.5 * (high - low), min(high, 100.0))  # room for the words
