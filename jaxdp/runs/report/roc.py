"""The plot of an attack's ROC curve beside the proven limit of any attack."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes

from jaxdp import accounting as acc
from jaxdp.accounting.curves import false_negative_rates, profile
from jaxdp.ledger.durable import write_atomically
from jaxdp.runs.report import plots, svg
from jaxdp.runs.report.svg import BLUE
from jaxdp.runs.report.words import show_epsilon

if TYPE_CHECKING:  # they need scipy.stats, which takes a second, and reports none of it
    from jaxdp.audit.algorithms import EpsilonAudit

WORDS = (
    "How many used records the audit's attack found, by how many unused ones it accused; both axes "
    "are logarithmic. The line of an attack may pass the proven limit by chance: the table decides."
)
_FEWEST = 1e-4


def save_roc(audit: "EpsilonAudit", path: Path, title: str) -> Path:
    """Writes the ROC curve as PNG and SVG, with the proven limit where there is one."""
    seen = audit.roc[(audit.roc > 0).all(axis=1)]
    least = max(_FEWEST, 10.0 ** np.floor(np.log10(np.min(seen, initial=0.01))))
    figure, axes = plots.rates(float(least))
    relation = acc.Relation.ADD_OR_REMOVE_ONE
    known = acc.supports(audit.event, relation)
    points = profile(audit.event, relation, audit.delta) if known else []
    if points:
        rates = np.logspace(np.log10(least), 0, 200)
        curve = np.c_[rates, 1 - false_negative_rates(points, rates)]
        label = f"proven limit, epsilon {show_epsilon(audit.proven)} (but for chance)"
        plots.bounded(axes, curve, label)
    axes.plot(seen[:, 0], seen[:, 1], color=BLUE, label="this attack", linestyle="--")
    if audit.points:
        _plot_points(axes, np.array(audit.points), audit.confidence)
    plots.legend(figure)
    write_atomically(path.with_suffix(".svg"), svg.standalone(svg.inline(figure, "roc", WORDS)))
    plots.titled(axes, f"{title}\n{axes.get_title(loc='left')}")
    plots.save_png(figure, path)
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
