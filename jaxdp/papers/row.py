"""One run of a table, by name."""

import dataclasses
from typing import Any

from jaxdp.runs.config import RunConfig, resolve
from jaxdp.runs.recipes import recipe


@dataclasses.dataclass(frozen=True)
class Row:
    """One run of a table.

    Attributes:
        name: of the row.
        dataset: of the run.
        given: what differs from the data set's recipe.
        paper: the paper's accuracy and where it stands, or "".
        needs_gpu: whether the run takes hours on two cores, so that the queue waits for a GPU.
    """

    name: str
    dataset: str
    given: dict[str, Any]
    paper: str = ""
    needs_gpu: bool = False

    def config(self) -> RunConfig:
        """The resolved configuration."""
        return resolve(recipe(self.dataset, **self.given))
