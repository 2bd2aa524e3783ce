"""What an attacker can force out of a mechanism: valid lower bounds on epsilon.

from jaxdp import auditing
with_record, without = auditing.two_worlds(auditing.training_run(method, worlds, steps=10), 10_000)
auditing.audit_scores(with_record, without, delta=1e-5).epsilon
"""

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
from jaxdp.auditing.hidden import hidden_run
from jaxdp.auditing.one_run import RunAudit, audit_canaries
from jaxdp.auditing.scores import Audited, audit_all_thresholds, audit_one_run, audit_scores
from jaxdp.auditing.worlds import Worlds, training_run, two_worlds

__all__ = [
    "Audited",
    "Canaries",
    "Counts",
    "RunAudit",
    "Verdict",
    "Worlds",
    "audit_all_thresholds",
    "audit_canaries",
    "audit_event",
    "audit_one_run",
    "audit_scores",
    "discriminant",
    "epsilon_bound",
    "expand",
    "family_bound",
    "gaussian_bound",
    "hidden_run",
    "mu_bound",
    "one_run_bound",
    "one_run_p_value",
    "p_value",
    "training_run",
    "two_worlds",
]
