"""Accuracy by epochs and by epsilon: AdaDp's Figure 2, and PIGDO's Figures 3, 5, 6 and 9."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.papers.row import ResultRow
from benchmarks.papers.rows import FASHION, MLP_SETTINGS, OTHER_PIGDO, ROWS
from benchmarks.papers.tables import style
from benchmarks.papers.tables.rows import Results
from jaxdp import accounting as acc
from jaxdp.runs.config import RunConfig

# The algorithms of each row of panels, as parts of their rows' names; one style an algorithm.
PCA = ("pca-dp-sgd", "pca-dp-sgd-falling", "pca-adadp", "pca-adadp-as-published")
PIXELS = (
    *("dp-sgd", "exp", "adadp", "dp-adam"),
    *("piadam", "piadam-as-published", *OTHER_PIGDO),
)
Panel = tuple[str, str, tuple[str, ...]]  # the figure, the data set, the algorithms
PANELS: tuple[Panel, ...] = (
    ("AdaDp, Figure 2", "mnist", PCA),
    ("PIGDO, Figure 5", "mnist", PIXELS),
    ("PIGDO, Figure 9", "fashion_mnist", (*FASHION, *OTHER_PIGDO)),
)
_LEAST = {"mnist": 80, "fashion_mnist": 65}  # percent: below it is the beginning of a run
_PLACES = {
    name: place for place, name in enumerate((*PIXELS, "adadp-as-published", "dp-sgd-falling"))
}
# PIGDO, Section 5.2, the text to Figure 6 (a): epsilon and accuracy in percent.
FIGURE_6 = {
    "piadam": ((0.5, 91.0), (8.0, 97.5)),
    "adadp": ((0.5, 90.0),),
    "exp": ((0.5, 89.0),),
    "dp-sgd": ((0.5, 88.9),),
}
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
    made, axes = style.panels(3, 3, (14, 12))
    for row, (what, dataset, algorithms) in enumerate(PANELS):
        for column, (noise, _, epochs) in enumerate(MLP_SETTINGS):
            panel = axes[3 * row + column]
            for name in algorithms:
                look = look_of(name)
                for line in results.runs(f"{dataset}-mlp-{name}-noise-{noise:g}"):
                    x, y = points(line)
                    panel.plot(x, y, linewidth=2, label=labels[name], **look)
                paper = printed.get(name, {}).get(noise) if dataset == "mnist" else None
                if paper and row == 1:
                    hollow: dict[str, Any] = {
                        "fillstyle": "none",
                        "markersize": 10,
                        "markeredgewidth": 1.8,
                    }
                    panel.plot(epochs, paper, "D", color=look["color"], clip_on=False, **hollow)
            if panel.lines:
                panel.set_ylim(_LEAST[dataset], None)
            else:
                style.nothing_yet(panel)
            panel.set_xlim(0, epochs)
            panel.set_xlabel("epochs")
            style.title(panel, f"{what}: noise {noise:g}")
        axes[3 * row].set_ylabel("test accuracy (%)")
    style.legend(made, axes, 4)
    return made


def below(results: Results, labels: dict[str, str], panels: Sequence[Panel] = PANELS) -> str:
    """What is said of runs that no panel shows, since they stay below its axis; may be empty."""
    found = [
        f"{labels[name]} at noise {noise:g} (at most {max(y):.1f} %)"
        for _, dataset, algorithms in panels
        for noise, *_ in MLP_SETTINGS
        for name in algorithms
        for line in results.runs(f"{dataset}-mlp-{name}-noise-{noise:g}")
        if max(y := points(line)[1]) < _LEAST[dataset]
    ]
    return f" Below the axis: {', '.join(found)}." if found else ""


def look_of(name: str) -> dict[str, Any]:
    """Colour and dashes of an algorithm, the same with and without DP-PCA."""
    place = _PLACES[name.removeprefix("pca-")]
    return {"color": style.COLOURS[place], "linestyle": style.DASHES[place % len(style.DASHES)]}


def points(line: ResultRow) -> tuple[list[float], list[float]]:
    """Epochs and accuracies in percent of the evaluations that a run kept, else of its end."""
    kept = line.get("curve") or [(line["steps"], "", line["test_accuracy"])]
    return [step / 100 for step, *_ in kept], [100 * share for *_, share in kept]


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
    made, (left, right) = style.panels(1, 2, (14, 5.6))
    for name in PIXELS:
        look = look_of(name)
        for i, (noise, *_) in enumerate(MLP_SETTINGS):
            for line in results.runs(f"mnist-mlp-{name}-noise-{noise:g}"):
                curve = [at for at in line.get("curve") or () if math.isfinite(float(at[1]))]
                x, y = [at[1] for at in curve], [100 * at[2] for at in curve]
                width = (1.0, 2.0, 3.2)[i]
                left.plot(x, y, linewidth=width, label=labels[name], **look)
        for epsilon, accuracy in FIGURE_6.get(name, ()):
            left.plot(epsilon, accuracy, "D", color=look["color"], fillstyle="none", markersize=9)
    left.set(xscale="log", xlabel="proven epsilon at delta 1e-5", ylim=(_LEAST["mnist"], None))
    left.set_ylabel("test accuracy (%)")
    style.title(left, "(a) thin: noise 8; middle: 4; thick: 2")
    for i, budget in enumerate(BUDGETS):
        pairs = [(delta, best_within(results, "piadam", budget, delta)) for delta in DELTAS]
        shown = [(delta, share) for delta, share in pairs if share is not None]
        if shown:
            look = {"color": style.COLOURS[i], "marker": style.MARKERS[i]}
            right.plot(*zip(*shown, strict=True), label=f"ε {budget:g}", **look)
    if right.lines:
        right.legend(loc="lower right")
    else:
        style.nothing_yet(right)
    right.set(xscale="log", xlabel="delta")
    style.title(right, "(b) PIAdam, repaired, within ε")
    style.legend(made, (left,), 4)
    return made
