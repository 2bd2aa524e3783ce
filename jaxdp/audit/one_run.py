"""The audit of one training run by its canaries (Steinke, Nasr and Jagielski 2023)."""

import dataclasses
import math
from functools import partial

import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.audit import canaries
from jaxdp.audit.algorithms import EpsilonAudit, noise_family
from jaxdp.audit.assumed import audit_one_run_family
from jaxdp.audit.guesses import audit_one_run
from jaxdp.audit.scores import family_bound, roc_curve, roc_points
from jaxdp.optimizers.algorithm import Algorithm

ASSUMED = (
    "the canaries tell as much as that many independent runs, and nothing but the size of the "
    "noise can be wrong"
)
FAMILY = "nothing but the size of the noise can be wrong"
_FEW = 50  # candidates on either side, below which they are not taken as runs
_NUMBERS = 20_000_000  # random numbers for a ceiling
_RUNS = 9
WORDS = "gradients in one coordinate each, read off the noisy gradients of every step"
RECORDS = "records, their own gradients held against the noisy ones of every step"
LAST = "the sum of the noisy gradients alone", "the losses of the last iterate alone"
ENDS = "records, by their losses before the first step and after the last"


def audit_canaries(
    seen: np.ndarray,
    coins: np.ndarray,
    algorithm: Algorithm,
    event: acc.Event,
    delta: float,
    *,
    confidence: float = 0.95,
    claimed: tuple[str, float] | None = None,
    records: bool = False,
    steps: int | None = None,
    seed: int | None = None,
) -> EpsilonAudit:
    """A lower bound on epsilon from the canaries of one run, beside the claimed and the proven.

    Formal guarantee: that of ``jaxdp.audit.audit_one_run`` with log odds, of the whole run,
    under adding or removing a record: the bound exceeds the true epsilon with probability at most
    1 - ``confidence`` over the coins and the run. The scores are computed without the coins.
    Of the last iterate alone it holds by the same proof: that is a part of what was released.

    Args:
        seen: float [steps, m], the noisy gradients at the candidates' coordinates, in units of one
            clipped record; of ``records`` [steps, 3 m], see ``canaries.split_parts``; with
            ``steps`` [2, m].
        coins: bool [m].
        algorithm: of the run, for its noise and sampling rate.
        event: what was charged.
        delta: of the epsilons.
        confidence: of the bound.
        claimed: (name, epsilon) of the paper's claim.
        records: the candidates are records, from such as ``jaxdp.audit.Canaries`` of records.
        steps: of a run whose last iterate alone is scored: the candidates are records, and ``seen``
            is their losses before the first step and after the last. Those whose loss fell most
            seem to have taken part; how far it falls is not compared with what was charged.
        seed: of the order among equal scores; None takes one from the operating system.

    Returns:
        The audit: claimed, proven and audited epsilon.

    Raises:
        ValueError: shapes that do not fit, or a number out of its range.
    """
    ends, count = steps is not None, np.size(coins)
    wide = canaries.PARTS if records and not ends else 1
    if (
        np.ndim(seen) != 2
        or not np.size(seen)
        or np.ndim(coins) != 1
        or np.shape(seen)[1] != wide * count
        or (ends and len(seen) != 2)
    ):
        raise ValueError(
            f"seen must be [{'2' if ends else 'steps'}, {'3 ' if wide > 1 else ''}m] for coins [m],"
            f" got {np.shape(seen)} and {np.shape(coins)}"
        )
    for name, value in (("delta", delta), ("confidence", confidence)):
        arguments.fraction(name, value)
    # What assumes nothing: from every step, from the end alone, and if all coins were guessed.
    audited = partial(audit_one_run, delta=delta, confidence=confidence, log_odds=not ends)
    last = None
    if steps is None:
        steps, odds = len(seen), canaries.log_odds(seen, algorithm, records=records)
        last = audited(canaries.last_log_odds(seen, algorithm, records=records), coins, seed=seed)
        words = RECORDS if records else WORDS
    else:
        records, odds, words = True, canaries.loss_falls(seen), ENDS
    right = np.arange(count) % 2 == 0
    ceiling = audited(np.where(right, 50.0, -50.0), right, seed=0)

    # What the charged kind of mechanism adds: canaries of one run, and each taken as a run.
    inside, outside = odds[coins], odds[~coins]
    both = bool(len(inside) and len(outside))
    family = profile = None
    kinds = noise_family(algorithm, steps)
    if kinds is not None and min(len(inside), len(outside)) >= _FEW:
        family = audit_one_run_family(odds, coins, *kinds, delta, confidence=confidence, seed=seed)
        family = dataclasses.replace(family, assumes=FAMILY)
        if not records:  # whose gradients share their directions
            runs = family_bound(inside, outside, *kinds, delta, confidence=confidence)
            profile = dataclasses.replace(runs, assumes=ASSUMED)

    # What ideal scores would show, of a run that leaks all that was charged: the median of a few
    # simulated audits in which nothing but the candidates and the noise is in the sums. Sampling
    # other than Poisson's is simulated as Poisson's of the same rate.
    ideal, size = [], max(1, steps * count)
    for number in range(int(np.clip(_NUMBERS // size, 1, _RUNS)) if size <= 10 * _NUMBERS else 0):
        tossed = np.random.default_rng([number, 1]).random(count) < 0.5
        rng = np.random.default_rng(number)
        drawn = (rng.random((steps, count)) < canaries.sampling_rate(algorithm)) & tossed
        noisy = drawn + canaries.noise_multipliers(algorithm, steps) * rng.standard_normal(
            drawn.shape
        )
        ideal.append(audited(canaries.log_odds(noisy, algorithm), tossed, seed=number).epsilon)

    found = audited(odds, coins, seed=seed)
    proven = acc.epsilon(event, delta).upper if acc.supports(event) else math.inf
    return EpsilonAudit(
        what="this very run, once",
        adversary=f"{count:,} canaries: {words}",
        steps=steps,
        runs=1,
        canaries=count,
        delta=delta,
        confidence=confidence,
        claim=claimed,
        proven=proven,
        audited=found,
        profile=profile,
        family=family,
        last=last,
        last_of=None if last is None else LAST[records],
        reachable=float(np.median(ideal)) if ideal else None,
        all_right=ceiling.epsilon,
        broken=found.epsilon > proven,
        points=roc_points(inside, outside, confidence) if both else [],
        event=event,
        roc=roc_curve(inside, outside) if both else np.zeros((0, 2)),
    )
