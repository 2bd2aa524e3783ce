"""``jaxdp.check_loop``: a training loop of one's own, run on neighbouring data."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxdp import _validate
from jaxdp.checks import law, where
from jaxdp.checks import neighbours as near
from jaxdp.checks.findings import Checked, Finding, in_order
from jaxdp.mechanism import Mechanism

Loop = Callable[[Any, int], Iterable[Any]]
_SEEDS = 8  # runs of which the noise is measured
_LEAST, _MOST = 4, 64  # records
_OF = ("gradients", "parameters")


@dataclasses.dataclass(frozen=True)
class Runs:
    """The releases of a loop, run after run.

    Attributes:
        base: list of [T, d], for each seed on the data.
        changed: for each seed a list over records of [T, d], with that record replaced.
        copies: list of [T, d], for each of other seeds, on copies of one record.
    """

    base: list[np.ndarray]
    changed: list[list[np.ndarray]]
    copies: list[np.ndarray]


def check_loop(
    loop: Loop,
    data: Any,
    mechanism: Mechanism,
    *,
    steps: int | None = None,
    restart: Loop | None = None,
    of: str = "gradients",
    seeds: int = 3,
) -> Checked:
    """Runs a whole training loop on neighbouring data, and tells what it charges too little for.

    The loop may be written with any library. It is run about ``seeds`` · n + 10 times, so give it
    few records and few steps, and compile what it calls outside of it. Noise cancels in the
    difference of two runs of one seed, which leaves the influence of the one record in which they
    differ, exactly; the noise itself is measured over seeds. A breach smaller than a factor of two
    in the noise multiplier is not seen (``jaxdp audit`` is for that). The idea of replaying a
    mechanism on neighbours with one randomness is that of Cebere et al. 2026 (arXiv:2602.17454v1);
    dividing by the realised batch size is the breach of arXiv:2605.15648v1.

    Args:
        loop: from (data, seed) to the releases, one pytree of arrays for **every** update; a
            generator will do. All its randomness must follow from ``seed``.
        data: 4 to 64 records: a pytree of arrays [n, ...], or a list of records.
        mechanism: what the loop charges for: noise, sampling, batch size, n as dataset size.
        steps: the number of updates that its epsilon counts; None takes ``mechanism.steps``.
        restart: the same loop, interrupted and taken up again in its middle: all releases of both
            of its lives.
        of: "gradients": the releases are noisy gradients, as they go into the optimizer, in
            whatever scale; "parameters": the parameters after each update of plain SGD. The noise
            must have one standard deviation in all coordinates.
        seeds: runs of each neighbour: more make a verdict on the sampling surer.

    Raises:
        ValueError: an argument is out of its range, ``data`` is no data set of the mechanism's
            size, the loop releases nothing, or none of the records moves a release.
    """
    began = time.perf_counter()
    _validate.one_of("of", of, _OF)
    _validate.integer("seeds", seeds, least=1)
    _require(loop, restart, mechanism)
    if not _LEAST <= near.count(data) <= _MOST:
        raise ValueError(
            f"data must hold {_LEAST} to {_MOST} records, for the loop is run for each, got "
            f"{near.count(data)}: give some of them, and a mechanism for so many"
        )
    if mechanism.dataset_size != near.count(data):
        raise ValueError(
            f"mechanism must be one for a data set of {near.count(data)} records, as data has, got "
            f"dataset_size {mechanism.dataset_size}: keep noise, clip norm and steps, and take a "
            "small batch"
        )
    first = _run(loop, data, 0, of)
    found = _counted(loop, first, mechanism, steps)
    tested = ["the number of releases, beside the steps that are charged"]
    if not _alike(first, _run(loop, data, 0, of)):
        found.append(_not_repeatable(loop))
        return Checked(in_order(found), tuple(tested), (), time.perf_counter() - began)
    runs = _all_runs(loop, data, of, seeds)
    if words := _unlike_shapes(runs):
        found.append(_of_shape(words, loop))
    else:
        _require_influence(runs, near.count(data))
        found += law.of_noise(runs, mechanism, loop)
        found += law.of_influence(runs, mechanism, loop)
        tested += [
            "the noise over seeds, beside the influence of each record",
            "which records take part in which step, beside the sampling that is charged",
            "the same noise in two updates",
        ]
        if restart is not None:
            lives = [_run(restart, near.take(data, _zeros(data)), s, of) for s in _other(seeds)]
            real = [_run(restart, data, s, of) for s in _other(seeds)[:2]]
            found += law.of_repeats(lives, real, law.noise_of(runs.copies), mechanism, restart)
            tested.append("the same noise in two updates, across a restart")
    return Checked(in_order(found), tuple(tested), (), time.perf_counter() - began)


def _require(loop: Any, restart: Any, mechanism: Any) -> None:
    for name, function in (("loop", loop), ("restart", restart)):
        if not callable(function) and not (name == "restart" and function is None):
            raise ValueError(f"{name} must be a function of (data, seed), got {function!r}")
    if not isinstance(mechanism, Mechanism):
        raise ValueError(f"mechanism must come from jaxdp.dp_sgd, got {mechanism!r}")


def _require_influence(runs: Runs, count: int) -> None:
    """ValueError where no record moves anything: a check of such a loop could find nothing."""
    for base, changed in zip(runs.base, runs.changed, strict=True):
        if any(not np.array_equal(base, other, equal_nan=True) for other in changed):
            return
    raise ValueError(
        f"loop must train on the data that it is given, but none of its {count} records moved a "
        f"release in {len(runs.base)} runs, so nothing can be checked: it may read records from "
        "elsewhere, or draw none in so few steps"
    )


def _all_runs(loop: Loop, data: Any, of: str, seeds: int) -> Runs:
    count = near.count(data)
    base = [_run(loop, data, seed, of) for seed in range(seeds)]
    changed = [
        [_run(loop, _replaced(data, at), seed, of) for at in range(count)] for seed in range(seeds)
    ]
    same = near.take(data, _zeros(data))
    with np.errstate(all="ignore"):  # copies have no spread, which some divide by
        copies = [_run(loop, same, seed, of) for seed in _other(seeds)]
    if not all(np.all(np.isfinite(run)) for run in copies):
        copies = [_run(loop, data, seed, of) for seed in _other(seeds)]
    return Runs(base, changed, copies)


def _other(seeds: int) -> range:
    return range(seeds, seeds + _SEEDS)


def _zeros(data: Any) -> np.ndarray:
    return np.zeros(near.count(data), np.int64)


def _run(loop: Loop, data: Any, seed: int, of: str) -> np.ndarray:
    """The releases of one run, float64 [T, d]; increments where they are parameters."""
    rows = []
    releases = loop(data, seed)
    if not isinstance(releases, Iterable):
        raise ValueError(
            "loop must give a pytree of arrays for every update, such as by yield, got "
            f"{type(releases).__name__}"
        )
    for release in releases:
        leaves = [np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(release)]
        rows.append(np.concatenate(leaves))
    if not rows or len({len(row) for row in rows}) != 1:
        raise ValueError(
            "loop must give a pytree of arrays of the same shapes for every update, got "
            f"{len(rows)} of {len({len(row) for row in rows})} sizes"
        )
    found = np.stack(rows)
    # The first parameters are the same in all runs: they drop out of every difference.
    return found if of == "gradients" else np.concatenate([found[:1], np.diff(found, axis=0)])


def _replaced(data: Any, at: int) -> Any:
    """The data with another record at ``at``: the next one, its numbers made larger, reversed."""
    other = near.record(data, (at + 1) % near.count(data))
    other = jax.tree.map(_larger, other)
    if isinstance(data, list):
        return [other if i == at else each for i, each in enumerate(data)]

    def put(leaf: Any, value: Any) -> Any:
        changed = np.array(leaf)
        changed[at] = value
        return changed if isinstance(leaf, np.ndarray) else jax.numpy.asarray(changed)

    return jax.tree.map(put, data, other)


def _larger(leaf: Any) -> Any:
    value = np.asarray(leaf)
    return value * value.dtype.type(-2) if value.dtype.kind == "f" else leaf


def _alike(one: np.ndarray, two: np.ndarray) -> bool:
    return one.shape == two.shape and bool(np.allclose(one, two, rtol=1e-5, atol=1e-7))


def _unlike_shapes(runs: Runs) -> str:
    for base, changed in zip(runs.base, runs.changed, strict=True):
        for at, other in enumerate(changed):
            if other.shape != base.shape:
                return f"{len(base)} releases, and {len(other)} with another record {at}"
    return ""


def _of_shape(words: str, loop: Loop) -> Finding:
    return Finding(
        "steps",
        words,
        "when it stops, or what it skips, depends on a record, and no event is charged for that",
        where.of_function(loop, r"\bbreak\b|\breturn\b|while |continue"),
        "stop after a public number of steps, or by noisy releases",
    )


def _counted(
    loop: Loop, first: np.ndarray, mechanism: Mechanism, steps: int | None
) -> list[Finding]:
    charged = mechanism.steps if steps is None else _validate.integer("steps", steps, least=1)
    if charged is None or len(first) <= charged:
        return []
    words = ""
    if mechanism.delta is not None and mechanism.strategy is None:
        found = [mechanism.epsilon(n, mechanism.delta).upper for n in (charged, len(first))]
        words = f": epsilon is {found[1]:.2f}, not {found[0]:.2f}"
    return [
        Finding(
            "steps",
            f"{len(first)} updates were released and {charged} are charged{words}",
            "every update is a release of its own; an epoch has many",
            where.of_function(loop, r"epsilon|compute_|accountant|epochs?\b"),
            "count updates: steps = epochs * dataset_size / batch_size; a jaxdp.Ledger counts them",
        )
    ]


def _not_repeatable(loop: Loop) -> Finding:
    return Finding(
        "state",
        "two runs of one seed on the same data release different numbers",
        "what comes from a record cannot be told from what comes from chance",
        where.of_function(loop, law.SEEDED),
        "let all randomness follow from the seed, for the check "
        "(jaxdp: secret=jaxdp.Secret.from_seed(seed))",
        certain=False,
    )
