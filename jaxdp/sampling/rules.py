"""Rules by which records are drawn, by name: step by step, an epoch at once, or a whole run.

An epoch is one event, charged whole at its first step. Its draw is a function of the epoch's own
randomness, so that any step of it can be drawn without those before. With correlated noise a run of
a public number of steps is one event: a record takes part at times that the strategy's sensitivity,
or its amplification, was made for (docs/correlated_noise.md).
"""

import dataclasses
import hashlib
import math
import warnings
from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.sampling.exact import binomial, permutation, shuffle_within_groups, subset
from jaxdp.sampling.files import memory

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

    def prepare(
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
            arranged: from ``prepare``.
            step: of the run.
            rng: of the step.
        """


class _Rule:
    """The check of a declared size, by what a rule says of itself."""

    title: ClassVar[str]
    # The declared size is part of the guarantee. Elsewhere a wrong one makes a wrong divisor of the
    # mean, silently, and is refused from a factor of 2 on.
    exact: ClassVar[bool] = False

    def _positions(self, dataset_size: int) -> float:
        """The number of positions that are drawn at once, by public numbers alone."""
        return dataset_size

    def check(self, num_records: int, dataset_size: int) -> None:
        """Refuses a declared size that is not the number of records, or that memory cannot hold.

        Args:
            num_records: n, private where ``exact`` is False.
            dataset_size: the declared number.

        Raises:
            ValueError: the two differ (by more than a factor of 2 where ``exact`` is False), or
                memory does not hold the positions of a draw.
        """
        if self.exact and num_records != dataset_size:
            raise ValueError(
                f"dataset_size must be the number of records ({num_records}) under {self.title}, "
                f"got {dataset_size}"
            )
        # Without the number, which is private; that it was refused is told to the owner alone.
        if not dataset_size <= 2 * num_records <= 4 * dataset_size:
            raise ValueError(
                "dataset_size must be the number of records, to a factor of 2, got "
                f"{dataset_size}: batches would have a size far from batch_size"
            )
        positions, held = self._positions(dataset_size), memory()
        if held is not None and _BYTES * positions > held:
            raise ValueError(
                f"dataset_size must be one that can be drawn from in memory under {self.title}: "
                f"one draw has {positions:.3g} positions, which take "
                f"{_BYTES * positions / 1e9:.3g} GB of the {held / 1e9:.3g} GB here. Poisson "
                "sampling at a small rate holds one batch alone"
            )


@dataclasses.dataclass(frozen=True)
class Poisson(_Rule):
    """Poisson sampling: each record takes part independently with probability ``sampling_prob``.

    Amplifies under add-or-remove-one. The number of records is private: the guarantee does not
    assume it, and the declared ``dataset_size`` need equal it only to a factor of 2.
    """

    sampling_prob: float
    title: ClassVar[str] = "Poisson sampling"

    def __post_init__(self) -> None:
        arguments.probability("sampling_prob", self.sampling_prob)

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [k]: the positions drawn, k binomial; may be empty."""
        return subset(rng, num_records, binomial(rng, num_records, self.sampling_prob))

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of a Poisson-sampled Gaussian."""
        return acc.PoissonSampled(released, sampling_prob=self.sampling_prob)

    def _positions(self, dataset_size: int) -> float:
        return self.sampling_prob * dataset_size


@dataclasses.dataclass(frozen=True)
class FixedSize(_Rule):
    """Fixed-size sampling: ``batch_size`` records, uniformly without replacement (replace-one)."""

    batch_size: int
    title: ClassVar[str] = "fixed-size sampling"
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        arguments.integer("batch_size", self.batch_size, least=1)

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [batch_size]: the positions drawn."""
        return subset(rng, num_records, self.batch_size)

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of a Gaussian on a fixed-size draw without replacement."""
        return acc.FixedSizeSampled(released, dataset_size=dataset_size, batch_size=self.batch_size)

    def check(self, num_records: int, dataset_size: int) -> None:
        """As of every rule, and refuses a batch of more than all records; ValueError."""
        super().check(num_records, dataset_size)
        if self.batch_size > num_records:
            raise ValueError(
                f"batch_size must be at most the {num_records} records, got {self.batch_size}"
            )

    def _positions(self, dataset_size: int) -> float:
        return self.batch_size


@dataclasses.dataclass(frozen=True)
class FullBatch(_Rule):
    """Full-batch steps: every record takes part in every step, without amplification."""

    title: ClassVar[str] = "full batches"

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [num_records]: all positions."""
        return permutation(rng, num_records)

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event itself: a Gaussian without sampling."""
        return released


@dataclasses.dataclass(frozen=True)
class TruncatedPoisson(_Rule):
    """Poisson sampling of which at most ``cap`` records are kept, so that every draw has one shape.

    Each record takes part independently with probability ``sampling_prob``; of more than ``cap`` a
    uniformly random subset of ``cap`` is kept. Draws are padded to ``cap``, whatever their size:
    one compiled physical batch serves every step. Only replacing a record by a null record is
    covered, and ``dataset_size`` must be exact.
    """

    sampling_prob: float
    cap: int
    title: ClassVar[str] = "truncated Poisson sampling"
    exact: ClassVar[bool] = True

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

    def _positions(self, dataset_size: int) -> float:
        return self.sampling_prob * dataset_size


@dataclasses.dataclass(frozen=True)
class RandomAllocation(_Rule):
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
    title: ClassVar[str] = "random allocation"

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
        order = shuffle_within_groups(
            _jumped(rng, self.participations), positions, num_records, slots, self.steps_per_epoch
        )
        return np.split(order, ends[:-1])

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of an epoch of such steps."""
        return acc.RandomAllocation(released, self.steps_per_epoch, self.participations)

    def _positions(self, dataset_size: int) -> float:
        return self.participations * dataset_size


@dataclasses.dataclass(frozen=True)
class Shuffled(_Rule):
    """Shuffling: an epoch is one pass over the records in random order, in batches of one size.

    It is offered to be compared with: no amplification is proven, and the epsilon charged is that
    of steps without sampling. Random allocation uses every record as often, at a fraction of it.
    Batches have ``batch_size`` records but for the last one, which has what is left, the same noise
    and the same public divisor. ``dataset_size`` must be exact: it is public here.
    """

    batch_size: int
    title: ClassVar[str] = "shuffled sampling"
    exact: ClassVar[bool] = True

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
        return _in_batches(rng, num_records, self.batch_size)

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of an epoch of such steps."""
        return acc.ShuffledEpoch(released, self.block(dataset_size))


@dataclasses.dataclass(frozen=True)
class CyclicPoisson(_Rule):
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
    title: ClassVar[str] = "cyclic Poisson sampling"

    def __post_init__(self) -> None:
        arguments.probability("sampling_prob", self.sampling_prob)
        arguments.integer("bands", self.bands, least=1)
        arguments.integer("steps", self.steps, least=1)

    def block(self, dataset_size: int) -> int:
        """The steps of the run."""
        return self.steps

    def prepare(
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
        key, groups = rng.bytes(32), np.empty(num_records, np.int64)
        for place, identity in enumerate(identities):
            digest = hashlib.blake2b(identity_bytes(identity), digest_size=8, key=key).digest()
            groups[place] = int.from_bytes(digest, "big") % self.bands
        return [np.flatnonzero(groups == g) for g in range(self.bands)]

    def of_step(
        self, arranged: list[np.ndarray], step: int, rng: np.random.Generator
    ) -> np.ndarray:
        """int64 [k]: the positions of one step, in random order; k is binomial, may be 0.

        Args:
            arranged: from ``prepare``.
            step: of the run.
            rng: of the step.
        """
        group = arranged[step % self.bands]
        return group[Poisson(self.sampling_prob).choose(rng, len(group))]

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of the whole run."""
        return acc.CyclicPoisson(released, self.sampling_prob, self.bands, self.steps)


@dataclasses.dataclass(frozen=True)
class FixedOrder(_Rule):
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
    title: ClassVar[str] = "fixed-order sampling"
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        arguments.integer("batch_size", self.batch_size, least=1)
        arguments.integer("steps", self.steps, least=1)

    def block(self, dataset_size: int) -> int:
        """The steps of the run."""
        return self.steps

    def separation(self, dataset_size: int) -> int:
        """T: the steps of a pass; a record's steps are so many apart."""
        return -(-dataset_size // self.batch_size)

    def prepare(
        self, rng: np.random.Generator, num_records: int, identities: Identities | None = None
    ) -> list[np.ndarray]:
        """The positions of every batch of a pass; ``identities`` are not used."""
        return _in_batches(rng, num_records, self.batch_size)

    def of_step(
        self, arranged: list[np.ndarray], step: int, rng: np.random.Generator
    ) -> np.ndarray:
        """int64 [k]: the positions of one step; as ``CyclicPoisson.of_step``."""
        batch = arranged[step % len(arranged)]
        return batch[permutation(rng, len(batch))]

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of the whole run."""
        return acc.CorrelatedNoise(released, self.steps)


_ADD, _REPLACE, _NULL = (
    acc.Relation.ADD_OR_REMOVE_ONE,
    acc.Relation.REPLACE_ONE,
    acc.Relation.REPLACE_SPECIAL,
)
# The rules by name, and the neighbouring relations that are covered.
RULES: dict[str, tuple[type[Sampling], tuple[acc.Relation, ...]]] = {
    "poisson": (Poisson, (_ADD, _REPLACE, _NULL)),
    "fixed_size": (FixedSize, (_ADD, _REPLACE, _NULL)),
    "full_batch": (FullBatch, (_ADD, _REPLACE, _NULL)),
    "allocation": (RandomAllocation, (_ADD, _NULL)),
    "shuffle": (Shuffled, (_REPLACE, _NULL)),
    "truncated_poisson": (TruncatedPoisson, (_NULL,)),
    # Of whole runs with correlated noise: ``dp_mf`` makes them, and they are no ``NAMES``.
    "cyclic_poisson": (CyclicPoisson, (_ADD, _NULL)),
    "fixed_order": (FixedOrder, (_REPLACE, _NULL)),
}
NAMES = tuple(name for name in RULES if name not in ("cyclic_poisson", "fixed_order"))


def by_name(
    name: str, batch_size: int, dataset_size: int, participations: int = 1, cap: int | None = None
) -> Sampling:
    """The sampling rule of a name in ``NAMES``.

    Args:
        name: of the rule.
        batch_size: the expected number of records of a step; of an allocation, of whose steps a
            whole number makes an epoch, the most that it may be, see ``expected_size``.
        dataset_size: the declared number of records.
        participations: of an allocation.
        cap: of truncated Poisson sampling; None takes one that a draw exceeds about
            once in a billion steps.

    Raises:
        ValueError: an unknown name, or a number that the rule does not have or allow.
    """
    hint = ": correlated noise, jaxdp.dp_mf" if name in RULES else ""
    arguments.one_of("sampling", name, NAMES, hint)
    batch_size = arguments.integer("batch_size", batch_size, least=1)
    dataset_size = arguments.integer("dataset_size", dataset_size, least=1)
    if batch_size > dataset_size:
        raise ValueError(
            f"batch_size must be at most dataset_size ({dataset_size}), got {batch_size}"
        )
    if participations != 1 and name != "allocation":
        raise ValueError(f"participations must be 1 but for allocation, got {participations}")
    if cap is not None and name != "truncated_poisson":
        raise ValueError(f"cap must be None but for truncated_poisson, got {cap}")
    if name == "poisson":
        return Poisson(batch_size / dataset_size)
    if name == "fixed_size":
        return FixedSize(batch_size)
    if name == "full_batch":
        return FullBatch()
    if name == "allocation":
        return RandomAllocation(-(-dataset_size * participations // batch_size), participations)
    if name == "shuffle":
        return Shuffled(batch_size)
    # A cap that a draw of this expected size exceeds about once in a billion steps: six standard
    # deviations above the mean, rounded up to a multiple of 64.
    most = batch_size + math.ceil(6 * math.sqrt(batch_size))
    cap = min(dataset_size, -(-most // 64) * 64) if cap is None else cap
    return TruncatedPoisson(batch_size / dataset_size, cap)


def name_of(sampling: Sampling) -> str:
    """The name of a rule; that of its class for one of the caller's own."""
    names = (name for name, (kind, _) in RULES.items() if type(sampling) is kind)
    return next(names, type(sampling).__name__)


def relations(name: str) -> tuple[acc.Relation, ...]:
    """The neighbouring relations that are covered for a name; all of them but for a few rules."""
    return RULES[name][1] if name in RULES else tuple(acc.Relation)


def rate(sampling: Sampling, batch_size: int, dataset_size: int) -> float:
    """The share of the steps that a record is in, on average."""
    if isinstance(sampling, Poisson | TruncatedPoisson):
        return sampling.sampling_prob
    if isinstance(sampling, RandomAllocation):
        return sampling.participations / sampling.steps_per_epoch
    if isinstance(sampling, CyclicPoisson):
        return sampling.sampling_prob / sampling.bands
    return batch_size / dataset_size


def expected_size(sampling: Sampling, batch_size: int, dataset_size: int) -> int:
    """The expected batch size, rounded up: of an allocation what its whole steps make of it."""
    if not isinstance(sampling, RandomAllocation):
        return batch_size
    return -(-dataset_size * sampling.participations // sampling.steps_per_epoch)


def exact_size(sampling: Sampling, dataset_size: int) -> int | None:
    """The largest number of records of a draw, where it is public; None where sizes are random.

    Of full batches a little more than the declared number, since a record may enter.
    """
    if isinstance(sampling, FixedSize | Shuffled | FixedOrder):
        return sampling.batch_size
    if isinstance(sampling, FullBatch):
        return dataset_size // 8 * 8 + 8
    return getattr(sampling, "cap", None)


def whole_epochs(steps: int, block: int, stacklevel: int = 4) -> int:
    """The steps, rounded up to whole epochs of ``block`` steps; warns where that changes them."""
    whole = -(-steps // block) * block
    if whole > steps:
        warnings.warn(
            f"steps was rounded up from {steps} to {whole}, {whole // block} epochs of {block} "
            "steps: each is charged whole",
            stacklevel=stacklevel,
        )
    return whole


def steps_of_a_block(sampling: Sampling, dataset_size: int) -> int:
    """The number of consecutive steps that are one event of the rule; 1 for most."""
    if isinstance(sampling, EpochSampling) or isinstance(sampling, RunSampling):  # noqa: SIM101
        return sampling.block(dataset_size)
    return 1


def identity_bytes(identity: Identity) -> bytes:
    """The identity of a record as bytes, the same from NumPy and from Python.

    Raises:
        ValueError: it is no integer, string or bytes.
    """
    # As Python has it: what a NumPy scalar is shown as may change.
    plain = identity.item() if isinstance(identity, np.generic) else identity
    if isinstance(plain, bool) or not isinstance(plain, int | str | bytes):
        raise ValueError(
            "identities must be integers, strings or bytes, got one of "
            f"{type(plain).__name__}: a record's group must follow from what identifies it"
        )
    return identity if isinstance(identity, bytes) else repr(plain).encode()


def _in_batches(rng: np.random.Generator, num_records: int, size: int) -> list[np.ndarray]:
    """All positions in random order, in batches of one size; the last one has what is left."""
    return np.split(permutation(rng, num_records), np.arange(size, num_records, size))


def _jumped(rng: np.random.Generator, part: int, again: int = 0) -> np.random.Generator:
    """A generator that begins (1 + part) 2^160 + again 2^128 numbers later: no two overlap."""
    bits = rng.bit_generator.jumped(((1 + part) << 32) + again)  # type: ignore[attr-defined]
    return np.random.Generator(bits)


def _uniform(rng: np.random.Generator, part: int, count: int, below: int) -> np.ndarray:
    """uint64 [count]: exactly uniform on range(below), the p-th from 64-bit words of its own.

    Words of an incomplete last stretch of length ``below`` are rejected, and drawn again by
    themselves.
    """
    last = np.uint64(2**64 - 1 - 2**64 % below)
    words = _jumped(rng, part).bit_generator.random_raw(count)
    again = 0
    while (rejected := words > last).any():
        again += 1
        words = np.where(rejected, _jumped(rng, part, again).bit_generator.random_raw(count), words)
    return np.asarray(words % np.uint64(below))
