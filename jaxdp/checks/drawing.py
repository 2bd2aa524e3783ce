"""Tests of a loader: whether its batches can be what the mechanism's sampling draws."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp.checks import where
from jaxdp.checks.findings import Finding
from jaxdp.mechanism import Mechanism
from jaxdp.sampling import FixedSize, Poisson

SURE, ODD = 1e-6, 1e-3
DRAWS = r"shuffle|permutation|choice|DataLoader|range\(0,|\.batch\(|randint|split\(|sampler"
_EPOCHS = 3


def loader(
    make: Callable[[int], Iterable[Any]], mechanism: Mechanism, columns: Sequence[np.ndarray]
) -> list[Finding]:
    """Draws a few epochs, and asks how probable they are under the mechanism's sampling.

    Args:
        make: from a seed to the batches of one epoch: integer positions [k], or records.
        mechanism: names the sampling.
        columns: the records, one array [n, ...] for every leaf.
    """
    each = 1 if mechanism.batch_size == 0 else mechanism.dataset_size / mechanism.batch_size
    steps = max(1, math.ceil(each))
    records = len(columns[0])
    sizes, seen = [], []
    for seed in range(_EPOCHS):
        drawn = [
            _positions(batch, columns) for _, batch in zip(range(steps), make(seed), strict=False)
        ]
        sizes.append([len(batch) for batch in drawn])
        seen.append(np.concatenate(drawn) if drawn else np.zeros(0, np.int64))
    at = where.of_function(make, DRAWS)
    return judged(mechanism, records, sizes, seen, at)


def judged(
    mechanism: Mechanism,
    records: int,
    sizes: Sequence[Sequence[int]],
    seen: Sequence[np.ndarray],
    at: str,
) -> list[Finding]:
    """Findings where epochs are improbable under the sampling that is charged.

    Args:
        mechanism: names the sampling.
        records: the number of records.
        sizes: for every epoch the sizes of its batches.
        seen: for every epoch the positions of all of its batches.
        at: the line.
    """
    rule, rate = mechanism.sampling, mechanism.batch_size / mechanism.dataset_size
    flat = [size for epoch in sizes for size in epoch]
    if not isinstance(rule, Poisson | FixedSize) or not flat:
        return []
    chance = 1.0
    words = []
    if isinstance(rule, Poisson):
        most = max(flat.count(size) for size in set(flat))
        if most >= len(flat) - len(sizes):  # all alike, but for the end of an epoch
            chance *= pmf(records, rate, round(rate * records)) ** most
            words.append(f"{most} of {len(flat)} batches have one size")
    if all(len(np.unique(epoch)) == len(epoch) for epoch in seen) and min(map(len, sizes)) > 1:
        steps = min(map(len, sizes))
        once = (1 - rate) ** steps + steps * rate * (1 - rate) ** (steps - 1)
        chance *= once ** (records * len(seen))
        words.append("no record comes twice in an epoch")
    if chance > ODD or not words:
        return []
    return [shuffled(" and ".join(words), chance, rule, at, chance < SURE)]


def shuffled(words: str, chance: float, rule: Any, at: str, certain: bool) -> Finding:
    """The finding for batches that are not drawn as the mechanism charges for."""
    name = type(rule).__name__
    return Finding(
        "sampling",
        f"{words}, which {name} sampling does with probability {chance:.1g}",
        f"epsilon is computed for {name} sampling; batches that exclude each other have a larger "
        "one (Chua et al. 2024, arXiv:2403.17673)",
        at,
        "draw with mechanism.sampler(...) or trainer.batches(); or charge what is drawn: "
        'sampling="allocation", "shuffle" or "fixed_size"',
        certain,
    )


def pmf(count: int, rate: float, hits: int) -> float:
    """The probability of so many hits in ``count`` draws of probability ``rate``."""
    log = math.lgamma(count + 1) - math.lgamma(hits + 1) - math.lgamma(count - hits + 1)
    if rate >= 1:
        return 1.0
    return math.exp(log + hits * math.log(rate) + (count - hits) * math.log1p(-rate))


def _positions(batch: Any, columns: Sequence[np.ndarray]) -> np.ndarray:
    """The positions in a batch: itself where it is integers [k], else by the records' bytes."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
    if len(leaves) == 1 and leaves[0].ndim == 1 and leaves[0].dtype.kind in "iu":
        return leaves[0].astype(np.int64)
    if len(leaves) != len(columns):
        raise ValueError(
            "loader must give integer positions [k], or records like the source's "
            f"({len(columns)} arrays), got {len(leaves)} arrays"
        )
    known: dict[bytes, int] = {}
    for at in range(len(columns[0])):
        known[b"".join(np.ascontiguousarray(c[at]).tobytes() for c in columns)] = at
    cast = [leaf.astype(c.dtype) for leaf, c in zip(leaves, columns, strict=True)]
    keys = (
        b"".join(np.ascontiguousarray(leaf[i]).tobytes() for leaf in cast)
        for i in range(len(cast[0]))
    )
    # Padding, and records that were changed on the way, are none of them.
    return np.asarray([known[key] for key in keys if key in known], np.int64)
