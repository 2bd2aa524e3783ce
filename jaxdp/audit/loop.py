"""``jaxdp.check_loop``: runs a training loop of the user's on neighbouring data.

Each of the tests of noise, influence and number drawn accuses a right loop with a probability of at
most ``residuals.SURE``, each of those of the sampling over whole runs with 1e-6.
"""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from jaxdp import arguments
from jaxdp.audit.bounds import binomial_pmf
from jaxdp.audit.findings import Checked, Finding, certain_first
from jaxdp.audit.residuals import SURE, binary_divergence, find_shared_noise, test_tails
from jaxdp.audit.runs import (
    GRAIN,
    LEAST,
    Loop,
    Runs,
    collect_releases,
    replace_record,
    run_all,
    unused_seeds,
)
from jaxdp.mechanism import Mechanism
from jaxdp.sampling import FixedSize, Poisson
from jaxdp.sampling import neighbours as near
from jaxdp.training.lines import line_of_function
from jaxdp.types import PyTree

_MOST = 64  # records
_OF = ("gradients", "parameters")
_LIVES = 40  # runs of a restart
_REUSED = 0.02  # of the energy that two independent noises differ by: 2
_EMPTY = 4  # releases that nobody was drawn for, of one step
_SLACK = 0.98  # of the multiplier that is charged
_FAR = 0.5  # of it, where releases may be no sums plus noise
_AGAIN, _KNOWN = 0.2, 0.05  # of an influence that comes back; the error of an autoregression
_WHOLE = 1e-6  # the chance of whole runs below which they are not drawn as charged


