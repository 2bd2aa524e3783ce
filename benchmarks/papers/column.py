"""The audited column of the papers' rows: of the run, or of its algorithm on a tiny network."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.papers.row import ResultRow
from jaxdp import arguments
from jaxdp.audit.algorithms import EpsilonAudit, audit_algorithm
from jaxdp.ledger.durable import write_atomically
from jaxdp.optimizers import registry
from jaxdp.papers import algorithms, networks  # noqa: F401  (registers them)
from jaxdp.runs.config import RunConfig
from jaxdp.runs.report.schema import AuditRow

MOST_STEPS = 600
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def audited_columns(audited: AuditRow | None) -> ResultRow:
    """The columns of a result row about an audit.

    Args:
        audited: of its report; None where nothing was audited.
    """
    if audited is None:
        return {"audited_epsilon": None, "audited": None}
    runs = "1 run" if audited.runs == 1 else f"{audited.runs:,} runs"
    what = f"{audited.what}, {audited.steps:,} steps, {runs}"
    return {
        "audited_epsilon": audited.audited,
        "audited": f"{what}, at {audited.confidence:.0%} confidence",
    }


def audit_rows(
    results: Path,
    *,
    runs: int = 2_000,
    confidence: float = 0.95,
    seed: int | None = None,
    progress: Progress,
) -> list[ResultRow]:
    """Audits the algorithm of every finished row that has no audit yet; returns those rows.

    The row's own noise, sampling rate and steps (at most ``MOST_STEPS``), on a tiny network:
    see ``jaxdp.audit.algorithms.audit_algorithm`` for what that says. Each row is written as soon
    as it is done, so that a command that was stopped goes on where it was.

    Args:
        results: the JSON file of the finished rows.
        runs: in each world.
        confidence: of every number, by itself.
        seed: of the runs.
        progress: from a name and a number of runs to a context manager of a progress function.

    Raises:
        ValueError: the file is missing, or a row is not one of ``benchmarks.papers.queue``.
    """
    arguments.integer("runs", runs, least=10)
    done: list[ResultRow] = []
    for row in _rows(results):
        if row.get("audited_epsilon") is not None or _refused(row):
            continue
        with progress(row["name"], 2 * runs) as shown:
            found = _audit(RunConfig.from_dict(row["config"]), runs, confidence, seed, shown)
        filled: ResultRow = {**row, **audited_columns(AuditRow.from_dict(found.to_dict()))}
        rows = [filled if _key(r) == _key(row) else r for r in _rows(results)]
        write_atomically(results, json.dumps(rows, indent=1) + "\n")
        done.append(filled)
    return done


def _key(row: ResultRow) -> tuple[str, int]:
    return row["name"], row.get("run", 1)


def _rows(results: Path) -> list[ResultRow]:
    if not results.exists():
        raise ValueError(f"results must be a file of finished rows, got {results}: it is missing")
    rows: list[ResultRow] = json.loads(results.read_text(encoding="utf-8"))
    if not isinstance(rows, list) or not all("config" in row and "name" in row for row in rows):
        raise ValueError(f"results must hold rows of `jaxdp reproduce`, got {results}")
    return rows


def _refused(row: ResultRow) -> bool:
    """True if the audit of an algorithm does not cover the row: see docs/auditing.md."""
    config = RunConfig.from_dict(row["config"])
    return config.sampling == "fixed_size" or config.relation != "add_or_remove_one"


def _audit(
    config: RunConfig,
    runs: int,
    confidence: float,
    seed: int | None,
    progress: Callable[[int], None],
) -> EpsilonAudit:
    assert config.steps is not None
    return audit_algorithm(
        config.private_algorithm(),
        min(config.steps, MOST_STEPS),
        config.delta,
        runs=runs,
        confidence=confidence,
        energy=registry.ALGORITHMS[config.algorithm].energy,
        seed=seed,
        progress=progress,
        chunk=1_000,
        residuals=False,
    )
