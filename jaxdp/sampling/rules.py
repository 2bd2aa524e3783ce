"""Rules by which records are drawn, by name: step by step, an epoch at once, or a whole run.

An epoch is one event, charged whole at its first step. Its draw is a function of the epoch's own
randomness, so that any step of it can be drawn without those before. With correlated noise a run of
a public number of steps is one event: a record takes part at times that the strategy's sensitivity,
or its amplification, was made for (docs/proofs/correlated_noise.md).
"""

import dataclasses
import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.sampling.exact import binomial, permutation, shuffle_within_groups, subset
from jaxdp.sampling.files import memory
from jaxdp.types import PyTree

if TYPE_CHECKING:
    from jaxdp.sampling.source import Source

# What identifies a record, whatever the other records are; one of them each, [n].
Identity = int | str | bytes | np.generic
Identities = Sequence[Identity] | np.ndarray
_AT_ONCE = 4096  # records that are read together
_AGAIN = 64  # records of which the probability is asked twice
# Of memory, that a position takes while its draw is made: twice or so what was measured.
_BYTES = 64


_ADD, _REPLACE, _NULL = (
    acc.Relation.ADD_OR_REMOVE_ONE,
    acc.Relation.REPLACE_ONE,
    acc.Relation.REPLACE_SPECIAL,
)
# The rules by name, in the order of their definition; a class statement adds one, ``name="..."``.
RULES: dict[str, type["Sampling"]] = {}


class Sampling:
    """A rule for drawing records: a frozen dataclass that derives from one of the three below.

    ``StepSampling`` draws each step by itself, ``EpochSampling`` an epoch at once, ``RunSampling``
    a whole run. A rule states its own facts, by overriding what differs from the defaults here; no
    other module asks which rule it is (docs/draws.md, "Add a sampling rule").

    Attributes:
        name: of the rule, ``class Poisson(StepSampling, name="poisson")``; else the class's.
        title: the rule in words, for messages.
        exact: True where the declared number of records is part of the guarantee. Elsewhere a wrong
            one makes a wrong divisor of the mean, silently, and is refused from a factor of 2 on.
        relations: the neighbouring relations that are covered, the first one usual. The event must
            have a bound besides.
        options: names of the options of ``by_name`` that the rule has.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = "this sampling"
    exact: ClassVar[bool] = True
    relations: ClassVar[tuple[acc.Relation, ...]] = tuple(acc.Relation)
    options: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, name: str = "") -> None:
        cls.name = name or cls.__name__
        if not name:
            return
        # The same class once more, such as a notebook's cell that is run again, takes the name.
        known = RULES.get(name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"name must be one that no sampling rule has, got {name!r}")
        RULES[name] = cls

    @classmethod
    def of(cls, batch_size: int, dataset_size: int, **options: Any) -> "Sampling":
        """The rule for an expected batch size, as ``by_name`` makes it."""
        return cls(batch_size, **options)  # type: ignore[call-arg]

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The accounting event of releasing ``released`` on one step's draw, or a block's."""
        raise NotImplementedError(f"{type(self).__name__} must have an event")

    def block(self, dataset_size: int) -> int:
        """The number of consecutive steps that are one event: 1, an epoch's, or a run's."""
        return 1

    def fixed_size(self, dataset_size: int) -> int | None:
        """The number of records of every draw (but a shorter last one); None where it is random."""
        return None

    def largest_size(self, dataset_size: int) -> int | None:
        """The largest number of records of a draw, where it is public; None where it is not."""
        return self.fixed_size(dataset_size)

    def rate(self, batch_size: int, dataset_size: int) -> float:
        """The share of the steps that a record is in, on average."""
        return batch_size / dataset_size

    def expected_size(self, batch_size: int, dataset_size: int) -> int:
        """The expected batch size, rounded up, for one that was asked for."""
        return batch_size

    def positions_held(self, dataset_size: int) -> float:
        """The number of positions that memory holds at once, by public numbers alone."""
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
        # Without the number, which is private; only the owner sees that it was refused.
        if not dataset_size <= 2 * num_records <= 4 * dataset_size:
            raise ValueError(
                "dataset_size must be the number of records, to a factor of 2, got "
                f"{dataset_size}: batches would have a size far from batch_size"
            )
        positions, available = self.positions_held(dataset_size), memory()
        if available is not None and _BYTES * positions > available:
            raise ValueError(
                f"dataset_size must be one that can be drawn from in memory under {self.title}: "
                f"one draw has {positions:.3g} positions, which take "
                f"{_BYTES * positions / 1e9:.3g} GB of the {available / 1e9:.3g} GB here. Poisson "
                "sampling at a small rate holds one batch alone"
            )


