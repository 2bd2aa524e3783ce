"""A privacy filter for runs whose next step depends on what was released before."""

import math

import numpy as np

from jaxdp import arguments as check
from jaxdp.accounting.budget import BudgetExceededError, Plan, as_read, planned, relation_of
from jaxdp.accounting.curves import renyi_curve
from jaxdp.accounting.events import Array, Composed, Event, Relation, Repeated
from jaxdp.accounting.rdp import DEFAULT_ORDERS as FINE_ORDERS
from jaxdp.accounting.rdp import rdp_to_epsilon

DEFAULT_ORDERS: tuple[float, ...] = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)


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

    Args:
        epsilon: budget, > 0.
        delta: budget, in (0, 1).
        relation: the neighbouring relation of the guarantee; None takes that of the plan's
            mechanisms, as ``Budget`` does, else add-or-remove-one.
        orders: [k] Renyi orders > 1, fixed from the start; None takes eleven that suit most runs.
        plan: in place of ``orders``: what will probably be charged, as for ``Budget``. The filter
            has the one order that suits it best, and all of delta for it; it admits other events
            too. Public, as ``orders`` are.
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        relation: Relation | None = None,
        orders: tuple[float, ...] | None = None,
        *,
        plan: Plan | None = None,
    ) -> None:
        self.epsilon = check.positive("epsilon", epsilon)
        self.delta = check.error_probability("delta", delta)
        plan = None if plan is None else as_read(plan)
        self.relation = relation = relation_of(() if plan is None else plan, relation)
        if plan is not None:
            if orders is not None:
                raise ValueError(f"give one of orders and plan, got orders={orders!r} and a plan")
            # The order that has room for the plan most often.
            event = Composed(tuple(Repeated(each, n) for each, n in planned(plan)))
            room = self._budgets(FINE_ORDERS) / renyi_curve(event, FINE_ORDERS, relation)
            orders = (FINE_ORDERS[int(np.argmax(room))],)
        orders = DEFAULT_ORDERS if orders is None else orders
        if not orders or not all(math.isfinite(a) and a > 1 for a in orders):
            raise ValueError(f"orders={orders!r}: expected at least one finite order > 1")
        self.orders = tuple(float(a) for a in orders)
        self._spent = np.zeros(len(self.orders))
        self._budget = self._budgets(self.orders, len(self.orders))

    def _budgets(self, orders: tuple[float, ...], share: int = 1) -> Array:
        """The divergences that convert to epsilon at delta/share: the inverse of rdp_to_epsilon."""
        a, log_delta = np.asarray(orders), math.log(self.delta / share)
        return np.asarray(self.epsilon - np.log1p(-1 / a) + (log_delta + np.log(a)) / (a - 1))

    def admits(self, event: Event) -> bool:
        """True if charging ``event`` keeps the run within the budget."""
        return self._within(self._cost(event))

    def fits(self, event: Event, most: int = 1) -> int:
        """The number of an event in a row that is admitted, at most ``most``.

        Raises:
            UnsupportedEventError: when the event has no Renyi bound.
        """
        cost, left = self._cost(event), self._budget - self._spent
        live = (left >= 0) & np.isfinite(cost)
        if not live.any():
            return 0
        # The quotient may be off by its rounding: the comparison that ``charge`` makes decides.
        with np.errstate(divide="ignore", invalid="ignore"):
            number = float(np.max(np.where(cost[live] > 0, left[live] / cost[live], math.inf)))
        count = int(min(most, number + 1))
        while count and not self._within(self._cost(Repeated(event, count))):
            count -= 1
        return count

    def charge(self, event: Event) -> None:
        """Charges ``event``; call it before the release becomes visible.

        Raises:
            BudgetExceededError: when the event is not admitted; nothing is charged then.
            UnsupportedEventError: when the event has no Renyi bound.
        """
        cost = self._cost(event)
        if not self._within(cost):
            raise BudgetExceededError(self.refusal(event, 0, 1))
        self._spent = self._spent + cost

    def give_back(self, event: Event) -> None:
        """Takes back a charge whose release was never made, and never will be."""
        cost = self._cost(event)
        self._spent = self._spent - np.where(np.isfinite(cost), cost, 0.0)

    def refusal(self, event: Event, fit: int, count: int) -> str:
        """The words for ``count`` of an event of which only ``fit`` are admitted."""
        many = len(self.orders) > 1
        hint = f". RenyiFilter({self.epsilon:g}, {self.delta:g}, plan=mechanism) has one order that"
        hint += f" suits the plan, in place of {len(self.orders)}, and room for more"
        return f"event={event!r}: {fit} of {count} fit what is left of {self}{many * hint}"

    def spent(self) -> float:
        """Epsilon at delta of everything charged so far (a privacy odometer).

        A guarantee at a time fixed beforehand; at a time chosen by looking at it, the guarantee is
        the budget.
        """
        if not self._spent.any():
            return 0.0
        return rdp_to_epsilon(self._spent, self.delta / len(self.orders), self.orders)[0]

    def _cost(self, event: Event) -> Array:
        return renyi_curve(event, self.orders, self.relation)

    def _within(self, cost: Array) -> bool:
        return bool(np.any(self._spent + cost <= self._budget))

    def __repr__(self) -> str:
        """All that was fixed with it, which a ledger compares when it is opened again."""
        given = f"epsilon={self.epsilon!r}, delta={self.delta!r}, relation={self.relation.value}"
        return f"RenyiFilter({given}, orders={self.orders!r})"

    def __str__(self) -> str:
        return f"(epsilon={self.epsilon:g}, delta={self.delta:g})"
