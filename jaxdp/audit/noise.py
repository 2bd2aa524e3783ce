"""Findings on the noise of a loop's releases: missing, shared, of another law, repeated.

Each of the tests accuses a right loop with a probability of at most ``residuals.SURE``.
"""

from collections.abc import Sequence

import numpy as np
from scipy import special

from jaxdp.audit.findings import Finding, line_in
from jaxdp.audit.residuals import SURE, shared, tails
from jaxdp.audit.runs import GRAIN, Loop, Runs

SEEDED = r"PRNGKey|random\.key\(|fold_in|default_rng|RandomState|\.split\(|seed"
ADDED = r"normal\(|randn|laplace\(|gauss|uniform\("
_REUSED = 0.02  # of the energy that two independent noises differ by: 2
_EMPTY = 4  # releases that nobody was drawn for, of one step


def of_bare(runs: Runs) -> Finding | None:
    """Finds coordinates of the first release that have no noise."""
    bare = runs.noise.moves & ~runs.noise.noised
    if not bare.any():
        return None
    return Finding(
        "noise",
        f"{_in_words(bare, runs)} of the first release have no noise: they "
        "change with the records, and not with the seed",
        "they show the un-noised sum of the gradients",
        line_in(runs.loop, f"{ADDED}|{SEEDED}"),
        "add noise to every coordinate of every leaf that is trained, new for every update",
    )


def of_law(runs: Runs) -> Finding | None:
    """Finds noise of the first release that is not Gaussian."""
    if not runs.noise.additive or not (words := law_in_words(runs)):
        return None
    return Finding(
        "noise",
        words,
        "epsilon is computed for Gaussian noise: bounded noise shows some records for certain, "
        "and other tails have other guarantees",
        line_in(runs.loop, ADDED),
        "add Gaussian noise (jax.random.normal), or charge for the law that is added",
    )