class StepSampling(Sampling):
    """A rule that draws each step by itself."""

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [k]: the positions drawn from ``range(num_records)``, without repetition.

        In random order: the rounding of a sum depends on it (docs/proofs/clip_bound.md, Theorem 4).
        """
        raise NotImplementedError(f"{type(self).__name__} must have a method choose")


class EpochSampling(Sampling):
    """A rule that draws an epoch at once, which is one event, charged whole at its first step.

    It overrides ``block``, the number of steps of an epoch.
    """

    def epoch(self, rng: np.random.Generator, num_records: int) -> list[np.ndarray]:
        """The positions of every step of an epoch, int64 [k] each; otherwise as ``choose``.

        Args:
            rng: Philox, at the beginning of the epoch's stream.
            num_records: n.
        """
        raise NotImplementedError(f"{type(self).__name__} must have a method epoch")


class RunSampling(Sampling):
    """A rule under which a whole run is one event, charged at its first step: correlated noise.

    It overrides ``block``, the number of steps of the run.

    Attributes:
        tail_again: True if the last steps may be released once more, with other noise, for the
            price of the whole event.
    """

    tail_again: ClassVar[bool]

    def prepare(
        self, rng: np.random.Generator, num_records: int, identities: Identities | None
    ) -> list[np.ndarray]:
        """The part of the draws that all steps have in common.

        Args:
            rng: Philox, at the beginning of the run's stream.
            num_records: n.
            identities: the identity of each record, [n]; None where nothing was given.
        """
        raise NotImplementedError(f"{type(self).__name__} must have a method prepare")

    def of_step(
        self, prepared: list[np.ndarray], step: int, rng: np.random.Generator
    ) -> np.ndarray:
        """The positions of one step, int64 [k]; otherwise as ``choose``.

        Args:
            prepared: from ``prepare``.
            step: of the run.
            rng: of the step.
        """
        raise NotImplementedError(f"{type(self).__name__} must have a method of_step")


@dataclasses.dataclass(frozen=True)
class Poisson(StepSampling, name="poisson"):
    """Poisson sampling: each record takes part independently with probability ``sampling_prob``.

    Amplifies under add-or-remove-one. The number of records is private: the guarantee does not
    assume it, and the declared ``dataset_size`` need equal it only to a factor of 2.
    """

    sampling_prob: float
    title: ClassVar[str] = "Poisson sampling"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        arguments.probability("sampling_prob", self.sampling_prob)

    @classmethod
    def of(cls, batch_size: int, dataset_size: int, **options: Any) -> "Poisson":
        """With the share of the records as the probability."""
        return cls(batch_size / dataset_size)

    def rate(self, batch_size: int, dataset_size: int) -> float:
        """The sampling probability."""
        return self.sampling_prob

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [k]: the positions drawn, k binomial; may be empty."""
        return subset(rng, num_records, binomial(rng, num_records, self.sampling_prob))

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of a Poisson-sampled Gaussian."""
        return acc.PoissonSampled(released, sampling_prob=self.sampling_prob)

    def positions_held(self, dataset_size: int) -> float:
        """Those of one draw."""
        return self.sampling_prob * dataset_size


@dataclasses.dataclass(frozen=True)
class WeightedPoisson(StepSampling):
    """Poisson sampling with a probability of each record's own: a rare class is drawn more often.

    Each record takes part independently with ``probability(record)``: a public function, fixed
    before the run, of the record alone, never of other records, of a count of them or of a release.
    Records are drawn at ``largest``, and kept with their share of it, rounded down to a multiple of
    2^-63. It costs what Poisson sampling at ``largest`` does, whatever the class
    (docs/proofs/sampling_bounds.md, Theorem 5). ``batch_size`` is the declared divisor: the sum of
    all probabilities, by public shares of the classes.

    Attributes:
        probability: from one privacy unit as the source gives it (a record, NumPy; or a ``User``)
            to a number, on the host. NaN or one below 0 counts as 0, one above ``largest`` as that.
            An error that it raises is passed on before the first draw, with nothing charged.
        largest: in (0, 1], public.
        label: a name for the function, which goes into keys and reports; "" takes its own.
    """

    probability: Callable[[PyTree], float] = dataclasses.field(repr=False)
    largest: float
    label: str = ""
    title: ClassVar[str] = "weighted Poisson sampling"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        arguments.fields(self, largest=arguments.probability)  # a float, as it is charged
        label = self.label or getattr(self.probability, "__name__", "<lambda>")
        if not callable(self.probability) or label == "<lambda>":
            raise ValueError(
                "probability must be a function of one record, with a label where it has no name of"
                f" its own, got {arguments.described(self.probability)}"
            )
        object.__setattr__(self, "label", label)

    def read(self, source: "Source", batch_size: int | None) -> np.ndarray:
        """uint64 [n]: the share of ``largest`` that each record is kept with, in units of 2^-63.

        Args:
            source: of the records, all of which are read, each by itself; the first few twice.
            batch_size: the declared divisor; None where there is none.

        Raises:
            ValueError: it is far from the expected number of records of a draw, or the function
                gives a record another probability after it has seen others.
        """
        below, above = float(self.largest).as_integer_ratio()
        shares = np.empty(len(source), np.uint64)

        def found(places: np.ndarray) -> np.ndarray:
            leaves, structure = jax.tree.flatten(source.gather(places, np.ones(len(places), bool)))
            each = np.empty(len(places), np.uint64)
            for i in range(len(places)):
                record = jax.tree.unflatten(structure, [leaf[i] for leaf in leaves])
                own = float(self.probability(record))
                own = min(own, self.largest) if own > 0 else 0.0  # NaN is not above 0
                yes, whole = own.as_integer_ratio()
                each[i] = (yes * above << 63) // (whole * below)
            return each

        for start in range(0, len(shares), _AT_ONCE):
            places = np.arange(start, min(len(shares), start + _AT_ONCE))
            shares[places] = found(places)
        # A few once more, after all others: no proof, but what counts or draws says otherwise here.
        again = np.arange(min(len(shares), _AGAIN))[::-1]
        if len(again) and not np.array_equal(found(again), shares[again]):
            raise ValueError(
                f"probability must follow from the record alone, but {self.label} gave another one "
                "for the same record after it had seen others: they would move its rate. Nothing "
                "was drawn"
            )
        expected = math.fsum(shares.tolist()) / 2**63 * self.largest
        if batch_size is not None and not batch_size <= 2 * expected <= 3 * batch_size:
            raise ValueError(
                "batch_size must be the expected number of records of a draw, from two thirds to "
                "twice the sum of all probabilities, by public shares of the classes, got "
                f"{batch_size}. Nothing was drawn. That it was refused tells something of the "
                "records: it is for their owner, and not to be published"
            )
        return shares

    def choose(
        self, rng: np.random.Generator, num_records: int, shares: np.ndarray | None = None
    ) -> np.ndarray:
        """int64 [k]: the positions drawn, with the ``shares`` that ``read`` has found."""
        assert shares is not None
        drawn = Poisson(self.largest).choose(rng, num_records)
        words = rng.bit_generator.random_raw(len(drawn))
        return drawn[words >> np.uint64(1) < shares[drawn]]

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of a Gaussian on such a sample, by the largest probability."""
        return acc.WeightedPoissonSampled(released, sampling_prob=self.largest)

    def positions_held(self, dataset_size: int) -> float:
        """Those of one draw at ``largest``, and eight bytes for each record."""
        return (self.largest + 8 / _BYTES) * dataset_size


