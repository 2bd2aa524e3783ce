"""The plots of a report, as PNG files or for its page."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from scipy import special

from jaxdp.runs.report import levels
from jaxdp.runs.report.schema import Metric, Report, Tradeoff
from jaxdp.runs.report.svg import BLUE, INK, LINE, ORANGE, SOFT
from jaxdp.runs.report.words import drawable, show_delta

_WIDTH = 5.1  # inches of 72 units: as wide as a telephone is in pixels, for letters of equal size
_LETTERS = 11
_LEAST = 1e-5  # where the axes of rates begin


def save_plots(report: Report, folder: Path) -> list[Path]:
    """Writes accuracy_and_epsilon.png and update_norm.png; returns their paths."""
    figures = {
        "accuracy_and_epsilon.png": accuracy_and_epsilon(report),
        "update_norm.png": update_norm(report),
    }
    for name, figure in figures.items():
        save_png(figure, folder / name)
    return [folder / name for name in figures]


def save_png(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG on white, sharp at twice its width."""
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=200, facecolor="white")


def accuracy_and_epsilon(report: Report) -> Figure:
    """Plots the measured number, the level of guessing and, below, the epsilon spent, by step."""
    found, steps = report.measured, _column(report, "step")
    if found is None:
        figure, (below,) = _figure(2.9)
    else:
        figure, (above, below) = _figure(4.9, 2)
        _plot_measured(above, report, found, steps)
    _plot_epsilon(below, report, steps)
    _label_steps(below, steps)
    return figure


def _plot_measured(axes: Axes, report: Report, found: Metric, steps: np.ndarray) -> None:
    scale = 100 if found.share else 1
    _style(axes, f"{found.name} (%)" if found.share else found.name)
    axes.plot(steps, scale * _column(report, found.column), "o-", color=BLUE, markersize=4)
    if (guess := levels.best_guess(report)) is None:
        return
    axes.axhline(scale * guess, color=SOFT, linestyle=":")
    axes.annotate(
        "guessing",
        (1, scale * guess),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        color=SOFT,
        fontsize=_LETTERS - 1,
    )
    axes.set_ylim(bottom=0)


def _plot_epsilon(axes: Axes, report: Report, steps: np.ndarray) -> None:
    delta = show_delta(report.guarantee.delta)
    _style(axes, f"Proven epsilon so far, at delta {delta}")
    epsilon = _column(report, "epsilon")
    axes.plot(steps, epsilon, "s--", color=ORANGE, markersize=4)
    if np.isfinite(epsilon).any():
        axes.set_ylim(bottom=0)
        return
    axes.set_yticks([])
    axes.annotate(
        "infinite: nothing is proven",
        (0.5, 0.5),
        xycoords="axes fraction",
        ha="center",
        color=INK,
        fontsize=_LETTERS,
    )


def update_norm(report: Report) -> Figure:
    """Plots the norm of the noisy update, by step."""
    figure, (axes,) = _figure(2.9)
    steps = _column(report, "step")
    norms = _column(report, "update_norm")
    _style(axes, "Norm of the noisy update, mean of a block")
    axes.plot(steps, norms, "o-", color=BLUE, markersize=4)
    # A run that diverged has a report as well, and so has one that never moved.
    highest = np.max(norms, where=np.isfinite(norms), initial=0.0)
    axes.set_ylim(0, 1.1 * highest or 1.0)
    _label_steps(axes, steps)
    return figure


def tradeoff(found: Tradeoff) -> Figure:
    """Plots the largest true-positive rate of any attack, by false-positive rate."""
    figure, axes = rates(_LEAST)
    curve = np.array(found.curve)
    bounded(axes, curve, "most that is possible (proven)")
    if found.mu is not None and found.mu_is != "exact":
        hits = special.ndtr(special.ndtri(curve[:, 0]) + found.mu)
        axes.plot(
            curve[:, 0],
            hits,
            "--",
            color=BLUE,
            linewidth=1.4,
            label=f"Gaussian with mu {found.mu:.3g} (approximate)",
        )
    at = np.array([[float(rate), hits] for rate, hits in found.tpr_at_fpr.items()])
    axes.plot(at[:, 0], at[:, 1], "o", color=ORANGE, markersize=6, clip_on=False)
    legend(figure)
    return figure


def rates(least: float) -> tuple[Figure, Axes]:
    """Empty logarithmic axes of both rates, in percent, with the diagonal of guessing."""
    figure, (axes,) = _figure(4.7)
    _style(axes, "True positives: used records found")
    axes.set_xlabel("False positives: unused records accused", color=INK, fontsize=_LETTERS)
    axes.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.08))
    ticks = 10.0 ** np.arange(round(np.log10(least)), 1)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator(list(ticks)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g}%"))
    axes.get_xticklabels()[-1].set_horizontalalignment("right")
    axes.plot([least, 1], [least, 1], ":", color=SOFT, label="guessing")
    return figure, axes


def bounded(axes: Axes, curve: np.ndarray, label: str) -> None:
    """Draws the proven limit [k, 2] and shades what lies beyond it."""
    axes.plot(curve[:, 0], curve[:, 1], color=ORANGE, label=label, linewidth=2.6)
    axes.fill_between(curve[:, 0], curve[:, 1], 1.08, color=ORANGE, alpha=0.1, linewidth=0)


def legend(figure: Figure) -> None:
    """Puts the legend below the axes, where it hides nothing at any width."""
    figure.legend(
        loc="outside lower left",
        frameon=False,
        fontsize=_LETTERS,
        labelcolor=INK,
        handlelength=2.2,
        borderaxespad=0.2,
    )


def titled(axes: Axes, title: str, **style: Any) -> None:
    """Writes a title as it is: a caller's own words may hold what would start a formula."""
    axes.set_title(drawable(title), loc="left", fontsize=_LETTERS, parse_math=False, **style)


def _figure(height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False)
    return figure, list(axes[:, 0])


def _style(axes: Axes, title: str) -> None:
    titled(axes, title, color=INK)
    axes.tick_params(colors=LINE, labelcolor=INK, labelsize=_LETTERS)
    axes.grid(color=LINE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)


def _label_steps(axes: Axes, steps: np.ndarray) -> None:
    axes.set_xlabel("step", color=INK, fontsize=_LETTERS)
    axes.set_xlim(0, 1.03 * steps[-1])
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _column(report: Report, name: str) -> np.ndarray:
    return np.array([row.value(name) for row in report.history])
