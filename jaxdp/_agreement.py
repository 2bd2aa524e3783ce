"""Checks that the parts of a mechanism agree, when it is made."""

from typing import Any

import jax

from jaxdp import _validate
from jaxdp.sampling import FixedOrder, FixedSize, FullBatch, RunSampling, Shuffled, steps_of_a_block
from jaxdp.sampling.named import rate
from jaxdp.schedules import NoiseSchedule


def check_mechanism(mechanism: Any) -> None:
    """Raises ValueError if parts of a mechanism are of a wrong kind, out of range, or at odds."""
    _check_kinds(mechanism)
    noise, count = mechanism.noise_multiplier, mechanism.count_noise_multiplier
    if not isinstance(noise, NoiseSchedule):
        if isinstance(noise, jax.Array):
            raise ValueError(
                f"noise_multiplier must be a Python number, public and fixed, got an array {noise}"
            )
        _validate.non_negative("noise_multiplier", noise)
    elif count is not None:
        raise ValueError(
            "noise_multiplier must be one number with count_noise_multiplier, got a schedule"
        )
    if mechanism.records_per_user is not None:
        _validate.integer("records_per_user", mechanism.records_per_user, least=1)
    if mechanism.steps is not None:
        _validate.integer("steps", mechanism.steps, least=1)
    if mechanism.delta is not None:
        _validate.fraction("delta", mechanism.delta)
    _check_sizes(mechanism)
    _check_strategy(mechanism)


def _check_strategy(mechanism: Any) -> None:
    """Raises ValueError where noise and sampling of a whole run do not belong to each other."""
    strategy, rule = mechanism.strategy, mechanism.sampling
    whole = isinstance(rule, RunSampling)
    if (strategy is not None) != whole:
        raise ValueError(
            "strategy must be given with CyclicPoisson or FixedOrder sampling, and with no other: "
            "correlated noise is proven for a record that takes part at known times, got "
            f"{strategy!r} with {rule}"
        )
    if strategy is None:
        return
    if strategy.steps != rule.block(mechanism.dataset_size):
        raise ValueError(
            f"steps must be those of the sampling ({rule.block(mechanism.dataset_size)}) for the "
            f"strategy, got {strategy.steps}"
        )
    for name in ("count_noise_multiplier", "records_per_user"):
        if (found := getattr(mechanism, name)) is not None:
            raise ValueError(f"{name} must be None with correlated noise, got {found}: no proof")
    if isinstance(mechanism.noise_multiplier, NoiseSchedule):
        raise ValueError("noise_multiplier must be one number with a strategy, got a schedule")


def _check_kinds(mechanism: Any) -> None:
    def has(part: Any, *names: str) -> bool:
        return not isinstance(part, type) and all(callable(getattr(part, n, None)) for n in names)

    if not has(mechanism.rule, "l2", "factors"):
        raise ValueError(
            f"rule must be a clipping rule such as jaxdp.clip(0.1), got {mechanism.rule!r}"
        )
    whole = ["arrange", "of_step", "block", "event", "check"]
    rules = (["choose", "event", "check"], ["epoch", "block", "event", "check"], whole)
    if not any(has(mechanism.sampling, *names) for names in rules):
        raise ValueError(
            f"sampling must be such as jaxdp.sampling.Poisson(0.01), got {mechanism.sampling!r}"
        )
    if not isinstance(mechanism.leak, str):
        raise ValueError(f"leak must be a string, got {mechanism.leak!r}")


def _check_sizes(mechanism: Any) -> None:
    """Raises ValueError unless sampling, divisor and data set size agree.

    A divisor that is not the expected batch size would still be public, and epsilon right. But a
    sum of more records than ``most_records`` is refused at random, and the learning rate is
    another than it says, so it is taken for the mistake that it nearly always is. Poisson rates may
    differ by the rounding of the expected batch size to a whole number.

    Raises:
        ValueError: they do not.
    """
    size = _validate.integer("dataset_size", mechanism.dataset_size, least=1)
    batch = _validate.integer("batch_size", mechanism.batch_size, least=1)
    sampling = mechanism.sampling
    if batch > size:
        raise ValueError(f"batch_size must be at most dataset_size ({size}), got {batch}")
    expected = rate(sampling, batch, size) * size
    if abs(expected - batch) >= 1:
        of = "sampling_prob" if hasattr(sampling, "sampling_prob") else "share of the steps"
        raise ValueError(
            f"batch_size must be {of} * dataset_size = {expected:g}, rounded, got {batch}"
        )
    if isinstance(sampling, FixedSize | FixedOrder | Shuffled) and sampling.batch_size != batch:
        raise ValueError(
            f"batch_size must be that of the sampling ({sampling.batch_size}), got {batch}"
        )
    if isinstance(sampling, FullBatch) and batch != size:
        raise ValueError(f"batch_size must be dataset_size ({size}) for full_batch, got {batch}")
    cap = getattr(sampling, "cap", 1)
    if cap > mechanism.most_records:
        raise ValueError(f"cap must be at most {mechanism.most_records}, got {cap}")
    _check_levels(mechanism.noise_multiplier, steps_of_a_block(sampling, size))


def _check_levels(noise: Any, block: int) -> None:
    """Raises ValueError if the noise changes within an epoch, which is one event of one noise."""
    if not isinstance(noise, NoiseSchedule):
        return
    for multiplier, steps in noise.levels[:-1]:
        if steps % block:
            raise ValueError(
                f"noise_multiplier must stay the same within an epoch of {block} steps, got a "
                f"schedule that keeps {multiplier:g} for {steps}"
            )


def check_source(mechanism: Any, source: Any) -> None:
    """Raises ValueError if the mechanism draws otherwise from them, or protects another unit."""
    found = getattr(source, "records_per_user", None)
    if found != mechanism.records_per_user:
        raise ValueError(
            "records_per_user must be that of the source, jaxdp.sources.users, or None for a "
            f"source of records: expected {found}, got {mechanism.records_per_user}"
        )
    check_unit(mechanism, source)
    mechanism.sampling.check(len(source), mechanism.dataset_size)


def check_unit(mechanism: Any, source: Any) -> None:
    """Raises ValueError for an empty source, and for one whose every index is a batch of records.

    A batched one is told by the declared size: as many times larger than the source as every leaf's
    first axis is long. Groups that are records are as many as was declared.

    Raises:
        ValueError: it is one of these. No message tells the number of records.
    """
    size, declared = len(source), mechanism.dataset_size
    if size == 0:
        raise ValueError("source must hold records to draw from, got an empty one")
    leading = {leaf.shape[0] if leaf.shape else 1 for leaf in jax.tree.leaves(source.example)}
    count = leading.pop() if len(leading) == 1 else 1
    if mechanism.records_per_user is not None or size == declared or count < 2:
        return
    if size in (declared // count, -(-declared // count)):
        raise ValueError(
            f"source must give one record for each index, got leaves that all begin with an axis "
            f"of {count}, and a dataset_size that is {count} times the number of indices, which "
            f"looks like records batched by {count}: epsilon would hold for a batch as a whole. "
            "Give the data as they were before they were batched; if such a group is one record, "
            "dataset_size must be the number of groups"
        )