@dataclasses.dataclass(frozen=True)
class FixedSize(StepSampling, name="fixed_size"):
    """Fixed-size sampling: ``batch_size`` records, uniformly without replacement (replace-one)."""

    batch_size: int
    title: ClassVar[str] = "fixed-size sampling"

    def __post_init__(self) -> None:
        arguments.integer("batch_size", self.batch_size, least=1)

    def fixed_size(self, dataset_size: int) -> int:
        """The batch size."""
        return self.batch_size

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

    def positions_held(self, dataset_size: int) -> float:
        """Those of one draw."""
        return self.batch_size


@dataclasses.dataclass(frozen=True)
class FullBatch(StepSampling, name="full_batch"):
    """Full-batch steps: every record takes part in every step, without amplification."""

    title: ClassVar[str] = "full batches"
    exact: ClassVar[bool] = False

    @classmethod
    def of(cls, batch_size: int, dataset_size: int, **options: Any) -> "FullBatch":
        """The rule, which has no numbers."""
        return cls()

    def fixed_size(self, dataset_size: int) -> int:
        """All records."""
        return dataset_size

    def largest_size(self, dataset_size: int) -> int:
        """A little more than the declared number, since a record may enter."""
        return dataset_size // 8 * 8 + 8

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [num_records]: all positions."""
        return permutation(rng, num_records)

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event itself: a Gaussian without sampling."""
        return released


