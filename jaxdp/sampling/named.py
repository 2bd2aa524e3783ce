"""Sampling rules by name, as ``dp_sgd`` and the command line know them."""

import dataclasses
import math
import warnings
from collections.abc import Callable

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.sampling.rules import (
    CyclicPoisson,
    FixedOrder,
    FixedSize,
    FullBatch,
    Poisson,
    RandomAllocation,
    Sampling,
    Shuffled,
    TruncatedPoisson,
)


@dataclasses.dataclass(frozen=True)
class RuleEntry:
    """A registry entry: a sampling rule, how it is built, and what it covers.

    Attributes:
        kind: the rule's class.
        build: from (batch size, dataset size, participations, cap) to the rule; None for those of
            whole runs with correlated noise, which a strategy makes.
        relations: the neighbouring relations that are covered.
    """

    kind: type
    build: Callable[[int, int, int, int | None], Sampling] | None = None
    relations: tuple[acc.Relation, ...] = tuple(acc.Relation)


_ADD, _REPLACE, _NULL = (
    acc.Relation.ADD_OR_REMOVE_ONE,
    acc.Relation.REPLACE_ONE,
    acc.Relation.REPLACE_SPECIAL,
)
RULES: dict[str, RuleEntry] = {
    "poisson": RuleEntry(Poisson, lambda batch, size, k, cap: Poisson(batch / size)),
    "fixed_size": RuleEntry(FixedSize, lambda batch, size, k, cap: FixedSize(batch)),
    "full_batch": RuleEntry(FullBatch, lambda batch, size, k, cap: FullBatch()),
    "allocation": RuleEntry(
        RandomAllocation,
        lambda batch, size, k, cap: RandomAllocation(-(-size * k // batch), k),
        (_ADD, _NULL),
    ),
    "shuffle": RuleEntry(Shuffled, lambda batch, size, k, cap: Shuffled(batch), (_REPLACE, _NULL)),
    "truncated_poisson": RuleEntry(
        TruncatedPoisson,
        lambda batch, size, k, cap: TruncatedPoisson(
            batch / size, default_cap(batch, size) if cap is None else cap
        ),
        (_NULL,),
    ),
    "cyclic_poisson": RuleEntry(CyclicPoisson, relations=(_ADD, _NULL)),
    "fixed_order": RuleEntry(FixedOrder, relations=(_REPLACE, _NULL)),
}
NAMES = tuple(name for name, entry in RULES.items() if entry.build is not None)


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
        cap: of truncated Poisson sampling; None takes ``default_cap``.

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
    build = RULES[name].build
    assert build is not None
    return build(batch_size, dataset_size, participations, cap)


def default_cap(batch_size: int, dataset_size: int) -> int:
    """A cap that a Poisson draw of this expected size exceeds about once in a billion steps.

    Six standard deviations above the mean, rounded up to a multiple of 64.
    """
    return min(dataset_size, -(-(batch_size + math.ceil(6 * math.sqrt(batch_size))) // 64) * 64)


def name_of(sampling: Sampling) -> str:
    """The name of a rule; that of its class for one of the caller's own."""
    names = (name for name, entry in RULES.items() if type(sampling) is entry.kind)
    return next(names, type(sampling).__name__)


def relations(name: str) -> tuple[acc.Relation, ...]:
    """The neighbouring relations that are covered for a name; all of them but for a few rules."""
    return RULES[name].relations if name in RULES else tuple(acc.Relation)


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
