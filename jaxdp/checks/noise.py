"""The noise of a loop's releases, measured over seeds: where it is missing, shared or repeated."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy import special

from jaxdp.checks import where
from jaxdp.checks.findings import Finding
from jaxdp.mechanism import Mechanism

if TYPE_CHECKING:
    from jaxdp.checks.loop import Runs

SURE = 1e-7  # the probability that one of the ten tests accuses a right loop: 1e-6 together
SEEDED = r"PRNGKey|random\.key\(|fold_in|default_rng|RandomState|\.split\(|seed"
ADDED = r"normal\(|randn|laplace\(|gauss|uniform\("
_REUSED = 0.02  # of the energy that two independent noises differ by: 2
_ROUNDING = 8.0  # units in the last place that may be rounding
_PAIRS, _SPAN, _NEAR = 1_024, 96, 4  # coordinates of which all pairs, all sums are looked at
_BOUNDED, _HEAVY = (1.8, 2.5, 3.2), 3.5  # standard deviations
_EMPTY = 4  # releases that nobody was drawn for, of one step


class Noise(NamedTuple):
    """The noise of the first release.

    Two worlds of copies of one record, and of another, release k·u + z and k·v + z with one seed,
    where k records were drawn. Their difference k·(v - u) tells k up to a factor, without noise.
    What is left of the releases of S seeds after a regression on (1, k) is z, on S - 2 degrees of
    freedom, whatever k, u and v are.

    Attributes:
        rows: [S, m], the residuals, of the coordinates ``at``.
        at: int [m], the coordinates that are looked at: all, or some of every leaf.
        freedom: the degrees of freedom of a column of ``rows``.
        std: [d], the standard deviation of each coordinate; elsewhere than ``at``, of its leaf.
        grain: [d], below which a deviation may be rounding.
        moves: bool [d], True where a release changes with the records or with how many are drawn.
        taken: [S], multiples of k; empty where that is not known.
        additive: True if the difference of the worlds has no noise: releases are sums plus noise.
        leaves: the names of the leaves, and where each begins and ends.
    """

    rows: np.ndarray
    at: np.ndarray
    freedom: int
    std: np.ndarray
    grain: np.ndarray
    moves: np.ndarray
    taken: np.ndarray
    additive: bool
    leaves: Sequence[tuple[str, slice]]

    @property
    def noised(self) -> np.ndarray:
        """bool [d], True where there is more than rounding."""
        return self.std > self.grain

    @property
    def size(self) -> float:
        """The root of the mean variance of the coordinates that have noise."""
        return float(np.sqrt(np.mean(self.std[self.noised] ** 2))) if self.noised.any() else 0.0

    def multiplier(self, change: np.ndarray, levels: np.ndarray, tests: int) -> float:
        """A bound on the noise multiplier, from the change that replacing one record makes.

        For a change d and every w, w·d / std(w·z) <= 2 / multiplier where the charge holds, by
        Cauchy and Schwarz, however the noise is distributed over coordinates. w is d over the
        variances; std(w·z) is not above its estimate times (f / chi2_f(p))^1/2, p = SURE / tests.

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
        least = 2 * special.gammaincinv(self.freedom / 2, SURE / tests)
        return 2 * math.sqrt(energy / least) / along


def measured(runs: "Runs") -> Noise:
    """The noise of the first release, from two worlds of one record's copies."""
    one, two = runs.first
    at, leaves = runs.at, runs.leaves
    apart = two - one
    energies, left = np.linalg.eigh(apart @ apart.T)
    strong = int(np.sum(energies > 1e-6 * max(energies[-1], 1e-300)))
    known = 1 if runs.copies else runs.count  # the draw of n records has n directions
    left = left[:, ::-1][:, : min(known, strong)]
    basis = np.column_stack([np.ones(len(one)), left])
    turned, kept, _ = np.linalg.svd(basis, full_matrices=False)
    turned = turned[:, kept > 1e-6 * kept[0]]
    centred = one - one[:1]
    rows = centred - turned @ (turned.T @ centred)
    freedom = len(one) - turned.shape[1]
    grain = _ROUNDING * runs.precision[at] * np.max(np.abs(one), 0, initial=1e-300)
    std = np.sqrt(np.sum(rows**2, 0) / freedom)
    moves = np.maximum(np.max(np.abs(apart), 0), np.ptp(one, 0)) > _ROUNDING * grain
    whole = np.zeros((3, len(runs.precision)))
    for _, part in leaves:
        mine = (at >= part.start) & (at < part.stop)
        whole[:, part] = [[np.sqrt(np.mean(std[mine] ** 2))], [np.max(grain[mine])], [0]]
    whole[:, at] = std, grain, moves
    return Noise(
        rows,
        at,
        freedom,
        whole[0],
        whole[1],
        whole[2] > 0,
        left[:, 0] * np.sign(left[:, 0].sum()) if runs.copies and strong == 1 else np.zeros(0),
        strong <= known < len(at) + runs.copies,
        leaves,
    )


