"""The audit of a finished run by the canaries that it was started with."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxdp.audit.algorithms import EpsilonAudit
from jaxdp.audit.canaries import PARTS
from jaxdp.audit.one_run import audit_canaries
from jaxdp.ledger import Ledger
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.runs import canaries
from jaxdp.runs.config import RunConfig
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.files import writing

if TYPE_CHECKING:  # their package is slow to import
    from jaxdp.runs.report.schema import AuditRow, Report


def report_of(directory: RunDirectory) -> "Report":
    """The report of a finished run; ValueError without one."""
    from jaxdp.runs.report.schema import load

    path = directory.path / "report.json"
    if not path.exists():
        raise ValueError(
            f"run must be the folder of a finished run, got {directory.path}: no report.json. "
            "run.report() writes it where Run(..., report=False) left it out"
        )
    return load(path)


def config_of(directory: RunDirectory) -> RunConfig:
    """The configuration of a finished run of the command line; ValueError for another run."""
    config = report_of(directory).config
    if config is None:
        raise ValueError(
            f"run must be one of `jaxdp train`, got {directory.path}, whose model and data are in "
            "a program: call run.audit() there"
        )
    return RunConfig.from_dict(config)


def audit_run(
    directory: RunDirectory, delta: float | None = None, confidence: float = 0.95
) -> EpsilonAudit:
    """The audit of a finished run, from its releases and the auditor's coins alone.

    The noisy gradients at the canaries' coordinates, ``report.json`` and ``ledger.jsonl`` are
    releases; of ``secret/`` only ``canaries.json`` is read.

    Formal guarantee: see ``jaxdp.audit.one_run.audit_canaries``.

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
    directory: RunDirectory,
    algorithm: Algorithm,
    count: int,
    delta: float,
    confidence: float,
    ends: np.ndarray | None = None,
) -> EpsilonAudit:
    """The audit of a run whose algorithm and number of candidates are given.

    Of candidates that are records, three numbers are released of each in every step.

    Args:
        directory: of the run.
        algorithm: of the run.
        count: m, the number of candidates.
        delta: of the epsilons.
        confidence: of the bound.
        ends: float [2, m], the candidates' losses before the first step and after the last, where
            they alone are scored.
    """
    report = report_of(directory)
    steps = report.history[-1].step
    seen = canaries.released(directory) if ends is None else ends
    records = seen.shape == (steps, PARTS * count)
    if ends is None and not records and seen.shape != (steps, count):
        raise ValueError(
            f"{directory.canary_gradients} must hold {steps} steps of {count} canaries, got shape "
            f"{seen.shape}"
        )
    ledger = Ledger(directory.ledger)
    claim = None if report.claim is None else (report.claim.name, report.claim.epsilon)
    releases = report.guarantee.releases
    if ledger.steps != releases:
        # What is missing would make the proven number too low, and an honest run look broken.
        raise ValueError(
            f"{directory.ledger} must hold the {releases} releases of report.json, got "
            f"{ledger.steps}"
        )
    if delta != report.guarantee.delta:
        claim = None  # the paper's epsilon is at the run's own delta
    return audit_canaries(
        seen,
        canaries.coins_of(directory, count),
        algorithm,
        ledger.event,
        delta,
        confidence=confidence,
        claimed=claim,
        records=records,
        steps=None if ends is None else steps,
    )


def row_of(name: str, found: EpsilonAudit) -> "AuditRow":
    """An audit as it is written to files, under the name of what was audited."""
    from jaxdp.runs.report.schema import AuditRow

    return AuditRow.from_dict({"algorithm": name, **found.to_dict()})


def save_audit(folder: Path, row: "AuditRow", found: EpsilonAudit) -> None:
    """Writes audit.json and roc.png.

    Args:
        folder: where to.
        row: the audit.
        found: the same with its ROC curve.
    """
    from jaxdp.runs.report.plots import save_roc

    with writing(folder / "audit.json"):
        text = json.dumps(row.to_dict(), indent=1) + "\n"
        (folder / "audit.json").write_text(text, encoding="utf-8")
        save_roc(found, folder / "roc.png", f"Audit of {row.algorithm}, {found.steps:,} steps")


def into_report(directory: RunDirectory, row: "AuditRow") -> None:
    """Writes an audit into the report of the finished run that it is of."""
    from jaxdp.runs import reporting

    reporting.write(dataclasses.replace(report_of(directory), audited=row), directory)
