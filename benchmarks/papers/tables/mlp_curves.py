"""Accuracy by epochs and by epsilon: AdaDp's Figure 2, and PIGDO's Figures 3, 5, 6 and 9."""

import functools
import math
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers.row import ResultRow
from benchmarks.papers.rows import FASHION, MLP_SETTINGS, OTHER_PIGDO, ROWS
from benchmarks.papers.tables import style
from benchmarks.papers.tables.rows import Results
from jaxdp import accounting as acc
from jaxdp.runs.config import RunConfig

# The algorithms of each row of panels, as parts of their rows' names.
PCA = ("pca-dp-sgd", "pca-dp-sgd-falling", "pca-adadp", "pca-adadp-as-published")
PIXELS = (
    *("dp-sgd", "exp", "adadp", "dp-adam"),
    *("piadam", "piadam-as-published", *OTHER_PIGDO),
)
Panel = tuple[str, str, tuple[str, ...]]  # the figure, the data set, the algorithms
PANELS: tuple[Panel, ...] = (
    ("AdaDp, Fig. 2, DP-PCA", "mnist", PCA),
    ("PIGDO, Fig. 5", "mnist", PIXELS),
    ("PIGDO, Fig. 9", "fashion_mnist", (*FASHION, *OTHER_PIGDO)),
)
# PIGDO, Section 5.2, the text to Figure 6 (a): epsilon and accuracy in percent.
FIGURE_6 = {
    "piadam": ((0.5, 91.0), (8.0, 97.5)),
    "adadp": ((0.5, 90.0),),
    "exp": ((0.5, 89.0),),
    "dp-sgd": ((0.5, 88.9),),
}
# Dashes of the three noise multipliers, largest first, in the figure by epsilon.
_OF_NOISE: tuple[Any, ...] = (":", "--", "-")
BUDGETS, DELTAS = (0.25, 0.5, 1.0, 2.0), (1e-5, 1e-4, 1e-3, 1e-2)


def by_epochs(
    results: Results, labels: dict[str, str], printed: Mapping[str, Mapping[float, float]]
) -> Figure:
    """A row of panels for each figure, a column for each noise multiplier.

    Args:
        results: the finished rows.
        labels: of the algorithms.
        printed: from an algorithm to the papers' accuracy at a noise multiplier, on MNIST.
    """
    made, axes = style.panels(3, 3, (12, 12))
    for row, (what, dataset, algorithms) in enumerate(PANELS):
        for column, (noise, _, epochs) in enumerate(MLP_SETTINGS):
            panel = axes[3 * row + column]
            for name in algorithms:
                for line in results.runs(f"{dataset}-mlp-{name}-noise-{noise:g}"):
                    shown = labels[name].removesuffix(", DP-PCA")
                    style.curve(panel, points(line), name, shown)
            panel.set_xlim(0, epochs)
            style.from_below(panel) if panel.lines else style.nothing_yet(panel)
            if dataset == "mnist" and algorithms is PIXELS:
                _printed(panel, epochs, {name: printed.get(name, {}).get(noise) for name in PIXELS})
            panel.set_xlabel("epochs")
            style.title(panel, f"{what}: noise {noise:g}")
        axes[3 * row].set_ylabel("test accuracy (%)")
    style.key(axes[-1], hollow="printed by PIGDO, same marks")
    style.legend(made, axes, 3)
    return made


def _printed(panel: Axes, epochs: int, shares: Mapping[str, float | None]) -> None:
    """The papers' accuracies at the end of the runs, side by side beyond a dotted line."""
    shown = {name: share for name, share in shares.items() if share}
    for place, (name, share) in enumerate(shown.items(), 1):
        panel.plot(epochs * (1 + 0.06 * place), share, **style.mark(name, printed=True))
    panel.axvline(epochs, color="0.5", linestyle=":")
    ticks = [tick for tick in panel.get_xticks() if 0 <= tick <= epochs]
    panel.set_xticks(ticks)
    panel.set_xlim(0, epochs * (1.04 + 0.06 * len(shown)))
    panel.set_ylim(top=max(panel.get_ylim()[1], *(share + 0.5 for share in shown.values())))


