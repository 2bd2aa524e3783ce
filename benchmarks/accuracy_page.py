"""Draws the accuracies of the best recipes against epsilon, and prints their table.

python -m benchmarks.accuracy_page

Read from ``benchmarks/results/accuracy.json``, which ``benchmarks.accuracy`` writes, and from the
papers' rows in ``papers.json`` beside it. Writes ``docs/images/accuracy.png``.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.accuracy import RESULTS
from jaxdp.runs.report.plots import BLUE, INK, ORANGE, SOFT, save_png

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "accuracy.png"
SHOWN = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
# Tramèr and Boneh 2021 (arXiv:2011.11660v3), their best at (3, 1e-5).
PRINTED = {"mnist": 98.7, "fashion_mnist": 89.7, "cifar10": 69.3}
EPSILONS = (0.5, 1, 2, 3, 5, 8)
DELTA = 1e-5
LEAST = {"mnist": 90.0, "fashion_mnist": 80.0, "cifar10": 45.0}


def rows(dataset: str) -> tuple[dict[float, list[float]], float | None]:
    """Accuracies by epsilon, and without privacy, in percent."""
    found = [r for r in json.loads(RESULTS.read_text(encoding="utf-8")) if r["dataset"] == dataset]
    private = {r["epsilon"]: r["accuracy"] for r in found if r["epsilon"] is not None}
    plain = [r["accuracy"][0] for r in found if r["epsilon"] is None]
    return dict(sorted(private.items())), plain[0] if plain else None


def papers(dataset: str) -> list[tuple[float, float]]:
    """(Epsilon proven at ``DELTA``, accuracy in percent) of the papers' rows."""
    path = RESULTS.parent / "papers.json"
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return [
        (min(r["proven_epsilon"], 99.0), 100 * r["test_accuracy"])
        for r in found
        if r["dataset"] == dataset
        and r["delta"] == DELTA
        and isinstance(r["proven_epsilon"], float)
    ]


def shown(runs: list[float] | None) -> str:
    """Mean and standard deviation, or the single run."""
    if not runs:
        return "not run"
    mean = f"{statistics.mean(runs):.2f}"
    return f"{mean} ± {statistics.stdev(runs):.2f}" if len(runs) > 1 else mean


def panel(axes: Axes, dataset: str) -> None:
    private, plain = rows(dataset)
    for epsilon, accuracy in papers(dataset):
        axes.plot(epsilon, accuracy, ".", color=SOFT, markersize=4, zorder=1)
    axes.plot([], [], ".", color=SOFT, label="the papers' algorithms, a run each")
    means = [statistics.mean(runs) for runs in private.values()]
    axes.plot(list(private), means, "o-", color=BLUE, markersize=4, label="--recipe best")
    for epsilon, runs in private.items():
        axes.vlines(epsilon, min(runs), max(runs), color=BLUE, linewidth=4, alpha=0.35)
    axes.plot(3, PRINTED[dataset], "D", color=ORANGE, markersize=5, label="Tramèr and Boneh 2021")
    if plain is not None:
        axes.axhline(plain, color=INK, linestyle=":", label="these features without privacy")
    axes.set(title=SHOWN[dataset], xlabel="proven epsilon (delta 1e-5)", xscale="log")
    axes.set_ylim(bottom=LEAST[dataset])
    axes.set_xlim(0.4, 10)
    axes.xaxis.set_major_locator(FixedLocator(EPSILONS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)


def table() -> list[str]:
    """Lines of Markdown: accuracy by epsilon and data set, in percent."""
    lines = ["| epsilon | " + " | ".join(SHOWN.values()) + " |", "|---|---|---|---|"]
    for epsilon in EPSILONS:
        cells = [shown(rows(dataset)[0].get(epsilon)) for dataset in SHOWN]
        lines.append(f"| {epsilon:g} | " + " | ".join(cells) + " |")
    plain = [rows(dataset)[1] for dataset in SHOWN]
    lines.append("| without privacy | " + " | ".join(str(p or "not run") for p in plain) + " |")
    return lines


def main() -> None:
    """Writes the picture, and prints the table in Markdown."""
    figure = Figure((12, 3.9), layout="constrained")
    for axes, dataset in zip(figure.subplots(1, 3), SHOWN, strict=True):
        panel(axes, dataset)
        axes.set_ylabel("test accuracy (%)" if dataset == "mnist" else "")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    save_png(figure, IMAGE)
    print("\n".join(table()))


if __name__ == "__main__":
    main()
