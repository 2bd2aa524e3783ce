"""One run of a table, by name."""

import dataclasses
from typing import Any

from jaxdp.papers import algorithms, networks  # noqa: F401  (registers what rows name)
from jaxdp.runs.config import RunConfig, resolve
from jaxdp.runs.recipes import recipe
from jaxdp.runs.run import Row as Shown


@dataclasses.dataclass(frozen=True)
class Row:
    """One run of a table.

    Attributes:
        name: of the row.
        dataset: of the run.
        given: what differs from the data set's recipe.
        paper: the paper's accuracy and where it stands, or "".
        accepted: the number of accepted candidates with which the run ends, or None; its steps are
            then the most that it may take.
    """

    name: str
    dataset: str
    given: dict[str, Any]
    paper: str = ""
    accepted: int | None = None

    def config(self) -> RunConfig:
        """The resolved configuration."""
        return resolve(recipe(self.dataset, **self.given))

    def enough(self, shown: Shown) -> bool:
        """True if the run ends with the block of this row of its history."""
        return self.accepted is not None and shown["accepted"] >= self.accepted
