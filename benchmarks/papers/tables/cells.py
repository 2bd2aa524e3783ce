"""A printed figure with ours beside it, and the rule by which it counts as met or explained."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence

from benchmarks.papers.rows import ROWS
from benchmarks.papers.tables import gaps, rows
from benchmarks.papers.tables.rows import Results

# What a figure may come to, in the order of the table that counts them.
MET = "met"
EXPERIMENT = "explained by experiment"
REASONING = "explained by reasoning"
UNEXPLAINED = "not explained"
NOT_RUN = rows.MISSING
UNDEFINED = "not defined in the paper"
DERIVED = "the paper's own arithmetic"
VERDICTS = {
    MET: "ours in the paper's setting, as published or repaired, within the margin",
    EXPERIMENT: "ours by another reading or setting, which is named, within the margin; in words "
    "or seconds: what the sentence names was measured",
    REASONING: "a sentence says why ours must differ, without an experiment that meets the figure",
    UNEXPLAINED: "ours differ and nothing here gives the figure",
    NOT_RUN: "no run of ours answers, though one could",
    UNDEFINED: "an algorithm or setting of which the text does not say what a run would need",
    DERIVED: "percentages between figures that are counted themselves",
}
# Two single runs differ by more than 2 √2 standard deviations once in twenty.
_TWO = 2 * math.sqrt(2)
# The papers' averages, where they say so, are of five runs.
_THEIRS = 5
# Of epsilons at which an accuracy is reached: looks at the test set are a few percent of a run.
EPSILON_SHARE = 0.1


@functools.cache
def spread(results: Results) -> tuple[float, int]:
    """The median standard deviation, in points, of rows of at least three runs, and their number.

    Without such rows 0.2 and none.
    """
    every = [rows.accuracies(results, name) for name in ROWS]
    deviations = [100 * statistics.stdev(shares) for shares in every if len(shares) >= 3]
    return (statistics.median(deviations) if deviations else 0.2), len(deviations)


def margin(results: Results) -> float:
    """By how much two single runs differ, in points, to a tenth."""
    return round(_TWO * spread(results)[0], 1)


class Ours:
    """Something of ours that stands beside a printed figure."""

    def told(self, results: Results) -> str:
        """As the page shows it."""
        raise NotImplementedError

    def number(self, results: Results) -> float | None:
        """In the printed figure's unit; None where nothing was run."""
        raise NotImplementedError

    def room(self, results: Results, value: float) -> float:
        """How far from the printed ``value`` still counts as met."""
        del value
        return margin(results)

    def meets(self, results: Results, value: float) -> bool:
        """True if the printed ``value`` is met."""
        found = self.number(results)
        return found is not None and abs(found - value) <= self.room(results, value) + 1e-9


@dataclasses.dataclass(frozen=True)
class Run(Ours):
    """The accuracy of a row or an experiment, in percent: the mean of its runs."""

    before: str
    name: str

    def told(self, results: Results) -> str:
        found = gaps.shares(results, self.name)
        share = rows.mean_and_spread(found)[0] if found else rows.MISSING
        return f"{self.before} {share} `{self.name}`".strip()

    def number(self, results: Results) -> float | None:
        found = gaps.shares(results, self.name)
        return 100 * statistics.mean(found) if found else None

    def room(self, results: Results, value: float) -> float:
        found = gaps.shares(results, self.name)
        if len(found) < 3:
            return margin(results)
        own = 2 * 100 * statistics.stdev(found) * math.sqrt(1 / len(found) + 1 / _THEIRS)
        return max(margin(results), own)


@dataclasses.dataclass(frozen=True)
class Lead(Ours):
    """Points of one row or experiment over another."""

    before: str
    name: str
    over: str

    def told(self, results: Results) -> str:
        found = self.number(results)
        shown = rows.MISSING if found is None else f"{found:+.1f}"
        return f"{self.before} {shown} `{self.name}` over `{self.over}`".strip()

    def number(self, results: Results) -> float | None:
        ahead, behind = (Run("", name).number(results) for name in (self.name, self.over))
        return None if ahead is None or behind is None else ahead - behind

    def room(self, results: Results, value: float) -> float:
        del value
        return math.sqrt(2) * margin(results)


