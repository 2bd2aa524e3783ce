"""Draws the accuracies of the best recipes beside published ones, and prints their table.

python -m benchmarks.accuracy_page

Read from ``benchmarks/results/accuracy.json``, which ``benchmarks.accuracy`` writes, and from
``published.json`` beside it. Writes ``docs/images/accuracy.png`` and ``accuracy_dark.png``.
"""

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from benchmarks.accuracy import RESULTS

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SHOWN = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
EPSILONS = (0.5, 1, 2, 3, 5, 8)
MARKS = {
    "Tramèr and Boneh 2021": "D",
    "De et al. 2022": "s",
    "DP-RandP 2023": "^",
    "DP-Mix 2023": "v",
}


class Palette(NamedTuple):
    """Colours of one picture, its marks' in the order of ``MARKS``; each has a contrast of 4.5."""

    ground: str
    ink: str
    ours: str
    marks: tuple[str, str, str, str]


PICTURES = {
    "accuracy.png": Palette(
        "white", "#1b1f24", "#0072b2", ("#b34700", "#00734f", "#a3326f", "#6b5b00")
    ),
    "accuracy_dark.png": Palette(
        "#0d1117", "#e6edf3", "#56b4e9", ("#ff9e57", "#3ddba4", "#f29ac9", "#e8d44d")
    ),
}


def rows(dataset: str) -> tuple[dict[float, list[float]], float | None]:
    """Accuracies by epsilon, and without privacy, in percent."""
    found = [r for r in json.loads(RESULTS.read_text(encoding="utf-8")) if r["dataset"] == dataset]
    private = {r["epsilon"]: r["accuracy"] for r in found if r["epsilon"] is not None}
    plain = [r["accuracy"][0] for r in found if r["epsilon"] is None]
    return dict(sorted(private.items())), plain[0] if plain else None


def published(dataset: str) -> list[dict[str, Any]]:
    """Published results on a data set without public data, delta 1e-5, accuracies in percent.

    Those with a number of runs were run again, in one study: DP-Mix by two of its authors, the
    others by others than their authors.
    """
    path = RESULTS.parent / "published.json"
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return [row for row in found if row["dataset"] == dataset]


def shown(runs: list[float] | None) -> str:
    """Mean and standard deviation, or the single run."""
    if not runs:
        return "not run"
    mean = f"{statistics.mean(runs):.2f}"
    return f"{mean} ± {statistics.stdev(runs):.2f}" if len(runs) > 1 else mean


def panel(axes: Axes, dataset: str, colours: Palette) -> None:
    private, plain = rows(dataset)
    means = [statistics.mean(runs) for runs in private.values()]
    line: dict[str, Any] = {"color": colours.ours, "linewidth": 3.5, "markersize": 10}
    axes.plot(list(private), means, "o-", **line, label="jaxdp, proven")
    if plain is not None:
        axes.axhline(
            plain, color=colours.ink, linestyle=":", linewidth=2.5, label="jaxdp, not private"
        )
    for (method, mark), colour in zip(MARKS.items(), colours.marks, strict=True):
        style: dict[str, Any] = {"color": colour, "markersize": 12, "markeredgewidth": 2}
        axes.plot([], [], mark, label=method, **style)
        for row in published(dataset):
            if row["method"] == method:
                fill = colour if row["runs"] else colours.ground
                at = row["epsilon"], row["accuracy"]
                axes.plot(*at, mark, **style, markerfacecolor=fill, zorder=3)
    axes.set_title(SHOWN[dataset], color=colours.ink, pad=12)
    axes.set(xscale="log", facecolor=colours.ground)
    axes.set_xlim(0.42, 9.6)
    axes.xaxis.set_major_locator(FixedLocator(EPSILONS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.tick_params(colors=colours.ink)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(colours.ink)


def picture(colours: Palette) -> Figure:
    """The three panels, in letters that are read at a third of their size."""
    figure = Figure((12.8, 6.4), layout="constrained", facecolor=colours.ground)
    for axes, dataset in zip(figure.subplots(1, 3), SHOWN, strict=True):
        panel(axes, dataset, colours)
    figure.axes[0].set_ylabel("test accuracy (%)", color=colours.ink)
    figure.axes[1].set_xlabel("epsilon at delta 1e-5 (smaller is more private)", color=colours.ink)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    legend: dict[str, Any] = {"loc": "outside lower center", "ncols": 3, "frameon": False}
    figure.legend(handles, labels, labelcolor=colours.ink, handlelength=1.5, **legend)
    return figure


def table() -> list[str]:
    """Lines of Markdown: accuracy by epsilon and data set, in percent."""
    lines = ["| epsilon | " + " | ".join(SHOWN.values()) + " |", "|---|---|---|---|"]
    for epsilon in EPSILONS:
        cells = [shown(rows(dataset)[0].get(epsilon)) for dataset in SHOWN]
        lines.append(f"| {epsilon:g} | " + " | ".join(cells) + " |")
    plain = [rows(dataset)[1] for dataset in SHOWN]
    lines.append("| without privacy | " + " | ".join(str(p or "not run") for p in plain) + " |")
    return lines


def beside() -> list[str]:
    """Lines of Markdown: CIFAR-10, ours and published, an epsilon a column; *: not run again."""
    theirs = published("cifar10")
    found = {"jaxdp": {epsilon: shown(runs) for epsilon, runs in rows("cifar10")[0].items()}}
    for row in theirs:
        again = f"{row['accuracy']:.2f} ± {row['spread']:.2f}" if row["runs"] else None
        name = f"{row['method']}, {row['model']}" if "WRN" in row["model"] else row["method"]
        found.setdefault(name, {})[row["epsilon"]] = again or f"{row['accuracy']} *"
    columns = sorted({row["epsilon"] for row in theirs})
    lines = [f"| epsilon | {' | '.join(map(str, columns))} |", "|---" * (len(columns) + 1) + "|"]
    for name, cells in found.items():
        lines.append(f"| {name} | {' | '.join(cells.get(e, '') for e in columns)} |")
    return lines


def main() -> None:
    """Writes the pictures, and prints the table in Markdown."""
    with rc_context({"font.size": 20}):
        for file, colours in PICTURES.items():
            picture(colours).savefig(IMAGES / file, dpi=150)
    print("\n".join([*table(), "", *beside()]))


if __name__ == "__main__":
    main()
