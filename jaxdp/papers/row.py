"""One run of a table, by name."""

import dataclasses
from typing import Any

from jaxdp.runs.config import RunConfig, resolve
from jaxdp.runs.recipes import recipe
from jaxdp.runs.run import Row as Shown

# From so many hours on, a row runs on a processor only when it is named.
LONG = 3.0


@dataclasses.dataclass(frozen=True)
class Row:
    """One run of a table.

    Attributes:
        name: of the row.
        dataset: of the run.
        given: what differs from the data set's recipe.
        paper: the paper's accuracy and where it stands, or "".
        hours: estimated hours on two cores, by the time of a few steps; 0 for less than half an
            hour.
        accepted: the number of accepted candidates with which the run ends, or None; its steps are
            then the most that it may take.
    """

    name: str
    dataset: str
    given: dict[str, Any]
    paper: str = ""
    hours: float = 0.0
    accepted: int | None = None

    @property
    def long(self) -> bool:
        """True if it must be named to run without a GPU."""
        return self.hours >= LONG

    def config(self) -> RunConfig:
        """The resolved configuration."""
        return resolve(recipe(self.dataset, **self.given))

    def enough(self, shown: Shown) -> bool:
        """True if the run ends with the block of this row of its history."""
        return self.accepted is not None and shown["accepted"] >= self.accepted
