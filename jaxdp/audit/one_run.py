"""The audit of one training run by its canaries (Steinke, Nasr and Jagielski 2023)."""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.audit import canaries, record_canaries
from jaxdp.audit.algorithms import EpsilonAudit, members, roc
from jaxdp.audit.assumed import audit_one_run_family
from jaxdp.audit.events import family_bound
from jaxdp.audit.guesses import audit_one_run
from jaxdp.audit.measures import points
from jaxdp.audit.scores import Audited
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


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RunAudit(EpsilonAudit):
    """An audited run; its ``profile`` assumes ``ASSUMED``.

    Attributes:
        canaries: the number of candidates, each put in by its own fair coin.
        family: the lower bound that assumes ``FAMILY``; None where the algorithm is another.
        last: the lower bound from the sum of the noisy gradients alone, which assumes nothing; with
            plain SGD that sum is the last iterate. Of ``records`` from the losses at the end.
        records: the candidates are records for the run's own loss, not gradients.
    """

    canaries: int
    family: Audited | None
    last: Audited
    records: bool = False

    @property
    def broken(self) -> bool:
        """True if the proven guarantee is refuted at ``confidence``."""
        return self.audited.epsilon > self.proven

    def __str__(self) -> str:
        return self.in_words()

    def in_words(self) -> str:
        """The verdict in a sentence or two."""
        if self.broken:
            words = (
                f"BROKEN: at {self.confidence:.0%} confidence this run did not keep the proven "
                "guarantee."
            )
        elif math.isinf(self.proven):
            words = f"Nothing is proven, and the canaries show {self.audited}."
        else:
            words = (
                "Nothing contradicts the proven guarantee; the canaries reach "
                f"{self.share(self.audited.epsilon)} of it with nothing assumed"
            )
            if self.reachable is not None and self.proven:
                words += (
                    f", where {self.canaries:,} of them would show about "
                    f"{self.share(self.reachable)} even if all of it leaked"
                )
            words += "."
            for found, what in (
                (self.family, f"Provided that {FAMILY}"),
                (self.profile, "Taken as that many independent runs"),
            ):
                if found is not None:
                    words += f" {what}, they reach {self.share(found.epsilon)}."
        return words + self.claim_in_words()

    @property
    def ceiling(self) -> float:
        """The largest bound that so many candidates can prove: every coin guessed right."""
        coins = np.arange(self.canaries) % 2 == 0
        odds = np.where(coins, 50.0, -50.0)
        confidence = self.confidence
        return audit_one_run(
            odds, coins, self.delta, confidence=confidence, log_odds=True, seed=0
        ).epsilon

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; infinity becomes the string "inf"."""
        return {
            **self.numbers(),
            "what": "this very run, once",
            "runs": 1,
            "canaries": self.canaries,
            "audited_family": None if self.family is None else self.family.epsilon,
            "family_assumes": None if self.family is None else FAMILY,
            "audited_last": self.last.epsilon,
            "last_of": LAST[self.records],
            "all_right": self.ceiling,
            "p_value": None,
            "broken": self.broken,
            "adversary": f"{self.canaries:,} canaries: {RECORDS if self.records else WORDS}",
            "verdict": self.in_words(),
        }


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
    seed: int | None = None,
) -> RunAudit:
    """A lower bound on epsilon from the canaries of one run, beside the claimed and the proven.

    Formal guarantee: that of ``jaxdp.audit.audit_one_run`` with log odds, of the whole run,
    under adding or removing a record: the bound exceeds the true epsilon with probability at most
    1 - ``confidence`` over the coins and the run. The scores are computed without the coins.

    Args:
        seen: float [steps, m], the noisy gradients at the candidates' coordinates, in units of one
            clipped record; of ``records`` [steps, 3 m], see ``record_canaries.parts``.
        coins: bool [m].
        algorithm: of the run, for its noise and sampling rate.
        event: what was charged.
        delta: of the epsilons.
        confidence: of the bound.
        claimed: (name, epsilon) of the paper's claim.
        records: the candidates are records, from ``jaxdp.audit.record_canaries``.
        seed: of the order among equal scores; None takes one from the operating system.

    Returns:
        The audit: claimed, proven and audited epsilon.

    Raises:
        ValueError: shapes that do not fit, or a number out of its range.
    """
    kind, wide = (record_canaries, record_canaries.PARTS) if records else (canaries, 1)
    if (
        np.ndim(seen) != 2
        or not np.size(seen)
        or np.ndim(coins) != 1
        or np.shape(seen)[1] != wide * np.size(coins)
    ):
        raise ValueError(
            f"seen must be [steps, {'' if wide == 1 else '3 '}m] for coins [m], got "
            f"{np.shape(seen)} and {np.shape(coins)}"
        )
    for name, value in (("delta", delta), ("confidence", confidence)):
        arguments.fraction(name, value)
    found, steps, count = kind.scores(seen, algorithm), len(seen), len(coins)
    proven = acc.epsilon(event, delta).upper if acc.supports(event) else math.inf
    inside, outside = found[coins], found[~coins]
    both = bool(len(inside) and len(outside))

    # What the charged kind of mechanism adds: canaries of one run, and each taken as a run.
    family = profile = None
    kinds, noise = members(algorithm, steps), algorithm.mechanism.noise_multiplier
    if kinds is not None and min(len(inside), len(outside)) >= _FEW:
        assert isinstance(noise, int | float)
        family = audit_one_run_family(
            found, coins, kinds, noise, delta, confidence=confidence, seed=seed
        )
        if not records:  # whose gradients share their directions
            runs = family_bound(inside, outside, kinds, noise, delta, confidence=confidence)
            profile = dataclasses.replace(runs, assumes=ASSUMED)

    audited, last = (
        audit_one_run(odds, coins, delta, confidence=confidence, log_odds=True, seed=seed)
        for odds in (found, kind.last_scores(seen, algorithm))
    )
    return RunAudit(
        steps=steps,
        canaries=count,
        delta=delta,
        confidence=confidence,
        claimed=None if claimed is None else claimed[1],
        claim=None if claimed is None else claimed[0],
        proven=proven,
        audited=audited,
        profile=profile,
        family=family,
        last=last,
        reachable=reachable(algorithm, steps, count, delta, confidence),
        points=points(inside, outside, confidence) if both else [],
        event=event,
        roc=roc(inside, outside) if both else np.zeros((0, 2)),
        records=records,
    )


def reachable(
    algorithm: Algorithm, steps: int, count: int, delta: float, confidence: float = 0.95
) -> float | None:
    """About the bound that so many candidates give of a run that leaks all that was charged.

    The median of up to nine simulated audits in which nothing but the candidates and the noise is
    in the sums; None where one would take more than ten times 20 million random numbers. Sampling
    other than Poisson's is simulated as Poisson's of the same rate.

    Args:
        algorithm: of the run.
        steps: of the run.
        count: m, of the candidates.
        delta: of the bound.
        confidence: of the bound.
    """
    size, found = max(1, steps * count), []
    if size > 10 * _NUMBERS:
        return None
    for seed in range(int(np.clip(_NUMBERS // size, 1, _RUNS))):
        coins = np.random.default_rng([seed, 1]).random(count) < 0.5
        odds = canaries.scores(canaries.simulated(coins, steps, algorithm, seed), algorithm)
        simulated = audit_one_run(
            odds, coins, delta, confidence=confidence, log_odds=True, seed=seed
        )
        found.append(simulated.epsilon)
    return float(np.median(found))
