"""Rules that draw the records of a whole epoch at once: random allocation, and shuffling.

An epoch is one event, charged whole at its first step. Its draw is a function of the epoch's own
randomness, so that any step of it can be drawn without those before.
"""

import dataclasses

import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.sampling.rules import require_declared_size, require_memory, require_near_size
from jaxdp.sampling.subsets import arranged, permutation


@dataclasses.dataclass(frozen=True)
class RandomAllocation:
    """Random allocation: in each epoch every record is in ``participations`` random steps.

    They are drawn uniformly without replacement among the epoch's ``steps_per_epoch``, for each
    record by itself ("balls in bins" for one participation; Feldman and Shenfeld 2025,
    arXiv:2502.08202). Every record is used equally often, and yet batches have the privacy
    amplification that shuffling lacks. Their sizes are random, as with Poisson sampling; the number
    of records is private, and ``dataset_size`` need equal it only to a factor of 2.

    Attributes:
        steps_per_epoch: t >= 1.
        participations: k in 1..t.
    """

    steps_per_epoch: int
    participations: int = 1

    def __post_init__(self) -> None:
        arguments.integer("steps_per_epoch", self.steps_per_epoch, least=1)
        arguments.integer("participations", self.participations, least=1)
        if self.participations > self.steps_per_epoch:
            raise ValueError(
                f"participations must be at most steps_per_epoch ({self.steps_per_epoch}), got "
                f"{self.participations}"
            )

    def block(self, dataset_size: int) -> int:
        """The steps of an epoch."""
        return self.steps_per_epoch

    def slots(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """uint64 [n, k]: the steps of every record within an epoch, exactly uniform.

        Row p depends on the generator and p alone: neither on the other records nor on how many
        there are. Floyd's algorithm (Bentley and Floyd 1987, CACM 30(9)) draws without replacement.

        Args:
            rng: at the beginning of the epoch's stream.
            num_records: n.
        """
        first = self.steps_per_epoch - self.participations
        taken = np.empty((num_records, self.participations), np.uint64)
        for i in range(self.participations):
            found = _uniform(rng, i, num_records, first + i + 1)
            again = (taken[:, :i] == found[:, None]).any(axis=1)
            taken[:, i] = np.where(again, np.uint64(first + i), found)
        return taken

    def epoch(self, rng: np.random.Generator, num_records: int) -> list[np.ndarray]:
        """The positions of each step of an epoch, in random order.

        Args:
            rng: at the beginning of the epoch's stream.
            num_records: n.
        """
        slots = self.slots(rng, num_records).ravel()
        ends = np.cumsum(np.bincount(slots.view(np.int64), minlength=self.steps_per_epoch))
        positions = np.repeat(np.arange(num_records), self.participations)
        order = arranged(
            _apart(rng, self.participations), positions, num_records, slots, self.steps_per_epoch
        )
        return np.split(order, ends[:-1])

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of an epoch of such steps."""
        return acc.RandomAllocation(released, self.steps_per_epoch, self.participations)

    def check(self, num_records: int, dataset_size: int) -> None:
        """As ``Poisson.check``; an epoch is one draw."""
        require_near_size(num_records, dataset_size)
        require_memory(self.participations * dataset_size, "random allocation, an epoch at once,")


@dataclasses.dataclass(frozen=True)
class Shuffled:
    """Shuffling: an epoch is one pass over the records in random order, in batches of one size.

    It is offered to be compared with: no amplification is proven, and the epsilon charged is that
    of steps without sampling. Random allocation uses every record as often, at a fraction of it.
    Batches have ``batch_size`` records but for the last one, which has what is left, the same noise
    and the same public divisor. ``dataset_size`` must be exact: it is public here.
    """

    batch_size: int

    def __post_init__(self) -> None:
        arguments.integer("batch_size", self.batch_size, least=1)

    def block(self, dataset_size: int) -> int:
        """The steps of an epoch."""
        return max(1, -(-dataset_size // self.batch_size))

    def epoch(self, rng: np.random.Generator, num_records: int) -> list[np.ndarray]:
        """The positions of each step of an epoch: slices of one uniform permutation.

        Args:
            rng: at the beginning of the epoch's stream.
            num_records: n.
        """
        order = permutation(rng, num_records)
        ends = np.arange(1, self.block(num_records)) * self.batch_size
        return np.split(order, ends)

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of an epoch of such steps."""
        return acc.ShuffledEpoch(released, self.block(dataset_size))

    def check(self, num_records: int, dataset_size: int) -> None:
        """Refuses a declared size other than the number of records; ValueError."""
        require_declared_size(num_records, dataset_size, "shuffled")
        require_memory(dataset_size, "shuffling, an epoch at once,")


def _apart(rng: np.random.Generator, part: int, again: int = 0) -> np.random.Generator:
    """A generator that begins (1 + part) 2^160 + again 2^128 numbers later: no two overlap."""
    bits = rng.bit_generator.jumped(((1 + part) << 32) + again)  # type: ignore[attr-defined]
    return np.random.Generator(bits)


def _uniform(rng: np.random.Generator, part: int, count: int, below: int) -> np.ndarray:
    """uint64 [count]: exactly uniform on range(below), the p-th from 64-bit words of its own.

    Words of an incomplete last stretch of length ``below`` are rejected, and drawn again by
    themselves.
    """
    last = np.uint64(2**64 - 1 - 2**64 % below)
    words = _apart(rng, part).bit_generator.random_raw(count)
    again = 0
    while (rejected := words > last).any():
        again += 1
        words = np.where(rejected, _apart(rng, part, again).bit_generator.random_raw(count), words)
    return np.asarray(words % np.uint64(below))