def check_loop(
    loop: Loop,
    data: PyTree,
    mechanism: Mechanism,
    *,
    steps: int | None = None,
    restart: Loop | None = None,
    of: str = "gradients",
    seeds: int = 3,
    first: int = 288,
) -> Checked:
    """Runs a whole training loop on neighbouring data; returns what it charges too little for.

    The loop may be written with any library. It is run about ``seeds`` · n + 80 times, and its
    first release is computed 2 · ``first`` + 150 times (a generator is stopped there), so give it
    few records and few steps, and compile what it calls outside of it.

    Noise cancels in the difference of two runs of one seed, which leaves the influence of the
    records in which they differ, exactly. The noise of the first release is measured in every
    coordinate, on copies of one record: see ``jaxdp.audit.runs``. A charge holds for a change d
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
    arguments.integer("first", first, least=48)
    for name, function in (("loop", loop), ("restart", restart)):
        if not callable(function) and not (name == "restart" and function is None):
            raise ValueError(f"{name} must be a function of (data, seed), got {function!r}")
    if not isinstance(mechanism, Mechanism):
        raise ValueError(f"mechanism must come from jaxdp.dp_sgd, got {mechanism!r}")
    count = near.count(data)
    if not LEAST <= count <= _MOST:
        raise ValueError(
            f"data must hold {LEAST} to {_MOST} records, for the loop is run for each, got "
            f"{count}: give some of them, and a mechanism for so many"
        )
    if mechanism.dataset_size != count:
        raise ValueError(
            f"mechanism must be one for a data set of {count} records, as data has, got "
            f"dataset_size {mechanism.dataset_size}: keep noise, clip norm and steps, and take a "
            "small batch"
        )
    line = line_of_function(loop)

    # The number of releases, and whether a seed decides them.
    once, again = (collect_releases(loop, data, 0, of) for _ in range(2))
    charged = mechanism.steps if steps is None else arguments.integer("steps", steps, least=1)
    found: list[Finding | None] = []
    tested = ["the number of releases, beside the steps that are charged"]
    untested: list[str] = []
    if charged is not None and len(once) > charged:
        words = f"{len(once)} updates were released and {charged} are charged"
        if mechanism.delta is not None and mechanism.strategy is None:
            counted, true = (
                mechanism.epsilon(n, mechanism.delta).upper for n in (charged, len(once))
            )
            words += f": epsilon is {true:.2f}, not {counted:.2f}"
        found.append(Finding("steps", words, line))

    def answer() -> Checked:
        """The findings so far, in order."""
        spent = time.perf_counter() - began
        return Checked(certain_first(found), tuple(tested), (), spent, tuple(untested))

    if once.shape != again.shape or not np.allclose(once, again, rtol=1e-5, atol=1e-7):
        words = "two runs of one seed on the same data release different numbers"
        found.append(Finding("state", words, line, certain=False))
        return answer()

    # Every record replaced, with every seed: as many releases, of which some must move.
    base = [collect_releases(loop, data, seed, of) for seed in range(seeds)]
    changed = [
        [collect_releases(loop, replace_record(data, at), seed, of) for at in range(count)]
        for seed in range(seeds)
    ]
    for run, others in zip(base, changed, strict=True):
        for at, other in enumerate(others):
            if other.shape != run.shape:
                words = f"{len(run)} releases, and {len(other)} with another record {at}"
                found.append(Finding("steps", words, line))
                return answer()
    if all(
        np.array_equal(run, other, equal_nan=True)
        for run, others in zip(base, changed, strict=True)
        for other in others
    ):
        raise ValueError(
            f"loop must train on the data that it is given, but none of its {count} records "
            f"moved a release in {seeds} runs, so nothing can be checked: it may read records from "
            "elsewhere, or draw none in so few steps"
        )

    # The noise of the first release: in every coordinate, its own in each, Gaussian; and some where
    # nobody was drawn, new in every update.
    runs, few, untested = run_all(loop, mechanism, data, of, base, changed, first)
    noise, law = runs.noise, _describe_other_law(runs)
    if (bare := noise.moves & ~noise.noised).any():
        words = (
            f"{_count_by_leaf(bare, runs)} of the first release have no noise: they change with "
        )
        found.append(Finding("noise", f"{words}the records, and not with the seed", line))
    alike = _find_shared_noise(runs)
    found.append(alike)
    if noise.additive and law and not alike:
        found.append(Finding("noise", law, line))
    found.append(_find_empty_draws(runs))
    if not alike:
        found.append(_find_reused_noise(runs, runs.few[0], base, loop, law))
    tested.append("the noise over seeds, in every coordinate, beside the influence of each record")
    tested.append("the same noise in two updates, or in two coordinates")
    if restart is not None:
        copies = [collect_releases(restart, few, seed, of) for seed in unused_seeds(seeds, _LIVES)]
        real = [collect_releases(restart, data, seed, of) for seed in unused_seeds(seeds, 2)]
        found.append(_find_reused_noise(runs, copies, real, restart, law))
        tested.append("the same noise in two updates, across a restart")

    # Beside it what each record moves: how much, in which steps, and how scaled.
    moved = _measure_influence(runs)
    large = _find_large_influence(runs, moved, law)
    of_one_size = bool(len(noise.scaled_counts)) and not len(noise.drawn) and not large
    divided = _find_realised_divisor(runs, moved, certain=of_one_size)
    found += [large, _find_returning_influence(runs), divided]
    found.append(_find_other_sampling(runs, moved, of_one_size and not divided))
    tested.append("which records take part in which step, beside the sampling that is charged")
    return answer()


# The noise ------------------------------------------------------------------------------------


def _describe_other_law(runs: Runs) -> str:
    """Says that the first release's noise is bounded or heavy-tailed; "" if it may be Gaussian.

    A squared residual over the sum of its column's squares, r² / ((1 - h) sum r²) with h its
    leverage (all are about 2 / S), has the law Beta(1/2, (f - 1) / 2). The number of independent
    coordinates is estimated from the correlations of a sample.
    """
    noise, freedom = runs.noise, runs.noise.freedom
    at = np.flatnonzero(noise.noised[noise.at])
    if not len(at):
        return ""
    rows = noise.rows[:, at] / np.linalg.norm(noise.rows[:, at], axis=0)
    some = np.sort(np.random.default_rng(1).permutation(len(at))[:1_024])
    related = np.square(rows[:, some].T @ rows[:, some])
    np.fill_diagonal(related, 0)
    excess = max(0.0, float(np.sum(related - 1 / freedom)))

    def beyond(edge: float) -> float:
        """The probability that a squared residual of Gaussian noise exceeds ``edge``."""
        return float(special.betainc((freedom - 1) / 2, 0.5, max(0.0, 1 - edge / freedom)))

    squares = np.square(rows) * len(rows)
    p, words = test_tails(squares, beyond, squares.size / (1 + excess / len(some)))
    return words if p < SURE else ""


def _find_shared_noise(runs: Runs) -> Finding | None:
    """Finds coordinates that have one noise, so that a combination of them has none.

    Accused is a combination with a thousandth of the noise that it should have, which a record
    moves: where noise and sum are projected alike, none does.
    """
    noise = runs.noise
    at = np.flatnonzero(noise.noised[noise.at])
    if len(at) < 2 or not noise.additive:
        return None

    # Per unit of each coordinate's noise: the run in which the records move them most.
    lengths = np.linalg.norm(noise.rows[:, at], axis=0)
    changes = noise.difference[:, at] / lengths
    moved = changes[int(np.argmax(np.sum(changes**2, 1)))]
    starts = [part.start for _, part in runs.leaves]
    leaf = np.searchsorted(starts, noise.at[at], side="right")
    found = find_shared_noise(noise.rows[:, at], noise.freedom, leaf)

    # Pairs and combinations with next to no noise left, of which the records move more than that.
    left = np.sqrt(np.maximum(0.0, 2 - 2 * np.abs(found.related)))
    one, two = found.pairs.T
    grain = noise.grain[noise.at[at]] / lengths
    floor = np.maximum(1e-3, 4 * np.maximum(grain[one], grain[two]))
    shown = np.abs(moved[one] - np.sign(found.related) * moved[two])
    equal = np.flatnonzero((left < floor) & (shown > 10 * left + 1e-6))
    combined = sum(
        abs(float(moved[block] @ weights)) > 10 * rest + 1e-6
        for block, weights, rest in found.combined
    )

    def locate(column: int) -> str:
        """The leaf and index of a coordinate, in words."""
        name, part = runs.leaves[leaf[column] - 1]
        return f"{name}[{noise.at[at[column]] - part.start}]"

    if len(equal):
        names = locate(one[equal[0]]), locate(two[equal[0]])
        words = f"{len(equal)} pairs of coordinates have one noise, such as {' and '.join(names)}"
    elif combined:
        words = f"{combined} linear combinations of coordinates have no noise"
    elif found.p_value < SURE:
        words = "the noise of coordinates is correlated"
    else:
        return None
    certain = bool(len(equal) or combined)
    return Finding("shared", words, line_of_function(runs.loop), certain)


def _find_empty_draws(runs: Runs) -> Finding | None:
    """Finds releases that nobody was drawn for and that have no noise.

    Until the two worlds of one seed differ, nobody was drawn. A coordinate is accused if it is
    equal in at least four such runs at one step, and the records move it at that step in others.
    """
    (difference, first), rows, noise = runs.differences, runs.few[0], runs.noise
    for step in range(rows.shape[1]):
        empty, later = rows[first > step, step], difference[first <= step, step]
        if len(empty) < _EMPTY or not len(later):
            continue
        slip = GRAIN * runs.precision * np.max(np.abs(rows[:, step]), 0)
        bare = (np.ptp(empty, 0) <= slip) & (np.max(np.abs(later), 0) > GRAIN * slip)
        bare &= noise.noised | ~noise.moves  # the others were found in the first release
        if bare.any():
            words = f"{_count_by_leaf(bare, runs)} of release {step} have no noise in "
            words += f"{len(empty)} runs in which nobody was drawn"
            return Finding("noise", words, line_of_function(runs.loop))
    return None


def _find_reused_noise(
    runs: Runs,
    copies: Sequence[np.ndarray] | np.ndarray,
    real: list[np.ndarray],
    loop: Loop,
    law: str,
) -> Finding | None:
    """Finds two updates of a run that have one noise in a leaf, on other sums.

    The energy of the difference of two independent noises is that of the smaller times chi2_f or
    more, in law; it is accused below 0.02.

    Args:
        runs: of the loop: its first noise, and how much there is of it in the other releases.
        copies: releases [T, d] for each seed, on copies of one record.
        real: releases on the records; two that are equal there are one release, shown twice.
        loop: the user's, or the interrupted one.
        law: words, if the first noise is not Gaussian.
    """
    noise, mechanism, level = runs.noise, runs.mechanism, runs.levels
    if mechanism.strategy is not None:
        return None  # correlated noise takes back what it added

    # All pairs of releases, but for those that are one release, shown twice.
    shown = min(map(len, (*copies, *real)))
    scales = [runs.charged_at(t) for t in range(min(shown, mechanism.steps or shown))]
    tests = max(1, len(scales) * (len(scales) - 1) * len(runs.leaves))
    every = [(one, two) for two in range(len(scales)) for one in range(two)]
    for one, two in sorted(every):
        if all(np.array_equal(run[one], run[two]) for run in real):
            continue
        difference = np.stack([run[two] - run[one] for run in copies])
        for name, part in runs.leaves:
            used = np.flatnonzero(noise.noised[part]) + part.start
            if not len(used):
                continue
            # A restart may give more releases than the loop itself.
            lower = np.min(level[[min(step, len(level) - 1) for step in (one, two)]], axis=0)
            unit = noise.std[used] * min(scales[one], scales[two]) / scales[0]
            unit *= np.minimum(1.0, lower[used])
            energy = np.linalg.svd(
                (difference - difference.mean(0))[:, used] / unit, compute_uv=False
            )
            # Copies differ by their number, in one direction: it is left out.
            rest = energy[1:] if len(used) > 1 else energy
            freedom = (len(copies) - 2) * max(1, len(used) - 1)
            ratio = float(np.sum(rest**2)) / freedom
            if ratio < _REUSED and special.chdtr(freedom, ratio * freedom / 2) * tests < SURE:
                words = f"releases {one} and {two} have one noise{f' in {name}' if name else ''}: "
                words += (
                    f"their difference has {ratio:.1g} of its variance, and 2 where independent"
                )
                certain = noise.additive or not law
                return Finding("repeat", words, line_of_function(loop), certain)
    return None


def _count_by_leaf(which: np.ndarray, runs: Runs) -> str:
    """Counts of coordinates, bool [d], leaf by leaf."""
    words, at = [], runs.noise.at
    for name, part in runs.leaves:
        mine = at[(at >= part.start) & (at < part.stop)]
        if count := int(np.sum(which[mine])):
            words.append(f"{count} of {len(mine)} numbers{f' of {name}' if name else ''}")
    return ", ".join(words[:3] + ([f"and of {len(words) - 3} more leaves"] if words[3:] else []))


# What a record moves --------------------------------------------------------------------------


class Influence(NamedTuple):
    """The change that each record made in each run, [seeds, records].

    Attributes:
        first: int, the first release that it changed; -1 for none. All before were equal, so that
            the record alone did it.
        norm: by how much.
        share: a bound on the noise multiplier of that release, over what is charged; inf for none.
    """

    first: np.ndarray
    norm: np.ndarray
    share: np.ndarray


def _measure_influence(runs: Runs) -> Influence:
    """The first release that each record changes, by how much, and the noise beside it."""
    shape = len(runs.base), len(runs.changed[0])
    found = Influence(np.full(shape, -1), np.zeros(shape), np.full(shape, math.inf))
    for seed, (base, changed) in enumerate(zip(runs.base, runs.changed, strict=True)):
        rounding = 1e-6 * np.linalg.norm(base, axis=1) + 1e-9 * runs.noise.size
        for at, other in enumerate(changed):
            norms = np.linalg.norm(other - base, axis=1)
            steps = np.flatnonzero(~(norms <= rounding))  # what is not finite has changed, too
            if len(steps):
                step = int(steps[0])
                bound = runs.noise.multiplier(
                    other[step] - base[step], runs.levels[step], _count_bounds(runs)
                )
                found.first[seed, at], found.norm[seed, at] = step, norms[step]
                found.share[seed, at] = bound / max(runs.charged_at(step), 1e-300)
    return found


def _count_bounds(runs: Runs) -> int:
    """The number of bounds on the multiplier that are computed together."""
    return len(runs.base) * len(runs.changed[0]) + len(runs.bad)


def _find_large_influence(runs: Runs, moved: Influence, law: str) -> Finding | None:
    """Finds a record, or one that is not finite, that moves a release beyond its noise."""
    noise, charged, line = runs.noise, runs.charged_at(0), line_of_function(runs.loop)
    if not noise.size or charged == 0:
        return None
    worst = np.unravel_index(np.argmin(moved.share), moved.share.shape)
    if (share := float(moved.share[worst])) < _SLACK:
        words = (
            f"the noise multiplier is at most {share * charged:.3g}, and {charged:.3g} is charged: "
            f"one record moves a release by {moved.norm[worst]:.3g}, its noise has standard "
            f"deviation {noise.size:.3g}"
        )
        # What is no sum plus noise, such as Adam's updates, has no sensitivity in this sense;
        # where dropout moves the sums from run to run, it has.
        return Finding("sensitivity", words, line, noise.additive or (share < _FAR and not law))
    bounds = [noise.multiplier(change, runs.levels[0], _count_bounds(runs)) for change in runs.bad]
    if min(bounds, default=math.inf) >= _SLACK * charged:
        return None
    words = (
        f"one record of NaN changes a release by {np.max(np.linalg.norm(runs.bad, axis=1)):.3g}, "
        f"as if the noise multiplier were {min(bounds):.3g}; {charged:.3g} is charged"
    )
    return Finding("sensitivity", words, line)


def _find_realised_divisor(runs: Runs, moved: Influence, certain: bool) -> Finding | None:
    """Finds an influence of a record that falls with the number of records drawn beside it.

    Args:
        runs: of the loop.
        moved: its influence.
        certain: True if one pair of runs is enough.
    """
    there = moved.first == 0
    drawn = there.sum(1)
    pairs = [
        (moved.norm[one, at] / moved.norm[two, at], drawn[two] / drawn[one])
        for two in range(len(drawn))
        for one in range(two)
        for at in np.flatnonzero(there[one] & there[two])
        if drawn[one] != drawn[two]
    ]
    if not pairs or not all(abs(got / wanted - 1) < 0.02 for got, wanted in pairs):
        return None
    got, wanted = pairs[0] if pairs[0][0] > 1 else (1 / pairs[0][0], 1 / pairs[0][1])
    words = (
        f"a record's influence is {got:.2f} times as large where {wanted:.2f} times fewer records "
        "were drawn with it"
    )
    return Finding("divisor", words, line_of_function(runs.loop), certain or len(pairs) > 1)


def _find_returning_influence(runs: Runs) -> Finding | None:
    """Finds influence that comes back in steps that the record was not drawn for.

    Two worlds of a few copies of one record, or of another, differ by D_a in the first step that
    one was drawn for. What is made of **noisy** sums, such as their momentum, hands on noise and
    influence alike: where the noise z_t of runs in which nobody was drawn so far is c_1 z_(t-1) +
    c_2 z_(t-2) + ... and something new, so is the influence, and D_t - sum c_l D_(t-l) is that of
    step t alone. That it goes on along D_a, by a fifth or more (and four standard errors of c),
    must not be more frequent after the first influence than the first influence itself is. Hits h
    in n trials of an unknown rate q have the mixture likelihood ratio
    B(h+1, n-h+1) / (q^h (1-q)^(n-h)); the product of that of the steps up to the first influence
    and that of those after it exceeds 1 / SURE for the true q with a probability of at most SURE
    (Ville), whatever stops the count.
    """
    noise, correlated = runs.noise, runs.mechanism.strategy is not None
    if not runs.alone or not noise.additive or not noise.size:
        return None

    # How noisy sums hand on what they are made of. Correlated noise takes back what it added, and
    # sums do not.
    (difference, first), noised = runs.differences, np.flatnonzero(noise.noised)
    steps = difference.shape[1]
    kept, errors = _autoregression(runs.few[0][:, :, noised] / noise.std[noised], first)
    if not len(kept):
        return None
    kept = 0 * kept if correlated else kept

    # The steps after the first influence in which it goes on, beyond what momentum explains.
    hits, trials = 0, 0
    for change, at in zip(difference[:, :, noised], first, strict=True):
        along = change @ change[at] / float(change[at] @ change[at]) if at + 1 < steps else change
        for step in range(at + 1, steps):
            past = along[max(0, step - len(kept)) : step][::-1]
            new = along[step] - past @ kept[: len(past)]
            hits += bool(new > _AGAIN + 4 * np.abs(past) @ errors[: len(past)])
            trials += 1

    # Against the rate at which a record is drawn at all, for every such rate.
    seen, fresh = int(np.sum(first < steps)), int(np.sum(np.minimum(first + 1, steps)))
    if not trials or hits * fresh <= seen * trials:
        return None
    rates, evidence = np.linspace(0.001, 0.999, 999), np.zeros(999)
    for got, trying in ((seen, fresh), (hits, trials)):
        mean = special.betaln(got + 1, trying - got + 1)
        evidence += mean - got * np.log(rates) - (trying - got) * np.log1p(-rates)
    if float(np.min(evidence)) < -math.log(SURE):
        return None
    words = (
        f"what a record did to a release comes back in {hits} of {trials} later ones, as by "
        f"momentum of un-noised sums; it was first drawn in {seen} of {fresh}"
    )
    # With correlated noise, momentum of noisy sums would look the same.
    return Finding("sensitivity", words, line_of_function(runs.loop), certain=not correlated)


def _autoregression(rows: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(c [lags], their standard errors): the regression of a step's noise on those before it.

    Least squares over all coordinates and steps of the runs in which nobody was drawn so far; as
    many lags, up to four, as have errors below a twentieth; none where no such run has two steps.
    """
    steps = rows.shape[1]
    for lags in range(min(4, steps - 1), 0, -1):
        past, now, freedom = [], [], -lags
        for step in range(1, steps):
            quiet = rows[first > step]
            if len(quiet) < 2:
                continue
            quiet = quiet - quiet.mean(0)
            before = [
                quiet[:, step - n] if n <= step else 0 * quiet[:, 0] for n in range(1, lags + 1)
            ]
            past.append(np.stack([each.ravel() for each in before], axis=1))
            now.append(quiet[:, step].ravel())
            freedom += (len(quiet) - 1) * rows.shape[2]
        if freedom < 1:
            break
        x, y = np.concatenate(past), np.concatenate(now)
        inverse = np.linalg.pinv(x.T @ x)
        found = inverse @ (x.T @ y)
        errors = np.sqrt(np.diag(inverse) * float(np.sum((y - x @ found) ** 2)) / freedom)
        if np.all((errors > 0) & (errors < _KNOWN)):
            return found, errors
    return np.zeros(0), np.zeros(0)


