"""The papers' rows as a queue: one run after the other, resumable, results kept as JSON."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxdp import data
from jaxdp._durable import open_locked, write_atomically
from jaxdp.runs.column import audited_columns
from jaxdp.runs.config import RunConfig, recipe, resolve
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.loop import Progress, RunResult, resume, start
from jaxdp.seeds import Secret


@dataclasses.dataclass(frozen=True)
class Row:
    """One run of a table.

    Attributes:
        name: of the row.
        dataset: of the run.
        given: what differs from the data set's recipe.
        paper: the paper's accuracy and where it stands, or "".
    """

    name: str
    dataset: str
    given: dict[str, Any]
    paper: str = ""

    def config(self) -> RunConfig:
        """The resolved configuration."""
        return resolve(recipe(self.dataset, **self.given))


_CNN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dp-sgd-tanh", {}),
    ("dp-sgd-relu", {"activation": "relu"}),
    ("auto-s", {"method": "auto-s"}),
    ("sa-dpsgd", {"method": "sa-dpsgd"}),
    ("adadp", {"method": "adadp", "l2_clip_norm": 1.0}),
    ("piadam", {"method": "piadam"}),
    ("dp-adam", {"method": "dp-adam"}),
    ("tempered-sigmoid", {"activation": "tempered_sigmoid"}),
    ("sa-dpsgd-as-published", {"method": "sa-dpsgd-as-published"}),
    ("exp", {"noise_schedule": "exponential:0.01:118"}),
)
_PAPER = {
    ("mnist", "dp-sgd-relu"): "96.73 %", ("mnist", "dp-sgd-tanh"): "98.05 %",
    ("mnist", "auto-s"): "98.12 %", ("mnist", "sa-dpsgd"): "98.35 %",
    ("fashion_mnist", "dp-sgd-relu"): "84.42 %", ("fashion_mnist", "dp-sgd-tanh"): "86.03 %",
    ("fashion_mnist", "auto-s"): "86.33 %", ("fashion_mnist", "sa-dpsgd"): "87.41 %",
}


def _table_1(dataset: str, suffix: str, **changes: Any) -> list[Row]:
    rows = []
    for name, given in _CNN:
        paper = _PAPER.get((dataset, name), "")
        source = f"{paper} (SA-DPSGD, Table 1)" if paper and not suffix else ""
        rows.append(Row(f"{dataset}-{name}{suffix}", dataset, {**given, **changes}, source))
    return rows


def _mlp() -> list[Row]:
    rows = []
    for noise, pca, epochs in ((8.0, 16.0, 30), (4.0, 7.0, 100), (2.0, 4.0, 260)):
        for name in ("adadp", "dp-sgd", "adadp-as-published"):
            given = {
                "method": name, "model": "mlp", "hidden": 1_000, "activation": "relu",
                "batch_size": 600, "noise_multiplier": noise, "steps": 100 * epochs,
                "l2_clip_norm": 4.0, "pca_dimensions": 60, "pca_noise_multiplier": pca,
                **({"learning_rate": 0.1, "momentum": 0.0} if name == "dp-sgd" else {}),
            }
            rows.append(Row(f"mnist-mlp-pca-{name}-noise-{noise:g}", "mnist", given))
        for name in ("piadam", "dpgdo", "piadam-as-published"):
            given = {
                "method": name, "model": "mlp", "hidden": 1_000, "activation": "relu",
                "batch_size": 600, "noise_multiplier": noise, "steps": 100 * epochs,
                "l2_clip_norm": 4.0, "learning_rate": 0.001,
            }
            rows.append(Row(f"mnist-mlp-{name}-noise-{noise:g}", "mnist", given))
    return rows


# MNIST first; "short" rows take a few epochs and hence less noise at the same proven epsilon.
ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        *_table_1("mnist", "-short", epsilon=3.0, steps=600),
        *_table_1("fashion_mnist", "-short", epsilon=3.0, steps=150),
        *_table_1("mnist", "", epsilon=3.0, steps=4_700),
        *_table_1("fashion_mnist", "", epsilon=3.0, steps=1_172),
        *_mlp(),
        *_table_1("cifar10", "", epsilon=3.0, steps=1_465),
    )
}


def work(
    names: Iterable[str], folder: Path, results: Path, data_dir: Path | None,
    report: Callable[[RunResult], dict[str, Any]], progress: Callable[[Row], Any],
) -> list[str]:
    """Runs the rows that have no result yet, one after the other; returns their names.

    An interrupted row goes on from its last checkpoint; one worker at a time.

    Args:
        names: keys of :data:`ROWS`, in the order of running.
        folder: where the runs lie.
        results: the JSON file of finished rows.
        data_dir: where prepared data sets lie.
        report: the report of a finished run, as a dictionary.
        progress: from a row to a context manager of its progress function.

    Raises:
        ValueError: an unknown row, or another worker is at it.
    """
    chosen = [row_named(name) for name in names]
    folder.mkdir(parents=True, exist_ok=True)
    lock = open_locked(folder / "worker.lock", "w", f"queue is in use by another worker: {folder}")
    done = []
    try:
        for row in chosen:
            if row.name in finished(results):
                continue
            with progress(row) as shown:
                result = run_row(row, folder / row.name, data_dir, shown)
            keep(results, row, report(result))
            done.append(row.name)
    finally:
        lock.close()
    return done


def run_row(row: Row, folder: Path, data_dir: Path | None, progress: Progress) -> RunResult:
    """Starts the row's run, or goes on with it."""
    directory = RunDirectory(folder)
    dataset = data.load(row.dataset, data_dir)
    if directory.exists():
        config = RunConfig(**directory.load_state()["config"])
        return resume(config, directory, dataset, progress)
    return start(row.config(), directory, dataset, Secret.new(), progress)


def row_named(name: str) -> Row:
    """The row; ValueError for an unknown name."""
    if name not in ROWS:
        raise ValueError(f"rows must be among those of `jaxdp reproduce list`, got {name!r}")
    return ROWS[name]


def finished(results: Path) -> dict[str, dict[str, Any]]:
    """The finished rows by name."""
    if not results.exists():
        return {}
    return {row["name"]: row for row in json.loads(results.read_text(encoding="utf-8"))}


def keep(results: Path, row: Row, report: dict[str, Any]) -> None:
    """Adds a finished row to the file, all at once."""
    counts, claim = report["counts"], report["claim"]
    line = {
        "name": row.name, "dataset": row.dataset, "method": report["method"],
        "model": report["model"], "activation": report["activation"],
        "test_accuracy": report["test_accuracy"],
        "proven_epsilon": report["guarantee"]["epsilon"],
        "delta": report["guarantee"]["delta"],
        "claimed_epsilon": claim["epsilon"] if claim else None,
        **audited_columns(report.get("audited")),
        "acceptance_rate": counts["accepted"] / counts["proposals"] if counts else None,
        "noise_multiplier": report["guarantee"]["noise_multiplier"],
        "steps": report["history"][-1]["step"], "judged_by": report["judged_by"],
        "paper": row.paper or None, "seconds": report["seconds"],
        "steps_timed": report["steps_in_this_sitting"], "machine": report["machine"],
        "jaxdp": report["jaxdp"], "config": report["config"],
    }
    rows = {**finished(results), row.name: line}
    results.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(results, json.dumps(list(rows.values()), indent=1) + "\n")