def points(line: ResultRow) -> list[tuple[float, float]]:
    """Epochs and accuracy in percent of every evaluation that a run kept, else of its end."""
    kept = line.get("curve") or [(line["steps"], "", line["test_accuracy"])]
    return [(step / 100, 100 * share) for step, _, share in kept]


def best_within(results: Results, name: str, budget: float, delta: float) -> float | None:
    """The best accuracy in percent of any noise's curve at a proven epsilon within the budget.

    Epsilon is that of a run whose number of steps was fixed beforehand.

    Args:
        results: the finished rows.
        name: of the algorithm.
        budget: epsilon.
        delta: at which epsilon is taken.
    """
    found = [
        100 * share
        for noise, *_ in MLP_SETTINGS
        for line in results.runs(f"mnist-mlp-{name}-noise-{noise:g}")
        for step, _, share in line.get("curve") or ()
        if _epsilon(line["name"], step, delta) <= budget
    ]
    return max(found, default=None)


@functools.cache
def _epsilon(name: str, step: int, delta: float) -> float:
    return acc.epsilon(_config(name).total(step), delta).upper


@functools.cache
def _config(name: str) -> RunConfig:
    return ROWS[name].config()


def by_epsilon(results: Results, labels: dict[str, str]) -> Figure:
    """PIGDO's Figure 6: accuracy by epsilon, and by delta at four epsilons, from stored curves."""
    made, (left, right) = style.panels(1, 2, (12, 6.2), width_ratios=(1.8, 1))
    for name in PIXELS:
        before, look = len(left.lines), {**style.look(name), "markersize": 7, "markevery": 0.2}
        for (noise, *_), dashes in zip(MLP_SETTINGS, _OF_NOISE, strict=True):
            for line in results.runs(f"mnist-mlp-{name}-noise-{noise:g}"):
                curve = [at for at in line.get("curve") or () if math.isfinite(float(at[1]))]
                if curve:
                    x, y = [at[1] for at in curve], [100 * at[2] for at in curve]
                    left.plot(x, y, **{**look, "linestyle": dashes})
        if len(left.lines) > before:
            left.plot([], [], label=labels[name], **style.mark(name))
    left.set_xscale("log")
    for name, printed in FIGURE_6.items():
        look = style.mark(name, printed=True) | {"fillstyle": "full", "markerfacecolor": "white"}
        for epsilon, accuracy in printed:
            beside = 1.1 if name == "dp-sgd" else 1  # of EXP's mark
            left.plot(beside * epsilon, accuracy, zorder=4, **look)
    style.from_below(left)
    left.set(xlabel="proven epsilon at delta 1e-5 (log scale)", ylabel="test accuracy (%)")
    left.set_xticks([0.03, 0.1, 0.3, 1, 3, 8], ["0.03", "0.1", "0.3", "1", "3", "8"])
    left.minorticks_off()
    style.title(left, "(a) by proven epsilon")
    for (noise, *_), dashes in zip(MLP_SETTINGS, _OF_NOISE, strict=True):
        left.plot([], [], color="0.35", linestyle=dashes, label=f"noise {noise:g}")
    style.key(left, hollow="printed, same marks")
    for budget, marker in zip(BUDGETS, style.MARKERS, strict=False):
        pairs = [(delta, best_within(results, "piadam", budget, delta)) for delta in DELTAS]
        shown = [(delta, share) for delta, share in pairs if share is not None]
        if shown:
            look = {**style.look("piadam"), "marker": marker, "markersize": 8}
            right.plot(*zip(*shown, strict=True), label=f"ε {budget:g}", **look)
    if right.lines:
        right.legend(loc="lower right", fontsize=12, title="within", title_fontsize=12)
    else:
        style.nothing_yet(right)
    right.set(xscale="log", xlabel="delta (log scale)", ylabel="best test accuracy (%)")
    style.title(right, "(b) PIAdam, repaired")
    style.legend(made, (left,), 4)
    return made
