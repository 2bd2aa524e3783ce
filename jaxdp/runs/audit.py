"""The audit of a finished run by the canaries that it was started with."""

import json
from pathlib import Path
from typing import Any

from jaxdp.auditing.one_run import RunAudit, audit_canaries
from jaxdp.ledger import Ledger
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.runs import canaries
from jaxdp.runs.config import RunConfig
from jaxdp.runs.directory import RunDirectory


def report_of(directory: RunDirectory) -> dict[str, Any]:
    """The dictionary of a finished run's report.json; ValueError without one."""
    path = directory.path / "report.json"
    if not path.exists():
        raise ValueError(
            f"run must be the folder of a finished run, got {directory.path}: no report.json"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def config_of(directory: RunDirectory) -> RunConfig:
    """The configuration of a finished run of the command line; ValueError for another run."""
    config = report_of(directory).get("config")
    if config is None:
        raise ValueError(
            f"run must be one of `jaxdp train`, got {directory.path}, whose model and data are in "
            "a program: call run.audit() there"
        )
    return RunConfig(**config)


def audit_run(
    directory: RunDirectory, delta: float | None = None, confidence: float = 0.95
) -> RunAudit:
    """Reads what the run released, and then the auditor's coins; nothing else of the run.

    The noisy gradients at the canaries' coordinates, ``report.json`` and ``ledger.jsonl`` are
    releases; of ``secret/`` only ``canaries.json`` is read.

    Formal guarantee: see :func:`jaxdp.auditing.one_run.audit_canaries`.

    Args:
        directory: of a finished run of the command line with ``canaries``.
        delta: of the epsilons; None is the run's.
        confidence: of the bound.

    Raises:
        ValueError: a run without canaries or without a report, or a file is missing or damaged.
    """
    config = config_of(directory)
    if not config.canaries:
        raise ValueError(f"run must have audit canaries, got {directory.path} without")
    return audit_rows_of(
        directory,
        config.private_algorithm(),
        config.canaries,
        config.delta if delta is None else delta,
        confidence,
    )


def audit_rows_of(
    directory: RunDirectory, algorithm: Algorithm, count: int, delta: float, confidence: float
) -> RunAudit:
    """As :func:`audit_run`, of a run whose algorithm and number of candidates are known."""
    report = report_of(directory)
    seen, steps = canaries.released(directory), report["history"][-1]["step"]
    if seen.shape != (steps, count):
        raise ValueError(
            f"{directory.canary_gradients} must hold {steps} steps of {count} canaries, got shape "
            f"{seen.shape}"
        )
    ledger, claim = Ledger(directory.ledger), report["claim"]
    releases = report["guarantee"]["releases"]
    if ledger.steps != releases:
        # What is missing would make the proven number too low, and an honest run look broken.
        raise ValueError(
            f"{directory.ledger} must hold the {releases} releases of report.json, got "
            f"{ledger.steps}"
        )
    if delta != report["guarantee"]["delta"]:
        claim = None  # the paper's epsilon is at the run's own delta
    return audit_canaries(
        seen,
        canaries.coins_of(directory, count),
        algorithm,
        ledger.event,
        delta,
        confidence=confidence,
        claimed=claim and (claim["name"], float(claim["epsilon"])),
    )


def save_audit(folder: Path, row: dict[str, Any], found: Any) -> None:
    """Writes audit.json and roc.png.

    Args:
        folder: where to.
        row: the audit, ready for JSON.
        found: the audit, for its plot.
    """
    from jaxdp.report.roc import save_roc

    (folder / "audit.json").write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    save_roc(found, folder / "roc.png", f"Audit of {row['algorithm']}, {found.steps:,} steps")


def into_report(directory: RunDirectory, row: dict[str, Any]) -> None:
    """Writes an audit into the report of the finished run that it is of."""
    from jaxdp.runs import reporting

    report = {**report_of(directory), "audited": row}
    for name in ("seconds", "steps_in_this_sitting"):
        report.pop(name, None)  # of reports older than the rule that no time is published
    reporting.write(report, directory)
