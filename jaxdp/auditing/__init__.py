"""Audits: attacks on a mechanism, and the valid lower bounds on epsilon that they prove.

from jaxdp import auditing
run = auditing.training_run(algorithm, worlds, steps=10)
with_record, without = auditing.two_worlds(run, 10_000)
auditing.audit_scores(with_record, without, delta=1e-5).epsilon
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdp.auditing.audit import AlgorithmAudit, audit_algorithm
    from jaxdp.auditing.bounds import Counts, epsilon_bound, gaussian_bound
    from jaxdp.auditing.canaries import Canaries
    from jaxdp.auditing.events import audit_event
    from jaxdp.auditing.guessed import (
        audit_guesses,
        audit_one_run,
        audit_one_run_family,
        audit_one_run_gaussian,
    )
    from jaxdp.auditing.measures import AttackMeasures, attack_measures, audit_ranks, audit_splits
    from jaxdp.auditing.one_run import RunAudit, audit_canaries
    from jaxdp.auditing.reference import audit_noise
    from jaxdp.auditing.residuals import audit_residuals
    from jaxdp.auditing.scores import Audited, audit_scores
    from jaxdp.auditing.worlds import Worlds, training_run, two_worlds

__all__ = [
    "AlgorithmAudit",
    "AttackMeasures",
    "Audited",
    "Canaries",
    "Counts",
    "RunAudit",
    "Worlds",
    "attack_measures",
    "audit_algorithm",
    "audit_canaries",
    "audit_event",
    "audit_guesses",
    "audit_noise",
    "audit_one_run",
    "audit_one_run_family",
    "audit_one_run_gaussian",
    "audit_ranks",
    "audit_residuals",
    "audit_scores",
    "audit_splits",
    "epsilon_bound",
    "gaussian_bound",
    "training_run",
    "two_worlds",
]

# Imported when asked for: attacks need scipy.stats, which takes a second, and training none of it.
_HOME = {
    "AlgorithmAudit": "audit",
    "AttackMeasures": "measures",
    "Audited": "scores",
    "Canaries": "canaries",
    "Counts": "bounds",
    "RunAudit": "one_run",
    "Worlds": "worlds",
    "attack_measures": "measures",
    "audit_algorithm": "audit",
    "audit_canaries": "one_run",
    "audit_event": "events",
    "audit_guesses": "guessed",
    "audit_noise": "reference",
    "audit_one_run": "guessed",
    "audit_one_run_family": "guessed",
    "audit_one_run_gaussian": "guessed",
    "audit_ranks": "measures",
    "audit_residuals": "residuals",
    "audit_scores": "scores",
    "audit_splits": "measures",
    "epsilon_bound": "bounds",
    "gaussian_bound": "bounds",
    "training_run": "worlds",
    "two_worlds": "worlds",
}
_SUBMODULES = (
    "assumed", "bounds", "events", "features", "guessed", "guesses", "measures", "ranks",
    "residuals", "scores",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """A name of the package, from the module that defines it; or such a module."""
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
