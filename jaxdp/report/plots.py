"""The plots of a run, from the rows of its history."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxdp.report.words import show_delta, title

# Okabe & Ito's colours, told apart by colour-blind readers; line styles differ as well.
_BLUE, _ORANGE = "#0072B2", "#D55E00"


def save_plots(report: dict[str, Any], folder: Path) -> list[Path]:
    """Writes accuracy_and_epsilon.png and update_norm.png; returns their paths."""
    figures = {
        "accuracy_and_epsilon.png": _accuracy_and_epsilon(report),
        "update_norm.png": _update_norm(report),
    }
    paths = []
    for name, figure in figures.items():
        FigureCanvasAgg(figure).print_png(folder / name)
        paths.append(folder / name)
    return paths


def _figure(report: dict[str, Any], label: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title(report), loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _column(report: dict[str, Any], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in report["history"]])


def _accuracy_and_epsilon(report: dict[str, Any]) -> Figure:
    figure, axes = _figure(report, "test accuracy (%)")
    steps = _column(report, "step")
    accuracy = 100 * _column(report, "test_accuracy")
    axes.plot(steps, accuracy, "o-", color=_BLUE, label="test accuracy")
    axes.yaxis.label.set_color(_BLUE)
    other = axes.twinx()
    epsilon = _column(report, "epsilon")
    if not np.isfinite(epsilon).all():
        other.set_yticks([])
    label = f"proven epsilon at delta {show_delta(report['guarantee']['delta'])}"
    other.plot(steps, epsilon, "s--", color=_ORANGE, label=label)
    other.set_ylabel(label)
    other.yaxis.label.set_color(_ORANGE)
    other.set_ylim(bottom=0)
    other.spines["top"].set_visible(False)
    handles = [*axes.get_lines(), *other.get_lines()]
    axes.legend(handles, [h.get_label() for h in handles], loc="lower right")
    return figure


def _update_norm(report: dict[str, Any]) -> Figure:
    figure, axes = _figure(report, "norm of the noisy update, block mean")
    norms = _column(report, "update_norm")
    axes.plot(_column(report, "step"), norms, "o-", color=_BLUE)
    # A run that diverged has a report as well, and so has one that never moved.
    highest = np.max(norms, where=np.isfinite(norms), initial=0.0)
    axes.set_ylim(0, 1.1 * highest or 1.0)
    return figure
