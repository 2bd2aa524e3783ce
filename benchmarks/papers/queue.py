"""The papers' rows as a queue: one run after the other, resumable, results kept as JSON."""

import datetime
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import jax

from benchmarks.papers import adadp_phase
from benchmarks.papers.column import audited_columns
from benchmarks.papers.row import ResultRow, Row
from benchmarks.papers.rows import ROWS as ROWS
from jaxdp import arguments, data
from jaxdp.ledger.durable import open_locked, write_atomically
from jaxdp.ledger.seeds import Secret
from jaxdp.runs.assemble import RunResult, resume, start
from jaxdp.runs.config import RunConfig
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.report.schema import Report
from jaxdp.runs.run import Progress

# Of a row and the number of its run, counted from 1.
Key = tuple[str, int]
R = TypeVar("R")  # a row


def work(
    names: Iterable[str],
    folder: Path,
    results: Path,
    data_dir: Path | None,
    report: Callable[[RunResult], Report],
    progress: Callable[[Row], AbstractContextManager[Progress]],
    runs: int = 1,
) -> list[Key]:
    """Runs the rows that have no result yet, one after the other; returns which.

    An interrupted row goes on from its last checkpoint; one worker at a time.

    Args:
        names: keys of ``ROWS``, in the order of running.
        folder: where the runs are.
        results: the JSON file of finished rows.
        data_dir: where prepared data sets are.
        report: from a finished run to its report.
        progress: from a row to a context manager of its progress function.
        runs: how often each is run; all rows once before any row twice.

    Raises:
        ValueError: an unknown row, or another worker is at it.
    """
    chosen = [row_named(name) for name in names]
    arguments.integer("runs", runs, least=1)
    # Reading one takes longer than many a run.
    load = functools.lru_cache(maxsize=1)(data.load)

    def one(row: Row, number: int) -> dict[str, Any]:
        with progress(row) as shown:
            dataset = load(row.dataset, data_dir)
            result = run_row(row, folder / folder_name(row.name, number), dataset, shown)
        return {**line_of(row, report(result)), **_measured(row, number, result)}

    return work_through({row.name: row for row in chosen}, folder, results, one, runs)


def _measured(row: Row, number: int, result: RunResult) -> dict[str, Any]:
    """The queue's own notes, of public data sets: a report holds no time."""
    return {
        "seconds": round(result.seconds, 1),
        "steps_timed": result.steps_run,
        "date": datetime.date.today().isoformat(),
        "command": f"jaxdp reproduce run {row.name} --runs {number}",
    }


def work_through(
    rows: Mapping[str, R],
    folder: Path,
    results: Path,
    one: Callable[[R, int], Mapping[str, object]],
    runs: int,
    indent: int | None = 1,
    shown: Callable[[int], None] = lambda done: None,
) -> list[Key]:
    """Calls ``one(row, number)`` for what has no line in ``results`` yet, and keeps its lines.

    Args:
        rows: by name, in the order of running.
        folder: locked meanwhile.
        results: the JSON file of finished rows.
        one: makes a line.
        runs: how often each is run; all rows once before any row twice.
        indent: of the file; None writes one line a row.
        shown: called with how many runs are done, at first and after each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open_locked(folder / "worker.lock", "w", f"queue is in use by another worker: {folder}")
    done = []
    try:
        before = len(finished(results))
        shown(before)
        for number in range(1, runs + 1):
            for name, row in rows.items():
                if (name, number) not in finished(results):
                    keep(results, {**one(row, number), "run": number}, indent)
                    done.append((name, number))
                    shown(before + len(done))
    finally:
        lock.close()
    return done


def run_row(row: Row, folder: Path, dataset: data.Dataset, progress: Progress) -> RunResult:
    """Starts the row's run, or goes on with it.

    Raises:
        ValueError: the folder holds a run of another configuration.
    """
    directory, enough = RunDirectory(folder), row.enough if row.accepted is not None else None
    if directory.exists():
        kept = directory.load_state().config
        if kept is None or "algorithm" not in kept and "method" not in kept:
            raise ValueError(
                f"{folder} must hold a run of row {row.name}, got one of a program: move it away, "
                "or give another --out"
            )
        config = RunConfig.from_dict(kept)
        # With the defaults of what an older version did not write down.
        _check_same(row, config, folder)
        return resume(config, directory, dataset, progress, enough=enough)
    return start(row.config(), directory, dataset, Secret.new(), progress, enough=enough)


def _check_same(row: Row, kept: RunConfig, folder: Path) -> None:
    """Raises ValueError where the run in a folder is not the row's, which would bear its name."""
    # As files hold them: tuples are lists there.
    stored, now = (json.loads(json.dumps(each.to_dict())) for each in (kept, row.config()))
    for name in sorted(now):
        same = stored[name] == now[name]
        # Another version of the accountant calibrates them a little differently.
        if name in ("noise_multiplier", "steps") and stored[name] and now[name]:
            same = math.isclose(stored[name], now[name], rel_tol=0.01)
        if not same:
            raise ValueError(
                f"{folder} must hold a run of row {row.name}, got one of another configuration, "
                f"with {name} {stored[name]!r} instead of {now[name]!r}: move it away, or give "
                "another --out"
            )


