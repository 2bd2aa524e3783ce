"""Groups of the census runs: their errors, run by run, and how far two settings are apart."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from scipy.stats import binomtest, t

from benchmarks.papers.tables.rows import Results

FILE = "pums.json"
MODELS = {"logistic": "logistic regression", "mlp": "MLP, 64 hidden units"}
BUDGETS = ("epsilon-0.5", "epsilon-1", "epsilon-3", "not-private")
TIGHT = "epsilon-1-tight"
SHOWN = {
    "epsilon-0.5": "ε 0.5",
    "epsilon-1": "ε 1",
    "epsilon-3": "ε 3",
    "not-private": "not private",
    TIGHT: "ε 1, clipped to 0.5",
}
Lines = Sequence[dict[str, Any]]


def found(results: Results, model: str, budget: str) -> Lines:
    """The runs of one setting, in order."""
    name = f"pums-{model}-{budget}"
    lines = [line for line in results.read(FILE) or [] if line["name"] == name]
    return sorted(lines, key=lambda line: line["run"])


def by_group(lines: Lines) -> dict[str, Lines]:
    """Every group's counts, run by run."""
    names = [group["group"] for group in lines[0]["groups"]]
    return {name: [line["groups"][i] for line in lines] for i, name in enumerate(names)}


def errors(groups: Lines) -> list[float]:
    """The error of one group, run by run."""
    return [group["errors"] / group["size"] for group in groups]


def interval(groups: Lines) -> tuple[float, float]:
    """Wilson's 95 % interval of the mean error, for the number of test records alone."""
    size = groups[0]["size"]
    mean = round(statistics.mean(group["errors"] for group in groups))
    bounds = binomtest(mean, size).proportion_ci(0.95, method="wilson")
    return bounds.low, bounds.high


def shift(strict: Lines, free: Lines) -> tuple[float, float, float]:
    """The rise of a group's error from no privacy to the strictest budget, in points.

    With Welch's 95 % interval over the runs, for these test records.
    """
    first, second = errors(strict), errors(free)
    parts = [statistics.variance(values) / len(values) for values in (first, second)]
    mean, spread_of_mean = statistics.mean(first) - statistics.mean(second), math.sqrt(sum(parts))
    reach = 0.0
    if spread_of_mean:
        # Welch 1947, with Satterthwaite's degrees of freedom; scipy's warns where runs are equal.
        freedom = sum(parts) ** 2 / sum(
            part**2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True)
        )
        reach = float(t.ppf(0.975, freedom)) * spread_of_mean
    return 100 * mean, 100 * (mean - reach), 100 * (mean + reach)


def shift_cell(strict: Lines, free: Lines) -> str:
    """The rise of a group's error and its interval; – where there is no spread."""
    if min(len(strict), len(free)) < 2:
        return "–"
    mean, low, high = shift(strict, free)
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def spread(values: Sequence[float], percent: bool = True, digits: int = 2) -> str:
    """Mean ± standard deviation; of one value, the value."""
    scale, unit = (100, " %") if percent else (1, "")
    digits = digits if percent else 3
    mean = f"{scale * statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean + unit
    return f"{mean} ± {scale * statistics.stdev(values):.{digits}f}{unit}"
