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
    from jaxdp.auditing.bounds import epsilon_bound, gaussian_bound
    from jaxdp.auditing.canaries import Canaries
    from jaxdp.auditing.events import audit_event
    from jaxdp.auditing.one_run import RunAudit, audit_canaries
    from jaxdp.auditing.reference import audit_noise
    from jaxdp.auditing.residuals import audit_residuals
    from jaxdp.auditing.scores import Audited, audit_scores
    from jaxdp.auditing.worlds import Worlds, training_run, two_worlds

__all__ = [
    "AlgorithmAudit",
    "Audited",
    "Canaries",
    "RunAudit",
    "Worlds",
    "audit_algorithm",
    "audit_canaries",
    "audit_event",
    "audit_noise",
    "audit_residuals",
    "audit_scores",
    "epsilon_bound",
    "gaussian_bound",
    "training_run",
    "two_worlds",
]

# Imported when asked for: attacks need scipy.stats, which takes a second, and training none of it.
_HOME = {
    "AlgorithmAudit": "audit",
    "Audited": "scores",
    "Canaries": "canaries",
    "RunAudit": "one_run",
    "Worlds": "worlds",
    "audit_algorithm": "audit",
    "audit_canaries": "one_run",
    "audit_event": "events",
    "audit_noise": "reference",
    "audit_residuals": "residuals",
    "audit_scores": "scores",
    "epsilon_bound": "bounds",
    "gaussian_bound": "bounds",
    "training_run": "worlds",
    "two_worlds": "worlds",
}
_SUBMODULES = ("bounds", "events", "features", "residuals", "scores")


def __getattr__(name: str) -> Any:
    """A name of the package, from the module that defines it; or such a module."""
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
