"""Audits: attacks on a mechanism, and the valid lower bounds on epsilon that they prove.

from jaxdp import auditing
run = auditing.training_run(algorithm, worlds, steps=10)
with_record, without = auditing.two_worlds(run, 10_000)
auditing.audit_scores(with_record, without, delta=1e-5).epsilon
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdp.auditing.assumed import audit_one_run_family
    from jaxdp.auditing.audit import AlgorithmAudit, audit_algorithm
    from jaxdp.auditing.bounds import ErrorCounts, epsilon_bound
    from jaxdp.auditing.canaries import Canaries
    from jaxdp.auditing.events import audit_event
    from jaxdp.auditing.guesses import audit_one_run
    from jaxdp.auditing.measures import AttackMeasures, attack_measures
    from jaxdp.auditing.one_run import RunAudit, audit_canaries
    from jaxdp.auditing.reference import audit_noise
    from jaxdp.auditing.residuals import audit_residuals
    from jaxdp.auditing.scores import Audited, audit_scores
    from jaxdp.auditing.worlds import Worlds, training_run, two_worlds

__all__ = [
    "AlgorithmAudit", "AttackMeasures", "Audited", "Canaries", "ErrorCounts", "RunAudit", "Worlds",
    "attack_measures", "audit_algorithm", "audit_canaries", "audit_event", "audit_noise",
    "audit_one_run", "audit_one_run_family", "audit_residuals", "audit_scores", "epsilon_bound",
    "training_run", "two_worlds",
]  # fmt: skip

# Imported when asked for: attacks need scipy.stats, which takes a second, and training none of it.
_NAMES = {
    "assumed": ("audit_one_run_family",),
    "audit": ("AlgorithmAudit", "audit_algorithm"),
    "bounds": ("ErrorCounts", "epsilon_bound"),
    "canaries": ("Canaries",),
    "events": ("audit_event",),
    "guesses": ("audit_one_run",),
    "measures": ("AttackMeasures", "attack_measures"),
    "one_run": ("RunAudit", "audit_canaries"),
    "reference": ("audit_noise",),
    "residuals": ("audit_residuals",),
    "scores": ("Audited", "audit_scores"),
    "worlds": ("Worlds", "training_run", "two_worlds"),
}


def __getattr__(name: str) -> Any:
    """A name of the package, from the module that defines it; or such a module."""
    if name in _NAMES:
        return importlib.import_module(f"{__name__}.{name}")
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
