"""Findings on what single records do to a loop's releases: how much, how scaled, in which steps."""

import math
from typing import NamedTuple

import numpy as np

from jaxdp.audit.findings import Finding, line_in
from jaxdp.audit.noise import ADDED, law_in_words
from jaxdp.audit.residuals import SURE
from jaxdp.audit.runs import Runs

_SLACK = 0.98  # of the multiplier that is charged
_FAR = 0.5  # of it, where releases may be no sums plus noise
_AGAIN, _KNOWN = 0.2, 0.05  # of an influence that comes back; the error of an autoregression


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


def influences(runs: Runs) -> list[list[Influence]]:
    """For each seed that of every record: all releases before were equal, so it alone did it."""
    tests = _tests(runs)
    found: list[list[Influence]] = []
    for base, changed in zip(runs.base, runs.changed, strict=True):
        rounding = 1e-6 * np.linalg.norm(base, axis=1) + 1e-9 * runs.noise.size
        found.append([])
        for other in changed:
            norms = np.linalg.norm(other - base, axis=1)
            at = np.flatnonzero(~(norms <= rounding))  # what is not finite has changed, too
            if not len(at):
                found[-1].append(Influence(-1, 0.0, math.inf))
                continue
            step = int(at[0])
            bound = runs.noise.multiplier(other[step] - base[step], runs.levels[step], tests)
            share = bound / max(runs.charged_at(step), 1e-300)
            found[-1].append(Influence(step, float(norms[step]), share))
    return found


def _tests(runs: Runs) -> int:
    return len(runs.base) * len(runs.changed[0]) + len(runs.bad)


def of_size(runs: Runs, found: list[list[Influence]]) -> Finding | None:
    """Finds a record, or one that is not finite, that moves a release beyond its noise."""
    noise, charged = runs.noise, runs.charged_at(0)
    if not noise.size or charged == 0:
        return None
    worst = min((each for seed in found for each in seed), key=lambda each: each.share)
    if worst.share < _SLACK:
        return Finding(
            "sensitivity",
            f"the noise multiplier is at most {worst.share * charged:.3g}, and {charged:.3g} "
            f"is charged: one record moves a release by {worst.norm:.3g}, its noise has "
            f"standard deviation {noise.size:.3g}",
            "noise must be the multiplier times what one record can move, in the same scale: "
            "on a sum of gradients clipped one by one, before the division by the batch size",
            line_in(runs.loop, ADDED),
            "clip every example's gradient, sum, add noise_multiplier * clip_norm, then divide "
            "by the expected batch size (jaxdp.clipped_grad and mechanism.privatize do)",
            # What is no sum plus noise, such as Adam's updates, has no sensitivity in this
            # sense; where dropout moves the sums from run to run, it has.
            certain=noise.additive or (worst.share < _FAR and not law_in_words(runs)),
        )
    bounds = [noise.multiplier(change, runs.levels[0], _tests(runs)) for change in runs.bad]
    if min(bounds, default=math.inf) >= _SLACK * charged:
        return None
    return Finding(
        "sensitivity",
        f"one record of NaN changes a release by {np.max(np.linalg.norm(runs.bad, axis=1)):.3g}"
        f", as if the noise multiplier were {min(bounds):.3g}; {charged:.3g} is charged",
        "a batch that is skipped, or loses its noise, because one gradient was not finite "
        "shows that record",
        line_in(runs.loop, r"isfinite|isnan|nan_to_num|continue"),
        "let the gradient that is not finite count as zero, example by example, before the "
        "sum; keep the others and the noise",
    )


def of_divisor(runs: Runs, found: list[list[Influence]], certain: bool) -> Finding | None:
    """Finds an influence of a record that falls with the number of records drawn beside it.

    Args:
        runs: of the loop.
        found: its influences.
        certain: True if one pair of runs is enough.
    """
    drawn = [sum(1 for each in seed if each.step == 0) for seed in found]
    pairs = [
        (a.norm / b.norm, drawn[two] / drawn[one])
        for two in range(len(found))
        for one in range(two)
        for a, b in zip(found[one], found[two], strict=True)
        if a.step == b.step == 0 and drawn[one] != drawn[two]
    ]
    if not pairs or not all(abs(got / wanted - 1) < 0.02 for got, wanted in pairs):
        return None
    got, wanted = pairs[0] if pairs[0][0] > 1 else (1 / pairs[0][0], 1 / pairs[0][1])
    return Finding(
        "divisor",
        f"a record's influence is {got:.2f} times as large where {wanted:.2f} times fewer "
        "records were drawn with it",
        "the realised batch size is divided by: it is private under Poisson sampling, and the "
        "noise shrinks where the batch is large (arXiv:2605.15648)",
        line_in(
            runs.loop,
            r"/ *(len\(|\w*\.shape|\w*count|\w*size|\w*\.sum|\w*mask)|\.mean\(|maximum\(",
        ),
        "divide by the public expected batch size, mechanism.batch_size",
        certain=certain or len(pairs) > 1,
    )


def of_memory(runs: Runs) -> Finding | None:
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
    (apart, first), noised = runs.differences, np.flatnonzero(noise.noised)
    steps = apart.shape[1]
    kept, errors = _autoregression(runs.few[0][:, :, noised] / noise.std[noised], first)
    if not len(kept):
        return None
    kept = 0 * kept if correlated else kept  # noise takes back what it added, sums do not
    hits, trials = 0, 0
    for change, at in zip(apart[:, :, noised], first, strict=True):
        along = change @ change[at] / float(change[at] @ change[at]) if at + 1 < steps else change
        for step in range(at + 1, steps):
            past = along[max(0, step - len(kept)) : step][::-1]
            new = along[step] - past @ kept[: len(past)]
            hits += bool(new > _AGAIN + 4 * np.abs(past) @ errors[: len(past)])
            trials += 1
    seen, fresh = int(np.sum(first < steps)), int(np.sum(np.minimum(first + 1, steps)))
    if not trials or hits * fresh <= seen * trials:
        return None
    rates, evidence = np.linspace(0.001, 0.999, 999), np.zeros(999)
    for got, of in ((seen, fresh), (hits, trials)):
        mean = math.lgamma(got + 1) + math.lgamma(of - got + 1) - math.lgamma(of + 2)
        evidence += mean - got * np.log(rates) - (of - got) * np.log1p(-rates)
    if float(np.min(evidence)) < -math.log(SURE):
        return None
    return Finding(
        "sensitivity",
        f"what a record did to a release comes back in {hits} of {trials} later ones; it was "
        f"first drawn in {seen} of {fresh}",
        "an un-noised sum is kept, such as by momentum before the noise: a record then has "
        "influence on every later release, and is charged for those that it was drawn for",
        line_in(runs.loop, r"momentum|trace|beta|decay|\* *0?\.9|ema"),
        "keep averages of noisy sums only: add the noise first, the optimizer comes after",
        certain=not correlated,  # momentum of noisy sums would look the same
    )


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
