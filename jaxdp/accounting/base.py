"""Relations, bounds, events and dominating pairs, which all accountants share."""

import abc
import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Relation(enum.Enum):
    """The neighbouring relation: how two neighbouring data sets differ.

    The noise multiplier of an event is always relative to the largest contribution of ONE record;
    the relation alone decides what a change of one record does to the sum.

    Attributes:
        ADD_OR_REMOVE_ONE: one record more or less. The sum moves by one contribution.
        REPLACE_ONE: one record becomes another. The sum moves from +1 to -1 contribution, that is
            by twice as much: for a full batch it is the same as half the noise multiplier.
        REPLACE_SPECIAL: one record becomes a null record that contributes zero ("zero-out"). The
            sum moves by one contribution and the number of records stays public.
    """

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    REPLACE_ONE = "replace_one"
    REPLACE_SPECIAL = "replace_special"

    @property
    def separation(self) -> float:
        """Distance that one record moves a sum by: 2 contributions for replace-one, else 1."""
        return 2.0 if self is Relation.REPLACE_ONE else 1.0


ADD = Relation.ADD_OR_REMOVE_ONE


class UnsupportedEventError(ValueError):
    """Raised for an event that an accountant cannot bound, with its name and the reason."""


@dataclass(frozen=True)
class Bound:
    """An interval that holds the true value, and the accountant that found it.

    Attributes:
        lower: not above the true value (0 where the accountant gives no lower bound).
        estimate: the exact value to rounding, never a guarantee; None where only an upper bound is
            proven.
        upper: not below the true value. This is the number to report.
        accountant: name of the accountant, e.g. "rdp".
        note: a sentence when the value needs one (why it is 0, or infinite), else "".
        relation: which data sets are neighbours; None where nobody said.
    """

    lower: float
    estimate: float | None
    upper: float
    accountant: str = ""
    note: str = ""
    relation: Relation | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if any(math.isnan(v) for v in (self.lower, self.estimate or 0.0, self.upper)):
            raise ArithmeticError(f"{self.accountant}: a bound came out as not-a-number")
        if self.lower > self.upper:
            raise ArithmeticError(f"{self.accountant}: lower {self.lower} above upper {self.upper}")


@dataclass(frozen=True)
class Claim:
    """An epsilon that a paper states: to be printed and plotted, never to guarantee.

    It is not a number, and no function that takes a guarantee takes it.

    Attributes:
        name: short, for a table.
        value: the claimed epsilon.
        assumptions: the assumptions of the formula, one sentence each.
        holds: for each assumption, True if it held.
        source: paper and number of the formula.
        order: the Renyi or moment order that gave the value (nan when there is none).
    """

    name: str
    value: float
    assumptions: tuple[str, ...]
    holds: tuple[bool, ...]
    source: str
    order: float = math.nan

    def verdict(self, proven: Bound) -> str:
        """One sentence that sets the claim against a proven bound for the same run."""
        broken = [a for a, ok in zip(self.assumptions, self.holds, strict=True) if not ok]
        why = f" (does not hold: {'; '.join(broken)})" if broken else ""
        if self.value < proven.lower:
            return f"below the truth, which is at least {proven.lower:.4g}{why}"
        if self.value < proven.upper:
            return f"within the bounds of the truth{why}"
        return f"above the proven {proven.upper:.4g}{why}"


class Unresolved(ArithmeticError):
    """Raised where a computation has no answer of use; another accountant must answer."""


class Event:
    """Base class of all events: frozen dataclasses that describe a release.

    Every event raises ValueError for a field that is not what its ``Attributes`` say.

    Attributes:
        types: every event class by its name, as ``to_dict`` writes it.
    """

    types: ClassVar[dict[str, Callable[..., "Event"]]] = {}

    @property
    def block(self) -> int:
        """The number of consecutive steps of a loop that are one such event: 1 for most."""
        return 1

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.__name__.startswith("_"):
            Event.types[cls.__name__] = cls


def an_event(name: str, value: object) -> Event:
    """Returns the value, if it is an event."""
    if not isinstance(value, Event):
        raise ValueError(f"{name}={value!r}: expected an event of jaxdp.accounting")
    return value


class Masses(NamedTuple):
    """Masses of cells of losses.

    Attributes:
        p: [m] under P.
        q: [m] under Q, times e^base.
        gain: [m] p - q, with the digits that both have in common left out.
        error: [m] bound on the error of ``gain``.
        base: [m] a loss near the cell's, or 0 for all.
    """

    p: Array
    q: Array
    gain: Array
    error: Array
    base: Array | float = 0.0


class Pair(abc.ABC):
    """A dominating pair (P, Q) of one release in one direction, by its loss L = log dP/dQ under P.

    A record's presence can be told from the release no better than P from Q: delta(epsilon) of the
    release is at most P(L > epsilon) - e^epsilon Q(L > epsilon) (Zhu, Dong and Wang 2022,
    arXiv:2106.08567v2, Definition 7), for a tight pair the same. A composition is dominated by the
    products of its pairs (Theorem 10 there).

    Attributes:
        center: a loss near which most of the probability lies; grids are aligned with it.
        infinite: P(L = infinity).
        rounding: bound on the relative error of every mass that ``masses`` and ``tails`` return.
    """

    center: float
    infinite: float = 0.0
    rounding: float

    @abc.abstractmethod
    def masses(self, edges: Array) -> Masses:
        """Masses of edges[i] < L <= edges[i + 1], [m] each; edges increase, +-inf allowed.

        An infinite loss is in no cell.
        """

    @abc.abstractmethod
    def tails(self, losses: Array) -> tuple[Array, Array]:
        """P(L > loss) with the infinite losses, and Q(L > loss), [m] each; any order of losses."""

    @abc.abstractmethod
    def span(self, tail: float) -> tuple[float, float]:
        """(low, high) finite losses: P(L < low) and P(high < L < infinity) are about ``tail``.

        Only a hint where to put a grid; nothing proven rests on it.
        """

    def slack(self, edges: Array) -> float:
        """The largest distance, in loss, of cells and tails as computed from finite ``edges``."""
        return 0.0

    def cells(self, edges: Array) -> tuple[Array, Array]:
        """P and Q masses of the cells between ``edges``, [m] each."""
        p, q, *_ = self.masses(edges)
        return p, q


class Release(Protocol):
    """A kind of release in a flat run: a Gaussian step, or a ``PairedEvent``."""

    def pairs(self, relation: Relation, upper: bool) -> tuple[Pair, ...]:
        """As ``PairedEvent.pairs``."""
        ...

    def renyi(self, relation: Relation, orders: Array) -> Array:
        """As ``PairedEvent.renyi``."""
        ...


class PairedEvent(Event):
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
