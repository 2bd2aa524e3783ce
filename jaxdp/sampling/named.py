"""Sampling rules by name, as ``dp_sgd`` and the command line know them."""

import math
import warnings
from collections.abc import Callable

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.sampling.epochs import RandomAllocation, Shuffled
from jaxdp.sampling.rules import FixedSize, FullBatch, Poisson, Sampling, TruncatedPoisson
from jaxdp.sampling.whole import CyclicPoisson, FixedOrder

_TYPES: dict[str, type] = {
    "poisson": Poisson,
    "fixed_size": FixedSize,
    "full_batch": FullBatch,
    "allocation": RandomAllocation,
    "shuffle": Shuffled,
    "truncated_poisson": TruncatedPoisson,
}
NAMES = tuple(_TYPES)
# Of whole runs with correlated noise, whose rules a strategy makes.
_OF_RUNS: dict[str, type] = {"cyclic_poisson": CyclicPoisson, "fixed_order": FixedOrder}
_COVERED = {
    "allocation": (acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_SPECIAL),
    "shuffle": (acc.Relation.REPLACE_ONE, acc.Relation.REPLACE_SPECIAL),
    "truncated_poisson": (acc.Relation.REPLACE_SPECIAL,),
    "cyclic_poisson": (acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_SPECIAL),
    "fixed_order": (acc.Relation.REPLACE_ONE, acc.Relation.REPLACE_SPECIAL),
}


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
    hint = ": correlated noise, jaxdp.dp_mf" if name in _OF_RUNS else ""
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
    made: dict[str, Callable[[], Sampling]] = {
        "poisson": lambda: Poisson(batch_size / dataset_size),
        "fixed_size": lambda: FixedSize(batch_size),
        "full_batch": FullBatch,
        "allocation": lambda: RandomAllocation(
            -(-dataset_size * participations // batch_size), participations
        ),
        "shuffle": lambda: Shuffled(batch_size),
        "truncated_poisson": lambda: TruncatedPoisson(
            batch_size / dataset_size, default_cap(batch_size, dataset_size) if cap is None else cap
        ),
    }
    return made[name]()


def default_cap(batch_size: int, dataset_size: int) -> int:
    """A cap that a Poisson draw of this expected size exceeds about once in a billion steps.

    Six standard deviations above the mean, rounded up to a multiple of 64.
    """
    return min(dataset_size, -(-(batch_size + math.ceil(6 * math.sqrt(batch_size))) // 64) * 64)


def name_of(sampling: Sampling) -> str:
    """The name of a rule; that of its class for one of the caller's own."""
    known = {**_TYPES, **_OF_RUNS}
    names = (name for name, kind in known.items() if type(sampling) is kind)
    return next(names, type(sampling).__name__)


def relations(name: str) -> tuple[acc.Relation, ...]:
    """The neighbouring relations that are covered for a name; all of them but for a few rules."""
    return _COVERED.get(name, tuple(acc.Relation))


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
