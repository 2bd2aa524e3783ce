"""``jaxdp.check_loop``: a training loop of one's own, run on neighbouring data."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxdp import arguments
from jaxdp.checks import law, noise, where
from jaxdp.checks import neighbours as near
from jaxdp.checks.findings import Checked, Finding, in_order
from jaxdp.mechanism import Mechanism

Loop = Callable[[Any, int], Iterable[Any]]
_LEAST, _MOST = 4, 64  # records
_OF = ("gradients", "parameters")
_WHOLE = 40  # runs of other seeds, from their beginning to their end
_BAD = 48  # runs with a record that is not finite
_SOME = 8  # runs that show whether two worlds differ
_COORDINATES = 2**15  # of which the noise is looked at one by one


@dataclasses.dataclass(frozen=True)
class Runs:
    """The releases of a loop, run after run.

    Attributes:
        base: list of [T, d], for each seed on the data.
        changed: for each seed a list over records of [T, d], with that record replaced.
        first: the first release of S other seeds, [S, m] each, in two worlds: all records are
            copies of one, or of another.
        copies: False where a loop does not run on copies: the worlds are then the records and
            others, one by one.
        few: whole runs of other seeds, a list of [T, d] for each of two worlds: a few copies of one
            record, or of another; as many as in ``first`` where the loop does not run on a few.
        alone: True if these are only a few.
        bad: [k, d], by how much the first release changes where one of the copies is NaN.
        leaves: the name of every leaf of a release, and its place in [0, d).
        precision: [d], the relative precision of a release's numbers.
        at: int [m], the coordinates of ``first``: all, or some of every leaf.
        count: the number of records.
    """

    base: list[np.ndarray]
    changed: list[list[np.ndarray]]
    first: tuple[np.ndarray, np.ndarray]
    copies: bool
    few: tuple[list[np.ndarray], list[np.ndarray]]
    alone: bool
    bad: np.ndarray
    leaves: list[tuple[str, slice]]
    precision: np.ndarray
    at: np.ndarray
    count: int

    def differences(self, of: noise.Noise) -> tuple[np.ndarray, np.ndarray]:
        """([S, T, d] between the worlds of ``few``; int [S], the first step; T where none is)."""
        one, two = np.stack(self.few[0]), np.stack(self.few[1])
        norms = np.linalg.norm(two - one, axis=2)
        moved = norms > 1e-6 * np.linalg.norm(one, axis=2) + 1e-9 * of.size
        return two - one, np.where(moved.any(1), moved.argmax(1), moved.shape[1])


def check_loop(
    loop: Loop,
    data: Any,
    mechanism: Mechanism,
    *,
    steps: int | None = None,
    restart: Loop | None = None,
    of: str = "gradients",
    seeds: int = 3,
    first: int = 288,
) -> Checked:
    """Runs a whole training loop on neighbouring data, and tells what it charges too little for.

    The loop may be written with any library. It is run about ``seeds`` · n + 80 times, and its
    first release is computed 2 · ``first`` + 150 times (a generator is stopped there), so give it
    few records and few steps, and compile what it calls outside of it.

    Noise cancels in the difference of two runs of one seed, which leaves the influence of the
    records in which they differ, exactly. The noise of the first release is measured in every
    coordinate, on copies of one record: see ``jaxdp.checks.noise``. A charge holds for a change d
    and noise of covariance V only if w·d <= 2 (w·V w)^1/2 / multiplier for all directions w. Looked
    at are w = d / diag(V), single coordinates, pairs of them, and combinations of 96. Whatever
    comes after the noise moves d and V alike, as long as it is linear.

    Formal guarantee: a loop that draws as its mechanism says, and releases clipped sums plus
    independent Gaussian noise, or their momentum, is accused with a probability of at most 1e-6 by
    the tests of the noise, of the influence and of the number drawn: each of ten has 1e-7. Those of
    the sampling over whole runs have 1e-6 each. A suspicion has no such bound.

    A breach smaller than a factor of two in the noise multiplier may not be seen (``jaxdp audit``
    is for that). The idea of replaying a mechanism on neighbours with one randomness is that of
    Cebere et al. 2026 (arXiv:2602.17454v1); dividing by the realised batch size is the breach of
    arXiv:2605.15648v1.

    Args:
        loop: from (data, seed) to the releases, one pytree of arrays for **every** update; a
            generator will do. All its randomness must follow from ``seed``.
        data: 4 to 64 records: a pytree of arrays [n, ...], or a list of records.
        mechanism: what the loop charges for: noise, sampling, batch size, n as dataset size.
        steps: the number of updates that its epsilon counts; None takes ``mechanism.steps``.
        restart: the same loop, interrupted and taken up again in its middle: all releases of both
            of its lives.
        of: "gradients": the releases are noisy gradients, as the noise leaves them or after a
            linear filter such as momentum, in whatever scale, by leaf or coordinate;
            "parameters": the parameters after each update of plain SGD, with momentum or without.
            Of other optimizers (Adam) give the gradients that go into them: what is no sum plus
            noise is tested in part, and the answer says so (``untested``). So it is where dropout
            makes the sums random.
        seeds: runs of each neighbour: more make a verdict on the sampling surer.
        first: runs of which the first release is computed in each of two worlds: more show smaller
            faults of the noise, and rarer ones of the draw.

    Raises:
        ValueError: an argument is out of its range, ``data`` is no data set of the mechanism's
            size, the loop releases nothing, or none of the records moves a release.
    """
    began = time.perf_counter()
    arguments.one_of("of", of, _OF)
    arguments.integer("seeds", seeds, least=1)
    arguments.integer("first", first, least=_BAD)
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
    once = _run(loop, data, 0, of)
    found = _counted(loop, once, mechanism, steps)
    tested = ["the number of releases, beside the steps that are charged"]
    untested: list[str] = []
    if not _alike(once, _run(loop, data, 0, of)):
        found.append(_not_repeatable(loop))
    else:
        base = [_run(loop, data, seed, of) for seed in range(seeds)]
        changed = [
            [_run(loop, _replaced(data, at), seed, of) for at in range(near.count(data))]
            for seed in range(seeds)
        ]
        if words := _unlike_shapes(base, changed):
            found.append(_of_shape(words, loop))
        else:
            _require_influence(base, changed)
            few, runs, z, untested = _all_runs(loop, data, of, base, changed, first)
            level = noise.levels(runs, z)
            found += noise.of_noise(runs, z, loop)
            found += noise.of_empty(runs, z, loop)
            if not any(each.kind == "shared" for each in found):
                found += noise.of_repeats(runs.few[0], runs.base, z, level, mechanism, loop)
            found += law.of_influence(runs, z, level, mechanism, loop)
            tested += [
                "the noise over seeds, in every coordinate, beside the influence of each record",
                "which records take part in which step, beside the sampling that is charged",
                "the same noise in two updates, or in two coordinates",
            ]
            if restart is not None:
                lives = [_run(restart, few, seed, of) for seed in _other(seeds, _WHOLE)]
                real = [_run(restart, data, seed, of) for seed in _other(seeds, 2)]
                found += noise.of_repeats(lives, real, z, level, mechanism, restart)
                tested.append("the same noise in two updates, across a restart")
    spent = time.perf_counter() - began
    return Checked(in_order(found), tuple(tested), (), spent, tuple(untested))


def _require(loop: Any, restart: Any, mechanism: Any) -> None:
    for name, function in (("loop", loop), ("restart", restart)):
        if not callable(function) and not (name == "restart" and function is None):
            raise ValueError(f"{name} must be a function of (data, seed), got {function!r}")
    if not isinstance(mechanism, Mechanism):
        raise ValueError(f"mechanism must come from jaxdp.dp_sgd, got {mechanism!r}")


def _require_influence(base: list[np.ndarray], changed: list[list[np.ndarray]]) -> None:
    """ValueError where no record moves anything: a check of such a loop could find nothing."""
    for run, others in zip(base, changed, strict=True):
        if any(not np.array_equal(run, other, equal_nan=True) for other in others):
            return
    raise ValueError(
        f"loop must train on the data that it is given, but none of its {len(changed[0])} records "
        f"moved a release in {len(base)} runs, so nothing can be checked: it may read records from "
        "elsewhere, or draw none in so few steps"
    )


def _all_runs(
    loop: Loop,
    data: Any,
    of: str,
    base: list[np.ndarray],
    changed: list[list[np.ndarray]],
    first: int,
) -> tuple[Any, Runs, noise.Noise, list[str]]:
    """(the first world of ``few``, all runs, the first release's noise, what could not be run)."""
    count, seeds = near.count(data), len(base)
    leaves, precision = _described(loop, data)
    at = _looked_at(leaves)
    untested = []

    def starts(given: Any, most: int, at: Any = slice(None)) -> np.ndarray:
        """[most, m], the first releases at these coordinates."""
        with np.errstate(all="ignore"):  # copies have no spread, which some divide by
            return np.stack([_run(loop, given, s, of, 1)[0][at] for s in _other(seeds, most)])

    def whole(given: Any) -> list[np.ndarray]:
        """[T, d] for each seed."""
        with np.errstate(all="ignore"):
            return [_run(loop, given, seed, of) for seed in _other(seeds, _WHOLE)]

    # Two worlds: copies of a record, and of another that changes the first release.
    one, copies = near.take(data, _zeros(count)), True
    some = starts(one, _SOME)
    if not np.all(np.isfinite(some)):
        one, copies, two = data, False, _all_replaced(data)
    else:
        for other in range(_LEAST):
            two = near.take(_replaced(data, other), _zeros(count) + other)
            if np.any(np.abs(starts(two, _SOME) - some) > 1e-6 * np.abs(some).max()):
                break
    worlds = one, two
    pair = starts(one, first, at), starts(two, first, at)
    nothing = np.zeros((0, len(precision)))
    runs = Runs(base, changed, pair, copies, ([], []), False, nothing, leaves, precision, at, count)
    z = noise.measured(runs)

    # A few records: never fewer than were drawn at once, or a loop that wants more would not end.
    drawn, why = law.counts(z), "how many records are drawn cannot be told from the releases"
    if len(drawn):
        size = min(count, max(2, int(drawn.min())))
        few = near.take(one, np.arange(size)), near.take(two, np.arange(size))
        try:
            ran = whole(few[0]), whole(few[1])
            shapes = {run.shape for world in ran for run in world}
            why = f"on {size} records, copies of one, it gives {len(shapes)} shapes of releases"
            if shapes == {base[0].shape} and np.all(np.isfinite(ran)):
                worlds, runs = few, dataclasses.replace(runs, few=ran, alone=True)
        except Exception as error:  # of the user's own
            why = f"on {size} records the loop raises {type(error).__name__}: {error}"
    if not runs.alone:
        untested.append(f"steps that nobody is drawn for, and influence that comes back: {why}")
        ran = whole(worlds[0]), whole(worlds[1])
        least = min(len(run) for world in ran for run in world)
        cut = [[run[:least] for run in world] for world in ran]
        runs = dataclasses.replace(runs, few=(cut[0], cut[1]))
    if not z.additive:
        untested.append(
            "the law of the noise, and whether coordinates share it: what a record changes differs "
            "from noise to noise, so the releases are not sums plus noise"
        )

    # One record that is not finite, among copies of another.
    try:
        bad = starts(_not_finite(one), _BAD) - starts(one, _BAD)
        if not np.all(np.isfinite(bad)):
            untested.append("a record that is not finite: the releases then are not, either")
        else:
            runs = dataclasses.replace(runs, bad=bad)
    except Exception as error:  # of the user's own: it may well refuse such a record
        untested.append(f"a record that is not finite: {type(error).__name__}: {error}")
    return worlds[0], runs, z, untested


def _other(seeds: int, most: int) -> range:
    return range(seeds, seeds + most)


def _zeros(size: int) -> np.ndarray:
    return np.zeros(size, np.int64)


def _run(loop: Loop, data: Any, seed: int, of: str, most: int | None = None) -> np.ndarray:
    """The first ``most`` releases of a run, float64 [T, d]; increments of parameters."""
    rows = []
    releases = loop(data, seed)
    if not isinstance(releases, Iterable):
        raise ValueError(
            "loop must give a pytree of arrays for every update, such as by yield, got "
            f"{type(releases).__name__}"
        )
    for release in itertools.islice(releases, most):
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


def _described(loop: Loop, data: Any) -> tuple[list[tuple[str, slice]], np.ndarray]:
    """(name and place of every leaf of a release, [d] the relative precision of its numbers)."""
    (release,) = itertools.islice(loop(data, 0), 1)
    leaves, precision, start = [], [], 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(release)[0]:
        value = np.asarray(leaf)
        # A float64 release may hold sums of float32.
        narrow = jax.numpy.issubdtype(value.dtype, np.floating) and value.dtype.itemsize < 4
        eps = float(jax.numpy.finfo(value.dtype if narrow else np.float32).eps)
        leaves.append((jax.tree_util.keystr(path), slice(start, start + value.size)))
        precision.append(np.full(value.size, eps))
        start += value.size
    return leaves, np.concatenate(precision)


def _looked_at(leaves: list[tuple[str, slice]]) -> np.ndarray:
    """The coordinates of which the noise is looked at one by one: all, or a part of every leaf.

    Of a large leaf half are its first, which holds neighbours along its axes, the rest random.
    """
    rng, found = np.random.default_rng(0), []
    quota = max(64, _COORDINATES // max(1, len(leaves)))
    whole = sum(part.stop - part.start for _, part in leaves) <= _COORDINATES
    for _, part in leaves:
        every = np.arange(part.start, part.stop)
        if not whole and len(every) > quota:
            rest = rng.choice(every[quota // 2 :], quota - quota // 2, replace=False)
            every = np.concatenate([every[: quota // 2], np.sort(rest)])
        found.append(every)
    return np.concatenate(found)


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


def _all_replaced(data: Any) -> Any:
    """The data with every record replaced by another."""
    other = jax.tree.map(_larger, near.take(data, np.roll(np.arange(near.count(data)), -1)))
    return other


def _not_finite(data: Any) -> Any:
    """The data with NaN in the first record, where its numbers are not integers."""

    def broken(leaf: Any) -> Any:
        value = np.array(leaf)
        if value.dtype.kind != "f":
            return leaf
        value[(0,) if value.ndim else ()] = np.nan
        return value if isinstance(leaf, np.ndarray) else jax.numpy.asarray(value)

    if isinstance(data, list):
        return [jax.tree.map(lambda v: v * np.nan if _is_float(v) else v, data[0]), *data[1:]]
    return jax.tree.map(broken, data)


def _is_float(leaf: Any) -> bool:
    return np.asarray(leaf).dtype.kind == "f"


def _larger(leaf: Any) -> Any:
    value = np.asarray(leaf)
    return value * value.dtype.type(-2) if value.dtype.kind == "f" else leaf


def _alike(one: np.ndarray, two: np.ndarray) -> bool:
    return one.shape == two.shape and bool(np.allclose(one, two, rtol=1e-5, atol=1e-7))


def _unlike_shapes(base: list[np.ndarray], changed: list[list[np.ndarray]]) -> str:
    for run, others in zip(base, changed, strict=True):
        for at, other in enumerate(others):
            if other.shape != run.shape:
                return f"{len(run)} releases, and {len(other)} with another record {at}"
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
    charged = mechanism.steps if steps is None else arguments.integer("steps", steps, least=1)
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
        where.of_function(loop, noise.SEEDED),
        "let all randomness follow from the seed, for the check "
        "(jaxdp: secret=jaxdp.Secret.from_seed(seed))",
        certain=False,
    )
