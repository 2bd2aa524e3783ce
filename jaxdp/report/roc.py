"""The ROC curve of an attack, and the region that the proven guarantee leaves to any attack."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxdp import accounting as acc
from jaxdp.auditing.audit import MethodAudit
from jaxdp.auditing.events import tradeoff_of
from jaxdp.auditing.one_run import RunAudit
from jaxdp.report.plots import _BLUE, _ORANGE
from jaxdp.report.words import show_epsilon


def save_roc(audit: MethodAudit | RunAudit, path: Path, title: str) -> Path:
    """Writes the plot; where nothing is proven the region is everything."""
    figure = Figure(figsize=(5.4, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    rates = np.r_[np.logspace(-6, -2, 200), np.linspace(0.01, 1, 300)]
    if acc.supports(audit.event) and np.isfinite(audit.proven):
        limit = 1 - tradeoff_of(audit.event)(rates)
        label = f"proven: no attack above, but by chance (epsilon {show_epsilon(audit.proven)})"
        axes.plot(rates, limit, "--", color=_ORANGE, label=label)
        axes.fill_between(rates, limit, 1, color=_ORANGE, alpha=0.12, linewidth=0)
    axes.plot(audit.roc[:, 0], audit.roc[:, 1], color=_BLUE, label="this attack")
    axes.plot([0, 1], [0, 1], ":", color="0.6", label="guessing")
    axes.set(xlabel="false alarms (record absent)", ylabel="hits (record present)",
             xlim=(0, 1), ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right")
    FigureCanvasAgg(figure).print_png(path)
    return path
