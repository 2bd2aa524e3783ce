"""A privacy filter for runs whose next step depends on what was released before."""

import math

import numpy as np

from jaxdp import arguments as check
from jaxdp.accounting.curves import renyi_curve
from jaxdp.accounting.events import ADD, Event, Relation
from jaxdp.accounting.rdp import rdp_to_epsilon

DEFAULT_ORDERS: tuple[float, ...] = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)


class BudgetExceededError(ValueError):
    """Raised for an event that the filter does not admit; nothing was charged."""


class RenyiFilter:
    """Admits events, chosen adaptively, as long as the whole stays within (epsilon, delta).

    Ordinary accounting needs the sequence of events to be fixed beforehand; a noise multiplier or a
    number of steps that was chosen by looking at the outputs needs a filter (fully adaptive
    composition). For one fixed order the sum of the divergences may be compared with the budget at
    every step (Feldman and Zrnic 2021, "Individual privacy accounting via a Renyi filter",
    arXiv:2008.11193v4, Theorem 4.3). With k orders an event is admitted while ANY order is within
    its own budget, and each order's budget is that of delta/k: on the paths that some order lets
    run longest the run equals that order's filtered run, which is (epsilon, delta/k)-DP, and the k
    sets of paths add up.

    Attributes:
        epsilon: budget, > 0.
        delta: budget, in (0, 1).
        relation: the neighbouring relation of the guarantee.
        orders: [k] Renyi orders > 1, fixed from the start. Fewer are cheaper if they fit the run.
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        relation: Relation = ADD,
        orders: tuple[float, ...] = DEFAULT_ORDERS,
    ) -> None:
        self.epsilon = check.positive("epsilon", epsilon)
        self.delta = check.error_probability("delta", delta)
        if not isinstance(relation, Relation):
            raise ValueError(f"relation={relation!r}: expected a Relation")
        self.relation = relation
        if not orders or not all(math.isfinite(a) and a > 1 for a in orders):
            raise ValueError(f"orders={orders!r}: expected at least one finite order > 1")
        self.orders = tuple(float(a) for a in orders)
        self._spent = np.zeros(len(self.orders))
        a = np.asarray(self.orders)
        share = math.log(self.delta / a.size)
        # The divergence that converts to epsilon at delta/k (inverse of rdp_to_epsilon).
        self._budget = self.epsilon - np.log1p(-1 / a) + (share + np.log(a)) / (a - 1)

    def admits(self, event: Event) -> bool:
        """True if charging ``event`` keeps the run within the budget."""
        return bool(np.any(self._spent + self._cost(event) <= self._budget))

    def charge(self, event: Event) -> None:
        """Charges ``event``; call it before the release becomes visible.

        Raises:
            BudgetExceededError: when the event is not admitted; nothing is charged then.
            UnsupportedEventError: when the event has no Renyi bound.
        """
        cost = self._cost(event)
        if not np.any(self._spent + cost <= self._budget):
            raise BudgetExceededError(
                f"event={event!r}: expected one that fits what is left of "
                f"(epsilon={self.epsilon:g}, delta={self.delta:g})"
            )
        self._spent = self._spent + cost

    def spent(self) -> float:
        """Epsilon at delta of everything charged so far (a privacy odometer).

        A guarantee at a time fixed beforehand; at a time chosen by looking at it, the guarantee is
        the budget.
        """
        if not self._spent.any():
            return 0.0
        return rdp_to_epsilon(self._spent, self.delta / len(self.orders), self.orders)[0]

    def _cost(self, event: Event) -> np.ndarray:
        return renyi_curve(event, self.orders, self.relation)