def of_noise(runs: "Runs", noise: Noise, loop: Callable[..., Any]) -> list[Finding]:
    """Findings on the noise of the first release: absent, absent in places, shared, another law."""
    bare = noise.moves & ~noise.noised
    found = []
    if bare.any():
        found.append(
            Finding(
                "noise",
                f"{in_words(bare[noise.at], noise)} of the first release have no noise: they "
                "change with the records, and not with the seed",
                "they show the un-noised sum of the gradients",
                where.of_function(loop, f"{ADDED}|{SEEDED}"),
                "add noise to every coordinate of every leaf that is trained, new for every update",
            )
        )
    shared = _shared(runs, noise, loop)
    return found + shared + ([] if shared else _another_law(noise, loop))


def in_words(which: np.ndarray, noise: Noise) -> str:
    """Counts of coordinates, leaf by leaf."""
    words = []
    for name, part in noise.leaves:
        mine = (noise.at >= part.start) & (noise.at < part.stop)
        if count := int(np.sum(which[mine])):
            words.append(f"{count} of {int(np.sum(mine))} numbers{f' of {name}' if name else ''}")
    shown = words[:3] + ([f"and of {len(words) - 3} more leaves"] if len(words) > 3 else [])
    return ", ".join(shown)


def _shared(runs: "Runs", noise: Noise, loop: Callable[..., Any]) -> list[Finding]:
    """A finding where coordinates have one noise, so that a combination of them has none.

    Looked at are: all pairs of 1,024 coordinates; of all coordinates, those whose noise is nearest
    in a random direction of the seeds, which finds every equal or opposite pair; and all linear
    combinations of the first 96 of each leaf, with the sum of its others, and of a random 96. The
    squared correlation of two independent normals over f degrees of freedom has the law
    Beta(1/2, (f - 1) / 2); the least singular value of 96 is above sqrt(f) - sqrt(96) - t but with
    probability exp(-t²/2). A combination w is accused if it has a thousandth of the noise that it
    should have, and a record moves it: where noise and sum are projected alike, none does.
    """
    at = np.flatnonzero(noise.noised[noise.at])
    if len(at) < 2 or not noise.additive:
        return []
    rng = np.random.default_rng(0)
    lengths = np.sqrt(np.sum(noise.rows[:, at] ** 2, 0))
    rows = noise.rows[:, at] / lengths
    changes = (runs.first[1] - runs.first[0])[:, at] / lengths
    moved = changes[int(np.argmax(np.sum(changes**2, 1)))]
    pairs, related = _pairs(rows, rng)
    chance = SURE / (len(at) * (len(at) - 1))
    bound = special.betaincinv((noise.freedom - 1) / 2, 0.5, chance)
    left = np.sqrt(np.maximum(0.0, 2 - 2 * np.abs(related)))  # of their noise, in a combination
    grain = 4 * np.max((noise.grain[noise.at][at] / lengths)[pairs], axis=1)
    apart = np.abs(moved[pairs[:, 0]] - np.sign(related) * moved[pairs[:, 1]])
    equal = np.flatnonzero((left < np.maximum(1e-3, grain)) & (apart > 10 * left + 1e-6))
    combined = 0
    for some in _blocks(noise, at, rng):
        block, change = rows[:, some[:_SPAN]], moved[some[:_SPAN]]
        if len(some) > _SPAN:
            rest = rows[:, some[_SPAN:]].sum(1)
            size = np.linalg.norm(rest)
            block = np.column_stack([block, rest / size])
            change = np.append(change, moved[some[_SPAN:]].sum() / size)
        _, values, turned = np.linalg.svd(block, full_matrices=False)
        none = values < 1e-3
        combined += int(np.sum(np.abs(turned[none] @ change) > 10 * values[none] + 1e-6))
    odd = int(np.sum(1 - np.square(related) < bound))
    if not len(equal) and not combined and not odd:
        return []
    if len(equal):
        one, two = (_place(noise, at[k]) for k in pairs[equal[0]])
        words = f"{len(equal)} pairs of coordinates have one noise, such as {one} and {two}"
    elif combined:
        words = f"{combined} linear combinations of coordinates have no noise"
    else:
        words = f"the noise of {odd} pairs of coordinates is correlated"
    return [
        Finding(
            "shared",
            words,
            "their difference, or another combination, shows the un-noised sum of the gradients",
            where.of_function(loop, f"{ADDED}|{SEEDED}"),
            "draw noise of each leaf's own shape, with a key of its own (jax.random.split)",
            certain=bool(len(equal) or combined),
        )
    ]


