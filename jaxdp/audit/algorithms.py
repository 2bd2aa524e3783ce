"""The audit of an algorithm: claimed, proven and audited epsilon side by side.

A tiny network is trained thousands of times, with and without a canary: a record whose gradient is
constant, along the direction that is worst for the algorithm's clipping.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from jaxdp import accounting as acc
from jaxdp import arguments
from jaxdp.audit import bounds
from jaxdp.audit.bounds import ErrorCounts
from jaxdp.audit.canaries import noise_multipliers, sampling_rate
from jaxdp.audit.residuals import RUNS, ResidualVerdict, audit_noise
from jaxdp.audit.scores import (
    Audited,
    audit_event,
    audit_scores,
    event_tradeoff,
    family_bound,
    roc_curve,
    roc_points,
)
from jaxdp.audit.worlds import Worlds, training_run, two_worlds
from jaxdp.clipping.losses import with_constants
from jaxdp.clipping.rules import CoordinateBox
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.optimizers.energy import DrawnEnergy, PublicEnergy
from jaxdp.sampling import CyclicAllocation, CyclicPoisson, FixedOrder, FullBatch
from jaxdp.types import ExtraArgument, PyTree

TINY = "the same mechanism on a tiny network"
LOG_RATIO = 1  # the column of the log-likelihood ratio in the scores of a canary
_FAR = 1e3  # times the direction: far beyond any clipping norm in use here


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class EpsilonAudit:
    """An audit: the claimed, the proven and the audited epsilon.

    Attributes as those of ``jaxdp.runs.report.schema.AuditRow`` of the same name, but for these:
        claim: (name, epsilon) of the paper's claim, where there is one.
        audited: the lower bound that assumes nothing.
        profile: a lower bound that assumes the mechanism's kind, where it has one; of one run also
            that its canaries are as good as independent runs.
        family: of one run the lower bound that assumes the mechanism's kind alone.
        last: of one run the lower bound from its end alone, which assumes nothing.
        noise: the verdict on the residuals; None where it was not asked for, and for an algorithm
            that adds no noise or names a leak.
        event: what is charged.
        roc: float [k, 2], rates of false alarms and hits of the scores, for a plot.
    """

    what: str = TINY
    adversary: str
    steps: int
    runs: int
    canaries: int | None = None
    delta: float
    confidence: float
    claim: tuple[str, float] | None = None
    proven: float
    audited: Audited
    profile: Audited | None = None
    family: Audited | None = None
    last: Audited | None = None
    last_of: str | None = None
    reachable: float | None = None
    all_right: float | None = None
    p_value: float | None = None
    broken: bool
    noise: ResidualVerdict | None = None
    points: list[list[float]] = dataclasses.field(default_factory=list)
    event: acc.Event
    roc: np.ndarray

    @property
    def claim_refuted(self) -> bool:
        """True if the assumption-free bound exceeds the paper's claim."""
        return self.claim is not None and self.audited.epsilon > self.claim[1]

    def __str__(self) -> str:
        return self.in_words()

    def in_words(self) -> str:
        """The verdict in a sentence or two."""

        def share(epsilon: float) -> str:
            """The share of the proven epsilon, in percent."""
            return f"{epsilon / self.proven if self.proven else 1.0:.0%}"

        # What refutes comes first; else what the attack reached, and what it could have reached.
        if self.broken:
            words = (
                f"BROKEN: at {self.confidence:.0%} confidence the proven guarantee was not kept."
            )
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
                f"{share(self.audited.epsilon)} of it with nothing assumed"
            )
            if self.canaries is not None and self.reachable is not None and self.proven:
                words += (
                    f", where {self.canaries:,} canaries would show about "
                    f"{share(self.reachable)} even if all of it leaked"
                )
            words += "."
            for found in (self.family, self.profile):
                if found is not None:
                    words += f" Provided that {found.assumes}, it reaches {share(found.epsilon)}."
        if self.claim is not None and self.claim_refuted:
            words += f" The claim of {self.claim[0]}, epsilon {self.claim[1]:.3g}, is refuted."
        if self.noise is not None and self.noise.refuted:
            words += " BROKEN: the noise is not what was charged."
        return words

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready ``jaxdp.runs.report.schema.AuditRow``; infinity becomes "inf"."""
        written = {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "proven": self.proven if math.isfinite(self.proven) else "inf",
            "audited": self.audited.epsilon,
            "claim_refuted": self.claim_refuted,
            "verdict": self.in_words(),
        }
        if self.claim is not None:
            written |= {"claim": self.claim[0], "claimed": self.claim[1]}
        for name in ("profile", "family", "last"):
            if (bound := written.pop(name)) is not None:
                written |= {f"audited_{name}": bound.epsilon, f"{name}_assumes": bound.assumes}
        if self.noise is not None:
            written |= {"noise": self.noise.in_words(), "noise_p_value": self.noise.p_value}
            written["noise_refuted"] = self.noise.refuted
        for name in ("event", "roc", "last_assumes"):
            written.pop(name, None)
        return written


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
) -> EpsilonAudit:
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

    Raises:
        ValueError: a number is out of range, or the algorithm has a sum of its own.
    """
    if seed is not None:
        arguments.integer("seed", seed, least=0)
    if algorithm.is_of_own_sum:
        raise ValueError(
            "algorithm must sum the gradients of a tiny network to be audited by it, got one with "
            "a sum of its own (dp_zo, dp_adafest): audit a run of it, "
            'jaxdp.Run(..., canaries=records, canary_scores="last")'
        )
    steps = arguments.integer("steps", steps, least=1)
    runs = arguments.integer("runs", runs, least=10)
    chunk = arguments.integer("chunk", chunk, least=1)
    for name, value in (("delta", delta), ("confidence", confidence)):
        arguments.fraction(name, value)
    mechanism, multiplier = algorithm.mechanism, algorithm.mechanism.noise_multiplier

    # The runs, and the scores of the worst adversary that is known for the algorithm.
    canary, worlds = tiny_worlds(algorithm)
    judge = _tiny_energy(energy, algorithm, worlds)
    run = training_run(
        algorithm, worlds, steps, score=canary_score(algorithm, canary), energy=judge
    )
    inside, outside = two_worlds(run, runs, seed=seed, progress=progress, chunk=chunk)
    found = audit_scores(inside, outside, delta, confidence=confidence)
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
        # Ideal scores: the best of a few thresholds, with as many errors as are to be expected.
        alarms, tested = (
            np.array([0.0, *np.logspace(-3.5, np.log10(0.5), 10)]),
            found.counts.without,
        )
        misses = np.clip(event_tradeoff(event, relation)(alarms), 0.0, 1.0)
        expected = [
            ErrorCounts(round(a * tested), tested, round(b * tested), tested)
            for a, b in zip(alarms, misses, strict=True)
        ]
        most = max(
            bounds.epsilon_bound(counts, delta, confidence, rule)
            for counts in expected
            for rule in ("sum", "alarms")
        )

    # What is claimed, and what the mechanism's kind adds.
    claim = profile = None
    if algorithm.claim is not None and isinstance(multiplier, int | float):
        claim = algorithm.claim(
            mechanism.batch_size / mechanism.dataset_size, multiplier, steps, delta
        )
    kinds = noise_family(algorithm, steps)
    if kinds is not None and not isinstance(mechanism.sampling, FullBatch | FixedOrder):
        profile = family_bound(inside, outside, *kinds, delta, confidence=confidence)
    elif kinds is not None and canary.alone:
        # The likelihood ratio at 0 is the best point of a Gaussian: no run is set aside to find it.
        ratios = inside[:, LOG_RATIO], outside[:, LOG_RATIO]
        profile = audit_scores(
            *ratios, delta, confidence=confidence, kind="gaussian", threshold=0.0
        )
    elif kinds is not None:
        profile = audit_scores(
            inside, outside, delta, confidence=confidence, kind="gaussian", held_out=0.1
        )

    # The noise, on runs of their own.
    noise = None
    if residuals and not mechanism.leak and noise_multipliers(algorithm, steps).min() > 0:
        noise = audit_noise(
            algorithm,
            worlds,
            steps,
            runs=min(runs, RUNS),
            confidence=confidence,
            energy=judge,
            seed=None if seed is None else seed + 1,
        )
    return EpsilonAudit(
        adversary=canary.words,
        steps=steps,
        runs=2 * runs,
        delta=delta,
        confidence=confidence,
        claim=None if claim is None else (claim.name, claim.value),
        proven=proven,
        audited=found,
        profile=profile,
        reachable=most,
        p_value=None if verdict is None else verdict.p_value,
        broken=verdict is not None and verdict.refuted,
        noise=noise,
        points=roc_points(one, other, confidence),
        event=event,
        roc=roc_curve(one, other),
    )


