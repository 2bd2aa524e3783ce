"""The audit of one training run by its canaries (Steinke, Nasr and Jagielski 2023)."""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxdp import _validate
from jaxdp import accounting as acc
from jaxdp.auditing import canaries
from jaxdp.auditing.audit import roc
from jaxdp.auditing.events import family_bound
from jaxdp.auditing.scores import Audited, audit_one_run
from jaxdp.optimizers.algorithm import Algorithm

ASSUMED = (
    "the candidates are as many independent runs of the mechanism, but for the size of the noise"
)
_FEW = 50  # candidates on either side, below which they are not taken as runs
WORDS = "gradients in one coordinate each, read off the noisy gradients of every step"


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
        profile: the lower bound that assumes ``ASSUMED``; None where the algorithm is another.
        event: what was charged.
        roc: float [k, 2], rates of false alarms and hits over the candidates, for a plot.
    """

    steps: int
    canaries: int
    delta: float
    confidence: float
    claimed: tuple[str, float] | None
    proven: float
    audited: Audited
    profile: Audited | None
    event: acc.Event
    roc: np.ndarray

    @property
    def broken(self) -> bool:
        """True if the proven guarantee is refuted at ``confidence``."""
        return self.audited.epsilon > self.proven

    @property
    def claim_refuted(self) -> bool:
        """True if the bound exceeds the paper's claim."""
        return self.claimed is not None and self.audited.epsilon > self.claimed[1]

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
                f"{self._share(self.audited)} of it, where guessing all of them right would prove "
                f"{self.ceiling:.1f}."
            )
            if self.profile is not None:
                words += (
                    f" Taken as so many independent runs, they reach {self._share(self.profile)}."
                )
        if self.claim_refuted:
            assert self.claimed is not None
            words += f" The claim of {self.claimed[0]}, epsilon {self.claimed[1]:.3g}, is refuted."
        return words

    def _share(self, found: Audited) -> str:
        return f"{found.epsilon / self.proven if self.proven else 1.0:.0%}"

    @property
    def ceiling(self) -> float:
        """The largest bound that so many candidates can prove: every coin guessed right."""
        coins = np.arange(self.canaries) % 2 == 0
        best = audit_one_run(coins.astype(float), coins, self.delta, confidence=self.confidence)
        return best.epsilon

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
            "p_value": None,
            "broken": self.broken,
            "claim_refuted": self.claim_refuted,
            "adversary": f"{self.canaries:,} candidates: {WORDS}",
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
) -> RunAudit:
    """A lower bound on epsilon from the canaries of one run, beside the claimed and the proven.

    Formal guarantee: that of ``jaxdp.auditing.scores.audit_one_run``, of the whole run, under
    adding or removing a record: the bound exceeds the true epsilon with probability at most
    1 - ``confidence`` over the coins and the run. The scores are computed without the coins.

    Args:
        seen: float [steps, m], the noisy gradients at the candidates' coordinates, in units of one
            clipped record.
        coins: bool [m].
        algorithm: of the run, for its noise and sampling rate.
        event: what was charged.
        delta: of the epsilons.
        confidence: of the bound.
        claimed: (name, epsilon) of the paper's claim.

    Returns:
        The audit: claimed, proven and audited epsilon.

    Raises:
        ValueError: shapes that do not fit, or a number out of its range.
    """
    if np.ndim(seen) != 2 or not np.size(seen) or np.shape(seen)[1:] != np.shape(coins):
        raise ValueError(
            f"seen must be [steps, m] for coins [m], got {np.shape(seen)} and {np.shape(coins)}"
        )
    for name, value in (("delta", delta), ("confidence", confidence)):
        _validate.fraction(name, value)
    found = canaries.scores(seen, algorithm)
    audited = audit_one_run(found, coins, delta, confidence=confidence)
    proven = acc.epsilon(event, delta).upper if acc.supports(event) else math.inf
    profile = _profile(algorithm, len(seen), found[coins], found[~coins], delta, confidence)
    return RunAudit(
        len(seen),
        len(coins),
        delta,
        confidence,
        claimed,
        proven,
        audited,
        profile,
        event,
        roc(found[coins], found[~coins]),
    )


def _profile(
    algorithm: Algorithm,
    steps: int,
    inside: np.ndarray,
    outside: np.ndarray,
    delta: float,
    confidence: float,
) -> Audited | None:
    """Every candidate as a run of its own; see ``jaxdp.auditing.events.family_bound``."""
    mechanism, noise = algorithm.mechanism, algorithm.mechanism.noise_multiplier
    if algorithm.energy is not None or mechanism.leak or not isinstance(noise, int | float):
        return None
    if min(len(inside), len(outside)) < _FEW:
        return None

    def family(z: float) -> acc.Event:
        tried = dataclasses.replace(mechanism, noise_multiplier=z, count_noise_multiplier=None)
        return tried.total(steps)

    found = family_bound(inside, outside, family, noise, delta, confidence=confidence)
    return dataclasses.replace(found, assumes=ASSUMED)