# Who is drawn ---------------------------------------------------------------------------------


def _find_other_sampling(runs: Runs, moved: Influence, of_one_size: bool) -> Finding | None:
    """Finds draws that are improbable under the sampling that is charged.

    In whole runs: more records change a release, none of them before, than can have been drawn; or
    all within 1 / rate steps. In S first releases on copies: never below b and never above b have
    each the probability P^S. SURE is shared: an eighth each for b = 1 and 2, a quarter for all
    other b, a quarter for one number in all runs, a quarter for a rate above the one charged
    (Chernoff: exp(-S n KL)).

    Args:
        runs: of the loop.
        moved: its influence.
        of_one_size: True if the first release moves by one and the same, or not at all, in all
            runs.
    """
    mechanism, (seeds, count) = runs.mechanism, moved.first.shape
    rule, rate = mechanism.sampling, mechanism.batch_size / mechanism.dataset_size
    if not isinstance(rule, Poisson | FixedSize) or rate >= 1:
        return None
    line, firsts, last = line_of_function(runs.loop), moved.first.ravel(), int(moved.first.max())
    for step in range(last + 1):
        # Those that changed nothing before: each is drawn now with the same probability.
        trials, taken = int(np.sum((firsts == -1) | (firsts >= step))), int(np.sum(firsts == step))
        chance = float(binomial_pmf(trials, rate)[taken:].sum()) * (last + 1)
        # Batches that exclude each other take all that are left, but never more than a batch.
        if taken > 1.5 * rate * len(firsts) and chance <= _WHOLE:
            words = f"{taken} of {trials} replaced records changed release {step} and none before, "
            words += f"where {rate * trials:.0f} were to be drawn (statistics of the whole data?)"
            return Finding("independence", words, line)

    odd: list[tuple[float, float, str]] = []  # (chance, the one that is sure, words)
    steps, poisson, law = (
        max(1, round(1 / rate)),
        isinstance(rule, Poisson),
        binomial_pmf(count, rate),
    )
    if steps > 1 and np.all((firsts >= 0) & (firsts < steps)):
        words = f"every record took part within {steps} steps, in {seeds} runs"
        odd.append(((1 - (1 - rate) ** steps) ** len(firsts), _WHOLE, words))

    # How many copies were drawn first, run by run.
    drawn, trials = runs.noise.drawn, len(runs.noise.rows)
    if poisson and len(drawn):
        low, high, mean = int(drawn.min()), int(drawn.max()), float(drawn.mean()) / count
        share = 8 if low in (1, 2) else 8 * count
        words = f"{low} or more records were drawn in each of {trials} first steps"
        odd.append((share * float(law[low:].sum()) ** trials, SURE, words))
        words = f"at most {high} records were drawn in each of {trials} first steps"
        odd.append((8 * count * float(law[: high + 1].sum()) ** trials, SURE, words))
        if rate < mean <= 1:
            words = f"{mean:.1%} of the records were drawn in {trials} first steps"
            odd.append((4 * math.exp(-trials * count * binary_divergence(mean, rate)), SURE, words))
    elif poisson and of_one_size:
        words = f"as many records, or none, were drawn in each of {trials} first steps"
        odd.append((4 * float(law[0] + law[1:].max()) ** trials, SURE, words))

    for chance, sure, words in sorted(odd):
        if chance <= sure:
            words += f", a chance of {chance:.1g} under the sampling that is charged"
            return Finding("sampling", words, line)
    return None
