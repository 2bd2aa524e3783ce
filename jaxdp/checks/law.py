"""Judges the releases of a loop: noise against influence, who took part, noise that came twice."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxdp.checks import drawing, where
from jaxdp.checks.findings import Finding
from jaxdp.mechanism import Mechanism
from jaxdp.sampling import FixedSize, Poisson

if TYPE_CHECKING:
    from jaxdp.checks.loop import Runs

SEEDED = r"PRNGKey|random\.key\(|fold_in|default_rng|RandomState|\.split\(|seed"
_NOISE = r"normal\(|randn|laplace\(|gauss"
_DIVIDED = r"/ *(len\(|\w*\.shape|\w*count|\w*size|\w*\.sum|\w*mask)|\.mean\(|maximum\("
_FITTED = r"\.(mean|std|var|median|quantile|max|min|fit)\w*\("
_COORDINATES = 2_000  # that the noise is measured on
_REUSED = 0.2  # of the energy that two independent noises differ by: 2


class Noise(NamedTuple):
    """The standard deviation of the noise of the first release, per coordinate.

    Attributes:
        std: the estimate.
        most: not exceeded with probability 0.999, if the noise is Gaussian.
    """

    std: float
    most: float


class Influence(NamedTuple):
    """The change that one record made in one run.

    Attributes:
        step: the first release that it changed; -1 for none.
        norm: by how much.
    """

    step: int
    norm: float


def noise_of(copies: Sequence[np.ndarray]) -> Noise:
    """Measures the noise of the first release, over seeds, on copies of one record.

    Copies make the un-noised sum the same vector in all runs, times the number of records drawn:
    variation in that one direction (the first singular vector) is left out.
    """
    rows = np.stack([run[0] for run in copies])
    width = min(rows.shape[1], _COORDINATES)
    chosen = np.random.default_rng(0).choice(rows.shape[1], width, replace=False)
    energy = _energy(rows[:, chosen])
    rng = np.random.default_rng(1)
    unit = np.array([_energy(rng.normal(size=(len(rows), width))) for _ in range(300)])
    least = max(float(np.quantile(unit, 0.001)), 1e-12)
    return Noise(math.sqrt(energy / float(unit.mean())), math.sqrt(energy / least))


def _energy(rows: np.ndarray) -> float:
    """Squares of centred rows, but for their first singular direction."""
    values = np.linalg.svd(rows - rows.mean(0), compute_uv=False)
    return float(np.sum(values[1:] ** 2))


def of_noise(runs: "Runs", mechanism: Mechanism, loop: Callable[..., Any]) -> list[Finding]:
    """Findings on the noise alone: seeds without effect, and noise that comes twice in a run."""
    noise = noise_of(runs.copies)
    size = float(np.max(np.abs(runs.copies[0]), initial=0.0))
    if noise.std <= 1e-7 * size or noise.std == 0.0:
        return [
            Finding(
                "noise",
                "runs with other seeds release the same numbers",
                "there is no noise, or the same in every run: two releases subtract to none",
                where.of_function(loop, f"{_NOISE}|{SEEDED}"),
                "draw new noise for every update, from a key of its own",
            )
        ]
    return of_repeats(runs.copies, runs.base, noise, mechanism, loop)


def of_repeats(
    copies: Sequence[np.ndarray],
    real: Sequence[np.ndarray],
    noise: Noise,
    mechanism: Mechanism,
    loop: Callable[..., Any],
) -> list[Finding]:
    """A finding where two updates of a run have one noise, on other sums.

    Args:
        copies: releases [T, d] for each seed, on copies of one record.
        real: releases on the records; two that are equal there are one release, shown twice.
        noise: of the first release.
        mechanism: tells how the noise changes with the step.
        loop: for the line.
    """
    if mechanism.strategy is not None or noise.std == 0.0:
        return []  # correlated noise takes back what it added
    shown = min(map(len, (*copies, *real)))
    scales = [
        mechanism.multipliers(t)["gradient"] for t in range(min(shown, mechanism.steps or shown))
    ]
    for one in range(len(scales)):
        for two in range(one + 1, len(scales)):
            apart = np.stack([run[two] - run[one] for run in copies])
            unit = noise.std * min(scales[one], scales[two]) / scales[0]
            ratio = float(np.mean(apart**2)) / unit**2
            ratio = min(
                ratio, _energy(apart) / (unit**2 * max(1, (len(apart) - 2)) * apart.shape[1])
            )
            if ratio < _REUSED and not all(np.array_equal(r[one], r[two]) for r in real):
                return [_repeated(one, two, ratio, loop)]
    return []


def _repeated(one: int, two: int, ratio: float, loop: Callable[..., Any]) -> Finding:
    return Finding(
        "repeat",
        f"releases {one} and {two} have one noise: their difference has {ratio:.1g} of its "
        "variance, where independent noise has 2",
        "the difference of the two shows their un-noised sums",
        where.of_function(loop, SEEDED),
        "take a new key for every update, also after a restart: save the key with the parameters, "
        "or take fresh randomness of the operating system (a jaxdp.Run does)",
    )


def of_influence(runs: "Runs", mechanism: Mechanism, loop: Callable[..., Any]) -> list[Finding]:
    """Findings on what single records change: by how much, in which steps, how scaled."""
    noise = noise_of(runs.copies)
    found = [
        [_first(base, other, noise) for other in changed]
        for base, changed in zip(runs.base, runs.changed, strict=True)
    ]
    everywhere = _all_at_once(found, mechanism, loop)
    sampled = [] if everywhere else _law_of_draws(found, mechanism, loop)
    return everywhere + _too_large(found, noise, mechanism, loop) + sampled + _divided(found, loop)


def _first(base: np.ndarray, other: np.ndarray, noise: Noise) -> Influence:
    """The first release that a record changed: all before were equal, so it alone did."""
    norms = np.linalg.norm(other - base, axis=1)
    rounding = 1e-6 * np.linalg.norm(base, axis=1) + 1e-9 * noise.std
    at = np.flatnonzero(~(norms <= rounding))  # what is not finite has changed, too
    return Influence(int(at[0]), float(norms[at[0]])) if len(at) else Influence(-1, 0.0)


def _too_large(
    found: list[list[Influence]], noise: Noise, mechanism: Mechanism, loop: Callable[..., Any]
) -> list[Finding]:
    charged = mechanism.multipliers(0)["gradient"]
    if mechanism.strategy is not None or charged == 0 or noise.std == 0:
        return []
    largest = 0.0
    for each in (i for seed in found for i in seed if i.step >= 0):
        step = min(each.step, (mechanism.steps or each.step + 1) - 1)
        if np.isfinite(each.norm):
            largest = max(largest, each.norm * charged / mechanism.multipliers(step)["gradient"])
    # A replaced record takes one contribution away and adds another.
    if largest == 0.0 or 2 * noise.most / largest >= 0.9 * charged:
        return []
    return [
        Finding(
            "sensitivity",
            f"the noise multiplier is at most {2 * noise.most / largest:.3g}, and {charged:.3g} is "
            f"charged: one record moves a release by {largest:.3g}, its noise has standard "
            f"deviation {noise.std:.3g}",
            "noise must be the multiplier times what one record can move, in the same scale: on a "
            "sum of gradients clipped one by one, before the division by the batch size",
            where.of_function(loop, _NOISE),
            "clip every example's gradient, sum, add noise_multiplier * clip_norm, then divide by "
            "the expected batch size (jaxdp.clipped_grad and mechanism.privatize do)",
        )
    ]


def _rate(mechanism: Mechanism) -> float:
    return mechanism.batch_size / mechanism.dataset_size


def _all_at_once(
    found: list[list[Influence]], mechanism: Mechanism, loop: Callable[..., Any]
) -> list[Finding]:
    """A finding where more records change a release than can have been drawn."""
    if not isinstance(mechanism.sampling, Poisson | FixedSize) or _rate(mechanism) >= 1:
        return []
    everyone = [each.step for seed in found for each in seed]
    last = max(everyone)
    for step in range(last + 1):
        # Those that changed nothing before: each is drawn now with the same probability.
        trials = sum(1 for first in everyone if first == -1 or first >= step)
        taken, rate = everyone.count(step), _rate(mechanism)
        chance = sum(drawing.pmf(trials, rate, hits) for hits in range(taken, trials + 1))
        # Batches that exclude each other take all that are left, but never more than a batch.
        more = taken > 1.5 * rate * len(everyone)
        if more and chance * (last + 1) <= drawing.SURE:
            return [_everywhere(taken, trials, step, rate, loop)]
    return []


def _everywhere(
    taken: int, trials: int, step: int, rate: float, loop: Callable[..., Any]
) -> Finding:
    return Finding(
        "company",
        f"{taken} of {trials} replaced records changed release {step} and none before, where "
        f"{rate * trials:.0f} were to be drawn",
        "records that were not drawn have influence (statistics of the whole data set?), so "
        "sampling amplifies nothing, and no clipping bounds it",
        where.of_function(loop, _FITTED),
        "use public constants for preprocessing, clip bounds and noise, or charge for the "
        "statistic (jaxdp.preprocess)",
    )


def _law_of_draws(
    found: list[list[Influence]], mechanism: Mechanism, loop: Callable[..., Any]
) -> list[Finding]:
    """A finding where first takings of part are improbable under the sampling charged."""
    rule, rate = mechanism.sampling, _rate(mechanism)
    if not isinstance(rule, Poisson | FixedSize) or rate >= 1:
        return []
    steps = max(1, round(1 / rate))
    log, words = 0.0, []
    counts = [[sum(1 for i in seed if i.step == t) for t in range(steps)] for seed in found]
    whole = all(sum(row) == len(seed) for row, seed in zip(counts, found, strict=True))
    if whole and steps > 1:
        words.append(f"every record took part within {steps} steps, in {len(found)} runs")
        log += sum(len(seed) for seed in found) * math.log1p(-((1 - rate) ** steps))
    if isinstance(rule, Poisson) and len({count for row in counts for count in row[:1]}) == 1:
        if whole and len({count for row in counts for count in row}) == 1:
            words.append(f"{counts[0][0]} of them for the first time in each")
            log = sum(_multinomial(row, rate) for row in counts)
        elif len(counts) > 1:
            words.append(f"{counts[0][0]} records took part in the first step of every run")
            log += sum(
                math.log(max(drawing.pmf(len(seed), rate, counts[0][0]), 1e-300)) for seed in found
            )
    chance = math.exp(log)
    if not words or chance > drawing.ODD:
        return []
    at = where.of_function(loop, drawing.DRAWS)
    return [drawing.shuffled(" and ".join(words), chance, rule, at, chance < drawing.SURE)]


def _multinomial(counts: Sequence[int], rate: float) -> float:
    """Log probability of so many first takings of part in each step, and none later."""
    log = math.lgamma(sum(counts) + 1)
    for step, count in enumerate(counts):
        each = math.log(rate) + step * math.log1p(-rate)
        log += count * each - math.lgamma(count + 1)
    return log


def _divided(found: list[list[Influence]], loop: Callable[..., Any]) -> list[Finding]:
    """A finding where a record's influence falls with the number of records drawn beside it."""
    drawn = [sum(1 for each in seed if each.step == 0) for seed in found]
    pairs = []
    for one in range(len(found)):
        for two in range(one + 1, len(found)):
            for a, b in zip(found[one], found[two], strict=True):
                if a.step == b.step == 0 and drawn[one] != drawn[two]:
                    pairs.append((a.norm / b.norm, drawn[two] / drawn[one]))
    if not pairs or not all(abs(got / wanted - 1) < 0.02 for got, wanted in pairs):
        return []
    got, wanted = pairs[0] if pairs[0][0] > 1 else (1 / pairs[0][0], 1 / pairs[0][1])
    return [
        Finding(
            "divisor",
            f"a record's influence is {got:.2f} times as large where {wanted:.2f} times fewer "
            "records were drawn with it",
            "the realised batch size is divided by: it is private under Poisson sampling, and the "
            "noise shrinks where the batch is large (arXiv:2605.15648)",
            where.of_function(loop, _DIVIDED),
            "divide by the public expected batch size, mechanism.batch_size",
            certain=len(pairs) > 1,
        )
    ]
