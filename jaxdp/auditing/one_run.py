"""The audit of one training run by its canaries (Steinke, Nasr and Jagielski 2023)."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.auditing import canaries, record_canaries
from jaxdp.auditing.audit import roc
from jaxdp.auditing.events import family_bound
from jaxdp.auditing.guessed import audit_guesses, audit_one_run, audit_one_run_family
from jaxdp.auditing.measures import Point, points
from jaxdp.auditing.scores import Audited
from jaxdp.optimizers.algorithm import Algorithm

ASSUMED = (
    "the canaries tell as much as that many independent runs, and nothing but the size of the "
    "noise can be wrong"
)
FAMILY = "nothing but the size of the noise can be wrong"
_FEW = 50  # candidates on either side, below which they are not taken as runs
_NUMBERS = 20_000_000  # random numbers for a ceiling
_RUNS = 9
_LOOKS = 0.1  # of the error. By simulation: a leak as charged loses 1 %, and faults are still found
WORDS = "gradients in one coordinate each, read off the noisy gradients of every step"
RECORDS = "records, their own gradients held against the noisy ones of every step"
LAST = "the sum of the noisy gradients alone", "the losses of the last iterate alone"


@dataclasses.dataclass(frozen=True, eq=False)
class RunAudit:
    """An audited run: the claimed, the proven and the audited epsilon.

    Attributes:
        steps: the steps of the run.
        canaries: the number of candidates, each put in by its own fair coin.
        delta: of every epsilon.
        confidence: of the audited number.
        claimed: (name, epsilon) of the paper's claim, where there is one.
        proven: the accountant's epsilon of the run's ledger; infinite where nothing is proven.
        audited: the lower bound.
        profile: the lower bound that assumes ``ASSUMED``; None where the algorithm is another, and
            of records, whose gradients share their directions.
        family: the lower bound that assumes ``FAMILY``; None where the algorithm is another.
        last: the lower bound from the sum of the noisy gradients alone, which assumes nothing; with
            plain SGD that sum is the last iterate. Of ``records`` from the losses at the end.
        reachable: the bound that ideal scores of the charged mechanism would give, about: the
            median of simulated audits. None where that takes too long.
        points: false-alarm and hit rates at fixed ranks, with intervals.
        event: what was charged.
        roc: float [k, 2], rates of false alarms and hits over the candidates, for a plot.
        records: the candidates are records for the run's own loss, not gradients.
    """

    steps: int
    canaries: int
    delta: float
    confidence: float
    claimed: tuple[str, float] | None
    proven: float
    audited: Audited
    profile: Audited | None
    family: Audited | None
    last: Audited
    reachable: float | None
    points: tuple[Point, ...]
    event: acc.Event
    roc: np.ndarray
    records: bool = False

    @property
    def broken(self) -> bool:
        """True if the proven guarantee is refuted at ``confidence``."""
        return self.audited.epsilon > self.proven

    @property
    def claim_refuted(self) -> bool:
        """True if the bound exceeds the paper's claim."""
        return self.claimed is not None and self.audited.epsilon > self.claimed[1]

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
                f"{self._share(self.audited)} of it with nothing assumed{self._at_most()}."
            )
            for found, what in (
                (self.family, f"Provided that {FAMILY}"),
                (self.profile, "Taken as that many independent runs"),
            ):
                if found is not None:
                    words += f" {what}, they reach {self._share(found)}."
        if self.claim_refuted:
            assert self.claimed is not None
            words += f" The claim of {self.claimed[0]}, epsilon {self.claimed[1]:.3g}, is refuted."
        return words

    def _share(self, found: Audited) -> str:
        return f"{found.epsilon / self.proven if self.proven else 1.0:.0%}"

    def _at_most(self) -> str:
        if self.reachable is None or not self.proven:
            return ""
        share = self.reachable / self.proven
        return (
            f", where {self.canaries:,} of them would show about {share:.0%} even if all of it "
            "leaked"
        )

    @property
    def ceiling(self) -> float:
        """The largest bound that so many candidates can prove: every coin guessed right."""
        coins = np.arange(self.canaries) % 2 == 0
        odds = np.where(coins, 50.0, -50.0)
        return _audited(odds, coins, self.delta, self.confidence).epsilon

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; infinity becomes the string "inf"."""
        return {
            "what": "this very run, once",
            "steps": self.steps,
            "runs": 1,
            "canaries": self.canaries,
            "delta": self.delta,
            "confidence": self.confidence,
            "claimed": None if self.claimed is None else self.claimed[1],
            "claim": None if self.claimed is None else self.claimed[0],
            "proven": self.proven if math.isfinite(self.proven) else "inf",
            "audited": self.audited.epsilon,
            "audited_profile": None if self.profile is None else self.profile.epsilon,
            "profile_assumes": None if self.profile is None else self.profile.assumes,
            "audited_family": None if self.family is None else self.family.epsilon,
            "family_assumes": None if self.family is None else FAMILY,
            "audited_last": self.last.epsilon,
            "last_of": LAST[self.records],
            "reachable": self.reachable,
            "all_right": self.ceiling,
            "points": [point.to_list() for point in self.points],
            "p_value": None,
            "broken": self.broken,
            "claim_refuted": self.claim_refuted,
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
) -> RunAudit:
    """A lower bound on epsilon from the canaries of one run, beside the claimed and the proven.

    Formal guarantee: that of ``jaxdp.auditing.audit_guesses`` and ``audit_one_run``, with 90 and
    10 % of the error, of the whole run, under adding or removing a record: the bound exceeds the
    true epsilon with probability at most 1 - ``confidence`` over the coins and the run. The scores
    are computed without the coins.

    Args:
        seen: float [steps, m], the noisy gradients at the candidates' coordinates, in units of one
            clipped record; of ``records`` [steps, 3 m], see ``record_canaries.parts``.
        coins: bool [m].
        algorithm: of the run, for its noise and sampling rate.
        event: what was charged.
        delta: of the epsilons.
        confidence: of the bound.
        claimed: (name, epsilon) of the paper's claim.
        records: the candidates are records, from ``jaxdp.auditing.record_canaries``.

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
    found, steps = kind.scores(seen, algorithm), len(seen)
    proven = acc.epsilon(event, delta).upper if acc.supports(event) else math.inf
    given = (algorithm, steps, found, coins, delta, confidence)
    inside, outside = found[coins], found[~coins]
    return RunAudit(
        steps,
        len(coins),
        delta,
        confidence,
        claimed,
        proven,
        _audited(found, coins, delta, confidence),
        None if records else _profile(*given),
        _family(*given),
        audit_guesses(kind.last_scores(seen, algorithm), coins, delta, confidence=confidence),
        reachable(algorithm, steps, len(coins), delta, confidence),
        points(inside, outside, confidence) if len(inside) and len(outside) else (),
        event,
        roc(inside, outside) if len(inside) and len(outside) else np.zeros((0, 2)),
        records,
    )