def noise_family(
    algorithm: Algorithm, steps: int
) -> tuple[Callable[[float], acc.Event], float] | None:
    """(from a noise multiplier to the event, the algorithm's); None where it has none above 0."""
    mechanism, noise = algorithm.mechanism, algorithm.mechanism.noise_multiplier
    if algorithm.energy is not None or mechanism.leak or not isinstance(noise, int | float):
        return None
    if noise == 0:  # no smaller one could be refuted
        return None

    def family(z: float) -> acc.Event:
        """The event of the same mechanism with noise multiplier z."""
        tried = dataclasses.replace(mechanism, noise_multiplier=z, count_noise_multiplier=None)
        return tried.total(steps)

    return family, noise


class Canary(NamedTuple):
    """A record whose gradient is constant: along one direction, whatever the parameters.

    Attributes:
        direction: pytree shaped like the parameters, of norm 1.
        words: a description for the report.
        alone: True if no other record has a gradient along it.
    """

    direction: PyTree
    words: str
    alone: bool


def tiny_worlds(algorithm: Algorithm) -> tuple[Canary, Worlds]:
    """The canary that is worst for the algorithm's clipping; a tiny network with and without it.

    The network has 23 parameters, and four random records whose first feature is 0. None has a
    gradient in the weights of that feature; a Dirac there meets noise alone. The auditor inserts
    the canary as the fifth: no data set holds a record with such a gradient.
    """
    # The network and its four ordinary records; fixed, for the audit's own randomness is the run's.
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "w1": 0.5 * jax.random.normal(keys[0], (4, 3)),
        "b1": jnp.zeros(3),
        "w2": 0.5 * jax.random.normal(keys[1], (3, 2)),
        "b2": jnp.zeros(2),
    }
    x = jax.random.normal(keys[2], (4, 4)).at[:, 0].set(0.0)
    labels = jax.random.bernoulli(keys[3], 0.5, (4,)).astype(jnp.int32)

    def loss_fn(parameters: PyTree, example: dict[str, jax.Array]) -> jax.Array:
        """Cross-entropy of the tiny network, []."""
        hidden = jnp.tanh(example["x"] @ parameters["w1"] + parameters["b1"])
        logits = hidden @ parameters["w2"] + parameters["b2"]
        return logsumexp(logits) - logits[example["y"]]

    # A box of coordinates is filled by a gradient that is equal in all; any other rule bounds a
    # norm, which a Dirac spends where no other record adds anything.
    if isinstance(algorithm.mechanism.rule, CoordinateBox) and algorithm.raw is None:
        even = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 23**-0.5, jnp.float32), params)
        canary = Canary(even, "a gradient equal in every coordinate", alone=False)
    else:
        first = jax.tree.map(jnp.zeros_like, params)
        first["w1"] = first["w1"].at[0, 0].set(1.0)
        canary = Canary(first, "a Dirac gradient in a chosen coordinate", alone=True)

    def with_canary(parameters: PyTree, record: dict[str, PyTree]) -> jax.Array:
        """The loss of a record: of the canary a pull along its direction."""
        pull = -_FAR * inner_product(parameters, canary.direction)
        return jnp.where(record["canary"], pull, loss_fn(parameters, record["example"]))

    rows = {"x": jnp.concatenate([x, x[:1]]), "y": jnp.concatenate([labels, labels[:1]])}
    records = {"example": rows, "canary": jnp.arange(5) == 4}
    return canary, Worlds(with_constants(with_canary, canary.direction), params, records)


