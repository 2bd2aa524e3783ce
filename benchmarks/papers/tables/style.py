"""The style of plots: readable at half size, and without colour vision.

An algorithm has one colour in every picture. Its forms, repaired, as published and with momentum,
differ by dashes and markers. Filled marks are ours, hollow ones a paper's.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec

# Okabe & Ito's colours.
BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, BLACK = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#000000",
)
BROWN, PURPLE, GREY = "#7A4B00", "#5F3B8C", "#8C8C8C"
# From the beginning of a name to a colour, and the markers of its forms: repaired (or the only
# one), as published, with momentum, and both. The longest that fits is taken.
_ALGORITHMS = {
    "dp-sgd": (BLUE, "o"),
    "dp-sgd-relu": (BLUE, "X"),
    "dp-sgd-falling": (BLUE, "X"),
    "tempered-sigmoid": (BLUE, "p"),
    "exp": (SKY, "*"),
    "auto-s": (YELLOW, "s"),
    "sa-dpsgd": (ORANGE, "D^Pv"),
    "adadp": (GREEN, "<>"),
    # Its two components.
    "adadp-step-only": ("#96BF00", "h"),
    "adadp-noise-only": ("#00441B", "dD"),
    "piadam": (PINK, "pH"),
    "pirmsprop": (BROWN, "^s"),
    "piadagrad": (GREY, "v8"),
    "dp-adam": (BLACK, "P"),
    "dp-adam-bc": (PURPLE, "h"),
    "agd": ("#882255", "s"),
    "agd-program": ("#882255", "X"),
    "dp-sbcd": ("#1B2A6B", "v"),
}
_DASHED = ("dp-sgd-relu", "dp-sgd-falling", "agd-program")
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (5, 1, 1, 1)), (0, (1.2, 1)))
# Of the formulas for epsilon: those of a paper have the colour of its algorithm.
FORMULAS: dict[str, dict[str, Any]] = {
    "exact": {"color": BLACK, "linestyle": "-"},
    "rdp": {"color": PURPLE, "linestyle": (0, (1.2, 1))},
    "moments accountant": {"color": BLUE, "linestyle": (0, (4, 1.5))},
    "moments closed form": {"color": SKY, "linestyle": (0, (5, 1, 1, 1))},
    "zCDP": {"color": BROWN, "linestyle": (0, (1.2, 1))},
    "central limit": {"color": GREY, "linestyle": (0, (4, 1.5))},
    "AdaDp Theorem 1": {"color": GREEN, "linestyle": (0, (8, 2))},
    "SA-DPSGD Theorem 1": {"color": ORANGE, "linestyle": (0, (3, 1, 1, 1, 1, 1))},
    "PIGDO MMA": {"color": PINK, "linestyle": "-"},
}
# Of what is no algorithm.
COLOURS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
# What a row's name says before its algorithm.
_SETTING = re.compile(r"^(?:(?:fashion_)?mnist-|cifar10-)?(?:mlp-)?(?:\d+-)?(?:pca-|features-)?")
_HOLLOW: dict[str, Any] = {"fillstyle": "none", "markeredgewidth": 1.8}
_SIZES: dict[Any, Any] = {
    "font.size": 13,
    "axes.titlesize": 14,
    "axes.labelsize": 13,
    "legend.fontsize": 12,
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
}


def look(name: str) -> dict[str, Any]:
    """Colour, dashes and marker of a row or an algorithm, by name as in the rows."""
    name = _SETTING.sub("", name)
    begins = max((of for of in _ALGORITHMS if name.startswith(of)), key=len)
    colour, markers = _ALGORITHMS[begins]
    form = ("as-published" in name) + 2 * ("momentum" in name)
    dashes = _DASHES[1 if begins in _DASHED else form]
    return {"color": colour, "linestyle": dashes, "marker": markers[min(form, len(markers) - 1)]}


def mark(name: str, printed: bool = False) -> dict[str, Any]:
    """A mark of a row or an algorithm: filled, hollow where it is what a paper prints."""
    return {**look(name), "linestyle": "none", "markersize": 9, **(_HOLLOW if printed else {})}


def curve(axes: Axes, points: Iterable[Sequence[float]], name: str, label: str) -> None:
    """A curve in the look of a row or an algorithm, with markers where other curves have none."""
    more: dict[str, Any] = {"markersize": 7, "markevery": (0.05 + 0.03 * len(axes.lines), 0.25)}
    axes.plot(*zip(*points, strict=True), **look(name), label=label, **more)


def from_below(axes: Axes) -> None:
    """Lets the y axis, in percent, begin below all but the first quarter of every curve.

    An arrow stands where a curve comes from below the axis. What is drawn later must not move it.
    """
    shown = [np.asarray(line.get_ydata(), float) for line in axes.lines]
    curves = [line for line, y in zip(axes.lines, shown, strict=True) if len(y) > 2]
    shown = [y[len(y) // 4 :] for y in shown if len(y)]
    if not curves:
        return
    least, most = min(map(np.min, shown)), max(map(np.max, shown))
    room = max(0.04 * (most - least), (3 - (most - least)) / 2)  # no chance as large as an effect
    low, _ = axes.set_ylim(max(least - room, axes.get_ylim()[0]), most + room)
    for line in curves:
        points = axes.transScale.transform(np.column_stack(line.get_data()))
        first = int(np.argmax(points[:, 1] >= low))
        if first:
            (x0, y0), (x1, y1) = points[first - 1 : first + 1]
            at = (x0 + (x1 - x0) * (low - y0) / (y1 - y0), low)
            axes.annotate(
                "",
                (axes.transScale.inverted().transform(at)[0], low),
                (0, 17),
                textcoords="offset points",
                arrowprops={"arrowstyle": "-|>", "color": line.get_color(), "linewidth": 1.8},
                annotation_clip=False,
            )


def key(axes: Axes, **looks: str) -> None:
    """Adds what filled and hollow marks mean to the entries of a legend.

    Args:
        axes: whose legend.
        looks: of "filled" and "hollow", in words.
    """
    for what, label in looks.items():
        more = _HOLLOW if what == "hollow" else {}
        axes.plot([], [], "o", color="0.35", markersize=9, label=label, **more)


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
