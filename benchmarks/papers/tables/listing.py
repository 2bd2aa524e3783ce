"""Accuracies of rows down a panel: ours and the paper's."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from benchmarks.papers.rows import ROWS
from benchmarks.papers.tables import rows, style
from benchmarks.papers.tables.rows import Results

# A frame around ours where the two are the same.
_PAPERS = {"marker": "D", "markersize": 11, "zorder": 3}


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
                color=style.look(name)["color"],
                markersize=7,
                capsize=4,
            )
        if printed is not None:
            panel.plot(printed, place, **{**style.mark(name, printed=True), **_PAPERS})
        if not found and name in ROWS:
            style.waiting(panel, place, rows.status(name))
    panel.set_xlabel("test accuracy (%)")
    low, high = panel.get_xlim()
    high = min(high + 0.05 * (high - low), 100.0)
    # Words at the left take less than half of a panel.
    beside = [at for name, at in zip(names, paper, strict=True) if at and not results.runs(name)]
    panel.set_xlim(
        min([low - 0.05 * (high - low), *((at - 0.47 * high) / 0.53 for at in beside)]), high
    )
    style.key(panel, filled="ours")
    look = {**style.mark(names[0], printed=True), **_PAPERS, "color": "0.35"}
    panel.plot([], [], label="the paper's", **look)
