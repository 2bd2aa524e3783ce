"""SA-DPSGD's Figure 3: accuracy and loss on the test set as functions of the privacy loss."""

import math
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers.row import ResultRow
from benchmarks.papers.rows import ROWS
from benchmarks.papers.tables import style, table3
from benchmarks.papers.tables.rows import Results
from jaxdp.data.specs import spec

# The figure's four, and SA-DPSGD's other forms.
SHOWN = (
    "dp-sgd-relu",
    "dp-sgd-tanh",
    "auto-s",
    "sa-dpsgd",
    "sa-dpsgd-momentum",
    "sa-dpsgd-as-published",
    "sa-dpsgd-as-published-momentum",
)
Points = list[tuple[float, float]]


def accuracies(line: ResultRow) -> Points:
    """(proven epsilon, accuracy in percent) of the evaluations that a run kept."""
    return [(float(e), 100 * a) for _, e, a in line.get("curve") or () if _finite(e)]


def losses(line: ResultRow) -> Points:
    """(proven epsilon, mean cross-entropy) of the evaluations of which a run kept the loss."""
    pairs = zip(line.get("curve") or (), line.get("test_losses") or (), strict=False)
    return [(float(at[1]), loss) for at, loss in pairs if loss is not None and _finite(at[1])]


def _finite(epsilon: float | str) -> bool:
    return math.isfinite(float(epsilon))


def length(results: Results, dataset: str) -> str:
    """What is added to the names of the rows that a data set's panels draw: all are as long.

    The whole rows, where any kept a curve, else the short ones.
    """
    names = [f"{dataset}-{algorithm}" for algorithm in SHOWN]
    whole = any(drawn(results, name, accuracies) for name in names)
    return "" if whole else table3.SHORT


def drawn(
    results: Results, name: str, points: Callable[[ResultRow], Points]
) -> tuple[Points, ResultRow] | None:
    """A curve of the row, and its run; None where no run kept one."""
    for line in results.runs(name):
        if found := points(line):
            return found, line
    return None


def figure(results: Results) -> Figure:
    """Accuracy above, loss below; a column for each data set."""
    made, axes = style.panels(2, 3, (12, 8.4))
    for column, dataset in enumerate(table3.LEVELS):
        added = length(results, dataset)
        above, below = axes[column], axes[3 + column]
        epochs = _panel(above, results, dataset, added, accuracies)
        _panel(below, results, dataset, added, losses)
        style.title(above, f"{spec(dataset).title}{epochs}")
    axes[0].set_ylabel("test accuracy (%)")
    axes[3].set_ylabel("test loss (cross-entropy)")
    style.legend(made, axes, 3)
    return made


def _panel(
    panel: Axes,
    results: Results,
    dataset: str,
    added: str,
    points: Callable[[ResultRow], Points],
) -> str:
    """Draws the rows that kept these points; returns how long they ran, as in ", 40 epochs"."""
    epochs, without = "", []
    for algorithm in SHOWN:
        name = f"{dataset}-{algorithm}{added}"
        if found := drawn(results, name, points):
            style.curve(panel, found[0], algorithm, table3.COLUMNS[algorithm])
            epochs = f", {_epochs(found[1]):.0f} epochs"
        elif results.runs(name):
            without.append(table3.COLUMNS[algorithm])
    if not panel.lines:
        panel.set_axis_off()
        told = "no losses kept" if without else "no row run yet"
        panel.text(0.5, 0.5, told, transform=panel.transAxes, ha="center", color="0.4")
    elif without:
        kept = "losses" if points is losses else "curve"
        told = "\n".join((f"no {kept} kept:", *without))
        panel.text(0.97, 0.95, told, transform=panel.transAxes, ha="right", va="top", color="0.4")
    panel.set_xlabel("proven epsilon at delta 1e-5")
    return epochs


def _epochs(line: ResultRow) -> float:
    config = ROWS[line["name"]].config()
    return line["steps"] * config.batch_size / config.dataset_size
