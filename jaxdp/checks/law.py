"""Judges what the records of a loop do to its releases: by how much, in which steps, how scaled."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxdp.checks import drawing, where
from jaxdp.checks.findings import Finding
from jaxdp.checks.noise import (
    ADDED,
    SURE,
    Noise,
    charged_at,
    divergence,
    law_in_words,
)
from jaxdp.mechanism import Mechanism
from jaxdp.sampling import FixedSize, Poisson

if TYPE_CHECKING:
    from jaxdp.checks.loop import Runs

_NOT_FINITE = r"isfinite|isnan|nan_to_num|continue"
_BEFORE = r"momentum|trace|beta|decay|\* *0?\.9|ema"
_DIVIDED = r"/ *(len\(|\w*\.shape|\w*count|\w*size|\w*\.sum|\w*mask)|\.mean\(|maximum\("
_FITTED = r"\.(mean|std|var|median|quantile|max|min|fit)\w*\("
_SLACK = 0.98  # of the multiplier that is charged
_FAR = 0.5  # of it, where releases may be no sums plus noise
_AGAIN, _KNOWN = 0.2, 0.05  # of an influence that comes back; an error of what is handed on


class Influence(NamedTuple):
    """The change that one record made in one run.

    Attributes:
        step: the first release that it changed; -1 for none.
        norm: by how much.
        share: a bound on the noise multiplier of that release, over what is charged; inf for none.
    """

    step: int
    norm: float
    share: float


def of_influence(
    runs: "Runs",
    noise: Noise,
    level: np.ndarray,
    mechanism: Mechanism,
    loop: Callable[..., Any],
) -> list[Finding]:
    """Findings on what single records change: by how much, in which steps, how scaled."""
    tests = len(runs.base) * runs.count + len(runs.bad)
    found = [
        [_first(base, other, noise, level, mechanism, tests) for other in changed]
        for base, changed in zip(runs.base, runs.changed, strict=True)
    ]
    everywhere = _all_at_once(found, mechanism, loop)
    sampled = [] if everywhere else _law_of_draws(found, mechanism, loop)
    large, divided = _too_large(found, noise, mechanism, loop), _divided(found, loop)
    alike = bool(len(noise.taken)) and not len(counts(noise))
    if alike and not large:
        divided = [dataclasses.replace(each, certain=True) for each in divided]
    if not sampled:
        alike = alike and not large and not divided
        sampled = _law_of_counts(runs, noise, mechanism, alike, loop)
    return [
        *everywhere,
        *(large or _not_finite(runs, noise, level, mechanism, tests, loop)),
        *sampled,
        *divided,
        *_again(runs, noise, mechanism, loop),
    ]


def _first(
    base: np.ndarray,
    other: np.ndarray,
    noise: Noise,
    level: np.ndarray,
    mechanism: Mechanism,
    tests: int,
) -> Influence:
    """The first release that a record changed: all before were equal, so it alone did."""
    norms = np.linalg.norm(other - base, axis=1)
    rounding = 1e-6 * np.linalg.norm(base, axis=1) + 1e-9 * noise.size
    at = np.flatnonzero(~(norms <= rounding))  # what is not finite has changed, too
    if not len(at):
        return Influence(-1, 0.0, math.inf)
    step = int(at[0])
    share = noise.multiplier(other[step] - base[step], level[step], tests)
    return Influence(step, float(norms[step]), share / max(charged_at(mechanism, step), 1e-300))


def _too_large(
    found: list[list[Influence]], noise: Noise, mechanism: Mechanism, loop: Callable[..., Any]
) -> list[Finding]:
    charged = charged_at(mechanism, 0)
    worst = min((each for seed in found for each in seed), key=lambda each: each.share)
    if not noise.size or charged == 0 or worst.share >= _SLACK:
        return []
    return [
        Finding(
            "sensitivity",
            f"the noise multiplier is at most {worst.share * charged:.3g}, and {charged:.3g} is "
            f"charged: one record moves a release by {worst.norm:.3g}, its noise has standard "
            f"deviation {noise.size:.3g}",
            "noise must be the multiplier times what one record can move, in the same scale: on a "
            "sum of gradients clipped one by one, before the division by the batch size",
            where.of_function(loop, ADDED),
            "clip every example's gradient, sum, add noise_multiplier * clip_norm, then divide by "
            "the expected batch size (jaxdp.clipped_grad and mechanism.privatize do)",
            # What is no sum plus noise, such as Adam's updates, has no sensitivity in this sense;
            # where dropout moves the sums from run to run, it has.
            certain=noise.additive or (worst.share < _FAR and not law_in_words(noise)),
        )
    ]


def _not_finite(
    runs: "Runs",
    noise: Noise,
    level: np.ndarray,
    mechanism: Mechanism,
    tests: int,
    loop: Callable[..., Any],
) -> list[Finding]:
    """A finding where a record that is not finite takes the others' gradients with it."""
    charged = charged_at(mechanism, 0)
    bounds = [noise.multiplier(change, level[0], tests) for change in runs.bad]
    if not noise.size or not bounds or charged == 0 or min(bounds) >= _SLACK * charged:
        return []
    return [
        Finding(
            "sensitivity",
            f"one record of NaN changes a release by {np.max(np.linalg.norm(runs.bad, axis=1)):.3g}"
            f", as if the noise multiplier were {min(bounds):.3g}; {charged:.3g} is charged",
            "a batch that is skipped, or loses its noise, because one gradient was not finite "
            "shows that record",
            where.of_function(loop, _NOT_FINITE),
            "let the gradient that is not finite count as zero, example by example, before the "
            "sum; keep the others and the noise",
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


def counts(noise: Noise) -> np.ndarray:
    """int [S], the number of copies drawn in each first step; empty where it cannot be told.

    Multiples of it are known: the unit is the least distance of two of them.
    """
    if not len(noise.taken):
        return np.zeros(0, np.int64)
    slip = 1e-3 * float(np.max(np.abs(noise.taken)))
    seen = np.sort(np.abs(noise.taken))
    seen = seen[np.append(True, np.diff(seen) > slip)]
    if np.sum(seen > slip) < 2:
        return np.zeros(0, np.int64)  # all alike, such as a full batch, or a realised divisor
    found = np.abs(noise.taken) / float(np.min(np.diff(seen)))
    whole = np.round(found)
    return np.zeros(0, np.int64) if np.max(np.abs(found - whole)) > 0.05 else whole.astype(np.int64)


def _law_of_counts(
    runs: "Runs", noise: Noise, mechanism: Mechanism, alike: bool, loop: Callable[..., Any]
) -> list[Finding]:
    """A finding where the numbers drawn first, run by run, are improbable under Poisson sampling.

    Never below b, and never above b, each has the probability P^S in S runs. SURE is shared: an
    eighth each for b = 1 and 2, a quarter for all other b, a quarter for one number in all runs, a
    quarter for a rate above the one charged (Chernoff: exp(-S n KL)).

    Args:
        runs: all runs.
        noise: with the numbers drawn first, up to a factor.
        mechanism: what is charged.
        alike: True if the first release moves by one and the same, or not at all, in all runs.
        loop: for the line.
    """
    drawn, rate, count = counts(noise), _rate(mechanism), runs.count
    if not isinstance(mechanism.sampling, Poisson) or rate >= 1:
        return []
    law = np.array([drawing.pmf(count, rate, hits) for hits in range(count + 1)])
    trials = len(runs.first[0])
    tests = [(math.inf, "")]
    if len(drawn):
        low, high, mean = int(drawn.min()), int(drawn.max()), float(drawn.mean()) / count
        share = 8 if low in (1, 2) else 8 * count
        words = f"{low} or more records were drawn in each of {trials} first steps"
        tests.append((share * float(law[low:].sum()) ** trials, words))
        words = f"at most {high} records were drawn in each of {trials} first steps"
        tests.append((8 * count * float(law[: high + 1].sum()) ** trials, words))
        if rate < mean <= 1:
            words = f"{mean:.1%} of the records were drawn in {trials} first steps"
            tests.append((4 * math.exp(-trials * count * divergence(mean, rate)), words))
    elif alike:
        words = f"as many records, or none, were drawn in each of {trials} first steps"
        tests.append((4 * float(law[0] + law[1:].max()) ** trials, words))
    chance, words = min(tests)
    if chance > SURE:
        return []
    at = where.of_function(loop, drawing.DRAWS + r"|random\(|bernoulli|binomial|while |poisson")
    return [drawing.shuffled(words, chance, mechanism.sampling, at, True)]


def _again(
    runs: "Runs", noise: Noise, mechanism: Mechanism, loop: Callable[..., Any]
) -> list[Finding]:
    """A finding where what a record did comes back in steps that it was not drawn for.

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
    if not runs.alone or not noise.additive or not noise.size:
        return []
    apart, first = runs.differences(noise)
    steps = apart.shape[1]
    rows = np.stack(runs.few[0])
    noised = np.flatnonzero(noise.noised)
    kept, errors = _handed_on(rows[:, :, noised] / noise.std[noised], first)
    if not len(kept):
        return []
    if mechanism.strategy is not None:
        kept = 0 * kept  # noise takes back what it added, sums do not
    hits, trials = 0, 0
    for change, at in zip(apart[:, :, noised], first, strict=True):
        if at + 1 >= steps:
            continue
        along = change @ change[at] / float(change[at] @ change[at])
        for step in range(at + 1, steps):
            past = along[max(0, step - len(kept)) : step][::-1]
            new = along[step] - past @ kept[: len(past)]
            hits += bool(new > _AGAIN + 4 * np.abs(past) @ errors[: len(past)])
            trials += 1
    seen = int(np.sum(first < steps))
    fresh = int(np.sum(np.minimum(first + 1, steps)))
    if not trials or hits * fresh <= seen * trials:
        return []
    rates = np.linspace(0.001, 0.999, 999)
    evidence = _mixture(seen, fresh, rates) + _mixture(hits, trials, rates)
    if float(np.min(evidence)) < -math.log(SURE):
        return []
    return [
        Finding(
            "sensitivity",
            f"what a record did to a release comes back in {hits} of {trials} later ones; it was "
            f"first drawn in {seen} of {fresh}",
            "an un-noised sum is kept, such as by momentum before the noise: a record then has "
            "influence on every later release, and is charged for those that it was drawn for",
            where.of_function(loop, _BEFORE),
            "keep averages of noisy sums only: add the noise first, the optimizer comes after",
            certain=mechanism.strategy is None,  # momentum of noisy sums would look the same
        )
    ]


def _handed_on(rows: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(c [lags], their standard errors): the regression of a step's noise on those before it.

    Least squares over all coordinates and steps of the runs in which nobody was drawn so far; as
    many lags, up to four, as have errors below a tenth; none where no such run has two steps.
    """
    steps = rows.shape[1]
    for lags in range(min(4, steps - 1), 0, -1):
        past, now, freedom = [], [], -lags
        for step in range(1, steps):
            quiet = rows[first > step]
            if len(quiet) < 2:
                continue
            quiet = quiet - quiet.mean(0)
            some = [
                quiet[:, step - n] if n <= step else 0 * quiet[:, 0] for n in range(1, lags + 1)
            ]
            past.append(np.stack([each.ravel() for each in some], axis=1))
            now.append(quiet[:, step].ravel())
            freedom += (len(quiet) - 1) * rows.shape[2]
        if freedom < 1:
            return np.zeros(0), np.zeros(0)
        x, y = np.concatenate(past), np.concatenate(now)
        inverse = np.linalg.pinv(x.T @ x)
        found = inverse @ (x.T @ y)
        errors = np.sqrt(np.diag(inverse) * float(np.sum((y - x @ found) ** 2)) / freedom)
        if np.all((errors > 0) & (errors < _KNOWN)):
            return found, errors
    return np.zeros(0), np.zeros(0)


def _mixture(hits: int, trials: int, rates: np.ndarray) -> np.ndarray:
    """Log of the likelihood of all rates, in the mean, over that of each of ``rates``."""
    misses = trials - hits
    mean = math.lgamma(hits + 1) + math.lgamma(misses + 1) - math.lgamma(trials + 2)
    return np.asarray(mean - hits * np.log(rates) - misses * np.log1p(-rates))


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
