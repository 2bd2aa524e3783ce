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
from jaxdp.auditing import adversaries, bounds
from jaxdp.auditing.adversaries import LOG_RATIO, Canary, canary_score, tiny_network
from jaxdp.auditing.bounds import Counts
from jaxdp.auditing.events import Verdict, audit_event, family_bound, tradeoff_of
from jaxdp.auditing.measures import Point, points
from jaxdp.auditing.reference import RUNS, audit_noise
from jaxdp.auditing.residuals import ResidualVerdict
from jaxdp.auditing.scores import Audited, audit_scores
from jaxdp.auditing.worlds import Worlds, training_run, two_worlds
from jaxdp.clipping.rules import CoordinateBox
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.optimizers.energy import OpenEnergy, PublicEnergy
from jaxdp.sampling import FixedOrder, FullBatch

HELD_OUT = 0.2


TINY = "the same mechanism on a tiny network"


@dataclasses.dataclass(frozen=True, eq=False)
class AlgorithmAudit:
    """An audited algorithm: the claimed, the proven and the audited epsilon.

    Attributes:
        steps: the steps of every run.
        runs: the number of runs in each world.
        delta: of every epsilon.
        confidence: of the audited numbers, each by itself.
        claimed: the paper's claim, where there is one.
        proven: the accountant's epsilon; infinite where nothing is proven.
        audited: the lower bound that assumes nothing.
        profile: the lower bound that assumes the mechanism's kind, where it has one.
        verdict: the test of the charged event against the runs; None where nothing is proven.
        event: what is charged.
        adversary: the adversary, in words.
        roc: float [k, 2], rates of false alarms and hits of the chosen score, for a plot.
        reachable: the bound that ideal scores of the charged event would give, about; None where
            nothing is proven.
        points: false-alarm and hit rates at fixed ranks, with intervals.
        noise: the verdict on the residuals; None where it was not asked for, and for an algorithm
            that adds no noise or names a leak.
        what: what was attacked, in words.
    """

    steps: int
    runs: int
    delta: float
    confidence: float
    claimed: acc.Claim | None
    proven: float
    audited: Audited
    profile: Audited | None
    verdict: Verdict | None
    event: acc.Event
    adversary: str
    roc: np.ndarray
    reachable: float | None = None
    points: tuple[Point, ...] = ()
    noise: ResidualVerdict | None = None
    what: str = TINY

    @property
    def broken(self) -> bool:
        """True if the charged event is refuted at ``confidence``, by the one test of the event."""
        return bool(self.verdict and self.verdict.refuted)

    @property
    def claim_refuted(self) -> bool:
        """True if the assumption-free bound exceeds the paper's claim."""
        return self.claimed is not None and self.audited.epsilon > self.claimed.value

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
                f"{self._share(self.audited)} of it with nothing assumed."
            )
            if self.profile is not None:
                share = self._share(self.profile)
                words += f" Provided that {self.profile.assumes}, it reaches {share}."
        if self.claim_refuted:
            assert self.claimed is not None
            words += (
                f" The claim of {self.claimed.name}, epsilon {self.claimed.value:.3g}, is refuted."
            )
        if self.noise is not None and self.noise.refuted:
            words += " BROKEN: the noise is not what was charged."
        return words

    def _share(self, found: Audited) -> str:
        return f"{found.epsilon / self.proven if self.proven else 1.0:.0%}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; infinity becomes the string "inf"."""
        row = {
            "what": self.what,
            "steps": self.steps,
            "runs": 2 * self.runs,
            "delta": self.delta,
            "confidence": self.confidence,
            "claimed": None if self.claimed is None else self.claimed.value,
            "claim": None if self.claimed is None else self.claimed.name,
            "proven": self.proven if math.isfinite(self.proven) else "inf",
            "audited": self.audited.epsilon,
            "audited_profile": None if self.profile is None else self.profile.epsilon,
            "profile_assumes": None if self.profile is None else self.profile.assumes,
            "reachable": self.reachable,
            "points": [point.to_list() for point in self.points],
            "p_value": None if self.verdict is None else self.verdict.p_value,
            "broken": self.broken,
            "claim_refuted": self.claim_refuted,
            "adversary": self.adversary,
            "verdict": self.in_words(),
            "noise": None if self.noise is None else self.noise.in_words(),
            "noise_p_value": None if self.noise is None else self.noise.p_value,
            "noise_refuted": self.noise is not None and self.noise.refuted,
        }
        return row


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
        residuals: test the noise as well, see ``jaxdp.auditing.audit_noise``, on further runs,
            at most 3,000 in each world; an audit at ``confidence`` of its own.
    """
    steps, runs, chunk = _counts(steps, runs, chunk, seed)
    for name, value in (("delta", delta), ("confidence", confidence)):
        arguments.fraction(name, value)
    canary, worlds = tiny_worlds(algorithm)
    judge = _energy(energy, algorithm, worlds)
    run = training_run(
        algorithm, worlds, steps, score=canary_score(algorithm, canary), energy=judge
    )
    inside, outside = two_worlds(run, runs, seed=seed, progress=progress, chunk=chunk)
    event, relation = algorithm.total(steps), _relation(algorithm)
    found = audit_scores(inside, outside, delta, confidence=confidence, held_out=HELD_OUT)
    proven = acc.epsilon(event, delta, relation).upper
    verdict = None
    if math.isfinite(proven):
        verdict = audit_event(inside, outside, event, confidence=confidence, relation=relation)
    profile = _profile(algorithm, steps, canary, inside, outside, delta, confidence)
    noise = None
    if residuals and _noisy(algorithm):
        noise = audit_noise(
            algorithm,
            worlds,
            steps,
            runs=min(runs, RUNS),
            confidence=confidence,
            energy=judge,
            seed=None if seed is None else seed + 1,  # not the runs that were just attacked
        )
    kept, one, other = _attacked(found, inside, outside)
    return AlgorithmAudit(
        steps,
        runs,
        delta,
        confidence,
        _claim(algorithm, steps, delta),
        proven,
        found,
        profile,
        verdict,
        event,
        canary.words,
        roc(one, other),
        None if verdict is None else reachable(event, relation, kept, delta, confidence),
        points(one, other, confidence),
        noise,
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
            Counts(round(a * runs), runs, round(b * runs), runs), delta, confidence, rule
        )
        for a, b in zip(alarms, misses, strict=True)
        for rule in ("sum", "alarms")
    )


def _relation(algorithm: Algorithm) -> acc.Relation:
    """The relation of the two worlds: in a fixed order a record that is absent keeps its place."""
    ordered = isinstance(algorithm.mechanism.sampling, FixedOrder)
    return acc.Relation.REPLACE_SPECIAL if ordered else acc.Relation.ADD_OR_REMOVE_ONE


def _noisy(algorithm: Algorithm) -> bool:
    given = algorithm.mechanism.noise_multiplier
    levels = [given] if isinstance(given, int | float) else [z for z, _ in given.levels]
    return not algorithm.mechanism.leak and min(levels) > 0


def tiny_worlds(algorithm: Algorithm) -> tuple[Canary, Worlds]:
    """The canary that is worst for the algorithm's clipping, and the tiny network with it."""
    loss_fn, params, records = tiny_network()
    boxed = isinstance(algorithm.mechanism.rule, CoordinateBox) and algorithm.raw is None
    canary = adversaries.dense(params)
    if not boxed:
        canary = adversaries.dirac(params, adversaries.W1, (0, 0))
        canary = dataclasses.replace(canary, alone=True)
    return canary, canary.worlds(loss_fn, params, records)