@dataclasses.dataclass(frozen=True)
class RandomAllocation(EpochSampling, name="allocation"):
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
    exact: ClassVar[bool] = False
    relations: ClassVar[tuple[acc.Relation, ...]] = (_ADD, _NULL)
    options: ClassVar[tuple[str, ...]] = ("participations",)

    def __post_init__(self) -> None:
        arguments.integer("steps_per_epoch", self.steps_per_epoch, least=1)
        arguments.integer("participations", self.participations, least=1)
        if self.participations > self.steps_per_epoch:
            raise ValueError(
                f"participations must be at most steps_per_epoch ({self.steps_per_epoch}), got "
                f"{self.participations}"
            )

    @classmethod
    def of(
        cls, batch_size: int, dataset_size: int, participations: int = 1, **options: Any
    ) -> "RandomAllocation":
        """With as many steps an epoch as keep the expected batch size at most at this one."""
        return cls(-(-dataset_size * participations // batch_size), participations)

    def rate(self, batch_size: int, dataset_size: int) -> float:
        """The share of an epoch's steps."""
        return self.participations / self.steps_per_epoch

    def expected_size(self, batch_size: int, dataset_size: int) -> int:
        """The expected batch size that whole steps of an epoch make."""
        return -(-dataset_size * self.participations // self.steps_per_epoch)

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
        # Sorted by step, and in random order within each.
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

    def positions_held(self, dataset_size: int) -> float:
        """Those of one draw."""
        return self.participations * dataset_size


@dataclasses.dataclass(frozen=True)
class Shuffled(EpochSampling, name="shuffle"):
    """Shuffling: an epoch is one pass over the records in random order, in batches of one size.

    It is offered to be compared with: no amplification is proven, and the epsilon charged is that
    of steps without sampling. Random allocation uses every record as often, at a fraction of it.
    Batches have ``batch_size`` records but for the last one, which has what is left, the same noise
    and the same public divisor. ``dataset_size`` must be exact: it is public here.
    """

    batch_size: int
    title: ClassVar[str] = "shuffled sampling"
    relations: ClassVar[tuple[acc.Relation, ...]] = (_REPLACE, _NULL)

    def __post_init__(self) -> None:
        arguments.integer("batch_size", self.batch_size, least=1)

    def fixed_size(self, dataset_size: int) -> int:
        """The batch size."""
        return self.batch_size

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
class ExampleLevel(Poisson):
    """Poisson sampling of records, where the privacy unit is a user with several of them.

    Each record takes part independently with ``sampling_prob``, and is clipped by itself: example-
    level sampling (Charles et al. 2024, arXiv:2407.07737). The source is
    ``jaxdp.sampling.user_examples``, with the same ``records_per_user``, and ``dataset_size`` the
    number of records that it keeps; neither that nor the number of users need be public.

    Attributes:
        sampling_prob: of each record.
        records_per_user: the most records of one user in the whole source, public.
    """

    records_per_user: int
    title: ClassVar[str] = "example-level sampling"
    relations: ClassVar[tuple[acc.Relation, ...]] = (_ADD, _NULL)

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.integer("records_per_user", self.records_per_user, least=1)

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of a Gaussian on such draws, for a user."""
        return acc.ExamplesPerUser(released, self.sampling_prob, self.records_per_user)


@dataclasses.dataclass(frozen=True)
class TruncatedPoisson(StepSampling, name="truncated_poisson"):
    """Poisson sampling of which at most ``cap`` records are kept, so that every draw has one shape.

    Each record takes part independently with probability ``sampling_prob``; of more than ``cap`` a
    uniformly random subset of ``cap`` is kept. Draws are padded to ``cap``, whatever their size:
    one compiled physical batch serves every step. Only replacing a record by a null record is
    covered, and ``dataset_size`` must be exact.
    """

    sampling_prob: float
    cap: int
    title: ClassVar[str] = "truncated Poisson sampling"
    relations: ClassVar[tuple[acc.Relation, ...]] = (_NULL,)
    options: ClassVar[tuple[str, ...]] = ("cap",)

    def __post_init__(self) -> None:
        arguments.probability("sampling_prob", self.sampling_prob)
        arguments.integer("cap", self.cap, least=1)

    @classmethod
    def of(
        cls, batch_size: int, dataset_size: int, cap: int | None = None, **options: Any
    ) -> "TruncatedPoisson":
        """With a cap that a draw exceeds about once in a billion steps, unless one is given.

        Six standard deviations above the mean, rounded up to a multiple of 64.
        """
        most = batch_size + math.ceil(6 * math.sqrt(batch_size))
        cap = min(dataset_size, -(-most // 64) * 64) if cap is None else cap
        return cls(batch_size / dataset_size, cap)

    def rate(self, batch_size: int, dataset_size: int) -> float:
        """The sampling probability, of a record before the cap."""
        return self.sampling_prob

    def largest_size(self, dataset_size: int) -> int:
        """The cap."""
        return self.cap

    def choose(self, rng: np.random.Generator, num_records: int) -> np.ndarray:
        """int64 [k]: the positions drawn, k <= cap.

        A Poisson sample stands in random order, so its first ``cap`` are a uniformly random part.
        """
        return Poisson(self.sampling_prob).choose(rng, num_records)[: self.cap]

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of a Gaussian on a truncated Poisson sample."""
        return acc.TruncatedPoisson(released, self.sampling_prob, self.cap, dataset_size)

    def positions_held(self, dataset_size: int) -> float:
        """Those of one draw."""
        return self.sampling_prob * dataset_size


@dataclasses.dataclass(frozen=True)
class CyclicPoisson(RunSampling, name="cyclic_poisson"):
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
    exact: ClassVar[bool] = False
    relations: ClassVar[tuple[acc.Relation, ...]] = (_ADD, _NULL)

    def __post_init__(self) -> None:
        arguments.probability("sampling_prob", self.sampling_prob)
        arguments.integer("bands", self.bands, least=1)
        arguments.integer("steps", self.steps, least=1)

    def rate(self, batch_size: int, dataset_size: int) -> float:
        """The probability of a record of the group, over all groups."""
        return self.sampling_prob / self.bands

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
        return _groups(rng, self.bands, num_records, identities, self.title)

    def of_step(
        self, prepared: list[np.ndarray], step: int, rng: np.random.Generator
    ) -> np.ndarray:
        """int64 [k]: the positions of one step, in random order; k is binomial, may be 0.

        Args:
            prepared: from ``prepare``.
            step: of the run.
            rng: of the step.
        """
        group = prepared[step % self.bands]
        return group[Poisson(self.sampling_prob).choose(rng, len(group))]

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of the whole run."""
        return acc.CyclicPoisson(released, self.sampling_prob, self.bands, self.steps)


@dataclasses.dataclass(frozen=True)
class CyclicAllocation(RunSampling, name="cyclic_allocation"):
    """Random allocation within groups that are used in turn: for correlated noise.

    Records are in ``bands`` groups as under ``CyclicPoisson``, and step i is one of group i mod
    ``bands``. In every epoch of ``bands`` times ``slots`` steps a record is in exactly one of its
    group's ``slots`` steps, drawn uniformly for it alone. Amplifies correlated noise of at most
    ``bands`` bands (docs/proofs/correlated_noise.md, Theorem 5), more than ``CyclicPoisson`` does
    at the same batch; one band is ``RandomAllocation``.

    Attributes:
        slots: m >= 1.
        bands: b >= 1.
        steps: n >= 1, of the whole run; a last epoch that is cut short costs as much as a whole.
    """

    slots: int
    bands: int
    steps: int
    tail_again: ClassVar[bool] = False  # as under ``CyclicPoisson``
    title: ClassVar[str] = "cyclic allocation"
    exact: ClassVar[bool] = False
    relations: ClassVar[tuple[acc.Relation, ...]] = (_ADD, _NULL)

    def __post_init__(self) -> None:
        for name in ("slots", "bands", "steps"):
            arguments.integer(name, getattr(self, name), least=1)

    def rate(self, batch_size: int, dataset_size: int) -> float:
        """The share of an epoch's steps."""
        return 1 / (self.bands * self.slots)

    def expected_size(self, batch_size: int, dataset_size: int) -> int:
        """The expected batch size that whole steps of an epoch make."""
        return -(-dataset_size // (self.bands * self.slots))

    def block(self, dataset_size: int) -> int:
        """The steps of the run."""
        return self.steps

    def prepare(
        self, rng: np.random.Generator, num_records: int, identities: Identities | None
    ) -> list[np.ndarray]:
        """The positions of the records of every group, as ``CyclicPoisson.prepare``, and a key."""
        groups = _groups(rng, self.bands, num_records, identities, self.title)
        return [*groups, np.frombuffer(rng.bytes(16), np.uint64)]

    def of_step(
        self, prepared: list[np.ndarray], step: int, rng: np.random.Generator
    ) -> np.ndarray:
        """int64 [k]: the positions of one step, in random order; as ``CyclicPoisson.of_step``."""
        group = prepared[step % self.bands]
        epoch, slot = divmod(step // self.bands, self.slots)
        # Words of its own for every epoch of a group: any step of it draws all of its slots again.
        words = np.random.Generator(np.random.Philox(key=prepared[-1]))
        part = epoch * self.bands + step % self.bands
        members = group[_uniform(words, part, len(group), self.slots) == slot]
        return members[permutation(rng, len(members))]

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of the whole run."""
        return acc.CyclicAllocation(released, self.slots, self.bands, self.steps)


@dataclasses.dataclass(frozen=True)
class FixedOrder(RunSampling, name="fixed_order"):
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
    relations: ClassVar[tuple[acc.Relation, ...]] = (_REPLACE, _NULL)

    def __post_init__(self) -> None:
        arguments.integer("batch_size", self.batch_size, least=1)
        arguments.integer("steps", self.steps, least=1)

    def fixed_size(self, dataset_size: int) -> int:
        """The batch size."""
        return self.batch_size

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
        self, prepared: list[np.ndarray], step: int, rng: np.random.Generator
    ) -> np.ndarray:
        """int64 [k]: the positions of one step; as ``CyclicPoisson.of_step``."""
        batch = prepared[step % len(prepared)]
        return batch[permutation(rng, len(batch))]

    def event(self, released: acc.Gaussian, dataset_size: int) -> acc.Event:
        """The event of the whole run."""
        return acc.CorrelatedNoise(released, self.steps)


def by_name(
    name: str, batch_size: int, dataset_size: int, participations: int = 1, cap: int | None = None
) -> Sampling:
    """The sampling rule of a name in ``names()``.

    Args:
        name: of the rule, as ``names`` lists them.
        batch_size: the expected number of records of a step; of an allocation, of whose steps a
            whole number makes an epoch, the most that it may be, see ``Sampling.expected_size``.
        dataset_size: the declared number of records.
        participations: of an allocation.
        cap: of truncated Poisson sampling; None takes one that a draw exceeds about
            once in a billion steps.

    Raises:
        ValueError: an unknown name, or a number that the rule does not have or allow.
    """
    hint = ": correlated noise, jaxdp.dp_mf" if name in RULES else ""
    arguments.one_of("sampling", name, names(), hint)
    batch_size = arguments.integer("batch_size", batch_size, least=1)
    dataset_size = arguments.integer("dataset_size", dataset_size, least=1)
    if batch_size > dataset_size:
        raise ValueError(
            f"batch_size must be at most dataset_size ({dataset_size}), got {batch_size}"
        )
    kind, options = RULES[name], {"participations": participations, "cap": cap}
    if participations != 1 and "participations" not in kind.options:
        raise ValueError(f"participations must be 1 but for allocation, got {participations}")
    if cap is not None and "cap" not in kind.options:
        raise ValueError(f"cap must be None but for truncated_poisson, got {cap}")
    known = {option: options[option] for option in kind.options}
    return kind.of(batch_size, dataset_size, **known)


def names() -> tuple[str, ...]:
    """The names for ``by_name``: of all rules but those of whole runs, which ``dp_mf`` makes."""
    return tuple(name for name, kind in RULES.items() if not issubclass(kind, RunSampling))


def relations(name: str) -> tuple[acc.Relation, ...]:
    """The neighbouring relations that are covered for a name; all of them for an unknown one."""
    return RULES[name].relations if name in RULES else tuple(acc.Relation)


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


# Their draws have the law of their event: docs/proofs/draws.md.
PROVEN = (
    Poisson,
    WeightedPoisson,
    FixedSize,
    FullBatch,
    RandomAllocation,
    Shuffled,
    TruncatedPoisson,
    CyclicPoisson,
    CyclicAllocation,
    FixedOrder,
    ExampleLevel,
)


def _groups(
    rng: np.random.Generator,
    bands: int,
    num_records: int,
    identities: Identities | None,
    title: str,
) -> list[np.ndarray]:
    """The positions of the records of each of ``bands`` groups, by a hash of their identities."""
    if bands == 1:
        return [np.arange(num_records)]
    if identities is None:
        raise ValueError(
            f"identities must be given for {title}: a record's group is a hash of what identifies "
            "it, never of its position, which other records would shift. Give one value a record, "
            "mechanism.sampler(n, identities=ids); jaxdp.Trainer takes the records themselves"
        )
    if len(identities) != num_records:
        raise ValueError("identities must be as many as the records, got another number")
    # A keyed hash: nobody without the key can choose an identity for a group.
    key, groups = rng.bytes(32), np.empty(num_records, np.int64)
    for place, identity in enumerate(identities):
        digest = hashlib.blake2b(identity_bytes(identity), digest_size=8, key=key).digest()
        groups[place] = int.from_bytes(digest, "big") % bands
    return [np.flatnonzero(groups == g) for g in range(bands)]


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
