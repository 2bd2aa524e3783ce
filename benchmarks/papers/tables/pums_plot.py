"""The plot of the census runs."""

import statistics

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers import census
from benchmarks.papers.tables import style
from benchmarks.papers.tables.pums_groups import (
    BUDGETS,
    MODELS,
    SHOWN,
    TIGHT,
    Lines,
    by_group,
    errors,
    found,
    interval,
)
from benchmarks.papers.tables.rows import Results

_OF_GROUPS = "mlp"
_LOOKS = {
    "epsilon-0.5": (style.ORANGE, "s"),
    "epsilon-1": (style.PINK, "D"),
    "epsilon-3": (style.GREEN, "^"),
    "not-private": (style.BLACK, "o"),
    TIGHT: (style.YELLOW, "v"),
}


def figure(results: Results) -> Figure:
    """Accuracy, AUC and calibration above, groups below."""
    drawn, axes = style.panels(2, 3, (12, 10), height_ratios=(1, 1.1))
    grid = axes[3].get_gridspec()
    assert grid is not None
    for panel in axes[3:]:
        panel.remove()
    _dots(axes[0], results, "test_accuracy", 100, "test accuracy (%)")
    _dots(axes[1], results, "auc", 1, "AUC")
    _reliability(axes[2], results)
    _bars(style.added(drawn, grid[1, :]), results)
    return drawn


def _dots(axes: Axes, results: Results, key: str, scale: float, label: str) -> None:
    for i, (model, shown) in enumerate(MODELS.items()):
        # Colours that no budget has.
        colour, marker = (style.BLUE, "o") if i == 0 else (style.BROWN, "s")
        for place, budget in enumerate(BUDGETS):
            values = [scale * line[key] for line in found(results, model, budget)]
            axes.plot(
                [place + 0.24 * i - 0.12] * len(values),
                values,
                marker,
                color=colour,
                alpha=0.6,
                markersize=6,
                label=shown,
            )
    axes.set_xticks(range(len(BUDGETS)), ["0.5", "1", "3", "not\nprivate"])
    axes.set_xlabel("proven epsilon at delta 1e-5")
    axes.margins(y=0.15)
    style.title(axes, label[0].upper() + label[1:])
    if key == "auc":
        axes.legend(handles=axes.get_lines()[:: len(BUDGETS)], loc="lower right", fontsize=12)


def _reliability(axes: Axes, results: Results) -> None:
    axes.plot([0, 1], [0, 1], ":", color="0.5", linewidth=1.5)
    for budget in (*BUDGETS, TIGHT):
        lines = found(results, _OF_GROUPS, budget)
        if not lines:
            continue
        error = statistics.mean(line["calibration_error"] for line in lines)
        colour, marker = _LOOKS[budget]
        points = reliability_mean(lines)
        axes.plot(
            *zip(*points, strict=True),
            marker=marker,
            color=colour,
            markersize=6,
            linewidth=1.6,
            label=f"{SHOWN[budget]}: ECE {error:.3f}",
        )
    axes.set(
        xlim=(0, 1),
        ylim=(0, 1.42),
        yticks=(0, 0.2, 0.4, 0.6, 0.8, 1),
        xlabel="predicted probability of unemployment",
        ylabel="share not employed",
    )
    style.title(axes, "Calibration, MLP")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="upper left", fontsize=11, labelspacing=0.25, handlelength=1.5)


def reliability_mean(lines: Lines) -> list[tuple[float, float]]:
    """Mean prediction and share found, bin by bin, over the test records of all runs."""
    sums: dict[int, list[float]] = {}
    for line in lines:
        for row in line["reliability"]:
            place = min(int(row["predicted"] * census.BINS), census.BINS - 1)
            total = sums.setdefault(place, [0.0, 0.0, 0.0])
            for i, value in enumerate((1.0, row["predicted"], row["found"])):
                total[i] += row["size"] * value
    # Fewer than 20 records a run say nothing about a share.
    kept = {i: t for i, t in sorted(sums.items()) if t[0] >= 20 * len(lines)}
    return [(predicted / size, share / size) for size, predicted, share in kept.values()]


def _bars(axes: Axes, results: Results) -> None:
    labels: list[str] = []
    for i, budget in enumerate(BUDGETS):
        lines = found(results, _OF_GROUPS, budget)
        if not lines:
            continue
        colour, marker = _LOOKS[budget]
        grouped = by_group(lines)
        labels = [f"{_two_lines(name)}\n{groups[0]['size']:,}" for name, groups in grouped.items()]
        for place, groups in enumerate(grouped.values()):
            x, mean = place + 0.18 * (i - 1.5), 100 * statistics.mean(errors(groups))
            low, high = interval(groups)
            deviation = 100 * statistics.stdev(errors(groups)) if len(groups) > 1 else 0
            axes.plot([x, x], [100 * low, 100 * high], color=colour, linewidth=1.1)
            axes.plot(
                [x, x], [mean - deviation, mean + deviation], color=colour, linewidth=5, alpha=0.5
            )
            axes.plot(
                x,
                mean,
                marker,
                color=colour,
                markersize=6.5,
                label=SHOWN[budget] if place == 0 else None,
            )
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel("wrong predictions (%)")
    style.title(axes, "Errors by group, MLP (number of test records below the group)")
    axes.legend(loc="upper left", ncols=4, fontsize=12) if labels else style.nothing_yet(axes)


def _two_lines(name: str) -> str:
    return name.replace(", ", "\n") if "," in name else f"{name}\n"