def _blocks(noise: Noise, at: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Places in ``at`` of which all combinations are looked at; beyond 96, of their sum."""
    places = noise.at[at]
    found = [np.flatnonzero((places >= p.start) & (places < p.stop)) for _, p in noise.leaves]
    return [some for some in found if len(some) > 1] + [rng.permutation(len(at))[:_SPAN]]


def _pairs(rows: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(int [p, 2], correlations [p]): all pairs of some coordinates, the nearest pairs of all."""
    count = rows.shape[1]
    some = np.sort(rng.permutation(count)[:_PAIRS])
    together = np.triu(rows[:, some].T @ rows[:, some], 1)
    i, j = np.nonzero(np.abs(together) > 0.2)
    found = [np.column_stack([some[i], some[j]])]
    across = rng.normal(size=len(rows)) @ rows
    order = np.argsort(np.abs(across))  # of opposite sign, too
    found += [np.column_stack([order[:-s], order[s:]]) for s in range(1, min(_NEAR + 1, count))]
    pairs = np.unique(np.sort(np.concatenate(found), axis=1), axis=0)
    return pairs, np.clip(np.sum(rows[:, pairs[:, 0]] * rows[:, pairs[:, 1]], 0), -1, 1)


def _place(noise: Noise, column: int) -> str:
    at = int(noise.at[column])
    for name, part in noise.leaves:
        if part.start <= at < part.stop:
            return f"{name}[{at - part.start}]"
    return f"[{at}]"


def _another_law(noise: Noise, loop: Callable[..., Any]) -> list[Finding]:
    words = law_in_words(noise)
    if not words or not noise.additive:
        return []
    return [
        Finding(
            "noise",
            words,
            "epsilon is computed for Gaussian noise: bounded noise shows some records for certain, "
            "and other tails have other guarantees",
            where.of_function(loop, ADDED),
            "add Gaussian noise (jax.random.normal), or charge for the law that is added",
        )
    ]


def law_in_words(noise: Noise) -> str:
    """In which way the first release's noise is not Gaussian: bounded, or heavy tails; else "".

    A squared residual over the sum of its column's squares, r² / ((1 - h) sum r²) with h its
    leverage, has the law Beta(1/2, (f - 1) / 2). The shares beyond 1.8, 2.5, 3.2 (too few?) and
    3.5 standard deviations (too many?) are compared with that by Chernoff's bound exp(-n KL), with
    n the number of rows times that of independent coordinates (of a sample, by correlations).
    """
    at = np.flatnonzero(noise.noised[noise.at])
    if not len(at):
        return ""
    rows = noise.rows[:, at] / np.sqrt(np.sum(noise.rows[:, at] ** 2, 0))
    some = np.sort(np.random.default_rng(1).permutation(len(at))[:_PAIRS])
    related = np.square(rows[:, some].T @ rows[:, some])
    np.fill_diagonal(related, 0)
    excess = max(0.0, float(np.sum(related - 1 / noise.freedom)))
    count = len(rows) * len(at) / (1 + excess / len(some))
    part = np.square(rows) * (len(rows) / noise.freedom)  # all leverages are about 2 / S
    for far, fewer in (*((each, True) for each in _BOUNDED), (_HEAVY, False)):
        edge = far**2 / noise.freedom
        wanted = float(special.betainc((noise.freedom - 1) / 2, 0.5, max(0.0, 1 - edge)))
        got = float(np.mean(part > edge))
        if (got < wanted) == fewer and count * divergence(got, wanted) > math.log(4 / SURE):
            return (
                f"{got:.2%} of the noise is beyond {far:g} standard deviations, of Gaussian noise "
                f"{wanted:.2%}"
            )
    return ""


def divergence(got: float, wanted: float) -> float:
    """KL of two coins: the exponent of Chernoff's bound."""
    return float(special.rel_entr(got, wanted) + special.rel_entr(1 - got, 1 - wanted))


def charged_at(mechanism: Mechanism, step: int) -> float:
    """The noise multiplier of one release; with correlated noise, of its own deviation."""
    step = min(step, (mechanism.steps or step + 1) - 1)
    whole, *_ = map(float, mechanism.multipliers(step).values())  # the gradient's comes first
    if mechanism.strategy is not None:
        whole *= float(mechanism.strategy.inverse_row_norms()[step])
    return whole


def levels(runs: "Runs", noise: Noise) -> np.ndarray:
    """[T, d], upper bounds on the deviation of each release's noise over that of the first.

    By leaf, from whole runs of other seeds: what else varies adds to the variance.
    """
    rows = np.stack(runs.few[0])
    found = np.ones(rows.shape[1:])
    for step in range(1, rows.shape[1]):
        for _, part in noise.leaves:
            used = np.flatnonzero(noise.noised[part]) + part.start
            if not len(used):
                continue
            scaled = (rows[:, step, used] - rows[:, step, used].mean(0)) / noise.std[used]
            freedom = (len(rows) - 1) * len(used)
            least = 2 * special.gammaincinv(freedom / 2, SURE / found.size)
            found[step, part] = math.sqrt(float(np.sum(scaled**2)) / least)
    return found


def of_empty(runs: "Runs", noise: Noise, loop: Callable[..., Any]) -> list[Finding]:
    """A finding where releases that nobody was drawn for have no noise.

    Until the two worlds of one seed differ, nobody was drawn. A coordinate is accused if it is
    equal in at least four such runs at one step, and the records move it at that step in others.
    """
    apart, first = runs.differences(noise)
    rows = np.stack(runs.few[0])
    for step in range(rows.shape[1]):
        empty, later = rows[first > step, step], apart[first <= step, step]
        if len(empty) < _EMPTY or not len(later):
            continue
        slip = _ROUNDING * runs.precision * np.max(np.abs(rows[:, step]), 0)
        bare = (np.ptp(empty, 0) <= slip) & (np.max(np.abs(later), 0) > _ROUNDING * slip)
        bare &= noise.noised | ~noise.moves  # the others were found in the first release
        if bare.any():
            return [
                Finding(
                    "noise",
                    f"{in_words(bare[noise.at], noise)} of release {step} have no noise in "
                    f"{len(empty)} runs in which nobody was drawn",
                    "one record more or less then shows whether it was drawn",
                    where.of_function(loop, rf"{ADDED}|\.any\(|sum\(\)|continue"),
                    "add the same noise also where the draw is empty",
                )
            ]
    return []


def of_repeats(
    copies: Sequence[np.ndarray],
    real: Sequence[np.ndarray],
    noise: Noise,
    level: np.ndarray,
    mechanism: Mechanism,
    loop: Callable[..., Any],
) -> list[Finding]:
    """A finding where two updates of a run have one noise in a leaf, on other sums.

    The energy of the difference of two independent noises is that of the smaller times chi2_f or
    more, in law; it is accused below 0.02, where that has a probability of at most SURE.

    Args:
        copies: releases [T, d] for each seed, on copies of one record.
        real: releases on the records; two that are equal there are one release, shown twice.
        noise: of the first release.
        level: [T, d], bounds on how much there is of it in the others.
        mechanism: tells how the noise changes with the step.
        loop: for the line.
    """
    if mechanism.strategy is not None:
        return []  # correlated noise takes back what it added
    shown = min(map(len, (*copies, *real)))
    scales = [charged_at(mechanism, t) for t in range(min(shown, mechanism.steps or shown))]
    tests = max(1, len(scales) * (len(scales) - 1) * len(noise.leaves))
    for one in range(len(scales)):
        for two in range(one + 1, len(scales)):
            if all(np.array_equal(run[one], run[two]) for run in real):
                continue
            apart = np.stack([run[two] - run[one] for run in copies])
            for name, part in noise.leaves:
                used = np.flatnonzero(noise.noised[part]) + part.start
                if not len(used):
                    continue
                unit = noise.std[used] * min(scales[one], scales[two]) / scales[0]
                unit *= np.minimum(1.0, _lower(level, one, two)[used])
                energy = np.linalg.svd((apart - apart.mean(0))[:, used] / unit, compute_uv=False)
                # Copies differ by their number, in one direction: it is left out.
                rest = energy[1:] if len(used) > 1 else energy
                freedom = (len(copies) - 2) * max(1, len(used) - 1)
                ratio = float(np.sum(rest**2)) / freedom
                chance = special.gammainc(freedom / 2, ratio * freedom / 4)
                if ratio < _REUSED and chance * tests < SURE:
                    sure = noise.additive or not law_in_words(noise)
                    return [_repeated(one, two, ratio, name, sure, loop)]
    return []


def _lower(level: np.ndarray, one: int, two: int) -> np.ndarray:
    """[d], the lesser of two releases' levels; a restart may give more than the loop itself."""
    return np.asarray(np.min(level[[min(step, len(level) - 1) for step in (one, two)]], axis=0))


def _repeated(
    one: int, two: int, ratio: float, leaf: str, sure: bool, loop: Callable[..., Any]
) -> Finding:
    return Finding(
        "repeat",
        f"releases {one} and {two} have one noise{f' in {leaf}' if leaf else ''}: their difference "
        f"has {ratio:.1g} of its variance, where independent noise has 2",
        "the difference of the two shows their un-noised sums",
        where.of_function(loop, SEEDED),
        "take a new key for every update, also after a restart: save the key with the parameters, "
        "or take fresh randomness of the operating system (a jaxdp.Run does)",
        certain=sure,
    )
