"""The audit of an algorithm: claimed, proven and audited epsilon side by side."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.audit import adversaries, bounds
from jaxdp.audit.adversaries import LOG_RATIO, Canary, canary_score, tiny_network
from jaxdp.audit.bounds import ErrorCounts
from jaxdp.audit.events import Verdict, audit_event, family_bound, tradeoff_of
from jaxdp.audit.measures import points
from jaxdp.audit.residuals import RUNS, ResidualVerdict, audit_noise
from jaxdp.audit.scores import Audited, audit_scores
from jaxdp.audit.worlds import Energy, Worlds, training_run, two_worlds
from jaxdp.clipping.rules import CoordinateBox
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.optimizers.energy import OpenEnergy, PublicEnergy
from jaxdp.sampling import FixedOrder, FullBatch

HELD_OUT = 0.2
TINY = "the same mechanism on a tiny network"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class EpsilonAudit:
    """An audit: the claimed, the proven and the audited epsilon.

    Attributes:
        steps: the steps of every run.
        delta: of every epsilon.
        confidence: of the audited numbers, each by itself.
        claimed: the epsilon that the paper claims, where there is a claim.
        claim: its name.
        proven: the accountant's epsilon; infinite where nothing is proven.
        audited: the lower bound that assumes nothing.
        profile: a lower bound that assumes the mechanism's kind, where it has one.
        reachable: about the bound that ideal scores of what was charged would give; None where
            nothing is proven, or where finding it takes too long.
        points: false-alarm and hit rates at fixed ranks, see ``jaxdp.audit.measures.points``.
        event: what is charged.
        roc: float [k, 2], rates of false alarms and hits of the scores, for a plot.
    """

    steps: int
    delta: float
    confidence: float
    claimed: float | None = None
    claim: str | None = None
    proven: float
    audited: Audited
    profile: Audited | None = None
    reachable: float | None = None
    points: list[list[float]] = dataclasses.field(default_factory=list)
    event: acc.Event
    roc: np.ndarray

    @property
    def claim_refuted(self) -> bool:
        """True if the assumption-free bound exceeds the paper's claim."""
        return self.claimed is not None and self.audited.epsilon > self.claimed

    def share(self, epsilon: float) -> str:
        """The share of the proven epsilon, in per cent."""
        return f"{epsilon / self.proven if self.proven else 1.0:.0%}"

    def claim_in_words(self) -> str:
        """A sentence on a claim that is refuted, after a space; else nothing."""
        if not self.claim_refuted:
            return ""
        return f" The claim of {self.claim}, epsilon {self.claimed:.3g}, is refuted."

    def numbers(self) -> dict[str, Any]:
        """The numbers of every audit, JSON-ready; infinity becomes the string "inf"."""
        return {
            "steps": self.steps,
            "delta": self.delta,
            "confidence": self.confidence,
            "claimed": self.claimed,
            "claim": self.claim,
            "proven": self.proven if math.isfinite(self.proven) else "inf",
            "audited": self.audited.epsilon,
            "audited_profile": None if self.profile is None else self.profile.epsilon,
            "profile_assumes": None if self.profile is None else self.profile.assumes,
            "reachable": self.reachable,
            "points": self.points,
            "claim_refuted": self.claim_refuted,
        }


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class AlgorithmAudit(EpsilonAudit):
    """An audited algorithm.

    Attributes:
        runs: the number of runs in each world.
        verdict: the test of the charged event against the runs; None where nothing is proven.
        adversary: the adversary, in words.
        noise: the verdict on the residuals; None where it was not asked for, and for an algorithm
            that adds no noise or names a leak.
        what: what was attacked, in words.
    """

    runs: int
    verdict: Verdict | None
    adversary: str
    noise: ResidualVerdict | None = None
    what: str = TINY

    @property
    def broken(self) -> bool:
        """True if the charged event is refuted at ``confidence``, by the one test of the event."""
        return bool(self.verdict and self.verdict.refuted)

    def in_words(self) -> str:
        """The verdict in a sentence or two."""
        if self.broken:
            words = "BROKEN: the runs cannot come from a mechanism that keeps the proven guarantee."
        elif self.audited.epsilon > self.proven:
            words = (
                "The audited number exceeds the proven one, but the test of the whole event does "
                "not refute it: audit again, with more runs."
            )
        elif math.isinf(self.proven):
            words = f"Nothing is proven, and the attack shows {self.audited}."
        else:
            words = (
                "Nothing contradicts the proven guarantee; the attack reaches "
                f"{self.share(self.audited.epsilon)} of it with nothing assumed."
            )
            if self.profile is not None:
                share = self.share(self.profile.epsilon)
                words += f" Provided that {self.profile.assumes}, it reaches {share}."
        words += self.claim_in_words()
        if self.noise is not None and self.noise.refuted:
            words += " BROKEN: the noise is not what was charged."
        return words

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; infinity becomes the string "inf"."""
        return {
            **self.numbers(),
            "what": self.what,
            "runs": 2 * self.runs,
            "p_value": None if self.verdict is None else self.verdict.p_value,
            "broken": self.broken,
            "adversary": self.adversary,
            "verdict": self.in_words(),
            "noise": None if self.noise is None else self.noise.in_words(),
            "noise_p_value": None if self.noise is None else self.noise.p_value,
            "noise_refuted": self.noise is not None and self.noise.refuted,
        }


def audit_algorithm(
    algorithm: Algorithm,
    steps: int,
    delta: float,
    *,
    runs: int = 10_000,
    confidence: float = 0.95,
    energy: str = "",
    seed: int | None = None,
    progress: Callable[[int], None] | None = None,
    chunk: int = 2_500,
    residuals: bool = True,
) -> AlgorithmAudit:
    """Audits an algorithm by ``2 * runs`` trainings of a tiny network with its own mechanism.

    Formal guarantee: each audited number exceeds the true epsilon of what was run with probability
    at most 1 - ``confidence``, under adding or removing a record (where records are taken in a
    fixed order, under replacing one by a null record). It audits this code on a tiny
    network, at the algorithm's own noise, sampling rate, clipping and steps; it cannot vouch for
    parts that are not run, such as the sampler of a real run.

    Args:
        algorithm: audited.
        steps: of every run.
        delta: of the epsilons.
        runs: in each world.
        confidence: of each audited number.
        energy: what judges an annealed algorithm: "public", "private", "test" or "train".
        seed: of the runs; None takes one from the operating system.
        progress: called with the number of runs done.
        chunk: runs at once.
        residuals: test the noise as well, see ``jaxdp.audit.audit_noise``, on further runs,
            at most 3,000 in each world; an audit at ``confidence`` of its own.
    """
    if seed is not None:
        arguments.integer("seed", seed, least=0)
    steps = arguments.integer("steps", steps, least=1)
    runs = arguments.integer("runs", runs, least=10)
    chunk = arguments.integer("chunk", chunk, least=1)
    for name, value in (("delta", delta), ("confidence", confidence)):
        arguments.fraction(name, value)
    mechanism = algorithm.mechanism

    # The runs, and the scores of the worst adversary that is known for the algorithm.
    canary, worlds = tiny_worlds(algorithm)
    judge = _energy(energy, algorithm, worlds)
    run = training_run(
        algorithm, worlds, steps, score=canary_score(algorithm, canary), energy=judge
    )
    inside, outside = two_worlds(run, runs, seed=seed, progress=progress, chunk=chunk)
    found = audit_scores(inside, outside, delta, confidence=confidence, held_out=HELD_OUT)
    assert found.rule is not None
    assert found.counts is not None
    one, other = (found.rule.sign * scores[:, found.rule.column] for scores in (inside, outside))

    # What is proven, and the test of it. In a fixed order an absent record keeps its place.
    ordered = isinstance(mechanism.sampling, FixedOrder)
    relation = acc.Relation.REPLACE_SPECIAL if ordered else acc.Relation.ADD_OR_REMOVE_ONE
    event = algorithm.total(steps)
    proven = acc.epsilon(event, delta, relation).upper
    verdict = most = None
    if math.isfinite(proven):
        verdict = audit_event(inside, outside, event, confidence=confidence, relation=relation)
        most = reachable(event, relation, found.counts.without, delta, confidence)

    # What is claimed, and what the mechanism's kind adds.
    claim, multiplier = None, mechanism.noise_multiplier
    if algorithm.claim is not None and isinstance(multiplier, int | float):
        claim = algorithm.claim(
            mechanism.batch_size / mechanism.dataset_size, multiplier, steps, delta
        )
    family, profile = members(algorithm, steps), None
    if family is not None and not isinstance(mechanism.sampling, FullBatch | FixedOrder):
        assert isinstance(multiplier, int | float)
        profile = family_bound(inside, outside, family, multiplier, delta, confidence=confidence)
    elif family is not None and canary.alone:
        # The likelihood ratio at 0 is the best point of a Gaussian: no run is set aside to find it.
        ratios = inside[:, LOG_RATIO], outside[:, LOG_RATIO]
        profile = audit_scores(
            *ratios, delta, confidence=confidence, kind="gaussian", threshold=0.0
        )
    elif family is not None:
        profile = audit_scores(
            inside, outside, delta, confidence=confidence, kind="gaussian", held_out=0.1
        )

    noise = None
    levels = (
        [multiplier] if isinstance(multiplier, int | float) else [z for z, _ in multiplier.levels]
    )
    if residuals and not mechanism.leak and min(levels) > 0:
        noise = audit_noise(
            algorithm,
            worlds,
            steps,
            runs=min(runs, RUNS),
            confidence=confidence,
            energy=judge,
            seed=None if seed is None else seed + 1,  # not the runs that were just attacked
        )
    return AlgorithmAudit(
        steps=steps,
        runs=runs,
        delta=delta,
        confidence=confidence,
        claimed=None if claim is None else claim.value,
        claim=None if claim is None else claim.name,
        proven=proven,
        audited=found,
        profile=profile,
        verdict=verdict,
        event=event,
        adversary=canary.words,
        roc=roc(one, other),
        reachable=most,
        points=points(one, other, confidence),
        noise=noise,
    )


def reachable(
    event: acc.Event, relation: acc.Relation, runs: int, delta: float, confidence: float = 0.95
) -> float:
    """About the bound that ideal scores of an event give, from ``runs`` runs in each world.

    The best of a few thresholds, with as many false alarms and misses as are to be expected there.

    Args:
        event: what was charged.
        relation: under which the worlds are neighbours.
        runs: tested in each world.
        delta: of the bound.
        confidence: of the bound.
    """
    alarms = np.array([0.0, *np.logspace(-3.5, np.log10(0.5), 10)])
    misses = np.clip(tradeoff_of(event, relation)(alarms), 0.0, 1.0)
    return max(
        bounds.epsilon_bound(
            ErrorCounts(round(a * runs), runs, round(b * runs), runs), delta, confidence, rule
        )
        for a, b in zip(alarms, misses, strict=True)
        for rule in ("sum", "alarms")
    )


def tiny_worlds(algorithm: Algorithm) -> tuple[Canary, Worlds]:
    """The canary that is worst for the algorithm's clipping, and the tiny network with it."""
    loss_fn, params, records = tiny_network()
    boxed = isinstance(algorithm.mechanism.rule, CoordinateBox) and algorithm.raw is None
    canary = adversaries.dense(params)
    if not boxed:
        canary = adversaries.dirac(params, adversaries.W1, (0, 0))
        canary = dataclasses.replace(canary, alone=True)
    return canary, canary.worlds(loss_fn, params, records)