@dataclasses.dataclass(frozen=True)
class Gain(Lead):
    """The same in percent of the other, as PIGDO prints it."""

    def number(self, results: Results) -> float | None:
        ahead, behind = (Run("", name).number(results) for name in (self.name, self.over))
        return None if ahead is None or behind is None else 100 * (ahead / behind - 1)

    def told(self, results: Results) -> str:
        found = self.number(results)
        shown = rows.MISSING if found is None else f"{found:+.2f} %"
        return f"{self.before} {shown} `{self.name}` over `{self.over}`".strip()


@dataclasses.dataclass(frozen=True)
class Fixed(Ours):
    """A number that no row gives.

    Attributes:
        found: ours.
        text: as it is shown.
        within: the most that rounding makes of a printed figure that is met.
    """

    found: float
    text: str
    within: float = 0.005

    def told(self, results: Results) -> str:
        del results
        return self.text

    def number(self, results: Results) -> float | None:
        del results
        return self.found

    def room(self, results: Results, value: float) -> float:
        del results, value
        return self.within


@dataclasses.dataclass(frozen=True)
class Epsilon(Ours):
    """The epsilon, by a paper's formula, at which a row's curve first reaches an accuracy."""

    before: str
    name: str
    level: float
    formula: Callable[[int], float]

    def told(self, results: Results) -> str:
        if not gaps.curves(results, self.name):
            shown = rows.MISSING
        else:
            found = self.number(results)
            shown = "not reached" if found == math.inf else rows.shown_epsilon(found)
        return f"{self.before} {shown} `{self.name}`".strip()

    def number(self, results: Results) -> float | None:
        found = gaps.curves(results, self.name)
        if not found:
            return None
        first = next((step for step, share in found[0] if 100 * share >= self.level), None)
        return math.inf if first is None else self.formula(first)

    def meets(self, results: Results, value: float) -> bool:
        found = self.number(results)
        return found is not None and found <= (1 + EPSILON_SHARE) * value


@dataclasses.dataclass(frozen=True)
class Holds(Ours):
    """Words of a paper, asked of the accuracies of rows, in percent: 1 where they hold, else 0.

    Attributes:
        before: what the rows are.
        names: of the rows, and how each is shown.
        words: of the accuracies, in that order, and the margin.
    """

    before: str
    names: dict[str, str]
    words: Callable[[Sequence[float], float], bool]

    def told(self, results: Results) -> str:
        shown = ", ".join(
            Run(before, name).told(results).replace(f" `{name}`", "")
            for name, before in self.names.items()
        )
        return f"{self.before}: {shown}"

    def number(self, results: Results) -> float | None:
        found = [Run("", name).number(results) for name in self.names]
        known = [one for one in found if one is not None]
        return float(self.words(known, margin(results))) if len(known) == len(found) else None

    def room(self, results: Results, value: float) -> float:
        del results, value
        return 0.0


@dataclasses.dataclass(frozen=True)
class Cell:
    """A printed figure.

    Attributes:
        what: it is.
        printed: as it stands in the paper.
        value: the same, in the unit of ours; 1 of words that hold.
        ours: in the paper's setting, as published or repaired; any of them may meet it.
        tried: by another reading or setting; any that meets it explains it.
        why: what the difference is, with the accuracy of an experiment for its name in braces.
        tag: the verdict where no row decides: REASONING, UNDEFINED or DERIVED.
    """

    what: str
    printed: str
    value: float = 1.0
    ours: Sequence[Ours] = ()
    tried: Sequence[Ours] = ()
    why: str = ""
    tag: str = ""

    def verdict(self, results: Results) -> str:
        """One of ``VERDICTS``, by the rows that there are."""
        if self.tag in (UNDEFINED, DERIVED):
            return self.tag
        if any(one.meets(results, self.value) for one in self.ours):
            return MET
        if any(one.meets(results, self.value) for one in self.tried):
            return EXPERIMENT
        if all(one.number(results) is None for one in (*self.ours, *self.tried)):
            return NOT_RUN
        return self.tag or UNEXPLAINED

    def line(self, results: Results) -> list[str]:
        """The cells of the page's table."""
        every = (*self.ours, *self.tried)
        verdict = self.verdict(results)
        # No cause is told before a run that could tell it.
        why = "" if verdict == NOT_RUN and every else gaps.told(results, self.why)
        told = "; ".join(one.told(results) for one in every)
        return [self.what, self.printed, told or "–", verdict, why or "–"]
