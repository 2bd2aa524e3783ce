"""The order in which the queue is run: by group, and what takes least time first within one."""

from benchmarks.papers import cost, repeats
from benchmarks.papers.row import Row
from benchmarks.papers.rows import ROWS

GROUPS = (
    "SA-DPSGD by its own protocol, Fashion-MNIST",
    "SA-DPSGD by its own protocol, MNIST",
    "PIGDO's networks on 784 pixels",
    "AdaDp: Table I, AdaL, AdaN, Figures 2 and 3",
    "repeated rows of accuracy against epsilon",
    "CIFAR-10, short",
    "SA-DPSGD's Table 1 and Figure 4",
    "the rest",
)
_REST = len(GROUPS) - 1


def group(row: Row) -> int:
    """The place of the row's group in ``GROUPS``."""
    if row.accepted is not None:
        return 0 if row.dataset == "fashion_mnist" else 1
    if row.name in {of.name for of in repeats.ROWS}:
        return 4
    if row.dataset == "cifar10" and row.name.endswith("-short"):
        return 5
    if "-pca-" in row.name or "-features-" in row.name:
        return 3
    if "-mlp-" in row.name and "-noise-" in row.name and row.given.get("hidden") == 1_000:
        return 2 if "figure-7" not in row.name and "1000" not in row.name else _REST
    brief = "-short" in row.name or row in repeats.RATES
    return _REST if "-mlp-" in row.name or brief else 6


def ordered() -> dict[str, Row]:
    """The rows of the queue by name, in the order of running."""
    return {row.name: row for row in sorted(ROWS.values(), key=lambda of: (group(of), _time(of)))}


def _time(row: Row) -> float:
    return cost.minutes(row)
