"""One run of a table, by name."""

import dataclasses
from typing import Any, TypedDict

from jaxdp.papers import algorithms, networks  # noqa: F401  (registers what rows name)
from jaxdp.runs.config import RunConfig, resolve
from jaxdp.runs.recipes import recipe
from jaxdp.runs.run import Row as Shown


class ResultRow(TypedDict, total=False):
    """The result of a finished run, as in papers.json; older ones lack some keys.

    Attributes:
        name: of the row.
        run: its number among the runs of the row, from 1.
        test_accuracy: a share of 1.
        claimed_epsilon: by the paper's formula; None without one.
        proven_epsilon: of the report; "inf" where nothing is proven.
        audited_epsilon: a lower bound; None where nothing was audited.
        accepted: of an annealed run's candidates; None for another.
        acceptance_rate: the share of them.
        curve: step, proven epsilon and accuracy of every evaluation.
        test_losses: of the same evaluations.
        accepted_by: the candidates accepted up to each of them.
        local_began: of AdaDp, as the next three, see ``benchmarks.papers.adadp_phase``.
        seconds: wall time of the run's last part.
        steps_timed: the steps of that part.
        config: the run's configuration.
    """

    name: str
    run: int
    dataset: str
    algorithm: str
    test_accuracy: float
    claimed_epsilon: float | str | None
    proven_epsilon: float | str
    audited_epsilon: float | None
    audited: str | None
    accepted: int
    acceptance_rate: float
    noise_multiplier: float
    steps: int
    curve: list[tuple[int, float | str, float]]
    test_losses: list[float | None]
    accepted_by: list[int] | None
    local_began: int
    noise_began: int
    local_share: float
    noise_share: float
    seconds: float
    steps_timed: int
    machine: str
    date: str
    command: str
    config: dict[str, Any]


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
        runs: how many of it a page wants.
    """

    name: str
    dataset: str
    given: dict[str, Any]
    paper: str = ""
    accepted: int | None = None
    runs: int = 1

    def config(self) -> RunConfig:
        """The resolved configuration."""
        return resolve(recipe(self.dataset, **self.given))

    def enough(self, shown: Shown) -> bool:
        """True if the run ends with the block of this row of its history."""
        return self.accepted is not None and shown["accepted"] >= self.accepted
