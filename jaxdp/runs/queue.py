"""The papers' rows as a queue: one run after the other, resumable, results kept as JSON."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxdp import data
from jaxdp._durable import open_locked, write_atomically
from jaxdp.runs.config import RunConfig
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.loop import Progress, RunResult, resume, start
from jaxdp.runs.rows import ROWS, Row
from jaxdp.seeds import Secret


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
