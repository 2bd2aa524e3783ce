"""The plots of a report, as files and for its page."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from scipy import special

from jaxdp import accounting as acc
from jaxdp.accounting.curves import false_negative_rates, profile
from jaxdp.ledger.durable import write_atomically
from jaxdp.runs.report import levels
from jaxdp.runs.report.schema import Metric, Report, Tradeoff
from jaxdp.runs.report.words import drawable, show_delta, show_epsilon

if TYPE_CHECKING:  # a report needs no attack
    from jaxdp.audit.algorithms import EpsilonAudit

# The page's colours in light mode. All but that of grid lines have a contrast of 4.5 on white.
INK, SOFT, LINE, BLUE, ORANGE = "#1b1f24", "#57606a", "#d0d7de", "#0072b2", "#b34700"
ROC_CAPTION = (
    "How many used records the audit's attack found, by how many unused ones it accused; both axes "
    "are logarithmic. The line of an attack may pass the proven limit by chance: the table decides."
)
_WIDTH = 5.1  # inches of 72 units: as wide as a telephone is in pixels, for letters of equal size
_LETTERS = 11
_LEAST = 1e-5  # where the axes of rates begin
_FEWEST = 1e-4  # where those of an attack's rates begin at the latest


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


def svg_text(figure: Figure) -> str:
    """The figure as SVG on white: the same figure gives the same text."""
    buffer = io.StringIO()
    FigureCanvasSVG(figure)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxdp"}):
        figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None})
    return buffer.getvalue()


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
    """Draws the measured number by step, with the level of guessing."""
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
    """Draws the epsilon that was spent, by step."""
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


def save_roc(audit: "EpsilonAudit", path: Path, title: str) -> Path:
    """Writes the ROC curve as PNG and SVG, with the proven limit where there is one."""
    seen = audit.roc[(audit.roc > 0).all(axis=1)]
    least = max(_FEWEST, 10.0 ** np.floor(np.log10(np.min(seen, initial=0.01))))
    figure, axes = rates(float(least))
    relation = acc.Relation.ADD_OR_REMOVE_ONE
    known = acc.supports(audit.event, relation)
    points = profile(audit.event, relation, audit.delta) if known else []
    if points:
        alarms = np.logspace(np.log10(least), 0, 200)
        curve = np.c_[alarms, 1 - false_negative_rates(points, alarms)]
        label = f"proven limit, epsilon {show_epsilon(audit.proven)} (but for chance)"
        bounded(axes, curve, label)
    axes.plot(seen[:, 0], seen[:, 1], color=BLUE, label="this attack", linestyle="--")
    if audit.points:
        _plot_points(axes, np.array(audit.points), audit.confidence)
    legend(figure)
    write_atomically(path.with_suffix(".svg"), svg_text(figure))
    titled(axes, f"{title}\n{axes.get_title(loc='left')}")
    save_png(figure, path)
    return path


def _plot_points(axes: Axes, points: np.ndarray, confidence: float) -> None:
    """Draws points [k, 6] with their intervals."""
    alarms, hits = points[:, :3], points[:, 3:]
    spreads = [np.abs(each[:, 1:] - each[:, :1]).T for each in (alarms, hits)]
    axes.errorbar(
        alarms[:, 0],
        hits[:, 0],
        xerr=spreads[0],
        yerr=spreads[1],
        fmt="o",
        color=BLUE,
        markersize=5,
        capsize=3,
        label=f"rates of the table, intervals at {confidence:.0%}",
    )


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
    """A figure of the page's width, with axes below one another."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False)
    return figure, list(axes[:, 0])


def _style(axes: Axes, title: str) -> None:
    """Gives axes a title, a grid and the colours of the page."""
    titled(axes, title, color=INK)
    axes.tick_params(colors=LINE, labelcolor=INK, labelsize=_LETTERS)
    axes.grid(color=LINE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)


def _label_steps(axes: Axes, steps: np.ndarray) -> None:
    """Labels the axis of the steps."""
    axes.set_xlabel("step", color=INK, fontsize=_LETTERS)
    axes.set_xlim(0, 1.03 * steps[-1])
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _column(report: Report, name: str) -> np.ndarray:
    """A number of every row of the history, [rows]."""
    return np.array([row.value(name) for row in report.history])
