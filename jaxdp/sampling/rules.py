"""Rules by which the records of a step are drawn, independently of the other steps."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.sampling.counts import binomial
from jaxdp.sampling.subsets import permutation, subset

# What identifies a record, whatever the other records are; one of them each, [n].
Identity = int | str | bytes | np.generic
Identities = Sequence[Identity] | np.ndarray
# Of memory, that a position takes while its draw is made: twice or so what was measured.
_BYTES = 64


class Sampling(Protocol):
    """A rule for drawing records: ``StepSampling`` or ``EpochSampling``, and the event of a draw.

    One with a ``cap`` never draws more records than that, and its draws are padded to it.
    """

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The accounting event of releasing ``released`` on one such draw."""

    def check(self, num_records: int, dataset_size: int) -> None:
        """Raises ValueError where these records cannot be drawn from by this rule."""


@runtime_checkable
class StepSampling(Sampling, Protocol):
    """A rule that draws each step by itself."""

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [k]: the positions drawn from ``range(num_records)``, without repetition.

        In random order: the rounding of a sum depends on it (docs/clip_bound.md, Theorem 4).
        """


@runtime_checkable
class EpochSampling(Sampling, Protocol):
    """A rule that draws an epoch at once, which is one event, charged whole at its first step."""

    def block(self, dataset_size: int) -> int:
        """The number of steps of an epoch."""

    def epoch(self, rng: np.random.Generator, num_records: int) -> list[np.ndarray]:
        """The positions of every step of an epoch, int64 [k] each; otherwise as ``choose``.

        Args:
            rng: Philox, at the beginning of the epoch's stream.
            num_records: n.
        """


@runtime_checkable
class RunSampling(Sampling, Protocol):
    """A rule under which a whole run is one event, charged at its first step: correlated noise.

    Attributes:
        tail_again: True if the last steps may be released once more, with other noise, for the
            price of the whole event.
    """

    @property
    def tail_again(self) -> bool:
        """True if the last steps may be released twice for the price of two events."""

    def block(self, dataset_size: int) -> int:
        """The number of steps of the run."""

    def arrange(
        self, rng: np.random.Generator, num_records: int, identities: Identities | None
    ) -> list[np.ndarray]:
        """The part of the draws that all steps have in common.

        Args:
            rng: Philox, at the beginning of the run's stream.
            num_records: n.
            identities: what identifies each record, [n]; None where nothing was given.
        """

    def of_step(
        self, arranged: list[np.ndarray], step: int, rng: np.random.Generator
    ) -> np.ndarray:
        """The positions of one step, int64 [k]; otherwise as ``choose``.

        Args:
            arranged: from ``arrange``.
            step: of the run.
            rng: of the step.
        """


@dataclasses.dataclass(frozen=True)
class Poisson:
    """Poisson sampling: each record takes part independently with probability ``sampling_prob``.

    Amplifies under add-or-remove-one. The number of records is private: the guarantee does not
    assume it, and the declared ``dataset_size`` need equal it only to a factor of 2.
    """

    sampling_prob: float

    def __post_init__(self) -> None:
        arguments.probability("sampling_prob", self.sampling_prob)

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [k]: the positions drawn, k binomial; may be empty."""
        return subset(rng, num_records, binomial(rng, num_records, self.sampling_prob))

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of a Poisson-sampled Gaussian."""
        return acc.PoissonSampled(released, sampling_prob=self.sampling_prob)

    def check(self, num_records: int, dataset_size: int) -> None:
        """Refuses a declared size that is not the number of records to a factor of 2.

        The guarantee holds for any number; but the divisor of the mean would be wrong, silently.

        Raises:
            ValueError: it is less than half or more than twice as large, or memory does not hold
                the positions of a draw.
        """
        require_near_size(num_records, dataset_size)
        require_memory(self.sampling_prob * dataset_size, "Poisson sampling")


@dataclasses.dataclass(frozen=True)
class FixedSize:
    """Fixed-size sampling: ``batch_size`` records, uniformly without replacement (replace-one)."""

    batch_size: int

    def __post_init__(self) -> None:
        arguments.integer("batch_size", self.batch_size, least=1)

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [batch_size]: the positions drawn."""
        return subset(rng, num_records, self.batch_size)

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of a Gaussian on a fixed-size draw without replacement."""
        return acc.FixedSizeSampled(released, dataset_size=dataset_size, batch_size=self.batch_size)

    def check(self, num_records: int, dataset_size: int) -> None:
        """Refuses a declared size other than the number of records, or less than a batch.

        The sampled fraction is part of the guarantee, so the size must be exact.

        Raises:
            ValueError: it is refused.
        """
        require_declared_size(num_records, dataset_size, "fixed-size")
        if self.batch_size > num_records:
            raise ValueError(
                f"batch_size must be at most the {num_records} records, got {self.batch_size}"
            )
        require_memory(self.batch_size, "fixed-size sampling")


@dataclasses.dataclass(frozen=True)
class FullBatch:
    """Full-batch steps: every record takes part in every step, without amplification."""

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [num_records]: all positions."""
        return permutation(rng, num_records)

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event itself: a Gaussian without sampling."""
        return released

    def check(self, num_records: int, dataset_size: int) -> None:
        """Refuses more records than memory holds the positions of; ValueError."""
        require_memory(dataset_size, "full batches")


@dataclasses.dataclass(frozen=True)
class TruncatedPoisson:
    """Poisson sampling of which at most ``cap`` records are kept, so that every draw has one shape.

    Each record takes part independently with probability ``sampling_prob``; of more than ``cap`` a
    uniformly random subset of ``cap`` is kept. Draws are padded to ``cap``, whatever their size:
    one compiled physical batch serves every step. Only replacing a record by a null record is
    covered, and ``dataset_size`` must be exact.
    """

    sampling_prob: float
    cap: int

    def __post_init__(self) -> None:
        arguments.probability("sampling_prob", self.sampling_prob)
        arguments.integer("cap", self.cap, least=1)

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [k]: the positions drawn, k <= cap.

        A Poisson sample stands in random order, so its first ``cap`` are a uniformly random part.
        """
        return Poisson(self.sampling_prob).choose(rng, num_records)[: self.cap]

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of a Gaussian on a truncated Poisson sample."""
        return acc.TruncatedPoisson(released, self.sampling_prob, self.cap, dataset_size)

    def check(self, num_records: int, dataset_size: int) -> None:
        """Refuses a declared size other than the number of records; ValueError."""
        require_declared_size(num_records, dataset_size, "truncated Poisson")
        require_memory(self.sampling_prob * dataset_size, "truncated Poisson sampling")


def steps_of_a_block(sampling: Sampling, dataset_size: int) -> int:
    """The number of consecutive steps that are one event of the rule; 1 for most."""
    if isinstance(sampling, EpochSampling) or isinstance(sampling, RunSampling):  # noqa: SIM101
        return sampling.block(dataset_size)
    return 1


def require_near_size(num_records: int, dataset_size: int) -> None:
    """Raises ValueError for a declared size that is wrong by more than a factor of 2."""
    # Without the number, which is private; that it was refused is told to the owner alone.
    if not dataset_size <= 2 * num_records <= 4 * dataset_size:
        raise ValueError(
            "dataset_size must be the number of records, to a factor of 2, got "
            f"{dataset_size}: batches would have a size far from batch_size"
        )


def require_declared_size(num_records: int, dataset_size: int, sampling: str) -> None:
    """Raises ValueError for a declared size that is not the number of records."""
    if num_records != dataset_size:
        raise ValueError(
            f"dataset_size must be the number of records ({num_records}) under {sampling} "
            f"sampling, got {dataset_size}"
        )


def require_memory(positions: float, sampling: str) -> None:
    """Refuses a draw whose positions memory does not hold.

    Args:
        positions: how many are drawn at once, by public numbers alone.
        sampling: the name of the rule.

    Raises:
        ValueError: it does not.
    """
    if not hasattr(os, "sysconf"):
        return
    needed, held = _BYTES * positions, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > held:
        raise ValueError(
            f"dataset_size must be one that can be drawn from in memory under {sampling}: one draw "
            f"has {positions:.3g} positions, which take {needed / 1e9:.3g} GB of the "
            f"{held / 1e9:.3g} GB here. Poisson sampling at a small rate holds one batch alone"
        )
