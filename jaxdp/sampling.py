"""Which records take part in a step: exact draws in fixed shapes, resumable from the step number.

A draw is made on the host with NumPy's 64-bit Philox generator: a binomial count, then a choice
without replacement, O(batch) work. float32 uniforms on the device would bias small rates
(``uniform < 1e-7`` is true 1.2 times too often), so they are not used.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from jaxdp import _validate
from jaxdp import accounting as acc
from jaxdp.seeds import Secret
from jaxdp.types import Draw


class Sampling(Protocol):
    """How a step's records are drawn, and what that does to the event it is charged as."""

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [k]: the positions drawn from ``range(num_records)``, without repetition."""

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The accounting event of releasing ``released`` on one such draw."""

    def check(self, num_records: int, dataset_size: int) -> None:
        """Raises ValueError where the records at hand cannot be drawn from like this."""


@dataclasses.dataclass(frozen=True)
class Poisson:
    """Every record takes part independently with probability ``sampling_prob``.

    Amplifies under add-or-remove-one. The number of records is not assumed: it is the draw's only
    secret, and the declared ``dataset_size`` need not equal it.
    """

    sampling_prob: float

    def __post_init__(self) -> None:
        _validate.probability("sampling_prob", self.sampling_prob)

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [k], k binomial; may be empty."""
        size = rng.binomial(num_records, self.sampling_prob)
        return rng.choice(num_records, size=size, replace=False, shuffle=False)

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """A Poisson-sampled Gaussian."""
        return acc.PoissonSampled(released, sampling_prob=self.sampling_prob)

    def check(self, num_records: int, dataset_size: int) -> None:
        """Any number of records can be drawn from."""


@dataclasses.dataclass(frozen=True)
class FixedSize:
    """Exactly ``batch_size`` records, uniformly without replacement (for replace-one)."""

    batch_size: int

    def __post_init__(self) -> None:
        _validate.integer("batch_size", self.batch_size, least=1)

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [batch_size]."""
        return rng.choice(num_records, size=self.batch_size, replace=False, shuffle=False)

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """A Gaussian on a fixed-size draw without replacement."""
        return acc.FixedSizeSampled(released, dataset_size=dataset_size, batch_size=self.batch_size)

    def check(self, num_records: int, dataset_size: int) -> None:
        """The sampled fraction is part of the guarantee, so the size must be the declared one."""
        _require_declared_size(num_records, dataset_size)
        if self.batch_size > num_records:
            raise ValueError(
                f"batch_size must be at most the {num_records} records, got {self.batch_size}"
            )


@dataclasses.dataclass(frozen=True)
class FullBatch:
    """Every record in every step: no amplification."""

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [num_records]."""
        return np.arange(num_records)

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The plain Gaussian."""
        return released

    def check(self, num_records: int, dataset_size: int) -> None:
        """Any number of records will do."""


@dataclasses.dataclass
class Sampler:
    """The draws of a run, one after the other; each is a pure function of (secret, step).

    A sampler never draws a step twice: two releases from the same draw are not two independently
    sampled events, and would cost more than two.

    Attributes:
        sampling: the rule of drawing.
        num_records: how many records there are. Sensitive under add-or-remove-one.
        physical_batch_size: rows of one physical batch; a larger draw takes more passes, none is
            ever truncated.
        secret: where the randomness comes from.
        step: the step to be drawn next; with the secret, all that a resumed run needs.
        on_draw: called with the step before its records are drawn: the ledger's charge.
    """

    sampling: Sampling
    num_records: int = dataclasses.field(repr=False)
    physical_batch_size: int
    secret: Secret
    step: int = 0
    on_draw: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        _validate.integer("num_records", self.num_records, least=0)
        if self.num_records >= 2**31:
            raise ValueError(f"num_records must be below 2**31, got {self.num_records!r}")
        _validate.integer("physical_batch_size", self.physical_batch_size, least=1)
        _validate.integer("step", self.step, least=0)

    def __setattr__(self, name: str, value: Any) -> None:
        """What the draws were charged for stays as it was."""
        if name in ("sampling", "num_records", "secret") and name in self.__dict__:
            # Without the values: the number of records is private, and the secret secret.
            raise ValueError(f"{name} must stay what it was when draws were first charged")
        super().__setattr__(name, value)

    def draw(self) -> Draw:
        """Charges the next step, draws its records, and advances."""
        step = self.step
        if self.on_draw is not None:
            self.on_draw(step)
        self.step += 1
        rng = self.secret.philox("sampling", step)
        chosen = self.sampling.choose(rng, self.num_records)
        return pad(chosen, self.physical_batch_size, step, self.num_records)


def pad(chosen: np.ndarray, physical_batch_size: int, step: int, num_records: int) -> Draw:
    """Cuts the chosen positions [k] into as many physical batches as they need, at least one."""
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