def row_named(name: str) -> Row:
    """The row; ValueError for an unknown name."""
    if name not in ROWS:
        raise ValueError(f"rows must be among those of `jaxdp reproduce list`, got {name!r}")
    return ROWS[name]


def folder_name(name: str, run: int) -> str:
    """Of the run's folder."""
    return name if run == 1 else f"{name}.run-{run}"


def forget(names: Iterable[str], folder: Path, results: Path) -> None:
    """Takes all runs of rows out of the results, so that they are run again.

    Args:
        names: keys of ``ROWS``.
        folder: where runs will be; it may hold none of these.
        results: the JSON file of finished rows.

    Raises:
        ValueError: a run of one of the rows is in the folder, and would be told again.
    """
    old = set(names)
    found = finished(results)
    for name, number in [*((name, 1) for name in old), *found]:
        if name in old and (kept := folder / folder_name(name, number)).exists():
            raise ValueError(
                f"out must hold no run of a row that is run again, got {kept}: give another --out, "
                "or leave --again out to go on with it"
            )
    left = [line for (name, _), line in found.items() if name not in old]
    write_atomically(results, json.dumps(left, indent=1) + "\n")


def has_gpu() -> bool:
    """True if long rows can run here without being named."""
    return jax.default_backend() != "cpu"


def finished(results: Path, needed: Iterable[str] = ()) -> dict[Key, ResultRow]:
    """The finished rows by name and run.

    Args:
        results: the JSON file; one that is not there holds none.
        needed: what every line must have besides its name.

    Raises:
        ValueError: the file cannot be read, is no JSON, or holds something else.
    """
    if not results.exists():
        return {}
    try:
        lines = json.loads(results.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"results must be a JSON file, got {results}: {error}") from error
    wanted = {"name", *needed}
    if not isinstance(lines, list) or not all(
        isinstance(line, dict) and wanted <= line.keys() for line in lines
    ):
        raise ValueError(
            f"results must be a list of rows, each with {', '.join(sorted(wanted))}; got something "
            f"else in {results}"
        )
    return {(line["name"], line.get("run", 1)): line for line in lines}


def line_of(row: Row, report: Report) -> dict[str, Any]:
    """The result row of a finished run."""
    counts, written = report.counts, report.to_dict()
    return {
        "name": row.name,
        "dataset": row.dataset,
        "algorithm": report.algorithm,
        "model": report.model,
        "activation": report.activation,
        "test_accuracy": report.value,
        "proven_epsilon": written["guarantee"]["epsilon"],
        "delta": report.guarantee.delta,
        "claimed_epsilon": written["claim"] and written["claim"]["epsilon"],
        **audited_columns(report.audited),
        "accepted": counts.accepted if counts else None,
        "acceptance_rate": counts.accepted / counts.proposals if counts else None,
        "noise_multiplier": report.guarantee.noise_multiplier,
        "steps": report.history[-1].step,
        "judged_by": report.judged_by,
        "paper": row.paper or None,
        "machine": report.machine,
        "jaxdp": report.jaxdp,
        "config": report.config,
        "curve": [[at["step"], at["epsilon"], at["test_accuracy"]] for at in written["history"]],
        # Of the same public test examples; beside the curve, which earlier rows have without it.
        "test_losses": [at.get("test_loss") for at in written["history"]],
        # What SA-DPSGD's paper charges up to there.
        "accepted_by": [at.get("accepted") for at in written["history"]] if counts else None,
        **adadp_phase.columns(report),
    }


def keep(results: Path, line: Mapping[str, object], indent: int | None = 1) -> None:
    """Adds a finished row to the file, all at once."""
    rows: dict[tuple[object, object], Mapping[str, object]] = {}
    rows.update(((name, run), row) for (name, run), row in finished(results).items())
    rows[line["name"], line.get("run", 1)] = line
    results.parent.mkdir(parents=True, exist_ok=True)
    if indent is None:
        text = "[\n" + ",\n".join(json.dumps(row) for row in rows.values()) + "\n]"
    else:
        text = json.dumps(list(rows.values()), indent=indent)
    write_atomically(results, text + "\n")
