"""Sampling of each step's records: exact draws in fixed shapes, charged before they are made.

A draw is made on the host with NumPy's 64-bit Philox generator: a binomial count, then a choice
without replacement, O(batch) work. float32 uniforms on the device would bias small rates
(``uniform < 1e-7`` is true 1.2 times too often), so they are not used.
"""

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jaxdp import _validate
from jaxdp import accounting as acc
from jaxdp._issuer import Issuer
from jaxdp.types import Draw

if TYPE_CHECKING:
    from jaxdp.ledger import Ledger


class Sampling(Protocol):
    """A rule for drawing a step's records, and the event that the step is then charged as."""

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [k]: the positions drawn from ``range(num_records)``, without repetition.

        In random order: the rounding of a sum depends on it (docs/clip_bound.md, Theorem 4).
        """

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The accounting event of releasing ``released`` on one such draw."""

    def check(self, num_records: int, dataset_size: int) -> None:
        """Raises ValueError where these records cannot be drawn from by this rule."""


@dataclasses.dataclass(frozen=True)
class Poisson:
    """Poisson sampling: each record takes part independently with probability ``sampling_prob``.

    Amplifies under add-or-remove-one. The number of records is private: the guarantee does not
    assume it, and the declared ``dataset_size`` need equal it only to a factor of 2.
    """

    sampling_prob: float

    def __post_init__(self) -> None:
        _validate.probability("sampling_prob", self.sampling_prob)

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [k]: the positions drawn, k binomial; may be empty."""
        size = rng.binomial(num_records, self.sampling_prob)
        return rng.choice(num_records, size=size, replace=False)

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of a Poisson-sampled Gaussian."""
        return acc.PoissonSampled(released, sampling_prob=self.sampling_prob)

    def check(self, num_records: int, dataset_size: int) -> None:
        """Refuses a declared size that is not the number of records to a factor of 2.

        The guarantee holds for any number; but the divisor of the mean would be wrong, silently.

        Raises:
            ValueError: it is less than half or more than twice as large.
        """
        # Without the number, which is private; that it was refused is told to the owner alone.
        if not dataset_size <= 2 * num_records <= 4 * dataset_size:
            raise ValueError(
                "dataset_size must be the number of records, to a factor of 2, got "
                f"{dataset_size}: batches would have a size far from batch_size"
            )


@dataclasses.dataclass(frozen=True)
class FixedSize:
    """Fixed-size sampling: ``batch_size`` records, uniformly without replacement (replace-one)."""

    batch_size: int

    def __post_init__(self) -> None:
        _validate.integer("batch_size", self.batch_size, least=1)

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [batch_size]: the positions drawn."""
        return rng.choice(num_records, size=self.batch_size, replace=False)

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of a Gaussian on a fixed-size draw without replacement."""
        return acc.FixedSizeSampled(released, dataset_size=dataset_size, batch_size=self.batch_size)

    def check(self, num_records: int, dataset_size: int) -> None:
        """Refuses a declared size other than the number of records, or less than a batch.

        The sampled fraction is part of the guarantee, so the size must be exact.

        Raises:
            ValueError: it is refused.
        """
        _require_declared_size(num_records, dataset_size)
        if self.batch_size > num_records:
            raise ValueError(
                f"batch_size must be at most the {num_records} records, got {self.batch_size}"
            )


@dataclasses.dataclass(frozen=True)
class FullBatch:
    """Full-batch steps: every record takes part in every step, without amplification."""

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [num_records]: all positions."""
        return rng.permutation(num_records)

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event itself: a Gaussian without sampling."""
        return released

    def check(self, num_records: int, dataset_size: int) -> None:
        """Accepts any number of records."""


class Sampler:
    """Draws the records of one step after the other, each charged before it is drawn.

    A sampler never draws a step twice, and two samplers never share a draw or a noise, also where
    they were made from one secret of the operating system: two releases from one draw are not two
    independently sampled events, and would cost more than two. (A seed that a person chose repeats
    both in another ledger; such a run is labelled.)

    Args:
        sampling: the sampling rule.
        num_records: the number of records. Sensitive under add-or-remove-one.
        physical_batch_size: rows of one physical batch; a larger draw takes several, none is ever
            truncated.
        issuer: charges and issues the tickets.
    """

    def __init__(
        self, sampling: Sampling, num_records: int, physical_batch_size: int, issuer: Issuer
    ):
        _validate.integer("num_records", num_records, least=0)
        if num_records >= 2**31:
            raise ValueError(f"num_records must be below 2**31, got {num_records!r}")
        _validate.integer("physical_batch_size", physical_batch_size, least=1)
        charged = getattr(issuer.mechanism, "sampling", sampling)
        if charged != sampling:
            raise ValueError(
                f"sampling must be the one that the issuer charges, {charged}, got {sampling}: "
                "take mechanism.sampler(...) of the mechanism"
            )
        self._sampling, self._num_records, self._issuer = sampling, num_records, issuer
        self._physical_batch_size = physical_batch_size

    @property
    def sampling(self) -> Sampling:
        """The sampling rule."""
        return self._sampling

    @property
    def num_records(self) -> int:
        """The number of records drawn from. Sensitive under add-or-remove-one."""
        return self._num_records

    @property
    def physical_batch_size(self) -> int:
        """Rows of one physical batch."""
        return self._physical_batch_size

    @property
    def issuer(self) -> Issuer:
        """The issuer that charges and makes the tickets."""
        return self._issuer

    @property
    def ledger(self) -> "Ledger":
        """The ledger that every draw is charged to."""
        ledger: Ledger = self._issuer.ledger
        return ledger

    @property
    def step(self) -> int:
        """The next step to be drawn."""
        return self._issuer.step

    def draw(self, until: int | None = None) -> Draw:
        """Charges the next step, draws its records, and advances.

        Args:
            until: steps from this one on are not charged ahead.
        """
        ticket = self._issuer.issue(until)
        if until is None:
            self._issuer.handed_out(ticket.step)
        chosen = self._sampling.choose(ticket.generator(), self._num_records)
        padded = pad(chosen, self._physical_batch_size, ticket.step, self._num_records)
        return padded.drawn_by(ticket)

    def close(self, unused: int = 0) -> None:
        """Gives back to the ledger what was charged ahead, and the last ``unused`` draws.

        Args:
            unused: the number of draws, the last ones made, that nobody saw.
        """
        self._issuer.close(unused)

    def __repr__(self) -> str:
        return f"Sampler({self._sampling!r}, step={self.step})"


def pad(chosen: np.ndarray, physical_batch_size: int, step: int, num_records: int) -> Draw:
    """The positions [k] as a draw of as many physical batches as they need, at least one."""
    passes = max(1, -(-len(chosen) // physical_batch_size))
    indices = np.zeros(passes * physical_batch_size, dtype=np.int32)
    indices[: len(chosen)] = chosen
    mask = np.arange(len(indices)) < len(chosen)
    shape = (passes, physical_batch_size)
    return Draw(indices.reshape(shape), mask.reshape(shape), step, num_records)


def _require_declared_size(num_records: int, dataset_size: int) -> None:
    if num_records != dataset_size:
        raise ValueError(
            f"dataset_size must be the number of records ({num_records}) under fixed-size "
            f"sampling, got {dataset_size}"
        )