def _tiny_energy(
    kind: str, algorithm: Algorithm, worlds: Worlds
) -> Callable[[jax.Array, jax.Array], ExtraArgument] | None:
    """The energy that judges the steps of an annealed algorithm on the tiny network."""
    if not kind:
        return None
    arguments.one_of("energy", kind, ("public", "private", "test", "train"))
    if kind in ("public", "test"):
        return lambda key, there: PublicEnergy(
            worlds.loss_fn, jax.tree.map(lambda leaf: leaf[:-1], worlds.records)
        )
    # An energy that is not noised ("train") takes all records, and bounds that nothing reaches.
    mechanism, count = algorithm.energy, worlds.count
    bound, l2, noise, rate, size = 1e6, 1e6, 0.0, 1.0, count
    if mechanism is not None:
        bound, l2 = mechanism.rule.l2(None), mechanism.l2(None)
        assert isinstance(mechanism.noise_multiplier, int | float)
        noise = mechanism.noise_multiplier
        rate, size = mechanism.batch_size / mechanism.dataset_size, mechanism.batch_size

    def drawn(key: jax.Array, there: jax.Array) -> DrawnEnergy:
        """The private energy's own draw of records and noise key, for one step."""
        who, noise_key = jax.random.split(key)
        mask = there & jax.random.bernoulli(who, rate, (count,))
        return DrawnEnergy(
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


def inner_product(tree: PyTree, other: PyTree) -> jax.Array:
    """The inner product over all leaves, float32 scalar."""
    products = jax.tree.map(lambda a, b: jnp.sum(a * b), tree, other)
    return jnp.sum(jnp.stack(jax.tree.leaves(products)))


def canary_score(algorithm: Algorithm, canary: Canary) -> Callable[[PyTree], jax.Array]:
    """A score function [k] along a canary's direction, for runs that release "gradients".

    The sum of the noisy gradients, the log-likelihood ratio of a sampled Gaussian (the most
    powerful test where other records have no gradient along it), the last iterate, extremes and
    sizes over the steps (a step without noise shows in its size), and the algorithm's counters.
    """
    unit = algorithm.mechanism.l2(canary.direction) / algorithm.mechanism.batch_size

    def score(released: PyTree) -> jax.Array:
        """float32 [k], the scores of one run."""
        gradients = released["noisy"]
        if not jax.tree.leaves(gradients):  # differences of iterates, with the sign of gradients
            gradients = jax.tree.map(lambda leaf: leaf[:-1] - leaf[1:], released["params"])
        noisy = jax.vmap(lambda g: inner_product(g, canary.direction))(gradients)
        sizes = jnp.log10(jnp.abs(noisy) + 1e-12)
        last = jax.tree.map(lambda leaf: leaf[-1], released["params"])
        columns = [
            jnp.sum(noisy),
            jnp.sum(log_ratios(algorithm, -noisy / unit)),
            inner_product(last, canary.direction),
            jnp.max(noisy),
            jnp.min(noisy),
            jnp.max(sizes),
            jnp.min(sizes),
            *(jnp.sum(leaf[-1]) for leaf in jax.tree.leaves(released["counts"])),
        ]
        return jnp.stack([column.astype(jnp.float32) for column in columns])

    return score


def log_ratios(algorithm: Algorithm, sums: jax.Array) -> jax.Array:
    """Log-likelihood ratios of noisy sums [steps] along the canary, in its clipped norms.

    Of every step; with correlated noise of every time that the canary may take part.
    """
    mechanism, steps = algorithm.mechanism, len(sums)
    if mechanism.strategy is None:
        prob = sampling_rate(algorithm)
        z = jnp.asarray(noise_multipliers(algorithm, steps)[:, 0], jnp.float32)
        shifted = (2 * sums - 1) / (2 * jnp.maximum(z, 1e-6) ** 2)
    else:  # the strategy times the sums has independent noise
        matrix, sampling = mechanism.strategy.matrix()[:steps, :steps], mechanism.sampling
        (noise,) = mechanism.multipliers(0).values()
        if isinstance(sampling, CyclicPoisson):
            moved, prob = matrix[:, :: sampling.bands], sampling.sampling_prob
        elif isinstance(sampling, CyclicAllocation):
            moved, prob = matrix[:, :: sampling.bands], 1.0
        else:
            assert isinstance(sampling, FixedOrder)
            turns = sampling.separation(mechanism.dataset_size)
            moved, prob = matrix[:, ::turns].sum(axis=1, keepdims=True), 1.0
        way = jnp.asarray(moved, jnp.float32)
        seen = jnp.asarray(matrix, jnp.float32) @ sums @ way
        shifted = (seen - jnp.sum(way**2, axis=0) / 2) / max(noise, 1e-6) ** 2
        if isinstance(sampling, CyclicAllocation):
            # One of an epoch's steps is the canary's; those of an epoch cut short may have none.
            short = -len(shifted) % sampling.slots
            one = jnp.concatenate([shifted, jnp.zeros(short)]).reshape(-1, sampling.slots)
            return logsumexp(one, axis=1) - np.float32(np.log(sampling.slots))
    if prob == 1.0:
        return shifted
    stay = jnp.full(shifted.shape, np.log1p(-prob), jnp.float32)
    return logsumexp(jnp.stack([stay, shifted + np.float32(np.log(prob))]), axis=0)