def _counts(steps: int, runs: int, chunk: int, seed: int | None) -> tuple[int, int, int]:
    if seed is not None:
        arguments.integer("seed", seed, least=0)
    return (
        arguments.integer("steps", steps, least=1),
        arguments.integer("runs", runs, least=10),
        arguments.integer("chunk", chunk, least=1),
    )


def _attacked(
    found: Audited, inside: np.ndarray, outside: np.ndarray
) -> tuple[int, np.ndarray, np.ndarray]:
    """The number of runs of the bound, and the score that it chose in both worlds, [runs] each."""
    assert found.rule is not None
    assert found.counts is not None
    one, other = (found.rule.sign * scores[:, found.rule.column] for scores in (inside, outside))
    return found.counts.without, one, other


def _profile(
    algorithm: Algorithm,
    steps: int,
    canary: Canary,
    inside: Any,
    outside: Any,
    delta: float,
    confidence: float,
) -> Audited | None:
    mechanism = algorithm.mechanism
    noise = mechanism.noise_multiplier
    if algorithm.energy is not None or mechanism.leak or not isinstance(noise, int | float):
        return None
    if isinstance(mechanism.sampling, FullBatch | FixedOrder):
        if not canary.alone:
            return audit_scores(
                inside, outside, delta, confidence=confidence, kind="gaussian", held_out=0.1
            )
        # The likelihood ratio at 0 is the best point of a Gaussian: no run is set aside to find it.
        return audit_scores(
            inside[:, LOG_RATIO],
            outside[:, LOG_RATIO],
            delta,
            confidence=confidence,
            kind="gaussian",
            threshold=0.0,
        )

    def family(z: float) -> acc.Event:
        tried = dataclasses.replace(mechanism, noise_multiplier=z, count_noise_multiplier=None)
        return tried.total(steps)

    return family_bound(inside, outside, family, noise, delta, confidence=confidence)


def _claim(algorithm: Algorithm, steps: int, delta: float) -> acc.Claim | None:
    noise = algorithm.mechanism.noise_multiplier
    if algorithm.claim is None or not isinstance(noise, int | float):
        return None
    rate = algorithm.mechanism.batch_size / algorithm.mechanism.dataset_size
    return algorithm.claim(rate, noise, steps, delta)


def _energy(kind: str, algorithm: Algorithm, worlds: Worlds) -> Callable[..., Any] | None:
    """The energy that judges the steps of an annealed algorithm on the tiny network."""
    if not kind:
        return None
    arguments.one_of("energy", kind, ("public", "private", "test", "train"))
    if kind in ("public", "test"):
        return lambda key, there: PublicEnergy(
            worlds.loss_fn, jax.tree.map(lambda leaf: leaf[:-1], worlds.records)
        )
    mechanism = algorithm.energy
    count = worlds.count
    bound = mechanism.rule.l2(None) if mechanism is not None else 1e6
    l2 = mechanism.l2(None) if mechanism is not None else 1e6
    noise = mechanism.noise_multiplier if mechanism is not None else 0.0
    rate = mechanism.batch_size / mechanism.dataset_size if mechanism is not None else 1.0
    size = mechanism.batch_size if mechanism is not None else count

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
            noise,  # type: ignore[arg-type]
            size,
        )

    return drawn


def roc(inside: np.ndarray, outside: np.ndarray, points: int = 400) -> np.ndarray:
    """(false-alarm rate, hit rate) [points, 2] of "score >= threshold" over all thresholds."""
    both = np.sort(np.r_[inside, outside])
    cuts = both[np.unique(np.linspace(0, len(both) - 1, points).astype(int))]
    alarms, hits = (1 - np.searchsorted(np.sort(s), cuts) / len(s) for s in (outside, inside))
    return np.c_[np.r_[alarms, 0.0], np.r_[hits, 0.0]]
