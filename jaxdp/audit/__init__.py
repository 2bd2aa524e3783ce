"""Checks of a user's loss, pipeline and loop before a run; attacks and what they prove after it.

from jaxdp import audit
run = audit.training_run(algorithm, worlds, steps=10)
with_record, without = audit.two_worlds(run, 10_000)
audit.audit_scores(with_record, without, delta=1e-5).epsilon
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdp.audit.algorithms import EpsilonAudit, audit_algorithm
    from jaxdp.audit.assumed import audit_one_run_family
    from jaxdp.audit.before import check
    from jaxdp.audit.bounds import ErrorCounts, epsilon_bound
    from jaxdp.audit.canaries import Canaries
    from jaxdp.audit.diagnosis import Diagnosis, diagnose
    from jaxdp.audit.findings import Checked, Finding
    from jaxdp.audit.guesses import audit_one_run
    from jaxdp.audit.loop import check_loop
    from jaxdp.audit.one_run import audit_canaries
    from jaxdp.audit.residuals import audit_noise, audit_residuals
    from jaxdp.audit.scores import (
        AttackMeasures,
        Audited,
        attack_measures,
        audit_event,
        audit_scores,
    )
    from jaxdp.audit.worlds import Worlds, training_run, two_worlds

__all__ = [
    "AttackMeasures", "Audited", "Canaries", "Checked", "Diagnosis", "EpsilonAudit", "ErrorCounts",
    "Finding", "Worlds", "attack_measures", "audit_algorithm", "audit_canaries", "audit_event",
    "audit_noise", "audit_one_run", "audit_one_run_family", "audit_residuals", "audit_scores",
    "check", "check_loop", "diagnose", "epsilon_bound", "training_run", "two_worlds",
]  # fmt: skip

# Imported when asked for: training needs none of the attacks.
_NAMES = {
    "algorithms": ("EpsilonAudit", "audit_algorithm"),
    "assumed": ("audit_one_run_family",),
    "before": ("check",),
    "bounds": ("ErrorCounts", "epsilon_bound"),
    "canaries": ("Canaries",),
    "diagnosis": ("Diagnosis", "diagnose"),
    "findings": ("Checked", "Finding"),
    "guesses": ("audit_one_run",),
    "loop": ("check_loop",),
    "one_run": ("audit_canaries",),
    "residuals": ("audit_noise", "audit_residuals"),
    "scores": ("AttackMeasures", "Audited", "attack_measures", "audit_event", "audit_scores"),
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
