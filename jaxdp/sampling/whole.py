"""Rules for correlated noise: a whole run of a public number of steps is one event.

A record takes part at times that the strategy's sensitivity, or its amplification, was made for
(docs/correlated_noise.md).
"""

import dataclasses
import hashlib
from typing import ClassVar

import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.sampling.rules import (
    Identities,
    Identity,
    Poisson,
    require_declared_size,
    require_memory,
    require_near_size,
)
from jaxdp.sampling.subsets import permutation


@dataclasses.dataclass(frozen=True)
class CyclicPoisson:
    """Cyclic Poisson sampling: every record belongs to one of ``bands`` groups, used in turn.

    Step i draws each record of group i mod ``bands`` independently with ``sampling_prob``. A
    record's group is a keyed hash of its identity, so that it does not depend on the other records,
    nor on how many there are. Amplifies correlated noise of at most ``bands`` bands under
    add-or-remove-one (Choquette-Choo et al. 2023, arXiv:2306.08153v2, Theorem 4); one band is
    Poisson sampling.

    Attributes:
        sampling_prob: of a record of the group; ``bands`` times the share of all records.
        bands: b >= 1.
        steps: n >= 1, of the whole run.
    """

    sampling_prob: float
    bands: int
    steps: int
    # A record whose columns straddle the first repeated step would be released twice by one draw.
    tail_again: ClassVar[bool] = False

    def __post_init__(self) -> None:
        arguments.probability("sampling_prob", self.sampling_prob)
        arguments.integer("bands", self.bands, least=1)
        arguments.integer("steps", self.steps, least=1)

    def block(self, dataset_size: int) -> int:
        """The steps of the run."""
        return self.steps

    def arrange(
        self, rng: np.random.Generator, num_records: int, identities: Identities | None
    ) -> list[np.ndarray]:
        """The positions of the records of every group, in order.

        Args:
            rng: at the beginning of the run's own stream.
            num_records: n.
            identities: what identifies each record, [n] integers, strings or bytes.

        Raises:
            ValueError: no identities, or another number of them.
        """
        if self.bands == 1:
            return [np.arange(num_records)]
        if identities is None:
            raise ValueError(
                "identities must be given for cyclic Poisson sampling: a record's group is a hash "
                "of what identifies it, never of its position, which other records would shift. "
                "Give one value a record, mechanism.sampler(n, identities=ids); jaxdp.Trainer "
                "takes the records themselves"
            )
        if len(identities) != num_records:
            raise ValueError("identities must be as many as the records, got another number")
        groups = _groups(rng.bytes(32), identities, self.bands)
        return [np.flatnonzero(groups == g) for g in range(self.bands)]

    def of_step(
        self, arranged: list[np.ndarray], step: int, rng: np.random.Generator
    ) -> np.ndarray:
        """int64 [k]: the positions of one step, in random order; k is binomial, may be 0.

        Args:
            arranged: from ``arrange``.
            step: of the run.
            rng: of the step.
        """
        group = arranged[step % self.bands]
        return group[Poisson(self.sampling_prob).choose(rng, len(group))]

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of the whole run."""
        return acc.CyclicPoisson(released, self.sampling_prob, self.bands, self.steps)

    def check(self, num_records: int, dataset_size: int) -> None:
        """As ``Poisson.check``."""
        require_near_size(num_records, dataset_size)
        require_memory(dataset_size, "cyclic Poisson sampling")


@dataclasses.dataclass(frozen=True)
class FixedOrder:
    """Batches in one order, the same in every pass over the records.

    A record's steps are T = ⌈N/B⌉ apart, exactly. The order is a random permutation that stays
    secret, but nothing rests on that: there is no amplification. Neighbours have the same number of
    records, which is public: one record is replaced by a null record, or by another.

    Attributes:
        batch_size: B; the last batch of a pass has what is left.
        steps: n >= 1, of the whole run.
    """

    batch_size: int
    steps: int
    tail_again: ClassVar[bool] = True

    def __post_init__(self) -> None:
        arguments.integer("batch_size", self.batch_size, least=1)
        arguments.integer("steps", self.steps, least=1)

    def block(self, dataset_size: int) -> int:
        """The steps of the run."""
        return self.steps

    def separation(self, dataset_size: int) -> int:
        """T: the steps of a pass; a record's steps are so many apart."""
        return -(-dataset_size // self.batch_size)

    def arrange(
        self, rng: np.random.Generator, num_records: int, identities: Identities | None = None
    ) -> list[np.ndarray]:
        """The positions of every batch of a pass; ``identities`` are not used."""
        order = permutation(rng, num_records)
        ends = np.arange(1, self.separation(num_records)) * self.batch_size
        return np.split(order, ends)

    def of_step(
        self, arranged: list[np.ndarray], step: int, rng: np.random.Generator
    ) -> np.ndarray:
        """int64 [k]: the positions of one step; as ``CyclicPoisson.of_step``."""
        batch = arranged[step % len(arranged)]
        return batch[permutation(rng, len(batch))]

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of the whole run."""
        return acc.CorrelatedNoise(released, self.steps)

    def check(self, num_records: int, dataset_size: int) -> None:
        """Refuses a declared size other than the number of records; ValueError."""
        require_declared_size(num_records, dataset_size, "fixed-order")
        require_memory(dataset_size, "a fixed order")


def _groups(key: bytes, identities: Identities, bands: int) -> np.ndarray:
    """int64 [n]: the group of each identity, by a keyed hash of it alone."""

    def group(identity: Identity) -> int:
        digest = hashlib.blake2b(named(identity), digest_size=8, key=key).digest()
        return int.from_bytes(digest, "big") % bands

    return np.fromiter(map(group, identities), np.int64)


def named(identity: Identity) -> bytes:
    """The identity of a record as bytes, the same from NumPy and from Python.

    Raises:
        ValueError: it is no integer, string or bytes.
    """
    return identity if isinstance(identity, bytes) else repr(_plain(identity)).encode()


def _plain(identity: Identity) -> int | str | bytes:
    """The identity as Python has it: what a NumPy scalar is shown as may change."""
    plain = identity.item() if isinstance(identity, np.generic) else identity
    if isinstance(plain, bool) or not isinstance(plain, int | str | bytes):
        raise ValueError(
            "identities must be integers, strings or bytes, got one of "
            f"{type(plain).__name__}: a record's group must follow from what identifies it"
        )
    return plain