def law_in_words(runs: Runs) -> str:
    """In which way the first release's noise is not Gaussian: bounded, or heavy tails; else "".

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
        return float(special.betainc((freedom - 1) / 2, 0.5, max(0.0, 1 - edge / freedom)))

    squares = np.square(rows) * len(rows)
    p, words = tails(squares, beyond, squares.size / (1 + excess / len(some)))
    return words if p < SURE else ""


def of_shared(runs: Runs) -> Finding | None:
    """Finds coordinates that have one noise, so that a combination of them has none.

    Accused is a combination with a thousandth of the noise that it should have, which a record
    moves: where noise and sum are projected alike, none does.
    """
    noise = runs.noise
    at = np.flatnonzero(noise.noised[noise.at])
    if len(at) < 2 or not noise.additive:
        return None
    lengths = np.linalg.norm(noise.rows[:, at], axis=0)
    changes = noise.apart[:, at] / lengths
    moved = changes[int(np.argmax(np.sum(changes**2, 1)))]
    starts = [part.start for _, part in runs.leaves]
    leaf = np.searchsorted(starts, noise.at[at], side="right")
    found = shared(noise.rows[:, at], noise.freedom, leaf)

    left = np.sqrt(np.maximum(0.0, 2 - 2 * np.abs(found.related)))  # of their noise, combined
    one, two = found.pairs.T
    grain = noise.grain[noise.at[at]] / lengths
    floor = np.maximum(1e-3, 4 * np.maximum(grain[one], grain[two]))
    apart = np.abs(moved[one] - np.sign(found.related) * moved[two])
    equal = np.flatnonzero((left < floor) & (apart > 10 * left + 1e-6))
    combined = sum(
        abs(float(moved[block] @ weights)) > 10 * rest + 1e-6
        for block, weights, rest in found.combined
    )

    def place(column: int) -> str:
        name, part = runs.leaves[leaf[column] - 1]
        return f"{name}[{noise.at[at[column]] - part.start}]"

    if len(equal):
        names = place(one[equal[0]]), place(two[equal[0]])
        words = f"{len(equal)} pairs of coordinates have one noise, such as {' and '.join(names)}"
    elif combined:
        words = f"{combined} linear combinations of coordinates have no noise"
    elif found.p_value < SURE:
        words = "the noise of coordinates is correlated"
    else:
        return None
    return Finding(
        "shared",
        words,
        "their difference, or another combination, shows the un-noised sum of the gradients",
        line_in(runs.loop, f"{ADDED}|{SEEDED}"),
        "draw noise of each leaf's own shape, with a key of its own (jax.random.split)",
        certain=bool(len(equal) or combined),
    )


def of_empty(runs: Runs) -> Finding | None:
    """Finds releases that nobody was drawn for and that have no noise.

    Until the two worlds of one seed differ, nobody was drawn. A coordinate is accused if it is
    equal in at least four such runs at one step, and the records move it at that step in others.
    """
    (apart, first), rows, noise = runs.differences, runs.few[0], runs.noise
    for step in range(rows.shape[1]):
        empty, later = rows[first > step, step], apart[first <= step, step]
        if len(empty) < _EMPTY or not len(later):
            continue
        slip = GRAIN * runs.precision * np.max(np.abs(rows[:, step]), 0)
        bare = (np.ptp(empty, 0) <= slip) & (np.max(np.abs(later), 0) > GRAIN * slip)
        bare &= noise.noised | ~noise.moves  # the others were found in the first release
        if bare.any():
            return Finding(
                "noise",
                f"{_in_words(bare, runs)} of release {step} have no noise in {len(empty)} runs "
                "in which nobody was drawn",
                "one record more or less then shows whether it was drawn",
                line_in(runs.loop, rf"{ADDED}|\.any\(|sum\(\)|continue"),
                "add the same noise also where the draw is empty",
            )
    return None


def of_repeats(
    runs: Runs, copies: Sequence[np.ndarray] | np.ndarray, real: list[np.ndarray], loop: Loop
) -> Finding | None:
    """Finds two updates of a run that have one noise in a leaf, on other sums.

    The energy of the difference of two independent noises is that of the smaller times chi2_f or
    more, in law; it is accused below 0.02.

    Args:
        runs: of the loop: its first noise, and how much there is of it in the other releases.
        copies: releases [T, d] for each seed, on copies of one record.
        real: releases on the records; two that are equal there are one release, shown twice.
        loop: the user's, or the interrupted one.
    """
    noise, mechanism, level = runs.noise, runs.mechanism, runs.levels
    if mechanism.strategy is not None:
        return None  # correlated noise takes back what it added
    shown = min(map(len, (*copies, *real)))
    scales = [runs.charged_at(t) for t in range(min(shown, mechanism.steps or shown))]
    tests = max(1, len(scales) * (len(scales) - 1) * len(runs.leaves))
    every = [(one, two) for two in range(len(scales)) for one in range(two)]
    for one, two in sorted(every):
        if all(np.array_equal(run[one], run[two]) for run in real):
            continue
        apart = np.stack([run[two] - run[one] for run in copies])
        for name, part in runs.leaves:
            used = np.flatnonzero(noise.noised[part]) + part.start
            if not len(used):
                continue
            # A restart may give more releases than the loop itself.
            lower = np.min(level[[min(step, len(level) - 1) for step in (one, two)]], axis=0)
            unit = noise.std[used] * min(scales[one], scales[two]) / scales[0]
            unit *= np.minimum(1.0, lower[used])
            energy = np.linalg.svd((apart - apart.mean(0))[:, used] / unit, compute_uv=False)
            # Copies differ by their number, in one direction: it is left out.
            rest = energy[1:] if len(used) > 1 else energy
            freedom = (len(copies) - 2) * max(1, len(used) - 1)
            ratio = float(np.sum(rest**2)) / freedom
            if ratio < _REUSED and special.chdtr(freedom, ratio * freedom / 2) * tests < SURE:
                return Finding(
                    "repeat",
                    f"releases {one} and {two} have one noise{f' in {name}' if name else ''}: "
                    f"their difference has {ratio:.1g} of its variance, where independent "
                    "noise has 2",
                    "the difference of the two shows their un-noised sums",
                    line_in(loop, SEEDED),
                    "take a new key for every update, also after a restart: save the key with "
                    "the parameters, or take fresh randomness of the operating system (a "
                    "jaxdp.Run does)",
                    certain=noise.additive or not law_in_words(runs),
                )
    return None


def _in_words(which: np.ndarray, runs: Runs) -> str:
    """Counts of coordinates, bool [d], leaf by leaf."""
    words, at = [], runs.noise.at
    for name, part in runs.leaves:
        mine = at[(at >= part.start) & (at < part.stop)]
        if count := int(np.sum(which[mine])):
            words.append(f"{count} of {len(mine)} numbers{f' of {name}' if name else ''}")
    shown = words[:3] + ([f"and of {len(words) - 3} more leaves"] if len(words) > 3 else [])
    return ", ".join(shown)
