"""The kept state of a run, checked; in several processes that of process 0, where all agree."""

import json
from collections.abc import Callable
from pathlib import Path

from jaxdp import _processes
from jaxdp.accounting import Relation
from jaxdp.accounting.canonical import apart
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.runs.state import RunState
from jaxdp.seeds import Secret


def taken(take: Callable[[], None]) -> None:
    """Takes the run's folder, in process 0 alone; what that refuses stops all."""

    def once() -> str:
        take()
        return ""

    _processes.first(once)


def state(
    own: Callable[[], RunState],
    mechanism: str,
    secret: Secret | None,
    facts: Callable[[Secret], dict[str, object]],
) -> RunState:
    """The secret state of a run.

    Args:
        own: reads or makes it, in process 0.
        mechanism: of the run, as text.
        secret: that the caller gave.
        facts: from the run's secret to what must be the same in all processes, by name.

    Raises:
        ValueError: processes disagree; nothing was charged.
    """
    if _processes.count() == 1:
        return own()
    given = None if secret is None else secret.stream("agreement").hex()
    _processes.agree(**_processes.versions(), mechanism=mechanism, secret=given)
    found = RunState.from_dict(json.loads(_processes.first(lambda: json.dumps(own().to_dict()))))
    _processes.agree(**facts(found.secret.restored()))
    return found


def check_guarantee(kept: RunState, path: Path, delta: float | None, relation: Relation) -> None:
    """Refuses another delta or relation than the epsilons of the run's rows have."""
    for name, given in (("delta", delta), ("relation", relation.value)):
        if kept.relation is not None and getattr(kept, name) != given:
            raise ValueError(
                f"{name} must stay that of the run in {path}, {getattr(kept, name)}, got {given}: "
                "its rows have epsilons of that one; run.epsilon() tells those of others"
            )


def check_relation(algorithm: Algorithm, relation: Relation) -> None:
    """Raises ValueError where a step has no bound under the relation, before any is charged."""
    apart(algorithm.total(1), relation)
