"""Runs of a user's loop on neighbouring data, and the noise of its first release."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable

import jax
import numpy as np

from jaxdp.audit.residuals import largest_std
from jaxdp.mechanism import Mechanism
from jaxdp.sampling import neighbours as near
from jaxdp.types import PyTree

Loop = Callable[[PyTree, int], Iterable[PyTree]]
LEAST = 4  # records
_WHOLE = 40  # runs of other seeds, from their beginning to their end
_BAD = 48  # runs with a record that is not finite
_SOME = 8  # runs that show whether two worlds differ
_COORDINATES = 2**15  # of which the noise is looked at one by one
GRAIN = 8.0  # units in the last place that may be rounding


@dataclasses.dataclass(frozen=True, eq=False)
class FirstNoise:
    """The noise of the first release.

    Two worlds of copies of one record, and of another, release k·u + z and k·v + z with one seed,
    where k records were drawn. Their difference k·(v - u) tells k up to a factor, without noise.
    What is left of the releases of S seeds after a regression on (1, k) is z, on S - 2 degrees of
    freedom, whatever k, u and v are.

    Attributes:
        rows: [S, m], the residuals, of the coordinates ``at``.
        difference: [S, m], the difference of the two worlds.
        at: int [m], the coordinates that are looked at: all, or some of every leaf.
        freedom: the degrees of freedom of a column of ``rows``.
        std: [d], the standard deviation of each coordinate; elsewhere than ``at``, of its leaf.
        grain: [d], below which a deviation may be rounding.
        moves: bool [d], True where a release changes with the records or with how many are drawn.
        scaled_counts: [S], multiples of k; empty where that is not known.
        additive: True if the difference of the worlds has no noise: releases are sums plus noise.
    """

    rows: np.ndarray
    difference: np.ndarray
    at: np.ndarray
    freedom: int
    std: np.ndarray
    grain: np.ndarray
    moves: np.ndarray
    scaled_counts: np.ndarray
    additive: bool

    @functools.cached_property
    def noised(self) -> np.ndarray:
        """bool [d], True where there is more than rounding."""
        return self.std > self.grain

    @functools.cached_property
    def size(self) -> float:
        """The root of the mean variance of the coordinates that have noise."""
        return float(np.sqrt(np.mean(self.std[self.noised] ** 2))) if self.noised.any() else 0.0

    @functools.cached_property
    def drawn(self) -> np.ndarray:
        """int [S], the number of copies drawn in each first step; empty where it is not known.

        Multiples of it are known: the unit is the least distance of two of them.
        """
        seen, none = np.sort(np.abs(self.scaled_counts)), np.zeros(0, np.int64)
        slip = 1e-3 * float(np.max(seen, initial=0.0))
        seen = seen[np.append(True, np.diff(seen) > slip)] if len(seen) else seen
        if np.sum(seen > slip) < 2:
            return none  # all alike, such as a full batch, or a realised divisor
        found = np.abs(self.scaled_counts) / float(np.min(np.diff(seen)))
        whole = np.round(found)
        return none if np.max(np.abs(found - whole)) > 0.05 else whole.astype(np.int64)

    def multiplier(self, change: np.ndarray, levels: np.ndarray, tests: int) -> float:
        """A bound on the noise multiplier, from the change that replacing one record makes.

        For a change d and every w, w·d / std(w·z) <= 2 / multiplier where the charge holds, by
        Cauchy and Schwarz, however the noise is distributed over coordinates. w is d over the
        variances.

        Args:
            change: [d].
            levels: [d], the deviation of the release's noise over that of the first.
            tests: how many such bounds are looked at together.
        """
        used = self.noised & np.isfinite(change)
        scaled = np.zeros(len(change))
        scaled[used] = change[used] / (self.std[used] * levels[used]) ** 2
        along = float(scaled @ np.where(used, change, 0.0))
        if along == 0.0:
            return math.inf
        weights = scaled * levels
        inside = np.zeros(len(change), bool)
        inside[self.at] = True
        energy = float(np.sum((self.rows @ weights[self.at]) ** 2))
        energy += self.freedom * float(np.sum((weights * self.std)[~inside] ** 2))
        return 2 * float(largest_std(energy, self.freedom, tests)) / along


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """The releases of a loop, run after run.

    Attributes:
        loop: the user's.
        mechanism: what it charges for.
        base: list of [T, d], for each seed on the data.
        changed: for each seed a list over records of [T, d], with that record replaced.
        leaves: the name of every leaf of a release, and its place in [0, d).
        precision: [d], the relative precision of a release's numbers.
        noise: of the first release, of other seeds.
        few: whole runs of other seeds, [S, T, d] for each of two worlds: a few copies of one
            record, or of another; as many as there are records where the loop does not run on few.
        alone: True if these are only a few.
        bad: [k, d], by how much the first release changes where one of the copies is NaN.
    """

    loop: Loop
    mechanism: Mechanism
    base: list[np.ndarray]
    changed: list[list[np.ndarray]]
    leaves: list[tuple[str, slice]]
    precision: np.ndarray
    noise: FirstNoise
    few: tuple[np.ndarray, np.ndarray]
    alone: bool
    bad: np.ndarray

    @functools.cached_property
    def differences(self) -> tuple[np.ndarray, np.ndarray]:
        """(the worlds of ``few`` subtracted, [S, T, d]; int [S], the first step to differ or T)."""
        one, two = self.few
        norms = np.linalg.norm(two - one, axis=2)
        moved = norms > 1e-6 * np.linalg.norm(one, axis=2) + 1e-9 * self.noise.size
        return two - one, np.where(moved.any(1), moved.argmax(1), moved.shape[1])

    @functools.cached_property
    def levels(self) -> np.ndarray:
        """[T, d], upper bounds on the deviation of each release's noise over that of the first.

        By leaf, from whole runs of other seeds: what else varies adds to the variance.
        """
        rows = self.few[0]
        found = np.ones(rows.shape[1:])
        for step, (_, part) in itertools.product(range(1, rows.shape[1]), self.leaves):
            used = np.flatnonzero(self.noise.noised[part]) + part.start
            if len(used):
                spread = rows[:, step, used] - rows[:, step, used].mean(0)
                energy = float(np.sum((spread / self.noise.std[used]) ** 2))
                found[step, part] = largest_std(energy, (len(rows) - 1) * len(used), found.size)
        return found

    def charged_at(self, step: int) -> float:
        """The noise multiplier of one release; with correlated noise, of its own deviation."""
        strategy = self.mechanism.strategy
        step = min(step, (self.mechanism.steps or step + 1) - 1)
        whole, *_ = map(float, self.mechanism.multipliers(step).values())  # the gradient's first
        return whole * (1 if strategy is None else float(strategy.inverse_row_norms()[step]))


def collect_releases(
    loop: Loop, data: PyTree, seed: int, of: str, most: int | None = None
) -> np.ndarray:
    """The first ``most`` releases of a run, float64 [T, d]; increments of parameters."""
    releases = loop(data, seed)
    if not isinstance(releases, Iterable):
        raise ValueError(
            "loop must give a pytree of arrays for every update, such as by yield, got "
            f"{type(releases).__name__}"
        )
    rows = []
    for release in itertools.islice(releases, most):
        leaves = [np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(release)]
        rows.append(np.concatenate(leaves))
    sizes = {len(row) for row in rows}
    if len(sizes) != 1:
        raise ValueError(
            "loop must give a pytree of arrays of the same shapes for every update, got "
            f"{len(rows)} of {len(sizes)} sizes"
        )
    found = np.stack(rows)
    # The first parameters are the same in all runs: they drop out of every difference.
    return found if of == "gradients" else np.concatenate([found[:1], np.diff(found, axis=0)])


def replace_record(data: PyTree, at: int) -> PyTree:
    """The data with another record at ``at``: the next one, its numbers made larger, reversed."""
    return near.put(data, at, near.scaled(near.record(data, (at + 1) % near.count(data)), -2))


def unused_seeds(seeds: int, most: int) -> range:
    """Seeds that the runs on neighbours do not have."""
    return range(seeds, seeds + most)


def run_all(
    loop: Loop,
    mechanism: Mechanism,
    data: PyTree,
    of: str,
    base: list[np.ndarray],
    changed: list[list[np.ndarray]],
    first: int,
) -> tuple[Runs, PyTree, list[str]]:
    """(all runs, the data of the first world of ``few``, what could not be run).

    Args:
        loop: the user's.
        mechanism: what it charges for.
        data: its records.
        of: "gradients" or "parameters".
        base: its runs on the data, one for each seed.
        changed: its runs with another record in each place, for each seed.
        first: S, runs of which the first release is computed in each of two worlds.
    """
    count, seeds, untested = near.count(data), len(base), []

    # The leaves of a release, and their precision: a float64 release may hold sums of float32.
    (release,) = itertools.islice(loop(data, 0), 1)
    leaves, precision, size = [], [], 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(release)[0]:
        value = np.asarray(leaf)
        narrow = jax.numpy.issubdtype(value.dtype, np.floating) and value.dtype.itemsize < 4
        eps = float(jax.numpy.finfo(value.dtype if narrow else np.float32).eps)
        leaves.append((jax.tree_util.keystr(path), slice(size, size + value.size)))
        precision.append(np.full(value.size, eps))
        size += value.size
    fine, at = np.concatenate(precision), np.arange(size)
    if size > _COORDINATES:  # the first of every leaf, which are neighbours, and random others
        some = np.random.default_rng(0).choice(size, _COORDINATES, replace=False)
        at = np.unique(np.concatenate([some, *(at[part][:64] for _, part in leaves)]))

    def first_releases(
        given: PyTree, most: int, at: np.ndarray | slice = slice(None)
    ) -> np.ndarray:
        """[most, m], first releases at these coordinates."""
        seen = unused_seeds(seeds, most)
        with np.errstate(all="ignore"):  # copies have no spread, which some divide by
            return np.stack([collect_releases(loop, given, seed, of, 1)[0][at] for seed in seen])

    def whole_runs(given: PyTree) -> list[np.ndarray]:
        """[T, d] for each of other seeds."""
        with np.errstate(all="ignore"):
            return [collect_releases(loop, given, seed, of) for seed in unused_seeds(seeds, _WHOLE)]

    # Two worlds: copies of a record, and of another that changes the first release. Where the loop
    # gives nothing finite on copies, the records themselves, and others one by one.
    one, copies = near.take(data, np.zeros(count, np.int64)), True
    some = first_releases(one, _SOME)
    if np.all(np.isfinite(some)):
        for other in range(LEAST):
            two = near.take(replace_record(data, other), np.full(count, other))
            if np.any(np.abs(first_releases(two, _SOME) - some) > 1e-6 * np.abs(some).max()):
                break
    else:
        one, copies = data, False
        two = near.scaled(near.take(data, np.roll(np.arange(count), -1)), -2)
    known = 1 if copies else count  # the draw of n records has n directions
    pair = first_releases(one, first, at), first_releases(two, first, at)
    noise = _measure_noise(*pair, known, leaves, fine, at)
    if not noise.additive:
        untested.append(
            "the law of the noise, and whether coordinates share it: what a record changes differs "
            "from noise to noise, so the releases are not sums plus noise"
        )

    # A few records: never fewer than were drawn at once, or a loop that wants more would not end.
    few, alone, why = None, False, "how many records are drawn cannot be told from the releases"
    if len(noise.drawn):
        places = np.arange(min(count, max(2, int(noise.drawn.min()))))
        fewer = near.take(one, places), near.take(two, places)
        try:
            few = whole_runs(fewer[0]), whole_runs(fewer[1])
            shapes = {run.shape for world in few for run in world}
            why = f"on {len(places)} copies of a record it gives {len(shapes)} shapes of releases"
            alone = shapes == {base[0].shape} and bool(np.all(np.isfinite(few)))
        except Exception as error:  # of the user's own
            why = f"on {len(places)} records the loop raises {type(error).__name__}: {error}"
    if few is None or not alone:
        untested.append(f"steps that nobody is drawn for, and influence that comes back: {why}")
        fewer, few = (one, two), (whole_runs(one), whole_runs(two))
    least = min(len(run) for world in few for run in world)
    worlds = tuple(np.stack([run[:least] for run in world]) for world in few)

    # One record that is not finite, among copies of another.
    bad = np.zeros((0, len(fine)))
    try:
        found = first_releases(near.put(one, 0, near.scaled(near.record(one, 0), math.nan)), _BAD)
        found = found - first_releases(one, _BAD)
        if np.all(np.isfinite(found)):
            bad = found
        else:
            untested.append("a record that is not finite: the releases then are not, either")
    except Exception as error:  # of the user's own: it may well refuse such a record
        untested.append(f"a record that is not finite: {type(error).__name__}: {error}")
    runs = Runs(
        loop, mechanism, base, changed, leaves, fine, noise, (worlds[0], worlds[1]), alone, bad
    )
    return runs, fewer[0], untested


def _measure_noise(
    one: np.ndarray,
    two: np.ndarray,
    known: int,
    leaves: list[tuple[str, slice]],
    precision: np.ndarray,
    at: np.ndarray,
) -> FirstNoise:
    """The noise of the first release, from two worlds [S, m]; a draw has ``known`` directions."""
    # What the two worlds differ by has as many directions as the draw; a constant and these are
    # what is no noise in a release.
    difference = two - one
    energies, left = np.linalg.eigh(difference @ difference.T)
    strong = int(np.sum(energies > 1e-6 * max(energies[-1], 1e-300)))
    left = left[:, ::-1][:, : min(known, strong)]
    turned, kept, _ = np.linalg.svd(np.column_stack([np.ones(len(one)), left]), full_matrices=False)
    turned = turned[:, kept > 1e-6 * kept[0]]
    rows = one - one[:1]
    rows = rows - turned @ (turned.T @ rows)
    freedom = len(one) - turned.shape[1]

    # Of every coordinate: what may be rounding, its deviation, and whether it moves at all. Those
    # that are not looked at get their leaf's.
    grain = GRAIN * precision[at] * np.max(np.abs(one), 0, initial=1e-300)
    std = np.sqrt(np.sum(rows**2, 0) / freedom)
    moves = np.maximum(np.max(np.abs(difference), 0), np.ptp(one, 0)) > GRAIN * grain
    whole = np.zeros((3, len(precision)))
    for _, part in leaves:
        mine = (at >= part.start) & (at < part.stop)
        whole[:, part] = [[np.sqrt(np.mean(std[mine] ** 2))], [np.max(grain[mine])], [0]]
    whole[:, at] = std, grain, moves

    # One direction alone: how far a run goes along it is a multiple of the number drawn.
    scaled_counts = np.zeros(0)
    if known == strong == 1 and len(left) > 1:
        scaled_counts = left[:, 0] * np.sign(left[:, 0].sum())
    copies = known == 1
    additive = strong <= known < len(at) + copies
    return FirstNoise(
        rows, difference, at, freedom, whole[0], whole[1], whole[2] > 0, scaled_counts, additive
    )
