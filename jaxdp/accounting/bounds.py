"""Neighbouring relations, bounds on epsilon or delta, and papers' claims."""

import enum
import math
from dataclasses import dataclass, field


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