def _audited(found: np.ndarray, coins: np.ndarray, delta: float, confidence: float) -> Audited:
    """The better of weights, with most of the error, and looks: a fault's log odds mislead."""
    level = 1 - confidence
    weights = audit_guesses(found, coins, delta, confidence=1 - (1 - _LOOKS) * level)
    looks = audit_one_run(found, coins, delta, confidence=1 - _LOOKS * level)
    best = max((weights, looks), key=lambda each: each.epsilon)
    return dataclasses.replace(best, confidence=confidence)


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
        found.append(_audited(odds, coins, delta, confidence).epsilon)
    return float(np.median(found))


def _members(algorithm: Algorithm, steps: int) -> Callable[[float], acc.Event] | None:
    """From a noise multiplier to the event; None where the algorithm has no single one."""
    mechanism, noise = algorithm.mechanism, algorithm.mechanism.noise_multiplier
    if algorithm.energy is not None or mechanism.leak or not isinstance(noise, int | float):
        return None

    def family(z: float) -> acc.Event:
        tried = dataclasses.replace(mechanism, noise_multiplier=z, count_noise_multiplier=None)
        return tried.total(steps)

    return family


def _family(
    algorithm: Algorithm,
    steps: int,
    found: np.ndarray,
    coins: np.ndarray,
    delta: float,
    confidence: float,
) -> Audited | None:
    """The bound that assumes the charged kind of mechanism alone."""
    members, noise = _members(algorithm, steps), algorithm.mechanism.noise_multiplier
    if members is None or min(coins.sum(), (~coins).sum()) < _FEW:
        return None
    assert isinstance(noise, int | float)
    return audit_one_run_family(found, coins, members, noise, delta, confidence=confidence)


def _profile(
    algorithm: Algorithm,
    steps: int,
    found: np.ndarray,
    coins: np.ndarray,
    delta: float,
    confidence: float,
) -> Audited | None:
    """Every candidate as a run of its own; see ``jaxdp.auditing.events.family_bound``."""
    members, noise = _members(algorithm, steps), algorithm.mechanism.noise_multiplier
    if members is None or min(coins.sum(), (~coins).sum()) < _FEW:
        return None
    assert isinstance(noise, int | float)
    runs = family_bound(found[coins], found[~coins], members, noise, delta, confidence=confidence)
    return dataclasses.replace(runs, assumes=ASSUMED)
