"""Result rows and how a table shows them: the same columns everywhere, and never a seed."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.papers import cost, queue
from benchmarks.papers.row import ResultRow
from benchmarks.papers.rows import ROWS
from jaxdp.runs.report.words import show_epsilon

COLUMNS = (
    "row",
    "test accuracy",
    "claimed ε",
    "proven ε",
    "audited ε",
    "accepted",
    "seconds",
    "run",
    "machine",
)
# The same of all runs of a row, in one line.
SUMMED = (*COLUMNS[:-2], "runs", "machine")
EPSILONS_LEGEND = (
    "*Claimed*: by the paper's own formula, where it claims another number than the proven one. "
    "*Proven*: what jaxdp guarantees for everything that the run released (∞: nothing). "
    "*Audited*: a lower bound on epsilon by an attack, at 95 % confidence. –: no such number. All "
    "at delta 1e-5, one record added or removed. What is proven has 1.5 to 2.05 % more noise than "
    "σC, for rounding ([which has what](../papers.md#noise-and-clip-norm-to-the-number)). Machines "
    "were shared with other work: seconds say little."
)
# Of a row of papers.json, for every page.
NEEDED = (
    *("test_accuracy", "claimed_epsilon", "proven_epsilon", "acceptance_rate", "seconds"),
    *("steps", "steps_timed", "machine"),
)
LEGEND = f"{EPSILONS_LEGEND} *Accepted*: the share of candidates that an annealed algorithm took."
SUMMED_LEGEND = (
    "A row that ran several times is one line: mean ± standard deviation, the largest claimed and "
    "proven ε, the first audit, the mean share accepted; runs and their mean seconds by machine."
)
MISSING = "not run"


class Results:
    """The committed rows of one folder.

    Args:
        folder: that holds papers.json and the other files of rows.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._papers = queue.finished(folder / "papers.json", NEEDED)

    def runs(self, name: str) -> list[ResultRow]:
        """The runs of a row of papers.json, in order."""
        return [line for (of, _), line in sorted(self._papers.items()) if of == name]

    def read(self, file: str) -> Any:
        """Another file of the folder; None where there is none, ValueError where it is no JSON."""
        path = self.folder / file
        if not path.exists():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"results must be a JSON file, got {path}: {error}") from error


def lines(results: Results, name: str) -> list[list[str]]:
    """The cells of ``COLUMNS`` for every run of a row; without a run, one line saying so."""
    found = results.runs(name)
    if found:
        return [cells(line) for line in found]
    return [[f"`{name}`", status(name), *[""] * (len(COLUMNS) - 2)]]


def summed(results: Results, name: str) -> list[str]:
    """The cells of ``SUMMED`` of a row; without a run they say so."""
    found = results.runs(name)
    return sum_of(found) if found else lines(results, name)[0]


def sum_of(found: Sequence[ResultRow]) -> list[str]:
    """The cells of ``SUMMED`` of the runs of a row, one or more."""
    of: dict[str, list[ResultRow]] = {}
    for line in found:
        of.setdefault(line["machine"], []).append(line)
    claims = [line["claimed_epsilon"] for line in found if line["claimed_epsilon"] is not None]
    audits = [line["audited_epsilon"] for line in found if line.get("audited_epsilon") is not None]
    rates = [line["acceptance_rate"] for line in found if line["acceptance_rate"] is not None]
    return [
        f"`{found[0]['name']}`",
        mean_and_spread([line["test_accuracy"] for line in found])[0],
        shown_epsilon(max(claims, key=float, default=None)),
        shown_epsilon(max((line["proven_epsilon"] for line in found), key=float)),
        shown_audited(next(iter(audits), None)),
        shown_rate(statistics.mean(rates) if rates else None),
        "; ".join(map(mean_seconds, of.values())),
        " + ".join(str(len(lines)) for lines in of.values()),
        "; ".join(of),
    ]


def status(name: str) -> str:
    """The reason why a row has no result."""
    return f"{MISSING}: {cost.shown(ROWS[name])}"


def cells(line: ResultRow) -> list[str]:
    """The cells of one run."""
    return [
        f"`{line['name']}`",
        percent(line["test_accuracy"]),
        shown_epsilon(line.get("claimed_epsilon")),
        shown_epsilon(line["proven_epsilon"]),
        shown_audited(line.get("audited_epsilon")),
        shown_rate(line["acceptance_rate"]),
        shown_seconds(line),
        str(line.get("run", 1)),
        line["machine"],
    ]


def percent(share: float) -> str:
    """As in 98.35 %."""
    return f"{100 * share:.2f} %"


def mean_and_spread(shares: Sequence[float]) -> list[str]:
    """Mean ± standard deviation in percent and the number of runs; of one run, "single"."""
    if len(shares) == 1:
        return [percent(shares[0]), "single"]
    spread = 100 * statistics.stdev(shares)
    return [f"{100 * statistics.mean(shares):.2f} ± {spread:.2f} %", str(len(shares))]


def shown_epsilon(epsilon: float | str | None) -> str:
    """Rounded up; ∞, or – where there is none."""
    if epsilon is None:
        return "–"
    return show_epsilon(epsilon) if math.isfinite(float(epsilon)) else "∞"


def shown_audited(epsilon: float | None) -> str:
    """A lower bound, hence rounded down."""
    return "–" if epsilon is None else f"≥ {math.floor(1000 * epsilon) / 1000:.3f}"


def shown_rate(rate: float | None) -> str:
    """As in 75.0 %."""
    return "–" if rate is None else f"{100 * rate:.1f} %"


def shown_seconds(line: ResultRow) -> str:
    """The wall time; of an interrupted run that of its last part, which is said."""
    text = f"{line['seconds']:.0f}" if line["seconds"] >= 10 else f"{line['seconds']:.1f}"
    timed, steps = line.get("steps_timed", line["steps"]), line["steps"]
    return text if timed == steps else f"{text} (last {timed:,} of {steps:,} steps)"


def mean_seconds(lines: Sequence[ResultRow]) -> str:
    """Of the runs that one clock timed as a whole; where there is none, of the first."""
    whole = [x for x in lines if x.get("steps_timed", x["steps"]) == x["steps"]]
    if not whole:
        return shown_seconds(lines[0])
    return shown_seconds({**whole[0], "seconds": statistics.mean(x["seconds"] for x in whole)})


def on_cpu(line: ResultRow) -> bool:
    """False of a row whose seconds say nothing of two cores."""
    return line["machine"].endswith(", cpu")


def accuracies(results: Results, name: str) -> list[float]:
    """Test accuracy of every run of a row."""
    return [line["test_accuracy"] for line in results.runs(name)]
