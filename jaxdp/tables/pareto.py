"""Accuracy against proven epsilon, every method on one plot."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from jaxdp.runs.rows import PARETO_EPSILONS
from jaxdp.tables import rows, style
from jaxdp.tables.page import Page, Plot, Section, Table
from jaxdp.tables.rows import Results

METHODS = {
    "piadam": "PIAdam, repaired",
    "dp-adam": "DP-Adam",
    "adadp": "AdaDp, repaired",
    "dp-sgd-tanh": "DP-SGD, tanh",
    "sa-dpsgd": "SA-DPSGD, repaired",
    "auto-s": "AUTO-S",
}
EPSILONS = tuple(sorted((*PARETO_EPSILONS, 3.0)))


def row_name(method: str, epsilon: float) -> str:
    """The short row of a method at a budget; epsilon 3 is the queue's own."""
    return f"mnist-{method}-short" + ("" if epsilon == 3 else f"-epsilon-{epsilon:g}")


NAMES = tuple(row_name(method, epsilon) for method in METHODS for epsilon in EPSILONS)
LONG = tuple(f"mnist-{method}" for method in METHODS)


def page(results: Results) -> Page:
    """One table a method."""
    text = (
        "MNIST, the CNN of 26,010 parameters, batch 512, 600 steps (about five epochs), each "
        "budget with its own noise. Rates and clipping are the papers' or ours for epsilon 3 and "
        "40 epochs, the same at every budget and not tuned for any.",
        "SA-DPSGD's accuracy is of the 5,000 test examples that judged nothing, the others' of all "
        "10,000: at an accuracy of 95 % one standard error is 0.3 and 0.2 points.",
        "Where a row was run once, nothing is known of the chance between runs (starting weights, "
        "draws, noise); where a curve falls although the budget grows, chance is likely more than "
        "what the curve tells.",
        rows.LEGEND,
    )
    sections = []
    for method, shown in METHODS.items():
        body = [
            [f"{epsilon:g}", *line]
            for epsilon in EPSILONS
            for line in rows.lines(results, row_name(method, epsilon))
        ]
        body += [["3, 40 epochs", *line] for line in rows.lines(results, f"mnist-{method}")]
        sections.append(Section(shown, table=Table(("budget", *rows.COLUMNS), body)))
    return Page(
        "Pareto curves: accuracy against proven epsilon",
        text,
        (
            Plot(
                "pareto.png",
                "Test accuracy against proven epsilon (delta 1e-5) after 600 steps on "
                "MNIST. Bars: range of several runs, where there are several. Stars: the 40-epoch "
                "runs, all at epsilon 3 and set apart only to be seen.",
            ),
        ),
        tuple(sections),
        "jaxdp reproduce pareto",
    )


def figure(results: Results) -> Figure:
    """One line a method, of the budgets that have been run."""
    drawn, (axes,) = style.panels(1, 1, (9, 6))
    for i, (method, shown) in enumerate(METHODS.items()):
        points = []
        for epsilon in EPSILONS:
            found = rows.accuracies(results, row_name(method, epsilon))
            if found:
                points.append((epsilon, *style.mean_and_range([100 * x for x in found])))
        if points:
            x, mean, low, high = zip(*points, strict=True)
            look = {"color": style.COLOURS[i], "linestyle": style.DASHES[i], "linewidth": 2}
            axes.plot(x, mean, marker=style.MARKERS[i], markersize=9, label=shown, **look)
            axes.vlines(x, [m - d for m, d in zip(mean, low, strict=True)],
                        [m + d for m, d in zip(mean, high, strict=True)],
                        color=style.COLOURS[i], linewidth=2)
        for accuracy in rows.accuracies(results, f"mnist-{method}"):
            axes.plot(3 * 1.045 ** (i - 2.5), 100 * accuracy, "*", color=style.COLOURS[i],
                      markersize=16, markeredgecolor="black", zorder=5)
    if axes.lines:
        axes.plot([], [], "*", color="white", markersize=16, markeredgecolor="black",
                  label="40 epochs")
    else:
        style.nothing_yet(axes)
    _axes(axes)
    style.legend(drawn, (axes,), 4)
    return drawn


def _axes(axes: Any) -> None:
    axes.set_xscale("log")
    axes.set_xlim(0.44, 9.1)
    axes.xaxis.set_major_locator(FixedLocator(EPSILONS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{epsilon:g}" for epsilon in EPSILONS])
    axes.set_xlabel("proven epsilon at delta 1e-5 (log scale)")
    axes.set_ylabel("test accuracy (%)")
    style.title(axes, "MNIST, CNN, 600 steps of 512")
