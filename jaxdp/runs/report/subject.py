"""The public facts of a run, from which its report is built."""

import dataclasses
from typing import Any

from jaxdp import accounting as acc
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.runs.report.schema import ChargedPart, Levels, Metric
from jaxdp.runs.report.words import A_USER
from jaxdp.schedules import NoiseSchedule

Rows = list[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Names:
    """The names that a run of ``jaxdp train`` has in the registries.

    Attributes:
        algorithm: private algorithm.
        dataset: data set.
        model: model.
        activation: of its hidden layers.
    """

    algorithm: str
    dataset: str
    model: str
    activation: str


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """The public facts of a run; nothing in it is computed from private data.

    Attributes:
        title: such as "DP-SGD on MNIST".
        algorithm: mechanism and optimizer.
        steps: of the run.
        delta: of the guarantee.
        relation: which data sets are neighbours.
        training: (name, words) of algorithm, optimizer and model.
        command: that gives the run.
        measured: what it is judged by; None for nothing.
        levels: to compare that with, see ``jaxdp.runs.report.levels.levels``.
        judged_by: what judged the candidates of an annealed algorithm, in words, or None.
        names: in the registries; None for a model and data of the caller's own.
        config: the public configuration; None for one that has none.
        parts: of what was charged; None for one run of one stage on a ledger of its own.
        provided: what epsilon takes as fixed beforehand, in words; None for nothing.
        ledger: whose it is and how its lines are chained, in words; "" for the folder's own.
    """

    title: str
    algorithm: Algorithm
    steps: int
    delta: float
    relation: acc.Relation
    training: Rows
    command: str
    measured: Metric | None = None
    levels: Levels = dataclasses.field(default_factory=Levels)
    judged_by: str | None = None
    names: Names | None = None
    config: dict[str, Any] | None = None
    parts: tuple[ChargedPart, ...] | None = None
    provided: str | None = None
    ledger: str = ""

    @property
    def dataset_size(self) -> int:
        """The declared number of records, or of users where they are the privacy unit."""
        return self.algorithm.mechanism.dataset_size

    @property
    def records_per_user(self) -> int | None:
        """The most records of a user that enter a step; None where the unit is a record."""
        return self.algorithm.mechanism.records_per_user

    @property
    def unit(self) -> str:
        """The privacy unit in words."""
        if self.records_per_user is None:
            return "one training record"
        entering = "are in the data" if self.algorithm.mechanism.by_example else "enter a step"
        return f"{A_USER}of whom at most {self.records_per_user:,} records {entering}"

    @property
    def batch_size(self) -> int:
        """The expected number of records of a step."""
        return self.algorithm.mechanism.batch_size

    @property
    def epochs(self) -> float:
        """The number of times that a record is used, on average."""
        return self.steps * self.batch_size / self.dataset_size

    @property
    def sampling(self) -> str:
        """The name of the sampling."""
        return self.algorithm.mechanism.sampling.name

    @property
    def noise_multipliers(self) -> list[float]:
        """The noise multiplier; of a schedule, that of each of its levels."""
        noise = self.algorithm.mechanism.noise_multiplier
        if isinstance(noise, NoiseSchedule):
            return [value for value, _ in noise.levels]
        return [float(noise)]


def own_training(algorithm: Algorithm, steps: int, about: dict[str, str], before: int = 0) -> Rows:
    """The facts about the training of a ``jaxdp.Run``; the caller's own words come last.

    Args:
        algorithm: of the last stage.
        steps: of all stages.
        about: the caller's words by name.
        before: steps of the stages before the last.
    """
    mechanism, last = algorithm.mechanism, steps - before
    words = steps_in_words(last, last * mechanism.batch_size / mechanism.dataset_size)
    if mechanism.steps is not None and last > mechanism.steps:
        words += f"; the noise was calibrated for {mechanism.steps:,}"
    if before:
        words = f"{steps:,}; in the last stage {words}"
    rows = [
        ("Steps", words),
        ("Model", "the caller's own"),
        ("Optimizer", "an optax chain of the caller's own, after the noise"),
    ]
    return [row for row in rows if row[0] == "Steps" or row[0] not in about] + [
        (name, f"{words} (in the caller's words)") for name, words in about.items()
    ]


def steps_in_words(steps: int, epochs: float) -> str:
    """The number of steps, and how often they use a record."""
    return f"{steps:,} ({epochs:.3g} epochs: the times that a record is used, on average)"
