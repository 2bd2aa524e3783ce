"""Audits: attacks on a mechanism, and the valid lower bounds on epsilon that they prove.

from jaxdp import auditing
run = auditing.training_run(algorithm, worlds, steps=10)
with_record, without = auditing.two_worlds(run, 10_000)
auditing.audit_scores(with_record, without, delta=1e-5).epsilon
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdp.auditing.bounds import (
        Counts,
        epsilon_bound,
        gaussian_bound,
        mu_bound,
        one_run_bound,
        one_run_p_value,
        p_value,
    )
    from jaxdp.auditing.canaries import Canaries
    from jaxdp.auditing.events import Verdict, audit_event, family_bound
    from jaxdp.auditing.features import discriminant, expand
    from jaxdp.auditing.one_run import RunAudit, audit_canaries
    from jaxdp.auditing.reference import audit_noise
    from jaxdp.auditing.residuals import ResidualVerdict, audit_residuals
    from jaxdp.auditing.scores import Audited, audit_all_thresholds, audit_one_run, audit_scores
    from jaxdp.auditing.worlds import Worlds, training_run, two_worlds

__all__ = [
    "Audited",
    "Canaries",
    "Counts",
    "ResidualVerdict",
    "RunAudit",
    "Verdict",
    "Worlds",
    "audit_all_thresholds",
    "audit_canaries",
    "audit_event",
    "audit_noise",
    "audit_one_run",
    "audit_residuals",
    "audit_scores",
    "discriminant",
    "epsilon_bound",
    "expand",
    "family_bound",
    "gaussian_bound",
    "mu_bound",
    "one_run_bound",
    "one_run_p_value",
    "p_value",
    "training_run",
    "two_worlds",
]

# Imported when asked for: attacks need scipy.stats, which takes a second, and training none of it.
_MODULES = {
    "bounds": "Counts epsilon_bound gaussian_bound mu_bound one_run_bound one_run_p_value p_value",
    "canaries": "Canaries",
    "events": "Verdict audit_event family_bound",
    "features": "discriminant expand",
    "one_run": "RunAudit audit_canaries",
    "reference": "audit_noise",
    "residuals": "ResidualVerdict audit_residuals",
    "scores": "Audited audit_all_thresholds audit_one_run audit_scores",
    "worlds": "Worlds training_run two_worlds",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """A name of the package, imported from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
