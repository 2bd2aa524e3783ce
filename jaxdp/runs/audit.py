"""The audit of a finished run by the canaries that it was started with."""

import json

from jaxdp.auditing.one_run import RunAudit, audit_canaries
from jaxdp.ledger import Ledger
from jaxdp.runs import canaries
from jaxdp.runs.config import RunConfig
from jaxdp.runs.directory import RunDirectory


def audit_run(
    directory: RunDirectory, delta: float | None = None, confidence: float = 0.95
) -> RunAudit:
    """Reads what the run released, and then the auditor's coins; nothing else of the run.

    The noisy gradients at the canaries' coordinates, ``report.json`` and ``ledger.jsonl`` are
    releases; of ``secret/`` only ``canaries.json`` is read.

    Formal guarantee: see :func:`jaxdp.auditing.one_run.audit_canaries`.

    Args:
        directory: of a finished run with ``canaries``.
        delta: of the epsilons; None is the run's.
        confidence: of the bound.

    Raises:
        ValueError: a run without canaries or without a report, or a file is missing or damaged.
    """
    path = directory.path / "report.json"
    if not path.exists():
        raise ValueError(f"run must be the folder of a finished run, got {directory.path}: "
                         "no report.json")
    report = json.loads(path.read_text(encoding="utf-8"))
    config = RunConfig(**report["config"])
    if not config.canaries:
        raise ValueError(f"run must have audit canaries, got {directory.path} without")
    seen = canaries.released(directory)
    if seen.shape != (config.steps, config.canaries):
        raise ValueError(
            f"{directory.canary_gradients} must hold {config.steps} steps of {config.canaries} "
            f"canaries, got shape {seen.shape}"
        )
    ledger, claim = Ledger(directory.ledger), report["claim"]
    releases = report["guarantee"]["releases"]
    if ledger.steps != releases:
        # What is missing would make the proven number too low, and an honest run look broken.
        raise ValueError(
            f"{directory.ledger} must hold the {releases} releases of report.json, got "
            f"{ledger.steps}"
        )
    if delta is not None and delta != config.delta:
        claim = None  # the paper's epsilon is at the run's own delta
    return audit_canaries(
        seen, canaries.coins_of(directory, config.canaries), config.private_method(),
        ledger.event, config.delta if delta is None else delta, confidence=confidence,
        claimed=claim and (claim["name"], float(claim["epsilon"])),
    )
