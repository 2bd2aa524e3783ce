"""Events, parts of a composition and dominating pairs: what an accountant knows of a release."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxdp.accounting.bounds import Relation

Array = NDArray[np.float64]


class Unresolved(ArithmeticError):
    """Raised where a computation has no answer of use; another accountant must answer."""


class Event:
    """Base class of all events: frozen dataclasses that describe a release.

    Every event raises ValueError for a field that is not what its ``Attributes`` say.

    Attributes:
        types: every event class by its name, as ``to_dict`` writes it.
    """

    types: ClassVar[dict[str, Callable[..., Any]]] = {}

    @property
    def block(self) -> int:
        """The number of consecutive steps of a loop that are one such event: 1 for most."""
        return 1

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if not cls.__name__.startswith("_"):
            Event.types[cls.__name__] = cls


def an_event(name: str, value: object) -> object:
    """The value, if it is an event."""
    if not isinstance(value, Event):
        raise ValueError(f"{name}={value!r}: expected an event of jaxdp.accounting")
    return value


class Pair(Protocol):
    """A dominating pair (P, Q) of one release in one direction, by its loss L = log dP/dQ under P.

    A record's presence can be told from the release no better than P from Q: delta(epsilon) of the
    release is at most P(L > epsilon) - e^epsilon Q(L > epsilon) (Zhu, Dong and Wang 2022,
    arXiv:2106.08567v2, Definition 7), for a tight pair the same. A composition is dominated by the
    products of its pairs (Theorem 10 there).

    Attributes:
        center: a loss near which most of the probability lies; grids are aligned with it.
        infinite: P(L = infinity).
        rounding: bound on the relative error of every mass that ``cells`` and ``tails`` return.
    """

    @property
    def center(self) -> float:
        """A typical loss, such as that of the record's absence."""
        ...

    @property
    def infinite(self) -> float:
        """P mass of the infinite loss."""
        ...

    @property
    def rounding(self) -> float:
        """Bound on the relative error of every mass."""
        ...

    def cells(self, edges: Array) -> tuple[Array, Array]:
        """P and Q masses of edges[i] < L <= edges[i + 1], [m] each; edges increase, +-inf allowed.

        An infinite loss is in no cell.
        """
        ...

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """P(L > loss) with the infinite losses, and Q(L > loss), [m] each; any order of losses."""
        ...

    def span(self, tail: float) -> tuple[float, float]:
        """(low, high) finite losses: P(L < low) and P(high < L < infinity) are about ``tail``.

        Only a hint where to put a grid; nothing proven rests on it.
        """
        ...


class Part(Event):
    """An event that accountants read as it is: neither a composition nor a Gaussian step.

    Subclasses are frozen dataclasses. An accountant asks ``refuses`` first.
    """

    def refuses(self, relation: Relation) -> str:
        """The reason why there is no bound under this relation, or ""."""
        return ""

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """Pairs for an upper (or a lower) bound on delta: one for each direction, or one for both.

        Forward is the record's presence (P with the record), reverse its absence. An empty tuple
        where no pair is known: then ``renyi`` bounds the event, or for a lower end nothing does.
        For a lower bound the pair must be dominated by one that the release attains.
        """
        return ()

    def renyi(self, relation: Relation, orders: Array) -> Array:
        """Renyi divergence of each order > 1, [k], in the larger direction; never below the truth.

        Infinite where none is known.
        """
        return np.full(orders.shape, np.inf)

    def pure(self, relation: Relation) -> float:
        """The largest loss, that is epsilon at delta 0; infinite unless a finite one is known."""
        return math.inf

    def infinite(self) -> str:
        """The reason why nothing at all can be guaranteed (no noise), or ""."""
        return ""


class Discrete:
    """A pair of finitely many losses.

    Args:
        loss: [m] increasing finite losses.
        p: [m] masses under P (their sum with ``infinite`` may fall short of 1 in a lower bound).
        infinite: P mass of an infinite loss.
        rounding: bound on the relative error of ``p``.
        q: [m] masses under Q; p e^-loss when None.
    """

    def __init__(
        self,
        loss: Array,
        p: Array,
        infinite: float = 0,
        rounding: float = 0,
        q: Array | None = None,
    ) -> None:
        self.loss, self.p, self.infinite = loss, p, infinite
        self.q = p * np.exp(-loss) if q is None else q
        # Sums of m non-negative terms: Higham 2002, Section 4.2.
        self.rounding = rounding + 2.3e-16 * (loss.size + 4)
        self.center = float(loss[int(np.argmax(p))]) if loss.size else 0.0

    def cells(self, edges: Array) -> tuple[Array, Array]:
        """As ``Pair.cells``."""
        index = np.searchsorted(edges, self.loss, side="left") - 1
        inside = (index >= 0) & (index < edges.size - 1)
        count = edges.size - 1
        p, q = (np.bincount(index[inside], mass[inside], count) for mass in (self.p, self.q))
        return np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """As ``Pair.tails``."""
        first = np.searchsorted(self.loss, losses, side="right")
        beyond_p = np.append(np.cumsum(self.p[::-1])[::-1], 0.0)
        beyond_q = np.append(np.cumsum(self.q[::-1])[::-1], 0.0)
        return beyond_p[first] + self.infinite, beyond_q[first]

    def span(self, tail: float) -> tuple[float, float]:
        """As ``Pair.span``."""
        top = self.loss.size - 1
        below = int(np.searchsorted(np.cumsum(self.p), tail))
        above = top - int(np.searchsorted(np.cumsum(self.p[::-1]), tail))
        return float(self.loss[min(below, top)]), float(self.loss[max(above, 0)])
