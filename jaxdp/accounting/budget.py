"""A budget for one public plan, kept by the exact accountant: docs/proofs/accounting.md."""

import hashlib
import json
import math
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from jaxdp import arguments as check
from jaxdp.accounting.events import ADD, Composed, Event, Relation, Repeated, counts_of, to_dict
from jaxdp.accounting.queries import calibrate_count
from jaxdp.accounting.queries import epsilon as epsilon_of

_ENDLESS = 10**12  # steps of a mechanism that names no number


class BudgetExceededError(ValueError):
    """Raised for what a budget does not admit; nothing was charged."""


@runtime_checkable
class PlannedSteps(Protocol):
    """A mechanism, as a plan: ``stretch`` says which event each of its steps is.

    Its ``steps`` and ``models``, if any, say how many there are and how often; ``neighbours`` and
    ``covered`` under which relation.
    """

    def stretch(self, step: int) -> tuple[Event, Any, int]:
        """(event, anything, end): the event of a step, and of all steps before the end."""


Plan = Event | PlannedSteps | Iterable[Any]  # or a list of them, in order


def planned(plan: Plan) -> list[tuple[Event, int]]:
    """The events of a plan in their order, each with how often it comes in a row.

    A block of steps that is one event is one; so is a round of several that is repeated.

    Raises:
        ValueError: it is no plan; one without an end comes before another.
    """
    if isinstance(plan, Repeated):
        inner = planned(plan.event)
        if len(inner) < 2:
            return [(event, n * plan.count) for event, n in inner]
        return [(plan.event, plan.count)]  # rounds of several
    if isinstance(plan, Event):
        return planned(plan.events) if isinstance(plan, Composed) else [(plan, 1)]
    if isinstance(plan, PlannedSteps):
        found: list[tuple[Event, int]] = []
        step, end = 0, getattr(plan, "steps", None) or math.inf
        while step < end and not (found and found[-1][1] == _ENDLESS):
            try:
                event, _, until = plan.stretch(step)
            except ValueError:  # the end of a schedule
                break
            until = int(min(until, end))
            count = -(-until // event.block) - step // event.block
            found.append((event, min(count, _ENDLESS)))
            step = until
        return found * getattr(plan, "models", 1)
    if not isinstance(plan, Iterable) or isinstance(plan, str | bytes):
        raise ValueError(
            "plan must be a mechanism, an event such as acc.Repeated(step, 1_000), or a list of "
            f"them in order, got {check.described(plan)}"
        )
    lists = [planned(part) for part in plan]
    for place, one in enumerate(lists[:-1]):
        if sum(n for _, n in one) >= _ENDLESS:
            raise ValueError(
                f"plan[{place}] must name its number of steps, for others come after it: give "
                "mechanism.total(steps)"
            )
    return [each for one in lists for each in one]


def as_read(plan: Plan) -> Plan:
    """The plan, its lists as tuples: an iterator could be read once."""
    if isinstance(plan, Event | PlannedSteps | str | bytes) or not isinstance(plan, Iterable):
        return plan
    return tuple(as_read(part) for part in plan)


def relation_of(plan: Plan, relation: Relation | None) -> Relation:
    """The relation, which the plan's mechanisms must cover; None takes theirs, else add-or-remove.

    Raises:
        ValueError: it is no relation; None, and those of the mechanisms differ.
        UnsupportedEventError: the proof of a mechanism's draws does not cover it.
    """
    if relation is not None and not isinstance(relation, Relation):
        raise ValueError(f"relation={relation!r}: expected a Relation")
    found: set[Relation] = set()
    if isinstance(plan, tuple):
        found = {relation_of(part, relation) for part in plan if not isinstance(part, Event)}
    elif hasattr(plan, "covered") and hasattr(plan, "neighbours"):
        # A mechanism's proof may cover fewer relations than its event.
        found = {plan.covered(relation) or plan.neighbours}
    if len(found) > 1:
        raise ValueError(
            "relation must be given where the mechanisms of a plan have unlike ones, "
            f"{', '.join(sorted(each.value for each in found))}, got None"
        )
    return next(iter(found), relation or ADD)


class Budget:
    """Admits the steps of one public plan, as many of its first ones as fit (epsilon, delta).

    For a plan that is fixed before the first release, which it may not follow from: its steps are
    counted by the exact accountant, and epsilon is used up to the last of them. To stop early is
    free, also for a reason that was seen. Whatever else is chosen after a look at releases
    (another mechanism, noise, batch, a further run) goes through ``RenyiFilter``.

    Formal guarantee: what was charged is (epsilon, delta)-private under ``relation`` at every time,
    in whatever order its steps were taken (docs/proofs/accounting.md, "Adaptive runs").

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        plan: a mechanism (its ``steps``, or without end), an event, or a list of them in order.
        relation: the neighbouring relation of the guarantee; None takes that of the plan's
            mechanisms (``Mechanism.neighbours``), else add-or-remove-one.

    Attributes:
        admitted: how many of each event fit; blocks of steps that are one event are whole.

    Raises:
        ValueError: an argument is none of these.
        UnsupportedEventError: an event has no bound under the relation.

    Example:
        >>> from jaxdp import accounting as acc
        >>> step = acc.PoissonSampled(acc.Gaussian(1.0), sampling_prob=0.05)
        >>> acc.Budget(3.0, 1e-5, plan=acc.Repeated(step, 200)).admitted[step]
        68
    """

    def __init__(
        self, epsilon: float, delta: float, plan: Plan, relation: Relation | None = None
    ) -> None:
        self.epsilon = epsilon = check.positive("epsilon", epsilon)
        self.delta = delta = check.error_probability("delta", delta)
        plan = as_read(plan)
        self.relation = relation_of(plan, relation)
        rows = planned(plan)
        total = sum(n for _, n in rows)
        if not total:
            raise ValueError(f"plan must hold a step, got {check.described(plan)}")
        text = json.dumps([[to_dict(event), n] for event, n in rows], sort_keys=True)
        self._plan = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

        def first(count: int) -> dict[Event, int]:
            """The events of the plan's first ones, each with its number."""
            found: dict[Event, int] = {}
            for event, n in rows:
                if count <= 0:
                    break
                for part, each in counts_of(event).items():
                    found[part] = found.get(part, 0) + each * min(n, count)
                count -= n
            return found

        def released(count: int) -> Event:
            """The first ones as one event."""
            return Composed(tuple(Repeated(event, n) for event, n in first(count).items()))

        # All of the plan, as where its noise was calibrated for this very budget; else what a
        # search finds, whose answer was proven to be within.
        fits = (
            total < _ENDLESS and epsilon_of(released(total), delta, self.relation).upper <= epsilon
        )
        fit = total if fits else calibrate_count(released, epsilon, delta, self.relation)
        self.admitted = first(fit)
        self._left = dict(self.admitted)
        self._words = f"{fit} of {total}" if total < _ENDLESS else f"{fit}"

    def fits(self, event: Event, most: int = 1) -> int:
        """The number of an event that is still admitted, at most ``most``."""
        need = counts_of(event).items()
        return min([most, *(self._left.get(part, 0) // n for part, n in need)])

    def charge(self, event: Event) -> None:
        """Charges ``event``; call it before the release becomes visible.

        Raises:
            BudgetExceededError: when the event is not admitted; nothing is charged then.
        """
        if not self.fits(event):
            raise BudgetExceededError(self.refusal(event, 0, 1))
        for part, n in counts_of(event).items():
            self._left[part] -= n

    def give_back(self, event: Event) -> None:
        """Takes back a charge whose release was never made, and never will be."""
        for part, n in counts_of(event).items():
            self._left[part] += n

    def refusal(self, event: Event, fit: int, count: int) -> str:
        """The words for ``count`` of an event of which only ``fit`` are admitted."""
        return (
            f"event={event!r}: {fit} of {count} fit the plan that was fixed with {self}, of which "
            f"{self._words} events are within. What is chosen on the way goes through "
            "acc.RenyiFilter"
        )

    def __copy__(self) -> "Budget":
        made = object.__new__(Budget)
        made.__dict__ = {**self.__dict__, "_left": dict(self._left)}
        return made

    def __repr__(self) -> str:
        """All that was fixed with it, which a ledger compares when it is opened again."""
        given = f"epsilon={self.epsilon!r}, delta={self.delta!r}, relation={self.relation.value}"
        return f"Budget({given}, plan={self._plan})"

    def __str__(self) -> str:
        return f"(epsilon={self.epsilon:g}, delta={self.delta:g})"
