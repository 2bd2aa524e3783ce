"""SA-DPSGD's Figure 3: accuracy and loss on the test set as functions of the privacy loss."""

import math
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers.row import ResultRow
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


def drawn(
    results: Results, name: str, points: Callable[[ResultRow], Points]
) -> tuple[Points, bool] | None:
    """A curve of the row, else of its short form (True); None where no run kept one."""
    for candidate in (name, name + table3.SHORT):
        for line in results.runs(candidate):
            if found := points(line):
                return found, candidate != name
    return None


def figure(results: Results) -> Figure:
    """Accuracy above, loss below; a column for each data set."""
    made, axes = style.panels(2, 3, (14, 8.2))
    for column, dataset in enumerate(table3.LEVELS):
        for panel, points in ((axes[column], accuracies), (axes[3 + column], losses)):
            for i, algorithm in enumerate(SHOWN):
                if found := drawn(results, f"{dataset}-{algorithm}", points):
                    _curve(panel, *found, i, table3.COLUMNS[algorithm])
            if not panel.lines:
                what = "row run" if points is accuracies else "loss kept"
                panel.text(0.5, 0.5, f"no {what} yet", transform=panel.transAxes, ha="center")
            panel.set_xlabel("proven epsilon at delta 1e-5")
        style.title(axes[column], spec(dataset).title)
    axes[0].set_ylabel("test accuracy (%)")
    axes[3].set_ylabel("test loss")
    style.legend(made, axes, 3)
    return made


def _curve(panel: Axes, points: Points, short: bool, place: int, label: str) -> None:
    panel.plot(
        *zip(*points, strict=True),
        color=style.COLOURS[place],
        linestyle=style.DASHES[place],
        linewidth=2,
        alpha=0.45 if short else 1,
        label=label,
    )
