"""The style of plots: readable at half size, and without colour vision."""

from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec

# Okabe & Ito's colours; markers and dashes differ as well.
BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, BLACK = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#000000",
)
COLOURS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK, "#999999", "#7A4B00", "#5F3B8C")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*", "h")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
_SIZES: dict[Any, Any] = {
    "font.size": 13,
    "axes.titlesize": 14,
    "axes.labelsize": 13,
    "legend.fontsize": 11.5,
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
}


def panels(
    rows: int, columns: int, size: tuple[float, float], **kwargs: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row."""
    with matplotlib.rc_context(_SIZES):
        figure = Figure(figsize=size, dpi=110, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **kwargs).ravel().tolist()
        for each in axes:
            each.grid(alpha=0.3)
            each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def title(axes: Axes, text: str) -> None:
    """Sets the title of the axes, aligned to the left."""
    axes.set_title(text, loc="left", fontweight="bold", fontsize=14)


def legend(figure: Figure, panels: Iterable[Axes], columns: int) -> None:
    """Puts one legend below all panels, one entry for each label, at most ``columns`` in a row."""
    found: dict[str, Artist] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    for fewer in range(columns, 0, -1) if found else ():
        made = figure.legend(
            found.values(), found.keys(), loc="outside lower center", ncols=fewer, fontsize=12
        )
        if fewer == 1 or made.get_window_extent().width <= figure.bbox.width:
            return
        made.remove()


def listed(axes: Axes, names: Sequence[str], labels: bool = True) -> None:
    """Names down the y axis, the first on top."""
    axes.set_yticks(range(len(names)), names if labels else [""] * len(names))
    axes.set_ylim(len(names) - 0.4, -0.6)


def waiting(axes: Axes, place: int, text: str) -> None:
    """Says at the left of a place why there is no mark."""
    axes.annotate(
        text,
        (0.02, place),
        color="0.45",
        fontsize=11,
        va="center",
        xycoords=("axes fraction", "data"),
    )


def nothing_yet(axes: Axes) -> None:
    """Says that no row of the plot has been run, on axes without numbers."""
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, "no row run yet", transform=axes.transAxes, ha="center", color="0.4")


def mean_and_range(values: Iterable[float]) -> tuple[float, float, float]:
    """Mean, and how far the least and the greatest value are from it."""
    found = list(values)
    mean = sum(found) / len(found)
    return mean, mean - min(found), max(found) - mean


def added(figure: Figure, place: SubplotSpec) -> Axes:
    """Axes over a place of the figure's grid, in the same style."""
    with matplotlib.rc_context(_SIZES):
        axes = figure.add_subplot(place)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return axes