def members(algorithm: Algorithm, steps: int) -> Callable[[float], acc.Event] | None:
    """From a noise multiplier to the event; None where the algorithm has no single one."""
    mechanism = algorithm.mechanism
    single = isinstance(mechanism.noise_multiplier, int | float)
    if algorithm.energy is not None or mechanism.leak or not single:
        return None

    def family(z: float) -> acc.Event:
        tried = dataclasses.replace(mechanism, noise_multiplier=z, count_noise_multiplier=None)
        return tried.total(steps)

    return family


def _energy(
    kind: str, algorithm: Algorithm, worlds: Worlds
) -> Callable[[jax.Array, jax.Array], Energy] | None:
    """The energy that judges the steps of an annealed algorithm on the tiny network."""
    if not kind:
        return None
    arguments.one_of("energy", kind, ("public", "private", "test", "train"))
    if kind in ("public", "test"):
        return lambda key, there: PublicEnergy(
            worlds.loss_fn, jax.tree.map(lambda leaf: leaf[:-1], worlds.records)
        )
    mechanism, count = algorithm.energy, worlds.count
    bound, l2, noise, rate, size = 1e6, 1e6, 0.0, 1.0, count
    if mechanism is not None:
        bound, l2 = mechanism.rule.l2(None), mechanism.l2(None)
        assert isinstance(mechanism.noise_multiplier, int | float)
        noise = mechanism.noise_multiplier
        rate, size = mechanism.batch_size / mechanism.dataset_size, mechanism.batch_size

    def drawn(key: jax.Array, there: jax.Array) -> OpenEnergy:
        who, noise_key = jax.random.split(key)
        mask = there & jax.random.bernoulli(who, rate, (count,))
        return OpenEnergy(
            worlds.records,
            jnp.arange(count)[None],
            mask[None],
            jnp.asarray(1),
            jax.random.key_data(noise_key),
            worlds.loss_fn,
            bound,
            l2,
            noise,
            size,
        )

    return drawn


def roc(inside: np.ndarray, outside: np.ndarray, points: int = 400) -> np.ndarray:
    """(false-alarm rate, hit rate) [points, 2] of "score >= threshold" over all thresholds."""
    both = np.sort(np.r_[inside, outside])
    cuts = both[np.unique(np.linspace(0, len(both) - 1, points).astype(int))]
    alarms, hits = (1 - np.searchsorted(np.sort(s), cuts) / len(s) for s in (outside, inside))
    return np.c_[np.r_[alarms, 0.0], np.r_[hits, 0.0]]
